"""The result of `score` is compared with the oracle, and a wrong score is seen."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from transferry.export.checks import texts as fed
from transferry.export.checks.texts import compare_scores
from transferry.export.oracle.oracle import Oracle
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.engine.engine import Engine
from transferry.runtime.engine.tasks.score import ScoreResult, score
from transferry.runtime.ort.portable_decoder import PortableDecoder


@pytest.fixture
def compared(oracle: Oracle, bundle: Bundle, decoder: PortableDecoder) -> Callable[..., list[str]]:
    """The faults of the scores of texts as answers to each other."""

    def faults(texts: list[str]) -> list[str]:
        pairs = list(zip(texts, texts[::-1], strict=True))
        return [item.fault for item in compare_scores(oracle, Engine(bundle, decoder), pairs)]

    return faults


def test_true_scores_pass(compared: Callable[..., list[str]], texts: list[str]) -> None:
    assert compared(texts) == [""]


def test_a_wrong_score_fails(
    compared: Callable[..., list[str]], texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(row: ScoreResult) -> ScoreResult:
        first, *others = row.log_probabilities
        return replace(row, log_probabilities=(first + 1e-3, *others))

    spoiled = lambda *given, **options: map(wrong, score(*given, **options))  # noqa: E731
    monkeypatch.setattr(fed, "score", spoiled)
    (fault,) = compared(texts)
    assert "exceeds the budget" in fault


def test_a_row_that_is_not_scored_fails(
    compared: Callable[..., list[str]], texts: list[str]
) -> None:
    faults = compared([*texts, ""])
    assert faults[0] == ""
    assert "were not scored" in faults[-1]
