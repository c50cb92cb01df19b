"""What a search needs of a model: the decoder protocol."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from transferry.runtime.logits import Normaliser

State = TypeVar("State")
# Sets scores `[rows, vocabulary]` to minus infinity in place where a token is forbidden.
Forbid = Callable[[NDArray[np.floating[Any]]], None]


class Decoder(Protocol[State]):
    """A model seen from the search: tokens in, logits out, the cache as a value.

    The state is opaque to the search. A call never changes the state that it is given, as far as
    the search can tell: the search goes on with the returned one and drops the old.
    """

    @property
    def vocabulary_size(self) -> int:
        """Number of target tokens, the last dimension of the logits."""
        ...

    @property
    def has_encoder(self) -> bool:
        """False where outputs go on with the source itself: the model is decoder-only."""
        ...

    def start(self, source: NDArray[np.int64], mask: NDArray[np.bool_]) -> State:
        """Encodes the source, or where there is no encoder fills the cache with it.

        Args:
            source: padded token ids `[rows, source]`.
            mask: True at tokens, False at padding `[rows, source]`.

        Returns:
            The state before the first target token.
        """
        ...

    def step(
        self, tokens: NDArray[np.int64], state: State
    ) -> tuple[NDArray[np.floating[Any]], State]:
        """Reads target tokens and scores what may come next: one forward pass.

        Args:
            tokens: the next target tokens of every row `[rows, target]`, all real.
            state: what `start`, `step` or `select` returned for the same rows.

        Returns:
            Logits `[rows, target, vocabulary]` and the state grown by `target` positions. The
            logits may lie in a buffer that the next step overwrites: copy what must survive, and
            write only into a copy.
        """
        ...

    def select(self, state: State, rows: NDArray[np.int64]) -> State:
        """Drops, repeats or reorders rows: row i of the result is row `rows[i]` of `state`.

        Args:
            state: the state of all rows.
            rows: which rows to take `[new_rows]`.
        """
        ...


@runtime_checkable
class SentenceDecoder(Decoder[State], Protocol[State]):
    """A decoder whose rows share the cache of their sentence, so that reordering copies nothing.

    The rows of a state are grouped by sentence, as many neighbouring rows each: 1 after `start`,
    more once a `select` has taken each sentence's row so many times. The search keeps to that where
    it can: it drops whole sentences, and reorders rows inside their sentence alone.
    """

    shares_cache: Literal[True]


@runtime_checkable
class GreedyDecoder(Decoder[State], Protocol[State]):
    """A decoder that finds the likeliest token itself, without scores of all the others."""

    def likeliest(
        self, tokens: NDArray[np.int64], state: State, forbid: Forbid | None = None
    ) -> tuple[NDArray[np.int64], State]:
        """Does what `step` does for one token a row, and tells the likeliest next token alone.

        Args:
            tokens: the next target token of every row `[rows, 1]`.
            state: as for `step`.
            forbid: what filters, if anything does.

        Returns:
            The likeliest next tokens that are not forbidden, the lowest of equal ones, -1 where no
            score is finite or one is NaN `[rows]`; and the state grown by one position.
        """
        ...


@dataclass(frozen=True)
class Ranked:
    """The likeliest tokens of each row.

    Attributes:
        logits: Theirs, the largest first, equal ones by token [rows, count].
        tokens: Which they are [rows, count].
        log_sum_exp: Of all logits of a row, as the function `logits.log_sum_exp` has it [rows].
    """

    logits: NDArray[np.floating[Any]]
    tokens: NDArray[np.int64]
    log_sum_exp: NDArray[np.float64]


@runtime_checkable
class RankingDecoder(Decoder[State], Protocol[State]):
    """A decoder that can rank tokens itself, so that only a few logits leave its device.

    Attributes:
        ranks: Whether it does.
    """

    ranks: bool

    def rank(self, tokens: NDArray[np.int64], state: State, count: int) -> tuple[Ranked, State]:
        """Does what `step` does for one token a row, and tells the likeliest next tokens alone.

        Args:
            tokens: the next target token of every row `[rows, 1]`.
            state: as for `step`.
            count: how many of each row are wanted, no more than there are tokens.
        """
        ...


@runtime_checkable
class PartialDecoder(Decoder[State], Protocol[State]):
    """A decoder that scores some tokens without all the others."""

    def part(self, tokens: NDArray[np.int64]) -> Any:
        """Readies what scoring some tokens takes, for many steps.

        Args:
            tokens: which, in rising order `[part]`.
        """
        ...

    def step_part(
        self, tokens: NDArray[np.int64], state: State, part: Any
    ) -> tuple[NDArray[np.floating[Any]], State]:
        """Does what `step` does, and scores these tokens alone.

        A logit depends on its row alone, not on which others are scored. It may be rounded
        otherwise than that of `step`.

        Args:
            tokens: as for `step`.
            state: as for `step`.
            part: what `part` returned.

        Returns:
            Logits `[rows, target, part]`, which may be written over, and the state, as of `step`.
        """
        ...


@runtime_checkable
class NormalisingDecoder(Protocol):
    """A decoder that normalises logits faster than numpy."""

    def normalise(self, logits: NDArray[np.floating[Any]]) -> Normaliser:
        """As `logits.normalise`, of `[rows, vocabulary]`."""
        ...


def longer(mask: NDArray[np.bool_], tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
    """The mask of a cache after a step over `tokens`, all of them real.

    For a decoder without an encoder; the mask of a source stays as it is.
    """
    return np.concatenate([mask, np.ones(tokens.shape, np.bool_)], axis=1)
