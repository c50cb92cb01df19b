"""Ranking: the score that a cross-encoder gives a pair of texts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transferry.runtime.engine.preprocess import LongRows, checked_pairs
from transferry.runtime.engine.result import Results, RowError, RowResult
from transferry.runtime.engine.tasks.heads import (
    HeadTask,
    Pair,
    PairCall,
    PairOptions,
    probabilities,
    written,
)
from transferry.runtime.engine.tasks.task import Page, RowOptions, columns
from transferry.runtime.errors import Option, UsageError

if TYPE_CHECKING:
    from transferry.runtime.engine.open_bundle import OpenBundle
    from transferry.runtime.engine.tasks.heads import Scores


@dataclass(frozen=True)
class RankedResult(RowResult):
    """Score of one pair of texts; NaN on an error. `single`: the score is float32."""

    pair: str | RowError | None = None
    score: float = math.nan
    single: bool = False

    @property
    def numbers(self) -> list[float]:
        """The score."""
        return [self.score]

    def _answer(self, n_best: int) -> dict[str, Any]:
        return self._error() or {"score": written(self.score, single=self.single)}


class Rank(HeadTask):
    """Scores of pairs."""

    name = "rank"
    options = PairOptions
    columns = columns(score="float")
    answer = "score"
    page = Page("Rank", "Query, then documents on lines of their own", "A question")

    @classmethod
    def check(cls, options: Any) -> None:
        if options.pair is None:
            told = "task rank scores pairs of texts; name the column of the second with "
            raise UsageError(told, Option("pair"))


def rank(
    engine: OpenBundle, pairs: Iterable[Pair], *, long_rows: LongRows | None = None
) -> Results[RankedResult]:
    """Scores pairs of texts with a cross-encoder, in order and in bounded memory.

    Args:
        engine: Engine of a bundle with a head that gives one score.
        pairs: Any number of pairs; an error becomes the result of its row.
        long_rows: As for `classify`.

    Raises:
        UsageError: The bundle has no such head, or `long_rows` is "split".
    """
    call = _Call(engine, RowOptions(long_rows=long_rows))
    return engine.map(checked_pairs(pairs, both=True), call.prepare, call.compute, engine.encoders)


class _Call(PairCall):
    task, kind = Rank.name, RankedResult

    def answer(self, row: Any, scores: Scores) -> Mapping[str, Any]:
        kind = self.head.rank
        return {"score": float(probabilities(scores, kind)[0]), "single": kind == "none"}
