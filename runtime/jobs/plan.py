"""Who computes what of a job: one process, a partition of its rows, workers their chunks."""

import hashlib
import json
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import closing
from heapq import heappop, heappush
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, cast

from transferry.runtime.errors import InputError, Option, UsageError
from transferry.runtime.io.atomic import durable_file
from transferry.runtime.io.outputs import STANDARD_STREAM
from transferry.runtime.io.whole import sha256
from transferry.runtime.jobs.formats.records import OutputColumns
from transferry.runtime.jobs.formats.rows import RowReader
from transferry.runtime.jobs.formats.sources import Series
from transferry.runtime.jobs.job_options import JobOptions, fraction
from transferry.runtime.jobs.journal import Journal
from transferry.runtime.jobs.output_files import LINES
from transferry.runtime.jobs.summary import Summary, Tally

RESTORE = ("Restore it, or add ", Option("force"), " to discard the saved rows")
# Chunks that wait, since a worker died of them, until all others are handed out.
_MOST_TRIED = 4
# Spans of a worker if all were of the length of the first: factoring (Hummel et al. 1992).
_SPANS = 2
# Row groups of each worker or partition from which on none is read by two: sharing the last ones
# would save at most a tenth of the time.
ENOUGH = 10


def partition_range(
    reader: RowReader, target: RowReader | None, options: JobOptions, folder: Path | None
) -> tuple[int, int]:
    """Returns the first row of a partition, and the row after its last; makes counts known.

    Partitions whose outputs lie in one `folder` share their counts of lines there.
    """
    number, partitions = fraction(str(options.partition))
    for each in filter(None, (reader, target)):
        each.number(folder and folder / LINES, (number - 1) / partitions)
    counts = [0, *accumulate(cast("list[int]", reader.counts))]
    if options.partition_by == "file":
        ends = [counts[(len(counts) - 1) * each // partitions] for each in (number - 1, number)]
    else:
        rows = counts[-1] if options.limit is None else min(counts[-1], options.limit)
        ends = [rows * each // partitions for each in (number - 1, number)]
        starts = [end if end == rows else reader.boundary(end) for end in ends]
        few = rows / (ENOUGH * partitions)
        ends = [
            start if end - start <= few else end for start, end in zip(starts, ends, strict=True)
        ]
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
        rows, first = job.rows(*job.row_range), job.row_range[0]
        for chunk in journal.chunks:
            job.require_unchanged(chunk, islice(rows, chunk.rows))
        if journal.is_complete(job.chunk_rows) and next(rows, None) is not None:
            file = job.reader.files(first + journal.rows)[-1]
            raise InputError(f"{file} has grown since its end was computed. ", *RESTORE)
        summary.saved = journal.rows
        for chunk in journal.chunks:
            add(chunk)
        watch(summary)
        # The engine does not stop between chunks.
        with (
            job.counting(summary, add, watch) as count,
            closing(job.results(rows, first + journal.rows)) as results,
        ):
            while not journal.is_complete(job.chunk_rows):
                at = first + journal.rows
                with journal.next_file() as file:
                    chunk = job.write(islice(results, job.chunk_rows(at)), file, at, count)
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
    """Hands out the unfinished chunks of a job, each by the number of its first row.

    A worker gets neighbouring chunks, so that it reads on where it stopped; spans become shorter
    towards the end. Nothing here grows with the chunks but what is finished elsewhere.

    Attributes:
        end: The row after the last; None until it is known.
    """

    def __init__(
        self,
        first: int,
        size: Callable[[int], int],
        workers: int,
        *,
        end: int | None = None,
        is_finished: Callable[[int], bool] = lambda first: False,
        boundary: Callable[[int], int] = lambda row: row,
        is_ready: Callable[[int], bool] | None = None,
    ) -> None:
        """Begins with all chunks that are not finished.

        The functions take the first row of a chunk: `size` returns its rows, unless the input ends
        before; `is_ready`, None if that does not matter, whether it is known where it lies in the
        input. For `boundary` see `RowReader.boundary`.
        """
        self._first, self._size, self._workers = first, size, workers
        self.end = self._counted = end
        self._is_finished, self._boundary, self._is_ready = is_finished, boundary, is_ready
        # A chunk that may take down every worker comes last.
        self._next, self._again, self._tried = first, list[int](), list[int]()
        self._spans: dict[int, deque[int]] = {}
        self._open: dict[int, int] = {}
        self._tries: Counter[int] = Counter()

    def found(self, first: int, rows: int) -> None:
        """Notes the rows of a chunk: fewer than its size only at the end."""
        if rows < self._size(first):  # at the end, or beyond
            self.end = first + rows if self.end is None else min(first + rows, self.end)

    def rows_of(self, first: int) -> int | None:
        """Returns the number of rows of a chunk; None if unknown."""
        return None if self._counted is None else min(self._size(first), self._counted - first)

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
            first = span.popleft()
            if not self._is_beyond(first):
                self._open[worker] = first
                return first
        return None

    def finished(self, worker: int, rows: int) -> bool:
        """Notes that a worker has finished its chunk; returns whether it belongs to the journal."""
        first = self._open.pop(worker)
        if self._is_beyond(first):
            return False
        self.found(first, rows)
        return rows > 0 or first == self._first

    def lost(self, worker: int) -> int:
        """Takes the chunks of a worker back; returns how often its open chunk was lost."""
        for first in self._spans.pop(worker, ()):
            heappush(self._again, first)
        if worker not in self._open:
            return 0
        first = self._open.pop(worker)
        heappush(self._tried, first)
        self._tries[first] += 1
        return self._tries[first]

    def _is_beyond(self, first: int) -> bool:
        """Whether a chunk has no rows; that of a job without rows has a file."""
        return self.end is not None and first >= max(self.end, self._first + 1)

    def _unassigned(self) -> int | None:
        """Returns the first chunk that no worker has, and which is not finished."""
        many = [self._tried] if len(self._tried) > _MOST_TRIED else []
        for heap in (*many, self._again):
            if (first := self._least(heap)) is not None:
                return first
        while not self._is_beyond(self._next):
            if not self._is_finished(self._next):
                if self._is_ready is None or self._is_ready(self._next):
                    return self._next
                break  # another worker is reading the chunk before, or died of it
            self._next += self._size(self._next)
        return self._least(self._tried)

    def _least(self, heap: list[int]) -> int | None:
        while heap and self._is_beyond(heap[0]):
            heappop(heap)
        return heap[0] if heap else None

    def _span(self) -> list[int]:
        """Returns neighbouring chunks for a worker: up to a boundary, unless others would wait."""
        first = self._unassigned()
        if first is None:
            return []
        for heap in (self._again, self._tried):
            if heap and heap[0] == first:
                return [heappop(heap)]
        end, span = self.end or 0, [first]
        left, least = end - first, (end - self._first) / (ENOUGH * self._workers)
        self._next = row = first + self._size(first)
        if self._is_ready is not None:
            return span
        while row < end and not self._is_finished(row):
            rows, whole = row - first, self._boundary(row) == row
            if rows >= (
                left / (_SPANS * self._workers) if whole else max(least, left / self._workers)
            ):
                break
            span.append(row)
            self._next = row = row + self._size(row)
        return span
