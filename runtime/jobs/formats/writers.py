"""Output formats of a job: records as lines, tables or vectors, in files that join into one."""

from __future__ import annotations

import csv
import io
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, cast, get_args

import numpy as np

from transferry.runtime.engine.result import RowError, RowResult
from transferry.runtime.engine.tasks.table import TASKS
from transferry.runtime.engine.tasks.task import Kind, Layout, OutputFormat, Task, columns
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.io.lines import Compression, packed, read_blocks
from transferry.runtime.jobs.formats.cells import as_text, json_value
from transferry.runtime.jobs.formats.columnar import import_pyarrow, opened_parquet
from transferry.runtime.jobs.formats.detection import TEXT_NAME, named_format
from transferry.runtime.jobs.formats.openai_batch import response_line
from transferry.runtime.jobs.formats.rows import InputRow

Record = Mapping[str, Any]
# Columns of every task behind its own; in tables `error` is two columns.
_ANY_TASK = columns(truncated="boolean", error_kind="text", error_message="text")
ROW_GROUP = 4096
_AS_SPACE = {ord(letter): " " for letter in "\t\r\n"}


@dataclass(frozen=True, kw_only=True)
class RowWriter(ABC):
    """Writes records in one format. The same records give the same bytes, however they are split.

    Attributes:
        format: Name of the format.
        columns: Fields of the input that it can repeat; None for a format without columns.
        refused: Names that no field of the input may have.
    """

    format: OutputFormat
    columns: tuple[str, ...] | None = None
    refused: frozenset[str] = frozenset()

    @abstractmethod
    def write(self, records: Iterable[Record], file: BinaryIO) -> None:
        """Writes records to an empty file, which stays open and is a whole file of the format."""

    @abstractmethod
    def join(self, files: Sequence[Path], file: BinaryIO) -> None:
        """Writes the records of several files of this writer, in order, as one file."""

    def admit(self, row: InputRow) -> InputRow:
        """Returns the row as the output can hold it, with an error for a value it cannot hold."""
        request = row.request
        if request is not None and isinstance(row.text, str):
            several = len(request.inputs) > 1 and self.format != "openai"
            several |= self.format == "text" and request.settings.get("n_best", 1) > 1
            if several or (request.dimensions and self.format in ("npy", "parquet")):
                held = "one answer a request" if several else "vectors of one length"
                refusal = f"{self.format} output has {held}; name a .jsonl file"
                row = replace(row, text=RowError("settings", refusal))
        kept = {name: value for name, value in row.fields.items() if self._holds(name, value)}
        id = row.id if self._holds_id(row.id) else row.number
        if len(kept) == len(row.fields) and id == row.id:
            return row
        names = [name for name in row.fields if name not in kept] or ["id"]
        error = RowError("fields", f"{self.format} output cannot hold the field {names[0]!r}")
        text = error if isinstance(row.text, str) else row.text
        return replace(row, id=id, text=text, fields=kept)

    def record(self, row: InputRow, result: RowResult, n_best: int) -> Record:
        """Returns the record of a row; `n_best` above 1 lists all hypotheses."""
        if self.format == "openai":
            named = {"number": row.number, "request": row.request, "result": result}
            return {"id": row.id, **named}
        if row.request is not None:
            n_best = max(n_best, row.request.settings.get("n_best", 1))
        return {"id": row.id, **row.fields, **result.record(n_best)}

    def _holds(self, name: str, value: Any) -> bool:
        return name not in self.refused and (self.columns is None or name in self.columns)

    def _holds_id(self, id: int | str) -> bool:
        return True


def open_writer(
    path: Path,
    *,
    format: OutputFormat | None = None,
    rows: Layout,
    task: str = "generate",
    n_best: bool = False,
    width: int = 0,
) -> RowWriter:
    """Returns the writer of a job's output.

    Args:
        path: The output; "-" is standard output. Lines are compressed as the name says.
        format: Format. Default: from the name, else that of the task.
        rows: The input.
        task: Name of the task.
        n_best: Whether tables list all hypotheses of a row; they do for requests.
        width: Length of the vectors of embed.

    Raises:
        InputError: A column of the input has the name of a field of the result.
        UsageError: The task has no such format, it cannot go there, or a package is missing.
    """
    kind, compression = TASKS[task], named_format(path)[1]
    format = _chosen_format(path, format, rows, kind)
    if format in ("npy", "parquet") and str(path) == "-":
        raise UsageError(f"{format} cannot go to standard output; name a file with --out")
    if format in ("npy", "parquet") and compression:
        raise UsageError(f"{path}: {format} is written without {compression}; leave it out")
    if format in ("text", "openai"):
        line = _text_line if format == "text" else response_line
        return _LineWriter(format=format, compression=compression, to_line=line)
    if format == "npy":
        return _NpyWriter(format=format, width=width)
    refused = frozenset({"id", "error", "source", *kind.columns, *_ANY_TASK})
    clash = sorted(refused.intersection(rows.columns))
    if clash and rows.format != "jsonl":
        raise InputError(
            f"{rows.path}: the output has fields of its own with the names {', '.join(clash)}; "
            "rename these columns"
        )
    if format == "jsonl":
        return _LineWriter(
            format=format, refused=refused, compression=compression, to_line=_json_line
        )
    passed = tuple(name for name in rows.columns if name not in clash)
    fields = _table_columns(kind, format, n_best=n_best or rows.format == "openai")
    if format == "parquet":
        schema = _schema(rows, passed, fields, width)
        return ParquetWriter(format=format, columns=passed, schema=schema)
    names = ("id", *passed, *fields)
    writer, joined = (_LineWriter, _csv) if format == "csv" else (_TsvWriter, _tsv)
    return writer(
        format=format,
        columns=passed,
        compression=compression,
        header=joined(names),
        to_line=partial(_table_line, joined, names),
    )


def _chosen_format(
    path: Path, format: OutputFormat | None, rows: Layout, task: type[Task]
) -> OutputFormat:
    """Returns the format by option, input or name; raises UsageError if the task has no such."""
    name, _ = named_format(path)
    if format is None and rows.format == "openai" and name == "jsonl":
        format = "openai"
    if format is None and name in get_args(OutputFormat):
        format = cast(OutputFormat, name)
    if format is None and name not in ("txt", "out") and not TEXT_NAME.fullmatch(name):
        endings = {"text": "txt", "openai": "jsonl"}
        known = dict.fromkeys(f".{endings.get(each, each)}" for each in task.formats)
        raise UsageError(
            f"{path}: there is no output format {name}; let the name end in one of "
            f"{', '.join(known)}, or choose with --format"
        )
    format = format or task.default_format
    if format not in task.formats:
        raise UsageError(
            f"task {task.name} writes {' or '.join(task.formats)}, not {format}; name another "
            "--out or --format"
        )
    if format == "openai" and rows.format != "openai":
        raise UsageError(
            f"{path}: responses answer requests, and {rows.path} is read as {rows.format}; add "
            "--format-in openai, or choose another --format"
        )
    return format


def _table_columns(task: type[Task], format: OutputFormat, *, n_best: bool) -> dict[str, Kind]:
    """Returns the columns of a result with their types, in the order of a table."""
    own = dict(task.columns)
    listed = {"n_best": own.pop("n_best")} if "n_best" in own else {}
    # Beside vectors in Parquet, texts would only take up space.
    cited = {} if format == "parquet" and "vector" in own else columns(source="text")
    return {**cited, **own, **_ANY_TASK, **(listed if n_best else {})}


@dataclass(frozen=True, kw_only=True)
class _LineWriter(RowWriter):
    """One line per record, behind a header if there is one."""

    compression: Compression
    to_line: Callable[[Record], str]
    header: str = ""

    def write(self, records: Iterable[Record], file: BinaryIO) -> None:
        with packed(file, self.compression) as stream:
            stream.write(self.header.encode())
            for record in records:
                stream.write(self.to_line(record).encode())

    def join(self, files: Sequence[Path], file: BinaryIO) -> None:
        header = self.header.encode()
        with packed(file, self.compression) as stream:
            stream.write(header)
            for path in files:
                _copy_behind(header, path, stream)


class _TsvWriter(_LineWriter):
    """TSV has no escape for tabs and line breaks, so a field with one cannot be repeated."""

    def _holds(self, name: str, value: Any) -> bool:
        return super()._holds(name, value) and self._holds_id(_text(value))

    def _holds_id(self, id: int | str) -> bool:
        return _tsv([str(id)]) == f"{id}\n"


def _text_line(record: Record) -> str:
    """The best output; a line break inside it becomes a space."""
    return " ".join((record.get("text") or "").splitlines()) + "\n"


def _json_line(record: Record) -> str:
    """All fields except a false `truncated`; NaN and infinity become null."""
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
        if name != "truncated" or value
    }
    return _to_json(finite) + "\n"


_to_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=json_value).encode


def _table_line(
    joined: Callable[[Iterable[str]], str], names: Sequence[str], record: Record
) -> str:
    return joined([_text(value) for value in _cells(record, names)])


def _csv(cells: Iterable[str]) -> str:
    # With both characters in its line terminator, csv quotes fields with either of them;
    # writerow passes on the result of `write`.
    line: str = csv.writer(_Echo(), lineterminator="\r\n").writerow(cells)
    return line.removesuffix("\r\n") + "\n"


class _Echo:
    def write(self, line: str) -> str:
        return line


def _tsv(cells: Iterable[str]) -> str:
    return "\t".join(cell.translate(_AS_SPACE) for cell in cells) + "\n"


def _cells(record: Record, names: Iterable[str]) -> list[Any]:
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


def _copy_behind(header: bytes, path: Path, file: BinaryIO) -> None:
    """Appends a file without its header."""
    begun = False
    for block in read_blocks(path):
        if not begun and not block.startswith(header):
            break
        file.write(block if begun else block[len(header) :])
        begun = True
    if header and not begun:
        raise InputError(f"{path} does not begin as its job writes it; run the job again")


@dataclass(frozen=True, kw_only=True)
class _NpyWriter(RowWriter):
    """One array `[rows, width]` float32, for `numpy.load(path, mmap_mode="r")`.

    A row with an error is NaN.
    """

    width: int

    def write(self, records: Iterable[Record], file: BinaryIO) -> None:
        file.write(self._header(0))
        nothing, rows = np.full(self.width, np.nan, "<f4"), 0
        for record in records:
            vector = record.get("vector")
            row = nothing if vector is None else np.asarray(vector, "<f4")
            file.write(row.reshape(self.width).tobytes())
            rows += 1
        file.seek(0)
        file.write(self._header(rows))
        file.seek(0, io.SEEK_END)

    def join(self, files: Sequence[Path], file: BinaryIO) -> None:
        fixed, row = len(self._header(0)), 4 * self.width
        rows = [(path.stat().st_size - fixed) // row for path in files]
        file.write(self._header(sum(rows)))
        for path, count in zip(files, rows, strict=True):
            _copy_behind(self._header(count), path, file)

    def _header(self, rows: int) -> bytes:
        """Returns the header of a file; numpy pads it to one length for any number of rows."""
        file = io.BytesIO()
        shape = {"descr": "<f4", "fortran_order": False, "shape": (rows, self.width)}
        np.lib.format.write_array_header_1_0(file, shape)
        return file.getvalue()


@dataclass(frozen=True, kw_only=True)
class ParquetWriter(RowWriter):
    """A column for the id and for each field of the input and the result.

    Attributes:
        schema: Names and Arrow types of the columns.
        group: Rows of a row group.
    """

    schema: Any
    group: int = ROW_GROUP

    def write(self, records: Iterable[Record], file: BinaryIO) -> None:
        """Writes records in groups of rows."""
        pyarrow = import_pyarrow()
        rows = (_cells(record, self.schema.names) for record in records)
        # Closed after an error too: else its destructor complains of the closed file.
        with pyarrow.parquet.ParquetWriter(file, self.schema) as writer:
            while group := list(islice(rows, self.group)):
                arrays = []
                for kind, column in zip(self.schema.types, zip(*group, strict=True), strict=True):
                    values: Iterable[Any] = column
                    if pyarrow.types.is_string(kind):
                        values = [None if value is None else as_text(value) for value in column]
                    arrays.append(pyarrow.array(values, kind))
                writer.write_table(pyarrow.table(arrays, schema=self.schema))

    def join(self, files: Sequence[Path], file: BinaryIO) -> None:
        """Writes the rows of several files in groups of the same sizes as `write`."""
        pyarrow = import_pyarrow()
        with pyarrow.parquet.ParquetWriter(file, self.schema) as writer:
            batches = chain.from_iterable(map(self._batches, files))
            for group in _row_groups(batches, self.group):
                table = pyarrow.Table.from_batches(group).cast(self.schema)
                # Else the pages would show where batches ended.
                writer.write_table(table.combine_chunks())

    def _batches(self, path: Path) -> Iterator[Any]:
        with opened_parquet(path) as file:
            if not file.schema_arrow.equals(self.schema):
                raise InputError(f"{path} has other columns than its job writes; run the job again")
            yield from file.iter_batches(self.group, use_threads=False)

    def _holds_id(self, id: int | str) -> bool:
        import pyarrow

        kind = self.schema.field("id").type
        try:
            pyarrow.scalar(id if pyarrow.types.is_integer(kind) else str(id), kind)
        except (ValueError, TypeError, OverflowError):
            return False
        return True


def _row_groups(batches: Iterable[Any], most: int) -> Iterator[list[Any]]:
    """Regroups batches of at most `most` rows: each list but the last has that many."""
    group: list[Any] = []
    room = most
    for batch in batches:
        if batch.num_rows >= room:
            yield [*group, batch.slice(0, room)]
            batch, group, room = batch.slice(room), [], most
        if batch.num_rows:
            group.append(batch)
            room -= batch.num_rows
    if group:
        yield group


def _schema(rows: Layout, passed: Iterable[str], results: Mapping[str, Kind], width: int) -> Any:
    pyarrow = import_pyarrow()
    types = {
        "text": pyarrow.string(),
        "json": pyarrow.string(),
        "integer": pyarrow.int64(),
        "float": pyarrow.float64(),
        "boolean": pyarrow.bool_(),
        "vector": pyarrow.list_(pyarrow.float32(), width),
    }
    kinds = dict.fromkeys(passed, types["text"]) | (rows.types or {})
    number = kinds.pop("id", types["text" if rows.has_id else "integer"])
    # Dictionaries keep their values only; an id that is neither a number nor text became text.
    kinds = {
        name: kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        for name, kind in kinds.items()
    }
    fields = {"id": number if pyarrow.types.is_integer(number) else types["text"], **kinds}
    own = {name: types[kind] for name, kind in results.items()}
    return pyarrow.schema([*fields.items(), *own.items()])
