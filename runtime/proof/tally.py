"""Counts of the rows of a search that agree, tie or differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from transferry.runtime.decoding.decoder import Decoder, State
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.decoding.hypothesis import Hypothesis
from transferry.runtime.decoding.search import search
from transferry.runtime.proof.compare import Tolerance
from transferry.runtime.proof.report import Decisions, Difference
from transferry.runtime.tokenizer.byte_pair import SpecialTokens

# Returns the text of token ids.
Decode = Callable[[Sequence[int]], str]
# Takes the number of a row, its source, the expected hypotheses and the found ones. Returns the
# difference for the report, and whether the tolerance allows it.
Explain = Callable[
    [int, Sequence[int], Sequence[Hypothesis], Sequence[Hypothesis]], tuple[Difference, bool]
]


@dataclass(frozen=True)
class ExpectedAnswers:
    """Expected answers of a batch.

    Attributes:
        rows: Number of each source; seeds its samples.
        sources: Token ids of each source.
        hypotheses: Hypotheses of each source, best first.
        scores: The oracle's score of each hypothesis; empty where scores are not compared.
        score_error: torch's own error of a score, in nats.
        reasons: Whether the hypotheses have torch's finish reasons, so that they are compared.
    """

    rows: Sequence[int]
    sources: Sequence[Sequence[int]]
    hypotheses: Sequence[Sequence[Hypothesis]]
    scores: Sequence[Sequence[float]] = ()
    score_error: float = 1.0
    reasons: bool = True


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
        self._ties: list[Difference] = []
        self._tolerated: list[Difference] = []
        self._defects: list[Difference] = []
        # Source, expected and found token ids of each row whose tokens differ.
        self._differing: dict[int, tuple[Sequence[int], Sequence[int], Sequence[int]]] = {}

    def compare(
        self,
        decoder: Decoder[State],
        batches: Iterable[ExpectedAnswers],
        options: GenerationOptions,
        special: SpecialTokens,
        explain: Explain,
    ) -> Tally:
        """Searches with a decoder, compares its answers with the expected ones; returns itself."""
        for batch in batches:
            answers = search(decoder, batch.sources, options, special, row_ids=batch.rows)
            self.add(batch, [[found] for found in answers], explain)
        return self

    def add(
        self,
        batch: ExpectedAnswers,
        answers: Sequence[Sequence[Sequence[Hypothesis]]],
        explain: Explain,
    ) -> None:
        """Compares answers with the expected ones.

        Args:
            batch: The expected answers.
            answers: The hypotheses of each source, once for each time that it was answered; the
                worst of them is counted.
            explain: Explains other tokens.
        """
        for place, (row, times) in enumerate(zip(batch.rows, answers, strict=True)):
            wanted = batch.hypotheses[place]
            same: list[Sequence[Hypothesis]] = []
            others: dict[tuple[tuple[int, ...], ...], Sequence[Hypothesis]] = {}
            for found in times:
                if _differ(wanted, found, reasons=batch.reasons):
                    others.setdefault(tuple(item.tokens for item in found), found)
                else:
                    same.append(found)
            errors = [
                abs(item.score - score)
                for found in (same if batch.scores else ())
                for item, score in zip(found, batch.scores[place], strict=True)
            ]
            # A tie at one time excuses no defect at another.
            explained = [
                (*explain(row, batch.sources[place], wanted, found), found)
                for found in others.values()
            ]
            worst = min(explained, key=lambda item: (item[1], item[0].tie), default=None)
            if worst is None or (worst[1] and same and not self._within(errors, batch.score_error)):
                self.best[row] = wanted[0], same[0][0]
                self.agree(row, errors, batch.score_error)
            else:
                difference, allowed, found = worst
                self.best[row] = wanted[0], found[0]
                pairs = (
                    (one.tokens, other.tokens) for one, other in zip(wanted, found, strict=False)
                )
                left, right = next(
                    (pair for pair in pairs if pair[0] != pair[1]),
                    (wanted[0].tokens, found[0].tokens),
                )
                self._differing[row] = batch.sources[place], left, right
                self.differ(difference, allowed)

    def _within(self, errors: Sequence[float], own: float) -> bool:
        """Whether the errors of scores are within the budget."""
        # Unlike max(), np.max keeps NaN: a row that fails on both sides proves nothing.
        return float(np.max(errors, initial=0.0)) <= self._factor * own

    def agree(self, row: int, errors: Sequence[float], own: float) -> None:
        """Counts a row with the expected tokens, given the errors of its scores and torch's own."""
        self._rows += 1
        self._identical += 1
        largest = float(np.max(errors, initial=0.0))
        if not self._within(errors, own):
            limit = self._factor * own
            message = f"a score is {largest:.2e} nats from the oracle's (limit {limit:.2e})"
            self._defects.append(Difference(row, message, wrong_score=True))
        self._score_error = float(np.maximum(self._score_error, largest))
        self._score_ratio = float(np.maximum(self._score_ratio, largest / own))

    def differ(self, difference: Difference, allowed: bool) -> None:
        """Counts a row with other tokens."""
        self._rows += 1
        kind = self._ties if difference.tie else self._tolerated
        (kind if allowed else self._defects).append(difference)

    def decisions(self, decode: Decode | None = None) -> Decisions:
        """Returns the result; `decode` gives the differences their texts."""

        def listed(differences: Iterable[Difference]) -> list[Difference]:
            ordered = sorted(differences, key=lambda item: item.row)
            return ordered if decode is None else [self._with_texts(i, decode) for i in ordered]

        return Decisions(
            self._search,
            self._rows,
            self._identical,
            self._score_error,
            self._score_ratio,
            listed(self._ties),
            listed(self._defects),
            listed(self._tolerated),
        )

    def _with_texts(self, difference: Difference, decode: Decode) -> Difference:
        if (tokens := self._differing.get(difference.row)) is None:
            return difference
        source, expected, found = map(decode, tokens)
        return replace(difference, source=source, expected=expected, found=found)


def _differ(wanted: Sequence[Hypothesis], found: Sequence[Hypothesis], *, reasons: bool) -> bool:
    """Whether tokens differ, or the reasons why the hypotheses end, end tokens included."""
    left, right = (
        [(item.tokens, reasons and (item.finish_reason, item.end)) for item in side]
        for side in (wanted, found)
    )
    return left != right
