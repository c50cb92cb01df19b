"""Text in, one vector out: what an encoder-only model makes of it, pooled over its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from transferry.runtime.engine import Engine
from transferry.runtime.pipeline import Todo
from transferry.runtime.rows import NOT_FINITE, RowError
from transferry.runtime.search import pad_sources

Pooling = Literal["mean", "first"]


@dataclass(frozen=True)
class Embedding:
    """What became of one row.

    Attributes:
        source: The text that came in.
        source_tokens: Its length, the tokens that wrap it included.
        vector: [d_model] float32; NaN where there is an error.
        error: None where there is a vector.
    """

    source: str
    source_tokens: int
    vector: NDArray[np.float32]
    error: RowError | None = None
    target_tokens: int = 0

    def record(self) -> dict[str, Any]:
        """Returns the row as JSON values."""
        if self.error is not None:
            return {"source": self.source, "error": self.error.record()}
        return {"source": self.source, "vector": [round(float(x), 7) for x in self.vector]}


def embed(
    engine: Engine, texts: Iterable[str], *, pooling: Pooling = "mean", normalise: bool = False
) -> Iterator[Embedding]:
    """Embeds each text, in order, in bounded memory; a row never depends on its neighbours.

    Args:
        engine: Of an encoder-only bundle.
        texts: Any iterable, however long.
        pooling: "mean" over all tokens, those that wrap the text included, or the "first" one.
        normalise: Divide each vector by its length.

    Raises:
        UsageError: The bundle holds no encoder-only model.
    """
    encoder, tokenizer = engine.encoder, engine.bundle.tokenizer
    nothing = np.full(int(engine.bundle.manifest.model["d_model"]), np.nan, np.float32)

    def prepare(first: int, texts: list[str]) -> list[Todo[tuple[str, list[int]]] | Embedding]:
        rows: list[Todo[tuple[str, list[int]]] | Embedding] = []
        for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
            source = tokenizer.special.wrap(ids)
            error = engine.refusal(text, len(source))
            if error is None:
                rows.append(Todo((text, source), len(source)))
            else:
                rows.append(Embedding(text, len(source), nothing, error))
        return rows

    def compute(rows: list[tuple[str, list[int]]]) -> list[Embedding]:
        sources = [source for _, source in rows]
        hidden = encoder.encode(*pad_sources(sources, tokenizer.special.pad_id), ("hidden",))
        embeddings = []
        for (text, source), states in zip(rows, hidden["hidden"], strict=True):
            pooled = states[: len(source)] if pooling == "mean" else states[:1]
            vector = pooled.mean(axis=0, dtype=np.float64)
            if normalise:
                vector /= max(float(np.linalg.norm(vector)), np.finfo(np.float64).tiny)
            error = None if np.isfinite(vector).all() else NOT_FINITE
            vector = nothing if error else vector.astype(np.float32)
            embeddings.append(Embedding(text, len(source), vector, error))
        return embeddings

    return engine.map(texts, prepare, compute)
