"""Cells of a row: bytes to text, and any value to text or JSON."""

from __future__ import annotations

import base64
import csv
import json
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from transferry.runtime.engine.result import RowError
from transferry.runtime.io.lines import MOST_LINE, LongLine


def decoded(line: bytes, encoding: str = "utf-8") -> str | RowError:
    """Returns a line as text, or its error."""
    if isinstance(line, LongLine):
        return RowError("malformed", line.fault())
    try:
        text = line.decode(encoding)
    except UnicodeDecodeError as error:
        if error.reason == "invalid continuation byte" and line[error.start] == 0xED:
            return RowError("undecodable", "half of a surrogate pair")
        tried = "UTF-8" if encoding == "utf-8" else encoding
        return RowError(
            "undecodable",
            f"expected {tried}, found the byte 0x{line[error.start]:02x} at position {error.start} "
            f"({error.reason})",
        )
    place = text.find("\0")  # at which other programs would end it
    return text if place < 0 else RowError("malformed", f"found a NUL at position {place}")


def has_nul(value: Any) -> bool:
    """Whether a NUL is anywhere in a JSON value or an Arrow scalar."""
    value = _plain(value)
    if isinstance(value, dict):
        return any(map(has_nul, (*value, *value.values())))
    return any(map(has_nul, value)) if isinstance(value, list) else "\0" in str(value)


def json_value(value: Any, *, finite: bool = True) -> Any:
    """Converts a float32 array or an Arrow scalar to JSON values, for `default` of json.dumps.

    A float32 becomes the number whose text is the shortest that gives the float32 back. Times
    become ISO 8601, decimals and UUIDs text, bytes base64; if `finite`, NaN and infinity null.
    """
    if isinstance(value, np.ndarray):
        return [float(text) for text in map(str, value)]
    import pyarrow

    types, kind, converted = pyarrow.types, value.type, partial(json_value, finite=finite)
    if not value.is_valid:
        return None
    if types.is_struct(kind):
        fields = [(name, converted(field)) for name, field in value.items()]
        named = dict(fields)
        twice = len(named) < len(fields)  # the entries of a map have the same form
        return [{"key": name, "value": field} for name, field in fields] if twice else named
    if (extension := getattr(kind, "extension_name", "")) in ("arrow.uuid", "arrow.bool8"):
        return str(value.as_py()) if extension == "arrow.uuid" else value.as_py()
    if isinstance(inner := getattr(value, "value", None), pyarrow.Scalar):
        return converted(inner)
    if types.is_nested(kind):
        return [converted(element) for element in value.values]
    if types.is_floating(kind):
        number = float(value.as_py())
        return number if math.isfinite(number) or not finite else None
    if types.is_duration(kind):
        return value.value
    if types.is_interval(kind):
        return list(value.as_py())
    if types.is_temporal(kind):
        text = value.cast(pyarrow.string()).as_py().replace(" ", "T")
        return re.sub(r"([+-]\d\d)(\d\d)$", r"\1:\2", text)  # +0100, which RFC 3339 lacks
    if types.is_decimal(kind):
        return str(value.as_py())
    python = value.as_py()
    return base64.b64encode(python).decode() if isinstance(python, bytes) else python


def as_text(value: Any) -> str:
    """Returns text as it is, and any other value of a field as JSON."""
    value = _plain(value)
    return value if isinstance(value, str) else to_json(value)


def cell_text(value: Any) -> str:
    """Returns the text of a cell: empty for null, else `as_text`."""
    value = _plain(value)
    return "" if value is None else as_text(value)


def _plain(value: Any) -> Any:
    """Returns a JSON value as it is, and any other as a JSON value."""
    known = value is None or isinstance(value, str | int | float | list | dict)
    return value if known else json_value(value)


def holds_only(column: Any, text: str | None) -> bool:
    """Whether a text stands for each value of an Arrow column: 07 for 7, None for null."""
    import pyarrow

    with suppress(pyarrow.ArrowException):  # it is no such number, or of no such type
        column.validate(full=True)
        if pyarrow.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        value = pyarrow.scalar(text, pyarrow.string()).cast(column.type)
        return bool(column.equals(pyarrow.repeat(value, len(column))))
    return text is None and column.null_count == len(column)


to_json = json.JSONEncoder(ensure_ascii=False, default=json_value).encode
# Differs between any two values of a type.
exact_json = json.JSONEncoder(ensure_ascii=False, default=partial(json_value, finite=False)).encode


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("it has a key twice")
    return fields


def _finite(number: str) -> float:
    value = float(number)
    return value if math.isfinite(value) else _refuse_number(number)


def _refuse_number(number: str) -> float:
    raise ValueError(f"{number} is not both a JSON number and a float64")


JSON = json.JSONDecoder(
    object_pairs_hook=_object, parse_constant=_refuse_number, parse_float=_finite
)


def depth(value: Any) -> int:
    """Returns how deep a JSON value is nested."""
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


class CsvLines:
    """Text lines for csv.reader, with the bytes of those that it took since the last record."""

    def __init__(self, lines: Iterator[bytes], encoding: str) -> None:
        self.lines, self._raw, self._line = 0, bytearray(), b""
        self._source, self._encoding = lines, encoding

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._line = next(self._source)
        self.lines += 1
        self._raw += line
        if isinstance(line, LongLine) and self.lines == 1:
            return ""
        if isinstance(line, LongLine) or len(self._raw) > MOST_LINE:
            raise csv.Error("a record longer than a row may be, or an unclosed quotation mark")
        # Bytes that are not text are found in _cells, once it is known which row has them.
        return line.decode(self._encoding, "replace")

    def taken(self) -> bytes:
        """Returns the bytes of a record, and begins the next."""
        raw, self._raw = bytes(self._raw), bytearray()
        single, self.lines = self.lines == 1, 0
        if single:
            return self._line
        return LongLine.of([raw]) if len(raw) > MOST_LINE else raw
