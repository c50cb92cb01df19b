"""Folders of every model class of every type, as people have them, give transformers' numbers.

FUZZ=long takes every class of every type, EXAMPLES of each; otherwise a few. Bundles of all types
answer in tests/end_to_end/types, bundles with heads in test_classifiers.py.
"""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.build_model.importing.huggingface.drawn import TYPES, exact, require_equal, transformers
from tests.build_model.importing.survey.folders import HEADS, Folder, classes_of
from transferry.build_model.checkpoint import Checkpoint, load_checkpoint
from transferry.build_model.importing.huggingface.importer import import_pretrained
from transferry.runtime.errors import InputError

LONG = os.environ.get("FUZZ") == "long"
SEEDS = range(int(os.environ.get("EXAMPLES", "1")))
SHORT = [
    ("bert", "BertForPreTraining", 0),
    ("albert", "AlbertForSequenceClassification", 1),
    ("deberta", "DebertaForTokenClassification", 0),
    ("roberta", "RobertaForQuestionAnswering", 0),
    ("llama", "LlamaForQuestionAnswering", 0),
    ("gpt_neox", "GPTNeoXForCausalLM", 0),
    ("mistral", "MistralModel", 0),
    ("t5", "T5ForSequenceClassification", 0),
    ("umt5", "UMT5ForTokenClassification", 0),
    ("mbart", "MBartForSequenceClassification", 0),
    ("bart", "BartModel", 0),
]
EVERY = [(kind, name, seed) for kind in TYPES for name in classes_of(kind) for seed in SEEDS]
# Refused by name; a hidden state as wide as a narrow embedding has no use but that of OPT-350m.
REFUSED = ["word_embed_proj_dim is 16"]


TEXTS = ["the cat sat on", "Straße über", "a", "hello world, this is a test", "it's 123 日本"]
TARGET = torch.tensor([[5, 7, 4, 6, 9]])


@torch.inference_mode()
def require_same(folder: Folder, checkpoint: Checkpoint) -> None:
    """Compares token ids, hidden states, logits and scores of a head."""
    tokenizer, theirs = checkpoint.tokenizer, folder.tokenizer
    rows = [theirs(text, split_special_tokens=True).input_ids for text in TEXTS]
    assert [tokenizer.special.wrap(tokenizer.encode(text)) for text in TEXTS] == rows
    model = checkpoint.model.double()
    reads = model.config.architecture == "encoder-only"
    if not reads and folder.name.endswith("Model") and not folder.name.endswith("LMHeadModel"):
        folder.model = folder.generator()
        assert folder.valid
    for row in rows:
        ids = torch.tensor([row])
        mask = torch.ones_like(ids).bool()
        found = _theirs(folder, ids)
        if reads:
            _require_same_reader(checkpoint, model.answers(ids, mask), found)
        elif model.config.architecture == "decoder-only":
            require_equal(model(ids[:, :0], mask[:, :0], ids), found["logits"])
        else:
            require_equal(model(ids, mask, TARGET), found["logits"])


def _theirs(folder: Folder, ids: Tensor) -> dict[str, Any]:
    fed = {"input_ids": ids}
    alone = not folder.model.config.is_encoder_decoder or folder.name.endswith("EncoderModel")
    if not alone and not folder.name.endswith(HEADS):
        fed["decoder_input_ids"] = TARGET
    with exact():
        found: dict[str, Any] = folder.model(**fed, output_hidden_states=True)
    return found


def _require_same_reader(
    checkpoint: Checkpoint, ours: dict[str, Tensor], theirs: dict[str, Any]
) -> None:
    if checkpoint.head is not None:
        wanted = theirs.get("logits")
        if wanted is None:
            wanted = torch.stack([theirs["start_logits"], theirs["end_logits"]], dim=-1)
        assert (ours["head"] - wanted).abs().max() <= 1e-9
        return
    known = "last_hidden_state" in theirs
    last = theirs["last_hidden_state"] if known else theirs["hidden_states"][-1]
    require_equal(ours["hidden"], last)
    if "logits" in ours:
        name = "prediction_logits" if "prediction_logits" in theirs else "logits"
        require_equal(ours["logits"], theirs[name])


@pytest.mark.parametrize(("kind", "name", "seed"), EVERY if LONG else SHORT)
def test_folders_give_the_numbers_of_transformers(
    kind: str, name: str, seed: int, tmp_path: Path
) -> None:
    folder = Folder(kind, name, seed, tmp_path / "theirs")
    if not folder.valid:
        pytest.skip("transformers does not find every weight either")
    try:
        import_pretrained(folder.path, tmp_path / "run")
    except InputError as error:
        if re.search("|".join(REFUSED), str(error)):
            pytest.skip("refused by name")
        raise AssertionError(folder.changes) from error
    require_same(folder, load_checkpoint(tmp_path / "run"))


@pytest.mark.parametrize("kind", TYPES if LONG else ["bert"])
def test_heads_without_a_task_are_refused_by_the_name_of_the_class(
    kind: str, tmp_path: Path
) -> None:
    stem = re.sub("(For[A-Z]|LMHead).*", "", TYPES[kind][0])
    for suffix in ("ForNextSentencePrediction", "ForMultipleChoice"):
        if not hasattr(transformers, f"{stem}{suffix}"):
            continue
        folder = Folder(kind, f"{stem}{suffix}", 0, tmp_path / suffix, old=False)
        with pytest.raises(InputError, match=f"architectures is .*{suffix}.*AutoModel"):
            import_pretrained(folder.path, tmp_path / "run")


def test_another_number_is_a_difference(tmp_path: Path) -> None:
    folder = Folder("bert", "BertModel", 0, tmp_path / "theirs")
    import_pretrained(folder.path, tmp_path / "run")
    checkpoint = load_checkpoint(tmp_path / "run")
    with torch.no_grad():
        checkpoint.model.encoder[0].self_attention.value.bias[3] += 1e-7  # type: ignore[union-attr, operator, index]
    with pytest.raises(AssertionError):
        require_same(folder, checkpoint)
