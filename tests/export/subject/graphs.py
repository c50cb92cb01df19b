"""Graphs with the names that optimum gives, made of our own bundles."""

import shutil
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper

from transferry.export.subject.bundle_copy import add, constant
from transferry.runtime.bundle.bundle import Bundle


def _renamed(value: ir.Value, name: str) -> None:
    value.name = name


def _model(bundle: Bundle, graph: str, folder: Path) -> ir.Model:
    source = bundle.graph(bundle.variant("portable").graphs[graph])
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.parent.iterdir():
        if path.suffix != ".onnx" and path.is_file():
            shutil.copy(path, folder)
    model = ir.load(source)
    ir.external_data.load_to_model(model)
    return model


def _int64_mask(model: ir.Model, mask: ir.Value, name: str) -> ir.Value:
    """Puts an input of int64 in place of one of booleans; returns the input."""
    index = list(model.graph.inputs).index(mask)
    given = ir.Value(name=name, type=ir.TensorType(ir.DataType.INT64))
    model.graph.inputs[index] = given
    return given


def _replace_uses(old: ir.Value, new: ir.Value) -> None:
    for node, index in list(old.uses()):
        if node is not new.producer():
            node.replace_input_with(index, new)


def decoder_with_past(bundle: Bundle, folder: Path) -> Path:
    """A causal language model with past, for prompts padded on the right: model.onnx."""
    model = _model(bundle, "decoder", folder)
    graph = bundle.variant("portable").graphs["decoder"]
    values = {str(value.name): value for value in (*model.graph.inputs, *model.graph.outputs)}
    (mask,) = graph.names("past_mask")
    old = values[mask]
    given = _int64_mask(model, old, "attention_mask")
    anchor = values[graph.names("past")[0]]
    length = add(anchor, "Shape", anchor, start=2, end=3)
    zero, one = constant(anchor, [0]), constant(anchor, [1])
    there = add(anchor, "Cast", add(anchor, "Slice", given, zero, length, one), to=9)
    given.shape = ir.Shape(["batch_size", "all"])
    _replace_uses(old, there)
    _renamed(values[graph.names("target")[0]], "input_ids")
    _renamed(values[graph.names("logits")[0]], "logits")
    for role, start in (("past", "past_key_values"), ("present", "present")):
        for number, name in enumerate(graph.names(role)):  # type: ignore[arg-type]
            _renamed(values[name], f"{start}.{number // 2}.{('key', 'value')[number % 2]}")
    return saved(model, folder / "model.onnx")


def masked_model(bundle: Bundle, folder: Path) -> Path:
    """A masked language model: model.onnx."""
    model = _model(bundle, "encoder", folder)
    graph = bundle.variant("portable").graphs["encoder"]
    values = {str(value.name): value for value in (*model.graph.inputs, *model.graph.outputs)}
    old = values[graph.names("source_mask")[0]]
    shape = old.shape
    given = _int64_mask(model, old, "attention_mask")
    given.shape = shape
    source = values[graph.names("source")[0]]
    _replace_uses(old, add(source, "Cast", given, to=9))
    _renamed(source, "input_ids")
    _renamed(values[graph.names("hidden")[0]], "last_hidden_state")
    _renamed(values[graph.names("logits")[0]], "logits")
    return saved(model, folder / "model.onnx")


def saved(model: ir.Model, path: Path) -> Path:
    """Writes a graph with its weights."""
    model.graph.sort()
    ir.save(model, path)
    return path


LINEAR = """
import torch

def audited():
    module = torch.nn.Linear(4, 3)
    torch.nn.init.constant_(module.weight, 0.5)
    torch.nn.init.constant_(module.bias, 0.25)
    return module, {"input": torch.arange(20.0).reshape(5, 4)}
"""


def linear_layer(folder: Path) -> None:
    """linear.onnx, and linear.py with the function `audited` that it is audited against."""
    (folder / "linear.py").write_text(LINEAR)
    value = helper.make_tensor_value_info
    node = helper.make_node("Gemm", ["input", "weight", "bias"], ["output"], transB=1)
    graph = helper.make_graph(
        [node],
        "linear",
        [value("input", TensorProto.FLOAT, ["batch", 4])],
        [value("output", TensorProto.FLOAT, ["batch", 3])],
        [
            numpy_helper.from_array(np.full((3, 4), 0.5, np.float32), "weight"),
            numpy_helper.from_array(np.full(3, 0.25, np.float32), "bias"),
        ],
    )
    opsets = [helper.make_opsetid("", 20)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), folder / "linear.onnx")
