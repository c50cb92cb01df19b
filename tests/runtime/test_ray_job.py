"""Shards that Ray's workers write: the bytes of a plain job, whoever is killed on the way."""

import gzip
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from transferry.build_model.corpus import builtin_pairs
from transferry.cli import main
from transferry.runtime.engine import Result
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.job_options import JobOptions, RayOptions
from transferry.runtime.jobs import Job, Summary
from transferry.runtime.merge import merge
from transferry.runtime.options import GenerationOptions
from transferry.runtime.ray_job import MOST_TRIES, RayJob, ShardFolder, read_shards
from transferry.runtime.rows import RowError, SourceRow
from transferry.runtime.sources import open_source

ray = pytest.importorskip("ray", reason='Ray is not installed: pip install "transferry[ray]"')
pytest.importorskip("ray.data", reason='Ray Data is not installed: pip install "transferry[ray]"')
Echo: Any = runpy.run_path(str(Path(__file__).with_name("echo.py")))["Echo"]
ROWS = 20


class Deadly(Echo):  # type: ignore[misc]  # it comes out of runpy
    """Kills its own process, as a machine that goes away would, at the row "deadly".

    Attributes:
        spared: Where it writes down that it did so, and does it no more.
    """

    spared: Path | None = None

    def generate(
        self,
        items: Iterable[str | RowError],
        options: GenerationOptions | None = None,
        *,
        first_row: int = 0,
        long_rows: str = "error",
    ) -> Iterator[Result]:
        def watched() -> Iterator[str | RowError]:
            for item in items:
                if item == "deadly" and not (self.spared and self.spared.exists()):
                    if self.spared:
                        self.spared.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                yield item

        yield from super().generate(watched(), options, first_row=first_row, long_rows=long_rows)


def deadly(spared: Path | None = None, **settings: Any) -> Any:
    engine = Deadly(**settings)
    engine.spared = spared
    return engine


@pytest.fixture(scope="module", autouse=True)
def two_workers() -> Iterator[None]:
    """Ray on this machine, with a core for each of two workers and one for whoever reads."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray.init("local", num_cpus=3, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.txt"
    lines = [f"row {number}" for number in range(ROWS)]
    lines[4], lines[9], lines[13] = "", "deadly", "\udcff"
    text = "".join(f"{line}\n" for line in lines)
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    return path


def job(
    source: Path, name: str = "out.jsonl", load: Callable[[], Any] = Echo, **options: Any
) -> RayJob:
    fleet = RayOptions("ray", workers=2)
    return RayJob(load, source, source.parent / name, JobOptions(shard_rows=3, **options), fleet)


def plain(source: Path, name: str = "plain.jsonl", **options: Any) -> bytes:
    Job(Echo(), source, source.parent / name, JobOptions(shard_rows=3, **options)).run()
    return (source.parent / name).read_bytes()


def joined(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.iterdir()))


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def counted(computed: Path) -> list[int]:
    return sorted(int(line) for line in computed.read_text().split())


def test_the_shards_are_the_rows_of_a_plain_job(source: Path) -> None:
    summary = job(source).run()
    out = source.parent / "out.jsonl"
    names = [f"{first:012d}.jsonl" for first in range(0, ROWS, 3)]
    assert sorted(content(out)) == names
    assert joined(out) == plain(source)
    assert (summary.rows, summary.errors) == (ROWS, {"empty": 1, "undecodable": 1})
    assert summary.first_error.startswith("row 5: ")
    record = json.loads((source.parent / "out.jsonl.summary.json").read_bytes())
    expected = json.loads((source.parent / "plain.jsonl.summary.json").read_bytes())
    assert (record["engine"], record["workers"]) == ("ray", 2)
    for name in ("rows", "errors", "first_error", "target_tokens", "fingerprint", "source_sha256"):
        assert record[name] == expected[name], name
    assert not (source.parent / "out.jsonl.job").exists()


def test_a_worker_that_is_killed_changes_nothing(source: Path, tmp_path: Path) -> None:
    job(source, "whole.jsonl").run()
    spared, computed = tmp_path / "spared", tmp_path / "computed"
    summary = job(source, load=partial(deadly, spared, computed=computed)).run()
    assert spared.exists(), "nobody was killed"
    assert content(tmp_path / "out.jsonl") == content(tmp_path / "whole.jsonl")
    assert (summary.rows, summary.resumed) == (ROWS, 0)
    # Nothing twice but the shard in which it happened.
    assert set(counted(computed)) == set(range(ROWS))
    assert {row for row in range(ROWS) if counted(computed).count(row) > 1} <= {9, 10, 11}


def test_rows_that_kill_every_worker_are_named(source: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"{MOST_TRIES} workers went down.* rows 10 to 12"):
        job(source, load=deadly).run()
    job(source, load=Echo).run()
    assert joined(tmp_path / "out.jsonl") == plain(source)


def test_a_job_goes_on_where_it_was_stopped(source: Path, tmp_path: Path) -> None:
    def stop(summary: Summary) -> None:
        raise KeyboardInterrupt

    computed, said = tmp_path / "computed", list[str]()
    with pytest.raises(KeyboardInterrupt, match=r"rows are saved in .*out\.jsonl\.job"):
        job(source).run(stop)
    folder = ShardFolder(tmp_path / "out.jsonl.job")
    before = time.monotonic()
    while not no_workers():
        time.sleep(0.1)
    print("waited", time.monotonic() - before)
    saved = {int(path.name.partition(".")[0]) for path in folder.notes.glob("*.json")}
    assert saved
    with pytest.raises(InputError, match="long_rows was error, is truncate"):
        job(source, long_rows="truncate").run()
    summary = job(source, load=partial(Echo, computed=computed)).run(say=said.append)
    assert summary.resumed == 1
    assert "rows are saved in" in said[0]
    assert {row // 3 * 3 for row in counted(computed)} == set(range(0, ROWS, 3)) - saved
    assert joined(tmp_path / "out.jsonl") == plain(source)


def no_workers() -> bool:
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
    return not any(command.startswith(b"ray::MapWorker") for command in commands)
