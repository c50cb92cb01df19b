"""Rows of columnar files: Parquet, and Arrow as Hugging Face datasets store it."""

from __future__ import annotations

import hashlib
import io
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any

from transferry.runtime.engine.result import RowError
from transferry.runtime.engine.tasks.task import Kind, Layout
from transferry.runtime.errors import InputError, Option, from_extra
from transferry.runtime.io.lines import MOST_LINE, LongLine
from transferry.runtime.io.whole import reason
from transferry.runtime.jobs.formats.cells import exact_json, has_nul, holds_only, to_json
from transferry.runtime.jobs.formats.detection import Dialect, partition_columns
from transferry.runtime.jobs.formats.pages import require_small_pages
from transferry.runtime.jobs.formats.remote_file import RemoteFile, Source
from transferry.runtime.jobs.formats.rows import Fields, InputRow, RowReader, layout_of, unique
from transferry.runtime.jobs.formats.sources import Steady
from transferry.runtime.jobs.job_options import InputFormat

_BATCH_BYTES = 1 << 23
_MOST_BATCH_ROWS = 1024
# Metadata of Parquet that would no longer be true with more columns: Spark, for one, reads those
# columns alone that its own schema lists.
_OF_LAYOUT = (
    *(b"ARROW:schema", b"content_defined_chunking"),
    *(b"org.apache.spark.sql.parquet.row.metadata", b"parquet.avro.schema"),
)


class ColumnarReader(RowReader):
    """Reads columns in batches of a few megabytes, and those that the folders' names hold."""

    _named: Mapping[str, str | None] = {}
    _folders: Mapping[str, str | None] = {}

    def __init__(self, path: Source, format: InputFormat, schema: Any, column: str | None) -> None:
        self.file = path
        self._folders = named = partition_columns(path)
        self._named = {name: named[name] for name in named if name not in schema.names}
        schema = self._with_named(schema)
        layout = layout_of(path, format, unique(schema.names, path), column)
        self.layout = replace(layout, schema=schema)
        require_texts(self.layout)

    def _numbered(
        self, batches: Iterator[Any], start: int, first: int, last: int | None
    ) -> Iterator[InputRow]:
        """Yields rows first to last - 1 of batches whose first row has the number `start`."""
        stop = None if last is None else max(0, last - start)
        whole = map(self._with_named, batches)
        found = enumerate(chain.from_iterable(map(_placed, whole)), start)
        for number, (fields, raw, arrow) in islice(found, max(0, first - start), stop):
            yield replace(self._row(number, fields, raw), arrow=arrow)

    def _with_named(self, table: Any) -> Any:
        """Returns a schema or a batch with the columns of the folders' names."""
        import pyarrow

        text, is_batch = pyarrow.string(), not isinstance(table, pyarrow.Schema)
        if not is_batch:
            for name in self._named:
                table = table.append(pyarrow.field(name, text))
        elif self._named:
            scalars = (pyarrow.scalar(value, text) for value in self._named.values())
            values = [pyarrow.repeat(scalar, table.num_rows) for scalar in scalars]
            schema = self._with_named(table.schema)
            table = pyarrow.RecordBatch.from_arrays([*table.columns, *values], schema=schema)
        for name in self._folders.keys() - self._named if is_batch else ():
            if not holds_only(table.column(name), self._folders[name]):
                raise InputError(
                    f"{self.file}: its column {name} has other values than the folder of that name "
                    "above it; rename one of the two"
                )
        return table


class ParquetReader(ColumnarReader):
    """Reads Parquet; row groups before the first row are not read."""

    seeks = True

    def __init__(
        self, path: Source, format: InputFormat, column: str | None, dialect: Dialect
    ) -> None:
        self._steady = Steady(path)
        with opened_parquet(self._steady) as file:
            if isinstance(path, Path):
                require_small_pages(path, file.metadata)
            schema, self._footer = file.schema_arrow, file.metadata
            metadata = {**(file.metadata.metadata or {}), **(schema.metadata or {})}
            kept = {name: metadata[name] for name in metadata if name not in _OF_LAYOUT}
            schema = schema.with_metadata(kept or None)
            groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
            self.boundaries = [0, *accumulate(group.num_rows for group in groups)]
            self.count = self.boundaries[-1]
            wide = max((g.total_byte_size // max(1, g.num_rows) for g in groups), default=0)
            self._batch = max(1, min(_MOST_BATCH_ROWS, _BATCH_BYTES // max(1, wide)))
            super().__init__(path, format, schema, column)

    def outline(self) -> list[Any]:
        """Returns the hash of the footer, which has sizes, places and usually least values."""
        footer = io.BytesIO()
        self._footer.write_metadata_file(footer)
        return [*super().outline(), hashlib.sha256(footer.getvalue()).hexdigest()]

    def rows(self, first: int = 0, last: int | None = None) -> Iterator[InputRow]:
        skipped = bisect_right(self.boundaries, first) - 1
        with opened_parquet(self._steady, self._footer) as file:
            for group, start in enumerate(self.boundaries[skipped:-1], skipped):
                if last is not None and start >= last:
                    return
                # One at a time, so that batches, and dictionaries, do not depend on the first row.
                batches = file.iter_batches(self._batch, row_groups=[group], use_threads=False)
                yield from self._numbered(batches, start, first, last)


class ArrowReader(ColumnarReader):
    """Reads Arrow IPC, a file or a stream as in the folder of a Hugging Face dataset."""

    seeks = True

    def __init__(
        self, path: Source, format: InputFormat, column: str | None, dialect: Dialect
    ) -> None:
        self._steady = Steady(path)
        with _opened_arrow(self._steady) as (schema, _):
            super().__init__(path, format, schema, column)

    @cached_property
    def count(self) -> int | None:  # type: ignore[override]
        """Number of rows, by the heads of the batches; None for a file elsewhere or damaged."""
        if isinstance(self.file, RemoteFile):
            return None
        try:
            with _opened_arrow(self._steady) as (_, batches):
                return sum(int(batch.num_rows) for batch in batches)
        except InputError:  # after the rows before it were read
            return None

    def rows(self, first: int = 0, last: int | None = None) -> Iterator[InputRow]:
        with _opened_arrow(self._steady) as (_, batches):
            begun, start, ahead = 0, 0, list[Any]()
            for batch in batches:  # of those before the first row only the length is read
                if begun + batch.num_rows > first:
                    start, ahead = begun, [batch]
                    break
                begun += batch.num_rows
            slices = (
                batch.slice(start, _MOST_BATCH_ROWS)
                for batch in chain(ahead, batches)
                for start in range(0, batch.num_rows, _MOST_BATCH_ROWS)
            )
            yield from self._numbered(slices, start, first, last)


def _placed(batch: Any) -> Iterator[tuple[Fields | RowError, bytes, tuple[Any, int]]]:
    """Yields fields of each row, bytes that distinguish it, and batch and place to repeat it."""
    try:
        batch.validate(full=True)
    except ValueError:
        for row in (_alone(batch, place) for place in range(batch.num_rows)):
            try:
                row.validate(full=True)
            except ValueError as error:
                at, *_, found = reason(error).removeprefix("In column ").partition(": Invalid: ")
                column = row.schema.names[int(at)] if at.isdecimal() else at
                told = RowError("undecodable", f"column {column}: {found}")
                yield told, row.serialize().to_pybytes(), (_emptied(row), 0)
            else:
                yield from ((*each, (row, 0)) for each in _fields(row))
        return
    for place, (fields, raw) in enumerate(_fields(batch)):
        yield fields, raw, (batch, place)


def _alone(batch: Any, place: int) -> Any:
    """Returns a copy of a row without the values of other rows, which may be the damaged ones.

    Dictionaries within lists and structs keep the values of all rows where they are not of text.
    """
    import pyarrow

    def copied(values: Any, place: int) -> Any:  # `take` has no views
        return pyarrow.chunked_array([values.slice(place, 1), values.slice(0, 0)]).combine_chunks()

    cells = []
    for column in batch.columns:
        cell = copied(column, place)
        with suppress(pyarrow.ArrowException):  # an index behind the values, a negative length
            if isinstance(cell, pyarrow.DictionaryArray):
                held, (index,) = cell.dictionary, cell.indices.to_pylist()
                held.validate()
                if index is None or 0 <= index < len(held):
                    value = copied(held, index or 0) if len(held) else held
                    first = pyarrow.array([index if index is None else 0], cell.indices.type)
                    kept = {"ordered": cell.type.ordered, "safe": False}
                    cell = pyarrow.DictionaryArray.from_arrays(first, value, **kept)
            elif (plain := _decoded(cell.type)) != cell.type:
                cell = cell.cast(plain).cast(cell.type)
        cells.append(cell)
    return pyarrow.record_batch(cells, batch.schema)


def _decoded(kind: Any) -> Any:
    """Returns a type with dictionaries in it replaced by the types of their values."""
    import pyarrow

    types = pyarrow.types
    if types.is_dictionary(kind):
        return kind.value_type
    if types.is_map(kind):
        return pyarrow.map_(_decoded(kind.key_type), _decoded(kind.item_type))
    fields = [kind.field(place) for place in range(kind.num_fields)]
    inner = [field.with_type(_decoded(field.type)) for field in fields]
    if types.is_struct(kind):
        return pyarrow.struct(inner)
    if types.is_fixed_size_list(kind):
        return pyarrow.list_(*inner, kind.list_size)
    lists = {types.is_list: pyarrow.list_, types.is_large_list: pyarrow.large_list}
    return next((make(*inner) for is_kind, make in lists.items() if is_kind(kind)), kind)


def _emptied(row: Any) -> Any:
    """Returns a row with null, or else an empty text or list, in place of cells that are wrong."""
    import pyarrow

    cells = []
    for cell, field in zip(row.columns, row.schema, strict=True):
        with suppress(ValueError):
            cell.validate(full=True)
            cells.append(cell)
            continue
        nested = pyarrow.types.is_nested(field.type)
        empty: Any = [None] * getattr(field.type, "list_size", 0) if nested else ""
        cells.append(pyarrow.array([None if field.nullable else empty], field.type))
    return pyarrow.record_batch(cells, row.schema)


def _fields(batch: Any) -> Iterator[tuple[Fields | RowError, bytes]]:
    """Yields the fields of each row, or its error, and bytes that distinguish it from others."""
    if batch.nbytes > MOST_LINE and batch.num_rows != 1:
        for place in range(batch.num_rows):
            yield from _fields(batch.slice(place, 1))
        return
    if batch.nbytes > MOST_LINE:
        # Its content decides no byte of the output, so it is not copied for a hash.
        line = LongLine(b"%d" % batch.nbytes)
        yield RowError("malformed", line.fault()), line
        return
    for values in zip(*map(_values, batch.columns), strict=True):
        fields = dict(zip(batch.schema.names, values, strict=True))
        raw = exact_json(values).encode()
        if b"\\u0000" in raw and has_nul(fields):
            yield RowError("malformed", "found a NUL in a text"), raw
        else:
            yield fields, raw


def _values(column: Any) -> list[Any]:
    """Returns Python values; types that would lose something stay Arrow scalars."""
    import pyarrow

    types, kind = pyarrow.types, column.type
    exact = (types.is_integer, types.is_boolean, types.is_floating, _is_text)
    if any(is_kind(kind) for is_kind in exact):
        return list(column.to_pylist())
    return [value if value.is_valid else None for value in column]


def require_texts(layout: Layout) -> None:
    """Raises InputError unless the chosen columns of a columnar file hold texts."""
    for name in layout.texts if layout.schema is not None else ():
        if not _is_text(found := layout.schema.field(name).type):
            raise InputError(
                f"{layout.path}: expected text in the column {name}, found {found}; name another "
                "with ",
                Option("column"),
            )


def _is_text(kind: Any) -> bool:
    import pyarrow

    types = pyarrow.types
    if types.is_dictionary(kind):
        kind = kind.value_type
    texts = types.is_string(kind) or types.is_large_string(kind) or kind == "string_view"
    return bool(texts or types.is_null(kind))  # a file may have no text


@contextmanager
def opened_parquet(path: Path | Steady, footer: Any = None) -> Iterator[Any]:
    """Opens a file, buffered by the megabyte. Every OSError inside counts as one of reading.

    The footer, if it was read before, may be as large as many row groups.
    """
    with _source(path, "Parquet") as (pyarrow, source):
        settings = {"buffer_size": 1 << 20, "pre_buffer": False, "metadata": footer}
        with pyarrow.parquet.ParquetFile(source, **settings) as file:
            yield file


@contextmanager
def _opened_arrow(path: Steady) -> Iterator[tuple[Any, Iterator[Any]]]:
    """Opens a file; gives its schema and its batches."""
    with _source(path, "Arrow") as (pyarrow, source):
        # A stream is mapped where it lies, so that reading is lazy and skipping is free.
        mapped = source if isinstance(path.source, RemoteFile) else pyarrow.memory_map(str(source))
        with pyarrow.PythonFile(mapped) if mapped is source else mapped as file:
            head = bytes(file.read(6))
            file.seek(0)
            if head.startswith(b"FEA1"):
                raise pyarrow.ArrowInvalid("version 1 of Feather; write it in version 2")
            if head == b"ARROW1":  # with random access; a stream has no such mark
                whole = pyarrow.ipc.open_file(file)
                yield whole.schema, map(whole.get_batch, range(whole.num_record_batches))
            else:
                stream = pyarrow.ipc.open_stream(file)
                yield stream.schema, _whole(stream, file)


def _whole(stream: Any, file: Any) -> Iterator[Any]:
    """Yields the batches of a stream; raises ArrowInvalid if another stream follows."""
    import pyarrow

    yield from stream
    if bytes(file.read(8)).strip(b"\0"):
        raise pyarrow.ArrowInvalid("several streams; give the files that were joined as inputs")


@contextmanager
def _source(path: Path | Steady, kind: str) -> Iterator[tuple[Any, Any]]:
    """Gives pyarrow, and a path or an open file elsewhere for it."""
    pyarrow = import_pyarrow(kind)
    opened: AbstractContextManager[Any] = nullcontext(path)
    if not isinstance(path, Path):
        opened = path.opened() if isinstance(path.source, RemoteFile) else path.watched()
    # Elsewhere an OSError tells of the connection, and a ValueError would tell of the URL.
    damaged = pyarrow.ArrowException, UnicodeError
    with _told(path, kind, OSError), opened as source, _told(path, kind, *damaged):
        yield pyarrow, source


@contextmanager
def _told(path: Path | Steady, kind: str, *errors: type[Exception]) -> Iterator[None]:
    try:
        yield
    except errors as error:
        names = {UnicodeEncodeError: "the path", UnicodeDecodeError: "the name of a column"}
        told = f"{names[type(error)]} is not UTF-8" if type(error) in names else reason(error)
        raise InputError(f"{path}: cannot be read as {kind}: {told}.") from error


def import_pyarrow(kind: str = "Parquet") -> Any:
    """Returns pyarrow, with pyarrow.parquet; raises UsageError where it is not installed."""
    with from_extra("jobs", f"{kind} needs pyarrow", instead=", or use another format"):
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    return pyarrow


def with_schema(batch: Any, schema: Any) -> Any:
    """Returns columns of a batch with the types of a schema; one file of several may differ.

    Raises:
        InputError: A value would change, or a text become another type.
    """
    import pyarrow

    arrays = []
    for name, kind in zip(schema.names, schema.types, strict=True):
        array = batch.column(name)
        # Arrow 26 cannot cast a struct to its own type where it is a slice.
        if array.type != kind:
            try:
                array = _cast(array, kind)
            except pyarrow.ArrowException as error:
                raise InputError(
                    f"the column {name} is {kind} in the first file and {array.type} in a later "
                    f"one, which does not fit ({error}); add ",
                    *(Option("drop"), f" {name}, or run a job for each"),
                ) from error
        arrays.append(array)
    return pyarrow.record_batch(arrays, schema)


def _cast(array: Any, kind: Any) -> Any:
    """Casts an array; raises ArrowException if a value would change, or mean something else."""
    import pyarrow

    if not _is_akin(array.type, kind):
        raise pyarrow.ArrowInvalid("values would mean something else")
    if pyarrow.types.is_dictionary(array.type):  # to which not all types are cast back
        array = array.dictionary_decode()
    found = again = array.cast(kind)
    with suppress(pyarrow.ArrowNotImplementedError):  # to a list of nothing
        again = found.cast(array.type)
    if to_json(_values(again)) != to_json(_values(array)):
        raise pyarrow.ArrowInvalid("a value would change")
    return found


# Types between which values keep their meaning, one a group, by the beginning of their text.
_KIN = re.compile(
    r"(u?int|halffloat|float|double|decimal)|((?:large_)?string)|((?:fixed_size_|large_)?binary)"
    r"|((?:fixed_size_|large_)?list)|(bool)|(date)|(time\d)|(timestamp\[\w+\])|(timestamp)"
    "|(duration)|(struct)|(map)"
)
_NUMBER, _TEXT = 1, 2


def is_kept(kind: Any, stored: Any, *, nested: bool = False) -> bool:
    """Whether Arrow 26 writes a type to Parquet, and reads the same values as the type `stored`."""
    import pyarrow

    kind, stored = (getattr(each, "storage_type", each) for each in (kind, stored))
    if kind != stored:  # views of lists cannot be cast, and dictionaries in lists not back
        views = "list_view" in str(kind).partition("<")[0]
        if views or (nested and pyarrow.types.is_dictionary(kind)) or not _is_akin(kind, stored):
            return False
    if getattr(kind, "list_size", 1) == 0:  # no more than one of them is read
        return False
    pairs = [(kind.field(place), stored.field(place)) for place in range(kind.num_fields)]
    return all(is_kept(given.type, found.type, nested=True) for given, found in pairs)


def _is_akin(given: Any, wanted: Any) -> bool:
    """Whether values of a type, and those in them, keep their meaning in another."""
    import pyarrow

    types = pyarrow.types
    given, wanted = (
        each.value_type if types.is_dictionary(each) else each for each in (given, wanted)
    )
    if given == wanted or types.is_null(given):
        return True
    kinds = [(found := _KIN.match(str(each))) and found.lastindex for each in (given, wanted)]
    if None in kinds or (kinds[0] != kinds[1] and kinds != [_NUMBER, _TEXT]):
        return False
    pairs = [(given.field(place), place) for place in range(given.num_fields)]
    if types.is_struct(given):  # a field that is lost is a value that changes
        places = [(field, wanted.get_field_index(field.name)) for field, _ in pairs]
        pairs = [(field, place) for field, place in places if place >= 0]
    return all(_is_akin(field.type, wanted.field(place).type) for field, place in pairs)


def with_numbers(batches: Iterable[Any], first: int) -> Iterator[Any]:
    """Yields batches whose rows have the number of the row where the column id is null."""
    import pyarrow
    import pyarrow.compute

    for batch in batches:
        place, ids = batch.schema.get_field_index("id"), batch.column("id")
        numbers = pyarrow.array(range(first, first + batch.num_rows)).cast(ids.type)
        filled = pyarrow.compute.coalesce(ids, numbers)
        yield batch.set_column(place, batch.schema.field(place), filled)
        first += batch.num_rows


def row_groups(batches: Iterable[Any], most: int) -> Iterator[list[Any]]:
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


def arrow_type(kind: Kind, width: int) -> Any:
    """Returns the Arrow type of a column."""
    import pyarrow

    if isinstance(kind, Mapping):
        return pyarrow.struct([(name, arrow_type(each, width)) for name, each in kind.items()])
    if not isinstance(kind, str):
        return pyarrow.list_(arrow_type(kind[0], width))
    return {
        "text": pyarrow.string(),
        "integer": pyarrow.int64(),
        "float": pyarrow.float64(),
        "boolean": pyarrow.bool_(),
        "vector": pyarrow.list_(pyarrow.float32(), width),
    }[kind]
