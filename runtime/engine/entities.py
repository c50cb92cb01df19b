"""Entities of a text: tokens joined by their labels, as transformers joins them.

Source: TokenClassificationPipeline of transformers 5.24, `aggregate` and its helpers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transferry.runtime.bundle.head import Aggregation

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from transferry.runtime.tokenizer.special_tokens import Place

    Floats = NDArray[np.float64]
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
