"""The rules of a search in a graph: `runtime.decoding.logits_processors` as ONNX operators."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from transferry.export.trace.editing import END, Tape
from transferry.runtime.decoding.generation_options import GenerationOptions

NOTHING = np.float32(-np.inf)


@dataclass(frozen=True)
class History:
    """The outputs so far in a graph, one a row; all live rows are equally long.

    Attributes:
        tokens: Their tokens `[rows, length]`.
        prompt: Tokens that the decoder read before, -1 at padding on the left `[rows, prompt]`.
        begun: Number of tokens that the outputs began with `[1]`.
        limit: Most tokens of each output `[rows]`.
    """

    tokens: ir.Value
    prompt: ir.Value
    begun: ir.Value
    limit: ir.Value


@dataclass(frozen=True)
class Rules:
    """Rules that forbid tokens or change their values, as nodes of a step."""

    step: Tape
    options: GenerationOptions
    ends: Sequence[int]
    size: int

    def applied(self, values: ir.Value, history: History) -> ir.Value:
        """Applies the rules to logits, or to the log-probabilities of beams `[rows, vocabulary]`.

        Those that forbid may apply in any order: only the penalty must come before.
        """
        step, options = self.step, self.options
        if options.repetition_penalty != 1:
            values = self._penalised(values, history)
        if options.suppress:
            values = step.op("Add", [values, self._forbidding(options.suppress)])
        if options.min_length:
            early = step.op("Less", [step.size(history.tokens, 1), step.of(options.min_length)])
            values = self._forbid_if(early, self.ends, values)
        if options.no_repeat_ngram:
            values = self._without_repeats(values, history)
        for length in sorted({*map(len, options.suppress_sequences)}):
            same = [each for each in options.suppress_sequences if len(each) == length]
            values = self._without_sequences(values, history, np.array(same, np.int64))
        if options.suppress_begin:
            begins = step.op("Equal", [step.size(history.tokens, 1), history.begun])
            values = self._forbid_if(begins, options.suppress_begin, values)
        if options.forced_end:
            next_length = step.op("Add", [step.size(history.tokens, 1), step.of(1)])
            last = step.unsqueezed(step.op("Equal", [next_length, history.limit]), 1)
            forced = np.full(self.size, NOTHING)
            forced[list(options.forced_end)] = 0
            values = step.op("Where", [last, step.constant(forced), values])
        return values

    def _forbid_if(self, holds: ir.Value, tokens: Sequence[int], values: ir.Value) -> ir.Value:
        step, zeros = self.step, self.step.constant(np.zeros(1, np.float32))
        forbidden = self._forbidding(tokens)
        return step.op("Add", [values, step.op("Where", [holds, forbidden, zeros])])

    def _forbidding(self, tokens: Sequence[int]) -> ir.Value:
        """Returns a bias that forbids tokens `[vocabulary]`."""
        flat, step = np.array(tokens, np.int64)[:, None], self.step
        zero = ir.tensor(np.zeros(1, np.float32))
        zeros = step.op("ConstantOfShape", [step.of(self.size)], {"value": zero})
        updates = np.full(len(flat), NOTHING)
        return step.op("ScatterND", [zeros, step.constant(flat), step.constant(updates)])

    def _whole(self, history: History, before: int = 0) -> ir.Value:
        """Returns prompt and output, after so many columns of -1 `[rows, columns]`."""
        return self._after(self.step.joined(history.prompt, history.tokens), before)

    def _after(self, tokens: ir.Value, before: int) -> ir.Value:
        """Puts columns of -1, which no token is, before tokens."""
        if not before:
            return tokens
        step = self.step
        nothing = ir.tensor(np.full(1, -1, np.int64))
        sizes = step.op("Concat", [step.size(tokens, 0), step.of(before)], {"axis": 0})
        return step.joined(step.op("ConstantOfShape", [sizes], {"value": nothing}), tokens)

    def _marked(self, tokens: ir.Value, mark: np.float32, rest: np.float32) -> ir.Value:
        """Returns a mark at the tokens of each row that are not negative `[rows, vocabulary]`."""
        step = self.step
        outside = step.op("Less", [tokens, step.of(0)])
        places = step.op("Where", [outside, step.of(self.size), tokens])
        sizes = step.op("Concat", [step.size(tokens, 0), step.of(self.size + 1)], {"axis": 0})
        table = step.op("ConstantOfShape", [sizes], {"value": ir.tensor(np.full(1, rest))})
        marks = step.op("Expand", [step.constant(np.full(1, mark)), step.op("Shape", [places])])
        marked = step.op("ScatterElements", [table, places, marks], {"axis": 1})
        return step.columns(marked, 0, self.size)

    def _penalised(self, values: ir.Value, history: History) -> ir.Value:
        step, penalty = self.step, np.float32(self.options.repetition_penalty)
        seen = self._marked(self._whole(history), np.float32(1), np.float32(0))
        seen = step.op("Greater", [seen, step.constant(np.float32(0))])
        less = step.op("Less", [values, step.constant(np.float32(0))])
        given = step.constant(penalty)
        changed = [step.op(operator, [values, given]) for operator in ("Mul", "Div")]
        return step.op("Where", [seen, step.op("Where", [less, *changed]), values])

    def _without_repeats(self, values: ir.Value, history: History) -> ir.Value:
        """Forbids the tokens that once followed the last `n - 1` tokens."""
        step, n = self.step, self.options.no_repeat_ngram
        with_prompt = self.options.prompt_ngrams
        seen = self._whole(history, n) if with_prompt else self._after(history.tokens, n)
        follows = step.columns(seen, n - 1, END)
        repeated = step.op("GreaterOrEqual", [follows, step.of(0)])
        for place in range(n - 1):
            window = step.columns(seen, place, place - (n - 1))
            # The last n - 1 tokens, one after another.
            after = place - (n - 1)
            last = step.columns(seen, after, after + 1 if after < -1 else END)
            repeated = step.op("And", [repeated, step.op("Equal", [window, last])])
        banned = step.op("Where", [repeated, follows, step.of(-1)])
        return step.op("Add", [values, self._marked(banned, NOTHING, np.float32(0))])

    def _without_sequences(
        self, values: ir.Value, history: History, sequences: NDArray[np.int64]
    ) -> ir.Value:
        """Forbids the last token of sequences `[sequences, length]` after their other tokens."""
        step, before = self.step, sequences.shape[1] - 1
        if not before:
            return step.op("Add", [values, self._forbidding(sequences[:, -1].tolist())])
        last = step.constant(sequences[:, -1])
        seen = step.columns(self._whole(history, before), -before, END)
        other = step.op("Equal", [step.unsqueezed(seen, 1), step.constant(sequences[:, :-1])])
        differ = step.any(step.op("Not", [other]), 2)
        banned = step.op("Where", [differ, step.of(-1), last])
        return step.op("Add", [values, self._marked(banned, NOTHING, np.float32(0))])
