"""Text in, one vector out: what an encoder-only model makes of it, pooled over its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from transferry.runtime.decoding.search import pad_sources
from transferry.runtime.engine.engine import Engine
from transferry.runtime.engine.preprocess import EncodedRow, LongRows, check_long_rows
from transferry.runtime.engine.result import NOT_FINITE, RowError
from transferry.runtime.engine.worker_pool import WorkItem
from transferry.runtime.ort.encoder import EncoderModel

Pooling = Literal["mean", "first"]


@dataclass(frozen=True)
class EmbeddingResult:
    """What became of one row.

    Attributes:
        source: The text that came in; nothing where an error came in.
        source_tokens: How much of it was read, the tokens that wrap it included; on an error its
            length, or at least so much of it.
        vector: [d_model] float32; NaN where there is an error.
        error: None where there is a vector.
        truncated: Whether the text was cut short.
    """

    source: str
    source_tokens: int
    vector: NDArray[np.float32]
    error: RowError | None = None
    target_tokens: int = 0
    truncated: bool = False

    def record(self) -> dict[str, Any]:
        """Returns the row as JSON values."""
        if self.error is not None:
            return {"source": self.source, "error": self.error.record()}
        return {"source": self.source, "vector": [round(float(x), 7) for x in self.vector]}


def embed(
    engine: Engine,
    items: Iterable[str | RowError],
    *,
    pooling: Pooling = "mean",
    normalise: bool = False,
    long_rows: LongRows = "error",
) -> Iterator[EmbeddingResult]:
    """Embeds each text, in order, in bounded memory; a row never depends on its neighbours.

    Args:
        engine: Of an encoder-only bundle.
        items: Any iterable, however long, of texts; an error is the result of its own row.
        pooling: "mean" over all tokens, those that wrap the text included, or the "first" one.
        normalise: Divide each vector by its length.
        long_rows: What becomes of texts of more tokens than the model has positions: an "error",
            or "truncate", which embeds their beginning.

    Raises:
        UsageError: The bundle holds no encoder-only model, or long rows are to be split.
    """
    encoders, pad_id = engine.encoders, engine.bundle.tokenizer.special.pad_id
    check_long_rows(long_rows, "task embed")
    nothing = np.full(int(engine.bundle.manifest.model["d_model"]), np.nan, np.float32)

    def prepare(
        first: int, items: list[str | RowError]
    ) -> list[WorkItem[EncodedRow] | EmbeddingResult]:
        return [
            WorkItem(row, len(row.ids))
            if row.error is None
            else EmbeddingResult(row.text, row.tokens, nothing, row.error)
            for row in engine.reader.read(items, long_rows)
        ]

    def compute(encoder: EncoderModel, rows: list[EncodedRow]) -> list[EmbeddingResult]:
        sources = [row.ids for row in rows]
        hidden = encoder.encode(*pad_sources(sources, pad_id), ("hidden",))
        embeddings = []
        for row, states in zip(rows, hidden["hidden"], strict=True):
            pooled = states[: len(row.ids)] if pooling == "mean" else states[:1]
            vector = pooled.mean(axis=0, dtype=np.float64)
            if normalise:
                vector /= max(float(np.linalg.norm(vector)), np.finfo(np.float64).tiny)
            error = None if np.isfinite(vector).all() else NOT_FINITE
            vector = nothing if error else vector.astype(np.float32)
            embeddings.append(
                EmbeddingResult(row.text, len(row.ids), vector, error, truncated=row.truncated)
            )
        return embeddings

    return engine.map(items, prepare, compute, encoders)
