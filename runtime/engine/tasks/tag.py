"""Tagging: the labels of the tokens of a text, or its entities."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transferry.runtime.bundle.head import Aggregation
from transferry.runtime.engine.entities import Tag, tags_of
from transferry.runtime.engine.preprocess import EncodedRow, LongRows, checked_texts
from transferry.runtime.engine.result import Results, RowError, RowResult
from transferry.runtime.engine.tasks.heads import EncoderCall, HeadTask, probabilities
from transferry.runtime.engine.tasks.task import Page, RowOptions, columns

if TYPE_CHECKING:
    from transferry.runtime.engine.open_bundle import OpenBundle
    from transferry.runtime.engine.tasks.heads import Scores
    from transferry.runtime.tokenizer.special_tokens import Place


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

    @property
    def numbers(self) -> tuple[float, ...]:
        """The probabilities of the likeliest labels."""
        return self.best

    def _answer(self, n_best: int) -> dict[str, Any]:
        return self._error() or {"tags": [{**vars(tag)} for tag in self.tags]}


@dataclass(frozen=True, kw_only=True)
class TagOptions(RowOptions):
    """Options of tag.

    Attributes:
        aggregation: Join neighbouring tokens of an entity unchanged (simple), or after giving a
            word's tokens one label (first, average, max).
    """

    aggregation: Aggregation = "none"


class TagTask(HeadTask):
    """Labels of tokens, or entities."""

    name = "tag"
    options = TagOptions
    columns = columns(
        tags=[columns(text="text", start="integer", end="integer", label="text", score="float")]
    )
    answer = "tags"
    page = Page("Tag", options={"aggregation": "simple"})


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
    call = _Call(engine, TagOptions(aggregation=aggregation, long_rows=long_rows))
    return engine.map(checked_texts(texts), call.prepare, call.compute, engine.encoders)


@dataclass(frozen=True)
class _TaggedRow(EncodedRow):
    """A text as token ids, with the place of each token but the special ones."""

    places: Sequence[Place] = ()


class _Call(EncoderCall):
    task, kind = TagTask.name, TaggedResult

    def __init__(self, engine: OpenBundle, options: TagOptions) -> None:
        super().__init__(engine, options)
        self.aggregation = options.aggregation
        self.places = engine.bundle.tokenizer.places

    def encoded(self, rows: list[str | RowError]) -> list[EncodedRow]:
        return [
            _TaggedRow(**vars(row), places=self.places(row.text)) if row.error is None else row
            for row in super().encoded(rows)
        ]

    def part(self, row: _TaggedRow, found: Scores) -> Scores:
        return found[len(self.special.before) : len(row.ids) - len(self.special.after)]

    def answer(self, row: _TaggedRow, scores: Scores) -> Mapping[str, Any]:
        values = probabilities(scores, "softmax")
        places = self.special.cut(row.places, len(values))
        tags = tags_of(row.text, places, values, self.head.labels, self.aggregation)
        return {"tags": tags, "best": tuple(values.max(axis=-1, initial=0.0).tolist())}
