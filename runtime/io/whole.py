"""Regular files: opened without waiting, and read whole within a limit of bytes."""

import hashlib
import io
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from transferry.runtime.errors import InputError

# Limit of a file that is read whole: tokenizers of published models have up to 40 MB.
MOST_BYTES = 256 << 20
# Content of a large file's placeholder in a clone without Git LFS.
_LFS = b"version https://git-lfs.github.com/spec/"


class Stored(Protocol):
    """A file elsewhere that opens itself."""

    def opened(self) -> AbstractContextManager[io.BufferedReader]:
        """Opens the file; an OSError inside the `with` counts as a read error."""


def shown_path(path: Path | str | Stored) -> str:
    """Returns the name of a file for messages."""
    return "standard input" if str(path) == "-" else str(path)


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """Reads a regular file of at most `most` bytes; raises InputError for any other."""
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise InputError(f"{path}: expected at most {most:,} bytes, found more; restore the file")
    return content


@contextmanager
def open_regular(
    path: Path, opener: Callable[[str, int], int] = os.open
) -> Iterator[io.BufferedReader]:
    """Opens a regular file for reading; an OSError inside the `with` counts as a read error.

    Raises InputError for a file that cannot be read, is no regular file, or is not fetched from Git
    LFS: a pipe is refused instead of waited for, and a device instead of read for ever. `opener`
    works as in `open`.
    """

    def at_once(name: str, flags: int) -> int:
        return opener(name, flags | getattr(os, "O_NONBLOCK", 0))

    try:
        with open(path, "rb", opener=at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise InputError(f"{path}: expected a file, found a pipe, a device or a socket.")
            if file.peek(len(_LFS)).startswith(_LFS):
                raise InputError(
                    f"{path}: expected the file, found its pointer of Git LFS; run git lfs pull in "
                    "its folder, or download it again"
                )
            yield file
    except OSError as error:
        raise unreadable(path, error) from error


def sha256(path: Path) -> str:
    """SHA-256 of a regular file in hexadecimal; raises InputError if it cannot be read."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unreadable(path: Path | str | Stored, error: OSError) -> InputError:
    """Error for a file that cannot be read."""
    return InputError(f"{shown_path(path)}: cannot be read: {reason(error)}.")


def reason(error: Exception) -> str:
    """Returns the message of a library's exception on one line, without words for programmers."""
    text = " ".join(str(getattr(error, "strerror", None) or error).split())
    return re.sub(r"; use sys\..*| \(b['\"].*| - do you .*", "", text).rstrip(" .")
