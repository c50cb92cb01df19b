"""Embedding of texts: the vector of a model's head, or its hidden states pooled over the tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from transferry.runtime.bundle.head import HeadSettings
from transferry.runtime.engine.preprocess import EncodedRow, LongRows, WorkItem, checked_texts
from transferry.runtime.engine.prompts import Asked, Encodable, Parts, Prompt, encode_prompt
from transferry.runtime.engine.result import NOT_FINITE, Results, RowError, RowResult
from transferry.runtime.engine.tasks.heads import EncoderCall, default_long_rows
from transferry.runtime.engine.tasks.task import (
    Bounds,
    Difference,
    Layout,
    Page,
    RowOptions,
    Task,
    columns,
    is_encoder,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from transferry.runtime.bundle.bundle import Bundle
    from transferry.runtime.engine.open_bundle import OpenBundle
    from transferry.runtime.engine.tasks.heads import Scores

Pooling = Literal["mean", "first", "last"]


@dataclass(frozen=True)
class EmbeddingResult(RowResult):
    """Vector of one input row.

    Attributes:
        vector: `[width]` float32; NaN on an error.
    """

    vector: NDArray[np.float32]

    @property
    def size(self) -> int:
        """Numbers that it holds, roughly."""
        return self.source_tokens + len(self.vector)

    def _answer(self, n_best: int) -> dict[str, Any]:
        return self._error() or {"vector": self.vector}


@dataclass(frozen=True, kw_only=True)
class EmbedOptions(RowOptions):
    """Options of embed.

    Attributes:
        pooling: Mean over all tokens, or the first or last token. Default: as the bundle's head,
            else mean.
        normalise: Scale vectors to length 1.
        prompt: Name of a text of the bundle to put before each row. Default: the bundle's own.
    """

    pooling: Pooling | None = None
    normalise: bool = False
    prompt: str | None = None


class Embed(Task):
    """Vectors of texts."""

    name = "embed"
    options = EmbedOptions
    columns = columns(vector="vector")
    answer = "vector"
    formats = ("npy", "parquet", "jsonl", "openai")
    default_format = "text"  # not among `formats`: the output of a job must name its format
    page = Page("Embed")

    def __init__(self, engine: OpenBundle, options: EmbedOptions, layout: Layout) -> None:
        super().__init__(engine, options, layout)
        self.long_rows = options.long_rows or default_long_rows(engine)
        self.width = embedding_width(engine, options.pooling)

    @classmethod
    def fits(cls, bundle: Bundle) -> bool:
        return is_encoder(bundle)

    def given(self, row: Any) -> Any:
        request = row.request
        if request is None or not isinstance(row.text, str):
            return row.text
        if request.dimensions > self.width:
            message = f"dimensions = {request.dimensions} is more than the model's {self.width}"
            return RowError("settings", message)
        inputs: list[Encodable] = list(request.inputs)
        if request.kind:
            inputs = [Prompt(each, request.kind) for each in request.inputs]
        asked = tuple(Asked(each, dimensions=request.dimensions) for each in inputs)
        return asked[0] if len(asked) == 1 else Parts(asked)

    def same(self, row: Any, again: Any, bounds: Bounds) -> Difference:
        largest = abs(again.vector).max(initial=0.0)
        error = float(abs(row.vector - again.vector).max(initial=0.0) / (largest or 1.0))
        if error <= bounds.vector:
            return "", 0
        return f"a vector {error:.1e} of its largest entry away, at most {bounds.vector:.1e}", 0


def embed(
    engine: OpenBundle,
    texts: Iterable[str | RowError | Asked],
    *,
    pooling: Pooling | None = None,
    normalise: bool = False,
    prompt: str | None = None,
    long_rows: LongRows | None = None,
) -> Results[EmbeddingResult]:
    """Embeds texts, in order and in bounded memory.

    Args:
        engine: Engine of an encoder-only bundle.
        texts: Any number of texts; an error becomes the result of its row. `Asked` has dimensions
            of its own, or token ids as a `Prompt`, which get no text and no tokens before.
        pooling: "mean" over all tokens, special tokens included, the "first" token, or the "last".
            Default: what the bundle's head does, else "mean".
        normalise: Divide each vector by its Euclidean norm.
        prompt: Name of a text of the bundle's to put before each text. Default: the bundle's.
        long_rows: Treatment of texts longer than the model's positions, or than the bundle's
            longest row: "error", or "truncate" to embed their beginning. Default: "truncate" where
            the bundle has a longest row, else "error".

    Raises:
        UsageError: The bundle is not encoder-only, it has no such prompt, or `long_rows` is
            "split".
    """
    encoders = engine.encoders
    call = _Call(engine, pooling, normalise, prompt, long_rows)
    return engine.map(checked_texts(texts, Asked), call.prepare, call.compute, encoders)


def embedding_width(engine: OpenBundle, pooling: Pooling | None) -> int:
    """Returns the length of the vectors; raises UsageError for other bundles."""
    graph = engine.encoder.variant.graphs["encoder"]
    if pooling is None and engine.bundle.embeds:
        whole, head = int(graph.tensor("head").shape[-1]), engine.bundle.manifest.head
        return min(whole, (head.width if head is not None else 0) or whole)
    return int(engine.bundle.manifest.model["d_model"])


@dataclass(frozen=True)
class _EmbeddedRow(EncodedRow):
    """A text as token ids, with the length of its vector; 0 is the whole vector."""

    dimensions: int = 0


class _Call(EncoderCall):
    def __init__(
        self,
        engine: OpenBundle,
        pooling: Pooling | None,
        normalise: bool,
        prompt: str | None,
        long_rows: LongRows | None,
    ) -> None:
        import numpy as np

        super().__init__(engine, "embed", long_rows)
        self.tokenizer = engine.bundle.tokenizer
        self.output = "head" if pooling is None and engine.bundle.embeds else "hidden"
        self.pooling, self.normalise = pooling or "mean", normalise
        head = engine.bundle.manifest.head or HeadSettings("embed")
        self.prompt = head.prompt(prompt)
        self.no_vector = np.full(embedding_width(engine, pooling), np.nan, np.float32)

    def prepare(
        self, texts: list[str | RowError | Asked]
    ) -> list[WorkItem[_EmbeddedRow] | EmbeddingResult]:
        asked = [text if isinstance(text, Asked) else Asked(text) for text in texts]
        prompted = [
            self.prompt + text if isinstance(text, str) and text.strip() else text
            for text in (each.source for each in asked)
        ]
        plain = [text for text in prompted if not isinstance(text, Prompt)]
        rows = iter(self.preprocessor.encode(plain, self.long_rows))
        around = self.tokenizer, self.preprocessor.positions, self.long_rows, 0
        encoded = [
            encode_prompt(text, *around) if isinstance(text, Prompt) else next(rows)
            for text in prompted
        ]
        return list(map(self._item, asked, encoded))

    def _item(self, asked: Asked, row: EncodedRow) -> WorkItem[_EmbeddedRow] | EmbeddingResult:
        source = asked.source
        text = source if isinstance(source, str) else row.text
        if row.error is not None:
            return EmbeddingResult(row.text and text, row.tokens, self.no_vector, error=row.error)
        named = {**vars(row), "text": text}
        return WorkItem(_EmbeddedRow(**named, dimensions=asked.dimensions), len(row.ids))

    def result(self, row: _EmbeddedRow, found: Scores) -> EmbeddingResult:
        import numpy as np

        if self.output == "head":
            found = found[None]
        elif self.pooling == "first":
            found = found[:1]
        elif self.pooling == "last":
            found = found[len(row.ids) - 1 :][:1]
        vector = found[: len(row.ids), : len(self.no_vector)].mean(axis=0, dtype=np.float64)
        vector = vector[: row.dimensions or None]
        if self.normalise:
            vector /= max(float(np.linalg.norm(vector)), np.finfo(np.float64).tiny)
        error = None if np.isfinite(vector).all() else NOT_FINITE
        vector = self.no_vector if error else vector.astype(np.float32)
        return EmbeddingResult(row.text, len(row.ids), vector, error=error, truncated=row.truncated)
