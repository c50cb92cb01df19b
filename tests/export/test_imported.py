"""Every imported model that generates: from its folder to the engine's answers.

Tracing takes most of the time. So in `make test` those types that differ most go through one
variant each, with one layer; with EXAMPLES=… all go through both, with three. Every type is
compared in torch by `test_model_types.py`, and every option is exported by `test_family.py`.
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.build_model.importing.huggingface.drawn import (
    Drawn,
    byte_level_tokenizer,
    exact,
    transformers,
)
from tests.build_model.importing.huggingface.small_models import llama_pieces, marian_vocabulary
from tests.traced import TRACES
from transferry.build_model.checkpoint import load_checkpoint
from transferry.build_model.importing.huggingface import decoder_only, encoder_decoder
from transferry.build_model.importing.huggingface.importer import import_pretrained
from transferry.export import bundle as exporting
from transferry.export.bundle import export_bundle
from transferry.runtime.engine.engine import Engine
from transferry.runtime.proof.recorded import vectors
from transferry.runtime.tokenizer.third_party import SentencePiecePair, SentencePieceTokenizer

THOROUGH = "EXAMPLES" in os.environ
KINDS = [*encoder_decoder.FAMILIES, *decoder_only.FAMILIES]
SHORT = ["bart", "marian", "m2m_100", "t5", "gpt2", "llama", "gemma3_text", "gpt_neox", "opt"]
VARIANTS = ("cpu-fp32", "portable")
# test_family.py exports the options of these.
ALIKE = ("gpt_neox", "opt")
CASES = [
    pytest.param(kind, variant, marks=pytest.mark.thorough if kind in ALIKE else ())
    for number, kind in enumerate(KINDS if THOROUGH else SHORT)
    for variant in (VARIANTS if THOROUGH else [VARIANTS[number % 2]])
]
OWN = {"marian": SentencePiecePair, "llama": SentencePieceTokenizer}  # of `portable`
TEXTS = ["the cat sat on the mat", "Straße", "日本 über"]


def write_tokenizer(kind: str, folder: Path) -> int:
    """Writes a tokenizer with the ids of `Drawn`; returns the size of its vocabulary."""
    folder.mkdir()
    if kind == "llama":  # a SentencePiece model alone
        (folder / "tokenizer.model").write_bytes(llama_pieces())
        settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        return len(transformers.AutoTokenizer.from_pretrained(folder))
    if kind != "marian":
        end = "</s>" if kind in encoder_decoder.FAMILIES else ""
        return len(byte_level_tokenizer(folder, "", end))
    size = marian_vocabulary(folder)
    pieces = list(json.loads((folder / "vocab.json").read_text()))
    order = dict.fromkeys(["<pad>", pieces[2], "</s>", "<unk>", *pieces])
    ids = {piece: number for number, piece in enumerate(order)}
    (folder / "vocab.json").write_text(json.dumps(ids))
    return size


@pytest.mark.parametrize(("kind", "variant"), CASES)
@torch.inference_mode()
def test_the_engine_answers_as_generate_does(
    kind: str, variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, run = tmp_path / "theirs", tmp_path / "run"
    drawn = Drawn(kind, 0, folder, write_tokenizer(kind, folder) + 3, 3 if THOROUGH else 1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    import_pretrained(folder, run)
    monkeypatch.setattr(exporting, "PORTABLE", variant)  # no other is traced
    monkeypatch.setattr("transferry.export.oracle.effort.RECORDED_LENGTH", 4)
    export_bundle(load_checkpoint(run), tmp_path / "bundle", traces=TRACES)
    engine = Engine(tmp_path / "bundle")
    assert list(engine.bundle.manifest.variants) == [variant]
    # Trained on documents, not on sentences: their texts are not split into lines.
    documents = kind in ("bart", "pegasus", "t5", "mt5", "umt5")
    assert engine.default_options().split_lines is (False if documents else None)
    for beam in (1, 3):
        wanted = []
        for text in TEXTS:
            read = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
            with exact():
                answer = drawn.theirs.generate(**read, num_beams=beam, max_new_tokens=12)[0]
            prompt = 1 if kind in encoder_decoder.FAMILIES else read["input_ids"].shape[1]
            answer = answer[prompt:].tolist()
            wanted.append(answer[: answer.index(2)] if 2 in answer else answer)
        rows = engine.generate(TEXTS, engine.options(beam=beam, max_length=12))
        assert [list(row.hypotheses[0].tokens) for row in rows] == wanted
    if variant == "portable":
        found, read_by = [*vectors(engine.bundle)], engine.bundle.tokenizer
        assert len(found) >= 3
        assert isinstance(read_by, OWN.get(kind, object))
        for vector in found:
            ids = tokenizer(vector["text"], return_tensors="pt").input_ids
            assert vector["ids"] == ids[0].tolist(), vector["text"]
            first = {"decoder_input_ids": torch.tensor([[read_by.special.bos_id]])}
            given = first if kind in encoder_decoder.FAMILIES else {}
            logits = drawn.theirs(ids, **given).logits[0, -1, :8].tolist()
            np.testing.assert_allclose(vector["logits"], logits, rtol=1e-3, atol=1e-5)
