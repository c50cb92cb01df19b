"""Weights stored in int8 and computed with in float32, by standard operators alone.

Unlike `linear_int8`, nothing else is rounded: DequantizeLinear gives the matrix that a product
reads. onnxruntime converts each matrix once, when it opens the graph, if
`session.disable_quant_qdq` is set. Such a graph takes a quarter of the space on a disk or a line,
and the time of the portable one.
"""

from __future__ import annotations

import onnx_ir as ir

from transferry.build_model.model.transformer import Transformer
from transferry.export.recipes import Recipe
from transferry.export.rewrite.calibration import Calibration
from transferry.export.rewrite.linear_int8 import quantised_weight
from transferry.export.rewrite.weight_blocks import matrices
from transferry.export.trace.editing import alike
from transferry.export.trace.graph import Graph, Traces
from transferry.export.trace.portable import export_graphs


def in_int8(
    model: Transformer, recipe: Recipe, traces: Traces, calibration: Calibration | None
) -> dict[str, Graph]:
    """Makes the portable variant with weights in int8; see `make.Maker`."""
    graphs = export_graphs(model, traces=traces)
    for graph in graphs.values():
        store_in_int8(graph.model.graph, model)
    return graphs


def store_in_int8(graph: ir.Graph, model: Transformer) -> None:
    """Replaces the matrices of a portable graph by integers with a scale for each output."""
    for name, _ in matrices(model):
        if (weight := graph.initializers.get(f"model.{name}")) is None:
            continue
        integers, scales = quantised_weight(graph, weight, pairs=False)
        model.release()
        computed = f"{weight.name}.float"
        node = ir.node("DequantizeLinear", [integers, scales], {"axis": 0}, name=computed)
        matrix = alike(node.outputs[0], weight)
        matrix.name = computed
        weight.replace_all_uses_with(matrix)
        del graph.initializers[f"model.{name}"]
        graph.insert_before(graph[0], node)
