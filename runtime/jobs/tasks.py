"""The tasks of a job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from operator import attrgetter
from typing import Any

from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.engine.engine import Engine
from transferry.runtime.engine.preprocess import InLanguages, LongRows
from transferry.runtime.engine.prompts import Prompt
from transferry.runtime.engine.result import RowResult
from transferry.runtime.engine.tasks.classify import head_of
from transferry.runtime.engine.tasks.embed import default_long_rows, embedding_width
from transferry.runtime.engine.tasks.score import ScoreResult
from transferry.runtime.errors import UsageError
from transferry.runtime.jobs.formats.rows import InputRow, RowReader
from transferry.runtime.jobs.job_options import JobOptions, token_or_text
from transferry.runtime.jobs.summary import Tally

# Tasks of heads.
HEADS = ("classify", "rank", "tag")


@dataclass(frozen=True)
class Task:
    """A task with its options, ready to run on any engine of the same bundle.

    Attributes:
        run: Yields the result of each row, in order; takes an engine, what `given` returns for the
            rows, and the number of the first row.
        settings: Options of the task that decide its results.
        generation: How to generate; None for tasks that do not.
        width: Length of the vectors of embed; else 0.
        given: What a row is to the engine: its text, a prompt, or a pair of texts.
        long_rows: What becomes of a row that is too long.
    """

    run: Callable[[Engine, Iterator[Any], int], Iterator[Any]]
    settings: dict[str, Any]
    generation: GenerationOptions | None = None
    width: int = 0
    given: Callable[[InputRow], Any] = attrgetter("text")
    long_rows: LongRows = "error"

    @property
    def n_best(self) -> int:
        """Most hypotheses of a row."""
        return self.generation.n_best if self.generation else 1

    @classmethod
    def of(cls, engine: Engine, options: JobOptions, reader: RowReader) -> Task:
        """Returns the task of a job over the rows of a reader.

        Raises:
            UsageError: The bundle cannot do it.
            ParityError: A required certificate does not cover the search.
        """
        if reader.task not in (None, options.task):
            raise UsageError(
                f"{reader.path} asks for task {reader.task}, not {options.task}; add --task "
                f"{reader.task}"
            )
        long_rows = options.long_rows or "error"
        chosen: dict[str, Any]
        spoken: dict[str, Any] = {}
        for name in ("source_language", "target_language"):
            spoken |= {key: getattr(options, key) for key in (name, f"{name}_column")}
            if (language := getattr(options, name)) is not None:
                engine.bundle.tokenizer.special.language(language)
            elif (column := getattr(options, f"{name}_column")) is not None:
                engine.bundle.tokenizer.special.require_languages(f"the column {column}")
        if options.task == "generate":
            prefix = tuple(engine.bundle.tokenizer.encode_target(options.prefix))
            asked = dict(reader.generation)
            if "max_length" in asked:  # a limit for the answer, which may be generous
                asked["max_length"] = min(asked["max_length"], engine.max_positions)
            chosen = {**asked, **options.generation, "prefix": prefix}
            if options.suppress:
                chosen["suppress"] = tuple(map(token_or_text, options.suppress))
            generation = engine.options(**chosen)
            engine.require_covered(generation)
            kind = options.prompt_kind
            if kind in ("turn", "messages") or reader.has_chat:
                engine.bundle.tokenizer.require_chat()
            prompts = ("chat", "system", "messages", "prompt_ids")
            return cls(
                lambda engine, texts, first: engine.generate(
                    texts, generation, first_row=first, long_rows=long_rows
                ),
                asdict(generation) | {name: getattr(options, name) for name in prompts} | spoken,
                generation,
                given=partial(_source, options),
                long_rows=long_rows,
            )
        if options.task == "score":
            if engine.decoder.has_encoder is (options.target is None):
                remedy = "name the texts to score with" if options.target is None else "leave out"
                architecture = engine.bundle.manifest.architecture
                raise UsageError(
                    f"{engine.bundle.folder}: the model is {architecture}; {remedy} --target"
                )
            return cls(
                lambda engine, pairs, first: engine.score(pairs, long_rows=long_rows),
                spoken,
                given=lambda row: (_source(options, row), row.target),
                long_rows=long_rows,
            )
        _ = engine.encoder  # refuses other architectures before anything is opened
        if options.task in HEADS:
            head_of(engine, options.task)
            long_rows = options.long_rows or default_long_rows(engine)
            joined = {"aggregation": options.aggregation} if options.task == "tag" else {}
            return cls(
                lambda engine, rows, first: getattr(engine, options.task)(
                    rows, long_rows=long_rows, **joined
                ),
                {"pair": options.pair, **joined},
                given=attrgetter("text") if options.pair is None else attrgetter("text", "target"),
                long_rows=long_rows,
            )
        chosen = {"mask": options.mask, "top": options.top}
        width = 0
        if options.task == "embed":
            width = embedding_width(engine, options.pooling)
            long_rows = options.long_rows or default_long_rows(engine)
            names = ("pooling", "normalise", "prompt")
            chosen = {name: getattr(options, name) for name in names}
        return cls(
            lambda engine, texts, first: getattr(engine, options.task.replace("-", "_"))(
                texts, long_rows=long_rows, **chosen
            ),
            chosen,
            width=width,
            long_rows=long_rows,
        )


def _source(options: JobOptions, row: InputRow) -> Any:
    """Returns what the text of a row is to the engine."""
    if not isinstance(row.text, str):
        return row.text
    if (kind := row.kind or options.prompt_kind) is not None:
        return Prompt(row.text, kind, options.system)
    source, target = row.languages
    source, target = source or options.source_language, target or options.target_language
    return row.text if source is target is None else InLanguages(row.text, source, target)


def tally_of(row: InputRow, result: RowResult, seconds: float) -> Tally:
    """Counts one row."""
    error = result.error
    return Tally(
        rows=1,
        errors={error.kind: 1} if error else {},
        truncated=int(result.truncated),
        repeated=int(result.repeated),
        shared_prompt_tokens=result.shared_prompt_tokens,
        source_tokens=result.source_tokens,
        target_tokens=result.target_tokens,
        log_probability=result.total if isinstance(result, ScoreResult) else 0.0,
        seconds=seconds,
        first_error=f"row {row.number + 1}: {error.message}" if error else "",
    )
