"""The graph of rough scores that `runtime.screen` needs, beside the one of the exact ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import onnx_ir as ir

from transferry.export.graphs.portable import Graph
from transferry.export.optimise.fusion import CONTRIB, drop_unused
from transferry.export.optimise.linear_int8 import quantised_weight
from transferry.runtime.bundle import StoredTensor
from transferry.runtime.errors import ParityError

# With fewer tokens the projection is no large part of a step.
SMALLEST_VOCABULARY = 2048


def rough_graph(head: Graph) -> Graph:
    """Makes the graph of the vocabulary projection in int8: hidden -> rough.

    The hidden states are quantised with a scale of the batch's own, which is no harm here: what
    the search gets is exact, and does not depend on it.

    Args:
        head: hidden -> logits, fused, in float32.

    Raises:
        ParityError: It is not one linear layer.
    """
    model = head.model.clone()
    graph, (product, *others) = model.graph, list(model.graph)
    if product.op_type != "Gemm" or others or product.inputs[1] is None:
        raise ParityError(f"expected one Gemm in {head.spec.file}, found {len(others) + 1} nodes")
    weight, bias = product.inputs[1], (*product.inputs, None)[2]
    integers, scales = quantised_weight(graph, weight)
    # onnxruntime folds the Transpose when it opens the graph.
    transpose = ir.node("Transpose", [integers], {"perm": [1, 0]})
    inputs = [product.inputs[0], transpose.outputs[0], scales, None, bias]
    rough = ir.node("DynamicQuantizeMatMul", inputs, domain=CONTRIB)
    rough.outputs[0].type = graph.outputs[0].type
    rough.outputs[0].shape = graph.outputs[0].shape
    rough.outputs[0].name = "rough"
    graph.extend([transpose, rough])
    graph.outputs[0] = rough.outputs[0]
    graph.remove(product, safe=True)
    drop_unused(graph)
    (logits,) = head.spec.outputs
    outputs = (replace(logits, name="rough", role="rough"),)
    file = head.spec.file.replace("head.onnx", "rough.onnx")
    return Graph(model, replace(head.spec, file=file, outputs=outputs))


def peaks_graph(sums: Graph) -> Graph:
    """Makes the graph that finds the peaks of rough scores, of the one that also sums up logits."""
    model = sums.model.clone()
    model.graph.outputs.pop(0)
    drop_unused(model.graph)
    file = sums.spec.file.replace("sums.onnx", "peaks.onnx")
    return Graph(model, replace(sums.spec, file=file, outputs=sums.spec.outputs[1:]))


def screen_tensors(head: Graph, rough: Graph) -> Mapping[str, StoredTensor]:
    """Tells where the projection and its rough form lie, once both are written."""
    (product,) = head.model.graph
    transpose, product_of_integers = rough.model.graph
    values = {
        "weight": product.inputs[1],
        "quantised": transpose.inputs[0],
        "scales": product_of_integers.inputs[2],
        "bias": (*product.inputs, None)[2],
    }
    return {name: _stored(value, head) for name, value in values.items() if value is not None}


def _stored(value: ir.Value, graph: Graph) -> StoredTensor:
    tensor = value.const_value
    assert isinstance(tensor, ir.ExternalTensor), value.name
    folder = graph.spec.file.rpartition("/")[0]
    shape = tuple(int(size) for size in tensor.shape.numpy())
    kind = str(tensor.dtype.numpy())
    return StoredTensor(f"{folder}/{tensor.location}", int(tensor.offset or 0), kind, shape)
