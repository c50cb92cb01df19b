"""Settings in one TOML file: read by `--config`, and written beside every result."""

from __future__ import annotations

import json
import re
import textwrap
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transferry.runtime.errors import InputError
from transferry.runtime.files import atomic_file

MADE = "made"


def read_settings(path: Path) -> dict[str, Any]:
    """Reads option names and values; what `write_settings` put into [made] is left out.

    Raises:
        InputError: The file cannot be read or is no TOML.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not TOML: {error}") from error
    values.pop(MADE, None)
    return {name.replace("-", "_"): value for name, value in values.items()}


def write_settings(path: Path, settings: Mapping[str, Any], made: Mapping[str, Any]) -> None:
    """Writes what `to_toml` makes of them."""
    with atomic_file(path) as file:
        # The name of a file may hold bytes that are no UTF-8, which TOML cannot express.
        file.write(to_toml(settings, made).encode(errors="replace"))


def to_toml(settings: Mapping[str, Any], made: Mapping[str, Any]) -> str:
    """Returns what was chosen, in the form that `read_settings` takes, and what was found.

    Args:
        settings: Option names and values; None stands for an option that was not given.
        made: Versions, hashes, counts: what explains the result but is no option.
    """
    lines = [f"{name} = {_toml(value)}\n" for name, value in settings.items() if value is not None]
    lines += [f"\n[{MADE}]\n", *(f"{name} = {_toml(value)}\n" for name, value in made.items())]
    return "".join(lines)


def field_helps(config: type[Any]) -> dict[str, str]:
    """What the docstring of a dataclass says of each attribute, as one line."""
    section = (config.__doc__ or "").partition("Attributes:")[2]
    # Python 3.13 takes the indentation out of docstrings, the versions before do not.
    section = textwrap.dedent(section.strip("\n")) + "\n"
    found = re.findall(r"^(\w+): (.+?)(?=^\w+: |\Z)", section, re.S | re.M)
    return {name: " ".join((text[0].upper() + text[1:]).split()) for name, text in found}


def _toml(value: Any) -> str:
    # JSON writes strings, numbers, bools and lists of them as TOML does, but for two things: TOML
    # has no surrogate pairs, so nothing beyond ASCII is escaped, and it wants DEL escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
