"""Graphs of the portable variant: torch modules with flat tensors in and out.

The encoder of an encoder-decoder returns the cross keys and values of every decoder layer. One
`decoder` graph serves the first step (past of length 0), all later steps, and the prompt of a
decoder-only model. `select` gathers rows of the cache, so that the search can drop and reorder rows
on the device. An encoder-only model is one graph, which returns `Transformer.answers`.
"""

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn

from transferry.build_model.model.recurrence import CellState
from transferry.build_model.model.transformer import Transformer
from transferry.build_model.own.model import OwnModel, refused_trace
from transferry.export.trace.graph import (
    Graph,
    Module,
    Traces,
    cache_specs,
    export_modules,
    flatten,
    pair,
    spec,
    state_specs,
)
from transferry.runtime.bundle.specs import GRAPHS


class ModelGraph(nn.Module):
    """A graph that reads the model's weights."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model


class EncoderGraph(ModelGraph):
    """source, source_mask -> cross keys and values of every decoder layer."""

    def forward(self, source: Tensor, source_mask: Tensor) -> tuple[Tensor, ...]:
        """Shapes as in `Transformer.encode` and `Transformer.cross`."""
        return flatten(self.model.cross(self.model.encode(source, source_mask)))


class EncoderOnlyGraph(ModelGraph):
    """source, source_mask -> hidden, head, logits of an encoder-only model."""

    def forward(self, source: Tensor, source_mask: Tensor) -> tuple[Tensor, ...]:
        """Shapes as in `Transformer.answers`; float32 in every precision, as the runtime reads."""
        return tuple(each.float() for each in self.model.answers(source, source_mask).values())


class DecoderGraph(ModelGraph):
    """target, mask, cross, past -> logits, present."""

    def forward(self, target: Tensor, mask: Tensor, *cache: Tensor) -> tuple[Tensor, ...]:
        """Shapes as in `Transformer.decode`; `cache` is all of cross, then all of past."""
        crosses = 2 * len(self.model.decoder) if self.model.encoder else 0
        cross, past = cache[:crosses], cache[crosses:]
        states = [CellState(cell) for cell in past] if self.model.config.recurrent else pair(past)
        logits, present = self.model.decode(target, mask, pair(cross), states)
        return logits, *flatten(present)


class SelectGraph(nn.Module):
    """rows, state -> the selected rows of every tensor of the state."""

    def forward(self, rows: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """Gathers rows `[selected]` of each state `[batch, heads, length, d_head]`."""
        return tuple(tensor.index_select(0, rows) for tensor in state)


def export_graphs(
    model: Transformer, names: Sequence[str] | None = None, traces: Traces | None = None
) -> dict[str, Graph]:
    """Exports the graphs of the portable variant: standard ONNX operators only, float32."""
    config = model.config
    cache = partial(cache_specs, config)
    source = spec("source", "int64", "batch", "source")
    mask = spec("source_mask", "bool", "batch", "source")
    cross = cache("cross", "batch", "source")
    encoder: Module = (EncoderGraph(model), (source, mask), cross)
    if not config.decoder_layers:
        outputs = [spec("hidden", "float32", "batch", "source", config.d_model)]
        if config.has_head:
            of_each = ("batch",) if config.pooling else ("batch", "source")
            outputs.append(spec("head", "float32", *of_each, config.d_head_output))
        if config.lm_head:
            outputs.append(spec("logits", "float32", "batch", "source", config.vocabulary_size))
        encoder = (EncoderOnlyGraph(model), (source, mask), tuple(outputs))
    past_mask = spec("past_mask", "bool", "batch", "past")
    read = (mask, *cross) if config.encoder_layers else (past_mask,)
    past, present = cache("past", "batch", "past"), cache("present", "batch", "past + target")
    if config.recurrent:
        past, present = (state_specs(config, role, "batch", 1, 1) for role in ("past", "present"))
    target = spec("target", "int64", "batch", "target")
    logits = spec("logits", "float32", "batch", "target", config.vocabulary_size)
    modules: dict[str, Module] = {
        "encoder": encoder,
        "decoder": (
            DecoderGraph(model),
            (target, *read, *past),
            (logits, *present),
        ),
        "select": (
            SelectGraph(),
            (spec("rows", "int64", "selected"), *cache("state", "batch", "length")),
            cache("selected", "selected", "length"),
        ),
    }
    chosen = {name: modules[name] for name in names or GRAPHS[config.architecture]}
    try:
        return export_modules(chosen, traces=traces)
    except Exception as error:  # the exporter raises errors of many kinds
        if not isinstance(model, OwnModel):
            raise
        raise refused_trace(error) from error
