"""Matrix products of a model: their number, and how fast the machine can do them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnxruntime import InferenceSession, OrtValue

from transferry.build_model.model.config import ModelConfig
from transferry.runtime.ort.session import SessionOptions, open_session

# Counts of matrices by shape `[in, out]`.
Shapes = Counter[tuple[int, int]]

MICROSOFT = "com.microsoft"
OPSET = 20
BEST_OF_SECONDS = 0.3


def matrices(config: ModelConfig) -> dict[str, Shapes]:
    """Counts the matrices of an encoder-decoder that multiply every token.

    Matrices of the same input count as one: query, key and value, and cross keys and values.
    Products of two activations, as in attention, are left out.

    Returns:
        "source": per source token, the cross keys and values of the decoder included;
        "target": per token that the decoder reads, the LM head included.
    """
    d_model, d_ff = config.d_model, config.d_ff
    narrow = config.kv_heads * config.d_head
    glu = config.activation == "swiglu"
    attention = [(d_model, d_model + 2 * narrow), (d_model, d_model)]
    cross_attention = [(d_model, d_model)] * 2
    feed_forward = [(d_model, d_ff)] * (2 if glu else 1) + [(d_ff, d_model)]
    source, target = Shapes(), Shapes()
    for shape in attention + feed_forward:
        source[shape] += config.encoder_layers
    source[d_model, 2 * narrow] += config.decoder_layers
    for shape in attention + cross_attention + feed_forward:
        target[shape] += config.decoder_layers
    if config.output_transform:
        target[d_model, d_model] += 1
    target[d_model, config.vocabulary_size] += 1
    return {"source": source, "target": target}


def multiply_adds(shapes: Shapes) -> int:
    """Multiply-adds of one token."""
    return sum(inner * outer * count for (inner, outer), count in shapes.items())


def least_seconds(shapes: Shapes, rows: int, precision: str, folder: Path) -> float:
    """Measures how long onnxruntime takes for the products of a token alone.

    Args:
        shapes: The matrices.
        rows: Tokens per product.
        precision: "float32" or "int8".
        folder: Folder for the graphs.

    Returns:
        Seconds per token on one thread. Of many runs of a product the fastest counts, since other
        work on the machine only slows it down.
    """
    total = 0.0
    for (inner, outer), count in shapes.items():
        path = folder / f"{inner}x{outer}.onnx"
        onnx.save(_product(rows, inner, outer, precision), path)
        total += count * _fastest(open_session(path, SessionOptions()), rows, inner, outer)
    return total / rows


def _product(rows: int, inner: int, outer: int, precision: str) -> onnx.ModelProto:
    """Graph of one product with a constant matrix; int8 inputs as from QuantizeLinear."""
    random = np.random.default_rng(0)
    if precision == "float32":
        constants: Mapping[str, NDArray[Any]] = {
            "b": random.standard_normal((inner, outer), np.float32),
            "c": np.zeros(outer, np.float32),
        }
        element, node = TensorProto.FLOAT, helper.make_node("Gemm", ["a", *constants], ["y"])
    else:
        constants = {
            "b": random.integers(-127, 128, (inner, outer), np.int8),
            "a_scale": np.array(0.1, np.float32),
            "b_scale": np.full(outer, 0.1, np.float32),
            "a_zero_point": np.array(128, np.uint8),
        }
        element = TensorProto.UINT8
        names = ["a", *constants]
        node = helper.make_node("MatMulIntegerToFloat", names, ["y"], domain=MICROSOFT)
    graph = helper.make_graph(
        [node],
        "product",
        [helper.make_tensor_value_info("a", element, [rows, inner])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [rows, outer])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)]
    # A fixed IR version, because onnxruntime may refuse that of a newer onnx.
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _fastest(session: InferenceSession, rows: int, inner: int, outer: int) -> float:
    element = np.float32 if session.get_inputs()[0].type == "tensor(float)" else np.uint8
    binding = session.io_binding()
    random = np.random.default_rng(1).integers(0, 256, (rows, inner)).astype(element)
    binding.bind_ortvalue_input("a", OrtValue.ortvalue_from_numpy(random))
    result = OrtValue.ortvalue_from_numpy(np.empty((rows, outer), np.float32))
    binding.bind_ortvalue_output("y", result)
    best, end = float("inf"), time.perf_counter() + BEST_OF_SECONDS
    while (started := time.perf_counter()) < end:
        session.run_with_iobinding(binding)
        best = min(best, time.perf_counter() - started)
    return best
