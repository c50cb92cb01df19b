"""A foreign graph that reads and does not generate: hidden states, masked tokens, labels."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from transferry.build_model.config import ModelConfig
from transferry.export.audit.layout import Layout
from transferry.export.audit.session import ForeignGraph
from transferry.runtime.errors import InputError
from transferry.runtime.ort.session import SessionOptions


class ForeignEncoder:
    """Runs a foreign encoder-only graph."""

    def __init__(self, layout: Layout, options: SessionOptions, config: ModelConfig) -> None:
        """Opens the graph.

        Raises:
            ProviderError: The provider asked for cannot run here.
            InputError: The graph cannot be opened, or gives nothing of known meaning.
        """
        self._config = config
        self._graph = ForeignGraph(layout.decoder, options)
        self.graphs = [self._graph]
        # The logits of a classifier are those of its head.
        self._names = {"logits": "head"} if config.has_head else {}
        self.gives = {self._names.get(name, name) for name in layout.decoder.outputs}
        if not self.gives:
            raise InputError(
                f"{layout.decoder.path}: expected an output logits or last_hidden_state, found "
                "none; name it with --names"
            )

    def encode(self, source: NDArray[np.int64], mask: NDArray[np.bool_]) -> dict[str, NDArray[Any]]:
        """Encodes padded token ids; see `ObservableEncoder.encode`."""
        inputs = {
            "tokens": source,
            "mask": mask,
            "positions": np.broadcast_to(np.arange(source.shape[1]), source.shape),
            "segments": np.zeros_like(source),
        }
        if self._config.segments:
            ends = np.cumsum(source == self._config.segment_end, axis=1)
            before = np.pad(ends, ((0, 0), (1, 0)))[:, :-1]
            inputs["segments"] = np.minimum(before, self._config.segments - 1)
        found, _ = self._graph.run(inputs, {})
        return {self._names.get(name, name): value for name, value in found.items()}
