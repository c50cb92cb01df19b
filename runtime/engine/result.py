"""Results of input rows, in order."""

import asyncio
import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, Self, TypeVar

Answer = TypeVar("Answer")
RowErrorKind = Literal[
    "undecodable",  # bytes that are not UTF-8
    "malformed",  # a line that is not a JSON object, or has another number of columns
    "no-text",  # the field of the text is missing, or holds something else than text
    "fields",  # other fields that the output cannot hold
    "settings",  # a request asks for something else than the first of its batch
    "language",  # a language that the bundle's tokenizer does not have
    "lines",  # several lines in one text, and several answers a row
    "tokenizer",  # a text that the tokenizer cannot encode
    "prompt",  # messages that the chat template refuses, or ids outside of the vocabulary
    "empty",
    "too-long",
    "too-short",
    "no-mask",
    "not-finite",
]


@dataclass(frozen=True)
class RowError:
    """Why a row has no answer.

    Attributes:
        kind: A word for programs.
        message: A sentence for people.
    """

    kind: RowErrorKind
    message: str

    def record(self) -> dict[str, str]:
        """Returns the error as JSON values."""
        return {"kind": self.kind, "message": self.message}


NOT_FINITE = RowError(
    "not-finite", "the model gave NaN or infinity; verify the bundle on this provider"
)


@dataclass(frozen=True)
class RowResult(ABC):
    """Result of one input row: an answer or an error.

    Attributes:
        source: The input text; empty if the input was an error.
        source_tokens: Tokens that the model read, special tokens included. On an error the tokens
            of the text, or a lower bound.
        error: Why there is no answer; None if there is one.
        truncated: Whether only the beginning of the text was read.
        repeated: Whether the answer was copied from an equal row before.
        shared_prompt_tokens: Tokens of the prompt that were not read, but copied from another row
            of the batch that begins alike.
    """

    source: str
    source_tokens: int
    _: KW_ONLY
    error: RowError | None = None
    truncated: bool = False
    repeated: bool = field(default=False, compare=False, repr=False)
    shared_prompt_tokens: int = field(default=0, compare=False, repr=False)

    @property
    def texts(self) -> list[str]:
        """Texts that were read: the source, and the second text of a pair."""
        both = (self.source, getattr(self, "pair", None))
        return [text for text in both if isinstance(text, str)]

    @property
    def target_tokens(self) -> int:
        """Number of tokens that were generated, filled in or scored."""
        return 0

    @property
    def total(self) -> float:
        """Log-probability of all tokens that were scored, in nats."""
        return 0.0

    @property
    def size(self) -> int:
        """Numbers that it holds, roughly."""
        return self.source_tokens + self.target_tokens

    def record(self, n_best: int = 1) -> dict[str, Any]:
        """Returns the record of an output file, in order.

        Args:
            n_best: Limit on the hypotheses; lists all of them if above 1.
        """
        truncated = {"truncated": True} if self.truncated else {}
        return {"source": self.source, **self._answer(n_best), **truncated}

    def to_dict(self) -> dict[str, Any]:
        """Returns the answer as JSON values, by the names that output files have."""
        return self.record()

    def cells(self, n_best: int = 1) -> dict[str, Any]:
        """Returns the values of a table's columns, by the task's names; arguments of `record`."""
        record = self.record(n_best)
        error = record.pop("error", {})
        return {"truncated": False, **record, **{f"error_{name}": error[name] for name in error}}

    @abstractmethod
    def _answer(self, n_best: int) -> dict[str, Any]: ...

    def _error(self) -> dict[str, Any]:
        return {} if self.error is None else {"error": self.error.record()}


@dataclass(frozen=True)
class Blank(RowResult):
    """Result of an empty cell: no answer, and no error.

    Attributes:
        answer: Name of the answer's column.
    """

    answer: str = ""

    def _answer(self, n_best: int) -> dict[str, Any]:
        return {self.answer: None}


def with_blanks(parts: Sequence[RowResult], answer: str) -> Sequence[RowResult]:
    """Returns results of cells without the errors of empty ones; all empty, they are errors."""
    empty = [part.error is not None and part.error.kind == "empty" for part in parts]
    if all(empty):
        return parts
    return [
        Blank(part.source, 0, answer=answer) if is_empty else part
        for part, is_empty in zip(parts, empty, strict=True)
    ]


def combined(parts: Sequence[RowResult]) -> dict[str, Any]:
    """Returns tokens and flags of a row's result, as fields, from the results of its parts."""
    return {
        "source_tokens": sum(part.source_tokens for part in parts),
        "truncated": any(part.truncated for part in parts),
        "repeated": all(part.repeated for part in parts),
        "shared_prompt_tokens": sum(part.shared_prompt_tokens for part in parts),
    }


@dataclass(frozen=True)
class PartsResult(RowResult):
    """Results of a row with several inputs.

    Attributes:
        parts: The result of each input, in order.
    """

    parts: tuple[RowResult, ...] = ()

    @classmethod
    def of(cls, parts: Sequence[RowResult]) -> Self:
        """Joins results; an error of one is the row's."""
        failed = (place for place, part in enumerate(parts) if part.error is not None)
        place = next(failed, None)
        error = None if place is None else parts[place].error
        if error is not None:
            error = RowError(error.kind, f"input {place}: {error.message}")
        source = " ".join(part.source for part in parts)
        return cls(source, error=error, parts=tuple(parts), **combined(parts))

    @property
    def texts(self) -> list[str]:
        """Texts that were read."""
        return [text for part in self.parts for text in part.texts]

    @property
    def total(self) -> float:
        """Log-probability of all tokens that were scored, in nats."""
        return sum(part.total for part in self.parts)

    @property
    def target_tokens(self) -> int:
        """Number of tokens of the best outputs."""
        return sum(part.target_tokens for part in self.parts)

    def _answer(self, n_best: int) -> dict[str, Any]:
        return self._error() or {"parts": [part.record(n_best) for part in self.parts]}


def with_bar(answers: Iterator[Answer], total: int | None) -> Iterator[Answer]:
    """Yields answers and counts them in a bar of tqdm, on stderr or in a notebook."""
    from tqdm.auto import tqdm

    with contextlib.closing(tqdm(total=total, unit=" rows")) as bar:
        for answer in answers:
            yield answer
            bar.update()


class Results(Iterator[Answer]):
    """Results in order, for `for` and for `async for`; nothing is computed before the first.

    `close` stops the computation early; dropping the iterator stops it too.
    """

    def __init__(self, answers: Iterator[Answer]) -> None:
        self._answers = answers
        self._reading = threading.RLock()  # a cancelled `async for` leaves a thread behind

    def __next__(self) -> Answer:
        with self._reading:
            return next(self._answers)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Answer:
        """Waits in a thread, so that the event loop goes on."""
        found = await asyncio.to_thread(next, self, None)
        if found is None:
            raise StopAsyncIteration
        return found

    def __repr__(self) -> str:
        return "<Results: an iterator, such as for list()>"

    def close(self) -> None:
        """Stops the computation."""
        with self._reading:
            self._answers.close()  # type: ignore[attr-defined]  # a generator
