"""Attention windows, by layer, rotary positions by layer, and encoders that see no later tokens."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor

from transferry.build_model.model.attention import Places, Rotation, causal_bias
from transferry.build_model.model.layers import rotary_angles, rotary_rates
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


Turn = Annotated[float, msgspec.Meta(ge=0, le=1000)]


@dataclass(frozen=True)
class RotaryConfig(WindowsConfig):
    """Variations of rotary positions.

    Attributes:
        rotary_rates: Radians per position of each pair of features, in place of those of
            rotary_base; features beyond these pairs do not turn.
        rotary_scale: Factor of the cosines and sines (YaRN, Peng et al. 2023, section 3.4).
        window_rotary_rates: Rates of the layers with a window, where they differ.
        unrotated: Layers, from 0, whose queries and keys do not turn, as in SmolLM 3.
    """

    rotary_rates: tuple[Turn, ...] = ()
    rotary_scale: Annotated[float, msgspec.Meta(gt=0, le=1000)] = 1.0
    window_rotary_rates: tuple[Turn, ...] = ()
    unrotated: tuple[Whole, ...] = ()

    def parts(self) -> tuple[type[Any], ...]:
        own = self.rotary_rates or self.window_rotary_rates or self.unrotated
        varies = self.positions == "rotary" and (own or self.rotary_scale != 1)
        return (*super().parts(), Turns) if varies else super().parts()


class Turns(Transformer):
    """A Transformer with rotary positions that the base alone does not give."""

    config: RotaryConfig
    window_cosines: Tensor
    window_sines: Tensor

    def tables(self) -> dict[str, Tensor]:
        config = self.config
        rates = config.rotary_rates or rotary_rates(config.d_head, config.rotary_base)
        tables = rotary_angles(config.max_positions, rates, config.rotary_scale)._asdict()
        if config.window_rotary_rates:
            angles = rotary_angles(config.max_positions, config.window_rotary_rates)
            tables |= {f"window_{name}": table for name, table in angles._asdict().items()}
        return tables

    def rotations(self, stack: Stack, positions: Tensor) -> list[Rotation | None]:
        config, turns = self.config, super().rotations(stack, positions)
        near = turns[0] if turns else None
        if config.window_rotary_rates:
            near = Rotation(self.window_cosines, self.window_sines).at(positions)
        return [
            None if number in config.unrotated else near if config.window(number) else turn
            for number, turn in enumerate(turns)
        ]
