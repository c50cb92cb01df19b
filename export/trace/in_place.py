"""Graphs of the fused variants: a cache in place, with one slot per sentence.

The portable decoder returns a longer cache at every step. The fused one writes into buffers of
fixed capacity, into cells that the host chooses, and a bias hides the columns that a token must not
see. Prompts of one batch may therefore differ in length, and the beams of a sentence share one
slot: the bias alone says which columns a beam descends from. Reordering beams moves no column, and
a column that no beam descends from is written again.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transferry.build_model.model.attention import KeyValues
from transferry.build_model.model.recurrence import CellState
from transferry.build_model.model.transformer import Transformer
from transferry.export.trace.graph import (
    Graph,
    Module,
    Specs,
    Traces,
    cache_specs,
    export_modules,
    flatten,
    pair,
    spec,
    state_specs,
)
from transferry.export.trace.portable import EncoderGraph, ModelGraph, SelectGraph
from transferry.runtime.bundle.specs import TensorSpec
from transferry.runtime.decoding.logits import SEGMENT

# The first opset with TensorScatter.
FUSED_OPSET = 24


@dataclass(frozen=True)
class CacheInPlace:
    """Cache buffers of one layer, with the cells for new keys and values.

    Attributes:
        keys: `[batch, kv_heads, capacity, d_head]`
        values: `[batch, kv_heads, capacity, d_head]`
        cells: Slot, head and column `[batch, target, kv_heads, 3]`, int64.
    """

    keys: Tensor
    values: Tensor
    cells: Tensor

    def append(self, newer: KeyValues) -> KeyValues:
        """Returns the buffers with the new columns written."""
        return KeyValues(self._written(self.keys, newer[0]), self._written(self.values, newer[1]))

    def _written(self, buffer: Tensor, newer: Tensor) -> Tensor:
        # Undoes the transpose of the split into heads, so that the optimiser drops both.
        return _in_place("ScatterND", buffer, self.cells, newer.transpose(1, 2))


class CellOfEach(CellState):
    """The state before each token `[batch, target, d_model]`; each token continues another row."""

    def continued(self, forget: Tensor, given: Tensor, longest: int) -> tuple[Tensor, CellState]:
        """See `CellState.continued`; the state has the shape of the tokens."""
        cells = given + forget * self.cell
        return cells, CellState(cells.reshape(-1, cells.shape[-1]))


class FusedDecoderGraph(ModelGraph):
    """target, positions, cells, bias, columns, cross, past -> hidden, present.

    The present is the past, written in place. `columns` is there where a layer has a window, or
    distances count.
    """

    def forward(
        self, target: Tensor, positions: Tensor, cells: Tensor, bias: Tensor, *cache: Tensor
    ) -> tuple[Tensor, ...]:
        """Runs the decoder over new tokens of every sentence.

        Args:
            target: Tokens of a prompt, or one token per beam `[batch, target]`, int64.
            positions: Their positions `[batch, target]`, int64.
            cells: Cells for their keys and values `[batch, target, kv_heads, 3]`, int64.
            bias: 0 at columns that a token sees, its own included, else minus infinity
                `[batch, 1, target, capacity]`.
            cache: Where they count, the positions of the keys `[batch, capacity]`, int64; with an
                encoder the bias of the source `[batch, 1, 1, source]` and all of cross, as
                `EncoderGraph` returns it; then all of past `[batch, kv_heads, capacity, d_head]`.
        """
        cross_bias, cross, columns = None, [], positions
        if self.model.config.looks_at_columns:
            columns, cache = cache[0], cache[1:]
        dtype = self.model.embedding.weight.dtype
        if self.model.encoder:
            crosses = 2 * len(self.model.decoder)
            cross_bias, cross = cache[0], pair(cache[1 : 1 + crosses])
            cache = cache[1 + crosses :]
        hidden, present = self.model.decode_at(
            target,
            positions,
            columns,
            bias.to(dtype),
            None if cross_bias is None else cross_bias.to(dtype),
            cross,
            [CacheInPlace(*tensors, cells) for tensors in pair(cache)],
        )
        return hidden, *flatten(present)


class RecurrentDecoderGraph(ModelGraph):
    """target, rows, source_bias, cross, past -> hidden, present: one token of each row."""

    def forward(
        self, target: Tensor, rows: Tensor, source_bias: Tensor, *cache: Tensor
    ) -> tuple[Tensor, ...]:
        """Runs the decoder over the next token of every row.

        Args:
            target: One token per beam `[batch, target]`, int64.
            rows: The row of past that each continues `[batch, target]`, int64.
            source_bias: Of the source `[batch, 1, 1, source]`.
            cache: All of cross, as `EncoderGraph` returns it; then all of past `[past, d_model]`.
        """
        crosses = 2 * len(self.model.decoder)
        cross, past = pair(cache[:crosses]), cache[crosses:]
        bias = source_bias.to(self.model.embedding.weight.dtype)
        states = [CellOfEach(F.embedding(rows, each)) for each in past]
        hidden, present = self.model.decode_at(target, None, None, None, bias, cross, states)
        return hidden, *flatten(present)


class HeadGraph(ModelGraph):
    """hidden -> logits.

    A graph of its own: prompts need no logits, and screened greedy search few of them.
    """

    def forward(self, hidden: Tensor) -> Tensor:
        """Projects hidden `[rows, d_model]` to logits `[rows, vocabulary]`."""
        return self.model.logits(hidden).float()


class SumsGraph(nn.Module):
    """logits -> sums of their exponentials, segment maxima."""

    def forward(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Returns sums `[rows]` and segment maxima `[rows, segments]`.

        Logits `[rows, vocabulary]` beyond the last whole segment are segments of one token.
        """
        segments, left = divmod(logits.shape[1], SEGMENT)
        maxima = logits.clone()  # a graph's output cannot be its input
        if segments:
            whole = logits[:, : segments * SEGMENT] if left else logits
            maxima = whole.reshape(-1, segments, SEGMENT).amax(dim=2)
            if left:
                maxima = torch.cat([maxima, logits[:, segments * SEGMENT :]], dim=1)
        return logits.exp().sum(dim=1), maxima


class GatherGraph(nn.Module):
    """index, state -> the selected columns of every tensor of the cache."""

    def forward(self, index: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """Gathers columns `[selected, heads, columns, d_head]` of each state.

        Args:
            index: (slot * heads + head) * capacity + column `[selected, heads, columns]`, int64.
            state: The cache `[batch, heads, capacity, d_head]`.
        """
        return tuple(F.embedding(index, each.reshape(-1, each.shape[-1])) for each in state)


class MoveGraph(nn.Module):
    """rows, places, state -> moved (state with some rows copied, written in place)."""

    def forward(self, rows: Tensor, places: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """Copies rows `[selected]` of each state to other rows, `places` `[selected]`."""
        return tuple(each.index_put((places,), each[rows]) for each in state)


class PlaceGraph(nn.Module):
    """write, fresh, state -> placed (state with fresh columns, written in place).

    Both fresh and state are cross, as `EncoderGraph` returns it.
    """

    def forward(self, write: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Writes the columns of each fresh into its state, from column write `[batch]` on."""
        half = len(tensors) // 2
        return tuple(
            _in_place("TensorScatter", state, fresh, write, axis=-2)
            for fresh, state in zip(tensors[:half], tensors[half:], strict=True)
        )


def _in_place(kind: str, buffer: Tensor, *inputs: Tensor, **attributes: Any) -> Tensor:
    """Returns an operator's output, for which onnxruntime can reuse the buffer."""
    return torch.onnx.ops.symbolic(
        kind,
        (buffer, *inputs),
        attrs=attributes,
        dtype=buffer.dtype,
        shape=buffer.shape,
        version=FUSED_OPSET,
    )


def export_fused_graphs(
    model: Transformer, cache_type: str | None = None, traces: Traces | None = None
) -> dict[str, Graph]:
    """Exports the graphs of a fused variant of a model with a decoder, before any rewriting.

    Biases and logits are float32 in every precision, so that the host handles one type only; the
    cache has the model's.
    """
    config = model.config
    precision = str(model.embedding.weight.dtype).removeprefix("torch.")
    stored = partial(cache_specs, config, dtype=cache_type or precision)
    hidden = spec("hidden", precision, "rows", config.d_model)
    logits = spec("logits", "float32", "rows", config.vocabulary_size)
    rows = spec("rows", "int64", "selected")
    state = stored("state", "batch", "capacity")
    # With both caches in one graph, names tell them apart.
    both: Specs = state
    if config.encoder_layers:
        both = (*stored("state", "batch", "source", prefix="cross."), *state)
    if config.recurrent:
        both = stored("state", "batch", "source")  # a selection does not move the states of rows
    segments = sum(divmod(config.vocabulary_size, SEGMENT))
    sums = (
        spec("exp_sums", "float32", "rows"),
        spec("segment_maxima", "float32", "rows", segments),
    )
    modules: dict[str, Module] = {
        "decoder": _decoder(model, precision, hidden),
        "lm_head": (HeadGraph(model), (hidden,), (logits,)),
        "exp_sums": (SumsGraph(), (logits,), sums),
    }
    if not config.recurrent:  # whose cache has no columns
        index = spec("index", "int64", "selected", config.kv_heads, "columns")
        gathered = stored("gathered", "selected", "columns")
        modules["gather"] = (GatherGraph(), (index, *state), gathered)
    moved = tuple(replace(each, name=f"moved.{each.name}", role="moved") for each in both)
    places = spec("places", "int64", "selected")
    modules["move"] = (MoveGraph(), (rows, places, *both), moved)
    if config.encoder_layers:
        source = spec("source", "int64", "batch", "source")
        mask = spec("source_mask", "bool", "batch", "source")
        cross = cache_specs(config, "cross", "batch", "source", precision)
        modules["encoder"] = (EncoderGraph(model), (source, mask), cross)
        source_state = stored("state", "batch", "source")
        selected = stored("selected", "selected", "source")
        modules["select"] = (SelectGraph(), (rows, *source_state), selected)
        write, fresh = spec("write", "int64", "batch"), stored("fresh", "batch", "new")
        placed = stored("placed", "batch", "source")
        modules["place"] = (PlaceGraph(), (write, *fresh, *source_state), placed)
    return export_modules(modules, FUSED_OPSET, traces)


def _decoder(model: Transformer, precision: str, hidden: TensorSpec) -> Module:
    """Returns the decoder, with a KV cache in place or a recurrent state per row."""
    config = model.config
    target = spec("target", "int64", "batch", "target")
    read: Specs = ()
    if config.encoder_layers:
        cross = cache_specs(config, "cross", "batch", "source", precision)
        read = (spec("source_bias", "float32", "batch", 1, 1, "source"), *cross)
    if config.recurrent:
        cell = partial(state_specs, config, dtype=precision)
        rows = spec("rows", "int64", "batch", "target")
        inputs = (target, rows, *read, *cell("past", "past"))
        return RecurrentDecoderGraph(model), inputs, (hidden, *cell("present", "rows"))
    cache = partial(cache_specs, config, batch="batch", length="capacity", dtype=precision)
    placed = (spec("columns", "int64", "batch", "capacity"),) if config.looks_at_columns else ()
    inputs = (
        target,
        spec("positions", "int64", "batch", "target"),
        spec("cells", "int64", "batch", "target", config.kv_heads, 3),
        spec("bias", "float32", "batch", 1, "target", "capacity"),
        *placed,
        *read,
        *cache("past"),
    )
    return FusedDecoderGraph(model), inputs, (hidden, *cache("present"))
