"""What a job writes: records as lines, tables or vectors, in parts that join into one file."""

from __future__ import annotations

import csv
import io
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol, cast, get_args

import numpy as np

from transferry.runtime.engine.result import RowError
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.files import Compression, packed, read_blocks
from transferry.runtime.jobs.options import SinkFormat, Task
from transferry.runtime.jobs.readers import (
    Source,
    as_text,
    import_pyarrow,
    json_value,
    named_format,
    opened_parquet,
)
from transferry.runtime.jobs.rows import SourceRow

_Kind = Literal["text", "integer", "float", "boolean", "json", "vector"]
# What each task can write.
FORMATS: dict[Task, tuple[SinkFormat, ...]] = {
    "generate": ("jsonl", "text", "tsv", "csv", "parquet"),
    "embed": ("npy", "parquet", "jsonl"),
    "fill-mask": ("jsonl", "text", "tsv", "csv", "parquet"),
    "score": ("jsonl", "tsv", "csv", "parquet"),
}
# In tables `error` is two columns.
_ANY_TASK: dict[str, _Kind] = {
    "truncated": "boolean",
    "error_kind": "text",
    "error_message": "text",
}
# What the answer to a row consists of, besides its id.
ANSWER_FIELDS: dict[Task, dict[str, _Kind]] = {
    "generate": {
        "source": "text",
        "text": "text",
        "score": "float",
        "finish_reason": "text",
        "target_tokens": "integer",
        "source_tokens": "integer",
        **_ANY_TASK,
        "n_best": "json",
    },
    "embed": {"source": "text", "vector": "vector", **_ANY_TASK},
    "fill-mask": {"source": "text", "text": "text", "masks": "json", **_ANY_TASK},
    "score": {
        "source": "text",
        "target": "text",
        "total": "float",
        "tokens": "json",
        "log_probabilities": "json",
        **_ANY_TASK,
    },
}
ROW_GROUP = 4096
_AS_SPACE = {ord(letter): " " for letter in "\t\r\n"}


class RowWriter(Protocol):
    """Takes records in order."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Writes a record: `id`, fields passed through, those of the answer, perhaps `error`."""
        ...

    def close(self) -> None:
        """Writes what is left, and leaves the file open; not called where a job failed."""
        ...


@dataclass(frozen=True, kw_only=True)
class Sink(ABC):
    """A format of output. The same records are the same bytes, in however many parts.

    Attributes:
        format: Its name.
        columns: Fields of the source that it can repeat; None where it has no columns.
        refused: Names that no field of the source may have.
    """

    format: SinkFormat
    columns: tuple[str, ...] | None = None
    refused: frozenset[str] = frozenset()

    @abstractmethod
    def open(self, file: BinaryIO) -> RowWriter:
        """Begins a part, which is itself a whole file of the format."""

    @abstractmethod
    def join(self, parts: Sequence[Path], file: BinaryIO) -> None:
        """Writes what the parts hold, in order, as one file; it does not tell where one ends.

        Raises:
            InputError: A part cannot be read, or is none of this sink.
        """

    def admit(self, row: SourceRow) -> SourceRow:
        """Returns a row as the output can hold it: with an error where it cannot hold a field."""
        kept = {name: value for name, value in row.fields.items() if self._holds(name, value)}
        id = row.id if self._holds_id(row.id) else row.number
        if len(kept) == len(row.fields) and id == row.id:
            return row
        names = [name for name in row.fields if name not in kept] or ["id"]
        error = RowError("fields", f"{self.format} output cannot hold the field {names[0]!r}")
        text = error if isinstance(row.text, str) else row.text
        return replace(row, id=id, text=text, fields=kept)

    def _holds(self, name: str, value: Any) -> bool:
        return name not in self.refused and (self.columns is None or name in self.columns)

    def _holds_id(self, id: int | str) -> bool:
        return True


def open_sink(
    path: Path,
    *,
    format: SinkFormat | None = None,
    source: Source,
    task: Task = "generate",
    n_best: bool = False,
    width: int = 0,
) -> Sink:
    """Returns how to write what a job answers.

    Args:
        path: Where it goes; "-" is standard output. Lines are compressed as the name says.
        format: By default what the name says, and text where it says nothing.
        source: What is answered.
        task: How.
        n_best: Whether tables have a column for it.
        width: How long the vectors of embed are, which npy and Parquet need to know.

    Raises:
        InputError: The source has a column with the name of a part of the answer.
        UsageError: The task does not write that, or not there, or a package is missing.
    """
    name, compression = named_format(path)
    format = format or cast(SinkFormat, name if name in get_args(SinkFormat) else "text")
    if format not in FORMATS[task]:
        raise UsageError(
            f"task {task} writes {' or '.join(FORMATS[task])}, not {format}; name another --out or "
            "--format"
        )
    if format in ("npy", "parquet") and str(path) == "-":
        raise UsageError(f"{format} cannot go to standard output; name a file with --out")
    if format in ("npy", "parquet") and compression:
        raise UsageError(f"{path}: {format} is written without {compression}; leave it out")
    if format == "text":
        return _LineSink(format=format, compression=compression, to_line=_text_line)
    if format == "npy":
        return _NpySink(format=format, width=width)

    kinds = dict(ANSWER_FIELDS[task])
    refused = frozenset({"id", "error", *kinds})
    clash = sorted(refused.intersection(source.columns))
    if clash and source.format != "jsonl":
        raise InputError(
            f"{source.path}: the answer has fields of its own with the names {', '.join(clash)}; "
            "rename these columns"
        )
    if format == "jsonl":
        return _LineSink(
            format=format, refused=refused, compression=compression, to_line=_json_line
        )
    if not n_best:
        kinds.pop("n_best", None)
    columns = tuple(name for name in source.columns if name not in clash)
    if format == "parquet":
        if task == "embed":
            del kinds["source"]
        return _ParquetSink(
            format=format, columns=columns, schema=_schema(source, columns, kinds, width)
        )
    names = ("id", *columns, *kinds)
    kind, joined = (_LineSink, _csv) if format == "csv" else (_TsvSink, _tsv)
    return kind(
        format=format,
        columns=columns,
        compression=compression,
        header=joined(names),
        to_line=partial(_table_line, joined, names),
    )


@dataclass(frozen=True, kw_only=True)
class _LineSink(Sink):
    """A line a record."""

    compression: Compression
    to_line: Callable[[Mapping[str, Any]], str]
    header: str = ""

    def open(self, file: BinaryIO) -> RowWriter:
        return _LineWriter(self, file)

    def join(self, parts: Sequence[Path], file: BinaryIO) -> None:
        header = self.header.encode()
        with packed(file, self.compression) as stream:
            stream.write(header)
            for part in parts:
                _copy_behind(header, part, stream)


class _TsvSink(_LineSink):
    """Nothing stands for a tab or a line break, so a field that has one cannot be repeated."""

    def _holds(self, name: str, value: Any) -> bool:
        return super()._holds(name, value) and self._holds_id(_text(value))

    def _holds_id(self, id: int | str) -> bool:
        return _tsv([str(id)]) == f"{id}\n"


class _LineWriter:
    def __init__(self, sink: _LineSink, file: BinaryIO) -> None:
        self._to_line, self._stack = sink.to_line, ExitStack()
        self._stream = self._stack.enter_context(packed(file, sink.compression))
        self._stream.write(sink.header.encode())

    def write(self, record: Mapping[str, Any]) -> None:
        self._stream.write(self._to_line(record).encode())

    def close(self) -> None:
        self._stack.close()


def _text_line(record: Mapping[str, Any]) -> str:
    """The best answer; a line break inside it becomes a space."""
    return " ".join((record.get("text") or "").splitlines()) + "\n"


def _json_line(record: Mapping[str, Any]) -> str:
    """Every field, but no `truncated` that is false; what is not finite is null."""
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
        if name != "truncated" or value
    }
    return _to_json(finite) + "\n"


_to_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=json_value).encode


def _table_line(
    joined: Callable[[Iterable[str]], str], names: Sequence[str], record: Mapping[str, Any]
) -> str:
    return joined([_text(value) for value in _cells(record, names)])


def _csv(cells: Iterable[str]) -> str:
    # With both in the line's end, csv puts either into quotation marks; writerow returns what
    # `write` returns.
    line: str = csv.writer(_Echo(), lineterminator="\r\n").writerow(cells)
    return line.removesuffix("\r\n") + "\n"


class _Echo:
    def write(self, line: str) -> str:
        return line


def _tsv(cells: Iterable[str]) -> str:
    return "\t".join(cell.translate(_AS_SPACE) for cell in cells) + "\n"


def _cells(record: Mapping[str, Any], names: Iterable[str]) -> list[Any]:
    """Returns the values of a record in the order of a table's columns."""
    error = record.get("error") or {}
    flat = {
        "truncated": False,
        **record,
        **{f"error_{name}": value for name, value in error.items()},
    }
    return [flat.get(name) for name in names]


def _text(value: Any) -> str:
    return "" if value is None else as_text(value)


def _copy_behind(header: bytes, part: Path, file: BinaryIO) -> None:
    """Appends a file without the header that it begins with."""
    begun = False
    for chunk in read_blocks(part):
        if not begun and not chunk.startswith(header):
            break
        file.write(chunk if begun else chunk[len(header) :])
        begun = True
    if header and not begun:
        raise InputError(f"{part} does not begin as its job writes it; run the job again")


@dataclass(frozen=True, kw_only=True)
class _NpySink(Sink):
    """numpy's own format: one array [rows, width] float32, for `numpy.load(path, mmap_mode="r")`.

    A row that has an error is NaN.
    """

    width: int

    def open(self, file: BinaryIO) -> RowWriter:
        return _NpyWriter(self, file)

    def join(self, parts: Sequence[Path], file: BinaryIO) -> None:
        fixed, row = len(self.header(0)), 4 * self.width
        rows = [(part.stat().st_size - fixed) // row for part in parts]
        file.write(self.header(sum(rows)))
        for part, count in zip(parts, rows, strict=True):
            _copy_behind(self.header(count), part, file)

    def header(self, rows: int) -> bytes:
        """Returns how a file of so many rows begins; numpy pads it to the same length for all."""
        file = io.BytesIO()
        shape = {"descr": "<f4", "fortran_order": False, "shape": (rows, self.width)}
        np.lib.format.write_array_header_1_0(file, shape)
        return file.getvalue()


class _NpyWriter:
    def __init__(self, sink: _NpySink, file: BinaryIO) -> None:
        self._sink, self._file, self._rows = sink, file, 0
        file.write(sink.header(0))
        self._nothing = np.full(sink.width, np.nan, "<f4")

    def write(self, record: Mapping[str, Any]) -> None:
        vector = record.get("vector")
        row = self._nothing if vector is None else np.asarray(vector, "<f4")
        self._file.write(row.reshape(self._sink.width).tobytes())
        self._rows += 1

    def close(self) -> None:
        self._file.seek(0)
        self._file.write(self._sink.header(self._rows))
        self._file.seek(0, io.SEEK_END)


@dataclass(frozen=True, kw_only=True)
class _ParquetSink(Sink):
    """A column each for the id, the fields of the source and those of the answer."""

    schema: Any

    def open(self, file: BinaryIO) -> RowWriter:
        return _ParquetWriter(self.schema, file)

    def join(self, parts: Sequence[Path], file: BinaryIO) -> None:
        pyarrow = import_pyarrow()
        with pyarrow.parquet.ParquetWriter(file, self.schema) as writer:
            batches = chain.from_iterable(map(self._batches, parts))
            for group in _row_groups(batches):
                table = pyarrow.Table.from_batches(group).cast(self.schema)
                # Where a batch ended would show in the pages.
                writer.write_table(table.combine_chunks())

    def _batches(self, part: Path) -> Iterator[Any]:
        with opened_parquet(part) as file:
            if not file.schema_arrow.equals(self.schema):
                raise InputError(f"{part} has other columns than its job writes; run the job again")
            yield from file.iter_batches(ROW_GROUP, use_threads=False)

    def _holds_id(self, id: int | str) -> bool:
        import pyarrow

        kind = self.schema.field("id").type
        try:
            pyarrow.scalar(id if pyarrow.types.is_integer(kind) else str(id), kind)
        except (ValueError, TypeError, OverflowError):
            return False
        return True


def _row_groups(batches: Iterable[Any]) -> Iterator[list[Any]]:
    """Cuts batches of at most `ROW_GROUP` rows anew: each list but the last has that many."""
    group: list[Any] = []
    room = ROW_GROUP
    for batch in batches:
        if batch.num_rows >= room:
            yield [*group, batch.slice(0, room)]
            batch, group, room = batch.slice(room), [], ROW_GROUP
        if batch.num_rows:
            group.append(batch)
            room -= batch.num_rows
    if group:
        yield group


def _schema(source: Source, columns: Iterable[str], kinds: Mapping[str, _Kind], width: int) -> Any:
    pyarrow = import_pyarrow()
    types = {
        "text": pyarrow.string(),
        "json": pyarrow.string(),
        "integer": pyarrow.int64(),
        "float": pyarrow.float64(),
        "boolean": pyarrow.bool_(),
        "vector": pyarrow.list_(pyarrow.float32(), width),
    }
    passed = dict.fromkeys(columns, types["text"]) | (source.types or {})
    number = passed.pop("id", types["text" if source.has_id else "integer"])
    # Of categories only the values stay; an id that is neither a number nor text became text.
    passed = {
        name: kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        for name, kind in passed.items()
    }
    fields = {"id": number if pyarrow.types.is_integer(number) else types["text"], **passed}
    return pyarrow.schema([*fields.items(), *((name, types[kinds[name]]) for name in kinds)])


class _ParquetWriter:
    def __init__(self, schema: Any, file: BinaryIO) -> None:
        self._pyarrow, self._schema = import_pyarrow(), schema
        self._writer = self._pyarrow.parquet.ParquetWriter(file, schema)
        self._rows: list[list[Any]] = []

    def write(self, record: Mapping[str, Any]) -> None:
        self._rows.append(_cells(record, self._schema.names))
        if len(self._rows) == ROW_GROUP:
            self._flush()

    def close(self) -> None:
        if self._rows:
            self._flush()
        self._writer.close()

    def _flush(self) -> None:
        arrays = []
        for kind, column in zip(self._schema.types, zip(*self._rows, strict=True), strict=True):
            values: Iterable[Any] = column
            if self._pyarrow.types.is_string(kind):
                values = [None if value is None else as_text(value) for value in column]
            arrays.append(self._pyarrow.array(values, kind))
        self._writer.write_table(self._pyarrow.table(arrays, schema=self._schema))
        self._rows = []
