"""Generation: an answer to each text, chat or list of token ids."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import starmap
from typing import TYPE_CHECKING, Any

from transferry.runtime.decoding.generation_options import GenerationOptions, check_generation
from transferry.runtime.decoding.hypothesis import Hypothesis
from transferry.runtime.engine.own_options import OwnOptions, batch_options
from transferry.runtime.engine.pieces import PIECE, Whole, cut_lines, in_lines, joined
from transferry.runtime.engine.preprocess import (
    EncodedRow,
    InLanguages,
    LongRows,
    WorkItem,
    check_long_rows,
    in_languages,
)
from transferry.runtime.engine.prompts import (
    Asked,
    Encodable,
    Parts,
    Prompt,
    PromptKind,
    Source,
    checked_prompts,
    deciding_part,
    template_variables,
)
from transferry.runtime.engine.result import NOT_FINITE, Results, RowError, RowResult
from transferry.runtime.engine.tasks.task import (
    LINES,
    Bounds,
    Difference,
    Kind,
    LanguageOptions,
    Layout,
    Page,
    Task,
    columns,
)
from transferry.runtime.errors import Option, UsageError, joined_options
from transferry.runtime.settings import Whole64, check_value

if TYPE_CHECKING:
    from transferry.runtime.decoding.strategy import Request
    from transferry.runtime.engine.open_bundle import OpenBundle
    from transferry.runtime.engine.worker_pool import Take
    from transferry.runtime.ort.open_model import ServedDecoder


@dataclass(frozen=True)
class TextHypothesis(Hypothesis):
    """A hypothesis with its tokens as text."""

    text: str

    def record(self) -> dict[str, Any]:
        """Returns text, score and finish reason; None for no score, since JSON has no NaN."""
        score = self.score if math.isfinite(self.score) else None
        return {"text": self.text, "score": score, "finish_reason": self.finish_reason}


@dataclass(frozen=True)
class GenerationResult(RowResult):
    """Generated texts for one input row.

    Attributes:
        hypotheses: Best first: `n_best`, or fewer if the search found fewer; none on an error.
        text: Text of the best hypothesis; empty on an error.
        score: Its score; NaN on an error, and where none was computed.
    """

    hypotheses: tuple[TextHypothesis, ...] = ()
    text: str = field(init=False, default="", compare=False, repr=False)
    score: float = field(init=False, default=math.nan, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("text", "score") if self.hypotheses else ():
            object.__setattr__(self, name, getattr(self.hypotheses[0], name))

    @property
    def target_tokens(self) -> int:
        """Tokens of the best hypothesis, the end token excluded."""
        return len(self.hypotheses[0].tokens) if self.hypotheses else 0

    @property
    def size(self) -> int:
        return self.source_tokens + sum(len(each.tokens) for each in self.hypotheses)

    def _answer(self, n_best: int) -> dict[str, Any]:
        best: dict[str, Any] = {"text": "", "finish_reason": "error"}
        if self.hypotheses:
            best = {**self.hypotheses[0].record(), "target_tokens": self.target_tokens}
        answer = {**best, **self._error(), "source_tokens": self.source_tokens}
        if n_best > 1:
            answer["n_best"] = [hypothesis.record() for hypothesis in self.hypotheses]
        return answer


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(LanguageOptions):
    """Options of generate.

    Attributes:
        generation: Fields of GenerationOptions that replace the bundle's defaults, or all of them
            as GenerationOptions.
        prefix: Text that every output begins with.
        chat: Render each row as a user's turn with the bundle's chat template.
        system: System message before each turn of --chat.
        chat_template_kwargs: Further variables of the chat template, as a JSON object, such as
            '{"enable_thinking": false}'.
        messages: JSONL column with messages (role and content) to render with the chat template.
        prompt_ids: JSONL column with token ids, read without changes.
        suppress: Text that no output holds, at the beginning of a word or within one; an unquoted
            number is a token id.
    """

    generation: Mapping[str, Any] = field(default_factory=dict)
    prefix: str = ""
    chat: bool = False
    system: str | None = None
    chat_template_kwargs: str | None = None
    messages: str | None = None
    prompt_ids: str | None = None
    suppress: tuple[str, ...] = ()

    @property
    def prompt_kind(self) -> PromptKind | None:
        """Kind of the rows; None for plain texts."""
        if self.chat:
            return "turn"
        if self.messages is not None:
            return "messages"
        return None if self.prompt_ids is None else "ids"


# Columns of a hypothesis.
BEST: Mapping[str, Kind] = {"text": "text", "score": "float", "finish_reason": "text"}


class Generate(Task):
    """Answers to texts, chats and token ids."""

    name = "generate"
    options = GenerateOptions
    columns = columns(**BEST, target_tokens="integer", source_tokens="integer", n_best=[BEST])
    formats = (*LINES, "openai")
    default_format = "text"
    page = Page("Run", example="A sentence or a beginning")
    elsewhere = frozenset({"long_rows", "generation", "prefix", "suppress"})

    def __init__(self, engine: OpenBundle, options: GenerateOptions, layout: Layout) -> None:
        super().__init__(engine, options, layout)
        self.tokenizer = tokenizer = engine.bundle.tokenizer
        options.require(tokenizer)
        chosen = dict(options.generation)
        if options.suppress:
            chosen["suppress"] = tuple(map(token_or_text, options.suppress))
        if options.prefix:
            chosen["prefix"] = tuple(tokenizer.encode_target(options.prefix))
        self.generation = engine.options(**chosen)
        engine.require_covered(self.generation)
        if options.prompt_kind in ("turn", "messages") or layout.has_chat:
            tokenizer.require_chat()
        elif options.chat_template_kwargs is not None:
            told = Option("chat_template_kwargs"), " has no effect without chats; add "
            raise UsageError(*told, Option("chat"), " or ", Option("messages"))
        self.variables = json.loads(template_variables(options.chat_template_kwargs or {}) or "{}")
        self.chosen, self.settings = options, asdict(self.generation) | self.settings
        self._own = OwnOptions(engine, self.generation, options.generation)

    @classmethod
    def check(cls, options: Any) -> None:
        check_generation(options.generation)  # a conflict with the bundle's defaults is found later
        named = [
            name
            for name in ("column", "messages", "prompt_ids")
            if getattr(options, name) not in (None, ())
        ]
        named += ["chat"] * options.chat
        kinds = [name for name in named if name != "column"]
        if len(kinds) > 1 or (kinds and "column" in named and not options.chat):
            raise UsageError(
                *joined_options(named), " exclude each other, since each names the rows; choose one"
            )
        if options.system is not None and not options.chat:
            told = Option("system"), " has no effect without chat; add ", Option("chat")
            raise UsageError(*told)
        if options.prompt_kind in ("turn", "messages") and options.long_rows not in (None, "error"):
            raise UsageError(
                *(Option("long_rows"), f"={options.long_rows} and ", Option(kinds[0])),
                " exclude each other, since a chat ends with the turn to be answered; choose ",
                *(Option("long_rows"), "=error"),
            )
        spoken = [name for name, value in options.spoken.items() if value is not None]
        if spoken and kinds:
            raise UsageError(
                Option(spoken[0]),
                " has no effect on chats and token ids, only on plain texts; leave it out",
            )

    def run(self, engine: Any, rows: Iterator[Any], first: int) -> Iterator[Any]:
        long_rows = self.long_rows
        found: Iterator[Any] = engine.generate(
            rows, self.generation, first_row=first, long_rows=long_rows
        )
        return found

    def given(self, row: Any) -> Any:
        request = row.request
        if request is None or not isinstance(row.text, str):
            return self._source(row, self.chosen.prompt_kind)
        options = self._own(request.settings)
        if isinstance(options, RowError):
            return options
        kind = request.kind or self.chosen.prompt_kind
        if kind == "messages" and self.tokenizer.chat is None:
            return RowError("prompt", "the bundle has no chat template; ask /v1/completions")
        rows = (replace(row, text=each) for each in request.inputs)
        sources = [self._source(each, kind, request.variables) for each in rows]
        # Samples of the inputs of a row differ.
        asked = [Asked(each, options, row.number + i * PIECE) for i, each in enumerate(sources)]
        return asked[0] if len(asked) == 1 else Parts(tuple(asked))

    def key(self, given: Any) -> Any:
        return deciding_part(given, self.generation)

    def _source(self, row: Any, kind: PromptKind | None, own: Any = None) -> Any:
        if kind is None or not isinstance(row.text, str):
            return self.chosen.text_of(row)
        variables = template_variables({**(own or {}), **self.variables})
        return Prompt(row.text, kind, self.chosen.system, variables)

    def same_row(self, row: Any, again: Any, bounds: Bounds, given: Any, number: int) -> Difference:
        """Compares tokens and scores; other tokens may be a near tie."""
        options = self.generation
        assert options is not None
        if isinstance(asked := given, Asked):
            options, given, number = asked.options or options, asked.source, asked.row_id
        if [one.tokens for one in row.hypotheses] == [one.tokens for one in again.hypotheses]:
            for one, other in zip(row.hypotheses, again.hypotheses, strict=True):
                length = len(one.tokens) + 1
                allowed = length ** (1 - options.length_penalty) * bounds.log_probability
                if options.scores and not abs(one.score - other.score) <= allowed:
                    scores = f"score {one.score:.6f}, but {other.score:.6f}"
                    return f"{scores}, at most {allowed:.1e} apart", 0
            return "", 0
        served, reference = bounds.served, bounds.reference
        if served.splits_lines(options) and isinstance(given, str | InLanguages):
            lines, around = cut_lines(row.source)
            if any(around):
                return self._same_pieces(lines, bounds, asked, number)
        long_rows: LongRows = "truncate" if row.truncated else "error"
        (encoded,) = served.encoded([given], options, long_rows)
        if encoded.error is not None:
            return self._same_pieces(served.preprocessor.pieces(row.source), bounds, asked, number)
        from transferry.runtime.proof.divergence import Explainer

        settings, special = served.settings_of(encoded, options)
        explainer = Explainer(
            reference.decoder,
            served.decoder,
            reference.decoder,
            special,
            bounds.tolerance,
            served.fitted(settings, len(encoded.ids)),
        )
        divergence = explainer.explain(encoded.ids, again.hypotheses, row.hypotheses, number)
        if divergence.passes:
            return "", 1
        return f"{row.text!r}, but {again.text!r} ({divergence})", 0

    def _same_pieces(
        self, pieces: Sequence[str], bounds: Bounds, given: Any, number: int
    ) -> Difference:
        """Compares a row that was split piece by piece: the joined answers hide near ties."""
        tied = 0
        for place, text in enumerate(pieces):
            first = number + place * PIECE
            piece: Any = text
            source = given.source if isinstance(given, Asked) else given
            if isinstance(source, InLanguages):
                piece = replace(source, text=text)
            if isinstance(given, Asked):
                piece = replace(given, source=piece, row_id=first)
            (one,), (again,) = (
                self.run(engine, iter([piece]), first)
                for engine in (bounds.served, bounds.reference)
            )
            difference, ties = self.same_row(one, again, bounds, piece, first)
            if difference:
                return f"piece {place + 1}: {difference}", 0
            tied = max(tied, ties)
        return "", tied


def token_or_text(value: str) -> int | str:
    """Returns a number as a token id, and other text without the quotes around it."""
    if value.isdecimal() and value.isascii():
        return int(value[:12])  # more digits are no id either
    quoted = len(value) > 2 and value[0] == value[-1] == '"'
    return value[1:-1] if quoted else value


def generate(
    engine: OpenBundle,
    texts: Iterable[Source],
    options: GenerationOptions | None = None,
    *,
    first_row: int = 0,
    long_rows: LongRows = "error",
    source_language: str | None = None,
    target_language: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    **named: Any,
) -> Results[GenerationResult]:
    """Generates an answer to each text, in order; reads ahead by two windows at most.

    An answer depends on its text and the options, and with sampling on the row's number; never
    on other rows or on batches. The lines of a text are answered one by one (`split_lines`).

    Args:
        engine: Engine of a bundle that generates.
        texts: Any number of texts; an error becomes the result of its row. Instead of a text, a
            list of messages with role and content each, which the bundle's chat template
            renders, or a list of token ids, which the model reads as they are; or
            `InLanguages`, a text with languages of its own; or `Asked`, an input with options of
            its own.
        options: Generation options. Default: those of the bundle.
        first_row: Number of the first row; a row's number seeds its samples.
        long_rows: Treatment of texts longer than the model's positions: "error"; "truncate" to
            answer their beginning; or "split" to answer them in pieces, as many sentences each
            as fit, and join the answers. The options apply to each piece.
        source_language: Language of the texts, by its name in the bundle's tokenizer. Default:
            the bundle's own.
        target_language: Language of the answers, likewise.
        chat_template_kwargs: Further variables of the chat template, such as
            `{"enable_thinking": False}`.
        **named: Fields of GenerationOptions to change, such as `beam=4`; see `options`.

    Raises:
        UsageError: A field is unknown or out of range, `max_length` exceeds the model's
            positions, rows cannot be split here, there is no such language, or there are
            messages and no chat template or no jinja2.
        ParityError: A required certificate does not cover such a search.
    """
    options = engine.options(options, **named)
    languages = source_language, target_language, engine.bundle.tokenizer.special
    variables = template_variables({} if chat_template_kwargs is None else chat_template_kwargs)
    prompts = in_languages(checked_prompts(texts, variables), *languages)
    check_value("first_row", first_row, Whole64)
    engine.require_task(Generate.name)
    engine.require_covered(options)
    engine.require_positions(options)
    conflict = "" if engine.decoder.has_encoder else "a decoder-only bundle"
    check_long_rows(long_rows, f"n_best={options.n_best}" if options.n_best > 1 else conflict)
    task = _Generate(engine, options, long_rows)
    return engine.results(task.answers(starmap(task.asked, enumerate(prompts, first_row))), texts)


class _Generate:
    """A call of `generate`; `wholes` are the rows that do not fit and are split, see `joined`."""

    def __init__(self, engine: OpenBundle, options: GenerationOptions, long_rows: LongRows) -> None:
        self.engine, self.options, self.long_rows = engine, options, long_rows
        self.wholes: deque[Whole] = deque()

    def asked(self, number: int, text: Encodable | Asked) -> Asked:
        """Returns an input with its options and row id."""
        if not isinstance(text, Asked):
            return Asked(text, self.options, number)
        self.engine.require_positions(text.options or self.options)
        return replace(text, options=text.options or self.options)

    def answers(self, inputs: Iterable[Asked]) -> Iterator[GenerationResult]:
        """Answers inputs, in order."""
        engine, options, split = self.engine, self.options, self.long_rows == "split"
        lines: deque[Whole] = deque()
        if splits := engine.splits_lines(options):
            inputs = in_lines(inputs, lines)
        workers = [partial(self.work, decoder) for decoder in engine.decoders]
        # A row that is split has several answers.
        key = None if split else partial(deciding_part, options=options)
        results = engine.answers(inputs, self.prepare, workers, engine.batches.rows, key)
        if split:
            results = joined(results, self.wholes, options.length_penalty)
        return joined(results, lines, options.length_penalty) if splits else results

    def prepare(self, inputs: list[Asked]) -> list[WorkItem[EncodedRow] | GenerationResult]:
        prepared: list[WorkItem[EncodedRow] | GenerationResult] = []
        # Without sampling, equal texts have equal answers.
        known: dict[Any, list[WorkItem[EncodedRow] | GenerationResult]] = {}
        rows = self.engine.encoded([each.source for each in inputs], self.options, self.long_rows)
        for given, row in zip(inputs, rows, strict=True):
            key = deciding_part(given, self.options) or given
            if key not in known:
                known[key] = [self._item(piece) for piece in self._pieces(given, row)]
            prepared += known[key]
            if self.long_rows == "split":
                self.wholes.append(Whole(row.text, len(known[key])))
        return prepared

    def _pieces(self, given: Asked, row: EncodedRow) -> list[EncodedRow]:
        """Returns a row with its row id, or its pieces with one each, so that samples differ."""
        text, pieces = given.source, [row]
        too_long = row.error is not None and row.error.kind == "too-long"
        if self.long_rows == "split" and too_long and isinstance(text, str | InLanguages):
            texts = self.engine.preprocessor.pieces(row.text)
            whole = text if isinstance(text, InLanguages) else InLanguages(text)
            pieces = self.engine.encoded(
                [replace(whole, text=each) for each in texts], self.options
            )
        options = given.options or self.options
        return [
            replace(piece, row_id=given.row_id + i * PIECE, options=options)
            for i, piece in enumerate(pieces)
        ]

    def _item(self, row: EncodedRow) -> WorkItem[EncodedRow] | GenerationResult:
        from transferry.runtime.decoding.logits_processors import beginning

        options, error, tokens = row.options or self.options, row.error, len(row.ids)
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
        group = batch_options(options, self.engine.max_positions)
        return WorkItem(row, tokens, group, max(options.beam, options.n_best))

    def _request(self, row: EncodedRow, key: Any = None) -> Request[Any]:
        """Returns the request for a row, with its language where that is the first token."""
        from transferry.runtime.decoding.strategy import Request

        options = row.options or self.options
        room, first = self.engine.room(options, len(row.ids)), row.target
        begins = self.engine.bundle.tokenizer.special.begins_with_language
        bos_id, forced = (first, None) if begins else (None, first)
        return Request(key, row.ids, room, options.prefix, row.row_id, bos_id, forced, options.seed)

    def work(
        self, decoder: ServedDecoder, take: Take[EncodedRow], slots: int
    ) -> Iterator[tuple[WorkItem[EncodedRow], GenerationResult]]:
        from transferry.runtime.decoding.search import search_batch
        from transferry.runtime.decoding.shared_prompts import copied_tokens

        tokenizer = self.engine.bundle.tokenizer
        shared: dict[WorkItem[EncodedRow], int] = {}
        while items := take(slots):
            if decoder.shares_prompts:
                copied = copied_tokens([item.row.ids for item in items])
                shared.update(zip(items, copied, strict=True))
            limits = (item.row.options.max_length for item in items if item.row.options)
            options = batch_options(items[0].group, max(limits))
            batch = [self._request(item.row, item) for item in items]
            for item, found in search_batch(
                decoder, batch, options, tokenizer.special, decode=tokenizer.decode
            ):
                yield item, self._result(item.row, found, shared.pop(item, 0))

    def _result(
        self, row: EncodedRow, found: Sequence[Hypothesis], copied: int
    ) -> GenerationResult:
        from transferry.runtime.decoding.stop_strings import StopStrings

        decode = self.engine.bundle.tokenizer.decode
        stops = StopStrings((row.options or self.options).stop, decode)
        hypotheses = tuple(
            TextHypothesis(**vars(one), text=stops.cut(decode(one.tokens)))
            for one in found
            if one.finish_reason != "error"
        )
        error, around = None if hypotheses else NOT_FINITE, (row.text, len(row.ids), hypotheses)
        result = GenerationResult(*around, error=error, truncated=row.truncated)
        return replace(result, shared_prompt_tokens=copied) if copied else result
