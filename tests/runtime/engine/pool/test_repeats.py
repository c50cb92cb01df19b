"""Rows that come again are answered once, as far as the table remembers."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from transferry import BatchOptions, Engine, GenerationOptions, RowError
from transferry.runtime.engine.preprocess import WorkItem
from transferry.runtime.engine.tasks.generate import GenerationResult
from transferry.runtime.engine.worker_pool import Repeats, batch_worker, in_order

GREEDY = GenerationOptions(max_length=8, no_repeat_ngram=1)


def answered(
    inputs: list[Any], window: int, computed: list[Any], most_tokens: int = 1 << 20
) -> list[GenerationResult]:
    """Answers inputs through a table; notes what is computed."""

    def prepare(window: list[Any]) -> list[WorkItem[Any] | GenerationResult]:
        return [
            GenerationResult("", 0, error=each) if isinstance(each, RowError) else WorkItem(each, 1)
            for each in window
        ]

    def compute(rows: list[Any]) -> list[GenerationResult]:
        computed.extend(rows)
        return [GenerationResult(row, len(row)) for row in rows]

    table: Repeats[Any, GenerationResult] = Repeats(prepare, lambda each: each, most_tokens)
    options = BatchOptions(rows=3, window=window)
    stream = in_order(inputs, table.prepare, [batch_worker(compute)], 3, options)
    return list(table.watch(stream))


@pytest.mark.parametrize("window", [1, 2, 5, 100])
def test_each_row_is_computed_once(window: int) -> None:
    draw = random.Random(window)
    inputs: list[Any] = [draw.choice("abcdefgh") * 3 for _ in range(200)]
    inputs[7] = inputs[90] = RowError("no-text", "there is none")
    computed: list[Any] = []
    found = answered(inputs, window, computed)
    assert [each.source if each.error is None else each.error for each in found] == inputs
    texts = set(inputs) - {inputs[7]}
    # Two windows are under way at once, so an equal row of the next may be computed again.
    assert set(computed) == texts
    assert len(computed) <= 2 * len(texts)
    assert sum(not each.repeated for each in found if each.error is None) == len(computed)


def test_the_table_forgets_what_was_asked_for_longest_ago() -> None:
    computed: list[Any] = []
    inputs = [f"{n % 6}" if n % 3 else "x" for n in range(300)]
    answered(inputs, 1, computed, 5 * 33)
    assert computed.count("x") < 5, "it was asked for again and again"
    computed.clear()
    answered([f"{n % 50}" for n in range(300)], 1, computed, 5 * 33)
    assert len(computed) == 300, "more than the table holds"


def test_an_endless_stream_of_equal_rows_needs_no_end(bundle_folder: Path) -> None:
    def endless() -> Iterator[str]:
        while True:
            yield "a dog"

    engine = Engine(bundle_folder, batches=BatchOptions(rows=4, window=4))
    stream = engine.generate(endless(), GREEDY)
    assert len([next(stream) for _ in range(500)]) == 500
    stream.close()
