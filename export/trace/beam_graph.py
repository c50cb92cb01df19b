"""Beam search as one graph of standard ONNX operators.

It follows the rules of `runtime.decoding.beam_search`, in float32: candidates ranked by
log-probability, then the lower beam, then the lower token; hypotheses kept by
`log_probability / length ** length_penalty`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir

from transferry.export.trace.editing import END, cast
from transferry.export.trace.graph import Graph
from transferry.export.trace.search_graph import SearchGraph


class BeamGraph(SearchGraph):
    """Composes the graph with beam search; the rows of the Loop are the beams.

    A beam that does not exist has log-probability minus infinity, and so have the beams of a
    sentence that has ended. `length_penalty` and `early_stopping` of the generation defaults are
    kept too.

    Attributes:
        beam: Beams of a sentence, and hypotheses that the graph returns.
    """

    # The tokens of the best hypotheses lie in rows, as the tokens of the beams do.
    carried: ClassVar[Mapping[str, tuple[str, int]]] = {
        "target": ("int64", 2),
        "ended": ("bool", 1),
        "failed": ("bool", 1),
        "past_mask": ("bool", 2),
        "tokens": ("int64", 2),
        "length": ("int64", 1),
        "totals": ("float32", 2),
        "best_tokens": ("int64", 2),
        "best_lengths": ("int64", 2),
        "best_totals": ("float32", 2),
        "best_scores": ("float32", 2),
        "excess": ("float32", 2),
        "best_excess": ("float32", 2),
    }

    def __init__(self, *given: Any, beam: int) -> None:
        super().__init__(*given)
        self.beam = beam
        self._sentences: ir.Value | None = None  # of each row of the Loop
        # Whether beams are ranked by other values than the model's log-probabilities; `excess` are
        # the model's less these.
        options = self.options
        # Ids of languages that a beginning may name where no default does; a first token that is
        # such a one, or any where there is a default, counts as likely as 1.
        named = self.has_encoder and not self.special.begins_with_language
        self.languages = [*self.special.languages.values()] if named else []
        self.forces = options.forced_begin is not None or bool(self.languages)
        self.changes = options.repetition_penalty != 1 or bool(options.forced_end) or self.forces

    def _part(
        self, graph: Graph, prefix: str, feeds: Mapping[str, ir.Value]
    ) -> tuple[list[ir.Node], list[ir.Value]]:
        nodes, outputs = super()._part(graph, prefix, feeds)
        if prefix == "step":  # of its rows each sentence has several: "batch" is another size here
            for node in nodes:
                for value in node.outputs:
                    value.shape = None
        return nodes, outputs

    def _each_answer(self) -> tuple[str | int, ...]:
        return ("batch", self.beam)

    def _row_of_each_beam(self, value: ir.Value, batch: ir.Value) -> ir.Value:
        main = self.main
        if self._sentences is None:
            numbers = main.range(main.op("Mul", [batch, main.of(self.beam)]))
            self._sentences = main.op("Div", [numbers, main.of(self.beam)])
        return main.op("Gather", [value, self._sentences], {"axis": 0})

    def _begun(self, target: ir.Value, begun: ir.Value, batch: ir.Value) -> dict[str, ir.Value]:
        main, beam = self.main, self.main.of(self.beam)
        tokens = main.columns(target, 1, END)
        first = np.full((1, self.beam), -np.inf, np.float32)
        first[0, 0] = 0  # each sentence begins with one beam
        totals = main.constant(first)
        shape = main.op("Concat", [batch, beam], {"axis": 0})
        return {
            "tokens": tokens,
            "length": begun,
            "totals": main.op("Expand", [totals, shape]),
            "best_tokens": tokens,
            "best_lengths": main.filled(np.int64(0), batch, beam),
            "best_totals": main.filled(np.float32(-np.inf), batch, beam),
            "best_scores": main.filled(np.float32(-np.inf), batch, beam),
            "failed": main.filled(np.bool_(False), batch),
            **({name: main.filled(np.float32(0), batch, beam) for name in self._excesses()}),
        }

    def _excesses(self) -> Sequence[str]:
        return ("excess", "best_excess") if self.changes else ()

    def _answers(self, results: Mapping[str, ir.Value], batch: ir.Value) -> list[ir.Value]:
        main, found = self.main, results["best_tokens"]
        shape = main.op("Concat", [batch, main.of(self.beam), main.size(found, 1)], {"axis": 0})
        tokens = main.op("Reshape", [found, shape])
        nan = main.constant(np.float32(np.nan))
        failed = main.unsqueezed(results["failed"], 1)
        totals = results["best_totals"]
        if self.changes:
            totals = main.op("Add", [totals, results["best_excess"]])
        totals = main.op("Where", [failed, nan, totals])
        scores = [results["best_scores"]] if self.changes else []
        return [tokens, results["best_lengths"], totals, *scores]

    def _choose(
        self,
        given: Mapping[str, ir.Value],
        logits: ir.Value,
        limit: ir.Value,
        present: Sequence[ir.Value],
    ) -> tuple[dict[str, ir.Value], Sequence[ir.Value]]:
        """Ranks the continuations of all beams; see `BeamStrategy._follow`."""
        step, beam = self.step, self.beam
        candidates, failed, excess = self._candidates(given, logits)
        values, parents, tokens = candidates
        lowest = step.constant(np.finfo(np.float32).min)
        nothing = step.constant(np.float32(-np.inf))
        exists = step.op("GreaterOrEqual", [values, lowest])
        each = step.unsqueezed(tokens, 2)
        is_end = step.any(step.op("Equal", [each, step.of(*self.special.ends)]), 2)
        ends = step.op("And", [exists, is_end])
        length = step.op("Add", [given["length"], step.of(1)])
        full = step.op("GreaterOrEqual", [length, limit])
        # At the limit all of them are complete.
        complete = step.op("And", [step.unsqueezed(full, 1), self._first(exists)])
        complete = step.op("Or", [complete, self._first(ends)])
        # Rows of the parents: those of a sentence follow each other.
        sentence = step.range(step.size(values, 0))
        base = step.unsqueezed(step.op("Mul", [sentence, step.of(beam)]), 1)
        rows = step.op("Add", [base, parents])
        candidates = values, rows, tokens
        after, scale = self._hypotheses(given, length, complete, nothing, candidates, base, excess)
        best_scores = after["best_scores"]
        # The first candidates that do not end go on.
        count = step.size(values, 1)
        later = step.op("Mul", [step.integers(ends), count])
        keys = step.op("Add", [later, step.range(count)])
        _, place = step.op_multi_out(
            "TopK", [keys, step.of(beam)], {"axis": 1, "largest": 0}, num_outputs=2
        )
        totals = step.picked(step.op("Where", [ends, nothing, values]), place)
        settled = self._settled(totals, best_scores, scale, limit)
        ended = step.op("Or", [step.op("Or", [given["ended"], full]), settled])
        failed = step.op("Or", [given["failed"], failed])
        ended = step.op("Or", [ended, failed])
        column = step.unsqueezed(ended, 1)
        row = step.op("Reshape", [step.picked(rows, place), step.of(-1)])
        target = step.op("Reshape", [step.picked(tokens, place), step.of(-1, 1)])
        grown = step.op("Gather", [given["tokens"], row], {"axis": 0})
        after |= {
            "target": target,
            "ended": ended,
            "failed": failed,
            "totals": step.op("Where", [column, nothing, totals]),
            "tokens": step.joined(grown, target),
        }
        if excess is not None:
            after["excess"] = step.picked(excess, place)
        if not self.has_encoder:
            of_row = step.op("Gather", [ended, step.op("Div", [row, step.of(beam)])], {"axis": 0})
            mask = step.op("Gather", [given["past_mask"], row], {"axis": 0})
            after["past_mask"] = self._longer_mask({**given, "past_mask": mask}, of_row)
        return after, [step.op("Gather", [value, row], {"axis": 0}) for value in present]

    def _hypotheses(
        self,
        given: Mapping[str, ir.Value],
        length: ir.Value,
        complete: ir.Value,
        nothing: ir.Value,
        candidates: tuple[ir.Value, ir.Value, ir.Value],
        base: ir.Value,
        excess: ir.Value | None,
    ) -> tuple[dict[str, ir.Value], ir.Value]:
        """Keeps the best hypotheses among the kept and the complete ones `[batch, beam]`.

        Returns:
            The carried values of hypotheses, and the divisor of scores of this length.
        """
        step, (values, rows, tokens) = self.step, candidates
        exponent = step.constant(np.float32(self.options.length_penalty))
        scale = step.op("Pow", [cast(step, length, ir.DataType.FLOAT), exponent])
        totals = self._first(values)
        scores = step.op("Where", [complete, step.op("Div", [totals, scale]), nothing])
        # Of equal scores the older hypothesis.
        both = step.joined(given["best_scores"], scores)
        best_scores, order = step.op_multi_out(
            "TopK", [both, step.of(self.beam)], {"axis": 1}, num_outputs=2
        )
        lengths = step.op("Expand", [length, step.op("Shape", [totals])])
        after = {
            "length": length,
            "best_scores": best_scores,
            "best_totals": step.picked(step.joined(given["best_totals"], totals), order),
            "best_lengths": step.picked(step.joined(given["best_lengths"], lengths), order),
            "best_tokens": self._best_tokens(given, rows, tokens, base, order),
        }
        if excess is not None:
            both = step.joined(given["best_excess"], self._first(excess))
            after["best_excess"] = step.picked(both, order)
        return after, scale

    def _candidates(
        self, given: Mapping[str, ir.Value], logits: ir.Value
    ) -> tuple[tuple[ir.Value, ir.Value, ir.Value], ir.Value, ir.Value | None]:
        """Finds the best ways to lengthen the beams of each sentence by one token.

        Returns:
            Log-probabilities, parent beams and tokens `[batch, candidates]`; whether the model gave
            NaN for a beam of a sentence `[batch]`; where rules change values, the model's
            log-probabilities less those `[batch, candidates]`.
        """
        step, beam = self.step, self.beam
        size = int(self.decoder.spec.tensor("logits").shape[-1])
        every = step.op("LogSoftmax", [logits], {"axis": -1})
        last = step.op("Gather", [every, step.of(-1, flat=False)], {"axis": 1})
        # Forced first tokens; after them a step reads one token, which is scored already.
        begun = step.columns(given["target"], 1, END)
        unused = step.columns(given["target"], 0, 1)
        scored = step.joined(begun, unused)
        gains = step.op("GatherElements", [every, step.unsqueezed(scored, 2)], {"axis": 2})
        forced = step.joined(
            step.op("GreaterOrEqual", [begun, step.of(0)]),
            step.op("Less", [unused, step.of(0)]),
        )
        counted = self._counted(scored, forced) if self.forces else forced
        totals = step.op("Reshape", [given["totals"], step.of(-1)])
        totals = step.op("Add", [totals, self._sum(gains, counted)])
        totals = step.unsqueezed(totals, 1)

        nothing = step.constant(np.float32(-np.inf))
        wrong = step.op("IsNaN", [step.columns(last, 0, 1)])
        ruled = self._allowed(last, given["tokens"])
        values = step.op("Add", [ruled, totals])
        values = step.op("Where", [wrong, nothing, values])
        values = step.op("Reshape", [values, step.of(-1, beam * size)])
        lowest = step.constant(np.finfo(np.float32).min)
        live = step.op("GreaterOrEqual", [given["totals"], lowest])
        wrong = step.op("Reshape", [wrong, step.of(-1, beam)])
        failed = step.any(step.op("And", [live, wrong]), 1)
        count = min((1 + len(self.special.ends)) * beam, beam * size)
        values, places = step.op_multi_out(
            "TopK", [values, step.of(count)], {"axis": 1}, num_outputs=2
        )
        parents = step.op("Div", [places, step.of(size)])
        excess = None
        if self.changes:
            more = step.op("Where", [step.op("GreaterOrEqual", [ruled, lowest]), ruled, last])
            more = step.op("Reshape", [step.op("Sub", [last, more]), step.of(-1, beam * size)])
            kept = given["excess"]
            if self.forces:
                first = self._sum(gains, step.op("And", [forced, step.op("Not", [counted])]))
                kept = step.op("Add", [kept, step.op("Reshape", [first, step.of(-1, beam)])])
            kept = step.picked(kept, parents)
            excess = step.op("Add", [kept, step.picked(more, places)])
        return (values, parents, step.op("Mod", [places, step.of(size)])), failed, excess

    def _counted(self, tokens: ir.Value, forced: ir.Value) -> ir.Value:
        """Returns where forced tokens count by their own value: not first, as begin or language."""
        step = self.step
        first = step.columns(forced, 0, 1)
        if self.options.forced_begin is None:
            each = step.unsqueezed(step.columns(tokens, 0, 1), 2)
            begins = step.any(step.op("Equal", [each, step.of(*self.languages)]), 2)
        else:
            begins = first
        first = step.op("And", [first, step.op("Not", [begins])])
        return step.joined(first, step.columns(forced, 1, END))

    def _sum(self, gains: ir.Value, mask: ir.Value) -> ir.Value:
        """Returns the sums of gains `[rows, columns, 1]` where a mask is true `[rows]`."""
        step, zero = self.step, self.step.constant(np.float32(0))
        gains = step.op("Where", [step.unsqueezed(mask, 2), gains, zero])
        return step.op("ReduceSum", [gains, step.of(1, 2)], {"keepdims": 0})

    def _best_tokens(
        self,
        given: Mapping[str, ir.Value],
        rows: ir.Value,
        tokens: ir.Value,
        base: ir.Value,
        order: ir.Value,
    ) -> ir.Value:
        """Returns the tokens of the best hypotheses among the kept and the new ones, as rows."""
        step, beam = self.step, self.step.of(self.beam)
        pad = step.op("Mul", [given["target"], step.of(0)])
        pad = step.columns(pad, 0, 1)
        pad = step.op("Add", [pad, step.of(self.special.pad_id)])
        kept = step.joined(given["best_tokens"], pad)
        parents = step.op("Reshape", [self._first(rows), step.of(-1)])
        new = step.op("Reshape", [self._first(tokens), step.of(-1, 1)])
        grown = step.joined(step.op("Gather", [given["tokens"], parents], {"axis": 0}), new)
        both = step.op("Concat", [kept, grown], {"axis": 0})
        # The new ones lie behind all kept ones.
        behind = step.op("Sub", [step.size(kept, 0), beam])
        is_new = step.op("GreaterOrEqual", [order, beam])
        place = step.op("Add", [order, step.op("Mul", [step.integers(is_new), behind])])
        place = step.op("Reshape", [step.op("Add", [base, place]), step.of(-1)])
        return step.op("Gather", [both, place], {"axis": 0})

    def _settled(
        self, totals: ir.Value, best_scores: ir.Value, scale: ir.Value, limit: ir.Value
    ) -> ir.Value:
        """Whether no further hypothesis of a sentence can matter; see `BeamStrategy._settled`."""
        step = self.step
        worst = step.columns(best_scores, -1, END)
        worst = step.op("Squeeze", [worst, step.of(1)])
        top = step.op("ReduceMax", [totals, step.of(1)], {"keepdims": 0})
        if self.options.early_stopping is True:
            lowest = step.constant(np.finfo(np.float32).min)
            none_left = step.op("Less", [top, lowest])
            return step.op("Or", [none_left, step.op("GreaterOrEqual", [worst, lowest])])
        if self.options.early_stopping == "never" and self.options.length_penalty > 0:
            exponent = step.constant(np.float32(self.options.length_penalty))
            scale = step.op("Pow", [cast(step, limit, ir.DataType.FLOAT), exponent])
        return step.op("LessOrEqual", [step.op("Div", [top, scale]), worst])

    def _first(self, value: ir.Value) -> ir.Value:
        """Returns the first columns, as many as there are beams."""
        step = self.step
        return step.columns(value, 0, self.beam)
