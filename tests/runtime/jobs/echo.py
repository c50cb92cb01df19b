"""An engine without a model, for tests of what happens around one."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transferry.runtime.decoding.options import GenerationOptions
from transferry.runtime.engine.engine import Engine
from transferry.runtime.engine.result import GenerationResult, RowError, TextHypothesis


class Echo(Engine):
    """Answers a text with itself in capitals, then reversed; an empty one with an error.

    Attributes:
        change: What it does instead of capitals.
        computed: A file to which the number of each row is added that is answered.
        seconds: That a row takes.
        fail_at: The row at which it breaks down.
        score: Of the best answer.
        described: How it describes itself.
    """

    def __init__(
        self,
        *,
        change: Callable[[str], str] = str.upper,
        computed: Path | None = None,
        seconds: float = 0.0,
        fail_at: int | None = None,
        score: float = -0.25000004,
    ) -> None:
        self.change, self.computed, self.seconds = change, computed, seconds
        self.fail_at, self.score = fail_at, score
        self.described: dict[str, Any] = {"manifest_sha256": "ab12", "onnxruntime": "1.0"}
        tokenizer = SimpleNamespace(encode_target=lambda text: list(text.encode()))
        self.bundle: Any = SimpleNamespace(tokenizer=tokenizer, folder="bundle")

    def describe(self) -> dict[str, Any]:
        return self.described

    def default_options(self) -> GenerationOptions:
        return GenerationOptions()

    def generate(
        self,
        items: Iterable[str | RowError],
        options: GenerationOptions | None = None,
        *,
        first_row: int = 0,
        long_rows: str = "error",
    ) -> Iterator[GenerationResult]:
        for number, item in enumerate(items, start=first_row):
            if self.computed is not None:
                with self.computed.open("a") as file:
                    file.write(f"{number}\n")
            if self.seconds:
                time.sleep(self.seconds)
            if number == self.fail_at:
                raise RuntimeError("the device is gone")
            if isinstance(item, RowError):
                yield GenerationResult("", 0, error=item)
                continue
            length = len(item.split()) + 1
            if not item:
                error = RowError("empty", "there is no text to work on")
                yield GenerationResult(item, length, error=error)
                continue
            best = TextHypothesis((7,) * length, -1.5, self.score, "end", self.change(item))
            second = TextHypothesis((8, 9), -1.0, -0.5, "length", item[::-1])
            found = (best, second)[: options.n_best if options else 1]
            yield GenerationResult(item, length, found)


def answered(computed: Path) -> list[int]:
    """Which rows were answered, in order of time; forgets them."""
    if not computed.exists():
        return []
    numbers = [int(line) for line in computed.read_text().split()]
    os.truncate(computed, 0)
    return numbers
