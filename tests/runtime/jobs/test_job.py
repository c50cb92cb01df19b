"""N rows in, N rows out, in order; what is written of each, and where."""

import gzip
import hashlib
import io
import json
import os
import sys
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.jobs.helpers import Echo, contents, make_job, names, read_records, run
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.engine import open_bundle
from transferry.runtime.engine.tasks.table import TASKS, option_names
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.io.outputs import STANDARD_STREAM
from transferry.runtime.jobs.job import Job
from transferry.runtime.jobs.job_options import JobOptions
from transferry.runtime.jobs.summary import Summary
from transferry.runtime.settings import listed

LINES = ["eins zwei", "", "drei", "Straße \u2028 東京"]
CANARY = "canary must be 1/N, such as 1/1000, found '"
AS_TEXT = "EINS ZWEI\n\nDREI\nSTRASSE   東京\n"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.txt"
    path.write_text("".join(line + "\n" for line in LINES), encoding="utf-8", newline="")
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def test_jsonl(source: Path, out: Path) -> None:
    assert "東京".encode() in run(source), "readable by people"
    first, empty, *others = read_records(out)
    assert [*first.items()] == [
        *(("id", 0), ("source", "eins zwei"), ("text", "EINS ZWEI"), ("score", -0.25000004)),
        *(("finish_reason", "end"), ("target_tokens", 3), ("source_tokens", 3)),
    ]
    error = {"kind": "empty", "message": "there is no text to work on"}
    nothing = dict(id=1, source="", text="", finish_reason="error", error=error, source_tokens=1)
    assert empty == nothing
    assert [(record["id"], record["source"]) for record in others] == list(enumerate(LINES))[2:]
    assert others[-1]["text"] == LINES[-1].upper()


@pytest.mark.parametrize("name", ["out.xlsx", "out.json", "out.xlsx.gz", "out.arrow", "a.md5"])
def test_a_format_that_is_unknown_is_refused(source: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"no output format \w+; let the name end in one of .jso"):
        make_job(source, name)
    assert names(source.parent) == {source.name}
    run(source, name, format="jsonl")


@pytest.mark.parametrize("name", ["out", "out.txt", "out.de", "out.pt-BR", "out.deu_Latn", "o.2"])
def test_text_has_many_names(source: Path, name: str) -> None:
    assert run(source, name).decode() == AS_TEXT


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
@pytest.mark.parametrize("line_break", ["\n", "\r\n", "\r", "\n\n", "\x0b", "\x85", "\u2028"])
def test_line_breaks_in_outputs_keep_the_lines_apart(
    source: Path, kind: str, line_break: str
) -> None:
    engine = Echo(change=lambda text: f"a{line_break}b{line_break}")
    found = run(source, f"out.{kind}", engine=engine)
    assert found.count(b"\n") == len(LINES)
    if kind == "txt":
        lines = found.decode().splitlines()
        assert [" ".join(line.split()) for line in lines] == ["a b", "", "a b", "a b"]
    else:
        assert json.loads(found.split(b"\n")[0])["text"] == f"a{line_break}b{line_break}"


def test_summary_counts(source: Path) -> None:
    seen: list[tuple[int, int]] = []
    summary = make_job(source).run(lambda summary: seen.append((summary.rows, summary.bad_rows)))
    # It is called while a row is awaited, too.
    counts = [counts for counts in dict.fromkeys(seen) if counts[0]]
    assert counts == [(1, 0), (2, 1), (3, 1), (4, 1)]
    assert (summary.rows, summary.errors) == (4, {"empty": 1})
    assert summary.source_tokens == 3 + 1 + 2 + 3
    assert summary.target_tokens == 3 + 2 + 3
    assert summary.first_error == "row 2: there is no text to work on"


def test_summary_as_a_record() -> None:
    summary = Summary(rows=10, bad_rows=1, errors={"empty": 1}, seconds=2.0, resumed=3)
    summary.source_tokens, summary.target_tokens = 50, 40
    summary.made = {"sha256": "ab12"}
    record = summary.to_dict()
    counts = dict(rows=10, bad_rows=1, errors={"empty": 1}, first_error="", truncated=0, repeated=0)
    tokens = dict(source_tokens=50, target_tokens=40, shared_prompt_tokens=0, seconds=2.0)
    tokens["special_texts"] = 0
    rates = dict(rows_per_second=5.0, target_tokens_per_second=20.0, resumed=3, sha256="ab12")
    assert record == {**counts, **tokens, **rates}
    assert Summary.from_dict(json.loads(json.dumps(record))).to_dict() == record
    assert Summary().to_dict()["rows_per_second"] == 0.0
    assert str(summary) == "10 rows in 2.0 s, 1 error, 5 rows/s, 20 tokens/s"


def test_an_existing_output_is_kept_unless_forced(source: Path, out: Path) -> None:
    run(source)
    before = contents(out.parent)
    beam = {"beam": 2}
    with pytest.raises(UsageError, match=r"out\.jsonl exists already, and .*; add force to rep"):
        run(source, generation=beam)
    with pytest.raises(RuntimeError, match="the device is gone"):
        run(source, engine=Echo(fail_at=1), generation=beam, force=True)
    assert contents(out.parent) == before
    run(source, generation=beam, force=True)
    assert len(read_records(out)) == len(LINES)
    assert contents(out.parent) != before


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("out.jsonl", "exists already, and no job wrote it"),
        ("out.jsonl.summary.json", "was not written by transferry"),
        ("out.jsonl.settings.toml", "was not written by transferry"),
        ("out.jsonl.job", "is not a folder"),
        ("out.jsonl.job/photo.part", "holds photo.part, so it is not the folder of a job"),
        ("out.jsonl.job/job.json", "holds job.json, which is not of a job"),
        ("out.jsonl.job/journal.jsonl", "holds journal.jsonl, which is not of a job"),
    ],
)
def test_nothing_is_replaced_that_no_job_wrote(
    source: Path, out: Path, name: str, message: str, force: bool
) -> None:
    path = out.parent / name
    path.parent.mkdir(exist_ok=True)
    path.write_text('{"dear": "to somebody"}\n')
    before = contents(out.parent)
    with pytest.raises(UsageError, match=f"{message}, so it is not replaced"):
        run(source, force=force)
    assert contents(out.parent) == before


def test_an_edited_output_is_not_replaced(source: Path, out: Path) -> None:
    run(source)
    out.write_bytes(out.read_bytes().replace(b"EINS", b"BETTER"))
    before = contents(out.parent)
    with pytest.raises(UsageError, match="has changed since a job wrote it, so it is not repl"):
        run(source, force=True)
    assert contents(out.parent) == before


def test_an_output_that_appears_during_the_job_is_not_replaced(source: Path, out: Path) -> None:
    def write(summary: Summary) -> None:
        out.write_text("dear to somebody")

    with pytest.raises(UsageError, match=r"no job wrote it, so it is not replaced; .* 4 rows are"):
        make_job(source).run(write)
    assert out.read_text() == "dear to somebody"
    out.unlink()
    assert make_job(source).run().resumed == 1


@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_is_not_replaced(source: Path, out: Path, dangling: bool) -> None:
    run(source, "first.jsonl")
    out.symlink_to("nowhere" if dangling else "first.jsonl")
    before = contents(out.parent)
    with pytest.raises(UsageError, match=r"out\.jsonl is a symbolic link, so it is not replaced"):
        run(source, force=True)
    assert contents(out.parent) == before
    assert out.is_symlink()


@pytest.mark.parametrize("suffix", [".summary.json", ".settings.toml", ".job"])
@pytest.mark.parametrize("side", ["text", "target"])
def test_an_input_is_not_replaced_by_what_lies_beside_the_output(
    source: Path, out: Path, suffix: str, side: str
) -> None:
    moved = source.rename(f"{out}{suffix}")
    texts = (moved, None) if side == "text" else ("-", moved)
    with pytest.raises(UsageError, match=f"out.jsonl{suffix} is the input; name another"):
        Job(Echo(), texts[0], out, JobOptions("score", target=texts[1], force=True))
    assert names(out.parent) == {moved.name}


def test_an_output_does_not_go_into_the_bundle(source: Path, tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    (tmp_path / "link").symlink_to("bundle")
    for folder in ("bundle", "link", "bundle/../link"):
        with pytest.raises(UsageError, match=r"out\.jsonl lies in .*bundle, which is the input"):
            Job(tmp_path / "bundle", source, tmp_path / folder / "out.jsonl")


@pytest.mark.parametrize("force", [False, True])
def test_the_input_is_never_the_output(source: Path, tmp_path: Path, force: bool) -> None:
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "same").hardlink_to(source)
    for output in (source, "link", "same"):
        with pytest.raises(UsageError, match="is the input; name another file for the output"):
            make_job(source, output, force=force)
    os.mkfifo(pipe := tmp_path / "pipe")  # like /dev/null, which root could replace
    for output in (tmp_path, pipe):
        with pytest.raises(UsageError, match="is not a file, so it is not replaced"):
            make_job(source, output, force=force)
    assert source.read_text(encoding="utf-8").split("\n")[0] == LINES[0]


def test_a_failing_engine_or_an_input_that_breaks_off_leaves_nothing(
    source: Path, tmp_path: Path
) -> None:
    for name in ("out.jsonl", "out.txt.gz"):
        with pytest.raises(RuntimeError, match="the device is gone"):
            run(source, name, engine=Echo(fail_at=1))
        assert names(tmp_path) == {"source.txt"}
    source.write_bytes(gzip.compress(source.read_bytes())[:-9])
    with pytest.raises(InputError, match=r"source\.txt: expected a whole gzip file"):
        run(source)
    assert names(tmp_path) == {"source.txt"}


def test_standard_streams(
    monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("-").touch()
    content = "".join(line + "\n" for line in LINES).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    assert make_job(STANDARD_STREAM, STANDARD_STREAM).run().rows == len(LINES)
    assert capsysbinary.readouterr().out.decode() == AS_TEXT
    assert Path("-").read_bytes() == b"", "standard output is no file"


def test_a_summary_lies_beside_the_output(source: Path, out: Path) -> None:
    done = make_job(source, column=None, max_errors=1)
    done.run(settings={"beam": 4, "out": str(out)})
    record = json.loads(out.with_name("out.jsonl.summary.json").read_bytes())
    assert record["sha256"] == hashlib.sha256(out.read_bytes()).hexdigest()
    assert record["fingerprint"] == done.fingerprint
    assert record["fingerprint"]["beam"] == 1
    assert not {"max_errors", "force", "replicas"} & record["fingerprint"].keys()
    assert (record["rows"], record["bad_rows"], record["errors"]) == (4, 1, {"empty": 1})
    settings = out.with_name("out.jsonl.settings.toml").read_text()
    assert settings.startswith("beam = 4\n")
    assert f'sha256 = "{record["sha256"]}"' in settings
    beside = {"out.jsonl", "out.jsonl.settings.toml", "out.jsonl.summary.json"}
    assert names(out.parent) == {"source.txt", *beside}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"partition": "0/2"},
            "partition must be I/N, such as 1/4 up to 4/4, or auto, found",
        ),
        ({"partition": "3/2"}, "partition must be I/N"),
        ({"partition": ""}, "partition must be I/N"),
        ({"chunk_rows": 0}, "chunk_rows must be at least 1, found 0"),
        ({"max_errors": -1}, "max_errors must be at least 0, found -1"),
        ({"column": {"a", "b"}}, "column must be a list, found"),
        ({"keep": ["a", "\ud800"]}, r"keep must be UTF-8, found '\\ud800'"),
        ({"task": "embed", "generation": {"beam": 4}}, "beam has no effect on task embed"),
        ({"task": "score", "canary": "1/2"}, "canary has no effect on task score"),
        *(({"canary": text}, CANARY) for text in ("", "1000", "2/3", "1/0", "1/-4", "1/x")),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        JobOptions(**options)


# An option of each kind, with a value that is not its default.
CHOSEN: dict[str, Any] = {
    **dict.fromkeys(("source_language", "target_language", "source_language_column"), "x"),
    **dict.fromkeys(("target_language_column", "prefix", "system", "messages", "prompt_ids"), "x"),
    **dict.fromkeys(("prompt", "pair", "mask", "chat_template_kwargs"), "x"),
    "generation": {"beam": 2},
    "chat": True,
    "suppress": ("x",),
    "pooling": "first",
    "normalise": True,
    "aggregation": "simple",
    "handle_impossible_answer": True,
    **dict.fromkeys(("top", "max_answer_len", "doc_stride", "max_seq_len"), 2),
    "target": Path("x"),
}


def test_a_task_refuses_the_options_of_others() -> None:
    owned = {name: option_names(task) - {"long_rows"} for name, task in TASKS.items()}
    assert set().union(*owned.values()) == CHOSEN.keys()
    for task, option in product(owned, CHOSEN):
        shown = "beam" if option == "generation" else option
        options: dict[str, Any] = {"task": task, option: CHOSEN[option]}
        if option not in owned[task]:
            takers = listed([name for name in owned if option in owned[name]], "and")
            with pytest.raises(UsageError) as refused:
                JobOptions(**options)
            assert f"{shown} has no effect on task {task}, only on {takers};" in str(refused.value)


def test_an_engine_is_watched_by_its_job_alone(source: Path) -> None:
    """Whoever goes on with the engine does not move the progress of a job that has ended."""
    engine = Echo()
    during: list[Any] = []
    job = make_job(source, engine=engine)
    job.run(lambda summary: during.append(vars(engine).get("_waiting")))
    # The first call is made before any row.
    assert len(during) > 1
    assert not {None, open_bundle._nothing} & {*during[1:]}
    assert engine._waiting is open_bundle._nothing


def test_an_engine_that_loses_a_result_ends_the_job(tmp_path: Path) -> None:
    class Losing(Echo):
        def generate(self, *given: Any, **named: Any) -> Any:
            results = list(super().generate(*given, **named))
            return (result for result in results[:-1])

    source = tmp_path / "in.txt"
    source.write_text("a\nb\nc\n")
    with pytest.raises(ValueError, match="1 rows have no result"):
        Job(Losing(), source, tmp_path / "out.txt", JobOptions()).run()


@pytest.mark.parametrize("place", ["bundle", "inputs", "output", "target"])
@pytest.mark.parametrize(
    "value", [b"a", 3, "a\0b", Path("a\0b"), Path("\ud800"), None, ["a", "\0"]]
)
def test_a_path_of_another_type_is_refused(source: Path, out: Path, place: str, value: Any) -> None:
    given: dict[str, Any] = {"bundle": Echo(), "inputs": source, "output": out, "target": None}
    given[place] = value
    if place == "target" and value is None:
        return
    with pytest.raises(UsageError, match=f"{place} must be a path, found "):
        options = JobOptions(task="score", target=given.pop("target"))
        Job(given["bundle"], given["inputs"], given["output"], options)


def test_generation_options_replace_all_of_the_bundle(source: Path, out: Path) -> None:
    chosen = GenerationOptions(beam=2, prefix=(7,))
    job = make_job(source, out.name, generation=chosen)
    assert job.task.generation == chosen
    assert make_job(source, out.name, generation=asdict(chosen)).fingerprint == job.fingerprint


@pytest.mark.parametrize("name", ["watch", "say", "settings"])
def test_a_run_with_an_argument_of_another_type_is_refused(
    name: str, source: Path, out: Path
) -> None:
    given: dict[str, Any] = {name: "x"}
    with pytest.raises(UsageError, match=f"{name} must be (Callable|Mapping), found 'x'"):
        make_job(source, out.name).run(**given)
    assert not out.exists()


def test_a_job_runs_once(source: Path, out: Path) -> None:
    """Its readers are at the end; another Job finds the output."""
    job = make_job(source, out.name)
    job.run()
    with pytest.raises(UsageError, match="a Job runs once"):
        job.run()
    assert make_job(source, out.name).run().finished_before
