"""Units of the errors of a tensor: each entry has its own, measured from the oracle by position."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from transferry.runtime.decoding.logits import BLOCK_ENTRIES, log_sum_exp

# Rank of a logit near the best, and how many times its distance a unit has at most; `logit_units`.
NEAR, NEAR_TIMES = 16, 4.0
EQUAL = 2.0**-44  # share of a logit that rounding of its sum in float64 explains
# Positions that measure the scale of a channel, and channels that measure torch's error.
SAMPLE = 1024
# Of 3/4 of the entries and of 9/10 of the errors to about the largest of a thousand, if these are
# normally distributed: quantiles, since one large entry or error says nothing of the others.
ENTRIES, ERRORS = 3.0, 2.5
# torch's error at a position is at least this: of few sums it may by chance round little.
LEAST = 2.0**-21
INT8_STEP = 2.0**-8  # half of one of a scale's 127 steps, which inputs are rounded to
# Least error of a position that a value at the border of two integers moves: twice the border that
# `export.oracle.rounding` foresees, so that other values there may cross in their turn.
CROSSED = 2.0**-19
SHARED = 64.0  # times the median, that the worst error of a position counts for all of them


def logit_units(logits: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    """Returns the unit of the errors of logits `[..., vocabulary]` by position `[...]`, in nats.

    It is the distance from the best logit to the median, at most 4 times that to the 16th best: one
    bias of -1e4, or one on most of the vocabulary, does not change it. 1 where these logits are
    equal, but for rounding in float64.
    """
    vocabulary = logits.shape[-1]
    middle = (vocabulary - 1) // 2
    near = max(vocabulary - 1 - NEAR, middle)
    ordered = np.partition(logits, (middle, near), axis=-1)
    close, median = ordered[..., near], ordered[..., middle]
    best = ordered[..., near:].max(axis=-1)
    units: NDArray[np.float64] = np.minimum(best - median, NEAR_TIMES * (best - close))
    return np.where(units > EQUAL * np.abs(best), units, 1.0).astype(np.float64)


def logit_errors(
    oracle: NDArray[np.floating[Any]], *sides: NDArray[np.floating[Any]]
) -> tuple[NDArray[np.float64], list[NDArray[np.float64]]]:
    """Returns the `logit_units` `[positions]`, and in them the largest error of a log-probability.

    A token far below the best is measured in units of its own distance from it, which rounding of
    its logit grows with. Logits are `[positions, vocabulary]`, the errors of each side
    `[positions]`.
    """
    exact = oracle.astype(np.float64)
    normalised, units = exact - log_sum_exp(exact)[:, None], logit_units(exact)
    scale = np.maximum(units[:, None], exact.max(axis=-1, keepdims=True) - exact)
    moved = (side - log_sum_exp(side)[:, None] - normalised for side in sides)
    return units, [(np.abs(each) / scale).max(axis=-1) for each in moved]


@dataclass(frozen=True)
class Units:
    """A tensor of the oracle by position, and the units of its entries.

    A position is a place in a row of a batch, its channels are the logits there, or the entries of
    all heads of a cache. A unit is the size of the position times that of the channel, or of the
    entry itself where that is larger: one large entry widens no unit but its own.

    Attributes:
        exact: `[positions, channels]`.
        kept: Which positions of the tensor these are, None for all; the others have no meaning.
        sizes: Size of each position `[positions, 1]`.
        channels: Size of each channel beside the others `[channels]`.
        logits: Whether the entries are logits: these are compared less their log-sum-exp, which is
            compared as one more channel.
        least: Lower bound of every unit.
    """

    exact: NDArray[np.floating[Any]]
    kept: NDArray[np.bool_] | None
    sizes: NDArray[np.float64]
    channels: NDArray[np.float64]
    logits: bool = False
    least: float = 0.0

    @classmethod
    def of(
        cls,
        tensor: NDArray[Any],
        kept: NDArray[np.bool_] | None = None,
        *,
        logits: bool = False,
        least: float = 0.0,
    ) -> Self:
        """Measures the sizes of a tensor, by default of all its positions.

        It is `[batch, heads, length, d_head]`, or has channels on the last axis; `kept` are the
        positions that have a meaning `[positions]`, `logits` says whether the channels are logits,
        and `least` is the lower bound of every unit.
        """
        exact = by_position(tensor, kept)
        if not exact.size:
            return cls(exact, kept, np.ones((len(exact), 1)), np.ones(exact.shape[1]))
        channels = np.ones(1)
        if logits:
            sizes = logit_units(exact)[:, None]
        else:
            large = np.abs(exact)
            few = large[:: -(-len(exact) // SAMPLE)]
            channels = quantile(few, 0.75, axis=0)
            # Of few positions, a channel may be small by chance, and a position by cancellation.
            channels = np.maximum(channels, quantile(channels, 0.5) / len(few))
            channels[channels == 0] = 1.0
            sizes = ENTRIES * quantile(large / channels, 0.75)[:, None]
        sizes = np.maximum(sizes, quantile(sizes[:, 0], 0.5) / 4)
        return cls(exact, kept, sizes, channels, logits, least)

    @property
    def typical(self) -> float:
        """Unit of a typical entry; 0 without any."""
        if not self.exact.size:
            return 0.0
        return float(quantile(self.sizes[:, 0], 0.5) * quantile(self.channels, 0.5))

    def errors(self, found: NDArray[Any]) -> Iterator[NDArray[np.float64]]:
        """Yields the errors of a tensor of the same shape, in units `[positions, channels]`.

        Each time it is those of the next few positions.
        """
        found = by_position(found, self.kept)
        step = max(1, BLOCK_ENTRIES // max(1, self.exact.shape[1]))
        for first in range(0, len(self.exact), step):
            part = slice(first, first + step)
            exact, other = (each[part].astype(np.float64) for each in (self.exact, found))
            moved, units = other - exact, self.sizes[part] * self.channels
            if self.logits:
                sums, best = log_sum_exp(exact)[:, None], exact.max(axis=1, keepdims=True)
                shift = log_sum_exp(other)[:, None] - sums
                moved = np.hstack([moved - shift, shift])
                units = np.maximum(units, np.hstack([best - exact, np.abs(sums)]))
            else:
                units = np.maximum(np.maximum(units, np.abs(exact)), self.least)
            units[units == 0] = 1.0
            yield np.abs(moved) / units

    def largest_error(self, found: NDArray[Any]) -> float:
        """Returns the largest of `errors`; 0 without entries."""
        return float(np.max([0.0, *(each.max(initial=0.0) for each in self.errors(found))]))

    def own(self, *references: NDArray[Any], borders: bool = False) -> NDArray[np.float64]:
        """Returns torch's error at each position `[positions]`, in units.

        All entries may share one error, for instance the error of a large channel, and in torch it
        may by chance be small: the worst position counts for all, up to 64 times the median, and a
        single position has a lower bound twice as large.

        `references` are the tensor in float32, and with the values at a border rounded the other
        way, where there are `borders` of integers.
        """
        levels, worst = np.zeros((2, len(references), len(self.exact)))
        for number, reference in enumerate(references):
            first = 0
            for errors in self.errors(reference):
                part = slice(first, first := first + len(errors))
                few = errors[:, :: -(-errors.shape[1] // SAMPLE)]
                levels[number, part] = ERRORS * quantile(few, 0.9)
                worst[number, part] = errors.max(axis=1)
        most = worst.max(axis=0, initial=0.0)
        own: NDArray[np.float64] = np.maximum(levels.max(axis=0, initial=0.0), most)
        crossed = (most > CROSSED) & borders
        if (calm := own[~crossed]).size:
            shared = np.minimum(calm.max(), SHARED * quantile(calm, 0.5))
            own[~crossed] = np.maximum(np.maximum(calm, shared), LEAST * (1 + 1 / len(own)))
        own[crossed] = np.maximum(most.max(initial=0.0), INT8_STEP)
        return own


def quantile(values: NDArray[Any], share: float, axis: int = -1) -> NDArray[np.float64]:
    """Returns a quantile, an entry itself: numpy's own takes ten times as long on small arrays."""
    place = int(share * (values.shape[axis] - 1) + 0.5)
    found: NDArray[np.float64] = np.partition(values, place, axis=axis).take(place, axis=axis)
    return found.astype(np.float64, copy=False)


def by_position(tensor: NDArray[Any], kept: NDArray[np.bool_] | None = None) -> NDArray[Any]:
    """Returns the kept positions of a tensor `[positions, channels]`."""
    if tensor.ndim == 4:
        tensor = np.moveaxis(tensor, 1, 2)
    channels = math.prod(tensor.shape[2:] if tensor.ndim == 4 else tensor.shape[-1:])
    entries = tensor.reshape(tensor.size // channels if channels else 0, channels)
    return entries if kept is None or kept.all() else entries[kept]
