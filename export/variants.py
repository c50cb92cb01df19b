"""The ways to compute a model that a bundle may hold, and how the graphs of each are made."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from transferry.build_model.transformer import Transformer
from transferry.export.graphs.fused import OPSET as SLOT_OPSET
from transferry.export.graphs.fused import export_slot_graphs
from transferry.export.graphs.portable import OPSET, Graph, export_graphs
from transferry.export.optimise.calibration import Activation, Calibration
from transferry.export.optimise.fusion import FloatKernels, Fusion, Kernels, drop_unused
from transferry.export.optimise.kv_cache_int8 import round_cache
from transferry.export.optimise.kv_scales import Units, in_units
from transferry.export.optimise.linear_int8 import Int8Kernels, quantise_embedding
from transferry.export.optimise.screening import (
    SMALLEST_VOCABULARY,
    peaks_graph,
    rough_graph,
    screen_tensors,
)
from transferry.export.optimise.top_k import rank_graph
from transferry.runtime.bundle import CacheSpec, StoredTensor, Variant
from transferry.runtime.errors import ParityError, UsageError

PORTABLE = "portable"
EMBEDDING = "model.embedding.weight"


@dataclass(frozen=True)
class Recipe:
    """How a variant is made.

    Attributes:
        precision: Of weights and arithmetic, as the manifest has it.
        providers: Where it is meant to run.
        dtype: What the model is exported in.
        prefix: What the names of its files begin with. Graphs that share weights lie in one
            folder, since onnxruntime refuses weights that lie outside the graph's.
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
    """Returns how a variant is made.

    Args:
        name: One of `RECIPES`.
        calibrated: Whether there is anything to calibrate it with.

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
    """A variant whose graphs are in memory, or after `weights.write_graphs` on disk.

    Attributes:
        name: One of `RECIPES`.
        opset: Version of the standard operators.
        graphs: By name.
    """

    name: str
    opset: int
    graphs: Mapping[str, Graph]

    def described(self) -> Variant:
        """Returns what the manifest says of it; to be asked once the graphs are written."""
        recipe = RECIPES[self.name]
        specs = {name: graph.spec for name, graph in self.graphs.items()}
        screen: Mapping[str, StoredTensor] = {}
        if "rough" in self.graphs:
            screen = screen_tensors(self.graphs["head"], self.graphs["rough"])
        cache = None
        if "decoder" in specs:
            cache = CacheSpec(recipe.fused, specs["decoder"].tensor("past").type)
        return Variant(
            self.name,
            recipe.precision,
            recipe.providers,
            self.opset,
            specs,
            cache,
            "rank" in specs,
            screen,
        )


def make_variant(
    model: Transformer,
    name: str,
    calibration: Calibration | None = None,
) -> MadeVariant:
    """Exports the graphs of a variant, and fuses them where its recipe says so.

    Args:
        model: The model in float32, in eval mode.
        name: One of `RECIPES`.
        calibration: What an int8 variant is made with.

    Raises:
        UsageError: There is no such variant, or an int8 variant is not calibrated.
        ParityError: Not every linear layer was fused, or not every attention reads integers.
    """
    recipe = recipe_of(name, calibrated=calibration is not None)
    if not recipe.fused:
        return MadeVariant(name, OPSET, export_graphs(model, recipe.prefix))
    if recipe.dtype != torch.float32:
        model = copy.deepcopy(model).to(recipe.dtype)
    activations, units = None, dict[str, Units]()
    if recipe.precision == "int8" and calibration is not None:
        activations, units = calibration.activations, dict(calibration.units)
        model = in_units(model, units)
    opset, graphs = OPSET, dict[str, Graph]()
    if model.config.decoder_layers:
        opset, graphs = (
            SLOT_OPSET,
            export_slot_graphs(
                model,
                recipe.prefix,
                stored="int8" if units else None,
            ),
        )
    else:
        graphs = export_graphs(model, recipe.prefix)
    fused = {name: _fuse(graph, recipe, activations) for name, graph in graphs.items()}
    linears = sum(fused.values())
    expected = linear_layers(model)
    if linears != expected:
        raise ParityError(
            f"variant {name}: expected {expected} linear layers in the graphs, found {linears}; "
            "the exporter wrote some in another way"
        )
    if units and (rounded := round_cache(graphs, units)) != len(units):
        raise ParityError(
            f"variant {name}: expected {len(units)} attentions of the decoder to read integers, "
            f"found {rounded}; the exporter wrote some in another way"
        )
    if "cpu" not in recipe.providers and "head" in graphs:
        graphs["rank"] = rank_graph(graphs["head"])
    if _screened(recipe, graphs, model):
        graphs["rough"] = rough_graph(graphs["head"])
        graphs["peaks"] = peaks_graph(graphs["sums"])
    return MadeVariant(name, opset, graphs)


def _fuse(graph: Graph, recipe: Recipe, activations: Mapping[str, Activation] | None) -> int:
    kernels: Kernels = FloatKernels(with_relu=recipe.providers == ("cpu",))
    if recipe.precision == "int8":
        assert activations is not None
        kernels = Int8Kernels(activations)
    outputs = [spec.name for spec in graph.spec.outputs if len(spec.shape) == 2]
    linears = Fusion(graph.model, kernels, outputs).run()
    if recipe.precision == "int8":
        quantise_embedding(graph.model.graph, EMBEDDING)
    drop_unused(graph.model.graph)
    return linears


def _screened(recipe: Recipe, graphs: Mapping[str, Graph], model: Transformer) -> bool:
    """Whether greedy search is to be spared most of the vocabulary projection."""
    return (
        "head" in graphs
        and (recipe.precision, recipe.providers) == ("float32", ("cpu",))
        and model.config.vocabulary_size >= SMALLEST_VOCABULARY
        and model.output_transform is None
    )


def linear_layers(model: Transformer) -> int:
    """Counts the linear layers of a model, the output projection included where it is tied."""
    linears = sum(isinstance(module, torch.nn.Linear) for module in model.modules())
    return linears + (model.output is None)
