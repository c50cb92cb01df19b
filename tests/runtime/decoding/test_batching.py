"""Batches hold every row once and no more than fits; windows read no further than they must."""

from itertools import count
from typing import Any

import numpy as np
import pytest

from transferry.runtime.decoding.batching import (
    UNIT,
    BatchOptions,
    blocks,
    fitting,
    length_batches,
    widened,
    windows,
)
from transferry.runtime.engine.prompts import Asked, Parts
from transferry.runtime.errors import UsageError


def test_windows_of_huge_items_are_shorter() -> None:
    """No list is added to that has enough, and an item is never cut."""
    items = ["aaa", "bb", "c" * 50, "d", ("ee", None), ("f", "ggg"), 7, 8, "h" * 9, "i"]
    found = list(windows(iter(items), 4, characters=5))
    assert found == [items[:2], items[2:3], items[3:6], items[6:9], items[9:]]
    asked: list[Any] = [Asked("aaa"), Parts((Asked("bb"),)), [{"content": "ccc"}], "d"]
    assert [len(each) for each in windows(asked, 4, characters=5)] == [2, 1, 1]
    megabytes = count()
    stream = windows(("x" * (1 << 20) for _ in megabytes), 4096)
    assert len(next(stream)) == 16
    assert next(megabytes) == 16, "no more are read than are given"


@pytest.mark.parametrize(
    ("columns", "limit", "wide"),
    [(0, None, 0), (1, None, 4), (4, None, 4), (5, None, 8), (5, 6, 6), (6, 6, 6), (7, 6, 7)],
)
def test_columns_are_a_multiple_as_far_as_there_is_room(
    columns: int, limit: int | None, wide: int
) -> None:
    mask = np.ones((3, columns), np.bool_)
    found = widened(mask, 4, limit)
    assert found.shape == (3, wide)
    assert found.dtype == mask.dtype
    assert int(found.sum()) == 3 * columns
    np.testing.assert_array_equal(found[:, :columns], mask)


def test_batches_are_full_but_for_a_long_row_by_itself() -> None:
    assert length_batches([1] * 7, rows=3, tokens=100) == [[0, 1, 2], [3, 4, 5], [6]]
    assert length_batches([5] * 5, rows=100, tokens=10) == [[0, 1], [2, 3], [4]]

    assert length_batches([2, 90, 2], rows=8, tokens=10) == [[1], [0, 2]]
    assert length_batches([], rows=8, tokens=10) == []


def test_what_fits_goes_by_the_longest_so_far() -> None:
    assert fitting([1, 2, 3, 4], rows=8, tokens=9) == 3
    assert fitting([4, 3, 2, 1], rows=8, tokens=9) == 2
    assert fitting(count(1), rows=3, tokens=100) == 3
    assert fitting([50, 1], rows=8, tokens=9) == 1
    assert fitting([], rows=8, tokens=9) == fitting([1], rows=0, tokens=9) == 0


@pytest.mark.parametrize("seed", range(10))
def test_blocks_hold_all_tokens_of_every_row(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 30, rng.integers(1, 40))
    mask = np.arange(lengths.max()) < lengths[:, None]
    found = list(blocks(mask, 60))
    assert [row for rows, _ in found for row in range(rows.start, rows.stop)] == [
        *range(len(lengths))
    ]
    for rows, columns in found:
        longest = int(lengths[rows].max())
        assert longest <= columns < longest + UNIT
        assert columns % UNIT == 0 or columns == mask.shape[1]
        assert rows.stop - rows.start == 1 or (rows.stop - rows.start) * longest <= 60


@pytest.mark.parametrize("name", ["rows", "tokens", "window"])
def test_options_refuse_nothing_at_once(name: str) -> None:
    with pytest.raises(UsageError, match=f"batch {name} must be at least 1, found 0"):
        BatchOptions(**{name: 0})
