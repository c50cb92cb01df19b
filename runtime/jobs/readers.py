"""What a job reads: the rows of a file, whatever its format, one after the other."""

from __future__ import annotations

import base64
import csv
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast, get_args

import numpy as np

from transferry.runtime.engine.result import RowError
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.files import Compression, read_raw_lines
from transferry.runtime.jobs.options import SourceFormat
from transferry.runtime.jobs.rows import SourceRow

# In characters. What is longer was opened by a quotation mark that nothing closes.
MOST_FIELD = 1 << 24
# Deeper JSON is refused, since writing it again could exceed Python's stack.
MOST_NESTED = 100
# How many rows of JSONL are looked at for one that tells the fields.
_FIRST_ROWS = 1000
_BATCH_BYTES = 1 << 23
_MOST_BATCH_ROWS = 1024

Fields = dict[str, Any]


class Source(Protocol):
    """A file of rows.

    Attributes:
        path: The file; "-" is standard input, which can be read once.
        format: Its format.
        columns: Fields that the rows pass through, in order: all but the text and `id`. Those of
            the first object in JSONL, where each row has its own.
        has_id: Whether the rows bring an id; otherwise their number is one.
        types: Of Parquet the Arrow types of `columns` and `id`, by name; otherwise None.
    """

    path: Path
    format: SourceFormat
    columns: tuple[str, ...]
    has_id: bool
    types: Any

    def rows(self, first: int = 0, last: int | None = None) -> Iterator[SourceRow]:
        """Streams the rows with the numbers first to last - 1 of the whole input.

        Raises:
            InputError: The file cannot be read or is damaged.
        """
        ...


def open_source(
    path: Path, *, format: SourceFormat | None = None, column: str | None = None
) -> Source:
    """Opens a file of rows, and looks at its header.

    Args:
        path: The file; "-" is standard input. Lines may be gzip or zstd.
        format: By default what the name says, and text where it says nothing.
        column: The field that holds the text; by default `text` or `source` where one of them is
            there, or the only one besides `id`.

    Raises:
        InputError: The file cannot be read, has no such column, or two of one name.
        UsageError: The format cannot be read from there, or needs a package that is missing.
    """
    name, compression = named_format(path)
    format = format or cast(SourceFormat, name if name in get_args(SourceFormat) else "text")
    if format == "text":
        if column is not None:
            raise UsageError(f"{path} is read as text, which has no column {column}; leave it out")
        return _TextSource(path, format, None)
    if format == "parquet":
        if str(path) == "-":
            raise UsageError("Parquet cannot be read from standard input; name a file")
        if compression:
            raise UsageError(f"{path}: Parquet is compressed inside; unpack it first")
        return _ParquetSource(path, column)
    kinds = {"tsv": _TsvSource, "csv": _CsvSource, "jsonl": _JsonlSource}
    return kinds[format](path, format, column)


def named_format(path: Path) -> tuple[str, Compression]:
    """Returns what a file's name says: its format, perhaps none that is known, and compression."""
    compression: Compression = ""
    if path.suffix in (".gz", ".zst"):
        compression, path = cast(Compression, path.suffix), path.with_suffix("")
    return path.suffix.removeprefix(".").lower(), compression


class _Record(NamedTuple):
    """The bytes of a row of lines, and of CSV what stands between its commas."""

    raw: bytes
    cells: list[str] | RowError | None = None


class _LineSource(ABC):
    """Rows that are lines; those of standard input can be asked for once."""

    types: Any = None

    def __init__(self, path: Path, format: SourceFormat, column: str | None) -> None:
        self.path, self.format = path, format
        self._names, records = self._look(self._open())
        self._column = self._choose(column)
        self.columns = _passed(self._names, self._column)
        self.has_id = _has_id(self._names, self._column)
        self._standard_input = records if str(path) == "-" else None

    def rows(self, first: int = 0, last: int | None = None) -> Iterator[SourceRow]:
        """Streams the rows."""
        records = self._standard_input or self._look(self._open())[1]
        for number, record in islice(enumerate(records), first, last):
            yield _row(number, self._fields(record), self._column, record.raw)

    def _open(self) -> Iterator[_Record]:
        """Reads the file from its beginning."""
        return map(_Record, read_raw_lines(self.path))

    def _choose(self, column: str | None) -> str:
        return _choose(self._names, column, self.path)

    @abstractmethod
    def _look(self, records: Iterator[_Record]) -> tuple[list[str], Iterator[_Record]]:
        """Returns the names of the fields, and those of the records that are rows."""

    @abstractmethod
    def _fields(self, record: _Record) -> Fields | RowError:
        """Returns the fields of a row, the text and the id among them."""


class _TextSource(_LineSource):
    def _look(self, records: Iterator[_Record]) -> tuple[list[str], Iterator[_Record]]:
        return ["text"], records

    def _fields(self, record: _Record) -> Fields | RowError:
        text = _decoded(record.raw)
        return text if isinstance(text, RowError) else {"text": text}


class _TsvSource(_LineSource):
    """Lines cut at each tab: a quotation mark is a letter like any other."""

    def _look(self, records: Iterator[_Record]) -> tuple[list[str], Iterator[_Record]]:
        header = next(records, None)
        if header is None:
            raise InputError(f"{self.path}: expected a header with names of columns, found nothing")
        names = self._cells(header)
        if isinstance(names, RowError):
            raise InputError(f"{self.path}: the header cannot be read: {names.message}")
        return _unique(names, self.path), records

    def _fields(self, record: _Record) -> Fields | RowError:
        cells = self._cells(record)
        if isinstance(cells, RowError):
            return cells
        if len(cells) != len(self._names):
            return RowError("malformed", f"expected {len(self._names)} columns, found {len(cells)}")
        return dict(zip(self._names, cells, strict=True))

    def _cells(self, record: _Record) -> list[str] | RowError:
        text = _decoded(record.raw)
        return text if isinstance(text, RowError) else text.split("\t")


class _CsvSource(_TsvSource):
    """RFC 4180: commas, and quotation marks around what holds one or a line break."""

    def _open(self) -> Iterator[_Record]:
        csv.field_size_limit(max(csv.field_size_limit(), MOST_FIELD))
        taken: list[bytes] = []

        def lines() -> Iterator[str]:
            for line in read_raw_lines(self.path, keep_ends=True):
                taken.append(line)
                # What is no UTF-8 comes out in _cells, when it is known which row it is in.
                yield line.decode(errors="replace")

        reader = csv.reader(lines(), strict=True)
        while True:
            cells: list[str] | RowError
            try:
                cells = next(reader) or [""]
            except StopIteration:
                return
            except csv.Error as error:
                over = f" in what reaches over {len(taken)} lines" if len(taken) > 1 else ""
                cells = RowError("malformed", f"expected CSV{over}, found: {error}")
            yield _Record(b"".join(taken), cells)
            taken.clear()

    def _cells(self, record: _Record) -> list[str] | RowError:
        text = _decoded(record.raw)
        assert record.cells is not None
        return text if isinstance(text, RowError) else record.cells


class _JsonlSource(_LineSource):
    def _look(self, records: Iterator[_Record]) -> tuple[list[str], Iterator[_Record]]:
        seen: list[_Record] = []
        names: list[str] = []
        for record in islice(records, _FIRST_ROWS):
            seen.append(record)
            fields = self._fields(record)
            if not isinstance(fields, RowError):
                names = list(fields)
                break
        return names, chain(seen, records)

    def _choose(self, column: str | None) -> str:
        # A field may be missing in one row and not in the next.
        return column or (super()._choose(None) if self._names else "text")

    def _fields(self, record: _Record) -> Fields | RowError:
        text = _decoded(record.raw)
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
                return RowError("undecodable", f"half a character stands alone: {error.reason}")
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
    raise ValueError(f"{number} is no number that JSON and float64 share")


_JSON = json.JSONDecoder(
    object_pairs_hook=_object, parse_constant=_refuse_number, parse_float=_finite
)


def _depth(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(_depth, value), default=0) if isinstance(value, list) else 0


class _ParquetSource:
    """Rows of Parquet, in batches of a few megabytes."""

    format: SourceFormat = "parquet"

    def __init__(self, path: Path, column: str | None) -> None:
        self.path = path
        with opened_parquet(path) as file:
            schema = file.schema_arrow
            groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
            self._groups = [group.num_rows for group in groups]
            wide = max((g.total_byte_size // max(1, g.num_rows) for g in groups), default=0)
        self._batch = max(1, min(_MOST_BATCH_ROWS, _BATCH_BYTES // max(1, wide)))
        names = _unique(schema.names, path)
        self._column = _choose(names, column, path)
        found = schema.field(self._column).type
        if not _is_text(found):
            raise InputError(
                f"{path}: expected text in the column {self._column}, found {found}; name another "
                "with --column"
            )
        self.columns = _passed(names, self._column)
        self.has_id = _has_id(names, self._column)
        kept = ("id", *self.columns) if self.has_id else self.columns
        self.types = {name: schema.field(name).type for name in kept}

    def rows(self, first: int = 0, last: int | None = None) -> Iterator[SourceRow]:
        """Streams the rows; groups of rows before the first are not read."""
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
                yield _row(number, fields, self._column, raw)


def _parquet_fields(batch: Any) -> Iterator[tuple[Fields | RowError, bytes]]:
    """Yields the fields of each row, and bytes that tell it from others."""
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
    """Returns what Python has the same of; the rest stays an Arrow scalar, which loses nothing."""
    import pyarrow

    types, kind = pyarrow.types, column.type
    if types.is_integer(kind) or types.is_boolean(kind) or _is_text(kind):
        return list(column.to_pylist())
    if types.is_float32(kind) or types.is_float64(kind):
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
    """Opens a file in pieces of a megabyte. Every OSError inside counts as one of reading."""
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
            'Parquet needs pyarrow, which is not installed; pip install "transferry[jobs]", or use '
            "another format"
        ) from error
    return pyarrow


def json_value(value: Any) -> Any:
    """Returns an array or an Arrow scalar as JSON values, for `default` of json.dumps.

    Times are ISO 8601, numbers with a fixed point are text, bytes are base64; what is not finite
    is null.
    """
    if isinstance(value, np.ndarray):
        return [round(float(number), 7) for number in value]
    import pyarrow

    types, kind = pyarrow.types, value.type
    if not value.is_valid:
        return None
    if types.is_struct(kind):
        return {name: json_value(item) for name, item in value.items()}
    if types.is_nested(kind):
        return [json_value(item) for item in value.values]
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
    if isinstance(value, str):
        return value
    return _to_json(value)


_to_json = json.JSONEncoder(ensure_ascii=False, default=json_value).encode


def _row(number: int, fields: Fields | RowError, column: str, raw: bytes) -> SourceRow:
    if isinstance(fields, RowError):
        return SourceRow(number, number, fields, {}, raw)
    missing = RowError("no-text", f"there is no field {column}")
    text = fields.pop(column, missing)
    if not isinstance(text, str | RowError):
        found = as_text(text)[:80]
        text = RowError("no-text", f"expected text in the field {column}, found {found}")
    id = fields.pop("id", None)
    if id is None:
        id = number
    elif isinstance(id, bool) or not isinstance(id, int | str):
        id = as_text(id)
    return SourceRow(number, id, text, fields, raw)


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


def _choose(names: Sequence[str], column: str | None, path: Path) -> str:
    """Returns the name of the field that holds the text.

    Raises:
        InputError: There is none of that name, or none stands out.
    """
    usual = [name for name in names if name in ("text", "source")]
    others = [name for name in names if name != "id"]
    candidates = [column] if column is not None else usual or others
    if len(candidates) == 1 and candidates[0] in names:
        return candidates[0]
    found = f"no column {column}" if column is not None else "nothing that says which is the text"
    raise InputError(
        f"{path}: there is {found}; it has the columns {', '.join(names)}: name one with --column"
    )


def _passed(names: Sequence[str], column: str) -> tuple[str, ...]:
    return tuple(name for name in names if name not in ("id", column))


def _has_id(names: Sequence[str], column: str) -> bool:
    return "id" in names and column != "id"
