"""What a model reads of a row: its tokens, or why it cannot take it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transferry.runtime.rows import RowError
from transferry.runtime.special_tokens import SpecialTokens


@dataclass(frozen=True)
class Reading:
    """What became of a row before any model saw it.

    Attributes:
        text: What came in; nothing where it was an error.
        ids: What the model reads, the tokens that wrap the text included.
        error: Why it does not; None where it can.
    """

    text: str
    ids: Sequence[int] = ()
    error: RowError | None = None


@dataclass(frozen=True)
class Reader:
    """Turns texts into what a model reads.

    Attributes:
        encode_batch: Gives the token ids of each text.
        special: Tells what wraps them.
        positions: Most tokens that the model takes.
    """

    encode_batch: Callable[[list[str]], list[list[int]]]
    special: SpecialTokens
    positions: int

    def read(self, items: Sequence[str | RowError]) -> list[Reading]:
        """Reads rows, in order.

        Args:
            items: Texts; an error stands for a row that has none.
        """
        ids = iter(self.encode_batch([item for item in items if isinstance(item, str)]))
        return [
            Reading("", (), item)
            if isinstance(item, RowError)
            else self._reading(item, self.special.wrap(next(ids)))
            for item in items
        ]

    def _reading(self, text: str, ids: Sequence[int]) -> Reading:
        error = None
        if not text.strip():
            error = RowError("empty", "there is no text to work on")
        elif len(ids) > self.positions:
            error = RowError(
                "too-long",
                f"{len(ids)} tokens, but the model has {self.positions} positions; shorten or "
                "split the text",
            )
        return Reading(text, ids, error)
