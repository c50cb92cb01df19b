"""The commands for models that go on with a text, or read one, and for scores."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.commands import FEW, call, done, fails
from transferry.build_model.train.corpus import builtin_pairs

SIZES = ["--d-model=16", "--heads=2", "--d-ff=16", "--max-positions=24", "--batch-tokens=96"]
STEPS = ["--max-steps=2", "--warmup-steps=1", "--vocabulary-size=300", "--device=cpu"]


Arguments = list[str | Path]


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "book.txt"
    sentences = [pair.source for pair in builtin_pairs(200, seed=2)]
    path.write_text("\n".join(sentences) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lines") / "lines.txt"
    sentences = [pair.source for pair in builtin_pairs(9, seed=3)]
    path.write_text("\n".join(sentences) + "\n", encoding="utf-8")
    return path


def test_a_decoder_alone_from_nothing_to_answers(book: Path, tmp_path: Path) -> None:
    run, bundle, out = tmp_path / "run", tmp_path / "bundle", tmp_path / "answers.jsonl"
    text: Arguments = ["--text", book, "--preset", "prose", *SIZES, "--decoder-layers=1"]
    trained = done("train", *text, *STEPS, "--out", run)
    assert "training text: " in trained.stderr
    assert "perplexity" in trained.stderr
    config = json.loads((run / "config.json").read_bytes())["model"]
    assert config["architecture"] == "decoder-only"
    done("export", run, "--out", bundle)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the\n\nthe first of\n")
    few = tmp_path / "few.txt"
    few.write_bytes(b"".join(book.read_bytes().splitlines(True)[:20]))
    verified = done("verify", bundle, *FEW, "--checkpoint", run, "--text", few)
    assert re.search(r"^beam 4 +20 +20 ", verified.stdout, re.M)
    done("verify", bundle)
    answered = call("run", bundle, prompts, "-o", out, "--max-length", "5")
    assert answered.exit_code == 6  # for the empty prompt, which is an error on its own row
    assert [row["finish_reason"] for row in rows(out)] == ["length", "error", "length"]
    assert "decoder-only" in done("inspect", bundle).stdout
    resumed = done("train", "--out", run, "--resume", "--max-steps", "3")
    assert "validation loss" in resumed.stderr
    other = tmp_path / "other.txt"
    other.write_text("something else altogether, but text it is\n" * 9)
    command = "train", "--out", run, "--resume", "--max-steps", "4", "--text", other
    fails(3, "from training on other text", *command)


def test_an_encoder_alone_from_nothing_to_vectors(book: Path, tmp_path: Path) -> None:
    run, bundle = tmp_path / "run", tmp_path / "bundle"
    options: Arguments = [*SIZES, *STEPS, "--encoder-layers=1", "--valid-text", book]
    done("train", "--text", book, "--preset", "reader", *options, "--out", run)
    done("export", run, "--out", bundle)
    short = tmp_path / "short.txt"
    short.write_text("the first\nanother one\n")
    verified = done("verify", bundle, *FEW, "--checkpoint", run, "--text", short)
    assert re.search(r"^fill-mask +2 +2\b", verified.stdout, re.M)
    done("verify", bundle)
    vectors = tmp_path / "vectors.npy"
    done("run", bundle, short, "--task", "embed", "-o", vectors)
    assert np.load(vectors).shape == (2, 16)
    settings = (tmp_path / "vectors.npy.settings.toml").read_text()
    assert 'task = "embed"' in settings


def test_the_builtin_corpus_is_text_too(tmp_path: Path) -> None:
    options = ["--architecture", "decoder-only", *SIZES, *STEPS, "--decoder-layers=1"]
    done("train", "--builtin", "--preset", "tiny", *options, "--out", tmp_path / "run")
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_pairs_are_scored(bundle_folder: Path, lines: Path, tmp_path: Path) -> None:
    out = tmp_path / "scores.jsonl"
    scored = done("score", bundle_folder, lines, "--target", lines, "-o", out)
    found = rows(out)
    assert [row["id"] for row in found] == list(range(9))
    total = sum(row["total"] for row in found)
    tokens = sum(len(row["tokens"]) for row in found)
    perplexity = math.exp(-total / tokens)
    assert f"scored tokens {tokens:,}, " in scored.stderr
    said = float(scored.stderr.partition("perplexity ")[2].split()[0])
    assert said == pytest.approx(perplexity, rel=1e-4)
    settings = (tmp_path / "scores.jsonl.settings.toml").read_text()
    exact = float(settings.partition("perplexity = ")[2].split()[0])
    assert exact == pytest.approx(perplexity, rel=1e-12)
    again = done("score", bundle_folder, lines, "--target", lines, "-o", out)
    assert "scores.jsonl was finished before: 9 rows" in again.stderr
    shorter = out.with_name("shorter")
    shorter.write_text("".join(lines.read_text().splitlines(keepends=True)[:-1]))
    assert call("score", bundle_folder, shorter, "--target", shorter, "-o", out).exit_code == 2
    table = tmp_path / "scores.tsv"
    done("score", bundle_folder, lines, "--target", lines, "-o", table)
    assert table.read_text().splitlines()[0].split("\t")[:4] == ["id", "source", "target", "total"]
    other = tmp_path / "other.jsonl"
    done("score", bundle_folder, lines, "--target", lines, "-o", other, "--batch-rows", "2")
    assert [row["tokens"] for row in rows(other)] == [row["tokens"] for row in found]


@pytest.mark.parametrize(("sources", "targets"), [(3, 2), (2, 3)])
def test_pairs_of_unequal_number(
    bundle_folder: Path, tmp_path: Path, sources: int, targets: int
) -> None:
    (tmp_path / "source").write_text("a\n" * sources)
    (tmp_path / "target").write_text("a\n" * targets)
    out = tmp_path / "scores.jsonl"
    files: Arguments = [tmp_path / "source", "--target", tmp_path / "target"]
    fails(3, "give files of equal length", "score", bundle_folder, *files, "-o", out)
    assert not out.exists()


def test_masks_are_filled(reader_bundle_folder: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "text", tmp_path / "filled.jsonl"
    text.write_text("the [MASK] of\nno mask\n")
    result = call("run", reader_bundle_folder, text, "--task", "fill-mask", "-o", out, "--top", "3")
    assert result.exit_code == 6
    filled, bare = rows(out)
    assert len(filled["masks"][0]) == 3
    assert bare["error"]["kind"] == "no-mask"
    text.write_text("the [MASK] of\n")
    plain = done("run", reader_bundle_folder, text, "--task", "fill-mask", "-o", "-", "--quiet")
    assert plain.stdout == filled["text"] + "\n"


def test_vectors_are_written(reader_bundle_folder: Path, lines: Path, tmp_path: Path) -> None:
    out = tmp_path / "vectors.npy"
    command: Arguments = ["run", reader_bundle_folder, lines, "--task", "embed", "--normalise"]
    done(*command, "-o", out, "--pooling", "first")
    first = out.read_bytes()
    done(*command, "-o", out, "--pooling", "first", "--force")
    assert out.read_bytes() == first
    np.testing.assert_allclose(np.linalg.norm(np.load(out), axis=1), np.ones(9), rtol=1e-5)
    done(*command, "-o", out, "--force")
    assert out.read_bytes() != first
