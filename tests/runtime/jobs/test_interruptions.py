"""Whatever stops a job, the same job again ends with the same bytes, and does nothing twice."""

import contextlib
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.jobs.helpers import Echo, computed_rows, make_job, names, run, write_rows
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.jobs.job import Job
from transferry.runtime.jobs.job_options import JobOptions
from transferry.runtime.jobs.plan import Runner
from transferry.runtime.jobs.summary import Summary

CHECKOUT = Path(__file__).parents[3]
ROWS = 11
OTHER = Echo()
OTHER.described["manifest_sha256"] = "cd34"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Eleven rows, the fifth of them empty."""
    (tmp_path / "folder").mkdir()
    return write_rows(tmp_path / "folder" / "input.txt", ROWS)


def stop(source: Path, at: int, **options: Any) -> None:
    """Runs a job that breaks down at a row."""
    with pytest.raises(RuntimeError, match="the device is gone"):
        run(source, engine=Echo(fail_at=at, **options))


def finish_as_if_never_stopped(source: Path) -> Summary:
    summary = make_job(source).run()
    assert source.with_name("out.jsonl").read_bytes() == run(source, "whole.jsonl")
    assert not source.with_name("out.jsonl.job").exists()
    return summary


@pytest.mark.parametrize(
    ("name", "every"),
    [
        ("jsonl", 3),
        *(pytest.param(name, 1, marks=pytest.mark.thorough) for name in ("jsonl", "csv.gz")),
        ("parquet", 9),
    ],
)
def test_a_job_that_is_killed_at_any_step(source: Path, name: str, every: int) -> None:
    if name == "parquet":
        pytest.importorskip("pyarrow", reason="pyarrow is an optional extra")
    program = [sys.executable, "-m", "tests.runtime.jobs.killed_job"]
    arguments = [str(source.parent), f"out.{name}", str(every)]
    done = subprocess.run(
        [*program, *arguments], cwd=CHECKOUT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.splitlines()[-1]) > 50, "what is patched is what the job calls"


def test_the_summary_tells_of_the_whole_job(source: Path) -> None:
    lines = source.read_text().splitlines()
    lines[3] = lines[0]  # of another chunk
    lines[7:10] = [lines[6], *lines[0:1], lines[6]]
    source.write_text("".join(f"{line}\n" for line in lines))
    whole = make_job(source, "whole.jsonl").run()
    stop(source, 7)
    said: list[str] = []
    summary = make_job(source).run(say=said.append)
    saved = f"6 rows are saved in {source.parent}/out.jsonl.job"
    settings = "task generate, chunk-rows 3"
    assert said[0].startswith(
        f"{saved}; this run computes the rest, from row 7 on, with {settings}"
    )
    assert (summary.rows, summary.errors, summary.saved) == (ROWS, {"empty": 1}, ROWS)
    assert summary.first_error == "row 5: there is no text to work on"
    assert whole.repeated == 1
    for name in ("source_tokens", "target_tokens", "repeated"):
        assert getattr(summary, name) == getattr(whole, name)
    assert (whole.resumed, summary.resumed) == (0, 1)
    assert json.loads((source.parent / "out.jsonl.summary.json").read_bytes())["resumed"] == 1


@pytest.mark.parametrize("lost", [False, True])
def test_rows_are_computed_once(
    source: Path, tmp_path: Path, lost: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Unless the disk promised more than it kept."""
    computed = tmp_path / "computed"
    stop(source, 10, computed=computed)
    assert computed_rows(computed) == [*range(ROWS)]
    if lost:
        (source.with_name("out.jsonl.job") / "000000" / "00000001.part").unlink()
    with caplog.at_level("INFO", "transferry"):
        make_job(source, engine=Echo(computed=computed)).run()

    assert computed_rows(computed) == [*range(3 if lost else 9, ROWS)]
    note = "2 finished chunks are damaged or gone and will be computed again"
    assert (caplog.messages[0] == note) is lost
    assert source.with_name("out.jsonl").read_bytes() == run(source, "whole.jsonl")


def test_a_finished_job_is_not_done_again(source: Path, tmp_path: Path) -> None:
    first = make_job(source).run()
    before = {path: path.stat().st_mtime_ns for path in source.parent.iterdir()}
    computed = tmp_path / "computed"
    again = make_job(source, engine=Echo(computed=computed)).run()
    assert computed_rows(computed) == []
    assert again.finished_before
    assert not first.finished_before
    assert again.to_dict() == first.to_dict()
    assert again.bad_rows == 1
    assert {path: path.stat().st_mtime_ns for path in source.parent.iterdir()} == before
    run(source, engine=Echo(computed=computed), force=True)
    assert computed_rows(computed) == [*range(ROWS)]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("output", ", and has changed since a job wrote it, so it is not replaced"),
        ("no summary", ", and no job wrote it, so it is not replaced"),
        ("input", ", and .*input.txt has changed since; add force"),
        ("option", ", and beam was 1, is 2; add force"),
        ("version", ", and job format was 6, is 5 in this version of transferry; add force"),
    ],
)
def test_another_output_is_not_taken_for_the_jobs(source: Path, change: str, reason: str) -> None:
    content, summary = run(source), source.with_name("out.jsonl.summary.json")
    if change == "output":
        source.with_name("out.jsonl").write_bytes(content + b"\n")
    elif change == "input":
        source.write_text(source.read_text() + "one more\n")
    elif change == "version":
        summary.write_text(summary.read_text().replace('"job_format": 5', '"job_format": 6'))
    elif change == "no summary":
        summary.unlink()
    options: dict[str, Any] = {"generation": {"beam": 2}} if change == "option" else {}
    with pytest.raises(UsageError, match=f"out.jsonl exists already{reason}"):
        run(source, **options)
    assert "out.jsonl.job" not in names(source.parent)


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        ({"generation": {"beam": 5}}, "beam was 1, is 5"),
        ({"chunk_rows": 4}, "chunk_rows was 3, is 4"),
        ({"prefix": "a"}, r"prefix was \[\], is \[97\]"),
        ({"long_rows": "truncate"}, "long_rows was error, is truncate"),
        ({"partition": "1/1"}, "partition was not set, is 1/1; rows was not set"),
        ({"format": "text"}, "was jsonl.*, is text"),
        ({"engine": OTHER}, "manifest_sha256 was ab12, is cd34"),
    ],
)
def test_another_option_is_refused_by_name(
    source: Path, options: dict[str, Any], difference: str
) -> None:
    stop(source, 7)
    with pytest.raises(InputError, match=f"holds 6 rows of a job .*: .*{difference}.* or add fo"):
        make_job(source, **options).run()
    assert make_job(source).run().resumed == 1


@pytest.mark.parametrize("options", [{"max_errors": 5}, {"force": True}])
def test_what_changes_no_result_may_change(source: Path, options: dict[str, Any]) -> None:
    stop(source, 7)
    assert make_job(source, **options).run().resumed == 1


@pytest.mark.parametrize(
    ("row", "line", "expected"),
    [
        (0, "row -0", "rows 1 to 3 are not those"),
        (4, "filled", "rows 4 to 6 are not those"),
        (9, "further on", None),  # nobody answered it yet
    ],
)
def test_another_input_is_refused(source: Path, row: int, line: str, expected: str | None) -> None:
    stop(source, 7)
    content = source.read_text()
    lines = content.splitlines()
    lines[row] = line
    source.write_text("".join(f"{text}\n" for text in lines))
    if expected is None:
        assert len(run(source).splitlines()) == ROWS
        return
    with pytest.raises(InputError, match=f"input.txt has changed: {expected}"):
        make_job(source).run()
    source.write_text(content)
    assert make_job(source).run().resumed == 1


def test_of_several_inputs_the_changed_one_is_named(source: Path) -> None:
    files = [write_rows(source.with_name(f"{name}.txt"), 5) for name in "abc"]
    out = source.with_name("out.jsonl")

    def job(**engine: Any) -> Job:
        return Job(Echo(**engine), files, out, JobOptions(chunk_rows=3))

    def refused(row: int) -> str:
        content = (file := files[row // 5]).read_text()
        file.write_text(content.replace(f"row {row % 5}", "changed"))
        with pytest.raises((InputError, UsageError)) as raised:
            job().run()
        file.write_text(content)
        told = re.search(r"(one of )?\S+(, \S+)* has changed", str(raised.value))
        assert told is not None
        return told[0].replace(f"{source.parent}/", "")

    with pytest.raises(RuntimeError, match="the device is gone"):
        job(fail_at=14).run()
    assert refused(0) == "a.txt has changed"
    assert refused(3) == "one of a.txt, b.txt has changed", "a chunk of both"
    assert refused(7) == "b.txt has changed"
    assert refused(11) == "one of b.txt, c.txt has changed"
    assert job().run().resumed == 1
    assert refused(11) == "one of a.txt, b.txt, c.txt has changed"


def test_a_shorter_and_a_longer_input_are_refused(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Runner, "publish", interrupt)
        make_job(source).run()
    content = source.read_text()
    source.write_text(content + "more\n")
    with pytest.raises(InputError, match="has grown since its end was computed"):
        make_job(source).run()
    source.write_text("".join(content.splitlines(keepends=True)[:-1]))
    with pytest.raises(InputError, match="has changed: rows 10 to 11"):
        make_job(source).run()
    source.write_text(content)
    assert make_job(source).run().rows == ROWS


def test_two_at_once(source: Path) -> None:
    refused = []

    def watch(summary: Summary) -> None:
        if summary.rows == 5:
            with pytest.raises(UsageError, match="is in use: another job writes the same output"):
                make_job(source).run()
            refused.append(summary.rows)

    assert make_job(source).run(watch).rows == ROWS
    assert refused == [5]


def test_too_many_errors_stop_it(source: Path) -> None:
    source.write_text("a\n\nb\n\nc\n\nd\n")
    with pytest.raises(InputError, match=r"more than 1 rows are bad, .* row 2: .*; 3 rows"):
        make_job(source, max_errors=1).run()
    assert names(source.parent) == {"input.txt", "out.jsonl.job"}
    for most in (0, 2):
        with pytest.raises(InputError, match=f"more than {most} rows are bad"):
            make_job(source, max_errors=most).run()
    summary = make_job(source, max_errors=3).run()
    assert (summary.rows, summary.bad_rows, summary.resumed) == (7, 3, 1)


@pytest.mark.parametrize(
    ("at", "said"), [(8, r"^6 rows are saved in .*out\.jsonl\.job$"), (0, r"^$")]
)
def test_an_interruption_says_what_is_saved(source: Path, at: int, said: str) -> None:
    """Nothing stays where nothing is saved."""

    def watch(summary: Summary) -> None:
        if summary.rows == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match=said):
        make_job(source).run(watch)
    assert at or names(source.parent) == {"input.txt"}
    assert finish_as_if_never_stopped(source).rows == ROWS


def fill(source: Path, limited: Callable[[], contextlib.AbstractContextManager[None]]) -> str:
    """Runs a job where there is too little room, and then where there is enough."""
    with limited(), pytest.raises(InputError, match=r"out\.jsonl: cannot be written: ") as failure:
        make_job(source).run()
    assert finish_as_if_never_stopped(source).rows == ROWS
    return str(failure.value)


@pytest.mark.parametrize("limit", [0, 10, 100, 400, 600, 700, 1100])
def test_a_file_that_may_not_grow(
    source: Path, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job file, a part, the journal, the output, and the files beside it."""
    # Else Python would keep what it could write of a compiled module.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    @contextlib.contextmanager
    def limited() -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    message = fill(source, limited)
    saved = "rows are saved in" in message
    assert saved or "nothing was written. Free some space or choose another place." in message


@pytest.mark.parametrize("pages", [4, 5, 6, 7, 8])
def test_a_full_disk(source: Path, pages: int, tmp_path: Path) -> None:
    """A file system of a few pages of 4 KiB, which then gets room for more."""
    size = os.sysconf("SC_PAGESIZE")
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={pages * size}", "tmpfs", str(disk)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")
    try:
        line = "x" * 300  # a chunk fills a page
        source = disk / "input.txt"
        source.write_text("".join(f"{number} {line}\n" for number in range(ROWS)))

        @contextlib.contextmanager
        def limited() -> Iterator[None]:
            yield
            subprocess.run(["mount", "-o", "remount,size=10m", str(disk)], check=True)

        fill(source, limited)
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
