"""Faults in the graph `generate`: each is caught by the answers, and by nothing before them."""

import dataclasses
from pathlib import Path

import pytest

from tests.export.faults.bundles import Side, bundle_test, self_tested, side_of
from transferry.build_model.checkpoint import load_samples
from transferry.export.checks.weights import WEIGHTS
from transferry.export.faults import self_test as module
from transferry.export.faults.gate import Fault
from transferry.export.faults.one_graph_faults import one_graph_faults
from transferry.export.faults.self_test import BundleTest
from transferry.export.subject.bundle_copy import BundleCopy
from transferry.runtime.bundle.specs import ANSWERS
from transferry.runtime.proof.certificates.strength import GRAPHS
from transferry.runtime.proof.compare import Tolerance
from transferry.runtime.proof.report import Claim

LIMIT = Tolerance()


# Words of the faults that are planted; all of them in the first.
SIDES = {
    "whole_bundle_folder": ("",),
    # Faults of a prompt and of beams; the rest is the same.
    "whole_writer_bundle_folder": ("padding", "swapped", "limit", "wrong lengths"),
    "beam_bundle_folder": ("cache", "length penalty", "end tokens", "limit", "wrong log"),
}


@pytest.fixture(scope="module", params=SIDES)
def side(request: pytest.FixtureRequest) -> Side:
    run = "writer_run_folder" if "writer" in request.param else "run_folder"
    samples = load_samples(request.getfixturevalue(run))[:4]
    # Of different lengths, so that they are padded.
    texts = [text[: 12 * number] for number, text in enumerate(samples, start=1)]
    return side_of(request, run, request.param, texts)


@pytest.fixture(autouse=True)
def _answers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither graphs nor weights are compared, and the step graphs, which are honest, not run."""
    monkeypatch.setattr(module, "weights_claim", lambda *_: Claim(WEIGHTS, ""))
    monkeypatch.setattr(module, "brief_sweep", lambda config, rows: [])
    monkeypatch.setattr(module, "lengths", lambda config, sources: [])


def alone(test: BundleTest) -> BundleTest:
    return dataclasses.replace(test, fresh=None)


def test_each_fault_is_caught_by_the_answers(
    side: Side, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    gate, folder = alone(bundle_test(side, LIMIT)).gate(whole=True), tmp_path / "copy"
    honest = gate.subject.copy(folder)
    faults = one_graph_faults(honest)
    kinds = [fault.kind for fault in faults]
    outputs = {f"generate: wrong {role.replace('_', ' ')}" for role in ANSWERS}
    assert outputs <= set(kinds)
    assert len(kinds) == len(set(kinds)) >= 14
    words = SIDES[request.node.callspec.params["side"]]
    faults = [fault for fault in faults if any(word in fault.kind for word in words)]
    assert len(faults) >= len(words)
    honest.rewrite()
    honest.seal()
    copy = gate.subject.reopened(folder)
    assert not gate.caught_by(copy)
    assert not gate.changes(copy)
    honest.restore()
    found = list(gate.plant(faults, folder))
    assert len(found) == len(faults)
    assert not [item for item in found if item is None or not item.caught_by]


@pytest.mark.parametrize("side", ["whole_bundle_folder"], indirect=True)
def test_the_self_test_plants_them_and_a_blunt_check_is_found_out(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "faults_of", lambda copy: [])
    monkeypatch.setattr(BundleTest, "step_checks", lambda self, copy: iter(()))

    def lengths_alone(copy: BundleCopy) -> list[Fault]:
        return [fault for fault in one_graph_faults(copy) if fault.kind.endswith("wrong lengths")]

    monkeypatch.setattr(module, "one_graph_faults", lengths_alone)
    found = self_tested(side, LIMIT, stored=False)["generate: wrong lengths"]
    assert found.kind == "generate: wrong lengths"
    assert found.changes_answer
    assert found.passed
    assert found.caught_by not in ("", WEIGHTS, GRAPHS)
    monkeypatch.setattr(module, "whole_searches", lambda *_: [])
    missed = self_tested(side, LIMIT, stored=False)["generate: wrong lengths"]
    assert (missed.changes_answer, missed.passed) == (True, False)
