"""Streams of text lines, and files that appear whole or not at all."""

import contextlib
import errno
import gzip
import hashlib
import io
import lzma
import os
import select
import stat
import struct
import sys
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol, cast

from transferry.runtime.errors import InputError, UsageError, install_command
from transferry.runtime.stopping import at_stop

# By suffix: none, gzip, zstd.
Compression = Literal["", ".gz", ".zst"]

# Of a file that is read whole: tokenizers of published models have up to 40 MB.
MOST_BYTES = 256 << 20
_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
# How long a named pipe may have no writer.
PIPE_SECONDS = 3.0
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# What a clone without Git LFS holds in the place of a large file.
_LFS = b"version https://git-lfs.github.com/spec/"


class Stored(Protocol):
    """A file elsewhere, which opens itself."""

    def opened(self) -> AbstractContextManager[io.BufferedReader]:
        """Opens it; an OSError inside the `with` counts as a read error."""


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


def some_lines(path: Path | str) -> list[str]:
    """Reads all lines of a file as `read_lines` does.

    Raises:
        InputError: As there, or the file is empty, so that nothing would be compared.
    """
    if lines := list(read_lines(path)):
        return lines
    raise InputError(f"{path}: expected at least one line, found none; give another file")


def read_raw_lines(path: Path | str | Stored, *, keep_ends: bool = False) -> Iterator[bytes]:
    r"""Streams the lines as bytes, for readers that continue after a line that is not UTF-8.

    Args:
        path: The file, here or elsewhere, plain, gzip or zstd; "-" is standard input.
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
            f"{_shown(path)}: expected a whole {kind} file, found one that is damaged or cut short "
            f"({error}). Copy or download it again."
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


def _open(path: Path | str | Stored) -> AbstractContextManager[io.BufferedReader]:
    if not isinstance(path, Path | str):
        return path.opened()
    if str(path) == "-":
        if sys.stdin is None:  # Python's own sign of a descriptor that is closed
            raise InputError(
                "standard input: cannot be read: it is closed. Pipe text into the command, or name "
                "a file."
            )
        return io.BufferedReader(cast(io.RawIOBase, sys.stdin.buffer))
    with contextlib.suppress(ValueError):  # a NUL, which `open` tells of too
        if Path(path).is_fifo():
            return _open_pipe(Path(path))
    try:
        return Path(path).open("rb")
    except ValueError as error:
        raise InputError(f"{path!r} is no path: {error}") from error


def _open_pipe(path: Path) -> io.BufferedReader:
    """Opens a named pipe, which would wait for a writer for ever."""
    file = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")  # noqa: PTH123, SIM115
    ready, _, _ = select.select([file], [], [], PIPE_SECONDS)
    if not ready:
        file.close()
        raise InputError(f"{path}: no process writes into this pipe; start its writer first")
    os.set_blocking(file.fileno(), True)
    return file


def _shown(path: Path | str | Stored) -> str:
    return "standard input" if str(path) == "-" else str(path)


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """Reads a regular file of at most so many bytes.

    Raises:
        InputError: The file cannot be read, is no regular file, or is larger.
    """
    with open_regular(path) as file:
        return read_at_most(file, most, path)


def read_at_most(file: BinaryIO, most: int, path: Path) -> bytes:
    """Reads an open file of at most so many bytes; `path` names it in errors.

    Raises:
        InputError: The file is larger.
    """
    content = file.read(most + 1)
    if len(content) > most:
        raise InputError(f"{path}: expected at most {most:,} bytes, found more; restore the file")
    return content


@contextmanager
def open_regular(
    path: Path, opener: Callable[[str, int], int] = os.open
) -> Iterator[io.BufferedReader]:
    """Opens a regular file for reading; an OSError inside the `with` counts as a read error.

    A pipe is refused instead of waited for, and a device instead of read for ever.

    Args:
        path: The file.
        opener: Opens it, as that of `open`.

    Raises:
        InputError: The file cannot be read, is no regular file, or is not fetched from Git LFS.
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
    """Returns the SHA-256 of a file in hexadecimal.

    Raises:
        InputError: The file cannot be read or is no regular file.
    """
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unreadable(path: Path | str | Stored, error: OSError) -> InputError:
    """Returns the error for a file that cannot be read."""
    return InputError(f"{_shown(path)}: cannot be read: {error.strerror or error}.")


_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "Free some space"),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR), "Create the folder"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "Make it writable"),
    errno.ENAMETOOLONG: "Shorten the name",
    errno.EISDIR: "Remove the folder",
    errno.EMFILE: "Raise the limit on open files (ulimit -n)",
    errno.EBADF: "Open it",
}


def unwritable(
    place: Path | str,
    error: OSError,
    kept: str = "; nothing was written",
    otherwise: str = " or choose another place",
) -> InputError:
    """Returns the error for an output that cannot be written, with the remedy that fits.

    Args:
        place: The output.
        error: Why.
        kept: What is there nevertheless.
        otherwise: What to do besides the remedy.
    """
    reason = "it is closed" if error.errno == errno.EBADF else error.strerror or error
    remedy = _REMEDIES.get(error.errno or 0, "Fix this")
    return InputError(f"{place}: cannot be written: {reason}{kept}. {remedy}{otherwise}.")


# Names of temporary files and folders. Nobody can guess them, and put a link in their place, and
# they are short, however long the name of the output is.
TEMPORARY = r"\..{0,20}\.[0-9a-f]{16}\.part"


def temporary_name(path: Path, folder: Path) -> Path:
    """Returns where an output is written before it gets its name."""
    return folder / f".{path.name[:20]}.{os.urandom(8).hex()}.part"


@contextmanager
def durable_file(path: Path, folder: Path | None = None) -> Iterator[BinaryIO]:
    """Writes a temporary file and renames it to `path` once all of it is on the disk.

    After a power cut the file is complete. After `kill -9` the temporary file stays.

    Args:
        path: The file.
        folder: Where the temporary file is, on the same file system. Default: beside `path`.
    """
    temporary = temporary_name(path, folder or path.parent)

    with at_stop(partial(temporary.unlink, missing_ok=True)):
        try:
            with temporary.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes renames in a folder survive a power cut, where the system can."""
    if os.name == "nt":  # a folder cannot be opened there
        return
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
        InputError: The disk is full, the folder is read-only or missing, or `path` is a device.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise InputError(f"{path} is not a file, so it is not replaced; name another")
    try:
        with durable_file(path) as file:
            yield file
    except OSError as error:
        raise unwritable(path, error) from error


def require_writable(path: Path, endings: Iterable[str] = ()) -> None:
    """Checks whether an output can be written, before the work that it is for.

    Args:
        path: The output.
        endings: What the names of other files beside it add to its name.

    Raises:
        InputError: Its folder is missing or read-only, or a name would be too long.
    """
    try:
        for ending in ("", *endings):
            with suppress(FileNotFoundError):
                path.with_name(path.name + ending).lstat()
        folder = path.absolute().parent
        folder.stat()
        # Not by writing a file, which `kill -9` would leave behind.
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise unwritable(path, error) from error


@contextmanager
def standard_output() -> Iterator[BinaryIO]:
    """Standard output, for bytes.

    Raises:
        InputError: The disk behind it is full. A closed pipe stays an OSError.
    """
    try:
        with suppress(io.UnsupportedOperation):  # not a file, in a test
            os.write(sys.stdout.fileno(), b"")  # refused at once if it is closed
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise
        # Python flushes once more at exit, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise unwritable("standard output", error, kept="") from error


# What numpy and zipfile raise for a damaged archive, and what reading its values then raises.
ARCHIVE_FAULTS = (
    *(OSError, ValueError, LookupError, EOFError, RuntimeError, TypeError, AttributeError),
    *(MemoryError, SyntaxError, struct.error, tokenize.TokenError),
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError),
)
# Arrays of an archive may take so many times its own size: a bomb takes thousands of times.
EXPANSION = 4
SMALL_ARCHIVE = 256 << 20


@contextmanager
def open_arrays(content: bytes, origin: str, what: str, remedy: str) -> Iterator[Any]:
    """Opens an .npz archive; errors of reading it inside the `with` become InputErrors.

    Args:
        content: The bytes of the archive.
        origin: Name of the file in errors.
        what: What the file should be, such as "a bundle's reference".
        remedy: What to do otherwise.

    Yields:
        Arrays by name, never unpickled.

    Raises:
        InputError: The archive is damaged, lacks an array, or unpacks to far more than its size.
    """
    import numpy as np  # here, so that `transferry --help` does not load it

    try:
        if not zipfile.is_zipfile(io.BytesIO(content)):  # numpy would speak of pickles
            raise ValueError("no whole .npz archive")
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            size = sum(member.file_size for member in file.zip.infolist())
            if size > max(EXPANSION * len(content), SMALL_ARCHIVE):
                raise ValueError(f"{len(content):,} bytes that unpack to {size:,}")
            yield file
    except ARCHIVE_FAULTS as error:
        raise InputError(f"{origin} is not {what} ({error}); {remedy}") from error
