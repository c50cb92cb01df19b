"""Logits processors: rules that forbid or rate tokens before one is chosen.

Greedy search and sampling apply them to the model's logits; beam search to its log-probabilities,
if a rule changes their values, and ranks by the result. The log-probability of a hypothesis is
always the model's own.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.decoding.logits import Floats, Integers, log_sum_exp
from transferry.runtime.decoding.strategy import Request


@dataclass(frozen=True)
class History:
    """The outputs so far, one a row.

    Attributes:
        sentences: The sentence of each row `[rows]`.
        tokens: Their tokens, `bos` left out `[rows, length]`.
        prompts: Tokens that the decoder read before each sentence's outputs, -1 before the first
            `[sentences, longest prompt]`; see `prompts_of`.
    """

    sentences: Integers
    tokens: Integers
    prompts: Integers

    @property
    def length(self) -> int:
        """Tokens of each row."""
        return int(self.tokens.shape[1])

    @cached_property
    def whole(self) -> "History":
        """The same with each row's prompt counted as its tokens."""
        tokens = np.concatenate([self.prompts[self.sentences], self.tokens], axis=1)
        return History(self.sentences, tokens, self.prompts[:, :0])


class LogitsProcessor(ABC):
    """Forbids tokens by setting their logits to minus infinity, or changes the logits.

    Attributes:
        changes: Whether logits of tokens that stay allowed may change.
    """

    changes: ClassVar[bool] = False

    def active(self, length: int) -> bool:
        """Whether it may have an effect after outputs of so many tokens."""
        return True

    @abstractmethod
    def __call__(self, logits: Floats, history: History, own: Floats) -> None:
        """Changes the logits of the next token in place.

        Args:
            logits: The logits, or log-probabilities `[rows, vocabulary]`.
            history: The outputs so far.
            own: The same before all processors.
        """


class MinLength(LogitsProcessor):
    """Forbids all end tokens before an output has as many tokens as its sentence requires."""

    def __init__(self, lengths: Sequence[int], ends: Sequence[int]) -> None:
        self.lengths = np.array(lengths, np.int64)
        self.ends = np.array(ends, np.int64)

    def active(self, length: int) -> bool:
        """True until all outputs have reached the greatest length."""
        return length < int(self.lengths.max())

    def __call__(self, logits: Floats, history: History, own: Floats) -> None:
        """Forbids the end tokens in rows that are too short."""
        short = self.lengths[history.sentences] > history.length
        logits[np.ix_(short, self.ends)] = -np.inf


class NoRepeatNGram(LogitsProcessor):
    """Forbids an n-gram of `size` to occur twice in an output (Paulus et al. 2018, section 2.5).

    With `prompt` it counts n-grams that begin in the prompt, as transformers does.
    """

    def __init__(self, size: int, *, prompt: bool = False) -> None:
        self.size = size
        self.prompt = prompt

    def active(self, length: int) -> bool:
        """True once an output holds an n-gram that could be repeated."""
        return self.prompt or length >= self.size

    def __call__(self, logits: Floats, history: History, own: Floats) -> None:
        """Forbids every token that once followed the last `size - 1` tokens."""
        seen = history.whole if self.prompt else history
        if seen.length < self.size:
            return
        ngrams = np.lib.stride_tricks.sliding_window_view(seen.tokens, self.size, axis=1)
        beginning = seen.tokens[:, seen.length - self.size + 1 :]
        repeated = (ngrams[..., :-1] == beginning[:, None]).all(axis=-1)
        repeated &= ngrams[..., -1] >= 0
        rows, positions = np.nonzero(repeated)
        logits[rows, ngrams[rows, positions, -1]] = -np.inf


class RepetitionPenalty(LogitsProcessor):
    """Makes tokens that the prompt or the output holds less likely (Keskar et al. 2019, 4.1).

    Like transformers it multiplies negative logits, where Keskar et al. divide these too.
    """

    changes = True

    def __init__(self, penalty: float) -> None:
        self.penalty = penalty

    def __call__(self, logits: Floats, history: History, own: Floats) -> None:
        """Divides positive logits of known tokens, multiplies negative ones."""
        seen = history.whole
        # A prompt's last token stands for places without a token: it is penalised once anyway.
        last = seen.tokens[:, history.prompts.shape[1] - 1, None]
        tokens = np.where(seen.tokens >= 0, seen.tokens, last)
        found = np.take_along_axis(logits, tokens, axis=1)
        penalised = np.where(found < 0, found * self.penalty, found / self.penalty)
        np.put_along_axis(logits, tokens, penalised, axis=1)


class Suppress(LogitsProcessor):
    """Forbids some tokens everywhere."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = np.array(tokens, np.int64)

    def __call__(self, logits: Floats, history: History, own: Floats) -> None:
        """Forbids the tokens."""
        logits[:, self.tokens] = -np.inf


class SuppressSequences(LogitsProcessor):
    """Forbids the last token of a sequence after its other tokens, prompts included."""

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self.sequences = [np.array(sequence, np.int64) for sequence in sequences]

    def __call__(self, logits: Floats, history: History, own: Floats) -> None:
        """Forbids tokens that would complete a sequence."""
        seen = history.whole
        for sequence in self.sequences:
            begun = len(sequence) - 1
            if seen.length >= begun:
                last = seen.tokens[:, seen.length - begun :]
                logits[(last == sequence[:-1]).all(axis=1), sequence[-1]] = -np.inf


class SuppressBegin(LogitsProcessor):
    """Forbids some tokens right after the forced beginning of an output."""

    def __init__(self, tokens: Sequence[int], beginnings: Sequence[Sequence[int]]) -> None:
        self.tokens = np.array(tokens, np.int64)
        self.lengths = np.array([len(beginning) for beginning in beginnings])

    def active(self, length: int) -> bool:
        """True until all outputs are longer than the longest beginning."""
        return length <= int(self.lengths.max())

    def __call__(self, logits: Floats, history: History, own: Floats) -> None:
        """Forbids the tokens in rows that have just their beginning."""
        begins = self.lengths[history.sentences] == history.length
        logits[np.ix_(begins, self.tokens)] = -np.inf


class ForcedEnd(LogitsProcessor):
    """Allows only some tokens, as likely as 1, in the last place of an output of maximal length."""

    changes = True

    def __init__(self, tokens: Sequence[int], limits: Sequence[int]) -> None:
        self.tokens = np.array(tokens, np.int64)
        self.limits = np.array(limits, np.int64)

    def active(self, length: int) -> bool:
        """True once an output may lack one token only."""
        return length + 1 >= int(self.limits.min())

    def __call__(self, logits: Floats, history: History, own: Floats) -> None:
        """Forbids all other tokens in rows that lack one token."""
        rows = np.flatnonzero(self.limits[history.sentences] == history.length + 1)
        logits[rows] = -np.inf
        logits[np.ix_(rows, self.tokens)] = 0.0


class ForcedPrefix(LogitsProcessor):
    """Makes every output begin with its sentence's prefix, even if other processors forbid it."""

    def __init__(self, prefixes: Sequence[Sequence[int]]) -> None:
        longest = max(map(len, prefixes), default=0)
        self.tokens = np.full((len(prefixes), longest), -1)
        for row, prefix in zip(self.tokens, prefixes, strict=True):
            row[: len(prefix)] = prefix

    def active(self, length: int) -> bool:
        """True until all outputs have the longest prefix."""
        return length < self.tokens.shape[1]

    def __call__(self, logits: Floats, history: History, own: Floats) -> None:
        """Forbids all tokens but the next of an unfinished prefix, whose logit it keeps."""
        forced = self.tokens[history.sentences, history.length]
        rows, forced = np.flatnonzero(forced >= 0), forced[forced >= 0]
        logits[rows] = -np.inf
        logits[rows, forced] = own[rows, forced]


class ForcedBegin(LogitsProcessor):
    """Makes every output begin with its sentence's token, as likely as 1; None allows any token."""

    changes = True

    def __init__(self, tokens: Sequence[int | None]) -> None:
        self.tokens = np.array([-1 if token is None else token for token in tokens], np.int64)

    def active(self, length: int) -> bool:
        """True while the outputs are empty."""
        return length == 0

    def __call__(self, logits: Floats, history: History, own: Floats) -> None:
        """Forbids all other tokens."""
        tokens = self.tokens[history.sentences]
        rows = np.flatnonzero(tokens >= 0)
        logits[rows] = -np.inf
        logits[rows, tokens[rows]] = 0.0


class Renormalise(LogitsProcessor):
    """Normalises log-probabilities again after the other processors."""

    changes = True

    def __call__(self, logits: Floats, history: History, own: Floats) -> None:
        """Subtracts the log-sum-exp; a row without an allowed token stays."""
        normaliser = log_sum_exp(logits)[:, None]
        logits -= np.where(np.isfinite(normaliser), normaliser, 0.0)


def first_token(options: GenerationOptions, request: Request[Any]) -> int | None:
    """Token that the outputs of a request begin with, before its prefix."""
    return options.forced_begin if request.forced_begin is None else request.forced_begin


def beginning(options: GenerationOptions, request: Request[Any]) -> tuple[int, ...]:
    """All tokens that the outputs of a request have to begin with."""
    first = first_token(options, request)
    return (*(() if first is None else (first,)), *request.prefix)


def prompts_of(prompts: Sequence[Sequence[int]]) -> Integers:
    """Prompts as one array, padded on the left with -1 `[prompts, longest]`."""
    longest = max(map(len, prompts))
    return np.array([[-1] * (longest - len(prompt)) + list(prompt) for prompt in prompts], np.int64)


def build_logits_processors(
    options: GenerationOptions,
    requests: Sequence[Request[Any]],
    ends: Sequence[int],
    *,
    has_encoder: bool,
) -> list[LogitsProcessor]:
    """Processors for these options, in the order in which they apply."""
    beginnings = [beginning(options, request) for request in requests]
    first = [first_token(options, request) for request in requests]
    prompts = [0 if has_encoder else len(request.source) for request in requests]
    least = [max(options.min_length, options.min_total_length - prompt) for prompt in prompts]
    processors: list[LogitsProcessor] = []
    if options.repetition_penalty != 1:
        processors.append(RepetitionPenalty(options.repetition_penalty))
    if options.no_repeat_ngram:
        processors.append(NoRepeatNGram(options.no_repeat_ngram, prompt=options.prompt_ngrams))
    if max(least) > 0:
        processors.append(MinLength(least, ends))
    if options.suppress:
        processors.append(Suppress(options.suppress))
    if options.suppress_sequences:
        processors.append(SuppressSequences(options.suppress_sequences))
    if options.suppress_begin:
        processors.append(SuppressBegin(options.suppress_begin, beginnings))
    if options.forced_end:
        processors.append(ForcedEnd(options.forced_end, [each.max_length for each in requests]))
    if any(beginnings):
        processors.append(ForcedPrefix(beginnings))
    if any(token is not None for token in first):
        processors.append(ForcedBegin(first))
    if options.renormalise and options.beam > 1 and processors:
        processors.append(Renormalise())
    return processors


def restrict(logits: Floats, processors: Sequence[LogitsProcessor], history: History) -> Floats:
    """Returns a copy of the logits `[rows, vocabulary]` after all processors, in order."""
    allowed = logits.copy()
    for processor in processors:
        processor(allowed, history, logits)
    return allowed
