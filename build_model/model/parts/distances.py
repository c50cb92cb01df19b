"""Biases of relative distances, and the scaled output, of T5 and MPNet."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transferry.build_model.model.attention import Places
from transferry.build_model.model.shape import LATER, Size, SizeOrNone, TransformerConfig
from transferry.build_model.model.transformer import Stack, Transformer


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
        kind = DistancesByLayer if self.relative_by_layer else Distances
        distances = (kind,) if self.relative_buckets else ()
        return (*super().parts(), *distances, *((ScaledOutput,) if self.scale_output else ()))

    @property
    def looks_at_columns(self) -> bool:
        return bool(self.relative_buckets) or super().looks_at_columns


class Distances(Transformer):
    """A Transformer that adds a number for each distance to the scores."""

    config: DistancesConfig

    def build(self) -> None:
        super().build()
        config = self.config
        if config.encoder_layers:
            self.encoder_distance = RelativeBias(config.encoder_config(), both_ways=True)
        if config.decoder_layers:
            self.decoder_distance = RelativeBias(config, both_ways=False)

    def biases(self, stack: Stack, bias: Tensor, places: Places) -> list[Tensor]:
        relative = self.get_submodule(f"{stack}_distance")
        bias = bias + relative(-places.distance)
        return super().biases(stack, bias, places)


class DistancesByLayer(Transformer):
    """A Transformer whose layers add numbers of their own (Chung et al. 2023, UniMax)."""

    config: DistancesConfig

    def build(self) -> None:
        super().build()
        config = self.config
        self.encoder_distance = nn.ModuleList(
            RelativeBias(config.encoder_config(), both_ways=True)
            for _ in range(config.encoder_layers)
        )
        self.decoder_distance = nn.ModuleList(
            RelativeBias(config, both_ways=False) for _ in range(config.decoder_layers)
        )

    def biases(self, stack: Stack, bias: Tensor, places: Places) -> list[Tensor]:
        found, distance = super().biases(stack, bias, places), -places.distance
        layers = self.get_submodule(f"{stack}_distance")
        return [
            each + relative(distance)
            for each, relative in zip(found, layers, strict=True)  # type: ignore[call-overload]
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
        """Returns the bias of distances of keys less queries.

        Args:
            distance: [queries, length] or [batch, queries, length] int64

        Returns:
            [heads, queries, length] or [batch, heads, queries, length]
        """
        place = distance.clamp(-self.longest, self.longest) + self.longest
        bucket = F.embedding(place, self.buckets).squeeze(-1)
        return F.embedding(bucket, self.weight).movedim(-1, -3)
