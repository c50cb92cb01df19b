"""Folders of every encoder-only type as people have them: classes, types of numbers, names, shards.

An import gives transformers' hidden states in float64, whichever class wrote the folder, or is
refused by the name of the class. FUZZ=long takes every type; otherwise each variation has one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.build_model.importing.huggingface.drawn import (
    AFTER_PADDING,
    LONGEST,
    Draw,
    byte_level_tokenizer,
    exact,
    randomise,
    require_equal,
    transformers,
)
from tests.build_model.importing.huggingface.encoder_types import ENCODERS
from transferry.build_model.checkpoint import load_checkpoint
from transferry.build_model.importing.huggingface.importer import import_pretrained
from transferry.runtime.errors import InputError

LONG = os.environ.get("FUZZ") == "long"
SUFFIXES = ("Model", "ForMaskedLM", "ForPreTraining", "ForTokenClassification")
REFUSED = ("ForNextSentencePrediction", "ForMultipleChoice")


def plain(folder: Path, model: Any) -> None:
    model.save_pretrained(folder)


def sharded(folder: Path, model: Any) -> None:
    model.save_pretrained(folder, max_shard_size="20KB")


def bfloat16(folder: Path, model: Any) -> None:
    model.bfloat16().save_pretrained(folder)


def own_names(folder: Path, model: Any) -> None:
    """With the names of transformers, where it saves those of the published files."""
    model.save_pretrained(folder, save_original_format=False)


def without_prefix(folder: Path, model: Any) -> None:
    model.save_pretrained(folder)
    rename(folder, lambda name: name.removeprefix(f"{model.base_model_prefix}."))


def with_prefix(folder: Path, model: Any) -> None:
    model.save_pretrained(folder)
    prefix = f"{model.base_model_prefix}."
    heads = ("cls.", "lm_head.", "classifier.", "vocab_", "generator_", "decoder.", "head.")
    rename(folder, lambda n: n if n.startswith((prefix, *heads)) else prefix + n)


def without_architectures(folder: Path, model: Any) -> None:
    model.save_pretrained(folder)
    record = json.loads((folder / "config.json").read_text())
    for name in ("architectures", "id2label", "label2id", "tie_word_embeddings"):
        record.pop(name, None)
    (folder / "config.json").write_text(json.dumps(record))


def rename(folder: Path, change: Callable[[str], str]) -> None:
    path = folder / "model.safetensors"
    save_file({change(name): tensor for name, tensor in load_file(path).items()}, path)


def written(
    kind: str, suffix: str, save: Callable[[Path, Any], None], folder: Path, **own: Any
) -> Any | None:
    """Writes a folder; returns transformers' model in float64, None without such a class."""
    name, drawn = ENCODERS[kind]
    model_class = getattr(transformers, name.replace("ForMaskedLM", suffix), None)
    if model_class is None:
        return None
    tokenizer = byte_level_tokenizer(folder, "<s>", "</s>")
    padding = 1 if kind in AFTER_PADDING else 0
    ids = {"pad_token_id": padding, "bos_token_id": 0, "eos_token_id": 2}
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": LONGEST}
    config = model_class.config_class(**drawn(Draw(f"{kind} {suffix}")) | ids | sizes | own)
    torch.manual_seed(1)
    made = model_class(config).eval()
    randomise(made)
    save(folder, made)
    with exact():
        theirs = model_class(config).eval()
    theirs.load_state_dict(made.double().state_dict())
    return theirs.double()


@torch.inference_mode()
def require_same(theirs: Any, run: Path) -> None:
    ours = load_checkpoint(run).model.double()
    rows = torch.tensor([[0, 5, 6, 7, 9, 2], [0, 8, 2, 1, 1, 1]])
    mask = torch.tensor([[True] * 6, [True] * 3 + [False] * 3])
    with exact():
        found = theirs(rows, attention_mask=mask.long(), output_hidden_states=True)
    answers = ours.answers(rows, mask)
    require_equal(answers["hidden"][mask], found.hidden_states[-1][mask])
    logits = found.get("prediction_logits", found.get("logits"))
    if "head" in answers and "ForTokenClassification" in type(theirs).__name__:
        require_equal(answers["head"][mask], logits[mask])
    if "logits" in answers:
        require_equal(answers["logits"][mask], logits[mask])


VARIATIONS = (plain, sharded, bfloat16, own_names, without_prefix, with_prefix)
SHORT = [
    ("bert", "Model", plain),
    ("electra", "ForPreTraining", sharded),
    ("roberta", "Model", bfloat16),
    ("nomic_bert", "ForMaskedLM", own_names),
    ("gte", "Model", own_names),
    ("mpnet", "ForMaskedLM", without_architectures),
]
EVERY = [
    (kind, suffix, save)
    for kind in ENCODERS
    for suffix in SUFFIXES
    for save in (*VARIATIONS, without_architectures)
    if save is not without_architectures or suffix != "ForTokenClassification"
]


@pytest.mark.parametrize(("kind", "suffix", "save"), EVERY if LONG else SHORT)
def test_hidden_states_are_theirs(
    kind: str, suffix: str, save: Callable[[Path, Any], None], tmp_path: Path
) -> None:
    if (theirs := written(kind, suffix, save, tmp_path / "theirs")) is None:
        pytest.skip("transformers has no such class")
    import_pretrained(tmp_path / "theirs", tmp_path / "run")
    require_same(theirs, tmp_path / "run")


@pytest.mark.parametrize("suffix", REFUSED)
@pytest.mark.parametrize("kind", ENCODERS if LONG else ["bert"])
def test_other_heads_are_refused_by_the_name_of_the_class(
    kind: str, suffix: str, tmp_path: Path
) -> None:
    if written(kind, suffix, plain, tmp_path / "theirs") is None:
        pytest.skip("transformers has no such class")
    with pytest.raises(InputError, match=f"architectures is .*{suffix}.*AutoModel"):
        import_pretrained(tmp_path / "theirs", tmp_path / "run")
