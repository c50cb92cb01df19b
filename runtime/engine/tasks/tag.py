"""Tagging: the labels of the tokens of a text, or its entities, joined as transformers joins them.

Source of the joining: TokenClassificationPipeline of transformers 5.24, `aggregate` and helpers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transferry.runtime.bundle.head import Aggregation
from transferry.runtime.engine.preprocess import EncodedRow, LongRows, checked_texts
from transferry.runtime.engine.result import Results, RowError, RowResult
from transferry.runtime.engine.tasks.heads import EncoderCall, HeadTask, probabilities
from transferry.runtime.engine.tasks.task import Page, RowOptions, columns

if TYPE_CHECKING:
    from transferry.runtime.engine.open_bundle import OpenBundle
    from transferry.runtime.engine.tasks.heads import Floats, Scores
    from transferry.runtime.tokenizer.special_tokens import Place

    Token = tuple[Place, Floats]


OUTSIDE = "O"  # the label of tokens outside of entities


@dataclass(frozen=True)
class Tag:
    """A token of a text, or an entity of several, with its likeliest label.

    Attributes:
        text: Its characters.
        start: Its first character in the text, from 0.
        end: The character after its last one.
        label: The likeliest label; of an entity without B- or I-.
        score: Its probability; of an entity the mean over its tokens or words.
    """

    text: str
    start: int
    end: int
    label: str
    score: float


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


def tags_of(
    text: str,
    places: Sequence[Place],
    probabilities: Floats,
    labels: Sequence[str],
    aggregation: Aggregation,
) -> tuple[Tag, ...]:
    """Returns the tokens of a text with their labels, or its entities.

    Args:
        text: The text.
        places: Where its tokens stand.
        probabilities: `[tokens, labels]`, of the first of these tokens.
        labels: Names of the labels.
        aggregation: "none" for every token; "simple" to join neighbours of one entity; "first",
            "average" and "max" to give all tokens of a word one label before: that of the first,
            the likeliest on average, or the surest token's.
    """
    # A text that was cut has more places than tokens.
    tokens = [(place, row) for place, row in zip(places, probabilities, strict=False)]
    groups = [[token] for token in tokens]
    if aggregation not in ("none", "simple"):
        groups = list(_words(tokens))
    tags = [_tag(text, group, labels, aggregation) for group in groups]
    return tuple(tags if aggregation == "none" else _entities(text, tags))


def _words(tokens: Sequence[Token]) -> Iterator[list[Token]]:
    word: list[Token] = []
    for place, row in tokens:
        if word and not place.continues:
            yield word
            word = []
        word.append((place, row))
    if word:
        yield word


def _tag(
    text: str, tokens: Sequence[Token], labels: Sequence[str], aggregation: Aggregation
) -> Tag:
    import numpy as np

    rows = np.stack([row for _, row in tokens])
    if aggregation == "average":
        chosen = rows.mean(axis=0)
    else:
        chosen = rows[rows.max(axis=-1).argmax() if aggregation == "max" else 0]
    best, start, end = int(chosen.argmax()), tokens[0][0].start, tokens[-1][0].end
    return Tag(text[start:end], start, end, labels[best], float(chosen[best]))


def _entities(text: str, tags: Sequence[Tag]) -> Iterator[Tag]:
    """Joins neighbours of one entity, which B- begins; those outside are left out."""
    import numpy as np

    groups: list[list[Tag]] = []
    for tag in tags:
        begins, kind = _kind(tag.label)
        if groups and not begins and kind == _kind(groups[-1][-1].label)[1]:
            groups[-1].append(tag)
        else:
            groups.append([tag])
    for group in groups:
        label = group[0].label.split("-", 1)[-1]
        if label != OUTSIDE:
            start, end = group[0].start, group[-1].end
            score = float(np.mean([tag.score for tag in group]))
            yield Tag(text[start:end], start, end, label, score)


def _kind(label: str) -> tuple[bool, str]:
    """Returns whether a label begins an entity, and the entity's name."""
    return label.startswith("B-"), label[2:] if label.startswith(("B-", "I-")) else label
