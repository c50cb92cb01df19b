"""Graphs of approximate logits for screened argmax (`runtime.ort.screened_argmax`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import onnx_ir as ir

from transferry.export.rewrite.linear_int8 import quantised_weight, transposed
from transferry.export.trace.editing import CONTRIB, argument, described, drop_unused
from transferry.export.trace.graph import Graph
from transferry.runtime.bundle.specs import GraphSpec, StoredTensor
from transferry.runtime.errors import ParityError

# With fewer tokens the LM head is a small part of a step.
SMALLEST_VOCABULARY = 2048


def approximate_graph(head: Graph) -> Graph:
    """Returns a fused LM head in int8: hidden -> approximate logits.

    Hidden states are quantised with a scale of the batch; the result of screening is exact and does
    not depend on it.

    Raises:
        ParityError: The LM head is not a single linear layer.
    """
    model = head.model.clone()
    graph, (product, *others) = model.graph, list(model.graph)
    if product.op_type != "Gemm" or others:
        raise ParityError(f"expected one Gemm in {head.spec.file}, found {len(others) + 1} nodes")
    integers, scales = quantised_weight(graph, argument(product, 1))
    tape, bias = ir.tape.Tape(graph), (*product.inputs, None)[2]
    inputs = [product.inputs[0], transposed(tape, integers), scales, None, bias]
    approximate = tape.op("DynamicQuantizeMatMul", inputs, domain=CONTRIB)
    (output,) = (
        replace(logits, name="approximate_logits", role="approximate_logits")
        for logits in head.spec.outputs
    )
    graph.outputs[0] = described(approximate, output)
    graph.remove(product, safe=True)
    drop_unused(graph)
    return Graph(model, GraphSpec("approximate_logits.onnx", head.spec.inputs, (output,)))


def segment_maxima_graph(sums: Graph) -> Graph:
    """Returns the graph of segment maxima alone: `sums` without its first output."""
    model = sums.model.clone()
    model.graph.outputs.pop(0)
    drop_unused(model.graph)
    return Graph(model, GraphSpec("segment_maxima.onnx", sums.spec.inputs, sums.spec.outputs[1:]))


def screen_tensors(graphs: Mapping[str, Graph]) -> dict[str, StoredTensor]:
    """Returns the places of a screened LM head's weights, float32 and int8, in written files."""
    if "approximate_logits" not in graphs:
        return {}
    head = graphs["lm_head"]
    (product,) = head.model.graph
    transpose, int8_product = graphs["approximate_logits"].model.graph
    values = {
        "weight": product.inputs[1],
        "quantised": transpose.inputs[0],
        "scales": int8_product.inputs[2],
        "bias": (*product.inputs, None)[2],
    }
    folder = head.spec.file.rpartition("/")[0]
    return {name: _stored(value, folder) for name, value in values.items() if value is not None}


def _stored(value: ir.Value, folder: str) -> StoredTensor:
    tensor = value.const_value
    assert isinstance(tensor, ir.ExternalTensor), value.name
    shape = tuple(int(size) for size in tensor.shape.numpy())
    kind = str(tensor.dtype.numpy())
    return StoredTensor(f"{folder}/{tensor.location}", int(tensor.offset or 0), kind, shape)
