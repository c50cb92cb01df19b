"""Files of every format, encoding and compression give the rows that other readers find in them.

Every file is written without the product, by csv, json, pandas, pyarrow, gzip and their like.
"""

import bz2
import csv
import gzip
import http.server
import io
import json
import lzma
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.commands import call, done, python
from tests.end_to_end.files import HARD_TEXTS
from tests.runtime.jobs.helpers import Echo, read_records
from transferry.runtime.engine.result import RowError
from transferry.runtime.errors import InputError, TransferryError, UsageError
from transferry.runtime.io.http_file import HttpFile
from transferry.runtime.jobs.formats.readers import open_inputs, open_reader
from transferry.runtime.jobs.formats.sources import expand
from transferry.runtime.jobs.job import Job
from transferry.runtime.jobs.job_options import JobOptions

pandas = pytest.importorskip("pandas")
pyarrow = pytest.importorskip("pyarrow")
feather = pytest.importorskip("pyarrow.feather")
zstandard = pytest.importorskip("zstandard")

openpyxl = pytest.importorskip("openpyxl")

# Texts that only some formats hold: their line ends, tabs and carriage returns need quoting.
QUOTED = ["two\nlines", "tab\tinside", "a\r\nb\rc", '"\n"', "a;b|c,d", "a" * 5000]
TEXTS = [*HARD_TEXTS, *QUOTED]
Pack = Callable[[bytes], bytes]


def as_csv(texts: list[str], **dialect: Any) -> str:
    file = io.StringIO()
    csv.writer(file, **dialect).writerows([("id", "text"), *enumerate(texts)])
    return file.getvalue()


def as_lines(texts: list[str]) -> str:
    return "".join(f"{text}\n" for text in texts)


def as_jsonl(texts: list[str], **options: Any) -> str:
    rows = [{"id": str(number), "text": text} for number, text in enumerate(texts)]
    return "".join(json.dumps(row, **options) + "\n" for row in rows)


def as_frame(texts: list[str]) -> Any:
    return pandas.DataFrame({"id": [str(number) for number in range(len(texts))], "text": texts})


def parts(content: bytes, pack: Pack) -> bytes:
    """A file of several members, as pigz, pzstd and cat write them."""
    return b"".join(map(pack, (content[:100], b"", content[100:])))


def as_stream(path: Path) -> None:
    table = pyarrow.Table.from_pandas(as_frame(TEXTS))
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as to:
        to.write_table(table, max_chunksize=7)


zstd = zstandard.ZstdCompressor(write_checksum=True).compress
# By name: the content, or a function that writes it; and options of `run`.
FILES: dict[str, tuple[Callable[[], bytes] | Callable[[Path], object], list[str]]] = {
    "a.ndjson": (lambda: as_jsonl(TEXTS, ensure_ascii=False).encode(), []),
    "a.json": (lambda: as_jsonl(TEXTS).encode(), []),
    "a.jsonlines.gz": (lambda: parts(as_jsonl(TEXTS).encode(), gzip.compress), []),
    "mark.jsonl.zst": (lambda: parts(as_jsonl(TEXTS).encode("utf-8-sig"), zstd), []),
    "pandas.jsonl": (lambda path: as_frame(TEXTS).to_json(path, orient="records", lines=True), []),
    "pandas.csv": (lambda path: as_frame(TEXTS).to_csv(path, index=False), []),
    "all.csv": (lambda: as_csv(TEXTS, quoting=csv.QUOTE_ALL).encode("utf-8-sig"), []),
    "excel.csv": (lambda: as_csv(TEXTS, delimiter=";").encode("utf-8-sig"), []),
    "sep.csv": (lambda: b"sep=;\r\n" + as_csv(TEXTS, delimiter=";").encode(), []),
    "tabs.csv.xz": (lambda: lzma.compress(as_csv(TEXTS, delimiter="\t").encode()), []),
    "bars.CSV": (lambda: as_csv(TEXTS, delimiter="|").encode(), []),
    "named.csv": (lambda: as_csv(TEXTS, delimiter="^").encode(), ["--delimiter", "^"]),
    "wide.csv": (lambda: as_csv(TEXTS).encode("utf-16"), []),
    "wider.csv.bz2": (lambda: parts(as_csv(TEXTS).encode("utf-32"), bz2.compress), []),
    "china.jsonl": (
        lambda: as_jsonl(TEXTS, ensure_ascii=False).encode("gb18030"),
        ["--encoding", "gb18030"],
    ),
    "big.jsonl": (
        lambda: as_jsonl(TEXTS, ensure_ascii=False).encode("utf-16-be"),
        ["--encoding", "UTF-16BE"],
    ),
    "a.feather": (lambda path: feather.write_feather(as_frame(TEXTS), str(path)), []),
    "stream.arrow": (as_stream, []),
    "pandas.pq": (lambda path: as_frame(TEXTS).to_parquet(path, row_group_size=8), []),
}


@pytest.fixture(scope="module")
def expected(bundle_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The records of the rows in the plainest file, JSONL."""
    path = tmp_path_factory.mktemp("plain") / "in.jsonl"
    path.write_text(as_jsonl(TEXTS), encoding="utf-8")
    records = answers(bundle_folder, path)
    assert [record["source"] for record in records] == TEXTS
    return records


def answers(bundle: Path, path: Path, *options: str) -> list[dict[str, Any]]:
    out = path.with_name(f"{path.name}.out.jsonl")
    result = call("run", bundle, path, "-o", out, "--max-length", "3", *options)
    assert result.exit_code in (0, 6), result.stderr
    return read_records(out)


@pytest.mark.parametrize("name", FILES)
def test_every_file_gives_the_answers_of_the_plainest(
    bundle_folder: Path, expected: list[Any], tmp_path: Path, name: str
) -> None:
    make, options = FILES[name]
    path = tmp_path / name
    content = make(path) if make.__code__.co_argcount else make()  # type: ignore[call-arg]
    if isinstance(content, bytes):
        path.write_bytes(content)
    assert answers(bundle_folder, path, *options) == expected


LINES = [text for text in TEXTS if "\n" not in text]


@pytest.mark.parametrize(
    ("name", "pack", "encoding"),
    [
        ("a.txt", bytes, "utf-8"),
        ("corpus.de", bytes, "utf-8-sig"),
        ("test.2016.zh-Hans.zst", partial(parts, pack=zstd), "utf-8"),
        ("corpus.deu_Latn.xz", lzma.compress, "utf-16"),
        ("plain", partial(parts, pack=bz2.compress), "utf-32"),
    ],
)
def test_every_line_gives_the_answer_of_its_text(
    bundle_folder: Path, tmp_path: Path, name: str, pack: Pack, encoding: str
) -> None:
    plain, path = tmp_path / "in.jsonl", tmp_path / name
    plain.write_text(as_jsonl(LINES), encoding="utf-8")
    path.write_bytes(pack(as_lines(LINES).encode(encoding)))
    wanted = answers(bundle_folder, plain)
    assert answers(bundle_folder, path) == [{**each, "id": int(each["id"])} for each in wanted]


def rows_of(path: Path | str, **options: Any) -> list[str | RowError]:
    return [row.text for row in open_inputs(expand([path]), **options).rows()]


def kinds(path: Path, **options: Any) -> list[str]:
    """Returns the text of each row, or the kind of its error in angle brackets."""
    rows = rows_of(path, **options)
    return [row if isinstance(row, str) else f"<{row.kind}>" for row in rows]


PIECES = ["a", "b c", '"', '""', ",", ";", "\t", "\n", "\r\n", "\r", " ", "é", "\u2028", "\0"]


@pytest.mark.parametrize("seed", range(20))
def test_odd_tables_are_read_as_csv_reads_them_or_told(tmp_path: Path, seed: int) -> None:
    draw, path = random.Random(seed), tmp_path / "odd.csv"
    for _ in range(20):
        body = "".join(["1,a\n", *draw.choices(PIECES, k=draw.randrange(40)), "\n"])
        path.write_bytes(b"id,text\n" + body.encode())
        reader = open_reader(path, delimiter=",")
        rows = list(reader.rows())
        assert b"".join(row.raw for row in rows).decode() == body
        try:
            records = list(csv.reader(io.StringIO(body, newline="\n"), strict=True))
        except csv.Error:
            errors = [row.text.message for row in rows if isinstance(row.text, RowError)]
            assert errors
            assert "universal-newline mode" not in " ".join(errors)  # an option of Python's
            continue
        assert len(rows) == len(records)
        for row, record in zip(rows, records, strict=True):
            if isinstance(row.text, RowError):
                assert len(record) != 2 or "\0" in "".join(record)
            else:
                assert [row.id, row.text] == record


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
@pytest.mark.parametrize("name", ["a.txt.gz", "a.txt.zst", "a.txt.bz2", "a.txt.xz"])
def test_members_of_any_length(tmp_path: Path, name: str, encoding: str) -> None:
    """The first may hold a part of the byte order mark, or nothing."""
    packs: dict[str, Pack] = {".gz": gzip.compress, ".zst": zstd, ".bz2": bz2.compress}
    pack = packs.get(Path(name).suffix, lzma.compress)
    content = "".join(f"{text}\n" for text in LINES).encode(encoding)
    for first in range(7):
        members = content[:first], content[first : first + 1], content[first + 1 :]
        (tmp_path / name).write_bytes(b"".join(map(pack, members)))
        assert [row.text for row in open_reader(tmp_path / name).rows()] == LINES


@pytest.mark.parametrize("seed", range(10))
def test_odd_lines_are_all_there(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(20):
        content = "".join(draw.choices(PIECES, k=draw.randrange(1, 40))) + "\nend"
        path = tmp_path / "odd.txt"
        path.write_bytes(content.encode())
        lines = [line.removesuffix("\r") for line in content.split("\n")]
        wanted = ["<malformed>" if "\0" in line else line for line in lines]
        assert kinds(path, format="text") == wanted
        path = tmp_path / "odd.jsonl"
        path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
        assert kinds(path) == wanted


@pytest.mark.parametrize(
    ("name", "content", "options", "found"),
    [
        ("a.csv", b"id;text\n1;a, b\n2;c\n", {}, ["a, b", "c"]),
        ("a.csv", b"text\na; b\nc\n", {}, ["a; b", "c"]),
        ("a.csv", b'id;text\n1;"a;\n', {"delimiter": ";"}, ["<malformed>"]),
        ("a.csv", "id,text\n1,表\\n".encode("shift_jis"), {"encoding": "shift_jis"}, ["表\\n"]),
        ("a.tsv", b"id,text\n1,a\n", {"delimiter": ","}, ["a"]),
        ("a.txt", "Stra\xdfe".encode("cp1252"), {"encoding": "cp1252"}, ["Straße"]),
        ("a.txt", b"a\x81\nb", {"encoding": "cp1252"}, ["<undecodable>", "b"]),
        ("a.txt", b"\xff\xfea\0\n\0\0\xd8\n\0b\0", {}, ["a", "<undecodable>", "b"]),
        ("a.txt", "한\n한".encode("iso2022_kr"), {"encoding": "iso2022_kr"}, ["한", "한"]),
        ("a.txt", b"", {}, []),
        ("a.txt", b"\xef\xbb\xbf", {}, []),
        ("a.csv", b'sep="\ntext"id\n', {}, ['text"id']),
        ("a.csv.1", b"id,text\n1,a\n", {}, ["a"]),
        ("a.txt", b"<html>\n", {"format": "text"}, ["<html>"]),
        ("a.xml", b"<a/>\n", {"format": "text"}, ["<a/>"]),
    ],
)
def test_dialects(
    tmp_path: Path, name: str, content: bytes, options: dict[str, Any], found: list[str]
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert kinds(path, **options) == found


def written(write: Callable[..., object]) -> bytes:
    write(pandas.DataFrame({"text": ["a"]}), file := io.BytesIO())
    return file.getvalue()


PARQUET, ARROW = map(written, (pandas.DataFrame.to_parquet, feather.write_feather))


def wide_zstd() -> bytes:
    wide = zstandard.ZstdCompressionParameters.from_level(3, window_log=30, enable_ldm=True)
    packer = zstandard.ZstdCompressor(compression_params=wide).compressobj()
    return bytes(packer.compress(b"abc\n" * 999) + packer.flush())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.docx", b"PK", r"no input format docx; convert it \(pandoc .* format_in"),
        ("a.csv.bak", b"a", "there is no input format bak"),
        ("a.txt", b"PK\x03\x04\0\0\xff", "found a zip archive or an office document"),
        ("a.csv", PARQUET, "found a Parquet file; let its name end in .parquet"),
        ("a.parquet", PARQUET.replace(b"text", b"t\xffxt"), "column is not UTF-8"),
        ("a.arrow", ARROW.replace(b"text", b"t\xffxt"), "column is not UTF-8"),
        ("a.jsonl", b"%PDF-1.7\n\x01", "found a PDF file; convert it: pdftotext"),
        ("a.txt", "Wort\n".encode("utf-16-le"), "binary file or UTF-16"),
        ("a.csv", b"\n<!DOCTYPE html><html>", "found a page in HTML"),
        ("a.csv", b'<?xml version="1.0"?>\n<Error><Code>AccessDenied', "found a page in HTML"),
        ("a.csv", b"version https://git-lfs.github.com/spec/v1\nsize 9\n", "git lfs pull"),
        ("a.json", b'[{"text": "a"}]', r"one document in JSON.* jq -c '.\[\]'"),
        ("a.json", b'{\n "text": "a"}', "one document in JSON.* jq -c '.'"),
        ("a.json", b'{"rows": [\n{"text": "a"},\n{"text": "b"}\n]}', "one document in JSON"),
        ("a.json", b'[{"text": "%b"}]' % (b"a" * (9 << 20)), "one document in JSON"),
        ("a.jsonl", b'[\n{"text": "a"}]', "one document in JSON"),
        ("a.csv", b"id,text\r1,a\r", r"found only \\r; convert it: tr"),
        ("a.csv", b"id;text\n1;a\n2\n", "cannot tell whether ',' or ';'.*with delimiter"),
        ("a.csv", b"id;a,text\n1;2,x\n", "cannot tell whether ',' or ';'.*with delimiter"),
        ("a.tsv", b"id,text\n1,a\n", r"cannot tell whether '\\t' or ','.*with delimiter"),
        ("a.txt", b'{"text": "a"}\n', "found an object of JSON a line; add format_in jsonl"),
        (
            "a.txt",
            b'\nA title\n{"a": 1}\n{"a": 2\n' + b'{"a": 3}\n' * 4,
            "an object of JSON a line",
        ),
        ("a.en", b"A title\n" + b"Go.\tGeh.\n" * 3, "found 2 columns between tabs; choose one"),
        ("a.txt", b'id;"text"\n1;A dog\n2;"Two', "found a table of CSV; add format_in csv"),
        ("a.en", b"Go.\tGeh.\t1\n" * 3, "found 3 columns between tabs; choose one"),
        ("a.csv", b"A dog runs.\nTwo men\n", "expected a header, found 'A dog runs.'"),
        ("a.tsv", b"two men talk to me\na\n", "expected a header"),
        ("a.tsv", b'"id"\t"text"\n"1"\t"a"\n', "quotation marks as in CSV; add format_in csv"),
        ("a.zst", wide_zstd(), "larger window than 128 MiB; unpack it first: zstd -d --long"),
        ("a.xz", lzma.compress(b"abc\n" * 99)[:-9], "damaged or cut short"),
        ("a.bz2", bz2.compress(b"abc\n") + b"more", "damaged or cut short"),
        ("a.gz", gzip.compress(b"abc\n", mtime=0) + b"more", "damaged or cut short"),
        ("a.txt", b"\xff\xfea", "expected utf-16-le, found other bytes"),
    ],
)
def test_what_is_no_rows_is_refused(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises((InputError, UsageError), match=message) as raised:
        rows_of(path)
    assert "--format-in" not in str(raised.value), "the option has another name here"


def test_texts_of_one_line_may_be_anything(tmp_path: Path) -> None:
    """The format of a name is doubted only for lines that no text has; a chosen one never."""
    lines = ['{"text": 1', "a\tb", "[1]", "{}", "", "c\td\te"]
    path = tmp_path / "a.txt"
    path.write_text("\n".join(lines))
    assert rows_of(path) == lines
    path.write_text("yes,no\nA dog, a cat, a man.\n")
    assert rows_of(path) == ["yes,no", "A dog, a cat, a man."]
    (tmp_path / "a.json").write_text('{"text"\n{"text": "a"}\n')
    assert kinds(tmp_path / "a.json") == ["<malformed>", "a"]
    path.write_text("{}\na\tb\n")
    assert rows_of(path, format="text") == ["{}", "a\tb"]


def test_quoted_cells_of_pandas_are_no_tsv(tmp_path: Path) -> None:
    """A doubled mark tells them from the marks of a corpus, which belong to its texts."""
    draw, path, refused = random.Random(4), tmp_path / "a.tsv", 0
    for _ in range(60):
        texts = ["".join(draw.choices(['"', "a", " b", ",", "\n"], k=4)) for _ in range(3)]
        pandas.DataFrame({"text": texts, "n": "x"}).to_csv(path, sep="\t", index=False)
        quoted = any('"' in text for text in texts)
        if quoted:
            with pytest.raises(InputError, match="quotation marks as in CSV"):
                rows_of(path)
            refused += 1
        assert rows_of(path, format="csv", delimiter="\t") == texts
        lines = [text.replace("\n", "c") for text in texts]
        path.write_text("text\tn\n" + "".join(f"{line}\tx\n" for line in lines))
        assert rows_of(path, delimiter="\t") == lines
        if any('"' in line[1:-1].replace('""', "") for line in lines):
            assert rows_of(path) == lines
    assert 20 < refused < 60


def test_a_nul_is_an_error_of_its_row(tmp_path: Path) -> None:
    files = {
        "a.txt": b"a\nb\0\nc",
        "a.tsv": b"id\ttext\n1\ta\n\0002\tb\n3\tc",
        "a.csv": b'id,text\n1,a\n2,"b\n\0"\n3,c',
        "a.jsonl": b'{"text":"a"}\n{"text":"b","x":[{"\\u0000":1}]}\n{"text":"c"}',
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    table = {"text": ["a", "b", "c"], "id": ["1", "\0", "3"], "x": ["\\u0000"] * 3}
    pandas.DataFrame(table).to_parquet(tmp_path / "a.parquet")
    for name in (*files, "a.parquet"):
        assert kinds(tmp_path / name) == ["a", "<malformed>", "c"]


def test_a_row_of_any_length_takes_little_memory(tmp_path: Path) -> None:
    """Files of 96 MiB in a row; pages of Parquet of 1 GiB are tried by hand."""
    block = b"a" * (1 << 20)
    files = {
        "line.txt.gz": [b"one\n", *[block] * 96, b"\ntwo"],
        "open.csv.zst": [b"id,text\n1,one\n2,", *[block] * 96, b"\n3,two"],
        "lines.csv.zst": [b'id,text\n1,one\n2,"', *[b"b,c\n" * (1 << 18)] * 9, b'"\n3,two'],
    }
    for name, content in files.items():
        pack = zstd if name.endswith("zst") else partial(gzip.compress, compresslevel=1)
        (tmp_path / name).write_bytes(pack(b"".join(content)))
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from transferry.runtime.jobs.formats.readers import open_reader\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak()\n"
        "for name in sys.argv[1:]:\n"
        "    rows = [str(row.text)[:50] for row in open_reader(Path(name)).rows(0, 9)]\n"
        "    print(rows[0], 'malformed' in rows[1], rows[-1])\n"
        "print(peak() - before)\n"
    )
    told = python("-c", code, *(tmp_path / name for name in files)).stdout.splitlines()
    assert told[:2] == ["one True two"] * 2
    assert told[2].startswith("one True")
    assert int(told[3]) < 64 << 10


def test_a_file_that_changes_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "rows.txt"
    for change in ("shorter", "longer"):
        path.write_text("row\n" * 300)

        def changed(text: str, change: str = change) -> str:
            path.write_text("row\n" * (5 if change == "shorter" else 400))
            return text

        out = tmp_path / f"{change}.jsonl"
        job = Job(Echo(change=changed), path, out, JobOptions(chunk_rows=20))
        with pytest.raises(InputError, match="has changed since"):
            job.run()
        assert not out.exists()


ROWS = "".join(f"row {number:04}\n" for number in range(2000)).encode()
PAGE = b"<!DOCTYPE html><html>Please log in</html>"


class Unreliable(http.server.BaseHTTPRequestHandler):
    """A server with a file for each fault."""

    def log_message(self, *arguments: Any) -> None: ...

    def do_GET(self) -> None:
        name = self.path.partition("?")[0].removeprefix("/").removesuffix(".txt")
        asked = self.server.__dict__.setdefault("asked", [])
        asked.append(name)
        grown = ROWS[: 900 * asked.count(name)]
        status, content, length = {
            "whole": (200, ROWS, len(ROWS)),
            "early": (200, ROWS[:9000], len(ROWS)),
            "half": (200, ROWS, len(ROWS) // 2),
            "growing": (200, grown, len(grown)),
            "login": (302, b"", 0),
            "page": (200, PAGE, len(PAGE)),
            "number": (200, ROWS, "many"),
            "private": (401, b"", 0),
            "part": (206 if self.headers["Range"] else 200, ROWS, len(ROWS)),
        }.get(name, (int(name) if name.isdecimal() else 404, b"", 0))
        if name == "private" and self.headers["Authorization"] == "Basic bWU6czNjcmV0":
            status, content, length = 200, b"one\ntwo\n", 8
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        if status == 302:
            self.send_header("Location", "/page")
        if status == 206:
            self.send_header("Content-Range", f"bytes 0-{len(ROWS) - 1}/{len(ROWS)}")
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Unreliable) as serving:
        threading.Thread(target=serving.serve_forever, args=(0.01,), daemon=True).start()
        yield f"127.0.0.1:{serving.server_port}"
        serving.shutdown()


def test_another_part_of_a_file_is_told(server: str) -> None:
    with HttpFile(f"http://{server}/part", "part") as file:
        file.seek(1000)
        with pytest.raises(InputError, match="expected bytes 1000-, found bytes 0-"):
            file.read(10)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("early", "expected 18,000 bytes, as the server announced, found 9,000"),
        ("half", "expected 9,000 bytes, as the server announced, found more"),
        ("growing", "has changed since it was first read: expected 900 bytes, found 1800"),
        ("login", "found a page in HTML, such as of a log-in"),
        ("number", "its Content-Length is no number"),
        ("401", r"asks for a user and a password, or a token.* \(401 Unauthorized\)"),
        ("403", r"refuses these credentials, or the signature .* expired \(403 Forbidden\)"),
        ("404", r"there is no such file \(404 Not Found\)"),
        ("500", r"the server failed; try again later \(500 Internal Server Error\)"),
    ],
)
def test_what_a_server_does_not_deliver_is_told(
    tmp_path: Path, server: str, name: str, message: str
) -> None:
    job = Job(Echo(), f"http://{server}/{name}.txt?key=h1dden", tmp_path / "out.jsonl")
    with pytest.raises(TransferryError, match=message) as told:
        job.run()
    assert "h1dden" not in str(told.value)
    assert not (tmp_path / "out.jsonl").exists()


def test_a_url_keeps_its_secrets(bundle_folder: Path, tmp_path: Path, server: str) -> None:
    out, url = tmp_path / "out.jsonl", f"http://me:s3cret@{server}/private.txt?sig=h1dden"
    command: list[Any] = ["run", bundle_folder, url, "-o", out, "--max-length", "3"]
    told = done(*command)
    assert [record["source"] for record in read_records(out)] == ["one", "two"]
    again = done(*command[:2], url.replace("h1dden", "another"), *command[3:])
    assert "finished before" in again.stderr
    refused = call(*command[:2], url.replace("s3cret", "wr0ng"), "-o", tmp_path / "other.jsonl")
    assert f"http://***@{server}/private.txt?sig=***: cannot be read" in refused.stderr
    written = [path.read_text() for path in tmp_path.iterdir() if path.is_file()]
    for text in (*written, told.output, again.output, refused.output):
        assert not any(secret in text for secret in ("s3cret", "h1dden", "another", "wr0ng"))
    settings = Path(f"{out}.settings.toml").read_text()
    assert f"http://***@{server}/private.txt?sig=***" in settings
    assert "give the whole address" in call("run", bundle_folder, f"http://{server}/a?b=***").stderr
