"""Graphs and inputs of sizes that do not fit are refused with a sentence: expected, found."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kernels.graphs import Operator, layer, norm, prefixed
from tests.kernels.test_attention import int8, self_attention
from transferry.runtime.ort.session import ONNXRUNTIME_ERRORS

RNG = np.random.default_rng(0)


def floats(*sizes: int) -> Any:
    return RNG.standard_normal(sizes).astype(np.float32)


def integers(*sizes: int) -> Any:
    return np.zeros(sizes, np.int64)


X = floats(6, 32)
LAYER = {"x": X, **layer(RNG, 32, 48)}
ATTENTION = self_attention(RNG, (2, 3, 10, 16, 2), single=False)
CACHE = {"past_keys": int8(RNG, 2, 3, 10, 16), "past_values": int8(RNG, 2, 3, 10, 16)}
SOUND: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "Linear": (LAYER, "x", {}),
    "LinearRank": ({**LAYER, "count": np.array([3])}, "x count", {}),
    "ExpSums": ({"logits": X}, "logits", {}),
    "LinearNorm": (
        {**LAYER, "residual": floats(6, 48), **norm(RNG, 48)},
        "x residual",
        {"epsilon": 1e-5},
    ),
    "FeedForward": (
        {
            "x": X,
            **prefixed("inner.", layer(RNG, 32, 64)),
            **prefixed("outer.", layer(RNG, 64, 32)),
            **norm(RNG, 32),
        },
        "x",
        {"epsilon": 1e-5},
    ),
    "LinearToHeads": ({**LAYER, "source": integers(2, 3)}, "x source", {"width": 16}),
    "SelfAttention": (ATTENTION, " ".join(ATTENTION), {"width": 16}),
    "CrossAttention": (
        {"x": floats(4, 48), **CACHE, "bias": floats(2, 1, 1, 10)},
        "x past_keys past_values bias",
        {"width": 16},
    ),
    "EncoderAttention": (
        {"q": X, "k": X, "v": X, "mask": np.ones((2, 3), bool)},
        "q k v mask",
        {"width": 16},
    ),
    "Embed": (
        {
            "ids": integers(2, 3),
            "positions": integers(2, 3),
            "table": int8(RNG, 50, 32),
            "scales": floats(50, 1),
            "factor": np.float32(2),
            "places": floats(9, 32),
        },
        "ids positions",
        {"counted": 0},
    ),
}
SATURATING = np.full((48, 32), 65, np.int8)


def replaced(array: Any, index: Any, value: int) -> Any:
    array = array.copy()
    array[index] = value
    return array


CASES: list[tuple[str, dict[str, Any], str]] = [
    ("Linear", {"x": floats(6, 16)}, "x of shape [?, 32], found [6, 16]"),
    ("Linear", {"x": floats(32)}, "x of shape [?, 32], found [32]"),
    ("Linear", {"x": floats(1, 2, 3, 4, 5)}, "x of shape [?, 32], found [1, 2, 3, 4, ...]"),
    ("Linear", {"x_scale": np.float32(0)}, "a positive scale x_scale, found 0"),
    ("Linear", {"x_scale": np.float32(np.nan)}, "a positive scale x_scale, found nan"),
    ("Linear", {"x_scale": np.float32(np.inf)}, "a positive scale x_scale, found inf"),
    ("Linear", {"x_scale": floats(2)}, "x_scale of shape [], found [2]"),
    ("Linear", {"x_zero": np.zeros(3, np.uint8)}, "x_zero of shape [], found [3]"),
    ("Linear", {"weight": int8(RNG, 48)}, "weight of shape [?, ?], found [48]"),
    ("Linear", {"weight": int8(RNG, 48, 24)}, "the inputs of weight to be a multiple of 16"),
    ("Linear", {"weight": int8(RNG, 1, 65552)}, "a multiple of 16 up to 65536, found 65552"),
    ("Linear", {"weight": SATURATING}, "neighbouring weights whose sum is -128 to 128"),
    ("Linear", {"scale": floats(2)}, "scale of shape [], found [2]"),
    ("Linear", {"scales": floats(47)}, "scales of shape [48], found [47]"),
    ("Linear", {"bias": floats(1)}, "bias of shape [48], found [1]"),
    ("LinearRank", {"count": np.array([0])}, "a count from 1 to 48, found 0"),
    ("LinearRank", {"count": np.array([49])}, "a count from 1 to 48, found 49"),
    ("LinearRank", {"count": integers(2)}, "the count of shape [], found [2]"),
    ("ExpSums", {"logits": floats(32)}, "the logits of shape [?, ?], found [32]"),
    ("LinearNorm", {"residual": floats(5, 48)}, "the residual of shape [6, 48], found [5, 48]"),
    ("LinearNorm", {"gamma": floats(47)}, "gamma of shape [48], found [47]"),
    ("LinearNorm", {"beta": floats(49)}, "beta of shape [48], found [49]"),
    ("LinearNorm", layer(RNG, 32, 20), "the width of LayerNormalization to be a multiple of 16"),
    ("FeedForward", prefixed("outer.", layer(RNG, 48, 32)), "32 inputs and 64 outputs"),
    (
        "FeedForward",
        {**prefixed("outer.", layer(RNG, 64, 48)), **norm(RNG, 48)},
        "64 outputs, found 64 and 48",
    ),
    ("LinearToHeads", {"width": 24}, "the heads' width to be a multiple of 16 up to 256, found 24"),
    ("LinearToHeads", {"width": 272}, "found 272"),
    ("LinearToHeads", {"width": -16}, "found -16"),
    ("LinearToHeads", {"width": 32}, "outputs in heads of 32, found 48"),
    ("LinearToHeads", {"source": integers(2, 4)}, "x of shape [8, 32], found [6, 32]"),
    ("LinearToHeads", {"source": integers(6)}, "the source of shape [?, ?], found [6]"),
    ("SelfAttention", {"width": 32}, "the keys of shape [?, ?, ?, 32], found [2, 3, 10, 16]"),
    ("SelfAttention", {"past_values": int8(RNG, 2, 3, 9, 16)}, "the values of shape [2, 3, 10, 16"),
    ("SelfAttention", {"positions": integers(3, 2)}, "the positions of shape [2, ?], found [3, 2]"),
    ("SelfAttention", {"x": floats(4, 96)}, "x of shape [4, 144], found [4, 96]"),
    ("SelfAttention", {"x": floats(3, 144)}, "x of shape [4, 144], found [3, 144]"),
    ("SelfAttention", {"cells": integers(2, 2, 1, 3)}, "the cells of shape [2, 2, 3, 3], found"),
    ("SelfAttention", {"bias": floats(2, 1, 1, 10)}, "the bias of shape [2, 1, 2, 10], found"),
    ("SelfAttention", {"single": np.ones(2, bool)}, "single of shape [], found [2]"),
    ("SelfAttention", {"single": np.array(True)}, "one token in each slot"),
    (
        "SelfAttention",
        {"cells": replaced(ATTENTION["cells"], (1, 1, 2, 2), 10)},
        "columns below 10, found 10",
    ),
    (
        "SelfAttention",
        {"cells": replaced(ATTENTION["cells"], (0, 0, 0, 2), -1)},
        "columns below 10, found -1",
    ),
    (
        "SelfAttention",
        {"cells": replaced(ATTENTION["cells"], (0, 0, 0, 0), 1)},
        "cells in the order of slots and heads",
    ),
    (
        "SelfAttention",
        {"x": floats(2, 144), "positions": integers(2, 1) + 10, "single": np.array(True)},
        "columns below 10, found 10",
    ),
    ("CrossAttention", {"x": floats(3, 48)}, "as many rows for each of 2 slots, found 3"),
    ("CrossAttention", {"x": floats(4, 32)}, "x of shape [?, 48], found [4, 32]"),
    (
        "CrossAttention",
        {"past_values": int8(RNG, 1, 3, 10, 16)},
        "the values of shape [2, 3, 10, 16]",
    ),
    ("CrossAttention", {"bias": floats(2, 1, 1, 9)}, "the source's bias of shape [2, 1, 1, 10]"),
    ("CrossAttention", {"bias": floats(2, 1, 4, 10)}, "found [2, 1, 4, 10]"),
    (
        "CrossAttention",
        {
            "past_keys": int8(RNG, 2, 3, 0, 16),
            "past_values": int8(RNG, 2, 3, 0, 16),
            "bias": floats(2, 1, 1, 0),
        },
        "keys of one source token or more",
    ),
    ("EncoderAttention", {"mask": np.ones((2, 4), bool)}, "the queries of shape [8, ?], found [6"),
    ("EncoderAttention", {"width": 64}, "queries in heads of 64, found 32"),
    ("EncoderAttention", {"k": floats(6, 16)}, "the keys of shape [6, 32], found [6, 16]"),
    ("EncoderAttention", {"v": floats(5, 32)}, "the values of shape [6, 32], found [5, 32]"),
    ("Embed", {"ids": integers(2, 3) + 50}, "tokens below 50, found 50"),
    ("Embed", {"ids": integers(2, 3) - 1}, "tokens below 50, found -1"),
    ("Embed", {"ids": integers(6)}, "the ids of shape [?, ?], found [6]"),
    ("Embed", {"positions": integers(2, 3) + 9}, "positions below 9, found 9"),
    ("Embed", {"positions": integers(2, 4)}, "the positions of shape [2, 3], found [2, 4]"),
    ("Embed", {"ids": integers(1, 10), "counted": 1}, "positions below 9, found 9"),
    ("Embed", {"table": int8(RNG, 50, 24)}, "the width of table to be a multiple of 16"),
    ("Embed", {"scales": floats(50)}, "scales of shape [50, 1], found [50]"),
    ("Embed", {"places": floats(9, 16)}, "places of shape [9, 32], found [9, 16]"),
    ("Embed", {"factor": floats(2)}, "factor of shape [], found [2]"),
]


def failure(library: Path, kind: str, changes: dict[str, Any]) -> str:
    """The library's words about an operator with changed inputs or attributes."""
    values, given, attributes = SOUND[kind]
    attributes = {name: changes.get(name, value) for name, value in attributes.items()}
    values = {name: changes.get(name, value) for name, value in values.items()}
    with pytest.raises(ONNXRUNTIME_ERRORS) as error:
        Operator(library, kind, values, given, **attributes)(values)
    found = re.search(rf"transferry\.kernels {kind}: (expected .*)", str(error.value))
    assert found, str(error.value)
    return found[1]


@pytest.mark.parametrize("kind", SOUND)
def test_the_sound_graphs_run(library: Path, kind: str) -> None:
    values, given, attributes = SOUND[kind]
    Operator(library, kind, values, given, **attributes)(values)


@pytest.mark.parametrize(("kind", "changes", "found"), CASES)
def test_sizes_that_do_not_fit(
    libraries: dict[str, Path], kind: str, changes: dict[str, Any], found: str
) -> None:
    assert found in failure(libraries["AVX2"], kind, changes)


@pytest.mark.parametrize("name", [name for name in LAYER if name != "x"])
def test_a_layer_has_constants(libraries: dict[str, Path], name: str) -> None:
    with pytest.raises(ONNXRUNTIME_ERRORS, match=rf"a constant, found the computed value {name}"):
        Operator(libraries["AVX2"], "Linear", LAYER, f"x {name}")
