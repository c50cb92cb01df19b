"""A second stack that reads the same text, as the classifiers of BART have it."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from transferry.build_model.model.attention import Places, causal_bias, padding_bias
from transferry.build_model.model.layers import Layer
from transferry.build_model.model.norms import make_norm
from transferry.build_model.model.parts.distances import DistancesConfig, RelativeBias
from transferry.build_model.model.shape import LATER, SizeOrNone
from transferry.build_model.model.transformer import Transformer
from transferry.runtime.errors import require
from transferry.runtime.settings import Whole


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
            count = config.rereading_layers if config.relative_by_layer else 1
            each = nn.ModuleList(RelativeBias(config, both_ways=False) for _ in range(count))
            self.rereading_distance = each if config.relative_by_layer else each[0]

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
