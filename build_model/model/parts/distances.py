"""Biases of relative distances, the scaled output, and a second stack over the same text.

The parts of T5 and MPNet, and of the classifiers of BART.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transferry.build_model.model.attention import Places, causal_bias, padding_bias
from transferry.build_model.model.layers import Layer
from transferry.build_model.model.norms import make_norm
from transferry.build_model.model.shape import LATER, Size, SizeOrNone, TransformerConfig
from transferry.build_model.model.transformer import Stack, Transformer
from transferry.runtime.errors import require
from transferry.runtime.settings import Whole


@dataclass(frozen=True)
class DistancesConfig(TransformerConfig):
    """Biases of relative distances.

    Attributes:
        relative_buckets: Buckets of distances; the number of a bucket and head is added to the
            scores (Raffel et al. 2020, section 2.1). 0 disables them.
        relative_distance: The distance from which all share the last bucket.
        relative_by_layer: Each layer has biases of its own, as in UMT5.
        scale_output: Divide the decoder's output by sqrt(d_model), as in T5.
    """

    relative_buckets: SizeOrNone = 0
    relative_distance: Size = 128
    relative_by_layer: bool = field(default=False, metadata=LATER)
    scale_output: bool = False

    def parts(self) -> tuple[type[Any], ...]:
        own = (Distances,) if self.relative_buckets else ()
        return (*super().parts(), *own, *((ScaledOutput,) if self.scale_output else ()))

    @property
    def looks_at_columns(self) -> bool:
        return bool(self.relative_buckets) or super().looks_at_columns


class Distances(Transformer):
    """A Transformer that adds a number for each distance to the scores."""

    config: DistancesConfig

    def build(self) -> None:
        super().build()
        config, layers = self.config, self.config.encoder_layers
        if layers:
            own = config.encoder_config()
            self.encoder_distance = distances(own, layers, both_ways=True)
        if config.decoder_layers:
            self.decoder_distance = distances(config, config.decoder_layers, both_ways=False)

    def biases(self, stack: Stack, bias: Tensor, places: Places) -> list[Tensor]:
        numbers, distance = self.get_submodule(f"{stack}_distance"), -places.distance
        if isinstance(numbers, RelativeBias):
            return super().biases(stack, bias + numbers(distance), places)
        found = super().biases(stack, bias, places)
        return [
            each + relative(distance)
            for each, relative in zip(found, numbers, strict=True)  # type: ignore[call-overload]
        ]


class ScaledOutput(Transformer):
    """A Transformer that divides the decoder's output by sqrt(d_model)."""

    def finished(self, x: Tensor) -> Tensor:
        x = super().finished(x)
        return x / math.sqrt(x.shape[-1])


class RelativeBias(nn.Module):
    """A number for each head and bucket of distances, added to the scores.

    Raffel et al. (2020), section 2.1: half of the buckets are single distances, the rest grow with
    the logarithm up to the longest distance, beyond which all share the last one.
    """

    buckets: Tensor

    def __init__(self, config: DistancesConfig, *, both_ways: bool) -> None:
        super().__init__()
        self.longest = config.relative_distance
        self.weight = nn.Parameter(torch.zeros(config.relative_buckets, config.heads))
        # As the table of a lookup: the exporter would store a reshaped copy, unknown to verify.
        buckets = self._buckets(config, both_ways)[:, None]
        self.register_buffer("buckets", buckets, persistent=False)

    def _buckets(self, config: DistancesConfig, both_ways: bool) -> Tensor:
        """Returns the bucket of each distance from -longest to longest, key less query."""
        distance = torch.arange(-self.longest, self.longest + 1)
        count, after = config.relative_buckets, torch.zeros_like(distance)
        if both_ways:
            count //= 2
            after = (distance > 0).long() * count
            distance = distance.abs()
        else:
            distance = (-distance).clamp(min=0)
        single = count // 2
        # In float32, as Mesh TensorFlow and transformers do: its rounding decides at the bounds.
        growth = torch.log(distance.to(torch.float32) / single)
        growth = growth / math.log(self.longest / single) * (count - single)
        wide = (single + growth.clamp(min=0).long()).clamp(max=count - 1)
        return torch.where(distance < single, distance, wide) + after

    def forward(self, distance: Tensor) -> Tensor:
        """Returns the bias [heads, queries, length] of keys less queries [queries, length].

        Both may begin with a batch.
        """
        place = distance.clamp(-self.longest, self.longest) + self.longest
        bucket = F.embedding(place, self.buckets).squeeze(-1)
        return F.embedding(bucket, self.weight).movedim(-1, -3)


def distances(config: DistancesConfig, layers: int, *, both_ways: bool) -> nn.Module:
    """Numbers that all layers of a stack add, or of each layer (Chung et al. 2023, UniMax)."""
    count = layers if config.relative_by_layer else 1
    each = nn.ModuleList(RelativeBias(config, both_ways=both_ways) for _ in range(count))
    return each if config.relative_by_layer else each[0]


@dataclass(frozen=True)
class RereadingConfig(DistancesConfig):
    """A second stack.

    Attributes:
        rereading_layers: Decoder layers of an encoder-only model that read the text again, shifted
            right by one token, and attend to the encoder's output (Lewis et al. 2020, section 3.1).
        rereading_begin: Token id before the shifted text.
    """

    rereading_layers: SizeOrNone = field(default=0, metadata=LATER)
    rereading_begin: Whole = field(default=0, metadata=LATER)

    def check(self) -> None:
        super().check()
        expected, begin = f"an id below {self.vocabulary_size}", self.rereading_begin
        require(begin < self.vocabulary_size, "rereading_begin", expected, begin)

    def parts(self) -> tuple[type[Any], ...]:
        return (*super().parts(), Rereading) if self.rereading_layers else super().parts()

    @property
    def two_stacks(self) -> bool:
        return bool(self.rereading_layers) or super().two_stacks


class Rereading(Transformer):
    """An encoder followed by a decoder that reads the same text."""

    config: RereadingConfig

    def build(self) -> None:
        super().build()
        config = self.config
        self.rereading = nn.ModuleList(
            Layer(config, number, cross=True) for number in range(config.rereading_layers)
        )
        self.rereading_norm = make_norm(config) if config.has_final_norm else None
        if config.relative_buckets:
            self.rereading_distance = distances(config, config.rereading_layers, both_ways=False)

    def encode(self, source: Tensor, source_mask: Tensor) -> Tensor:
        """See `Transformer.encode`; returns the second stack's output."""
        encoded = super().encode(source, source_mask)
        begin = torch.full_like(source[:, :1], self.config.rereading_begin)
        positions = torch.arange(source.shape[1], device=source.device)
        x = self.embed(torch.cat([begin, source[:, :-1]], dim=1), positions)
        padding = padding_bias(source_mask, x.dtype)
        bias = padding + causal_bias(0, source.shape[1], x.dtype, source.device)
        biases = self.biases("rereading", bias, Places(positions, positions))
        for layer, bias in zip(self.rereading, biases, strict=True):
            cross = layer.cross_attention.project(encoded)  # type: ignore[union-attr, operator]
            x, _ = layer(x, bias, cross=cross, cross_bias=padding)
        return x if self.rereading_norm is None else self.rereading_norm(x)
