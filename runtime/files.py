"""Text files as streams of lines, and files that appear whole or not at all."""

import errno
import gzip
import hashlib
import io
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

# What a name may end in: no compression, gzip or zstd.
Compression = Literal["", ".gz", ".zst"]

_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_lines(path: Path | str) -> Iterator[str]:
    r"""Stream the lines of a UTF-8 text file, plain, gzip or zstd.

    Only "\n" and "\r\n" end a line: the other separators of Unicode (U+2028, U+0085, ...) occur
    inside sentences, and splitting there would shift every line that follows.

    Args:
        path: the file; "-" is standard input.

    Raises:
        InputError: the file cannot be read, is binary, is damaged or is not UTF-8.
    """
    for number, line in enumerate(read_raw_lines(path), start=1):
        yield decode_line(line, path, number)


def read_raw_lines(path: Path | str, *, keep_ends: bool = False) -> Iterator[bytes]:
    r"""Stream the lines as bytes, for a reader that outlives a line which is not UTF-8.

    Args:
        path: the file, plain, gzip or zstd; "-" is standard input.
        keep_ends: leave "\n" and "\r\n" where they are.

    Raises:
        InputError: the file cannot be read, is binary or is damaged gzip or zstd.
        UsageError: zstd needs a package that is not installed.
    """
    with _unpacked(path) as file:
        # As git does: text has no NUL byte, and a binary file has one near its beginning.
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


def read_chunks(path: Path | str) -> Iterator[bytes]:
    """Stream a file as pieces of a few hundred kilobytes, unpacked where it is gzip or zstd.

    Raises:
        InputError: the file cannot be read or is damaged gzip or zstd.
        UsageError: zstd needs a package that is not installed.
    """
    with _unpacked(path) as file:
        yield from iter(partial(file.read, 1 << 18), b"")


@contextmanager
def _unpacked(path: Path | str) -> Iterator[io.BufferedReader]:
    """Opens what a reader streams. Every OSError inside counts as one of reading."""
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
        raise InputError(f"{_shown(path)}: cannot be read: {error.strerror or error}.") from error


class _ZstdFile(io.RawIOBase):
    """Unpacks zstd, frame after frame. Unlike zstandard's own reader it notices a missing end."""

    def __init__(self, packed: io.BufferedReader) -> None:
        self._packed, self._zstd = packed, _zstandard()
        self._frame = self._zstd.ZstdDecompressor().decompressobj()
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            # A small piece, since a kilobyte may hold megabytes of one letter.
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
    """Compress what is written to `file`, which stays open; the same content is the same bytes.

    Args:
        file: what is open for writing.
        compression: how; with "" it is `file` itself.

    Raises:
        UsageError: zstd needs a package that is not installed.
    """
    if compression == "":
        yield file
    else:
        # Not closed where writing failed: that would write more.
        stream = _packer(file, compression)
        yield stream
        stream.close()


def _packer(file: BinaryIO, compression: Compression) -> BinaryIO:
    if compression == ".gz":
        # No name and no time inside.
        return cast(BinaryIO, gzip.GzipFile("", "wb", 6, file, mtime=0))
    compressor = _zstandard().ZstdCompressor(write_checksum=True)
    return cast(BinaryIO, compressor.stream_writer(file, closefd=False))


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
def standard_output() -> Iterator[BinaryIO]:
    """Standard output, for bytes.

    Raises:
        InputError: It is full; where whoever reads has had enough, the OSError stays as it is.
    """
    try:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
    except OSError as error:
        if error.errno == errno.EPIPE:  # whoever reads has had enough
            raise
        # Python writes what is left once more when it ends, and must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise InputError(
            f"standard output: cannot be written: {error.strerror}. Free some space or choose "
            "another place."
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


# What numpy, zipfile and the reading of what they gave raise where a file is damaged.
ARCHIVE_FAULTS = (
    *(OSError, ValueError, LookupError, EOFError, RuntimeError, TypeError, AttributeError),
    zipfile.BadZipFile,
)


@contextmanager
def open_arrays(path: Path, what: str, remedy: str) -> Iterator[Any]:
    """Opens an archive, and answers for all that is read of it inside the `with`.

    Args:
        path: The file.
        what: What it should be, such as "a bundle's reference".
        remedy: What to do where it is not.

    Yields:
        The arrays by name; none of them is unpickled.

    Raises:
        InputError: The file is missing or damaged, or does not hold what is looked for.
    """
    import numpy as np  # here, so that `transferry --help` does not load it

    try:
        with np.load(path, allow_pickle=False) as file:
            yield file
    except ARCHIVE_FAULTS as error:
        raise InputError(f"{path} is not {what} ({error}); {remedy}") from error
