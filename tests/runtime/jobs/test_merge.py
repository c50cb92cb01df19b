"""The shards of several machines are one output, if they are all there and of one job."""

import json
import random
import runpy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.jobs.job import Job
from transferry.runtime.jobs.merge import merge
from transferry.runtime.jobs.options import JobOptions

Echo = runpy.run_path(str(Path(__file__).with_name("echo.py")))["Echo"]
ROWS = 11


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.tsv"
    lines = [f"{number}\ttext {number}" if number != 4 else "4\t" for number in range(ROWS)]
    path.write_text("".join(f"{line}\n" for line in ["weight\ttext", *lines]))
    return path


def run(source: Path, sink: Path, shard: str | None = None, **options: Any) -> Path:
    Job(Echo(), source, sink, JobOptions(shard=shard, shard_rows=3, **options)).run()
    return sink


def shards(source: Path, number: int, suffix: str = ".jsonl", **options: Any) -> list[Path]:
    return [
        run(source, source.with_name(f"{n}of{number}{suffix}"), f"{n}/{number}", **options)
        for n in range(1, number + 1)
    ]


@pytest.mark.parametrize("number", [1, 2, 3, 11, 13])
def test_shards_are_the_rows_of_one_machine(source: Path, number: int, tmp_path: Path) -> None:
    parts = shards(source, number)
    whole = run(source, tmp_path / "whole.jsonl")
    assert b"".join(part.read_bytes() for part in parts) == whole.read_bytes()
    random.Random(0).shuffle(parts)
    out = tmp_path / "out.jsonl"
    summary = merge(parts, out)
    assert out.read_bytes() == whole.read_bytes()
    assert (summary.rows, summary.errors) == (ROWS, {"empty": 1})
    assert summary.first_error == "row 5: there is no text to work on"
    record = json.loads((tmp_path / "out.jsonl.summary.json").read_bytes())
    alone = json.loads((tmp_path / "whole.jsonl.summary.json").read_bytes())
    assert record["sha256"] == alone["sha256"]
    assert record["source_tokens"] == alone["source_tokens"]


@pytest.mark.parametrize("suffix", [".txt", ".tsv", ".csv", ".jsonl.gz", ".csv.zst", ".parquet"])
def test_every_format_is_joined(source: Path, suffix: str, tmp_path: Path) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow", reason="pyarrow is an optional extra")
    if suffix.endswith(".zst"):
        pytest.importorskip("zstandard", reason="zstandard is an optional extra")
    options: dict[str, Any] = {"generation": {"beam": 2, "n_best": 2}}
    whole = run(source, tmp_path / f"whole{suffix}", **options)
    out = tmp_path / f"out{suffix}"
    merge(shards(source, 3, suffix, **options), out)
    assert out.read_bytes() == whole.read_bytes()


def test_a_shard_is_gone_on_with(source: Path, tmp_path: Path) -> None:
    options = JobOptions(shard="2/2", shard_rows=3)
    sink = tmp_path / "2of2.jsonl"
    with pytest.raises(RuntimeError):
        Job(Echo(fail_at=9), source, sink, options).run()
    assert Job(Echo(), source, sink, options).run().resumed == 1
    assert Job(Echo(), source, sink, options).run().finished_before
    assert [json.loads(line)["id"] for line in sink.read_text().splitlines()] == [*range(5, 11)]


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("missing", InputError, "shard 1/3, 3/3 is missing; give the outputs of all 3"),
        ("doubled", InputError, "1of3.jsonl and .*copy.jsonl are both shard 1/3; give each"),
        ("other beam", InputError, "are not of the same job: beam was 1, is 2"),
        ("other input", InputError, "are not of the same job: input_sha256 was .*, is "),
        ("other number", InputError, "are not of the same job: shards was 3, is 4"),
        ("changed", InputError, r"2of3.jsonl has changed .*, or run --shard 2/3 again"),
        ("no summary", InputError, r"2of3.jsonl has no 2of3.jsonl.summary.json beside it"),
        ("no shard", InputError, "whole.jsonl is no shard: its job ran without --shard"),
        ("existing", UsageError, "out.jsonl exists already; add --force to replace it"),
        ("itself", UsageError, "1of3.jsonl is one of the shards; name another file"),
        ("compression", UsageError, "must be compressed as .*; let its name end in no .gz or .zst"),
    ],
)
def test_what_is_not_one_job_is_refused(
    source: Path, tmp_path: Path, fault: str, error: type[Exception], message: str
) -> None:
    parts, out = shards(source, 3), tmp_path / "out.jsonl"
    if fault == "missing":
        parts = parts[1:2]
    elif fault == "doubled":
        copy = tmp_path / "copy.jsonl"
        for suffix in ("", ".summary.json"):
            shutil.copy(f"{parts[0]}{suffix}", f"{copy}{suffix}")
        parts.append(copy)
    elif fault == "other beam":
        parts[1] = run(source, tmp_path / "other.jsonl", "2/3", generation={"beam": 2})
    elif fault == "other input":
        source.write_text(source.read_text().replace("text 9", "text 8"))
        parts[1] = run(source, tmp_path / "other.jsonl", "2/3")
    elif fault == "other number":
        parts[1] = run(source, tmp_path / "other.jsonl", "2/4")
    elif fault == "changed":
        parts[1].write_bytes(parts[1].read_bytes()[:-1])
    elif fault == "no summary":
        Path(f"{parts[1]}.summary.json").unlink()
    elif fault == "no shard":
        parts[1] = run(source, tmp_path / "whole.jsonl")
    elif fault == "existing":
        out.write_text("dear to somebody")
    elif fault == "itself":
        out = parts[0]
    else:
        out = tmp_path / "out.jsonl.gz"
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(error, match=message):
        merge(parts, out)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_merge_that_was_done_is_done(source: Path, tmp_path: Path) -> None:
    parts, out = shards(source, 2), tmp_path / "out.jsonl"
    first = merge(parts, out)
    again = merge(parts, out)
    assert again.finished_before
    assert again.to_dict() == first.to_dict()
    out.write_text("dear to somebody")
    with pytest.raises(UsageError, match="exists already"):
        merge(parts, out)
    assert not merge(parts, out, force=True).finished_before


@pytest.mark.parametrize("suffix", [".npy", ".parquet"])
def test_vectors_are_joined(
    reader_bundle_folder: Path, source: Path, tmp_path: Path, suffix: str
) -> None:
    parts = []
    for shard in (None, "1/2", "2/2"):
        parts.append(tmp_path / f"{(shard or 'whole').replace('/', 'of')}{suffix}")
        options = JobOptions("embed", shard=shard, shard_rows=2)
        Job(reader_bundle_folder, source, parts[-1], options).run()
    out = tmp_path / f"out{suffix}"
    merge(parts[1:], out)
    np.testing.assert_allclose(vectors(out), vectors(parts[0]), atol=1e-5)
    assert np.isnan(vectors(out)).any(axis=1).tolist() == [row == 4 for row in range(ROWS)]


def vectors(path: Path) -> Any:
    if path.suffix == ".npy":
        return np.load(path)
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is an optional extra")
    column = parquet.read_table(path)["vector"].to_pylist()
    return np.array([[np.nan] * 32 if vector is None else vector for vector in column])
