"""Attention over the int8 cache and in an encoder, and embeddings, against float64."""

from pathlib import Path

import numpy as np
import pytest

from tests.kernels.graphs import Array, Operator, Values, attended

# Slots, heads, columns, width, rows of a slot.
SIZES = [
    *((1, 1, 1, 16, 1), (2, 3, 17, 16, 1), (3, 2, 70, 64, 4)),
    *((1, 2, 16, 256, 3), (2, 4, 33, 32, 2), (5, 1, 64, 48, 1)),
]


def close(found: Array, expected: Array, values: Array) -> None:
    """Within the error of float32, for averages of values."""
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.abs(values).max())


def int8(rng: np.random.Generator, *sizes: int) -> Array:
    return rng.integers(-128, 128, sizes).astype(np.int8)


def joined(x: Array) -> Array:
    """[slots, heads, rows, width] as a matrix of rows."""
    slots, heads, rows, width = x.shape
    return x.transpose(0, 2, 1, 3).reshape(slots * rows, heads * width)


def self_attention(
    rng: np.random.Generator, sizes: tuple[int, int, int, int, int], single: bool
) -> Values:
    """Inputs of SelfAttention: tokens at drawn columns, each sees some columns and its own."""
    slots, heads, columns, width, rows = sizes
    d = heads * width
    x = 0.02 * rng.standard_normal((slots * rows, 3 * d))
    x[:, d:] *= 4000  # keys and values are rounded to int8, some clamped
    own = np.stack([rng.permutation(columns)[:rows] for _ in range(slots)])
    seen = rng.random((slots, rows, columns)) < 0.5
    if single:
        seen = np.arange(columns) <= own[:, :, None]
    np.put_along_axis(seen, own[:, :, None], True, axis=2)
    cells = np.empty((slots, rows, heads, 3), np.int64)
    cells[..., 0] = np.arange(slots)[:, None, None]
    cells[..., 1] = np.arange(heads)
    cells[..., 2] = own[:, :, None]
    return {
        "x": x.astype(np.float32),
        "past_keys": int8(rng, slots, heads, columns, width),
        "past_values": int8(rng, slots, heads, columns, width),
        "positions": own,
        "cells": cells,
        "bias": np.where(seen, 0, -np.inf).astype(np.float32)[:, None],
        "single": np.array(single),
    }


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_self_attention_writes_its_cells_and_attends(
    library: Path, sizes: tuple[int, int, int, int, int], single: bool
) -> None:
    slots, heads, columns, width, rows = sizes
    if single:
        rows = 1
    rng = np.random.default_rng(sum(sizes))
    values = self_attention(rng, (slots, heads, columns, width, rows), single)
    y, keys, cached = Operator(library, "SelfAttention", values, " ".join(values), width=width)(
        values
    )
    x = values["x"].reshape(slots, rows, 3, heads, width).transpose(2, 0, 3, 1, 4)
    slot, head = np.arange(slots)[:, None, None], np.arange(heads)[:, None]
    for past, new, present in (("past_keys", x[1], keys), ("past_values", x[2], cached)):
        expected = values[past].copy()
        rounded = np.clip(np.rint(new), -128, 127)
        expected[slot, head, values["positions"][:, None]] = rounded
        np.testing.assert_array_equal(present, expected)
    close(y, joined(attended(x[0], keys, cached, values["bias"])), cached)
    if single:  # has the bits of the mask that hides later columns
        several = {**values, "single": np.array(False)}
        again = Operator(library, "SelfAttention", several, " ".join(values), width=width)(several)
        for one, other in zip((y, keys, cached), again, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_cross_attention_skips_padding(
    library: Path, sizes: tuple[int, int, int, int, int]
) -> None:
    slots, heads, columns, width, rows = sizes
    rng = np.random.default_rng(sum(sizes))
    bias = np.where(rng.random((slots, 1, 1, columns)) < 0.3, -np.inf, 0).astype(np.float32)
    bias[..., 0] = 0
    bias[0, ..., columns // 2 + 1 :] = -np.inf
    x = (0.02 * rng.standard_normal((slots * rows, heads * width))).astype(np.float32)
    shape = (slots, heads, columns, width)
    values = {"x": x, "past_keys": int8(rng, *shape), "past_values": int8(rng, *shape)}
    values["bias"] = bias
    y, keys, kept = Operator(library, "CrossAttention", values, " ".join(values), width=width)(
        values
    )
    np.testing.assert_array_equal(keys, values["past_keys"])
    np.testing.assert_array_equal(kept, values["past_values"])
    query = x.reshape(slots, rows, heads, width).swapaxes(1, 2)
    close(y, joined(attended(query, keys, kept, bias)), kept)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_an_encoder_attends_to_its_source(
    library: Path, sizes: tuple[int, int, int, int, int]
) -> None:
    batch, heads, length, width, _ = sizes
    rng = np.random.default_rng(sum(sizes))
    mask = rng.random((batch, length)) < 0.7
    mask[:, length // 2] = True
    matrices = rng.standard_normal((3, batch * length, heads * width)).astype(np.float32)
    values: Values = dict(zip(("q", "k", "v"), matrices, strict=True))
    values["mask"] = mask
    (y,) = Operator(library, "EncoderAttention", values, " ".join(values), width=width)(values)
    query, key, value = matrices.reshape(3, batch, length, heads, width).swapaxes(2, 3)
    bias = np.where(mask, 0, -np.inf)[:, None, None]
    close(y, joined(attended(query, key, value, bias)), value)


@pytest.mark.parametrize("counted", [0, 1])
@pytest.mark.parametrize("sizes", [(1, 1, 16), (3, 7, 48), (0, 5, 16)], ids=str)
def test_tokens_and_positions_are_embedded(
    library: Path, sizes: tuple[int, int, int], counted: int
) -> None:
    rng = np.random.default_rng(0)
    values: Values = {
        "ids": rng.integers(0, 50, sizes[:2]),
        "positions": rng.integers(0, 9, sizes[:2]),
        "table": int8(rng, 50, sizes[2]),
        "scales": rng.uniform(0.01, 0.02, (50, 1)).astype(np.float32),
        "factor": np.float32(7.1),
        "places": rng.standard_normal((9, sizes[2])).astype(np.float32),
    }
    (y,) = Operator(library, "Embed", values, "ids positions", counted=counted)(values)
    positions = values["positions"]
    if counted:
        positions = np.broadcast_to(np.arange(sizes[1]), sizes[:2])
    scaled = values["table"][values["ids"]].astype(np.float32) * values["scales"][values["ids"]]
    expected = scaled * values["factor"] + values["places"][positions]
    np.testing.assert_array_equal(y, expected.reshape(-1, sizes[2]))


def test_a_query_of_nan_has_answers_of_nan(library: Path) -> None:
    values = self_attention(np.random.default_rng(0), (2, 2, 40, 16, 3), single=False)
    operator = Operator(library, "SelfAttention", values, " ".join(values), width=16)
    clean = operator(values)[0]
    values["x"][1, 5] = np.nan
    y = operator(values)[0]
    assert np.isnan(y[1, :16]).all()
    y[1, :16] = clean[1, :16]
    np.testing.assert_array_equal(y, clean)
