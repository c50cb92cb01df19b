"""Logits processors: rules that forbid tokens before one is chosen.

They decide which tokens may be chosen, never what a token is worth: the search takes the
log-probability of a chosen token from the model's own logits.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transferry.runtime.decoding.options import GenerationOptions


@dataclass(frozen=True)
class History:
    """The outputs so far, one a row.

    Attributes:
        sentences: The sentence of each row `[rows]` int64.
        lengths: Tokens of each row so far `[rows]` int64.
        tokens: Those tokens, `bos` left out; undefined beyond a row's length `[rows, longest]`.
    """

    sentences: NDArray[np.int64]
    lengths: NDArray[np.int64]
    tokens: NDArray[np.int64]


class LogitsProcessor(ABC):
    """Forbids tokens by setting their logits to minus infinity."""

    @abstractmethod
    def active(self, lengths: NDArray[np.int64]) -> bool:
        """Whether it may forbid a token after outputs of these lengths `[rows]`."""

    @abstractmethod
    def __call__(self, logits: NDArray[np.floating[Any]], history: History) -> None:
        """Changes the logits of the next token `[rows, vocabulary]` in place."""


class MinLength(LogitsProcessor):
    """Forbids the end token before an output has `length` tokens."""

    def __init__(self, length: int, eos_id: int) -> None:
        self.length = length
        self.eos_id = eos_id

    def active(self, lengths: NDArray[np.int64]) -> bool:
        """True until all outputs have reached the length."""
        return bool((lengths < self.length).any())

    def __call__(self, logits: NDArray[np.floating[Any]], history: History) -> None:
        """Forbids the end token in rows that are too short."""
        logits[history.lengths < self.length, self.eos_id] = -np.inf


class NoRepeatNGram(LogitsProcessor):
    """Forbids an n-gram of `size` to occur twice in an output (Paulus et al. 2018, section 2.5)."""

    def __init__(self, size: int) -> None:
        self.size = size

    def active(self, lengths: NDArray[np.int64]) -> bool:
        """True once an output holds an n-gram that could be repeated."""
        return bool((lengths >= self.size).any())

    def __call__(self, logits: NDArray[np.floating[Any]], history: History) -> None:
        """Forbids every token that once followed the last `size - 1` tokens."""
        lengths = history.lengths[:, None]
        ngrams = np.lib.stride_tricks.sliding_window_view(history.tokens, self.size, axis=1)
        # Arbitrary in a row that is too short, which holds no n-gram either.
        last = lengths + np.arange(1 - self.size, 0)
        beginning = np.take_along_axis(history.tokens, last, axis=1)
        repeated = (ngrams[..., :-1] == beginning[:, None]).all(axis=-1)
        repeated &= np.arange(ngrams.shape[1]) <= lengths - self.size
        rows, positions = np.nonzero(repeated)
        logits[rows, ngrams[rows, positions, -1]] = -np.inf


class Suppress(LogitsProcessor):
    """Forbids some tokens everywhere."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = np.array(tokens, np.int64)

    def active(self, lengths: NDArray[np.int64]) -> bool:
        """Always true."""
        return True

    def __call__(self, logits: NDArray[np.floating[Any]], history: History) -> None:
        """Forbids the tokens."""
        logits[:, self.tokens] = -np.inf


class ForcedPrefix(LogitsProcessor):
    """Makes every output begin with its sentence's prefix, whatever other processors forbid."""

    def __init__(self, prefixes: Sequence[Sequence[int]]) -> None:
        longest = max(map(len, prefixes), default=0)
        self.tokens = np.full((len(prefixes), longest), -1)
        for row, prefix in zip(self.tokens, prefixes, strict=True):
            row[: len(prefix)] = prefix

    def active(self, lengths: NDArray[np.int64]) -> bool:
        """True until all outputs are longer than the longest prefix."""
        return bool((lengths < self.tokens.shape[1]).any())

    def __call__(self, logits: NDArray[np.floating[Any]], history: History) -> None:
        """Forbids all tokens but the next one of an unfinished prefix."""
        rows = np.flatnonzero(history.lengths < self.tokens.shape[1])
        forced = self.tokens[history.sentences[rows], history.lengths[rows]]
        rows, forced = rows[forced >= 0], forced[forced >= 0]
        logits[rows] = -np.inf
        logits[rows, forced] = 0.0


def build_logits_processors(
    options: GenerationOptions, prefixes: Sequence[Sequence[int]], eos_id: int
) -> list[LogitsProcessor]:
    """Returns the processors that the options ask for, in the order in which they apply."""
    processors: list[LogitsProcessor] = []
    if options.min_length:
        processors.append(MinLength(options.min_length, eos_id))
    if options.no_repeat_ngram:
        processors.append(NoRepeatNGram(options.no_repeat_ngram))
    if options.suppress:
        processors.append(Suppress(options.suppress))
    if any(prefixes):
        processors.append(ForcedPrefix(prefixes))
    return processors


def restrict(
    logits: NDArray[np.floating[Any]], processors: Sequence[LogitsProcessor], history: History
) -> NDArray[np.floating[Any]]:
    """Returns a copy of the logits `[rows, vocabulary]` after all processors, in order."""
    allowed = logits.copy()
    for processor in processors:
        processor(allowed, history)
    return allowed
