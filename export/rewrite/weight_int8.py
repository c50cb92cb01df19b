"""Quantisation of weights to int8."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

LARGEST = 127
# onnxruntime's kernels for CPUs without VNNI add two neighbouring products uint8 * int8 in 16 bits
# and saturate (microsoft/onnxruntime#12088). 255 * 128 still fits.
LARGEST_PAIR = 128
# Weights that are rounded at once. The arithmetic in float64 takes 40 bytes for each: of a whole
# embedding more than the rest of the model.
BLOCK = 1 << 20


def quantised(
    weight: NDArray[np.float32], *, pairs: bool = True, wide: Sequence[int] = ()
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Rounds each row to int8, symmetrically: `weight` is about `scales[:, None] * integers`.

    The scale is the finest at which no integer leaves -127..127 and no two neighbours of a row,
    2i and 2i + 1, sum to more than 128 in size: then the product with any uint8 is exact on every
    CPU. Halving the range (-64..64) would be as safe but coarser.

    Args:
        weight: `[outputs, inputs]`
        pairs: Limit the sum of neighbours too; without, the product must be of floats.
        wide: Inputs that are multiplied in float32, whose integers are 0.

    Returns:
        Integers `[outputs, inputs]` int8, and scales `[outputs]`; scale 1 for a row of zeros.
    """
    outputs, inputs = weight.shape
    if wide:
        weight = weight.copy()
        weight[:, list(wide)] = 0
    integers, scales = np.empty((outputs, inputs), np.int8), np.empty(outputs, np.float32)
    rows = max(1, BLOCK // max(1, inputs))
    for first in range(0, outputs, rows):
        block = slice(first, first + rows)
        integers[block], scales[block] = _quantised(weight[block], pairs)
    return integers, scales


def _quantised(
    weight: NDArray[np.float32], limits_pairs: bool
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    outputs, inputs = weight.shape
    pairs = np.zeros((outputs, -(-inputs // 2), 2), np.float64)
    pairs.reshape(outputs, -1)[:, :inputs] = weight
    scales = np.abs(pairs).max(axis=(1, 2)) / LARGEST
    if limits_pairs:
        # Rounding adds at most one half to each of the two.
        double = np.abs(pairs.sum(axis=2)).max(axis=1) / (LARGEST_PAIR - 1)
        scales = np.maximum(scales, double)
    scales = np.where(scales > 0, scales, 1).astype(np.float32)
    integers = np.rint(weight / scales[:, None].astype(np.float64))
    return np.clip(integers, -LARGEST, LARGEST).astype(np.int8), scales
