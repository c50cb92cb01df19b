"""Opens a variant of a bundle, by its architecture and its cache."""

from __future__ import annotations

from typing import Any, Protocol

from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.specs import STANDARD, Variant
from transferry.runtime.decoding.batching import BatchOptions
from transferry.runtime.decoding.decoder import ObservableDecoder
from transferry.runtime.errors import UsageError
from transferry.runtime.ort.encoder import EncoderModel
from transferry.runtime.ort.fused_decoder import FusedDecoder, RecurrentDecoder
from transferry.runtime.ort.graph_runner import runs
from transferry.runtime.ort.portable_decoder import PortableDecoder
from transferry.runtime.ort.session import SessionOptions


class ServedDecoder(ObservableDecoder[Any], Protocol):
    """A decoder that runs a variant of a bundle.

    Attributes:
        shares_prompts: Whether `start` reads a common beginning of prompts once. No bit of an
            answer depends on it.
    """

    variant: Variant
    options: SessionOptions
    batches: BatchOptions
    shares_prompts: bool

    def describe(self) -> dict[str, Any]:
        """Returns everything that determines the numbers; see `graph_runner.describe`."""


ServedModel = ServedDecoder | EncoderModel


def open_model(bundle: Bundle, variant: Variant, options: SessionOptions) -> ServedModel:
    """Opens the graphs of a variant.

    Raises:
        ProviderError: The requested provider cannot run here.
        InputError: A graph cannot be opened.
        UsageError: The runtime cannot run such a variant.
    """
    if not runs(options, variant):
        tensorrt = options.provider == "tensorrt"
        who = "provider tensorrt" if tensorrt else f"runtime {options.runtime}"
        raise UsageError(
            f"{who} runs variants of standard operators alone, not "
            f"{variant.name}; choose --variant {' or '.join(STANDARD)}"
        )
    return model_class(variant)(bundle, variant, options)


def model_class(
    variant: Variant,
) -> type[EncoderModel | FusedDecoder | RecurrentDecoder | PortableDecoder]:
    """Returns the class that runs a variant."""
    if variant.cache is None:
        return EncoderModel
    if not variant.in_place:
        return PortableDecoder
    return RecurrentDecoder if variant.recurrent else FusedDecoder
