"""Extractive question answering gives the answers of transformers' pipeline."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as parquet
import pytest
import torch

from tests.build_model.importing.huggingface.drawn import LONGEST
from tests.build_model.importing.huggingface.heads import TEXTS, Theirs
from tests.commands import call, done, fails
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
from transferry.runtime.engine.tasks import answer as task
from transferry.runtime.engine.tasks.answer import Answer, AnsweredResult, Span
from transferry.runtime.errors import UsageError
from transferry.runtime.proof.compare import Tolerance
from transferry.runtime.proof.views import report_text
from transferry.runtime.tokenizer.special_tokens import AnyTokenizer
from transferry.runtime.tokenizer.third_party import HuggingFaceTokenizer

QUESTIONS: list[tuple[str, str]] = [
    ("the cat", "on the mat"),
    ("a", "Straße über Häuser, the mat. The Mat!"),
    ("the mat", "the cat sat on it's mat, " * 12),
    ("Straße über Häuser", "mat " * 70 + "Häuser, "),
    ("the", "x"),
]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"top": 3, "handle_impossible_answer": True},
    {"top": 2, "max_answer_len": 2, "doc_stride": 3, "max_seq_len": 40},
    {"top": 2, "doc_stride": 0, "max_seq_len": 30},
]


class Made(NamedTuple):
    theirs: Theirs
    checkpoint: Checkpoint
    bundle: Path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp("answers")
    theirs = Theirs("bert", 0, root / "theirs", "ForQuestionAnswering")
    import_pretrained(root / "theirs", root / "run")
    checkpoint = load_checkpoint(root / "run")
    unverified(checkpoint, root / "bundle", Contents(texts=TEXTS[:3], variants=["cpu-fp32"]))
    return Made(theirs, checkpoint, root / "bundle")


@torch.inference_mode()
def pipeline(
    theirs: Theirs,
    question: str,
    context: str,
    top: int = 1,
    max_answer_len: int = 15,
    handle_impossible_answer: bool = False,
    doc_stride: int | None = None,
    max_seq_len: int = LONGEST,
) -> list[tuple[str, int, int, float]]:
    """QuestionAnsweringPipeline of transformers 4.57.1, `preprocess` and `postprocess`."""
    stride = min(max_seq_len // 2, 128) if doc_stride is None else doc_stride
    read = theirs.tokenizer(
        question,
        context,
        truncation="only_second",
        max_length=max_seq_len,
        stride=stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
        split_special_tokens=True,
    )
    answers: list[dict[str, Any]] = []
    null = 1000000.0
    for number, ids in enumerate(read["input_ids"]):
        inputs = {
            name: torch.tensor([read[name][number]]) for name in theirs.tokenizer.model_input_names
        }
        output = theirs.model(**inputs)
        undesired = np.array([each != 1 for each in read.sequence_ids(number)])
        undesired[np.array(ids) == 0] = False  # the cls token
        start, end = (
            np.where(undesired, -10000.0, logits[0].numpy())
            for logits in (output.start_logits, output.end_logits)
        )
        start, end = (np.exp(each - each.max()) for each in (start, end))
        start, end = start / start.sum(), end / end.sum()
        null = min(null, start[0] * end[0])
        start[0] = end[0] = 0.0
        candidates = np.tril(np.triu(np.outer(start, end)), max_answer_len - 1)
        order = np.argsort(-candidates.ravel(), kind="stable")[: top * 2 + 10]
        encoding = read.encodings[number]
        for first, last in zip(*np.unravel_index(order, candidates.shape), strict=True):
            score = candidates[first, last]
            if score == 0.0:
                continue
            words = encoding.token_to_word(int(first)), encoding.token_to_word(int(last))
            begin = encoding.word_to_chars(words[0], 1)[0]
            stop = encoding.word_to_chars(words[1], 1)[1]
            text = context[begin:stop]
            for known in answers:
                if known["text"].lower() == text.lower():
                    known["score"] += score
                    break
            else:
                answers.append({"text": text, "start": begin, "end": stop, "score": score})
    if handle_impossible_answer:
        answers.append({"text": "", "start": 0, "end": 0, "score": null})
    answers = sorted(answers, key=lambda each: each["score"], reverse=True)[:top]
    return [(each["text"], each["start"], each["end"], each["score"]) for each in answers]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "-".join(settings) or "usual")
@pytest.mark.parametrize("variant", ["portable", "cpu-fp32"])
def test_answers_are_those_of_the_pipeline(
    settings: dict[str, Any], variant: str, made: Made
) -> None:
    with Engine(made.bundle, variant=variant) as engine:
        found = list(engine.answer(QUESTIONS, **settings))
    for row, (question, context) in zip(found, QUESTIONS, strict=True):
        wanted = pipeline(made.theirs, question, context, **settings)
        assert row.error is None and (row.source, row.pair) == (question, context)
        own = [(each.text, each.start, each.end) for each in row.answers]
        assert own == [each[:3] for each in wanted]
        assert all(context[start:end] == text for text, start, end in own)
        assert np.abs(np.array(row.numbers) - [each[3] for each in wanted]).max() < 1e-5


def test_pairs_without_tokens_in_between_are_answered(tmp_path: Path) -> None:
    theirs = Theirs("qwen3", 0, tmp_path / "theirs", "ForQuestionAnswering")
    import_pretrained(tmp_path / "theirs", tmp_path / "run")
    unverified(load_checkpoint(tmp_path / "run"), tmp_path / "bundle", Contents(texts=TEXTS[:3]))
    with Engine(tmp_path / "bundle", variant="portable") as engine:
        assert not engine.bundle.tokenizer.special.between
        found = list(engine.answer(QUESTIONS))
    for row, (question, context) in zip(found, QUESTIONS, strict=True):
        ((text, start, end, score),) = pipeline(theirs, question, context)
        (best,) = row.answers
        assert (best.text, best.start, best.end) == (text, start, end)
        assert abs(best.score - score) < 1e-5


@pytest.mark.parametrize("from_end", [False, True])
@pytest.mark.parametrize(("room", "shared"), [(7, 3), (7, 0), (2, 1), (30, 29), (99, 5)])
def test_windows_are_those_of_tokenizers(
    room: int, shared: int, from_end: bool, made: Made
) -> None:
    tokenizer = made.theirs.tokenizer
    tokenizer.truncation_side = "left" if from_end else "right"
    try:
        read = tokenizer(
            "mat " * 30,
            truncation=True,
            max_length=room + 2,
            stride=shared,
            return_overflowing_tokens=True,
        )["input_ids"]
    finally:
        tokenizer.truncation_side = "right"
    ids = tokenizer("mat " * 30, add_special_tokens=False)["input_ids"]
    parts = task.parts(len(ids), room, shared, from_end=from_end)
    assert [ids[first:last] for first, last in parts] == [each[1:-1] for each in read]


def test_batches_are_verified_and_faults_seen(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(made.bundle) as engine:
        honest_parts: Any = task.parts
        honest_best: Any = task._Call._best
        wrong: Sequence[tuple[Any, str, Any]] = (
            (task, "parts", lambda *given, **named: honest_parts(*given, **named)[:1]),
            (task._Call, "_best", lambda *given: tuple(map(surer, honest_best(*given)))),
        )
        report = verify(made.checkpoint, engine.bundle, engine.model, Request(TEXTS))
        assert report.passed, report_text(report)
        assert [item.search for item in report.decisions] == ["answer"]
        assert "answer" in report.settings["tasks"]
        assert written(engine, TEXTS).problem == ""
        special, tolerance = made.checkpoint.tokenizer.special, Tolerance()
        oracle = Oracle.of(made.checkpoint.model, special, tolerance)
        tasks, model = ServedTasks(made.checkpoint, oracle, TEXTS[:2]), engine.encoder
        for owner, name, fault in wrong:
            with monkeypatch.context() as patched:
                patched.setattr(owner, name, fault)
                found = prove([tasks.check(engine.bundle, model, model.batches)])
            faults = {each.tensor for each in found.comparisons if each.fault}
            assert faults == {"answer"}, name


def surer(span: Span) -> Span:
    return replace(span, score=1.00001 * span.score)


def test_jobs_answer_in_every_format(made: Made, tmp_path: Path) -> None:
    wrong: list[tuple[Any, Any]] = [("a", " "), ("a", 7), ("mat " * 90, "the cat " * 99)]
    pairs = [*QUESTIONS, *wrong]
    rows = tmp_path / "rows.jsonl"
    lines = [json.dumps({"question": one, "context": two}) for one, two in pairs]
    rows.write_text("\n".join(lines) + "\n", encoding="utf-8")
    named = ["--task", "answer", "--column", "question", "--pair", "context", "--top", "2"]
    named += ["--canary", "1/1"]
    told = f"canaries {len(pairs)}, canaries identical {len(pairs)}"
    found: dict[str, list[dict[str, Any]]] = {}
    for ending in ("jsonl", "parquet", "csv", "tsv"):
        out = tmp_path / f"out.{ending}"
        fails(6, told, "run", made.bundle, rows, "-o", out, *named)
        if ending == "jsonl":
            found[ending] = list(map(json.loads, out.read_text(encoding="utf-8").splitlines()))
        if ending == "parquet":
            found[ending] = parquet.read_table(out).to_pylist()
    kinds = [each.get("error", {}).get("kind") for each in found["jsonl"]]
    assert kinds == [None] * 5 + ["empty", "no-text", "too-long"]
    with Engine(made.bundle) as engine:
        for number, row in enumerate(engine.answer(QUESTIONS, top=2)):
            spans = [vars(each) for each in row.answers]
            best = {name: spans[0][name] for name in ("start", "end", "score")}
            for records in found.values():
                record = records[number]
                assert record["answers"] == spans
                assert {name: record[name] for name in best} == best
                assert record["answer"] == spans[0]["text"]
    # Tables are read too, and in one a single answer needs no list.
    table, out = tmp_path / "rows.tsv", tmp_path / "one.parquet"
    table.write_text("q\tc\nthe cat\ton the mat\n", encoding="utf-8")
    done("run", made.bundle, table, "-o", out, "--task", "answer", "--column", "q", "--pair", "c")
    (record,) = parquet.read_table(out).to_pylist()
    assert record["answer"] == found["jsonl"][0]["answer"] and "answers" not in record


@pytest.mark.parametrize(
    ("given", "code", "message"),
    [
        ([], 2, "name the column of the contexts with --pair"),
        (["--pair", "c", "--long-rows", "truncate"], 2, "reads long contexts in windows"),
        (["--pair", "c", "--max-seq-len", "999"], 2, "at most 64, the model's positions"),
        (["--pair", "c", "--doc-stride", "64"], 2, "less than the window of 64 tokens"),
        (["--pair", "c", "--top", "0"], 2, "0"),
        (["--pair", "x"], 3, "expected a column x"),
        (["--task", "embed", "--doc-stride", "3"], 2, "only on answer"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    given: list[str], code: int, message: str, made: Made, tmp_path: Path
) -> None:
    (tmp_path / "rows.tsv").write_text("q\tc\nthe cat\ton the mat\n", encoding="utf-8")
    named: list[str] = [] if "--task" in given else ["--task", "answer"]
    failed = call("run", made.bundle, tmp_path / "rows.tsv", "--column", "q", *named, *given)
    assert failed.exit_code == code and message in failed.stderr, failed.stderr


def test_a_tokenizer_without_places_answers_nothing(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HuggingFaceTokenizer, "places", AnyTokenizer.places)
    with (
        Engine(made.bundle) as engine,
        pytest.raises(UsageError, match="which tasks tag and answer need"),
    ):
        engine.answer(QUESTIONS)


def test_canaries_tell_close_answers_from_wrong_ones() -> None:
    def result(*spans: Span) -> AnsweredResult:
        return AnsweredResult("q", 3, "c", spans)

    bounds: Any = SimpleNamespace(score=1e-4)
    one, other = Span("a", 0, 1, 0.5), Span("b", 2, 3, 0.5001)
    task: Any = object.__new__(Answer)
    assert task.same(result(one), result(one), bounds) == ("", 0)
    assert task.same(result(one), result(other), bounds) == ("", 1)
    assert "a score" in task.same(result(one), result(replace(other, score=0.6)), bounds)[0]
