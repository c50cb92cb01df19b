"""Chunks that several workers compute in any order: the bytes of a plain job."""

import gzip
import json
import os
import random
import shutil
import socketserver
import threading
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pyarrow
import pyarrow.parquet
import pytest

from tests.runtime.jobs.helpers import (
    Echo,
    LocalCrew,
    LocalRunner,
    by_workers,
    computed_rows,
    joined,
    names,
    run,
    write_rows,
)
from transferry.runtime.errors import InputError, Option
from transferry.runtime.jobs.chunk_folder import ChunkFolder
from transferry.runtime.jobs.distribution import LOST, MOST_TRIES, Call, Distribution, Worker
from transferry.runtime.jobs.formats.sources import open_sources
from transferry.runtime.jobs.job import Job
from transferry.runtime.jobs.job_options import JobOptions
from transferry.runtime.jobs.journal import Chunk, Journal, parts_of
from transferry.runtime.jobs.merge import merge
from transferry.runtime.jobs.plan import Plan
from transferry.runtime.jobs.ray_job import RayCrew, require_cluster, room_for, watched_start
from transferry.runtime.jobs.summary import Summary, beside
from transferry.runtime.stopping import at_stop


def as_table(lines: list[str]) -> Any:
    return pyarrow.table({"text": pyarrow.array(lines, pyarrow.string()), "n": range(len(lines))})


def parquet(path: Path, lines: list[str]) -> None:
    pyarrow.parquet.write_table(as_table(lines), path, row_group_size=4)


FORMATS: dict[str, Callable[[Path, list[str]], object]] = {
    "txt": lambda path, lines: path.write_text("".join(f"{line}\n" for line in lines)),
    "txt.gz": lambda path, lines: path.write_bytes(gzip.compress("\n".join(lines).encode())),
    "jsonl": lambda path, lines: path.write_text(
        "".join(json.dumps({"text": line}) + "\n" for line in lines)
    ),
    "parquet": parquet,
}


# First rows of chunks of Parquet: three rows, or up to the end of a row group of four or a file.
ENDING_WITH_GROUPS = {9: (0, 3, 4, 7, 9), 20: (0, 3, 4, 7, 8, 11, 12, 15, 16, 19, 20, 23)}


@pytest.mark.parametrize(
    ("form", "rows"),
    [("txt", 0), ("txt", 20), ("txt.gz", 9), ("jsonl", 20), ("parquet", 9), ("parquet", 20)],
)
def test_workers_write_the_bytes_of_a_plain_job(tmp_path: Path, form: str, rows: int) -> None:
    """Workers die now and then; of two files."""
    first, second = tmp_path / f"a.{form}", tmp_path / f"b.{form}"
    FORMATS[form](first, [f"row {number}" if number % 7 else "" for number in range(rows)])
    FORMATS[form](second, [f"other {number}" for number in range(rows // 3)])
    draw, out = random.Random(rows), tmp_path / "out.jsonl"
    deaths = (draw.random() < 0.2 for _ in range(99))
    by_workers([first, second], out, LocalRunner(deaths))
    job = Job(Echo(), [first, second], tmp_path / "plain.jsonl", JobOptions(chunk_rows=3))
    job.run()
    assert joined(out) == job.output.read_bytes()
    total = rows + rows // 3
    firsts = ENDING_WITH_GROUPS[rows] if form == "parquet" else range(0, max(1, total), 3)
    chunks = {f"{first:012d}.jsonl" for first in firsts}
    assert names(out) == {*chunks, "_manifest.json"}
    record, found = (json.loads(path.read_bytes()) for path in map(beside, (job.output, out)))
    for name in ("rows", "errors", "first_error", "source_sha256", "fingerprint"):
        assert found[name] == record[name], name
    assert by_workers([first, second], out).finished_before


def test_rows_that_kill_every_worker_are_named(tmp_path: Path) -> None:
    source, out = write_rows(tmp_path / "in.txt", 20), tmp_path / "out.jsonl"
    deaths = (number > 4 for number in range(1000))
    with pytest.raises(InputError, match=rf"{MOST_TRIES} workers went down.* rows .*saved"):
        by_workers(source, out, LocalRunner(deaths))
    # Finished chunks stay, but a damaged one, and one that is not in the journal.
    lines = (tmp_path / "out.jsonl.job" / "journal.jsonl").read_bytes().splitlines()
    saved = [json.loads(line)["first"] for line in lines]
    assert len(saved) == 5
    chunks = tmp_path / "out.jsonl.job" / "chunks" / "000000"
    (chunks / f"{saved[1]:012d}.jsonl").write_bytes(b"damaged")
    (chunks / "000000000999.jsonl").touch()
    journal = tmp_path / "out.jsonl.job" / "journal.jsonl"
    journal.write_bytes(b"\n".join([*lines, b'{"rows": 3, "err']))
    computed = tmp_path / "computed"
    assert by_workers(source, out, LocalRunner(computed=computed)).resumed == 1
    again = {row // 3 * 3 for row in computed_rows(computed)}
    assert again & set(saved) == {saved[1]}
    assert joined(out) == run(source, "plain.jsonl")


def test_many_chunks_lie_in_several_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of a job that reads from another row than the first, and is resumed."""
    monkeypatch.setattr(Journal, "block", 2)
    source, out = write_rows(tmp_path / "in.txt", 40), tmp_path / "out.jsonl"
    folder = stopped(source, out, partition="2/2")
    assert names(folder / "chunks") <= {"000000", "000001", "000002", "000003"}
    (folder / "chunks" / "000009").mkdir()
    assert by_workers(source, out, partition="2/2").resumed == 1
    half: dict[str, Any] = {"partition": "2/2", "partition_by": "rows"}
    whole = run(source, "plain.jsonl", **half)
    assert b"".join(path.read_bytes() for path in parts_of(out)) == whole
    assert names(out) == {"000000", "000001", "000002", "000003", "_manifest.json"}
    assert names(out / "000003") == {"000000000038.jsonl"}
    assert by_workers(source, out, partition="2/2").finished_before
    assert open_sources(out) == parts_of(out)
    with pytest.raises(RuntimeError):
        run(source, "again.jsonl", engine=Echo(fail_at=35), **half)
    assert names(tmp_path / "again.jsonl.job") >= {"000000", "000001", "journal.jsonl"}
    assert run(source, "again.jsonl", **half) == whole


def stopped(source: Path, out: Path, **options: Any) -> Path:
    with pytest.raises(InputError):
        by_workers(source, out, LocalRunner(number > 4 for number in range(1000)), **options)
    return out.with_name(f"{out.name}.job")


def test_finished_chunks_are_not_read_again(tmp_path: Path) -> None:
    """Their sizes and times tell; a copy of the folder is read."""
    source, out = write_rows(tmp_path / "in.txt", 20), tmp_path / "out.jsonl"
    folder = stopped(source, out)
    path = next((folder / "chunks" / "000000").iterdir())
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    path.write_bytes(path.read_bytes()[::-1])
    for changed, computed in ((0, 2), (1, 1)):
        os.utime(path, ns=(times[0], times[1] + changed))
        runner = LocalRunner(number >= 0 for number in range(1000))
        with pytest.raises(InputError, match=rf"{20 - 3 * computed} rows are saved|went down"):
            by_workers(source, out, runner)


def test_another_input_is_refused(tmp_path: Path) -> None:
    source, out = write_rows(tmp_path / "in.txt", 20), tmp_path / "out.jsonl"
    stopped(source, out)
    source.write_text(source.read_text().replace("row 1\n", "row I\n"))
    with pytest.raises(InputError, match=r"in\.txt has changed: rows 1 to 3 are not those"):
        by_workers(source, out)


@pytest.mark.parametrize("rows", [None, 0, 29, 30])
def test_a_plan_gives_every_chunk_once(rows: int | None) -> None:
    draw = random.Random(0)

    def size(first: int) -> int:
        return 3 if first < 112 else 2

    for workers in (1, 2, 7, 50):
        total = 30 if rows is None else rows
        end = None if rows is None else 100 + rows
        plan = Plan(100, size, workers, end=end, is_finished=lambda first: first % 4 == 0)
        done, open_chunks = list[int](), dict[int, int]()
        while not plan.complete:
            worker = draw.randrange(workers)
            if worker in open_chunks:
                first = open_chunks.pop(worker)
                if draw.random() < 0.2:
                    plan.lost(worker)
                elif plan.finished(worker, max(0, min(size(first), 100 + total - first))):
                    done.append(first)
            elif (begun := plan.next(worker)) is not None:
                open_chunks[worker] = begun
        grid = [*range(100, 112, 3), *range(112, 101 + total, 2)]
        assert sorted(done) == [first for first in grid if first % 4 and first < 100 + total]


def test_a_worker_reads_on_to_the_end_of_a_row_group() -> None:
    """As long as no other waits for it."""
    plan = Plan(0, lambda row: 10, 4, end=16_000, boundary=lambda row: row // 300 * 300)
    begun = [plan.next(worker) for worker in range(4)]
    assert begun == [0, 2100, 3900, 5700]
    assert [plan.next(0) for _ in range(3)] == [10, 20, 30]


def test_a_worker_reads_on_in_a_row_group(tmp_path: Path) -> None:
    """Beginning again would read all rows before the chunk again."""
    source, out = tmp_path / "in.parquet", tmp_path / "out.jsonl"
    pyarrow.parquet.write_table(as_table([f"row {row}" for row in range(36)]), source, 18)
    stopped(source, out)
    job = Job(Echo(), source, out, JobOptions(chunk_rows=3), LocalRunner())
    worker = Worker(*LocalRunner().told(job, 0))
    assert worker.open() is None
    begun = list[Any]()
    for first in (0, 9, 15, 21, 30, 6):
        assert cast(Chunk, worker.compute(first)).first == first
        begun.append(worker._read)
    assert [begun.index(each) for each in begun] == [0, 0, 0, 3, 3, 5]


@pytest.mark.parametrize(
    ("name", "was"), [("onnxruntime", "1.0"), ("transferry-kernels", "not set")]
)
def test_a_worker_refuses_what_is_not_the_job(tmp_path: Path, name: str, was: str) -> None:
    source, out = write_rows(tmp_path / "in.txt", 20), tmp_path / "out.jsonl"
    folder = stopped(source, out)
    engine, runner = Echo(), LocalRunner()
    engine.described[name] = "2.0"
    runner.load = lambda: engine
    job = Job(Echo(), source, out, JobOptions(chunk_rows=3), LocalRunner())
    with pytest.raises(InputError, match=rf"differ from .*: {name} was {was}, is 2\.0") as raised:
        raise Worker(*runner.told(job, 0)).open() or AssertionError
    assert Option(name) in raised.value.parts, "the command line names its option"
    shutil.rmtree(folder)
    with pytest.raises(InputError, match=r"worker on \S+: it sees no .*\.job; put the output on"):
        raise Worker(*LocalRunner().told(job, 0)).open() or AssertionError


def test_a_stall_is_told(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.txt", 20)
    job = Job(Echo(), source, tmp_path / "out.jsonl", JobOptions(chunk_rows=3))
    crew = LocalCrew(lambda: None, 3)
    stall = Distribution(job, ChunkFolder(job.folder), crew, Summary(), print)._stall
    assert [stall(at, 0) for at in (1000.0, 1059.0)] == ["", ""]
    assert stall(1061, 0) == "no row for 0:01:01 with 0 of 3 workers at work; nothing is free"
    assert [stall(at, 1) for at in (1062.0, 1120.0)] == ["", ""], "a row came"
    with pytest.raises(InputError, match=r"^no row for 0:15:00 with 0 of 3 .* is free\. Run the"):
        stall(1962.0, 1)


def test_a_worker_needs_room_on_one_machine() -> None:
    cpus, gone = {"CPU": 3.0}, {"Alive": False, "Resources": {"CPU": 9.0}}
    nodes = [{"Alive": True, "Resources": each} for each in (cpus, cpus, {**cpus, "GPU": 1.0}, {})]
    found = [room_for([*nodes, gone], cores, gpus) for cores, gpus in ((1, 0), (2, 0), (2, 1))]
    assert found == [9, 3, 1]


def test_a_file_that_is_gone_is_noticed(tmp_path: Path) -> None:
    folder = ChunkFolder(tmp_path / "out.jsonl.job", {"output_format": "jsonl", "chunk_rows": 3})
    folder.folder.mkdir()
    folder.clear()
    folder.outputs.mkdir()
    folder.extend([Chunk(first=0, rows=3, sha256="ab")])
    with folder.opened(9):
        pass
    with pytest.raises(InputError, match="fewer files than were written"):
        folder.require_all()


def test_a_folder_of_another_version_is_refused(tmp_path: Path) -> None:
    """Of format 1, which kept the chunks in a folder "shards"."""
    source, out = write_rows(tmp_path / "in.txt", 20), tmp_path / "out.jsonl"
    folder = stopped(source, out)
    now = json.loads((folder / "job.json").read_bytes())
    (folder / "chunks").rename(folder / "shards")
    (folder / "job.json").write_text('{"shard_rows": 3}')
    with pytest.raises(InputError, match="expected job format 5, found 1"):
        ChunkFolder(folder).begin(now, force=False)
    ChunkFolder(folder).begin(now, force=True)
    assert names(folder) - {"lock"} == {"chunks", "job.json", "journal.jsonl"}


def test_folders_of_several_jobs_are_merged(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.txt", 20)
    parts = [tmp_path / f"{number}.jsonl" for number in (3, 1, 2)]
    for part in parts:
        by_workers(source, part, partition=f"{part.stem}/3", partition_by="rows")
    merge(parts, tmp_path / "merged.jsonl")
    assert (tmp_path / "merged.jsonl").read_bytes() == run(source, "plain.jsonl")
    next(parts[0].iterdir()).write_bytes(b"changed")
    with pytest.raises(InputError, match=r"3\.jsonl has changed since its job wrote it"):
        merge(parts, tmp_path / "again.jsonl")


@contextmanager
def server(answer: bytes) -> Iterator[str]:
    """A server that answers each connection so; yields its address."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(99)
            self.request.sendall(answer)

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, args=(0.01,)).start()
        yield f"127.0.0.1:{listening.server_address[1]}"
        listening.shutdown()


# The first frame of a server of HTTP/2: its settings.
SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))


def test_an_address_that_is_not_of_ray_is_refused() -> None:
    """Ray itself asks such an address again for minutes."""
    with server(SETTINGS) as address:
        for each in (address, f"ray://{address}", "auto", "local"):
            require_cluster(each)
    for each in (address, f"ray://{address}", "127.0.0.1:99999"):
        with pytest.raises(InputError, match=f"there is no Ray cluster at {each}: "):
            require_cluster(each)
    with (
        server(b"HTTP/1.0 505 No\r\n") as other,
        pytest.raises(InputError, match=rf"cluster at {other}: the server there is not Ray's"),
    ):
        require_cluster(other)


def test_a_start_that_hangs_is_told_and_ended(caplog: pytest.LogCaptureFixture) -> None:
    ended = threading.Event()
    with watched_start("local", 60, 60):
        pass
    with (
        at_stop(lambda: "6 rows are saved"),
        watched_start("local", 0.01, 0.05, lambda code: ended.set() if code == 3 else None),
    ):
        assert ended.wait(10)
    told = [record.getMessage() for record in caplog.records]
    assert told[0] == "Ray (local) has not started for 0 s; waiting 0 s more"
    assert told[1].startswith("Ray (local) did not start within 0 s: see /tmp/ray/")
    assert told[1].endswith("; 6 rows are saved")
    assert len(told) == 2


def test_a_cluster_that_has_gone_away_ends_the_job() -> None:
    """Ray would end this process without a word, or wait for ever."""
    nodes = [{"NodeID": "here", "Alive": True}, {"NodeID": "there", "Alive": False}]
    with server(SETTINGS) as address:
        own = SimpleNamespace(gcs_address=address, get_node_id=lambda: "here")
        ray = SimpleNamespace(
            get_runtime_context=lambda: own, nodes=lambda: nodes, exceptions=MagicMock()
        )
        crew = RayCrew(ray, object, 2)
        crew.require_alive(1000.0)
        nodes[0]["Alive"] = False
        with pytest.raises(InputError, match="Ray has ended on the machine of this command"):
            crew.require_alive(1000.0)
    crew.require_alive(1029.0)
    with pytest.raises(InputError, match=rf"head of the Ray cluster at {address} has gone away: "):
        crew.require_alive(1030.0)


class Imagined:
    """Workers that compute nothing of a table that is nowhere; some calls lose their worker."""

    def __init__(self, workers: int, rows: int, chunk_rows: int) -> None:
        self.workers, self.rows, self.chunk_rows = workers, rows, chunk_rows
        self.open, self.draw, self.made = deque[Call](), random.Random(0), 0

    def __len__(self) -> int:
        return self.workers

    def call(self, worker: int, method: str, *arguments: Any) -> None:
        self.open.append(Call(worker, method, *arguments))
        self.made += 1

    def resources(self) -> str:
        return ""

    def returned(self, seconds: float) -> Iterator[Call]:
        for _ in range(self.draw.randint(1, len(self.open))):
            call = self.open.popleft()
            call.result = 0 if call.method == "progress" else None
            if call.method == "compute":
                rows = min(self.chunk_rows, self.rows - call.first)
                chunk = Chunk(first=call.first, rows=rows, sha256="0" * 64, source_sha256="0" * 64)
                call.result = LOST if self.draw.random() < 0.01 else chunk
            yield call


@pytest.mark.thorough
def test_a_billion_rows_on_a_thousand_machines(tmp_path: Path) -> None:
    """10,001 chunks and 8,000 workers, simulated: memory, time and calls of the command."""
    rows, chunk_rows = 1_000_000_001, 100_000
    reader: Any = SimpleNamespace(
        count=rows, boundary=lambda row: row // 2**20 * 2**20, keeps=False
    )
    folder = ChunkFolder(tmp_path)
    folder.begin({"output_format": "parquet", "chunk_rows": chunk_rows}, force=False)
    job: Any = SimpleNamespace(
        row_range=(0, None), options=JobOptions(chunk_rows=chunk_rows), reader=reader, target=None
    )
    job.readers, job.count, job.chunk_rows = [reader], lambda: rows, lambda first: chunk_rows
    job.folder = tmp_path
    crew, summary = Imagined(8000, rows, chunk_rows), Summary()
    began = time.process_time()
    tracemalloc.start()
    Distribution(job, folder, crew, summary, lambda summary: None).run(summary.add)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    seconds, each = time.process_time() - began, kept / len(folder.chunks)
    print(f"{seconds:.1f} s of CPU, {each:.0f} bytes a chunk, {crew.made:,} calls")
    assert (len(folder.chunks), folder.chunks.rows, summary.rows) == (10_001, rows, rows)
    assert each < 100
    assert crew.made < 40_000
