"""Weights of other tools' graphs beside the reference's: rounded ones pass, changed ones do not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

from transferry.build_model.checkpoint import load_checkpoint
from transferry.build_model.model.transformer import Transformer
from transferry.export.checks.foreign_weights import foreign_weights
from transferry.export.subject.layout import GraphFile, Layout
from transferry.runtime.proof.report import Claim

Edit = Callable[[np.ndarray], np.ndarray]


@pytest.fixture(scope="module")
def model(run_folder: Path) -> Transformer:
    return load_checkpoint(run_folder).model


@pytest.fixture(scope="module", params=["float32", "float16", "int8", "int4"])
def graph(request: pytest.FixtureRequest, model: Transformer, tmp_path_factory: Any) -> Path:
    """A product with each matrix of the model, and its vectors, as a tool would store them."""
    path: Path = tmp_path_factory.mktemp(request.param) / "model.onnx"
    kind = np.float16 if request.param == "float16" else np.float32
    weights = {name: each.numpy().T.astype(kind) for name, each in model.state_dict().items()}
    make, onnx_type = onnx.helper, onnx.helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    nodes, ends, tensors = [], ([], []), []  # type: ignore[var-annotated]
    for name, each in weights.items():
        tensors.append(onnx.numpy_helper.from_array(np.ascontiguousarray(each), name))
        product = each.ndim == 2 and name != "positions"
        given = [f"x.{name}", name] if product else [name]
        nodes.append(make.make_node("MatMul" if product else "Identity", given, [f"y.{name}"]))
        for end, values in zip("xy" if product else "y", ends[not product :], strict=True):
            shape = ["rows", each.shape[end == "y"]] if product else each.shape
            values.append(make.make_tensor_value_info(f"{end}.{name}", onnx_type, shape))
    made = make.make_graph(nodes, "graph", *ends, tensors)
    onnx.save(make.make_model(made, opset_imports=[make.make_opsetid("", 20)], ir_version=9), path)
    if request.param == "int8":
        quantize_dynamic(path, path, weight_type=QuantType.QInt8)
    if request.param == "int4":
        tool = MatMulNBitsQuantizer(onnx.load(path), block_size=32, is_symmetric=True)
        tool.process()
        onnx.save(tool.model.model, path)
    return path


def claimed(model: Transformer, graph: Path, tmp_path: Path, edit: Edit, *names: str) -> Claim:
    """The claim of a copy of the graph, in which the weights of some names are edited."""
    read = ir.load(graph)
    for name, value in read.graph.initializers.items():
        if value.const_value is not None and any(map(name.endswith, names)):
            array = value.const_value.numpy()
            value.const_value = ir.Tensor(edit(array.copy()).astype(array.dtype), name=name)
    ir.save(read, tmp_path / "model.onnx")
    return foreign_weights(model, Layout("a tool", GraphFile(tmp_path / "model.onnx", {}, {})))


def test_rounded_weights_pass(model: Transformer, graph: Path, tmp_path: Path) -> None:
    claim = claimed(model, graph, tmp_path, lambda array: array)
    assert (claim.problem, claim.skipped) == ("", "")


def swapped(array: np.ndarray) -> np.ndarray:
    array[[0, 1]] = array[[1, 0]]
    return array


# Names as each precision has them.
INNER = tuple(
    f"encoder.0.feed_forward.inner.weight{end}"
    for end in ("", "_scale", "_quantized_scale", "_scales", "_Q4_scales")
)


def flipped(array: np.ndarray) -> np.ndarray:
    """One in 16 entries is negated, in integers inverted."""
    flat = array.reshape(-1)
    flat[::16] = -flat[::16] if array.dtype.kind == "f" else ~flat[::16]
    return array


OUTER = tuple(f"decoder.0.feed_forward.outer.weight{e}" for e in ("", "_quantized", "_Q4"))
CHANGES: dict[str, tuple[Edit, tuple[str, ...]]] = {
    "scaled": (lambda array: array * 1.02 if array.dtype.kind == "f" else array, INNER),
    "bias": (lambda array: array * 1.02, ("encoder.0.feed_forward.inner.bias",)),
    "rows": (swapped, OUTER),
    "entries": (flipped, OUTER),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_within_the_rounding_is_found(
    kind: str, model: Transformer, graph: Path, tmp_path: Path
) -> None:
    edit, names = CHANGES[kind]
    claim = claimed(model, graph, tmp_path, edit, *names)
    assert f"are not {names[0]} rounded" in claim.problem, claim


def test_another_rounding_is_told(model: Transformer, graph: Path, tmp_path: Path) -> None:
    """As GPTQ, AWQ or folded norms leave weights: near the reference's, and not its own."""
    noise = np.random.default_rng(0)

    def moved(array: np.ndarray) -> np.ndarray:
        return array * noise.normal(1, 0.02, array.shape) if array.dtype.kind == "f" else array

    claim = claimed(model, graph, tmp_path, moved, "")
    assert claim.problem == ""
    assert "which are no weights of the reference" in claim.skipped
