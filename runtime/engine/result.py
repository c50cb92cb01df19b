"""Results of input rows, and the joining of those of a row that was split."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import islice
from typing import Any, Literal, Self, TypeVar

from transferry.runtime.decoding.hypothesis import FinishReason, Hypothesis, length_normalised

Answer = TypeVar("Answer")
# Of joined pieces the first of these that any has.
REASONS: tuple[FinishReason, ...] = ("length", "stop", "end")
RowErrorKind = Literal[
    "undecodable",  # bytes that are not UTF-8
    "malformed",  # a line that is not a JSON object, or has another number of columns
    "no-text",  # the field of the text is missing, or holds something else than text
    "fields",  # other fields that the output cannot hold
    "settings",  # a request asks for something else than the first of its batch
    "language",  # a language that the bundle's tokenizer does not have
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
        repeated: Whether the answer is that of an equal row before, and was not computed again.
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
    def target_tokens(self) -> int:
        """Number of tokens that were generated, filled in or scored."""
        return 0

    @property
    def size(self) -> int:
        """Numbers that it holds, roughly."""
        return self.source_tokens + self.target_tokens

    def record(self, n_best: int = 1) -> dict[str, Any]:
        """Returns what an output file holds of the result, in order.

        Args:
            n_best: Hypotheses that were asked for; if more than one, all are listed.
        """
        truncated = {"truncated": True} if self.truncated else {}
        return {"source": self.source, **self._answer(n_best), **truncated}

    @abstractmethod
    def _answer(self, n_best: int) -> dict[str, Any]: ...

    def _error(self) -> dict[str, Any]:
        return {} if self.error is None else {"error": self.error.record()}


@dataclass(frozen=True)
class TextHypothesis(Hypothesis):
    """A hypothesis with its text.

    Attributes:
        text: The tokens as text.
    """

    text: str

    def record(self) -> dict[str, Any]:
        """Returns text, score and finish reason; None for no score, since JSON has no NaN."""
        score = None if math.isnan(self.score) else round(self.score, 6)
        return {"text": self.text, "score": score, "finish_reason": self.finish_reason}


@dataclass(frozen=True)
class GenerationResult(RowResult):
    """Generated texts for one input row.

    Attributes:
        hypotheses: Best first: `n_best`, or fewer if the search found fewer; none on an error.
    """

    hypotheses: tuple[TextHypothesis, ...] = ()

    @property
    def text(self) -> str:
        """Text of the best hypothesis; empty on an error."""
        return self.hypotheses[0].text if self.hypotheses else ""

    @property
    def target_tokens(self) -> int:
        """Tokens of the best hypothesis, the end token excluded."""
        return len(self.hypotheses[0].tokens) if self.hypotheses else 0

    @property
    def size(self) -> int:
        """Numbers that it holds, roughly."""
        return self.source_tokens + sum(len(each.tokens) for each in self.hypotheses)

    def _answer(self, n_best: int) -> dict[str, Any]:
        best: dict[str, Any] = {"text": "", "finish_reason": "error"}
        if self.hypotheses:
            best = {**self.hypotheses[0].record(), "target_tokens": self.target_tokens}
        answer = {**best, **self._error(), "source_tokens": self.source_tokens}
        if n_best > 1:
            answer["n_best"] = [hypothesis.record() for hypothesis in self.hypotheses]
        return answer


class Results(Iterator[Answer]):
    """Results in order, for `for` and for `async for`; nothing is computed before the first.

    `close` stops the computation early; dropping the iterator does so too.
    """

    def __init__(self, answers: Iterator[Answer]) -> None:
        self._answers = answers
        self._reading = threading.Lock()  # a cancelled `async for` leaves a thread behind

    def __next__(self) -> Answer:
        with self._reading:
            return next(self._answers)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Answer:
        """Waits in a thread, so that the event loop goes on."""
        found = await asyncio.to_thread(self._next_or_end)
        if found is None:
            raise StopAsyncIteration
        return found[0]

    def _next_or_end(self) -> tuple[Answer] | None:
        for answer in self:
            return (answer,)
        return None

    def close(self) -> None:
        """Stops the computation."""
        with self._reading:
            self._answers.close()  # type: ignore[attr-defined]  # a generator


def joined(
    results: Iterator[GenerationResult], rows: deque[tuple[str, int]], length_penalty: float
) -> Iterator[GenerationResult]:
    """Joins the results of pieces to results of rows.

    Args:
        results: Results of all pieces, in order.
        rows: Text of each row and number of its pieces, appended before its results arrive.
        length_penalty: That of the search.
    """
    with contextlib.closing(results):  # type: ignore[type-var]  # a generator
        for first in results:
            text, count = rows.popleft()
            pieces = [first, *islice(results, count - 1)]
            yield first if count == 1 else join(text, pieces, length_penalty)


def join(text: str, pieces: Sequence[GenerationResult], length_penalty: float) -> GenerationResult:
    """Returns the result of a text from those of its pieces, which have one hypothesis each."""
    source_tokens = sum(piece.source_tokens for piece in pieces)
    for number, piece in enumerate(pieces, start=1):
        if piece.error is not None:
            message = f"piece {number} of {len(pieces)}: {piece.error.message}"
            return GenerationResult(
                text, source_tokens, error=replace(piece.error, message=message)
            )
    found = [piece.hypotheses[0] for piece in pieces]
    reasons = {hypothesis.finish_reason for hypothesis in found}
    reason = next(each for each in REASONS if each in reasons)
    log_probability = math.fsum(hypothesis.log_probability for hypothesis in found)
    lengths = [len(hypothesis.tokens) + (hypothesis.finish_reason == "end") for hypothesis in found]
    # What ranked a piece is its score without the normalisation by length.
    ranks = zip(found, lengths, strict=True)
    total = math.fsum(piece.score * length**length_penalty for piece, length in ranks)
    whole = TextHypothesis(
        tuple(token for hypothesis in found for token in hypothesis.tokens),
        log_probability,
        length_normalised(total, sum(lengths), length_penalty),
        reason,
        " ".join(hypothesis.text for hypothesis in found if hypothesis.text),
    )
    return GenerationResult(text, source_tokens, (whole,))
