"""Weights in blocks of 32, each with a scale of its own: 4 bits, or 8 where tokens are chosen.

The layout of MatMulNBits (onnxruntime, ContribOperators.md), symmetric: an integer q of b
bits stands for (q - 2^(b-1)) s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import nn

from transferry.build_model.model.transformer import Transformer

# The one length with which a row of a product is the same in a batch of any size; with 64, rows of
# odd batches differ in the last bits.
BLOCK = 32
# 4 bits in the last product and in lookups change tokens (microsoft/onnxruntime#29849); 8 bits
# cost little there, since the layers hold most weights.
WIDE = ("embedding.weight", "source_embedding.weight", "output.weight")


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
    scales[scales == 0] = 1
    integers = np.clip(np.rint(padded / scales), -half, half - 1).astype(np.int8)
    return Blocks(integers, scales[..., 0], inputs, bits)


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
