"""Text files as streams of lines, and files that appear whole or not at all."""

import errno
import gzip
import hashlib
import io
import os
import shutil
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from transferry.runtime.errors import InputError

_GZIP_MAGIC = b"\x1f\x8b"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_lines(path: Path | str) -> Iterator[str]:
    r"""Stream the lines of a UTF-8 text file, plain or gzip.

    Only "\n" and "\r\n" end a line: the other separators of Unicode (U+2028, U+0085, ...) occur
    inside sentences, and splitting there would shift every line that follows.

    Args:
        path: the file; "-" is standard input.

    Raises:
        InputError: the file cannot be read, is binary, is damaged gzip or is not UTF-8.
    """
    for number, line in enumerate(read_raw_lines(path), start=1):
        yield decode_line(line, path, number)


def read_raw_lines(path: Path | str) -> Iterator[bytes]:
    """Stream the lines as bytes, for a reader that outlives a line which is not UTF-8.

    Args:
        path: the file; "-" is standard input.

    Raises:
        InputError: the file cannot be read, is binary or is damaged gzip.
    """
    try:
        with _open(path) as packed:
            file = packed
            if packed.peek(2).startswith(_GZIP_MAGIC):
                file = io.BufferedReader(gzip.GzipFile(fileobj=packed))
            elif str(path).endswith(".gz"):
                raise gzip.BadGzipFile("it does not begin as gzip does")
            # As git does: text has no NUL byte, and a binary file has one near its beginning.
            if b"\0" in file.peek():
                raise InputError(
                    f"{_shown(path)}: expected UTF-8 text, found a NUL byte: this is a binary file "
                    "or UTF-16. Convert it to UTF-8 text."
                )
            for number, line in enumerate(file, start=1):
                text = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
                yield text[:-2] if text.endswith(b"\r\n") else text.removesuffix(b"\n")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(
            f"{_shown(path)}: expected a whole gzip file, found one that is damaged or cut short "
            f"({error}). Copy or download it again."
        ) from error
    except OSError as error:
        raise InputError(f"{_shown(path)}: cannot be read: {error.strerror or error}.") from error


def decode_line(line: bytes, path: Path | str, number: int) -> str:
    """Turn a raw line into text.

    Raises:
        InputError: the line is not UTF-8; names the file, the line and the byte.
    """
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise InputError(
            f"{_shown(path)}, line {number}: expected UTF-8, found the byte "
            f"0x{line[error.start]:02x} at position {error.start} ({error.reason}). "
            "Convert the file to UTF-8 or mend the line."
        ) from error


def _open(path: Path | str) -> io.BufferedReader:
    if str(path) == "-":
        return io.BufferedReader(cast(io.RawIOBase, sys.stdin.buffer))
    return Path(path).open("rb")


def _shown(path: Path | str) -> str:
    return "standard input" if str(path) == "-" else str(path)


@contextmanager
def durable_file(path: Path, part: Path) -> Iterator[BinaryIO]:
    """Write `part`, and let it take the name `path` once all of it is on the disk.

    A power cut right after leaves the whole file; where something fails, `part` stays as it is.

    Args:
        path: the file.
        part: where it is written to, on the same file system.
    """
    with part.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Let the names of a folder's files survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that cannot do it
            raise
    finally:
        os.close(descriptor)


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Write a file that appears whole or not at all, whenever the process is interrupted.

    The bytes go to a file beside it, which takes the name once all of them are on the disk.

    Args:
        path: the file.

    Raises:
        InputError: the disk is full, the folder is read-only or does not exist.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        try:
            with durable_file(path, part) as file:
                yield file
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(
            f"{path}: cannot be written: {error.strerror or error}; nothing was written. "
            "Free some space or choose another place."
        ) from error


@contextmanager
def staged_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out` to be filled and renamed; it is gone afterwards, whatever happens.

    Raises:
        InputError: the disk is full, or the place cannot be written to.
    """
    folder = out.absolute().with_name(f".{out.name}.{os.getpid()}.part")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
        yield folder
    except OSError as error:
        raise InputError(
            f"{out}: cannot be written: {error.strerror or error}; nothing was written. "
            "Free some space or choose another place."
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def replace_folder(folder: Path, out: Path) -> None:
    """Rename a folder to `out`; what lies there leaves only when the new one is in.

    Raises:
        InputError: the former folder cannot be removed.
    """
    if not out.exists():
        folder.rename(out)
        return
    old = folder.with_suffix(".old")
    out.rename(old)
    try:
        folder.rename(out)
    except BaseException:
        old.rename(out)
        raise
    try:
        shutil.rmtree(old)
    except OSError as error:
        raise InputError(
            f"{out} is replaced, but the former folder cannot be removed ({error}); delete {old}"
        ) from error


def sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal.

    Raises:
        InputError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}.") from error
