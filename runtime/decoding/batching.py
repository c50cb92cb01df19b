"""Batches of rows of similar length, within limits on rows and tokens."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from transferry.runtime.errors import require
from transferry.runtime.settings import MOST, check_value

Item = TypeVar("Item")
Scalar = TypeVar("Scalar", bound=np.generic)

# Sources and caches are padded to a multiple of this many columns: onnxruntime's product of one row
# with a matrix sums its last one to three terms in another order, so that padding would otherwise
# change the last bits; and a source of one token would be computed by another kernel.
UNIT = 4
# Prompts are padded to a multiple of this many columns: later tokens come after the padding, and a
# softmax adds its terms into as many sums as a vector has lanes, by their columns.
LANES = 16
# Limit on a window's characters, except those of its last text: rows of megabytes take no more
# memory than short rows.
WINDOW_CHARACTERS = 1 << 24


@dataclass(frozen=True)
class BatchOptions:
    """Limits on a computation. They decide speed and memory, never an answer.

    Attributes:
        rows: Rows that the decoder steps together; each beam of a sentence is a row.
        tokens: Source tokens read at once, padding counted; a longer row is read by itself.
        window: Sentences read ahead and sorted by length; fewer where they are huge. Default:
            4,096, and at least 512 for each replica, so that each has full batches.
    """

    rows: int = 64
    tokens: int = 4096
    window: int | None = None

    def __post_init__(self) -> None:
        for name in ("rows", "tokens", "window"):
            if (value := getattr(self, name)) is None:
                continue
            check_value(f"batch {name}", value, Annotated[int, msgspec.Meta(le=MOST)])
            require(value >= 1, f"batch {name}", "at least 1", value)

    def read_ahead(self, replicas: int) -> int:
        """Returns the window for so many replicas."""
        return self.window or max(4096, 512 * replicas)


def padded(columns: int) -> int:
    """Rounds a number of columns up to a multiple of `UNIT`."""
    return -(-columns // UNIT) * UNIT


def widened(array: NDArray[Scalar], unit: int, limit: int | None = None) -> NDArray[Scalar]:
    """Pads `[rows, columns]` with zeros to a multiple of `unit` columns, at most `limit`."""
    rows, columns = array.shape
    extra = -columns % unit
    if limit is not None:
        extra = max(0, min(extra, limit - columns))
    if not extra:
        return array
    found = np.zeros((rows, columns + extra), array.dtype)  # np.pad takes ten times as long
    found[:, :columns] = array
    return found


def windows(
    items: Iterable[Item], size: int, characters: int = WINDOW_CHARACTERS
) -> Iterator[list[Item]]:
    """Cuts a stream into lists of `size` items, reading no further than needed.

    Items are inputs of any kind, tuples that hold them, or small values. A list that holds
    `characters` characters is complete, too.
    """
    window: list[Item] = []
    held = 0
    for item in items:
        window.append(item)
        held += _characters(item)
        if len(window) == size or held >= characters:
            yield window
            window, held = [], 0
    if window:
        yield window


def _characters(item: Any) -> int:
    # The inputs in `Asked` and `Parts` of engine/prompts.py.
    item = getattr(item, "source", getattr(item, "inputs", item))
    if isinstance(item, dict):
        item = list(item.values())
    if isinstance(item, list | tuple):  # a list may hold token ids
        return len(item) * isinstance(item, list) + sum(map(_characters, item))
    return len(item) if isinstance(item, str) else 0


def fitting(lengths: Iterable[int], rows: int, tokens: int) -> int:
    """Number of first items, of given lengths in tokens, that fit into one batch.

    It has at most `rows` items, and items times longest is at most `tokens`; a single item may
    exceed that.
    """
    count = longest = 0
    for length in islice(lengths, rows):
        longest = max(longest, length)
        if count and (count + 1) * longest > tokens:
            break
        count += 1
    return count


def blocks(mask: NDArray[np.bool_], tokens: int) -> Iterator[tuple[slice, int]]:
    """Cuts a batch into blocks of neighbouring rows, of at most `tokens` as in `fitting`.

    Args:
        mask: True at tokens, False at padding, which follows them `[rows, columns]`.
        tokens: Limit on the rows of a block times its longest.

    Yields:
        The rows of a block, and its number of columns: the longest row, rounded up to a multiple of
        `UNIT` where the batch has as many.
    """
    lengths = mask.sum(axis=1).tolist()
    first = 0
    while first < len(lengths):
        count = fitting(lengths[first:], len(lengths), tokens)
        block = slice(first, first + count)
        longest = max(lengths[block])
        yield block, min(padded(longest), mask.shape[1])
        first += count


def length_batches(lengths: Sequence[int], rows: int, tokens: int) -> list[list[int]]:
    """Groups indices by length, longest first, so that the last batches are quick to finish.

    `rows` and `tokens` limit a batch as in `fitting`; each index is in exactly one batch.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    batches: list[list[int]] = []
    first = 0
    while first < len(order):
        count = fitting((lengths[index] for index in order[first:]), rows, tokens)
        batches.append(order[first : first + count])
        first += count
    return batches
