"""Embedding of texts: the vector of a model's head, or its hidden states pooled over the tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from transferry.runtime.bundle.head import HeadSettings
from transferry.runtime.engine.preprocess import EncodedRow, LongRows, checked_texts
from transferry.runtime.engine.prompts import Asked, Encodable, Parts, Prompt, encode_inputs
from transferry.runtime.engine.result import Results, RowError, RowResult
from transferry.runtime.engine.tasks.heads import (
    EncoderCall,
    default_long_rows,
    head_of,
    written,
)
from transferry.runtime.engine.tasks.task import (
    Bounds,
    Difference,
    Layout,
    OutputFormat,
    Page,
    Task,
    TopOptions,
    columns,
)
from transferry.runtime.errors import Option, UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from transferry.runtime.engine.open_bundle import OpenBundle
    from transferry.runtime.engine.tasks.heads import Scores
    from transferry.runtime.ort.encoder import EncoderOutput

Pooling = Literal["mean", "first", "last"]


@dataclass(frozen=True)
class EmbeddingResult(RowResult):
    """Vector of one input row, `[width]` float32; NaN on an error."""

    vector: NDArray[np.float32]

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other) is True and _equal(self.vector, other.vector)  # type: ignore[attr-defined]

    @property
    def size(self) -> int:
        return self.source_tokens + len(self.vector)

    def _answer(self, n_best: int) -> dict[str, Any]:
        return self._error() or {"vector": self.vector}


@dataclass(frozen=True)
class SparseResult(RowResult):
    """Sparse vector of one input row, the largest weights first.

    Attributes:
        indices: Ids of the tokens with a weight.
        weights: Their weights, float32 and above 0.
        tokens: These tokens, as the tokenizer's vocabulary spells them.
    """

    indices: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()
    tokens: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        return self.source_tokens + 4 * len(self.indices)

    def _answer(self, n_best: int) -> dict[str, Any]:
        weights = [written(each, single=True) for each in self.weights]
        return self._error() or {"weights": dict(zip(self.tokens, weights, strict=True))}

    def cells(self, n_best: int = 1) -> dict[str, Any]:
        """Returns the values of a table's columns: ids of tokens, and their weights."""
        cells = super().cells(n_best)
        if (weights := cells.pop("weights", None)) is not None:
            cells |= {"indices": [*self.indices], "values": [*weights.values()]}
        return cells


@dataclass(frozen=True)
class TokenVectorsResult(RowResult):
    """Vectors of the tokens of one input row, in their order.

    Attributes:
        vectors: `[tokens, width]` float32, without the tokens that the bundle leaves out; empty on
            an error.
    """

    vectors: NDArray[np.float32]

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other) is True and _equal(self.vectors, other.vectors)  # type: ignore[attr-defined]

    @property
    def size(self) -> int:
        return self.source_tokens + int(self.vectors.size)

    def _answer(self, n_best: int) -> dict[str, Any]:
        return self._error() or {"vectors": [*self.vectors]}


def _equal(one: NDArray[np.float32], other: NDArray[np.float32]) -> bool:
    """Whether vectors are equal; NaN is equal to NaN."""
    import numpy as np

    return np.array_equal(one, other, equal_nan=True)


@dataclass(frozen=True, kw_only=True)
class EmbedOptions(TopOptions):
    """Options of embed.

    Attributes:
        pooling: Mean over all tokens, or the first or last token. Default: as the bundle's head,
            else mean.
        normalise: Scale vectors to length 1.
        prompt: Name of a text of the bundle to put before each row, or of the side of a search
            that rows are: query or document. Default: the bundle's own.
    """

    pooling: Pooling | None = None
    normalise: bool = False
    prompt: str | None = None


SPARSE = columns(indices=["integer"], values=["float"])
OF_TOKENS = columns(vectors=["vector"])


class Embed(Task):
    """Vectors of texts."""

    name = "embed"
    options = EmbedOptions
    in_json = columns(weights="text", **OF_TOKENS)
    columns = columns(vector="vector")
    answer = "vector"
    formats: tuple[OutputFormat, ...] = ("npy", "parquet", "jsonl", "openai")
    default_format = "text"  # not among `formats`: the output of a job must name its format
    page = Page("Compare", "Sentence, then others on lines of their own")

    def __init__(self, engine: OpenBundle, options: EmbedOptions, layout: Layout) -> None:
        super().__init__(engine, options, layout)
        self.long_rows = options.long_rows or default_long_rows(engine)
        # Made before the rows are read, so that settings without effect are refused.
        call = _call(engine, options)
        self.width = 0 if isinstance(call, _SparseCall) else call.width
        if call.kind is not EmbeddingResult:
            self.formats = ("parquet", "jsonl")
            self.columns = SPARSE if call.kind is SparseResult else OF_TOKENS

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
        if isinstance(row, SparseResult):
            return _same_weights(row, again, bounds)
        found, wanted = (
            each.vectors if isinstance(each, TokenVectorsResult) else each.vector
            for each in (row, again)
        )
        if found.shape != wanted.shape:
            return f"{len(found)} vectors, not {len(wanted)}", 0
        error = float(abs(found - wanted).max(initial=0.0) / (abs(wanted).max(initial=0.0) or 1.0))
        if error <= bounds.vector:
            return "", 0
        return f"a vector {error:.1e} of its largest entry away, at most {bounds.vector:.1e}", 0


def _same_weights(row: SparseResult, again: SparseResult, bounds: Bounds) -> Difference:
    """Compares sparse vectors, which leave small weights out."""
    known = [dict(zip(each.indices, each.weights, strict=True)) for each in (row, again)]
    # `top` may leave out weights near the smallest, and gives vectors of one length; otherwise
    # only weights near 0 are left out.
    alike = len(row.indices) == len(again.indices)
    cut = max(min(each.values(), default=0.0) for each in known) if alike else 0.0
    errors = [
        abs(known[0].get(token, cut) - known[1].get(token, cut))
        for token in {*row.indices, *again.indices}
    ]
    error = max(errors, default=0.0) / max(again.weights, default=1.0)
    if error <= bounds.vector:
        return "", 0
    return f"a weight {error:.1e} of the largest away, at most {bounds.vector:.1e}", 0


def embed(
    engine: OpenBundle,
    texts: Iterable[str | RowError | Asked],
    *,
    pooling: Pooling | None = None,
    normalise: bool = False,
    prompt: str | None = None,
    top: int | None = None,
    long_rows: LongRows | None = None,
) -> Results[Any]:
    """Embeds texts, in order and in bounded memory.

    Args:
        engine: Engine of an encoder-only bundle.
        texts: Any number of texts; an error becomes the result of its row. `Asked` has dimensions
            of its own, or token ids as a `Prompt`, which get no text and no tokens before.
        pooling: "mean" over all tokens, special tokens included, the "first" token, or the "last".
            Default: what the bundle's head does, else "mean".
        normalise: Divide each vector by its Euclidean norm.
        prompt: Name of a text of the bundle's to put before each text, or of the side of a search
            that the texts are: "query" or "document". Default: the bundle's.
        top: Weights of a sparse vector to keep, the largest. Default: all.
        long_rows: Treatment of texts longer than the model's positions, or than the bundle's
            longest row: "error", or "truncate" to embed their beginning. Default: "truncate" where
            the bundle has a longest row, else "error".

    Returns:
        An `EmbeddingResult` for each text, a `SparseResult` where the bundle's head weighs the
        tokens of its vocabulary, or a `TokenVectorsResult` where each token has a vector.

    Raises:
        UsageError: The bundle is not encoder-only, it has no such prompt, `long_rows` is "split",
            or `top` is given for dense vectors, or another setting without effect.
    """
    options = EmbedOptions(
        pooling=pooling, normalise=normalise, prompt=prompt, top=top, long_rows=long_rows
    )
    call = _call(engine, options)
    return engine.map(checked_texts(texts, Asked), call.prepare, call.compute, engine.encoders)


def _call(engine: OpenBundle, options: EmbedOptions) -> _Call:
    """Returns a call for the bundle's kind of vectors; raises UsageError as `embed`."""
    _ = engine.encoder  # refuses other architectures
    head = engine.bundle.manifest.head
    kind = "dense" if head is None else head.vectors
    if kind == "tokens":
        for name in ("pooling", "normalise", "top"):
            if getattr(options, name):
                told = " has no effect on a vector for each token; leave it out"
                raise UsageError(Option(name), told)
        return _TokensCall(engine, options)
    if kind == "sparse" and options.pooling is None:
        return _SparseCall(engine, options)
    if options.top is not None:
        raise UsageError(Option("top"), " has no effect on dense vectors; leave it out")
    return _Call(engine, options)


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
    task = Embed.name
    kind: type[Any] = EmbeddingResult
    output: EncoderOutput = "hidden"

    def __init__(self, engine: OpenBundle, options: EmbedOptions) -> None:
        import numpy as np

        super().__init__(engine, options)
        self.tokenizer = engine.bundle.tokenizer
        if options.pooling is None and engine.bundle.embeds:
            self.output = "head"
        self.pooling, self.normalise = options.pooling or "mean", options.normalise
        head = engine.bundle.manifest.head or HeadSettings("embed")
        self.prompt = "" if head.sides else head.prompt(options.prompt)
        self.width = embedding_width(engine, options.pooling)
        self.nothing = {"vector": np.full(self.width, np.nan, np.float32)}

    def encoded(self, rows: list[str | RowError | Asked]) -> list[_EmbeddedRow]:
        asked = [row if isinstance(row, Asked) else Asked(row) for row in rows]
        prompted = [
            self.prompt + text if isinstance(text, str) and text.strip() else text
            for text in (each.source for each in asked)
        ]
        encoded = encode_inputs(prompted, self.tokenizer, self.preprocessor, self.long_rows)
        return list(map(self._item, asked, encoded))

    def _item(self, asked: Asked, row: EncodedRow) -> _EmbeddedRow:
        text = asked.source if isinstance(asked.source, str) else row.text
        named = {**vars(row), "text": row.text and text}
        return _EmbeddedRow(**named, dimensions=asked.dimensions)

    def part(self, row: _EmbeddedRow, found: Scores) -> Scores:
        if self.output == "head":
            found = found[None]
        elif self.pooling == "first":
            found = found[:1]
        elif self.pooling == "last":
            found = found[len(row.ids) - 1 :][:1]
        vector: Scores = found[: len(row.ids), : self.width].mean(axis=0, dtype="float64")
        return vector[: row.dimensions or None]

    def answer(self, row: _EmbeddedRow, scores: Scores) -> Mapping[str, Any]:
        return {"vector": self.normalised(scores).astype("float32")}

    def normalised(self, vector: Scores) -> Scores:
        """Returns a vector `[width]` float64, scaled to length 1 if vectors are normalised."""
        import numpy as np

        if not self.normalise:
            return vector
        found: Scores = vector / max(float(np.linalg.norm(vector)), np.finfo(np.float64).tiny)
        return found


class _TokensCall(_Call):
    kind = TokenVectorsResult

    def __init__(self, engine: OpenBundle, options: EmbedOptions) -> None:
        import numpy as np

        super().__init__(engine, options)
        self.side = head_of(engine, self.task).side(options.prompt)
        special = self.special
        self.preprocessor = replace(
            self.preprocessor,
            special=replace(special, before=(*special.before, *self.side.before)),
            positions=min(engine.preprocessor.positions, self.side.longest),
        )
        self.unseen = engine.bundle.manifest.model.get("unseen_token", -1)
        self.skipped = np.array(self.side.skipped, np.int64)
        self.nothing = {"vectors": np.zeros((0, self.width), np.float32)}

    def _item(self, asked: Asked, row: EncodedRow) -> _EmbeddedRow:
        # Token ids are read as they are.
        if isinstance(asked.source, Prompt):
            return super()._item(asked, row)
        if self.unseen in row.ids:
            told = "the text holds the mask token, which the model does not see; leave it out"
            row = replace(row, ids=(), error=RowError("tokenizer", told))
        if row.error is None and self.side.fill >= 0:
            filled = [self.side.fill] * (self.preprocessor.positions - len(row.ids))
            row = replace(row, ids=[*row.ids, *filled])
        return super()._item(asked, row)

    def part(self, row: _EmbeddedRow, found: Scores) -> Scores:
        import numpy as np

        return found[: len(row.ids)][~np.isin(np.asarray(row.ids, np.int64), self.skipped)]

    def answer(self, row: _EmbeddedRow, scores: Scores) -> Mapping[str, Any]:
        return {"vectors": scores.astype("float32")}


class _SparseCall(_Call):
    kind = SparseResult

    def __init__(self, engine: OpenBundle, options: EmbedOptions) -> None:
        super().__init__(engine, options)
        self.nothing, self.top = {}, options.top
        self.names = {token: name for name, token in self.tokenizer.vocabulary().items()}

    def part(self, row: _EmbeddedRow, found: Scores) -> Scores:
        return found

    def answer(self, row: _EmbeddedRow, scores: Scores) -> Mapping[str, Any]:
        import numpy as np

        weights = self.normalised(scores.astype(np.float64))
        kept = np.argsort(-weights, kind="stable")[: self.top]
        kept = kept[weights[kept] > 0]
        tokens = tuple(str(self.names.get(token, f"<{token}>")) for token in kept.tolist())
        values = tuple(weights[kept].astype(np.float32).tolist())
        return {"indices": tuple(kept.tolist()), "weights": values, "tokens": tokens}
