"""Rows of a job's input."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transferry.runtime.engine.result import RowError


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
    """

    number: int
    id: int | str
    text: str | RowError
    fields: Mapping[str, Any] = field(default_factory=dict)
    raw: bytes = b""
    target: str | RowError | None = None
    languages: tuple[str | None, str | None] = (None, None)

    def update(self, digest: hashlib._Hash) -> None:
        """Adds the row's bytes to a hash of rows."""
        digest.update(b"%d " % len(self.raw))
        digest.update(self.raw)


def hash_rows(rows: Iterable[InputRow]) -> tuple[int, str]:
    """Returns the number of rows and the hash of their bytes."""
    digest, count = hashlib.sha256(), 0
    for row in rows:
        row.update(digest)
        count += 1
    return count, digest.hexdigest()
