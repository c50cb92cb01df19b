"""Numbers and places of lines in a large file, counted once, by several processes together."""

import hashlib
import io
import json
from array import array
from bisect import bisect_right
from codecs import BOM_UTF8
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

from transferry.runtime.errors import InputError
from transferry.runtime.io.atomic import durable_file

# Bytes between two known places, and of a piece that one process counts; at most so many pieces.
BLOCK, PIECE, MOST_PIECES = 1 << 20, 1 << 24, 1024


class Counted(Protocol):
    """A file whose version is known, such as `Steady`."""

    version: tuple[Any, ...] | None

    def opened(self) -> AbstractContextManager[io.BufferedReader]:
        """Opens it."""


class LineIndex:
    """Numbers of lines, and where some of them begin.

    Attributes:
        lines: Number of lines.
        quotes: Number of quotation marks.
        sha256: Hash of the hashes of all pieces.
    """

    def __init__(self, numbers: Sequence[int] = (0,), offsets: Sequence[int] = (0,)) -> None:
        self.lines, self.quotes, self.sha256 = 0, 0, ""
        self._numbers, self._offsets = array("q", numbers), array("q", offsets)

    def before(self, line: int) -> tuple[int, int]:
        """Returns the last known line up to a line, and the offset at which it begins."""
        place = bisect_right(self._numbers, line) - 1
        return self._numbers[place], self._offsets[place]

    @classmethod
    def of(cls, file: Counted, folder: Path | None, share: float = 0.0) -> Self:
        """Counts the lines of a file, whose ends are line feeds.

        Args:
            file: The file.
            folder: Where several processes leave the pieces that they have counted; each counts
                those that are not there. None counts all.
            share: Where to begin, from 0 to 1, so that processes begin with different pieces.
        """
        index, pieces = cls(), dict[int, Any]()
        with file.opened() as opened:
            size = opened.seek(0, io.SEEK_END)
            length = max(PIECE, -(-size // MOST_PIECES // BLOCK) * BLOCK)
            starts = range(0, size, length)
            for turn in range(len(starts)):
                number = (int(share * len(starts)) + turn) % len(starts)
                stop = min(size, starts[number] + length)
                count = partial(_count_piece, opened, starts[number], stop)
                pieces[number] = remembered(file, folder, f"{length}.{number}", count)
            opened.seek(max(0, size - 3))
            end = opened.read(3)
        for number in sorted(pieces):
            newlines, quotes, _, *places = pieces[number]
            for offset, line in zip(places[::2], places[1::2], strict=True):
                index._offsets.append(offset)
                index._numbers.append(index.lines + line)
            index.lines, index.quotes = index.lines + newlines, index.quotes + quotes
        # A last line needs no line feed; a byte order mark alone is no line.
        index.lines += bool(end) and not end.endswith(b"\n") and (size > 3 or end != BOM_UTF8)
        hashes = "".join(pieces[number][2] for number in sorted(pieces))
        index.sha256 = hashlib.sha256(hashes.encode()).hexdigest()
        return index


def _count_piece(file: io.BufferedReader, start: int, stop: int) -> list[Any]:
    """Counts a part of a file.

    Returns newlines, quotation marks and a hash, then for each block the offset of a line and the
    number of newlines before it.
    """
    file.seek(start)
    newlines, quotes, digest, places = 0, 0, hashlib.sha256(), list[int]()
    for at in range(start, stop, BLOCK):
        content = file.read(min(BLOCK, stop - at))
        if (first := content.find(b"\n")) >= 0:
            places += [at + first + 1, newlines + 1]
        newlines += content.count(b"\n")
        quotes += content.count(b'"')
        digest.update(content)
    return [newlines, quotes, digest.hexdigest(), *places]


def remembered(file: Counted, folder: Path | None, fact: str, find: Callable[[], Any]) -> Any:
    """Returns a JSON value on a file's version: from a folder, or found and left there for others.

    Raises:
        InputError: The value in the folder is damaged.
    """
    if folder is None:
        return find()
    version = json.dumps([Path(str(file)).name, *map(str, file.version or ())])
    path = folder / f"{hashlib.sha256(version.encode()).hexdigest()[:16]}.{fact}.json"
    if path.exists():
        try:
            return json.loads(path.read_bytes())
        except ValueError as error:
            raise InputError(f"{path} is damaged; remove it") from error
    value = find()
    with suppress(OSError):  # then others count again
        folder.mkdir(exist_ok=True)
        with durable_file(path) as left:
            left.write(json.dumps(value).encode())
    return value
