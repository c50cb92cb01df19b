"""Weights rounded to integers: rows to int8, or blocks of 32 to 4 or 8 bits.

The blocks have the layout of MatMulNBits (onnxruntime, ContribOperators.md), symmetric: an integer
q of b bits stands for (q - 2^(b-1)) s. Where tokens are chosen, 8 bits stand for 4.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import nn

from transferry.build_model.model.transformer import Transformer

LARGEST = 127
# onnxruntime's kernels for CPUs without VNNI add two neighbouring products uint8 * int8 in 16 bits
# and saturate (microsoft/onnxruntime#12088). 255 * 128 still fits.
LARGEST_PAIR = 128
# Weights that are rounded at once. The arithmetic in float64 takes 40 bytes for each: of a whole
# embedding more than the rest of the model.
AT_ONCE = 1 << 20
# The one length with which a row of a product is the same in a batch of any size; with 64, rows of
# odd batches differ in the last bits.
BLOCK = 32
# 4 bits in the last product and in lookups change tokens (microsoft/onnxruntime#29849); 8 bits
# cost little there, since the layers hold most weights.
WIDE = ("embedding.weight", "source_embedding.weight", "output.weight")


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
    rows = max(1, AT_ONCE // max(1, inputs))
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
    single = np.where(scales > 0, scales, 1).astype(np.float32)
    integers = np.rint(weight / single[:, None].astype(np.float64))
    return np.clip(integers, -LARGEST, LARGEST).astype(np.int8), single


@dataclass(frozen=True)
class Blocks:
    """A weight `[outputs, inputs]` in blocks; the last one is filled up with zeros.

    Attributes:
        integers: `[outputs, blocks, 32]` int8, from -2^(bits-1) to 2^(bits-1) - 1.
        scales: `[outputs, blocks]` float32.
        inputs: Number of inputs.
        bits: 4 or 8.
    """

    integers: NDArray[np.int8]
    scales: NDArray[np.float32]
    inputs: int
    bits: int

    def packed(self) -> NDArray[np.uint8]:
        """Returns the bytes of MatMulNBits `[outputs, blocks, 4 * bits]`, the first one lowest."""
        unsigned = (self.integers.astype(np.int16) + (1 << (self.bits - 1))).astype(np.uint8)
        if self.bits == 8:
            return unsigned
        return (unsigned[..., 0::2] | unsigned[..., 1::2] << 4).astype(np.uint8)


def bits_of(name: str, bits: int) -> int:
    """Returns the bits of a weight by torch's name, given those of most."""
    return 8 if name in WIDE else bits


def blocks(weight: NDArray[np.float32], bits: int) -> Blocks:
    """Rounds a weight `[outputs, inputs]` to integers in blocks.

    The value of largest size in a block becomes -2^(bits-1): the side with one integer more.
    """
    outputs, inputs = weight.shape
    count = math.ceil(inputs / BLOCK)
    padded = np.zeros((outputs, count, BLOCK), np.float32)
    padded.reshape(outputs, -1)[:, :inputs] = weight
    places = np.abs(padded).argmax(axis=2)[..., None]
    half = 1 << (bits - 1)
    scales = (np.take_along_axis(padded, places, 2) / np.float32(-half)).astype(np.float32)
    # Of zeros the scale is 0: kernels subtract the offset after summing, which rounds.
    zeros = scales == 0
    integers = np.clip(np.rint(padded / np.where(zeros, 1, scales)), -half, half - 1)
    scales[zeros] = 0.0  # not -0.0
    return Blocks(integers.astype(np.int8), scales[..., 0], inputs, bits)


def matrices(model: Transformer) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yields the weights of linear layers and embeddings `[outputs, inputs]`, by name."""
    for name, parameter in model.named_parameters():
        layer, _, part = name.rpartition(".")
        linear = part == "weight" and isinstance(model.get_submodule(layer), nn.Linear)
        if linear or name in WIDE:
            yield name, parameter.detach().float().cpu().numpy()


def block_weights(model: Transformer, bits: int) -> Iterator[tuple[str, Blocks]]:
    """Yields the weights that a variant stores in blocks, by name; for `bits` see `bits_of`."""
    for name, weight in matrices(model):
        yield name, blocks(weight, bits_of(name, bits))
