"""Kinds of fault, and the places in a model where faults are planted.

A fault is planted where it is hardest to see: in one layer, in one weight of median size, in rows
that real text seldom reads. A fault that finds nothing to edit raises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from transferry.build_model.model.config import ModelConfig

Given = TypeVar("Given")
# Plants a fault in a copy; returns the change and its place, None where there is no place.
Plant = Callable[[Any], str | None]
Applies = Callable[[ModelConfig], bool]


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Attributes:
        kind: Its name in the report.
        plant: Plants it in a copy and describes the change; see `Plant`.
        applies: Whether a model of this shape can have it.
        everywhere: Whether any variant can have it; else it is planted in graphs as torch's
            exporter writes them.
    """

    kind: str
    plant: Plant
    applies: Applies = lambda config: True
    everywhere: bool = False


class Faults(list[Fault]):
    """Kinds of fault, in the order of the report."""

    def kind(
        self, kind: str, applies: Applies = lambda config: True, *, everywhere: bool = False
    ) -> Callable[[Plant], Plant]:
        """Decorates the function that plants a kind; see `Fault`."""

        def register(plant: Plant) -> Plant:
            self.append(Fault(kind, plant, applies, everywhere))
            return plant

        return register


def rare_tokens(config: ModelConfig) -> tuple[int, int]:
    """Returns the two tokens in whose rows of the embedding faults are planted."""
    return config.vocabulary_size // 3, 2 * config.vocabulary_size // 3


def given(new: Given) -> Callable[[Given], Given]:
    """Returns a change that replaces anything with this."""
    return lambda old: new


def decodes(config: ModelConfig) -> bool:
    """Whether there is a decoder."""
    return bool(config.decoder_layers)


def stack(config: ModelConfig) -> tuple[str, int]:
    """Returns the stack with the most layers, and how many it has."""
    if config.decoder_layers >= config.encoder_layers:
        return "decoder", config.decoder_layers
    return "encoder", config.encoder_layers


def first(config: ModelConfig) -> str:
    """Returns the first layer that a token meets."""
    return "encoder.0" if config.encoder_layers else "decoder.0"


def last(config: ModelConfig) -> str:
    """Returns the last layer that a token meets."""
    stack = "decoder" if config.decoder_layers else "encoder"
    return f"{stack}.{getattr(config, f'{stack}_layers') - 1}"


def tables(config: ModelConfig) -> list[str]:
    """Returns the names of the tables of positions."""
    return ["cosines", "sines"] if config.positions == "rotary" else ["positions"]
