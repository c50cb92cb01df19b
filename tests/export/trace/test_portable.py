"""Portable graphs use standard ONNX, match the manifest, and have no frozen size."""

import re
from itertools import product
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnxruntime.capi import onnxruntime_pybind11_state as native

from transferry.build_model.checkpoint import Checkpoint
from transferry.build_model.model.attention import KeyValues
from transferry.export.trace.graph import IR_VERSION, OPSET, flatten, pair
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.specs import GraphSpec, TensorSpec
from transferry.runtime.ort.session import SessionOptions, open_session

GRAPHS = ("encoder", "decoder", "select")
CHECKOUT = Path(__file__).resolve().parents[2]
# Sizes such that no two dimensions of a graph are always equal.
BATCHES, SOURCES, PASTS, TARGETS, ROWS = (1, 2, 7), (1, 2, 13), (0, 1, 9), (1, 3), (1, 5)


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


def size(dimension: int | str, sizes: dict[str, int]) -> int:
    """The size of a dimension of the manifest, a sum such as "past + target" included."""
    if isinstance(dimension, int):
        return dimension
    return sum(sizes[symbol] for symbol in dimension.split(" + "))


def example(item: TensorSpec, sizes: dict[str, int]) -> NDArray[np.generic]:
    """An input that is valid at any size: tokens and rows that exist, no padding."""
    shape = tuple(size(dimension, sizes) for dimension in item.shape)
    value = 0 if item.role == "rows" else 1
    return np.full(shape, value, item.type)


def test_every_size_that_varies_is_free(bundle: Bundle, spec: GraphSpec) -> None:
    session = open_session(bundle.graph(spec), SessionOptions())
    symbols = {"batch": BATCHES, "source": SOURCES, "past": PASTS, "target": TARGETS}
    symbols |= {"selected": ROWS, "length": PASTS}
    used = {name for item in spec.inputs for name in item.shape if isinstance(name, str)}
    swept = {name: values for name, values in symbols.items() if name in used}
    assert used == swept.keys()
    for values in product(*swept.values()):
        sizes = dict(zip(swept, values, strict=True))
        outputs = session.run(
            [item.name for item in spec.outputs],
            {item.name: example(item, sizes) for item in spec.inputs},
        )
        for item, output in zip(spec.outputs, outputs, strict=True):
            assert isinstance(output, np.ndarray)
            assert output.dtype == item.type
            assert output.shape == tuple(size(dimension, sizes) for dimension in item.shape)
            assert np.isfinite(output).all()


def test_sizes_beyond_the_manifest_are_refused(bundle: Bundle) -> None:
    """Only the dimensions that the manifest names vary; the number of heads does not."""
    select = bundle.variant().graphs["select"]
    session = open_session(bundle.graph(select), SessionOptions())
    feeds = {
        item.name: example(item, {"batch": 2, "selected": 1, "length": 3}) for item in select.inputs
    }
    name = select.names("state")[0]
    feeds[name] = np.repeat(feeds[name], 2, axis=1)
    with pytest.raises(native.InvalidArgument, match=name):
        session.run(None, feeds)


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


def test_cache_is_flat_layer_by_layer() -> None:
    layers = [KeyValues(torch.full((1,), 1.0), torch.full((1,), 2.0))]
    layers.append(KeyValues(torch.full((1,), 3.0), torch.full((1,), 4.0)))
    assert [tensor.item() for tensor in flatten(layers)] == [1.0, 2.0, 3.0, 4.0]
    assert pair(flatten(layers)) == layers
