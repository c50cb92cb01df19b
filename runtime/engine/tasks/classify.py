"""Labels of texts, of pairs of texts and of tokens: the scores of a model's head."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transferry.runtime.bundle.head import Aggregation, HeadSettings
from transferry.runtime.decoding.search import pad_sources
from transferry.runtime.engine.open_bundle import OpenBundle
from transferry.runtime.engine.preprocess import (
    EncodedRow,
    LongRows,
    Preprocessor,
    check_long_rows,
    checked_pairs,
    checked_texts,
    too_long,
)
from transferry.runtime.engine.result import NOT_FINITE, Results, RowError, RowResult
from transferry.runtime.engine.tasks.embed import cut_to_longest, default_long_rows
from transferry.runtime.engine.tasks.entities import Tag, tags_of
from transferry.runtime.engine.worker_pool import WorkItem
from transferry.runtime.errors import UsageError
from transferry.runtime.ort.encoder import EncoderModel
from transferry.runtime.tokenizer.special_tokens import Place

Floats = NDArray[np.float64]
# Text, and the second text of a pair; None where rows are no pairs.
Pair = tuple[str | RowError, str | RowError | None]


@dataclass(frozen=True)
class LabelScore:
    """A label and its probability; of a regression the number itself."""

    label: str
    score: float

    def record(self) -> dict[str, Any]:
        """Returns it as JSON values."""
        return {"label": self.label, "score": round(self.score, 6)}


@dataclass(frozen=True)
class ClassifiedResult(RowResult):
    """Labels of one text or pair of texts.

    Attributes:
        pair: The second text of a pair, or why there is none; None for a text.
        label: The likeliest label; where each label is for itself, all of a probability of at least
            one half, with a comma between; empty for a regression.
        scores: That of every label, in the model's order.
    """

    pair: str | RowError | None = None
    label: str = ""
    scores: tuple[LabelScore, ...] = ()

    def _answer(self, n_best: int) -> dict[str, Any]:
        scores = [each.record() for each in self.scores]
        return self._error() or {"label": self.label, "scores": scores}


@dataclass(frozen=True)
class RankedResult(RowResult):
    """Score of one pair of texts; NaN on an error."""

    pair: str | RowError | None = None
    score: float = np.nan

    def _answer(self, n_best: int) -> dict[str, Any]:
        return self._error() or {"score": round(self.score, 6)}


@dataclass(frozen=True)
class TaggedResult(RowResult):
    """Labels of the tokens of one text, special tokens left out.

    Attributes:
        tags: Its tokens, or its entities.
        best: Probability of the likeliest label of each token.
    """

    tags: tuple[Tag, ...] = ()
    best: tuple[float, ...] = ()

    @property
    def target_tokens(self) -> int:
        """Number of tokens with a label."""
        return len(self.best)

    def _answer(self, n_best: int) -> dict[str, Any]:
        tags = [{**vars(tag), "score": round(tag.score, 6)} for tag in self.tags]
        return self._error() or {"tags": tags}


def classify(
    engine: OpenBundle, rows: Iterable[str | RowError | Pair], *, long_rows: LongRows | None = None
) -> Results[ClassifiedResult]:
    """Scores the labels of texts or pairs of texts, in order and in bounded memory.

    Args:
        engine: Engine of a bundle with a head that classifies.
        rows: Any number of texts, or of pairs of them; an error becomes the result of its row.
        long_rows: Treatment of rows longer than the model's positions, or than the bundle's longest
            row: "error", or "truncate" to read their beginning, of a pair that of the longer text
            first. Default: "truncate" where the bundle has a longest row, else "error".

    Raises:
        UsageError: The bundle has no such head, or `long_rows` is "split".
    """
    task = _Classify(engine, long_rows)
    return engine.map(checked_texts(rows), task.prepare, task.compute, engine.encoders)


def rank(
    engine: OpenBundle, pairs: Iterable[Pair], *, long_rows: LongRows | None = None
) -> Results[RankedResult]:
    """Scores pairs of texts with a cross-encoder, in order and in bounded memory.

    Args:
        engine: Engine of a bundle with a head that gives one score.
        pairs: Any number of pairs; an error becomes the result of its row.
        long_rows: As for `classify`.

    Raises:
        UsageError: The bundle has no such head, or `long_rows` is "split".
    """
    task = _Rank(engine, long_rows)
    return engine.map(checked_pairs(pairs), task.prepare, task.compute, engine.encoders)


def tag(
    engine: OpenBundle,
    texts: Iterable[str | RowError],
    *,
    aggregation: Aggregation = "none",
    long_rows: LongRows | None = None,
) -> Results[TaggedResult]:
    """Scores the labels of each token of texts, in order and in bounded memory.

    Args:
        engine: Engine of a bundle with a head that tags tokens.
        texts: Any number of texts; an error becomes the result of its row.
        aggregation: How tokens are joined to entities, see `tags_of`; "none" gives every token.
        long_rows: As for `classify`.

    Raises:
        UsageError: The bundle has no such head, or `long_rows` is "split".
    """
    task = _Tag(engine, aggregation, long_rows)
    return engine.map(checked_texts(texts), task.prepare, task.compute, engine.encoders)


def head_of(engine: OpenBundle, task: str) -> HeadSettings:
    """Returns the settings of the head that a task needs.

    Raises:
        UsageError: The bundle has none.
    """
    _ = engine.encoder  # refuses other architectures
    head = engine.bundle.manifest.head
    if head is None or task not in engine.bundle.tasks:
        known = ", ".join(engine.bundle.tasks)
        raise UsageError(f"{engine.bundle.folder} has no head for task {task}; its tasks: {known}")
    return head


def probabilities(scores: NDArray[np.floating[Any]], kind: str) -> Floats:
    """Returns probabilities of scores `[..., labels]`, or the scores where kind is "none"."""
    exact = scores.astype(np.float64)
    if kind == "none":
        return exact
    if kind == "sigmoid":
        found: Floats = np.exp(-np.logaddexp(0.0, -exact))
        return found
    powers = np.exp(exact - exact.max(axis=-1, keepdims=True))
    shares: Floats = powers / powers.sum(axis=-1, keepdims=True)
    return shares


@dataclass(frozen=True)
class _PairRow:
    """Token ids of a text or pair, with its second text."""

    row: EncodedRow
    pair: str | RowError | None


class _Classify:
    task = "classify"

    def __init__(self, engine: OpenBundle, long_rows: LongRows | None) -> None:
        self.head = head_of(engine, self.task)
        self.long_rows = long_rows or default_long_rows(engine)
        check_long_rows(self.long_rows, f"task {self.task}")
        self.preprocessor = cut_to_longest(engine)
        self.special = engine.bundle.tokenizer.special

    def prepare(self, rows: list[Any]) -> list[Any]:
        pairs: list[Pair] = [row if isinstance(row, tuple) else (row, None) for row in rows]
        encoded = iter(encode_pairs(self.preprocessor, pairs, self.long_rows))
        return [self._item(next(encoded), second) for _, second in pairs]

    def _item(
        self, row: EncodedRow, second: str | RowError | None
    ) -> WorkItem[_PairRow] | RowResult:
        if row.error is not None:
            return self._result(_PairRow(row, second), np.zeros(0), row.error)
        return WorkItem(_PairRow(row, second), len(row.ids))

    def compute(self, encoder: EncoderModel, rows: list[_PairRow]) -> list[Any]:
        source = pad_sources([each.row.ids for each in rows], self.special.pad_id)
        found = encoder.encode(*source, ("head",))["head"]
        return [
            self._result(row, scores, None if np.isfinite(scores).all() else NOT_FINITE)
            for row, scores in zip(rows, found, strict=True)
        ]

    def _result(
        self, row: _PairRow, scores: NDArray[np.floating[Any]], error: RowError | None
    ) -> RowResult:
        text, tokens = row.row.text, row.row.tokens if error else len(row.row.ids)
        if error is not None:
            return ClassifiedResult(text, tokens, row.pair, error=error)
        kind, labels = self.head.probabilities, self.head.labels
        values = probabilities(scores, kind).tolist()
        label = labels[int(np.argmax(values))]
        if kind == "sigmoid":
            label = ", ".join(
                name for name, value in zip(labels, values, strict=True) if value >= 0.5
            )
        both = zip(labels, values, strict=True)
        return ClassifiedResult(
            text,
            tokens,
            row.pair,
            "" if kind == "none" else label,
            tuple(LabelScore(*each) for each in both),
            truncated=row.row.truncated,
        )


class _Rank(_Classify):
    task = "rank"

    def _result(
        self, row: _PairRow, scores: NDArray[np.floating[Any]], error: RowError | None
    ) -> RowResult:
        text, tokens = row.row.text, row.row.tokens if error else len(row.row.ids)
        if error is not None:
            return RankedResult(text, tokens, row.pair, error=error)
        score = float(probabilities(scores, self.head.rank)[0])
        return RankedResult(text, tokens, row.pair, score, truncated=row.row.truncated)


def encode_pairs(
    preprocessor: Preprocessor, pairs: Sequence[Pair], long_rows: LongRows
) -> list[EncodedRow]:
    """Encodes texts, and pairs joined as the tokenizer's template says.

    Raises:
        UsageError: There are pairs, and the tokenizer joins none.
    """
    firsts = preprocessor.encode([first for first, _ in pairs], long_rows)
    if all(second is None for _, second in pairs):
        return firsts
    special = preprocessor.special
    if not special.between:
        raise UsageError("the bundle's tokenizer joins no pairs of texts; leave the second out")
    texts = [each if isinstance(each, str) else "" for pair in pairs for each in pair]
    ids = iter(preprocessor.encode_batch(texts))
    rows = []
    for alone, (first, second) in zip(firsts, pairs, strict=True):
        both = next(ids), next(ids)
        if second is None:
            rows.append(alone)
        else:
            rows.append(_joined(preprocessor, first, second, *both, long_rows))
    return rows


def _joined(
    preprocessor: Preprocessor,
    first: str | RowError,
    second: str | RowError,
    left: list[int],
    right: list[int],
    long_rows: LongRows,
) -> EncodedRow:
    special, positions = preprocessor.special, preprocessor.positions
    text = first if isinstance(first, str) else ""
    for side in (first, second):
        if isinstance(side, RowError):
            return EncodedRow(text, error=side)
        if not side.strip():
            return EncodedRow(text, error=RowError("empty", "there is no text to work on"))
    room = positions - len(special.wrap(special.between))
    tokens = len(special.wrap([*left, *special.between, *right]))
    cut = len(left) + len(right) > room
    if cut and (long_rows != "truncate" or room < 2):
        return EncodedRow(text, (), tokens, too_long(tokens, positions))
    if cut:
        most = longest_first(len(left), len(right), room)
        left, right = left[: most[0]], right[: most[1]]
    ids = special.wrap([*left, *special.between, *right])
    return EncodedRow(text, ids, tokens, truncated=cut)


def longest_first(left: int, right: int, room: int) -> tuple[int, int]:
    """Returns the lengths to which two texts are cut: the longer one down to the other's first.

    As truncation "longest_first" of Hugging Face's tokenizers (`truncate_encodings`).
    """
    short, long = sorted((left, right))
    long = min(long, max(short, room - short))
    if short + long > room:
        short, long = room // 2, room - room // 2
    return (short, long) if left <= right else (long, short)


@dataclass(frozen=True)
class _TaggedRow:
    """A text as token ids, with the place of each token but the special ones."""

    row: EncodedRow
    places: Sequence[Place]


class _Tag:
    def __init__(
        self, engine: OpenBundle, aggregation: Aggregation, long_rows: LongRows | None
    ) -> None:
        self.head, self.aggregation = head_of(engine, "tag"), aggregation
        self.long_rows = long_rows or default_long_rows(engine)
        check_long_rows(self.long_rows, "task tag")
        self.preprocessor = cut_to_longest(engine)
        self.special = engine.bundle.tokenizer.special
        self.places = engine.bundle.tokenizer.places

    def prepare(self, texts: list[str | RowError]) -> list[WorkItem[_TaggedRow] | TaggedResult]:
        return [
            WorkItem(_TaggedRow(row, self.places(row.text)), len(row.ids))
            if row.error is None
            else TaggedResult(row.text, row.tokens, error=row.error)
            for row in self.preprocessor.encode(texts, self.long_rows)
        ]

    def compute(self, encoder: EncoderModel, rows: list[_TaggedRow]) -> list[TaggedResult]:
        source = pad_sources([each.row.ids for each in rows], self.special.pad_id)
        found = encoder.encode(*source, ("head",))["head"]
        return [self._result(*pair) for pair in zip(rows, found, strict=True)]

    def _result(self, tagged: _TaggedRow, scores: NDArray[np.floating[Any]]) -> TaggedResult:
        row, labels = tagged.row, self.head.labels
        first, last = len(self.special.before), len(row.ids) - len(self.special.after)
        own = scores[first:last]
        if not np.isfinite(own).all():
            return TaggedResult(row.text, len(row.ids), error=NOT_FINITE, truncated=row.truncated)
        values = probabilities(own, "softmax")
        tags = tags_of(row.text, tagged.places, values, labels, self.aggregation)
        best = tuple(values.max(axis=-1, initial=0.0).tolist())
        return TaggedResult(row.text, len(row.ids), tags, best, truncated=row.truncated)
