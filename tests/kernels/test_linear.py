"""Linear layers and the operators that continue them, to the bit."""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from tests.kernels.graphs import (
    Array,
    Operator,
    layer,
    norm,
    normalised,
    prefixed,
    product,
    quantised,
)

EPSILON = 1e-5
EXACT = [
    *((1, 16, 1, 0), (70, 48, 37, 117), (6, 16, 64, 255), (13, 272, 513, 3), (0, 32, 16, 128)),
    *((7, 64, 100, 0), (17, 128, 31, 117), (33, 64, 200, 255), (49, 192, 129, 9)),  # AMX's tiles
]
SIZES = st.tuples(
    st.integers(1, 70),
    st.integers(1, 20).map(lambda n: 16 * n),
    st.integers(1, 700),
    st.integers(0, 255),
)


def examples(test: Any) -> Any:
    """Tries the sizes of EXACT, and drawn ones."""
    for sizes in EXACT:
        test = example(sizes=sizes)(test)
    return given(sizes=SIZES)(test)


def drawn(sizes: tuple[int, int, int, int]) -> tuple[np.random.Generator, Array]:
    """Numbers of these sizes, and x, some of whose values are clamped."""
    rng = np.random.default_rng(sum(sizes))
    return rng, (2 * rng.standard_normal(sizes[:2])).astype(np.float32)


def same(found: Array, expected: Array) -> None:
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


@examples
def test_a_linear_layer_has_the_bits_of_numpy(
    library: Path, sizes: tuple[int, int, int, int]
) -> None:
    rng, x = drawn(sizes)
    for bias in (True, False):
        values = {"x": x, **layer(rng, sizes[1], sizes[2], bias=bias, zero=sizes[3])}
        q = quantised(x, values)
        y, integers = Operator(library, "Linear", values, "x")(values)
        same(integers, q)
        same(y, product(q, values))
        (alone,) = Operator(library, "Linear", values, "x", "y")(values)
        same(alone, y)


@examples
def test_a_linear_layer_is_normalised_with_its_residual(
    library: Path, sizes: tuple[int, int, int, int]
) -> None:
    rng, x = drawn(sizes)
    outputs = (sizes[2] + 15) // 16 * 16
    values = {"x": x, **layer(rng, sizes[1], outputs, zero=sizes[3])}
    values |= {"residual": rng.standard_normal((len(x), outputs)).astype(np.float32)}
    values |= norm(rng, outputs)
    q = quantised(x, values)
    y, integers = Operator(library, "LinearNorm", values, "x residual", epsilon=EPSILON)(values)
    same(integers, q)
    expected = normalised(product(q, values) + values["residual"], values, EPSILON)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    short = Operator(library, "LinearNorm", values, "x residual", "y", epsilon=EPSILON)
    same(short(values)[0], y)


@examples
def test_a_feed_forward_layer_shows_its_hidden_integers(
    library: Path, sizes: tuple[int, int, int, int]
) -> None:
    rng, x = drawn(sizes)
    width, inner = sizes[1], (sizes[2] + 15) // 16 * 16
    values = {"x": x, **prefixed("inner.", layer(rng, width, inner, zero=sizes[3]))}
    values |= prefixed("outer.", layer(rng, inner, width, zero=0))  # ReLU
    values |= norm(rng, width)
    q = quantised(x, values, "inner.")
    hidden = product(q, values, "inner.")
    r = quantised(hidden, values, "outer.")
    whole = Operator(library, "FeedForward", values, "x", epsilon=EPSILON)
    y, *shown = whole(values)
    for found, expected in zip(shown, (q, hidden, r), strict=True):
        same(found, expected)
    expected = normalised(product(r, values, "outer.") + x, values, EPSILON)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    for outputs in ("y", "y integers", "y hidden", "y inner"):
        part = Operator(library, "FeedForward", values, "x", outputs, epsilon=EPSILON)
        same(part(values)[0], y)


@pytest.mark.parametrize("width", [16, 64, 256])
def test_a_linear_layer_is_rounded_to_heads(library: Path, width: int) -> None:
    rng, x = drawn((3 * 5, 32, width, 9))
    values = {"x": x, **layer(rng, 32, 3 * width)}
    values["scales"] *= np.float32(400)  # some outputs are clamped
    values["source"] = np.zeros((3, 5), np.int64)
    q = quantised(x, values)
    heads, integers = Operator(library, "LinearToHeads", values, "x source", width=width)(values)
    same(integers, q)
    rounded = np.clip(np.rint(product(q, values)), -128, 127).astype(np.int8)
    assert {-128, 127} <= set(rounded.flat)
    same(heads, rounded.reshape(3, 5, 3, width).transpose(0, 2, 1, 3))
    (alone,) = Operator(library, "LinearToHeads", values, "x source", "heads", width=width)(values)
    same(alone, heads)


@pytest.mark.parametrize(
    "scale",
    [0.021, 2.0**-6, 1 / 3, float(np.nextafter(np.float32(2), np.float32(0))), 1e-25, 1e25, 1e-42],
)
def test_every_float_is_quantised_as_onnxruntime_does(library: Path, scale: float) -> None:
    rng = np.random.default_rng(0)
    patterns = rng.integers(0, 1 << 32, 1 << 14, dtype=np.uint32).view(np.float32)
    values: dict[str, Any] = {**layer(rng, 16, 16), "x_scale": np.float32(scale)}
    halves = (np.arange(-300, 300, dtype=np.float32) + 0.5) * values["x_scale"]
    above, below = (np.nextafter(halves, np.float32(end)) for end in (np.inf, -np.inf))
    odd = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, 3e38], np.float32)
    x = np.concatenate([patterns, halves, above, below, odd])[:, None].repeat(16, axis=1)
    node = helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"])
    types = {"x": TensorProto.FLOAT, "scale": TensorProto.FLOAT, "zero": TensorProto.UINT8}
    inputs = [helper.make_tensor_value_info(name, kind, None) for name, kind in types.items()]
    output = helper.make_tensor_value_info("q", TensorProto.UINT8, None)
    graph = helper.make_graph([node], "quantise", inputs, [output])
    opset = [helper.make_opsetid("", 21)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=10).SerializeToString()
    theirs = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    given = {"x": x, "scale": values["x_scale"], "zero": values["x_zero"]}
    given = {name: np.asarray(value) for name, value in given.items()}
    values = {"x": x, **values}
    same(Operator(library, "Linear", values, "x")(values)[1], theirs.run(None, given)[0])
