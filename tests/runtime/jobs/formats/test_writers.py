"""Other programs read back what was written, and no byte tells how it was cut into parts."""

import errno
import gzip
import io
import json
import random
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import pytest

from tests.runtime.jobs.formats.records import (
    LINES,
    TEXTS,
    WIDTH,
    in_parts,
    reader_of,
    records,
    vectors,
    write,
    writer_of,
)
from tests.runtime.jobs.helpers import run
from transferry.runtime.engine.result import RowError
from transferry.runtime.engine.tasks.table import TASKS
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.jobs.formats.readers import open_reader
from transferry.runtime.jobs.formats.records import Record
from transferry.runtime.jobs.formats.writers import ROW_GROUP, ParquetWriter, open_writer

zstandard = pytest.importorskip("zstandard", reason="zstandard is an optional extra")
pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is an optional extra")
parquet = pytest.importorskip("pyarrow.parquet")


MESSAGE = "tsv output cannot hold the field '{}'; leave it out, or write jsonl"


def test_tsv_has_no_place_for_tabs_and_line_breaks(tmp_path: Path) -> None:
    content = b'id,text,note\n1,a,"x\ty"\n"2\n",b,z\n3,"c\td",\n'
    reader = reader_of(tmp_path, content=content)
    writer = open_writer(tmp_path / "out.tsv", rows=reader.layout)
    rows = list(map(writer.admit, reader.rows()))
    for row, name in zip(rows, ("note", "id", "text"), strict=True):
        assert row.text == RowError("fields", MESSAGE.format(name))
    assert [row.cells for row in rows] == [("1", "a", None), (None, "b", "z"), ("3", None, "")]
    objects = b'{"note": ["\\t"], "text": "a\\tb"}\n{"note": "a\\tb", "text": "c"}\n'
    fields = reader_of(tmp_path, "in.jsonl", objects)
    kept, refused = map(open_writer(tmp_path / "out.tsv", rows=fields.layout).admit, fields.rows())
    assert (kept.text, kept.fields) == ("a\tb", {"note": ["\t"]})
    assert (refused.text, refused.fields) == (RowError("fields", MESSAGE.format("note")), {})
    wide = reader_of(tmp_path, content=b'text,"a\tb"\n', delimiter=",")
    with pytest.raises(UsageError, match=r"tsv cannot hold the name of the column 'a\\tb'; leave"):
        open_writer(tmp_path / "out.tsv", rows=wide.layout)
    bars = reader_of(tmp_path, "in.tsv", b"text|n\na\tb|c\n", delimiter="|", column="text")
    (tab,) = map(open_writer(tmp_path / "out.tsv", rows=bars.layout).admit, bars.rows())
    assert (tab.text, tab.cells) == (RowError("fields", MESSAGE.format("text")), (None, "c"))
    # In answers and in `source` they become spaces; to TSV from TSV cells stay as they are.
    line = {"id": "3", "note": "", "source": "c", "text": "e\nf\r\ng\t"}
    lines = write(writer, tmp_path / "out.tsv", [line]).read_text(encoding="utf-8")
    assert lines.splitlines()[1] == "3\tc\t\te f  g \t\t\t\t\tfalse\t\t"
    again = reader_of(tmp_path, "in.tsv", b"id\ttext\n1\ta\rb\n")
    writer = open_writer(tmp_path / "out.tsv", rows=again.layout)
    (row,) = map(writer.admit, again.rows())
    assert row.text == "a\rb"
    (line,) = [{"id": "1", "source": row.text}]
    assert b"\n1\ta\rb\t" in write(writer, tmp_path / "out.tsv", [line]).read_bytes()


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
        lacks, remedy = " output cannot hold the field", "; leave it out, or write jsonl"
        own = RowError("fields", f"parquet{lacks} 'id'{remedy}")
        assert [row.text for row in rows] == [
            *("a", "b", "c"),
            RowError("fields", f"{format}{lacks} 'more'{remedy}"),
            RowError("fields", f"{format}{lacks} 'score'{remedy}"),
            own if format == "parquet" else "f",
            RowError("no-text", "there is no field text"),
        ]
        assert (rows[4].fields, rows[6].fields) == ({"n": "kept"}, {"n": 2})
        assert rows[5].id == (None if format == "parquet" else "own")
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


@pytest.mark.parametrize("id", [7, -(2**63), None, 1.5, 1.0, True, "7", 2**63, [1]])
def test_an_id_of_a_later_row_is_kept_or_refused(tmp_path: Path, id: Any) -> None:
    """Where the first object has none, ids are the numbers of rows, a column of integers."""
    content = f'{{"text": "a"}}\n{json.dumps({"text": "b", "id": id})}\n'.encode()
    rows = reader_of(tmp_path, "in.jsonl", content)
    writer = open_writer(tmp_path / "out.parquet", rows=rows.layout)
    _, row = map(writer.admit, rows.rows())
    path = write(writer, tmp_path / "out.parquet", [{"id": row.id}])
    if type(id) is int and id < 2**63:
        assert parquet.read_table(path)["id"].to_pylist() == [id]
    else:
        assert (row.id, isinstance(row.text, RowError)) == (None, id is not None)


@pytest.mark.parametrize("name", ["out.csv", "out.tsv", "out.jsonl", "out.parquet"])
def test_a_column_called_as_a_part_of_the_answer_keeps_its_name(tmp_path: Path, name: str) -> None:
    reader = reader_of(tmp_path, content=b"source,score,error,target,transferry_score\n")
    writer = open_writer(tmp_path / name, rows=reader.layout)
    assert writer.columns
    theirs = ("source", "score", "error", "target", "transferry_score")
    own = ("text", "transferry_transferry_score", "finish_reason")
    if name == "out.jsonl":
        assert writer.columns.names[:8] == ("id", *theirs[1:], "source", *own[:2])
        assert "transferry_error" in writer.columns.names
    else:
        assert writer.columns.names[:8] == (*theirs, *own)
    open_writer(tmp_path / "out.txt", rows=reader.layout)  # which repeats nothing


@pytest.mark.parametrize("count", [0, 1, ROW_GROUP, ROW_GROUP + 5])
def test_pyarrow_reads_vectors(tmp_path: Path, count: int) -> None:
    out, rows = tmp_path / "out.parquet", vectors(count)
    reader = reader_of(tmp_path, "in.txt", b"")
    writer = open_writer(out, rows=reader.layout, task="embed", width=WIDTH)
    in_parts(writer, out, rows, [count // 2])
    table = parquet.read_table(out)
    assert table.schema.field("vector").type == pyarrow.list_(pyarrow.float32(), WIDTH)
    assert table.column_names == [
        "id",
        "source",
        *("vector", "truncated", "error_kind", "error_message"),
    ]
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
    n_best = 1 if "text" in name else 2
    writer = writer_of(tmp_path / name, b"text,note\n", task=task, n_best=n_best, width=WIDTH)
    if isinstance(writer, ParquetWriter):
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
    """They end by size, which is compared at the same rows."""
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


@pytest.mark.parametrize("name", ["out.csv", "out.tsv.gz"])
def test_a_header_longer_than_a_block(tmp_path: Path, name: str) -> None:
    header, cells = ["text", *(f"column {n:040}" for n in range(9000))], ",x" * 9000
    path = tmp_path / "in.csv"
    path.write_text(",".join(header) + f"\na{cells}" * 5)
    run(path, name, column="text")
    rows = list(open_reader(tmp_path / name, column="text").rows())
    assert [(row.text, row.fields["transferry_text"]) for row in rows] == [("a", "A")] * 5


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
            "task generate writes jsonl, text, tsv, csv, parq.*, not npy",
        ),
        (
            "out.txt",
            {"task": "embed"},
            "task embed writes npy, parquet, jsonl or openai, not tex",
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
