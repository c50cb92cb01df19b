"""Stop strings: text before which an answer ends."""

from collections.abc import Callable, Iterable, Sequence

from transferry.runtime.errors import UsageError


class StopStrings:
    """Finds the first stop string in the text of tokens, across the borders of tokens.

    `stop` has no empty strings. Raises UsageError for strings without `decode`, a tokenizer's.
    """

    def __init__(
        self, stop: Sequence[str], decode: Callable[[Iterable[int]], str] | None = None
    ) -> None:
        if stop and decode is None:
            raise UsageError(
                "stop needs the text of tokens: search through an engine, or pass the tokenizer's "
                "decode"
            )
        self.stop = stop
        self.decode = decode

    def __bool__(self) -> bool:
        return bool(self.stop)

    def end(self, tokens: Sequence[int]) -> bool:
        """Whether the text of the tokens holds a stop string."""
        assert self.decode is not None
        text = self.decode(tokens)
        return any(stop in text for stop in self.stop)

    def cut(self, text: str) -> str:
        """Returns the text before the first stop string; the whole text without one."""
        places = (place for stop in self.stop if (place := text.find(stop)) >= 0)
        return text[: min(places, default=len(text))]
