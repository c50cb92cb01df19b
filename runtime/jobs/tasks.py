"""The tasks of a job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from operator import attrgetter
from typing import Any

from transferry.runtime.decoding.options import GenerationOptions
from transferry.runtime.engine.classify import classify, head_of, rank, tag
from transferry.runtime.engine.embed import default_long_rows, embed, embedding_width
from transferry.runtime.engine.engine import Engine
from transferry.runtime.engine.fill_mask import fill_masks
from transferry.runtime.engine.preprocess import InLanguages, LongRows
from transferry.runtime.engine.prompts import Prompt
from transferry.runtime.engine.result import RowResult
from transferry.runtime.engine.score import ScoreResult, score
from transferry.runtime.errors import UsageError
from transferry.runtime.jobs.options import JobOptions, TaskName, token_or_text
from transferry.runtime.jobs.rows import InputRow
from transferry.runtime.jobs.summary import Tally

HEADS: dict[TaskName, Callable[..., Iterator[RowResult]]] = {
    "classify": classify,
    "rank": rank,
    "tag": tag,
}


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
    def of(cls, engine: Engine, options: JobOptions) -> Task:
        """Returns the task of a job.

        Raises:
            UsageError: The bundle cannot do it.
            ParityError: A required certificate does not cover the search.
        """
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
            chosen = {**options.generation, "prefix": prefix}
            if options.suppress:
                chosen["suppress"] = tuple(map(token_or_text, options.suppress))
            generation = engine.options(**chosen)
            engine.require_covered(generation)
            kind = options.prompt_kind
            if kind in ("turn", "messages"):
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
                need = "needs --target" if options.target is None else "takes no --target"
                architecture = engine.bundle.manifest.architecture
                raise UsageError(f"{engine.bundle.folder} is {architecture} and {need}")
            return cls(
                lambda engine, pairs, first: score(engine, pairs, long_rows=long_rows),
                spoken,
                given=lambda row: (_source(options, row), row.target),
                long_rows=long_rows,
            )
        _ = engine.encoder  # refuses other architectures before anything is opened
        if options.task in HEADS:
            head_of(engine, options.task)
            long_rows = options.long_rows or default_long_rows(engine)
            of_head = HEADS[options.task]
            joined = {"aggregation": options.aggregation} if options.task == "tag" else {}
            return cls(
                lambda engine, rows, first: of_head(engine, rows, long_rows=long_rows, **joined),
                {"pair": options.pair, **joined},
                given=attrgetter("text") if options.pair is None else attrgetter("text", "target"),
                long_rows=long_rows,
            )
        compute: Callable[..., Iterator[RowResult]] = fill_masks
        chosen = {"mask": options.mask, "top": options.top}
        width = 0
        if options.task == "embed":
            compute, width = embed, embedding_width(engine, options.pooling)
            long_rows = options.long_rows or default_long_rows(engine)
            names = ("pooling", "normalise", "prompt")
            chosen = {name: getattr(options, name) for name in names}
        return cls(
            lambda engine, texts, first: compute(engine, texts, long_rows=long_rows, **chosen),
            chosen,
            width=width,
            long_rows=long_rows,
        )


def _source(options: JobOptions, row: InputRow) -> Any:
    """Returns what the text of a row is to the engine."""
    if not isinstance(row.text, str):
        return row.text
    if options.prompt_kind is not None:
        return Prompt(row.text, options.prompt_kind, options.system)
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
        source_tokens=result.source_tokens,
        target_tokens=result.target_tokens,
        log_probability=result.total if isinstance(result, ScoreResult) else 0.0,
        seconds=seconds,
        first_error=f"row {row.number + 1}: {error.message}" if error else "",
    )
