"""Rotary positions with frequencies of their own, and layers that do not turn."""

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from torch import Tensor

from transferry.build_model.model.attention import Rotation
from transferry.build_model.model.layers import rotary_angles, rotary_rates
from transferry.build_model.model.parts.windows import WindowsConfig
from transferry.build_model.model.transformer import Stack, Transformer
from transferry.runtime.settings import Whole

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
