"""The variants of a bundle: how their graphs are made."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from transferry.build_model.transformer import Transformer
from transferry.export.graphs.fused import export_fused_graphs
from transferry.export.graphs.graph import Graph
from transferry.export.graphs.portable import export_graphs
from transferry.export.graphs.rewriting import drop_unused
from transferry.export.optimise.calibration import Calibration
from transferry.export.optimise.fusion import FloatKernels, Fusion, Kernels
from transferry.export.optimise.kv_cache_int8 import quantise_cache
from transferry.export.optimise.kv_scales import KVScales, fold_kv_scales
from transferry.export.optimise.linear_int8 import Int8Kernels, quantise_embedding
from transferry.export.optimise.screening import (
    SMALLEST_VOCABULARY,
    approximate_graph,
    screen_tensors,
    segment_maxima_graph,
)
from transferry.export.optimise.top_k import top_k_graph
from transferry.runtime.bundle import CacheSpec, StoredTensor, Variant
from transferry.runtime.errors import ParityError, UsageError

PORTABLE = "portable"
EMBEDDING = "model.embedding.weight"


@dataclass(frozen=True)
class Recipe:
    """How a variant is made.

    Attributes:
        precision: Of weights and arithmetic, as in the manifest.
        providers: Providers that the variant is made for.
        dtype: Precision of the exported model.
        prefix: Beginning of its files' names. Graphs that share weights lie in one folder, since
            onnxruntime refuses weights outside the graph's folder.
        fused: Linear layers fused and the cache in place; else standard operators only.
    """

    precision: str
    providers: tuple[str, ...]
    dtype: torch.dtype
    prefix: str
    fused: bool = True


RECIPES = {
    PORTABLE: Recipe("float32", ("cpu", "cuda"), torch.float32, "portable/", fused=False),
    "cpu-fp32": Recipe("float32", ("cpu",), torch.float32, "portable/fused-"),
    "cpu-int8": Recipe("int8", ("cpu",), torch.float32, "cpu-int8/"),
    "cuda-fp16": Recipe("float16", ("cuda",), torch.float16, "cuda-fp16/"),
    "cuda-bf16": Recipe("bfloat16", ("cuda",), torch.bfloat16, "cuda-bf16/"),
}


def recipe_of(name: str, *, calibrated: bool) -> Recipe:
    """Returns the recipe of a variant.

    Args:
        name: One of `RECIPES`.
        calibrated: Whether there is text to calibrate it with.

    Raises:
        UsageError: There is no such variant, or an int8 variant is not calibrated.
    """
    if name not in RECIPES:
        raise UsageError(f"there is no variant {name!r}; expected one of {', '.join(RECIPES)}")
    if RECIPES[name].precision == "int8" and not calibrated:
        raise UsageError(
            f"variant {name} is calibrated on text like that it will run on; add it with "
            "--calibrate FILE"
        )
    return RECIPES[name]


@dataclass(frozen=True)
class MadeVariant:
    """A variant whose graphs are in memory, or on disk after `external_data.write_graphs`.

    Attributes:
        name: One of `RECIPES`.
        graphs: The graphs by name.
    """

    name: str
    graphs: Mapping[str, Graph]

    def described(self) -> Variant:
        """Returns the variant's entry in the manifest; call it once the graphs are on disk."""
        recipe = RECIPES[self.name]
        specs = {name: graph.spec for name, graph in self.graphs.items()}
        opset = next(iter(self.graphs.values())).model.opset_imports[""]
        screen: Mapping[str, StoredTensor] = {}
        if "approximate_logits" in self.graphs:
            screen = screen_tensors(self.graphs["lm_head"], self.graphs["approximate_logits"])
        cache = None
        if "decoder" in specs:
            cache = CacheSpec(recipe.fused, specs["decoder"].tensor("past").type)
        fixed = (self.name, recipe.precision, recipe.providers, opset)
        return Variant(*fixed, specs, cache, top_k="top_k" in specs, screen=screen)


def make_variant(
    model: Transformer, name: str, calibration: Calibration | None = None
) -> MadeVariant:
    """Exports the graphs of a variant, and optimises them if its recipe says so.

    Args:
        model: The model in float32, in eval mode.
        name: One of `RECIPES`.
        calibration: Required for an int8 variant.

    Raises:
        UsageError: There is no such variant, or an int8 variant is not calibrated.
        ParityError: A linear layer was not fused, or an attention does not read integers.
    """
    recipe = recipe_of(name, calibrated=calibration is not None)
    graphs = _fused_graphs(model, name, calibration) if recipe.fused else export_graphs(model)
    return MadeVariant(
        name,
        {key: graph.at(f"{recipe.prefix}{graph.spec.file}") for key, graph in graphs.items()},
    )


def _fused_graphs(
    model: Transformer, name: str, calibration: Calibration | None
) -> dict[str, Graph]:
    recipe = RECIPES[name]
    on_cpu, int8 = recipe.providers == ("cpu",), recipe.precision == "int8"
    kernels: Kernels = FloatKernels(with_relu=on_cpu)
    scales: Mapping[str, KVScales] = {}
    if int8 and calibration is not None:
        kernels, scales = Int8Kernels(calibration.activations), calibration.kv_scales
        model = fold_kv_scales(model, scales)
    elif recipe.dtype != torch.float32:
        model = copy.deepcopy(model).to(recipe.dtype)
    if model.config.decoder_layers:
        graphs = export_fused_graphs(model, "int8" if int8 else None)
    else:
        graphs = export_graphs(model)
    linears = 0
    for graph in graphs.values():
        matrices = [spec.name for spec in graph.spec.outputs if len(spec.shape) == 2]
        linears += Fusion(graph.model, kernels, matrices).run()
        if int8:
            quantise_embedding(graph.model.graph, EMBEDDING)
        drop_unused(graph.model.graph)
    _require_all(name, "linear layers in the graphs", linear_layers(model), linears)
    if scales:
        attentions = quantise_cache(graphs, scales)
        _require_all(name, "attentions of the decoder to read integers", len(scales), attentions)
    elif "lm_head" in graphs and not on_cpu:
        graphs["top_k"] = top_k_graph(graphs["lm_head"])
    elif "lm_head" in graphs and _worth_screening(model):
        graphs["approximate_logits"] = approximate_graph(graphs["lm_head"])
        graphs["segment_maxima"] = segment_maxima_graph(graphs["exp_sums"])
    return graphs


def _require_all(variant: str, things: str, expected: int, found: int) -> None:
    if found != expected:
        raise ParityError(
            f"variant {variant}: expected {expected} {things}, found {found}; the exporter wrote "
            "some in another way"
        )


def _worth_screening(model: Transformer) -> bool:
    """Whether screened argmax saves time, and the LM head is one product, as it requires."""
    large = model.config.vocabulary_size >= SMALLEST_VOCABULARY
    return large and model.output_transform is None


def linear_layers(model: Transformer) -> int:
    """Returns the number of linear layers of a model, a tied LM head included."""
    linears = sum(isinstance(module, torch.nn.Linear) for module in model.modules())
    return linears + (model.output is None)
