"""Weights in int8: rounding errors, and exact products on kernels that add pairs in int16."""

import numpy as np
import pytest
from numpy.typing import NDArray

from transferry.export.rewrite.rounded_weights import quantised


def saturated(activations: NDArray[np.uint8], weights: NDArray[np.int8]) -> NDArray[np.int64]:
    """Products on x86 without VNNI: vpmaddubsw adds neighbours in int16 and saturates."""
    products = activations.astype(np.int64) * weights
    pairs = products.reshape(*products.shape[:-1], -1, 2).sum(axis=-1)
    sums: NDArray[np.int64] = np.clip(pairs, -(2**15), 2**15 - 1).sum(axis=-1)
    return sums


@pytest.mark.parametrize("inputs", [1, 2, 7, 64])
def test_weights_are_rounded_to_the_nearest_step(inputs: int) -> None:
    weight = np.random.default_rng(0).standard_normal((50, inputs)).astype(np.float32)
    integers, scales = quantised(weight)
    assert integers.dtype == np.int8
    assert scales.dtype == np.float32
    assert np.abs(integers.astype(int)).max() <= 127
    error = np.abs(weight - integers * scales[:, None].astype(np.float64))
    assert (error <= scales[:, None] * 0.50001).all()


def test_the_scale_is_the_finest_that_fits() -> None:
    """A row of zeros has scale 1."""
    weight = np.array([[0.5, -1.0, 0.25, 0.0], [1.0, 1.0, 0.0, 0.0], [0.0] * 4], np.float32)
    integers, scales = quantised(weight)
    assert scales.tolist() == [np.float32(1 / 127), np.float32(2 / 127), 1]
    assert integers.tolist() == [[64, -127, 32, 0], [64, 64, 0, 0], [0] * 4]


def test_no_pair_of_products_saturates() -> None:
    weight = np.random.default_rng(1).standard_normal((200, 64)).astype(np.float32)
    weight[:50] = np.abs(weight[:50])
    weight[50] = 1.0
    integers, _ = quantised(weight)
    plain = np.rint(weight * 127 / np.abs(weight).max(axis=1, keepdims=True)).astype(np.int8)
    lost = 0
    for activations in (integers > 0, integers < 0):
        worst = np.where(activations, 255, 0).astype(np.uint8)
        exact = (worst.astype(np.int64) * integers).sum(axis=1)
        assert saturated(worst, integers).tolist() == exact.tolist()
        lost += (saturated(worst, plain) != (worst.astype(np.int64) * plain).sum(axis=1)).sum()
    assert lost > 100
