"""Outputs: never an input, and never in place of something that the same command did not write.

Each kind of output is recognised where it is written; the rules are here, and every command asks
them before it works.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from transferry.runtime.errors import UsageError
from transferry.runtime.io.atomic import unwritable

STANDARD_STREAM = Path("-")
# Where a mark is looked for, in bytes.
_HEAD = 4096
# What a killed process leaves in a folder.
_TEMPORARY = re.compile(r"\..+\.(part|old)|.+\.tmp")


def require_apart(outputs: Sequence[Path], inputs: Sequence[Path], what: str = "the input") -> None:
    """Refuses outputs that are an input, hold one or lie in one, and outputs that are the same.

    Symbolic and hard links count as what they lead to, and standard streams as their files.

    Args:
        outputs: Files and folders that will be written.
        inputs: Files and folders that will be read.
        what: What the inputs are, for the message.

    Raises:
        InputError: An output has a name that cannot be written.
        UsageError: An output is not apart from an input or another output.
    """
    for number, output in enumerate(outputs):
        _require_name(output)
        for other in outputs[:number]:
            if _same(output, other) or _within(output, other) or _within(other, output):
                raise UsageError(f"{other} and {output} are both outputs; name another for one")
        for path in inputs:
            if _within(output, path):
                raise UsageError(f"{output} lies in {path}, which is {what}; name another place")
            if _same(output, path) or _linked_from(output, path):
                raise UsageError(f"{output} is {what}; name another file for the output")
            if _within(path, output):
                raise UsageError(
                    f"{output} holds {what}, {path}; name another folder for the output"
                )


def require_own(path: Path, foreign: Callable[[Path], str]) -> None:
    """Refuses to replace something that the command did not write.

    Args:
        path: The output, which need not exist.
        foreign: Returns what is wrong with an existing one, in words that follow its name; "" for
            one that may be replaced.

    Raises:
        UsageError: There is such a thing.
    """
    if not os.path.lexists(path):
        return
    # A link would be replaced, not followed.
    fault = "is a symbolic link" if path.is_symlink() else foreign(path)
    if fault:
        raise UsageError(f"{path} {fault}, so it is not replaced; name another, or move it away")


def foreign_file(path: Path, mark: bytes, what: str) -> str:
    """Returns what is wrong with a file that should begin as a command writes it."""
    return "" if mark in _head(path) else f"is not {what}"


def foreign_page(path: Path) -> str:
    """As `foreign_file`, for the page of a report."""
    mark = b'<meta name="generator" content="transferry verify">'
    return foreign_file(path, mark, "a report of `transferry verify`")


def foreign_junit(path: Path) -> str:
    """As `foreign_file`, for a report as JUnit XML."""
    mark = b'<testsuites name="transferry verify"'
    return foreign_file(path, mark, "a report of `transferry verify`")


def foreign_member(folder: Path, own: Callable[[str], bool]) -> str:
    """Names a file in a folder that the command did not write, if there is one.

    Args:
        folder: The folder.
        own: Whether the command writes a file of this path in the folder.
    """
    for path in _members(folder):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or not (own(name) or _TEMPORARY.fullmatch(path.name)):
            return f"holds {name}, which transferry did not write"
    return ""


def _members(folder: Path) -> Iterator[Path]:
    """Yields the files and links at any depth of a folder."""
    for place, folders, files in os.walk(folder):
        links = [name for name in folders if Path(place, name).is_symlink()]
        yield from (Path(place, name) for name in sorted([*links, *files]))


def _head(path: Path) -> bytes:
    """Returns the beginning of a file; nothing of what is no file."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would wait for its writer
            return b""
        with path.open("rb") as file:
            return file.read(_HEAD)
    except OSError:
        return b""


def _require_name(path: Path) -> None:
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise unwritable(path, error) from error


def _same(output: Path, other: Path) -> bool:
    if STANDARD_STREAM not in (output, other) and _places(output) & _places(other):
        return True
    found, given = _status(output, sys.stdout), _status(other, sys.stdin)
    return found is not None and given is not None and os.path.samestat(found, given)


def _within(path: Path, folder: Path) -> bool:
    if STANDARD_STREAM in (path, folder):
        return False
    ends = tuple(os.path.join(place, "") for place in _places(folder))  # noqa: PTH118
    return any(place.startswith(ends) for place in _places(path))


def _linked_from(output: Path, folder: Path) -> bool:
    """Whether an output is a hard link of a file in a folder."""
    found = _status(output, None)
    if found is None or found.st_nlink < 2 or not folder.is_dir():
        return False
    files = (_status(path, None) for path in _members(folder))
    return any(file is not None and os.path.samestat(found, file) for file in files)


def _places(path: Path) -> set[str]:
    """Returns where a path leads, and where it lies itself."""
    absolute = path.absolute()
    return {
        os.path.realpath(absolute),
        os.path.join(os.path.realpath(absolute.parent), absolute.name),  # noqa: PTH118
    }


def _status(path: Path, stream: object) -> os.stat_result | None:
    """Returns the status of a file, or of the file behind a standard stream, if there is one."""
    try:
        if path != STANDARD_STREAM:
            return path.stat()
        found = os.fstat(stream.fileno())  # type: ignore[attr-defined]
    except (OSError, ValueError, AttributeError):
        return None
    return found if stat.S_ISREG(found.st_mode) else None
