"""Distribution of a job's chunks among workers that come and go."""

import json
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol, TypeAlias, cast

from transferry.runtime.engine.engine import Engine
from transferry.runtime.errors import InputError, Option, TransferryError, UsageError
from transferry.runtime.io.atomic import durable_file, sync_folder
from transferry.runtime.io.folders import replace_folder
from transferry.runtime.jobs.chunk_folder import INPUT, ChunkFolder
from transferry.runtime.jobs.formats.rows import InputRow, changed
from transferry.runtime.jobs.formats.sources import Inputs, Steady
from transferry.runtime.jobs.job import Job
from transferry.runtime.jobs.job_options import JobOptions
from transferry.runtime.jobs.journal import Chunk, Journal, differences, hash_of_hashes
from transferry.runtime.jobs.output_files import write_manifest
from transferry.runtime.jobs.plan import Plan, Runner
from transferry.runtime.jobs.summary import Summary, Tally, read_summary
from transferry.runtime.stopping import raising

# Workers lost on one chunk before the job stops: some rows take every worker down.
MOST_TRIES = 5
# Seconds between two questions about progress, and workers asked at once.
LOOK_EVERY, MOST_ASKED = 1.0, 64
# Seconds without a further row that count as a stall, and without a worker until the job stops.
STALL_SECONDS, MOST_SECONDS = 60.0, 900.0
STARTING = "starting Ray and its workers"
# Result of a call whose worker has died.
LOST = object()


# Of the input and its targets, see `RowReader.place`.
Places: TypeAlias = Sequence[Any]


@dataclass
class Call:
    """A call of a worker's open, keep, compute or progress.

    Attributes:
        first: First row of the chunk that it is about.
        places: Where the rows of that chunk begin.
        result: A returned value, an exception that stops the job, or LOST.
    """

    worker: int
    method: str
    first: int = 0
    places: Places = ()
    result: Any = None


class Crew(Protocol):
    """Numbered workers, whose calls return in any order."""

    def __len__(self) -> int:
        """Number of workers."""

    def call(self, worker: int, method: str, *arguments: Any) -> None:
        """Calls a method of a worker, or of the one that replaces it."""

    def returned(self, seconds: float) -> Iterator[Call]:
        """Yields the calls that have returned, after so many seconds at most."""

    def resources(self) -> str:
        """Returns a sentence on the resources for workers."""


class Distribution:
    """Chunks of a job on their way to workers and into its journal."""

    def __init__(
        self,
        job: Job,
        folder: ChunkFolder,
        crew: Crew,
        summary: Summary,
        watch: Callable[[Summary], None],
    ) -> None:
        self._job, self._folder, self._crew = job, folder, crew
        self._summary, self._watch, self._looked = summary, watch, 0.0
        self._ahead: dict[int, int] = {}  # rows of the open chunk of each busy worker
        self._idle, self._asked, self._starts = set[int](), deque[int](), Counter[int]()
        self._failed: list[Exception] = []
        # Places of the chunks that are not finished; the reader of one finds that of the next.
        self._places = dict[int, Places]()
        # When the last row was done, and how many were.
        self._moved, self._done = time.monotonic(), -1

    def run(self, add: Callable[[Tally], None]) -> None:
        """Has every chunk finished; the journal has all of them afterwards.

        Raises:
            InputError: A worker reports it, or several died of one chunk.
        """
        for worker in range(len(self._crew)):
            self._crew.call(worker, "open")
        self._begin(add)
        while not self._plan.complete:
            self._assign()
            for chunk in self._turn():
                add(chunk)
        self._watch(self._summary)

    def _begin(self, add: Callable[[Tally], None]) -> None:
        """Makes the plan, and adds the finished chunks."""
        job, chunks, start = self._job, self._folder.chunks, self._job.row_range[0]
        # Who reads a chunk finds where the next begins, so that each byte is read once.
        if relayed := all(reader.keeps for reader in job.readers):
            self._places[start] = [reader.place(start) for reader in job.readers]
        same = job.target is None or job.target.count == job.reader.count
        known = job.count() if same else None
        self._summary.total = known
        self._plan = Plan(
            start,
            job.chunk_rows,
            len(self._crew),
            end=None if known is None else start + known,
            is_finished=chunks.has,
            boundary=job.reader.boundary,
            is_ready=self._places.__contains__ if relayed else None,
        )
        for chunk in chunks:
            self._plan.found(chunk.first, chunk.rows)
            self._found(chunk.first + chunk.rows, chunk.end)
            add(chunk)

    def _found(self, first: int, places: Places) -> None:
        """Notes where a chunk begins."""
        if places and not self._folder.chunks.has(first):
            self._places[first] = places

    def _turn(self) -> list[Chunk]:
        """Takes what workers return within a second; returns the finished chunks."""
        chunks = [*filter(None, map(self._taken, self._crew.returned(LOOK_EVERY)))]
        if chunks:
            self._folder.extend(chunks)
            self._summary.saved = self._folder.rows
        if self._failed:
            raise self._failed[0]
        if (now := time.monotonic()) - self._looked >= LOOK_EVERY:
            self._looked = now
            self._ask()
            ahead = sum(self._ahead.values())
            note = self._stall(now, ahead) or (
                "" if self._summary.rows or self._ahead else STARTING
            )
            self._watch(replace(self._summary, ahead=ahead, note=note))
        return chunks

    def _stall(self, now: float, ahead: int) -> str:
        """Tells of rows that have not come for a minute; raises InputError without a worker."""
        done = self._summary.rows + ahead
        if done != self._done:
            self._moved, self._done = now, done
        if (seconds := now - self._moved) < STALL_SECONDS:
            return ""
        busy = len(self._ahead)
        told = (
            f"no row for {timedelta(seconds=round(seconds))} with {busy} of {len(self._crew)} "
            f"workers at work; {self._crew.resources()}"
        )
        if not busy and seconds >= MOST_SECONDS:
            raise InputError(f"{told}. Run the command again once there is room for workers")
        return told

    def _assign(self) -> None:
        for worker in [*self._idle]:
            if (first := self._plan.next(worker)) is not None:
                self._idle.remove(worker)
                self._ahead[worker] = 0
                if first in self._places:
                    self._crew.call(worker, "keep", first, self._places[first])
                else:
                    self._crew.call(worker, "compute", first)

    def _ask(self) -> None:
        """Asks some workers how far they are, others the next time."""
        if not self._asked:
            self._asked.extend(self._ahead)
        for _ in range(min(MOST_ASKED, len(self._asked))):
            if (worker := self._asked.popleft()) in self._ahead:
                self._crew.call(worker, "progress")

    def _taken(self, call: Call) -> Chunk | None:
        """Takes the result of a call; returns a chunk that the journal lacks."""
        worker, found = call.worker, call.result
        if call.method == "progress":
            if found is not LOST and worker in self._ahead:
                self._ahead[worker] = found
            return None
        if call.method == "keep" and isinstance(found, tuple):
            rows, places = found
            self._plan.found(call.first, rows)
            self._found(call.first + rows, places)
            self._summary.total = self._job.expected(call.first + rows, places[0])
            self._crew.call(worker, "compute", call.first)
            return None
        self._ahead.pop(worker, None)
        if found is LOST:
            self._note_lost(call)
        elif isinstance(found, Exception):
            self._failed.append(found)
        else:
            self._idle.add(worker)
            if call.method == "compute":
                return self._finished(worker, found)
        return None

    def _finished(self, worker: int, chunk: Chunk) -> Chunk | None:
        self._starts[worker] = 0
        expected = self._plan.rows_of(chunk.first)
        if expected is not None and chunk.rows != expected:
            last = chunk.first + expected
            self._fail(
                f"{changed(self._job.readers, chunk.first, last)} since it was counted: rows "
                f"{chunk.first + 1} to {last} are {chunk.rows}. Run the command again once it "
                "stays as it is"
            )
            return None
        self._places.pop(chunk.first, None)
        return chunk if self._plan.finished(worker, chunk.rows) else None

    def _fail(self, *parts: str) -> None:
        self._failed.append(InputError(*parts))

    def _note_lost(self, call: Call) -> None:
        """Takes back the chunks of a worker that has died; Ray starts another in its place."""
        worker, rows = call.worker, self._job.chunk_rows(call.first)
        self._starts[worker] += call.method == "open"
        if self._plan.lost(worker) >= MOST_TRIES:
            self._fail(
                f"{MOST_TRIES} workers went down, one after the other, at rows {call.first + 1} to "
                f"{call.first + rows}. Look for what is wrong with these, or find it by running "
                "the job again with fewer ",
                Option("chunk_rows"),
            )
        elif self._starts[worker] >= MOST_TRIES:
            self._fail(
                f"a worker went down {MOST_TRIES} times before its first chunk; it may need more "
                "memory than there is"
            )
        self._crew.call(worker, "open")


class ChunkRunner(Runner):
    """Computes the chunks with workers, where `load` opens the engine; the output is a folder."""

    journal, in_order = ChunkFolder, False

    def __init__(self, load: Callable[[], Engine], workers: int = 0) -> None:
        self.load, self.workers = load, workers

    def told(self, job: Job, session: int) -> tuple[Any, ...]:
        """Returns the arguments of a `Worker`."""
        options = replace(job.options, partition=None, partition_by=None, max_errors=None)
        runner = WorkerRunner(session, self.workers)
        return self.load, job.sources, job.output, options, runner, job.row_range

    def crew(self, job: Job, session: int) -> AbstractContextManager[Crew]:
        """Gives the workers; they end with the `with`."""
        raise NotImplementedError

    def check_kind(self, output: Path) -> None:
        """Refuses to replace anything but a folder of chunks."""
        if output.exists() and (not output.is_dir() or read_summary(output) is None):
            raise UsageError(
                f"{output} is not a folder of chunks with its {output.name}.summary.json, so it is "
                "not replaced; name another"
            )

    def run(
        self,
        job: Job,
        journal: Journal,
        summary: Summary,
        add: Callable[[Tally], None],
        watch: Callable[[Summary], None],
    ) -> None:
        folder = cast(ChunkFolder, journal)
        summary.saved = folder.rows
        require_unchanged(job, folder)
        watch(replace(summary, note=STARTING))
        with raising(), self.crew(job, folder.session) as crew:
            Distribution(job, folder, crew, summary, watch).run(add)
        for file in steady_files(job):
            file.require_same()
        folder.require_all()
        # In order: the sums do not depend on which chunk was finished first.
        summary.recount(folder.chunks)

    def publish(self, job: Job, journal: Journal, describe: Callable[[str], None]) -> None:
        """Gives the folder of chunks the output's name, last of all."""
        describe(hash_of_hashes(chunk.sha256 for chunk in journal.chunks))
        folder = cast(ChunkFolder, journal)
        whole, *others = folder.blocks
        whole = folder.outputs if others else whole
        write_manifest(whole, folder.parts)
        replace_folder(whole, job.output)
        sync_folder(job.output.parent)


class WorkerRunner(Runner):
    """Stands for the runner of a job as a worker opens it: another process owns the output."""

    owns_output = False

    def __init__(self, session: int, workers: int) -> None:
        self.session, self.workers = session, workers


class Worker:
    """Computes chunks, in a process of Ray.

    Attributes:
        rows: Rows computed of the open chunk.
    """

    def __init__(
        self,
        load: Callable[[], Engine],
        sources: Inputs,
        output: Path,
        options: JobOptions,
        runner: WorkerRunner,
        row_range: tuple[int, int | None],
    ) -> None:
        """Opens nothing yet, so that Ray does not count an error as a failed start."""
        self._load, self._range, self._runner = load, row_range, runner
        self._opened = sources, output, options, runner
        self._job: Job = cast(Job, None)
        self._read: Iterator[InputRow] = iter(())
        self._next, self.rows, self._end = -1, 0, list[Any]()

    def open(self) -> Exception | None:
        """Opens the job; returns the error where that fails, since Ray passes on its text only."""
        told = f"the worker on {socket.gethostname()}: "
        try:
            self._job = Job(self._load(), *self._opened)
            require_same_job(self._job)
        except TransferryError as error:
            return type(error)(told, *error.parts)
        except OSError as error:
            return type(error)(f"{told}{error}")
        return None

    def progress(self) -> int:
        """Returns the number of rows computed of the open chunk."""
        return self.rows

    def keep(self, first: int, places: Places) -> tuple[int, Places] | Exception:
        """Reads the rows of a chunk into memory.

        Returns their number, fewer than others have only at the end, and the places behind them.
        """
        most, last = self._job.chunk_rows(first), self._range[1]
        most = most if last is None else min(most, last - first)
        self._next, self.rows = -1, 0
        try:
            pairs = zip(self._job.readers, places, strict=True)
            found = [reader.keep(first, most, place) for reader, place in pairs]
        except (TransferryError, OSError) as error:
            return error
        self._end = [place for _, place in found]
        return found[0][0], self._end

    def compute(self, first: int) -> Chunk | Exception:
        """Finishes the chunk that begins at a row, or returns the error.

        A chunk without rows has no file, unless it is the job's first.
        """
        job, start, summary = self._job, self._range[0], Summary()
        folder = ChunkFolder(job.folder, job.fingerprint | {"rows": (start, None)})
        self.rows = 0
        try:
            rows = self._rows(first)
            head = [*islice(rows, 1)]
            if not head and first > start:
                return Chunk(first=first)
            with (
                folder.opened(first) as file,
                job.counting(summary, summary.add, self._watch) as count,
            ):
                chunk = job.write(job.results(chain(head, rows), first), file, first, count)
            chunk.seal(folder.path(first))
            # Of the time that passes while all workers compute.
            chunk.seconds /= self._runner.workers
            chunk.session, chunk.end = self._runner.session, self._end
            return chunk
        except (TransferryError, OSError) as error:
            self._next = -1
            return error

    def _rows(self, first: int) -> Iterator[InputRow]:
        """Reads a chunk: on from the last one, unless reading begins at some row between them."""
        skipped, most, reader = first - self._next, self._job.chunk_rows(first), self._job.reader
        begins = skipped > 0 and reader.seeks and reader.boundary(first) >= self._next
        if self._next < 0 or skipped < 0 or begins:
            self._read, skipped = self._job.rows(first, self._range[1]), 0
        self._next = first + most
        return islice(self._read, skipped, skipped + most)

    def _watch(self, summary: Summary) -> None:
        self.rows = summary.rows + summary.ahead


def require_same_job(job: Job) -> None:
    """Raises InputError if a worker does not see the job's folder or has other settings."""
    former = ChunkFolder(job.folder).former()
    if former is None:
        raise InputError(
            f"it sees no {job.folder}; put the output on a file system that all machines share"
        )
    common = {setting: former.get(setting) for setting in job.fingerprint}
    if changes := differences(common, job.fingerprint):
        raise InputError("its settings differ from the job's: ", *changes)


def steady_files(job: Job) -> list[Steady]:
    """Returns the files of the input and its targets."""
    return [file for reader in job.readers for file in reader.steady]


def require_unchanged(job: Job, folder: ChunkFolder) -> None:
    """Raises InputError if the rows of a finished chunk have changed.

    Rows are read again only if sizes or times of the files have changed.
    """
    path = folder.folder / INPUT
    for file in steady_files(job):
        file.require_same()  # a file may not have been opened yet
    found = json.dumps([[str(file), *map(str, file.version or ())] for file in steady_files(job)])
    if not path.exists() or path.read_text() != found:
        for chunk in folder.chunks:
            ends = (chunk.first + job.chunk_rows(chunk.first), job.row_range[1])
            end = min(end for end in ends if end is not None)
            job.require_unchanged(chunk, job.rows(chunk.first, end))
        with durable_file(path) as written:
            written.write(found.encode())
