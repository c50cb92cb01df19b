"""The result of `score` is compared with the oracle, and a wrong score is seen."""

from dataclasses import replace

import pytest

from transferry.export.checks import scores as text_scores
from transferry.export.checks.scores import compare_scores
from transferry.export.oracle.oracle import Oracle
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.engine.engine import Engine
from transferry.runtime.engine.tasks.score import ScoreResult, score
from transferry.runtime.ort.portable_decoder import PortableDecoder


def compared(
    oracle: Oracle, bundle: Bundle, decoder: PortableDecoder, texts: list[str]
) -> list[str]:
    pairs = list(zip(texts, texts[::-1], strict=True))
    found = compare_scores(oracle, Engine(bundle, decoder), pairs)
    return [item.fault for item in found]


def test_true_scores_pass(
    oracle: Oracle, bundle: Bundle, decoder: PortableDecoder, texts: list[str]
) -> None:
    assert compared(oracle, bundle, decoder, texts) == [""]


def test_a_wrong_score_fails(
    oracle: Oracle,
    bundle: Bundle,
    decoder: PortableDecoder,
    texts: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrong(row: ScoreResult) -> ScoreResult:
        first, *others = row.log_probabilities
        return replace(row, log_probabilities=(first + 1e-3, *others))

    monkeypatch.setattr(
        text_scores, "score", lambda *given, **options: map(wrong, score(*given, **options))
    )
    (fault,) = compared(oracle, bundle, decoder, texts)
    assert "exceeds the budget" in fault


def test_a_row_that_is_not_scored_fails(
    oracle: Oracle, bundle: Bundle, decoder: PortableDecoder, texts: list[str]
) -> None:
    faults = compared(oracle, bundle, decoder, [*texts, ""])
    assert faults[0] == ""
    assert "were not scored" in faults[-1]
