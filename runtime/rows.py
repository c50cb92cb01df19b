"""A row of the input of a job, and why one has no answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

RowErrorKind = Literal[
    "undecodable",  # bytes that are no UTF-8
    "malformed",  # a line that is no JSON object, or has another number of columns
    "no-text",  # the field of the text is missing, or holds something else than text
    "fields",  # other fields that the output cannot hold
    "empty",
    "too-long",
    "too-short",
    "no-mask",
    "not-finite",
]


@dataclass(frozen=True)
class RowError:
    """Why a row has no answer.

    Attributes:
        kind: A word for programs.
        message: A sentence for people.
    """

    kind: RowErrorKind
    message: str

    def record(self) -> dict[str, str]:
        """Returns the error as JSON values."""
        return {"kind": self.kind, "message": self.message}


NOT_FINITE = RowError(
    "not-finite", "the model gave NaN or infinity; verify the bundle on this provider"
)


@dataclass(frozen=True)
class SourceRow:
    """A row of the input.

    Attributes:
        number: Its place in the whole input, from 0.
        id: What the input calls it, and its number where it has no field `id`.
        text: What is to be answered, or why there is nothing to answer.
        fields: What else the row holds and the output repeats, in order; neither the text nor `id`.
        raw: The bytes that it was read from, or as many as tell it from any other row.
    """

    number: int
    id: int | str
    text: str | RowError
    fields: Mapping[str, Any] = field(default_factory=dict)
    raw: bytes = b""
