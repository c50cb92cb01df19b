"""The model as a search sees it: tokens in, scores out, the KV cache as an opaque value."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from transferry.runtime.decoding.logits import SegmentMaxima

State = TypeVar("State")
Tensors = Mapping[str, NDArray[np.floating[Any]]]


@dataclass(frozen=True)
class TopK:
    """The likeliest tokens of each row.

    Attributes:
        tokens: Ids, the likeliest first, the lower of equally likely ones first `[rows, k]` int64.
        usable: False where a logit is NaN or infinite, or none is finite `[rows]` bool.
        logits: Their logits `[rows, k]`; None where the decoder found the tokens without scores.
        log_sum_exp: Log-sum-exp of all logits of a row `[rows]` float64; None likewise.
    """

    tokens: NDArray[np.int64]
    usable: NDArray[np.bool_]
    logits: NDArray[np.floating[Any]] | None = None
    log_sum_exp: NDArray[np.float64] | None = None


@dataclass(frozen=True)
class StepOutput:
    """Scores of the tokens that may come next: all logits, or the top k of each row alone.

    Attributes:
        logits: `[rows, target, vocabulary]`, in a buffer that the next step may overwrite: copy
            what must survive, and write only into a copy. None where `top_k` is given.
        top_k: The likeliest tokens; None where `logits` are given.
        log_sum_exp: Of the logits, where the decoder computes it faster than numpy does: as
            `logits.log_sum_exp` `[rows]` float64, for a step of one token a row.
        maxima: Maxima of segments of the logits, found along the way.
    """

    logits: NDArray[np.floating[Any]] | None = None
    top_k: TopK | None = None
    log_sum_exp: NDArray[np.float64] | None = None
    maxima: SegmentMaxima | None = None

    @property
    def all_logits(self) -> NDArray[np.floating[Any]]:
        """The logits of a step that was not asked for the top k `[rows, target, vocabulary]`."""
        assert self.logits is not None
        return self.logits


class Decoder(Protocol[State]):
    """A model that generates: tokens in, scores out, the KV cache as a value.

    The state is opaque to the search. A call never changes the state that it is given, as far as
    the search can tell: the search continues with the returned state and drops the old one.
    """

    @property
    def vocabulary_size(self) -> int:
        """Number of target tokens, the last dimension of the logits."""
        ...

    @property
    def has_encoder(self) -> bool:
        """False for a decoder-only model, whose outputs continue the source itself."""
        ...

    @property
    def shares_cache(self) -> bool:
        """Whether all rows of a sentence share one cache, so that reordering them copies nothing.

        The rows of such a state are grouped by sentence, equally many neighbouring rows each: 1
        after `start`, more once a `select` has repeated each sentence's row. The search keeps the
        grouping where it can: it drops whole sentences, and reorders rows within a sentence only.
        """
        ...

    def start(self, source: NDArray[np.int64], mask: NDArray[np.bool_]) -> State:
        """Encodes the source; without an encoder, fills the cache with it.

        Args:
            source: Padded token ids `[rows, source]`.
            mask: True at tokens, False at padding `[rows, source]`.

        Returns:
            The state before the first target token.
        """
        ...

    def step(
        self,
        tokens: NDArray[np.int64],
        state: State,
        *,
        top: int | None = None,
        normalise: bool = False,
    ) -> tuple[StepOutput, State]:
        """Reads target tokens and scores the tokens that may follow: one forward pass.

        Args:
            tokens: The next target tokens of every row `[rows, target]`, without padding.
            state: The state of the same rows, from `start`, `step` or `select`.
            top: Number of likeliest tokens that suffice, for a step of one token a row; None for
                all logits. A decoder that has no faster way gives all logits nevertheless.
            normalise: Whether the caller will need `log_sum_exp`.

        Returns:
            The scores, and the state grown by `target` positions.
        """
        ...

    def select(self, state: State, rows: NDArray[np.int64]) -> State:
        """Drops, repeats or reorders rows: row i of the result is row `rows[i]` of `state`.

        Args:
            state: The state of all rows.
            rows: Indices of the rows to take `[selected]`.
        """
        ...


class ObservableDecoder(Decoder[State], Protocol[State]):
    """A decoder that shows its cache, for comparison with another."""

    def tensors(self, state: State) -> Tensors:
        """Returns the cross and past of a state by name, such as "cross.0.keys"."""
        ...


@runtime_checkable
class ObservableEncoder(Protocol):
    """An encoder-only model."""

    def encode(self, source: NDArray[np.int64], mask: NDArray[np.bool_]) -> Tensors:
        """Returns "hidden" `[rows, source, d_model]`, and "head" and "logits" if it has them."""
        ...


def longer(mask: NDArray[np.bool_], tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Extends the mask of a decoder-only cache by a step over `tokens`, none of them padding."""
    return np.concatenate([mask, np.ones(tokens.shape, np.bool_)], axis=1)
