"""Rows of a job's input, and what reads them."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from transferry.runtime.engine.result import RowError
from transferry.runtime.errors import InputError
from transferry.runtime.jobs.formats.cells import as_text, to_json
from transferry.runtime.jobs.formats.remote_file import Source
from transferry.runtime.jobs.job_options import InputFormat

Fields = dict[str, Any]
Languages = tuple[str | None, str | None]


@dataclass(frozen=True)
class InputRow:
    """One row of the input.

    Attributes:
        number: Position in the whole input, from 0.
        id: The field `id`; `number` where the row has none.
        text: Text for the task, or why the row has none.
        fields: All other fields, in order, which the output repeats.
        raw: Bytes that the row was read from, or that distinguish it from any other row.
        target: Target text of a pair, or why it has none; None where rows are not pairs.
        languages: Languages of the text and of its answer; None is the job's.
        kind: What the text is, where the row itself says that it is JSON of something.
    """

    number: int
    id: int | str
    text: str | RowError
    fields: Mapping[str, Any] = field(default_factory=dict)
    raw: bytes = b""
    target: str | RowError | None = None
    languages: tuple[str | None, str | None] = (None, None)
    kind: Literal["messages", "ids"] | None = None

    def update(self, digest: hashlib._Hash) -> None:
        """Adds the row's bytes to a hash of rows."""
        digest.update(b"%d " % len(self.raw))
        digest.update(self.raw)


class RowReader(ABC):
    """Reads the rows of one file.

    Attributes:
        path: The file, or words for several; "-" is standard input, which can be read once.
        format: Its format.
        columns: Fields that are passed through, in order: all but the text and `id`. In JSONL,
            where each row has its own, those of the first object.
        has_id: Whether rows have an id of their own.
        offset: Number of the first row, where other files come before.
        types: Arrow types of `columns` and `id` by name, for Parquet; else None.
        lists: Whether the column holds lists, whose JSON becomes the text.
        languages: Columns with the languages of the text and of its answer, if there are any.
        generation: Fields of GenerationOptions that the input asks for.
        has_chat: Whether the rows are known to be chats.
        task: The task that the input asks for, if it does.
    """

    offset = 0
    types: Any = None
    lists = False
    generation: Mapping[str, Any] = MappingProxyType({})
    has_chat = False
    task: str | None = None
    languages: Languages = (None, None)

    def __init__(
        self, path: Source, format: InputFormat, names: Sequence[str], column: str | None
    ) -> None:
        self.path: Source | str = path
        self.format = format
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

    @property
    def layout(self) -> str:
        """The names of the columns, in words."""
        return f"{self.format} with the columns {', '.join((self._column, *self.columns))}"

    def _row(self, number: int, fields: Fields | RowError, raw: bytes) -> InputRow:
        number += self.offset
        if isinstance(fields, RowError):
            return InputRow(number, number, fields, {}, raw)
        missing = RowError("no-text", f"there is no field {self._column}")
        text = fields.pop(self._column, missing)
        if self.lists and not isinstance(text, RowError):
            found = to_json(text)
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


def unique(names: list[str], path: Source | str) -> list[str]:
    """Returns names; raises InputError if one is there twice."""
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"{path}: two columns have the name {twice!r}; rename one")
    return names


def hash_rows(rows: Iterable[InputRow]) -> tuple[int, str]:
    """Returns the number of rows and the hash of their bytes."""
    digest, count = hashlib.sha256(), 0
    for row in rows:
        row.update(digest)
        count += 1
    return count, digest.hexdigest()
