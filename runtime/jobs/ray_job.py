"""A job whose chunks are computed by workers of Ray, on one machine or several.

Ray Data reads, distributes, restarts and counts; rows are read, computed and written as in any
other job, so the bytes are the same. One chunk is one row of Ray's dataset: however Ray splits,
bundles or repeats its work, a chunk holds the same rows. The worker writes it under the number of
its first row, and only the counts travel back through Ray.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import replace
from functools import cached_property, partial
from itertools import count, islice
from pathlib import Path
from typing import Any, cast

from transferry.runtime.engine.engine import Engine
from transferry.runtime.errors import InputError, TransferryError, UsageError, install_command
from transferry.runtime.hardware import usable_cores
from transferry.runtime.io.atomic import sync_folder
from transferry.runtime.io.folders import replace_folder
from transferry.runtime.io.outputs import STANDARD_STREAM
from transferry.runtime.jobs.chunk_folder import ChunkFolder
from transferry.runtime.jobs.formats.columnar import ParquetReader
from transferry.runtime.jobs.formats.readers import read_rows
from transferry.runtime.jobs.formats.rows import InputRow
from transferry.runtime.jobs.formats.sources import Inputs, open_sources
from transferry.runtime.jobs.formats.writers import ENDINGS
from transferry.runtime.jobs.job import RESTORE, Job, Runner
from transferry.runtime.jobs.job_options import JobOptions, RayOptions
from transferry.runtime.jobs.journal import Chunk, Journal, differences, hash_of_hashes
from transferry.runtime.jobs.summary import Summary, Tally, read_summary
from transferry.runtime.stopping import raising

# Workers lost on one chunk before the job stops: some rows take every worker down.
MOST_TRIES = 5
# Defaults: nothing leaves the machine, and stderr is for the job.
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DATA_LOG_LEVEL": "ERROR",
    "RAY_BACKEND_LOG_LEVEL": "fatal",
}


def ray_job(
    load: Callable[[], Engine],
    inputs: Inputs,
    output: Path | str,
    options: JobOptions | None = None,
    ray_options: RayOptions | None = None,
) -> Job:
    """Returns a job for workers of Ray, which open the bundle once each.

    The output is a folder of chunks, each named by the number of its first row and itself a whole
    file of the format: in the order of their names they have the bytes of a plain job, whatever
    stops the job or kills a worker. All workers must see the folders of input and output. `load`
    opens the engine, here and on each worker.

    Raises:
        InputError: The bundle or the input cannot be used.
        UsageError: The options do not fit each other, the bundle or the files, or Ray is not
            installed.
    """
    sources, output, options = open_sources(inputs), Path(output), options or JobOptions()
    if STANDARD_STREAM in (*sources, output):
        raise UsageError(
            "workers of Ray share files, not standard input and output; name a file, and a "
            "folder with --out"
        )
    if options.canary is not None:
        raise UsageError("workers of Ray have no canary; leave it out")
    if options.target is not None:
        options = replace(options, target=options.target.absolute())
    runner = RayRunner(load, ray_options or RayOptions("ray"))
    shared = [each.absolute() if isinstance(each, Path) else each for each in sources]
    return Job(load(), shared, output.absolute(), options, runner)


class RayRunner(Runner):
    """Computes the chunks of a job with workers of Ray; see `ray_job`."""

    journal, in_order = ChunkFolder, False

    def __init__(self, load: Callable[[], Engine], options: RayOptions) -> None:
        """Imports Ray; connects to it when the job runs."""
        self.load, self.options, self.workers = load, options, 0
        self._ray = import_ray()

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
        """Finishes every chunk; Ray asks for all, and workers recognise finished ones."""
        summary.saved = journal.rows
        chunks: list[Chunk] = []
        folder = cast(ChunkFolder, journal)
        try:
            with (
                raising(),  # Ray's processes end with this one only if it shuts Ray down
                watching(folder, summary, watch),
                self._connected(job),
                closing(self._chunks(job, journal.session)) as finished,
            ):
                for chunk in finished:
                    chunks.append(chunk)
                    add(chunk)
                    folder.received(chunk_name(job, chunk.first))
        finally:
            # More may be finished than has come back.
            journal.read()
            summary.saved = journal.rows
        journal.chunks = sorted(chunks, key=lambda chunk: chunk.first)
        require_all(job, folder)
        # In order: the sums do not depend on which chunk was finished first.
        summary.recount(journal.chunks)

    def publish(self, job: Job, journal: Journal, describe: Callable[[str], None]) -> None:
        """Gives the folder of chunks the output's name, last of all."""
        outputs, chunks = cast(ChunkFolder, journal).outputs, [*journal.chunks]
        if len(chunks) > 1 and not chunks[-1].rows:  # some readers refuse a file without rows
            (outputs / chunk_name(job, chunks.pop().first)).unlink()
        describe(hash_of_hashes(chunk.sha256 for chunk in chunks))
        replace_folder(outputs, job.output)
        sync_folder(job.output.parent)

    def _chunks(self, job: Job, session: int) -> Generator[Chunk, None, None]:
        """Lets Ray compute all chunks; yields each when it is finished."""
        data, (cores, gpus) = self._ray.data, _needs(job)
        options = replace(job.options, partition=None, max_errors=None, force=True)
        open_job = partial(ray_job, self.load, job.sources, job.output, options)
        dataset = data.read_datasource(
            chunk_source(job, ranges := reader_ranges(job, self.workers)),
            override_num_blocks=len(ranges),
        )
        # In bytes; every chunk is longer, so each is a block, and a task, of its own.
        dataset.context.target_max_block_size = 1
        dataset.context.enable_progress_bars = False
        computed = dataset.map_batches(
            _Worker,
            batch_size=1,
            batch_format="pyarrow",
            compute=data.ActorPoolStrategy(size=self.workers),
            fn_constructor_args=(open_job, session, self.workers),
            num_cpus=cores,
            num_gpus=gpus,
        )
        for batch in computed.iter_batches(batch_size=None, batch_format="pyarrow"):
            for content in batch["chunk"]:
                chunk = pickle.loads(content.as_buffer())
                if isinstance(chunk, Exception):
                    raise chunk
                yield chunk

    @contextlib.contextmanager
    def _connected(self, job: Job) -> Iterator[None]:
        """Connects to Ray and sets the number of workers; keeps a connection that exists."""
        wanted, begun = self.options.workers, not self._ray.is_initialized()
        cores, gpus = _needs(job)
        if begun:
            address = self.options.ray_address or os.environ.get("RAY_ADDRESS") or "local"
            own: dict[str, Any] = {}
            if address == "local":
                # One core more than the workers take, for the reader.
                workers = wanted or max(1, usable_cores() // cores)
                own = {"num_cpus": workers * cores + 1, "include_dashboard": False}
            terminated = signal.getsignal(signal.SIGTERM)
            try:
                with _hushed():
                    self._ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **own)
            except ConnectionError as error:
                raise InputError(f"there is no Ray cluster at {address}: {error}") from error
            except Exception as error:
                if type(error) is not Exception:  # Ray's, of a start of more than 30 s, is plain
                    raise
                reason = str(error).partition(". ")[0].rstrip(".")
                raise InputError(
                    f"Ray did not start: {reason}. The machine may be too busy: end other programs "
                    "and run the command again"
                ) from error
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, terminated)  # Ray has set its own
        try:
            found = self._ray.cluster_resources()
            room = int(found.get("CPU", 0) - 1) // cores
            if gpus:
                room = min(room, int(found.get("GPU", 0)))
            self.workers = wanted or max(1, room)
            self.about = {"engine": "ray", "workers": self.workers}
            with contextlib.redirect_stdout(sys.stderr):  # Ray prints which workers died
                yield
        finally:
            if begun:
                self._ray.shutdown()


@contextlib.contextmanager
def _hushed() -> Iterator[None]:
    """Drops the output of C++ code on stderr, where Ray prints its log level."""
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


@contextlib.contextmanager
def watching(
    folder: ChunkFolder, summary: Summary, watch: Callable[[Summary], None]
) -> Iterator[None]:
    """Calls `watch` regularly in a thread, with the rows of unfinished chunks included."""
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(folder.look_every):
            ahead = folder.unfinished()
            note = "" if summary.rows + ahead else "starting Ray and its workers"
            watch(replace(summary, ahead=ahead, note=note))

    thread = threading.Thread(target=look, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        watch(summary)


def _needs(job: Job) -> tuple[int, int]:
    """Returns the CPU cores and GPUs of a worker."""
    engine = job.engine.describe()
    cores = int(engine.get("replicas", 1)) * int(engine.get("threads", 1))
    return cores, int(engine.get("provider") == "cuda")


def chunk_name(job: Job, first: int) -> str:
    """Returns the name of the chunk that begins at a row."""
    extension = ENDINGS.get(job.writer.format, job.writer.format)
    return f"{first:012d}.{extension}{job.fingerprint['compression']}"


def require_all(job: Job, folder: ChunkFolder) -> None:
    """Raises InputError unless the chunks are all of the input, and nothing else."""
    ends = [job.row_range[0], *(chunk.first + chunk.rows for chunk in folder.chunks)]
    starts = [chunk.first for chunk in folder.chunks]
    if starts != ends[:-1] or not folder.is_complete(job.options.chunk_rows):
        raise InputError(f"{job.output}: some rows came back from no worker; run the job again")
    if {path.name for path in folder.outputs.iterdir()} != {chunk_name(job, n) for n in starts}:
        raise InputError(f"{job.layout.path} has fewer rows than were computed. {RESTORE}")


def compute_chunk(job: Job, first: int, rows: list[InputRow], session: int, workers: int) -> Chunk:
    """Finishes one chunk, on a worker, unless it is finished.

    Args:
        job: The job as the worker has opened it.
        first: Number of the chunk's first row.
        rows: All its rows.
        session: Number of earlier runs of the job that finished chunks.
        workers: Number of workers that share the job.

    Raises:
        InputError: This worker's settings differ from the job's, it does not see the job's folder,
            or the rows of a finished chunk have changed.
    """
    folder, name = ChunkFolder(job.folder), chunk_name(job, first)
    host, former = socket.gethostname(), folder.former()
    if former is None:
        raise InputError(
            f"the worker on {host} sees no {job.folder}; put the output on a file system that all "
            "machines share"
        )
    common = {setting: former.get(setting) for setting in job.fingerprint}
    if changes := differences(common, job.fingerprint):
        raise InputError(
            f"the settings of the worker on {host} differ from the job's: {'; '.join(changes)}"
        )
    chunk = folder.find(name)
    if chunk is not None:
        job.require_unchanged(chunk, rows)
        return chunk
    if folder.tries(name) > MOST_TRIES:
        raise InputError(
            f"{MOST_TRIES} workers went down, one after the other, at rows {first + 1} to "
            f"{first + len(rows)}. Look for what is wrong with these, or find it by running the "
            "job again with fewer --chunk-rows"
        )
    summary = Summary()
    with (
        folder.writing(name) as file,
        folder.counting(name) as note,
        job.counting(summary, summary.add, note) as count,
    ):
        chunk = job.write(job.results(iter(rows), first), file, first, count)
    # Of the time that passes while all workers compute.
    chunk.seconds /= workers
    chunk.session = session
    folder.finish(name, chunk)
    return chunk


class _Worker:
    """Computes chunks; Ray creates one in each of its processes."""

    def __init__(self, open_job: Callable[[], Job], session: int, workers: int) -> None:
        self._open_job, self._session, self._workers = open_job, session, workers

    @cached_property
    def _job(self) -> Job:
        return self._open_job()

    def __call__(self, batch: Any) -> Any:
        import pyarrow

        ((first, content),) = zip(batch["first"].to_pylist(), batch["rows"], strict=True)
        rows = pickle.loads(content.as_buffer())
        # Ray passes errors on as text only, and the job should raise the original.
        done: Chunk | Exception
        try:
            if isinstance(rows, Exception):
                raise rows
            done = compute_chunk(self._job, first, rows, self._session, self._workers)
        except (TransferryError, OSError) as error:
            done = error
        return pyarrow.table({"chunk": [pickle.dumps(done)]})


def reader_ranges(job: Job, workers: int) -> list[tuple[int, int | None]]:
    """Returns the first row of each reader and its number of chunks; None is all that follow.

    Lines are found by reading all before them, so they have one reader.
    """
    first, last = job.row_range
    if not isinstance(job.reader, ParquetReader) or job.target is not None:
        return [(first, None)]
    rows = sum(job.reader.groups)
    last = rows if last is None else min(last, rows)
    rows = job.options.chunk_rows
    each = -(-((last - first) // rows + 1) // workers)
    *others, final = range(first, last + 1, each * rows)
    return [*((start, each) for start in others), (final, None)]


def chunk_source(job: Job, ranges: list[tuple[int, int | None]]) -> Any:
    """Returns a source of Ray Data: the rows of the input, by chunks."""
    from ray.data import Datasource
    from ray.data.block import BlockMetadata
    from ray.data.datasource import ReadTask

    rows_from = partial(read_rows, job.reader, job.target, last=job.row_range[1])
    read = partial(read_chunks, rows_from, job.options.chunk_rows)
    about = BlockMetadata(None, None, [str(job.layout.path)], None)
    tasks = [ReadTask(partial(read, *span), about) for span in ranges]

    class Chunks(Datasource):  # type: ignore[misc]  # Any where Ray is not installed
        def get_read_tasks(self, *arguments: Any, **named: Any) -> list[Any]:
            return tasks

        def estimate_inmemory_data_size(self) -> int | None:
            return None

    return Chunks()


def read_chunks(
    rows_from: Callable[[int], Iterator[InputRow]], chunk_rows: int, first: int, chunks: int | None
) -> Iterator[Any]:
    """Yields chunks as tables of one row: the number of the first row, and all rows, pickled.

    The last chunk has fewer than `chunk_rows` rows, perhaps none. Where the input cannot be read
    on, the error takes the place of the rows.
    """
    import pyarrow

    rows = rows_from(first)
    for number in islice(count(first, chunk_rows), chunks):
        block: list[InputRow] | TransferryError
        try:
            block = list(islice(rows, chunk_rows))
        except TransferryError as error:
            block = error
        content = pyarrow.array([pickle.dumps(block)], pyarrow.large_binary())
        yield pyarrow.table({"first": [number], "rows": content})
        if isinstance(block, TransferryError) or len(block) < chunk_rows:
            return


def import_ray() -> Any:
    """Returns ray, with ray.data; raises UsageError where it is not installed."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import ray
        import ray.data
    except ModuleNotFoundError as error:
        raise UsageError(
            f"--engine ray needs Ray Data, which is not installed; {install_command('ray')}"
        ) from error
    return ray
