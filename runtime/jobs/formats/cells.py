"""Cells of a row: bytes to text, and any value to text or JSON."""

from __future__ import annotations

import base64
import json
import math
from typing import Any

import numpy as np

from transferry.runtime.engine.result import RowError


def decoded(line: bytes) -> str | RowError:
    """Returns bytes as text, or says where they are not UTF-8."""
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        return RowError(
            "undecodable",
            f"expected UTF-8, found the byte 0x{line[error.start]:02x} at position {error.start} "
            f"({error.reason})",
        )


def json_value(value: Any) -> Any:
    """Converts float32 or an Arrow scalar to JSON values, for `default` of json.dumps.

    Of a float32 it returns the number whose text is the shortest that gives the float32 back. Times
    become ISO 8601, decimals text, bytes base64; NaN and infinity become null.
    """
    if isinstance(value, np.ndarray):
        return [float(text) for text in map(str, value)]
    if isinstance(value, np.float32):
        return float(str(value))
    import pyarrow

    types, kind = pyarrow.types, value.type
    if not value.is_valid:
        return None
    if types.is_struct(kind):
        return {name: json_value(field) for name, field in value.items()}
    if types.is_nested(kind):
        return [json_value(element) for element in value.values]
    if types.is_dictionary(kind) or isinstance(value, pyarrow.ExtensionScalar):
        return json_value(value.value)
    if types.is_floating(kind):
        return float(value.as_py()) if math.isfinite(value.as_py()) else None
    if types.is_temporal(kind) and not types.is_duration(kind) and not types.is_interval(kind):
        return value.cast(pyarrow.string()).as_py().replace(" ", "T")
    if types.is_duration(kind):
        return value.value
    if types.is_decimal(kind):
        return str(value.as_py())
    python = value.as_py()
    return base64.b64encode(python).decode() if isinstance(python, bytes) else python


def as_text(value: Any) -> str:
    """Returns text as it is, and any other value of a field as JSON."""
    if value is not None and not isinstance(value, str | int | float | list | dict):
        value = json_value(value)
    return value if isinstance(value, str) else to_json(value)


to_json = json.JSONEncoder(ensure_ascii=False, default=json_value).encode
