"""A stream of rows, computed by several threads and returned in order; equal ones once."""

import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import takewhile
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeAlias, TypeVar

from transferry.runtime.decoding.batching import BatchOptions, fitting, windows
from transferry.runtime.engine.preprocess import Row, WorkItem
from transferry.runtime.engine.result import RowResult
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.stopping import held

Input = TypeVar("Input")
Answer = TypeVar("Answer")
Known = TypeVar("Known", bound=RowResult)

# Seconds after which a thread that waits looks whether there is still something to wait for.
CHECK_SECONDS = 1.0
# A replica takes at least this many rows, if that many wait: fewer make matrix products too small.
SMALLEST_SHARE = 16
# Tokens of the answers that are remembered, and numbers of vectors likewise: some 40 MB.
MOST_TOKENS = 1 << 20
# Overhead of an answer, in tokens.
_OVERHEAD = 32


# Returns items of at most so many rows, of similar length; none once there are no more.
Take: TypeAlias = Callable[[int], list[WorkItem[Row]]]
# Computes what it takes, so many rows at once, and yields each item with its answer.
Worker: TypeAlias = Callable[[Take[Row], int], Iterable[tuple[WorkItem[Row], Answer]]]


class WorkQueue(Generic[Row, Answer]):
    """Work items on their way to the replicas, and the answers on their way back.

    The reader may be interrupted anywhere, and could then hold a lock for ever. So reader and
    replicas share only queues written in C, which Python documents as safe there, and a dictionary
    whose single entries they set and delete. The reader sends its changes to the replicas, which
    have a lock among themselves. Waking a thread takes 50 microseconds of CPU time, so a replica
    wakes the reader for the one answer that it waits for.

    Attributes:
        stopped: No more answers are needed; replicas look at it between two answers.
        process: Id of the process whose replicas compute.
        threads: The replicas, each running `run`.
    """

    def __init__(self, tokens: int, workers: int = 1) -> None:
        """Creates an empty queue.

        Args:
            tokens: Limit on the tokens taken at once, padding counted.
            workers: Number of replicas. Each takes at most its share of the waiting items, but at
                least `SMALLEST_SHARE`: one replica would otherwise take all of the last rows.
        """
        self._tokens, self._workers = tokens, workers
        self.stopped = self._closed = False
        self._error: BaseException | None = None
        self._reader, self.process = threading.current_thread(), os.getpid()
        self.threads: Sequence[threading.Thread] = ()
        # Changes to the waiting items; only the replica that holds the lock makes them.
        self._changes: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._waiting: deque[WorkItem[Row]] = deque()
        self._taking = threading.Lock()
        self._answers: dict[WorkItem[Row], Answer] = {}
        self._awaited: WorkItem[Row] | None = None
        self._woken: SimpleQueue[None] = SimpleQueue()

    def take(self, most: int) -> list[WorkItem[Row]]:
        """Waits for items and returns the next ones of a group, of at most so many rows together.

        At the end it returns none. A single item may have more rows.
        """
        with self._taking:
            while True:
                needed = not (self._waiting or self._closed or self._over())
                try:
                    self._changes.get(block=needed, timeout=CHECK_SECONDS)()
                except Empty:
                    if not needed:
                        break
            return [self._waiting.popleft() for _ in range(self._fitting(most))]

    def _over(self) -> bool:
        return self.stopped or self._abandoned()

    def _fitting(self, most: int) -> int:
        if self._over() or not self._waiting:
            return 0
        share = max(-(-len(self._waiting) // self._workers), SMALLEST_SHARE)
        first = self._waiting[0]
        group, rows = first.group, min(max(1, most // first.width), share)
        alike = takewhile(lambda item: item.group is group or item.group == group, self._waiting)
        return fitting((item.tokens for item in alike), rows, self._tokens)

    def _abandoned(self) -> bool:
        """Whether the program is ending without having closed its stream of results."""
        return not (threading.main_thread().is_alive() or self._reader.is_alive())

    def put(self, items: Iterable[WorkItem[Row]]) -> None:
        """Adds items at the end."""
        self._changes.put(partial(self._waiting.extend, [*items]))

    def put_back(self, items: Sequence[WorkItem[Row]]) -> None:
        """Returns items that could not be computed; they come first again."""
        self._changes.put(partial(self._waiting.extendleft, items[::-1]))

    def close(self) -> None:
        """Tells the replicas that there will be no more items."""
        self._changes.put(self._close)

    def _close(self) -> None:
        self._closed = True

    def stop(self, error: BaseException | None = None) -> None:
        """Tells the replicas to stop; readers of answers get the error."""
        self._error = self._error or error
        self.stopped = True
        self.close()  # wakes the replica that waits
        self._woken.put(None)

    def run(self, worker: Worker[Row, Answer], rows: int) -> None:
        """Computes as one of the replicas, at first `rows` at once, until there are no more items.

        If memory runs out, unfinished items return to the queue and the worker continues with half
        as many rows at once.
        """
        try:
            while True:
                taken: dict[WorkItem[Row], None] = {}
                try:
                    self._work(worker, rows, taken)
                    return
                except MemoryError as error:
                    rows = min(rows, sum(item.width for item in taken)) // 2
                    if rows == 0:
                        raise InputError(
                            f"there is not enough memory for a single row ({error}); shorten the "
                            "longest rows, run fewer replicas, or end other programs"
                        ) from error
                # Only here, where the error no longer keeps the buffers of the batch alive.
                self.put_back(list(taken))
        except BaseException as error:  # noqa: BLE001 - raised where the answers are read
            self.stop(error)

    def _work(
        self, worker: Worker[Row, Answer], rows: int, taken: dict[WorkItem[Row], None]
    ) -> None:
        def take(most: int) -> list[WorkItem[Row]]:
            items = self.take(min(most, rows))
            taken.update(dict.fromkeys(items))
            return items

        for item, answer in worker(take, rows):
            del taken[item]
            self._answers[item] = answer
            if item is self._awaited:  # which the reader sets before it looks for the answer
                self._woken.put(None)
            if self.stopped:
                return

    def answers(
        self, rows: Iterable[WorkItem[Row] | Answer], waiting: Callable[[int], None]
    ) -> Iterator[Answer]:
        """Yields the answers to rows in order, waiting for each, and forgets them at the end.

        Rows are items that were put, and answers that need no model; for `waiting` see `in_order`.
        """
        items: set[WorkItem[Row]] = set()
        for row in rows:
            if not isinstance(row, WorkItem):
                yield row
                continue
            items.add(row)
            self._awaited = row
            while row not in self._answers:
                if self._error is not None:
                    raise self._error
                if os.getpid() != self.process:  # a fork copies no thread
                    raise UsageError(
                        "the results were begun before this process was forked; ask for them here"
                    )
                with suppress(Empty):  # on Windows a wait without an end cannot be interrupted
                    self._woken.get(timeout=CHECK_SECONDS)
                if row not in self._answers:
                    # Without those that were yielded.
                    waiting(len(self._answers) - (len(items) - 1))
            yield self._answers[row]
        for item in items:
            del self._answers[item]


# Queues with replicas. A fork copies them, and with them locks of onnxruntime that replicas hold.
_RUNNING: set[WorkQueue[Any, Any]] = set()


def _require_no_locks() -> None:
    for each in tuple(_RUNNING):
        if each.process != os.getpid():
            raise UsageError(
                "this process was forked while an engine computed, and could wait for ever; read "
                "all results before a fork, or start processes with spawn"
            )
        # Its reader was interrupted before it could wait for them.
        if each.stopped and not any(thread.is_alive() for thread in each.threads):
            _RUNNING.discard(each)


def batch_worker(compute: Callable[[list[Row]], list[Answer]]) -> Worker[Row, Answer]:
    """Returns a worker that computes one batch after another."""
    return partial(_in_batches, compute)


def _in_batches(
    compute: Callable[[list[Row]], list[Answer]], take: Take[Row], rows: int
) -> Iterator[tuple[WorkItem[Row], Answer]]:
    while items := take(rows):
        yield from zip(items, compute([item.row for item in items]), strict=True)


def in_order(
    inputs: Iterable[Input],
    prepare: Callable[[list[Input]], list[WorkItem[Row] | Answer]],
    workers: Sequence[Worker[Row, Answer]],
    rows: int,
    options: BatchOptions,
    waiting: Callable[[int], None] = lambda ahead: None,
) -> Iterator[Answer]:
    """Computes every input, and yields the answers in order.

    Args:
        inputs: Of any number; read ahead by two windows at most.
        prepare: Encodes a window of inputs: work items, and answers that need no model, such as
            errors.
        workers: Run by a thread each.
        rows: Limit on the rows that a worker computes at once.
        options: Sizes of windows, and of batches in tokens.
        waiting: Called every second while the next answer is not there, with the number of later
            answers that are.

    Raises:
        UsageError: The process was forked while replicas computed.
    """
    _require_no_locks()
    queue = WorkQueue[Row, Answer](options.tokens, len(workers))
    threads = queue.threads = [
        threading.Thread(target=queue.run, args=(worker, rows), name=f"replica {number}")
        for number, worker in enumerate(workers)
    ]
    try:
        _RUNNING.add(queue)
        with held():  # a thread that is cut short while it starts could never be joined
            for thread in threads:
                thread.start()
        pending: deque[list[WorkItem[Row] | Answer]] = deque()
        for number, window in enumerate(windows(inputs, options.read_ahead(len(workers)))):
            prepared = prepare(window)
            # By group and length, alternately down and up, so that neighbours are of similar length
            # also where two windows meet.
            groups: dict[Any, int] = {}
            items = (row for row in prepared if isinstance(row, WorkItem))
            order = {row: (groups.setdefault(row.group, len(groups)), row.tokens) for row in items}
            queue.put(sorted(order, key=order.__getitem__, reverse=number % 2 == 0))
            pending.append(prepared)
            # One window is computed while the next is read, so that no replica waits.
            if len(pending) > 1:
                yield from queue.answers(pending.popleft(), waiting)
        queue.close()
        while pending:
            yield from queue.answers(pending.popleft(), waiting)
    finally:
        queue.stopped = True  # before any call, which might be interrupted
        with held():
            queue.stop()
            for thread in threads:
                if thread.is_alive():
                    thread.join()
            if queue.process == os.getpid():
                _RUNNING.discard(queue)


class Repeats(Generic[Input, Known]):
    """Gives an input that was answered before its answer again.

    An answer depends on its input alone, so this changes only the work. The answers that were not
    used for longest are forgotten first.
    """

    def __init__(
        self,
        prepare: Callable[[list[Input]], list[Any]],
        key: Callable[[Input], Any],
        most_tokens: int = MOST_TOKENS,
    ) -> None:
        """Watches a stream.

        Args:
            prepare: See `in_order`; gives one item or answer for each input.
            key: Returns the hashable part of an input that decides its answer; None for an input
                that comes once, such as a sample.
            most_tokens: Limit on the size of the answers that are remembered.
        """
        self._prepare, self._key, self._most_tokens = prepare, key, most_tokens
        self._known: OrderedDict[Any, tuple[Known, int]] = OrderedDict()
        self._tokens = 0
        # Key of each input whose answer is still to come, and whether it came before.
        self._asked: deque[tuple[Any, bool]] = deque()

    def prepare(self, inputs: list[Input]) -> list[WorkItem[Any] | Known]:
        """Encodes a window of inputs, each distinct one once."""
        keys = [self._key(each) for each in inputs]
        answered: dict[Any, WorkItem[Any] | Known] = {}
        new: dict[Any, Input] = {}
        for place, each in enumerate(inputs):
            key = keys[place]
            if key is None:
                keys[place] = one = object()
                new[one] = each
                self._asked.append((None, False))
                continue
            again = key in answered or key in new
            if not again and (found := self._known.get(key)) is not None:
                self._known.move_to_end(key)
                answered[key], again = found[0], True
            elif not again:
                new[key] = each
            self._asked.append((key, again))
        answered |= zip(new, self._prepare(list(new.values())), strict=True)
        return [answered[key] for key in keys]

    def watch(self, answers: Iterable[Known]) -> Iterator[Known]:
        """Passes the answers on, and remembers them; those that came again are marked."""
        for answer in answers:
            key, again = self._asked.popleft()
            if again:
                yield replace(answer, repeated=True, shared_prompt_tokens=0)
                continue
            yield answer
            self._remember(key, answer)

    def _remember(self, key: Any, answer: Known) -> None:
        if key is None or answer.error is not None or key in self._known:
            return
        size = _OVERHEAD + answer.size
        self._known[key] = answer, size
        self._tokens += size
        while self._tokens > self._most_tokens:
            _, (_, size) = self._known.popitem(last=False)
            self._tokens -= size
