"""The model card of a folder: the front matter of README.md, and the place in the hub's cache."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transferry.runtime.bundle.card import ModelCard
from transferry.runtime.errors import InputError
from transferry.runtime.io.whole import open_regular

README = "README.md"
_FRONT = re.compile(rb"\s*---\r?\n(.*?)\r?\n---\s*(\n|\Z)", re.DOTALL)
_MOST = 1 << 20  # bytes of README.md that are read
_MOST_WORDS, _MOST_NAMES = 200, 1000
_CACHED = re.compile(r"models--(.+)")


def read_card(folder: Path) -> ModelCard:
    """Reads the card of a folder; a damaged one states nothing."""
    front = _front_matter(folder / README)
    repository, source = folder.resolve().name, ""
    revision = folder.absolute()
    if revision.parent.name == "snapshots" and (
        cached := _CACHED.fullmatch(revision.parent.parent.name)
    ):
        repository = cached[1].replace("--", "/")
        source = f"huggingface.co/{repository} at {revision.name}"[:_MOST_WORDS]
    base = _names(front.get("base_model"))
    licence = " ".join(_names(front.get("license")))
    if more := " ".join(_names(front.get("license_name")) + _names(front.get("license_link"))):
        licence = f"{licence}: {more}"
    return ModelCard(
        name=(*_names(front.get("model_name")), *_names(repository), "")[0],
        source=source or (f"made from {', '.join(base[:4])}" if base else ""),
        licence=licence[: 2 * _MOST_WORDS],
        languages=_names(front.get("language")),
        trained_on=_names(front.get("datasets")),
    )


def _front_matter(path: Path) -> Mapping[str, Any]:
    try:
        import yaml
    except ImportError:
        return {}
    try:
        with open_regular(path) as file:
            found = _FRONT.match(file.read(_MOST))
        # Untyped: the language "no" is no truth value.
        read = yaml.load(found[1], yaml.BaseLoader) if found else {}
    except (InputError, ValueError, RecursionError, TypeError, yaml.YAMLError):
        return {}
    return read if isinstance(read, dict) else {}


def _names(value: Any) -> tuple[str, ...]:
    """Returns the texts of a value, which may be one, a list, or a list of lists."""

    def each(found: Any, depth: int) -> Iterator[str]:
        if isinstance(found, str) and found.strip():
            # A name in a file system may hold bytes that are no text.
            yield " ".join(found.encode(errors="replace").decode().split())[:_MOST_WORDS]
        elif isinstance(found, list) and depth < 3:
            for one in found:
                yield from each(one, depth + 1)

    return tuple(dict.fromkeys(each(value, 0)))[:_MOST_NAMES]
