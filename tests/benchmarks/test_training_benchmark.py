"""The benchmark of training: every side makes steps, on the same batches."""

import json
import sys
from pathlib import Path

import pytest
import torch

import training
from environment import processor
from transferry.build_model.train.corpus import builtin_pairs
from transferry.build_model.train.data import Batch
from transferry.build_model.train.presets import PRESETS


@pytest.fixture
def corpus(tmp_path: Path) -> tuple[Path, Path]:
    files = tmp_path / "train.en", tmp_path / "train.de"
    for file, lines in zip(files, zip(*builtin_pairs(60, seed=3), strict=True), strict=True):
        file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return files


def test_the_plain_transformer_reads_no_padding_and_nothing_ahead() -> None:
    torch.manual_seed(0)
    model = training.PlainTransformer(PRESETS["mini"].model_config(50)).eval()
    source, target = torch.randint(4, 50, (2, 7)), torch.randint(4, 50, (2, 6))
    mask = torch.arange(7) < torch.tensor([[7], [5]])
    logits = model(Batch(source, mask, target, target))
    other, later = source.clone(), target.clone()
    other[1, 5:] += 1
    later[:, 4:] = 4
    changed = model(Batch(other % 50, mask, later, later))
    torch.testing.assert_close(changed[:, :4], logits[:, :4])
    assert not torch.allclose(changed[:, 4:], logits[:, 4:])
    other[1, 4] += 1
    assert not torch.allclose(model(Batch(other % 50, mask, later, later))[1], changed[1])


def test_every_side_learns(corpus: tuple[Path, Path], tmp_path: Path) -> None:
    work, tokens = training.sides(*corpus, "mini", 2, "float32", tmp_path)
    assert tokens > 0
    for name, steps in list(work.items())[1:]:
        trainer = steps.args[0]  # type: ignore[attr-defined]
        before, seen = trainer.model.embedding.weight.clone(), trainer.progress.tokens
        steps()
        assert not torch.equal(trainer.model.embedding.weight, before), name
        # BPE dropout has more tokens of its own, of the same text.
        assert (trainer.progress.tokens - seen > tokens) == ("BPE" in name), name
        assert trainer.progress.tokens - seen >= tokens, name


@pytest.mark.thorough
def test_it_ends_in_a_line_of_json(
    corpus: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ["--steps", "1", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["training.py", *map(str, corpus), *options])
    training.main()
    lines = capsys.readouterr().out.splitlines()
    record = json.loads(lines[-1])
    assert set(record["ratio"]) == {
        "trainer",
        "trainer, R-Drop",
        "trainer, BPE dropout",
    }
    assert sum(line.endswith(processor()) for line in lines) == 4
