"""Jobs read each byte of their input once, by the counters of Linux in /proc/self/io."""

import json
import os
import random
import threading
from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import accumulate
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tests.runtime.jobs.helpers import Echo, LocalRunner, joined
from transferry.runtime.errors import InputError
from transferry.runtime.jobs.formats.rows import InputRow, RowReader
from transferry.runtime.jobs.job import Job
from transferry.runtime.jobs.job_options import JobOptions
from transferry.runtime.jobs.plan import Plan

IO = Path("/proc/self/io")
pytestmark = pytest.mark.skipif(not IO.exists(), reason="there is no /proc/self/io")
ROWS, MOST = 1600, 1.05
TEXTS = [os.urandom(4000).hex() for _ in range(ROWS)]
# Rows of a chunk and, of Parquet, of a row group and a file: neither a multiple of the other, tiny
# groups, and several files.
CASES = {
    "txt": (200,),
    "jsonl": (200,),
    "csv": (200,),
    "parquet of groups that are cut": (30, 53, ROWS),
    "parquet of tiny groups": (200, 3, ROWS),
    "parquet in files": (60, 37, 550),
}


@pytest.fixture(autouse=True)
def nothing_else_is_read() -> None:
    """Waits for threads that read /proc since another test opened a model."""
    for thread in threading.enumerate():
        if thread.name == "huge pages":
            thread.join()


def write(folder: Path, form: str, group: int = 0, file: int = ROWS) -> list[Path]:
    paths = [folder / f"in{first:04d}.{form}" for first in range(0, ROWS, file)]
    for number, path in enumerate(paths):
        texts = TEXTS[number * file : (number + 1) * file]
        if form == "parquet":
            table = pyarrow.table({"text": texts})
            pyarrow.parquet.write_table(table, path, row_group_size=group)
        elif form == "csv":
            path.write_text("text,id\n" + "".join(f'"{text}\n",1\n' for text in texts))
        else:
            lines = texts if form == "txt" else [json.dumps({"text": text}) for text in texts]
            path.write_text("".join(f"{line}\n" for line in lines))
    return paths


def short(text: str) -> str:
    """Outputs are read too, for their hashes, so they are small."""
    return text[:2]


def share(
    sources: list[Path],
    out: Path,
    chunk: int,
    runner: LocalRunner | None = None,
    partition: str | None = None,
) -> float:
    """Runs a job; returns the bytes that it has read, of all bytes of the input.

    Opening, which reads the footer or the first 100 rows, here and in workers, is left out.
    """
    options = JobOptions(chunk_rows=chunk, format="text", partition=partition)
    begun = int(IO.read_text().split()[1])
    job = Job(Echo(change=short), sources, out, options, runner)
    before = int(IO.read_text().split()[1])
    try:
        job.run()
    except InputError as error:
        assert "workers went down" in str(error)  # or it is finished
    read = int(IO.read_text().split()[1]) - before
    read -= (before - begun) * runner.opened if runner else 0
    return read / sum(source.stat().st_size for source in sources)


@pytest.mark.parametrize("case", CASES)
def test_each_byte_is_read_once(tmp_path: Path, case: str) -> None:
    """By one process, by partitions, by workers, and by workers that go on for others."""
    form, (chunk, *sizes) = case.partition(" ")[0], CASES[case]
    sources, plain = write(tmp_path, form, *sizes), tmp_path / "plain.txt"
    assert 0.95 < share(sources, plain, chunk) < MOST
    assert share(sources, tmp_path / "ray.txt", chunk, LocalRunner(change=short)) < MOST
    parts = [tmp_path / f"{number}.txt" for number in (1, 2, 3)]
    assert sum(share(sources, part, chunk, None, f"{part.stem}/3") for part in parts) < MOST
    assert b"".join(part.read_bytes() for part in parts) == plain.read_bytes()
    dies = (number > 800 // chunk for number in range(999))
    again = tmp_path / "again.txt"
    share(sources, again, chunk, LocalRunner(dies, change=short))
    lines = (tmp_path / "again.txt.job" / "journal.jsonl").read_bytes().splitlines()
    left = ROWS - sum(json.loads(line)["rows"] for line in lines)
    assert ROWS / 5 < left < ROWS * 0.8
    # Each worker may begin in a group; saved rows are not read.
    most = MOST * left + 3 * (sizes or [0])[0]
    assert share(sources, again, chunk, LocalRunner(change=short)) * ROWS < most
    assert joined(tmp_path / "ray.txt") == joined(again) == plain.read_bytes()


class Groups(RowReader):
    """A table of row groups that is nowhere."""

    def __init__(self, groups: list[int]) -> None:
        self.boundaries = [0, *accumulate(groups)]

    def rows(self, first: int = 0, last: int | None = None) -> Iterator[InputRow]:
        raise NotImplementedError


def spread(groups: list[int], most: int, workers: int, draw: random.Random) -> tuple[float, float]:
    """Has workers of random speed read groups; returns the rows read, and the time, as shares."""
    reader = Groups(groups)
    end, boundary = reader.boundaries[-1], reader.boundary
    plan = Plan(0, lambda row: reader.chunk(row, most), workers, end=end, boundary=boundary)
    free, ends, read, done = [(0.0, each) for each in range(workers)], [0] * workers, 0, [0.0]
    while free:
        now, worker = heappop(free)
        if (first := plan.next(worker)) is None:
            done.append(now)
            continue
        rows = plan.rows_of(first) or 0
        read += first + rows - max(boundary(first), ends[worker] if ends[worker] <= first else 0)
        ends[worker] = first + rows
        plan.finished(worker, rows)
        heappush(free, (now + rows * draw.uniform(0.9, 1.1), worker))
    assert plan.complete
    return read / end, max(done) * workers / end


@pytest.mark.parametrize(
    ("groups", "most", "workers", "read", "time"),
    [
        ([5300] * 300, 1000, 3, 1, 1.02),  # row groups that no chunks fill
        ([100] * 9000, 1000, 30, 1, 1.05),  # many in a chunk
        ([10, 4000, 900, 1] * 100, 1000, 9, 1, 1.1),
        ([5300] * 30, 1000, 3, 1, 1.1),  # as few as are never shared
        ([5300] * 12, 1000, 3, 1.2, 1.1),
        ([1_000_000], 1000, 3, 2.4, 1.1),  # shared, since workers would have nothing to do
    ],
)
def test_workers_share_no_row_group(
    groups: list[int], most: int, workers: int, read: float, time: float
) -> None:
    draw = random.Random(0)
    for _ in range(5):
        found = spread(groups, most, workers, draw)
        assert 1 <= found[0] <= read, f"{found[0]:.2f} of the rows were read"
        assert found[1] < time
        draw.shuffle(groups)
