"""Input formats of a job: rows streamed from text, TSV, CSV, JSONL, Parquet or Arrow."""

from __future__ import annotations

import csv
import json
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice, tee, zip_longest
from typing import Any, NamedTuple, cast, get_args

from transferry.runtime.engine.result import RowError
from transferry.runtime.engine.tasks.task import Layout
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.io.lines import Compression, read_raw_lines
from transferry.runtime.jobs.formats.cells import decoded
from transferry.runtime.jobs.formats.columnar import ArrowReader, ParquetReader
from transferry.runtime.jobs.formats.openai_batch import Request, parse_request
from transferry.runtime.jobs.formats.remote_file import Source
from transferry.runtime.jobs.formats.rows import (
    Fields,
    InputRow,
    Languages,
    RowReader,
    layout_of,
    unique,
)
from transferry.runtime.jobs.formats.sources import Series
from transferry.runtime.jobs.job_options import InputFormat

# Characters in a CSV field: a longer one was opened by a quotation mark that nothing closes.
MOST_FIELD = 1 << 24
# Deeper JSON is refused, since writing it again could exceed Python's stack.
MOST_NESTED = 100
# Rows of JSONL searched for an object whose keys become the columns.
_FIRST_ROWS = 1000


def open_inputs(sources: Sequence[Source], **chosen: Any) -> RowReader:
    """Opens the files of an input, which are read one after another; see `open_reader`."""
    readers = [open_reader(source, **chosen) for source in sources]
    return readers[0] if len(readers) == 1 else Series(readers)


def open_reader(
    path: Source,
    *,
    format: InputFormat | None = None,
    column: str | None = None,
    lists: bool = False,
    languages: Languages = (None, None),
) -> RowReader:
    """Opens a file of rows and reads its header.

    Args:
        path: The file; "-" is standard input. Files of lines may be gzip or zstd.
        format: Format. Default: from the name, else text.
        column: Field that holds the text. Default: `text` or `source`, or the only one besides
            `id`.
        lists: Whether the column holds lists, of messages or of token ids; only JSONL has lists.
        languages: Columns with the languages of the text and of its answer.

    Raises:
        InputError: The file cannot be read, lacks the column, or has two of one name.
        UsageError: The format cannot be read from there, or needs a package that is missing.
    """
    name, compression = named_format(path)
    format = format or cast(InputFormat, name if name in get_args(InputFormat) else "text")
    if lists and format != "jsonl":
        raise UsageError(
            f"{path} is read as {format}, and --messages and --prompt-ids name a column of JSONL; "
            "give a .jsonl file, or add --format-in jsonl"
        )
    if format in ("parquet", "arrow"):
        kind = format.capitalize()
        if str(path) == "-":
            raise UsageError(f"{kind} cannot be read from standard input; name a file")
        if compression:
            raise UsageError(f"{path}: {kind} is compressed inside; unpack it first")
    for named in filter(None, (column, *languages) if format == "text" else ()):
        raise UsageError(f"{path} is read as text, which has no column {named}; leave it out")
    reader = _READERS[format](path, format, column)
    for named in filter(None, languages):
        # In JSONL a field may be missing in one row and present in the next.
        if format != "jsonl" and named not in reader.layout.columns:
            others = ", ".join(reader.layout.columns) or "none besides the text"
            raise InputError(f"{path}: there is no column {named} for languages; it has {others}")
    reader.lists, reader.languages = lists, languages
    return reader


def named_format(path: Source) -> tuple[str, Compression]:
    """Splits a file's name into its format, which may be unknown, and its compression."""
    compression: Compression = ""
    if path.suffix in (".gz", ".zst"):
        compression, path = cast(Compression, path.suffix), path.with_suffix("")
    return path.suffix.removeprefix(".").lower(), compression


def read_rows(
    reader: RowReader, target: RowReader | None, first: int = 0, last: int | None = None
) -> Iterator[InputRow]:
    """Streams rows, each with the row of the same number of `target` where there is one.

    Raises:
        InputError: A file cannot be read, or one of the two ends before the other.
    """
    rows = reader.rows(first, last)
    return rows if target is None else _paired(rows, target.rows(first, last), target.layout.path)


def _paired(
    rows: Iterator[InputRow], others: Iterator[InputRow], path: Source | str
) -> Iterator[InputRow]:
    for row, other in zip_longest(rows, others):
        if row is None or other is None:
            longer = f"{path} goes on" if row is None else f"{path} ends"
            raise InputError(
                f"{longer} after row {(row or other).number} of the other input; give files of "
                "equal length"
            )
        raw = b"%d %b%b" % (len(row.raw), row.raw, other.raw)
        yield replace(row, raw=raw, target=other.text)


class _Line(NamedTuple):
    """The bytes of a row, and its cells if they are parsed while reading, as in CSV."""

    raw: bytes
    cells: list[str] | RowError | None = None


class _LineReader(RowReader):
    """Reads files of lines. Standard input can be iterated once."""

    def __init__(self, path: Source, format: InputFormat, column: str | None) -> None:
        self.file = path
        self._names, lines = self._header(self._lines())
        self.layout = self._layout(format, column)
        self._standard_input = lines if str(path) == "-" else None

    def _layout(self, format: InputFormat, column: str | None) -> Layout:
        return layout_of(self.file, format, self._names, column)

    def rows(self, first: int = 0, last: int | None = None) -> Iterator[InputRow]:
        lines = self._standard_input or self._header(self._lines())[1]
        for number, line in islice(enumerate(lines), first, last):
            yield self._row(number, self._fields(line), line.raw)

    def _lines(self) -> Iterator[_Line]:
        """Reads the file from its beginning, header included."""
        return map(_Line, read_raw_lines(self.file))

    @abstractmethod
    def _header(self, lines: Iterator[_Line]) -> tuple[list[str], Iterator[_Line]]:
        """Returns the names of the fields, and the lines that are rows."""

    @abstractmethod
    def _fields(self, line: _Line) -> Fields | RowError:
        """Returns the fields of a row, its text and id included."""


class _TextReader(_LineReader):
    def _header(self, lines: Iterator[_Line]) -> tuple[list[str], Iterator[_Line]]:
        return ["text"], lines

    def _fields(self, line: _Line) -> Fields | RowError:
        text = decoded(line.raw)
        return text if isinstance(text, RowError) else {"text": text}


class _TsvReader(_LineReader):
    """Lines split at each tab; a quotation mark is an ordinary character."""

    def _header(self, lines: Iterator[_Line]) -> tuple[list[str], Iterator[_Line]]:
        header = next(lines, None)
        if header is None:
            raise InputError(f"{self.file}: expected a header with names of columns, found nothing")
        names = self._cells(header)
        if isinstance(names, RowError):
            raise InputError(f"{self.file}: the header cannot be read: {names.message}")
        return unique(names, self.file), lines

    def _fields(self, line: _Line) -> Fields | RowError:
        cells = self._cells(line)
        if isinstance(cells, RowError):
            return cells
        if len(cells) != len(self._names):
            return RowError("malformed", f"expected {len(self._names)} columns, found {len(cells)}")
        return dict(zip(self._names, cells, strict=True))

    def _cells(self, line: _Line) -> list[str] | RowError:
        text = decoded(line.raw)
        return text if isinstance(text, RowError) else text.split("\t")


class _CsvReader(_TsvReader):
    """RFC 4180: commas, and quotation marks around fields with commas or line breaks."""

    def _lines(self) -> Iterator[_Line]:
        csv.field_size_limit(max(csv.field_size_limit(), MOST_FIELD))
        taken: list[bytes] = []

        def texts() -> Iterator[str]:
            for line in read_raw_lines(self.file, keep_ends=True):
                taken.append(line)
                # Bytes that are not UTF-8 are found in _cells, once it is known which row has them.
                yield line.decode(errors="replace")

        reader = csv.reader(texts(), strict=True)
        while True:
            cells: list[str] | RowError
            try:
                cells = next(reader) or [""]
            except StopIteration:
                return
            except csv.Error as error:
                over = f" in a record over {len(taken)} lines" if len(taken) > 1 else ""
                cells = RowError("malformed", f"expected CSV{over}, found: {error}")
            yield _Line(b"".join(taken), cells)
            taken.clear()

    def _cells(self, line: _Line) -> list[str] | RowError:
        text = decoded(line.raw)
        assert line.cells is not None
        return text if isinstance(text, RowError) else line.cells


class _JsonlReader(_LineReader):
    def _header(self, lines: Iterator[_Line]) -> tuple[list[str], Iterator[_Line]]:
        seen: list[_Line] = []
        names: list[str] = []
        for line in islice(lines, _FIRST_ROWS):
            seen.append(line)
            fields = self._fields(line)
            if not isinstance(fields, RowError):
                names = list(fields)
                break
        return names, chain(seen, lines)

    def _fields(self, line: _Line) -> Fields | RowError:
        text = decoded(line.raw)
        if isinstance(text, RowError):
            return text
        try:
            fields = _JSON.decode(text)
            if not isinstance(fields, dict):
                raise ValueError(f"it is a {type(fields).__name__}")
            if _depth(fields) > MOST_NESTED:
                raise RecursionError
        except ValueError as error:
            return RowError("malformed", f"expected a JSON object: {error}")
        except RecursionError:
            return RowError("malformed", f"expected JSON nested at most {MOST_NESTED} deep")
        if "\\u" in text:
            try:
                json.dumps(fields, ensure_ascii=False).encode()
            except UnicodeEncodeError as error:
                return RowError("undecodable", f"half of a surrogate pair: {error.reason}")
        return fields


class _RequestReader(_JsonlReader):
    """Lines of the OpenAI Batch API, all with the settings of the first."""

    _first: Request | None = None

    def _header(self, lines: Iterator[_Line]) -> tuple[list[str], Iterator[_Line]]:
        first, kept = tee(islice(lines, _FIRST_ROWS))
        requests = (self._request(self._fields(line)) for line in first)
        self._first = next((each for each in requests if isinstance(each, Request)), None)
        return ["request"], chain(kept, lines)

    def _layout(self, format: InputFormat, column: str | None) -> Layout:
        path = self.file
        if column is not None:
            raise UsageError(f"{path} holds requests, which have no column {column}; leave it out")
        if (first := self._first) is None:
            return Layout(path, format, (), has_id=True)
        chat = first.kind == "messages"
        return Layout(path, format, (), True, None, "", first.settings, chat, first.task)

    def _request(self, fields: Fields | RowError) -> Request | RowError:
        return fields if isinstance(fields, RowError) else parse_request(fields)

    def _row(self, number: int, fields: Fields | RowError, raw: bytes) -> InputRow:
        number += self.offset
        id = number if isinstance(fields, RowError) else str(fields.get("custom_id", number))
        request = self._request(fields)
        if isinstance(request, RowError):
            return InputRow(number, id, request, {"number": number}, raw)
        repeated = {"number": number, "endpoint": request.endpoint, "model": request.model}
        text: str | RowError = request.text
        if (request.settings, request.task) != (self.layout.generation, self.layout.task):
            text = RowError(
                "settings",
                "all requests of a batch must ask for the same, and this one has other settings "
                "than the first; put it into another file",
            )
        return InputRow(number, id, text, repeated, raw, kind=request.kind)


_READERS: dict[InputFormat, Callable[..., RowReader]] = {
    "text": _TextReader,
    "tsv": _TsvReader,
    "csv": _CsvReader,
    "jsonl": _JsonlReader,
    "openai": _RequestReader,
    "parquet": ParquetReader,
    "arrow": ArrowReader,
}


def _object(pairs: list[tuple[str, Any]]) -> Fields:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("it has a key twice")
    return fields


def _finite(number: str) -> float:
    value = float(number)
    return value if math.isfinite(value) else _refuse_number(number)


def _refuse_number(number: str) -> float:
    raise ValueError(f"{number} is not both a JSON number and a float64")


_JSON = json.JSONDecoder(
    object_pairs_hook=_object, parse_constant=_refuse_number, parse_float=_finite
)


def _depth(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(_depth, value), default=0) if isinstance(value, list) else 0
