"""Requests, growing outputs and the choice of a step: common to all ways of choosing tokens."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np

from transferry.runtime.decoding.decoder import StepOutput, TopK
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.decoding.hypothesis import Hypothesis
from transferry.runtime.decoding.logits import Bools, Doubles, Floats, Integers
from transferry.runtime.decoding.stop_strings import StopStrings

Key = TypeVar("Key")


@dataclass(frozen=True)
class Request(Generic[Key]):
    """A sentence to generate from.

    Attributes:
        key: Returned with the hypotheses.
        source: Token ids, at least one; a decoder-only model continues them.
        max_length: Limit on the tokens of its outputs, at most that of the options.
        prefix: Tokens that its outputs begin with.
        row_id: Seeds its samples.
        bos_id: The begin token of its outputs; None takes the special tokens'.
        forced_begin: The token that its outputs begin with, before the prefix; None takes the
            options'.
        seed: Seed of its samples; None takes the options'.
    """

    key: Key
    source: Sequence[int]
    max_length: int
    prefix: Sequence[int] = ()
    row_id: int = 0
    bos_id: int | None = None
    forced_begin: int | None = None
    seed: int | None = None


class Choice(NamedTuple):
    """The rows after a step.

    Attributes:
        rows: Their rows of `Strategy.tokens` `[rows]`.
        parents: Rows of the stepped state that they continue `[rows]`; None where each continues
            itself.
        tokens: Their next tokens `[rows]`.
    """

    rows: Integers
    parents: Integers | None
    tokens: Integers


class Strategy(ABC):
    """Chooses tokens, and holds the outputs of a batch of sentences while they grow.

    Each sentence has `width` outputs: sentence s those in the rows from `s * width` on. Outputs
    grow by a token a step, ended ones too while they are stepped, so those that are have one
    length.

    Attributes:
        width: Outputs of a sentence.
        rows_at_first: Rows of a sentence in the first step after `Decoder.start`.
        ranks: Whether it compares outputs, so that processors change log-probabilities.
        top: Number of likeliest tokens of a row that suffice for a choice; None for all logits.
        length: Tokens of the outputs that are stepped.
        limits: Maximal lengths of the outputs of each sentence `[sentences]`.
        least_limit: The lowest of them.
        tokens: The outputs, undefined beyond their length `[sentences * width, max_length]`.
        ended: Whether an output is complete or has failed `[sentences * width]`.
    """

    rows_at_first: int
    top: int | None
    ranks: ClassVar[bool] = False

    def __init__(
        self,
        requests: Sequence[Request[Any]],
        width: int,
        options: GenerationOptions,
        ends: Sequence[int],
        stops: StopStrings,
    ) -> None:
        self.width = width
        self.options = options
        self.ends = np.array(ends, np.int64)
        self.stops = stops
        rows = len(requests) * width
        self.length = 0
        self.limits = np.array([request.max_length for request in requests])
        self.least_limit = int(self.limits.min())
        self.tokens = np.zeros((rows, options.max_length), np.int64)
        self.ended = np.zeros(rows, np.bool_)

    def is_end(self, tokens: Integers) -> Bools:
        """Whether each token ends an output, in the shape of `tokens`."""
        found: Bools
        if len(self.ends) == 1:
            found = tokens == self.ends
        else:
            found = (tokens[..., None] == self.ends).any(axis=-1)
        return found

    def stopped(self, row: int, token: int) -> bool:
        """Whether the output in a row holds a stop string once it has this token."""
        return self.stops.end([*self.tokens[row, : self.length].tolist(), token])

    def rows_of(self, sentences: Integers) -> Integers:
        """Rows of some sentences, grouped by sentence `[sentences * width]`."""
        return (sentences[:, None] * self.width + np.arange(self.width)).ravel()

    @abstractmethod
    def choose(
        self, output: StepOutput, allowed: Floats | None, rows: Integers, own: Doubles | None = None
    ) -> Choice:
        """Chooses the next tokens from all logits, and marks the outputs that they end.

        Args:
            output: The scores of a step of one token a row.
            allowed: Its logits after the active logits processors `[rows, vocabulary]`; None
                without active processors.
            rows: Rows of `tokens` that were stepped `[rows]`.
            own: The model's own log-probabilities `[rows, vocabulary]`, where `allowed` are not
                logits but log-probabilities that processors changed.
        """

    @abstractmethod
    def choose_top_k(self, top_k: TopK, rows: Integers) -> Choice:
        """Chooses from at least the `top` likeliest tokens of each row, as `choose` does."""

    def extend(self, rows: Integers, choice: Choice) -> None:
        """Appends the chosen tokens to the outputs, after a step over `rows` `[rows]`."""
        if choice.parents is not None:
            parents = rows[choice.parents]
            self.tokens[choice.rows, : self.length] = self.tokens[parents, : self.length]
        self.tokens[choice.rows, self.length] = choice.tokens
        self.length += 1

    @abstractmethod
    def hypotheses(self, sentence: int) -> list[Hypothesis]:
        """Outputs of a sentence that has ended: at most `n_best`, best first."""
