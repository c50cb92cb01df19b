"""The graphs of a variant: torch modules with flat tensors in and out, turned into ONNX.

Of an encoder-decoder, `encoder` gives every decoder layer's cross keys and values, `decoder` serves
the first step and all later ones (the past has length 0 at first), `select` takes rows of the
cache, so that the search can drop and reorder rows where the cache lies. Without an encoder the
same `decoder` also reads the prompt. An `encoder` alone gives hidden states and scores of tokens.
Every dimension that varies is dynamic.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import onnxscript.optimizer
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from transferry.build_model.attention import KeyValues
from transferry.build_model.transformer import Transformer
from transferry.runtime.bundle import GRAPHS, GraphSpec, Role, TensorSpec

# The exporter's own opset, so that nothing is converted afterwards: 23 and later have an Attention
# operator, whose kernel is slower than the products it stands for and which fewer runtimes know.
OPSET = 20


@dataclass(frozen=True)
class Graph:
    """An exported graph, and where it comes from.

    Attributes:
        model: The graph.
        spec: What the manifest says of it.
        program: What torch traced, from which the graph was made: most values have the same names.
            None where the graph was read from a file.
    """

    model: ir.Model
    spec: GraphSpec
    program: ExportedProgram | None = None


class EncoderGraph(nn.Module):
    """source, source_mask -> cross keys and values of every decoder layer."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, source: Tensor, source_mask: Tensor) -> tuple[Tensor, ...]:
        """See `Transformer.encode` and `Transformer.cross` for the shapes."""
        return flatten(self.model.cross(self.model.encode(source, source_mask)))


class ReaderGraph(nn.Module):
    """source, source_mask -> hidden and logits: an encoder alone."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, source: Tensor, source_mask: Tensor) -> tuple[Tensor, Tensor]:
        """See `Transformer.encode` and `Transformer.logits` for the shapes."""
        hidden = self.model.encode(source, source_mask)
        return hidden, self.model.logits(hidden)


class DecoderGraph(nn.Module):
    """target, mask, cross and past -> logits and present."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, target: Tensor, mask: Tensor, *cache: Tensor) -> tuple[Tensor, ...]:
        """See `Transformer.decode` for the shapes; `cache` is all of cross, then all of past."""
        crosses = len(cache) // 2 if self.model.encoder else 0
        cross, past = cache[:crosses], cache[crosses:]
        logits, present = self.model.decode(target, mask, pair(cross), pair(past))
        return logits, *flatten(present)


class SelectGraph(nn.Module):
    """rows, state -> the chosen rows of every tensor of the state."""

    def forward(self, rows: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """Takes rows [selected] of each state [batch, heads, length, d_head]."""
        return tuple(tensor.index_select(0, rows) for tensor in state)


def flatten(caches: Sequence[KeyValues]) -> tuple[Tensor, ...]:
    """Layer by layer, keys then values."""
    return tuple(tensor for cache in caches for tensor in cache)


def pair(tensors: Sequence[Tensor]) -> list[KeyValues]:
    """Undoes `flatten`."""
    return [KeyValues(*both) for both in zip(tensors[::2], tensors[1::2], strict=True)]


def export_graphs(
    model: Transformer, prefix: str, names: Sequence[str] | None = None
) -> dict[str, Graph]:
    """Exports the graphs of the portable variant: standard ONNX operators only, float32.

    Args:
        model: The model, in eval mode.
        prefix: What the names of the files begin with, a folder included.
        names: Which graphs; by default those that `runtime.bundle.GRAPHS` lists for the
            architecture.

    Returns:
        The graphs by name.
    """
    config = model.config
    layers = range(config.decoder_layers)
    source = TensorSpec("source", "source", "int64", ("batch", "source"))
    mask = TensorSpec("source_mask", "source_mask", "bool", ("batch", "source"))
    past_mask = TensorSpec("past_mask", "past_mask", "bool", ("batch", "past"))
    target = TensorSpec("target", "target", "int64", ("batch", "target"))
    rows = TensorSpec("rows", "rows", "int64", ("selected",))
    logits = TensorSpec("logits", "logits", "float32", ("batch", "target", config.vocabulary_size))

    def cache(role: Role, length: str, batch: str = "batch") -> tuple[TensorSpec, ...]:
        shape = (batch, config.kv_heads, length, config.d_head)
        return tuple(
            TensorSpec(f"{role}.{layer}.{part}", role, "float32", shape)
            for layer in layers
            for part in ("keys", "values")
        )

    has_encoder = bool(config.encoder_layers)
    encoder: tuple[nn.Module, tuple[TensorSpec, ...], tuple[TensorSpec, ...]]
    encoder = (EncoderGraph(model), (source, mask), cache("cross", "source"))
    if not config.decoder_layers:
        shape = ("batch", "source", config.d_model)
        hidden = TensorSpec("hidden", "hidden", "float32", shape)
        shape = ("batch", "source", config.vocabulary_size)
        scores = TensorSpec("logits", "logits", "float32", shape)
        encoder = (ReaderGraph(model), (source, mask), (hidden, scores))
    read = (mask, *cache("cross", "source")) if has_encoder else (past_mask,)
    specs: dict[str, tuple[nn.Module, tuple[TensorSpec, ...], tuple[TensorSpec, ...]]] = {
        "encoder": encoder,
        "decoder": (
            DecoderGraph(model),
            (target, *read, *cache("past", "past")),
            (logits, *cache("present", "past + target")),
        ),
        "select": (
            SelectGraph(),
            (rows, *cache("state", "length")),
            cache("selected", "length", "selected"),
        ),
    }
    with silenced():
        return {
            name: export_graph(module, GraphSpec(f"{prefix}{name}.onnx", inputs, outputs))
            for name in names or GRAPHS[config.architecture]
            for module, inputs, outputs in [specs[name]]
        }


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Torch's exporter warns of its own affairs; what matters is checked afterwards."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def export_graph(module: nn.Module, spec: GraphSpec, opset: int = OPSET) -> Graph:
    """Traces the module with sizes that no two dimensions share, each dynamic."""
    inputs, outputs = spec.inputs, spec.outputs
    sizes = {"batch": 2, "source": 7, "target": 3, "past": 5, "length": 5, "selected": 3}
    sizes |= {"capacity": 11, "new": 4, "rows": 6, "columns": 12}
    examples = [_example(spec, sizes) for spec in inputs]
    dynamic = [
        {axis: size for axis, size in enumerate(spec.shape) if isinstance(size, str)}
        for spec in inputs
    ]
    # forward(a, b, *cache) takes the shapes of *cache as one tuple; forward(a, b) has none.
    kinds = [parameter.kind for parameter in inspect.signature(module.forward).parameters.values()]
    several = inspect.Parameter.VAR_POSITIONAL
    fixed = kinds.index(several) if several in kinds else len(inputs)
    shapes = (*dynamic[:fixed], tuple(dynamic[fixed:])) if several in kinds else tuple(dynamic)
    program = torch.onnx.export(
        module.eval(),
        tuple(examples),
        dynamic_shapes=shapes,
        input_names=[spec.name for spec in inputs],
        output_names=[spec.name for spec in outputs],
        opset_version=opset,
        dynamo=True,
        optimize=False,
        verbose=False,
    )
    assert program is not None
    # Folding a Transpose would store a Linear's weight a second time, and the tied embedding too;
    # onnxruntime folds it when it opens the graph.
    onnxscript.optimizer.optimize_ir(
        program.model, should_fold=lambda node: False if node.op_type == "Transpose" else None
    )
    _strip(program.model)
    return Graph(program.model, spec, program.exported_program)


def _example(spec: TensorSpec, sizes: dict[str, int]) -> Tensor:
    shape = [size if isinstance(size, int) else sizes[size] for size in spec.shape]
    if spec.type == "bool":
        return torch.ones(shape, dtype=torch.bool)
    if spec.type == "int64":
        return torch.ones(shape, dtype=torch.int64)
    return torch.zeros(shape, dtype=getattr(torch, spec.type))


def _strip(model: ir.Model) -> None:
    """Drops what tells of the machine that exported: stack traces, paths, names of modules."""
    model.doc_string = None
    model.metadata_props.clear()
    graphs: list[Any] = [model.graph, *model.functions.values()]
    for graph in graphs:
        graph.doc_string = None
        graph.metadata_props.clear()
        for node in graph:
            node.doc_string = None
            node.metadata_props.clear()
            for value in node.outputs:
                value.doc_string = None
                value.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.doc_string = None
        value.metadata_props.clear()
