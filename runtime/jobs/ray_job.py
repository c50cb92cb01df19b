"""A job whose shards are answered by the workers of Ray, on one machine or on many.

Ray Data reads, hands out, restarts and counts; what is read, answered and written is as in any
other job, and so are the bytes. A shard is one row of Ray's dataset, whole: however Ray cuts,
bundles or repeats its work, the same rows are in the same shard. The worker writes it under the
number of its first row, and Ray carries back no more than what was counted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import re
import shutil
import signal
import socket
import sys
import threading
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from functools import cached_property, partial
from itertools import count, islice
from pathlib import Path
from typing import Any, cast

from transferry.runtime.engine.engine import Engine
from transferry.runtime.errors import InputError, TransferryError, UsageError
from transferry.runtime.files import durable_file, replace_folder, sha256, sync_folder
from transferry.runtime.hardware import usable_cores
from transferry.runtime.jobs.job import (
    STANDARD_STREAM,
    Job,
    Summary,
    hash_rows,
    pairs,
    read_summary,
)
from transferry.runtime.jobs.journal import (
    JOB,
    Fingerprint,
    Journal,
    Shard,
    Tally,
    differences,
    hash_of_hashes,
    is_intact,
)
from transferry.runtime.jobs.options import JobOptions, RayOptions
from transferry.runtime.jobs.readers import Source, opened_parquet
from transferry.runtime.jobs.rows import SourceRow

EXTENSIONS = {"text": "txt"}
# How often a worker may begin a shard and be gone: rows that take it down would do so for ever.
MOST_TRIES = 5
# Unless said otherwise: nothing leaves the machine, and stderr is for the job.
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DATA_LOG_LEVEL": "ERROR",
    "RAY_BACKEND_LOG_LEVEL": "fatal",
}


class ShardFolder(Journal):
    """The folder of a job whose shards several processes finish, in any order.

    OUT.job/job.json                    what the job goes by
    OUT.job/shards/000000016384.jsonl   answers from that row on; the folder becomes OUT
    OUT.job/notes/000000016384.jsonl.json   that they are finished, and their hash
    OUT.job/lock                        locked while somebody hands out shards
    """

    own = re.compile(r"job\.json(\.tmp)?|journal\.jsonl|beside\.tmp|shards(\.old)?|notes")

    def __init__(self, folder: Path) -> None:
        """Looks at nothing yet."""
        super().__init__(folder)
        self.answers, self.notes = folder / "shards", folder / "notes"

    def begin(self, fingerprint: Fingerprint, *, force: bool) -> str:
        """Goes on where the same job was interrupted, or begins."""
        note = super().begin(fingerprint, force=force)
        for folder in (self.answers, self.notes):
            folder.mkdir(exist_ok=True)
        for path in (*self.notes.glob("*.tmp"), *self.notes.glob("*.tries")):
            path.unlink()
        return note

    def find(self, name: str) -> Shard | None:
        """Returns a shard that is finished and as it was then."""
        shard = self._noted(self.notes / f"{name}.json")
        return shard if shard and is_intact(self.answers / name, shard) else None

    def tries(self, name: str) -> int:
        """How often this shard was begun, counting this time."""
        with (self.notes / f"{name}.tries").open("ab") as file:
            file.write(b".")
            return file.tell()

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[Any]:
        """A file for the answers of a shard."""
        # A worker that Ray has given up may still be at it, so each has a name of its own.
        with durable_file(self.answers / name, self._temporary()) as file:
            yield file

    def finish(self, name: str, shard: Shard) -> None:
        """Writes down that the shard is finished that was written under this name."""
        part = self.answers / name
        shard.sha256, shard.size = sha256(part), part.stat().st_size
        with durable_file(self.notes / f"{name}.json", self._temporary()) as file:
            file.write(f"{json.dumps(asdict(shard))}\n".encode())

    def clear(self) -> None:
        """Throws away all that is finished; the lock stays."""
        (self.folder / JOB).unlink(missing_ok=True)
        for folder in (self.answers, self.notes, self.answers.with_suffix(".old")):
            if folder.exists():
                shutil.rmtree(folder)
        super().clear()

    def _temporary(self) -> Path:
        return self.notes / f"{uuid.uuid4().hex}.tmp"

    def read(self) -> str:
        """Looks what is finished."""
        # Whether a part is still what its note says, a worker looks when it is its turn.
        found = map(self._noted, sorted(self.notes.glob("*.json")))
        self.shards = [shard for shard in found if shard is not None]
        return ""

    def _noted(self, note: Path) -> Shard | None:
        try:
            return Shard(**json.loads(note.read_bytes()))
        except (FileNotFoundError, ValueError, TypeError):
            return None


class RayJob(Job):
    """One run over a file, by workers of Ray, each of which opens the bundle once.

    The output is a folder of shards, each named by the number of its first row and itself a whole
    file of the format: all together, in the order of their names, they are what `Job` would write.
    Whatever stops the job or kills a worker, the same is true in the end. The folders of source and
    sink have to be where all workers see them.
    """

    journal = ShardFolder

    def __init__(
        self,
        load: Callable[[], Engine],
        source: Path | str,
        sink: Path | str,
        options: JobOptions | None = None,
        ray_options: RayOptions | None = None,
    ) -> None:
        """Opens everything here, as each worker will, and changes nothing yet.

        Args:
            load: Opens what answers, here and on each worker.
            source: Where the rows come from; a file.
            sink: The folder of the shards.
            options: Settings of the job.
            ray_options: Which workers.

        Raises:
            InputError: The bundle or the source cannot be used.
            UsageError: The options do not fit each other, the bundle or the files, or Ray is not
                installed.
        """
        if STANDARD_STREAM in (Path(source), Path(sink)):
            raise UsageError(
                "workers of Ray share files, not standard input and output; name a file, and a "
                "folder with --out"
            )
        options = options or JobOptions()
        if options.canary is not None:
            raise UsageError("workers of Ray have no canary; leave it out")
        if options.target is not None:
            options = replace(options, target=options.target.absolute())
        super().__init__(load(), Path(source).absolute(), Path(sink).absolute(), options)
        self.ray_options = ray_options or RayOptions("ray")
        self._load, self._workers = load, 0
        self._ray = import_ray()

    def _check_path(self, source: Path) -> None:
        """Refuses to lose a folder."""
        if not self.path.exists():
            return
        if not self.path.is_dir() or read_summary(self.path) is None:
            raise UsageError(
                f"{self.path} is not a folder of shards with its {self.path.name}.summary.json, so "
                "it is not replaced; name another"
            )
        if self.path in source.parents:
            raise UsageError(f"{self.path} holds the input; name another folder for the output")

    def answer(self, first: int, rows: list[SourceRow], session: int, workers: int) -> Shard:
        """Finishes a shard, on a worker, unless it is finished.

        Args:
            first: Number of its first row.
            rows: All of it.
            session: How many runs of the job had finished shards before.
            workers: How many share the work.

        Raises:
            InputError: This worker does not compute as it was begun, or does not see the files; or
                the rows are not those that were answered.
        """
        folder, name = ShardFolder(self._beside(".job")), self._name(first)
        self._require_the_same(folder.former())
        shard = folder.find(name)
        if shard is not None:
            if shard.source_sha256 != hash_rows(rows)[1]:
                raise InputError(
                    f"{self.source.path} has changed: rows {first + 1} to {first + shard.rows} are "
                    "not those that were answered. Restore it, or add --force to throw away what "
                    "was saved"
                )
            return shard
        if folder.tries(name) > MOST_TRIES:
            raise InputError(
                f"{MOST_TRIES} workers went down, one after the other, while they answered rows "
                f"{first + 1} to {first + len(rows)}. Look for what is wrong with these, or run "
                "the same again with fewer --shard-rows to find it"
            )
        shard = Shard(first=first, session=session)
        with folder.writing(name) as file:
            answered = self._answered(iter(rows), first)
            shard.source_sha256 = self._write(
                answered, file, shard, Summary(), lambda summary: None
            )
        # Of the time that passes while all of them are at work.
        shard.seconds /= workers
        folder.finish(name, shard)
        return shard

    def _name(self, first: int) -> str:
        extension = EXTENSIONS.get(self.sink.format, self.sink.format)
        return f"{first:012d}.{extension}{self.fingerprint['compression']}"

    def _require_the_same(self, former: Fingerprint | None) -> None:
        if former is None:
            raise InputError(
                f"the worker on {socket.gethostname()} sees no {self._beside('.job')}; let the "
                "output lie on a file system that all machines share"
            )
        common = {name: former.get(name) for name in self.fingerprint}
        if changes := differences(common, self.fingerprint):
            raise InputError(
                f"the worker on {socket.gethostname()} computes otherwise than the job began: "
                f"{'; '.join(changes)}"
            )

    def _answer_rest(
        self,
        journal: Journal,
        summary: Summary,
        watch: Callable[[Summary], None],
        say: Callable[[str], None],
    ) -> None:
        summary.resumed, summary.saved = journal.session, journal.rows
        if summary.saved:
            say(f"{self._kept(summary)}; this run goes on with the others")
        shards: list[Shard] = []
        try:
            with self._connected(), closing(self._shards(journal.session)) as finished:
                for shard in finished:
                    shards.append(shard)
                    summary.add(shard)
                    self._check_errors(summary)
                    watch(summary)
        finally:
            # More may be finished than has come back.
            journal.read()
            summary.saved = journal.rows
        journal.shards = sorted(shards, key=lambda shard: shard.first)
        self._require_all(journal.shards, cast(ShardFolder, journal))
        # Once more, in order: so that nothing of it depends on which shard was finished first.
        total = Tally()
        for shard in journal.shards:
            total.add(shard)
        vars(summary).update(vars(total))

    def _shards(self, session: int) -> Generator[Shard, None, None]:
        """Lets Ray finish all shards; yields each when it is finished."""
        data = self._ray.data
        options = replace(self.options, shard=None, max_errors=None, force=True)
        job = partial(RayJob, self._load, self.source.path, self.path, options)
        ranges = self._ranges()
        dataset = data.read_datasource(self._datasource(ranges), override_num_blocks=len(ranges))
        # In bytes; a shard is longer, so each one is a block, and a task, of its own.
        dataset.context.target_max_block_size = 1
        dataset.context.enable_progress_bars = False
        answered = dataset.map_batches(
            _Worker,
            batch_size=1,
            batch_format="pyarrow",
            compute=data.ActorPoolStrategy(size=self._workers),
            fn_constructor_args=(job, session, self._workers),
            num_cpus=self._cores,
            num_gpus=int(self._needs_gpu),
        )
        for batch in answered.iter_batches(batch_size=None, batch_format="pyarrow"):
            for content in batch["shard"]:
                shard = pickle.loads(content.as_buffer())
                if isinstance(shard, Exception):
                    raise shard
                yield shard

    def _datasource(self, ranges: Sequence[tuple[int, int | None]]) -> Any:
        """What Ray Data reads: the rows of the source, by shards."""
        from ray.data import Datasource
        from ray.data.block import BlockMetadata
        from ray.data.datasource import ReadTask

        read = partial(read_shards, self.source, self.target, self.options.shard_rows, self._range)
        about = BlockMetadata(None, None, [str(self.source.path)], None)
        tasks = [ReadTask(partial(read, *part), about) for part in ranges]

        class Shards(Datasource):  # type: ignore[misc]  # Any where Ray is not installed
            def get_read_tasks(self, *arguments: Any, **named: Any) -> list[Any]:
                return tasks

            def estimate_inmemory_data_size(self) -> int | None:
                return None

        return Shards()

    def _ranges(self) -> list[tuple[int, int | None]]:
        """The first shard of each reader, and how many it reads; None is all that there are.

        Lines are found by reading all before them, so they have one reader.
        """
        if self.source.format != "parquet" or self.target is not None:
            return [(0, None)]
        first, last = self._range
        if last is None:
            with opened_parquet(self.source.path) as file:
                last = file.metadata.num_rows
        shards = (last - first) // self.options.shard_rows + 1
        each = -(-shards // self._workers)
        *others, (start, _) = ((start, each) for start in range(0, shards, each))
        return [*others, (start, None)]

    def _require_all(self, shards: list[Shard], folder: ShardFolder) -> None:
        """Refuses to publish what is not all of the input, and no more."""
        ends = [self._range[0], *(shard.first + shard.rows for shard in shards)]
        complete = shards and shards[-1].rows < self.options.shard_rows
        if [shard.first for shard in shards] != ends[:-1] or not complete:
            raise InputError(f"{self.path}: some rows came back from no worker; run the same again")
        names = {self._name(shard.first) for shard in shards}
        if {path.name for path in folder.answers.iterdir()} != names:
            raise InputError(
                f"{self.source.path} has fewer rows than were answered. Restore it, or add --force "
                "to throw away what was saved"
            )

    def _publish(
        self, journal: Journal, summary: Summary, settings: Mapping[str, Any] | None
    ) -> None:
        """Gives the folder its name, last of all: where it is, all is."""
        folder, shards = cast(ShardFolder, journal), [*journal.shards]
        if len(shards) > 1 and not shards[-1].rows:  # some readers refuse a file of no rows
            (folder.answers / self._name(shards.pop().first)).unlink()
        hashes = [shard.sha256 for shard in shards]
        self._explain(journal, summary, settings, hash_of_hashes(hashes))
        replace_folder(folder.answers, self.path)
        sync_folder(self.path.parent)
        journal.clear()

    def _made(self) -> dict[str, Any]:
        return super()._made() | {"engine": "ray", "workers": self._workers}

    @property
    def _cores(self) -> int:
        """How many a worker keeps busy."""
        described = self.engine.describe()
        return int(described.get("replicas", 1)) * int(described.get("threads", 1))

    @property
    def _needs_gpu(self) -> bool:
        return bool(self.engine.describe().get("provider") == "cuda")

    @contextlib.contextmanager
    def _connected(self) -> Iterator[None]:
        """Ray, and how many workers of it; where this process has one already, it stays."""
        wanted, begun = self.ray_options.workers, not self._ray.is_initialized()
        if begun:
            address = self.ray_options.ray_address or os.environ.get("RAY_ADDRESS") or "local"
            own: dict[str, Any] = {}
            if address == "local":
                # One more than the workers take: somebody has to read.
                cores = (wanted or max(1, usable_cores() // self._cores)) * self._cores + 1
                own = {"num_cpus": cores, "include_dashboard": False}
            terminated = signal.getsignal(signal.SIGTERM)
            try:
                self._ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **own)
            except ConnectionError as error:
                raise InputError(f"there is no Ray cluster at {address}: {error}") from error
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, terminated)  # Ray has one of its own
        try:
            found = self._ray.cluster_resources()
            room = int(found.get("CPU", 0) - 1) // self._cores
            if self._needs_gpu:
                room = min(room, int(found.get("GPU", 0)))
            self._workers = wanted or max(1, room)
            with contextlib.redirect_stdout(sys.stderr):  # Ray prints who has died
                yield
        finally:
            if begun:
                self._ray.shutdown()


class _Worker:
    """Answers shards; there is one in each process that Ray starts."""

    def __init__(self, make: Callable[[], RayJob], session: int, workers: int) -> None:
        self._make, self._session, self._workers = make, session, workers

    @cached_property
    def _job(self) -> RayJob:
        return self._make()

    def __call__(self, batch: Any) -> Any:
        import pyarrow

        ((first, content),) = zip(batch["first"].to_pylist(), batch["rows"], strict=True)
        rows = pickle.loads(content.as_buffer())
        # Ray passes errors on as text, and what went wrong shall be what the job says.
        done: Shard | Exception
        try:
            if isinstance(rows, Exception):
                raise rows
            done = self._job.answer(first, rows, self._session, self._workers)
        except (TransferryError, OSError) as error:
            done = error
        return pyarrow.table({"shard": [pickle.dumps(done)]})


def read_shards(
    source: Source,
    target: Source | None,
    shard_rows: int,
    part: tuple[int, int | None],
    start: int,
    shards: int | None,
) -> Iterator[Any]:
    """Yields shards as tables of one row: the number of the first row, and all of them, pickled.

    Where the source cannot be read on, the error takes the place of the rows.

    Args:
        source: What is read.
        target: The other side, if rows are pairs.
        shard_rows: Rows of each shard; the one at the end has fewer, perhaps none.
        part: Number of the first row of the job, and that behind its last if the input goes on.
        start: Number of the first shard.
        shards: How many; None is all that there are.
    """
    import pyarrow

    first, last = part
    first += start * shard_rows
    rows = source.rows(first, last)
    if target is not None:
        rows = pairs(rows, target, first, last)
    for number in islice(count(first, shard_rows), shards):
        some: list[SourceRow] | TransferryError
        try:
            some = list(islice(rows, shard_rows))
        except TransferryError as error:
            some = error
        content = pyarrow.array([pickle.dumps(some)], pyarrow.large_binary())
        yield pyarrow.table({"first": [number], "rows": content})
        if isinstance(some, TransferryError) or len(some) < shard_rows:
            return


def import_ray() -> Any:
    """Returns ray, with ray.data.

    Raises:
        UsageError: It is not installed.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import ray
        import ray.data
    except ModuleNotFoundError as error:
        raise UsageError(
            'this needs Ray Data, which is not installed; pip install "transferry[ray]"'
        ) from error
    return ray
