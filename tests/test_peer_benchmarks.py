"""The benchmarks of decoder-only and encoder-only models: all sides do the same work."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import encoders
import generators
from tests.build_model.test_huggingface import save
from transferry.build_model.checkpoint import load_checkpoint
from transferry.build_model.corpus import builtin_pairs
from transferry.build_model.huggingface.importer import import_checkpoint
from transferry.export.bundle import export_bundle

TEXTS = [pair.source for pair in builtin_pairs(24, seed=3)]


def measured(
    script: Any, kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str
) -> None:
    """Runs a benchmark on a small random model."""
    save(kind, folder / "model")
    import_checkpoint(folder / "model", folder / "run")
    export_bundle(load_checkpoint(folder / "run"), folder / "bundle", variants=["cpu-fp32"])
    text = folder / "text.txt"
    text.write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    paths = [str(folder / "model"), str(folder / "bundle"), str(text)]
    options = (*options, "--variants", "cpu-fp32", "--rows", "8", "--rounds", "1")
    monkeypatch.setattr(sys, "argv", [script.__name__, *paths, *options])
    script.main()


def test_generate_of_transformers_gives_the_engines_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--prompts", "3,9", "--new-tokens", "5")
    measured(generators, "gpt2", tmp_path, monkeypatch, *options)
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [cell["prompt"] for cell in record["cells"]] == [3, 9]
    for cell in record["cells"]:
        assert cell["peers"]["transformers"]["same"] == "8/8"


@pytest.mark.parametrize("tokens", ["0", "20"])
def test_the_peers_give_the_engines_vectors(
    tokens: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    measured(encoders, "bert", tmp_path, monkeypatch, "--tokens", tokens)
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    (cell,) = record["cells"]
    assert {"engine", "transformers"} <= cell["sides"].keys()
    for name, side in cell["sides"].items():
        assert side["distance"] < 1e-5, name
