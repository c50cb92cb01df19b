"""Other programs read back what was written, and no byte tells how it was cut into parts."""

import errno
import gzip
import io
import json
import random
import re
import sys
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import pytest

from transferry.runtime.engine.result import RowError
from transferry.runtime.engine.tasks.table import TASKS
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.jobs.formats import writers
from transferry.runtime.jobs.formats.readers import open_reader
from transferry.runtime.jobs.formats.rows import RowReader
from transferry.runtime.jobs.formats.writers import Record, RowWriter, open_writer

zstandard = pytest.importorskip("zstandard", reason="zstandard is an optional extra")
pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is an optional extra")
parquet = pytest.importorskip("pyarrow.parquet")

WIDTH = 3
LINES = ("text", "jsonl", "tsv", "csv")
# What csv and tsv have to hold, and what must not end a line.
TEXTS = ["a", 'b "c", d', " e ", "\u2028f\x85", "", "'", '"', "g\\n"]


def reader_of(folder: Path, name: str = "in.csv", content: bytes = b"id,text,note\n") -> RowReader:
    path = folder / name
    path.write_bytes(content)
    return open_reader(path)


def writer_of(out: Path, content: bytes = b"id,text,note\n", **options: Any) -> RowWriter:
    """A writer of a job that reads CSV; vectors for npy."""
    if out.suffix == ".npy":
        options = {"task": "embed", "width": WIDTH, **options}
    return open_writer(out, rows=reader_of(out.parent, content=content).layout, **options)


def records(count: int, texts: Sequence[str] = TEXTS) -> list[Record]:
    """What a job makes of rows with the field `note`; every fifth is an error."""
    found: list[Record] = []
    for number in range(count):
        text = texts[number % len(texts)]
        record: dict[str, Any] = {"id": f"n{number}", "note": text, "source": f"<{text}>"}
        if number % 5 == 4:
            error = RowError("too-long", f"90 tokens, {text}").record()
            record |= {"text": "", "finish_reason": "error", "error": error, "source_tokens": 90}
        else:
            record |= {
                "text": text[::-1],
                "score": -number / 7,
                "finish_reason": "end",
                "target_tokens": number,
                "source_tokens": 3,
                "n_best": [{"text": text[::-1], "score": -number / 7}],
            }
        if number % 3 == 0:
            record["truncated"] = True
        found.append(record)
    return found


def vectors(count: int) -> list[Record]:
    """What a job of embed makes; every third is an error."""
    error = {"error": RowError("empty", "there is no text to work on").record()}
    return [
        {"id": number, "source": "a"}
        | (error if number % 3 == 2 else {"vector": np.array([number, 0.5, -number], np.float32)})
        for number in range(count)
    ]


def write(writer: RowWriter, path: Path, content: Sequence[Record] | Sequence[Path]) -> Path:
    """Writes records, or joins files."""
    with path.open("wb") as file:
        joins = content and isinstance(content[0], Path)
        (writer.join if joins else writer.write)(cast(Any, content), file)
        assert not file.closed
    return path


def in_parts(writer: RowWriter, out: Path, rows: Sequence[Record], cuts: Sequence[int]) -> Path:
    """Writes rows as parts that begin at `cuts`, and joins them."""
    ends = zip([0, *cuts], [*cuts, len(rows)], strict=True)
    parts = [
        write(writer, out.with_name(f"{number:08}.part"), rows[first:last])
        for number, (first, last) in enumerate(ends)
    ]
    return write(writer, out, parts)


@pytest.mark.parametrize("name", ["out.csv", "out.tsv", "out.csv.gz", "out.csv.zst", "out.tsv.zst"])
def test_pandas_reads_tables(tmp_path: Path, name: str) -> None:
    pandas = pytest.importorskip("pandas")
    rows = records(40)
    path = in_parts(writer_of(tmp_path / name, n_best=True), tmp_path / name, rows, [9, 9, 30])
    quoting = {"sep": "\t", "quoting": 3} if "tsv" in name else {}
    table = pandas.read_csv(path, dtype=str, keep_default_na=False, lineterminator="\n", **quoting)
    assert list(table.columns) == [
        *("id", "note", "source", "text", "score", "finish_reason", "target_tokens"),
        *("source_tokens", "truncated", "error_kind", "error_message", "n_best"),
    ]
    for found, row in zip(table.to_dict("records"), rows, strict=True):
        for field in ("id", "note", "source", "text", "finish_reason"):
            assert found[field] == row[field]
        assert found["truncated"] == json.dumps("truncated" in row)
        assert found["error_kind"] == row.get("error", {}).get("kind", "")
        assert found["error_message"] == row.get("error", {}).get("message", "")
        if "error" in row:
            assert (found["score"], found["target_tokens"], found["n_best"]) == ("", "", "")
        else:
            assert float(found["score"]) == row["score"]
            assert int(found["target_tokens"]) == row["target_tokens"]
            assert json.loads(found["n_best"]) == row["n_best"]


def test_csv_gives_back_every_string(tmp_path: Path) -> None:
    wild = [*TEXTS, "a\rb", "\r", "a\nb", "\r\n", '""', "a,b", "\t", "\ufeff", '"\n"']
    writer = writer_of(tmp_path / "out.csv")
    rows: list[Record] = [
        {"id": text, "note": text, "source": text, "text": text, "finish_reason": "end"}
        for text in wild
    ]
    path = write(writer, tmp_path / "out.csv", rows)
    again = list(open_reader(path, column="text").rows())
    assert [(row.id, row.text, row.fields["note"]) for row in again] == [(t, t, t) for t in wild]
    assert path.read_bytes().startswith(b"id,note,source,text,score,")


def test_tsv_has_no_place_for_tabs_and_line_breaks(tmp_path: Path) -> None:
    content = b'id,text,note\n1,a,"x\ty"\n"2\n",b,z\n3,"c\td",\n'
    reader = reader_of(tmp_path, content=content)
    writer = open_writer(tmp_path / "out.tsv", rows=reader.layout)
    first, second, third = map(writer.admit, reader.rows())
    assert first.text == RowError("fields", "tsv output cannot hold the field 'note'")
    assert first.fields == {}
    assert second.text == RowError("fields", "tsv output cannot hold the field 'id'")
    assert (second.id, second.fields) == (1, {"note": "z"})
    assert third.text == "c\td"
    row = {"id": "3", "note": "", "source": "c\td", "text": "e\nf\r\ng\t"}
    lines = write(writer, tmp_path / "out.tsv", [row]).read_text(encoding="utf-8")
    assert lines.splitlines()[1] == "3\t\tc d\te f  g \t\t\t\t\tfalse\t\t"


@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
def test_pandas_reads_jsonl(tmp_path: Path, compression: str) -> None:
    pandas = pytest.importorskip("pandas")
    rows = records(40)
    out = tmp_path / f"out.jsonl{compression}"
    writer = writer_of(out)
    in_parts(writer, out, rows, [9, 9, 30])
    table = pandas.read_json(out, lines=True, dtype=False)
    assert table["id"].tolist() == [row["id"] for row in rows]
    assert table["note"].tolist() == [row["note"] for row in rows]
    opened = pandas.io.common.get_handle(out, "r", compression="infer", encoding="utf-8")
    with opened as handles:
        assert [json.loads(line) for line in handles.handle] == rows


def test_jsonl_holds_what_is_so(tmp_path: Path) -> None:
    writer = writer_of(tmp_path / "out.jsonl")
    row = {"id": 1, "a": {"b": [None, 12345678901234567890123]}, "text": "ä", "truncated": False}
    vector = {"id": 2, "vector": np.array([0.1, 1e-9, 3], np.float32), "share": float("nan")}
    path = write(writer, tmp_path / "out.jsonl", [row, vector])
    assert path.read_text(encoding="utf-8").splitlines() == [
        '{"id": 1, "a": {"b": [null, 12345678901234567890123]}, "text": "ä"}',
        '{"id": 2, "vector": [0.1, 0.0, 3.0], "share": null}',
    ]


@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
def test_text_is_a_line_a_row(tmp_path: Path, compression: str) -> None:
    out = tmp_path / f"out.txt{compression}"
    rows = [{"text": "ein\nZeilen\u2028ende"}, {"text": "", "error": {}}, {}, {"text": "ä "}]
    in_parts(writer_of(out), out, cast("list[Record]", rows), [1])
    with pyarrow.input_stream(out, compression="detect") as stream:
        assert stream.read().decode() == "ein Zeilen ende\n\n\nä \n"


def test_pyarrow_reads_tables(tmp_path: Path) -> None:
    rows = records(40)
    writer = writer_of(tmp_path / "out.parquet", n_best=True)
    table = parquet.read_table(in_parts(writer, tmp_path / "out.parquet", rows, [9, 9, 30]))
    assert [(field.name, str(field.type)) for field in table.schema] == [
        *(("id", "string"), ("note", "string"), ("source", "string"), ("text", "string")),
        *(("score", "double"), ("finish_reason", "string"), ("target_tokens", "int64")),
        *(("source_tokens", "int64"), ("truncated", "bool"), ("error_kind", "string")),
        *(("error_message", "string"), ("n_best", "string")),
    ]
    assert table.schema.metadata is None
    for found, row in zip(table.to_pylist(), rows, strict=True):
        error = row.get("error", {})
        assert found.pop("error_kind") == error.get("kind")
        assert found.pop("error_message") == error.get("message")
        assert found.pop("truncated") == ("truncated" in row)
        n_best = found.pop("n_best")
        assert (n_best and json.loads(n_best)) == row.get("n_best")
        assert found == {name: row.get(name) for name in found}


def passed_through(folder: Path, table: Any, name: str) -> Path:
    """A job from a table to a file that repeats its fields."""
    parquet.write_table(table, folder / "in.parquet", row_group_size=2)
    reader = open_reader(folder / "in.parquet")
    writer = open_writer(folder / name, rows=reader.layout)
    rows = [
        {"id": row.id, **row.fields, "source": row.text, "text": "x"}
        for row in map(writer.admit, reader.rows())
    ]
    return in_parts(writer, folder / name, rows, [1])


TYPED = {
    "at": pyarrow.array([1, None, 2], pyarrow.timestamp("ns", "UTC")),
    "day": pyarrow.array([1, None, 2], pyarrow.date32()),
    "price": pyarrow.array(["1.10", None, "2.00"]).cast(pyarrow.decimal128(5, 2)),
    "bytes": pyarrow.array([b"\xff", None, b""]),
    "list": pyarrow.array([[{"x": 1.5}], None, []]),
    "map": pyarrow.array([[("k", 1)], None, []], pyarrow.map_("string", "int8")),
    "big": pyarrow.array(["a", None, "b"], pyarrow.large_string()),
    "half": pyarrow.array([0.5, None, float("inf")], pyarrow.float16()),
    "small": pyarrow.array([1, None, -2], pyarrow.int8()),
    "waited": pyarrow.array([5, None, 6], pyarrow.duration("s")),
    "share": pyarrow.array([0.1, None, float("inf")], pyarrow.float32()),
    "yes": pyarrow.array([True, None, False]),
}


def test_parquet_to_parquet_keeps_types_and_values(tmp_path: Path) -> None:
    ids = pyarrow.array([7, 8, 9], pyarrow.uint16())
    kinds = pyarrow.array(["x", None, "x"])
    before = pyarrow.table(
        {"text": ["a", "b", "c"], "id": ids, **TYPED, "kind": kinds.dictionary_encode()}
    )
    after = parquet.read_table(passed_through(tmp_path, before, "out.parquet"))
    for name in TYPED:
        assert after.schema.field(name).type == before.schema.field(name).type
        assert after[name].combine_chunks() == before[name].combine_chunks()
    assert after["id"].combine_chunks() == ids
    assert after["kind"].combine_chunks() == kinds  # of categories the values stay


def test_parquet_to_jsonl_and_csv(tmp_path: Path) -> None:
    table = pyarrow.table({"text": ["a", "b", "c"], **TYPED})
    lines = passed_through(tmp_path, table, "out.jsonl").read_text(encoding="utf-8").splitlines()
    expected: dict[str, tuple[Any, Any]] = {
        "at": ("1970-01-01T00:00:00.000000001Z", "1970-01-01T00:00:00.000000002Z"),
        "day": ("1970-01-02", "1970-01-03"),
        "price": ("1.10", "2.00"),
        "bytes": ("/w==", ""),
        "list": ([{"x": 1.5}], []),
        "map": ([{"key": "k", "value": 1}], []),
        "big": ("a", "b"),
        "half": (0.5, None),
        "small": (1, -2),
        "waited": (5, 6),
        "share": (float(np.float32(0.1)), None),
        "yes": (True, False),
    }
    for number, line in enumerate(lines):
        fields = {name: (first, None, last)[number] for name, (first, last) in expected.items()}
        answer = {"source": "abc"[number], "text": "x"}
        assert json.loads(line) == {"id": number, **fields, **answer}
    assert number == 2
    path = passed_through(tmp_path, table, "out.csv")
    (row, _, _) = open_reader(path, column="text").rows()
    assert row.fields["at"] == "1970-01-01T00:00:00.000000001Z"
    assert row.fields["list"] == '[{"x": 1.5}]'
    assert (row.fields["yes"], row.fields["price"]) == ("true", "1.10")


@pytest.mark.parametrize("kind", ["timestamp", "string", "dictionary", "null"])
def test_ids_of_parquet(tmp_path: Path, kind: str) -> None:
    ids = {
        "timestamp": (pyarrow.array([1000], pyarrow.timestamp("ms")), "1970-01-01T00:00:01.000"),
        "string": (pyarrow.array(["x"]), "x"),
        "dictionary": (pyarrow.array(["x"]).dictionary_encode(), "x"),
        "null": (pyarrow.array([None], pyarrow.int32()), 0),
    }
    column, id = ids[kind]
    path = passed_through(tmp_path, pyarrow.table({"text": ["a"], "id": column}), "out.parquet")
    assert parquet.read_table(path)["id"].to_pylist() == [id]


def test_jsonl_to_a_table_has_the_fields_of_the_first_row(tmp_path: Path) -> None:
    lines = [
        '{"text": "a", "n": 1.50, "m": "x"}',
        '{"text": "b", "m": null, "n": {"ä": [1, true]}}',
        '{"text": "c"}',
        '{"text": "d", "more": 1}',
        '{"text": "e", "score": 1, "n": "kept"}',
        '{"text": "f", "id": "own"}',
        '{"n": 2, "more": 1}',
    ]
    reader = reader_of(tmp_path, "in.jsonl", "\n".join(lines).encode())
    for name in ("out.csv", "out.parquet"):
        writer = open_writer(tmp_path / name, rows=reader.layout)
        rows = list(map(writer.admit, reader.rows()))
        format = writer.format
        own = RowError("fields", "parquet output cannot hold the field 'id'")
        assert [row.text for row in rows] == [
            *("a", "b", "c"),
            RowError("fields", f"{format} output cannot hold the field 'more'"),
            RowError("fields", f"{format} output cannot hold the field 'score'"),
            own if format == "parquet" else "f",
            RowError("no-text", "there is no field text"),
        ]
        assert (rows[4].fields, rows[6].fields) == ({"n": "kept"}, {"n": 2})
        assert rows[5].id == (5 if format == "parquet" else "own")
        path = write(writer, tmp_path / name, [{"id": row.id, **row.fields} for row in rows])
        expected = [("1.5", "x"), ('{"ä": [1, true]}', None), (None, None)]
        if name == "out.parquet":
            table = parquet.read_table(path)
            found = list(zip(table["n"].to_pylist(), table["m"].to_pylist(), strict=True))
            assert found[:3] == expected
        else:
            again = list(open_reader(path, column="text").rows())
            assert [(row.fields["n"], row.fields["m"]) for row in again[:3]] == [
                (n or "", m or "") for n, m in expected
            ]


def test_jsonl_to_jsonl_leaves_each_row_its_fields(tmp_path: Path) -> None:
    lines = [
        '{"text": "a", "n": 1}',
        '{"text": "b", "m": [1.50, null]}',
        '{"text": "c", "score": 1, "n": 2}',
    ]
    reader = reader_of(tmp_path, "in.jsonl", "\n".join(lines).encode())
    writer = open_writer(tmp_path / "out.jsonl", rows=reader.layout)
    first, second, third = map(writer.admit, reader.rows())
    assert (first.text, first.fields) == ("a", {"n": 1})
    assert (second.text, second.fields) == ("b", {"m": [1.5, None]})
    assert third.text == RowError("fields", "jsonl output cannot hold the field 'score'")
    assert third.fields == {"n": 2}


@pytest.mark.parametrize("name", ["out.csv", "out.tsv", "out.jsonl", "out.parquet"])
def test_a_column_called_as_a_part_of_the_answer_is_refused(tmp_path: Path, name: str) -> None:
    reader = reader_of(tmp_path, content=b"source,score,error,target\n")
    with pytest.raises(InputError, match="names error, score; rename these columns"):
        open_writer(tmp_path / name, rows=reader.layout)
    open_writer(tmp_path / "out.txt", rows=reader.layout)  # which repeats nothing
    with pytest.raises(InputError, match="names error, target; rename"):
        open_writer(tmp_path / name, rows=reader.layout, task="score")


def test_plain_text_and_vectors_admit_any_field(tmp_path: Path) -> None:
    reader = reader_of(tmp_path, "in.jsonl", b'{"text": "a", "score": 1, "id": "\\t"}')
    (row,) = reader.rows()
    assert open_writer(tmp_path / "out.txt", rows=reader.layout).admit(row) is row
    assert (
        open_writer(tmp_path / "out.npy", rows=reader.layout, task="embed", width=3).admit(row)
        is row
    )


@pytest.mark.parametrize("count", [0, 1, 9, 12_345])
def test_numpy_reads_vectors(tmp_path: Path, count: int) -> None:
    out, rows = tmp_path / "out.npy", vectors(count)
    in_parts(writer_of(out), out, rows, sorted([count // 2, count // 3, count // 3]))
    nothing = np.full(WIDTH, np.nan, np.float32)
    wanted = np.array([row.get("vector", nothing) for row in rows], np.float32)
    for mode in ("r", None):
        found = np.load(out, mmap_mode=cast(Any, mode))
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, wanted.reshape(count, WIDTH))


def test_vectors_of_another_width_are_no_rows(tmp_path: Path) -> None:
    writer = writer_of(tmp_path / "o.npy", width=WIDTH + 1)
    with pytest.raises(ValueError, match="reshape"):
        write(writer, tmp_path / "o.npy", vectors(1))


@pytest.mark.parametrize("count", [0, 1, writers.ROW_GROUP, writers.ROW_GROUP + 5])
def test_pyarrow_reads_vectors(tmp_path: Path, count: int) -> None:
    out, rows = tmp_path / "out.parquet", vectors(count)
    reader = reader_of(tmp_path, "in.txt", b"")
    writer = open_writer(out, rows=reader.layout, task="embed", width=WIDTH)
    in_parts(writer, out, rows, [count // 2])
    table = parquet.read_table(out)
    assert table.schema.field("vector").type == pyarrow.list_(pyarrow.float32(), WIDTH)
    assert table.column_names == ["id", "vector", "truncated", "error_kind", "error_message"]
    found = table.to_pydict()
    assert found["id"] == list(range(count))
    for row, vector, kind in zip(rows, found["vector"], found["error_kind"], strict=True):
        assert kind == row.get("error", {}).get("kind")
        assert vector == (row["vector"].tolist() if "vector" in row else None)


OUTPUTS = [
    *(("generate", f"out.{name}{packing}") for name in LINES for packing in ("", ".gz", ".zst")),
    ("generate", "out.parquet"),
    *(("embed", f"out.{name}") for name in TASKS["embed"].formats if name != "openai"),
    *(("fill-mask", f"out.{name}") for name in ("csv", "parquet")),
    *(("score", f"out.{name}") for name in ("csv", "parquet")),
]


@pytest.mark.parametrize(("task", "name"), OUTPUTS)
def test_no_byte_tells_how_rows_were_cut(tmp_path: Path, task: str, name: str) -> None:
    writer = writer_of(tmp_path / name, b"text,note\n", task=task, n_best=True, width=WIDTH)
    if isinstance(writer, writers.ParquetWriter):
        writer = replace(writer, group=64)
    texts = [f"{text}{number}" for number in range(50) for text in TEXTS]
    # Ids are numbers here.
    rows: list[Record] = [
        {**row, "id": number, "masks": [[{"text": "a"}]], "tokens": [1], "total": -0.5}
        for number, row in enumerate(records(300, texts))
    ]
    if task == "embed":
        rows = [{**row, "note": texts[number]} for number, row in enumerate(vectors(300))]
    whole = write(writer, tmp_path / "whole", rows).read_bytes()
    chance = random.Random(name)
    for cuts in ([], [0, 300], *(sorted(chance.choices(range(301), k=12)) for _ in range(4))):
        assert in_parts(writer, tmp_path / name, rows, cuts).read_bytes() == whole
    empty = write(writer, tmp_path / "empty", [])
    assert write(writer, tmp_path / name, [empty, empty]).read_bytes() == empty.read_bytes()


def test_pages_of_parquet_do_not_tell_either(tmp_path: Path) -> None:
    """They end by size, which has to be looked at at the same rows."""
    writer = writer_of(tmp_path / "out.parquet")
    chance = random.Random(0)
    rows = records(5000, [chance.randbytes(500).hex() for _ in range(5000)])
    whole = write(writer, tmp_path / "whole", rows).read_bytes()
    for cuts in ([700], [1500, 1501, 4500]):
        assert in_parts(writer, tmp_path / "out.parquet", rows, cuts).read_bytes() == whole


def test_gzip_holds_neither_time_nor_name(tmp_path: Path) -> None:
    writer = writer_of(tmp_path / "out.txt.gz")
    packed = write(writer, tmp_path / "out.txt.gz", [{"text": "a"}]).read_bytes()
    assert packed[3:8] == bytes(5)  # no flags, so no name; no time
    assert gzip.decompress(packed) == b"a\n"


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv", "out.csv.gz", "out.csv.zst", "out.npy"])
def test_joining_takes_bounded_memory(tmp_path: Path, name: str) -> None:
    width = 1 << 16
    sized: dict[str, Any] = {"width": width} if name == "out.npy" else {}
    writer = writer_of(tmp_path / name, **sized)
    chance = random.Random(0)
    rows: list[Record] = [{"id": 1, "text": chance.randbytes(50_000).hex()} for _ in range(100)]
    if name == "out.npy":
        rows = [{"vector": np.zeros(width, np.float32)}] * 40
    part = write(writer, tmp_path / "part", rows)
    assert part.stat().st_size > 4 << 20
    tracemalloc.start()
    try:
        write(writer, tmp_path / name, [part, part])
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 4 << 20, most


TABLES = ["out.csv", "out.csv.gz", "out.csv.zst", "out.npy", "out.parquet"]


@pytest.mark.parametrize("fault", ["of another job", "cut short"])
@pytest.mark.parametrize("name", [*TABLES, "out.tsv.gz"])
def test_a_bad_part_is_refused(tmp_path: Path, name: str, fault: str) -> None:
    writer, good, bad = writer_of(tmp_path / name), tmp_path / "good", tmp_path / "bad"
    write(writer, good, [])
    if fault == "cut short":
        bad.write_bytes(good.read_bytes()[:-9])
        expected = "bad"
    else:
        width: dict[str, Any] = {"width": WIDTH + 1} if name == "out.npy" else {}
        write(writer_of(tmp_path / name, b"text,comment,other\n", **width), bad, [])
        expected = "bad (does not begin|has other columns)"
    with pytest.raises(InputError, match=expected):
        write(writer, tmp_path / name, [good, bad])


class FullDisk(io.BytesIO):
    """Takes a header, and then has no room."""

    def write(self, data: Any) -> int:
        if self.tell() > 300:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


@pytest.mark.parametrize("name", TABLES)
def test_a_full_disk_is_no_fault_of_the_parts(tmp_path: Path, name: str) -> None:
    writer, rng = writer_of(tmp_path / name), random.Random(0)
    rows = records(3000, [rng.randbytes(20).hex() for _ in range(3000)])
    part = write(writer, tmp_path / "part", vectors(3000) if name == "out.npy" else rows)
    with pytest.raises(OSError, match="No space left on device"):
        writer.join([part, part], cast(BinaryIO, FullDisk()))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "out.npy",
            {},
            "task generate writes jsonl or text or tsv or csv or parq.*, not npy",
        ),
        (
            "out.txt",
            {"task": "embed"},
            "task embed writes npy or parquet or jsonl or openai, not tex",
        ),
        ("-", {"format": "parquet"}, "parquet cannot go to standard output; name a file"),
        ("-", {"task": "embed", "format": "npy"}, "npy cannot go to standard output"),
        ("out.parquet.gz", {}, "parquet is written without .gz; leave it out"),
    ],
)
def test_what_cannot_be_written_is_refused(
    tmp_path: Path, name: str, options: Any, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        open_writer(Path(name), rows=reader_of(tmp_path).layout, **options)


@pytest.mark.parametrize(
    ("name", "given", "format"),
    [
        ("a.jsonl.gz", None, "jsonl"),
        ("a.b", None, "text"),
        ("-", None, "text"),
        ("-", "csv", "csv"),
        ("a.TSV", None, "tsv"),
        ("a.jsonl", "text", "text"),
    ],
)
def test_the_name_tells_the_format(tmp_path: Path, name: str, given: Any, format: str) -> None:
    assert open_writer(Path(name), format=given, rows=reader_of(tmp_path).layout).format == format


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = reader_of(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UsageError, match=r'pip install .*\[jobs\]"'):
        open_writer(tmp_path / "a.parquet", rows=reader.layout)
    with pytest.raises(UsageError, match=r'pip install .*\[jobs\]"'):
        write(open_writer(tmp_path / "a.txt.zst", rows=reader.layout), tmp_path / "a", [])


def test_the_example_of_the_document_is_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = Path(__file__).parents[3] / "docs" / "formats.md"
    found = re.findall(r"^```(?!sh)\w+\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M)
    code, shown = found
    monkeypatch.chdir(tmp_path)
    exec(compile(code, page.name, "exec"), {})
    assert capsys.readouterr().out.strip() == shown.strip()
