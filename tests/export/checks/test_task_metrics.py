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
from transferry.export.checks.task_metrics import token_agreement, translation
from transferry.export.recipes import RECIPES
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.manifest import MANIFEST
from transferry.runtime.bundle.specs import PORTABLE
from transferry.runtime.decoding.hypothesis import Hypothesis
from transferry.runtime.errors import InputError
from transferry.runtime.io.whole import sha256
from transferry.runtime.precision import Precision
from transferry.runtime.proof.compare import Tolerance
from transferry.runtime.proof.report import Claim, ParityReport, TaskMetric

WEIGHTS = "portable/weights.bin"


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
    checkpoint: Checkpoint, bundle: Bundle, texts: list[str], targets: list[str] | None = None
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
        return verified(checkpoint, bundle, texts, targets=targets)


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


def test_half_precision_does_not_pass_for_float32(
    checkpoint: Checkpoint, bundle_folder: Path, texts: list[str], tmp_path: Path
) -> None:
    report = verify(checkpoint, rounded(bundle_folder, tmp_path / "b", "float32", 10), texts[:2])
    faulty = {stage.name for stage in report.stages() if stage.faults}
    assert faulty == {"encoder", "first step", "later step", "text"}


def test_four_bits_do_not_pass_for_half_precision(
    checkpoint: Checkpoint, bundle_folder: Path, texts: list[str], tmp_path: Path
) -> None:
    """And users of the model would see it: the tasks fail by themselves."""
    report = verify(checkpoint, rounded(bundle_folder, tmp_path / "b", "float16", 2), texts[:8])
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


def test_what_cannot_be_measured_does_not_pass() -> None:
    assert not TaskMetric("perplexity", 3.0, math.nan, math.nan, 0.1).passed


def test_targets_must_go_with_the_texts(
    checkpoint: Checkpoint, bundle: Bundle, texts: list[str]
) -> None:
    with pytest.raises(InputError, match=r"expected a target for each of 3 texts.*found 1"):
        verify(checkpoint, bundle, texts[:3], texts[:1])
