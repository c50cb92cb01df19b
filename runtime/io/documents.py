"""Reads documents from outside: bounded, regular files whose content has the expected types.

A manifest, tokenizer, certificate or configuration may come from a stranger. Each goes through
`read_document` or `parse_document`, so that whatever it holds ends in one line that names the file,
the key, what was expected and what was found. docs/security.md says what is defended against.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from transferry.runtime.errors import InputError
from transferry.runtime.io.whole import read_bytes

# Bytes. Decoded, the worst JSON takes 24 times as much memory: empty lists in a list.
MOST_JSON = 16 << 20

T = TypeVar("T")


def read_document(path: Path, kind: type[T], remedy: str, *, most: int = MOST_JSON) -> T:
    """Reads a JSON file of a given type.

    Args:
        path: The file.
        kind: Type of its content: a dataclass, `dict[str, Any]`, `list[str]` and the like.
        remedy: What to do if it holds something else.
        most: Largest size in bytes.

    Raises:
        InputError: The file cannot be read, is no regular file, is larger, or holds no JSON of
            this type.
    """
    return parse_document(read_bytes(path, most), kind, str(path), remedy)


def parse_document(content: bytes, kind: type[T], origin: str, remedy: str) -> T:
    """Parses JSON of a given type, without duplicate keys, NaN, infinity or lone surrogates.

    Args:
        content: The text in UTF-8.
        kind: Type of the content.
        origin: Name of the file in errors.
        remedy: What to do if it holds something else.

    Raises:
        InputError: The text is no JSON, or of another type.
    """
    try:
        value = decode(content)
    except ValueError as error:
        raise InputError(f"{origin} is not JSON ({error}); {remedy}") from error
    return checked(value, kind, origin, remedy)


def decode(content: bytes) -> Any:
    """Decodes JSON without duplicate keys, NaN, infinity or lone surrogates.

    Raises:
        ValueError: The text is another, or nested too deeply.
    """
    try:
        value = msgspec.json.decode(content)
        json.loads(content, object_pairs_hook=_require_unique)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return value


def checked(value: Any, kind: type[T], origin: str, remedy: str) -> T:
    """Converts what a document holds to a type.

    Args:
        value: The content.
        kind: Its type.
        origin: Name of the file in errors.
        remedy: What to do if it is of another type.

    Raises:
        InputError: It is of another type.
    """
    try:
        return msgspec.convert(value, kind)
    except ValueError as error:
        raise InputError(f"{origin}: {error}; {remedy}") from error


def _require_unique(pairs: Sequence[tuple[str, Any]]) -> None:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise ValueError(f"Duplicate key {key!r}")
        seen.add(key)


def json_values(value: Any) -> Any:
    """Returns a value with NaN and infinity, which JSON lacks, as None."""
    if isinstance(value, Mapping):
        return {name: json_values(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_values(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
