"""Both answers to a row that differs, cut around their first difference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

BEFORE, AFTER = 200, 160  # characters shown around a difference
NOTHING = "(nothing)"


@dataclass(frozen=True)
class Side:
    """One answer: the text before the first word that differs, that word, and the rest."""

    before: str
    word: str
    after: str


@dataclass(frozen=True)
class Answers:
    """The answers to one row.

    Attributes:
        title: The row and its searches.
        source: Text of the source.
        expected: torch's answer.
        found: The bundle's answer.
        message: How the two came to differ.
    """

    title: str
    source: str
    expected: Side
    found: Side
    message: str


def side_by_side(differences: Iterable[Mapping[str, Any]]) -> list[Answers]:
    """Returns the answers of differences that have texts; searches with the same answers share one.

    Args:
        differences: Records of `Difference`, each with its "search".
    """
    groups: dict[tuple[int, str, str, str], list[Mapping[str, Any]]] = {}
    for item in differences:
        texts = item["source"], item["expected"], item["found"]
        if any(texts):
            groups.setdefault((item["row"], *texts), []).append(item)
    return [
        Answers(
            f"row {row}, {' and '.join(item['search'] for item in items)}",
            _cut(source, len(source)),
            *_sides(expected, found),
            items[0]["message"],
        )
        for (row, source, expected, found), items in groups.items()
    ]


def _sides(expected: str, found: str) -> tuple[Side, Side]:
    pairs = enumerate(zip(expected, found, strict=False))
    shared = next((i for i, (a, b) in pairs if a != b), min(len(expected), len(found)))
    start = max(expected.rfind(mark, 0, shared) for mark in (" ", "\n")) + 1
    if not any(text[shared : shared + 1].strip() for text in (expected, found)):
        start = shared  # the word before is whole on both sides
    return _side(expected, start), _side(found, start)


def _side(text: str, start: int) -> Side:
    word = "".join(text[start:].split(maxsplit=1)[:1])
    place = text.find(word, start)
    before, after = text[:place], text[place + len(word) :]
    if len(before) > BEFORE:
        before = f"… {before[-BEFORE:]}"
    return Side(before, word or NOTHING, _cut(after, AFTER))


def _cut(text: str, most: int) -> str:
    most = min(most, BEFORE + AFTER)
    return text if len(text) <= most else f"{text[:most]} …"
