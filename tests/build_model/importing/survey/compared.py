"""An imported checkpoint beside transformers' model of the same folder, in float64."""

from typing import Any

import torch
from torch import Tensor

from tests.build_model.importing.huggingface.drawn import exact, require_equal
from tests.build_model.importing.survey.folders import HEADS, Folder
from transferry.build_model.checkpoint import Checkpoint

TEXTS = ["the cat sat on", "Straße über", "a", "hello world, this is a test", "it's 123 日本"]
TARGET = torch.tensor([[5, 7, 4, 6, 9]])


def rows_of(folder: Folder) -> list[list[int]]:
    """Returns the ids that transformers gives the texts."""
    return [folder.tokenizer(text, split_special_tokens=True).input_ids for text in TEXTS]


@torch.inference_mode()
def require_same(folder: Folder, checkpoint: Checkpoint) -> None:
    """Compares token ids, hidden states, logits and scores of a head.

    Raises:
        AssertionError: Some differ.
    """
    tokenizer, rows = checkpoint.tokenizer, rows_of(folder)
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
