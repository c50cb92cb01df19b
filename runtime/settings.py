"""Settings as TOML: read by `--config`, written beside every result."""

from __future__ import annotations

import json
import re
import textwrap
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transferry.runtime.errors import InputError
from transferry.runtime.files import atomic_file, read_bytes

MADE = "made"


def read_settings(path: Path) -> dict[str, Any]:
    """Reads option names and values, without the section [made] of `write_settings`.

    Raises:
        InputError: The file cannot be read or is not TOML.
    """
    try:
        values = tomllib.loads(read_bytes(path).decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not TOML: {error}") from error
    values.pop(MADE, None)
    return {name.replace("-", "_"): value for name, value in values.items()}


def write_settings(path: Path, settings: Mapping[str, Any], made: Mapping[str, Any]) -> None:
    """Writes the result of `to_toml` to a file."""
    with atomic_file(path) as file:
        # File names may hold bytes that are not UTF-8, which TOML cannot express.
        file.write(to_toml(settings, made).encode(errors="replace"))


def to_toml(settings: Mapping[str, Any], made: Mapping[str, Any]) -> str:
    """Returns the settings as TOML that `read_settings` reads.

    Args:
        settings: Option names and values; options that are None are left out.
        made: Versions, hashes and counts, which explain a result but are not options.
    """
    lines = [f"{name} = {_toml(value)}\n" for name, value in settings.items() if value is not None]
    lines += [f"\n[{MADE}]\n", *(f"{name} = {_toml(value)}\n" for name, value in made.items())]
    return "".join(lines)


def field_helps(config: type[Any]) -> dict[str, str]:
    """Descriptions of a dataclass's attributes from its docstring, each as one line."""
    section = (config.__doc__ or "").partition("Attributes:")[2]
    # Python 3.13 and later strip the indentation of docstrings themselves.
    section = textwrap.dedent(section.strip("\n")) + "\n"
    found = re.findall(r"^(\w+): (.+?)(?=^\w+: |\Z)", section, re.S | re.M)
    return {name: " ".join((text[0].upper() + text[1:]).split()) for name, text in found}


def _toml(value: Any) -> str:
    # JSON and TOML agree on strings, numbers, bools and lists, with two exceptions: TOML has no
    # surrogate pairs, so non-ASCII stays unescaped, and it requires DEL to be escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
