"""Faults in the graph `generate`: each is caught by the answers, and by nothing before them."""

import shutil
from pathlib import Path

import pytest

from tests.traced import TRACES
from transferry.build_model.checkpoint import Checkpoint, load_checkpoint, load_samples
from transferry.export.checks.graphs import GRAPHS
from transferry.export.checks.weights import WEIGHTS
from transferry.export.faults import self_test as module
from transferry.export.faults.bundle_copy import BundleCopy
from transferry.export.faults.fault import Fault
from transferry.export.faults.one_graph_faults import one_graph_faults
from transferry.export.faults.self_test import Gate, self_test
from transferry.export.oracle.cases import source_of
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.specs import ANSWERS
from transferry.runtime.ort.open_model import open_model
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.proof.compare import Tolerance
from transferry.runtime.proof.report import Claim

Side = tuple[Checkpoint, Bundle, list[list[int]]]
LIMIT = Tolerance()


# Words of the faults that are planted; all of them in the first.
SIDES = {
    "whole_bundle_folder": ("",),
    # What concerns a prompt, and the beams; the rest is the same.
    "whole_writer_bundle_folder": ("padding", "swapped", "limit", "wrong lengths"),
    "beam_bundle_folder": ("cache", "length penalty", "end tokens", "limit", "wrong log"),
}


@pytest.fixture(scope="module", params=SIDES)
def side(request: pytest.FixtureRequest) -> Side:
    run = request.getfixturevalue(
        "writer_run_folder" if "writer" in request.param else "run_folder"
    )
    bundle = Bundle.load(request.getfixturevalue(request.param))
    checkpoint = load_checkpoint(run)
    tokenizer, config = checkpoint.tokenizer, checkpoint.model.config
    # Of different lengths, so that they are padded.
    texts = [text[: 12 * number] for number, text in enumerate(load_samples(run)[:4], start=1)]
    return checkpoint, bundle, [source_of(text, tokenizer, config, 1) for text in texts]


@pytest.fixture(autouse=True)
def _answers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither graphs nor weights are compared, and the step graphs, which are honest, not run."""
    monkeypatch.setattr(module, "fresh_graphs", lambda *_: None)
    monkeypatch.setattr(module, "weights_claim", lambda *_: Claim(WEIGHTS, ""))
    monkeypatch.setattr(module, "brief_sweep", lambda config, rows: [])
    monkeypatch.setattr(module, "lengths", lambda config, sources: [])


def test_each_fault_is_caught_by_the_answers(
    side: Side, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    checkpoint, bundle, sources = side
    model = open_model(bundle, bundle.variant(), SessionOptions())
    gate = Gate(checkpoint, bundle, model, sources, LIMIT, traces=TRACES)
    honest = BundleCopy(bundle, bundle.variant(), tmp_path / "honest", whole=True)
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
    assert not gate.check(honest.folder, whole=True)
    assert not gate.changes(honest.folder, whole=True)
    missed: list[tuple[str, bool]] = []
    for fault in faults:
        copy = BundleCopy(bundle, bundle.variant(), tmp_path / "planted", whole=True)
        fault.plant(copy)
        copy.seal()
        if not gate.check(copy.folder, whole=True):
            missed.append((fault.kind, gate.changes(copy.folder, whole=True)))
        shutil.rmtree(copy.folder)
    assert not missed


@pytest.mark.parametrize("side", ["whole_bundle_folder"], indirect=True)
def test_the_self_test_plants_them_and_a_blunt_check_is_found_out(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, bundle, sources = side
    monkeypatch.setattr(module, "faults_of", lambda copy: [])
    monkeypatch.setattr(Gate, "_checks", lambda self, model: iter(()))

    def lengths_alone(copy: BundleCopy) -> list[Fault]:
        return [fault for fault in one_graph_faults(copy) if fault.kind.endswith("wrong lengths")]

    monkeypatch.setattr(module, "one_graph_faults", lengths_alone)
    model = open_model(bundle, bundle.variant(), SessionOptions())
    asked = checkpoint, bundle, model, sources, LIMIT
    _, found = self_test(*asked, traces=TRACES)
    assert (found.kind, found.changes_answer, found.passed) == (
        "generate: wrong lengths",
        True,
        True,
    )
    assert found.caught_by not in ("", WEIGHTS, GRAPHS)
    monkeypatch.setattr(module, "check_one_graph", lambda *_: [])
    _, missed = self_test(*asked, traces=TRACES)
    assert (missed.changes_answer, missed.passed) == (True, False)
