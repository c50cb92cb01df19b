"""A row of the input of a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transferry.runtime.engine.result import RowError


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
