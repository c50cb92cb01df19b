"""Classifiers give the scores of transformers' own classes."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.build_model.importing.huggingface.drawn import LONGEST, SEEDS, TYPES, transformers
from tests.build_model.importing.huggingface.encoder_types import ENCODERS, LIKE_OTHERS
from tests.build_model.importing.huggingface.heads import (
    TEXTS,
    Theirs,
    require_their_answers,
    write,
)
from tests.commands import call, done
from tests.traced import unverified, verify
from transferry.build_model.checkpoint import load_checkpoint
from transferry.build_model.importing.huggingface.encoder_only import FAMILIES
from transferry.build_model.importing.huggingface.folder import Settings
from transferry.build_model.importing.huggingface.heads import problem_of
from transferry.build_model.importing.huggingface.importer import import_pretrained
from transferry.export.bundle import Contents
from transferry.export.checks.claims import manifest_claims, recorded_claim
from transferry.export.oracle.oracle import Oracle
from transferry.export.verify import Request
from transferry.runtime.bundle.manifest import Manifest
from transferry.runtime.engine.engine import Engine
from transferry.runtime.engine.tasks.classify import classify
from transferry.runtime.engine.tasks.rank import rank
from transferry.runtime.engine.tasks.tag import tag
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.proof.compare import Tolerance
from transferry.runtime.proof.recorded import Reference
from transferry.runtime.proof.views import report_text
from transferry.runtime.tokenizer.special_tokens import AnyTokenizer
from transferry.runtime.tokenizer.third_party import HuggingFaceTokenizer


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
SUFFIXES = {
    "ForSequenceClassification": "classify",
    "ForTokenClassification": "tag",
    "ForQuestionAnswering": "answer",
}
HEADS = {
    **{kind: ("ForSequenceClassification", kind) for kind in PROBLEMS},
    "tokens": ("ForTokenClassification", "softmax"),
    "answers": ("ForQuestionAnswering", "softmax"),
}
# transformers lacks some classes; asked for an attribute, it would import each.
CLASSES = {*dir(transformers)}
SCORED = [
    pytest.param(kind, *HEADS[name], seed, id=f"{kind}-{name}-{seed}")
    for kind in (*ENCODERS, "bart")
    for name in HEADS
    for seed in SEEDS
    if re.sub("For[A-Z].*", HEADS[name][0], TYPES[kind][0]) in CLASSES
    and (kind not in LIKE_OTHERS or seed != 1)
]


@pytest.mark.parametrize(("kind", "suffix", "problem", "seed"), SCORED)
def test_scores_are_theirs(kind: str, suffix: str, problem: str, seed: int, tmp_path: Path) -> None:
    folder, run = tmp_path / "theirs", tmp_path / "run"
    task = SUFFIXES[suffix]
    theirs = Theirs(kind, seed, folder, suffix, **PROBLEMS[problem] if task != "answer" else {})
    said: list[str] = []
    import_pretrained(folder, run, say=said.append)
    checkpoint = load_checkpoint(run)
    head = checkpoint.head
    assert head is not None
    labels = len(head.labels)
    expected = 2 if task == "answer" else 1 if problem == "none" else 3
    assert (head.task, head.probabilities, labels) == (task, problem, expected)
    assert f"head for --task {task}, labels {', '.join(head.labels)}, " in said[0]
    works = f"embed, {task} and rank" if problem == "none" else f"embed and {task}"
    assert f"no masked language model head: only --task {works} work" in said[0]
    rows: list[tuple[str, str | None]] = [(text, None) for text in TEXTS]
    rows += [] if task == "tag" else PAIRS[:2]
    require_their_answers(theirs, checkpoint, rows)


@pytest.mark.parametrize("named", [True, False])
def test_a_tagger_tells_of_another_unknown_token(named: bool, tmp_path: Path) -> None:
    Theirs("bert", 0, tmp_path / "theirs", "ForTokenClassification", num_labels=3)
    place = tmp_path / "theirs/tokenizer_config.json"
    settings = json.loads(place.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    if not named:
        del settings["unk_token"]
    place.write_text(json.dumps(settings))
    said: list[str] = []
    import_pretrained(tmp_path / "theirs", tmp_path / "run", say=said.append)
    assert any("an unknown token begins a word" in line for line in said) != named


def probability(scores: Tensor, problem: str) -> Tensor:
    if problem == "softmax":
        return scores.softmax(dim=-1)
    return scores.sigmoid() if problem == "sigmoid" else scores


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("bert", "softmax"),
        ("modernbert", "sigmoid"),
        ("deberta-v2", "none"),
        ("roberta", "none"),
        ("bart", "softmax"),
        ("mistral", "softmax"),
    ],
)
@torch.inference_mode()
def test_labels_through_bundle_and_engine_are_theirs(
    kind: str, problem: str, tmp_path: Path
) -> None:
    folder, run, bundle = tmp_path / "theirs", tmp_path / "run", tmp_path / "bundle"
    more = {"classifier_pooling": "mean"} if kind == "modernbert" else {}
    theirs = Theirs(kind, 0, folder, "ForSequenceClassification", **PROBLEMS[problem], **more)
    import_pretrained(folder, run)
    checkpoint = load_checkpoint(run)
    unverified(checkpoint, bundle, Contents(texts=TEXTS[:3], variants=["cpu-fp32"]))
    limits: dict[str, Any] = {"truncation": "longest_first", "max_length": LONGEST}
    if kind == "roberta":
        limits["max_length"] -= 2  # positions of padding
    for variant in ("portable", "cpu-fp32"):
        engine = Engine(bundle, variant=variant)
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
        if variant == "portable":
            continue
        report = verify(checkpoint, engine.bundle, engine.model, Request(TEXTS))
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
        sparse = replace(manifest, head=replace(manifest.head, vectors="sparse"))
        with pytest.raises(InputError, match="for task classify, and no sparse vectors"):
            Manifest.from_json(sparse.to_json(), "manifest.json")
        embedding = replace(manifest, head=replace(manifest.head, task="tag"))
        with pytest.raises(InputError, match="gives no scores or vectors for task tag"):
            Manifest.from_json(embedding.to_json(), "manifest.json")
        assert [item.search for item in report.decisions] == ["classify"] * (problem != "none")


@torch.inference_mode()
def test_tags_are_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, run, bundle = tmp_path / "theirs", tmp_path / "run", tmp_path / "bundle"
    theirs = Theirs("distilbert", 0, folder, "ForTokenClassification", **PROBLEMS["softmax"])
    import_pretrained(folder, run)
    checkpoint = load_checkpoint(run)
    unverified(checkpoint, bundle, Contents(texts=TEXTS[:3], variants=["cpu-fp32"]))
    engine = Engine(bundle)
    assert checkpoint.head is not None
    *short, long = tag(engine, [*TEXTS, "mat " * 99], long_rows="truncate")
    for row, text in zip(short, TEXTS, strict=True):
        scores = theirs(text).logits[0, 1:-1].softmax(dim=-1)
        best = [checkpoint.head.labels[int(each)] for each in scores.argmax(dim=-1)]
        assert [each.label for each in row.tags] == best
    assert long.truncated and len(long.tags) == LONGEST - 2
    report = verify(checkpoint, engine.bundle, engine.model, Request(TEXTS))
    assert report.passed and report.decisions[0].search == "tag"
    # As of a tokenizer that tells no places: tags cannot be served, and the head is judged.
    monkeypatch.setattr(HuggingFaceTokenizer, "places", AnyTokenizer.places)
    report = verify(checkpoint, engine.bundle, engine.model, Request(TEXTS))
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
    import_pretrained(folder, run)
    unverified(load_checkpoint(run), bundle, Contents(texts=TEXTS[:3]))
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    pairs = [*PAIRS[:2], ("a", " "), ("a", 7), ("b", None)]
    records = [{"text": first, "other": second} for first, second in pairs]
    rows.write_text("".join(f"{json.dumps(each)}\n" for each in records), encoding="utf-8")
    paired = [] if task == "tag" else ["--pair", "other"]
    given: list[str | Path] = ["run", bundle, rows, "-o", out, "--canary", "1/1"]
    if task == "rank":  # the others are the task of the head
        given += ["--task", task]
    result = call(*given, *paired)
    assert result.exit_code == (0 if task == "tag" else 6), result.stderr
    answers = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    kinds = [answer.get("error", {}).get("kind") for answer in answers]
    assert kinds == ([None] * 5 if task == "tag" else [None, None, "empty", "no-text", "no-text"])
    assert f"canaries {len(pairs)}, canaries identical {len(pairs)}" in result.stderr
    engine = Engine(bundle)
    if task == "tag":
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
        (["--task", "embed", "--pair", "other"], "only on classify, rank"),
        (["--task", "embed", "--aggregation", "max"], "--aggregation has no effect on task embed"),
        (["--task", "rank"], "name the column of the second with --pair"),
        (["--task", "classify", "--prompt", "query"], "--prompt has no effect on task"),
        (["--task", "generate"], "its tasks: embed, "),
        (
            ["--task", task, *paired, "--format", "npy"],
            f"task {task} writes jsonl, tsv, csv or parquet",
        ),
    ):
        failed = call("run", bundle, rows, *wrong)
        assert failed.exit_code == 2 and message in failed.stderr, failed.stderr
    # A recorded unit of the head in which errors look small is no answer of torch's.
    checkpoint, variant = load_checkpoint(run), engine.bundle.variant()
    oracle = Oracle.of(checkpoint.model, checkpoint.tokenizer.special, Tolerance())
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
        ("architectures", ["BertForMultipleChoice"], "architectures is .*BertForMultipleChoice"),
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
        import_pretrained(folder, tmp_path / "run")


def test_a_single_label_without_another_is_refused() -> None:
    """It would have the score 1 for every text."""
    config = Settings(Path("config.json"), {"problem_type": "single_label_classification"})
    with pytest.raises(InputError, match=r"supported: regression for a single label"):
        problem_of(config, ("good",))
