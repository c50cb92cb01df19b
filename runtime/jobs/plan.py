"""Who computes what of a job: one process, a partition of its rows, workers their chunks."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import closing
from heapq import heappop, heappush
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, cast

from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.io.atomic import durable_file
from transferry.runtime.io.outputs import STANDARD_STREAM
from transferry.runtime.io.whole import sha256
from transferry.runtime.jobs.formats.records import OutputColumns
from transferry.runtime.jobs.formats.rows import RowReader
from transferry.runtime.jobs.formats.sources import Series
from transferry.runtime.jobs.job_options import JobOptions, fraction
from transferry.runtime.jobs.journal import Journal
from transferry.runtime.jobs.summary import Summary, Tally

RESTORE = "Restore it, or add --force to discard the saved rows"
# Chunks that wait, since a worker died of them, until all others are handed out.
_MOST_TRIED = 4
# Spans of a worker if all were of the length of the first: factoring (Hummel et al. 1992).
_SPANS = 2


def partition_range(
    reader: RowReader, target: RowReader | None, options: JobOptions, shared: Path | None
) -> tuple[int, int]:
    """Returns the first row of a partition, and the row after its last; makes counts known.

    Args:
        reader: The input.
        target: Targets of its rows.
        options: With `partition`.
        shared: Folder in which the partitions leave the numbers of lines for each other.
    """
    number, partitions = fraction(str(options.partition))
    for each in filter(None, (reader, target)):
        each.number(shared, (number - 1) / partitions)
    counts = [0, *accumulate(cast("list[int]", reader.counts))]
    if options.partition_by == "file":
        ends = [counts[(len(counts) - 1) * each // partitions] for each in (number - 1, number)]
    else:
        rows = counts[-1] if options.limit is None else min(counts[-1], options.limit)
        ends = [rows * each // partitions for each in (number - 1, number)]
    most = counts[-1] if options.limit is None else options.limit
    return min(ends[0], most), min(ends[1], most)


def is_cut(job: Any) -> bool:
    """Whether a job's partition reads its own bytes alone, and so knows no numbers of its rows.

    Those decide samples and canaries; ids are filled in by `merge`, if there is one.
    """
    options, columns = job.options, job.writer.columns
    if options.partition_by == "file":
        apart = isinstance(job.reader, Series)
    else:
        apart = options.partition is not None and options.partition_by is None and job.reader.keeps
    numbered = options.limit or options.target or options.canary or not job.runner.in_order
    numbered = numbered or (job.task.generation is not None and job.task.generation.sample)
    if not apart or numbered or job.layout.format in ("openai", "parquet", "arrow"):
        return False
    filled = job.writer.format in ("jsonl", "parquet") or job.layout.format == "text"
    merged = job.remote is None and job.output != STANDARD_STREAM
    return columns is None or not columns.identified or (filled and merged)


def cut(reader: RowReader, options: JobOptions, columns: OutputColumns | None) -> dict[str, Any]:
    """Leaves the rows of a partition that is cut; returns facts for its fingerprint."""
    number, partitions = fraction(str(options.partition))
    sizes, ends = [file.size for file in reader.steady], (number - 1, number)
    if options.partition_by == "file":
        starts = cast(Series, reader).starts
        begin, end = (starts[(len(starts) - 1) * each // partitions] for each in ends)
    else:
        begin, end = (reader.start(reader.size * each // partitions) for each in ends)
    reader.cut(begin, end)
    lacks_ids = columns is not None and columns.identified
    told = hashlib.sha256(json.dumps(sizes).encode()).hexdigest()
    return {"input_sha256": told, "bytes": [begin, end], "lacks_ids": lacks_ids}


def hash_of_input(reader: RowReader, target: RowReader | None) -> str:
    """Returns a hash by which partitions know that they are of one input, without reading it."""
    outline = [reader.outline(), target and target.outline()]
    return hashlib.sha256(json.dumps(outline).encode()).hexdigest()


class Runner:
    """Computes the chunks of a job, in this process and in order, and joins its output.

    Attributes:
        journal: Kind of the job's folder.
        about: Facts about the runner for the summary.
        in_order: Whether the finished chunks are always the first ones of the input.
        owns_output: Whether this process writes the output, and not only chunks of it.
    """

    journal: type[Journal] = Journal
    about: Mapping[str, Any] = {}
    in_order, owns_output = True, True

    def check_kind(self, output: Path) -> None:
        """Raises UsageError for an output that is not a file."""
        if output.exists() and not output.is_file():
            raise UsageError(f"{output} is not a file, so it is not replaced; name another")

    def outlook(self, job: Any) -> tuple[int, str]:
        """Returns the number of processes that compute, and words on them, if any."""
        return 1, ""

    def run(
        self,
        job: Any,
        journal: Journal,
        summary: Summary,
        add: Callable[[Tally], None],
        watch: Callable[[Summary], None],
    ) -> None:
        """Finishes every chunk that is not finished yet; the journal has all of them afterwards.

        The runner keeps `summary.saved` up to date. `add` adds counts to the summary, and raises
        InputError after too many errors; for `watch` see `Job.run`.
        """
        rows, first, most = job.rows(*job.row_range), job.row_range[0], job.options.chunk_rows
        for chunk in journal.chunks:
            job.require_unchanged(chunk, islice(rows, chunk.rows))
        if journal.is_complete(most) and next(rows, None) is not None:
            raise InputError(f"{job.layout.path} has grown since its end was computed. {RESTORE}")
        summary.saved = journal.rows
        for chunk in journal.chunks:
            add(chunk)
        watch(summary)
        # The engine does not stop between chunks.
        with (
            job.counting(summary, add, watch) as count,
            closing(job.results(rows, first + journal.rows)) as results,
        ):
            while not journal.is_complete(most):
                with journal.next_file() as file:
                    chunk = job.write(islice(results, most), file, first + journal.rows, count)
                journal.append(chunk)
                summary.saved = journal.rows

    def publish(self, job: Any, journal: Journal, describe: Callable[[str], None]) -> None:
        """Gives the output its name, last of all: where it exists, everything does.

        `describe` writes summary and settings beside the output, given its hash.
        """
        with durable_file(job.output, journal.folder) as file:
            job.writer.join(journal.files, file)
            file.flush()
            describe(sha256(Path(file.name)))


class Plan:
    """Hands out the unfinished chunks of a job.

    A worker gets neighbouring chunks, so that it reads on where it stopped; spans become shorter
    towards the end. Nothing here grows with the chunks but what is finished elsewhere.

    Attributes:
        end: Number of the last chunk, the only one with fewer than `chunk_rows` rows, perhaps none;
            None until it is known.
    """

    def __init__(
        self,
        first: int,
        chunk_rows: int,
        workers: int,
        *,
        rows: int | None = None,
        is_finished: Callable[[int], bool] = lambda first: False,
        boundary: Callable[[int], int] = lambda row: row,
        is_ready: Callable[[int], bool] | None = None,
    ) -> None:
        """Begins with all chunks that are not finished.

        Args:
            first: Number of the job's first row.
            chunk_rows: Rows of a chunk.
            workers: Number of workers.
            rows: Rows of the job; None if unknown.
            is_finished: Whether the chunk that begins at a row is finished.
            boundary: Returns the next row, or the same, at which reading begins without reading
                rows before it.
            is_ready: Whether it is known where the chunk that begins at a row lies in the input;
                None if that does not matter.
        """
        self._first, self._rows, self._workers = first, chunk_rows, workers
        self._is_finished, self._boundary, self._is_ready = is_finished, boundary, is_ready
        self.end, self._counted = None if rows is None else rows // chunk_rows, rows
        # A chunk that may take down every worker comes last.
        self._next, self._again, self._tried = 0, list[int](), list[int]()
        self._spans: dict[int, deque[int]] = {}
        self._open: dict[int, int] = {}
        self._tries: Counter[int] = Counter()

    def found(self, first: int, rows: int) -> None:
        """Notes a chunk that was finished before."""
        if rows < self._rows:
            self.end = (first - self._first) // self._rows

    def rows_of(self, first: int) -> int | None:
        """Returns the number of rows of a chunk; None if unknown."""
        if self._counted is None:
            return None
        return min(self._rows, self._first + self._counted - first)

    @property
    def complete(self) -> bool:
        """Whether every chunk is finished."""
        if self.end is None or self._open or any(self._spans.values()):
            return False
        return self._unassigned() is None

    def next(self, worker: int) -> int | None:
        """Returns the first row of the next chunk of a worker; None if nothing is left for it."""
        span = self._spans.setdefault(worker, deque())
        if not span:
            span.extend(self._span())
        while span:
            number = span.popleft()
            if not self._is_beyond(number):
                self._open[worker] = number
                return self._first + number * self._rows
        return None

    def finished(self, worker: int, rows: int) -> bool:
        """Notes that a worker has finished its chunk; returns whether it belongs to the journal."""
        number = self._open.pop(worker)
        if self._is_beyond(number):
            return False
        if rows < self._rows:
            self.end = number
        # Another chunk without rows may follow from before.
        return rows > 0 or number == 0

    def lost(self, worker: int) -> int:
        """Takes the chunks of a worker back; returns how often its open chunk was lost."""
        for number in self._spans.pop(worker, ()):
            heappush(self._again, number)
        if worker not in self._open:
            return 0
        number = self._open.pop(worker)
        heappush(self._tried, number)
        self._tries[number] += 1
        return self._tries[number]

    def _is_beyond(self, number: int) -> bool:
        return self.end is not None and number > self.end

    def _unassigned(self) -> int | None:
        """Returns the first chunk that no worker has, and which is not finished."""
        many = [self._tried] if len(self._tried) > _MOST_TRIED else []
        for heap in (*many, self._again):
            if (number := self._least(heap)) is not None:
                return number
        while self.end is None or self._next <= self.end:
            first = self._first + self._next * self._rows
            if not self._is_finished(first):
                if self._is_ready is None or self._is_ready(first):
                    return self._next
                break  # another worker is reading the chunk before, or died of it
            self._next += 1
        return self._least(self._tried)

    def _least(self, heap: list[int]) -> int | None:
        while heap and self._is_beyond(heap[0]):
            heappop(heap)
        return heap[0] if heap else None

    def _span(self) -> range | list[int]:
        """Returns neighbouring chunks for a worker."""
        number = self._unassigned()
        if number is None:
            return []
        for heap in (self._again, self._tried):
            if heap and heap[0] == number:
                return [heappop(heap)]
        stop = number + self._length(number)
        for later in range(number, stop):
            if self._is_finished(self._first + later * self._rows):
                stop = later
                break
        self._next = stop
        return range(number, stop)

    def _length(self, number: int) -> int:
        """Returns the length of a span: to a boundary, unless other workers would wait for it."""
        if self.end is None or self._is_ready is not None:
            return 1
        left = self.end + 1 - number
        length = max(1, left // (_SPANS * self._workers))
        begin = self._boundary(self._first + (number + length) * self._rows)
        whole = max(length, -(-(begin - self._first) // self._rows) - number)
        return min(left, whole if whole * self._workers <= 2 * left else length)
