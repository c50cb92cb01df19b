"""Folders of every model class of every type, as people have them, give transformers' numbers.

FUZZ=long takes every class of every type, EXAMPLES of each; otherwise a few. Bundles of all types
answer in tests/end_to_end/types, bundles with heads in test_classifiers.py.
"""

import os
import re
from pathlib import Path

import pytest
import torch

from tests.build_model.importing.huggingface.drawn import TYPES, transformers
from tests.build_model.importing.survey.compared import require_same
from tests.build_model.importing.survey.folders import Folder, classes_of
from transferry.build_model.checkpoint import load_checkpoint
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
