"""Documents from outside: regular files of bounded size whose content has an expected type.

A manifest, tokenizer, certificate or configuration may come from a stranger. Every defect of one
ends in a line that names the file, the key, the expected and the found value. docs/security.md
lists the attacks.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from transferry.runtime.errors import InputError
from transferry.runtime.io.whole import read_bytes, reason

# Bytes. The worst JSON, empty lists in a list, takes 24 times as much memory once decoded.
MOST_JSON = 16 << 20

T = TypeVar("T")


def read_document(path: Path, kind: type[T], remedy: str, *, most: int = MOST_JSON) -> T:
    """Reads a JSON file of at most `most` bytes and of a type: a dataclass, `dict[str, Any]`, ...

    Raises InputError for a file that cannot be read, is no regular file, is larger, or holds no
    JSON of this type; the message ends with `remedy`.
    """
    return parse_document(read_bytes(path, most), kind, str(path), remedy)


def parse_document(content: bytes, kind: type[T], origin: str, remedy: str) -> T:
    """Parses UTF-8 JSON of a given type, without duplicate keys, NaN, infinity or lone surrogates.

    Raises InputError for any other text; the message names the file `origin` and ends with
    `remedy`.
    """
    try:
        value = decode(content)
    except ValueError as error:
        raise InputError(f"{origin} is not JSON ({reason(error)}); {remedy}") from error
    return checked(value, kind, origin, remedy)


def decode(content: bytes) -> Any:
    """Decodes JSON without duplicate keys, NaN, infinity or lone surrogates.

    Raises ValueError for any other text, and for one that is nested too deeply.
    """
    try:
        value = msgspec.json.decode(content)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if _keys(value) != _colons(content):
        json.loads(content, object_pairs_hook=_require_unique)
    return value


def _keys(value: Any) -> int:
    """Number of keys of all objects in a value."""
    count, waiting = 0, [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            count, each = count + len(each), each.values()
        elif not isinstance(each, list):
            continue
        waiting += [item for item in each if type(item) in (dict, list)]
    return count


def _colons(content: bytes) -> int:
    """Number of colons outside the strings of valid JSON: one for each key, duplicates included."""
    unescaped = content.replace(rb"\\", b"").replace(rb"\"", b"")
    return sum(part.count(b":") for part in unescaped.split(b'"')[::2])


def checked(value: Any, kind: type[T], origin: str, remedy: str) -> T:
    """Converts the decoded content of a document to a type; raises as `parse_document`."""
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
    """Replaces NaN and infinity, which JSON lacks, by None."""
    if isinstance(value, Mapping):
        return {name: json_values(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_values(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
