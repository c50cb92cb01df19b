"""Folders with heads, and transformers' own classes beside them."""

import inspect
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.build_model.importing.huggingface.drawn import (
    LONGEST,
    TYPES,
    Draw,
    byte_level_tokenizer,
    drawn_model,
    exact,
    in_float64,
    tokenizers,
    transformers,
)
from tests.build_model.importing.huggingface.encoder_types import WITH_SEGMENTS
from transferry.build_model.checkpoint import Checkpoint
from transferry.build_model.importing.huggingface.decoder_only import FAMILIES as DECODERS

TEXTS = ["the cat sat", "Straße über Häuser, the mat", "a", "on the mat " * 6]
T5_KINDS = ("t5", "mt5", "umt5")
EXPORTED = ("bert", "qwen3", "t5")  # through bundle and engine too; exporting takes seconds


def join_pairs(folder: Path, kind: str) -> None:
    """Gives a folder's tokenizer the template of pairs of its model type."""
    path = str(folder / "tokenizer.json")
    made = tokenizers.Tokenizer.from_file(path)
    single, pair = "<s> $A </s>", "<s> $A </s> </s> $B </s>"
    if kind in (*WITH_SEGMENTS, "distilbert"):
        pair = "<s> $A </s> $B:1 </s>:1"
    if kind == "modernbert":
        pair = "<s> $A </s> $B </s>"
    if kind in ("llama", "mistral", "gemma2", "gemma3_text"):
        single, pair = "<s> $A", "<s> $A <s> $B"
    elif kind in DECODERS or kind in T5_KINDS:
        single, pair = "$A </s>", "$A $B </s>"
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    made.save(path)
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    inputs = ["input_ids", "attention_mask", *["token_type_ids"] * (kind in WITH_SEGMENTS)]
    write(folder / "tokenizer_config.json", {**config, "model_input_names": inputs})


class Theirs:
    """A drawn checkpoint of transformers with a tokenizer, and its model in float64."""

    def __init__(self, kind: str, seed: int, folder: Path, suffix: str, **settings: Any) -> None:
        byte_level_tokenizer(folder, "<s>", "</s>")
        join_pairs(folder, kind)
        self.tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        name, drawn = TYPES[kind]
        if kind == "gemma3_text" and suffix != "ForCausalLM":
            name = "Gemma3TextForCausalLM"
        stem = re.sub("(For(MaskedLM|CausalLM|ConditionalGeneration)|LMHeadModel)$", "", name)
        model_class = getattr(transformers, f"{stem}{suffix}")
        ends = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
        positions = {} if kind in ("gpt2", *T5_KINDS) else {"max_position_embeddings": LONGEST}
        chosen = drawn(Draw(f"{kind} {seed} {suffix}")) | positions | ends | settings
        if kind in WITH_SEGMENTS:
            chosen["type_vocab_size"] = 2
        config = model_class.config_class(vocab_size=len(self.tokenizer), **chosen)
        made = drawn_model(config, model_class, seed)
        made.save_pretrained(folder)
        if kind in DECODERS:  # whose tokenizer class may be that of the model type
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.model = in_float64(made, config)

    @torch.inference_mode()
    def __call__(self, text: str, pair: str | None = None, **limits: Any) -> Any:
        read = self.tokenizer(text, pair, return_tensors="pt", split_special_tokens=True, **limits)
        known = inspect.signature(self.model.forward).parameters
        with exact():
            return self.model(**{name: read[name] for name in read if name in known})


def write(path: Path, record: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record), encoding="utf-8")


def write_modules(folder: Path, *types: str) -> list[Path]:
    """Writes modules.json of sentence-transformers, the first module in the folder itself."""
    places = ["", *(f"{n}_{kind.rpartition('.')[2]}" for n, kind in enumerate(types[1:], start=1))]
    modules = [
        {"idx": number, "name": str(number), "path": place, "type": kind}
        for number, (place, kind) in enumerate(zip(places, types, strict=True))
    ]
    write(folder / "modules.json", modules)
    return [folder / place for place in places]


@torch.inference_mode()
def require_their_answers(
    theirs: Theirs, checkpoint: Checkpoint, rows: Sequence[tuple[str, str | None]]
) -> None:
    """Compares the scores of texts and of pairs, or hidden states where there is no head."""
    model, special, head = checkpoint.model.double(), checkpoint.tokenizer.special, checkpoint.head
    for first, second in rows:
        ids = checkpoint.tokenizer.encode(first)
        if second is not None:
            ids = [*ids, *special.between, *checkpoint.tokenizer.encode(second)]
        wrapped, padding = special.wrap(ids), [5, 6]  # padding has no influence
        mask = torch.tensor([[True] * len(wrapped) + [False] * len(padding)])
        found, wanted = (
            model.answers(torch.tensor([wrapped + padding]), mask),
            theirs(first, second),
        )
        if head is None:
            ours, other = found["hidden"][0], wanted.last_hidden_state[0]
        elif head.task == "answer":
            both = wanted.start_logits[0], wanted.end_logits[0]
            ours, other = found["head"][0], torch.stack(both, dim=-1)
        else:
            ours, other = found["head"][0], wanted.logits[0]
        if head is None or head.task != "classify":
            ours = ours[: len(wrapped)]
        assert ours.shape == other.shape
        assert (ours - other).abs().max() <= 1e-9 * min(1, other.abs().max())
