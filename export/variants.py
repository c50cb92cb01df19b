"""The variants of a bundle: how their graphs are made."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from transferry.build_model.model.config import ModelConfig
from transferry.build_model.model.transformer import Transformer
from transferry.export.recipes import RECIPES, recipe_of, reference_file
from transferry.export.rewrite.calibration import Calibration
from transferry.export.rewrite.encoder_attention import attentions_to_fuse, fuse_attentions
from transferry.export.rewrite.fusion import FloatKernels, Fusion, Kernels
from transferry.export.rewrite.kv_cache_int8 import quantise_cache
from transferry.export.rewrite.kv_scales import KVScales, fold_kv_scales
from transferry.export.rewrite.linear_int4 import Int4Kernels, look_up_blocks
from transferry.export.rewrite.linear_int8 import Int8Kernels, quantise_embedding
from transferry.export.rewrite.screening import (
    SMALLEST_VOCABULARY,
    approximate_graph,
    screen_tensors,
    segment_maxima_graph,
)
from transferry.export.rewrite.top_k import top_k_graph
from transferry.export.rewrite.weight_only import store_in_int8
from transferry.export.trace.beam_graph import BeamComposer
from transferry.export.trace.editing import drop_unused
from transferry.export.trace.graph import CELL, Graph, Traces
from transferry.export.trace.greedy_graph import Composer, require_one_graph
from transferry.export.trace.in_place import export_fused_graphs
from transferry.export.trace.portable import export_graphs
from transferry.runtime.bundle.specs import ONE_GRAPH, CacheSpec, Variant
from transferry.runtime.errors import ParityError
from transferry.runtime.precision import FLOAT32, INT4, INT8
from transferry.runtime.tokenizer.special_tokens import SpecialTokens

EMBEDDING = "model.embedding.weight"


def make_variant(
    model: Transformer,
    name: str,
    calibration: Calibration | None = None,
    traces: Traces | None = None,
) -> dict[str, Graph]:
    """Exports the graphs of a variant by name, and optimises them if its recipe says so.

    Args:
        model: The model in float32, in eval mode.
        name: One of `RECIPES`.
        calibration: Required for an int8 variant.
        traces: Graphs traced before; receives the new ones.

    Raises:
        UsageError: There is no such variant, or an int8 variant is not calibrated.
        ParityError: A linear layer was not fused, or an attention does not read integers.
    """
    recipe = recipe_of(name, calibrated=calibration is not None)
    if recipe.fused:
        graphs = _fused_graphs(model, name, calibration, traces)
    else:
        graphs = export_graphs(model, traces=traces)
        if recipe.precision.weights_only:
            for graph in graphs.values():
                store_in_int8(graph.model.graph, model, model.release)
    return {key: graph.at(f"{recipe.prefix}{graph.spec.file}") for key, graph in graphs.items()}


def add_one_graph(
    graphs: dict[str, Graph],
    config: ModelConfig,
    special: SpecialTokens,
    generation: Mapping[str, Any],
    beam: int,
) -> None:
    """Adds greedy search, or beam search with several beams, as one graph to the portable graphs.

    Raises:
        UsageError: The model generates nothing, or a generation default cannot be kept.
    """
    require_one_graph(config.architecture, generation, beam)
    given = graphs, special, generation, config.max_positions
    composer = Composer(*given) if beam == 1 else BeamComposer(*given, beam=beam)
    graphs[ONE_GRAPH] = composer.graph()


def describe(name: str, graphs: Mapping[str, Graph]) -> Variant:
    """Returns a variant's entry in the manifest, once its graphs are on disk."""
    recipe, specs = RECIPES[name], {key: graph.spec for key, graph in graphs.items()}
    opset = next(iter(graphs.values())).model.opset_imports[""]
    cache = None
    if "decoder" in specs:
        # A state is no KV cache: the keys and values are those of the source.
        decoder = specs["decoder"]
        if decoder.names("past")[0].endswith(CELL):
            cache = CacheSpec(recipe.fused, decoder.tensor("cross").type, "state")
        else:
            cache = CacheSpec(recipe.fused, decoder.tensor("past").type)
    fixed = (name, recipe.precision.name, recipe.providers, opset)
    return Variant(
        *fixed,
        specs,
        cache,
        top_k="top_k" in specs,
        screen=screen_tensors(graphs),
        reference=reference_file(recipe),
    )


def _fused_graphs(
    model: Transformer, name: str, calibration: Calibration | None, traces: Traces | None
) -> dict[str, Graph]:
    precision, on_cpu = RECIPES[name].precision, RECIPES[name].providers == ("cpu",)
    kernels: Kernels = FloatKernels(with_relu=on_cpu)
    scales: Mapping[str, KVScales] = {}
    if precision.calibrated and calibration is not None:
        kernels = Int8Kernels(calibration.activations, model.release)
        scales = calibration.kv_scales
        model = fold_kv_scales(model, scales)
    elif precision == INT4:
        kernels = Int4Kernels()
    elif precision != FLOAT32:
        model = copy.deepcopy(model).to(getattr(torch, precision.name))
    decoder, cache_type = bool(model.config.decoder_layers), "int8" if scales else None
    if decoder:
        graphs = export_fused_graphs(model, cache_type, traces)
    else:
        graphs = export_graphs(model, traces=traces)
    linears = 0
    for key, graph in graphs.items():
        linears += Fusion(graph, kernels).run()
        if key == "encoder" and on_cpu:
            expected, found = attentions_to_fuse(model.config), fuse_attentions(graph)
            _require_all(name, "attentions of the encoder in one operator", expected, found)
        if precision == INT8:
            quantise_embedding(graph.model.graph, EMBEDDING)
        elif precision == INT4:
            look_up_blocks(graph.model.graph)
        drop_unused(graph.model.graph)
    _require_all(name, "linear layers in the graphs", linear_layers(model), linears)
    if scales:
        attentions = quantise_cache(graphs, scales, model.config)
        _require_all(name, "attentions of the decoder to read integers", len(scales), attentions)
    elif decoder and not on_cpu:
        graphs["top_k"] = top_k_graph(graphs["lm_head"])
    elif precision == FLOAT32 and decoder and _is_screened(model):
        graphs["approximate_logits"] = approximate_graph(graphs["lm_head"])
        graphs["segment_maxima"] = segment_maxima_graph(graphs["exp_sums"])
    return graphs


def _is_screened(model: Transformer) -> bool:
    """Whether the LM head is a product with one large matrix and nothing else."""
    one = model.output_transform is None and model.output_projection is None
    large = model.config.vocabulary_size >= SMALLEST_VOCABULARY
    return one and large and not model.config.output_softcap


def _require_all(variant: str, things: str, expected: int, found: int) -> None:
    if found != expected:
        raise ParityError(
            f"variant {variant}: expected {expected} {things}, found {found}; the exporter wrote "
            "some in another way"
        )


def linear_layers(model: Transformer) -> int:
    """Returns the number of linear layers of a model's graphs, a tied LM head included."""
    linears = sum(isinstance(module, torch.nn.Linear) for module in model.modules())
    # Encoder and decoder each have the embedding.
    twice = model.embedding_projection is not None and model.encoder and model.decoder
    tied = model.config.lm_head and model.output is None
    return linears + tied + bool(twice)
