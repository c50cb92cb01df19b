"""Error of int8 and int4 graphs beside the float32 graph of the same export: correct, and faulty.

    python benchmarks/integer_rounding.py onnx/llama int8/llama tokenizer.json captions.txt

`transferry audit` takes its limits for graphs of integers from these numbers. Every row of text is
run alone; an error is the largest distance of the logits over the largest logit. Faults are planted
in copies of the rounded graph. Needs tokenizers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import numpy_helper

Floats = NDArray[np.float64]
LONGEST = 48  # tokens of a row
PRODUCTS = ("MatMulInteger", "MatMulNBits")
RANDOM = (1, 2, 3, 5, 8, 13, 21, 34, LONGEST) * 3  # tokens of the random rows


def main() -> None:
    """Prints a line for each graph, and the same as JSON in the last line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("whole", "rounded", "tokenizer", "text"):
        parser.add_argument(name, type=Path)
    given = parser.parse_args()
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(given.tokenizer))
    lines = given.text.read_text(encoding="utf-8").splitlines()
    texts = [tokenizer.encode(line).ids[:LONGEST] for line in lines]
    generator, size = np.random.default_rng(0), tokenizer.get_vocab_size()
    random = [generator.integers(size, size=length).tolist() for length in RANDOM]
    whole = onnx.load(given.whole / "model.onnx")
    rounded = onnx.load(given.rounded / "model.onnx")
    exact = answers(whole, texts)
    found = {
        "correct": compared(answers(rounded, texts), exact),
        "correct, random tokens": compared(answers(rounded, random), answers(whole, random)),
    }
    for name, faulty in faults(rounded):
        found[name] = compared(answers(faulty, texts), exact)
    for name, numbers in found.items():
        print(f"{name:36}", *(f"{key} {value:.4f}" for key, value in numbers.items()))
    print(json.dumps(found))


def answers(model: onnx.ModelProto, rows: Sequence[Sequence[int]]) -> list[Floats]:
    """Returns the first output of each row alone."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    first = session.get_outputs()[0].name
    return [session.run([first], _inputs(session, row))[0][0].astype(np.float64) for row in rows]


def _inputs(session: onnxruntime.InferenceSession, row: Sequence[int]) -> dict[str, Any]:
    length = len(row)
    known = {
        "input_ids": np.array([row]),
        "attention_mask": np.ones((1, length), np.int64),
        "position_ids": np.arange(length)[None],
        "token_type_ids": np.zeros((1, length), np.int64),
    }
    found = {}
    for value in session.get_inputs():
        if value.name in known:
            found[value.name] = known[value.name]
        else:  # a cache without positions
            _, heads, _, width = value.shape
            found[value.name] = np.zeros((1, heads, 0, width), np.float32)
    return found


def compared(found: Sequence[Floats], exact: Sequence[Floats]) -> dict[str, float]:
    """Returns the errors of all rows, and the share of equal choices."""
    pairs = list(zip(found, exact, strict=True))
    errors = [np.abs(one - other).max() / np.abs(other).max() for one, other in pairs]
    same = [np.mean(one.argmax(-1) == other.argmax(-1)) for one, other in pairs]
    return {
        "worst": float(np.max(errors)),
        "median": float(np.median(errors)),
        "same choices": float(np.mean(same)),
    }


def faults(model: onnx.ModelProto) -> Iterator[tuple[str, onnx.ModelProto]]:
    """Yields copies with a fault in the middle one of the rounded weights.

    Raises:
        SystemExit: No weight is rounded.
    """
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    products = [node for node in model.graph.node if node.op_type in PRODUCTS]
    if not products:
        raise SystemExit(f"expected a graph with {' or '.join(PRODUCTS)}, found none")
    node = products[len(products) // 2]
    weight = node.input[1]
    of_blocks = node.op_type == "MatMulNBits"
    scale = node.input[2] if of_blocks else weight.replace("_quantized", "_scale")

    def changed(name: str, array: NDArray[Any]) -> onnx.ModelProto:
        copied = onnx.ModelProto()
        copied.CopyFrom(model)
        for tensor in copied.graph.initializer:
            if tensor.name == name:
                tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return copied

    values = numpy_helper.to_array(stored[weight])
    yield "a weight reversed", changed(weight, values[::-1])
    nothing = np.full_like(values, 0x88 if of_blocks else 0)
    yield "a weight of zeros", changed(weight, nothing)
    swapped = values.copy()
    columns = swapped if of_blocks else swapped.T
    columns[[0, 1]] = columns[[1, 0]]
    yield "two columns swapped", changed(weight, swapped)
    if scale in stored:
        steps = numpy_helper.to_array(stored[scale])
        for factor in (1.1, 1.5):
            yield f"a scale times {factor}", changed(scale, (steps * factor).astype(steps.dtype))


if __name__ == "__main__":
    main()
