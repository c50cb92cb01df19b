"""Every row of every format comes out once, in its place, whatever is wrong with it."""

import bz2
import contextlib
import encodings.aliases
import gzip
import io
import itertools
import json
import lzma
import os
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from transferry.runtime.engine.result import RowError
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.io.lines import LongLine
from transferry.runtime.jobs.formats import cells, columnar
from transferry.runtime.jobs.formats.readers import open_reader
from transferry.runtime.jobs.formats.rows import InputRow, RowReader
from transferry.runtime.jobs.job_options import JobOptions

zstandard = pytest.importorskip("zstandard", reason="zstandard is an optional extra")
pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is an optional extra")
parquet = pytest.importorskip("pyarrow.parquet")

PACK = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}
TEXTS = ["eins", 'zwei "drei", vier', "fünf\u2028sechs", " ", "<s> </s>"]
NOTES = ["a", "", "c,d", '"', "\u2603"]


def written(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def rows(reader: RowReader, first: int = 0, last: int | None = None) -> list[InputRow]:
    return list(reader.rows(first, last))


def texts(path: Path, **options: Any) -> list[str]:
    """Of each row the text, or the kind of its error."""
    return [
        row.text.kind if isinstance(row.text, RowError) else row.text
        for row in open_reader(path, **options).rows()
    ]


def example(folder: Path, name: str) -> Path:
    """The rows of TEXTS as another writer has them."""
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"id": range(10, 15), "text": TEXTS, "note": NOTES})
    path = folder / name
    format = name.split(".")[1]
    if format == "text":
        path.write_bytes(PACK[path.suffix.removeprefix(".text")]("\n".join(TEXTS).encode()))
    elif format == "tsv":  # pandas cannot leave quotation marks alone and write no others
        lines = ["id\ttext\tnote", *map("\t".join, zip("01234", TEXTS, NOTES, strict=True))]
        path.write_bytes(PACK[path.suffix.removeprefix(".tsv")]("\n".join(lines).encode()))
    elif format == "csv":
        table.to_csv(path, index=False)
    elif format == "jsonl":
        table.to_json(path, orient="records", lines=True)
    else:
        table.to_parquet(path, row_group_size=2)
    return path


NAMES = [
    f"rows.{format}{compression}"
    for format in ("text", "tsv", "csv", "jsonl", "parquet")
    for compression in (PACK if format != "parquet" else [""])
]


@pytest.mark.parametrize("name", NAMES)
def test_what_others_wrote_is_read(tmp_path: Path, name: str) -> None:
    reader = open_reader(example(tmp_path, name))
    found = rows(reader)
    assert [row.text for row in found] == TEXTS
    assert [row.number for row in found] == [0, 1, 2, 3, 4]
    assert reader.layout.format == name.split(".")[1]
    assert len({row.raw for row in found}) == len(found)
    for first in range(7):
        assert rows(reader, first) == found[first:]
        for last in range(7):
            assert rows(reader, first, last) == found[first:last]
    if reader.layout.format == "text":
        assert (reader.layout.columns, reader.layout.has_id) == ((), False)
        assert {row.id for row in found} == {None}
        return
    assert (reader.layout.columns, reader.layout.has_id) == (("note",), True)
    assert [row.fields for row in found] == [{"note": note} for note in NOTES]
    ids = {"tsv": [*"01234"], "csv": ["10", "11", "12", "13", "14"]}
    assert [row.id for row in found] == ids.get(reader.layout.format, [10, 11, 12, 13, 14])


def test_bad_lines_of_csv(tmp_path: Path) -> None:
    content = (
        b"\xef\xbb\xbfid,text\r\n"
        b'1,"a\r\nb ""c"""\r\n'  # 0: a line break inside quotation marks
        b"2\r\n"  # 1
        b"\r\n"  # 2
        b"3,\xe4\r\n"  # 3
        b'4,"open\n5,x,"y"\n'  # 4: what opens on one line and closes wrongly on the next
        b'6,"a"b\n'  # 5
        b"7,a\rb\n"  # 6
        b'8,"never closed\n9,gone'  # 7
    )
    path = written(tmp_path, "a.csv", content)
    found = rows(open_reader(path))
    assert (
        texts(path) == ['a\r\nb "c"', "malformed", "malformed", "undecodable"] + ["malformed"] * 4
    )
    assert [row.id for row in found[:2]] == ["1", None]
    assert b"".join(row.raw for row in found) == content.partition(b"\r\n")[2]
    assert "in a record over 2 lines" in found[-1].text.message  # type: ignore[union-attr]


def test_a_megabyte_in_a_field_is_fine(tmp_path: Path) -> None:
    long = "ä\n" * 500_000
    for name, content in {
        "a.csv": f'text,b\n"{long}",x\nnext,y\n',
        "a.jsonl": json.dumps({"text": long}) + '\n{"text": "next"}\n',
    }.items():
        assert texts(written(tmp_path, name, content.encode())) == [long, "next"]


def test_what_no_quotation_mark_closes_takes_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cells, "MOST_LINE", 200)
    lines = b"".join(b"%d,line\n" % number for number in range(100))
    found = rows(open_reader(written(tmp_path, "a.csv", b'id,text\n0,"open\n' + lines)))
    kinds = [row.text.kind if isinstance(row.text, RowError) else "" for row in found]
    assert kinds == ["malformed"] + [""] * (len(kinds) - 1)
    assert max(len(row.raw) for row in found) < 250
    over = re.search(r"over (\d+) lines", str(found[0].text))
    assert over is not None
    assert (found[-1].id, len(found)) == ("99", 1 + 100 + 1 - int(over[1]))


def test_bad_lines_of_jsonl(tmp_path: Path) -> None:
    lines = [
        '{"text": "gut", "more": {"a": [1, null, 1.5, true]}, "id": "x"}',
        "[]",
        "",
        "{",
        '{"text": "a", "text": "b"}',
        '{"text": "a", "n": NaN}',
        '{"text": "a", "n": 1e999}',
        '{"text": "a", "n": ' + "9" * 5000 + "}",
        '{"text": "a", "n": ' + "[" * 150 + "]" * 150 + "}",
        "[" * 100_000,
        '{"text": "\\ud800"}',
        '{"text": "a", "\\uDFFF": 1}',
        '{"text": null, "n": 1}',
        '{"n": 1}',
        '{"text": ["a"]}',
        '{"text": "\\ud83d\\ude00", "n": 12345678901234567890123}',
    ]
    path = written(tmp_path, "a.jsonl", "\n".join(lines).encode())
    undecodable, no_text = ["undecodable"] * 2, ["no-text"] * 3
    assert texts(path) == ["gut", *["malformed"] * 9, *undecodable, *no_text, "\U0001f600"]
    found = rows(open_reader(path))
    told = [row.text.message for row in found if isinstance(row.text, RowError)]
    assert told[0] == "expected a JSON object: it is []"
    assert told[6].endswith("value has 5000 digits"), "no setting of Python"
    assert found[0].id == "x"
    assert found[0].fields == {"more": {"a": [1, None, 1.5, True]}}
    assert found[12].fields == {"n": 1}
    assert found[15].fields == {"n": 12345678901234567890123}
    raw = [line.encode() for line in lines]
    assert [row.raw for row in found] == [r if len(r) < 4096 else LongLine.of([r]) for r in raw]


@pytest.mark.parametrize(
    ("value", "id"),
    [("7", 7), ('"7"', "7"), ("null", None), ("true", True), ("1.50", 1.5), ('["ä"]', ["ä"])],
)
def test_an_id_stays_as_it_is(tmp_path: Path, value: str, id: Any) -> None:
    path = written(tmp_path, "a.jsonl", f'{{"text": "a", "id": {value}}}'.encode())
    (row,) = open_reader(path).rows()
    assert (row.id, type(row.id)) == (id, type(id))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"", "expected a header"),
        ("a.tsv", b"", "expected a header"),
        ("a.csv", b"text,a,a\n", "two columns have the name 'a'"),
        ("a.tsv", b"text\ttext\n", "two columns have the name 'text'"),
        ("a.csv", b"text,\xff\n", "the header cannot be read: expected UTF-8"),
        ("a.csv", b'"text\n', "the header cannot be read: expected CSV"),
        ("a.tsv", b"text\tn\n1\ta\t3\n2\tb\t4\n", "found 2 in the header and 3 columns"),
        ("a.csv", b'text,n\n1,"a\n,b",3\n2,c,4\n', "found 2 in the header and 3 columns"),
        ("a.csv", b"a title\ntext,n\na,3\nb,4\n", "found 1 in the header and 2 columns"),
        ("a.parquet", b"PAR1 or not", "cannot be read as Parquet"),
        ("a.arrow", b"FEA1" + bytes(99), "version 1 of Feather; write it in version 2"),
        ("b.parquet", None, "cannot be read as Parquet: "),
        ("b.csv", None, "cannot be read: No such file"),
    ],
)
def test_what_cannot_be_read_is_refused(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    path = tmp_path / name if content is None else written(tmp_path, name, content)
    with pytest.raises(InputError, match=message):
        open_reader(path)


@pytest.mark.parametrize(
    ("columns", "column", "chosen"),
    [
        ("text,a", None, "text"),
        ("a,source", None, "source"),
        ("a", None, "a"),
        ("id,a", None, "a"),
        ("text,source", None, InputError),
        ("a,b", None, InputError),
        ("id", None, InputError),
        ("text,source", "source", "source"),
        ("text,id", "id", "id"),
        ("text,a", "b", InputError),
    ],
)
def test_which_column_is_the_text(
    tmp_path: Path, columns: str, column: str | None, chosen: Any
) -> None:
    names = columns.split(",")
    values = dict(zip(names, names, strict=True))
    table = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({name: [name] for name in names}), table)
    for path in (
        table,
        written(tmp_path, "a.csv", f"{columns}\n{columns}\n".encode()),
        written(tmp_path, "a.tsv", f"{columns}\n{columns}\n".replace(",", "\t").encode()),
        written(tmp_path, "a.jsonl", json.dumps(values).encode()),
    ):
        if chosen is InputError and not (path.suffix == ".jsonl" and column):
            with pytest.raises(InputError, match=rf"with column \({', '.join(names)}\)"):
                open_reader(path, column=column)
        else:
            assert texts(path, column=column) == ["no-text" if chosen is InputError else chosen]


@pytest.mark.parametrize("pack", PACK.values())
def test_standard_input(monkeypatch: pytest.MonkeyPatch, pack: Any) -> None:
    def given(content: bytes) -> Path:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(pack(content))))
        return Path("-")

    assert texts(given(b"eins\nzwei\n")) == ["eins", "zwei"]
    assert texts(given(b"text,b\neins,\nzwei,\n"), format="csv") == ["eins", "zwei"]
    lines = b'[]\n{"text": "eins"}\n{"text": "zwei"}\n'
    assert texts(given(lines), format="jsonl") == ["malformed", "eins", "zwei"]
    with pytest.raises(UsageError, match="a pipe or stdin; name a file"):
        open_reader(given(b""), format="parquet")


@pytest.mark.parametrize(
    ("name", "head", "row"),
    [
        ("a.csv", b"id,text\n", b'%d,"A dog %d"\n'),
        ("a.tsv", b"id\ttext\n", b"%d\tA dog %d\n"),
        ("a.jsonl", b"", b'{"id": %d, "text": "A dog %d"}\n'),
        ("a.json", b"", b'{"id": %d, "text": "A dog %d"}\n'),
        ("a.txt", b"", b"%d A dog %d\n"),
    ],
)
def test_a_pipe_is_read_once(tmp_path: Path, name: str, head: bytes, row: bytes) -> None:
    """More rows than its first read holds come back as from a file."""
    content = head + b"".join(row % (number, number) for number in range(20_000))
    wanted = texts(written(tmp_path, name, content))
    pipe = tmp_path / "pipe" / name
    pipe.parent.mkdir()
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(content,))
    writer.start()
    assert texts(pipe) == wanted
    writer.join()


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress, lzma.compress, PACK[".zst"]])
def test_a_pipe_may_begin_slowly(tmp_path: Path, pack: Any) -> None:
    """A byte order mark and the mark of a packed file count also where they come in two parts."""
    for encoding, first in itertools.product(("utf-8-sig", "utf-16", "utf-32"), (1, 3, 9)):
        content, pipe = pack("eins\nzwei\n".encode(encoding)), tmp_path / f"{encoding}{first}.txt"
        os.mkfifo(pipe)

        def write(pipe: Path = pipe, parts: Any = (content[:first], content[first:])) -> None:
            with pipe.open("wb", buffering=0) as file:
                for part in parts:
                    file.write(part)
                    time.sleep(0.05)

        writer = threading.Thread(target=write)
        writer.start()
        assert texts(pipe) == ["eins", "zwei"]
        writer.join()


def test_every_encoding_reads_or_refuses(tmp_path: Path) -> None:
    """Python's codecs raise errors of several classes for bytes that they cannot read."""
    read = 0
    for name in sorted({*encodings.aliases.aliases.values()}):
        with contextlib.suppress(UsageError):
            JobOptions(encoding=name)
            for content in (b"abc\ndef\n", b"+//8-\n~{\n\xff\n", b"\x1b$)C\n\x0e!\n", b"\0\0\0a"):
                with contextlib.suppress(InputError):
                    path = written(tmp_path, "rows.txt", content)
                    read += len(rows(open_reader(path, encoding=name)))
    assert read > 500


def test_zstd_frames_follow_each_other(tmp_path: Path) -> None:
    pack = PACK[".zst"]
    skipped = b"\x50\x2a\x4d\x18\x04\x00\x00\x00skip"  # as pzstd writes before each frame
    content = skipped + pack(b"eins\nzw") + skipped + pack(b"ei\n") + pack(b"") + pack(b"drei")
    assert texts(written(tmp_path, "a.zst", content)) == ["eins", "zwei", "drei"]


@pytest.mark.parametrize("cut", [1, 5, 3000])
def test_damaged_zstd_breaks_where_it_is_damaged(tmp_path: Path, cut: int) -> None:
    compressor = zstandard.ZstdCompressor(write_checksum=True)
    lines = b"".join(b"%d\n" % (number**9) for number in range(100_000))
    path = written(tmp_path, "a.zst", compressor.compress(lines)[:-cut])
    found: list[InputRow] = []
    with pytest.raises(InputError, match="whole zstd file, found one that is damaged or cut short"):
        found.extend(open_reader(path).rows())
    assert len(found) > 90_000
    assert [row.raw for row in found] == lines.split(b"\n")[: len(found)]


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_rows_are_streamed(tmp_path: Path, name: str) -> None:
    """The first row is there although the end of the file, which is damaged, was not reached."""
    line = b'{"text": "a"}\n' if name == "a.jsonl" else b"text\n"
    packed = gzip.compress(line * 100_000)[:-9]
    reader = open_reader(written(tmp_path, name + ".gz", packed))
    assert next(reader.rows()).number == 0
    with pytest.raises(InputError, match="damaged or cut short"):
        list(reader.rows())


@pytest.mark.parametrize("bad", ["text", "b", "list"])
def test_bytes_that_are_no_text_in_parquet(tmp_path: Path, bad: str) -> None:
    """Writers that do not check leave such bytes in a column of text."""
    wrong = pyarrow.array([b"a", b"\xff", b"c"]).view(pyarrow.string())
    columns = {"text": pyarrow.array(["a", "b", "c"]), "b": pyarrow.array(["a", "b", "c"])}
    offsets = pyarrow.array([0, 1, 2, 3], pyarrow.int32())
    columns[bad] = pyarrow.ListArray.from_arrays(offsets, wrong) if bad == "list" else wrong
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table(columns), path)
    assert texts(path) == ["a", "undecodable", "c"]
    found = rows(open_reader(path))[1]
    assert found.raw != b""
    assert isinstance(found.text, RowError)
    assert found.text.message.startswith(f"column {bad}: ")


def test_groups_before_the_first_row_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"text": [f"text {number}" for number in range(3000)]})
    parquet.write_table(table, path, row_group_size=1000, compression="none")
    first = parquet.ParquetFile(path).metadata.row_group(0).column(0)
    content = bytearray(path.read_bytes())
    place = first.data_page_offset
    content[place : place + 50] = bytes(50)
    path.write_bytes(content)
    reader = open_reader(path)
    assert [row.text for row in reader.rows(1500, 1502)] == ["text 1500", "text 1501"]
    with pytest.raises(InputError, match="cannot be read as Parquet"):
        rows(reader)


def test_batches_of_long_rows_are_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columnar, "_BATCH_BYTES", 1 << 14)
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"text": [f"{number:04}" * 256 for number in range(100)]})
    parquet.write_table(table, path, use_dictionary=False)
    sizes: list[int] = []
    read = columnar._fields

    def watched(batch: Any) -> Any:
        sizes.append(batch.num_rows)
        return read(batch)

    monkeypatch.setattr(columnar, "_fields", watched)
    assert texts(path) == table["text"].to_pylist()
    assert max(sizes) <= 16


def test_a_large_group_of_rows_is_read_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"text": ["x" * 1000] * 60_000})
    parquet.write_table(table, path, use_dictionary=False, compression="none")
    del table
    before = pyarrow.total_allocated_bytes()
    most = max(pyarrow.total_allocated_bytes() for _ in open_reader(path).rows())
    assert most - before < 20 << 20


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, "a.zst", PACK[".zst"](b"a"))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    for name in ("a.parquet", "a.zst"):
        with pytest.raises(UsageError, match=r'pip install .*\[jobs\]"'):
            texts(tmp_path / name)
