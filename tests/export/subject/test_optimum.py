"""Graphs that optimum exports now, where it is installed."""

import importlib
from pathlib import Path

import pytest
import transformers

from tests.build_model.importing.huggingface.small_models import save
from transferry.export.audit import audit
from transferry.export.subject.foreign import ForeignFolder
from transferry.export.subject.layout import read_layout
from transferry.export.subject.reference import load_reference
from transferry.runtime.ort.session import SessionOptions

pytestmark = [pytest.mark.optional("optimum"), pytest.mark.optimum]


@pytest.mark.parametrize(
    ("kind", "task"),
    [
        ("gpt2", "text-generation-with-past"),
        ("llama", "text-generation-with-past"),
        ("marian", "text2text-generation-with-past"),
        ("bert", "fill-mask"),
    ],
)
def test_what_optimum_exports_passes(kind: str, task: str, tmp_path: Path) -> None:
    # Its own bounds exclude the transformers that this project is tested with.
    exporters = importlib.import_module("optimum.exporters.onnx")
    save(kind, tmp_path / "model")
    if kind in ("gpt2", "bert"):  # converting its tables needs transformers 5
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
    exporters.main_export(
        str(tmp_path / "model"), tmp_path / "onnx", task=task, do_validation=False
    )
    reference = load_reference(tmp_path / "model")
    texts = ["a small test", "another one, longer", "a"]
    folder = ForeignFolder(read_layout(tmp_path / "onnx"), SessionOptions(), reference)
    report = audit(tmp_path / "onnx", folder, texts)
    assert report.faults == []
