"""How fast is one linear layer with weights in 32, 8 and 4 bits, with few rows and with many?

    python benchmarks/weight_bits.py [--inputs 2048] [--outputs 2048] [--rows 1,8,64] [--rounds 9]

One thread, interleaved rounds. The last line is JSON: for each number of rows the speed of each
kernel as a multiple of float32's.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnxruntime import InferenceSession, SessionOptions

from rounds import compare, interleaved
from transferry.export.rewrite.weight_blocks import BLOCK, blocks

MICROSOFT = "com.microsoft"
ROWS_PER_ROUND = 256


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--inputs", type=int, default=2048)
    parser.add_argument("--outputs", type=int, default=2048)
    parser.add_argument("--rows", default="1,8,64")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()

    random = np.random.default_rng(0)
    weight = random.standard_normal((arguments.outputs, arguments.inputs), np.float32)
    sessions = {
        "float32": _session(
            weight, [helper.make_node("Gemm", ["x", "w"], ["y"], transB=1)], w=weight
        ),
        "int4, level 1": _in_blocks(weight, 4, 1),
        "int4, level 4": _in_blocks(weight, 4, 4),
        "int4 variant's LM head": _in_blocks(weight, 8, 4),
        "int8": _in_int8(weight),
    }
    result = {}
    for rows in map(int, arguments.rows.split(",")):
        x = random.standard_normal((rows, arguments.inputs), np.float32)
        repeats = max(1, ROWS_PER_ROUND // rows)
        work = {name: partial(_run, each, x, repeats) for name, each in sessions.items()}
        for warm in work.values():
            warm()
        times = interleaved(work, arguments.rounds, quiet=True)
        same = dict.fromkeys(work, rows * repeats)
        result[f"{rows} rows"] = compare(times, same, rows, "float32")["ratio"]
        print(f"{rows} rows: {result[f'{rows} rows']}", flush=True)
    print(json.dumps(result))


def _in_blocks(weight: NDArray[np.float32], bits: int, level: int) -> InferenceSession:
    outputs, inputs = weight.shape
    found = blocks(weight, bits)
    sizes = {"N": outputs, "K": inputs, "bits": bits, "block_size": BLOCK}
    names = ["x", "w", "scales"]
    node = helper.make_node(
        "MatMulNBits", names, ["y"], domain=MICROSOFT, accuracy_level=level, **sizes
    )
    return _session(weight, [node], w=found.packed(), scales=found.scales)


def _in_int8(weight: NDArray[np.float32]) -> InferenceSession:
    """A product of integers, with the rounding of its input."""
    scales = np.abs(weight).max(axis=1) / np.float32(64)
    constants: dict[str, NDArray[Any]] = {
        "w": np.rint(weight / scales[:, None]).astype(np.int8).T.copy(),
        "x_scale": np.array(0.03, np.float32),
        "x_zero": np.array(128, np.uint8),
        "w_scales": scales,
    }
    names = ["q", "w", "x_scale", "w_scales", "x_zero"]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "x_scale", "x_zero"], ["q"]),
        helper.make_node("MatMulIntegerToFloat", names, ["y"], domain=MICROSOFT),
    ]
    return _session(weight, nodes, **constants)


def _session(
    weight: NDArray[np.float32], nodes: list[onnx.NodeProto], **constants: NDArray[Any]
) -> InferenceSession:
    outputs, inputs = weight.shape
    graph = helper.make_graph(
        nodes,
        "layer",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", inputs])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", outputs])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(MICROSOFT, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = SessionOptions()
    options.intra_op_num_threads = 1
    return InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _run(session: InferenceSession, x: NDArray[np.float32], repeats: int) -> None:
    feed: Mapping[str, NDArray[Any]] = {"x": x}
    for _ in range(repeats):
        session.run(None, feed)


if __name__ == "__main__":
    main()
