"""What differences come to in the measures that the users of a model go by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import sacrebleu

from transferry.runtime.decoding.hypothesis import FAILED, Hypothesis
from transferry.runtime.parity.report import TaskMetric
from transferry.runtime.tokenizer.byte_pair import AnyTokenizer


class Answers:
    """The best answers of two searches, row by row: torch's and those judged."""

    def __init__(self, rows: int) -> None:
        self.wanted = [FAILED] * rows
        self.found = [FAILED] * rows

    def keep(self, row: int, wanted: Sequence[Hypothesis], found: Sequence[Hypothesis]) -> None:
        """Takes in a row's answers, best first."""
        self.wanted[row], self.found[row] = wanted[0], found[0]


@dataclass(frozen=True)
class TaskBudget:
    """The largest changes that pass.

    Attributes:
        agreement: Share of torch's tokens that may differ.
        bleu: Points of sacreBLEU.
        perplexity: Relative change of the perplexity.
    """

    agreement: float
    bleu: float
    perplexity: float

    @classmethod
    def of(cls, precision: str) -> TaskBudget:
        """Returns what a precision is allowed.

        In float32 every different token must be a tie, so that no share of them is too large.
        """
        return _BUDGETS.get(precision, _BUDGETS["int8"])


_BUDGETS = {
    "float32": TaskBudget(math.inf, math.inf, math.inf),
    "float16": TaskBudget(0.02, 0.1, 0.001),
    "bfloat16": TaskBudget(0.10, 0.3, 0.01),
    "int8": TaskBudget(0.15, 0.3, 0.02),
}


def token_agreement(
    answers: Answers,
    budget: float,
) -> TaskMetric:
    """Returns which share of torch's tokens the other has in the same places."""
    same, total = 0, 0
    for one, other in zip(answers.wanted, answers.found, strict=True):
        same += sum(a == b for a, b in zip(one.tokens, other.tokens, strict=False))
        total += max(len(one.tokens), len(other.tokens))
    share = same / total if total else 1.0
    return TaskMetric("token agreement", 1.0, share, 1.0 - share, budget)


def translation(
    tokenizer: AnyTokenizer,
    search: str,
    answers: Answers,
    targets: Sequence[str],
    budget: float,
) -> TaskMetric:
    """Returns the loss in sacreBLEU; a gain is no change."""
    scores = [
        sacrebleu.corpus_bleu(
            [tokenizer.decode(answer.tokens) for answer in side], [list(targets)]
        ).score
        for side in (answers.wanted, answers.found)
    ]
    reference, found = scores
    return TaskMetric(f"sacreBLEU {search}", reference, found, max(0.0, reference - found), budget)
