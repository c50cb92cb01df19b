"""Input formats of a job: rows streamed from text, TSV, CSV, JSONL, Parquet or Arrow."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from abc import abstractmethod
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain, islice, tee
from pathlib import Path
from typing import Any, NamedTuple

from transferry.runtime.engine.result import RowError
from transferry.runtime.engine.tasks.task import Layout
from transferry.runtime.errors import InputError, Option, UsageError
from transferry.runtime.io.line_index import LineIndex
from transferry.runtime.io.lines import (
    MOST_LINE,
    PACKED,
    LongLine,
    encoding_of_lines,
    is_plain,
    read_raw_lines,
)
from transferry.runtime.io.whole import reason, unreadable
from transferry.runtime.jobs.formats.cells import (
    JSON,
    CsvLines,
    as_text,
    decoded,
    depth,
    has_nul,
)
from transferry.runtime.jobs.formats.columnar import ArrowReader, ParquetReader, require_texts
from transferry.runtime.jobs.formats.detection import (
    Dialect,
    find_delimiter,
    format_of_name,
    is_json,
    require_header,
    require_json_lines,
    require_text,
    up_to,
)
from transferry.runtime.jobs.formats.openai_batch import Request, parse_request
from transferry.runtime.jobs.formats.remote_file import Source
from transferry.runtime.jobs.formats.rows import (
    FIRST_ROWS,
    Fields,
    InputRow,
    Languages,
    RowReader,
    layout_of,
    unique,
    with_texts,
)
from transferry.runtime.jobs.formats.sources import Kept, Series, Steady, reads_once
from transferry.runtime.jobs.formats.spreadsheet import SpreadsheetReader
from transferry.runtime.jobs.job_options import InputFormat

# Rows and bytes by which the delimiter of a table is found.
FIRST_RECORDS, FIRST_BYTES = 100, 1 << 20
# First line of a table in which Excel tells the delimiter.
_SEPARATOR = re.compile(rb"sep=([^\r\n\"])\r?\n?", re.I)
# Bytes in which the shape of at most so many rows tells whether a line begins a row of CSV.
_PROBES, _PROBED = (1 << 16, 1 << 20, 1 << 24), 10
_LINES = ("text", "tsv", "csv", "jsonl", "openai")
# Deeper JSON is refused, since writing it again could exceed Python's stack.
MOST_NESTED = 100


def open_inputs(sources: Sequence[Source], **chosen: Any) -> RowReader:
    """Opens the files of an input, which are read one after another; see `open_reader`."""
    readers = [open_reader(source, **chosen) for source in sources]
    return readers[0] if len(readers) == 1 else Series(readers)


def open_reader(
    path: Source,
    *,
    format: InputFormat | None = None,
    column: str | Sequence[str] | None = None,
    lists: bool = False,
    languages: Languages = (None, None),
    encoding: str | None = None,
    delimiter: str | None = None,
    sheet: str | None = None,
) -> RowReader:
    """Opens a file of rows and reads its header; for the settings see `JobOptions`.

    `lists` tells that the column holds lists, of messages or of token ids; `languages` are the
    columns with the languages of the text and of its answer.

    Raises:
        InputError: The file cannot be read, lacks the column, or has two of one name.
        UsageError: The format is unknown, cannot be read from there, or needs a package that is
            missing; or the encoding or the delimiter has no effect.
    """
    dialect = Dialect(encoding, delimiter, sheet, pages=format == "text")
    json_name = format is None and is_json(path) and not reads_once(path)
    format = format or format_of_name(path)
    if lists and format != "jsonl":
        raise UsageError(
            f"{path} is read as {format}, and ",
            *(Option("messages"), " and ", Option("prompt_ids"), " name a column of JSONL; "),
            *("give a .jsonl file, or add ", Option("format_in"), " jsonl"),
        )
    _require_effect(path, format, dialect)
    texts = (column,) if isinstance(column, str) else column or ()
    for named in filter(None, (*texts, *languages) if format == "text" else ()):
        raise UsageError(f"{path} is read as text, which has no column {named}; leave it out")
    if json_name:
        begin = [*islice(read_raw_lines(path, encoding=encoding, pages=False), 2)]
        require_json_lines(path, begin, encoding_of_lines(encoding), strict=True)
    reader = _READERS[format](path, format, next(iter(texts), None), dialect)
    for named in filter(None, languages):
        # In JSONL a field may be missing in one row and present in the next.
        if format != "jsonl" and named not in reader.layout.columns:
            known = ", ".join(reader.layout.columns) or "none besides the text"
            raise InputError(f"{path}: there is no column {named} for languages; it has {known}")
    reader.layout = with_texts(reader.layout, texts[1:])
    require_texts(reader.layout)
    reader.lists, reader.languages = lists, languages
    return reader


def _require_effect(path: Source, format: InputFormat, dialect: Dialect) -> None:
    """Raises UsageError for options that a format lacks, or a file that cannot hold it."""
    if format not in _LINES:
        kind = format.capitalize() if format != "xlsx" else ".xlsx"
        if reads_once(path):
            raise UsageError(f"{path}: {kind} cannot be read from a pipe or stdin; name a file")
        if path.suffix.lower() in PACKED:
            raise UsageError(f"{path}: {kind} is compressed inside; unpack it first")
    takers = {"encoding": _LINES, "sheet": ("xlsx",), "delimiter": ("tsv", "csv")}
    for name, formats in takers.items():
        if getattr(dialect, name) is not None and format not in formats:
            raise UsageError(Option(name), f" has no effect on {format}: {path}")


class _Line(NamedTuple):
    """The bytes of a row, and its cells if they are parsed while reading, as in CSV."""

    raw: bytes
    cells: list[str] | RowError | None = None


class _LineReader(RowReader):
    """Reads files of lines. Standard input and pipes can be iterated once."""

    # Lines above the first row, and whether a row with quotation marks may have several lines.
    _above, _quotes = 0, False
    _index: LineIndex | None = None
    _stop = math.inf

    def __init__(
        self, path: Source, format: InputFormat, column: str | None, dialect: Dialect
    ) -> None:
        self.file, self._dialect, self._steady = path, dialect, Steady(path)
        self._encoding = encoding_of_lines(dialect.encoding)
        self._names, lines = self._header(self._lines())
        self.layout = self._layout(format, column)
        self._only = lines if reads_once(path) else None

    def _layout(self, format: InputFormat, column: str | None) -> Layout:
        return layout_of(self.file, format, self._names, column)

    def number(self, folder: Path | None = None, share: float = 0.0) -> None:
        """Counts lines; rows where the file is packed, or some may have several lines."""
        if self.keeps:
            try:
                index = LineIndex.of(self._steady, folder, share)
            except OSError as error:
                raise unreadable(self.file, error) from error
            if not (index.quotes and self._quotes):
                self._index, self._sha256 = index, index.sha256
                self.count = max(0, index.lines - self._above)
        super().number(folder, share)

    @cached_property
    def keeps(self) -> bool:  # type: ignore[override]
        """Whether lines can be found from any byte on."""
        try:
            with self._steady.opened() as file:
                return file.seekable() and is_plain(file, self._dialect.encoding)
        except OSError as error:
            raise unreadable(self.file, error) from error

    def start(self, at: int) -> int:
        if at >= self._steady.size:
            return at
        header = islice(self._split(self._raw_lines(0, keep_ends=True)), self._above)
        if at <= sum(len(line.raw) for line in header) + len(BOM_UTF8):
            return 0
        with self._steady.opened() as file:
            file.seek(at - 1)
            while (line := file.readline(MOST_LINE)) and not line.endswith(b"\n"):
                pass
            return int(file.tell())

    def cut(self, begin: int, end: int) -> None:
        self._index, self._stop = LineIndex([self._above], [begin]), end

    @property
    def size(self) -> int:
        begin = self._index.before(self._above)[1] if self._stop < math.inf and self._index else 0
        return int(min(self._steady.size, self._stop)) - begin

    def share(self, place: Any = None) -> float:
        size, end = self.size, min(self._steady.size, self._stop)
        return 1 - (end - (self._steady.at if place is None else place[1])) / size if size else 0.0

    def place(self, first: int) -> Any:
        """Returns number and offset of a line."""
        return list(self._index.before(first + self._above)) if self._index else [0, 0]

    def keep(self, first: int, rows: int, place: Any) -> tuple[int, Any]:
        number, start = place
        kept = self._steady.kept = Kept(start)
        size, skipped = 0, first + self._above - number

        def measured() -> Iterator[bytes]:
            nonlocal size
            for line in self._raw_lines(start, keep_ends=True):
                size += line.size if isinstance(line, LongLine) else len(line)
                yield line

        found = sum(1 for _ in islice(self._split(measured()), skipped + rows))
        size += 3 * (start == 0 and kept.content.startswith(BOM_UTF8))
        self._index = LineIndex([number], [start])
        return max(0, found - skipped), [number + found, start + size]

    def rows(self, first: int = 0, last: int | None = None) -> Iterator[InputRow]:
        start, begun = self.place(first)
        if begun >= self._stop:
            return
        if begun:
            number, lines = start - self._above, self._lines(begun)
        else:
            number, lines = 0, self._only or self._header(self._lines())[1]
        stop = None if last is None else max(0, last - number)
        for place, line in islice(enumerate(lines, number), max(0, first - number), stop):
            yield self._row(place, self._fields(line), line.raw)

    def _lines(self, start: int = 0) -> Iterator[_Line]:
        """Reads the file from its beginning, header included, or from the byte of a row."""
        return self._split(self._raw_lines(start))

    def _split(self, lines: Iterator[bytes]) -> Iterator[_Line]:
        """Returns the rows in lines; those of CSV have their ends."""
        return map(_Line, lines)

    def _raw_lines(self, start: int, **kept: Any) -> Iterator[bytes]:
        told: dict[str, Any] = {"encoding": self._dialect.encoding, "pages": self._dialect.pages}
        return read_raw_lines(self._steady, start=start, stop=self._stop, **told, **kept)

    @abstractmethod
    def _header(self, lines: Iterator[_Line]) -> tuple[list[str], Iterator[_Line]]:
        """Returns the names of the fields, and the lines that are rows."""

    @abstractmethod
    def _fields(self, line: _Line) -> Fields | RowError:
        """Returns the fields of a row, its text and id included."""


class _TextReader(_LineReader):
    def _header(self, lines: Iterator[_Line]) -> tuple[list[str], Iterator[_Line]]:
        return ["text"], lines

    def _lines(self, start: int = 0) -> Iterator[_Line]:
        lines = self._raw_lines(start)
        if not start and not self._dialect.pages:  # the format was not chosen
            head = [*up_to(lines, FIRST_RECORDS, FIRST_BYTES)]
            require_text(self.file, [line.decode(self._encoding, "replace") for line in head])
            lines = chain(head, lines)
        yield from self._split(lines)

    def _fields(self, line: _Line) -> Fields | RowError:
        text = decoded(line.raw, self._encoding)
        return text if isinstance(text, RowError) else {"text": text}


class _TsvReader(_LineReader):
    """Lines split at each tab; a quotation mark is an ordinary character."""

    _delimiter: str | None = None
    _mark = ""

    def _layout(self, format: InputFormat, column: str | None) -> Layout:
        delimiter = (self._quotes and self._delimiter) or ","
        return replace(super()._layout(format, column), delimiter=delimiter, mark=self._mark)

    def _lines(self, start: int = 0) -> Iterator[_Line]:
        return self._split(self._delimited(start))

    def _delimited(self, start: int) -> Iterator[bytes]:
        """Returns the lines of the table, and finds its byte order mark and delimiter."""
        lines = self._raw_lines(start, keep_ends=self._quotes, keep_mark=not start)
        if start:
            return lines
        self._above = 1
        head = list(up_to(lines, FIRST_RECORDS, FIRST_BYTES))
        if head and head[0].startswith(BOM_UTF8):
            self._mark, head[0] = BOM_UTF8.decode(), head[0].removeprefix(BOM_UTF8)
        if head and (told := _SEPARATOR.fullmatch(head[0])):  # Excel's own
            del head[0]
            self._above = 2
            self._delimiter = told[1].decode("latin-1")
        self._delimiter = self._dialect.delimiter or self._delimiter
        texts = [line.decode(self._encoding, "replace") for line in head]
        cut = (more := next(lines, None)) is not None
        if self._delimiter is None:
            usual = "," if self._quotes else "\t"
            self._delimiter = find_delimiter(self.file, texts, usual, cut=cut)
        require_header(self.file, texts, self._delimiter, quotes=self._quotes, cut=cut)
        return chain(head, [] if more is None else [more], lines)

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
        text = decoded(line.raw, self._encoding)
        return text if isinstance(text, RowError) else text.split(self._delimiter)


class _CsvReader(_TsvReader):
    """RFC 4180: commas, and quotation marks around fields with commas or line breaks."""

    _quotes = True

    def _split(self, lines: Iterator[bytes]) -> Iterator[_Line]:
        csv.field_size_limit(max(csv.field_size_limit(), MOST_LINE))
        record = CsvLines(lines, self._encoding)
        reader = csv.reader(record, delimiter=self._delimiter or ",", strict=True)
        while True:
            cells: list[str] | RowError
            try:
                cells = next(reader) or [""]
            except StopIteration:
                return
            except csv.Error as error:
                if "end of data" in str(error) and self._stop < self._steady.size:
                    raise InputError(
                        f"{self.file}: it is not clear at which byte a row begins, such as "
                        f"{self._stop:,.0f}; add ",
                        *(Option("partition_by"), " rows"),
                    ) from error
                over = f" in a record over {record.lines} lines" if record.lines > 1 else ""
                cells = RowError("malformed", f"expected CSV{over}, found: {reason(error)}")
            yield _Line(record.taken(), cells)

    def start(self, at: int) -> int:
        """Returns the byte of a row that probably begins there; `_split` tells of wrong ones."""
        if (start := super().start(at)) in (0, self._steady.size):
            return start
        for most in _PROBES:
            with self._steady.opened() as file:
                file.seek(start)
                content = file.read(most)
            whole = len(content) < most
            for begin in (b"", b'"'):  # outside quotation marks, or inside
                rows = [*islice(self._split(io.BytesIO(begin + content)), _PROBED)]
                rows = rows if whole else rows[:-1]  # the last may be cut
                part, rows = rows[: len(begin)], rows[len(begin) :]
                fits = [isinstance(row.cells, list) for row in part] + [*map(self._fits, rows)]
                if all(fits) and (rows or (part and whole)):
                    return start + sum(len(row.raw) - 1 for row in part)
        return start

    def _fits(self, line: _Line) -> bool:
        return isinstance(line.cells, list) and len(line.cells) == len(self._names)

    def _cells(self, line: _Line) -> list[str] | RowError:
        assert line.cells is not None
        if isinstance(line.cells, RowError) and isinstance(line.raw, LongLine):
            return line.cells
        text = decoded(line.raw, self._encoding)
        return text if isinstance(text, RowError) else line.cells


class _JsonlReader(_LineReader):
    tells = False

    def _header(self, lines: Iterator[_Line]) -> tuple[list[str], Iterator[_Line]]:
        seen: list[_Line] = [*islice(lines, 2)]
        lines, names = chain(seen, lines), list[str]()
        firsts = [line.raw for line in seen]
        require_json_lines(self.file, firsts, self._encoding, strict=False)
        seen = []
        for line in islice(lines, FIRST_ROWS):
            seen.append(line)
            fields = self._fields(line)
            if not isinstance(fields, RowError):
                names, self.tells = list(fields), True
                break
        return names, chain(seen, lines)

    def _fields(self, line: _Line) -> Fields | RowError:
        text = decoded(line.raw, self._encoding)
        if isinstance(text, RowError):
            return text
        try:
            fields = JSON.decode(text)
            if not isinstance(fields, dict):
                raise ValueError(f"it is {text.strip()[:80]}")
            if depth(fields) > MOST_NESTED:
                raise RecursionError
        except ValueError as error:
            return RowError("malformed", f"expected a JSON object: {reason(error)}")
        except RecursionError:
            return RowError("malformed", f"expected JSON nested at most {MOST_NESTED} deep")
        if "\\u" in text:
            try:
                json.dumps(fields, ensure_ascii=False).encode()
            except UnicodeEncodeError as error:
                return RowError("undecodable", f"half of a surrogate pair: {error.reason}")
            if has_nul(fields):
                return RowError("malformed", "found a NUL, written as \\u0000")
        return fields


class _RequestReader(_JsonlReader):
    """Lines of the OpenAI Batch API, all for the task of the first."""

    _first: Request | None = None

    def _header(self, lines: Iterator[_Line]) -> tuple[list[str], Iterator[_Line]]:
        first, kept = tee(islice(lines, FIRST_ROWS))
        requests = (self._request(self._fields(line)) for line in first)
        usable = (each for each in requests if isinstance(each, Request) and each.error is None)
        self._first = next(usable, None)
        self.tells = self._first is not None
        return ["request"], chain(kept, lines)

    def _layout(self, format: InputFormat, column: str | None) -> Layout:
        path = self.file
        if column is not None:
            raise UsageError(f"{path} holds requests, which have no column {column}; leave it out")
        if (first := self._first) is None:
            return Layout(path, format, (), has_id=True)
        chat = first.kind == "messages"
        return Layout(path, format, (), True, has_chat=chat, task=first.task)

    def _request(self, fields: Fields | RowError) -> Request | RowError:
        return fields if isinstance(fields, RowError) else parse_request(fields)

    def _row(self, number: int, fields: Fields | RowError, raw: bytes) -> InputRow:
        number += self.offset
        named = None if isinstance(fields, RowError) else fields.get("custom_id")
        id = number if named is None else as_text(named)
        request = self._request(fields)
        if isinstance(request, RowError):
            return InputRow(number, id, request, {}, raw)
        text = request.text
        if isinstance(text, str) and request.task != self.layout.task:
            message = f"this asks for task {request.task}, and the first for {self.layout.task}"
            text = RowError("settings", f"{message}; put it into another file")
        return InputRow(number, id, text, {}, raw, request=request)


_READERS: dict[InputFormat, Callable[..., RowReader]] = {
    "text": _TextReader,
    "tsv": _TsvReader,
    "csv": _CsvReader,
    "jsonl": _JsonlReader,
    "openai": _RequestReader,
    "parquet": ParquetReader,
    "arrow": ArrowReader,
    "xlsx": SpreadsheetReader,
}
