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


def wrapped(text: str, first: str = "", rest: str = "  ") -> str:
    """Wraps prose at column 80, between words only; `first` and `rest` indent its lines."""
    return textwrap.fill(
        *(text, WIDTH),
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


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
