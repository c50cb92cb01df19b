"""A stream of rows computed in batches by several threads, and given back in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from transferry.runtime.batching import BatchOptions, length_batches, windows

Item = TypeVar("Item")
Task = TypeVar("Task")
Done = TypeVar("Done")


@dataclass(frozen=True)
class Todo(Generic[Task]):
    """A row that waits for its batch.

    Attributes:
        task: What is to be computed.
        tokens: How long it is: rows of similar length are computed together.
        group: Only rows of one group are.
    """

    task: Task
    tokens: int
    group: int = 0


@dataclass(frozen=True)
class _Window(Generic[Task, Done]):
    """Rows being worked on, and the batches that will complete them."""

    rows: list[Todo[Task] | Done]
    batches: list[tuple[list[int], Future[list[Done]]]]


def in_batches(
    items: Iterable[Item],
    prepare: Callable[[int, list[Item]], list[Todo[Task] | Done]],
    compute: Callable[[list[Task]], list[Done]],
    *,
    options: BatchOptions,
    rows: int,
    replicas: int,
) -> Iterator[Done]:
    """Computes every item, and yields what became of each in order.

    Args:
        items: Any iterable, however long; it is read ahead by at most two windows.
        prepare: Makes rows of a window of items, given the number of the first: what waits for
            its batch, and what is done already, such as an error.
        compute: Computes a batch; it is called by `replicas` threads at once.
        options: Sizes of windows and batches, in tokens.
        rows: Most rows of a batch.
        replicas: Batches in progress at a time.
    """
    pool = ThreadPoolExecutor(replicas, thread_name_prefix="replica")

    def submit(window: list[Todo[Task] | Done]) -> _Window[Task, Done]:
        groups: dict[int, list[tuple[int, Todo[Task]]]] = {}
        for number, row in enumerate(window):
            if isinstance(row, Todo):
                groups.setdefault(row.group, []).append((number, row))
        batches = []
        for group in groups.values():
            lengths = [todo.tokens for _, todo in group]
            for batch in length_batches(lengths, rows, options.tokens):
                tasks = [group[index][1].task for index in batch]
                places = [group[index][0] for index in batch]
                batches.append((places, pool.submit(compute, tasks)))
        return _Window(window, batches)

    def collect(window: _Window[Task, Done]) -> Iterator[Done]:
        finished = {
            place: done
            for places, future in window.batches
            for place, done in zip(places, future.result(), strict=True)
        }
        for number, row in enumerate(window.rows):
            yield finished[number] if isinstance(row, Todo) else row

    try:
        first = 0
        pending: deque[_Window[Task, Done]] = deque()
        for window in windows(items, options.window):
            pending.append(submit(prepare(first, window)))
            first += len(window)
            # One window is computed while the next is read, so that no replica waits.
            if len(pending) > 1:
                yield from collect(pending.popleft())
        while pending:
            yield from collect(pending.popleft())
    finally:
        pool.shutdown(cancel_futures=True)
