"""Portable graphs use standard ONNX, match the manifest, and compute in the oldest onnxruntime."""

import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from tests.commands import PATIENCE
from tests.optional import OLDEST
from transferry.build_model.checkpoint import Checkpoint
from transferry.export.trace.graph import IR_VERSION, OPSET
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.specs import GraphSpec, TensorSpec

GRAPHS = ("encoder", "decoder", "select")
CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture(params=GRAPHS)
def spec(bundle: Bundle, request: pytest.FixtureRequest) -> GraphSpec:
    return bundle.variant().graphs[request.param]


@pytest.fixture
def model(bundle: Bundle, spec: GraphSpec) -> onnx.ModelProto:
    return onnx.load(bundle.graph(spec), load_external_data=False)


def tensor_specs(values: list[onnx.ValueInfoProto]) -> list[tuple[str, str, tuple[int | str, ...]]]:
    """Name, type and shape of each input or output of the file."""
    return [
        (
            value.name,
            onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type).name,
            tuple(dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim),
        )
        for value in values
    ]


def test_graphs_have_standard_operators_alone(bundle: Bundle, model: onnx.ModelProto) -> None:
    assert tuple(bundle.variant().graphs) == GRAPHS
    assert bundle.variant().opset == OPSET
    assert model.ir_version == IR_VERSION == onnx.helper.OP_SET_ID_VERSION_MAP["ai.onnx", OPSET]
    assert {entry.domain: entry.version for entry in model.opset_import} == {"": OPSET}
    assert not model.functions
    assert model.graph.node
    for node in model.graph.node:
        assert node.domain == ""
        assert onnx.defs.get_schema(node.op_type, OPSET).since_version <= OPSET


def test_file_is_what_the_manifest_says(spec: GraphSpec, model: onnx.ModelProto) -> None:
    for values, specs in ((model.graph.input, spec.inputs), (model.graph.output, spec.outputs)):
        assert tensor_specs(list(values)) == [(item.name, item.type, item.shape) for item in specs]


def test_values_are_named_after_their_modules(
    calm: Checkpoint, spec: GraphSpec, model: onnx.ModelProto
) -> None:
    """A layer's values begin with its path, as its weights do after "model."."""
    modules = {name for name, _ in calm.model.named_modules()}
    inputs = [value.name for value in model.graph.input]
    for node in model.graph.node:
        module, _, kind = re.sub(r"(\.\d+)?$", "", node.name).rpartition(".")
        assert module in modules or module.startswith(tuple(inputs)), node.name
        assert not re.search(r"_\d|^val|^node", kind)
        weights = [name for name in node.input if name.startswith("model.")]
        assert all(f"model.{module}." in name or not module for name in weights)
    values = [name for node in model.graph.node for name in node.output]
    constants = [each.name for each in model.graph.initializer]
    assert all(re.search(r"^model\.|\.constant(\.\d+)?$", name) for name in constants)
    assert len({*inputs, *values, *constants}) == len(inputs + values + constants)


def test_no_trace_of_the_exporting_machine(
    bundle: Bundle, spec: GraphSpec, model: onnx.ModelProto
) -> None:
    content = bundle.graph(spec).read_bytes()
    for trace in (b".py", b"stack_trace", b"pkg.torch", b"/home/", str(CHECKOUT).encode()):
        assert trace not in content
    graph = model.graph
    for item in (model, graph, *graph.node, *graph.input, *graph.output, *graph.initializer):
        assert not item.doc_string
        assert not item.metadata_props
    assert not any(info.doc_string or info.metadata_props for info in graph.value_info)


PROGRAM = """
import sys, numpy, onnxruntime
options = onnxruntime.SessionOptions()
options.add_session_config_entry("session.disable_quant_qdq", "1")
session = onnxruntime.InferenceSession(sys.argv[1], options)
numpy.savez(sys.argv[3], *session.run(None, dict(numpy.load(sys.argv[2]))))
print(onnxruntime.__version__)
"""
SIZES = {"batch": 2, "source": 5, "past": 3, "target": 1, "begun": 2, "selected": 3, "length": 3}


def example(spec: TensorSpec, generator: np.random.Generator) -> Any:
    shape = [SIZES[size] if isinstance(size, str) else size for size in spec.shape]
    if spec.type == "float32":
        return generator.normal(size=shape).astype(np.float32)
    if spec.name == "max_length":
        return np.array([12])
    most = SIZES["batch"] if spec.role == "rows" else 90
    return np.ones(shape, bool) if spec.type == "bool" else generator.integers(0, most, shape)


@pytest.mark.optional("oldest")
@pytest.mark.parametrize(
    ("fixture", "variant"),
    [
        *(("whole_bundle_folder", "portable"), ("whole_writer_bundle_folder", "portable")),
        *(("reader_bundle_folder", "portable"), ("weight_only_bundle_folder", "portable-int8")),
    ],
)
def test_computes_as_the_newest_does(
    fixture: str, variant: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    bundle = Bundle.load(request.getfixturevalue(fixture))
    generator = np.random.default_rng(0)
    for spec in bundle.variant(variant).graphs.values():
        feeds = {each.name: example(each, generator) for each in spec.inputs}
        given, found = tmp_path / "feeds.npz", tmp_path / "found.npz"
        np.savez(given, **feeds)
        command = [OLDEST, "-c", PROGRAM, bundle.graph(spec), given, found]
        ran = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=PATIENCE)
        assert ran.stdout == "1.17.3\n", ran.stderr
        wanted = onnxruntime.InferenceSession(str(bundle.graph(spec))).run(None, feeds)
        with np.load(found) as arrays:
            for one, other in zip(wanted, arrays.values(), strict=True):
                np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-4)
