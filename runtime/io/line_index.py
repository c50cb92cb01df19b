"""Numbers and places of lines in a large file."""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_right
from codecs import BOM_UTF8
from collections.abc import Sequence
from typing import BinaryIO

# Bytes between two known places.
BLOCK = 1 << 20


class LineIndex:
    """Line numbers and byte offsets of some lines of a file.

    Attributes:
        lines: Number of lines.
        quotes: Number of quotation marks.
        sha256: Hash of the file.
    """

    def __init__(self, numbers: Sequence[int] = (0,), offsets: Sequence[int] = (0,)) -> None:
        """Begins with some lines."""
        self.lines, self.quotes, self.sha256 = 0, 0, ""
        self._numbers, self._offsets = array("q", numbers), array("q", offsets)

    def before(self, line: int) -> tuple[int, int]:
        """Returns number and offset of a line at or before a line."""
        place = bisect_right(self._numbers, line) - 1
        return self._numbers[place], self._offsets[place]

    @classmethod
    def of(cls, file: BinaryIO) -> LineIndex:
        """Counts the lines of a file, whose ends are line feeds, by blocks of bytes."""
        index, digest, start, end = cls(), hashlib.sha256(), 0, b""
        while content := file.read(BLOCK):
            if (first := content.find(b"\n")) >= 0:
                index._numbers.append(index.lines + 1)
                index._offsets.append(start + first + 1)
            index.lines += content.count(b"\n")
            index.quotes += content.count(b'"')
            digest.update(content)
            start, end = start + len(content), (end + content)[-3:]
        # A last line needs no line feed; a byte order mark alone is no line.
        index.lines += bool(end) and not end.endswith(b"\n") and (start > 3 or end != BOM_UTF8)
        index.sha256 = digest.hexdigest()
        return index
