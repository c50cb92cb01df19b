"""Streams of text lines: plain, gzip or zstd, from a file, a pipe or elsewhere."""

import contextlib
import gzip
import io
import os
import select
import sys
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from transferry.runtime.errors import InputError, UsageError, install_command
from transferry.runtime.io.whole import Stored, shown_path, unreadable

# By suffix: none, gzip, zstd.
# By suffix: none, gzip, zstd.
Compression = Literal["", ".gz", ".zst"]
_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
PIPE_SECONDS = 3.0  # how long a named pipe may lack a writer
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_lines(path: Path | str) -> Iterator[str]:
    r"""Streams the lines of a UTF-8 text file, plain, gzip or zstd; "-" is standard input.

    Only "\n" and "\r\n" end a line: Unicode's other separators (U+2028, U+0085, ...) occur inside
    sentences, and splitting there would shift all following lines.

    Raises:
        InputError: The file is unreadable, binary, damaged or not UTF-8.
    """
    for number, line in enumerate(read_raw_lines(path), start=1):
        yield decode_line(line, path, number)


def some_lines(path: Path | str) -> list[str]:
    """Reads all lines of a file; raises as `read_lines`, and InputError for an empty file."""
    if lines := list(read_lines(path)):
        return lines
    raise InputError(f"{path}: expected at least one line, found none; give another file")


def read_raw_lines(path: Path | str | Stored, *, keep_ends: bool = False) -> Iterator[bytes]:
    r"""Streams the lines as bytes, for readers that continue after a line that is not UTF-8.

    `keep_ends` keeps "\n" and "\r\n".

    Raises:
        InputError: The file is unreadable, binary, or damaged gzip or zstd.
        UsageError: The file is zstd and zstandard is not installed.
    """
    with _unpacked(path) as file:
        # git's heuristic: a NUL byte near the beginning marks a binary file.
        if b"\0" in file.peek():
            raise InputError(
                f"{shown_path(path)}: expected UTF-8 text, found a NUL byte: this is a binary "
                "file or UTF-16. Convert it to UTF-8 text."
            )
        for number, line in enumerate(file, start=1):
            text = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
            if keep_ends:
                yield text
            else:
                yield text[:-2] if text.endswith(b"\r\n") else text.removesuffix(b"\n")


def read_blocks(path: Path | str) -> Iterator[bytes]:
    """Streams a file in blocks of at most 256 KiB, decompressed; raises as `read_raw_lines`."""
    with _unpacked(path) as file:
        yield from iter(partial(file.read, 1 << 18), b"")


@contextmanager
def _unpacked(path: Path | str | Stored) -> Iterator[io.BufferedReader]:
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
            f"{shown_path(path)}: expected a whole {kind} file, found one that is damaged or cut "
            f"short ({error}). Copy or download it again."
        ) from error
    except OSError as error:
        raise unreadable(path, error) from error


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
            f"zstd needs zstandard, which is not installed; {install_command('jobs')}, or use gzip"
        ) from error
    return zstandard


@contextmanager
def packed(file: BinaryIO, compression: Compression) -> Iterator[BinaryIO]:
    """Compresses bytes written to `file`, which stays open; the result is reproducible.

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
    """Decodes a raw line; raises InputError with file, line and byte if it is not UTF-8."""
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise InputError(
            f"{shown_path(path)}, line {number}: expected UTF-8, found the byte "
            f"0x{line[error.start]:02x} at position {error.start} ({error.reason}). "
            "Convert the file to UTF-8 or fix the line."
        ) from error


def _open(path: Path | str | Stored) -> AbstractContextManager[io.BufferedReader]:
    if not isinstance(path, Path | str):
        return path.opened()
    if str(path) == "-":
        if sys.stdin is None:  # Python's sign of a closed descriptor
            raise InputError(
                "standard input: cannot be read: it is closed. Pipe text into the command, or name "
                "a file."
            )
        return io.BufferedReader(cast(io.RawIOBase, sys.stdin.buffer))
    with contextlib.suppress(ValueError):  # a NUL; `open` reports it
        if Path(path).is_fifo():
            return _open_pipe(Path(path))
    try:
        return Path(path).open("rb")
    except ValueError as error:
        raise InputError(f"{path!r} is no path: {error}") from error


def _open_pipe(path: Path) -> io.BufferedReader:
    """Opens a named pipe, but does not wait for a writer for ever."""
    file = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")  # noqa: PTH123, SIM115
    ready, _, _ = select.select([file], [], [], PIPE_SECONDS)
    if not ready:
        file.close()
        raise InputError(f"{path}: no process writes into this pipe; start its writer first")
    os.set_blocking(file.fileno(), True)
    return file
