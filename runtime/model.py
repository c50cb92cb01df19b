"""A variant of a bundle, opened as its architecture wants."""

from transferry.runtime.bundle import Bundle, Variant
from transferry.runtime.onnx_decoder import OnnxDecoder
from transferry.runtime.onnx_encoder import OnnxEncoder
from transferry.runtime.session import SessionOptions
from transferry.runtime.slot_decoder import SlotDecoder

Model = OnnxDecoder | SlotDecoder | OnnxEncoder


def open_model(bundle: Bundle, variant: Variant, options: SessionOptions) -> Model:
    """Opens the graphs of a variant.

    Raises:
        ProviderError: The provider asked for cannot run here.
        InputError: A graph cannot be opened.
    """
    if bundle.manifest.architecture == "encoder-only":
        return OnnxEncoder(bundle, variant, options)
    if variant.graphs["decoder"].names("write"):
        return SlotDecoder(bundle, variant, options)
    return OnnxDecoder(bundle, variant, options)
