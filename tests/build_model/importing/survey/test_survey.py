"""Folders of every model class of every type, as people have them, give transformers' numbers.

FUZZ=long takes every class of every type, EXAMPLES of each, and in half an hour two of each type,
one with a head, through bundle and engine; otherwise a few.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.build_model.importing.huggingface.drawn import TYPES, exact, transformers
from tests.build_model.importing.survey.compared import TEXTS, require_same
from tests.build_model.importing.survey.folders import Folder, classes_of
from tests.traced import unverified
from transferry.build_model.checkpoint import load_checkpoint
from transferry.build_model.importing.huggingface.importer import import_pretrained
from transferry.export.bundle import Contents
from transferry.runtime.engine.engine import Engine
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
NEW = 6  # tokens of an answer
HEADS = ("ForSequenceClassification", "ForTokenClassification")
# Refused by name; a hidden state as wide as a narrow embedding has no use but that of OPT-350m.
REFUSED = ["word_embed_proj_dim is 16"]


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
