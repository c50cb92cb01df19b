"""N lines in, N lines out, in order; the file of answers appears whole or not at all."""

import gzip
import io
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest

from transferry.runtime.engine import Engine, Output, Result
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.jobs import (
    STANDARD_STREAM,
    Format,
    Job,
    Summary,
    generation,
    guess_format,
)
from transferry.runtime.options import GenerationOptions
from transferry.runtime.rows import RowError

LINES = ["eins zwei", "", "drei", "Straße \u2028 東京"]


class Echo(Engine):
    """Answers a text with itself in capitals, then reversed; an empty one with an error."""

    def __init__(self, change: Callable[[str], str] = str.upper) -> None:
        self.change = change

    def generate(
        self,
        texts: Iterable[str],
        options: GenerationOptions | None = None,
        *,
        first_row: int = 0,
    ) -> Iterator[Result]:
        for text in texts:
            length = len(text.split()) + 1
            if not text:
                yield Result(text, length, (), RowError("empty", "there is no text to work on"))
                continue
            best = Output(self.change(text), (7,) * length, -0.25000004, -1.5, "end")
            second = Output(text[::-1], (8, 9), -0.5, -1.0, "length")
            yield Result(text, length, (best, second)[: options.n_best if options else 1])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.txt"
    path.write_text("".join(line + "\n" for line in LINES), encoding="utf-8", newline="")
    return path


def job(source: Path, sink: Path, kind: Format = "jsonl", **fields: Any) -> Job[Result]:
    defaults: dict[str, Any] = {"engine": Echo(), "options": GenerationOptions()}
    return generation(source=source, sink=sink, format=kind, **(defaults | fields))


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
    options = GenerationOptions(beam=2, n_best=2)
    job(source, tmp_path / "sink.jsonl", options=options).run()
    first, empty, *_ = records(tmp_path / "sink.jsonl")
    assert first["text"] == "EINS ZWEI"
    assert first["n_best"] == [
        {"text": "EINS ZWEI", "score": -0.25, "finish_reason": "end"},
        {"text": "iewz snie", "score": -0.5, "finish_reason": "length"},
    ]
    assert empty["n_best"] == []


def test_jsonl_without_scores_has_null(source: Path, tmp_path: Path) -> None:
    class Unscored(Echo):
        def generate(self, *arguments: Any, **named: Any) -> Iterator[Result]:
            for result in super().generate(*arguments, **named):
                outputs = [
                    replace(output, score=math.nan, log_probability=math.nan)
                    for output in result.outputs
                ]
                yield replace(result, outputs=tuple(outputs))

    job(source, tmp_path / "sink.jsonl", engine=Unscored()).run()
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
    source: Path, tmp_path: Path, kind: Format, line_break: str
) -> None:
    engine = Echo(lambda text: f"a{line_break}b{line_break}")
    job(source, tmp_path / "sink", kind, engine=engine).run()
    assert (tmp_path / "sink").read_bytes().count(b"\n") == len(LINES)
    if kind == "text":
        found = (tmp_path / "sink").read_bytes().decode().splitlines()
        assert [" ".join(line.split()) for line in found] == ["a b", "", "a b", "a b"]
    else:
        assert records(tmp_path / "sink")[0]["text"] == f"a{line_break}b{line_break}"


@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_gzip_in_and_out(source: Path, tmp_path: Path, kind: Format) -> None:
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
        Callable[[Summary], None], lambda summary: seen.append((summary.rows, summary.errors))
    )
    summary = job(source, tmp_path / "sink").run(watch)
    assert seen == [(1, 0), (2, 1), (3, 1), (4, 1)]
    assert (summary.rows, summary.errors) == (4, 1)
    assert summary.source_tokens == 3 + 1 + 2 + 3
    assert summary.target_tokens == 3 + 2 + 3
    assert summary.first_error == "line 2: there is no text to work on"


def test_summary_as_a_record() -> None:
    summary = Summary(rows=10, errors=1, source_tokens=50, target_tokens=40, seconds=2.0)
    assert summary.to_dict() == {
        "rows": 10,
        "errors": 1,
        "source_tokens": 50,
        "target_tokens": 40,
        "seconds": 2.0,
        "rows_per_second": 5.0,
        "target_tokens_per_second": 20.0,
    }
    assert Summary().to_dict()["rows_per_second"] == 0.0


def test_an_empty_source_gives_an_empty_sink(tmp_path: Path) -> None:
    (tmp_path / "source").touch()
    assert job(tmp_path / "source", tmp_path / "sink").run().rows == 0
    assert (tmp_path / "sink").read_bytes() == b""


def test_an_existing_sink_is_kept_unless_forced(source: Path, tmp_path: Path) -> None:
    sink = tmp_path / "sink"
    sink.write_bytes(b"precious")
    with pytest.raises(UsageError, match="sink exists already; add --force to replace it"):
        job(source, sink)
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


class Failing(Echo):
    def generate(
        self,
        texts: Iterable[str],
        options: GenerationOptions | None = None,
        *,
        first_row: int = 0,
    ) -> Iterator[Result]:
        results = super().generate(texts, options)
        yield next(results)
        raise RuntimeError("the device is gone")


@pytest.mark.parametrize("name", ["sink", "sink.gz"])
def test_a_failing_engine_leaves_nothing(source: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(RuntimeError, match="the device is gone"):
        job(source, tmp_path / name, engine=Failing()).run()
    assert names(tmp_path) == ["source.txt"]


def test_a_failing_engine_leaves_the_old_answers(source: Path, tmp_path: Path) -> None:
    (tmp_path / "sink").write_bytes(b"old")
    with pytest.raises(RuntimeError):
        job(source, tmp_path / "sink", engine=Failing(), force=True).run()
    assert (tmp_path / "sink").read_bytes() == b"old"
    assert names(tmp_path) == ["sink", "source.txt"]


def test_a_bad_line_leaves_nothing(source: Path, tmp_path: Path) -> None:
    source.write_bytes(b"eins\ncaf\xe9\n")
    with pytest.raises(InputError, match=r"source\.txt, line 2: expected UTF-8"):
        job(source, tmp_path / "sink").run()
    assert names(tmp_path) == ["source.txt"]


class FullDisk(io.FileIO):
    """A file that exists, on a disk that has no room for its content."""

    def write(self, data: Any) -> int:
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("name", ["sink", "sink.gz"])
def test_a_full_disk_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    part_seen = []

    def open_on_full_disk(path: Path, mode: str = "r") -> BinaryIO:
        if path.suffix != ".part":
            return cast(BinaryIO, open(path, mode))  # noqa: PTH123
        file = io.BufferedWriter(FullDisk(path, "w"), buffer_size=16)
        part_seen.append(path.exists())
        return cast(BinaryIO, file)

    monkeypatch.setattr(Path, "open", open_on_full_disk)
    with pytest.raises(InputError, match=rf"{name}: cannot be written: No space left on device"):
        job(source, tmp_path / name).run()
    assert part_seen == [True]
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


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.jsonl", "jsonl"),
        ("a.jsonl.gz", "jsonl"),
        ("a.de", "text"),
        ("a.gz", "text"),
        ("-", "text"),
        ("jsonl", "text"),
    ],
)
def test_format_follows_the_name(name: str, expected: Format) -> None:
    assert guess_format(Path(name)) == expected
