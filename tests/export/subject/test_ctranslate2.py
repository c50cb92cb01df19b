"""Models of CTranslate2 beside torch: a sound one passes, a changed one does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ctranslate2_model import write_ctranslate2
from tests.commands import call
from transferry.build_model.checkpoint import Checkpoint, load_checkpoint, load_samples
from transferry.export.audit import ALONE, audit
from transferry.export.oracle.cases import random_case
from transferry.export.subject import ctranslate2_model
from transferry.export.subject.ctranslate2_model import CTranslate2Decoder, CTranslate2Folder
from transferry.runtime.errors import UsageError
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.proof.report import ParityReport

Converts = Callable[..., Path]
CPU = SessionOptions()


@pytest.fixture(scope="session")
def reference(run_folder: Path) -> Checkpoint:
    return load_checkpoint(run_folder)


@pytest.fixture
def converts(reference: Checkpoint, tmp_path: Path) -> Converts:
    pytest.importorskip("ctranslate2", reason="of the extra peers, which is not installed")

    def make(precision: str = "float32") -> Path:
        write_ctranslate2(reference, tmp_path / precision, precision)
        return tmp_path / precision

    return make


def audited(folder: Path, reference: Checkpoint, run: Path) -> ParityReport:
    layout = CTranslate2Folder(folder, CPU)
    return audit(folder, layout, reference, load_samples(run)[:9])


def test_a_converted_model_passes(
    converts: Converts, reference: Checkpoint, run_folder: Path
) -> None:
    report = audited(converts(), reference, run_folder)
    assert report.faults == []
    assert [item.search for item in report.decisions] == [
        f"{search}, {way}"
        for search in ("greedy", "beam 4")
        for way in (ALONE, "batches of 8", "batches of 64")
    ]
    assert {item.stage for item in report.comparisons} == {"first step", "later step", "text"}
    assert [claim.name for claim in report.claims] == [
        "CTranslate2: vocabulary",
        "CTranslate2: eos_token",
        "repeated runs",
    ]
    assert report.settings["written by"] == "CTranslate2"
    assert "onnxruntime" not in report.settings


def test_another_model_fails(converts: Converts, reference: Checkpoint, run_folder: Path) -> None:
    """The audited weights are those of the reference before one of them changed."""
    folder = converts()
    changed = load_checkpoint(run_folder)
    changed.model.state_dict()["encoder.0.feed_forward.inner.weight"][0] *= 1.01
    report = audited(folder, changed, run_folder)
    assert any("exceeds the budget" in fault for fault in report.faults)


def test_int8_is_judged_as_int8(
    converts: Converts, reference: Checkpoint, run_folder: Path
) -> None:
    report = audited(converts("int8"), reference, run_folder)
    assert report.settings["precision"] == "int8"
    assert max(item.error for item in report.comparisons) > 1e-4  # it does round
    asked = CTranslate2Folder(converts(), CPU, "int8")
    special = reference.tokenizer.special
    model = CTranslate2Decoder(asked, reference.model.config, special)
    assert model.precision == "int8"


def test_steps_continue_a_target(converts: Converts, reference: Checkpoint) -> None:
    """Logits of a target read whole are those of its parts."""
    config, special = reference.model.config, reference.tokenizer.special
    model = CTranslate2Decoder(CTranslate2Folder(converts(), CPU), config, special)
    case = model.fitting(random_case(config, 3, 7, 4, seed=1))
    assert not np.isin(case.target[:, 1:], [*special.ends, special.pad_id]).any()
    state = model.start(case.source, case.mask)
    whole, _ = model.step(case.target, state)
    first, later = model.step(case.target[:, :2], state)
    second, _ = model.step(case.target[:, 2:], later)
    parts = np.concatenate([first.all_logits, second.all_logits], axis=1)
    np.testing.assert_allclose(parts, whole.all_logits, atol=1e-5)


def test_another_vocabulary_is_told(
    converts: Converts, reference: Checkpoint, run_folder: Path
) -> None:
    folder = converts()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token": "t7"}))
    layout = CTranslate2Folder(folder, CPU)
    assert [claim.problem != "" for claim in layout.claims(reference)] == [False, True]
    (folder / "shared_vocabulary.json").write_text(json.dumps(["a", "b"]))
    assert layout.claims(reference)[0].problem.startswith("has 2 tokens, the reference")


def test_mistakes_are_told(
    converts: Converts, run_folder: Path, writer_run_folder: Path, tmp_path: Path
) -> None:
    folder = converts()
    for arguments, code, message in (
        (("--reference", run_folder, "--plant"), 2, "--plant needs ONNX graphs"),
        (("--reference", run_folder, "--precision", "int4"), 2, "not in int4"),
        (("--reference", writer_run_folder), 3, str(folder)),
    ):
        refused = call("audit", folder, *arguments)
        assert refused.exit_code == code, refused.stderr
        assert message in refused.stderr
    (folder / "model.bin").write_bytes(b"no model")
    refused = call("audit", folder, "--reference", run_folder)
    assert refused.exit_code == 3
    assert "Traceback" not in refused.stderr


def test_a_missing_library_is_told(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.bin").write_bytes(b"")
    monkeypatch.setitem(__import__("sys").modules, "ctranslate2", None)
    assert ctranslate2_model.is_ctranslate2(tmp_path)
    with pytest.raises(UsageError, match="pip install ctranslate2"):
        CTranslate2Folder(tmp_path, CPU)
    refused = call("audit", tmp_path, "--reference", run_folder)
    assert refused.exit_code == 2
    assert "pip install ctranslate2" in refused.stderr
