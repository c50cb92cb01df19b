"""Rows that are answered in pieces, lines or parts that fit, and the answers joined."""

from __future__ import annotations

import contextlib
import math
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from transferry.runtime.decoding.hypothesis import FinishReason, length_normalised
from transferry.runtime.engine.preprocess import InLanguages
from transferry.runtime.engine.result import RowError, combined

if TYPE_CHECKING:
    from transferry.runtime.engine.prompts import Asked, Encodable

# Of joined pieces the first of these that any has.
REASONS: tuple[FinishReason, ...] = ("length", "stop", "end")
# Difference of the row ids of neighbouring pieces of a row: larger than any number of rows.
PIECE = 1 << 40
# A line that is not blank. Possessive, since blank text would take quadratic time.
_LINE = re.compile(r"(?<![^\r\n])[^\S\r\n]*+\S[^\r\n]*+")


class Whole(NamedTuple):
    """A row that is answered in pieces.

    Attributes:
        text: Its text.
        pieces: Number of its pieces.
        around: Text before, between and after the pieces, for the answers too; empty for a blank
            between answers that are not empty.
    """

    text: str
    pieces: int = 1
    around: Sequence[str] = ()


def cut_lines(text: str) -> tuple[list[str], list[str]]:
    r"""Returns the lines of a text that are not blank, and the text around each.

    Lines end in `\n`, `\r\n` or `\r`.
    """
    return _LINE.findall(text), _LINE.split(text)


def in_lines(inputs: Iterable[Asked], wholes: deque[Whole]) -> Iterator[Asked]:
    """Yields inputs, texts with line breaks line by line; appends to `wholes` for each input.

    Several lines have no n best joined answers, so such a row becomes an error of kind `lines`.
    """
    for given in inputs:
        source = given.source
        text = source.text if isinstance(source, InLanguages) else source
        if not isinstance(text, str) or not ("\n" in text or "\r" in text):
            wholes.append(Whole(""))
            yield given
            continue
        lines, around = cut_lines(text)
        n_best = given.options.n_best if given.options else 1
        if len(lines) > 1 and n_best > 1:
            message = f"a text of {len(lines)} lines has no joined answers for n_best={n_best}"
            error = RowError("lines", f"{message}; give each line a row, or do not split lines")
            lines, around, source = [""], ["", ""], error
        wholes.append(Whole(text, len(lines), around) if lines else Whole(""))
        for place, line in enumerate(lines or [text]):
            one: Encodable = source
            if isinstance(source, InLanguages):
                one = replace(source, text=line)
            elif isinstance(source, str):
                one = line
            yield replace(given, source=one, row_id=given.row_id + place * PIECE)


def joined(results: Iterator[Any], wholes: deque[Whole], length_penalty: float) -> Iterator[Any]:
    """Joins the results of pieces to results of rows.

    Args:
        results: The `GenerationResult` of every piece, in order.
        wholes: Each row, appended before its results arrive.
        length_penalty: That of the search.
    """
    with contextlib.closing(results):  # type: ignore[type-var]  # a generator
        for first in results:
            whole = wholes.popleft()
            pieces = [first, *islice(results, whole.pieces - 1)]
            yield join(whole, pieces, length_penalty)


def join(whole: Whole, pieces: Sequence[Any], length_penalty: float) -> Any:
    """Joins the results of pieces, which have one hypothesis each if they are several."""
    first, *others = pieces
    if not others and not whole.around:
        # A piece has lost the white space around it.
        return replace(first, source=whole.text) if whole.text else first
    if not others:
        before, after = whole.around
        hypotheses = (replace(one, text=f"{before}{one.text}{after}") for one in first.hypotheses)
        return replace(first, source=whole.text, hypotheses=tuple(hypotheses))
    result = replace(first, source=whole.text, hypotheses=(), **combined(pieces))
    for number, piece in enumerate(pieces, start=1):
        if piece.error is not None:
            message = f"piece {number} of {len(pieces)}: {piece.error.message}"
            error = replace(piece.error, message=message)
            return replace(result, error=error, truncated=False, repeated=False)
    found = [piece.hypotheses[0] for piece in pieces]
    return replace(result, hypotheses=(_join_hypotheses(whole, found, length_penalty),))


def _join_hypotheses(whole: Whole, found: Sequence[Any], length_penalty: float) -> Any:
    reasons = {hypothesis.finish_reason for hypothesis in found}
    lengths = [len(hypothesis.tokens) + (hypothesis.finish_reason == "end") for hypothesis in found]
    # The score without the normalisation by length ranked a piece.
    ranks = zip(found, lengths, strict=True)
    total = math.fsum(piece.score * length**length_penalty for piece, length in ranks)
    texts = [hypothesis.text for hypothesis in found]
    if whole.around:
        before, *after = whole.around
        text = before + "".join(map("".join, zip(texts, after, strict=True)))
    else:
        text = " ".join(filter(None, texts))
    return replace(
        found[0],
        tokens=tuple(token for hypothesis in found for token in hypothesis.tokens),
        log_probability=math.fsum(hypothesis.log_probability for hypothesis in found),
        score=length_normalised(total, sum(lengths), length_penalty),
        finish_reason=next(each for each in REASONS if each in reasons),
        text=text,
        end=None,
    )
