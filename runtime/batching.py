"""Which rows are computed together: of similar length, and no more than fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from transferry.runtime.errors import UsageError

Item = TypeVar("Item")


@dataclass(frozen=True)
class BatchOptions:
    """How much is computed at once. It decides speed and memory, never an answer.

    Attributes:
        rows: Most rows that the decoder steps together; each beam of a sentence is a row.
        tokens: Most source tokens of a batch, padding counted; a longer row is a batch by itself.
        window: Sentences that are read ahead and sorted by length.
    """

    rows: int = 64
    tokens: int = 4096
    window: int = 4096

    def __post_init__(self) -> None:
        for name in ("rows", "tokens", "window"):
            if getattr(self, name) < 1:
                raise UsageError(f"batch {name} must be at least 1, not {getattr(self, name)}")


def windows(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Cuts a stream into lists of `size`, the last one shorter; reads no further than needed."""
    iterator = iter(items)
    while window := list(islice(iterator, size)):
        yield window


def length_batches(lengths: Sequence[int], rows: int, tokens: int) -> list[list[int]]:
    """Groups indices by length, longest first, so that the last batches to finish are short ones.

    Args:
        lengths: Tokens of each item.
        rows: Most items of a batch.
        tokens: Most items times longest of a batch; one item alone may exceed it.

    Returns:
        Each index exactly once.
    """
    batches: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        full = not batches or len(batches[-1]) == rows
        if full or (len(batches[-1]) + 1) * longest > tokens:
            batches.append([])
            longest = lengths[index]
        batches[-1].append(index)
    return batches
