"""Plain-text tables for terminals and logs."""

import re
import textwrap
from collections.abc import Iterable, Sequence

WIDTH = 80  # columns of a narrow terminal


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Formats rows as aligned columns under a header and a rule."""
    texts = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    texts.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in texts
    )


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun, such as "1 row" and "2,000 rows"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def wrapped(text: str, first: str = "", rest: str = "  ") -> str:
    """Wraps prose at column 80, between words only; `first` and `rest` indent its lines."""
    return textwrap.fill(
        *(text, WIDTH),
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def wrapped_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Formats rows as `table` does, the words of the last column wrapped at column 80."""
    columns = list(zip(header, *rows, strict=True))[:-1]
    room = WIDTH - sum(max(len(str(cell)) for cell in column) + 2 for column in columns)
    lines: list[list[object]] = []
    for *cells, last in rows:
        parts = textwrap.wrap(str(last), room, break_long_words=False, break_on_hyphens=False)
        lines += [[*cells, part] for part in parts[:1] or [""]]
        lines += [[*("" for _ in cells), part] for part in parts[1:]]
    return table(header, lines)


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """Formats named values, each wrapped beside its name; a name may be empty."""
    return "\n".join(wrapped(value, f"{name:<12}", " " * 12) for name, value in rows)


# Terminal controls, half surrogates, and marks that change the direction of text; newline and tab
# stay.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    r"""Escapes terminal controls in text from outside, such as names in a bundle, as \x1b."""
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)
