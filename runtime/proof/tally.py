"""Counts of the rows of a search that agree, tie or differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from transferry.runtime.decoding.hypothesis import Hypothesis
from transferry.runtime.proof.compare import Tolerance
from transferry.runtime.proof.report import Decisions, Difference

# Share of the scores of a variant of integers that may be off by more than rounding in float32: so
# much, so many times torch's own share, and a few rows. In bundles of two models with beam 4, on 20
# to 200 sentences of two kinds, it was at most 14 % (torch's then 12 %); with torch's 0, 8 %.
CROSSED_SHARE, CROSSED_TIMES, CROSSED_FEW = 1 / 3, 4, 3
# Returns the text of token ids.
Decode = Callable[[Sequence[int]], str]
# Takes the number of a row, its source, the expected hypotheses and the found ones. Returns the
# difference for the report, and whether the tolerance allows it.
Explain = Callable[
    [int, Sequence[int], Sequence[Hypothesis], Sequence[Hypothesis]], tuple[Difference, bool]
]


class ExactScore(NamedTuple):
    """The oracle's score of a hypothesis.

    Attributes:
        score: As the search normalises it, in nats; NaN where the search failed.
        own: torch's own error of it, in nats: the limit is so many times as large as the
            tolerance's factor.
        rounding: How far it is off at most if no value crossed the border of two integers; infinity
            where none can.
        wider: Returns the score with torch's error of more roundings; None where none are measured.
    """

    score: float
    own: float
    rounding: float = math.inf
    wider: Callable[[], ExactScore] | None = None


# Returns the oracle's scores of the hypotheses of some sources.
Scored = Callable[
    [Sequence[Sequence[int]], Sequence[Sequence[Hypothesis]]], Sequence[Sequence[ExactScore]]
]


Error = tuple[float, float]  # of a score, and torch's own


@dataclass(frozen=True)
class ExpectedAnswers:
    """Expected answers of a batch.

    Attributes:
        rows: Number of each source; seeds its samples.
        scores: The oracle's score of each hypothesis; empty where scores are not compared.
        reasons: Whether the hypotheses have torch's finish reasons, so that they are compared.
    """

    rows: Sequence[int]
    sources: Sequence[Sequence[int]]
    hypotheses: Sequence[Sequence[Hypothesis]]
    scores: Sequence[Sequence[ExactScore]] = ()
    reasons: bool = True


@dataclass
class _Other:
    """Answers of one row with other tokens than expected, once for each time that they were given.

    Attributes:
        allowed: Whether the tolerance allows the difference.
    """

    difference: Difference
    allowed: bool
    found: Sequence[Sequence[Hypothesis]]


@dataclass(frozen=True)
class _Row:
    """Answers to one source: those with the expected tokens, each time, and others."""

    number: int
    source: Sequence[int]
    wanted: Sequence[Hypothesis]
    same: Sequence[Sequence[Hypothesis]]
    others: Sequence[_Other]


class Tally:
    """Counts the rows of a search that agree, tie or fail.

    Attributes:
        best: The best hypothesis of each row, expected and found.
    """

    def __init__(self, search: str, tolerance: Tolerance) -> None:
        self.best: dict[int, tuple[Hypothesis, Hypothesis]] = {}
        self._search, self._factor = search, tolerance.factor
        self._rows = self._identical = 0
        self._score_error = self._score_ratio = 0.0
        # Sums over rows of the share of scores beyond rounding in float32, of the model and torch.
        self._crossed = np.zeros(2)
        self._ties: list[Difference] = []
        self._tolerated: list[Difference] = []
        self._defects: list[Difference] = []
        # Source, expected and found token ids of each row whose tokens differ.
        self._differing: dict[int, tuple[Sequence[int], Sequence[int], Sequence[int]]] = {}

    def add(
        self,
        batch: ExpectedAnswers,
        answers: Sequence[Sequence[Sequence[Hypothesis]]],
        explain: Explain,
        scored: Scored | None = None,
    ) -> None:
        """Compares answers with the expected ones.

        Each source has the hypotheses of each time that it was answered; the worst of them are
        counted. `scored` scores the answers whose other tokens `explain` excuses, which have no
        expected scores. By default such scores are not compared.
        """
        rows = list(_grouped(batch, answers, explain))
        if batch.scores and scored is not None:
            self._compare_excused(rows, scored)
        for place, row in enumerate(rows):
            known = batch.scores[place] if batch.scores else ()
            if row.same:
                self._crossed += [_crossed(row.same, known), _crossed([row.wanted], known)]
            self._count(row, self._errors(row.same, known))

    def _compare_excused(self, rows: Sequence[_Row], scored: Scored) -> None:
        """Makes defects of excused answers whose scores are wrong."""
        excused = [(row.source, each) for row in rows for each in row.others if each.allowed]
        if not excused:
            return
        exact = scored([source for source, _ in excused], [each.found[0] for _, each in excused])
        for (_, each), scores in zip(excused, exact, strict=True):
            if wrong := self._wrong(self._errors(each.found, scores)):
                message = f"{each.difference.message}, but {wrong}"
                each.difference = replace(each.difference, message=message)
                each.allowed = False

    def _count(self, row: _Row, errors: Sequence[Error]) -> None:
        """Counts a row, given the errors of the scores of its expected answers."""
        # A tie at one time excuses no defect at another.
        worst = min(row.others, key=lambda each: (each.allowed, each.difference.tie), default=None)
        if worst is None or (worst.allowed and row.same and self._wrong(errors)):
            self.best[row.number] = row.wanted[0], row.same[0][0]
            self.agree(row.number, errors)
            return
        wanted, found = row.wanted, worst.found[0]
        self.best[row.number] = wanted[0], found[0]
        pairs = ((one.tokens, other.tokens) for one, other in zip(wanted, found, strict=False))
        left, right = next(
            (pair for pair in pairs if pair[0] != pair[1]), (wanted[0].tokens, found[0].tokens)
        )
        self._differing[row.number] = row.source, left, right
        self.differ(worst.difference, worst.allowed)

    def _errors(
        self, answers: Sequence[Sequence[Hypothesis]], exact: Sequence[ExactScore]
    ) -> list[Error]:
        """Returns the error of each score, and torch's own; none without exact scores.

        Unless a row is wrong already, a score beyond its limit is measured with more roundings.
        """
        found = []
        for item, one in (
            pair for each in (answers if exact else ()) for pair in zip(each, exact, strict=True)
        ):
            within = abs(item.score - one.score) <= self._factor * one.own
            if not within and one.wider is not None and not self._defects:
                one = one.wider()
            found.append((abs(item.score - one.score), one.own))
        return found

    def _wrong(self, errors: Sequence[Error]) -> str:
        """Describes the worst of some errors of scores if it exceeds its limit, else empty.

        Keeps the largest error and ratio for the report.
        """
        if not errors:
            return ""
        # Unlike max(), argmax finds NaN: a row that fails on both sides proves nothing.
        error, own = errors[int(np.argmax([error / own for error, own in errors]))]
        self._score_error = float(np.max([self._score_error, *(each for each, _ in errors)]))
        self._score_ratio = float(np.maximum(self._score_ratio, error / own))
        if error <= (limit := self._factor * own):
            return ""
        return f"a score is {error:.2e} nats from the oracle's (limit {limit:.2e})"

    def agree(self, row: int, errors: Sequence[Error]) -> None:
        """Counts a row with the expected tokens, given errors of its scores and torch's own."""
        self._rows += 1
        self._identical += 1
        if wrong := self._wrong(errors):
            self._defects.append(Difference(row, wrong, wrong_score=True))

    def differ(self, difference: Difference, allowed: bool) -> None:
        """Counts a row with other tokens."""
        self._rows += 1
        kind = self._ties if difference.tie else self._tolerated
        (kind if allowed else self._defects).append(difference)

    def decisions(self, decode: Decode | None = None) -> Decisions:
        """Returns the result; `decode` gives the differences their texts."""
        defects, rows = self._defects, max(1, self._rows)
        crossed, own = (self._crossed / rows).tolist()
        if crossed > CROSSED_SHARE + CROSSED_TIMES * own + CROSSED_FEW / rows:
            message = (
                f"{crossed:.0%} of the scores differ from the oracle's by more than float32's "
                f"rounding, {own:.0%} of torch's: values at borders do not explain so many"
            )
            defects = [*defects, Difference(0, message, wrong_score=True)]

        def told(one: Difference) -> Difference:
            if decode is None or one.row not in self._differing:
                return one
            source, expected, found = map(decode, self._differing[one.row])
            return replace(one, source=source, expected=expected, found=found)

        def listed(differences: Iterable[Difference]) -> list[Difference]:
            return [told(one) for one in sorted(differences, key=lambda item: item.row)]

        return Decisions(
            self._search,
            self._rows,
            self._identical,
            self._score_error,
            self._score_ratio,
            listed(self._ties),
            listed(defects),
            listed(self._tolerated),
        )


def _grouped(
    batch: ExpectedAnswers, answers: Sequence[Sequence[Sequence[Hypothesis]]], explain: Explain
) -> Iterator[_Row]:
    """Groups the answers given each time, and explains those with other tokens."""
    for number, source, wanted, times in zip(
        batch.rows, batch.sources, batch.hypotheses, answers, strict=True
    ):
        same: list[Sequence[Hypothesis]] = []
        others: dict[tuple[tuple[int, ...], ...], list[Sequence[Hypothesis]]] = {}
        for found in times:
            if _differ(wanted, found, reasons=batch.reasons):
                others.setdefault(tuple(item.tokens for item in found), []).append(found)
            else:
                same.append(found)
        told = [_Other(*explain(number, source, wanted, each[0]), each) for each in others.values()]
        yield _Row(number, source, wanted, same, told)


def _crossed(answers: Sequence[Sequence[Hypothesis]], exact: Sequence[ExactScore]) -> float:
    """Returns the share of scores that are off by more than rounding in float32."""
    beyond = [
        not abs(item.score - one.score) <= one.rounding
        for found in (answers if exact else ())
        for item, one in zip(found, exact, strict=True)
    ]
    return sum(beyond) / max(1, len(beyond))


def _differ(wanted: Sequence[Hypothesis], found: Sequence[Hypothesis], *, reasons: bool) -> bool:
    """Whether tokens differ, or the reasons why the hypotheses end, end tokens included."""
    left, right = (
        [(item.tokens, reasons and (item.finish_reason, item.end)) for item in side]
        for side in (wanted, found)
    )
    return left != right
