"""Fused variants: the cache in place, and linear layers on onnxruntime's own kernels."""

from __future__ import annotations

import copy

import onnx_ir as ir
import torch

from transferry.build_model.model.transformer import Transformer
from transferry.build_model.own.model import OwnModel
from transferry.export.recipes import Recipe
from transferry.export.rewrite.calibration import Calibration
from transferry.export.rewrite.encoder_attention import attentions_to_fuse, fuse_attentions
from transferry.export.rewrite.fusion import FloatKernels, Fusion, Kernels
from transferry.export.rewrite.lm_head import (
    approximate_graph,
    is_screened,
    segment_maxima_graph,
    top_k_graph,
)
from transferry.export.trace.editing import alike, argument, cast, drop_unused
from transferry.export.trace.graph import Graph, Traces
from transferry.export.trace.in_place import export_fused_graphs
from transferry.export.trace.portable import export_graphs
from transferry.runtime.errors import ParityError, UsageError
from transferry.runtime.precision import BFLOAT16, FLOAT32

BFLOAT16_TYPE = ir.DataType.BFLOAT16


def floats(
    model: Transformer, recipe: Recipe, traces: Traces, calibration: Calibration | None
) -> dict[str, Graph]:
    """Makes a fused variant in float32, float16 or bfloat16; see `make.Maker`."""
    if recipe.precision != FLOAT32:
        model = copy.deepcopy(model).to(getattr(torch, recipe.precision.name))
    graphs = fused_graphs(model, recipe, traces, FloatKernels(with_relu=recipe.on_cpu))
    if recipe.precision == BFLOAT16:
        for each in graphs.values():
            widen_roots(each.model.graph)
    if not model.config.decoder_layers:
        return graphs
    if not recipe.on_cpu:
        graphs["top_k"] = top_k_graph(graphs["lm_head"])
    elif is_screened(model):
        graphs["approximate_logits"] = approximate_graph(graphs["lm_head"])
        graphs["segment_maxima"] = segment_maxima_graph(graphs["exp_sums"])
    return graphs


def widen_roots(graph: ir.Graph) -> None:
    """Computes Sqrt and Reciprocal of bfloat16 in float32, as torch does.

    onnxruntime has no kernel of theirs for bfloat16, and opens no graph with RMSNorm in it.
    """
    for node in list(graph):
        if node.op_type in ("Sqrt", "Reciprocal") and argument(node, 0).dtype == BFLOAT16_TYPE:
            tape = ir.tape.Tape()
            wide = cast(tape, argument(node, 0), ir.DataType.FLOAT)
            found = cast(tape, tape.op(node.op_type, [wide]), BFLOAT16_TYPE)
            graph.insert_before(node, tape.nodes)
            node.outputs[0].replace_all_uses_with(alike(found, node.outputs[0]))
            graph.remove(node, safe=True)


def fused_graphs(
    model: Transformer,
    recipe: Recipe,
    traces: Traces,
    kernels: Kernels,
    cache_type: str | None = None,
) -> dict[str, Graph]:
    """Traces a model and puts its linear layers, lookups and encoder attentions on kernels.

    Args:
        model: The model, with the weights that the graphs store or round.
        recipe: How the variant is made.
        traces: Graphs traced before; receives the new ones.
        kernels: Operators of linear layers and of lookups.
        cache_type: Element type of the KV cache. Default: the weights'.
    """
    own = isinstance(model, OwnModel)
    if own and model.config.decoder_layers:
        raise UsageError(
            f"variant {recipe.name} writes the cache in place, as only the reference's decoder "
            "does; choose --variant portable or portable-int8 for a module of your own"
        )
    if model.config.decoder_layers:
        graphs = export_fused_graphs(model, cache_type, traces)
    else:
        graphs = export_graphs(model, traces=traces)
    linears = 0
    for key, graph in graphs.items():
        linears += Fusion(graph, kernels).run()
        if key == "encoder" and recipe.on_cpu:
            found = fuse_attentions(graph)
            expected = found if own else attentions_to_fuse(model.config)
            require_all(recipe, "attentions of the encoder in one operator", expected, found)
        kernels.look_up(graph.model.graph)
        drop_unused(graph.model.graph)
    expected = linears or 1 if own else linear_layers(model)
    require_all(recipe, "linear layers in the graphs", expected, linears)
    return graphs


def require_all(recipe: Recipe, things: str, expected: int, found: int) -> None:
    """Raises ParityError unless a rewrite found as many places as the model has."""
    if found != expected:
        raise ParityError(
            f"variant {recipe.name}: expected {expected} {things}, found {found}; the exporter "
            "wrote some in another way"
        )


def linear_layers(model: Transformer) -> int:
    """Returns the number of linear layers of a model's graphs, a tied LM head included."""
    linears = sum(isinstance(module, torch.nn.Linear) for module in model.modules())
    linears += sum(int(getattr(module, "reused", 0)) for module in model.modules())
    # Encoder and decoder each have the embedding.
    narrow = model.config.d_embedding != model.config.d_model
    twice = narrow and model.encoder and model.decoder
    tied = model.config.lm_head and model.output is None
    return linears + tied + bool(twice)
