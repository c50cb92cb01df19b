"""Attention windows, by layer, and encoders whose tokens see no later ones."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from transferry.build_model.model.attention import Places, causal_bias
from transferry.build_model.model.shape import LATER, TransformerConfig
from transferry.build_model.model.transformer import Stack, Transformer
from transferry.runtime.settings import Whole


@dataclass(frozen=True)
class WindowsConfig(TransformerConfig):
    """Attention windows.

    Attributes:
        windows: For each layer, how many positions a token sees to the left, itself included
            (Beltagy et al. 2020); an encoder's token sees as many to the right. 0 means all; none
            given means all in every layer.
    """

    windows: tuple[Whole, ...] = ()

    def parts(self) -> tuple[type[Any], ...]:
        return (*super().parts(), Windows) if any(self.windows) else super().parts()

    @property
    def looks_at_columns(self) -> bool:
        return any(self.windows) or super().looks_at_columns

    def window(self, layer: int) -> int:
        """Positions that a token of a layer sees to the left, itself included; 0 means all."""
        return self.windows[layer] if self.windows else 0


class Windows(Transformer):
    """A Transformer whose layers see as far as their windows."""

    config: WindowsConfig

    def biases(self, stack: Stack, bias: Tensor, places: Places) -> list[Tensor]:
        seen, distance = super().biases(stack, bias, places), places.distance
        made: dict[tuple[int, int], Tensor] = {}  # each once, however many layers share it
        keys = [(id(each), window) for each, window in zip(seen, self.config.windows, strict=True)]
        for key, each in zip(keys, seen, strict=True):
            if key not in made:
                made[key] = windowed(each, distance, key[1], places.queries)
        return [made[key] for key in keys]


def windowed(bias: Tensor, distance: Tensor, window: int, queries: Tensor | None = None) -> Tensor:
    """Returns M that also hides positions at a distance of `window` or more; 0 hides nothing.

    Args:
        bias: M, broadcastable to [batch, heads, queries, length].
        distance: Of each query to each key, [queries, length] or [batch, queries, length] int64.
        window: Positions that a token sees to either side, itself included.
        queries: [batch, queries] bool, False at padding, to whose window there may be no token: it
            sees all, since a softmax over nothing would be NaN. None where each sees itself.
    """
    if not window:
        return bias
    far = distance.abs() >= window
    if queries is not None:
        far = torch.logical_and(far, queries[:, :, None])
    return bias.masked_fill(far if far.dim() == 2 else far[:, None], -math.inf)


@dataclass(frozen=True)
class CausalConfig(TransformerConfig):
    """An encoder that hides the future.

    Attributes:
        causal: An encoder-only model's tokens see no later ones, as in a decoder that only reads.
    """

    causal: bool = field(default=False, metadata=LATER)

    def parts(self) -> tuple[type[Any], ...]:
        return (*super().parts(), CausalEncoder) if self.causal else super().parts()


class CausalEncoder(Transformer):
    """An encoder whose tokens see no later ones."""

    def biases(self, stack: Stack, bias: Tensor, places: Places) -> list[Tensor]:
        bias = bias + causal_bias(0, places.positions.shape[0], bias.dtype, bias.device)
        return super().biases(stack, bias, places)
