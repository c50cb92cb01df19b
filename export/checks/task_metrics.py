"""Effect of the differences on answers: tokens, BLEU, labels, vectors and scores."""

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from sacrebleu.metrics.bleu import BLEU as CorpusBLEU
from sacrebleu.significance import PairedTest, Result

from transferry.export.checks.check import Findings, Results
from transferry.export.oracle.teacher_forcing import kept_share
from transferry.runtime.decoding.hypothesis import Hypothesis
from transferry.runtime.precision import TaskBudget
from transferry.runtime.proof.report import (
    AGREEMENT,
    BLEU,
    COSINE,
    LEAST_COSINE,
    NDCG,
    NEIGHBOURS,
    RANKS,
    TaskMetric,
)
from transferry.runtime.tokenizer.byte_pair import AnyTokenizer

LEAST = 4  # distance of the least cosine from 1, in units of the mean one's limit
MOST_TEXTS = 2000  # compared with one another: 4 million similarities
MOST_VECTORS = 16_000  # of their tokens
BLOCK = 16  # queries compared at once
CUT = 10  # results of a search that count

Floats = NDArray[np.float64]


def task_metrics(
    found: Findings,
    budget: TaskBudget,
    tokenizer: AnyTokenizer,
    fed: Sequence[Sequence[int]] | None = None,
    targets: Sequence[str] | None = None,
) -> list[TaskMetric]:
    """Returns the metrics of answers to text; none without text.

    `fed` are given answers, whose perplexity is reported; `targets` reference answers, or of a
    model that embeds the text that each text looks for.
    """
    forcing = found.forcing
    metrics = vector_metrics(found.vectors, budget, searched=targets is not None)
    metrics += score_metrics(found.scores, budget)
    if not forcing.tokens:
        return metrics
    metrics += [forcing.choices(budget.choices), forcing.worst_choice(budget.choice)]
    if not found.best:  # without a decoder: of labels, or of the tokens that are filled in
        return [*metrics, forcing.labels(budget.labels)]
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


def score_metrics(scores: Results, budget: TaskBudget) -> list[TaskMetric]:
    """Returns the metric of scores that choose no label, that of the worst score; none without."""
    columns = [np.stack(side, axis=1) for side in zip(*scores, strict=True)]
    each = [_correlation(*pair, limit=budget.ranks) for pair in zip(*columns, strict=True)]
    return sorted(each, key=lambda metric: metric.found)[:1]


def vector_metrics(vectors: Results, budget: TaskBudget, *, searched: bool) -> list[TaskMetric]:
    """Returns the metrics of vectors of torch as trained and of the variant; none without.

    Each text has one `[width]`, or one a token `[tokens, width]`. If `searched`, each text of the
    first half looks for one of the second half.
    """
    if not vectors:
        return []
    different = {meant.tobytes(): (meant, found) for meant, found in vectors}
    units = [list(map(_unit, side)) for side in zip(*different.values(), strict=True)]
    cosines = np.array(
        [(one * other).sum(axis=1).mean() for one, other in zip(*units, strict=True)]
    )
    means = float(cosines.mean()), float(cosines.min())
    limits = budget.cosine, LEAST * budget.cosine
    metrics = [
        TaskMetric(name, 1.0, value, 1.0 - value, limit)
        for name, value, limit in zip((COSINE, LEAST_COSINE), means, limits, strict=True)
    ]
    if len(cosines) > 2:
        fitting = int((np.cumsum([*map(len, units[0])]) <= MOST_VECTORS).sum())
        few = max(3, min(MOST_TEXTS, fitting))
        alike = [_similarities(unit[:few], unit[:few]) for unit in units]
        pairs = np.tril_indices(len(alike[0]), -1)
        for each in alike:
            np.fill_diagonal(each, -np.inf)
        wanted, nearest = (each.argmax(axis=1) for each in alike)
        kept = int((wanted == nearest).sum())
        metrics.append(kept_share(NEIGHBOURS, kept, len(wanted), budget.neighbours))
        metrics.append(_correlation(*(each[pairs] for each in alike), limit=budget.ranks))
    return [*metrics, *([_retrieval(vectors, budget.found)] if searched else [])]


def _unit(vectors: Floats) -> Floats:
    """Returns a text's vectors `[vectors, width]`, each of length 1."""
    vectors = np.atleast_2d(vectors)
    lengths: Floats = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.where(lengths > 0, lengths, 1.0)


def _similarities(queries: Sequence[Floats], documents: Sequence[Floats]) -> Floats:
    """Returns the mean MaxSim of a query's vectors `[queries, documents]`; of one their cosine.

    Khattab and Zaharia 2020, ColBERT, section 3.3, there the sum.
    """
    joined, rows = np.concatenate(documents), []
    starts = np.cumsum([0, *map(len, documents)])[:-1]
    for first in range(0, len(queries), BLOCK):
        block = queries[first : first + BLOCK]
        sizes = np.array([*map(len, block)])
        best = np.maximum.reduceat(np.concatenate(block) @ joined.T, starts, axis=1)
        rows.append(np.add.reduceat(best, np.cumsum(sizes) - sizes, axis=0) / sizes[:, None])
    found: Floats = np.concatenate(rows)
    return found


def _correlation(wanted: Floats, found: Floats, *, limit: float) -> TaskMetric:
    """Returns Spearman's rank correlation, equal values sharing their mean rank."""
    one, other = (_ranks(side) for side in (wanted, found))
    size = math.sqrt(float((one @ one) * (other @ other)))
    value = float(one @ other) / size if size else float(not one.any() and not other.any())
    return TaskMetric(RANKS, 1.0, value, 1.0 - value, limit)


def _ranks(values: Floats) -> Floats:
    """Returns the ranks of values less their mean; NaN if one is NaN."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Floats = (counts.cumsum() - (counts - 1) / 2)[places] - (len(values) + 1) / 2
    return ranks if np.isfinite(values).all() else np.full(len(values), np.nan)


def _retrieval(pairs: Results, budget: float) -> TaskMetric:
    """Returns the loss in nDCG@10 of a search for each text's target among all targets.

    Jaervelin and Kekaelaeinen 2002, Cumulated Gain-Based Evaluation of IR Techniques; with one
    right result it is 1 / log2(1 + rank).
    """
    count = len(pairs) // 2
    targets = [meant.tobytes() for meant, _ in pairs[count:]]
    documents = {target: place for place, target in enumerate(dict.fromkeys(targets))}
    right = np.array([documents[target] for target in targets])
    first = [targets.index(target) for target in documents]
    gains = []
    for vectors in zip(*pairs, strict=True):
        unit = [*map(_unit, vectors)]
        scores = _similarities(unit[:count], [unit[count + place] for place in first])
        ranks = 1 + (scores > scores[np.arange(count), right][:, None]).sum(axis=1)
        gains.append(np.where(ranks <= CUT, 1 / np.log2(1 + ranks), 0.0))
    reference, found = (float(each.mean()) for each in gains)
    return TaskMetric(NDCG, reference, found, max(0.0, reference - found), budget)
