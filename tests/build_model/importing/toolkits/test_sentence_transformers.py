"""Folders of sentence-transformers give its vectors."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.build_model.importing.huggingface.drawn import SEEDS, TYPES
from tests.build_model.importing.huggingface.heads import (
    EXPORTED,
    T5_KINDS,
    TEXTS,
    Theirs,
    write,
    write_modules,
)
from tests.build_model.importing.huggingface.test_classifiers import PAIRS, PROBLEMS
from tests.commands import done
from tests.traced import unverified, verify
from transferry.build_model.checkpoint import load_checkpoint
from transferry.build_model.importing.huggingface.encoder_only import FAMILIES
from transferry.build_model.importing.huggingface.importer import import_pretrained
from transferry.export.bundle import Contents
from transferry.export.verify import Request
from transferry.runtime.bundle.head import HeadSettings
from transferry.runtime.engine.engine import Engine
from transferry.runtime.engine.tasks.embed import embed
from transferry.runtime.engine.tasks.rank import rank
from transferry.runtime.errors import InputError, UsageError

ALL_POOLINGS = ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
LENGTH = 12  # max_seq_length
LIMITS: dict[str, Any] = {"truncation": True, "max_length": LENGTH}


def pooled(hidden: Tensor, kind: str) -> Tensor:
    """As Pooling.forward of sentence-transformers 6.2, for a text without padding."""
    weights = torch.arange(1.0, len(hidden) + 1, dtype=hidden.dtype)[:, None]
    found: dict[str, Tensor] = {
        "cls": hidden[0],
        "max": hidden.max(dim=0).values,
        "mean": hidden.mean(dim=0),
        "mean_sqrt_len_tokens": hidden.sum(dim=0) / len(hidden) ** 0.5,
        "weightedmean": (hidden * weights).sum(dim=0) / weights.sum(),
        "lasttoken": hidden[-1],
    }
    return found[kind]


def sentence_folder(
    folder: Path, *poolings: str, dense: Sequence[nn.Linear] = (), normalise: bool = False
) -> None:
    """Adds what SentenceTransformer.save writes beside the Transformer."""
    kinds = ["Transformer", "Pooling", *["Dense"] * len(dense), *["Normalize"] * normalise]
    places = write_modules(folder, *(f"sentence_transformers.models.{kind}" for kind in kinds))
    write(folder / "sentence_bert_config.json", {"max_seq_length": LENGTH, "do_lower_case": False})
    prompts = {"prompts": {"query": "the query ", "document": ""}, "default_prompt_name": None}
    write(folder / "config_sentence_transformers.json", prompts)
    endings = (
        *("cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens"),
        *("weightedmean_tokens", "lasttoken"),
    )
    named = zip(endings, ALL_POOLINGS, strict=True)
    flags = {f"pooling_mode_{ending}": kind in poolings for ending, kind in named}
    write(places[1] / "config.json", {"word_embedding_dimension": 32, **flags})
    for place, layer, name in zip(places[2:], dense, ("Tanh", "GELU"), strict=False):
        settings = {
            "in_features": layer.in_features,
            "out_features": layer.out_features,
            "bias": layer.bias is not None,
            "activation_function": f"torch.nn.modules.activation.{name}",
        }
        write(place / "config.json", settings)
        tensors = {f"linear.{name}": each.detach() for name, each in layer.named_parameters()}
        save_file(tensors, place / "model.safetensors")


def dense_layers() -> list[nn.Linear]:
    torch.manual_seed(1)
    return [nn.Linear(32 * len(ALL_POOLINGS), 12), nn.Linear(12, 5, bias=False)]


@torch.inference_mode()
def vector_of(hidden: Tensor, poolings: Sequence[str], dense: Sequence[nn.Linear]) -> Tensor:
    x = torch.cat([pooled(hidden, kind) for kind in poolings])
    activations = [nn.Tanh(), nn.GELU()]
    for layer, activation in zip(dense, activations, strict=False):
        x = activation(layer.double()(x))
    return nn.functional.normalize(x, dim=0)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "kind", [*(each for each in FAMILIES if each in TYPES), "qwen3", *T5_KINDS]
)
@torch.inference_mode()
def test_vectors_are_those_of_sentence_transformers(kind: str, seed: int, tmp_path: Path) -> None:
    folder, run, dense = tmp_path / "theirs", tmp_path / "run", dense_layers()
    theirs = Theirs(kind, seed, folder, "EncoderModel" if kind in T5_KINDS else "Model")
    sentence_folder(folder, *ALL_POOLINGS, dense=dense, normalise=True)
    said: list[str] = []
    import_pretrained(folder, run, say=said.append)
    assert "no masked language model head: only --task embed works" in said[0]
    assert f"rows cut to {LENGTH} tokens, prompts query document" in said[0]

    wanted = [
        vector_of(theirs(text, **LIMITS).last_hidden_state[0], ALL_POOLINGS, dense)
        for text in TEXTS
    ]
    checkpoint = load_checkpoint(run)
    assert checkpoint.tokenizer.special.mask_id is None
    rows = [theirs.tokenizer(text, split_special_tokens=True, **LIMITS).input_ids for text in TEXTS]
    longest = max(map(len, rows))
    assert longest == LENGTH
    mask = torch.arange(longest) < torch.tensor([len(row) for row in rows])[:, None]
    source = torch.tensor([row + [5] * (longest - len(row)) for row in rows])
    found = checkpoint.model.double().answers(source, mask)["head"]
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).abs().max() <= 1e-9

    if kind not in EXPORTED or seed:
        return
    bundle = tmp_path / "bundle"
    checkpoint = load_checkpoint(run)
    unverified(checkpoint, bundle, Contents(texts=TEXTS[:3], variants=["cpu-fp32"]))
    for variant in ("portable", "cpu-fp32"):
        engine = Engine(bundle, variant=variant)
        answers = list(embed(engine, TEXTS))
        whole = [len(theirs.tokenizer(text).input_ids) for text in TEXTS]
        assert [row.truncated for row in answers] == [each > LENGTH for each in whole]
        for row, vector in zip(answers, wanted, strict=True):
            assert np.abs(row.vector - vector.numpy()).max() < 1e-5
        if kind in T5_KINDS:  # what follows does not depend on the Transformer
            continue
        (asked,) = embed(engine, ["the cat"], prompt="query")
        hidden = theirs("the query the cat", **LIMITS).last_hidden_state[0]
        assert asked.source == "the cat"
        wanted_too = vector_of(hidden, ALL_POOLINGS, dense).numpy()
        assert np.abs(asked.vector - wanted_too).max() < 1e-5
        # An option of its own takes the hidden states.
        texts, places = ["the cat", "a"], {"first": 0, "last": -1}
        for pooling, place in places.items():
            for row in embed(engine, texts, pooling=pooling):  # type: ignore[arg-type]
                hidden = theirs(row.source).last_hidden_state[0, place].numpy()
                assert np.abs(row.vector - hidden).max() < 1e-4
        with pytest.raises(UsageError, match="prompt must be one of the bundle's: query, document"):
            embed(engine, [], prompt="nothing")
        lines, out = tmp_path / "lines.txt", tmp_path / f"{variant}.npy"
        lines.write_text("the cat\n", encoding="utf-8")
        given: list[str | Path] = ["run", bundle, lines, "--task", "embed", "-o", out]
        given += ["--variant", variant]
        done(*given, "--prompt", "query", "--canary", "1/1")
        assert np.array_equal(np.load(out)[0], asked.vector)
        (long,) = embed(engine, TEXTS[3:], long_rows="error")
        assert long.error is not None
    assert verify(checkpoint, engine.bundle, engine.model, Request(TEXTS[:2])).passed


def test_a_transformer_in_a_folder_of_its_own(tmp_path: Path) -> None:
    folder, inner = tmp_path / "theirs", tmp_path / "theirs" / "0_Transformer"
    Theirs("bert", 0, inner, "Model")
    sentence_folder(folder, "mean")
    (folder / "sentence_bert_config.json").rename(inner / "sentence_bert_config.json")
    break_modules(folder, lambda modules: modules[0].update(path="0_Transformer"))
    said: list[str] = []
    import_pretrained(folder, tmp_path / "run", say=said.append)
    checkpoint = load_checkpoint(tmp_path / "run")
    assert checkpoint.head == HeadSettings(
        "embed", longest=LENGTH, prompts={"query": "the query ", "document": ""}
    )
    assert checkpoint.model.config.pooling == ("mean",)
    assert "0_Transformer/config.json, without effect on answers: architectures" in said[0]


def break_modules(folder: Path, change: Any) -> None:
    path = folder / "modules.json"
    modules = json.loads(path.read_text(encoding="utf-8"))
    change(modules)
    write(path, modules)


def typed(name: str) -> Any:
    return lambda modules: modules[1].update(type=name)


@pytest.mark.parametrize(
    ("name", "record", "message"),
    [
        ("modules.json", typed("sentence_transformers.models.CNN"), "Transformer, CNN, .*support"),
        ("modules.json", typed("somebody.Pooling"), "code of others is not run"),
        ("modules.json", lambda each: each[1].update(path="../x"), "expected folders in"),
        ("modules.json", lambda each: each.pop(), "are Transformer, which cannot be imported"),
        ("config.json", {"model_type": "bart"}, r'model_type is "bart", .* with modules\.json'),
        ("1_Pooling/config.json", {"pooling_mode": "attention"}, 'pooling_mode is "attention"'),
        ("1_Pooling/config.json", {"include_prompt": False}, "include_prompt is false"),
        ("1_Pooling/config.json", {"pooling_mode": ["mean", 3]}, "pooling_mode is 3"),
        ("1_Pooling/config.json", {"pooling_mode": [["mean"]]}, r'pooling_mode is \["mean"\]'),
        ("sentence_bert_config.json", {"max_seq_length": 0}, "supported: at least 3"),
        ("config_sentence_transformers.json", {"default_prompt_name": ["x"]}, "a name of prompts"),
        ("config_sentence_transformers.json", {"prompts": ["a"]}, "supported: texts by name"),
        ("config_sentence_transformers.json", {"prompts": {"a": "a<s>"}}, "without special tokens"),
        ("config_sentence_transformers.json", {"default_prompt_name": "x"}, "a name of prompts"),
        ("config_sentence_transformers.json", {"model_type": "SparseEncoder"}, "SparseEncoder"),
    ],
)
def test_what_cannot_be_a_head_is_refused(
    name: str, record: Any, message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "theirs"
    Theirs("bert", 0, folder, "Model")
    sentence_folder(folder, "mean")
    if callable(record):
        break_modules(folder, record)
    else:
        write(folder / name, record)
    with pytest.raises(InputError, match=message):
        import_pretrained(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_score_of_a_cross_encoder_is_as_its_folder_says(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    Theirs("bert", 0, folder, "ForSequenceClassification", **PROBLEMS["none"])
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    identity = "torch.nn.modules.linear.Identity"
    for said, wanted in (
        ({}, "sigmoid"),
        ({"sentence_transformers": {"activation_fn": identity}}, "none"),
        ({"sbert_ce_default_activation_function": identity}, "none"),
    ):
        write(folder / "config.json", {**config, **said})
        import_pretrained(folder, tmp_path / "run", force=True)
        head = load_checkpoint(tmp_path / "run").head
        assert head is not None and head.rank == wanted


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_cross_encoders_of_sentence_transformers(kind: str, tmp_path: Path) -> None:
    folder, run, bundle = tmp_path / "theirs", tmp_path / "run", tmp_path / "bundle"
    theirs = Theirs(kind, 0, folder, "ForSequenceClassification", **PROBLEMS["none"])
    write_modules(folder, "sentence_transformers.base.modules.transformer.Transformer")
    record: dict[str, Any] = {
        "activation_fn": "torch.nn.modules.linear.Identity",
        "default_prompt_name": "query",
        "model_type": "CrossEncoder",
        "prompts": {"query": "a "},
    }
    write(folder / "config_sentence_transformers.json", record)
    reading = {"transformer_task": "sequence-classification", "max_seq_length": 20}
    write(folder / "sentence_bert_config.json", reading)
    import_pretrained(folder, run)
    unverified(load_checkpoint(run), bundle, Contents(texts=TEXTS[:3]))
    ranked = list(rank(Engine(bundle), PAIRS))
    assert [row.truncated for row in ranked] == [False, False, True, True]
    for row, pair in zip(ranked, PAIRS, strict=True):
        prompted = f"a {pair[0]}", pair[1]
        logit = theirs(*prompted, truncation="longest_first", max_length=20).logits[0, 0]
        assert abs(row.score - float(logit)) < 1e-5
        assert row.source == pair[0]
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    write(folder / "config.json", {**config, "architectures": ["BertModel"]})
    with pytest.raises(InputError, match=r"architectures is|is unknown"):
        import_pretrained(folder, run, force=True)
