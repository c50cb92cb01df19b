"""Decoders without logits give the scores and hidden states of transformers' own classes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.build_model.importing.huggingface.drawn import (
    LONGEST,
    SEEDS,
    TYPES,
    Draw,
    byte_level_tokenizer,
    drawn_model,
    exact,
    in_float64,
    require_equal,
    transformers,
)
from tests.build_model.importing.huggingface.heads import (
    TEXTS,
    Theirs,
    require_their_answers,
    write,
)
from transferry.build_model.checkpoint import load_checkpoint
from transferry.build_model.importing.huggingface.decoder_only import FAMILIES
from transferry.build_model.importing.huggingface.importer import import_pretrained
from transferry.runtime.errors import InputError

CLASSES = ("ForSequenceClassification", "ForTokenClassification", "Model")


def suffix_of(kind: str, seed: int) -> str:
    """A class that transformers has of the type."""
    stem, suffix = FAMILIES[kind].stems.split()[-1], CLASSES[seed % 3]
    return suffix if hasattr(transformers, f"{stem}{suffix}") else "Model"


def require_theirs(theirs: Theirs, folder: Path, run: Path, suffix: str) -> None:
    """Imports a folder; compares scores or hidden states of texts, and of a pair."""
    import_pretrained(folder, run, force=True)
    rows: list[tuple[str, str | None]] = [(text, None) for text in TEXTS[1:]]
    rows += [("the cat", "a mat")] * (suffix == CLASSES[0])
    require_their_answers(theirs, load_checkpoint(run), rows)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", FAMILIES)
def test_what_a_decoder_reads_is_theirs(kind: str, seed: int, tmp_path: Path) -> None:
    suffix = suffix_of(kind, seed)
    more: dict[str, Any] = {} if suffix == "Model" else {"num_labels": 3}
    if kind == "opt" and suffix == "Model":
        more["word_embed_proj_dim"] = 32
    theirs = Theirs(kind, seed, tmp_path / "theirs", suffix, **more)
    require_theirs(theirs, tmp_path / "theirs", tmp_path / "run", suffix)


def test_padding_that_ends_a_text_is_read_by_no_head(tmp_path: Path) -> None:
    """The end token also pads, and transformers' head reads the token before it."""
    folder, run = tmp_path / "theirs", tmp_path / "run"
    theirs = Theirs("qwen3", 0, folder, CLASSES[0], num_labels=3, pad_token_id=2)
    require_theirs(theirs, folder, run, CLASSES[0])
    assert load_checkpoint(run).tokenizer.special.after == ()
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(settings | {"model_max_length": 1}))  # the end token alone
    with pytest.raises(InputError, match=r"model_max_length is 1.*at least 2"):
        import_pretrained(folder, run, force=True)


@pytest.mark.parametrize(("kind", "setting"), [("gemma3_text", True), ("llama", False)])
def test_attention_may_go_both_ways(kind: str, setting: bool, tmp_path: Path) -> None:
    key = "use_bidirectional_attention" if setting else "is_causal"
    more: dict[str, Any] = {key: setting, "attn_implementation": "eager"}
    if setting:
        more |= {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
        more["num_hidden_layers"] = 4
    folder, run = tmp_path / "theirs", tmp_path / "run"
    theirs = Theirs(kind, 0, folder, "Model", **more)
    require_theirs(theirs, folder, run, "Model")
    assert not load_checkpoint(run).model.config.causal


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"architectures": ["LlamaForMultipleChoice"]}, r'is \["LlamaForMultipleChoice"\]'),
        (
            {"architectures": ["LlamaEncoderModel"]},
            "begin with Llama and end with ForCausalLM, For",
        ),
        ({"architectures": ["LlamaForCausalLM"]}, "the tensor lm_head.weight is missing"),
    ],
)
def test_classes_that_are_not_carried_are_refused(
    record: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "theirs"
    Theirs("llama", 0, folder, "Model", tie_word_embeddings=False)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    write(folder / "config.json", {**config, **record})
    with pytest.raises(InputError, match=message):
        import_pretrained(folder, tmp_path / "run")


def test_classes_of_transformers_are_known() -> None:
    """The stems of the table are those of transformers."""
    for family in FAMILIES.values():
        for stem in family.stems.split():
            assert hasattr(transformers, f"{stem}Model") or stem == "Gemma3"


VISION = {
    "gemma3": {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14},
    "mistral3": {"model_type": "pixtral", "image_size": 28, "patch_size": 14, "head_dim": 8},
}


@pytest.mark.parametrize("older", [True, False])
@pytest.mark.parametrize(("kind", "text"), [("gemma3", "gemma3_text"), ("mistral3", "mistral")])
@torch.inference_mode()
def test_the_text_part_of_a_model_that_reads_images(
    kind: str, text: str, older: bool, tmp_path: Path
) -> None:
    name = f"{kind.capitalize()}ForConditionalGeneration"
    folder, model_class = tmp_path / "theirs", getattr(transformers, name)
    theirs = byte_level_tokenizer(folder, "<s>", "")
    ids = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "vocab_size": len(theirs)}
    chosen = TYPES[text][1](Draw(f"text of {kind}")) | ids | {"max_position_embeddings": LONGEST}
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision = VISION[kind] | sizes | {"num_attention_heads": 2}
    more = {"mm_tokens_per_image": 4} if kind == "gemma3" else {}
    config = model_class.config_class(
        text_config={"model_type": text, **chosen}, vision_config=vision, **more
    )
    made = drawn_model(config, model_class)
    made.save_pretrained(folder, save_original_format=older)
    path = folder / "config.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    # Beside text_config, for which transformers reads them nowhere.
    outer = {"sliding_window": 2, "rms_norm_eps": 0.5, "hidden_size": 99, "head_dim": 3}
    for key in ("sliding_window", "rms_norm_eps"):
        del record["text_config"][key]
    write(path, {**record, **outer, "eos_token_id": 4, "architectures": [name]})
    config = model_class.config_class.from_pretrained(folder)
    ends = transformers.GenerationConfig.from_model_config(config).eos_token_id
    (folder / "generation_config.json").unlink()
    said: list[str] = []
    import_pretrained(folder, tmp_path / "run", say=said.append)
    assert "the text part of a model that reads images; " in said[0]
    checkpoint = load_checkpoint(tmp_path / "run")
    assert checkpoint.tokenizer.special.eos_id == ends
    assert any("sliding_window" in line and "not of its text" in line for line in said)
    ours = checkpoint.model.double()
    rows = torch.randint(3, len(theirs), (2, 9))
    exactly = in_float64(made, config)
    with exact():
        wanted = exactly(input_ids=rows).logits
    nothing = rows[:, :0]
    require_equal(ours(nothing, nothing.bool(), rows), wanted)
