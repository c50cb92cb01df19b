"""A student of a tiny teacher: its training pairs and text, interrupted or not, and refusals."""

import json
import os
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import sacrebleu

from tests.commands import call, changed, done, python
from tests.export.distillation.killed_distil import STUDENT
from tests.threads import torch_threads
from transferry.build_model.checkpoint import load_checkpoint
from transferry.build_model.train.corpus import builtin_pairs
from transferry.build_model.train.data import ReadReport, SentencePair, read_pair_file
from transferry.build_model.train.loop import Trainer
from transferry.build_model.train.metrics import Metrics
from transferry.export.distillation import distil as distillation
from transferry.export.distillation.distil import (
    DistilledPair,
    best_hypothesis,
    distil,
    distilled,
    write_pairs,
)
from transferry.runtime.engine.engine import Engine
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.tokenizer.byte_pair import Tokenizer

CHECKOUT = Path(__file__).parents[3]
# The same as options of the command line.
OPTIONS = [
    f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
    for name, value in STUDENT.items()
]
TOO_LONG = " ".join(["seven hundred"] * 60)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Metrics, "draw", lambda self: None)


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    with torch_threads(1):
        yield


@pytest.fixture(scope="session")
def corpus(bundle_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The options that name a corpus; references of its first rows are fourth hypotheses.

    Most answers of the random teacher never end.
    """
    folder = tmp_path_factory.mktemp("corpus")
    pairs = [pair for pair in dict.fromkeys(builtin_pairs(300, seed=1)) if len(pair.source) < 40]
    fourth, others = {}, {}
    with Engine(bundle_folder) as engine:
        results = engine.generate((pair.source for pair in pairs), beam=4, n_best=4)
        for pair, result in zip(pairs, results, strict=True):
            last = result.hypotheses[3]
            if last.finish_reason == "end" and last.text.strip() and last.text.isprintable():
                fourth[pair.source] = last.text
            else:
                others[pair.source] = pair.target
    assert len(fourth) >= 16
    # One row without a text, and one that is too long for the teacher.
    rows = [*list(fourth.items())[:16], *list(others.items())[:18], ("", "leer")]
    rows.append((TOO_LONG, "lang"))
    for place, name in enumerate(("train.en", "train.de")):
        (folder / name).write_text("".join(f"{row[place]}\n" for row in rows))
    return ["--source", str(folder / "train.en"), "--target", str(folder / "train.de")]


@pytest.fixture(scope="session")
def whole(bundle_folder: Path, corpus: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    with torch_threads(1), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Metrics, "draw", lambda self: None)
        distil(bundle_folder, folder, source=corpus[1], target=corpus[3], **STUDENT)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def given(bundle_folder: Path, corpus: list[str], run: Path) -> list[str | Path]:
    """The command that makes the run, without a word of its own."""
    return ["distil", bundle_folder, *corpus, *OPTIONS, "--out", run]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def same(one: Path, other: Path) -> None:
    names = [
        *("model.safetensors", "config.json", "tokenizer.json", "samples.json"),
        *(f"distilled/{name}.jsonl" for name in ("answers", "pairs", "valid")),
    ]
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def test_the_student_is_trained_on_references_and_answers(whole: Path, bundle_folder: Path) -> None:
    answers = {row["source"]: row for row in lines_of(whole / "distilled" / "answers.jsonl")}
    pairs = lines_of(whole / "distilled" / "pairs.jsonl")
    taught = [pair for pair in pairs if pair["origin"] == "teacher"]
    assert answers[TOO_LONG]["error"]["kind"] == "too-long"
    assert "" not in answers
    assert len(taught) >= 10
    assert {pair["rank"] for pair in taught} >= {4}, "the search's own order does not decide"
    for pair in taught:
        answer = answers[pair["source"]]
        ended = [each["text"] for each in answer["n_best"] if each["finish_reason"] == "end"]
        scores = [
            sacrebleu.sentence_bleu(text, [answer["reference"]]).score
            for text in ended
            if text.strip()
        ]
        assert pair["bleu"] == pytest.approx(max(scores), abs=1e-3)
        assert pair["target"] in ended
    held = {pair["source"] for pair in lines_of(whole / "distilled" / "valid.jsonl")}
    assert len(held) == 3
    references = {pair["source"] for pair in pairs if pair["origin"] == "reference"}
    assert references == answers.keys() - held
    assert {pair["source"] for pair in taught} <= references
    teacher, student = Tokenizer.load(bundle_folder), load_checkpoint(whole)
    assert student.tokenizer == teacher
    assert student.model.config.d_model == 16
    assert not (whole / "distilled" / "rows.jsonl").exists()


def test_what_is_said(given: list[str | Path], run: Path) -> None:
    said = done(*[word for word in given if word != "--quiet"]).stderr
    pairs = lines_of(run / "distilled" / "pairs.jsonl")
    taught = [pair for pair in pairs if pair["origin"] == "teacher"]
    lines = said.splitlines()
    assert lines[0] == "pairs to distil: 35 of 36 kept, 1 empty"
    counts = r"distilled pairs: (\d+) of 35 kept, (\d+) without a whole answer, 1 too-long"
    found = re.fullmatch(counts, lines[1])
    assert found is not None
    kept, dropped = map(int, found.groups())
    assert kept + dropped + 1 == 35
    assert kept >= len(taught), "answers of sources that are held out count too"
    assert re.fullmatch(r"sentence BLEU \d+\.\d on average; \d+ of them .* likeliest", lines[2])
    assert lines[-1].startswith("validation loss ")


def test_killed_in_every_phase_it_ends_with_the_same_bytes(
    bundle_folder: Path, corpus: list[str], whole: Path, tmp_path: Path
) -> None:
    program = "-m", "tests.export.distillation.killed_distil"
    given = bundle_folder, corpus[1], corpus[3], tmp_path / "cut"
    ended = python(*program, *given, cwd=CHECKOUT, env={**os.environ, "OMP_NUM_THREADS": "1"})
    # The killed phase, saved chunks, and whether there are answers, pairs and a state.
    assert ended.stdout.splitlines() == [
        "append 0 False False False",
        "append 2 False False False",
        "distilled -1 True False False",
        "_write -1 True False False",
        "_step -1 True True True",
        "_step -1 True True True",
    ]
    same(whole, tmp_path / "cut")


def test_an_interrupted_training_says_how_to_go_on(
    given: list[str | Path], whole: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Trainer._step

    def interrupted(self: Trainer, *arguments: Any) -> Any:
        self.interrupted = self.progress.step == 1
        return step(self, *arguments)

    monkeypatch.setattr(Trainer, "_step", interrupted)
    result = call(*given)
    assert result.exit_code == 130
    assert f"continue with: transferry distil --out {run} --resume" in result.stderr
    monkeypatch.undo()
    monkeypatch.setattr(Metrics, "draw", lambda self: None)
    refused = call("train", "--out", run, "--resume")
    assert refused.exit_code == 2
    assert f"made by distil; continue it with: transferry distil --out {run}" in refused.stderr
    # Neither the teacher nor the corpus need be named, and the answers are not made again.
    monkeypatch.setattr(distillation, "_answer", None)
    done("distil", "--out", run, "--resume", "--quiet")
    same(whole, run)


def test_the_settings_of_a_run_give_it_again(whole: Path, run: Path) -> None:
    settings = whole / "settings.toml"
    made = tomllib.loads(settings.read_text())
    assert made["beam"] == 4
    assert len(made["made"]["teacher_sha256"]) == 64
    done("distil", "--config", settings, "--out", run, "--quiet")
    same(whole, run)


def test_without_references_the_likeliest_is_taken(
    bundle_folder: Path, corpus: list[str], tmp_path: Path, run: Path
) -> None:
    pairs = builtin_pairs(4, seed=5)
    valid = tmp_path / "valid.tsv"
    valid.write_text("".join("\t".join(pair) + "\n" for pair in pairs))
    options = {**STUDENT, "max_steps": 1, "vocabulary_size": 300}
    distil(bundle_folder, run, source=corpus[1], valid_pairs=valid, **options)
    answers = lines_of(run / "distilled" / "answers.jsonl")
    assert [row["error"]["kind"] for row in answers if "error" in row] == ["empty", "too-long"]
    expected = [
        {"source": row["source"], "target": row["text"], "origin": "teacher", "rank": 1}
        for row in answers
        if row["finish_reason"] == "end" and row["text"].strip()
    ]
    assert lines_of(run / "distilled" / "pairs.jsonl") == expected
    assert not (run / "distilled" / "valid.jsonl").exists()
    assert load_checkpoint(run).tokenizer.vocabulary_size == 300


def require_refused(folder: Path, code: int, message: str, *arguments: str | Path) -> None:
    result = call(*arguments)
    assert result.exit_code == code, result.stderr
    assert message in result.stderr
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("option", "code", "message"),
    [
        ("--heads=3", 2, "heads"),
        ("--dropout=0 --r-drop=1", 2, "r-drop must be 0 where dropout is 0"),
        ("--n-best=5", 2, "--n-best=5 is more than --beam=4 can give"),
        ("--valid-source=absent", 2, "give --valid-source and --valid-target"),
        ("--vocabulary-size=300 --encoding=cl100k_base", 2, "exclude each other"),
        ("--device=tpu", 2, "device must be cpu"),
        ("--pairs=absent.tsv", 2, "give --source, with --target"),
        ("--source=absent.en", 3, "absent.en"),
        ("--source=/dev/null", 3, "expected at least one line, found none"),
        ("--variant=cpu-int9", 2, "cpu-int9"),
        ("--preset=prose", 2, "'prose' is not one of"),
    ],
)
def test_bad_options_leave_nothing(
    given: list[str | Path], tmp_path: Path, option: str, code: int, message: str
) -> None:
    require_refused(tmp_path, code, message, *changed(given, *option.split()))


def test_too_many_errors_stop_it_and_a_higher_limit_continues(
    given: list[str | Path], whole: Path, run: Path
) -> None:
    stopped = call(*given, "--max-errors=0")
    assert stopped.exit_code == 3
    assert "more than 0 rows are bad, the first of them: row 35: " in stopped.stderr
    assert "30 rows are saved in" in stopped.stderr
    done(*given, "--max-errors=1")
    same(whole, run)


def test_what_cannot_be_distilled_is_refused(
    bundle_folder: Path,
    writer_bundle_folder: Path,
    reader_bundle_folder: Path,
    corpus: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = ["--out", str(tmp_path / "run")]
    for arguments, code, message in (
        ([*corpus, *out], 2, "expected a TEACHER, the bundle that answers"),
        ([tmp_path / "absent", *corpus, *out], 3, "absent"),
        ([writer_bundle_folder, *corpus, *out], 2, "as the teacher, found decoder-only"),
        ([reader_bundle_folder, *corpus, *out], 2, "as the teacher, found encoder-only"),
        ([bundle_folder, "--source=-", *out], 2, "read more than once, and stdin only once"),
    ):
        require_refused(tmp_path, code, message, "distil", *arguments)
    with pytest.raises(UsageError, match="distil has no option beams; it knows teacher, source"):
        distil(bundle_folder, tmp_path / "run", source=corpus[1], beams=4)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match=r"train on OUT/distilled/pairs\.jsonl"):
        distil(bundle_folder, tmp_path / "run", source=corpus[1])
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_continued_as_it_was_begun_or_replaced_by_force(
    given: list[str | Path], whole: Path, tmp_path: Path, run: Path
) -> None:
    source = tmp_path / "train.en"
    shutil.copytree(whole, run)
    place = given.index("--source") + 1
    shutil.copy(given[place], source)
    given[place] = source
    refused = call(*given, "--beam=5")
    assert refused.exit_code == 2
    assert "started with --beam 4, found --beam 5; leave it out to resume" in refused.stderr
    refused = call(*changed(given, "--seed=1"))
    assert "started with --seed left out, found --seed 1" in refused.stderr
    refused = call("distil", "--out", run, "--resume", "--d-ff=32")
    assert "started with --d-ff 16, found --d-ff 32" in refused.stderr
    # The corpus may have moved, but must be the same.
    done(*given)
    same(whole, run)
    source.write_text(source.read_text().replace("seven", "eight"))
    refused = call(*given)
    assert refused.exit_code == 3
    assert f"{run} was begun with another source, found {source}; restore it" in refused.stderr
    same(whole, run)
    done(*changed(given, "--force", "--max-steps=1"))
    assert (run / "model.safetensors").read_bytes() != (whole / "model.safetensors").read_bytes()
    assert not (run / ".former").exists()
    # A note of somebody else is kept, and so the run is too.
    (run / "distilled" / "notes.txt").write_text("mine")
    refused = call(*given, "--force")
    assert refused.exit_code == 2
    assert "holds distilled/notes.txt, which transferry did not write" in refused.stderr


def test_a_replaced_run_comes_back_after_an_early_error(
    given: list[str | Path], whole: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(whole, run)

    def broken(*arguments: Any, **named: Any) -> None:
        raise InputError("the teacher is gone")

    monkeypatch.setattr(Engine, "__init__", broken)
    result = call(*given, "--force")
    assert (result.exit_code, result.stderr) == (3, "Error: the teacher is gone\n")
    same(whole, run)
    assert not (run / ".former").exists()


REFERENCE = "Zwei Hunde laufen über eine grüne Wiese ."
NEAR, NEARER = "Zwei Hunde laufen über die Wiese .", "Zwei Hunde laufen über eine Wiese ."


def answer(*hypotheses: str | tuple[str, str], source: str = "two dogs") -> dict[str, Any]:
    """A record of a job, hypotheses best first; the second of a tuple is the finish reason."""
    pairs = [(each, "end") if isinstance(each, str) else each for each in hypotheses]
    listed = [{"text": text, "finish_reason": reason} for text, reason in pairs]
    return {"source": source, **listed[0], **({"n_best": listed} if listed[1:] else {})}


@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_best_by_sentence_bleu_is_taken_wherever_it_stands(place: int) -> None:
    texts = ["Ein Hund schläft .", NEAR]
    texts.insert(place, NEARER)
    pair = best_hypothesis(answer(*texts), REFERENCE)
    assert pair is not None
    bleu = sacrebleu.sentence_bleu(NEARER, [REFERENCE]).score
    assert pair == DistilledPair("two dogs", NEARER, "teacher", place + 1, round(bleu, 3))
    others = [sacrebleu.sentence_bleu(text, [REFERENCE]).score for text in texts]
    assert sorted(others)[-2] < max(others) == bleu


def test_of_equals_and_without_a_reference_the_likeliest_is_taken() -> None:
    equals = answer("Nichts davon", "Gar nichts", "Zwei")
    for reference, expected in (("ganz anders", 1), (None, 1), ("Zwei", 3)):
        pair = best_hypothesis(equals, reference)
        assert pair is not None
        assert pair.rank == expected


@pytest.mark.parametrize("reference", [None, "a b c d"])
def test_an_answer_that_is_empty_or_cut_off_is_not_taken(reference: str | None) -> None:
    pair = best_hypothesis(answer(("a b c d", "length"), " ", "a b"), reference)
    assert pair is not None
    assert (pair.target, pair.rank) == ("a b", 3)
    assert best_hypothesis(answer(("a b c d", "length"), ""), reference) is None


def written(folder: Path, *answers: dict[str, Any]) -> Path:
    path = folder / "answers.jsonl"
    path.write_text("".join(f"{json.dumps(each)}\n" for each in answers))
    return path


def test_rows_with_errors_are_dropped_and_counted(tmp_path: Path) -> None:
    error = {"text": "", "finish_reason": "error", "error": {"kind": "too-long", "message": "x"}}
    answers = written(
        tmp_path,
        answer("eins", source="one"),
        {"source": "", **error, "n_best": []},
        answer(("zwei zwei", "length"), source="two"),
        answer("vier", "drei", source="three"),
    )
    shown: list[int] = []
    pairs, report = distilled(answers, ["eins", "-", "zwei", "drei"], shown.append)
    assert [(pair.source, pair.target) for pair in pairs] == [("one", "eins"), ("three", "drei")]
    assert report == ReadReport(4, 2, {"too-long": 1, "without a whole answer": 1})
    assert str(report) == "2 of 4 kept, 1 too-long, 1 without a whole answer"
    assert shown == [1, 2, 3, 4]
    answers = written(tmp_path, {"source": "", **error})
    with pytest.raises(InputError, match=r"at least one usable answer, found 0 of 1 kept, 1 too-"):
        distilled(answers, None, shown.append)


def test_a_source_that_is_held_out_is_trained_on_with_no_target(tmp_path: Path) -> None:
    corpus = [SentencePair(f"s{number}", f"t{number}") for number in range(20)]
    taught = [DistilledPair(pair.source, f"{pair.target} too", "teacher", 1) for pair in corpus]
    train, valid = tmp_path / "pairs.jsonl", tmp_path / "valid.jsonl"
    write_pairs(taught, corpus, train, valid)
    held, _ = read_pair_file(valid)
    kept, _ = read_pair_file(train)
    assert held == [("s0", "t0"), ("s10", "t10")]
    assert len(kept) == 2 * 18
    assert not {pair.source for pair in held} & {pair.source for pair in kept}
    origins = [json.loads(line)["origin"] for line in train.read_text().splitlines()]
    assert origins == ["reference"] * 18 + ["teacher"] * 18
    write_pairs(taught, corpus, train, None)
    assert len(train.read_text().splitlines()) == 40
    write_pairs(taught, [], train, valid)
    assert read_pair_file(valid)[0] == [("s0", "t0 too"), ("s10", "t10 too")]
    with pytest.raises(InputError, match="give more, or --valid-pairs"):
        write_pairs(taught[:3], [], train, valid)
