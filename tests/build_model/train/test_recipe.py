"""From files to a trained run, killed on the way or not. As a script, one such training."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.build_model.train.small import BYTES, LAYERS, records
from transferry.build_model.checkpoint import load_checkpoint, load_samples
from transferry.build_model.train import follow as following
from transferry.build_model.train.data import BadPair, SentencePair
from transferry.build_model.train.distributed import Process
from transferry.build_model.train.evaluation import Evaluation
from transferry.build_model.train.follow import hold_out
from transferry.build_model.train.loop import Trainer
from transferry.build_model.train.metrics import Metrics
from transferry.build_model.train.presets import Preset
from transferry.build_model.train.recipe import PairFiles, TrainingRecipe
from transferry.runtime.errors import InputError
from transferry.runtime.tokenizer.byte_pair import SOURCES, SpecialTokens, Tokenizer

SMALLEST = Preset(
    270,
    dict(LAYERS, dropout=0.1, max_positions=40),
    dict(
        batch_tokens=120,
        warmup_steps=4,
        peak_learning_rate=1e-2,
        max_steps=10,
        validate_every=5,
        save_every=3,
    ),
)
WORDS = ["red", "green", "blue", "grey", "black", "white"]


def write_pairs(folder: Path, *more: str) -> PairFiles:
    folder.mkdir(exist_ok=True)
    lines = [f"a {a} {b} cat\t{b} {a}" for a in WORDS for b in WORDS]
    (folder / "pairs.tsv").write_text("\n".join([*lines, *more]) + "\n")
    return PairFiles(folder / "pairs.tsv")


def recipe(pairs: PairFiles, **changes: Any) -> TrainingRecipe:
    return TrainingRecipe(
        **{
            "train": pairs,
            "valid": pairs,
            "preset": SMALLEST,
            "model_changes": {},
            "train_changes": {"valid_sentences": 4},
            **changes,
        }
    )


def follow(
    what: TrainingRecipe, folder: Path, *, resume: bool = False
) -> tuple[Evaluation | None, str]:
    """Runs it; returns the marks and the messages."""
    said: list[str] = []
    marks = following.follow(what, folder, device="cpu", resume=resume, say=said.append)
    return marks, "\n".join(said)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Metrics, "draw", lambda self: None)


def train_in_another_process(pairs: Path, folder: Path, *options: str) -> int:
    arguments = [sys.executable, "-m", __name__, str(pairs), str(folder), *options]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(arguments, cwd=Path(__file__).parents[3], env=alone).returncode


def test_a_killed_training_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    write_pairs(tmp_path)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    killed = train_in_another_process(tmp_path / "pairs.tsv", cut, "kill")
    assert killed == -signal.SIGKILL
    assert not (cut / "model.safetensors").exists()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        follow(recipe(PairFiles(tmp_path / "pairs.tsv")), whole)
        follow(recipe(PairFiles(tmp_path / "pairs.tsv")), cut, resume=True)
    finally:
        torch.set_num_threads(threads)
    for name in ("model.safetensors", "config.json", "tokenizer.json", "ranks.tiktoken"):
        assert (cut / name).read_bytes() == (whole / name).read_bytes(), name
    assert records(cut) == records(whole)
    assert (cut / "curves.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.usefixtures("quick")
def test_what_comes_out_can_be_loaded(tmp_path: Path) -> None:
    marks, said = follow(recipe(write_pairs(tmp_path)), tmp_path / "run")
    assert marks is not None
    assert 0.0 < marks.loss < 6.0
    assert load_samples(tmp_path / "run")[:2] == ["a red red cat", "a red green cat"]
    loaded = load_checkpoint(tmp_path / "run")
    parameters = sum(parameter.numel() for parameter in loaded.model.parameters())
    assert loaded.tokenizer.vocabulary_size == 270
    assert [line for line in said.splitlines() if not line.startswith("step ")] == [
        "training pairs: 36 of 36 kept",
        "validation pairs: 36 of 36 kept",
        "vocabulary: 270 ids",
        f"model: {parameters:,} parameters, on cpu",
    ]


@pytest.mark.usefixtures("quick")
def test_without_validation_pairs_some_are_held_out(tmp_path: Path) -> None:
    pairs = write_pairs(tmp_path, "a red red cat\tred red")
    pairs.source.write_text(f"too long\t{'x ' * 300}\n{pairs.source.read_text()}")
    what = recipe(pairs, valid=None, skip_bad=True, train_changes=dict(max_steps=1))
    _, said = follow(what, tmp_path / "run")
    assert "validation pairs: 2 of these, held out" in said.splitlines()
    assert load_samples(tmp_path / "run") == ["a green white cat", "a grey white cat"]


@pytest.mark.parametrize(
    ("text", "valid", "message"),
    [
        ("1", None, "one.txt: expected at least 2 tokens, found 1; give more text$"),
        ("1 2 3", None, "one.txt, the last tenth, .*, found 0; give more text or --valid-text$"),
        ("1 2 3", "1", "valid.txt: expected at least 2 tokens, found 1; give more text$"),
    ],
)
def test_a_text_of_few_tokens_is_named(
    text: str, valid: str | None, message: str, tmp_path: Path
) -> None:
    (tmp_path / "one.txt").write_text(text)
    (tmp_path / "valid.txt").write_text(valid or "")
    given = None if valid is None else tmp_path / "valid.txt"
    shape = {"architecture": "decoder-only", "encoder_layers": 0}
    what = recipe(PairFiles(tmp_path), valid=given, tokenizer=BYTES, model_changes=shape)
    with pytest.raises(InputError, match=message):
        follow(replace(what, train=tmp_path / "one.txt"), tmp_path / "run")


def test_held_out_pairs_are_on_one_side_alone() -> None:
    pairs = [SentencePair(f"{number % 25}", "x") for number in range(60)]
    train, valid = hold_out(pairs)
    assert [pair.source for pair in valid] == ["0", "12"]
    assert len(train) == 60 - 3 - 2
    assert not set(train) & set(valid)
    many = [SentencePair(str(number), "x") for number in range(30_000)]
    assert [len(side) for side in hold_out(many)] == [29_000, 1_000]
    with pytest.raises(InputError, match=r"at least 10 different pairs .*, found 1; give more"):
        hold_out(pairs[:1] * 20)


@pytest.mark.usefixtures("quick")
def test_what_differs_from_the_preset(tmp_path: Path) -> None:
    changed = recipe(
        write_pairs(tmp_path),
        model_changes={"d_ff": 48},
        train_changes={"max_steps": 2, "seed": 7},
        vocabulary_size=262,
    )
    follow(changed, tmp_path / "run")
    loaded = load_checkpoint(tmp_path / "run")
    assert loaded.config is not None
    assert (loaded.model.config.d_ff, loaded.model.config.vocabulary_size) == (48, 262)
    assert (loaded.config.max_steps, loaded.config.seed) == (2, 7)
    assert loaded.config.batch_tokens == 120


@pytest.mark.usefixtures("quick")
def test_a_named_encoding_is_cut_to_both_sides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[str, list[str], SpecialTokens]] = []

    def cut(name: str, lines: list[str], special: SpecialTokens) -> Tokenizer:
        given.append((name, lines, special))
        return BYTES

    monkeypatch.setattr(following, "cut_encoding", cut)
    what = recipe(write_pairs(tmp_path), encoding="o200k_base", train_changes=dict(max_steps=1))
    follow(what, tmp_path / "run")
    [(name, lines, special)] = given
    assert special == SOURCES
    assert (name, lines[:2], len(lines)) == ("o200k_base", ["a red red cat", "red red"], 72)
    assert load_checkpoint(tmp_path / "run").tokenizer.vocabulary_size == 259


@pytest.mark.usefixtures("quick")
def test_the_built_in_corpus_lies_in_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Path] = []

    def write_corpus(folder: Path) -> None:
        written.append(folder)
        folder.mkdir(parents=True)
        for name, count in (("train", 30), ("valid", 5)):
            for language in ("en", "de"):
                lines = [f"{language} {word}" for word in WORDS * 5][:count]
                (folder / f"{name}.{language}").write_text("\n".join(lines) + "\n")

    monkeypatch.setattr(following, "write_corpus", write_corpus)
    folder = tmp_path / "run"
    what = recipe(write_pairs(tmp_path), train=None, valid=None, train_changes=dict(max_steps=2))
    for resume in (False, True):
        _, said = follow(what, folder, resume=resume)
        assert said.splitlines()[:2] == [
            "training pairs: 30 of 30 kept",
            "validation pairs: 5 of 5 kept",
        ]
    assert written == [folder / "corpus"]
    assert load_samples(folder)[0] == "en red"


@pytest.mark.usefixtures("quick")
def test_bad_pairs_are_refused_or_counted(tmp_path: Path) -> None:
    good = write_pairs(tmp_path)
    bad = write_pairs(tmp_path / "other", "no target\t", "long " * 40 + "\tlang")
    with pytest.raises(BadPair, match="line 37: expected text, found nothing"):
        follow(recipe(bad), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    what = recipe(bad, valid=good, skip_bad=True, train_changes=dict(max_steps=1))
    _, said = follow(what, tmp_path / "run")
    assert said.splitlines()[0] == "training pairs: 37 of 38 kept, 1 empty"
    assert "training pairs: 36 of 37 kept, 1 too many tokens" in said


def test_a_validation_pair_that_is_too_long_is_refused(tmp_path: Path) -> None:
    good = write_pairs(tmp_path)
    long = write_pairs(tmp_path / "other", "long " * 40 + "\tlang")
    with pytest.raises(BadPair, match="expected at most 40 tokens"):
        follow(recipe(good, valid=long, skip_bad=True), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("quick")
def test_resuming_keeps_all_settings_but_the_end(tmp_path: Path) -> None:
    pairs = write_pairs(tmp_path)
    folder = tmp_path / "run"
    follow(recipe(pairs, train_changes=dict(max_steps=2, seed=7)), folder)
    changes = dict(max_steps=4, seed=8, batch_tokens=60)
    what = recipe(pairs, model_changes=dict(d_ff=48), train_changes=changes, vocabulary_size=262)
    follow(what, folder, resume=True)
    loaded = load_checkpoint(folder)
    assert loaded.config is not None
    assert (loaded.config.max_steps, loaded.config.seed) == (4, 7)
    assert (loaded.config.batch_tokens, loaded.model.config.d_ff) == (120, 32)
    assert records(folder)[-1]["step"] == 4


@pytest.mark.usefixtures("quick")
def test_other_processes_write_nothing_and_say_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = []

    class Second(Process):
        def stop(self) -> None:
            stopped.append(self.rank)

    second = Second(1, 1, torch.device("cpu"))
    monkeypatch.setattr(Process, "start", lambda device: second)
    assert follow(recipe(write_pairs(tmp_path)), tmp_path / "run") == (None, "")
    assert not (tmp_path / "run").exists()
    assert stopped == [1]


def main() -> None:
    """Trains from the pairs sys.argv[1] into the folder sys.argv[2]; "kill" dies at step 8."""
    step = Trainer._step

    def last_step(self: Trainer, *args: Any) -> tuple[float, int]:
        if self.progress.step == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, *args)

    if "kill" in sys.argv:
        Trainer._step = last_step  # type: ignore[method-assign, assignment]
    follow(recipe(PairFiles(Path(sys.argv[1]))), Path(sys.argv[2]))


if __name__ == "__main__":
    main()
