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

    def active(self, length: int) -> bool:
        """Whether outputs of `length` tokens need it; a step that needs none copies nothing."""
        ...

    def __call__(
        self,
        logits: NDArray[np.floating[Any]],
        sentences: NDArray[np.int64],
        history: NDArray[np.int64],
    ) -> None:
        """Changes the logits in place.

        Args:
            logits: of the next token `[rows, vocabulary]`, a copy.
            sentences: the sentence that each row belongs to `[rows]`.
            history: the tokens so far, without `bos` `[rows, length]`.
        """
        ...


class MinLength:
    """No end token before an output has `length` tokens."""

    def __init__(self, length: int, eos_id: int) -> None:
        self.length = length
        self.eos_id = eos_id

    def active(self, length: int) -> bool:
        """True until the length is reached."""
        return length < self.length

    def __call__(
        self,
        logits: NDArray[np.floating[Any]],
        sentences: NDArray[np.int64],
        history: NDArray[np.int64],
    ) -> None:
        """Forbids the end token."""
        logits[:, self.eos_id] = -np.inf


class NoRepeatNGram:
    """No n-gram of `size` tokens occurs twice in an output (Paulus et al. 2018, section 2.5)."""

    def __init__(self, size: int) -> None:
        self.size = size

    def active(self, length: int) -> bool:
        """True once there is an n-gram to repeat."""
        return length >= self.size

    def __call__(
        self,
        logits: NDArray[np.floating[Any]],
        sentences: NDArray[np.int64],
        history: NDArray[np.int64],
    ) -> None:
        """Forbids every token that once followed the last `size - 1` tokens."""
        ngrams = np.lib.stride_tricks.sliding_window_view(history, self.size, axis=1)
        beginning = history[:, history.shape[1] - self.size + 1 :]
        rows, positions = np.nonzero((ngrams[..., :-1] == beginning[:, None]).all(axis=-1))
        logits[rows, ngrams[rows, positions, -1]] = -np.inf


class Suppress:
    """No output holds these tokens."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = np.array(tokens, np.int64)

    def active(self, length: int) -> bool:
        """Always true."""
        return True

    def __call__(
        self,
        logits: NDArray[np.floating[Any]],
        sentences: NDArray[np.int64],
        history: NDArray[np.int64],
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

    def active(self, length: int) -> bool:
        """True until the longest prefix is over."""
        return length < self.tokens.shape[1]

    def __call__(
        self,
        logits: NDArray[np.floating[Any]],
        sentences: NDArray[np.int64],
        history: NDArray[np.int64],
    ) -> None:
        """Forbids all but the prefix's next token, where the prefix is not over."""
        forced = self.tokens[sentences, history.shape[1]]
        rows = np.flatnonzero(forced >= 0)
        logits[rows] = -np.inf
        logits[rows, forced[rows]] = 0.0


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
) -> NDArray[np.floating[Any]]:
    """A copy of the logits `[rows, vocabulary]` after all processors, applied in order.

    The other arguments are those of `LogitsProcessor.__call__`.
    """
    allowed = logits.copy()
    for processor in processors:
        processor(allowed, sentences, history)
    return allowed
