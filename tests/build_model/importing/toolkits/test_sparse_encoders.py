"""Sparse encoders of sentence-transformers (SPLADE) give its weights."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as parquet
import pytest
import torch

from tests.build_model.importing.huggingface.heads import TEXTS, Theirs, write, write_modules
from tests.commands import call
from tests.traced import unverified, verify
from transferry.build_model.checkpoint import Checkpoint, load_checkpoint
from transferry.build_model.importing.huggingface.importer import import_pretrained
from transferry.export.bundle import Contents
from transferry.export.checks.check import prove
from transferry.export.checks.job_files import written
from transferry.export.checks.tasks import ServedTasks
from transferry.export.oracle.cases import random_case
from transferry.export.oracle.followed import ShownModel, followed
from transferry.export.oracle.oracle import Oracle
from transferry.export.rewrite.calibration import Calibration
from transferry.export.verify import Request
from transferry.runtime.engine.engine import Engine
from transferry.runtime.engine.tasks import embed
from transferry.runtime.engine.tasks.embed import SparseResult
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.proof.compare import Tolerance
from transferry.runtime.proof.views import report_text

SEVERAL = [*TEXTS, "the", "mat mat", "the cat sat on the mat, " * 7]


def sparse_folder(folder: Path, pooling: Mapping[str, Any], first: str = "Transformer") -> None:
    """Adds what SparseEncoder.save writes beside the masked language model."""
    package = "sentence_transformers.sparse_encoder.models"
    _, place = write_modules(folder, f"{package}.{first}", f"{package}.SpladePooling")
    write(folder / "config_sentence_transformers.json", {"model_type": "SparseEncoder"})
    reading = {"max_seq_length": 40, "do_lower_case": False}
    write(folder / "sentence_bert_config.json", {**reading, "transformer_task": "fill-mask"})
    write(place / "config.json", dict(pooling))


@torch.inference_mode()
def weights(theirs: Theirs, text: str, *, strategy: str = "max", twice: bool = False) -> Any:
    """As SpladePooling.forward of sentence-transformers 6.2, for a text without padding."""
    logits = theirs(text, truncation=True, max_length=40).logits[0]
    found = torch.log1p(torch.relu(logits))
    found = torch.log1p(found) if twice else found
    return (found.amax(dim=0) if strategy == "max" else found.sum(dim=0)).numpy()


@pytest.mark.parametrize(
    ("kind", "pooling"),
    [
        ("bert", {"pooling_strategy": "max", "activation_function": "relu"}),
        ("distilbert", {"pooling_strategy": "sum", "activation_function": "log1p_relu"}),
        pytest.param(
            *("roberta", {"pooling_strategy": "max", "activation_function": "log1p_relu"}),
            marks=pytest.mark.thorough,
        ),
        ("modernbert", {"pooling_strategy": "sum", "word_embedding_dimension": None}),
    ],
)
def test_weights_are_theirs(kind: str, pooling: dict[str, Any], tmp_path: Path) -> None:
    theirs = Theirs(kind, 1, tmp_path / "theirs", "ForMaskedLM")
    sparse_folder(
        tmp_path / "theirs", pooling, "MLMTransformer" if kind == "bert" else "Transformer"
    )
    import_pretrained(tmp_path / "theirs", tmp_path / "run")
    checkpoint = load_checkpoint(tmp_path / "run")
    assert checkpoint.head is not None
    assert (checkpoint.head.vectors, checkpoint.head.longest) == ("sparse", 40)
    twice = pooling.get("activation_function") == "log1p_relu"
    model = checkpoint.model.double()
    for text in TEXTS:
        ids = checkpoint.tokenizer.special.wrap(checkpoint.tokenizer.encode(text))
        ids = ids[:39] + ids[-1:] if len(ids) > 40 else ids
        mask = torch.tensor([[True] * len(ids) + [False] * 2])
        with torch.inference_mode():
            found = model.answers(torch.tensor([[*ids, 5, 6]]), mask)["head"][0]
        wanted = weights(theirs, text, strategy=pooling["pooling_strategy"], twice=twice)
        assert np.abs(found.numpy() - wanted).max() <= 1e-9


class Made(NamedTuple):
    theirs: Theirs
    checkpoint: Checkpoint
    bundle: Path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp("sparse")
    theirs = Theirs("bert", 0, root / "theirs", "ForMaskedLM")
    sparse_folder(root / "theirs", {"pooling_strategy": "max", "activation_function": "relu"})
    import_pretrained(root / "theirs", root / "run")
    checkpoint = load_checkpoint(root / "run")
    unverified(checkpoint, root / "bundle", Contents(texts=TEXTS[:3], variants=["cpu-fp32"]))
    return Made(theirs, checkpoint, root / "bundle")


@pytest.mark.parametrize("variant", ["portable", "cpu-fp32"])
def test_sparse_vectors_are_theirs(variant: str, made: Made) -> None:
    names = {token: name for name, token in made.checkpoint.tokenizer.vocabulary().items()}
    with Engine(made.bundle, variant=variant) as engine:
        found = list(engine.embed(SEVERAL))
        few = list(engine.embed(SEVERAL, top=3))
        alone = [next(iter(engine.embed([text]))) for text in SEVERAL]
        (unit,) = engine.embed(["the"], normalise=True)
        assert len(next(iter(engine.embed(["the"], pooling="mean"))).vector) == 32
    assert found == alone  # whatever the other rows of a batch
    for row, short, text in zip(found, few, SEVERAL, strict=True):
        wanted = weights(made.theirs, text)
        assert isinstance(row, SparseResult) and row.error is None
        dense = np.zeros(len(wanted))
        dense[[*row.indices]] = row.weights
        assert np.abs(dense - wanted).max() < 1e-5
        assert sorted(row.weights, reverse=True) == [*row.weights] and min(row.weights) > 0
        assert row.tokens == tuple(names[token] for token in row.indices)
        assert (short.indices, short.weights) == (row.indices[:3], row.weights[:3])
    assert abs(np.linalg.norm(unit.weights) - 1) < 1e-6


def test_batches_are_verified_and_faults_seen(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(made.bundle) as engine:
        report = verify(made.checkpoint, engine.bundle, engine.model, Request(SEVERAL[:1:-1]))
        assert report.passed, report_text(report)
        assert "embed" in report.settings["tasks"]
        assert written(engine, TEXTS).problem == ""
        special, model = made.checkpoint.tokenizer.special, engine.encoder
        oracle = Oracle.of(made.checkpoint.model, special, Tolerance())
        tasks = ServedTasks(made.checkpoint, oracle, SEVERAL[2:4])
        honest = embed._SparseCall.result

        def shifted(one: SparseResult) -> SparseResult:
            return replace(one, indices=tuple(token + 1 for token in one.indices))

        wrong: Any = lambda *given: shifted(honest(*given))  # noqa: E731
        monkeypatch.setattr(embed._SparseCall, "result", wrong)
        found = prove([tasks.check(engine.bundle, model, model.batches)])
    assert {each.tensor for each in found.comparisons if each.fault} == {"embed"}


def test_in_8_bits_the_head_is_as_exact_as_in_float32(made: Made, tmp_path: Path) -> None:
    model, special = made.checkpoint.model, made.checkpoint.tokenizer.special
    given = Contents(variants=["cpu-int8"], calibrate=[*TEXTS, *SEVERAL])
    unverified(made.checkpoint, tmp_path / "bundle", given)
    with Engine(tmp_path / "bundle", variant="cpu-int8") as engine:
        variant = engine.bundle.variant("cpu-int8")
        shown = ShownModel(engine.bundle, engine.model)
        calibration = Calibration.of(engine.bundle, variant)
        oracle = Oracle.of(model, special, Tolerance.of("int8"), calibration=calibration)
        for seed in (4, 20):  # states moved across a border of two integers
            case = random_case(model.config, 1, 60, 0, seed=seed)
            found = followed(oracle, shown, case)[1]
            assert not [item.fault for item in found if item.fault]
            assert max(item.budget for item in found[1:]) < 1e-4


def test_jobs_write_sparse_columns(made: Made, tmp_path: Path) -> None:
    rows = tmp_path / "rows.txt"
    rows.write_text("".join(f"{text}\n" for text in [*SEVERAL, ""]), encoding="utf-8")
    outs = {ending: tmp_path / f"out.{ending}" for ending in ("jsonl", "parquet")}
    for out in outs.values():
        ran = call("run", made.bundle, rows, "-o", out, "--task", "embed", "--canary", "1/1")
        assert ran.exit_code == 6, ran.stderr
        assert "canaries identical 8" in ran.stderr
    lines = [json.loads(line) for line in outs["jsonl"].read_text(encoding="utf-8").splitlines()]
    table = parquet.read_table(outs["parquet"]).to_pylist()
    with Engine(made.bundle) as engine:
        for row, line, cells in zip(engine.embed(SEVERAL), lines, table, strict=False):
            assert line["weights"].keys() == {*row.tokens}
            assert np.array([*line["weights"].values()], np.float32).tolist() == [*row.weights]
            assert cells["indices"] == [*row.indices]
            assert np.array(cells["values"], np.float32).tolist() == [*row.weights]
        assert lines[-1]["error"]["kind"] == "empty" and table[-1]["indices"] is None
        with pytest.raises(UsageError, match="no effect on dense vectors"):
            engine.embed(SEVERAL, pooling="mean", top=3)
    few = tmp_path / "few.jsonl"
    ran = call("run", made.bundle, rows, "-o", few, "--task", "embed", "--top", "2")
    assert ran.exit_code == 6, ran.stderr
    first = json.loads(few.read_text(encoding="utf-8").splitlines()[0])
    assert first["weights"] == dict([*lines[0]["weights"].items()][:2])
    refused = call("run", made.bundle, rows, "-o", tmp_path / "a.npy", "--task", "embed")
    assert refused.exit_code == 2 and "npy holds no sparse vectors" in refused.stderr


@pytest.mark.parametrize(
    ("suffix", "pooling", "message"),
    [
        ("ForMaskedLM", {"pooling_strategy": "mean"}, 'pooling_strategy is "mean"'),
        ("ForMaskedLM", {"activation_function": "gelu"}, 'activation_function is "gelu"'),
        ("Model", {}, "another kind without logits"),
    ],
)
def test_folders_that_do_not_fit_are_refused(
    suffix: str, pooling: dict[str, Any], message: str, tmp_path: Path
) -> None:
    Theirs("bert", 0, tmp_path / "theirs", suffix)
    sparse_folder(tmp_path / "theirs", pooling)
    with pytest.raises(InputError, match=message):
        import_pretrained(tmp_path / "theirs", tmp_path / "run")
