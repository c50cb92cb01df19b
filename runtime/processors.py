"""What filters: processors forbid tokens before one is picked.

They decide which tokens may be picked, never what a token is worth: the search takes the
log-probability of a picked token from the model's own logits.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from transferry.runtime.options import GenerationOptions


class LogitsProcessor(Protocol):
    """Forbids tokens by setting their logits to minus infinity."""

    def active(self, lengths: NDArray[np.int64]) -> bool:
        """Whether outputs of these lengths may need it; a step that needs none copies nothing."""
        ...

    def __call__(
        self,
        logits: NDArray[np.floating[Any]],
        sentences: NDArray[np.int64],
        history: NDArray[np.int64],
        lengths: NDArray[np.int64],
    ) -> None:
        """Changes the logits in place.

        Args:
            logits: of the next token `[rows, vocabulary]`, a copy.
            sentences: the sentence that each row belongs to `[rows]`.
            history: the tokens so far, without `bos` `[rows, longest]`, without meaning beyond the
                length of a row.
            lengths: tokens that each row has so far `[rows]`.
        """
        ...


class MinLength:
    """No end token before an output has `length` tokens."""

    def __init__(self, length: int, eos_id: int) -> None:
        self.length = length
        self.eos_id = eos_id

    def active(self, lengths: NDArray[np.int64]) -> bool:
        """True until all have reached the length."""
        return bool((lengths < self.length).any())

    def __call__(
        self,
        logits: NDArray[np.floating[Any]],
        sentences: NDArray[np.int64],
        history: NDArray[np.int64],
        lengths: NDArray[np.int64],
    ) -> None:
        """Forbids the end token where the length is not reached."""
        logits[lengths < self.length, self.eos_id] = -np.inf


class NoRepeatNGram:
    """No n-gram of `size` tokens occurs twice in an output (Paulus et al. 2018, section 2.5)."""

    def __init__(self, size: int) -> None:
        self.size = size

    def active(self, lengths: NDArray[np.int64]) -> bool:
        """True once there is an n-gram to repeat."""
        return bool((lengths >= self.size).any())

    def __call__(
        self,
        logits: NDArray[np.floating[Any]],
        sentences: NDArray[np.int64],
        history: NDArray[np.int64],
        lengths: NDArray[np.int64],
    ) -> None:
        """Forbids every token that once followed the last `size - 1` tokens."""
        ngrams = np.lib.stride_tricks.sliding_window_view(history, self.size, axis=1)
        # Of a row that is too short this is anything; it has no n-gram either.
        last = lengths[:, None] + np.arange(1 - self.size, 0)
        beginning = np.take_along_axis(history, last, axis=1)
        repeated = (ngrams[..., :-1] == beginning[:, None]).all(axis=-1)
        repeated &= np.arange(ngrams.shape[1]) <= lengths[:, None] - self.size
        rows, positions = np.nonzero(repeated)
        logits[rows, ngrams[rows, positions, -1]] = -np.inf


class Suppress:
    """No output holds these tokens."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = np.array(tokens, np.int64)

    def active(self, lengths: NDArray[np.int64]) -> bool:
        """Always true."""
        return True

    def __call__(
        self,
        logits: NDArray[np.floating[Any]],
        sentences: NDArray[np.int64],
        history: NDArray[np.int64],
        lengths: NDArray[np.int64],
    ) -> None:
        """Forbids the tokens."""
        logits[:, self.tokens] = -np.inf


class ForcedPrefix:
    """Every output begins with its sentence's prefix; it overrules whatever ran before it."""

    def __init__(self, prefixes: Sequence[Sequence[int]]) -> None:
        longest = max(map(len, prefixes), default=0)
        self.tokens = np.full((len(prefixes), longest), -1)
        for row, prefix in zip(self.tokens, prefixes, strict=True):
            row[: len(prefix)] = prefix

    def active(self, lengths: NDArray[np.int64]) -> bool:
        """True until the longest prefix is over."""
        return bool((lengths < self.tokens.shape[1]).any())

    def __call__(
        self,
        logits: NDArray[np.floating[Any]],
        sentences: NDArray[np.int64],
        history: NDArray[np.int64],
        lengths: NDArray[np.int64],
    ) -> None:
        """Forbids all but the prefix's next token, where the prefix is not over."""
        rows = np.flatnonzero(lengths < self.tokens.shape[1])
        forced = self.tokens[sentences[rows], lengths[rows]]
        rows, forced = rows[forced >= 0], forced[forced >= 0]
        logits[rows] = -np.inf
        logits[rows, forced] = 0.0


def build_processors(
    options: GenerationOptions, prefixes: Sequence[Sequence[int]], eos_id: int
) -> list[LogitsProcessor]:
    """The processors that the options ask for, in the order in which they apply."""
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
    logits: NDArray[np.floating[Any]],
    processors: Sequence[LogitsProcessor],
    sentences: NDArray[np.int64],
    history: NDArray[np.int64],
    lengths: NDArray[np.int64],
) -> NDArray[np.floating[Any]]:
    """A copy of the logits `[rows, vocabulary]` after all processors, applied in order.

    The other arguments are those of `LogitsProcessor.__call__`.
    """
    allowed = logits.copy()
    forbid(processors, sentences, history, lengths, allowed)
    return allowed


def forbid(
    processors: Sequence[LogitsProcessor],
    sentences: NDArray[np.int64],
    history: NDArray[np.int64],
    lengths: NDArray[np.int64],
    logits: NDArray[np.floating[Any]],
) -> None:
    """Applies all processors in order to logits `[rows, vocabulary]`, in place."""
    for processor in processors:
        processor(logits, sentences, history, lengths)
