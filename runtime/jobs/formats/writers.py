"""Output formats of a job: records as lines, tables or vectors, in files that join into one."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, cast, get_args

import numpy as np

from transferry.runtime.engine.tasks.table import TASKS
from transferry.runtime.engine.tasks.task import Kind, Layout, OutputFormat, Task, columns
from transferry.runtime.errors import InputError, Option, UsageError
from transferry.runtime.io.lines import Compression, packed, read_blocks
from transferry.runtime.io.whole import reason
from transferry.runtime.jobs.formats.cells import as_text, cell_text, json_value
from transferry.runtime.jobs.formats.columnar import (
    arrow_type,
    import_pyarrow,
    is_kept,
    opened_parquet,
    row_groups,
    with_numbers,
    with_schema,
)
from transferry.runtime.jobs.formats.detection import TEXT_NAME, named_format
from transferry.runtime.jobs.formats.openai_batch import response_line
from transferry.runtime.jobs.formats.records import (
    ARROW,
    EVERY,
    ColumnChoice,
    OutputColumns,
    Record,
    RowWriter,
    output_columns,
)
from transferry.runtime.settings import listed

# Columns of every task behind its own; in tables `error` is two columns.
_ANY_TASK = columns(truncated="boolean", error_kind="text", error_message="text")
ROW_GROUP = 4096
# Endings of names, where they are not the format's own name.
ENDINGS: dict[str, str] = {"text": "txt", "openai": "jsonl"}
_OUT = Option("output")
_AS_SPACE = {ord(letter): " " for letter in "\t\r\n"}


def open_writer(
    path: Path,
    *,
    format: OutputFormat | None = None,
    rows: Layout,
    task: str = "generate",
    kinds: Mapping[str, Kind] | None = None,
    n_best: int = 1,
    width: int = 0,
    choice: ColumnChoice = EVERY,
) -> RowWriter:
    """Returns the writer of a job's output; "-" is standard output.

    Lines are compressed as the name says. `kinds` are the task's columns in a table, by default
    those of its class; `width` is the length of the vectors of embed. With `n_best` above 1, and
    for requests, tables list all hypotheses.

    Raises:
        UsageError: The task has no such format, it cannot go there, or a package is missing; or a
            column was chosen that is not there.
    """
    kind, compression = TASKS[task], named_format(path)[1]
    format = _chosen_format(path, format, rows, kind, kinds)
    if format in ("npy", "parquet") and str(path) == "-":
        raise UsageError(f"{format} cannot go to standard output; name a file with ", _OUT)
    if format in ("npy", "parquet") and compression:
        raise UsageError(f"{path}: {format} is written without {compression}; leave it out")
    if format in ("text", "npy", "openai"):
        choice.refuse(format)
        if n_best > 1 and format == "text":
            raise UsageError(
                *("text has one answer a row, and ", Option("n_best"), f" is {n_best}; "),
                *("name another ", _OUT, " or ", Option("format"), ", such as jsonl"),
            )
        if rows.others:
            raise UsageError(
                f"{format} has one answer a row, and there are {1 + len(rows.others)} columns to "
                "answer; name another ",
                *(_OUT, " or ", Option("format"), ", such as jsonl"),
            )
        return join_writer(format, compression, width=width)
    # JSON has its own fields, with lists where a table has columns.
    kinds = kind.columns if kinds is None or format == "jsonl" else kinds
    own = _own_columns(
        {**kinds, **kind.in_json}, format, n_best=n_best > 1 or rows.format == "openai"
    )
    columns = output_columns(rows, own, kind.answer, choice, is_table=format != "jsonl")
    for name in columns.names if format == "tsv" else ():
        if name != name.translate(_AS_SPACE):
            raise UsageError(
                f"{rows.path}: tsv cannot hold the name of the column {name!r}; leave it out with ",
                *(Option("drop"), ", or choose another ", Option("format")),
            )
    schema = _schema(rows, columns, width) if format == "parquet" else None
    table: dict[str, Any] = {"delimiter": rows.delimiter, "mark": rows.mark}
    writer = join_writer(format, compression, names=columns.names, schema=schema, **table)
    if isinstance(writer, _TsvWriter) and rows.format == "tsv":
        writer = replace(writer, verbatim=frozenset(columns.repeated))
    return replace(writer, columns=columns)


def join_writer(
    format: OutputFormat,
    compression: Compression,
    *,
    names: Sequence[str] = (),
    schema: Any = None,
    width: int = 0,
    delimiter: str = ",",
    mark: str = "",
) -> RowWriter:
    """Returns a writer of a job that can at least join its files.

    TSV and CSV need the `names` of all columns, Parquet a `schema`, npy a `width` of vectors.
    """
    if format == "npy":
        return _NpyWriter(format=format, width=width)
    if format == "parquet":
        return ParquetWriter(format=format, schema=schema)
    if format in ("csv", "tsv"):
        kind = _CsvWriter if format == "csv" else _TsvWriter
        table: dict[str, Any] = {"names": tuple(names), "delimiter": delimiter, "mark": mark}
        return kind(format=format, compression=compression, **table)
    line = {"text": _text_line, "jsonl": _json_line, "openai": response_line}[format]
    return _LineWriter(format=format, compression=compression, to_line=line)


def _chosen_format(
    path: Path,
    format: OutputFormat | None,
    rows: Layout,
    task: type[Task],
    kinds: Mapping[str, Kind] | None,
) -> OutputFormat:
    """Returns the format by option, input or name; raises UsageError if the task has no such."""
    name, _ = named_format(path)
    if format is None and rows.format == "openai" and name in ("", "jsonl"):
        format = "openai"
    if format is None and name in get_args(OutputFormat):
        format = cast(OutputFormat, name)
    if format is None and name not in ("txt", "out") and not TEXT_NAME.fullmatch(name):
        known = dict.fromkeys(f".{ENDINGS.get(each, each)}" for each in task.formats)
        raise UsageError(
            f"{path}: there is no output format {name}; let the name end in one of "
            f"{', '.join(known)}, or choose with ",
            Option("format"),
        )
    format = format or task.default_format
    if format not in task.formats:
        raise UsageError(
            f"task {task.name} writes {listed(task.formats, 'or')}, not {format}; name another ",
            *(_OUT, " or ", Option("format")),
        )
    for column, held in (("indices", "sparse vectors"), ("vectors", "vectors of tokens")):
        if format in ("npy", "openai") and column in (kinds or ()):
            raise UsageError(f"{format} holds no {held}; name a .parquet or .jsonl file")
    if format == "openai" and rows.format != "openai":
        raise UsageError(
            f"{path}: responses answer requests, and {rows.path} is read as {rows.format}; add ",
            *(Option("format_in"), " openai, or choose another ", Option("format")),
        )
    return format


def _own_columns(
    kinds: Mapping[str, Kind], format: OutputFormat, *, n_best: bool
) -> dict[str, Kind]:
    """Returns the columns of a result with their types, in order."""
    own = dict(kinds)
    if format == "jsonl":
        return {"source": "text", **own, "truncated": "boolean", "error": "text"}
    own.pop("weights", None)
    if own.keys() & {"vector", "indices"}:
        own.pop("vectors", None)
    own.pop("scores", None)
    all_best = {"n_best": own.pop("n_best")} if "n_best" in own else {}
    return {"source": "text", **own, **_ANY_TASK, **(all_best if n_best else {})}


@dataclass(frozen=True, kw_only=True)
class _LineWriter(RowWriter):
    """One line per record, behind a header if there is one."""

    compression: Compression
    to_line: Callable[[Record], str] = str
    header: str = ""

    def write(self, records: Iterable[Record], file: BinaryIO) -> None:
        with packed(file, self.compression) as stream:
            stream.write(self.header.encode())
            for record in records:
                stream.write(self.to_line(record).encode())

    def join(self, files: Iterable[Path], file: BinaryIO, first: int | None = None) -> None:
        header = self.header.encode()
        with packed(file, self.compression) as stream:
            stream.write(header)
            blocks = (block for path in files for block in _behind(header, path))
            for block in blocks if first is None else self._numbered(blocks, first):
                stream.write(block)

    def _numbered(self, blocks: Iterable[bytes], first: int) -> Iterator[bytes]:
        """Yields records in blocks of bytes; those without an id get the number of the row."""
        for number, record in enumerate(_lines(blocks), first):
            lacks = record.startswith(b'{"id": null, ')
            yield record.replace(b"null", b"%d" % number, 1) if lacks else record


@dataclass(frozen=True, kw_only=True)
class _CsvWriter(_LineWriter):
    """A table.

    Attributes:
        names: All columns, in order.
        delimiter: Character between the columns of CSV.
        mark: Byte order mark in front of the header, by which Excel knows UTF-8.
    """

    names: tuple[str, ...]
    delimiter: str = ","
    mark: str = ""

    def __post_init__(self) -> None:
        header = self.joined({name: name for name in self.names})
        object.__setattr__(self, "header", self.mark + header)
        object.__setattr__(self, "to_line", self.joined)

    def joined(self, record: Record) -> str:
        """Returns the line of a record."""
        cells = (cell_text(record.get(name)) for name in self.names)
        # With both characters in its line terminator, csv quotes fields with either of them.
        line = io.StringIO()
        csv.writer(line, delimiter=self.delimiter, lineterminator="\r\n").writerow(cells)
        return line.getvalue().removesuffix("\r\n") + "\n"

    def _numbered(self, blocks: Iterable[bytes], first: int) -> Iterator[bytes]:
        # Only of a text, where no row has an id.
        return (b"%d%b" % numbered for numbered in enumerate(self._split(_lines(blocks)), first))

    def _split(self, lines: Iterator[bytes]) -> Iterator[bytes]:
        record = b""
        for line in lines:
            record += line
            if not record.count(b'"') % 2:
                yield record
                record = b""


@dataclass(frozen=True, kw_only=True)
class _TsvWriter(_CsvWriter):
    """TSV has no escape for tabs and line breaks, so a field with one cannot be repeated.

    Attributes:
        verbatim: Columns of another TSV, whose cells are repeated as they stand.
    """

    verbatim: frozenset[str] = frozenset()

    def joined(self, record: Record) -> str:
        """Returns the line of a record; in answers tabs and line breaks become spaces."""
        cells = ((name, cell_text(record.get(name))) for name in self.names)
        kept = self.verbatim
        found = (cell if name in kept else cell.translate(_AS_SPACE) for name, cell in cells)
        return "\t".join(found) + "\n"

    def _split(self, lines: Iterator[bytes]) -> Iterator[bytes]:
        return lines

    def _holds(self, value: Any) -> bool:
        lost, text = "\t\n" if self.verbatim else "\t\n\r", cell_text(value)
        return not any(letter in text for letter in lost)


def _text_line(record: Record) -> str:
    """The best output; a line break inside it becomes a space."""
    return " ".join((record.get("text") or "").splitlines()) + "\n"


def _json_line(record: Record) -> str:
    """All fields; NaN and infinity become null."""
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
    }
    return _to_json(finite) + "\n"


_to_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=json_value).encode


def _lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    rest = b""
    for block in blocks:
        *lines, rest = (rest + block).split(b"\n")
        yield from (line + b"\n" for line in lines)


def _behind(header: bytes, path: Path) -> Iterator[bytes]:
    """Yields a file without its header, in blocks."""
    blocks, begin = read_blocks(path), b""
    while len(begin) < len(header) and (block := next(blocks, b"")):
        begin += block
    if not begin.startswith(header):
        raise InputError(f"{path} does not begin as its job writes it; run the job again")
    yield begin[len(header) :]
    yield from blocks


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

    def join(self, files: Iterable[Path], file: BinaryIO, first: int | None = None) -> None:
        fixed, row, files = len(self._header(0)), 4 * self.width, list(files)
        rows = [(path.stat().st_size - fixed) // row for path in files]
        file.write(self._header(sum(rows)))
        for path, count in zip(files, rows, strict=True):
            for block in _behind(self._header(count), path):
                file.write(block)

    def _header(self, rows: int) -> bytes:
        """Returns the header of a file; numpy pads it to one length for any number of rows."""
        file = io.BytesIO()
        shape = {"descr": "<f4", "fortran_order": False, "shape": (rows, self.width)}
        np.lib.format.write_array_header_1_0(file, shape)
        return file.getvalue()


@dataclass(frozen=True, kw_only=True)
class ParquetWriter(RowWriter):
    """A column for each field of the input and the result.

    Attributes:
        schema: Names and Arrow types of the columns, as a file gives them back.
        group: Rows of a row group.
    """

    schema: Any
    group: int = ROW_GROUP

    def write(self, records: Iterable[Record], file: BinaryIO) -> None:
        pyarrow, rows = import_pyarrow(), iter(records)
        # Closed after an error too: else its destructor complains of the closed file.
        with pyarrow.parquet.ParquetWriter(file, self.schema) as writer:
            while group := list(islice(rows, self.group)):
                with _held("a column", pyarrow.ArrowException):
                    writer.write_table(self.table(group))

    def table(self, group: Sequence[Record]) -> Any:
        """Returns records as an Arrow table."""
        pyarrow, found = import_pyarrow(), {}
        if self.columns is not None and self.columns.source and ARROW in group[0]:
            found = self._repeated(group, self.columns.repeated)
        for field in self.schema:
            if field.name in found:
                continue
            values: Iterable[Any] = [record.get(field.name) for record in group]
            if pyarrow.types.is_string(field.type):
                values = [None if value is None else as_text(value) for value in values]
            found[field.name] = pyarrow.array(values, field.type)
        return pyarrow.table([found[name] for name in self.schema.names], schema=self.schema)

    def _repeated(self, group: Sequence[Record], names: Sequence[str]) -> dict[str, Any]:
        """Returns columns of the input that Arrow holds, and the values of each in one array."""
        import pyarrow

        schema = pyarrow.schema([self.schema.field(name) for name in names])
        slices: list[tuple[Any, int, int]] = []
        for record in group:
            batch, place = record[ARROW]
            if slices and slices[-1][0] is batch and sum(slices[-1][1:]) == place:
                batch, first, rows = slices.pop()
                slices.append((batch, first, rows + 1))
            else:
                slices.append((batch, place, 1))
        batches = [with_schema(batch, schema).slice(first, rows) for batch, first, rows in slices]
        whole = pyarrow.Table.from_batches(batches).combine_chunks()
        return dict(zip(names, whole.columns, strict=True))

    def join(self, files: Iterable[Path], file: BinaryIO, first: int | None = None) -> None:
        import pyarrow

        found = (batch for path in files for batch in self._batches(path))
        batches = found if first is None else with_numbers(found, first)
        with pyarrow.parquet.ParquetWriter(file, self.schema) as writer:
            for group in row_groups(batches, self.group):
                table = pyarrow.Table.from_batches(group).unify_dictionaries()
                with _held("a column", pyarrow.ArrowException):
                    writer.write_table(table.combine_chunks())

    def _batches(self, path: Path) -> Iterator[Any]:
        with opened_parquet(path) as file:
            if not file.schema_arrow.equals(self.schema):
                raise InputError(f"{path} has other columns than its job writes; run the job again")
            yield from file.iter_batches(self.group, use_threads=False)

    def _holds_id(self, id: Any) -> bool:
        # Arrow would make 1 of 1.5.
        of_numbers = self.schema.field("id").type == import_pyarrow().int64()
        return id is None or not of_numbers or (type(id) is int and -(2**63) <= id < 2**63)


def _schema(rows: Layout, columns: OutputColumns, width: int) -> Any:
    """Returns the schema of Parquet, as a file gives it back; metadata of pandas stay.

    Raises:
        UsageError: Parquet cannot hold a column of an Arrow file.
    """
    pyarrow = import_pyarrow()
    text, number = pyarrow.string(), pyarrow.int64()
    fields = [pyarrow.field("id", text if rows.has_id else number)] if columns.identified else []
    of_table = rows.schema is not None and not columns.identified
    fields += [rows.schema.field(name) if of_table else (name, text) for name in columns.repeated]
    fields += [(name, arrow_type(kind, width)) for name, kind in columns.kinds.items()]
    wanted = pyarrow.schema(fields, rows.schema.metadata if of_table else None)
    for field in wanted:
        with _held(f"the column {field.name}", pyarrow.ArrowException, OSError):
            if not is_kept(field.type, _stored(pyarrow.schema([field])).types[0]):
                raise pyarrow.ArrowNotImplementedError(f"it is {field.type}")
    return _stored(wanted)


def _stored(schema: Any) -> Any:
    """Returns a schema as a file of Parquet gives it back."""
    pyarrow, file = import_pyarrow(), io.BytesIO()
    pyarrow.parquet.ParquetWriter(file, schema).close()
    return pyarrow.parquet.ParquetFile(io.BytesIO(file.getvalue())).schema_arrow


@contextmanager
def _held(column: str, *errors: type[Exception]) -> Iterator[None]:
    """Converts errors to UsageError, such as of views in lists, which Arrow cannot always write."""
    try:
        yield
    except errors as error:
        told = f"Parquet cannot hold {column}: {reason(error)}; leave it out with "
        raise UsageError(told, Option("drop")) from error
