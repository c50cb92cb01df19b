"""Classification: the scores of the labels of texts or of pairs of texts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transferry.runtime.engine.preprocess import LongRows, checked_texts
from transferry.runtime.engine.result import Results, RowError, RowResult
from transferry.runtime.engine.tasks.heads import (
    HeadTask,
    Pair,
    PairCall,
    PairOptions,
    head_of,
    probabilities,
    written,
)
from transferry.runtime.engine.tasks.task import Kind, Layout, Page, RowOptions, columns

if TYPE_CHECKING:
    from transferry.runtime.engine.open_bundle import OpenBundle
    from transferry.runtime.engine.tasks.heads import Scores


@dataclass(frozen=True)
class LabelScore:
    """A label and its probability; of a regression the number itself."""

    label: str
    score: float


@dataclass(frozen=True)
class ClassifiedResult(RowResult):
    """Labels of one text or pair of texts.

    Attributes:
        pair: The second text of a pair, or its error; None for a text.
        label: The likeliest label; with independent labels all of a probability of at least one
            half, with a comma between; empty for a regression.
        scores: Score of every label, in the model's order.
        single: Whether the scores are float32, as of a regression.
    """

    pair: str | RowError | None = None
    label: str = ""
    scores: tuple[LabelScore, ...] = ()
    single: bool = False

    @property
    def numbers(self) -> list[float]:
        """The scores of all labels."""
        return [each.score for each in self.scores]

    def _answer(self, n_best: int) -> dict[str, Any]:
        scores = [
            {"label": each.label, "score": written(each.score, single=self.single)}
            for each in self.scores
        ]
        return self._error() or {"label": self.label, "scores": scores}

    def cells(self, n_best: int = 1) -> dict[str, Any]:
        """Returns the values of a table's columns: the score of the likeliest and of each label."""
        cells = super().cells(n_best)
        scores = cells.pop("scores", [])
        names, values = score_columns(self.scores), [each["score"] for each in scores]
        several = self.single and len(scores) > 1  # of a regression, where no score is the largest
        best = {} if several or not scores else {"score": max(values)}
        return {**cells, **best, **dict(zip(names, values, strict=False))}


def score_columns(labels: Iterable[LabelScore | str]) -> list[str]:
    """Returns the name of each label's column; "_" tells equal labels apart."""
    names: list[str] = []
    for label in labels:
        name = f"score_{label if isinstance(label, str) else label.label}"
        while name in names:
            name += "_"
        names.append(name)
    return names


class Classify(HeadTask):
    """Labels of texts or pairs."""

    name = "classify"
    options = PairOptions
    # In a table a column for each label; `scores` is their list in JSON.
    columns = columns(label="text", score="float", scores=[{"label": "text", "score": "float"}])
    answer = "label"
    page = Page("Classify")

    def __init__(self, engine: OpenBundle, options: PairOptions, layout: Layout) -> None:
        super().__init__(engine, options, layout)
        labels = head_of(engine, self.name).labels
        scores: dict[str, Kind] = dict.fromkeys(score_columns(labels), "float")
        self.columns = {"label": "text", "score": "float", **(scores if len(labels) > 1 else {})}


def classify(
    engine: OpenBundle, rows: Iterable[str | RowError | Pair], *, long_rows: LongRows | None = None
) -> Results[ClassifiedResult]:
    """Scores the labels of texts or pairs of texts, in order and in bounded memory.

    Args:
        engine: Engine of a bundle with a head that classifies.
        rows: Any number of texts, or of pairs of them; an error becomes the result of its row.
        long_rows: Treatment of rows longer than the model's positions, or than the bundle's longest
            row: "error", or "truncate" to read their beginning, of a pair that of the longer text
            first. Default: "truncate" where the bundle has a longest row, else "error".

    Raises:
        UsageError: The bundle has no such head, or `long_rows` is "split" or unknown.
    """
    call = _Call(engine, RowOptions(long_rows=long_rows))
    return engine.map(checked_texts(rows, pairs=True), call.prepare, call.compute, engine.encoders)


class _Call(PairCall):
    task, kind = Classify.name, ClassifiedResult

    def answer(self, row: Any, scores: Scores) -> Mapping[str, Any]:
        kind, labels = self.head.probabilities, self.head.labels
        values = probabilities(scores, kind).tolist()
        both = [LabelScore(*each) for each in zip(labels, values, strict=True)]
        label = labels[values.index(max(values))]
        if kind == "sigmoid":
            label = ", ".join(each.label for each in both if each.score >= 0.5)
        single = kind == "none"
        return {"label": "" if single else label, "scores": tuple(both), "single": single}
