"""A foreign graph that reads and does not generate: hidden states, masked tokens, labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transferry.build_model.model.config import ModelConfig
from transferry.export.subject.decoder import Padding, padded
from transferry.export.subject.layout import Layout
from transferry.export.subject.session import ForeignGraph, require_shape
from transferry.runtime.ort.session import SessionOptions

READS = ("tokens", "mask", "positions", "segments")


class ForeignEncoder:
    """Runs a foreign encoder-only graph."""

    def __init__(
        self, layout: Layout, options: SessionOptions, config: ModelConfig, pad_id: int
    ) -> None:
        """Opens the graph; raises as `ForeignGraph` and `require` do."""
        self._config, self._pad_id = config, pad_id
        self._graph = ForeignGraph(layout.decoder, options)
        self.graphs = [self._graph]
        # The logits of a classifier are those of its head.
        self._names = {"logits": "head"} if config.has_head else {}
        self.gives = frozenset(self._names.get(name, name) for name in layout.decoder.outputs)
        self._graph.require(READS, ("logits", "hidden", "head"))

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
        named = {self._names.get(name, name): value for name, value in found.items()}
        for name, value in named.items():
            require_shape(name, value, self._shape(name, source))
        return named

    def read(
        self, rows: Sequence[Sequence[int]], padding: Padding
    ) -> list[dict[str, NDArray[Any]]]:
        """Returns the outputs for a batch of texts, without padding, a row each."""
        ids, mask = padded(rows, self._pad_id, padding)
        found = self.encode(ids, mask)
        return [
            {
                name: value[row][mask[row]] if value.ndim > 2 else value[row]
                for name, value in found.items()
            }
            for row in range(len(rows))
        ]

    def _shape(self, name: str, source: NDArray[np.int64]) -> tuple[int, ...]:
        config = self._config
        if name == "head":
            of_text = source.shape[:1] if config.pooling else source.shape
            return (*of_text, config.d_head_output)
        return (*source.shape, config.vocabulary_size if name == "logits" else config.d_model)
