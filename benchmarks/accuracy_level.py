"""Tokens that MatMulNBits picks at each accuracy level, beside float32 with the same weights.

    python benchmarks/accuracy_level.py int4/model.onnx tokenizer.json captions.txt

The reference is the same graph with each MatMulNBits replaced by MatMul with the weights of 4 bits
as float32, so that rounding of activations is all that differs. Every row of text is run alone and
whole; a wrong token is a position whose largest logit is another one than the reference's. Its
margin is how far the reference puts the chosen token below its own, in nats. Needs tokenizers.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from integer_rounding import LONGEST, answers

OPERATOR = "MatMulNBits"
LEVELS = (0, 1, 4)  # as the kernel decides, float32, int8
NEAR_TIE = 0.05  # nats


def main() -> None:
    """Prints a line for each accuracy level, and the same as JSON in the last line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("graph", "tokenizer", "text"):
        parser.add_argument(name, type=Path)
    given = parser.parse_args()
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(given.tokenizer))
    lines = given.text.read_text(encoding="utf-8").splitlines()
    texts = [tokenizer.encode(line).ids[:LONGEST] for line in lines]
    model = onnx.load(given.graph)
    exact = np.concatenate(answers(float32(model), texts))
    ranked = np.sort(exact, axis=-1)
    close = ranked[:, -1] - ranked[:, -2] < NEAR_TIE
    record: dict[str, Any] = {"positions": len(exact), "near ties": int(close.sum())}
    for level in LEVELS:
        found = np.concatenate(answers(at_level(model, level), texts))
        chosen = found.argmax(-1)
        margins = ranked[:, -1] - np.take_along_axis(exact, chosen[:, None], 1)[:, 0]
        wrong = chosen != exact.argmax(-1)
        record[f"level {level}"] = {
            "wrong tokens": int(wrong.sum()),
            "of near ties": int((wrong & close).sum()),
            "largest margin": float(margins.max()),
            "largest difference": float(np.abs(found - exact).max()),
            "largest logit": float(np.abs(exact).max()),
        }
    for name, numbers in record.items():
        print(f"{name:12}", numbers)
    print(json.dumps(record))


def at_level(model: onnx.ModelProto, level: int) -> onnx.ModelProto:
    """Returns a copy whose products of 4 bits have an accuracy level."""
    copied = onnx.ModelProto()
    copied.CopyFrom(model)
    for node in copied.graph.node:
        if node.op_type == OPERATOR:
            kept = [item for item in node.attribute if item.name != "accuracy_level"]
            del node.attribute[:]
            node.attribute.extend([*kept, onnx.helper.make_attribute("accuracy_level", level)])
    return copied


def float32(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a copy that multiplies by the same weights in float32.

    Raises:
        SystemExit: No product is of 4 bits.
    """
    copied = onnx.ModelProto()
    copied.CopyFrom(model)
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    nodes = [node for node in copied.graph.node if node.op_type == OPERATOR]
    if not nodes:
        raise SystemExit(f"expected a graph with {OPERATOR}, found none")
    for node in nodes:
        given = {item.name: item.i for item in node.attribute}
        arrays = [numpy_helper.to_array(stored[name]) for name in node.input[1:4] if name]
        weight = dequantised(given["K"], given["N"], given["block_size"], *arrays)
        name = f"{node.output[0]}_weight"
        copied.graph.initializer.append(numpy_helper.from_array(weight, name))
        inputs = node.input[0], name
        node.CopyFrom(onnx.helper.make_node("MatMul", inputs, list(node.output), node.name))
    return copied


def dequantised(
    rows: int,
    columns: int,
    block: int,
    packed: NDArray[np.uint8],
    scales: NDArray[np.float32],
    zero_points: NDArray[Any] | None = None,
) -> NDArray[np.float32]:
    """Returns the weights `[rows, columns]` of a product of 4 bits; the low half comes first."""
    blocks = -(-rows // block)
    found = _halves(packed.reshape(columns, blocks, -1)).astype(np.float32)
    zeros: Any = 8
    if zero_points is not None:
        zeros = _halves(zero_points.reshape(columns, -1))[:, :blocks, None].astype(np.float32)
    weight = (found - zeros) * scales.reshape(columns, blocks, 1)
    return np.ascontiguousarray(weight.reshape(columns, -1)[:, :rows].T, np.float32)


def _halves(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


if __name__ == "__main__":
    main()
