"""A variant of a bundle, opened as its architecture and its graphs want."""

from __future__ import annotations

from typing import Any, Protocol

from transferry.runtime.batching import BatchOptions
from transferry.runtime.bundle import Bundle, Variant
from transferry.runtime.compare import ObservableDecoder
from transferry.runtime.errors import UsageError
from transferry.runtime.onnx_decoder import OnnxDecoder
from transferry.runtime.onnx_encoder import OnnxEncoder
from transferry.runtime.session import SessionOptions
from transferry.runtime.slot_decoder import SlotDecoder


class ServedDecoder(ObservableDecoder[Any], Protocol):
    """A decoder that runs a variant of a bundle, whichever its graphs are made for."""

    variant: Variant
    options: SessionOptions
    batches: BatchOptions

    def describe(self) -> dict[str, Any]:
        """What decides the numbers: the settings, and where the nodes of the graphs really ran."""
        ...


Model = ServedDecoder | OnnxEncoder


def open_model(bundle: Bundle, variant: Variant, options: SessionOptions) -> Model:
    """Opens the graphs of a variant.

    Raises:
        ProviderError: The provider asked for cannot run here.
        InputError: A graph cannot be opened.
        UsageError: CUDA graphs are wanted of a variant that is not made for a GPU.
    """
    if options.cuda_graphs and "rank" not in variant.graphs:
        raise UsageError(
            f"cuda_graphs expects a variant that is made for a GPU alone, such as cuda-fp16, found "
            f"{variant.name}; choose another variant, or leave cuda_graphs out"
        )
    if bundle.manifest.architecture == "encoder-only":
        return OnnxEncoder(bundle, variant, options)
    if variant.in_place:
        return SlotDecoder(bundle, variant, options)
    return OnnxDecoder(bundle, variant, options)
