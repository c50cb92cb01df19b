"""Input formats of a job: rows streamed from text, TSV, CSV, JSONL or Parquet."""

from __future__ import annotations

import base64
import csv
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

import numpy as np

from transferry.runtime.engine.result import RowError
from transferry.runtime.errors import InputError, UsageError, install_command
from transferry.runtime.files import Compression, read_raw_lines
from transferry.runtime.jobs.options import InputFormat
from transferry.runtime.jobs.rows import InputRow

# Characters in a CSV field: a longer one was opened by a quotation mark that nothing closes.
MOST_FIELD = 1 << 24
# Deeper JSON is refused, since writing it again could exceed Python's stack.
MOST_NESTED = 100
# Rows of JSONL searched for an object whose keys become the columns.
_FIRST_ROWS = 1000
_BATCH_BYTES = 1 << 23
_MOST_BATCH_ROWS = 1024

Fields = dict[str, Any]
Languages = tuple[str | None, str | None]


class RowReader(ABC):
    """Reads the rows of one file.

    Attributes:
        path: The file; "-" is standard input, which can be read once.
        format: Its format.
        columns: Fields that are passed through, in order: all but the text and `id`. In JSONL,
            where each row has its own, those of the first object.
        has_id: Whether rows have an id of their own.
        types: Arrow types of `columns` and `id` by name, for Parquet; else None.
        lists: Whether the column holds lists, whose JSON becomes the text.
        languages: Columns with the languages of the text and of its answer, if there are any.
    """

    types: Any = None
    lists = False
    languages: Languages = (None, None)

    def __init__(
        self, path: Path, format: InputFormat, names: Sequence[str], column: str | None
    ) -> None:
        self.path, self.format = path, format
        self._column = self._choose(names, column)
        self.columns = tuple(name for name in names if name not in ("id", self._column))
        self.has_id = "id" in names and self._column != "id"

    def _choose(self, names: Sequence[str], column: str | None) -> str:
        """Returns the name of the field that holds the text."""
        if self.format == "jsonl" and (column or not names):
            # A field may be missing in one row and present in the next.
            return column or "text"
        if column is not None:
            if column in names:
                return column
            problem = f"there is no column {column}"
        else:
            usual = [name for name in names if name in ("text", "source")]
            candidates = usual or [name for name in names if name != "id"]
            if len(candidates) == 1:
                return candidates[0]
            problem = "cannot tell which column holds the text"
        raise InputError(f"{self.path}: {problem}; choose one of {', '.join(names)} with --column")

    @abstractmethod
    def rows(self, first: int = 0, last: int | None = None) -> Iterator[InputRow]:
        """Streams rows first to last - 1 of the whole input.

        Raises:
            InputError: The file cannot be read or is damaged.
        """

    def _row(self, number: int, fields: Fields | RowError, raw: bytes) -> InputRow:
        if isinstance(fields, RowError):
            return InputRow(number, number, fields, {}, raw)
        missing = RowError("no-text", f"there is no field {self._column}")
        text = fields.pop(self._column, missing)
        if self.lists and not isinstance(text, RowError):
            found = _to_json(text)
            error = RowError(
                "no-text", f"expected a list in the field {self._column}, found {found[:80]}"
            )
            text = found if isinstance(text, list) else error
        if not isinstance(text, str | RowError):
            found = as_text(text)[:80]
            text = RowError("no-text", f"expected text in the field {self._column}, found {found}")
        languages: list[str | None] = []
        for column in self.languages:
            language = fields.get(column) if column is not None else None
            languages.append(None if language is None else as_text(language) or None)
        id = fields.pop("id", None)
        if id is None:
            id = number
        elif isinstance(id, bool) or not isinstance(id, int | str):
            id = as_text(id)
        return InputRow(number, id, text, fields, raw, languages=(languages[0], languages[1]))


def open_reader(
    path: Path,
    *,
    format: InputFormat | None = None,
    column: str | None = None,
    lists: bool = False,
    languages: Languages = (None, None),
) -> RowReader:
    """Opens a file of rows and reads its header.

    Args:
        path: The file; "-" is standard input. Files of lines may be gzip or zstd.
        format: By default from the name, else text.
        column: The field that holds the text; by default `text` or `source`, or the only one
            besides `id`.
        lists: The column holds lists, of messages or of token ids; JSONL alone has them.
        languages: Columns with the languages of the text and of its answer.

    Raises:
        InputError: The file cannot be read, lacks the column, or has two of one name.
        UsageError: The format cannot be read from there, or needs a package that is missing.
    """
    name, compression = named_format(path)
    format = format or cast(InputFormat, name if name in get_args(InputFormat) else "text")
    if lists and format != "jsonl":
        raise UsageError(
            f"{path} is read as {format}, and messages and prompt-ids name a column of JSONL; give "
            "a .jsonl file, or add --format-in jsonl"
        )
    reader: RowReader
    if format == "text":
        for named in filter(None, (column, *languages)):
            raise UsageError(f"{path} is read as text, which has no column {named}; leave it out")
        reader = _TextReader(path, format, None)
    elif format == "parquet":
        if str(path) == "-":
            raise UsageError("Parquet cannot be read from standard input; name a file")
        if compression:
            raise UsageError(f"{path}: Parquet is compressed inside; unpack it first")
        reader = _ParquetReader(path, column)
    else:
        kinds = {"tsv": _TsvReader, "csv": _CsvReader, "jsonl": _JsonlReader}
        reader = kinds[format](path, format, column)
    for named in filter(None, languages):
        # In JSONL a field may be missing in one row and present in the next.
        if format != "jsonl" and named not in reader.columns:
            others = ", ".join(reader.columns) or "none besides the text"
            raise InputError(f"{path}: there is no column {named} for languages; it has {others}")
    reader.lists, reader.languages = lists, languages
    return reader


def named_format(path: Path) -> tuple[str, Compression]:
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
    return rows if target is None else _paired(rows, target.rows(first, last), target.path)


def _paired(rows: Iterator[InputRow], others: Iterator[InputRow], path: Path) -> Iterator[InputRow]:
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

    def __init__(self, path: Path, format: InputFormat, column: str | None) -> None:
        self.path = path
        self._names, lines = self._header(self._lines())
        super().__init__(path, format, self._names, column)
        self._standard_input = lines if str(path) == "-" else None

    def rows(self, first: int = 0, last: int | None = None) -> Iterator[InputRow]:
        lines = self._standard_input or self._header(self._lines())[1]
        for number, line in islice(enumerate(lines), first, last):
            yield self._row(number, self._fields(line), line.raw)

    def _lines(self) -> Iterator[_Line]:
        """Reads the file from its beginning, header included."""
        return map(_Line, read_raw_lines(self.path))

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
        text = _decoded(line.raw)
        return text if isinstance(text, RowError) else {"text": text}


class _TsvReader(_LineReader):
    """Lines split at each tab; a quotation mark is an ordinary character."""

    def _header(self, lines: Iterator[_Line]) -> tuple[list[str], Iterator[_Line]]:
        header = next(lines, None)
        if header is None:
            raise InputError(f"{self.path}: expected a header with names of columns, found nothing")
        names = self._cells(header)
        if isinstance(names, RowError):
            raise InputError(f"{self.path}: the header cannot be read: {names.message}")
        return _unique(names, self.path), lines

    def _fields(self, line: _Line) -> Fields | RowError:
        cells = self._cells(line)
        if isinstance(cells, RowError):
            return cells
        if len(cells) != len(self._names):
            return RowError("malformed", f"expected {len(self._names)} columns, found {len(cells)}")
        return dict(zip(self._names, cells, strict=True))

    def _cells(self, line: _Line) -> list[str] | RowError:
        text = _decoded(line.raw)
        return text if isinstance(text, RowError) else text.split("\t")


class _CsvReader(_TsvReader):
    """RFC 4180: commas, and quotation marks around fields with commas or line breaks."""

    def _lines(self) -> Iterator[_Line]:
        csv.field_size_limit(max(csv.field_size_limit(), MOST_FIELD))
        taken: list[bytes] = []

        def texts() -> Iterator[str]:
            for line in read_raw_lines(self.path, keep_ends=True):
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
        text = _decoded(line.raw)
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
        text = _decoded(line.raw)
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


class _ParquetReader(RowReader):
    """Reads Parquet in batches of a few megabytes."""

    def __init__(self, path: Path, column: str | None) -> None:
        with opened_parquet(path) as file:
            schema = file.schema_arrow
            groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
            self._groups = [group.num_rows for group in groups]
            wide = max((g.total_byte_size // max(1, g.num_rows) for g in groups), default=0)
        self._batch = max(1, min(_MOST_BATCH_ROWS, _BATCH_BYTES // max(1, wide)))
        names = _unique(schema.names, path)
        super().__init__(path, "parquet", names, column)
        found = schema.field(self._column).type
        if not _is_text(found):
            raise InputError(
                f"{path}: expected text in the column {self._column}, found {found}; name another "
                "with --column"
            )
        kept = ("id", *self.columns) if self.has_id else self.columns
        self.types = {name: schema.field(name).type for name in kept}

    def rows(self, first: int = 0, last: int | None = None) -> Iterator[InputRow]:
        # Row groups before the first row are not read.
        start, skipped = 0, 0
        for rows in self._groups:
            if start + rows > first:
                break
            start, skipped = start + rows, skipped + 1
        stop = None if last is None else max(0, last - start)
        with opened_parquet(self.path) as file:
            groups = range(skipped, len(self._groups))
            batches = file.iter_batches(self._batch, row_groups=groups, use_threads=False)
            found = enumerate(chain.from_iterable(map(_parquet_fields, batches)), start)
            for number, (fields, raw) in islice(found, max(0, first - start), stop):
                yield self._row(number, fields, raw)


def _parquet_fields(batch: Any) -> Iterator[tuple[Fields | RowError, bytes]]:
    """Yields the fields of each row, and bytes that distinguish it from others."""
    try:
        batch.validate(full=True)
    except ValueError as error:
        if batch.num_rows > 1:
            for place in range(batch.num_rows):
                yield from _parquet_fields(batch.take([place]))
        else:
            yield RowError("undecodable", str(error)), batch.serialize().to_pybytes()
        return
    for values in zip(*map(_values, batch.columns), strict=True):
        fields = dict(zip(batch.schema.names, values, strict=True))
        yield fields, _to_json(values).encode()


def _values(column: Any) -> list[Any]:
    """Returns Python values; types that would lose something stay Arrow scalars."""
    import pyarrow

    types, kind = pyarrow.types, column.type
    exact = (types.is_integer, types.is_boolean, types.is_float32, types.is_float64, _is_text)
    if any(is_kind(kind) for is_kind in exact):
        return list(column.to_pylist())
    return [value if value.is_valid else None for value in column]


def _is_text(kind: Any) -> bool:
    import pyarrow

    types = pyarrow.types
    if types.is_dictionary(kind):
        kind = kind.value_type
    return bool(types.is_string(kind) or types.is_large_string(kind) or kind == "string_view")


@contextmanager
def opened_parquet(path: Path) -> Iterator[Any]:
    """Opens a file, buffered by the megabyte. Every OSError inside counts as one of reading."""
    pyarrow = import_pyarrow()
    try:
        with pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            yield file
    except (OSError, pyarrow.ArrowException) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path}: cannot be read as Parquet: {reason}.") from error


def import_pyarrow() -> Any:
    """Returns pyarrow, with pyarrow.parquet.

    Raises:
        UsageError: It is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise UsageError(
            f"Parquet needs pyarrow, which is not installed; {install_command('jobs')}, or use "
            "another format"
        ) from error
    return pyarrow


def json_value(value: Any) -> Any:
    """Converts an array or an Arrow scalar to JSON values, for `default` of json.dumps.

    Times become ISO 8601, decimals text, bytes base64; NaN and infinity become null.
    """
    if isinstance(value, np.ndarray):
        return [round(float(number), 7) for number in value]
    import pyarrow

    types, kind = pyarrow.types, value.type
    if not value.is_valid:
        return None
    if types.is_struct(kind):
        return {name: json_value(field) for name, field in value.items()}
    if types.is_nested(kind):
        return [json_value(element) for element in value.values]
    if types.is_dictionary(kind) or isinstance(value, pyarrow.ExtensionScalar):
        return json_value(value.value)
    if types.is_floating(kind):
        return float(value.as_py()) if math.isfinite(value.as_py()) else None
    if types.is_temporal(kind) and not types.is_duration(kind) and not types.is_interval(kind):
        return value.cast(pyarrow.string()).as_py().replace(" ", "T")
    if types.is_duration(kind):
        return value.value
    if types.is_decimal(kind):
        return str(value.as_py())
    python = value.as_py()
    return base64.b64encode(python).decode() if isinstance(python, bytes) else python


def as_text(value: Any) -> str:
    """Returns text as it is, and any other value of a field as JSON."""
    if value is not None and not isinstance(value, str | int | float | list | dict):
        value = json_value(value)
    return value if isinstance(value, str) else _to_json(value)


_to_json = json.JSONEncoder(ensure_ascii=False, default=json_value).encode


def _decoded(line: bytes) -> str | RowError:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        return RowError(
            "undecodable",
            f"expected UTF-8, found the byte 0x{line[error.start]:02x} at position {error.start} "
            f"({error.reason})",
        )


def _unique(names: list[str], path: Path) -> list[str]:
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"{path}: two columns have the name {twice!r}; rename one")
    return names
