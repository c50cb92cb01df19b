"""The ways to compute a model that a bundle may hold, and how the graphs of each are made."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from transferry.build_model.transformer import Transformer
from transferry.export.calibration import Activation
from transferry.export.fusion import FloatKernels, Fusion, Kernels, drop_unused
from transferry.export.graphs import OPSET, Graph, export_graphs
from transferry.export.int8 import Int8Kernels, quantise_embedding
from transferry.export.slot_graphs import OPSET as SLOT_OPSET
from transferry.export.slot_graphs import export_slot_graphs
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


def export_variant(
    model: Transformer, name: str, calibration: Mapping[str, Activation] | None = None
) -> tuple[dict[str, Graph], int]:
    """Exports the graphs of a variant.

    Args:
        model: The model in float32, in eval mode.
        name: One of `RECIPES`.
        calibration: What an int8 variant quantises activations with.

    Returns:
        The graphs by name, and the version of the standard operators that they use.

    Raises:
        UsageError: There is no such variant, or an int8 variant is not calibrated.
        ParityError: Not every linear layer was fused.
    """
    if name not in RECIPES:
        raise UsageError(f"there is no variant {name!r}; expected one of {', '.join(RECIPES)}")
    recipe = RECIPES[name]
    if recipe.precision == "int8" and calibration is None:
        raise UsageError(f"variant {name} is quantised by text like yours: add --calibrate FILE")
    if not recipe.fused:
        return export_graphs(model, recipe.prefix), OPSET
    if recipe.dtype != torch.float32:
        model = copy.deepcopy(model).to(recipe.dtype)
    if model.config.decoder_layers:
        graphs, opset = export_slot_graphs(model, recipe.prefix), SLOT_OPSET
    else:
        graphs, opset = export_graphs(model, recipe.prefix), OPSET
    linears = 0
    for graph in graphs.values():
        kernels: Kernels = FloatKernels()
        if recipe.precision == "int8":
            assert calibration is not None
            kernels = Int8Kernels(calibration)
        outputs = [spec.name for spec in graph.spec.outputs if len(spec.shape) == 2]
        linears += Fusion(graph.model, kernels, outputs).run()
        if recipe.precision == "int8":
            quantise_embedding(graph.model.graph, EMBEDDING)
        drop_unused(graph.model.graph)
    expected = linear_layers(model)
    if linears != expected:
        raise ParityError(
            f"variant {name}: expected {expected} linear layers in the graphs, found {linears}; "
            "the exporter wrote some in another way"
        )
    return graphs, opset


def linear_layers(model: Transformer) -> int:
    """Counts the linear layers of a model, the output projection included where it is tied."""
    linears = sum(isinstance(module, torch.nn.Linear) for module in model.modules())
    return linears + (model.output is None)
