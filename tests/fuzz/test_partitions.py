"""Partitions of random files, cut at any byte, merge into the output of the plain job."""

import csv
import io
import json
import random
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import THOROUGH
from tests.end_to_end.files import read_rows
from tests.runtime.jobs.helpers import Echo, LocalRunner
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.jobs.job import Job
from transferry.runtime.jobs.job_options import JobOptions
from transferry.runtime.jobs.merge import merge

TRIALS = 80 if THOROUGH else 4
PIECES = ["a", "b ", "é", "東", "\u2028", '"', ",", ";", "'", "\t", "\0", "\r", "longer " * 9]


def text(draw: random.Random) -> str:
    return "".join(draw.choices(PIECES, k=draw.randrange(9)))


def table(draw: random.Random, end: str) -> str:
    """CSV with line breaks in cells that look like rows, bad rows and unclosed quotation marks."""
    file, dialect = io.StringIO(newline=""), draw.choice(["excel", "unix"])  # unix quotes all
    writer = csv.writer(file, dialect, delimiter=draw.choice(",;"), lineterminator=end)
    breaks = draw.choice([[""], ["", "\n", "\n1,2\n", "\r\n"]])
    writer.writerow(["id", "text"])
    for number in range(draw.randrange(30)):
        writer.writerow([number, text(draw) + draw.choice(breaks) + text(draw)])
        if draw.random() < 0.04:
            file.write(draw.choice(['bad,"x"y', "one", '9,"open']) + end)
    return file.getvalue()


def value(draw: random.Random) -> Any:
    """A value of JSON."""
    plain = [None, True, 0, 2**64, -0.0, 1e300, 5e-324, "", "007", text(draw), text(draw)]
    return draw.choice([*plain, [], {}, [draw.choice(plain)], {text(draw): draw.choice(plain)}])


def require_fields(files: list[Path], out: Path) -> None:
    """A field of every row comes back, as JSON in a table, or the row has an error."""
    lines = [line for file in files for line in io.BytesIO(file.read_bytes())]
    for line, record in zip(lines, read_rows(out), strict=True):
        fields = json.loads(line.decode("utf-8-sig")) if b"{" in line else {"note": None}
        wanted = json.dumps(fields["note"], ensure_ascii=False)
        kept, note = record.get("note"), fields["note"]
        if "id" in fields and not (record.get("error") or record.get("error_kind")):
            given, found = fields["id"], record["id"]
            same = found == given and type(found) is type(given)
            if out.suffix != ".jsonl" and not same:
                given = given if isinstance(given, str) else json.dumps(given)
                same = str(found) == given
            assert same or fields["id"] is None, line
        if out.suffix == ".jsonl":
            kept = json.dumps(kept, ensure_ascii=False)
        elif isinstance(note, str) or note is None:
            wanted = note or ""
        if kept != wanted:
            assert (kept or "null") == "null", line
            assert note is None or record.get("error") or record.get("error_kind"), line


def content(draw: random.Random, form: str) -> bytes:
    end, rows = draw.choice(["\n", "\r\n"]), range(draw.randrange(30))
    if form == "csv":
        return (draw.choice(["", "\ufeff"]) + table(draw, end)).encode()
    if form == "txt":
        lines = [text(draw) for _ in rows]
    elif form == "tsv":
        lines = ["text\tid", *(f"{text(draw)}\t{number}" for number in rows)]
    else:
        ids: list[dict[str, Any]] = [
            {},
            {"id": 3},
            {"id": "x"},
            {"id": None},
            {"id": ""},
            {"id": 3.5},
            {"id": True},
            {"id": 2**63},
        ]
        lines = [
            json.dumps({"text": text(draw), "note": value(draw), **draw.choice(ids)}) for _ in rows
        ]
        lines += ["bad"] * draw.randrange(2)
    return (draw.choice(["", "\ufeff"]) + end.join(lines) + draw.choice(["", end])).encode()


@pytest.mark.parametrize("form", ["txt", "jsonl", "tsv", "csv"])
def test_partitions_merge_into_the_plain_output(tmp_path: Path, form: str) -> None:
    draw, merged = random.Random(form), 0
    for trial in range(TRIALS):
        folder = tmp_path / str(trial)
        folder.mkdir()
        files = [folder / f"in{number}.{form}" for number in range(draw.choice([1, 1, 3]))]
        for file in files:
            file.write_bytes(content(draw, form))
        out = draw.choice(["jsonl", "csv", "tsv", "txt", "parquet", "jsonl.gz"])
        column = () if form == "txt" else ("text",)
        try:
            options = JobOptions(chunk_rows=draw.choice([1, 3, 7]), column=column)
            whole = Job(Echo(), files, folder / f"whole.{out}", options).run()
        except (InputError, UsageError):  # lines of \r alone, or two delimiters
            continue
        # Workers write the same bytes, also where every second call goes down.
        runner = LocalRunner([True, False] * 5)
        Job(runner.load(), files, folder / f"chunks.{out}", options, runner).run()
        joined = folder / f"joined.{out}"
        merge([folder / f"chunks.{out}"], joined)
        assert joined.read_bytes() == (folder / f"whole.{out}").read_bytes()
        table = form in ("csv", "tsv") and out in ("csv", "tsv")
        marks = [file.read_bytes().startswith(BOM_UTF8) for file in (files[0], joined)]
        assert marks[1] == (marks[0] and table), "Excel needs it"
        if form == "jsonl" and out in ("jsonl", "csv", "tsv", "parquet"):
            require_fields(files, folder / f"whole.{out}")
        count, by = draw.choice([1, 2, 3, 5]), draw.choice([None, None, "file"])
        parts = [folder / f"{number}.{out}" for number in range(1, count + 1)]
        try:
            for number, part in enumerate(parts, start=1):
                chosen: dict[str, Any] = {"partition": f"{number}/{count}", "partition_by": by}
                chosen |= {"chunk_rows": options.chunk_rows, "column": column}
                Job(Echo(), files, part, JobOptions(**chosen)).run()
        except InputError as error:
            assert form == "csv" and "add --partition-by rows" in str(error)
            continue
        summary, merged = merge(parts, folder / f"out.{out}"), merged + 1
        assert (folder / f"out.{out}").read_bytes() == (folder / f"whole.{out}").read_bytes()
        for name in ("rows", "bad_rows", "errors", "first_error"):
            assert getattr(summary, name) == getattr(whole, name)
    assert merged >= TRIALS // 2


def test_a_cell_that_looks_like_rows_is_not_cut(tmp_path: Path) -> None:
    """The beginning of the second partition is wrong, and the first one tells so."""
    options: dict[str, Any]
    path, options = tmp_path / "in.csv", {"chunk_rows": 3, "column": ("text",)}
    path.write_text('id,text\n1,first\n2,"' + "3,three\n" * 99 + '"\n4,last\n')
    whole, parts = tmp_path / "whole.jsonl", [tmp_path / "1.jsonl", tmp_path / "2.jsonl"]
    Job(Echo(), path, whole, JobOptions(**options)).run()
    with pytest.raises(InputError, match=r"such as [\d,]+; add partition_by rows"):
        Job(Echo(), path, parts[0], JobOptions(**options, partition="1/2")).run()
    for part in parts:
        chosen = JobOptions(**options, partition=f"{part.stem}/2", partition_by="rows")
        Job(Echo(), path, part, chosen).run()
    merge(parts, tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == whole.read_bytes()
