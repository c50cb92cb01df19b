"""Streams of text lines: plain or compressed, in any encoding, from a file, a pipe or elsewhere."""

import codecs
import contextlib
import gzip
import hashlib
import io
import math
import os
import re
import select
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from transferry.runtime.errors import InputError, Option, from_extra
from transferry.runtime.io.whole import Stored, reason, shown_path, unreadable

# Compressions of outputs by suffix: none, gzip, zstd.
Compression = Literal["", ".gz", ".zst"]
# First bytes of packed inputs, by suffix. zstd may begin with a frame to skip.
PACKED = {
    ".gz": rb"\x1f\x8b",
    ".zst": rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18",
    ".bz2": rb"BZh[1-9](1AY&SY|\x17rE8P)",
    ".xz": rb"\xfd7zXZ\0",
}
# Bytes of a line: a longer one is an error, and not held.
MOST_LINE = 1 << 23
PIPE_SECONDS = 3.0  # how long a named pipe may lack a writer
_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
    codecs.BOM_UTF8: "utf-8",
}

# Beginnings of files that are no text, as patterns, and what to do with each.
_KINDS = {
    rb"PAR1": ("a Parquet file", "let its name end in .parquet"),
    rb"ARROW1|FEA1": ("an Arrow file", "let its name end in .arrow"),
    rb"PK\x03\x04|PK\x05\x06": (
        "a zip archive or an office document",
        "unpack it, or let its name end as it is, such as .xlsx",
    ),
    rb"\xd0\xcf\x11\xe0": (
        "an old or encrypted office document",
        "let its name end as it is, such as .xls, or save it without a password",
    ),
    rb"%PDF-": ("a PDF file", "convert it: pdftotext OLD NEW.txt"),
    rb"ORC": ("an ORC file", "convert it to Parquet or CSV"),
    rb"Obj\x01": ("an Avro file", "convert it to Parquet or JSONL"),
    rb"SQLite format 3": ("an SQLite database", "export a table as CSV"),
    rb"version https://git-lfs": ("a pointer of Git LFS", "fetch the file itself: git lfs pull"),
    rb"7z\xbc\xaf|Rar!|\x04\x22\x4d\x18": ("a packed file", "unpack it"),
}
# Of those, beginnings that are text themselves.
_NEVER_ROWS = (b"%PDF-", b"version https://git-lfs")
_PAGE = re.compile(
    rb"\s*(<\?xml[^>]*>\s*)?(<!--.{0,999}?-->\s*)?<(!doctype html|html|error)\b", re.I | re.S
)
# Control characters that no text has; NUL is counted apart.
_CONTROLS = re.compile(rb"[\x01-\x08\x0e-\x1a\x1c-\x1f]")


def read_lines(path: Path | str) -> Iterator[str]:
    r"""Streams the lines of a UTF-8 text file, plain or compressed; "-" is standard input.

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


class LongLine(bytes):
    """Stands for a line of more than MOST_LINE bytes: its number of bytes and its SHA-256."""

    @classmethod
    def of(cls, pieces: Iterable[bytes]) -> "LongLine":
        """Reads the pieces of a line one by one."""
        digest, size = hashlib.sha256(), 0
        for piece in pieces:
            digest.update(piece)
            size += len(piece)
        return cls(b"%d %s" % (size, digest.hexdigest().encode()))

    @property
    def size(self) -> int:
        """Bytes of the line."""
        return int(self.split()[0])

    def fault(self) -> str:
        """Returns the message of the row's error."""
        return f"expected a row of at most {MOST_LINE >> 20} MiB, found {self.size:,} bytes"


def read_raw_lines(
    path: Path | str | Stored,
    *,
    keep_ends: bool = False,
    encoding: str | None = None,
    pages: bool = True,
    keep_mark: bool = False,
    start: int = 0,
    stop: float = math.inf,
) -> Iterator[bytes]:
    r"""Streams the lines as bytes, for readers that continue after a line that is not UTF-8.

    Yields `LongLine` in the place of a line that is too long.

    Args:
        path: The file; "-" is standard input.
        keep_ends: Whether to keep "\n" and "\r\n".
        encoding: Encoding of the file. Default: UTF-8, or by its byte order mark. Where
            this encoding has other line ends, as UTF-16 has, the lines come in UTF-8.
        pages: Whether lines may be those of a page in HTML.
        keep_mark: Whether to keep a byte order mark, that of UTF-8, in front of the first line.
        start: Byte at which a line begins, in a file that is not packed.
        stop: Lines that begin there or behind it are left out.

    Raises:
        InputError: The file is unreadable, binary, damaged, or has other line ends.
        UsageError: The file is zstd and zstandard is not installed.
    """
    shown = shown_path(path)
    with _unpacked(path) as unpacked:
        file = _with_usual_ends(unpacked, encoding, shown)
        refuse_other_content(file.peek(), shown, encoding_of_lines(encoding), pages=pages)
        if start:
            file.seek(start)
        for line in _bounded(file, shown, start, stop, keep_mark=keep_mark):
            if keep_ends or isinstance(line, LongLine):
                yield line
            else:
                yield line[:-2] if line.endswith(b"\r\n") else line.removesuffix(b"\n")


def _bounded(
    file: io.BufferedReader, shown: str, at: int, stop: float, *, keep_mark: bool
) -> Iterator[bytes]:
    """Yields lines with their ends, and a LongLine in the place of a long one."""
    while at < stop and (line := file.readline(MOST_LINE)):
        first, at = not at, at + len(line)
        whole = len(line) < MOST_LINE or line.endswith(b"\n")
        if first:
            text = line.removeprefix(codecs.BOM_UTF8)
            if not text:  # there was only the mark
                return
            line = line if keep_mark else text
            if b"\r" in line and not line.endswith(b"\n"):
                raise InputError(
                    f"{shown}: expected lines that end in \\n, found only \\r; convert it: "
                    "tr '\\r' '\\n' < OLD > NEW"
                )
        if not whole:
            line = LongLine.of(chain([line], _rest(file)))
            at = file.tell() if stop < math.inf else at
        yield line


def _rest(file: io.BufferedReader) -> Iterator[bytes]:
    """Yields the rest of a line in pieces."""
    for piece in iter(partial(file.readline, 1 << 18), b""):
        yield piece
        if piece.endswith(b"\n"):
            return


def refuse_other_content(head: bytes, shown: str, encoding: str, *, pages: bool) -> None:
    """Raises InputError for first bytes that are not those of lines of text.

    `shown` is the file's name in messages; with `pages` a page in HTML is as good as other text.
    """
    if not pages and _PAGE.match(head):
        raise InputError(
            f"{shown}: expected rows, found a page in HTML, such as of a log-in or an error; check "
            "address and credentials, or add ",
            *(Option("format_in"), " text"),
        )
    if not _is_binary(head, encoding):
        return
    for pattern, (kind, remedy) in _KINDS.items():
        if re.match(pattern, head):
            raise InputError(f"{shown}: expected text, found {kind}; {remedy}")
    raise InputError(
        f"{shown}: expected UTF-8 text, found a NUL byte: this is a binary file or UTF-16. "
        "Convert it to UTF-8 text, or name its encoding."
    )


def _is_binary(head: bytes, encoding: str) -> bool:
    """Whether bytes are no text; text with a stray NUL is text."""
    nuls = head.count(0)
    try:
        codecs.getincrementaldecoder(encoding)().decode(head)
        is_text = True
    except UnicodeDecodeError:
        is_text = False
    known = any(re.match(pattern, head) for pattern in _KINDS)
    if known and (not is_text or _CONTROLS.search(head) or head.startswith(_NEVER_ROWS)):
        return True
    return nuls > 0 and (not is_text or nuls * 5 >= len(head) * 2 or bool(_CONTROLS.search(head)))


def is_plain(file: io.BufferedReader, encoding: str | None) -> bool:
    """Whether a file at its start is not packed, and its lines end in the byte of a line feed."""
    head = file.peek(10)
    marked = next((name for mark, name in _MARKS.items() if head.startswith(mark)), "utf-8")
    packed_as = any(re.match(start, head) for start in PACKED.values())
    return not packed_as and _is_of_lines(encoding or marked)


def encoding_of_lines(encoding: str | None) -> str:
    """Returns the encoding of the lines of `read_raw_lines`."""
    return encoding if encoding and _is_of_lines(encoding) else "utf-8"


def _is_of_lines(encoding: str) -> bool:
    """Whether bytes tell where lines end, and each line can be decoded alone."""
    # ISO-2022-KR names its character set once, at the beginning.
    return "\n".encode(encoding) == b"\n" and codecs.lookup(encoding).name != "iso2022_kr"


def _with_usual_ends(
    file: io.BufferedReader, encoding: str | None, shown: str
) -> io.BufferedReader:
    """Returns a file as it is, or in UTF-8 if bytes cannot tell where its lines end."""
    head = file.peek(4)
    marked = next((name for mark, name in _MARKS.items() if head.startswith(mark)), None)
    wanted = codecs.lookup(encoding or marked or "utf-8").name.removesuffix("-sig")
    if marked and not marked.startswith(wanted):
        raise InputError(f"{shown}: expected {wanted}, found the byte order mark of {marked}")
    if _is_of_lines(wanted):
        return file
    return io.BufferedReader(_Pieces(_in_utf8(file, wanted, shown)))


_HEAD = 64  # bytes that tell what a file is


class _Pieces(io.RawIOBase):
    """A stream of pieces of bytes, made as they are read; `source` is closed with it."""

    def __init__(self, pieces: Iterator[bytes], source: io.BufferedReader | None = None) -> None:
        # Whole where a file begins with short members, or a pipe with few bytes: `peek` reads once.
        head = b""
        while len(head) < _HEAD and (piece := next(pieces, None)) is not None:
            head += piece
        self._pieces, self._ready, self._source = pieces, memoryview(head), source

    @classmethod
    def of_pipe(cls, file: io.BufferedReader) -> io.BufferedReader:
        """Returns a pipe whose first bytes are there together."""
        return io.BufferedReader(cls(iter(partial(file.read1, 1 << 16), b""), file))

    def close(self) -> None:
        if self._source is not None:
            self._source.close()
        super().close()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            if (piece := next(self._pieces, None)) is None:
                return 0
            self._ready = memoryview(piece)
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size


def _in_utf8(file: io.BufferedReader, encoding: str, shown: str) -> Iterator[bytes]:
    """Yields text in UTF-8; half of a surrogate pair becomes bytes that are wrong."""
    decoder = codecs.getincrementaldecoder(encoding)("surrogatepass")
    for piece in chain(iter(partial(file.read1, 1 << 16), b""), [b""]):
        try:
            text = decoder.decode(piece, final=not piece)
        except UnicodeError as error:  # also of UTF-16 without a byte order mark
            reason = getattr(error, "reason", error)
            raise InputError(
                f"{shown}: expected {encoding}, found other bytes ({reason}). Name another "
                "encoding, or copy the file again"
            ) from error
        yield text.encode(errors="surrogatepass")


def read_blocks(path: Path | str) -> Iterator[bytes]:
    """Streams a file in blocks of at most 256 KiB, decompressed; raises as `read_raw_lines`."""
    with _unpacked(path) as file:
        yield from iter(partial(file.read, 1 << 18), b"")


@contextmanager
def _unpacked(path: Path | str | Stored) -> Iterator[io.BufferedReader]:
    """Opens and decompresses a file; an OSError inside the `with` counts as a read error."""
    kind = ""
    try:
        with open_stream(path) as file:
            head = file.peek(10)
            named = next((suffix for suffix in PACKED if str(path).lower().endswith(suffix)), "")
            kind = next((suffix for suffix in PACKED if re.match(PACKED[suffix], head)), named)
            if kind == ".gz" and not re.match(PACKED[".gz"], head):
                raise gzip.BadGzipFile("it does not begin as gzip does")
            if kind == ".gz":
                yield io.BufferedReader(gzip.GzipFile(fileobj=file))
            elif kind:
                yield io.BufferedReader(_Pieces(_frames(file, kind)))
            else:
                yield file
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        name = {".gz": "gzip", ".zst": "zstd"}.get(kind, kind.removeprefix("."))
        raise InputError(
            f"{shown_path(path)}: expected a whole {name} file, found one that is damaged or cut "
            f"short ({reason(error)}). Copy or download it again."
        ) from error
    except _TooWide as error:
        raise InputError(
            f"{shown_path(path)} was packed with a larger window than 128 MiB; unpack it first: "
            "zstd -d --long=31 FILE"
        ) from error
    except OSError as error:
        raise unreadable(path, error) from error


class _TooWide(Exception):
    """A frame needs more memory than a reader may take."""


def _frames(packed: io.BufferedReader, suffix: str) -> Iterator[bytes]:
    """Decompresses zstd, bz2 or xz frame by frame, and detects truncation."""
    new, errors, most = _unpacker(suffix)
    frame = new()
    while True:
        piece = b""
        if frame.eof:
            piece = frame.unused_data.lstrip(b"\0") or packed.read(256)
            if not piece:
                return
            frame = new()
        elif getattr(frame, "needs_input", True):
            # Little input at a time: 256 bytes of zstd can become 8 MB.
            piece = packed.read(256)
            if not piece:
                raise EOFError("it ends within a frame")
        try:
            unpacked = frame.decompress(piece, *most)
        except errors as error:
            if "too much memory" in str(error):
                raise _TooWide from error
            raise EOFError(str(error)) from error
        yield unpacked


def _unpacker(
    suffix: str,
) -> tuple[Callable[[], Any], type[Exception] | tuple[type[Exception], ...], tuple[int, ...]]:
    """Returns the type of a decompressor, its errors, and its limit on bytes at once."""
    if suffix == ".zst":
        zstandard = _zstandard()
        return zstandard.ZstdDecompressor().decompressobj, zstandard.ZstdError, ()
    import bz2
    import lzma

    made = bz2.BZ2Decompressor if suffix == ".bz2" else lzma.LZMADecompressor
    return made, (OSError, lzma.LZMAError), (1 << 18,)


def _zstandard() -> Any:
    with from_extra("jobs", "zstd needs zstandard", instead=", or use gzip"):
        import zstandard
    return zstandard


@contextmanager
def packed(file: BinaryIO, compression: Compression) -> Iterator[BinaryIO]:
    """Compresses bytes written to `file`, which stays open; the result is reproducible.

    Raises UsageError if zstandard is needed and not installed.
    """
    stream: Any = file
    if compression == ".gz":
        # No file name and no time in the header.
        stream = gzip.GzipFile("", "wb", 6, file, mtime=0)
    elif compression == ".zst":
        compressor = _zstandard().ZstdCompressor(write_checksum=True)
        stream = compressor.stream_writer(file, closefd=False)
    yield stream
    if stream is not file:  # not after an error: closing writes
        stream.close()


def decode_line(line: bytes, path: Path | str, number: int) -> str:
    """Decodes a raw line; raises InputError with file, line and byte if it is not UTF-8 text."""
    place = f"{shown_path(path)}, line {number}"
    if isinstance(line, LongLine):
        raise InputError(f"{place}: {line.fault()}; shorten or remove it")
    if b"\0" in line:
        raise InputError(f"{place}: expected text, found a NUL byte; remove it")
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise InputError(
            f"{place}: expected UTF-8, found the byte "
            f"0x{line[error.start]:02x} at position {error.start} ({error.reason}). "
            "Convert the file to UTF-8 or fix the line."
        ) from error


def open_stream(path: Path | str | Stored) -> AbstractContextManager[io.BufferedReader]:
    """Opens a file, a pipe, standard input or a file elsewhere, as it is."""
    if not isinstance(path, Path | str):
        return path.opened()
    if str(path) == "-":
        if sys.stdin is None:  # Python's sign of a closed descriptor
            raise InputError(
                "standard input: cannot be read: it is closed. Pipe text into the command, or name "
                "a file."
            )
        return _Pieces.of_pipe(cast(io.BufferedReader, sys.stdin.buffer))
    with contextlib.suppress(ValueError):  # a NUL; `open` reports it
        if Path(path).is_fifo():
            return _Pieces.of_pipe(_open_pipe(Path(path)))
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
