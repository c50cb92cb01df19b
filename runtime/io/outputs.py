"""Checks of outputs: never an input, and never a replacement for another program's file.

Each kind of output is recognised where it is written; every command asks these rules before it
works.
"""

import os
import re
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from transferry.runtime.errors import Option, UsageError
from transferry.runtime.io.atomic import unwritable

STANDARD_STREAM = Path("-")
# Bytes at the beginning of a file that are searched for a mark.
_HEAD = 4096
# Left in a folder by a killed process.
_TEMPORARY = re.compile(r"\..+\.(part|old)|.+\.tmp")


def require_apart(outputs: Sequence[Path], inputs: Sequence[Path], what: str = "the input") -> None:
    """Refuses outputs that are an input, hold one or lie in one, and outputs that are the same.

    Symbolic and hard links count as their targets, and standard streams as their files. `what`
    names the inputs in messages.

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
    """Raises UsageError for a file or folder that the command did not write, and may not replace.

    `foreign` describes the defect of an existing one, in words that follow its name; "" allows its
    replacement.
    """
    if not os.path.lexists(path):
        return
    # A link would be replaced, not followed.
    try:
        fault = "is a symbolic link" if path.is_symlink() else foreign(path)
    except OSError as error:  # a folder without permission
        raise unwritable(path, error) from error
    if fault:
        raise UsageError(f"{path} {fault}, so it is not replaced; name another, or move it away")


def require_new(out: Path, foreign: Callable[[Path], str], *, force: bool) -> None:
    """Raises UsageError for a folder that exists, with `force` as `require_own`."""
    if out.exists() and not force:
        told = f"{out} exists already; add "
        raise UsageError(told, Option("force"), " to replace it, or name another folder")
    require_own(out, foreign)


def foreign_file(path: Path, mark: bytes, what: str) -> str:
    """Defect of a file that should begin with the mark of a command; "" without one."""
    return "" if mark in _head(path) else f"is not {what}"


_REPORT = "a report of `transferry verify`"
foreign_page = partial(
    foreign_file, mark=b'<meta name="generator" content="transferry verify">', what=_REPORT
)
foreign_junit = partial(foreign_file, mark=b'<testsuites name="transferry verify"', what=_REPORT)


def foreign_member(folder: Path, own: Callable[[str], bool]) -> str:
    """Names a file in a folder whose path there is not the command's `own`; "" without one."""
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
    """Beginning of a regular file; empty for anything else."""
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
    """Returns the target of a path and the place of the path itself."""
    absolute = path.absolute()
    return {
        os.path.realpath(absolute),
        os.path.join(os.path.realpath(absolute.parent), absolute.name),  # noqa: PTH118
    }


def _status(path: Path, stream: object) -> os.stat_result | None:
    """Status of a file, or of the file behind a standard stream; None without one."""
    try:
        if path != STANDARD_STREAM:
            return path.stat()
        found = os.fstat(stream.fileno())  # type: ignore[attr-defined]
    except (OSError, ValueError, AttributeError):
        return None
    return found if stat.S_ISREG(found.st_mode) else None
