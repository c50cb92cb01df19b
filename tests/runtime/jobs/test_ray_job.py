"""Shards that Ray's workers write: the bytes of a plain job, whoever is killed on the way."""

import gzip
import json
import os
import pickle
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.dataset
import pyarrow.parquet
import pytest
from click.testing import CliRunner

from transferry.build_model.corpus import builtin_pairs
from transferry.cli import main
from transferry.runtime.decoding.options import GenerationOptions
from transferry.runtime.engine.result import GenerationResult, RowError
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.jobs.job import Job, Summary
from transferry.runtime.jobs.merge import merge
from transferry.runtime.jobs.options import JobOptions, RayOptions
from transferry.runtime.jobs.ray_job import (
    ENVIRONMENT,
    MOST_TRIES,
    RayJob,
    ShardFolder,
    read_shards,
)
from transferry.runtime.jobs.readers import open_source

os.environ.update(ENVIRONMENT)
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
    ) -> Iterator[GenerationResult]:
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


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def counted(computed: Path) -> list[int]:
    return sorted(int(line) for line in computed.read_text().split())


def shards(source: Path, **options: Any) -> dict[str, bytes]:
    """What has to be in the folder: the lines of a plain job, cut."""
    lines = plain(source, **options).splitlines(keepends=True)
    return {
        f"{first:012d}.jsonl": b"".join(lines[first : first + 3]) for first in range(0, ROWS, 3)
    }


def test_a_worker_that_is_killed_changes_nothing(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spared, computed = tmp_path / "spared", tmp_path / "computed"
    summary = job(source, load=partial(deadly, spared, computed=computed)).run()
    assert spared.exists(), "nobody was killed"
    assert content(tmp_path / "out.jsonl") == shards(source)
    # Nothing twice but the shard in which it happened, and none of that is lost.
    found = counted(computed)
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
        job(source, load=deadly).run()
    folder = tmp_path / "out.jsonl.job"
    saved = {int(path.name.partition(".")[0]) for path in (folder / "notes").glob("*.json")}
    assert 9 not in saved
    assert saved & {12, 15, 18}, "one worker was busy with them, the other went on"
    with pytest.raises(InputError, match="long_rows was error, is truncate"):
        job(source, long_rows="truncate").run()
    with pytest.raises(UsageError, match=r"holds (notes|shards), so it is not the folder of a job"):
        Job(Echo(), source, tmp_path / "out.jsonl").run()
    (folder / "shards" / f"{min(saved):012d}.jsonl").write_bytes(b"damaged")
    summary = job(source, load=partial(Echo, computed=computed)).run(say=said.append)
    assert summary.resumed == 1
    assert "rows are saved in" in said[0]
    # None of what was saved, but what is damaged or was in the way of it.
    again = {row // 3 * 3 for row in counted(computed)}
    assert again & saved == {min(saved)}
    assert 9 in again
    assert content(tmp_path / "out.jsonl") == shards(source)


def test_a_killed_driver_loses_no_finished_shard(fast_bundle_folder: Path, tmp_path: Path) -> None:
    """Begun on a cluster, gone on with by Ray of its own; Parquet in, by two readers, and out."""
    source, out = tmp_path / "source.parquet", tmp_path / "out.parquet"
    texts = [pair.source for pair in builtin_pairs(300, seed=7)]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts, "n": range(300)}), source)
    command = ["run", str(fast_bundle_folder), str(source), "--shard-rows", "10"]
    ours = [*command, "-o", str(out), "--engine", "ray", "--workers", "2"]
    arguments = [sys.executable, "-m", "transferry.cli", *ours]
    address = ["--ray-address", ray.get_runtime_context().gcs_address]
    with subprocess.Popen([*arguments, *address], stderr=subprocess.PIPE, text=True) as process:
        notes = tmp_path / "out.parquet.job" / "notes"
        while not any(notes.glob("*.json")):
            assert process.poll() is None, process.stderr and process.stderr.read()
            time.sleep(0.005)
        process.kill()
    assert not out.exists()
    saved = len([*notes.glob("*.json")])
    assert saved < 30
    resumed = subprocess.run(
        [*arguments, "--json"], capture_output=True, text=True, check=False, timeout=100
    )
    assert resumed.returncode == 0, resumed.stderr
    assert "this run goes on with the others" in resumed.stderr
    record = json.loads(resumed.stdout)
    assert (record["rows"], record["resumed"]) == (300, 1)
    assert len(content(out)) == 30
    assert CliRunner().invoke(main, [*command, "-o", f"{tmp_path}/plain.parquet"]).exit_code == 0
    # Whole for any reader, and joined the same file.
    expected = pyarrow.parquet.read_table(tmp_path / "plain.parquet")
    assert pyarrow.dataset.dataset(out).to_table().equals(expected)
    merge([out], tmp_path / "merged.parquet")
    same = (tmp_path / "merged.parquet").read_bytes() == (tmp_path / "plain.parquet").read_bytes()
    assert same
    before = content(tmp_path)
    again = CliRunner().invoke(main, ours)
    assert (again.exit_code, content(tmp_path), len(content(out))) == (0, before, 30)
    assert "was finished before: 300 rows" in again.stderr
    next(out.iterdir()).write_bytes(b"changed")
    refused = CliRunner().invoke(main, ours)
    assert (refused.exit_code, "exists already" in refused.stderr) == (2, True)


def test_what_a_worker_finds_wrong_is_what_the_job_says(source: Path, tmp_path: Path) -> None:
    packed = tmp_path / "source.txt.gz"
    packed.write_bytes(gzip.compress(source.read_bytes())[:-20])
    before = set(tmp_path.iterdir())
    with pytest.raises(InputError, match=r"source\.txt\.gz"):
        job(packed, max_errors=None).run()
    assert set(tmp_path.iterdir()) - before <= {tmp_path / "out.jsonl.job"}


# Without Ray: what its processes do, done here.


def answered(source: Path, **options: Any) -> tuple[RayJob, ShardFolder, list[Any]]:
    """Everything but Ray: the shards of a job, with what was counted of each."""
    here, worker = job(source, **options), job(source, **{**options, "shard": None})
    folder = ShardFolder(here.path.with_name(f"{here.path.name}.job"))
    folder.folder.mkdir(exist_ok=True)
    folder.begin(here.fingerprint, force=False)
    rows = read_shards(here.source, None, 3, here._range, 0, None)
    done = [
        worker.answer(table["first"][0].as_py(), pickle.loads(table["rows"][0].as_py()), 0, 2)
        for table in rows
    ]
    return here, folder, done


def test_the_last_shard_has_fewer_rows_than_the_others(tmp_path: Path) -> None:
    for count, expected in ((0, [0]), (2, [2]), (3, [3, 0]), (7, [3, 3, 1])):
        path = tmp_path / "rows.txt"
        path.write_text("row\n" * count)
        tables = [*read_shards(open_source(path), None, 3, (0, None), 0, None)]
        assert [len(pickle.loads(table["rows"][0].as_py())) for table in tables] == expected
        assert [table["first"][0].as_py() for table in tables] == [*range(0, count + 1, 3)]


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 50])
@pytest.mark.parametrize(("rows", "share"), [(0, None), (9, None), (20, None), (20, "2/3")])
def test_readers_read_every_row_once(
    tmp_path: Path, rows: int, share: str | None, workers: int
) -> None:
    source = tmp_path / "source.parquet"
    table = pyarrow.table({"text": [f"row {number}" for number in range(rows)]}).cast(
        pyarrow.schema([("text", pyarrow.string())])
    )
    pyarrow.parquet.write_table(table, source, row_group_size=4)
    here = job(source, shard=share)
    here._workers = workers
    found = [
        (table["first"][0].as_py(), pickle.loads(table["rows"][0].as_py()))
        for start, shards in here._ranges()
        for table in read_shards(here.source, None, 3, here._range, start, shards)
    ]
    first, last = here._range
    last = rows if last is None else last
    assert [number for number, _ in found] == [*range(first, last + 1, 3)]
    assert [row.number for _, some in found for row in some] == [*range(first, last)]


def test_shards_are_published_when_all_are_there(source: Path) -> None:
    here, folder, done = answered(source)
    here._require_all(done, folder)
    for lacking in (done[1:], done[:-1], done[:3] + done[4:], []):
        with pytest.raises(InputError, match="some rows came back from no worker"):
            here._require_all(lacking, folder)
    (folder.answers / "000000000099.jsonl").touch()
    with pytest.raises(InputError, match="fewer rows than were answered"):
        here._require_all(done, folder)


def test_a_last_shard_without_rows_is_no_file(source: Path) -> None:
    out = source.parent / "out.jsonl"
    for text in ("one\ntwo\nthree\nfour\nfive\nsix\n", "a\nb\nc\n"):
        source.write_text(text)
        here, folder, done = answered(source)
        folder.shards = done
        here._publish(folder, Summary(rows=99), {"beam": 1})
        lines = plain(source, force=True).splitlines(keepends=True)
        files = [b"".join(lines[first : first + 3]) for first in range(0, len(lines), 3)]
        assert [path.read_bytes() for path in sorted(out.iterdir())] == files, "and no others"
        again = job(source).run()
        assert (again.finished_before, again.rows) == (True, 99)
        with pytest.raises(UsageError, match="exists already, and long_rows was"):
            job(source, long_rows="truncate").run()


def test_folders_of_several_jobs_are_merged(source: Path, tmp_path: Path) -> None:
    for number in (1, 2, 3):
        here, folder, done = answered(source, name=f"{number}.jsonl", shard=f"{number}/3")
        folder.shards = done
        here._publish(folder, Summary(rows=sum(shard.rows for shard in done)), None)
    parts = [tmp_path / f"{number}.jsonl" for number in (3, 1, 2)]
    merge(parts, tmp_path / "merged.jsonl")
    assert (tmp_path / "merged.jsonl").read_bytes() == plain(source)
    next(parts[0].iterdir()).write_bytes(b"changed")
    with pytest.raises(InputError, match=r"3\.jsonl has changed since its job wrote it"):
        merge(parts, tmp_path / "again.jsonl")


def test_a_worker_refuses_what_is_not_the_job(source: Path) -> None:
    here, folder, done = answered(source)
    rows = [*here.source.rows(0, 3)]
    assert here.answer(0, rows, 7, 2) == done[0], "it was finished before"
    with pytest.raises(InputError, match=r"has changed: rows 1 to 3 are not those"):
        here.answer(0, [*here.source.rows(3, 6)], 7, 2)
    engine = Echo()
    engine.described = {**engine.described, "onnxruntime": "2.0"}
    elsewhere = job(source, load=lambda: engine)
    with pytest.raises(InputError, match=r"computes otherwise .* onnxruntime was 1\.0, is 2\.0"):
        elsewhere.answer(0, rows, 7, 2)
    folder.clear()
    with pytest.raises(InputError, match=r"sees no .*out\.jsonl\.job; let the output lie on"):
        here.answer(0, rows, 7, 2)


def test_what_it_cannot_do_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="add --engine ray"):
        RayOptions(workers=2)
    with pytest.raises(UsageError, match="workers must be at least 1"):
        RayOptions("ray", workers=0)
    with pytest.raises(UsageError, match="share files, not standard input"):
        RayJob(Echo, "-", tmp_path / "out")
    with pytest.raises(UsageError, match="have no canary"):
        job(source, canary="1/10")
    for path in (source, tmp_path):
        with pytest.raises(UsageError, match="is not a folder of shards"):
            RayJob(Echo, source, path, JobOptions(force=True))
    (tmp_path.parent / f"{tmp_path.name}.summary.json").write_text(
        json.dumps({"fingerprint": {}, "sha256": "", "rows": 0})
    )
    with pytest.raises(UsageError, match="holds the input"):
        RayJob(Echo, source, tmp_path, JobOptions(force=True))


def test_without_ray_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"transferry\[ray\]"):
        RayJob(Echo, source, tmp_path / "out.jsonl")
