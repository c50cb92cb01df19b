"""The format of an input, by its name and its first lines."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import PurePosixPath
from typing import Any, cast
from urllib.parse import unquote

from transferry.runtime.errors import InputError, Option, UsageError
from transferry.runtime.io.lines import PACKED, Compression, LongLine
from transferry.runtime.jobs.formats.remote_file import RemoteFile, Source
from transferry.runtime.jobs.job_options import InputFormat

# Formats by the ending of a name.
FORMATS: dict[str, InputFormat] = {
    **dict.fromkeys(("txt", "text", "out"), "text"),
    **dict.fromkeys(("src", "tgt", "trg", "ref", "hyp", "tok", "bpe", "lines"), "text"),
    **dict.fromkeys(("tsv", "tab"), "tsv"),
    "csv": "csv",
    **dict.fromkeys(("jsonl", "ndjson", "jsonlines", "json"), "jsonl"),
    **dict.fromkeys(("parquet", "pq"), "parquet"),
    **dict.fromkeys(("arrow", "feather", "ipc"), "arrow"),
    **dict.fromkeys(("xlsx", "xlsm"), "xlsx"),
}
# Endings of text files beside those: none, a number, and languages such as de, pt-BR and deu_Latn.
TEXT_NAME = re.compile(
    r"|[\d-]+|[a-z]{1,2}([-_]([a-z]{2}|[a-z]{4}))?|[a-z]{3}_[a-z]{4}"
    "|ara|ces|deu|eng|fin|fra|hin|ita|jpn|kor|nld|pol|por|rus|spa|swe|tur|ukr|vie|zho"
)
_KNOWN = ".csv, .tsv, .jsonl, .parquet, .arrow, .feather, .xlsx, .txt, or languages such as .de"
# How files of other formats become rows.
_CONVERSIONS = {
    "docx": "pandoc -t plain --wrap=none FILE -o NEW.txt",
    "pdf": "pdftotext FILE NEW.txt",
    "html": "pandoc -t plain --wrap=none FILE -o NEW.txt",
    **dict.fromkeys(("xls", "xlsb", "ods"), "soffice --headless --convert-to csv FILE"),
    "orc": "python -c \"import pandas; pandas.read_orc('FILE').to_parquet('NEW.parquet')\"",
}
# A line that holds names of columns, and no text: they have no blanks between them.
_NAMES = re.compile(r"\"?[\w.-]+\"?([,;|])(\"?[\w.-]+\"?\1)*\"?[\w.-]+\"?")
# A cell in quotation marks.
_QUOTED = re.compile(r'(?<![^\t\n])"(?:[^"]|"")*"(?![^\t\n])')
DELIMITERS = (",", ";", "\t", "|")
# Name of a folder that holds a column, and the value for rows that have none.
_PARTITION = re.compile("[^=]+=.*", re.DOTALL)
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True)
class Dialect:
    """How a file is read, where its format leaves that open; see `JobOptions`.

    `pages` tells whether the lines may be those of a page in HTML.
    """

    encoding: str | None = None
    delimiter: str | None = None
    sheet: str | None = None
    pages: bool = True


def named_format(path: Source) -> tuple[str, Compression]:
    """Splits the name of an output into its format, which may be unknown, and its compression."""
    compression: Compression = ""
    if path.suffix in (".gz", ".zst"):
        compression, path = cast(Compression, path.suffix), path.with_suffix("")
    return path.suffix.removeprefix(".").lower(), compression


def format_of_name(path: Source) -> InputFormat:
    """Returns the format that the name of an input says.

    Raises:
        UsageError: The name says another format, or has an unknown ending.
    """
    if str(path) == "-":
        return "text"
    named = _unpacked(path)
    name = named.suffix.removeprefix(".").lower()
    if name.isdecimal():  # rows.csv.1 is no text
        before = named.with_suffix("").suffix.removeprefix(".").lower()
        name = before if before in FORMATS else name
    if name in FORMATS:
        return FORMATS[name]
    if TEXT_NAME.fullmatch(name):
        return "text"
    advice = f"convert it ({_CONVERSIONS[name]})" if name in _CONVERSIONS else "convert it"
    raise UsageError(
        f"{path}: there is no input format {name}; {advice}, or choose with ",
        *(Option("format_in"), ". Known: "),
        f"{_KNOWN}, lines also with {', '.join(PACKED)}",
    )


def is_json(path: Source) -> bool:
    """Whether a name says JSON, and not lines of JSON."""
    return _unpacked(path).suffix.lower() == ".json"


def _unpacked(path: Source) -> Source:
    """Returns a name without the ending of a compression."""
    return path.with_suffix("") if path.suffix.lower() in PACKED else path


def require_json_lines(
    path: Source | str, begin: Sequence[bytes], encoding: str, *, strict: bool
) -> None:
    """Raises InputError for the first two lines of a document in JSON.

    `strict` refuses a single object too, a line that is too long, and lines without JSON.
    """
    lines = [line.decode(encoding, "replace") for line in begin]
    if strict and lines and isinstance(begin[0], LongLine):  # of its content only the hash is known
        lines = ["["]
    if not lines or (start := lines[0].strip())[:1] not in ("[", "{"):
        return
    try:
        value = json.loads(start)
        whole = len(lines) == 1 and (strict or (isinstance(value, list) and value != []))
    except ValueError:
        whole = start == "{" or (start[0] == "[" and (start == "[" or start[-1] == ","))
        whole |= strict and not any(map(_parsed, lines[1:]))
    except RecursionError:
        whole = False
    if whole:
        found = ".[]" if start[0] == "[" else "."
        raise InputError(
            f"{path} is one document in JSON, not an object a line; convert it: "
            f"jq -c '{found}' OLD.json > NEW.jsonl"
        )


def _parsed(line: str) -> Any:
    """Returns the value of a line in JSON; None for another line."""
    with suppress(ValueError, RecursionError):
        return json.loads(line)
    return None


def require_text(path: Source | str, lines: Sequence[str]) -> None:
    """Raises InputError for the first lines of a table or of JSONL, whose name says text.

    Most lines decide: there may be a title above them, or a damaged one among them.
    """
    found, lines = tuple[str, ...](), [line for line in lines if line.strip()]
    most = len(lines) // 2 + 1
    if lines and sum(isinstance(_parsed(line), dict) for line in lines) >= most:
        found = "an object of JSON a line; add ", Option("format_in"), " jsonl"
    header = _NAMES.fullmatch(lines[0]) if len(lines) > 1 else None
    if header and _fits(lines[:3], header[1], cut=True):
        found = "a table of CSV; add ", Option("format_in"), " csv"
    for tabs, count in Counter(line.count("\t") for line in lines).items():
        if tabs and count >= max(most, 3):
            found = (f"{tabs + 1} columns between tabs; choose one (cut -f1 OLD > NEW)",)
    if found:
        raise InputError(
            *(f"{path}: expected a text a line, found ", *found, ", or add ", Option("format_in")),
            " text to read each line as it stands",
        )


def find_delimiter(path: Source | str, lines: Sequence[str], usual: str, *, cut: bool) -> str:
    """Returns the delimiter of a table, by its first lines, header included.

    A delimiter fits if all records have as many columns as the header, and more than one. `usual`
    is the format's; `cut` tells whether the file goes on behind these lines.

    Raises:
        InputError: Several delimiters fit, or the header has another one and some rows have not;
            or cells of TSV are quoted as in CSV.
    """
    header = lines[0] if lines else ""
    if usual == "\t" and _is_quoted("\n".join(lines)):
        raise InputError(
            f"{path}: expected TSV, found cells in quotation marks as in CSV; add ",
            *(Option("format_in"), " csv ", Option("delimiter"), " tab, or ", Option("delimiter")),
            " tab alone if the marks belong to the texts",
        )
    # TSV has no quoting, so its rows say less.
    fitting = [each for each in DELIMITERS if usual != "\t" and _fits(lines, each, cut=cut)]
    if len(fitting) == 1:
        return fitting[0]
    others = [] if usual in header else [each for each in DELIMITERS if each in header]
    if usual == "\t":
        others = [each for each in others if any(each in line for line in lines[1:])]
    if not fitting and not others:
        return usual
    found = " or ".join(map(repr, fitting or [usual, *others]))
    raise InputError(
        f"{path}: cannot tell whether {found} stands between columns; choose one with ",
        *(Option("delimiter"), ", such as ", Option("delimiter"), " tab"),
    )


def _is_quoted(text: str) -> bool:
    """Whether pandas or Excel wrote a TSV: quoted cells, with doubled marks or in the header."""
    found = _QUOTED.findall(text)
    told = any('""' in cell[1:-1] for cell in found)
    told |= bool(found) and all(cell[:1] == '"' for cell in text.partition("\n")[0].split("\t"))
    return told and '"' not in _QUOTED.sub("", text)


def _fits(lines: Sequence[str], delimiter: str, *, cut: bool) -> bool:
    widths = _widths(lines, delimiter, csv.QUOTE_MINIMAL, cut=cut)
    return len(set(widths)) == 1 and widths[0] > 1


def _widths(lines: Sequence[str], delimiter: str, quoting: Any, *, cut: bool) -> list[int]:
    """Returns the numbers of columns of all records but blank ones; none where one is invalid."""
    widths = []
    try:
        for record in csv.reader(lines, delimiter=delimiter, strict=True, quoting=quoting):
            widths += [len(record)] if record else []
    except csv.Error as error:
        return widths if cut and "end of data" in str(error) else []
    return widths


def require_header(
    path: Source | str, lines: Sequence[str], delimiter: str, *, quotes: bool, cut: bool
) -> None:
    """Raises InputError where all first rows agree on another number of columns than the header."""
    quoting = csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE
    header, *rows = _widths(lines, delimiter, quoting, cut=cut) or [0]
    if len(rows) > 1 and {header} != set(rows) == {rows[0]}:
        quoting_too = f"quote cells that hold {delimiter!r}, " if quotes else ""
        raise InputError(
            f"{path}: expected a name for each column, found {header} in the header and {rows[0]} "
            f"columns in the rows; name them all, {quoting_too}or leave out R's names of rows "
            "(row.names = FALSE)"
        )


def up_to(lines: Iterator[bytes], count: int, size: int) -> Iterator[bytes]:
    """Yields the first lines, until there are enough of them or of their bytes."""
    for line in islice(lines, count):
        yield line
        size -= len(line)
        if size < 0:
            return


def partition_columns(path: Source) -> dict[str, str | None]:
    """Returns the columns that folders named NAME=VALUE hold for a file, as texts.

    Hive, Spark and pandas write a table so; the folders lie right above the file.
    """
    whole = path.url.split("?")[0] if isinstance(path, RemoteFile) else str(path.absolute())
    folders = reversed(PurePosixPath(whole).parts[:-1])
    # A name may hold an equals sign, written %3D.
    found = (each.split("=", 1) for each in takewhile(_PARTITION.fullmatch, folders))
    try:
        pairs = [tuple(unquote(text, errors="strict") for text in each) for each in found]
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: expected UTF-8 in the names of its folders, such as %C3%A4 for ä, found "
            f"%{error.object[error.start]:02X}; rename the folder"
        ) from error
    return {name: None if value == _NO_VALUE else value for name, value in reversed(pairs)}
