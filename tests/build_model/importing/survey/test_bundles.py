"""Two drawn folders of each type, one with a head, through bundle and engine.

FUZZ=long takes every type, in half an hour; otherwise one, since an export takes seconds.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.build_model.importing.huggingface.drawn import TYPES, exact
from tests.build_model.importing.survey.compared import TEXTS
from tests.build_model.importing.survey.folders import Folder, classes_of
from tests.traced import unverified
from transferry.build_model.checkpoint import load_checkpoint
from transferry.build_model.importing.huggingface.importer import import_pretrained
from transferry.export.bundle import Contents
from transferry.runtime.engine.engine import Engine

LONG = os.environ.get("FUZZ") == "long"
NEW = 6  # tokens of an answer
HEADS = ("ForSequenceClassification", "ForTokenClassification")


def cases() -> list[tuple[str, str, int]]:
    """Returns type, class and seed: the class of TYPES, and one with a head."""
    found = [(kind, TYPES[kind][0], 5) for kind in TYPES]
    for kind in TYPES:
        names = [name for name in classes_of(kind) if name.endswith(HEADS)]
        found += [(kind, each, 6) for each in names[:1]] or [(kind, TYPES[kind][0], 6)]
    return found


@pytest.mark.parametrize(
    ("kind", "name", "seed"),
    cases() if LONG else [("mistral", "MistralForSequenceClassification", 6)],
)
@torch.inference_mode()
def test_bundles_answer_as_transformers(
    kind: str, name: str, seed: int, traces: None, tmp_path: Path
) -> None:
    folder = Folder(kind, name, seed, tmp_path / "theirs")
    if not folder.valid:
        pytest.skip("transformers does not find every weight either")
    import_pretrained(folder.path, tmp_path / "run")
    with torch.inference_mode(mode=False):
        checkpoint = load_checkpoint(tmp_path / "run")
        unverified(checkpoint, tmp_path / "bundle", Contents(texts=TEXTS))
    with Engine.load(tmp_path / "bundle", variant="portable") as engine:
        if checkpoint.model.config.architecture != "encoder-only":
            answers = engine.generate(
                TEXTS, max_length=NEW, max_total_length=0, beam=1, split_lines=False
            )
            found = [row.hypotheses[0].text for row in answers]
            assert found == [generated(folder, text) for text in TEXTS], folder.changes
        elif checkpoint.head is None:
            for row, text in zip(engine.embed(TEXTS, pooling="mean"), TEXTS, strict=True):
                wanted = read(folder, text).hidden_states[-1][0].mean(dim=0)
                require_close(torch.tensor(row.vector), wanted)
        elif checkpoint.head.task == "classify":
            for scored, text in zip(engine.classify(TEXTS), TEXTS, strict=True):
                logits = read(folder, text).logits[0]
                wanted = logits.softmax(dim=-1) if len(logits) > 1 else logits
                require_close(torch.tensor([each.score for each in scored.scores]), wanted)
        else:
            for tagged, text in zip(engine.tag(TEXTS), TEXTS, strict=True):
                scores = read(folder, text).logits[0].softmax(dim=-1).max(dim=-1).values
                special = folder.tokenizer(
                    text, split_special_tokens=True, return_special_tokens_mask=True
                ).special_tokens_mask
                kept = scores[~torch.tensor(special).bool()]
                require_close(torch.tensor([each.score for each in tagged.tags]), kept)


def require_close(ours: Tensor, theirs: Tensor) -> None:
    """float32 beside float64."""
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max().clamp(min=1.0)


def ids_of(folder: Folder, text: str) -> Tensor:
    return torch.tensor([folder.tokenizer(text, split_special_tokens=True).input_ids])


def read(folder: Folder, text: str) -> Any:
    with exact():
        return folder.model(input_ids=ids_of(folder, text), output_hidden_states=True)


def generated(folder: Folder, text: str) -> str:
    """The answer of `generate` under the settings of the folder."""
    ids = ids_of(folder, text)
    both = folder.model.config.is_encoder_decoder
    with exact():
        found = folder.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            num_beams=1,
            do_sample=False,
        )[0].tolist()
    answer: str = folder.tokenizer.decode(
        found[1 if both else ids.shape[1] :], skip_special_tokens=True
    )
    return answer
