"""What became of a row: its answers, or an error; and of the pieces of a row that was split."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

from transferry.runtime.decoding.hypothesis import FinishReason, length_normalised

RowErrorKind = Literal[
    "undecodable",  # bytes that are no UTF-8
    "malformed",  # a line that is no JSON object, or has another number of columns
    "no-text",  # the field of the text is missing, or holds something else than text
    "fields",  # other fields that the output cannot hold
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
class TextHypothesis:
    """One answer to a row.

    Attributes:
        text: The tokens as text.
        tokens: Ids, without the start and end tokens.
        score: What answers are ranked by: log-probability over length ** length_penalty; NaN where
            the options want no scores.
        log_probability: Of all tokens, the end token included, in nats; NaN likewise.
        finish_reason: "end", or "length" where max_length cut it off.
    """

    text: str
    tokens: tuple[int, ...]
    score: float
    log_probability: float
    finish_reason: FinishReason


@dataclass(frozen=True)
class GenerationResult:
    """What became of one row: answers, best first, or an error.

    Attributes:
        source: The text that came in; nothing where an error came in.
        source_tokens: How much of it was read, the end token included; on an error its length, or
            at least so much of it.
        outputs: `n_best` answers, or fewer where the search found fewer; none on an error.
        error: None where there is an answer.
        truncated: Whether the text was cut short before it was answered.
    """

    source: str
    source_tokens: int
    outputs: tuple[TextHypothesis, ...]
    error: RowError | None = None
    truncated: bool = False

    @property
    def text(self) -> str:
        """The best answer, or nothing on an error."""
        return self.outputs[0].text if self.outputs else ""

    @property
    def target_tokens(self) -> int:
        """Length of the best answer, without the end token."""
        return len(self.outputs[0].tokens) if self.outputs else 0


def joined(
    results: Iterator[GenerationResult], cuts: deque[tuple[str, int]], length_penalty: float
) -> Iterator[GenerationResult]:
    """Puts together what became of the pieces of rows.

    Args:
        results: Of all pieces, in order.
        cuts: The text of each row and the number of its pieces, known before its results are.
        length_penalty: Of the search.
    """
    with contextlib.closing(results):  # type: ignore[type-var]  # a generator
        for first in results:
            text, count = cuts.popleft()
            pieces = [first, *islice(results, count - 1)]
            yield first if count == 1 else join(text, pieces, length_penalty)


def join(text: str, pieces: Sequence[GenerationResult], length_penalty: float) -> GenerationResult:
    """Returns the result of a text out of those of its pieces, one answer each."""
    source_tokens = sum(piece.source_tokens for piece in pieces)
    for number, piece in enumerate(pieces, start=1):
        if piece.error is not None:
            message = f"piece {number} of {len(pieces)}: {piece.error.message}"
            return GenerationResult(text, source_tokens, (), replace(piece.error, message=message))
    outputs = [piece.outputs[0] for piece in pieces]
    ends = [output.finish_reason == "end" for output in outputs]
    log_probability = math.fsum(output.log_probability for output in outputs)
    length = sum(len(output.tokens) for output in outputs) + sum(ends)
    joined = TextHypothesis(
        " ".join(output.text for output in outputs if output.text),
        tuple(token for output in outputs for token in output.tokens),
        length_normalised(log_probability, length, length_penalty),
        log_probability,
        "end" if all(ends) else "length",
    )
    return GenerationResult(text, source_tokens, (joined,))
