"""Chunks that workers of Ray write: the bytes of a plain job, whoever is killed on the way."""

import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.dataset
import pyarrow.parquet
import pytest

from tests.commands import PATIENCE, call, done
from tests.runtime.jobs import helpers
from tests.runtime.jobs.helpers import (
    Deadly,
    Echo,
    computed_rows,
    joined,
    make_job,
    run,
    write_rows,
)
from transferry.build_model.train.corpus import builtin_pairs
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.jobs.distribution import MOST_TRIES
from transferry.runtime.jobs.job import Job
from transferry.runtime.jobs.job_options import JobOptions, RayOptions
from transferry.runtime.jobs.merge import merge
from transferry.runtime.jobs.ray_job import ENVIRONMENT, ray_job

os.environ.update(ENVIRONMENT)
ray = pytest.importorskip("ray", reason="ray is absent; `make test-all` installs it")
pytestmark = pytest.mark.optional("ray")
ROWS = 20


@pytest.fixture(scope="module", autouse=True)
def two_workers() -> Iterator[None]:
    """Ray on this machine, with a core for each of two workers."""
    for module in (sys.modules[__name__], helpers):
        ray.cloudpickle.register_pickle_by_value(module)
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = write_rows(tmp_path / "source.txt", ROWS)
    text = path.read_bytes()
    path.write_bytes(text.replace(b"row 9\n", b"deadly\n").replace(b"row 13", b"\xff"))
    return path


def by_ray(
    source: Path, name: str = "out.jsonl", load: Callable[[], Any] = Echo, **options: Any
) -> Job:
    chosen = JobOptions(chunk_rows=3, **options)
    return ray_job(load, source, source.parent / name, chosen, RayOptions("ray", workers=2))


def content(folder: Path) -> dict[str, bytes]:
    """Bytes of the files of a folder, but for the manifest of its chunks."""
    paths = (path for path in folder.iterdir() if path.is_file() and path.name[0] != "_")
    return {path.name: path.read_bytes() for path in paths}


def saved_chunks(folder: Path) -> set[int]:
    journal = folder / "journal.jsonl"
    lines = journal.read_bytes().splitlines() if journal.exists() else []
    return {json.loads(line)["first"] for line in lines}


def test_a_worker_that_is_killed_changes_nothing(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spared, computed = tmp_path / "spared", tmp_path / "computed"
    summary = by_ray(source, load=partial(Deadly, spared, computed=computed)).run()
    assert spared.exists(), "nobody was killed"
    assert joined(tmp_path / "out.jsonl") == run(source, "plain.jsonl")
    # Nothing twice but the chunk in which it happened, and no row is lost.
    found = computed_rows(computed)
    assert set(found) == set(range(ROWS))
    assert {row for row in found if found.count(row) > 1} <= {9, 10, 11}
    assert (summary.rows, summary.errors) == (ROWS, {"empty": 1, "undecodable": 1})
    assert summary.first_error.startswith("row 5: ")
    record = json.loads((tmp_path / "out.jsonl.summary.json").read_bytes())
    expected = json.loads((tmp_path / "plain.jsonl.summary.json").read_bytes())
    assert (record["engine"], record["workers"], record["resumed"]) == ("ray", 2, 0)
    for name in ("rows", "errors", "first_error", "target_tokens", "fingerprint", "source_sha256"):
        assert record[name] == expected[name], name
    assert not (tmp_path / "out.jsonl.job").exists()
    assert capsys.readouterr().out == "", "what Ray has to tell belongs on stderr"


def test_a_job_goes_on_where_it_was_stopped(source: Path, tmp_path: Path) -> None:
    """Here by rows that take down whoever answers them."""
    computed, said = tmp_path / "computed", list[str]()
    message = rf"{MOST_TRIES} workers went down.* rows 10 to 12\. .*rows are saved in .*\.job"
    with pytest.raises(InputError, match=message):
        by_ray(source, load=Deadly).run()
    folder = tmp_path / "out.jsonl.job"
    saved = saved_chunks(folder)
    assert 9 not in saved
    assert saved & {12, 15, 18}, "one worker was busy with them, the other went on"
    with pytest.raises(InputError, match="long_rows was error, is truncate"):
        by_ray(source, long_rows="truncate").run()
    with pytest.raises(UsageError, match="so it is not the folder of a job"):
        make_job(source).run()
    (folder / "chunks" / "000000" / f"{min(saved):012d}.jsonl").write_bytes(b"damaged")
    summary = by_ray(source, load=partial(Echo, computed=computed)).run(say=said.append)
    assert summary.resumed == 1
    assert "rows are saved in" in " ".join(said)
    # No saved chunk, only damaged files and those in their way.
    again = {row // 3 * 3 for row in computed_rows(computed)}
    assert again & saved == {min(saved)}
    assert 9 in again
    assert joined(tmp_path / "out.jsonl") == run(source, "plain.jsonl")


def test_a_killed_driver_loses_no_finished_chunk(fast_bundle_folder: Path, tmp_path: Path) -> None:
    """Begun on a cluster, gone on with by Ray of its own; Parquet in and out."""
    source, out = tmp_path / "source.parquet", tmp_path / "out.parquet"
    texts = [pair.source for pair in builtin_pairs(300, seed=7)]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts, "n": range(300)}), source)
    command = ["run", str(fast_bundle_folder), str(source), "--chunk-rows", "10"]
    ours = [*command, "-o", str(out), "--engine", "ray", "--workers", "2"]
    arguments = [sys.executable, "-m", "transferry.cli", *ours]
    address = ["--ray-address", ray.get_runtime_context().gcs_address]
    with subprocess.Popen([*arguments, *address], stderr=subprocess.PIPE, text=True) as process:
        while not (saved := len(saved_chunks(tmp_path / "out.parquet.job"))):
            assert process.poll() is None, process.stderr and process.stderr.read()
            time.sleep(0.005)
        process.kill()
    assert not out.exists()
    assert saved < 30
    resumed = subprocess.run(
        [*arguments, "--json"], capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    assert resumed.returncode == 0, resumed.stderr
    assert "this run computes the rest" in resumed.stderr
    assert "logging.cc" not in resumed.stderr
    record = json.loads(resumed.stdout)
    assert (record["rows"], record["resumed"]) == (300, 1)
    assert len(content(out)) == 30
    done(*command, "-o", tmp_path / "plain.parquet")
    # Whole for any reader, and joined the same file.
    expected = pyarrow.parquet.read_table(tmp_path / "plain.parquet")
    assert pyarrow.dataset.dataset(out).to_table().equals(expected)
    merge([out], tmp_path / "merged.parquet")
    merged = (tmp_path / "merged.parquet").read_bytes()
    assert merged == (tmp_path / "plain.parquet").read_bytes()
    before = content(tmp_path)
    again = call(*ours)
    assert (again.exit_code, content(tmp_path), len(content(out))) == (0, before, 30)
    assert "was finished before: 300 rows" in again.stderr
    next(out.glob("*.parquet")).write_bytes(b"changed")
    refused = call(*ours)
    assert (refused.exit_code, "exists already" in refused.stderr) == (2, True)


def test_what_a_worker_finds_wrong_is_what_the_job_says(source: Path, tmp_path: Path) -> None:
    packed = tmp_path / "source.txt.gz"
    packed.write_bytes(gzip.compress(source.read_bytes())[:-20])
    before = set(tmp_path.iterdir())
    with pytest.raises(InputError, match=r"source\.txt\.gz"):
        by_ray(packed, max_errors=None).run()
    assert set(tmp_path.iterdir()) - before <= {tmp_path / "out.jsonl.job"}


def test_what_it_cannot_do_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="add engine ray"):
        RayOptions(workers=2)
    with pytest.raises(UsageError, match="workers must be at least 1"):
        RayOptions("ray", workers=0)
    os.mkfifo(tmp_path / "pipe")
    for given, out in (("-", "out"), (tmp_path / "pipe", "out"), (source, "-")):
        with pytest.raises(UsageError, match="share files, not standard input"):
            ray_job(Echo, given, out)
    with pytest.raises(UsageError, match="have no canary"):
        by_ray(source, canary="1/10")
    for path in (source, tmp_path):
        with pytest.raises(UsageError, match="is not a folder of chunks"):
            ray_job(Echo, source, path, JobOptions(force=True))
    (tmp_path.parent / f"{tmp_path.name}.summary.json").write_text(
        json.dumps({"fingerprint": {}, "sha256": "", "rows": 0})
    )
    with pytest.raises(UsageError, match="holds the input"):
        ray_job(Echo, source, tmp_path, JobOptions(force=True))


def test_without_ray_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"\[ray\]"):
        ray_job(Echo, source, tmp_path / "out.jsonl")
