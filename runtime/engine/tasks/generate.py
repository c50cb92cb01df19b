"""Generation: an answer to each text, chat or list of token ids."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.decoding.hypothesis import Hypothesis
from transferry.runtime.decoding.logits_processors import beginning
from transferry.runtime.decoding.search import search_stream
from transferry.runtime.decoding.shared_prompts import copied_tokens
from transferry.runtime.decoding.stop_strings import StopStrings
from transferry.runtime.decoding.strategy import Request
from transferry.runtime.engine.open_bundle import OpenBundle
from transferry.runtime.engine.preprocess import (
    EncodedRow,
    InLanguages,
    LongRows,
    check_long_rows,
    in_languages,
)
from transferry.runtime.engine.prompts import Encodable, Source, checked_prompts
from transferry.runtime.engine.result import (
    NOT_FINITE,
    GenerationResult,
    Results,
    RowError,
    TextHypothesis,
    joined,
)
from transferry.runtime.engine.worker_pool import Take, WorkItem
from transferry.runtime.errors import UsageError
from transferry.runtime.ort.open_model import ServedDecoder
from transferry.runtime.settings import Whole64, check_value

# Difference of the row ids of neighbouring pieces of a row: larger than any number of rows.
PIECE = 1 << 40


def generate(
    engine: OpenBundle,
    texts: Iterable[Source],
    options: GenerationOptions | None = None,
    *,
    first_row: int = 0,
    long_rows: LongRows = "error",
    source_language: str | None = None,
    target_language: str | None = None,
    **named: Any,
) -> Results[GenerationResult]:
    """Generates an answer to each text, in order; reads ahead by two windows at most.

    An answer depends on its text and the options, and with sampling on the row's number; never
    on other rows or on batches.

    Args:
        engine: Engine of a bundle that generates.
        texts: Any number of texts; an error becomes the result of its row. Instead of a text, a
            list of messages with role and content each, which the bundle's chat template
            renders, or a list of token ids, which the model reads as they are; or
            `InLanguages`, a text with languages of its own.
        options: Generation options. Default: those of the bundle.
        first_row: Number of the first row; a row's number seeds its samples.
        long_rows: Treatment of texts longer than the model's positions: "error"; "truncate" to
            answer their beginning; or "split" to answer them in pieces, as many sentences each
            as fit, and join the answers. The options apply to each piece.
        source_language: Language of the texts, by its name in the bundle's tokenizer. Default:
            the bundle's own.
        target_language: Language of the answers, likewise.
        **named: Fields of GenerationOptions to change, such as `beam=4`; see `options`.

    Raises:
        UsageError: A field is unknown or out of range, `max_length` exceeds the model's
            positions, rows cannot be split here, there is no such language, or there are
            messages and no chat template or no jinja2.
        ParityError: A certificate is required, and none covers such a search.
    """
    options = engine.options(options, **named)
    languages = source_language, target_language, engine.bundle.tokenizer.special
    prompts = in_languages(checked_prompts(texts), *languages)
    check_value("first_row", first_row, Whole64)
    engine.require_covered(options)
    if options.max_length > engine.max_positions:
        raise UsageError(
            f"max_length is {options.max_length}, but the model has {engine.max_positions} "
            "positions; lower max_length"
        )
    conflict = "" if engine.decoder.has_encoder else "a decoder-only bundle"
    check_long_rows(long_rows, f"n_best={options.n_best}" if options.n_best > 1 else conflict)
    task = _Generate(engine, options, long_rows)
    workers = [partial(task.work, decoder) for decoder in engine.decoders] * engine.replicas
    slots = max(1, engine.batches.rows // max(options.beam, options.n_best))
    # Samples depend on the row's number too, and a row that is split has several answers.
    key = None if options.sample or long_rows == "split" else itemgetter(1)
    results = engine.answers(enumerate(prompts, first_row), task.prepare, workers, slots, key)
    if long_rows == "split":
        results = joined(results, task.rows, options.length_penalty)
    return Results(results)


class _Generate:
    """A call of `generate`.

    Attributes:
        rows: Where rows are split: text and number of pieces of each row, see `joined`.
    """

    def __init__(self, engine: OpenBundle, options: GenerationOptions, long_rows: LongRows) -> None:
        self.engine, self.options, self.long_rows = engine, options, long_rows
        self.rows: deque[tuple[str, int]] = deque()

    def prepare(
        self, texts: list[tuple[int, Encodable]]
    ) -> list[WorkItem[EncodedRow] | GenerationResult]:
        prepared: list[WorkItem[EncodedRow] | GenerationResult] = []
        # Without sampling, equal texts have equal answers.
        known: dict[Encodable, list[WorkItem[EncodedRow] | GenerationResult]] = {}
        rows = self.engine.encode([text for _, text in texts], self.options, self.long_rows)
        for (number, text), row in zip(texts, rows, strict=True):
            if self.options.sample or text not in known:
                known[text] = [self._item(piece) for piece in self._pieces(number, text, row)]
            prepared += known[text]
            if self.long_rows == "split":
                self.rows.append((row.text, len(known[text])))
        return prepared

    def _pieces(self, number: int, text: Encodable, row: EncodedRow) -> list[EncodedRow]:
        """Returns a row with its row id, or its pieces with one each, so that samples differ."""
        pieces = [row]
        too_long = row.error is not None and row.error.kind == "too-long"
        if self.long_rows == "split" and too_long and isinstance(text, str | InLanguages):
            texts = self.engine.preprocessor.pieces(row.text)
            whole = text if isinstance(text, InLanguages) else InLanguages(text)
            pieces = self.engine.encode([replace(whole, text=each) for each in texts], self.options)
        return [replace(piece, row_id=number + i * PIECE) for i, piece in enumerate(pieces)]

    def _item(self, row: EncodedRow) -> WorkItem[EncodedRow] | GenerationResult:
        options, error, tokens = self.options, row.error, len(row.ids)
        request = self._request(row)
        prefix, room = len(beginning(options, request)), request.max_length
        longest = options.max_total_length
        if error is None and longest and not self.engine.decoder.has_encoder and tokens >= longest:
            error = RowError(
                "too-long",
                f"{tokens} tokens are not less than max_total_length={longest}; raise it, or "
                "shorten the text",
            )
        if error is None and prefix > room:
            error = RowError(
                "too-long",
                f"{tokens} tokens leave room for {room} in the model's "
                f"{self.engine.max_positions} positions, but the prefix has {prefix}; shorten "
                "either",
            )
        if error is not None:
            return GenerationResult(row.text, row.tokens, error=error)
        self.engine.require_covered(self.engine.settings_of(row, options)[0])
        return WorkItem(row, tokens)

    def _request(self, row: EncodedRow, key: Any = None) -> Request[Any]:
        """Returns the request for a row, with its language where that is the first token."""
        options = self.options
        room, first = self.engine.room(options, len(row.ids)), row.target
        begins = self.engine.bundle.tokenizer.special.begins_with_language
        given = (None, first) if not begins else (first, None)
        return Request(key, row.ids, room, options.prefix, row.row_id, *given)

    def work(
        self, decoder: ServedDecoder, take: Take[EncodedRow], slots: int
    ) -> Iterator[tuple[WorkItem[EncodedRow], GenerationResult]]:
        options, special = self.options, self.engine.bundle.tokenizer.special

        shared: dict[WorkItem[EncodedRow], int] = {}

        def requests(most: int) -> list[Request[WorkItem[EncodedRow]]]:
            items = take(most)  # one batch
            if decoder.shares_prompts and items:
                copied = copied_tokens([item.row.ids for item in items])
                shared.update(zip(items, copied, strict=True))
            return [self._request(item.row, item) for item in items]

        decode = self.engine.bundle.tokenizer.decode
        stream = search_stream(decoder, requests, options, special, slots=slots, decode=decode)
        for item, found in stream:
            result = self._result(item.row, found)
            yield item, replace(result, shared_prompt_tokens=shared.pop(item, 0))

    def _result(self, row: EncodedRow, found: Sequence[Hypothesis]) -> GenerationResult:
        decode = self.engine.bundle.tokenizer.decode
        stops = StopStrings(self.options.stop, decode)
        hypotheses = tuple(
            TextHypothesis(**vars(one), text=stops.cut(decode(one.tokens)))
            for one in found
            if one.finish_reason != "error"
        )
        error = None if hypotheses else NOT_FINITE
        return GenerationResult(
            row.text, len(row.ids), hypotheses, error=error, truncated=row.truncated
        )
