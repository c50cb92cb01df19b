"""N rows in, N rows out, in order; what is written of each, and where."""

import gzip
import io
import json
import math
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.jobs.job import STANDARD_STREAM, Job, Summary
from transferry.runtime.jobs.options import JobOptions

Echo = runpy.run_path(str(Path(__file__).with_name("echo.py")))["Echo"]
LINES = ["eins zwei", "", "drei", "Straße \u2028 東京"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.txt"
    path.write_text("".join(line + "\n" for line in LINES), encoding="utf-8", newline="")
    return path


def job(
    source: Path, sink: Path, format: str | None = "jsonl", engine: Any = None, **options: Any
) -> Job:
    return Job(engine or Echo(), source, sink, JobOptions(format=cast(Any, format), **options))


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_jsonl(source: Path, tmp_path: Path) -> None:
    job(source, tmp_path / "sink.jsonl").run()
    first, empty, *others = records(tmp_path / "sink.jsonl")
    assert first == {
        "id": 0,
        "source": "eins zwei",
        "text": "EINS ZWEI",
        "score": -0.25,
        "finish_reason": "end",
        "target_tokens": 3,
        "source_tokens": 3,
    }
    assert empty == {
        "id": 1,
        "source": "",
        "text": "",
        "finish_reason": "error",
        "error": {"kind": "empty", "message": "there is no text to work on"},
        "source_tokens": 1,
    }
    assert [(item["id"], item["source"]) for item in others] == list(enumerate(LINES))[2:]
    assert others[-1]["text"] == LINES[-1].upper()
    assert "東京" in (tmp_path / "sink.jsonl").read_text(encoding="utf-8"), "readable by people"


def test_jsonl_with_n_best(source: Path, tmp_path: Path) -> None:
    options = {"beam": 2, "n_best": 2}
    job(source, tmp_path / "sink.jsonl", generation=options).run()
    first, empty, *_ = records(tmp_path / "sink.jsonl")
    assert first["text"] == "EINS ZWEI"
    assert first["n_best"] == [
        {"text": "EINS ZWEI", "score": -0.25, "finish_reason": "end"},
        {"text": "iewz snie", "score": -0.5, "finish_reason": "length"},
    ]
    assert empty["n_best"] == []


def test_jsonl_without_scores_has_null(source: Path, tmp_path: Path) -> None:
    job(source, tmp_path / "sink.jsonl", engine=Echo(score=math.nan)).run()
    assert "NaN" not in (tmp_path / "sink.jsonl").read_text(encoding="utf-8")
    first, empty, *_ = records(tmp_path / "sink.jsonl")
    assert first["score"] is None
    assert "score" not in empty


def test_text(source: Path, tmp_path: Path) -> None:
    job(source, tmp_path / "sink.txt", "text").run()
    expected = "EINS ZWEI\n\nDREI\nSTRASSE   東京\n"
    assert (tmp_path / "sink.txt").read_bytes().decode() == expected


@pytest.mark.parametrize("kind", ["text", "jsonl"])
@pytest.mark.parametrize("line_break", ["\n", "\r\n", "\r", "\n\n", "\x0b", "\x85", "\u2028"])
def test_line_breaks_in_answers_keep_the_lines_apart(
    source: Path, tmp_path: Path, kind: str, line_break: str
) -> None:
    engine = Echo(change=lambda text: f"a{line_break}b{line_break}")
    job(source, tmp_path / "sink", kind, engine=engine).run()
    assert (tmp_path / "sink").read_bytes().count(b"\n") == len(LINES)
    if kind == "text":
        found = (tmp_path / "sink").read_bytes().decode().splitlines()
        assert [" ".join(line.split()) for line in found] == ["a b", "", "a b", "a b"]
    else:
        assert records(tmp_path / "sink")[0]["text"] == f"a{line_break}b{line_break}"


@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_gzip_in_and_out(source: Path, tmp_path: Path, kind: str) -> None:
    packed = tmp_path / "source.gz"
    packed.write_bytes(gzip.compress(source.read_bytes()))
    job(source, tmp_path / "plain", kind).run()
    job(packed, tmp_path / "first.gz", kind).run()
    job(packed, tmp_path / "second.gz", kind).run()
    first = (tmp_path / "first.gz").read_bytes()
    assert gzip.decompress(first) == (tmp_path / "plain").read_bytes()
    assert (tmp_path / "second.gz").read_bytes() == first


def test_gzip_holds_no_time(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job(source, tmp_path / "first.gz").run()
    monkeypatch.setattr("time.time", lambda: 2e9)
    job(source, tmp_path / "second.gz").run()
    assert (tmp_path / "first.gz").read_bytes() == (tmp_path / "second.gz").read_bytes()


def test_summary_counts(source: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    watch = cast(
        Callable[[Summary], None], lambda summary: seen.append((summary.rows, summary.bad_rows))
    )
    summary = job(source, tmp_path / "sink").run(watch)
    assert seen == [(1, 0), (2, 1), (3, 1), (4, 1)]
    assert (summary.rows, summary.errors) == (4, {"empty": 1})
    assert summary.source_tokens == 3 + 1 + 2 + 3
    assert summary.target_tokens == 3 + 2 + 3
    assert summary.first_error == "row 2: there is no text to work on"


def test_summary_as_a_record() -> None:
    summary = Summary(
        rows=10, errors={"empty": 1}, source_tokens=50, target_tokens=40, seconds=2.0, resumed=3
    )
    summary.made = {"sha256": "ab12"}
    record = summary.to_dict()
    assert record == {
        "rows": 10,
        "bad_rows": 1,
        "errors": {"empty": 1},
        "first_error": "",
        "truncated": 0,
        "source_tokens": 50,
        "target_tokens": 40,
        "log_probability": 0.0,
        "seconds": 2.0,
        "rows_per_second": 5.0,
        "target_tokens_per_second": 20.0,
        "resumed": 3,
        "sha256": "ab12",
    }
    assert Summary.from_dict(json.loads(json.dumps(record))).to_dict() == record
    assert Summary().to_dict()["rows_per_second"] == 0.0
    assert str(summary) == "10 rows in 2.0 s, 1 errors, 5 rows/s, 20 tokens/s"


def test_an_empty_source_gives_an_empty_sink(tmp_path: Path) -> None:
    (tmp_path / "source").touch()
    assert job(tmp_path / "source", tmp_path / "sink").run().rows == 0
    assert (tmp_path / "sink").read_bytes() == b""


def test_an_existing_sink_is_kept_unless_forced(source: Path, tmp_path: Path) -> None:
    sink = tmp_path / "sink"
    sink.write_bytes(b"precious")
    with pytest.raises(UsageError, match="sink exists already; add --force to replace it"):
        job(source, sink).run()
    assert sink.read_bytes() == b"precious"
    job(source, sink, force=True).run()
    assert len(records(sink)) == len(LINES)


@pytest.mark.parametrize("force", [False, True])
def test_the_source_is_never_the_sink(source: Path, tmp_path: Path, force: bool) -> None:
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "same").hardlink_to(source)
    for sink in (source, tmp_path / "link", tmp_path / "same"):
        with pytest.raises(UsageError, match="is the input; name another file for the output"):
            job(source, sink, force=force)
    assert source.read_text(encoding="utf-8").split("\n")[0] == LINES[0]


@pytest.mark.parametrize("name", ["sink", "sink.gz"])
def test_a_failing_engine_leaves_nothing(source: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(RuntimeError, match="the device is gone"):
        job(source, tmp_path / name, engine=Echo(fail_at=1)).run()
    assert names(tmp_path) == ["source.txt"]


def test_a_failing_engine_leaves_the_old_answers(source: Path, tmp_path: Path) -> None:
    (tmp_path / "sink").write_bytes(b"old")
    with pytest.raises(RuntimeError):
        job(source, tmp_path / "sink", engine=Echo(fail_at=1), force=True).run()
    assert (tmp_path / "sink").read_bytes() == b"old"
    assert names(tmp_path) == ["sink", "source.txt"]


def test_a_source_that_breaks_off_leaves_nothing(source: Path, tmp_path: Path) -> None:
    packed = gzip.compress(source.read_bytes())
    source.write_bytes(packed[:-9])
    with pytest.raises(InputError, match=r"source\.txt: expected a whole gzip file"):
        job(source, tmp_path / "sink").run()
    assert names(tmp_path) == ["source.txt"]


def test_a_missing_folder_is_named(source: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="sink: cannot be written: No such file or directory"):
        job(source, tmp_path / "absent" / "sink").run()


def test_standard_streams(
    monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    content = "".join(line + "\n" for line in LINES).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    summary = job(STANDARD_STREAM, STANDARD_STREAM, "text").run()
    assert summary.rows == len(LINES)
    assert capsysbinary.readouterr().out.decode() == "EINS ZWEI\n\nDREI\nSTRASSE   東京\n"


def test_standard_output_is_no_file(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsysbinary: pytest.CaptureFixture[bytes],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("-").touch()
    job(source, STANDARD_STREAM).run()
    assert len(capsysbinary.readouterr().out.split(b"\n")) == len(LINES) + 1
    assert Path("-").read_bytes() == b""


def test_bytes_that_are_no_text_are_an_error_of_their_row(source: Path, tmp_path: Path) -> None:
    source.write_bytes(b"eins\ncaf\xe9\nzwei\n")
    summary = job(source, tmp_path / "sink").run()
    assert summary.errors == {"undecodable": 1}
    first, bad, last = records(tmp_path / "sink")
    assert (bad["id"], bad["source"], bad["text"]) == (1, "", "")
    assert bad["error"]["kind"] == "undecodable"
    assert (first["text"], last["text"]) == ("EINS", "ZWEI")


def test_fields_and_ids_pass_through(tmp_path: Path) -> None:
    source, sink = tmp_path / "source.tsv", tmp_path / "sink.csv"
    source.write_text("id\tde\tweight\na\teins, zwei\t0.10\nb\t\t7\n")
    job(source, sink, None, column="de").run()
    header, first, bad = sink.read_text().splitlines()
    names = "id,weight,source,text,score,finish_reason,target_tokens,source_tokens,truncated"
    assert header == f"{names},error_kind,error_message"
    assert first == 'a,0.10,"eins, zwei","EINS, ZWEI",-0.25,end,3,3,false,,'
    assert bad == "b,7,,,,error,,1,false,empty,there is no text to work on"


def test_a_field_that_the_output_cannot_hold(tmp_path: Path) -> None:
    source, sink = tmp_path / "source.jsonl", tmp_path / "sink.jsonl"
    source.write_text('{"text": "a", "x": [1]}\n{"text": "b", "score": 2}\n')
    assert job(source, sink, None).run().errors == {"fields": 1}
    good, bad = records(sink)
    assert good["x"] == [1]
    assert bad["error"]["kind"] == "fields"
    assert "score" not in bad


def test_a_summary_lies_beside_the_output(source: Path, tmp_path: Path) -> None:
    import hashlib

    sink = tmp_path / "sink.jsonl"
    done = job(source, sink, column=None, max_errors=1)
    done.run(settings={"beam": 4, "out": str(sink)})
    record = json.loads((tmp_path / "sink.jsonl.summary.json").read_bytes())
    assert record["sha256"] == hashlib.sha256(sink.read_bytes()).hexdigest()
    assert record["fingerprint"] == done.fingerprint
    assert record["fingerprint"]["beam"] == 1
    assert not {"max_errors", "force", "replicas"} & record["fingerprint"].keys()
    assert (record["rows"], record["bad_rows"], record["errors"]) == (4, 1, {"empty": 1})
    settings = (tmp_path / "sink.jsonl.settings.toml").read_text()
    assert settings.startswith("beam = 4\n")
    assert f'sha256 = "{record["sha256"]}"' in settings
    assert names(tmp_path) == sorted(
        ["sink.jsonl", "sink.jsonl.settings.toml", "sink.jsonl.summary.json", "source.txt"]
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shard": "0/2"}, "shard must be I/N, such as 1/4 up to 4/4, found '0/2'"),
        ({"shard": "3/2"}, "shard must be I/N"),
        ({"shard": "half"}, "shard must be I/N"),
        ({"shard_rows": 0}, "shard-rows must be at least 1, not 0"),
        ({"max_errors": -1}, "max-errors must be at least 0, not -1"),
        ({"task": "embed", "generation": {"beam": 4}}, "generates nothing, so beam has no effect"),
        ({"task": "score", "canary": "1/2"}, "task score has no canary"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        JobOptions(**options)


def test_a_shard_of_standard_input_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="so it cannot be stdin"):
        job(STANDARD_STREAM, tmp_path / "sink", shard="1/2")
