"""The model as a search uses it: tokens in, scores out, the KV cache as an opaque value."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np

from transferry.runtime.decoding.logits import Bools, Doubles, Floats, Integers, SegmentMaxima

State = TypeVar("State")
Tensors = Mapping[str, Floats]


class TopK(NamedTuple):
    """The likeliest tokens of each row.

    Attributes:
        tokens: Ids, the likeliest first, the lower of equally likely ones first `[rows, k]` int64.
        logits: Their logits `[rows, k]`; None where the decoder found the tokens without scores,
            and -1 in a row of unusable ones.
        log_sum_exp: Log-sum-exp of all logits of a row, NaN where a logit is NaN or plus infinity,
            or all are minus infinity `[rows]` float64; None likewise.
    """

    tokens: Integers
    logits: Floats | None = None
    log_sum_exp: Doubles | None = None


class StepOutput(NamedTuple):
    """Scores of the tokens that may come next: all logits, or the top k of each row alone.

    Attributes:
        logits: `[rows, target, vocabulary]`, read-only, in a buffer that the next step may
            overwrite. None where `top_k` is given.
        top_k: The likeliest tokens; None where `logits` are given.
        log_sum_exp: Of the logits of one token a row, where the decoder computes it faster than
            numpy `[rows]` float64.
        maxima: Maxima of segments of the logits, a by-product.
    """

    logits: Floats | None = None
    top_k: TopK | None = None
    log_sum_exp: Doubles | None = None
    maxima: SegmentMaxima | None = None

    @property
    def all_logits(self) -> Floats:
        """Logits of a step that gave no top k `[rows, target, vocabulary]`."""
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

    @property
    def has_encoder(self) -> bool:
        """False for a decoder-only model, whose outputs continue the source itself."""

    @property
    def shares_cache(self) -> bool:
        """Whether all rows of a sentence share one cache, so that reordering them copies nothing.

        The rows of a shared state are grouped by sentence, equally many neighbouring rows each: 1
        after `start`, more once a `select` has repeated each sentence's row. The search keeps the
        grouping where it can: it drops whole sentences, and reorders rows within a sentence only.
        """

    def start(self, source: Integers, mask: Bools) -> State:
        """Encodes the source, or reads the prompt into the cache; returns the first state.

        Args:
            source: Padded token ids `[rows, source]`.
            mask: True at tokens, False at padding `[rows, source]`.
        """

    def step(
        self, tokens: Integers, state: State, *, top: int | None = None, normalise: bool = False
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

    def select(self, state: State, rows: Integers) -> State:
        """Drops, repeats or reorders rows: row i of the result is row `rows[i]` of `state`."""


class ObservableDecoder(Decoder[State], Protocol[State]):
    """A decoder that shows its cache, for comparison with another."""

    def tensors(self, state: State) -> Tensors:
        """Returns the cross and past of a state by name, such as "cross.0.keys"."""


@runtime_checkable
class ObservableEncoder(Protocol):
    """An encoder-only model."""

    def encode(self, source: Integers, mask: Bools) -> Tensors:
        """Returns "hidden" `[rows, source, d_model]`, and "head" and "logits" if it has them."""


def longer(mask: Bools, tokens: Integers) -> Bools:
    """Mask of a decoder-only cache after a step over `tokens`, all of them without padding."""
    return np.concatenate([mask, np.ones(tokens.shape, np.bool_)], axis=1)
