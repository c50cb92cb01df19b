"""The tasks of a job: how rows are answered, and what is written of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from transferry.runtime.decoding.options import GenerationOptions
from transferry.runtime.engine.embed import EmbeddingResult, embed
from transferry.runtime.engine.engine import Engine
from transferry.runtime.engine.fill_mask import FilledMaskResult, fill_masks
from transferry.runtime.engine.result import GenerationResult, RowError
from transferry.runtime.engine.score import ScoreResult, score
from transferry.runtime.errors import UsageError
from transferry.runtime.jobs.options import JobOptions
from transferry.runtime.jobs.rows import SourceRow

Answer = GenerationResult | EmbeddingResult | FilledMaskResult | ScoreResult
# What an engine is given of a row.
Item = str | RowError | tuple[str | RowError, str | RowError | None]


@dataclass(frozen=True)
class Pair(SourceRow):
    """A row of two inputs.

    Attributes:
        target: The text of the other side, or why there is none.
    """

    target: str | RowError = ""


@dataclass(frozen=True)
class Answering:
    """How the rows of a job are answered.

    Attributes:
        ask: Answers items with an engine, in order, given the number of the first.
        settings: What the answers go by, as far as the task has a choice.
        generation: How it generates, if it does.
        width: How many numbers each answer is, if it is a vector.
    """

    ask: Callable[[Engine, Iterator[Any], int], Iterator[Any]]
    settings: dict[str, Any]
    generation: GenerationOptions | None = None
    width: int = 0

    @property
    def n_best(self) -> int:
        """How many answers a row may have."""
        return self.generation.n_best if self.generation else 1

    @classmethod
    def of(cls, engine: Engine, options: JobOptions) -> Answering:
        """Puts together what a task needs.

        Raises:
            UsageError: The task is not the bundle's.
        """
        if options.task == "generate":
            return cls._generate(engine, options)
        if options.task == "score":
            return cls._score(engine, options)
        _ = engine.encoder  # refuses another architecture before anything is opened
        chosen: dict[str, Any]
        long_rows = options.long_rows
        if options.task == "embed":
            chosen = {"pooling": options.pooling, "normalise": options.normalise}
            return cls(
                lambda engine, items, first: embed(engine, items, long_rows=long_rows, **chosen),
                chosen,
                width=int(engine.bundle.manifest.model["d_model"]),
            )
        chosen = {"mask": options.mask, "top": options.top}
        return cls(
            lambda engine, items, first: fill_masks(engine, items, long_rows=long_rows, **chosen),
            chosen,
        )

    @classmethod
    def _generate(cls, engine: Engine, options: JobOptions) -> Answering:
        prefix = tuple(engine.bundle.tokenizer.encode_target(options.prefix))
        chosen = replace(engine.default_options(), **options.generation, prefix=prefix)
        return cls(
            lambda engine, items, first: engine.generate(
                items, chosen, first_row=first, long_rows=options.long_rows
            ),
            asdict(chosen),
            chosen,
        )

    @classmethod
    def _score(cls, engine: Engine, options: JobOptions) -> Answering:
        if engine.decoder.has_encoder is (options.target is None):
            need = "needs --target" if options.target is None else "takes no --target"
            architecture = engine.bundle.manifest.architecture
            raise UsageError(f"{engine.bundle.folder} is {architecture} and {need}")
        long_rows = options.long_rows
        return cls(lambda engine, items, first: score(engine, items, long_rows=long_rows), {})


def item_of(row: SourceRow, task: str) -> Item:
    """Returns what an engine is given of a row."""
    if task != "score":
        return row.text
    return row.text, row.target if isinstance(row, Pair) else None


def record_of(row: SourceRow, answer: Answer, n_best: int = 1) -> dict[str, Any]:
    """Returns what is written of a row, in order: `id`, its other fields, and the answer.

    Args:
        row: What came in.
        answer: Its result.
        n_best: Above 1, all hypotheses are listed.
    """
    return {"id": row.id, **row.fields, **answer.record(n_best)}
