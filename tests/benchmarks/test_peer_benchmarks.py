"""The benchmark of encoder-only models, and the shapes of models: all sides do the same work."""

import json
import sys
from pathlib import Path

import pytest
import torch

import encoders
import shapes
from rounds import processor
from tests.build_model.importing.huggingface.small_models import save
from tests.traced import unverified
from transferry.build_model.checkpoint import load_checkpoint
from transferry.build_model.importing.huggingface.importer import import_pretrained
from transferry.build_model.train.corpus import builtin_pairs
from transferry.export.bundle import Contents
from transferry.runtime.tokenizer.byte_pair import load_tokenizer

pytestmark = pytest.mark.usefixtures("traces")
TEXTS = [pair.source for pair in builtin_pairs(24, seed=3)]


def measured(folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    """Runs the benchmark on a small random model."""
    save("bert", folder / "model")
    import_pretrained(folder / "model", folder / "run")
    contents = Contents(variants=["cpu-fp32"])
    unverified(load_checkpoint(folder / "run"), folder / "bundle", contents)
    text = folder / "text.txt"
    text.write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    paths = [str(folder / "model"), str(folder / "bundle"), str(text)]
    options = (*options, "--variants", "cpu-fp32", "--rows", "8", "--rounds", "1")
    monkeypatch.setattr(sys, "argv", ["encoders", *paths, *options])
    encoders.main()


def test_the_peers_give_the_engines_vectors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured(tmp_path, monkeypatch, "--tokens", "0,20")
    *printed, record = capsys.readouterr().out.splitlines()
    cells = json.loads(record)["cells"]
    assert [cell["tokens"] for cell in cells] == [0, 20]
    for cell in cells:
        assert {"engine", "transformers"} <= cell["sides"].keys()
        for name, side in cell["sides"].items():
            assert side["distance"] < 1e-5, name
    results = [line for line in printed if line.startswith("cpu-fp32 ")]
    assert len(results) == sum(len(cell["sides"]) for cell in cells)
    assert all(line.endswith(processor()) for line in results)


@pytest.mark.parametrize(("shape", "millions"), [("llama", 100), ("bert", 109), ("minilm", 23)])
def test_a_shape_has_the_parameters_that_it_says(shape: str, millions: int) -> None:
    with torch.device("meta"):
        model = shapes.SHAPES[shape][0]()
    assert round(model.num_parameters() / 1e6) == millions


@pytest.mark.parametrize("shape", ["llama", "minilm"])
def test_a_random_shape_can_be_imported(
    shape: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text, folder = tmp_path / "text.txt", tmp_path / "model"
    text.write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["shapes.py", shape, str(text), str(folder), "--layers", "1"])
    shapes.main()
    assert f"shape {shape}" in capsys.readouterr().out
    import_pretrained(folder, tmp_path / "run")
    tokenizer = load_tokenizer(tmp_path / "run")
    ids = tokenizer.encode(TEXTS[0])
    assert 0 < len(ids) < len(TEXTS[0]), "trained on the text"
    text_again = tokenizer.decode(ids).strip()
    assert text_again == (TEXTS[0].lower() if shape == "minilm" else TEXTS[0])
    with pytest.raises(SystemExit):  # an existing folder is kept
        shapes.main()
    assert "FOLDER must be a new folder" in capsys.readouterr().err
