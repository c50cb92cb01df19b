"""A stream of rows computed by several threads, and given back in order."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeAlias, TypeVar

from transferry.runtime.decoding.batching import BatchOptions, fitting, windows
from transferry.runtime.errors import InputError

Item = TypeVar("Item")
Task = TypeVar("Task")
Done = TypeVar("Done")

# How often a replica that waits looks whether anybody is left to wait for, in seconds.
LOOK_UP = 1.0
# What one replica takes at least, if there is as much: fewer rows hardly fill its products.
SMALLEST_SHARE = 16


@dataclass(frozen=True, eq=False)
class WorkItem(Generic[Task]):
    """What is to be computed. Where it stands for several rows, these become the same.

    Attributes:
        task: What it is.
        tokens: How long it is: what is of similar length is computed together.
    """

    task: Task
    tokens: int


class Tasks(Protocol[Task]):
    """Where a worker gets what is to be computed."""

    def take(self, most: int) -> list[WorkItem[Task]]:
        """Hands out what is to be computed next, of similar length, once there is anything.

        Args:
            most: How many are wanted.

        Returns:
            What is to be computed; nothing if nothing more will come.
        """
        ...


class WorkQueue(Generic[Task, Done]):
    """What waits to be computed and what has been: where the reader and the replicas meet."""

    def __init__(self, tokens: int, workers: int = 1) -> None:
        """Begins empty.

        Args:
            tokens: Most tokens that are handed out at once, padding counted.
            workers: Among how many it is shared out. None gets more than its share of what waits,
                unless that is hardly worth computing: of the last rows one would otherwise take
                all, and the others have nothing to do.
        """
        self._tokens, self._workers = tokens, workers
        self._waiting: deque[WorkItem[Task]] = deque()
        self._done: dict[WorkItem[Task], Done] = {}
        self._closed = self._stopped = False
        self._error: BaseException | None = None
        self._reader = threading.current_thread()
        lock = threading.Lock()
        self._added, self._finished = threading.Condition(lock), threading.Condition(lock)

    def take(self, most: int) -> list[WorkItem[Task]]:
        """Hands out what is to be computed next; see `Tasks.take`."""
        with self._added:
            while not (self._waiting or self._closed or self._abandoned()):
                self._added.wait(LOOK_UP)
            return [self._waiting.popleft() for _ in range(self._fitting(most))]

    def _fitting(self, most: int) -> int:
        if self._stopped or self._abandoned():
            return 0
        share = max(-(-len(self._waiting) // self._workers), SMALLEST_SHARE)
        return fitting((todo.tokens for todo in self._waiting), min(most, share), self._tokens)

    def _abandoned(self) -> bool:
        """Whether the program ends without having closed its stream of results."""
        return not (threading.main_thread().is_alive() or self._reader.is_alive())

    def add(self, todos: Iterable[WorkItem[Task]]) -> None:
        """Lets something be computed, after all else."""
        with self._added:
            self._waiting.extend(todos)
            self._added.notify_all()

    def give_back(self, todos: Sequence[WorkItem[Task]]) -> None:
        """Takes back what could not be computed, to be computed before all else."""
        with self._added:
            self._waiting.extendleft(reversed(todos))
            self._added.notify_all()

    def close(self) -> None:
        """Tells the replicas that nothing more will come."""
        with self._added:
            self._closed = True
            self._added.notify_all()

    def stop(self, error: BaseException | None = None) -> None:
        """Tells the replicas that nobody wants more.

        Args:
            error: What the reader is to raise.
        """
        self.close()
        with self._finished:
            self._stopped = True
            self._error = self._error or error
            self._finished.notify_all()

    def work(self, worker: Worker[Task, Done]) -> None:
        """Computes, as one of the replicas, until nothing more will come."""
        try:
            for todo, done in worker(self):
                with self._finished:
                    self._done[todo] = done
                    self._finished.notify_all()
                if self._stopped:
                    break
        except BaseException as error:  # noqa: BLE001 - raised where the results are read
            self.stop(error)

    def results(self, rows: Iterable[WorkItem[Task] | Done]) -> Iterator[Done]:
        """Waits for what became of rows, in order, and forgets it."""
        todos = set()
        for row in rows:
            if not isinstance(row, WorkItem):
                yield row
                continue
            todos.add(row)
            with self._finished:
                while row not in self._done:
                    if self._error is not None:
                        raise self._error
                    self._finished.wait()
                done = self._done[row]
            yield done
        with self._finished:
            for todo in todos:
                del self._done[todo]


Worker: TypeAlias = Callable[[WorkQueue[Task, Done]], Iterable[tuple[WorkItem[Task], Done]]]
# A worker that is told how much to compute at once.
Work: TypeAlias = Callable[[Tasks[Task], int], Iterable[tuple[WorkItem[Task], Done]]]


class _Loan(Generic[Task]):
    """What a worker has taken and not computed yet."""

    def __init__(self, supply: WorkQueue[Task, Done], most: int) -> None:
        self._supply: Tasks[Task] = supply
        self._most = most
        self.taken: dict[WorkItem[Task], None] = {}

    def take(self, most: int) -> list[WorkItem[Task]]:
        todos = self._supply.take(min(most, self._most))
        self.taken.update(dict.fromkeys(todos))
        return todos


def sparing(work: Work[Task, Done], rows: int) -> Worker[Task, Done]:
    """Returns a worker that goes on with half as much at once where memory runs out.

    What it was at is given back and computed again: no answer depends on what is beside it.

    Args:
        work: Computes so many at once.
        rows: How many at first.

    Raises:
        InputError: There is not enough memory for one.
    """

    def worker(supply: WorkQueue[Task, Done]) -> Iterator[tuple[WorkItem[Task], Done]]:
        rows_now, most = rows, sys.maxsize
        while True:
            loan = _Loan(supply, most)
            try:
                for todo, done in work(loan, rows_now):
                    del loan.taken[todo]
                    yield todo, done
                return
            except MemoryError as error:
                taken = list(loan.taken)
                rows_now = most = min(rows_now, len(taken)) // 2
                if most == 0:
                    raise InputError(
                        f"there is not enough memory for a single row ({error}); shorten the "
                        "longest rows, run fewer replicas, or end other programs"
                    ) from error
            # Not before the error is forgotten, which holds all that was computed with.
            supply.give_back(taken)

    return worker


def batch_worker(compute: Callable[[list[Task]], list[Done]], rows: int) -> Worker[Task, Done]:
    """Returns a worker that computes one batch after another.

    Args:
        compute: Computes a batch.
        rows: Most rows of a batch.
    """

    def work(tasks: Tasks[Task], rows: int) -> Iterator[tuple[WorkItem[Task], Done]]:
        while todos := tasks.take(rows):
            yield from zip(todos, compute([todo.task for todo in todos]), strict=True)

    return sparing(work, rows)


def in_order(
    items: Iterable[Item],
    prepare: Callable[[int, list[Item]], list[WorkItem[Task] | Done]],
    workers: Sequence[Worker[Task, Done]],
    *,
    options: BatchOptions,
) -> Iterator[Done]:
    """Computes every item, and yields what became of each in order.

    Args:
        items: Any iterable, however long; it is read ahead by at most two windows.
        prepare: Makes rows of a window of items, given the number of the first: what is to be
            computed, and what is done already, such as an error.
        workers: Each takes from the supply and computes, in a thread of its own.
        options: Sizes of windows, and of what a supply hands out, in tokens.
    """
    supply = WorkQueue[Task, Done](options.tokens, len(workers))
    threads = [
        threading.Thread(target=supply.work, args=(worker,), name=f"replica {number}")
        for number, worker in enumerate(workers)
    ]
    for thread in threads:
        thread.start()
    try:
        first = 0
        pending: deque[list[WorkItem[Task] | Done]] = deque()
        for number, window in enumerate(windows(items, options.window)):
            rows = prepare(first, window)
            first += len(window)
            # Up and down by turns: where windows meet, what is computed together is alike, too.
            todos = dict.fromkeys(row for row in rows if isinstance(row, WorkItem))
            supply.add(sorted(todos, key=lambda todo: todo.tokens, reverse=number % 2 == 0))
            pending.append(rows)
            # One window is computed while the next is read, so that no replica waits.
            if len(pending) > 1:
                yield from supply.results(pending.popleft())
        supply.close()
        while pending:
            yield from supply.results(pending.popleft())
    finally:
        supply.stop()
        for thread in threads:
            thread.join()
