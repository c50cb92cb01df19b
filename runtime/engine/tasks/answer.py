"""Answering: the spans of a context that answer a question.

Source: QuestionAnsweringPipeline of transformers 4.57, the last release that has it. Spans of
probability 0 are left out.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from transferry.runtime.engine.preprocess import DIVIDED, EncodedRow, LongRows, checked_pairs
from transferry.runtime.engine.result import Results, RowError, RowResult, combined
from transferry.runtime.engine.tasks.heads import (
    EMPTY,
    EncoderCall,
    HeadTask,
    Pair,
    PairOptions,
    probabilities,
)
from transferry.runtime.engine.tasks.task import Bounds, Difference, Layout, TopOptions, columns
from transferry.runtime.errors import Option, UsageError, require
from transferry.runtime.settings import Count, Whole
from transferry.runtime.tokenizer.special_tokens import TextError

if TYPE_CHECKING:
    from transferry.runtime.engine.open_bundle import OpenBundle
    from transferry.runtime.engine.tasks.heads import Scores
    from transferry.runtime.tokenizer.special_tokens import Place

LONGEST_WINDOW = 384  # tokens of a window, the pipeline's default
SHARED = 128  # tokens that neighbouring windows share, likewise


@dataclass(frozen=True)
class Span:
    """A span of a context.

    Attributes:
        text: Its characters; empty where the context has no answer.
        start: Its first character in the context, from 0.
        end: The character after its last one.
        score: Probability of its start times that of its end, summed over the spans of this text.
    """

    text: str
    start: int
    end: int
    score: float


@dataclass(frozen=True)
class AnsweredResult(RowResult):
    """The likeliest answers to a question, best first; `pair` is its context, or an error."""

    pair: str | RowError | None = None
    answers: tuple[Span, ...] = ()

    @property
    def numbers(self) -> list[float]:
        """The scores of the answers."""
        return [each.score for each in self.answers]

    def _answer(self, n_best: int) -> dict[str, Any]:
        if self.error is not None:
            return self._error()
        best = self.answers[0]
        answers = [vars(each) for each in self.answers]
        own = {"answer": best.text, "start": best.start, "end": best.end, "score": best.score}
        return {**own, "answers": answers}


@dataclass(frozen=True, kw_only=True)
class AnswerOptions(TopOptions, PairOptions):
    """Options of answer.

    Attributes:
        max_answer_len: Longest answer in tokens.
        handle_impossible_answer: Offer "no answer", as an empty text.
        doc_stride: Tokens that neighbouring windows of a long context share. Default: 128, or half
            of --max-seq-len.
        max_seq_len: Tokens of a window, question included. Default: 384, or the model's positions.
    """

    max_answer_len: Count = 15
    handle_impossible_answer: bool = False
    doc_stride: Whole | None = None
    max_seq_len: Count | None = None


class Answer(HeadTask):
    """Answers in contexts."""

    name = "answer"
    options = AnswerOptions
    columns = columns(
        answer="text",
        start="integer",
        end="integer",
        score="float",
        answers=[{"text": "text", "start": "integer", "end": "integer", "score": "float"}],
    )
    answer = "answer"

    def __init__(self, engine: OpenBundle, options: AnswerOptions, layout: Layout) -> None:
        super().__init__(engine, options, layout)
        self.long_rows = "error"
        if (options.top or 1) == 1:
            self.columns = {name: self.columns[name] for name in self.columns if name != "answers"}

    @classmethod
    def check(cls, options: Any) -> None:
        if options.pair is None:
            raise UsageError(
                "task answer reads questions and contexts; name the column of the contexts with ",
                Option("pair"),
            )
        if options.long_rows is not None:
            raise UsageError(Option("long_rows"), f" {NO_CUTS}")

    def same(self, row: Any, again: Any, bounds: Bounds) -> Difference:
        """Compares the best answers; others may change places where their scores are close."""
        best, other = row.answers[0], again.answers[0]
        # A product of two probabilities, summed over spans of one text.
        most = 2 * bounds.score * max(1.0, other.score)
        if not abs(best.score - other.score) <= most:
            return f"a score {abs(best.score - other.score):.1e} away, at most {most:.1e}", 0
        return "", int((best.start, best.end) != (other.start, other.end))


NO_CUTS = "has no effect on task answer, which reads long contexts in windows; leave it out"


def answer(
    engine: OpenBundle,
    pairs: Iterable[Pair],
    *,
    top: int | None = None,
    max_answer_len: int = 15,
    handle_impossible_answer: bool = False,
    doc_stride: int | None = None,
    max_seq_len: int | None = None,
    long_rows: LongRows = "error",
) -> Results[AnsweredResult]:
    """Answers questions with spans of their contexts, in order and in bounded memory.

    Args:
        engine: Engine of a bundle with a head that marks answers.
        pairs: Any number of questions with their contexts; an error becomes the result of its row.
        top: Answers of a row at most. Default: 1.
        max_answer_len: Longest answer in tokens; words at its ends are completed.
        handle_impossible_answer: Whether "no answer" is an answer: a span without text, with the
            least score that any window gives it.
        doc_stride: Tokens of a context that neighbouring windows share. Default: 128, but at most
            half of `max_seq_len`.
        max_seq_len: Tokens of a window, question and special tokens included. Default: 384, or
            fewer where the model or its tokenizer reads fewer.
        long_rows: "error": a question that leaves no room for its context has no answer.

    Raises:
        UsageError: The bundle has no such head, its tokenizer does not tell the places of tokens,
            or a window is longer than the model's positions.
    """
    if long_rows != "error":
        raise UsageError(Option("long_rows"), f" {NO_CUTS}")
    call = _Call(
        engine,
        AnswerOptions(
            top=top,
            max_answer_len=max_answer_len,
            handle_impossible_answer=handle_impossible_answer,
            doc_stride=doc_stride,
            max_seq_len=max_seq_len,
        ),
    )
    windows = call.windows(checked_pairs(pairs, both=True))
    found = engine.map(windows, call.prepare, call.compute, engine.encoders, key=_key)
    return Results(call.joined(found))


@dataclass(frozen=True, kw_only=True)
class _Window(EncodedRow):
    """Question and a part of its context as token ids, or an error.

    Attributes:
        pair: Both texts.
        number: Its place among the windows of the context.
        first: Place of the first token of the context among its tokens.
        places: Where the tokens of the context stand.
    """

    text: str = ""
    pair: tuple[Any, Any]
    number: int = 0
    first: int = 0
    places: Sequence[Place] = ()


def _key(window: _Window) -> Any:
    return window.pair, window.number


@dataclass(frozen=True)
class _Found(RowResult):
    """Spans of a window, best first, and the probability that it has no answer."""

    spans: tuple[Span, ...] = ()
    unanswered: float = 0.0

    @property
    def size(self) -> int:
        return self.source_tokens + 4 * len(self.spans)

    def _answer(self, n_best: int) -> dict[str, Any]:
        raise NotImplementedError


class _Call(EncoderCall):
    task, kind = Answer.name, _Found

    def __init__(self, engine: OpenBundle, options: AnswerOptions) -> None:
        super().__init__(engine, options)
        self.top, self.longest_answer = options.top or 1, options.max_answer_len
        self.or_none = options.handle_impossible_answer
        self.tokenizer = engine.bundle.tokenizer
        self.tokenizer.places("a")  # refuses tokenizers that do not tell places
        if not self.special.joins_pairs:
            raise UsageError("the bundle's tokenizer joins no pairs of texts, as task answer needs")
        most = self.preprocessor.positions
        window, shared = options.max_seq_len, options.doc_stride
        if window is None:
            window = min(LONGEST_WINDOW, most, self.special.longest or most)
        shared = min(window // 2, SHARED) if shared is None else shared
        require(window <= most, "max_seq_len", f"at most {most}, the model's positions", window)
        require(shared < window, "doc_stride", f"less than the window of {window} tokens", shared)
        self.window, self.shared = window, shared
        # The number of windows and the whole pair of each row whose results are to come.
        self.rows: deque[tuple[int, tuple[Any, Any]]] = deque()

    def windows(self, pairs: Iterator[tuple[Any, Any]]) -> Iterator[_Window]:
        """Yields the windows of each row, at least one."""
        for pair in pairs:
            found = self._windows(pair)
            windows = [_Window(pair=pair, error=found)] if isinstance(found, RowError) else found
            self.rows.append((len(windows), pair))
            yield from windows

    def _windows(self, pair: tuple[Any, Any]) -> list[_Window] | RowError:
        for side in pair:
            if isinstance(side, RowError):
                return side
        if not all(side.strip() for side in pair):
            return EMPTY
        question, context = pair
        try:
            asked, ids = self.tokenizer.encode_batch([question, context])
            places = self.tokenizer.places(context)
        except TextError as error:
            return RowError("tokenizer", str(error))
        if not ids:
            return EMPTY
        if self.preprocessor.separator in (*asked, *ids):
            return DIVIDED
        special = self.special
        begin = [*special.before, *asked, *special.between]
        room = self.window - len(begin) - len(special.after)
        if len(ids) > room <= self.shared:
            told = f"the question leaves {max(0, room)} of {self.window} tokens for the context, "
            told += f"expected more than doc_stride ({self.shared}); shorten it, or change "
            return RowError("too-long", f"{told}doc_stride or max_seq_len")
        return [
            _Window(
                ids=(*begin, *ids[first:last], *special.after),
                pair=pair,
                number=number,
                first=len(begin),
                places=places[first:last],
            )
            for number, (first, last) in enumerate(
                parts(len(ids), room, self.shared, from_end=special.keeps_end)
            )
        ]

    def encoded(self, rows: list[_Window]) -> list[_Window]:
        return rows

    def part(self, row: _Window, found: Scores) -> Scores:
        return found[: len(row.ids)]

    def answer(self, row: _Window, scores: Scores) -> Mapping[str, Any]:
        """Returns the likeliest spans of a window, with characters of whole words."""
        # The first token, which is in no span, stands for "no answer".
        kept = [*range(min(1, len(self.special.before))), *range(row.first, len(row.ids))]
        kept = kept[: len(kept) - len(self.special.after)]
        start, end = probabilities(scores[kept].T, "softmax")
        nothing = float(start[0] * end[0]) if self.special.before else 0.0
        skip = len(kept) - len(row.places)
        best = best_spans(start[skip:], end[skip:], self.longest_answer, 2 * self.top + 10)
        text, words = row.pair[1], _words(row.places)
        spans = []
        for first, last, score in best:
            begin, stop = words[first][0], words[last][1]
            spans.append(Span(text[begin:stop], begin, stop, score))
        return {"spans": tuple(spans), "unanswered": nothing}

    def joined(self, results: Iterator[_Found]) -> Iterator[AnsweredResult]:
        """Joins the results of windows to results of rows."""
        with contextlib.closing(results):  # type: ignore[type-var]  # a generator
            for first in results:
                count, (question, context) = self.rows.popleft()
                found = [first, *islice(results, count - 1)]
                text = question if isinstance(question, str) else ""
                error = next((each.error for each in found if each.error is not None), None)
                answers = () if error is not None else self._best(found)
                own: dict[str, Any] = {"pair": context, "answers": answers, "error": error}
                yield AnsweredResult(text, **own, **combined(found))

    def _best(self, found: Sequence[_Found]) -> tuple[Span, ...]:
        """Returns the likeliest answers; spans of one text in any case are one answer."""
        answers: dict[str, Span] = {}
        for span in (span for window in found for span in window.spans):
            known = answers.get(span.text.lower())
            if known is not None:
                span = Span(known.text, known.start, known.end, known.score + span.score)
            answers[span.text.lower()] = span
        listed = [*answers.values()]
        if self.or_none or not listed:
            listed.append(Span("", 0, 0, min(window.unanswered for window in found)))
        return tuple(sorted(listed, key=lambda one: -one.score)[: self.top])


def parts(length: int, room: int, shared: int, *, from_end: bool) -> list[tuple[int, int]]:
    """Returns first and last token, exclusive, of each window over a text.

    As `Encoding::truncate` of Hugging Face's tokenizers.
    """
    found = [(0, min(room, length))]
    while found[-1][1] < length:
        first = found[-1][0] + room - shared
        found.append((first, min(first + room, length)))
    return [(length - last, length - first) for first, last in found] if from_end else found


def best_spans(
    start: Scores, end: Scores, longest: int, count: int
) -> list[tuple[int, int, float]]:
    """Returns first and last token and probability of at most `count` likeliest spans, best first.

    Spans of at most `longest` tokens are drawn from the probabilities `[tokens]` that one begins
    and that it ends at a token.
    """
    import numpy as np

    longest = min(longest, len(start))
    ends = np.lib.stride_tricks.sliding_window_view(np.pad(end, (0, longest - 1)), longest)
    scores = (start[:, None] * ends).ravel()
    count = min(count, len(scores))
    least = np.partition(scores, -count)[-count]
    kept = np.flatnonzero((scores >= least) & (scores > 0))  # all ties, so that order decides
    kept = kept[np.argsort(-scores[kept], kind="stable")][:count]
    first, more = np.divmod(kept, longest)
    return [*zip(first.tolist(), (first + more).tolist(), scores[kept].tolist(), strict=True)]


def _words(places: Sequence[Place]) -> list[tuple[int, int]]:
    """Returns the characters of the word of each token, as far as the window has it."""
    ends: dict[int, tuple[int, int]] = {}
    for place in places:
        if place.word is not None:
            ends[place.word] = ends.get(place.word, place)[0], place.end
    return [place[:2] if place.word is None else ends[place.word] for place in places]
