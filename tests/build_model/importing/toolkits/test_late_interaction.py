"""Folders of PyLate and ColBERT give a vector for each token."""

import json
import string
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as parquet
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.build_model.importing.huggingface.drawn import exact
from tests.build_model.importing.huggingface.heads import TEXTS, Theirs, write, write_modules
from tests.commands import call
from tests.traced import unverified, verify
from transferry.build_model.checkpoint import Checkpoint, load_checkpoint
from transferry.build_model.importing.huggingface.importer import import_pretrained
from transferry.export.bundle import Contents
from transferry.export.checks.check import prove
from transferry.export.checks.job_files import written
from transferry.export.checks.tasks import ServedTasks
from transferry.export.oracle.oracle import Oracle
from transferry.export.verify import Request
from transferry.runtime.engine.engine import Engine
from transferry.runtime.engine.tasks import embed
from transferry.runtime.engine.tasks.embed import TokenVectorsResult
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.proof.compare import Tolerance
from transferry.runtime.proof.views import report_text

SEVERAL = [*TEXTS, "the", "mat, mat.", "the cat sat on the mat! " * 4]
LENGTHS = {"query": 12, "document": 18}
SETTINGS = {
    "query_prefix": "Q",
    "document_prefix": "D",
    "query_length": LENGTHS["query"],
    "document_length": LENGTHS["document"],
    "skiplist_words": [".", ",", "!"],
    "prompts": {"query": "", "document": ""},
    "similarity_fn_name": "MaxSim",
    "model_type": "ColBERT",
}


def pylate_folder(folder: Path, width: int, **settings: Any) -> torch.Tensor:
    """Adds what ColBERT.save of PyLate 1.6 writes beside the model; returns the projection."""
    kinds = ("sentence_transformers.models.Transformer", "pylate.models.Dense.Dense")
    _, place = write_modules(folder, *kinds)
    write(folder / "config_sentence_transformers.json", {**SETTINGS, **settings})
    write(folder / "sentence_bert_config.json", {"max_seq_length": 17, "do_lower_case": False})
    identity = "torch.nn.modules.linear.Identity"
    dense = {"in_features": width, "out_features": 8, "bias": False, "use_residual": False}
    write(place / "config.json", {**dense, "activation_function": identity})
    weight = torch.randn(8, width)
    save_file({"linear.weight": weight}, place / "model.safetensors")
    return weight


@torch.inference_mode()
def vectors(
    theirs: Theirs,
    weight: torch.Tensor,
    text: str,
    side: str,
    *,
    prefix: str = "",
    skipped: str = ".,!",
    expands: bool = True,
    attends: bool = False,
) -> Any:
    """The formulas of ColBERT (sections 3.2 and 3.3) on transformers' own model."""
    known, most = theirs.tokenizer.get_vocab(), LENGTHS[side] - 1
    read = theirs.tokenizer(text, truncation=True, max_length=most, split_special_tokens=True)
    first, *rest = read["input_ids"]
    ids = [first, known[prefix or side[0].upper()], *rest]
    seen = [1] * len(ids)
    if side == "query" and expands:
        more = LENGTHS[side] - len(ids)
        ids, seen = ids + [theirs.tokenizer.mask_token_id] * more, seen + [int(attends)] * more
    with exact():
        hidden = theirs.model(
            input_ids=torch.tensor([ids]), attention_mask=torch.tensor([seen])
        ).last_hidden_state[0]
    found = torch.nn.functional.normalize(hidden @ weight.double().T, dim=-1)
    left_out = {known[each] for each in skipped} if side == "document" else set()
    return found[[token not in left_out for token in ids]].numpy()


@pytest.mark.parametrize(
    ("kind", "ways"),
    [
        ("bert", {}),
        ("roberta", {"attend_to_expansion_tokens": True}),
        ("distilbert", {"do_query_expansion": False}),
        ("modernbert", {}),
    ],
)
def test_vectors_are_those_of_the_formulas(
    kind: str, ways: dict[str, bool], tmp_path: Path
) -> None:
    own = {"local_attention": 64} if kind == "modernbert" else {}
    theirs = Theirs(kind, 1, tmp_path / "theirs", "Model", **own)
    weight = pylate_folder(tmp_path / "theirs", theirs.model.config.hidden_size, **ways)
    import_pretrained(tmp_path / "theirs", tmp_path / "run")
    checkpoint = load_checkpoint(tmp_path / "run")
    model, head = checkpoint.model.double(), checkpoint.head
    assert head is not None and head.vectors == "tokens"
    named: dict[str, Any] = {
        "expands": ways.get("do_query_expansion", True),
        "attends": ways.get("attend_to_expansion_tokens", False),
    }
    for name, side in head.sides.items():
        for text in TEXTS:
            wanted = vectors(theirs, weight, text, name, **named)
            ids = checkpoint.tokenizer.encode(text)[: side.longest - 3]
            ids = [*checkpoint.tokenizer.special.before, *side.before, *ids, 2]
            ids += [side.fill] * ((side.longest - len(ids)) if side.fill >= 0 else 0)
            mask = torch.tensor([[True] * len(ids) + [False] * 2])
            with torch.inference_mode():
                found = model.answers(torch.tensor([[*ids, 5, 6]]), mask)["head"][0, : len(ids)]
            found = found[[token not in side.skipped for token in ids]]
            assert np.abs(found.numpy() - wanted).max() <= 1e-9


def test_folders_of_colbert_are_imported(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    theirs = Theirs("bert", 2, folder, "Model")
    width, weight = theirs.model.config.hidden_size, torch.randn(8, 32)
    assert width == 32
    tensors = {
        f"bert.{name}": each for name, each in load_file(folder / "model.safetensors").items()
    }
    save_file({**tensors, "linear.weight": weight}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    write(folder / "config.json", {**config, "architectures": ["HF_ColBERT"]})
    lengths = {"query_maxlen": LENGTHS["query"], "doc_maxlen": LENGTHS["document"]}
    tokens = {"query_token_id": "Q", "doc_token_id": "D", "query_token": "[Q]", "lr": 1e-5}
    write(folder / "artifact.metadata", {**lengths, **tokens, "dim": 8, "nbits": 1})
    import_pretrained(folder, tmp_path / "run")
    checkpoint = load_checkpoint(tmp_path / "run")
    head, known = checkpoint.head, theirs.tokenizer.get_vocab()
    assert head is not None and head.default_prompt == "document"
    assert {*head.sides["document"].skipped} == {known[each] for each in string.punctuation}
    query = head.sides["query"]
    assert (query.longest, query.fill, query.before) == (12, known["<mask>"], (known["Q"],))
    assert checkpoint.model.config.unseen_token == query.fill
    ids = [0, *query.before, *checkpoint.tokenizer.encode("the cat"), 2]
    ids += [query.fill] * (12 - len(ids))
    with torch.inference_mode():
        model = checkpoint.model.double()
        found = model.answers(torch.tensor([ids]), torch.ones(1, 12, dtype=torch.bool))["head"][0]
    wanted = vectors(theirs, weight, "the cat", "query")
    assert np.abs(found.numpy() - wanted).max() <= 1e-9


class Made(NamedTuple):
    theirs: Theirs
    weight: torch.Tensor
    checkpoint: Checkpoint
    bundle: Path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp("colbert")
    theirs = Theirs("bert", 0, root / "theirs", "Model")
    weight = pylate_folder(root / "theirs", theirs.model.config.hidden_size)
    import_pretrained(root / "theirs", root / "run")
    checkpoint = load_checkpoint(root / "run")
    unverified(checkpoint, root / "bundle", Contents(texts=TEXTS[:3], variants=["cpu-fp32"]))
    return Made(theirs, weight, checkpoint, root / "bundle")


@pytest.mark.parametrize("variant", ["portable", "cpu-fp32"])
def test_engine_gives_these_vectors_in_any_batch(variant: str, made: Made) -> None:
    with Engine(made.bundle, variant=variant) as engine:
        for side in ("query", "document"):
            found = list(engine.embed(SEVERAL, prompt=side))
            for text, row in zip(SEVERAL, found, strict=True):
                (alone,) = engine.embed([text], prompt=side)
                wanted = vectors(made.theirs, made.weight, text, side)
                assert isinstance(row, TokenVectorsResult) and row.error is None
                assert row.vectors.shape == wanted.shape
                assert np.abs(row.vectors - wanted).max() < 1e-5
                assert row.vectors.tobytes() == alone.vectors.tobytes()
        (usual,) = engine.embed(["mat."])
        (named,) = engine.embed(["mat."], prompt="document")
        assert usual.vectors.tobytes() == named.vectors.tobytes()
        for wrong, told in (
            ({"pooling": "mean"}, "no effect on a vector for each token"),
            ({"normalise": True}, "no effect on a vector for each token"),
            ({"top": 3}, "no effect on a vector for each token"),
            ({"prompt": "passage"}, "prompt must be query or document"),
        ):
            with pytest.raises(UsageError, match=told):
                engine.embed(["mat"], **wrong)


def test_batches_are_verified_and_faults_seen(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(made.bundle) as engine:
        report = verify(made.checkpoint, engine.bundle, engine.model, Request(SEVERAL[2:5]))
        assert report.passed, report_text(report)
        assert "embed" in report.settings["tasks"]
        assert written(engine, TEXTS).problem == ""
        special, model = made.checkpoint.tokenizer.special, engine.encoder
        oracle = Oracle.of(made.checkpoint.model, special, Tolerance())
        tasks = ServedTasks(made.checkpoint, oracle, SEVERAL[2:4])
        honest = embed._TokensCall._item

        def told() -> set[str]:
            found = prove([tasks.check(engine.bundle, model, model.batches)])
            return {each.tensor for each in found.comparisons if each.fault}

        def unfilled(call: Any, asked: Any, row: Any) -> Any:
            call.side = replace(call.side, fill=-1)
            return honest(call, asked, row)

        def kept(call: Any, asked: Any, row: Any) -> Any:
            call.skipped = call.skipped[:0]
            return honest(call, asked, row)

        monkeypatch.setattr(embed._TokensCall, "_item", unfilled)
        assert told() == {"source", "embed"}
        tasks = ServedTasks(made.checkpoint, oracle, ["mat, mat."])
        monkeypatch.setattr(embed._TokensCall, "_item", kept)
        assert told() == {"embed"}


def test_jobs_write_lists_of_vectors(made: Made, tmp_path: Path) -> None:
    rows = tmp_path / "rows.txt"
    rows.write_text("".join(f"{text}\n" for text in [*SEVERAL, ""]), encoding="utf-8")
    run = ("run", made.bundle, rows, "--task", "embed", "--prompt")
    with Engine(made.bundle) as engine:
        for side, ending in (("query", "jsonl"), ("document", "jsonl"), ("document", "parquet")):
            out = tmp_path / f"{side}.{ending}"
            ran = call(*run, side, "-o", out, "--canary", "1/1")
            assert ran.exit_code == 6, ran.stderr
            assert f"canaries identical {len(SEVERAL) + 1}" in ran.stderr
            if ending == "jsonl":
                lines = out.read_text(encoding="utf-8").splitlines()
                records = [json.loads(line) for line in lines]
                assert records[-1]["error"]["kind"] == "empty"
            else:
                records = parquet.read_table(out).to_pylist()
                assert records[-1]["vectors"] is None
            for row, record in zip(engine.embed(SEVERAL, prompt=side), records, strict=False):
                assert np.array(record["vectors"], np.float32).tolist() == row.vectors.tolist()
    refused = call(*run, "query", "-o", tmp_path / "a.npy")
    assert refused.exit_code == 2 and "npy holds no vectors of tokens" in refused.stderr
    refused = call(*run, "passage", "-o", tmp_path / "a.jsonl")
    assert refused.exit_code == 2 and "prompt must be query or document" in refused.stderr


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("bert", {"query_prefix": "[Q] "}, r'prefix of a query is "\[Q\] ", which cannot'),
        ("bert", {"skiplist_words": "."}, "supported: a list of words"),
        ("bert", {"prompts": {"query": "ask: "}}, "prompts is"),
        ("bert", {"query_length": 2}, "more than 3"),
        ("modernbert", {"local_attention": 4}, "false without a window of 3"),
        ("bert", {"pruned": 3}, "expected settings that import knows, found pruned"),
    ],
)
def test_folders_that_do_not_fit_are_refused(
    kind: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    own = {name: settings.pop(name) for name in [*settings] if name == "local_attention"}
    theirs = Theirs(kind, 0, tmp_path / "theirs", "Model", **own)
    pylate_folder(tmp_path / "theirs", theirs.model.config.hidden_size, **settings)
    with pytest.raises(InputError, match=message):
        import_pretrained(tmp_path / "theirs", tmp_path / "run")
