"""Effect of the differences on token agreement and BLEU."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from sacrebleu.metrics.bleu import BLEU as CorpusBLEU
from sacrebleu.significance import PairedTest, Result

from transferry.export.checks.check import Findings
from transferry.runtime.decoding.hypothesis import Hypothesis
from transferry.runtime.precision import TaskBudget
from transferry.runtime.proof.report import AGREEMENT, BLEU, TaskMetric
from transferry.runtime.tokenizer.byte_pair import AnyTokenizer


def task_metrics(
    found: Findings,
    budget: TaskBudget,
    tokenizer: AnyTokenizer,
    fed: Sequence[Sequence[int]] | None = None,
    targets: Sequence[str] | None = None,
) -> list[TaskMetric]:
    """Returns the metrics of answers to text; none without text.

    Args:
        found: Findings of all checks.
        budget: The largest changes that pass.
        tokenizer: Decodes answers.
        fed: Given answers, whose perplexity is reported.
        targets: Reference answers.
    """
    forcing = found.forcing
    if not forcing.tokens:
        return []
    metrics = [forcing.choices(budget.choices), forcing.worst_choice(budget.choice)]
    if not found.best:  # without a decoder: of the tokens that are filled in
        return metrics
    metrics.append(token_agreement(found.best["greedy"]))
    if targets is not None:
        metrics += [
            translation(tokenizer, name, found.best[name], targets, budget.bleu)
            for name in ("greedy", "beam 4")
        ]
    return metrics + ([] if fed is None else [forcing.perplexity(budget.perplexity)])


def token_agreement(pairs: Iterable[tuple[Hypothesis, Hypothesis]]) -> TaskMetric:
    """Returns the share of torch's tokens that the bundle has in the same places.

    It has no limit: after one choice between equally good tokens, all that follow differ.
    """
    same, total = 0, 0
    for one, other in pairs:
        same += sum(a == b for a, b in zip(one.tokens, other.tokens, strict=False))
        total += max(len(one.tokens), len(other.tokens))
    share = same / total if total else 1.0
    return TaskMetric(AGREEMENT, 1.0, share, 1.0 - share, math.inf)


def translation(
    tokenizer: AnyTokenizer,
    search: str,
    pairs: Iterable[tuple[Hypothesis, Hypothesis]],
    targets: Sequence[str],
    budget: float,
) -> TaskMetric:
    """Returns the loss in sacreBLEU; a gain counts as no change.

    The chance of a loss above the budget comes from a paired bootstrap of 1,000 samples (Koehn
    2004, Statistical Significance Tests for Machine Translation Evaluation).
    """
    wanted, answered = (
        [tokenizer.decode(answer.tokens) for answer in side] for side in zip(*pairs, strict=True)
    )
    metric = CorpusBLEU(references=[list(targets)])
    reference, found = (metric.corpus_score(side, None).score for side in (wanted, answered))
    loss, p_value = max(0.0, reference - found), 0.0
    if loss > budget:
        systems: list[tuple[str, Sequence[str]]] = [("torch", wanted), ("bundle", answered)]
        test = PairedTest(systems, {"BLEU": metric}, None, test_type="bs", n_samples=1000)
        found_score = test()[1]["BLEU"][1]
        assert isinstance(found_score, Result)
        p_value = float(found_score.p_value or 0.0)
    return TaskMetric(f"{BLEU} {search}", reference, found, loss, budget, p_value)
