"""Jobs read each byte of their input once, by the counters of Linux in /proc/self/io."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tests.runtime.jobs.helpers import Echo, LocalRunner, joined
from transferry.runtime.errors import InputError
from transferry.runtime.jobs.job import Job
from transferry.runtime.jobs.job_options import JobOptions

IO = Path("/proc/self/io")
pytestmark = pytest.mark.skipif(not IO.exists(), reason="there is no /proc/self/io")
# Each of three workers also reads 100 rows when it opens the file.
ROWS, CHUNK, MOST, OPENING = 1600, 200, 1.05, 0.12
TEXTS = [os.urandom(4000).hex() for _ in range(ROWS)]


def lines(path: Path, line: Callable[[str], str], header: str = "") -> None:
    path.write_text(header + "".join(f"{line(text)}\n" for text in TEXTS))


FORMATS: dict[str, Callable[[Path], None]] = {
    "txt": lambda path: lines(path, str),
    "jsonl": lambda path: lines(path, lambda text: json.dumps({"text": text, "id": "x"})),
    "csv": lambda path: lines(path, lambda text: f'"{text}\n",1', "text,id\n"),
    "parquet": lambda path: pyarrow.parquet.write_table(
        pyarrow.table({"text": TEXTS}), path, row_group_size=CHUNK
    ),
}


def short(text: str) -> str:
    """Outputs are read too, for their hashes, so they are small."""
    return text[:2]


def share(
    source: Path, out: Path, runner: LocalRunner | None = None, partition: str | None = None
) -> float:
    """Runs a job; returns the bytes that it has read, of all bytes of the input."""
    options = JobOptions(chunk_rows=CHUNK, format="text", partition=partition)
    job = Job(Echo(change=short), source, out, options, runner)
    before = int(IO.read_text().split()[1])
    try:
        job.run()
    except InputError as error:
        assert "workers went down" in str(error)  # or it is finished
    return (int(IO.read_text().split()[1]) - before) / source.stat().st_size


@pytest.mark.parametrize("form", FORMATS)
def test_each_byte_is_read_once(tmp_path: Path, form: str) -> None:
    """By one process, by partitions, by workers, and by workers that go on for others."""
    source, plain = tmp_path / f"in.{form}", tmp_path / "plain.txt"
    FORMATS[form](source)
    assert share(source, plain) < MOST
    assert share(source, tmp_path / "ray.txt", LocalRunner(change=short)) < MOST + OPENING
    parts = [tmp_path / f"{number}.txt" for number in (1, 2, 3)]
    read = sum(share(source, part, None, f"{part.stem}/3") for part in parts)
    # Row groups at the borders are read by two.
    assert read < MOST + OPENING + (form == "parquet") * 2 * CHUNK / ROWS
    assert b"".join(part.read_bytes() for part in parts) == plain.read_bytes()
    runner = LocalRunner((number > 3 for number in range(99)), change=short)
    share(source, tmp_path / "again.txt", runner)
    resumed = share(source, tmp_path / "again.txt", LocalRunner(change=short))
    assert 0.4 < resumed < 0.5 * MOST + OPENING
    assert joined(tmp_path / "ray.txt") == joined(tmp_path / "again.txt") == plain.read_bytes()
