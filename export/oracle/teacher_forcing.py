"""Errors and margins on given answers: by position, and how clear each choice was."""

from collections.abc import Sequence
from math import exp, fsum, lgamma, log, log1p
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transferry.runtime.bundle.head import HeadSettings
from transferry.runtime.decoding.decoder import Tensors
from transferry.runtime.decoding.logits import log_sum_exp
from transferry.runtime.proof.report import (
    CHOICES,
    EQUIVALENT,
    LABELS,
    PERPLEXITY,
    WORST_CHOICE,
    Growth,
    Margins,
    TaskMetric,
)
from transferry.runtime.proof.units import logit_errors

Logits = NDArray[np.floating[Any]]

# Distances of the two best tokens, in nats, two bins per decade.
EDGES = tuple(10.0 ** (exponent / 2) for exponent in range(-14, 5))


def chosen_from(tensors: Tensors, head: HeadSettings | None) -> NDArray[np.floating[Any]]:
    """Returns the scores among which the labels of a row are chosen.

    `[choices, options]`: of each text or token the scores of its labels; where each label is for
    itself, of each label 0 for no and its score for yes; of answers, for start and end the scores
    of all tokens. Empty where nothing is chosen.
    """
    scores = tensors["head"][0] if head is not None else np.zeros(0)
    if head is None or head.probabilities == "none":
        return np.zeros((0, 0))
    if head.probabilities == "sigmoid":
        return np.stack([np.zeros_like(scores), scores], axis=-1)
    return scores.T if head.task == "answer" else scores.reshape(-1, scores.shape[-1])


class TeacherForcing:
    """Sums up errors and margins over rows of logits."""

    def __init__(self) -> None:
        self.errors: list[float] = []  # of the model under test, by position
        self.own: list[float] = []  # of torch, by position
        self.counts = np.zeros(len(EDGES) - 1, np.int64)
        self.smallest = np.inf
        self.error = 0.0
        self.tokens = 0
        self.losses = np.zeros(2)
        self.equivalent = self.kept = 0
        self.furthest = 0.0  # in nats

    def add(
        self,
        target: Sequence[int],
        oracle: Logits,
        reference: Logits,
        found: Logits,
        trained: Logits | None = None,
        *,
        places: NDArray[np.int64] | None = None,
    ) -> None:
        """Adds a row, or tokens of several.

        Args:
            target: `[tokens + 1]`; each token but the first is predicted from those before.
            oracle: Logits in float64 `[positions, vocabulary]`; those after the target are ignored.
            reference: Logits of torch in float32, likewise.
            found: Logits of the model under test, likewise.
            trained: Logits of the model as trained, for the metrics, likewise; by default the
                reference's.
            places: Place of each predicted token in its row. Default: those of one row.
        """
        tokens = len(target) - 1
        if not tokens:
            return
        places = np.arange(tokens) if places is None else places
        exact, own, judged, meant = (
            logits[:tokens].astype(np.float64)
            for logits in (oracle, reference, found, reference if trained is None else trained)
        )
        units, sides = logit_errors(exact, judged, own)
        for errors, worst in zip((self.errors, self.own), sides, strict=True):
            if errors is self.errors:
                self.error = float(np.maximum(self.error, (units * worst).max()))
            grown = np.pad(errors, (0, max(0, int(places.max()) + 1 - len(errors))))
            with np.errstate(invalid="ignore"):  # NaN stays
                np.maximum.at(grown, places, worst)
            errors[:] = grown.tolist()
        best = np.partition(exact, -2, axis=1)[:, -2:]
        margins = best[:, 1] - best[:, 0]
        self.smallest = min(self.smallest, float(margins.min()))
        self.counts += np.histogram(np.clip(margins, EDGES[0], EDGES[-1]), EDGES)[0]
        chosen = np.arange(tokens), list(target[1:])
        self.tokens += tokens
        self.losses += [
            float((log_sum_exp(logits) - logits[chosen]).sum()) for logits in (meant, judged)
        ]

        preferred = judged.argmax(axis=1)
        lost = meant.max(axis=1) - meant[chosen[0], preferred]
        self.equivalent += int((lost <= EQUIVALENT).sum())
        self.kept += int((lost <= 0).sum())
        self.furthest = float(np.maximum(self.furthest, lost.max()))

    def growth(self) -> list[Growth]:
        """Returns the error by position."""
        return [
            Growth(step, error, own)
            for step, (error, own) in enumerate(zip(self.errors, self.own, strict=True))
        ]

    def margins(self) -> Margins | None:
        """Returns the histogram of margins; None without tokens."""
        if not self.tokens:
            return None
        return Margins(EDGES, self.counts.tolist(), self.smallest, self.error)

    def choices(self, budget: float) -> TaskMetric:
        """Returns the share of positions at which the preferred token is as good as the best."""
        return kept_share(CHOICES, self.equivalent, self.tokens, budget)

    def labels(self, budget: float) -> TaskMetric:
        """Returns the share of positions at which the preferred label is the best."""
        return kept_share(LABELS, self.kept, self.tokens, budget)

    def worst_choice(self, budget: float) -> TaskMetric:
        """Returns how far below the best token a preferred one is, in nats of the trained model."""
        return TaskMetric(WORST_CHOICE, 0.0, self.furthest, self.furthest, budget)

    def perplexity(self, budget: float) -> TaskMetric:
        """Returns the change of the perplexity (exp of the mean loss).

        Above 709 nats a perplexity is infinite in float64, the change is not.
        """
        losses = self.losses / self.tokens
        with np.errstate(over="ignore"):
            reference, found = np.exp(losses).tolist()
            change = float(np.abs(np.expm1(losses[1] - losses[0])))
        return TaskMetric(PERPLEXITY, reference, found, change, budget)


def kept_share(measure: str, kept: int, number: int, budget: float) -> TaskMetric:
    """Returns the share of results that stayed as they were.

    Of few results chance alone may lose more than the budget: the p-value is the probability of as
    many losses where each result is lost with probability `budget` (exact binomial test).
    """
    lost, p_value = number - kept, 0.0
    if lost > budget * number:
        ways = (lgamma(number + 1) - lgamma(k + 1) - lgamma(number - k + 1) for k in range(lost))
        odds = log(budget), log1p(-budget)
        below = (exp(w + k * odds[0] + (number - k) * odds[1]) for k, w in enumerate(ways))
        p_value = max(0.0, 1 - fsum(below))
    return TaskMetric(measure, 1.0, kept / number, lost / number, budget, p_value)
