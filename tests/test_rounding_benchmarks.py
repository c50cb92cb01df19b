"""The benchmark of accuracy levels: its float32 has the weights of the 4-bit kernel."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

import accuracy_level
from integer_rounding import answers

ROWS, COLUMNS, BLOCK, WORDS = 80, 48, 32, 12  # the last block is half empty
TEXTS = [[1, 5, 9, 2], [11, 0, 3]]


def packed(values: NDArray[np.integer]) -> NDArray[np.uint8]:
    """Two numbers of 4 bits a byte, the first in the low half."""
    return (values[..., ::2] | values[..., 1::2] << 4).astype(np.uint8)


def model(zero_points: bool, level: int = 4) -> onnx.ModelProto:
    """A graph of one product with 4 bits, as onnxruntime-genai writes it."""
    random, blocks = np.random.default_rng(0), -(-ROWS // BLOCK)
    stored: dict[str, NDArray[Any]] = {
        "embedding": random.normal(size=(WORDS, ROWS)).astype(np.float32),
        "weight": packed(random.integers(0, 16, (COLUMNS, blocks, BLOCK))),
        "scales": random.uniform(0.01, 0.1, COLUMNS * blocks).astype(np.float32),
    }
    if zero_points:  # an even number for each column
        zeros = random.integers(0, 16, (COLUMNS, blocks + blocks % 2))
        stored["zero_points"] = packed(zeros).reshape(-1)
    attributes: dict[str, Any] = {
        "K": ROWS,
        "N": COLUMNS,
        "bits": 4,
        "block_size": BLOCK,
        "accuracy_level": level,
    }
    inputs = ["x", *list(stored)[1:]]
    nodes = [
        helper.make_node("Gather", ["embedding", "input_ids"], ["x"]),
        helper.make_node(
            "MatMulNBits", inputs, ["logits"], "product", domain="com.microsoft", **attributes
        ),
    ]
    graph = helper.make_graph(
        nodes,
        "one",
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "length"])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "length", COLUMNS])],
        [numpy_helper.from_array(array, name) for name, array in stored.items()],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


@pytest.mark.parametrize("zero_points", [False, True])
def test_float32_has_the_weights_of_the_kernel(zero_points: bool) -> None:
    given = model(zero_points)
    exact = np.concatenate(answers(accuracy_level.float32(given), TEXTS))
    float32 = np.concatenate(answers(accuracy_level.at_level(given, 1), TEXTS))
    int8 = np.concatenate(answers(accuracy_level.at_level(given, 4), TEXTS))
    np.testing.assert_allclose(float32, exact, rtol=0, atol=1e-4)
    assert np.abs(int8 - exact).max() > 1e-3
    assert "MatMulNBits" in {node.op_type for node in given.graph.node}  # a copy was changed


def test_a_graph_without_4_bits_is_refused() -> None:
    with pytest.raises(SystemExit, match="expected a graph with MatMulNBits, found none"):
        accuracy_level.float32(accuracy_level.float32(model(False)))


def test_the_record_counts_wrong_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    words = {f"w{number}": number for number in range(WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    onnx.save(model(True), tmp_path / "model.onnx")
    lines = [" ".join(f"w{word}" for word in text) for text in TEXTS]
    (tmp_path / "text.txt").write_text("\n".join(lines), encoding="utf-8")
    paths = [str(tmp_path / name) for name in ("model.onnx", "tokenizer.json", "text.txt")]
    monkeypatch.setattr(sys, "argv", ["accuracy_level.py", *paths])
    accuracy_level.main()
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["positions"] == sum(map(len, TEXTS))
    for level in (0, 1, 4):
        found = record[f"level {level}"]
        assert 0 <= found["of near ties"] <= found["wrong tokens"] <= record["positions"]
    assert record["level 1"]["wrong tokens"] == 0
    assert record["level 4"]["largest difference"] > 10 * record["level 1"]["largest difference"]
