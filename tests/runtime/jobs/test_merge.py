"""The partitions of several machines are one output, if they are all there and of one job."""

import gzip
import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from tests.runtime.jobs.helpers import (
    Echo,
    LocalRunner,
    by_workers,
    contents,
    run,
)
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.io.whole import sha256
from transferry.runtime.jobs.formats.remote_file import RemoteFile
from transferry.runtime.jobs.formats.sources import open_sources
from transferry.runtime.jobs.job import Job
from transferry.runtime.jobs.job_options import JobOptions, scheduled
from transferry.runtime.jobs.merge import merge
from transferry.runtime.jobs.summary import Summary

ROWS = 11


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.tsv"
    lines = [f"{number}\ttext {number}" if number != 4 else "4\t" for number in range(ROWS)]
    path.write_text("".join(f"{line}\n" for line in ["weight\ttext", *lines]))
    return path


def partitions(source: Path, count: int, suffix: str = ".jsonl", **options: Any) -> list[Path]:
    paths = [source.with_name(f"{n}of{count}{suffix}") for n in range(1, count + 1)]
    for number, path in enumerate(paths, start=1):
        run(source, path, partition=f"{number}/{count}", **options)
    return paths


@pytest.mark.parametrize("count", [1, 2, 13])
def test_partitions_are_the_rows_of_one_machine(source: Path, count: int, tmp_path: Path) -> None:
    whole, by = run(source, "whole.jsonl"), "rows" if count == 2 else None
    parts = partitions(source, count, partition_by=by)
    lacking = re.sub(rb'"id": \d+', b'"id": null', whole)
    assert b"".join(part.read_bytes() for part in parts) == (whole if by else lacking)
    random.Random(0).shuffle(parts)
    out = tmp_path / "out.jsonl"
    summary = merge(parts, out)
    assert out.read_bytes() == whole
    assert not (tmp_path / ".transferry-lines").exists()
    assert (summary.rows, summary.errors) == (ROWS, {"empty": 1})
    assert summary.first_error == "row 5: there is no text to work on"
    record = json.loads((tmp_path / "out.jsonl.summary.json").read_bytes())
    alone = json.loads((tmp_path / "whole.jsonl.summary.json").read_bytes())
    for name in ("sha256", "source_tokens"):
        assert record[name] == alone[name]


@pytest.mark.parametrize("suffix", [".txt", ".tsv", ".csv", ".jsonl.gz", ".csv.zst", ".parquet"])
def test_every_format_is_joined(source: Path, suffix: str, tmp_path: Path) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow", reason="pyarrow is an optional extra")
    if suffix.endswith(".zst"):
        pytest.importorskip("zstandard", reason="zstandard is an optional extra")
    n_best = 1 if suffix == ".txt" else 2
    options: dict[str, Any] = {"generation": {"beam": 2, "n_best": n_best}}
    out = tmp_path / f"out{suffix}"
    merge(partitions(source, 3, suffix, **options), out)
    assert out.read_bytes() == run(source, f"whole{suffix}", **options)


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("doubled", InputError, "1of3.jsonl and .*copy.jsonl are both partition 1/3; give each"),
        ("other beam", InputError, "are not of the same job: beam was 1, is 2"),
        ("other input", InputError, "are not of the same job: input_sha256 was .*, is "),
        ("other number", InputError, "are not of the same job: partitions was 3, is 4"),
        ("other version", InputError, "2of3.jsonl was written by .*: expected job format 5, found"),
        ("no summary", InputError, r"2of3.jsonl has no 2of3.jsonl.summary.json beside it"),
        ("no partition", InputError, "whole.jsonl is not a partition: its job ran without part"),
        ("existing", UsageError, "out.jsonl exists already, and no merge wrote it, so it is not"),
        ("itself", UsageError, "1of3.jsonl is one of the partitions; name another file"),
        ("format", UsageError, "out.csv must have the format of .*; let its name end in .jsonl"),
        ("compression", UsageError, "must be compressed as .*; let its name end in no .gz or .zst"),
    ],
)
def test_what_is_not_one_job_is_refused(
    source: Path, tmp_path: Path, fault: str, error: type[Exception], message: str
) -> None:
    parts, out = partitions(source, 3), tmp_path / "out.jsonl"
    others: dict[str, dict[str, Any]] = {
        "other beam": {"partition": "2/3", "generation": {"beam": 2}},
        "other input": {"partition": "2/3"},
        "other number": {"partition": "2/4"},
        "no partition": {},
    }
    summary = tmp_path / "2of3.jsonl.summary.json"
    if fault in others:
        if fault == "other input":
            source.write_text(source.read_text().replace("text 9", "text 99"))
        parts[1] = tmp_path / "whole.jsonl"
        run(source, parts[1], **others[fault])
    elif fault == "doubled":
        parts.append(tmp_path / "copy.jsonl")
        for suffix in ("", ".summary.json"):
            shutil.copy(f"{parts[0]}{suffix}", f"{parts[-1]}{suffix}")
    elif fault == "other version":
        summary.write_text(summary.read_text().replace('"job_format": 5,', ""))
    elif fault == "no summary":
        summary.unlink()
    elif fault == "existing":
        out.write_text("dear to somebody")
    elif fault == "itself":
        out = parts[0]
    else:
        out = tmp_path / {"compression": "out.jsonl.gz", "format": "out.csv"}[fault]
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    with pytest.raises(error, match=message):
        merge(parts, out)
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


def test_a_merge_takes_texts_for_paths(source: Path, tmp_path: Path) -> None:
    for number in (1, 2):
        run(source, tmp_path / f"{number}.jsonl", partition=f"{number}/2")
    out: Any = str(tmp_path / "out.jsonl")
    parts: Any = [str(tmp_path / f"{number}.jsonl") for number in (1, 2)]
    assert merge(parts, out).rows == len(Path(out).read_bytes().splitlines())
    refused: list[tuple[Any, str]] = [([], "found none"), (parts[0], "several"), ([3], "a path")]
    for wrong, told in refused:
        with pytest.raises(UsageError, match=told):
            merge(wrong, out)


def test_a_merge_that_was_done_is_done(source: Path, tmp_path: Path) -> None:
    parts, out = partitions(source, 2), tmp_path / "out.jsonl"
    first = merge(parts, out)
    again = merge(parts, out)
    assert again.finished_before
    assert again.to_dict() == first.to_dict()
    assert not merge(parts, out, force=True).finished_before
    out.write_text("dear to somebody")
    for force in (False, True):
        with pytest.raises(UsageError, match="has changed since a merge wrote it, so it is not"):
            merge(parts, out, force=force)
    assert out.read_text() == "dear to somebody"


def test_a_merge_replaces_a_merge_by_force_only(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    merge(partitions(source, 2), out)
    parts = partitions(source, 3)
    with pytest.raises(UsageError, match="exists already; add force to replace it"):
        merge(parts, out)
    assert not merge(parts, out, force=True).finished_before
    whole = tmp_path / "whole.jsonl"
    run(source, whole)
    with pytest.raises(UsageError, match="no merge wrote it, so it is not replaced"):
        merge(parts, whole, force=True)


def test_a_merge_does_not_replace_the_summary_of_a_partition(source: Path, tmp_path: Path) -> None:
    parts = partitions(source, 2)
    before = contents(tmp_path)
    for name in ("1of2.jsonl.summary.json", "1of2.jsonl"):
        with pytest.raises(UsageError, match=f"{name} is one of the partitions"):
            merge(parts, tmp_path / name, force=True)
    assert contents(tmp_path) == before


def test_a_merge_goes_to_standard_output(
    source: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    parts = partitions(source, 2, ".csv.gz")
    before = contents(tmp_path)
    assert merge(parts, Path("-")).rows == ROWS
    assert capfdbinary.readouterr().out == run(source, "whole.csv")
    whole = {f"{tmp_path / 'whole.csv'}{suffix}" for suffix in ("", ".summary.json")}
    assert contents(tmp_path).keys() - before.keys() == whole


@pytest.mark.parametrize("suffix", [".npy", ".parquet"])
def test_vectors_are_joined(
    reader_bundle_folder: Path, source: Path, tmp_path: Path, suffix: str
) -> None:
    whole, *parts = (tmp_path / f"{name}{suffix}" for name in ("whole", "1of2", "2of2"))
    for path, partition in ((whole, None), (parts[0], "1/2"), (parts[1], "2/2")):
        options = JobOptions("embed", partition=partition, chunk_rows=2)
        Job(reader_bundle_folder, source, path, options).run()
    out = tmp_path / f"out{suffix}"
    merge(parts, out)
    np.testing.assert_allclose(vectors(out), vectors(whole), atol=1e-5)
    assert np.isnan(vectors(out)).any(axis=1).tolist() == [row == 4 for row in range(ROWS)]


def vectors(path: Path) -> Any:
    if path.suffix == ".npy":
        return np.load(path)
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is an optional extra")
    column = parquet.read_table(path)["vector"].to_pylist()
    return np.array([[np.nan] * 32 if vector is None else vector for vector in column])


@pytest.mark.parametrize("form", ["jsonl", "txt.gz", "parquet"])
def test_partitions_by_file(tmp_path: Path, form: str) -> None:
    """Some are empty; formats that are read from their start, too."""
    sources = [tmp_path / f"in-{number}.{form}" for number in range(3)]
    for number, path in enumerate(sources):
        lines = [f"row {number} {each}" for each in range(5 + number)]
        if form == "parquet":
            pyarrow = pytest.importorskip("pyarrow")
            parquet = pytest.importorskip("pyarrow.parquet")
            parquet.write_table(pyarrow.table({"text": lines}), path, row_group_size=2)
        elif form == "jsonl":
            path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
        else:
            path.write_bytes(gzip.compress("\n".join(lines).encode()))
    Job(Echo(), sources, tmp_path / "whole.jsonl", JobOptions(chunk_rows=3)).run()
    parts = [tmp_path / f"{number}.jsonl" for number in (1, 2, 3, 4)]
    for number, part in enumerate(parts, start=1):
        options = JobOptions(chunk_rows=3, partition=f"{number}/4", partition_by="file")
        Job(Echo(), sources, part, options).run()
    assert [len(part.read_bytes().splitlines()) for part in parts] == [0, 5, 6, 7]
    merge(parts, tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    Job(Echo(), sources, parts[1], JobOptions(chunk_rows=3, partition="2/4", force=True)).run()
    with pytest.raises(InputError, match=r"(begins at |of the same kind).*partition_by"):
        merge(parts, tmp_path / "again.jsonl")


def slurm(number: int, count: int, first: int, last: int, step: int = 1) -> dict[str, str]:
    values = {"ID": number, "COUNT": count, "MIN": first, "MAX": last, "STEP": step}
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in values.items()}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (slurm(7, 4, 5, 8), "3/4"),
        (slurm(4, 5, 0, 8, 2), "3/5"),
        (slurm(7, 4, 0, 3), "SLURM_ARRAY_TASK_ID is 7"),
        (slurm(3, 3, 1, 7), "SLURM_ARRAY_TASK_COUNT 3: expected an array without gaps"),
        ({"JOB_COMPLETION_INDEX": "0", "JOB_COMPLETIONS": "9"}, "1/9"),
        ({"JOB_COMPLETION_INDEX": "0"}, "JOB_COMPLETIONS is no number; set it to the number"),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "3"}, "3/3"),
        ({}, "auto needs a variable of a scheduler: SLURM_ARRAY_TASK_ID, JOB_COMPLETION_INDEX"),
    ],
)
def test_a_scheduler_tells_the_partition(environment: dict[str, str], expected: str) -> None:
    if "/" in expected:
        assert scheduled(environment) == expected
        return
    with pytest.raises(UsageError, match=expected):
        scheduled(environment)


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet"])
def test_partitions_stay_a_folder_of_parts(source: Path, tmp_path: Path, form: str) -> None:
    """They read as one table; a partition without rows is no part."""
    run(source, f"whole.{form}", limit=2)
    whole = read_table(tmp_path / f"whole.{form}")
    parts, out = partitions(source, 3, f".{form}", limit=2), tmp_path / f"out.{form}"
    before = [part.read_bytes() for part in parts]
    summary = merge(parts, out, keep_parts=True)
    assert summary.rows == 2
    listed = json.loads((out / "_manifest.json").read_bytes())["parts"]
    assert [part["rows"] for part in listed] == [1, 1]
    files = [out / part["name"] for part in listed]
    assert files == sorted(path for path in out.iterdir() if path.name != "_manifest.json")
    for path, part in zip(files, listed, strict=True):
        found = path.stat().st_size, sha256(path)
        assert found == (part["bytes"], part["sha256"])
    assert pandas.concat([read_table(path) for path in files], ignore_index=True).equals(whole)
    if form == "parquet":
        assert pandas.read_parquet(out).equals(whole)
    assert open_sources(out) == files
    assert merge(parts, out, keep_parts=True).finished_before
    with pytest.raises(UsageError, match="is one of the partitions"):
        merge(parts, parts[0], keep_parts=True, force=True)
    files[1].unlink()
    files[1].write_bytes(b"changed")
    with pytest.raises(UsageError, match="has changed since a merge wrote it"):
        merge(parts, out, keep_parts=True, force=True)
    assert [part.read_bytes() for part in parts] == before


def read_table(path: Path) -> Any:
    if path.suffix == ".jsonl":
        return pandas.read_json(path, lines=True)
    return pandas.read_csv(path) if path.suffix == ".csv" else pandas.read_parquet(path)


def test_a_folder_of_ray_is_kept_as_it_is(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "ray.jsonl"
    by_workers(source, out)
    merge([out], tmp_path / "kept.jsonl", keep_parts=True)
    names = ("000000000000.jsonl", "000000000003.jsonl", "_manifest.json")
    for name in names:
        assert (tmp_path / "kept.jsonl" / name).read_bytes() == (out / name).read_bytes()


@pytest.fixture
def elsewhere(tmp_path: Path) -> str:
    """A folder by URL, through fsspec."""
    pytest.importorskip("fsspec", reason="fsspec, for URLs, is not installed")
    return f"file://{tmp_path / 'there'}"


def stored(url: str) -> bytes:
    """The rows of a folder elsewhere, as its manifest lists them."""
    folder = Path(url.removeprefix("file://"))
    listed = json.loads((folder / "_manifest.json").read_bytes())["parts"]
    found = {part["name"] for part in listed}
    assert found == {path.name for path in folder.iterdir() if path.name[0] != "_"}
    return b"".join((folder / part["name"]).read_bytes() for part in listed)


@pytest.mark.parametrize("workers", [False, True])
def test_an_output_elsewhere(
    source: Path, tmp_path: Path, elsewhere: str, monkeypatch: pytest.MonkeyPatch, workers: bool
) -> None:
    """A folder of parts, whose job folder lies here; replaced by force alone."""
    monkeypatch.chdir(tmp_path)
    whole, url = run(source, "whole.jsonl"), f"{elsewhere}.jsonl"

    def job(engine: Echo | None = None, **options: Any) -> Job:
        runner = LocalRunner() if workers else None
        return Job(engine or Echo(), source, url, JobOptions(chunk_rows=3, **options), runner)

    if not workers:
        with pytest.raises(RuntimeError):
            job(Echo(fail_at=9)).run()
        assert not any((tmp_path / "there.jsonl").iterdir())
    summary = job().run(settings={"a": 1})
    assert summary.resumed == (not workers)
    assert stored(url) == whole
    assert not (tmp_path / "there.jsonl.job").exists()
    record = json.loads((tmp_path / "there.jsonl" / "_summary.json").read_bytes())
    assert record["rows"] == ROWS
    assert job().run().finished_before
    with pytest.raises(UsageError, match="exists already, and limit was not set, is 4; add fo"):
        job(limit=4).run()
    with pytest.raises(UsageError, match="holds the output of another job; add force"):
        job(partition="1/2").run()
    job(force=True, limit=4).run()
    assert stored(url) == b"".join(whole.splitlines(keepends=True)[:4])
    (tmp_path / "there.jsonl" / "notes.txt").write_text("dear to somebody")
    with pytest.raises(UsageError, match=r"holds notes\.txt, which transferry did not write"):
        job(force=True).run()
    with pytest.raises(InputError, match="cannot be written: there is no such bucket or folder"):
        Job(Echo(), source, f"{elsewhere}/absent/out.jsonl").run()


def test_partitions_meet_elsewhere(
    source: Path, tmp_path: Path, elsewhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one completes the output, whichever it is, killed before or not."""
    monkeypatch.chdir(tmp_path)
    whole, url, notes = run(source, "whole.jsonl"), f"{elsewhere}.jsonl", list[str]()

    def part(number: int, **options: Any) -> Summary:
        chosen = JobOptions(chunk_rows=3, partition=f"{number}/3", **options)
        return Job(Echo(), source, url, chosen).run(say=notes.append)

    part(3)
    part(1)
    assert [note.partition(" in ")[0] for note in notes] == [
        "2 of 3 partitions are still missing",
        "1 of 3 partitions are still missing",
    ]
    with pytest.raises(UsageError, match="holds the output of another job; add force"):
        part(2, generation={"beam": 2})
    part(2)
    assert stored(url) == whole
    record = json.loads((tmp_path / "there.jsonl" / "_summary.json").read_bytes())
    assert (record["rows"], record["errors"]) == (ROWS, {"empty": 1})
    # A process killed before it completed the output is run again; parts that were cut off, too.
    (tmp_path / "there.jsonl" / "_manifest.json").unlink()
    assert part(1).finished_before
    assert stored(url) == whole
    (tmp_path / "there.jsonl" / "_manifest.2-of-3.json").unlink()
    (tmp_path / "there.jsonl" / "_manifest.json").unlink()
    cut = next((tmp_path / "there.jsonl").glob("000000000003-*"))
    cut.write_bytes(cut.read_bytes()[:9])
    part(2)
    assert stored(url) == whole
    for number in (1, 2, 3):
        part(number, force=True, generation={"beam": 2})
        if number < 3:
            assert not (tmp_path / "there.jsonl" / "_manifest.json").exists()
    assert b'"score"' in stored(url)
    assert "is not complete" in notes[-1] or "are not of the same job" in "".join(notes)
    merge(partitions(source, 2), RemoteFile(f"{elsewhere}.merged"))
    assert stored(f"{elsewhere}.merged") == whole
