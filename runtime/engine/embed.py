"""Embedding of texts: hidden states of an encoder-only model, pooled over the tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from transferry.runtime.decoding.search import pad_sources
from transferry.runtime.engine.engine import Engine
from transferry.runtime.engine.preprocess import (
    EncodedRow,
    LongRows,
    check_long_rows,
    checked_texts,
)
from transferry.runtime.engine.result import NOT_FINITE, RowError, RowResult
from transferry.runtime.engine.worker_pool import WorkItem
from transferry.runtime.ort.encoder import EncoderModel

Pooling = Literal["mean", "first"]


@dataclass(frozen=True)
class EmbeddingResult(RowResult):
    """Vector of one input row.

    Attributes:
        vector: `[d_model]` float32; NaN on an error.
    """

    vector: NDArray[np.float32]

    def _answer(self, n_best: int) -> dict[str, Any]:
        return self._error() or {"vector": self.vector}


def embed(
    engine: Engine,
    texts: Iterable[str | RowError],
    *,
    pooling: Pooling = "mean",
    normalise: bool = False,
    long_rows: LongRows = "error",
) -> Iterator[EmbeddingResult]:
    """Embeds texts, in order and in bounded memory.

    Args:
        engine: Engine of an encoder-only bundle.
        texts: Any number of texts; an error becomes the result of its row.
        pooling: "mean" over all tokens, special tokens included, or the "first" token.
        normalise: Divide each vector by its Euclidean norm.
        long_rows: Treatment of texts longer than the model's positions: "error", or "truncate" to
            embed their beginning.

    Raises:
        UsageError: The bundle is not encoder-only, or `long_rows` is "split".
    """
    encoders = engine.encoders
    check_long_rows(long_rows, "task embed")
    task = _Embed(engine, pooling, normalise, long_rows)
    return engine.map(checked_texts(texts), task.prepare, task.compute, encoders)


class _Embed:
    def __init__(
        self, engine: Engine, pooling: Pooling, normalise: bool, long_rows: LongRows
    ) -> None:
        self.preprocessor, self.long_rows = engine.preprocessor, long_rows
        self.pooling, self.normalise = pooling, normalise
        self.pad_id = engine.bundle.tokenizer.special.pad_id
        self.no_vector = np.full(int(engine.bundle.manifest.model["d_model"]), np.nan, np.float32)

    def prepare(self, texts: list[str | RowError]) -> list[WorkItem[EncodedRow] | EmbeddingResult]:
        return [
            WorkItem(row, len(row.ids))
            if row.error is None
            else EmbeddingResult(row.text, row.tokens, self.no_vector, error=row.error)
            for row in self.preprocessor.encode(texts, self.long_rows)
        ]

    def compute(self, encoder: EncoderModel, rows: list[EncodedRow]) -> list[EmbeddingResult]:
        source = pad_sources([row.ids for row in rows], self.pad_id)
        hidden = encoder.encode(*source, ("hidden",))["hidden"]
        return [self._pooled(*pair) for pair in zip(rows, hidden, strict=True)]

    def _pooled(self, row: EncodedRow, hidden: NDArray[np.floating[Any]]) -> EmbeddingResult:
        pooled = hidden[: len(row.ids)] if self.pooling == "mean" else hidden[:1]
        vector = pooled.mean(axis=0, dtype=np.float64)
        if self.normalise:
            vector /= max(float(np.linalg.norm(vector)), np.finfo(np.float64).tiny)
        error = None if np.isfinite(vector).all() else NOT_FINITE
        vector = self.no_vector if error else vector.astype(np.float32)
        return EmbeddingResult(row.text, len(row.ids), vector, error=error, truncated=row.truncated)
