"""The models that an audit compares, opened as the architecture of the reference wants them."""

from __future__ import annotations

from typing import Any

from transferry.build_model.checkpoint import Checkpoint
from transferry.export.subject.decoder import ForeignDecoder
from transferry.export.subject.encoder import ForeignEncoder
from transferry.export.subject.layout import Layout
from transferry.runtime.decoding.decoder import ObservableDecoder, ObservableEncoder
from transferry.runtime.errors import InputError
from transferry.runtime.ort.session import SessionOptions

Model = ForeignDecoder | ForeignEncoder
# Any of them, whatever its state is.
Observable = ObservableDecoder[Any] | ObservableEncoder


def open_foreign(layout: Layout, checkpoint: Checkpoint, options: SessionOptions) -> Model:
    """Opens the graphs.

    Raises:
        InputError: They are of another architecture, or cannot be opened.
        ProviderError: The provider asked for cannot run here.
    """
    config, special = checkpoint.model.config, checkpoint.tokenizer.special
    both = config.architecture == "encoder-decoder"
    if both != (layout.encoder is not None):
        found = "an encoder and a decoder" if layout.encoder else "one graph without an encoder"
        raise InputError(
            f"the reference is {config.architecture}, the folder holds {found}; name the reference "
            "that the graphs were made from"
        )
    if config.decoder_layers:
        return ForeignDecoder(layout, options, config, special.pad_id)
    return ForeignEncoder(layout, options, config)
