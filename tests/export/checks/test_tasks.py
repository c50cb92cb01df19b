"""Tasks of an encoder-only model in batches, and scores: wrong batches and results are seen."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.export.conftest import opened
from tests.export.faults.bundles import Side, bundle_test, side_of
from transferry.export.checks import texts as fed
from transferry.export.checks.check import Findings, prove
from transferry.export.checks.task_metrics import task_metrics
from transferry.export.checks.tasks import ServedTasks
from transferry.export.checks.texts import scores
from transferry.export.faults import self_test
from transferry.export.faults.variant_faults import batch_faults
from transferry.export.oracle.oracle import SHAKES, Oracle
from transferry.export.oracle.results import RESULTS
from transferry.export.oracle.served import Watched
from transferry.export.oracle.teacher_forcing import TeacherForcing
from transferry.export.torch_model import TorchDecoder
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.engine.engine import Engine
from transferry.runtime.engine.tasks import embed, fill_mask
from transferry.runtime.engine.tasks.score import ScoreResult, score
from transferry.runtime.engine.tasks.table import TASKS
from transferry.runtime.ort.encoder import EncoderModel
from transferry.runtime.ort.portable_decoder import PortableDecoder
from transferry.runtime.precision import INT8
from transferry.runtime.proof.compare import Tolerance
from transferry.runtime.proof.recorded import verify_recorded
from transferry.runtime.proof.report import COSINE, LABELS, LEAST_COSINE, RANKS
from transferry.runtime.proof.tally import Tally

JUDGED = {"embed": {COSINE, LEAST_COSINE, RANKS}, "fill-mask": {LABELS}}
TEXTS = [f"the {one} {other}" for one in ("cat", "dog", "old man") for other in ("sat", "ran off")]
OF_DECODERS = {"generate", "score"}  # checks/searches.py and checks/texts.py


@pytest.fixture(scope="module")
def side(request: pytest.FixtureRequest) -> Side:
    return side_of(request, "reader_run_folder", "reader_bundle_folder", [])


@pytest.fixture
def found(side: Side) -> Callable[[], Findings]:
    checkpoint, bundle, sources = side
    texts = list(map(checkpoint.tokenizer.decode, sources))
    oracle = Oracle.of(checkpoint.model, checkpoint.tokenizer.special, Tolerance())
    model = opened(bundle, "portable")
    assert isinstance(model, EncoderModel)
    return lambda: prove(
        [ServedTasks(checkpoint, oracle, texts).check(bundle, model, model.batches)]
    )


def faults(found: Findings) -> set[str]:
    return {item.tensor for item in found.comparisons if item.fault}


def test_each_task_has_a_check() -> None:
    assert TASKS.keys() == OF_DECODERS | RESULTS.keys()


def test_an_honest_bundle_passes(found: Callable[[], Findings]) -> None:
    findings = found()
    assert faults(findings) == set()
    assert {"hidden", "logits", "vector", "fill-mask", "embed"} == {
        item.tensor for item in findings.comparisons
    }
    (decisions,) = findings.decisions
    assert (decisions.search, decisions.rows, decisions.passed) == ("fill-mask", 2, True)


@pytest.mark.parametrize("main", ["embed", "fill-mask"])
def test_a_loss_against_the_model_as_trained_is_limited(main: str, side: Side) -> None:
    """Where torch as trained has other weights, an honest bundle has lost that much."""
    checkpoint, bundle, _ = side
    special, trained = checkpoint.tokenizer.special, deepcopy(checkpoint.model)
    with torch.no_grad():
        trained.embedding.weight += 0.3 * torch.randn_like(trained.embedding.weight)
    honest = Oracle.of(checkpoint.model, special, Tolerance())
    lossy = replace(honest, trained=TorchDecoder(trained), rounds=True)
    for oracle, passed in ((honest, True), (lossy, False)):
        tasks = ServedTasks(checkpoint, oracle, TEXTS)
        tasks.main = tasks.runs = main
        model = opened(bundle, "portable")
        assert isinstance(model, EncoderModel)
        found = prove([tasks.check(bundle, model, model.batches)])
        metrics = task_metrics(found, INT8.task, checkpoint.tokenizer)
        assert {each.passed for each in metrics if each.measure in JUDGED[main]} == {passed}


def test_choices_are_compared_with_several_roundings(side: Side) -> None:
    checkpoint, _, _ = side
    oracle = Oracle.of(checkpoint.model, checkpoint.tokenizer.special, Tolerance())
    tasks = ServedTasks(checkpoint, oracle, TEXTS)
    row = next(row for each in tasks._chunks(1) for kind, row in each if kind == "fill-mask")
    exact, left, *_, meant = row.choices
    best = np.eye(exact.shape[1])[exact.argmax(axis=1)]
    shaken = replace(row, choices=[exact, left, exact + 1e-3 * best, meant])
    mask = np.array(row.row.ids) == tasks.inputs.special.mask_id
    for error, measured, passed in ((2e-3, shaken, True), (2e-3, row, False), (0.2, shaken, False)):
        served = deepcopy(dict(row.truth.oracle))
        served["logits"][0, mask] += error * best
        given, tally = replace(row, measured=partial(replace, measured)), Tally("", Tolerance())
        tasks._choose(0, given, [served], TeacherForcing(), tally)
        assert tally.decisions().passed is passed


@pytest.mark.parametrize("moved", [0.0, 1e-3])
def test_float64_measures_a_sample_and_what_is_in_doubt(moved: float, side: Side) -> None:
    """A row that is not in the sample is moved; all other sides of torch are the honest ones."""
    checkpoint, bundle, _ = side
    oracle = Oracle.of(checkpoint.model, checkpoint.tokenizer.special, Tolerance())
    served = opened(bundle, "portable")
    assert isinstance(served, EncoderModel)
    tasks = ServedTasks(checkpoint, replace(oracle, others=(oracle.exact,)), TEXTS)
    tasks.main = tasks.runs = "embed"
    ids = tasks.inputs.rows("embed")[3].ids

    def move(source: Any, mask: Any, found: Any) -> None:
        for place, length in enumerate(mask.sum(axis=1).tolist()):
            if tuple(source[place, :length].tolist()) == ids:
                found["hidden"][place] += np.float32(moved)

    known = {
        row.row.ids: row for chunk in tasks._chunks(1) for kind, row in chunk if kind == "embed"
    }
    typical = [row.tolerance.factor == 1 for row in known.values()]
    assert typical == [False] + [True] * 5
    findings = prove([tasks.check(bundle, Watched(served, move), served.batches)])
    assert faults(findings) == ({"hidden", "vector"} if moved else set())
    assert len({item.case for item in findings.comparisons if item.fault}) == (moved > 0)
    assert len(findings.vectors) >= len(TEXTS)


@pytest.mark.parametrize("fault", batch_faults(), ids=lambda fault: fault.kind)
def test_a_fault_of_batches_shows_in_text_alone(
    fault: Any, side: Side, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_test, "brief_sweep", lambda config, rows: [])
    monkeypatch.setattr(self_test, "lengths", lambda config, sources: [])
    test = replace(bundle_test(side), stored=False)
    (planted,) = test.gate().plant([fault], tmp_path / "copy")
    assert planted is not None
    assert (planted.changes_answer, planted.caught_by) == (True, "text")


@pytest.mark.parametrize(
    ("task", "call", "wrong"),
    [
        ("embed", embed._Call, lambda one: replace(one, vector=one.vector * np.float32(1.00001))),
        ("fill-mask", fill_mask._Call, lambda one: replace(one, text=one.text + ".")),
        ("fill-mask", fill_mask._Call, lambda one: replace(one, candidates=one.candidates[1:])),
    ],
)
def test_a_result_that_its_tensors_do_not_give_fails(
    task: str,
    call: Any,
    wrong: Callable[[Any], Any],
    found: Callable[[], Findings],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest = call.result
    monkeypatch.setattr(call, "result", lambda self, *given: wrong(honest(self, *given)))
    assert faults(found()) == {task}


def test_results_of_other_rows_fail(
    found: Callable[[], Findings], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = embed._Call.compute
    monkeypatch.setattr(
        embed._Call, "compute", lambda self, *given: honest(self, *given)[::-1], raising=True
    )
    assert faults(found()) == {"embed"}


def test_a_task_without_a_check_fails(
    found: Callable[[], Findings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "tasks", ["embed", "summarise"])
    findings = found()
    told = {item.tensor: item.fault for item in findings.comparisons}
    assert told["summarise"] == "summarise is not verified: it has no check"
    assert told["fill-mask"] == "fill-mask is not verified: the bundle does not offer it"


@pytest.mark.parametrize("fault", batch_faults(), ids=lambda fault: fault.kind)
def test_a_fault_of_batches_shows_against_the_record(
    fault: Any, side: Side, tmp_path: Path
) -> None:
    subject = bundle_test(side).honest
    assert verify_recorded(subject.bundle, subject.model).passed
    copy = subject.copy(tmp_path / "copy")
    fault.plant(copy)
    copy.seal()
    found = subject.reopened(copy.folder)
    report = verify_recorded(found.bundle, found.model)
    assert any("recorded rows" in item.case and item.fault for item in report.comparisons)


@pytest.fixture
def compared(oracle: Oracle, bundle: Bundle, decoder: PortableDecoder) -> Callable[..., list[str]]:
    """The faults of the scores of texts as answers to each other."""

    def faults(texts: list[str]) -> list[str]:
        pairs = list(zip(texts, texts[::-1], strict=True))
        checks = [scores(oracle, Engine.of(bundle, decoder), pairs)]
        return [item.fault for item in prove(checks).comparisons]

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


def test_scores_are_compared_with_several_roundings(
    compared: Callable[..., list[str]], texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, real = [], Oracle.runs

    def lucky(oracle: Oracle, run: Any, shakes: int = 0) -> Any:
        """torch whose error shows when it is shaken."""
        asked.append(shakes)
        exact, left, *others = real(oracle, run, shakes)
        moved = [replace(each, ranks=each.ranks + 2e-4) for each in exact]
        return [exact, left, *others, *[moved] * (shakes > 0)]

    monkeypatch.setattr(Oracle, "runs", lucky)
    assert compared(texts) == [""]
    for error, passes in ((1e-3, True), (1e-2, False)):
        spoiled = lambda *given, error=error, **options: [  # noqa: E731
            replace(row, log_probabilities=tuple(each + error for each in row.log_probabilities))
            for row in score(*given, **options)
        ]
        monkeypatch.setattr(fed, "score", spoiled)
        assert [not fault for fault in compared(texts)] == [passes]
    assert asked == [0, 0, SHAKES, 0, SHAKES]


def test_a_row_that_is_not_scored_fails(
    compared: Callable[..., list[str]], texts: list[str]
) -> None:
    faults = compared([*texts, ""])
    assert faults[0] == ""
    assert "were not scored" in faults[-1]
