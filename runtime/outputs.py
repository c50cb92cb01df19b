"""The outputs that a search lets grow, and what is common to the ways of choosing their tokens."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from transferry.runtime.decoder import Ranked
from transferry.runtime.hypothesis import Hypothesis
from transferry.runtime.logits import Normaliser
from transferry.runtime.options import GenerationOptions

Key = TypeVar("Key")
# `logits.normalise`, or what a decoder has for it.
Normalise = Callable[[NDArray[np.floating[Any]]], Normaliser]


@dataclass(frozen=True)
class Request(Generic[Key]):
    """A sentence to be answered.

    Attributes:
        key: Handed back with the answer.
        source: Token ids, at least one; where the decoder has no encoder the outputs go on with
            them.
        max_length: Most tokens of its outputs, no more than the options' own.
        prefix: Its forced prefix.
        row_id: Seeds its samples.
    """

    key: Key
    source: Sequence[int]
    max_length: int
    prefix: Sequence[int] = ()
    row_id: int = 0


@dataclass(frozen=True)
class Choice:
    """The rows after a step.

    Attributes:
        rows: which rows of `Outputs` they are `[rows]`.
        parents: the row of the stepped state that each goes on from `[rows]`.
        tokens: their next tokens `[rows]`.
    """

    rows: NDArray[np.int64]
    parents: NDArray[np.int64]
    tokens: NDArray[np.int64]


class Outputs(ABC):
    """The outputs of the sentences that are answered together.

    Each has `width` outputs, those of sentence s in the rows from `s * width` on. They grow by a
    token a step, ended ones too while they are stepped.

    Attributes:
        width: outputs of a sentence.
        rows_at_first: rows of a sentence in the first step after `Decoder.start`.
        wanted: how many tokens of a row may matter.
        lengths: tokens of the outputs of each sentence `[sentences]`.
        limits: most tokens of an output of each `[sentences]`.
        tokens: the outputs, without meaning beyond their lengths `[sentences * width, max_length]`.
        ended: which outputs are complete, or have failed `[sentences * width]`.
    """

    rows_at_first: int
    wanted: int

    def __init__(
        self,
        requests: Sequence[Request[Any]],
        width: int,
        options: GenerationOptions,
        eos_id: int,
        normalise: Normalise,
    ) -> None:
        self.width = width
        self.normalise = normalise
        self.options = options
        self.eos_id = eos_id
        rows = len(requests) * width
        self.lengths = np.zeros(len(requests), np.int64)
        self.limits = np.array([request.max_length for request in requests])
        self.tokens = np.zeros((rows, options.max_length), np.int64)
        self.ended = np.zeros(rows, np.bool_)

    def rows_of(self, sentences: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows of some sentences, those of each side by side `[sentences * width]`."""
        return (sentences[:, None] * self.width + np.arange(self.width)).ravel()

    @abstractmethod
    def choose(
        self,
        logits: NDArray[np.floating[Any]],
        allowed: NDArray[np.floating[Any]],
        rows: NDArray[np.int64],
    ) -> Choice:
        """Chooses the next tokens, and marks what they end.

        Args:
            logits: of the next token, as the model gave them `[rows, vocabulary]`.
            allowed: the same after the processors; the same array where there were none.
            rows: which rows were stepped `[rows]`.
        """

    @abstractmethod
    def choose_ranked(self, ranked: Ranked, rows: NDArray[np.int64]) -> Choice:
        """Does what `choose` does, of the likeliest tokens of each row.

        Args:
            ranked: as many of each row as `wanted`, or all.
            rows: which rows were stepped `[rows]`.
        """

    def extend(self, rows: NDArray[np.int64], choice: Choice) -> None:
        """Adds the chosen tokens.

        Args:
            rows: the rows that were stepped `[stepped rows]`.
            choice: what follows them.
        """
        sentences = choice.rows // self.width
        lengths = self.lengths[sentences]
        parents = rows[choice.parents]
        if not np.array_equal(parents, choice.rows):
            longest = int(lengths.max())
            self.tokens[choice.rows, :longest] = self.tokens[parents, :longest]
        self.tokens[choice.rows, lengths] = choice.tokens
        self.lengths[sentences] = lengths + 1

    @abstractmethod
    def hypotheses(self, sentence: int) -> list[Hypothesis]:
        """The outputs of a sentence that has ended: at most `n_best`, best first."""
