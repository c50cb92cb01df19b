"""The cost of reduced precision is reported in the users' own measures, and bounded by them."""

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.export.conftest import verified
from transferry.build_model.checkpoint import Checkpoint
from transferry.export.checks.check import Results
from transferry.export.checks.task_metrics import (
    _similarities,
    score_metrics,
    token_agreement,
    translation,
    vector_metrics,
)
from transferry.export.oracle.effort import ALL, Effort
from transferry.export.oracle.teacher_forcing import TeacherForcing, kept_share
from transferry.export.recipes import RECIPES
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.manifest import MANIFEST
from transferry.runtime.bundle.specs import PORTABLE
from transferry.runtime.decoding.hypothesis import Hypothesis
from transferry.runtime.errors import InputError
from transferry.runtime.io.whole import sha256
from transferry.runtime.precision import FLOAT32, INT8, Precision
from transferry.runtime.proof.compare import Tolerance
from transferry.runtime.proof.report import (
    COSINE,
    LABELS,
    LEAST_COSINE,
    NDCG,
    NEIGHBOURS,
    RANKS,
    Claim,
    ParityReport,
    TaskMetric,
)

WEIGHTS = "portable/weights.bin"
BRIEF = Effort(8, vocabulary=False, batch_rows=4, most_cases=4)


def rounded(folder: Path, copy: Path, precision: str, bits: int) -> Bundle:
    """A copy of a bundle whose weights have so many bits of mantissa."""
    shutil.copytree(folder, copy)
    words = np.fromfile(copy / WEIGHTS, np.uint32)
    dropped = 23 - bits
    # To the nearest: half of the last kept bit is added, then the rest is cut off.
    words = (words + np.uint32(1 << (dropped - 1))) & ~np.uint32((1 << dropped) - 1)
    words.tofile(copy / WEIGHTS)
    record = json.loads((copy / MANIFEST).read_bytes())
    record["files"][WEIGHTS]["sha256"] = sha256(copy / WEIGHTS)
    variant = record["variants"]["portable"]
    variant["precision"] = variant["cache"]["type"] = precision
    (copy / MANIFEST).write_text(json.dumps(record), encoding="utf-8")
    return Bundle.load(copy)


def verify(
    checkpoint: Checkpoint,
    bundle: Bundle,
    texts: list[str],
    targets: list[str] | None = None,
    effort: Effort = ALL,
) -> ParityReport:
    targets = [text.upper() for text in texts] if targets is None else targets
    with pytest.MonkeyPatch.context() as patch:
        # As if the portable variant were made in this precision.
        recipe = dataclasses.replace(
            RECIPES[PORTABLE], precision=Precision.of(bundle.variant().precision)
        )
        patch.setitem(RECIPES, PORTABLE, recipe)
        # The file still holds float32.
        patch.setattr("transferry.export.verify.weights_claim", lambda *_: Claim("weights"))
        return verified(checkpoint, bundle, texts, targets=targets, effort=effort)


def test_half_precision_passes_as_what_it_is(
    checkpoint: Checkpoint, bundle_folder: Path, texts: list[str], tmp_path: Path
) -> None:
    report = verify(checkpoint, rounded(bundle_folder, tmp_path / "b", "float16", 10), texts[:8])
    report.require()
    assert report.tolerance == Tolerance.of("float16")
    assert max(stage.error for stage in report.stages()) > 1e-5, "it is not float32"
    assert [metric.measure for metric in report.task_metrics] == [
        *("equivalent choices", "worst choice", "token agreement"),
        *("sacreBLEU greedy", "sacreBLEU beam 4", "perplexity"),
    ]


def test_four_bits_do_not_pass_for_half_precision(
    checkpoint: Checkpoint, bundle_folder: Path, texts: list[str], tmp_path: Path
) -> None:
    """And users of the model would see it: the tasks fail by themselves."""
    bundle = rounded(bundle_folder, tmp_path / "b", "float16", 2)
    report = verify(checkpoint, bundle, texts[:8], effort=BRIEF)
    assert not report.passed
    assert any(not metric.passed for metric in report.task_metrics)


def test_an_unknown_precision_has_no_budget() -> None:
    with pytest.raises(InputError, match="found 'float8'"):
        Tolerance.of("float8")


def pairs(*answers: tuple[tuple[int, ...], tuple[int, ...]]) -> list[Any]:
    return [[Hypothesis(tokens, -1.0, -1.0, "end") for tokens in both] for both in answers]


def test_agreement_is_the_share_of_tokens_in_the_same_place() -> None:
    metric = token_agreement(pairs(((5, 6, 7), (5, 9, 7)), ((8,), (8, 9)), ((), ())))
    assert (metric.found, metric.change, metric.passed) == (0.6, 0.4, True)
    assert not dataclasses.replace(metric, budget=0.3).passed
    assert token_agreement(pairs(((), ()))).found == 1.0


def test_a_gain_in_bleu_is_no_change(checkpoint: Checkpoint, texts: list[str]) -> None:
    tokenizer = checkpoint.tokenizer
    right, wrong = (tuple(tokenizer.encode(text)) for text in texts[:2])
    for both, passed in (((right, wrong), False), ((wrong, right), True)):
        metric = translation(tokenizer, "greedy", pairs(both), [texts[0]], 0.3)
        assert metric.passed is passed
        assert max(metric.reference, metric.found) == pytest.approx(100.0)


def test_a_loss_that_may_be_chance_passes(checkpoint: Checkpoint, texts: list[str]) -> None:
    """One answer of eight is worse: resampled, every third set of eight lacks it."""
    tokenizer = checkpoint.tokenizer
    right = [tuple(tokenizer.encode(text)) for text in texts[:8]]
    for worse, passed in ((1, True), (8, False)):
        answered = [right[(row + 1) % 8] if row < worse else right[row] for row in range(8)]
        both = pairs(*zip(right, answered, strict=True))
        metric = translation(tokenizer, "greedy", both, texts[:8], 0.3)
        assert metric.change > 0.3
        assert (metric.passed, metric.p_value >= 0.05) == (passed, passed)


def vectors(count: int, noise: float, seed: int = 0) -> Results:
    """Random vectors, and the same with noise."""
    rng = np.random.default_rng(seed)
    exact = rng.normal(size=(count, 24))
    return list(zip(exact, exact + noise * rng.normal(size=exact.shape), strict=True))


@pytest.mark.parametrize(("noise", "lossy"), [(0.02, False), (0.3, True), (np.nan, True)])
def test_vectors_are_limited(noise: float, lossy: bool) -> None:
    metrics = vector_metrics(vectors(100, noise), INT8.task, searched=False)
    assert [each.measure for each in metrics] == [COSINE, LEAST_COSINE, NEIGHBOURS, RANKS]
    assert {each.passed for each in metrics} == {not lossy}
    assert all(each.passed for each in vector_metrics(vectors(9, 0), FLOAT32.task, searched=False))


def test_vectors_of_tokens_are_compared_by_maxsim() -> None:
    """Noise after the first token of each text; similarities from loops over tokens."""
    rng = np.random.default_rng(0)
    exact = [rng.normal(size=(1 + number % 4, 6)) for number in range(40)]
    units = [each / np.linalg.norm(each, axis=1, keepdims=True) for each in exact]
    plain = [
        [np.mean([max(token @ other for other in two) for token in one]) for two in units[:9]]
        for one in units
    ]
    np.testing.assert_allclose(_similarities(units, units[:9]), plain)
    for noise, lossy in ((0.0, False), (0.5, True)):
        found = [each + noise * rng.normal(size=each.shape) for each in exact]
        for one, other in zip(found, exact, strict=True):
            one[0] = other[0]
        pairs = list(zip(exact, found, strict=True))
        metrics = vector_metrics(pairs, INT8.task, searched=True)
        assert all(each.passed for each in metrics) is not lossy


def test_neighbours_are_those_of_different_texts() -> None:
    """Of four texts, one twice: in the variant the last one is nearest to the second."""
    exact = [np.array(each, float) for each in ([1, 0], [1, 0.1], [0, 1], [0.2, 1], [0, 1])]
    found = [*exact[:3], np.array([1, 0.2]), exact[4]]
    metrics = vector_metrics(list(zip(exact, found, strict=True)), INT8.task, searched=False)
    (kept,) = (each for each in metrics if each.measure == NEIGHBOURS)
    assert (kept.found, kept.passed) == (0.5, False)


def test_a_share_of_few_may_be_lost_by_chance() -> None:
    """Two or more of 20 where 5 % may be lost: 1 - 0.95^20 - 20 * 0.05 * 0.95^19."""
    expected = 1 - 0.95**20 - 0.95**19
    assert kept_share(LABELS, 18, 20, 0.05).p_value == pytest.approx(expected)
    assert [kept_share(LABELS, kept, 20, 0.05).passed for kept in (19, 18, 14)] == [True] * 2 + [
        False
    ]
    for tokens, passed in ((10, True), (100, False)):
        forcing = TeacherForcing()
        forcing.tokens, forcing.equivalent = tokens, tokens * 9 // 10
        assert forcing.choices(0.02).passed == passed


def test_the_rank_correlation_is_spearmans() -> None:
    """Deviations of the ranks: -2 -.5 -.5 1 2 and -2 1 -.5 -.5 2; of two scores the worse one's."""
    one, other = [1.0, 2.0, 2.0, 4.0, 5.0], [1.0, 3.0, 2.0, 2.0, 9.0]
    pairs = [(np.array([a, a]), np.array([a, b])) for a, b in zip(one, other, strict=True)]
    (metric,) = score_metrics(pairs, INT8.task)
    assert metric.found == pytest.approx(7.25 / 9.5)
    assert not metric.passed
    assert score_metrics([], INT8.task) == []


def test_a_search_loses_the_gain_of_targets_found_later() -> None:
    """Four texts look for three different targets; the variant puts one of them second."""
    axes = np.eye(3)
    meant = [*axes, axes[2], *axes, axes[2]]
    found = [axes[0] + 2 * axes[1], *meant[1:]]
    metrics = vector_metrics(list(zip(meant, found, strict=True)), INT8.task, searched=True)
    (loss,) = (each for each in metrics if each.measure == NDCG)
    assert (loss.reference, loss.passed) == (1.0, False)
    assert loss.change == pytest.approx((1 - 1 / np.log2(3)) / 4)


def test_what_cannot_be_measured_does_not_pass() -> None:
    assert not TaskMetric("perplexity", 3.0, math.nan, math.nan, 0.1).passed


def test_targets_must_go_with_the_texts(
    checkpoint: Checkpoint, bundle: Bundle, texts: list[str]
) -> None:
    with pytest.raises(InputError, match=r"expected a target for each of 3 texts.*found 1"):
        verify(checkpoint, bundle, texts[:3], texts[:1])
