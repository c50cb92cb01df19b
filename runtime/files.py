"""Streams of text lines, and files and folders that appear whole or not at all."""

import errno
import gzip
import hashlib
import io
import json
import os
import shutil
import sys
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from transferry.runtime.errors import InputError, UsageError

# By suffix: none, gzip, zstd.
Compression = Literal["", ".gz", ".zst"]

_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_lines(path: Path | str) -> Iterator[str]:
    r"""Streams the lines of a UTF-8 text file, plain, gzip or zstd.

    Only "\n" and "\r\n" end a line: Unicode's other separators (U+2028, U+0085, ...) occur inside
    sentences, and splitting there would shift all following lines.

    Args:
        path: The file; "-" is standard input.

    Raises:
        InputError: The file is unreadable, binary, damaged or not UTF-8.
    """
    for number, line in enumerate(read_raw_lines(path), start=1):
        yield decode_line(line, path, number)


def read_raw_lines(path: Path | str, *, keep_ends: bool = False) -> Iterator[bytes]:
    r"""Streams the lines as bytes, for readers that continue after a line that is not UTF-8.

    Args:
        path: The file, plain, gzip or zstd; "-" is standard input.
        keep_ends: Keep "\n" and "\r\n".

    Raises:
        InputError: The file is unreadable, binary, or damaged gzip or zstd.
        UsageError: The file is zstd and zstandard is not installed.
    """
    with _unpacked(path) as file:
        # git's heuristic: a binary file has a NUL byte near its beginning, text has none.
        if b"\0" in file.peek():
            raise InputError(
                f"{_shown(path)}: expected UTF-8 text, found a NUL byte: this is a binary file "
                "or UTF-16. Convert it to UTF-8 text."
            )
        for number, line in enumerate(file, start=1):
            text = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
            if keep_ends:
                yield text
            else:
                yield text[:-2] if text.endswith(b"\r\n") else text.removesuffix(b"\n")


def read_blocks(path: Path | str) -> Iterator[bytes]:
    """Streams a file in blocks of at most 256 KiB, decompressed if it is gzip or zstd.

    Raises:
        InputError: The file is unreadable, or damaged gzip or zstd.
        UsageError: The file is zstd and zstandard is not installed.
    """
    with _unpacked(path) as file:
        yield from iter(partial(file.read, 1 << 18), b"")


@contextmanager
def _unpacked(path: Path | str) -> Iterator[io.BufferedReader]:
    """Opens and decompresses a file; an OSError inside the `with` counts as a read error."""
    kind = "gzip"
    try:
        with _open(path) as file:
            magic = file.peek(4)
            if magic.startswith(_GZIP_MAGIC):
                yield io.BufferedReader(gzip.GzipFile(fileobj=file))
            elif str(path).endswith(".gz"):
                raise gzip.BadGzipFile("it does not begin as gzip does")
            elif magic.startswith(_ZSTD_MAGIC) or str(path).endswith(".zst"):
                kind = "zstd"
                yield io.BufferedReader(_ZstdFile(file))
            else:
                yield file
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(
            f"{_shown(path)}: expected a whole {kind} file, found one that is damaged or cut short "
            f"({error}). Copy or download it again."
        ) from error
    except OSError as error:
        raise _unreadable(path, error) from error


class _ZstdFile(io.RawIOBase):
    """Decompresses zstd frame by frame; unlike zstandard's own reader it detects truncation."""

    def __init__(self, packed: io.BufferedReader) -> None:
        self._packed, self._zstd = packed, _zstandard()
        self._frame = self._zstd.ZstdDecompressor().decompressobj()
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            # Little input at a time: a kilobyte can decompress to megabytes.
            piece = (self._frame.unused_data if self._frame.eof else b"") or self._packed.read(1024)
            if not piece and self._frame.eof:
                return 0
            if not piece:
                raise EOFError("it ends within a frame")
            if self._frame.eof:
                self._frame = self._zstd.ZstdDecompressor().decompressobj()
            try:
                self._ready = memoryview(self._frame.decompress(piece))
            except self._zstd.ZstdError as error:
                raise EOFError(str(error)) from error
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size


def _zstandard() -> Any:
    try:
        import zstandard
    except ModuleNotFoundError as error:
        raise UsageError(
            'zstd needs zstandard, which is not installed; pip install "transferry[jobs]", or use '
            "gzip"
        ) from error
    return zstandard


@contextmanager
def packed(file: BinaryIO, compression: Compression) -> Iterator[BinaryIO]:
    """Compresses what is written to `file`, which stays open; the bytes are reproducible.

    Args:
        file: A file open for writing.
        compression: "" yields `file` itself.

    Raises:
        UsageError: zstandard is needed and not installed.
    """
    if compression == "":
        yield file
    else:
        # Not closed after an error: closing writes.
        stream = _packer(file, compression)
        yield stream
        stream.close()


def _packer(file: BinaryIO, compression: Compression) -> BinaryIO:
    if compression == ".gz":
        # No file name and no time in the header.
        return cast(BinaryIO, gzip.GzipFile("", "wb", 6, file, mtime=0))
    compressor = _zstandard().ZstdCompressor(write_checksum=True)
    return cast(BinaryIO, compressor.stream_writer(file, closefd=False))


def decode_line(line: bytes, path: Path | str, number: int) -> str:
    """Decodes a raw line.

    Raises:
        InputError: The line is not UTF-8; the message has file, line and byte.
    """
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise InputError(
            f"{_shown(path)}, line {number}: expected UTF-8, found the byte "
            f"0x{line[error.start]:02x} at position {error.start} ({error.reason}). "
            "Convert the file to UTF-8 or fix the line."
        ) from error


def _open(path: Path | str) -> io.BufferedReader:
    if str(path) == "-":
        return io.BufferedReader(cast(io.RawIOBase, sys.stdin.buffer))
    return Path(path).open("rb")


def _shown(path: Path | str) -> str:
    return "standard input" if str(path) == "-" else str(path)


def read_bytes(path: Path) -> bytes:
    """Reads a file.

    Raises:
        InputError: The file cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error


def read_object(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        InputError: The file cannot be read or holds no JSON object.
    """
    try:
        values = json.loads(read_bytes(path))
    except ValueError as error:
        raise InputError(f"{path} is not JSON ({error}); restore the file") from error
    if not isinstance(values, dict):
        raise InputError(f"{path} must be a JSON object, found {type(values).__name__}")
    return values


def sha256(path: Path) -> str:
    """Returns the SHA-256 of a file in hexadecimal.

    Raises:
        InputError: The file cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path | str, error: OSError) -> InputError:
    return InputError(f"{_shown(path)}: cannot be read: {error.strerror or error}.")


def _unwritable(path: Path, error: OSError) -> InputError:
    return InputError(
        f"{path}: cannot be written: {error.strerror or error}; nothing was written. "
        "Free some space or choose another place."
    )


@contextmanager
def durable_file(path: Path, temporary: Path) -> Iterator[BinaryIO]:
    """Writes `temporary` and renames it to `path` once all of it is on the disk.

    After a power cut the file is complete. After an error `temporary` stays.

    Args:
        path: The file.
        temporary: Where it is written, on the same file system.
    """
    with temporary.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes renames in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # not every file system can do it
            raise
    finally:
        os.close(descriptor)


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Writes a file that appears whole or not at all, even if the process is interrupted.

    Raises:
        InputError: The disk is full, or the folder is read-only or missing.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        try:
            with durable_file(path, temporary) as file:
                yield file
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from error


@contextmanager
def standard_output() -> Iterator[BinaryIO]:
    """Standard output, for bytes.

    Raises:
        InputError: The disk behind it is full. A closed pipe stays an OSError.
    """
    try:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise
        # Python flushes once more at exit, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise InputError(
            f"standard output: cannot be written: {error.strerror}. Free some space or choose "
            "another place."
        ) from error


@contextmanager
def staged_folder(out: Path) -> Iterator[Path]:
    """Temporary folder beside `out`, to be filled and renamed; always removed at the end.

    Raises:
        InputError: The disk is full, or the place is not writable.
    """
    folder = out.absolute().with_name(f".{out.name}.{os.getpid()}.part")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
        yield folder
    except OSError as error:
        raise _unwritable(out, error) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def replace_folder(folder: Path, out: Path) -> None:
    """Renames a folder to `out`; an existing `out` is removed once the new one is in place.

    Raises:
        InputError: The former folder cannot be removed.
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


# What numpy and zipfile raise for a damaged archive, and what reading its values then raises.
ARCHIVE_FAULTS = (
    *(OSError, ValueError, LookupError, EOFError, RuntimeError, TypeError, AttributeError),
    zipfile.BadZipFile,
)


@contextmanager
def open_arrays(path: Path, what: str, remedy: str) -> Iterator[Any]:
    """Opens an .npz archive; errors of reading it inside the `with` become InputErrors.

    Args:
        path: The file.
        what: What the file should be, such as "a bundle's reference".
        remedy: What to do otherwise.

    Yields:
        Arrays by name, never unpickled.

    Raises:
        InputError: The file is missing, damaged or lacks an array.
    """
    import numpy as np  # here, so that `transferry --help` does not load it

    try:
        # A stream of our own, since numpy leaves a damaged file open.
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            yield file
    except ARCHIVE_FAULTS as error:
        raise InputError(f"{path} is not {what} ({error}); {remedy}") from error
