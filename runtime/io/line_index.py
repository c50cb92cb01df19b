"""Places of lines in a large file, counted once, by several processes together."""

from __future__ import annotations

import hashlib
import io
import json
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from transferry.runtime.errors import InputError
from transferry.runtime.io.atomic import durable_file
from transferry.runtime.io.lines import is_plain

# Bytes between two known places, and of a piece that one process counts; at most so many pieces.
BLOCK, PIECE, MOST_PIECES = 1 << 20, 1 << 24, 1024


class Counted(Protocol):
    """A file whose version is known, such as `Steady`."""

    version: tuple[Any, ...] | None

    def opened(self) -> AbstractContextManager[io.BufferedReader]:
        """Opens it."""


class LineIndex:
    """Line numbers and byte offsets of some lines of a file.

    Attributes:
        lines: Number of lines.
        quotes: Number of quotation marks.
    """

    def __init__(self, numbers: Sequence[int] = (0,), offsets: Sequence[int] = (0,)) -> None:
        """Begins with some lines."""
        self.lines, self.quotes = 0, 0
        self._digest = hashlib.sha256()
        self._numbers, self._offsets = array("q", numbers), array("q", offsets)

    def before(self, line: int) -> tuple[int, int]:
        """Returns number and offset of a line at or before a line."""
        place = bisect_right(self._numbers, line) - 1
        return self._numbers[place], self._offsets[place]

    def outline(self) -> str:
        """Returns a hash of the hashes of all pieces."""
        return self._digest.hexdigest()

    def add(self, piece: list[Any]) -> None:
        """Adds the next piece; see `count_piece`."""
        newlines, quotes, sha256, *places = piece
        self._digest.update(sha256.encode())
        for offset, number in zip(places[::2], places[1::2], strict=True):
            self._offsets.append(offset)
            self._numbers.append(self.lines + number)
        self.lines, self.quotes = self.lines + newlines, self.quotes + quotes


def count_piece(file: io.BufferedReader, start: int, stop: int, block: int) -> list[Any]:
    """Counts a part of a file.

    Returns newlines, quotation marks and a hash, then for each block the offset of a line and the
    number of newlines before it.
    """
    file.seek(start)
    newlines, quotes, digest, places = 0, 0, hashlib.sha256(), list[int]()
    for at in range(start, stop, block):
        content = file.read(min(block, stop - at))
        if (first := content.find(b"\n")) >= 0:
            places += [at + first + 1, newlines + 1]
        newlines += content.count(b"\n")
        quotes += content.count(b'"')
        digest.update(content)
    return [newlines, quotes, digest.hexdigest(), *places]


def index_lines(
    file: Counted,
    folder: Path | None,
    share: float = 0.0,
    *,
    encoding: str | None = None,
    block: int = BLOCK,
    piece: int = PIECE,
) -> LineIndex | None:
    """Counts the lines of a file; None if its size is unknown, or it is read from its start only.

    Args:
        file: The file.
        folder: Where several processes leave the pieces that they have counted; each counts those
            that are not there. None counts all.
        share: Where to begin, from 0 to 1, so that processes begin with different pieces.
        encoding: Encoding of its text. Default: UTF-8, or by its byte order mark.
        block: Bytes between two known places.
        piece: Least number of bytes that a process counts at once.
    """
    with file.opened() as opened:
        if not opened.seekable() or not is_plain(opened, encoding):
            return None
        size = opened.seek(0, io.SEEK_END)
        length = max(piece, -(-size // MOST_PIECES // block) * block)
        starts = range(0, size, length)
        base = folder and folder / f"{key_of(file)}.{length}"
        pieces: dict[int, Any] = {}
        if base and (whole := base.with_name(f"{base.name}.json")).exists():
            pieces = dict(enumerate(_read(whole)))
        for turn in range(len(starts) if not pieces else 0):
            number = (int(share * len(starts)) + turn) % len(starts)
            stop = min(size, starts[number] + length)
            path = base and base.with_name(f"{base.name}.{number}.json")
            count = partial(count_piece, opened, starts[number], stop, block)
            pieces[number] = remembered(path, count)
        index = LineIndex()
        for number in sorted(pieces):
            index.add(pieces[number])
        if base:
            remembered(whole, lambda: [pieces[number] for number in sorted(pieces)])
        opened.seek(max(0, size - 3))
        end = opened.read(3)
    # A last line needs no newline; a byte order mark alone is no line.
    index.lines += bool(end) and not end.endswith(b"\n") and (size > 3 or end != b"\xef\xbb\xbf")
    return index


def key_of(file: Counted) -> str:
    """Returns a name for facts about a file in its current version."""
    facts = [Path(str(file)).name, *map(str, file.version or ())]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def remembered(path: Path | None, find: Callable[[], Any]) -> Any:
    """Returns the JSON value in a file, or finds it and leaves it there for other processes."""
    if path is not None and path.exists():
        return _read(path)
    value = find()
    if path is not None:
        with suppress(OSError):  # then others count again
            path.parent.mkdir(exist_ok=True)
            with durable_file(path) as file:
                file.write(json.dumps(value).encode())
    return value


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise InputError(f"{path} is damaged; remove it") from error
