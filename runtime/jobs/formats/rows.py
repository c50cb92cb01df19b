"""Rows of a job's input, and the protocol of their readers."""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from transferry.runtime.engine.result import RowError
from transferry.runtime.engine.tasks.task import Layout
from transferry.runtime.errors import InputError, Option
from transferry.runtime.io.line_index import remembered
from transferry.runtime.io.lines import LongLine
from transferry.runtime.jobs.formats.cells import as_text, to_json
from transferry.runtime.jobs.formats.remote_file import Source
from transferry.runtime.jobs.job_options import InputFormat

Fields = dict[str, Any]
# Bytes that a row keeps of its line: thousands of rows are read ahead.
_MOST_RAW = 1 << 12
# Rows of JSONL searched for an object whose keys become the columns, and for chosen columns.
FIRST_ROWS = 1000
Languages = tuple[str | None, str | None]
# The end of a sentence, or five words: the first row of a table without a header.
_SENTENCE = re.compile(r"[.!?…。！？]\W*$|(\S+\s+){4}\S")


@dataclass(frozen=True)
class InputRow:
    """One row of the input.

    Attributes:
        number: Position in the whole input, from 0.
        id: The field `id` as it was read; None where the row has none.
        text: Text for the task, or why the row has none.
        fields: All other fields, in order, which the output repeats.
        raw: Bytes that the row was read from, or that distinguish it from any other row, such as
            the hash of many bytes.
        target: Target of a pair, or its error; None where rows are not pairs.
        languages: Languages of the text and of its answer; None is the job's.
        request: The request of a batch that it is; see `openai_batch.Request`.
        others: Texts of further columns, likewise.
        cells: Values of all columns of a table; None on an error.
        arrow: Batch and place of a row that Arrow holds.
    """

    number: int
    id: Any
    text: str | RowError
    fields: Mapping[str, Any] = field(default_factory=dict)
    raw: bytes = b""
    target: str | RowError | None = None
    languages: Languages = (None, None)
    request: Any = None
    others: tuple[str | RowError, ...] = ()
    cells: tuple[Any, ...] | None = None
    arrow: tuple[Any, int] | None = None

    @property
    def singles(self) -> Iterator[InputRow]:
        """The row with each of its texts alone."""
        yield self
        for text in self.others:
            yield replace(self, text=text)

    def update(self, digest: hashlib._Hash) -> None:
        """Adds the row's bytes to a hash of rows."""
        digest.update(b"%d " % len(self.raw))
        digest.update(self.raw)


def layout_of(
    path: Source, format: InputFormat, names: Sequence[str], column: str | None
) -> Layout:
    """Returns the layout of named fields; one holds the text.

    Raises:
        InputError: There is no such column, or several may hold the text.
    """
    text = _text_column(path, format, names, column)
    passed = tuple(name for name in names if name not in ("id", text))
    table = tuple(names) if format in ("tsv", "csv", "xlsx", "parquet", "arrow") else ()
    has_id = "id" in names and text != "id"
    return Layout(path, format, passed, has_id, column=text, names=table)


def with_texts(layout: Layout, others: Sequence[str]) -> Layout:
    """Returns a layout with further columns of texts.

    Raises:
        InputError: There is no such column, it holds no text, or it is named twice.
    """
    for place, name in enumerate(others):
        if name in (layout.column, *others[:place]):
            raise InputError(f"{layout.path}: the column {name} is named twice; name it once")
        if layout.format != "jsonl" and name not in layout.names:
            known = ", ".join(layout.names)
            raise InputError(
                f"{layout.path}: there is no column {name}; choose with ",
                *(Option("column"), f" ({known})"),
            )
    columns = tuple(name for name in layout.columns if name not in others)
    has_id = layout.has_id and "id" not in others
    return replace(layout, columns=columns, has_id=has_id, others=tuple(others))


def _text_column(
    path: Source, format: InputFormat, names: Sequence[str], column: str | None
) -> str:
    if format == "jsonl" and (column or not names):
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
            if len(names) == 1 and format in ("tsv", "csv", "xlsx") and _SENTENCE.search(names[0]):
                raise InputError(
                    f"{path}: expected a header, found {names[0][:60]!r}; put the column's name "
                    "above it, or give it with ",
                    *(Option("column"), " if it is the name"),
                )
            return candidates[0]
        problem = "cannot tell which column holds the text"
    known = f" ({', '.join(names)})"
    raise InputError(f"{path}: {problem}; choose one with ", Option("column"), known)


class RowReader(ABC):
    """Reads the rows of one file, or of several.

    Attributes:
        layout: Columns and settings.
        offset: Number of the first row, where other files come before.
        lists: Whether the column holds lists, whose JSON becomes the text.
        languages: Columns with the languages of the text and of its answer.
        count: Number of rows, where it is known without reading them.
        seeks: Whether reading begins at any row without reading all rows before it.
        keeps: Whether `keep` reads rows where the rows before them end.
        tells: Whether the columns are known: not of JSONL without an object.
        boundaries: Rows at which reading begins without reading rows before them, and the number
            of rows; empty where reading begins at any row alike.
    """

    layout: Layout
    offset = 0
    count: int | None = None
    seeks, keeps, tells = False, False, True
    boundaries: Sequence[int] = ()
    _steady: Any = None
    _sha256 = ""
    lists = False
    languages: Languages = (None, None)

    @abstractmethod
    def rows(self, first: int = 0, last: int | None = None) -> Iterator[InputRow]:
        """Streams rows first to last - 1 of the whole input.

        Raises:
            InputError: The file cannot be read or is damaged.
        """

    @property
    def steady(self) -> Sequence[Any]:
        """The files, which must stay as they are; see `Steady`."""
        return [self._steady]

    def number(self, folder: Path | None = None, share: float = 0.0) -> None:
        """Makes `count` known, by reading the file if no other process has; see `LineIndex.of`."""
        if self.count is None:
            self._steady.require_same()
            counted = remembered(self._steady, folder, "rows", lambda: hash_rows(self.rows()))
            self.count, self._sha256 = counted

    def files(self, first: int, end: int | None = None) -> list[Any]:
        """Returns the files whose changes may change rows first to end - 1; those rows are read."""
        return [self.layout.path]

    @property
    def counts(self) -> list[int | None]:
        """Rows of each file, where known."""
        return [self.count]

    def outline(self) -> list[Any]:
        """Returns facts that differ between inputs, as JSON values; `number` comes before."""
        return [*self._steady.version[:1], self.count, self._sha256]

    def start(self, at: int) -> int:
        """Returns the byte of the first row that begins at a byte or behind it."""
        raise NotImplementedError

    def cut(self, begin: int, end: int) -> None:
        """Leaves only the rows between two bytes that `start` has found; numbers them anew."""
        raise NotImplementedError

    @property
    def size(self) -> int:
        """Bytes of the rows, header included; 0 if unknown."""
        return int(self._steady.size)

    def boundary(self, row: int) -> int:
        """Returns the last boundary up to a row; the row itself behind the last one."""
        ends = self.boundaries
        return ends[bisect_right(ends, row) - 1] if ends and row <= ends[-1] else row

    def chunk(self, first: int, most: int) -> int:
        """Returns the rows of a chunk: `most`, or fewer up to the last boundary among them."""
        end = self.boundary(first + most)
        return end - first if end > first else most

    def share(self, place: Any = None) -> float:
        """Returns the share of the input's bytes before a place, or read so far; 0 if unknown."""
        return 0.0

    def place(self, first: int) -> Any:
        """Returns a place at or before a row, as a JSON value, for `keep`."""
        return first

    def keep(self, first: int, rows: int, place: Any) -> tuple[int, Any]:
        """Reads rows and keeps their bytes in memory, for `rows`, in place of those kept before.

        Returns the number of rows, fewer only at the end, and the place behind them.
        """
        raise NotImplementedError

    def _row(self, number: int, fields: Fields | RowError, raw: bytes) -> InputRow:
        number += self.offset
        if len(raw) > _MOST_RAW:
            raw = LongLine.of([raw])
        layout = self.layout
        if isinstance(fields, RowError):
            errors = (fields,) * len(layout.others)
            return InputRow(number, None, fields, {}, raw, others=errors)
        cells = tuple(map(fields.get, layout.names)) if layout.names else None
        text = self._text(fields, layout.column)
        others = tuple(self._text(fields, name) for name in layout.others)
        named = (column if column is None else fields.get(column) for column in self.languages)
        source, target = (None if each is None else as_text(each) or None for each in named)
        id, spoken = fields.pop("id", None), (source, target)
        return InputRow(number, id, text, fields, raw, languages=spoken, others=others, cells=cells)

    def _text(self, fields: Fields, column: str) -> str | RowError:
        """Removes a text from the fields of a row."""
        if column not in fields:
            return RowError("no-text", f"there is no field {column}")
        text = fields.pop(column)
        if text is None and self.layout.others:
            return ""  # an empty cell beside others; see `with_blanks`
        if isinstance(text, list if self.lists else str):
            return to_json(text) if self.lists else str(text)
        expected, found = ("a list", to_json(text)) if self.lists else ("text", as_text(text))
        return RowError("no-text", f"expected {expected} in the field {column}, found {found[:80]}")


def read_rows(
    reader: RowReader, target: RowReader | None, first: int = 0, last: int | None = None
) -> Iterator[InputRow]:
    """Streams rows, each with the row of the same number of `target` where there is one.

    Raises:
        InputError: A file cannot be read, or one of the two ends before the other.
    """
    rows = reader.rows(first, last)
    if target is None:
        yield from rows
        return
    for row, other in zip_longest(rows, target.rows(first, last)):
        if row is None or other is None:
            longer = f"{target.layout.path} {'goes on' if row is None else 'ends'}"
            raise InputError(
                f"{longer} after row {(row or other).number} of the other input; give files of "
                "equal length"
            )
        raw = b"%d %b%b" % (len(row.raw), row.raw, other.raw)
        yield replace(row, raw=raw, target=other.text)


def unique(names: list[str], path: Source | str) -> list[str]:
    """Returns names; raises InputError if one is there twice."""
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"{path}: two columns have the name {twice!r}; rename one")
    return names


def changed(readers: Iterable[RowReader], first: int = 0, end: int | None = None) -> str:
    """Begins a message on rows that have changed: the file that holds them, or the files."""
    first_file, *others = map(str, (file for each in readers for file in each.files(first, end)))
    shown = others if len(others) <= 3 else ["…", others[-1]]
    return f"{'one of ' if others else ''}{', '.join([first_file, *shown])} has changed"


def hash_rows(rows: Iterable[InputRow]) -> tuple[int, str]:
    """Returns the number of rows and the hash of their bytes."""
    digest, count = hashlib.sha256(), 0
    for row in rows:
        row.update(digest)
        count += 1
    return count, digest.hexdigest()
