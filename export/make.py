"""The graphs of a bundle's variants."""

import pkgutil
from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch

import onnx_ir as ir
import torch.fx

from transferry.build_model.model.config import ModelConfig
from transferry.build_model.model.transformer import Transformer
from transferry.export.recipes import Recipe
from transferry.export.rewrite.calibration import Calibration
from transferry.export.rewrite.linear_int8 import quantised_weight
from transferry.export.rewrite.lm_head import screen_tensors
from transferry.export.rewrite.rounded_weights import matrices
from transferry.export.trace.beam_graph import BeamGraph
from transferry.export.trace.editing import alike
from transferry.export.trace.graph import CELL, Graph, Traces
from transferry.export.trace.portable import export_graphs
from transferry.export.trace.search_graph import GreedyGraph, require_one_graph
from transferry.runtime.bundle.specs import ONE_GRAPH, CacheSpec, Variant
from transferry.runtime.tokenizer.special_tokens import SpecialTokens

PACKAGE = "transferry.export"

# Traces a model and rewrites its graphs; their names have no prefix yet.
Maker = Callable[[Transformer, Recipe, Traces, Calibration | None], dict[str, Graph]]


def make(
    model: Transformer,
    recipe: Recipe,
    traces: Traces | None = None,
    calibration: Calibration | None = None,
) -> dict[str, Graph]:
    """Exports the graphs of a variant of a model, in float32 and eval mode, by name.

    Raises:
        ParityError: A linear layer or an attention was not rewritten.
    """
    maker: Maker = pkgutil.resolve_name(f"{PACKAGE}.{recipe.maker}")
    # A tenth of the time: only `blame` reads which line of Python made a node.
    with patch.object(torch.fx.config, "do_not_emit_stack_traces", True):
        graphs = maker(model, recipe, traces or Traces(), calibration)
    return {key: graph.at(f"{recipe.prefix}{graph.spec.file}") for key, graph in graphs.items()}


def portable(
    model: Transformer, recipe: Recipe, traces: Traces, calibration: Calibration | None
) -> dict[str, Graph]:
    """Makes the portable variant; see `Maker`."""
    return export_graphs(model, traces=traces)


def add_one_graph(
    graphs: dict[str, Graph],
    config: ModelConfig,
    special: SpecialTokens,
    generation: Mapping[str, Any],
    beam: int,
) -> None:
    """Adds greedy search, or beam search with several beams, as one graph to the portable graphs.

    Raises UsageError as `require_one_graph` does.
    """
    require_one_graph(config.architecture, generation, beam)
    given = graphs, special, generation, config.max_positions
    composer = GreedyGraph(*given) if beam == 1 else BeamGraph(*given, beam=beam)
    graphs[ONE_GRAPH] = composer.graph()


def describe(recipe: Recipe, graphs: Mapping[str, Graph]) -> Variant:
    """Returns a variant's entry in the manifest, once its graphs are on disk."""
    specs = {key: graph.spec for key, graph in graphs.items()}
    cache = None
    if (decoder := specs.get("decoder")) is not None:
        # A state is no KV cache: only the source has keys and values.
        kind = ("state",) if decoder.names("past")[0].endswith(CELL) else ()
        stored = decoder.tensor("cross" if kind else "past").type
        cache = CacheSpec(recipe.fused, stored, *kind)
    return Variant(
        recipe.name,
        recipe.precision.name,
        recipe.providers,
        next(iter(graphs.values())).model.opset_imports[""],
        specs,
        cache,
        top_k="top_k" in specs,
        screen=screen_tensors(graphs),
        reference=recipe.reference,
    )


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
