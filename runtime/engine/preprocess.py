"""What a model reads of a row: its tokens, or why it cannot take it.

Where a text has more tokens than the model has positions, it is an error, or cut short, or cut into
pieces that are answered each for itself.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from transferry.runtime.engine.result import RowError
from transferry.runtime.errors import UsageError
from transferry.runtime.tokenizer.special_tokens import SpecialTokens

LongRows = Literal["error", "truncate", "split"]


@dataclass(frozen=True)
class EncodedRow:
    """What became of a row before any model saw it.

    Attributes:
        text: What came in; nothing where it was an error.
        ids: What the model reads, the tokens that wrap the text included.
        tokens: How many the whole text has, likewise; where it is far too long to be counted, the
            fewest that it can have.
        error: Why the model does not read it; None where it does.
        truncated: Whether the text goes on after what is read.
    """

    text: str
    ids: Sequence[int] = ()
    tokens: int = 0
    error: RowError | None = None
    truncated: bool = False


@dataclass(frozen=True)
class Preprocessor:
    """Turns texts into what a model reads.

    Attributes:
        encode_batch: Gives the token ids of each text.
        special: Tells what wraps them.
        positions: Most tokens that the model takes.
        longest_token: Most characters that a token stands for, if no text has fewer tokens than
            that gives: what must be too long is not even counted. None where a tokenizer may drop
            or join characters.
    """

    encode_batch: Callable[[list[str]], list[list[int]]]
    special: SpecialTokens
    positions: int
    longest_token: int | None = None

    def read(
        self, items: Sequence[str | RowError], long_rows: LongRows = "error", reserve: int = 0
    ) -> list[EncodedRow]:
        """Reads rows, in order.

        Args:
            items: Texts; an error stands for a row that has none.
            long_rows: Whether what is too long is cut short; else it is an error.
            reserve: Positions that what is cut short leaves free.
        """
        room = max(0, self.positions - (reserve if long_rows == "truncate" else 0))
        texts = [item for item in items if isinstance(item, str)]
        heads = [self._head(text, room, long_rows) for text in texts]
        ids = iter(self.encode_batch(heads))
        return [
            EncodedRow("", error=item)
            if isinstance(item, RowError)
            else self._reading(item, next(ids), room, long_rows)
            for item in items
        ]

    def _least(self, text: str) -> int:
        """The fewest tokens that a text can have."""
        return -(-len(text) // self.longest_token) if self.longest_token else 0

    def _head(self, text: str, room: int, long_rows: LongRows) -> str:
        """As much of a text as decides what is read of it."""
        if self._least(text) <= self.positions:
            return text
        assert self.longest_token is not None
        return text[: room * self.longest_token] if long_rows == "truncate" else ""

    def _reading(self, text: str, ids: Sequence[int], room: int, long_rows: LongRows) -> EncodedRow:
        uncounted = self._least(text) > self.positions
        wrapped = self.special.wrap(ids)
        around = len(wrapped) - len(ids)
        tokens = self._least(text) + around if uncounted else len(wrapped)
        if not text.strip():
            return EncodedRow(text, (), tokens, RowError("empty", "there is no text to work on"))
        if tokens <= room:
            return EncodedRow(text, wrapped, tokens)
        if long_rows == "truncate" and room > around:
            return EncodedRow(text, self.special.wrap(ids[: room - around]), tokens, truncated=True)
        return EncodedRow(
            text,
            (),
            tokens,
            RowError(
                "too-long",
                f"{'at least ' * uncounted}{tokens} tokens, but the model has {self.positions} "
                "positions; shorten or split the text",
            ),
        )

    def pieces(self, text: str) -> list[str]:
        """Cuts a text into pieces that the model takes: neighbouring sentences as far as they fit.

        A sentence that does not fit is cut at white space, a word that does not at characters.
        Nothing but white space between the pieces is lost.
        """
        return list(self._pieces(text, [sentences, _words, list]))

    def _pieces(self, text: str, cuts: Sequence[Callable[[str], list[str]]]) -> Iterator[str]:
        text = text.strip()
        if self._fits(text) or not cuts:
            if text:
                yield text
            return
        cut, *finer = cuts
        parts = cut(text)
        counts = [len(ids) for ids in self.encode_batch(parts)]
        room = self.positions - len(self.special.wrap([]))
        first = 0
        while first < len(parts):
            last, tokens = first + 1, counts[first]
            while last < len(parts) and tokens + counts[last] <= room:
                tokens += counts[last]
                last += 1
            # Parts may have more tokens together than singly, or without the blank in front.
            while last > first + 1 and not self._fits("".join(parts[first:last]).strip()):
                last -= 1
            yield from self._pieces("".join(parts[first:last]), finer)
            first = last

    def _fits(self, text: str) -> bool:
        (reading,) = self.read([text])
        return reading.tokens <= self.positions


def check_long_rows(long_rows: LongRows, conflict: str = "") -> None:
    """Does nothing where rows that are too long can be treated so.

    Args:
        long_rows: What is asked for.
        conflict: What excludes that they are split, if anything does.

    Raises:
        UsageError: There is no such treatment, it is excluded, or a library is missing for it.
    """
    if long_rows not in get_args(LongRows):
        names = ", ".join(get_args(LongRows))
        raise UsageError(f"long_rows must be one of {names}, found {long_rows!r}")
    if long_rows != "split":
        return
    if conflict:
        raise UsageError(
            f"long_rows=split and {conflict} exclude each other: only single answers of an "
            "encoder-decoder are joined; choose long_rows=truncate or long_rows=error"
        )
    sentences("")


def sentences(text: str) -> list[str]:
    """Cuts a text into sentences, whatever its language; joined again they are the text.

    Raises:
        UsageError: The library for it is not installed.
    """
    try:
        import sentencex
    except ModuleNotFoundError as error:
        raise UsageError(
            "long_rows=split needs sentencex, which is not installed; "
            'pip install "transferry[sentences]"'
        ) from error
    # Its rules of English are those that it follows where it does not know a language.
    found: list[str] = sentencex.segment("en", text)
    return found


def sentences_version() -> str:
    """Returns the version of the library that cuts sentences, which decides where; or "none"."""
    try:
        return importlib.metadata.version("sentencex")
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _words(text: str) -> list[str]:
    return re.findall(r"\s*\S+|\s+$", text)
