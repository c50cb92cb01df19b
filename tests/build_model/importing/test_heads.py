"""Heads of encoder-only models give the vectors and scores of transformers' own classes."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.build_model.importing.test_model_types import (
    LONGEST,
    REASON,
    SEEDS,
    TYPES,
    Draw,
    byte_level_tokenizer,
    exact,
    randomise,
)
from tests.commands import call, done
from transferry.build_model.checkpoint import load_checkpoint
from transferry.build_model.importing.huggingface.encoder_only import FAMILIES
from transferry.build_model.importing.huggingface.folder import Settings
from transferry.build_model.importing.huggingface.importer import import_checkpoint
from transferry.export.bundle import Contents, export_bundle
from transferry.export.checks.claims import manifest_claims, recorded_claim
from transferry.export.oracle.oracle import Oracle
from transferry.export.verify import verify_against
from transferry.runtime.bundle.head import HeadSettings
from transferry.runtime.bundle.manifest import Manifest
from transferry.runtime.engine.engine import Engine
from transferry.runtime.engine.tasks.classify import classify
from transferry.runtime.engine.tasks.embed import embed
from transferry.runtime.engine.tasks.rank import rank
from transferry.runtime.engine.tasks.tag import tag
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.proof.compare import Tolerance
from transferry.runtime.proof.recorded import Reference
from transferry.runtime.proof.views import report_text

transformers = pytest.importorskip("transformers", reason=REASON)
tokenizers = pytest.importorskip("tokenizers", reason=REASON)

TEXTS = ["the cat sat", "Straße über Häuser, the mat", "a", "on the mat " * 6]
EXPORTED = ("bert", "mpnet")  # through bundle and engine too; exporting takes seconds
ALL_POOLINGS = ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
LENGTH = 12  # max_seq_length


@pytest.mark.parametrize("names", [None, {"0": "a", "1": "b"}, {"1": "b", "0": "a", "2": "c"}])
@pytest.mark.parametrize("count", [None, 2, 3])
def test_labels_have_the_names_of_transformers(
    names: dict[str, str] | None, count: int | None
) -> None:
    given: dict[str, Any] = {"id2label": names, "num_labels": count}
    given = {key: value for key, value in given.items() if value is not None}
    theirs = transformers.BertConfig.from_dict(given).id2label
    record = {"architectures": ["BertForSequenceClassification"], "hidden_size": 8, **given}
    head = FAMILIES["bert"].classifier(Settings(Path("config.json"), record))
    assert head is not None
    assert head.settings.labels == tuple(theirs[number] for number in range(len(theirs)))


def join_pairs(folder: Path, kind: str) -> None:
    """Gives a folder's tokenizer the template of pairs of its model type."""
    path = str(folder / "tokenizer.json")
    made = tokenizers.Tokenizer.from_file(path)
    pair = "<s> $A </s> </s> $B </s>"
    if kind in ("bert", "electra", "distilbert"):
        pair = "<s> $A </s> $B:1 </s>:1"
    if kind == "modernbert":
        pair = "<s> $A </s> $B </s>"
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", pair=pair, special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    made.save(path)
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    inputs = ["input_ids", "attention_mask", *["token_type_ids"] * (kind in ("bert", "electra"))]
    write(folder / "tokenizer_config.json", {**config, "model_input_names": inputs})


class Theirs:
    """A drawn checkpoint of transformers with a tokenizer, and its model in float64."""

    def __init__(self, kind: str, seed: int, folder: Path, suffix: str, **settings: Any) -> None:
        byte_level_tokenizer(folder, "<s>", "</s>")
        join_pairs(folder, kind)
        self.tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        name, drawn = TYPES[kind]
        model_class = getattr(transformers, name.replace("ForMaskedLM", suffix))
        ends = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
        positions = {"max_position_embeddings": LONGEST}
        chosen = drawn(Draw(f"{kind} {seed} {suffix}")) | positions | ends | settings
        if kind in ("bert", "electra"):
            chosen["type_vocab_size"] = 2
        config = model_class.config_class(vocab_size=len(self.tokenizer), **chosen)
        torch.manual_seed(seed)
        made = model_class(config).eval()
        randomise(made)
        made.save_pretrained(folder)
        with exact():
            self.model = model_class(config).eval()
        self.model.load_state_dict(made.double().state_dict())
        self.model.double()

    @torch.inference_mode()
    def __call__(self, text: str, pair: str | None = None, **limits: Any) -> Any:
        read = self.tokenizer(text, pair, return_tensors="pt", split_special_tokens=True, **limits)
        known = inspect.signature(self.model.forward).parameters
        with exact():
            return self.model(**{name: read[name] for name in read if name in known})


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


def write(path: Path, record: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record), encoding="utf-8")


def sentence_folder(
    folder: Path, *poolings: str, dense: Sequence[nn.Linear] = (), normalise: bool = False
) -> None:
    """Adds what SentenceTransformer.save writes beside the Transformer."""
    package = "sentence_transformers.models"
    kinds = ["Transformer", "Pooling", *["Dense"] * len(dense), *["Normalize"] * normalise]
    places = ["", *(f"{number}_{kind}" for number, kind in enumerate(kinds[1:], start=1))]
    write(
        folder / "modules.json",
        [
            {"idx": number, "name": str(number), "path": place, "type": f"{package}.{kind}"}
            for number, (place, kind) in enumerate(zip(places, kinds, strict=True))
        ],
    )
    write(folder / "sentence_bert_config.json", {"max_seq_length": LENGTH, "do_lower_case": False})
    prompts = {"prompts": {"query": "the query ", "document": ""}, "default_prompt_name": None}
    write(folder / "config_sentence_transformers.json", prompts)
    flags = {f"pooling_mode_{kind}_token": kind in poolings for kind in ("cls",)}
    flags |= {f"pooling_mode_{kind}_tokens": kind in poolings for kind in ALL_POOLINGS[1:5]}
    flags |= {"pooling_mode_lasttoken": "lasttoken" in poolings}
    flags["pooling_mode_mean_sqrt_len_tokens"] = flags.pop(
        "pooling_mode_mean_sqrt_len_tokens_tokens"
    )
    flags["pooling_mode_weightedmean_tokens"] = "weightedmean" in poolings
    write(folder / places[1] / "config.json", {"word_embedding_dimension": 32, **flags})
    for place, layer, name in zip(places[2:], dense, ("Tanh", "GELU"), strict=False):
        settings = {
            "in_features": layer.in_features,
            "out_features": layer.out_features,
            "bias": layer.bias is not None,
            "activation_function": f"torch.nn.modules.activation.{name}",
        }
        write(folder / place / "config.json", settings)
        tensors = {f"linear.{name}": each.detach() for name, each in layer.named_parameters()}
        save_file(tensors, folder / place / "model.safetensors")


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
@pytest.mark.parametrize("kind", FAMILIES)
@torch.inference_mode()
def test_vectors_are_those_of_sentence_transformers(kind: str, seed: int, tmp_path: Path) -> None:
    folder, run, dense = tmp_path / "theirs", tmp_path / "run", dense_layers()
    theirs = Theirs(kind, seed, folder, "Model")
    sentence_folder(folder, *ALL_POOLINGS, dense=dense, normalise=True)
    said: list[str] = []
    import_checkpoint(folder, run, say=said.append)
    assert "no masked language model head: only --task embed works" in said[0]
    assert f"rows cut to {LENGTH} tokens, prompts query document" in said[0]

    limits: dict[str, Any] = {"truncation": True, "max_length": LENGTH}
    wanted = [
        vector_of(theirs(text, **limits).last_hidden_state[0], ALL_POOLINGS, dense)
        for text in TEXTS
    ]
    checkpoint = load_checkpoint(run)
    rows = [theirs.tokenizer(text, split_special_tokens=True, **limits).input_ids for text in TEXTS]
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
    export_bundle(checkpoint, bundle, Contents(texts=TEXTS[:3], variants=["cpu-fp32"]))
    for variant in ("portable", "cpu-fp32"):
        engine = Engine.load(bundle, variant=variant)
        answers = list(embed(engine, TEXTS))
        whole = [len(theirs.tokenizer(text).input_ids) for text in TEXTS]
        assert [row.truncated for row in answers] == [each > LENGTH for each in whole]
        for row, vector in zip(answers, wanted, strict=True):
            assert np.abs(row.vector - vector.numpy()).max() < 1e-5
        (asked,) = embed(engine, ["the cat"], prompt="query")
        hidden = theirs("the query the cat", **limits).last_hidden_state[0]
        assert asked.source == "the cat"
        wanted_too = vector_of(hidden, ALL_POOLINGS, dense).numpy()
        assert np.abs(asked.vector - wanted_too).max() < 1e-5
        # An option of its own takes the hidden states.
        (first,) = embed(engine, ["the cat"], pooling="first")
        hidden = theirs("the cat").last_hidden_state[0, 0].numpy()
        assert np.abs(first.vector - hidden).max() < 1e-4
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
        assert verify_against(checkpoint, engine.bundle, engine.model, TEXTS[:2]).passed


def test_a_transformer_in_a_folder_of_its_own(tmp_path: Path) -> None:
    folder, inner = tmp_path / "theirs", tmp_path / "theirs" / "0_Transformer"
    Theirs("bert", 0, inner, "Model")
    sentence_folder(folder, "mean")
    (folder / "sentence_bert_config.json").rename(inner / "sentence_bert_config.json")
    break_modules(folder, lambda modules: modules[0].update(path="0_Transformer"))
    said: list[str] = []
    import_checkpoint(folder, tmp_path / "run", say=said.append)
    checkpoint = load_checkpoint(tmp_path / "run")
    assert checkpoint.head == HeadSettings(
        "embed", longest=LENGTH, prompts={"query": "the query ", "document": ""}
    )
    assert checkpoint.model.config.pooling == ("mean",)
    assert "0_Transformer/config.json: architectures" in said[0]


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
        ("config.json", {"model_type": "t5"}, r'model_type is "t5", .* with modules\.json'),
        ("1_Pooling/config.json", {"pooling_mode": "attention"}, 'pooling_mode is "attention"'),
        ("1_Pooling/config.json", {"include_prompt": False}, "include_prompt is false"),
        ("1_Pooling/config.json", {"pooling_mode": ["mean", 3]}, "pooling_mode is 3"),
        ("1_Pooling/config.json", {"pooling_mode": [["mean"]]}, r'pooling_mode is \["mean"\]'),
        ("sentence_bert_config.json", {"max_seq_length": 0}, "supported: at least 3"),
        ("config_sentence_transformers.json", {"default_prompt_name": ["x"]}, "a name of prompts"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "tells upper from lower case"),
        ("sentence_bert_config.json", {"max_seq_length": "8"}, "must be a whole number"),
        ("config_sentence_transformers.json", {"prompts": ["a"]}, "supported: texts by name"),
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
        import_checkpoint(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


PAIRS = [
    ("the cat sat", "on the mat"),
    ("a", "Straße über Häuser"),
    ("mat " * 99, "the cat"),
    ("mat " * 99, "the cat " * 40),
]
PROBLEMS: dict[str, dict[str, Any]] = {
    "softmax": {"num_labels": 3, "id2label": {0: "good", 1: "bad", 2: "neither"}},
    "sigmoid": {"num_labels": 3, "problem_type": "multi_label_classification"},
    "none": {"num_labels": 1},
}
HEADS = [
    *(pytest.param("ForSequenceClassification", kind, id=kind) for kind in PROBLEMS),
    pytest.param("ForTokenClassification", "softmax", id="tokens"),
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("suffix", "problem"), HEADS)
@pytest.mark.parametrize("kind", FAMILIES)
@torch.inference_mode()
def test_scores_are_theirs(kind: str, suffix: str, problem: str, seed: int, tmp_path: Path) -> None:
    folder, run = tmp_path / "theirs", tmp_path / "run"
    theirs = Theirs(kind, seed, folder, suffix, **PROBLEMS[problem])
    said: list[str] = []
    import_checkpoint(folder, run, say=said.append)
    checkpoint = load_checkpoint(run)
    head, special = checkpoint.head, checkpoint.tokenizer.special
    assert head is not None
    labels = len(head.labels)
    tags = suffix == "ForTokenClassification"
    task = "tag" if tags else "classify"
    assert (head.task, head.probabilities, labels) == (task, problem, 1 if problem == "none" else 3)
    assert f"head for --task {task}, labels {', '.join(head.labels)}, " in said[0]
    works = " and rank work" if problem == "none" else " work"
    assert f"no masked language model head: only --task embed and {task}{works}" in said[0]
    rows: list[tuple[str, str | None]] = [(text, None) for text in TEXTS]
    rows += [] if tags else PAIRS[:2]
    model = checkpoint.model.double()
    for first, second in rows:
        ids = checkpoint.tokenizer.encode(first)
        if second is not None:
            ids = [*ids, *special.between, *checkpoint.tokenizer.encode(second)]
        wrapped = special.wrap(ids)
        pad = [5, 6]  # padding has no influence
        mask = torch.tensor([[True] * len(wrapped) + [False] * len(pad)])
        found = model.answers(torch.tensor([wrapped + pad]), mask)["head"][0]
        wanted = theirs(first, second).logits[0]
        found = found[: len(wrapped)] if tags else found
        assert (found - wanted).abs().max() <= 1e-9


def probability(scores: Tensor, problem: str) -> Tensor:
    if problem == "softmax":
        return scores.softmax(dim=-1)
    return scores.sigmoid() if problem == "sigmoid" else scores


@pytest.mark.parametrize(
    ("kind", "problem"),
    [("bert", "softmax"), ("modernbert", "sigmoid"), ("electra", "none"), ("roberta", "none")],
)
@torch.inference_mode()
def test_labels_through_bundle_and_engine_are_theirs(
    kind: str, problem: str, tmp_path: Path
) -> None:
    folder, run, bundle = tmp_path / "theirs", tmp_path / "run", tmp_path / "bundle"
    more = {"classifier_pooling": "mean"} if kind == "modernbert" else {}
    theirs = Theirs(kind, 0, folder, "ForSequenceClassification", **PROBLEMS[problem], **more)
    import_checkpoint(folder, run)
    checkpoint = load_checkpoint(run)
    export_bundle(checkpoint, bundle, Contents(texts=TEXTS[:3], variants=["cpu-fp32"]))
    limits: dict[str, Any] = {"truncation": "longest_first", "max_length": LONGEST}
    if kind == "roberta":
        limits["max_length"] -= 2  # positions of padding
    for variant in ("portable", "cpu-fp32"):
        engine = Engine.load(bundle, variant=variant)
        assert checkpoint.head is not None
        labels = checkpoint.head.labels
        asked: list[Any] = [*TEXTS, *PAIRS]
        found = list(classify(engine, asked, long_rows="truncate"))
        assert [row.truncated for row in found] == [False] * 6 + [True] * 2
        for row, given in zip(found, asked, strict=True):
            pair = given if isinstance(given, tuple) else (given, None)
            scores = probability(theirs(*pair, **limits).logits[0], problem)
            assert [each.label for each in row.scores] == list(labels)
            values = np.array([each.score for each in row.scores])
            assert np.abs(values - scores.numpy()).max() < 1e-5 * max(1.0, np.abs(values).max())
            if problem == "softmax":
                assert row.label == labels[int(scores.argmax())]
            if problem == "sigmoid":
                assert row.label == ", ".join(
                    label for label, score in zip(labels, scores, strict=True) if score >= 0.5
                )
        alone = list(classify(engine, asked[:2]))
        for one, other in zip(alone, found, strict=False):
            assert abs(one.scores[0].score - other.scores[0].score) < 1e-5
        (too_long,) = classify(engine, PAIRS[2:3])
        assert too_long.error is not None and too_long.error.kind == "too-long"
        if problem == "none":
            ranked = list(rank(engine, PAIRS, long_rows="truncate"))
            for each, pair in zip(ranked, PAIRS, strict=True):
                score = float(theirs(*pair, **limits).logits[0, 0].sigmoid())
                assert abs(each.score - score) < 1e-5
        else:
            with pytest.raises(UsageError, match="no head for task rank; its tasks: embed, class"):
                rank(engine, PAIRS)
        report = verify_against(checkpoint, engine.bundle, engine.model, TEXTS)
        assert report.passed, report_text(report)
        manifest = engine.bundle.manifest
        assert manifest.head is not None
        for settings in (
            replace(manifest.head, labels=tuple(f"{label}!" for label in labels)),
            replace(manifest.head, rank="none" if manifest.head.rank == "sigmoid" else "sigmoid"),
        ):
            changed = replace(engine.bundle, manifest=replace(manifest, head=settings))
            faulty = [claim.name for claim in manifest_claims(checkpoint, changed) if claim.problem]
            assert faulty == ["head"]
        fewer = replace(manifest, head=replace(manifest.head, labels=(*labels, "more")))
        with pytest.raises(InputError, match=f"gives {len(labels)} scores, and there are"):
            Manifest.from_json(fewer.to_json(), "manifest.json")
        embedding = replace(manifest, head=replace(manifest.head, task="tag"))
        with pytest.raises(InputError, match="gives no scores or vectors for task tag"):
            Manifest.from_json(embedding.to_json(), "manifest.json")
        assert [item.search for item in report.decisions] == ["classify"] * (problem != "none")


@torch.inference_mode()
def test_tags_are_theirs(tmp_path: Path) -> None:
    folder, run, bundle = tmp_path / "theirs", tmp_path / "run", tmp_path / "bundle"
    theirs = Theirs("distilbert", 0, folder, "ForTokenClassification", **PROBLEMS["softmax"])
    import_checkpoint(folder, run)
    checkpoint = load_checkpoint(run)
    export_bundle(checkpoint, bundle, Contents(texts=TEXTS[:3], variants=["cpu-fp32"]))
    engine = Engine.load(bundle)
    assert checkpoint.head is not None
    *short, long = tag(engine, [*TEXTS, "mat " * 99], long_rows="truncate")
    for row, text in zip(short, TEXTS, strict=True):
        scores = theirs(text).logits[0, 1:-1].softmax(dim=-1)
        offsets = theirs.tokenizer(text, return_offsets_mapping=True)["offset_mapping"][1:-1]
        assert [(each.start, each.end) for each in row.tags] == offsets
        assert [each.text for each in row.tags] == [text[start:end] for start, end in offsets]
        best = [checkpoint.head.labels[int(each)] for each in scores.argmax(dim=-1)]
        assert [each.label for each in row.tags] == best
        found = np.array([each.score for each in row.tags])
        assert np.abs(found - scores.max(dim=-1).values.numpy()).max() < 1e-5
    assert long.truncated and len(long.tags) == LONGEST - 2
    report = verify_against(checkpoint, engine.bundle, engine.model, TEXTS)
    assert report.passed and report.decisions[0].search == "tag"
    with pytest.raises(UsageError, match="no head for task classify; its tasks: embed, tag"):
        classify(engine, ["a"])


@pytest.mark.parametrize(
    ("task", "suffix", "problem"),
    [
        ("classify", "ForSequenceClassification", "softmax"),
        ("rank", "ForSequenceClassification", "none"),
        ("tag", "ForTokenClassification", "softmax"),
    ],
)
def test_jobs_with_heads(
    task: str, suffix: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, run, bundle = tmp_path / "theirs", tmp_path / "run", tmp_path / "bundle"
    Theirs("bert", 0, folder, suffix, **PROBLEMS[problem])
    import_checkpoint(folder, run)
    export_bundle(load_checkpoint(run), bundle, Contents(texts=TEXTS[:3]))
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    pairs = [*PAIRS[:2], ("a", " "), ("a", 7), ("b", None)]
    records = [{"text": first, "other": second} for first, second in pairs]
    rows.write_text("".join(f"{json.dumps(each)}\n" for each in records), encoding="utf-8")
    paired = [] if task == "tag" else ["--pair", "other"]
    given: list[str | Path] = ["run", bundle, rows, "-o", out, "--task", task, "--canary", "1/1"]
    result = call(*given, *paired)
    assert result.exit_code == (0 if task == "tag" else 6), result.stderr
    answers = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    kinds = [answer.get("error", {}).get("kind") for answer in answers]
    assert kinds == ([None] * 5 if task == "tag" else [None, None, "empty", "no-text", "no-text"])
    assert f"canaries {len(pairs)}, canaries identical {len(pairs)}" in result.stderr
    engine = Engine.load(bundle)
    if task == "classify":
        (wanted, _) = classify(engine, PAIRS[:2])
        assert answers[0]["label"] == wanted.label
        assert answers[0]["scores"] == [each.record() for each in wanted.scores]
        assert answers[0]["other"] == PAIRS[0][1]
    if task == "rank":
        (ranked, _) = rank(engine, PAIRS[:2])
        assert answers[0]["score"] == round(ranked.score, 6)
    if task == "tag":
        assert [each["text"] for each in answers[0]["tags"]] == ["the", " cat", " sat"]
        assert {each["label"] for each in answers[0]["tags"]} <= {"good", "bad", "neither"}
        for format in ("jsonl", "csv", "tsv", "parquet"):
            joined = tmp_path / f"joined.{format}"
            given = ["run", bundle, rows, "-o", joined, "--task", task, "--aggregation", "first"]
            done(*given, "--canary", "1/1", "--force")
        joined = tmp_path / "joined.jsonl"
        first = json.loads(joined.read_text(encoding="utf-8").splitlines()[0])
        (row,) = tag(engine, [PAIRS[0][0]], aggregation="first")
        assert [(each["label"], each["start"], each["end"]) for each in first["tags"]] == [
            (each.label, each.start, each.end) for each in row.tags
        ]
        assert "".join(each.text for each in row.tags) == PAIRS[0][0]
    for wrong, message in (
        (["--task", "embed", "--pair", "other"], "only on classify and rank"),
        (["--task", "embed", "--aggregation", "max"], "--aggregation has no effect on task embed"),
        (["--task", "rank"], "name the column of the second with --pair"),
        (["--task", "classify", "--prompt", "query"], "--prompt has no effect on task"),
        (["--task", "generate"], "its tasks are embed and "),
        (
            ["--task", task, *paired, "--format", "npy"],
            f"task {task} writes jsonl or tsv or csv or parquet",
        ),
    ):
        failed = call("run", bundle, rows, *wrong)
        assert failed.exit_code == 2 and message in failed.stderr, failed.stderr
    # A recorded unit of the head in which errors look small is no answer of torch's.
    checkpoint, variant = load_checkpoint(run), engine.bundle.variant()
    oracle = Oracle(checkpoint.model, checkpoint.tokenizer.special, Tolerance())
    assert recorded_claim(engine.bundle, variant, oracle).problem == ""
    known = Reference.of(engine.bundle, variant)
    cases = [(case, replace(truth, least=10 * truth.least)) for case, truth in known.cases]
    monkeypatch.setattr(Reference, "of", lambda *_: replace(known, cases=cases))
    assert (
        "the head's unit is recorded as" in recorded_claim(engine.bundle, variant, oracle).problem
    )
    lines = tmp_path / "lines.txt"
    lines.write_text("a\n", encoding="utf-8")
    if task != "tag":
        failed = call("run", bundle, lines, "--task", task, "--pair", "other")
        assert failed.exit_code == 3 and "expected a column other" in failed.stderr


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("id2label", {"0": "good", "2": "bad"}, "names of the labels 0, 1, 2 and so on"),
        ("id2label", {"0": "good", "1": 3}, "names of the labels"),
        ("problem_type", "ranking", 'problem_type is "ranking"'),
        ("id2label", {"0": "good"}, "does not fit"),
        ("architectures", ["BertForMultipleChoice"], "classifier.* is unknown"),
        ("sentence_transformers", {"activation_fn": "mine.Scale"}, "sentence_transformers is"),
    ],
)
def test_classifiers_that_do_not_fit_are_refused(
    name: str, value: Any, message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "theirs"
    Theirs("bert", 0, folder, "ForSequenceClassification", **PROBLEMS["softmax"])
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    write(folder / "config.json", {**config, name: value})
    with pytest.raises(InputError, match=message):
        import_checkpoint(folder, tmp_path / "run")


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
        import_checkpoint(folder, tmp_path / "run", force=True)
        head = load_checkpoint(tmp_path / "run").head
        assert head is not None and head.rank == wanted


@torch.inference_mode()
def test_cross_encoders_of_sentence_transformers(tmp_path: Path) -> None:
    folder, run, bundle = tmp_path / "theirs", tmp_path / "run", tmp_path / "bundle"
    theirs = Theirs("bert", 0, folder, "ForSequenceClassification", **PROBLEMS["none"])
    kind = "sentence_transformers.base.modules.transformer.Transformer"
    write(folder / "modules.json", [{"idx": 0, "name": "0", "path": "", "type": kind}])
    record: dict[str, Any] = {
        "activation_fn": "torch.nn.modules.linear.Identity",
        "default_prompt_name": None,
        "model_type": "CrossEncoder",
        "prompts": {},
    }
    write(folder / "config_sentence_transformers.json", record)
    reading = {"transformer_task": "sequence-classification", "max_seq_length": 20}
    write(folder / "sentence_bert_config.json", reading)
    import_checkpoint(folder, run)
    export_bundle(load_checkpoint(run), bundle, Contents(texts=TEXTS[:3]))
    ranked = list(rank(Engine.load(bundle), PAIRS))
    assert [row.truncated for row in ranked] == [False, False, True, True]
    for row, pair in zip(ranked, PAIRS, strict=True):
        logit = theirs(*pair, truncation="longest_first", max_length=20).logits[0, 0]
        assert abs(row.score - float(logit)) < 1e-5
    write(folder / "config_sentence_transformers.json", {**record, "prompts": {"query": "q"}})
    with pytest.raises(InputError, match="prompts is"):
        import_checkpoint(folder, run, force=True)
    write(folder / "config_sentence_transformers.json", record)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    write(folder / "config.json", {**config, "architectures": ["BertModel"]})
    with pytest.raises(InputError, match=r"architectures is|is unknown"):
        import_checkpoint(folder, run, force=True)
