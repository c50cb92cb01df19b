"""Records of a job's output, their columns, and the protocol of their writers."""

from __future__ import annotations

import csv
import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from transferry.runtime.engine.result import PartsResult, RowError, RowResult
from transferry.runtime.engine.tasks.task import Kind, Layout, OutputFormat
from transferry.runtime.errors import Option, UsageError, joined_options
from transferry.runtime.jobs.formats.cells import decoded
from transferry.runtime.jobs.formats.rows import FIRST_ROWS, InputRow

Record = Mapping[Any, Any]
# Put before a name of an answer's column that the input has too.
PREFIX = "transferry_"
# Key of a record: batch and place of a row that Arrow repeats as it stands.
ARROW = object()


@dataclass(frozen=True)
class ColumnChoice:
    """The user's choice of columns.

    Attributes:
        output: Names of the answers' columns, one for each text; empty for the task's own.
        keep: Columns of the input to repeat, as names or lists with commas; empty for all.
        drop: Columns of the input not to repeat, likewise.
        sampled: Returns the fields of the first rows of JSONL, where these are known.
    """

    output: Sequence[str] = ()
    keep: Sequence[str] = ()
    drop: Sequence[str] = ()
    sampled: Callable[[], Collection[str]] = tuple

    def refuse(self, format: str) -> None:
        """Raises UsageError for choices without effect on a format without columns."""
        given = {"output_column": self.output, "keep": self.keep, "drop": self.drop}
        for name in (name for name, value in given.items() if value):
            raise UsageError(Option(name), f" has no effect on {format} output; leave it out")

    def columns(self, rows: Layout) -> Iterable[str]:
        """Returns the columns of an input that is no table, of JSONL those of its first rows."""
        found = dict.fromkeys((*rows.columns, *(self.sampled() if rows.format == "jsonl" else ())))
        return (name for name in found if name not in (rows.column, *rows.others))

    def repeats(self, rows: Layout) -> Callable[[str], bool]:
        """Returns whether a column of an input is repeated, by its name.

        Raises:
            UsageError: The input lacks a column, or the first rows of JSONL, if they are known.
        """
        if self.keep and self.drop:
            raise UsageError(*joined_options(["keep", "drop"]), " exclude each other; choose one")
        known = rows.names or (rows.column, *rows.others, *rows.columns)
        option, values = ("keep", self.keep) if self.keep else ("drop", self.drop)
        named = [name for value in values for name in _listed(value, known)]
        place = ""
        if rows.format == "jsonl":  # each row has its own, and the writer adds id
            others = () if {*named} <= {*known, "id"} else self.sampled()
            known = (*known, "id", *sorted(others)) if others else (*known, *named)
            place = f" in its first {FIRST_ROWS:,} rows"
        for name in named:
            if name not in known:
                close = difflib.get_close_matches(name, known, 1)
                hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(known)}"
                told = f"{rows.path} has no column {name}{place} for "
                raise UsageError(told, Option(option), f"; {hint}")
        chosen, drops = frozenset(named), option == "drop"
        return lambda name: (name in chosen) is not drops


EVERY = ColumnChoice()


def _listed(value: str, known: Collection[str]) -> Sequence[str]:
    """Returns the names of a list, as CSV has them; a column may have a comma in its name."""
    return [value] if value in known else next(csv.reader([value]), [])


@dataclass(frozen=True, kw_only=True)
class OutputColumns:
    """Columns of an output.

    Attributes:
        identified: Whether rows get an `id`; rows of a table have their own columns instead.
        numbers: Whether a row without an id gets its number; else `join` gives it.
        is_table: Whether all rows have the same columns.
        source: All columns of the input's table, in order; empty for other inputs.
        repeated: Columns of the input that every row has, in order.
        repeats: Whether a field is repeated where rows have their own.
        own: For each text the names of its answer's columns, by the task's names.
        kinds: Types of the answers' columns, by name, in order.
    """

    identified: bool
    is_table: bool
    source: tuple[str, ...]
    repeated: tuple[str, ...]
    repeats: Callable[[str], bool]
    own: Sequence[Mapping[str, str]]
    kinds: Mapping[str, Kind]
    numbers: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all columns of a table."""
        return (*(["id"] if self.identified else []), *self.repeated, *self.kinds)

    def holds(self, name: str) -> bool:
        """Whether there is a place for a chosen field of a row."""
        return name in self.repeated if self.is_table else name not in self.kinds

    def record(self, row: InputRow, result: RowResult, n_best: int) -> dict[Any, Any]:
        """Returns the values of a row by name; `ARROW` stands for columns that Arrow repeats."""
        found: dict[Any, Any]
        if self.identified:
            found = {"id": row.number if row.id is None and self.numbers else row.id}
            found |= {name: row.fields[name] for name in row.fields if self.repeats(name)}
        else:
            found = {} if row.arrow is None else {ARROW: row.arrow}
            cells = zip(self.source, row.cells or (), strict=False)
            found |= {name: value for name, value in cells if name in self.repeated}
        results = result.parts if row.others and isinstance(result, PartsResult) else (result,)
        for names, one in zip(self.own, results, strict=True):
            values = one.cells(n_best) if self.is_table else one.record(n_best)
            found |= {names[name]: values[name] for name in values if name in names}
        return found


def output_columns(
    rows: Layout, own: Mapping[str, Kind], answer: str, choice: ColumnChoice, *, is_table: bool
) -> OutputColumns:
    """Returns the columns of an output.

    A name of ours that the input has too gets `PREFIX`; with several texts, that of the text's
    column before it. `own` has the types of the task's columns, `answer` the name of one of them.

    Raises:
        UsageError: A chosen name is not there, or taken.
    """
    repeats, texts = choice.repeats(rows), (rows.column, *rows.others)
    keeps_table = bool(rows.names) and is_table
    columns = rows.names if keeps_table else choice.columns(rows) if is_table else rows.columns
    repeated = tuple(filter(repeats, columns))
    if choice.output and len(choice.output) != len(texts):
        expected = "one name" if len(texts) == 1 else f"{len(texts)} names, one a column"
        raise UsageError(
            Option("output_column"), f" must give {expected}, found {len(choice.output)}"
        )
    taken = {*repeated, *choice.output} | (set() if keeps_table else {"id"})
    for place, name in enumerate(choice.output):
        if isinstance(fault := decoded(name.encode(errors="surrogatepass")), RowError):
            raise UsageError(Option("output_column"), f" must be text, {fault.message}")
        if name in repeated or name in choice.output[:place] or (name == "id" and not keeps_table):
            raise UsageError(
                Option("output_column"),
                f": there is a column {name} already; choose another name, or leave the column ",
                *("out with ", Option("drop"), f" {name}"),
            )
    names: list[dict[str, str]] = []
    for place, text in enumerate(texts):
        found = {}
        for name in own:
            if name == "source" and (keeps_table or not repeats(text)):
                continue
            if name == answer and choice.output:
                found[name] = choice.output[place]
                continue
            found[name] = _free(f"{text}_{name}" if rows.others else name, taken)
            taken.add(found[name])
        names.append(found)
    kinds = {each[name]: own[name] for each in names for name in each}
    return OutputColumns(
        identified=not keeps_table,
        is_table=is_table,
        source=rows.names,
        repeated=repeated,
        repeats=repeats,
        own=names,
        kinds=kinds,
    )


def _free(name: str, taken: Collection[str]) -> str:
    while name.casefold() in map(str.casefold, taken):  # SQL takes such names for the same
        name = PREFIX + name
    return name


def with_error(row: InputRow, error: RowError) -> InputRow:
    """Returns a row with an error in the place of each text."""
    texts: Iterable[str | RowError] = (row.text, *row.others)
    text, *others = (error if isinstance(text, str) else text for text in texts)
    return replace(row, text=text, others=tuple(others))


@dataclass(frozen=True, kw_only=True)
class RowWriter(ABC):
    """Writes records in one format. The same records give the same bytes, however they are split.

    Attributes:
        format: Name of the format.
        columns: Names of an output of fields; None for other formats.
    """

    format: OutputFormat
    columns: OutputColumns | None = None

    @abstractmethod
    def write(self, records: Iterable[Record], file: BinaryIO) -> None:
        """Writes records to an empty file, which stays open and is a whole file of the format."""

    @abstractmethod
    def join(self, files: Iterable[Path], file: BinaryIO, first: int | None = None) -> None:
        """Writes the records of several files of this writer, in order, as one file.

        `first` is the number of the first row, where rows without an id still lack their numbers.
        """

    def record(self, row: InputRow, result: RowResult, n_best: int = 1) -> Record:
        """Returns the record of a row; `n_best` above 1 lists all hypotheses."""
        if self.format == "openai":
            named = {"number": row.number, "request": row.request, "result": result}
            return {"id": row.id, **named}
        if row.request is not None:
            n_best = max(n_best, row.request.settings.get("n_best", 1))
        if self.columns is None:
            return result.record(n_best)
        return self.columns.record(row, result, n_best)

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
        if self.columns is None:
            return row
        if not self.columns.identified:
            return self._admit_cells(self.columns, row)
        names = [
            name
            for name in filter(self.columns.repeats, row.fields)
            if not (self.columns.holds(name) and self._holds(row.fields[name]))
        ]
        kept = {name: value for name, value in row.fields.items() if name not in names}
        names += [] if self._holds_id(row.id) else ["id"]
        if not names:
            return row
        id = None if "id" in names else row.id
        return replace(self._refuse(row, names[0]), id=id, fields=kept)

    def _admit_cells(self, columns: OutputColumns, row: InputRow) -> InputRow:
        """Returns a row of a table with empty cells in the place of those it cannot hold."""
        if row.cells is None:
            return row
        cells = dict(zip(columns.source, row.cells, strict=True))
        names = [name for name in columns.repeated if not self._holds(cells[name])]
        if not names:
            return row
        kept = (None if name in names else value for name, value in cells.items())
        return replace(self._refuse(row, names[0]), cells=tuple(kept))

    def _refuse(self, row: InputRow, name: str) -> InputRow:
        message = (
            f"{self.format} output cannot hold the field {name!r}; leave it out, or write jsonl"
        )
        return with_error(row, RowError("fields", message))

    def _holds(self, value: Any) -> bool:
        """Whether the format has a place for a value of the input."""
        return True

    def _holds_id(self, id: Any) -> bool:
        return self._holds(id)
