"""The graphs of the fused variants: a cache in place, in slots of sentences.

The portable decoder makes a longer cache at every step. This one writes into buffers of a given
capacity, where the host says, and reads what a bias lets it see. So prompts of one batch may be of
different lengths, and the beams of a sentence share one cache: which of its columns a beam descends
from is in the bias, no column moves because beams do, and one that no beam descends from is written
again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transferry.build_model.attention import KeyValues
from transferry.build_model.transformer import Transformer
from transferry.export.graphs.portable import (
    EncoderGraph,
    Graph,
    SelectGraph,
    export_graph,
    flatten,
    pair,
    silenced,
)
from transferry.runtime.bundle import GraphSpec, Role, TensorSpec
from transferry.runtime.decoding.logits import SEGMENT

# The first that has TensorScatter.
OPSET = 24


@dataclass(frozen=True)
class CacheInPlace:
    """Keys and values [batch, kv_heads, capacity, d_head], and the cells that new ones go to.

    Attributes:
        cells: Slot, head and column [batch, target, kv_heads, 3].
    """

    keys: Tensor
    values: Tensor
    cells: Tensor

    def append(self, newer: KeyValues) -> KeyValues:
        """Returns the buffers after the new columns were written into them."""
        return KeyValues(self._written(self.keys, newer[0]), self._written(self.values, newer[1]))

    def _written(self, buffer: Tensor, newer: Tensor) -> Tensor:
        # As they were before they were split into heads, which then need not be done.
        rows = newer.transpose(1, 2)
        return _in_place("ScatterND", buffer, self.cells, rows)


class SlotDecoderGraph(nn.Module):
    """target, positions, cells, bias, cross and past -> hidden and present, written in place."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, target: Tensor, positions: Tensor, cells: Tensor, bias: Tensor, *cache: Tensor
    ) -> tuple[Tensor, ...]:
        """Runs the decoder over new tokens of every sentence.

        Args:
            target: [batch, target] int64: of each sentence its beams' tokens, or a prompt's.
            positions: Of the tokens [batch, target] int64.
            cells: Where in the cache each token's keys and values go: slot, head and column
                [batch, target, kv_heads, 3] int64.
            bias: [batch, 1, target, capacity]: 0 at the columns that a token sees, its own
                included, and minus infinity elsewhere.
            cache: Where there is an encoder, the same for the source [batch, 1, 1, source] and
                all of cross, as `EncoderGraph` gives it; then all of past [batch, kv_heads,
                capacity, d_head].
        """
        cross_bias, cross = None, []
        if self.model.encoder:
            crosses = 2 * len(self.model.decoder)
            cross_bias, columns, cache = cache[0], cache[1 : 1 + crosses], cache[1 + crosses :]
            cross = pair(columns)
        dtype = self.model.embedding.weight.dtype
        hidden, present = self.model.decode_at(
            target,
            positions,
            bias.to(dtype),
            None if cross_bias is None else cross_bias.to(dtype),
            cross,
            [CacheInPlace(*tensors, cells) for tensors in pair(cache)],
        )
        return hidden, *flatten(present)


class HeadGraph(nn.Module):
    """hidden -> logits.

    A graph of its own: a prompt needs none, and greedy search seldom all of them.
    """

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, hidden: Tensor) -> Tensor:
        """Projects hidden [batch * target, d_model] to [batch * target, vocabulary]."""
        return self.model.logits(hidden).float()


class SumsGraph(nn.Module):
    """logits -> sums, peaks: what makes probabilities of them, and where the likeliest are."""

    def forward(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the sums of exponentials `[rows]` and the segment maxima of the logits."""
        segments, left = divmod(logits.shape[1], SEGMENT)
        peaks = logits.clone()  # an output is no input
        if segments:
            whole = logits[:, : segments * SEGMENT] if left else logits
            peaks = whole.reshape(-1, segments, SEGMENT).amax(dim=2)
            if left:
                peaks = torch.cat([peaks, logits[:, segments * SEGMENT :]], dim=1)
        return logits.exp().sum(dim=1), peaks


class GatherGraph(nn.Module):
    """index, state -> the chosen columns of every tensor of the cache."""

    def forward(self, index: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """Takes columns of each state [batch, heads, capacity, d_head], all counted as one row.

        Args:
            index: (slot * heads + head) * capacity + column [selected, heads, columns].
            state: The cache.

        Returns:
            Of each state [selected, heads, columns, d_head].
        """
        return tuple(F.embedding(index, each.reshape(-1, each.shape[-1])) for each in state)


class MoveGraph(nn.Module):
    """rows, places and state -> state with some rows in other places too, written in place."""

    def forward(self, rows: Tensor, places: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """Copies rows [selected] of each state to places [selected], none of which are rows."""
        return tuple(each.index_put((places,), each[rows]) for each in state)


class PlaceGraph(nn.Module):
    """write, fresh and state -> state with fresh in it, written in place.

    Both are cross, as `EncoderGraph` gives it.
    """

    def forward(self, write: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Puts the columns of each fresh into its state, from column write [batch] on."""
        half = len(tensors) // 2
        fresh, state = tensors[:half], tensors[half:]
        return tuple(
            _in_place("TensorScatter", *each, write, axis=-2)
            for each in zip(state, fresh, strict=True)
        )


def _in_place(kind: str, buffer: Tensor, *inputs: Tensor, **attributes: Any) -> Tensor:
    """Returns what an operator makes of a buffer, which onnxruntime lets it write into."""
    return torch.onnx.ops.symbolic(
        kind,
        (buffer, *inputs),
        attrs=attributes,
        dtype=buffer.dtype,
        shape=buffer.shape,
        version=OPSET,
    )


def export_slot_graphs(
    model: Transformer, prefix: str, *, stored: str | None = None
) -> dict[str, Graph]:
    """Exports the graphs of a fused variant, before any rewriting.

    Biases and logits are float32 whatever the model computes in, so that the host need know of no
    other type; the cache has the model's.

    Args:
        model: Encoder-decoder or decoder-only, in eval mode and in the variant's precision.
        prefix: What the names of the files begin with, a folder included.
        stored: What the cache is stored in, "int8" or else the model's precision. The encoder and
            the decoder are written for the model's all the same.

    Returns:
        The graphs by name.
    """
    config = model.config
    has_encoder = bool(config.encoder_layers)
    precision = str(model.embedding.weight.dtype).removeprefix("torch.")
    stored = stored or precision

    def ids(role: Role, *shape: str | int) -> TensorSpec:
        return TensorSpec(role, role, "int64", shape)

    def floats(role: Role, *shape: str | int) -> TensorSpec:
        return TensorSpec(role, role, "float32", shape)

    def cache(
        role: Role, batch: str, columns: str, kind: str = precision, prefix: str = ""
    ) -> tuple[TensorSpec, ...]:
        shape = (batch, config.kv_heads, columns, config.d_head)
        return tuple(
            TensorSpec(f"{prefix}{role}.{layer}.{part}", role, kind, shape)
            for layer in range(config.decoder_layers)
            for part in ("keys", "values")
        )

    past, present = cache("past", "batch", "capacity"), cache("present", "batch", "capacity")

    whole, left = divmod(config.vocabulary_size, SEGMENT)
    segments = whole + left
    source = ids("source", "batch", "source")
    mask = TensorSpec("source_mask", "source_mask", "bool", ("batch", "source"))
    cross = cache("cross", "batch", "source")
    read = (floats("source_bias", "batch", 1, 1, "source"), *cross)
    modules: dict[str, tuple[nn.Module, tuple[TensorSpec, ...], tuple[TensorSpec, ...]]] = {
        "decoder": (
            SlotDecoderGraph(model),
            (
                ids("target", "batch", "target"),
                ids("positions", "batch", "target"),
                ids("cells", "batch", "target", config.kv_heads, 3),
                floats("bias", "batch", 1, "target", "capacity"),
                *(read if has_encoder else ()),
                *past,
            ),
            (
                TensorSpec("hidden", "hidden", precision, ("rows", config.d_model)),
                *present,
            ),
        ),
        "head": (
            HeadGraph(model),
            (TensorSpec("hidden", "hidden", precision, ("rows", config.d_model)),),
            (floats("logits", "rows", config.vocabulary_size),),
        ),
        "sums": (
            SumsGraph(),
            (floats("logits", "rows", config.vocabulary_size),),
            (floats("sums", "rows"), floats("peaks", "rows", segments)),
        ),
        "gather": (
            GatherGraph(),
            (
                ids("index", "selected", config.kv_heads, "columns"),
                *cache("state", "batch", "capacity", stored),
            ),
            cache("gathered", "selected", "columns", stored),
        ),
    }
    both = cache("state", "batch", "capacity", stored)
    if has_encoder:
        both = (*cache("state", "batch", "source", stored, "cross."), *both)
    modules["move"] = (
        MoveGraph(),
        (ids("rows", "selected"), ids("places", "selected"), *both),
        tuple(TensorSpec(f"moved.{each.name}", "moved", each.type, each.shape) for each in both),
    )
    if has_encoder:
        modules["encoder"] = (EncoderGraph(model), (source, mask), cross)
        modules["select"] = (
            SelectGraph(),
            (ids("rows", "selected"), *cache("state", "batch", "source", stored)),
            cache("selected", "selected", "source", stored),
        )
        modules["place"] = (
            PlaceGraph(),
            (
                ids("write", "batch"),
                *cache("fresh", "batch", "new", stored),
                *cache("state", "batch", "source", stored),
            ),
            cache("placed", "batch", "source", stored),
        )
    with silenced():
        return {
            name: export_graph(module, GraphSpec(f"{prefix}{name}.onnx", inputs, outputs), OPSET)
            for name, (module, inputs, outputs) in modules.items()
        }
