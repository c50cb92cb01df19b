"""Effect of the differences on token agreement and BLEU."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import sacrebleu

from transferry.runtime.decoding.hypothesis import Hypothesis
from transferry.runtime.parity.report import AGREEMENT, BLEU, TaskMetric
from transferry.runtime.tokenizer.byte_pair import AnyTokenizer


@dataclass(frozen=True)
class TaskBudget:
    """The largest changes that pass.

    Attributes:
        agreement: Share of torch's tokens that may differ.
        bleu: Points of sacreBLEU.
        perplexity: Relative change of the perplexity.
        choice: How far below torch's token a preferred one may be, in nats.
    """

    agreement: float
    bleu: float
    perplexity: float
    choice: float


# In float32 every different token must be a tie, so that no share of them is too large.
BUDGETS = {
    "float32": TaskBudget(math.inf, math.inf, math.inf, math.inf),
    "float16": TaskBudget(0.02, 0.1, 0.001, 0.1),
    "bfloat16": TaskBudget(0.10, 0.3, 0.01, 1.0),
    "int8": TaskBudget(0.15, 0.3, 0.02, 2.0),
}


def token_agreement(pairs: Iterable[tuple[Hypothesis, Hypothesis]], budget: float) -> TaskMetric:
    """Returns the share of torch's tokens that the bundle has in the same places."""
    same, total = 0, 0
    for one, other in pairs:
        same += sum(a == b for a, b in zip(one.tokens, other.tokens, strict=False))
        total += max(len(one.tokens), len(other.tokens))
    share = same / total if total else 1.0
    return TaskMetric(AGREEMENT, 1.0, share, 1.0 - share, budget)


def translation(
    tokenizer: AnyTokenizer,
    search: str,
    pairs: Iterable[tuple[Hypothesis, Hypothesis]],
    targets: Sequence[str],
    budget: float,
) -> TaskMetric:
    """Returns the loss in sacreBLEU; a gain counts as no change."""
    reference, found = (
        sacrebleu.corpus_bleu([tokenizer.decode(answer.tokens) for answer in side], [list(targets)])
        for side in zip(*pairs, strict=True)
    )
    loss = max(0.0, reference.score - found.score)
    return TaskMetric(f"{BLEU} {search}", reference.score, found.score, loss, budget)
