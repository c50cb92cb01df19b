"""Rows come back in order, whatever order they are computed in; every way out ends the threads."""

import random
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator

import pytest

from tests.commands import PATIENCE, python
from transferry.runtime.decoding.batching import BatchOptions
from transferry.runtime.engine.preprocess import WorkItem
from transferry.runtime.engine.worker_pool import Take, Worker, WorkQueue, batch_worker, in_order
from transferry.runtime.errors import InputError


def prepare(items: list[int]) -> list[WorkItem[int] | str]:
    """An item is as long as it is large; one below 0 is done already."""
    return [f"{item} is bad" if item < 0 else WorkItem(item, item) for item in items]


def names(items: list[int]) -> list[str]:
    return [str(item) for item in items]


def run(
    items: Iterable[int],
    compute: Callable[[list[int]], list[str]] = names,
    *,
    rows: int = 4,
    tokens: int = 1 << 30,
    window: int = 5,
    replicas: int = 1,
    worker: Worker[int, str] | None = None,
) -> Iterator[str]:
    return in_order(
        items,
        prepare,
        [worker or batch_worker(compute)] * replicas,
        rows,
        BatchOptions(tokens=tokens, window=window),
    )


@pytest.mark.parametrize(("replicas", "expected"), [(2, 4096), (64, 32_768)])
def test_a_window_has_full_batches_for_all_replicas(replicas: int, expected: int) -> None:
    sizes = []

    def prepared(items: list[int]) -> list[WorkItem[int] | str]:
        sizes.append(len(items))
        return [str(item) for item in items]

    workers = [batch_worker(names)] * replicas
    assert len(list(in_order(range(40_000), prepared, workers, 128, BatchOptions()))) == 40_000
    assert max(sizes) == expected


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("window", [1, 7, 1000])
def test_rows_come_back_in_order(replicas: int, window: int) -> None:
    generator = random.Random(window)
    items = [generator.randint(-3, 50) for _ in range(200)]

    def compute(batch: list[int]) -> list[str]:
        time.sleep(generator.random() / 1000)
        return names(batch)

    found = list(run(items, compute, window=window, replicas=replicas))
    assert found == [f"{item} is bad" if item < 0 else str(item) for item in items]
    assert list(run([])) == []


def test_batches_are_of_similar_length_where_windows_meet_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batches = []
    windows, put = threading.Semaphore(0), WorkQueue.put

    def tell(queue: WorkQueue[int, str], items: Iterable[WorkItem[int]]) -> None:
        put(queue, items)
        windows.release()

    def compute(batch: list[int]) -> list[str]:
        batches.append(batch)
        return names(batch)

    def worker(take: Take[int], rows: int) -> Iterator[tuple[WorkItem[int], str]]:
        assert windows.acquire(timeout=PATIENCE)
        assert windows.acquire(timeout=PATIENCE)
        yield from batch_worker(compute)(take, rows)

    monkeypatch.setattr(WorkQueue, "put", tell)
    items = [3, 9, 1, 7, 5, *[2, 8, 4, 6, 1], *[1, 2, 9, 4, 5]]
    assert list(run(items, worker=worker)) == names(items)
    assert batches[:2] == [[9, 7, 5, 3], [1, 1, 2, 4]]
    assert [item for batch in batches for item in batch][8:] == [6, 8, 9, 5, 4, 2, 1]


@pytest.mark.parametrize(("rows", "tokens"), [(3, 1000), (100, 20), (1, 1)])
def test_no_batch_is_larger_than_asked_for(rows: int, tokens: int) -> None:
    batches = []

    def compute(batch: list[int]) -> list[str]:
        batches.append(batch)
        return names(batch)

    items = [random.Random(1).randint(1, 30) for _ in range(100)]
    assert list(run(items, compute, rows=rows, tokens=tokens, window=30)) == names(items)
    for batch in batches:
        assert len(batch) <= rows
        assert len(batch) == 1 or len(batch) * max(batch) <= tokens
    assert len(batches) < len(items) or rows == 1


def test_a_worker_has_rows_of_the_next_window_before_it_gives_up_those_of_the_last() -> None:
    """Four places that are never empty until the end: no window drains."""
    items = list(range(1, 31))
    fewest = []

    def worker(take: Take[int], rows: int) -> Iterator[tuple[WorkItem[int], str]]:
        held: list[WorkItem[int]] = []
        taken = 0
        while taken < len(items) or held:
            while len(held) < 4 and taken < len(items):
                more = take(4 - len(held))
                assert more
                held += more
                taken += len(more)
            if taken < len(items):
                fewest.append(len(held))
            oldest = held.pop(0)
            yield oldest, str(oldest.row)

    assert list(run(items, worker=worker)) == names(items)
    assert set(fewest) == {4}


def test_what_ran_out_of_memory_is_computed_before_all_else() -> None:
    batches: list[list[int]] = []

    def compute(batch: list[int]) -> list[str]:
        batches.append(batch)
        if len(batches) == 1:
            raise MemoryError
        return names(batch)

    list(run([5, 4, 3, 2, 1, 0], compute, rows=4, window=6))
    assert batches == [[5, 4, 3, 2], [5, 4], [3, 2], [1, 0]]


def test_what_was_done_before_memory_ran_out_is_not_done_again() -> None:
    given = []

    def worker(take: Take[int], rows: int) -> Iterator[tuple[WorkItem[int], str]]:
        while items := take(rows):
            for item in items:
                given.append(item.row)
                if len(given) == 6:
                    raise MemoryError
                yield item, str(item.row)

    found = list(run(range(20), worker=worker, window=20))
    assert found == names(list(range(20)))
    assert len(given) == 21


def test_no_memory_for_a_single_row_is_an_error_with_a_remedy() -> None:
    def compute(batch: list[int]) -> list[str]:
        raise MemoryError("no room for 4 GB")

    with pytest.raises(
        InputError, match=r"memory for a single row \(no room for 4 GB\); shorten"
    ) as caught:
        list(run(range(9), compute))
    assert isinstance(caught.value.__cause__, MemoryError)


def test_what_was_computed_with_is_freed_before_the_rest_is_computed() -> None:
    class Buffer:
        pass

    alive: list[weakref.ref[Buffer]] = []

    def compute(batch: list[int]) -> list[str]:
        assert [reference() for reference in alive] == [None] * len(alive)
        buffer = Buffer()
        alive.append(weakref.ref(buffer))
        if len(batch) > 1:
            raise MemoryError
        return names(batch)

    assert list(run(range(5), compute)) == names(list(range(5)))


def test_an_error_of_a_worker_is_raised_where_its_row_is_read() -> None:
    def compute(batch: list[int]) -> list[str]:
        if 13 in batch:
            raise RuntimeError("thirteen")
        return names(batch)

    found = []
    with pytest.raises(RuntimeError, match="thirteen"):
        for row in run(range(1, 100), compute, rows=1, replicas=2):
            found.append(row)
    assert found == names(list(range(1, 100)))[: len(found)]
    assert len(found) <= 12


def test_a_batch_of_another_size_is_an_error() -> None:
    with pytest.raises(ValueError, match="zip"):
        list(run([1, 2, 3], lambda batch: ["one"]))


def test_an_error_of_the_source_ends_the_workers() -> None:
    def source() -> Iterator[int]:
        yield from range(1, 8)
        raise OSError("the cable was pulled")

    with pytest.raises(OSError, match="cable"):
        list(run(source(), replicas=2))


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once a queue has been stopped."""
    event, stop = threading.Event(), WorkQueue.stop

    def tell(queue: WorkQueue[int, str], error: BaseException | None = None) -> None:
        stop(queue, error)
        event.set()

    monkeypatch.setattr(WorkQueue, "stop", tell)
    return event


def test_closing_early_stops_the_workers_at_once(stopped: threading.Event) -> None:
    computed = []

    def compute(batch: list[int]) -> list[str]:
        computed.extend(batch)
        assert 1 not in batch or stopped.wait(PATIENCE)
        return names(batch)

    stream = run([2, *[1] * 99], compute, rows=1, window=100)
    assert next(stream) == "2"
    stream.close()  # type: ignore[attr-defined]
    assert len(computed) <= 2


def test_closing_early_ends_what_a_worker_has_begun(stopped: threading.Event) -> None:
    given = []

    def worker(take: Take[int], rows: int) -> Iterator[tuple[WorkItem[int], str]]:
        for item in take(rows):
            given.append(item)
            yield item, str(item.row)
            assert stopped.wait(PATIENCE)

    stream = run([1] * 100, worker=worker, rows=100, window=100)
    assert next(stream) == "1"
    stream.close()  # type: ignore[attr-defined]
    assert len(given) <= 2


def test_the_last_rows_are_shared_out() -> None:
    queue = WorkQueue[int, str](1000, workers=3)
    queue.put([WorkItem(row, 1) for row in range(200)])
    # A third of the rest each time, until that is not worth a batch.
    taken = [len(queue.take(most)) for most in (50, 100, 100, 100, 100, 7, 100, 100)]
    assert taken == [50, 50, 34, 22, 16, 7, 16, 5]
    queue.put([WorkItem(row, 1) for row in range(300)])
    assert len(queue.take(100)) == 100


def test_nothing_is_handed_out_once_nobody_wants_more() -> None:
    queue = WorkQueue[int, str](100)
    queue.put([WorkItem(1, 1), WorkItem(2, 2)])
    queue.stop()
    assert queue.take(9) == []


def test_a_program_may_end_without_closing_its_stream() -> None:
    script = """
from transferry.runtime.decoding.batching import BatchOptions
from transferry.runtime.engine.worker_pool import WorkItem, batch_worker, in_order
stream = in_order(iter(int, 1), lambda items: [WorkItem(item, 1) for item in items],
                  [batch_worker(list)] * 2, 2, BatchOptions(window=4))
print(next(stream))
"""
    done = python("-c", script)
    assert (done.stdout, done.stderr) == ("0\n", "")


STRESS = """
import random, signal, sys, threading
from transferry.runtime.decoding.batching import BatchOptions
from transferry.runtime.engine.worker_pool import WorkItem, batch_worker, in_order

armed = False

def interrupt(*signal_and_frame):  # as Ctrl-C does, but never outside of the pipeline
    if armed:
        signal.raise_signal(signal.SIGINT)

signal.signal(signal.SIGALRM, interrupt)
signal.signal(signal.SIGINT, signal.default_int_handler)
draw, interrupted = random.Random(int(sys.argv[1])), 0
for number in range(int(sys.argv[2])):
    stream = in_order(range(300), lambda items: [WorkItem(item, 1) for item in items],
                      [batch_worker(list)] * 2, 2, BatchOptions(window=8))
    try:
        armed = True
        signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-5, 4e-3))
        list(stream)
        armed = False
    except KeyboardInterrupt:
        armed = False
        interrupted += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    stream.close()
    # Interrupted just before it waits for its threads, a stream leaves them to end by themselves.
    for thread in {*threading.enumerate()} - {threading.main_thread()}:
        thread.join(30)
        assert not thread.is_alive()
print(interrupted)
"""


@pytest.mark.parametrize("seed", range(3))
def test_a_pipeline_that_is_interrupted_anywhere_ends(seed: int) -> None:
    """A program of its own: where it hangs, it can be ended."""
    # Python may say that it ignored a KeyboardInterrupt, in a callback of a weak reference.
    done = python("-c", STRESS, seed, 300)
    assert int(done.stdout) > 100, "many are interrupted before their end"


def test_while_an_answer_is_awaited_later_ones_are_counted() -> None:
    gate, counted = threading.Event(), list[int]()

    def compute(rows: list[int]) -> list[int]:
        if 0 in rows:
            assert gate.wait(PATIENCE)
        return rows

    def waiting(ahead: int) -> None:
        counted.append(ahead)
        if ahead == 5:
            gate.set()

    def items(rows: list[int]) -> list[WorkItem[int] | int]:
        return [WorkItem(row, 9 - row) for row in rows]

    # The first row is the longest and waits alone, while another worker computes the other five.
    workers = [batch_worker(compute)] * 2
    found = in_order(range(6), items, workers, 1, BatchOptions(window=6), waiting)
    assert list(found) == [*range(6)]
    assert max(counted) == 5
