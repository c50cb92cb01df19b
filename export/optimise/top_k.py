"""The graph that ranks tokens where their logits are, so that few numbers leave the device."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from transferry.export.graphs.portable import Graph
from transferry.export.optimise.fusion import register
from transferry.runtime.bundle import GraphSpec, TensorSpec


def rank_graph(head: Graph) -> Graph:
    """Makes the graph hidden, count -> top_logits, top_tokens, relative_sums.

    The log of the sum of all exponentials is that of `relative_sums` plus the largest logit; it is
    NaN where a logit is NaN or infinite, or none is finite.

    Args:
        head: hidden -> logits, fused.
    """
    model = head.model.clone()
    graph = model.graph
    logits = graph.outputs[0]
    count = ir.Value(name="count", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([1]))
    graph.inputs.append(count)
    first, second = (register(graph, f"rank.{n}", np.array([n])) for n in (0, 1))
    # Of equal logits the one of the lower token comes first (ONNX, TopK).
    top = ir.node("TopK", [logits, count], {"axis": 1}, num_outputs=2)
    largest = ir.node("Slice", [top.outputs[0], first, second, second])
    relative = ir.node("Sub", [logits, largest.outputs[0]])
    powers = ir.node("Exp", relative.outputs)
    sums = ir.node("ReduceSum", [powers.outputs[0], second], {"keepdims": 0})
    graph.extend([top, largest, relative, powers, sums])
    specs = (
        TensorSpec("top_logits", "top_logits", "float32", ("rows", "count")),
        TensorSpec("top_tokens", "top_tokens", "int64", ("rows", "count")),
        TensorSpec("relative_sums", "relative_sums", "float32", ("rows",)),
    )
    graph.outputs.clear()
    for value, spec in zip((*top.outputs, *sums.outputs), specs, strict=True):
        value.name = spec.name
        value.type = ir.TensorType(ir.DataType[{"float32": "FLOAT", "int64": "INT64"}[spec.type]])
        value.shape = ir.Shape(spec.shape)
        graph.outputs.append(value)
    wanted = TensorSpec("count", "count", "int64", (1,))
    file = head.spec.file.replace("head.onnx", "rank.onnx")
    return Graph(model, GraphSpec(file, (*head.spec.inputs, wanted), specs))
