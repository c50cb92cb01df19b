"""Folders that cannot be imported are refused by name."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.build_model.importing.huggingface.drawn import TYPES, transformers
from tests.build_model.importing.huggingface.small_models import (
    KINDS,
    Copies,
    change,
    edited,
    listing,
    save,
)
from tests.build_model.importing.survey.folders import Folder
from transferry.build_model.importing.huggingface.importer import (
    FAMILIES,
    import_pretrained,
    read_pretrained,
)
from transferry.runtime.errors import InputError


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("llama", "model_type", "mamba"),
        ("llama", "model_type", None),
        ("llama", "hidden_act", "mish"),
        ("llama", "attention_bias", "yes"),
        ("llama", "rope_parameters", [1]),
        ("llama", "quantization_config", {"bits": 4}),
        ("llama", "num_hidden_layers", "2"),
        ("llama", "rms_norm_eps", "small"),
        ("llama", "num_attention_heads", 0),
        ("gpt2", "add_cross_attention", True),
        ("gpt2", "vocab_size", 99),
        ("bert", "position_embedding_type", "relative_key"),
        ("bert", "is_decoder", True),
        ("bert", "is_causal", True),
        ("marian", "decoder_vocab_size", 40),
        ("marian", "is_causal", True),
        ("marian", "normalize_before", True),
        ("marian", "normalize_embedding", True),
        ("marian", "add_final_layer_norm", True),
        ("marian", "static_position_embeddings", False),
    ],
)
def test_a_setting_is_refused_by_name(kind: str, name: str, value: Any, copied: Copies) -> None:
    theirs = copied(kind)
    change(theirs / "config.json", **{name: value})
    told = {"num_attention_heads": "heads"}.get(name, name)
    found = "" if value is None else re.escape(json.dumps(value))
    message = rf"config\.json: {told} (is|must be) .*{found}|'{value}'|ids below {name}, {value}"
    with pytest.raises(InputError, match=message):
        read_pretrained(theirs)


@pytest.mark.parametrize(
    ("rope", "name"),
    [
        ({"rope_type": "proportional"}, "rope_type"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": 0.0}, "factor"),
        ({"rope_type": "linear", "factor": 2.0, "mrope_section": [1, 2]}, "mrope_section"),
        ({"type": "yarn", "factor": 2.0, "beta_fast": "fast"}, "beta_fast"),
        ({"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 1.0}, "high_freq_factor"),
        ({"rope_type": "longrope", "short_factor": [1.0]}, "short_factor"),
        ({"partial_rotary_factor": "all"}, "partial_rotary_factor"),
        ({"rope_theta": 0.5}, "partial_rotary_factor"),
    ],
)
def test_rotary_settings_are_refused_by_name(
    rope: dict[str, Any], name: str, copied: Copies
) -> None:
    theirs = copied("llama")
    change(theirs / "config.json", rope_parameters=rope)
    with pytest.raises(InputError, match=rf"config\.json: {name} (is|must be) "):
        read_pretrained(theirs)


@pytest.mark.parametrize(
    ("kind", "file", "name", "value"),
    [
        ("marian", "generation_config.json", "bad_words_ids", [[3, 100_000]]),
        ("marian", "generation_config.json", "bad_words_ids", "pad"),
        ("llama", "generation_config.json", "bos_token_id", [1, 5]),
        ("gpt2", "tokenizer_config.json", "tokenizer_class", "LayoutLMv3Tokenizer"),
        ("gpt2", "tokenizer_config.json", "auto_map", ["a.B", None]),
        ("llama", "tokenizer_config.json", "fix_mistral_regex", True),
        # generation_config.json has another, which counts.
        ("llama", "config.json", "eos_token_id", "end"),
    ],
)
def test_a_setting_of_another_file_is_refused_by_name(
    kind: str, file: str, name: str, value: Any, copied: Copies
) -> None:
    theirs = copied(kind)
    if not (theirs / file).exists():
        (theirs / file).write_text("{}")
    change(theirs / file, **{name: value})
    with pytest.raises(InputError, match=rf"{re.escape(file)}: {name} (is .*supported: |must be )"):
        read_pretrained(theirs)
    if name == "auto_map":
        read_pretrained(theirs, ignored=[name])  # the remedy in the message


NORM, UP = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"
MLP, FIRST = "model.layers.0.mlp", "model.layers.0.mlp.up_proj.weight"
ONES = torch.ones(4)
Weights = dict[str, Tensor]


@pytest.mark.parametrize(
    ("damaged", "message"),
    [
        (
            lambda own: {name: own[name] for name in own if name != UP},
            r"the tensor layers\.1\.mlp\.up_proj\.weight is missing",
        ),
        (
            lambda own: {name.replace(UP, UP.replace("up", "op")): own[name] for name in own},
            r"the tensor model\.layers\.1\.mlp\.op_proj\.weight is unknown",
        ),
        (
            lambda own: own | {FIRST: own[FIRST].T.contiguous()},
            r"layers\.0\.mlp\.up_proj\.weight .* must have the shape \[48, 32\]",
        ),
        (
            lambda own: own | {NORM: own[NORM][None, None].clone()},
            r"model\.norm\.weight of shape \[1, 1, 32\] does not fit",
        ),
        (
            lambda own: own | {"lm_head.weight": own["lm_head.weight"].to(torch.int8)},
            r"found int8 in the tensor lm_head\.weight: they are quantised\. Import",
        ),
        (
            lambda own: own | {f"{MLP}.scales": ONES, f"{MLP}.qweight": ONES.int()},
            r"found the tensor model\.layers\.0\.mlp\.qweight: they are quantised\. Import",
        ),
        (
            lambda own: own | {"model.layers.2.input_layernorm.weight": own[NORM].clone()},
            r"the tensor model\.layers\.2\.input_layernorm\.weight has no place",
        ),
        (
            lambda own: own | {"score.weight": own[NORM].clone()},
            r"the tensor score\.weight is unknown",
        ),
        (
            lambda own: {f"_orig_mod.{name}": own[name] for name in own},
            r"named by a wrapper around the model; save .* model\._orig_mod\.save_pretrained",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    damaged: Callable[[Weights], Weights], message: str, copied: Copies
) -> None:
    theirs = copied("llama")
    path = theirs / "model.safetensors"
    save_file(damaged(load_file(path)), path)
    with pytest.raises(InputError, match=message):
        read_pretrained(theirs)


def test_a_tensor_without_value_is_named_and_nothing_is_written(copied: Copies) -> None:
    theirs = copied("llama")
    with edited(theirs) as tensors:
        tensors[NORM][3] = float("nan")
    with pytest.raises(InputError, match=r"finite numbers in the tensor model\.norm\.weight"):
        import_pretrained(theirs, theirs.parent / "run")
    assert listing(theirs.parent) == {"theirs", *(f"theirs/{name}" for name in listing(theirs))}


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_that_is_missing_is_named(kind: str, copied: Copies) -> None:
    theirs = copied(kind)
    whole = load_file(theirs / "model.safetensors")
    # A file may lack these; of BERT the first tells that there is a head.
    dispensable = ("cls.predictions.bias", "pooler", "seq_relationship", "final_logits_bias")
    for name in whole:
        if any(part in name for part in dispensable):
            continue
        save_file(
            {other: tensor for other, tensor in whole.items() if other != name},
            theirs / "model.safetensors",
        )
        known = re.escape(name.removeprefix(FAMILIES[kind].prefixes[0]))
        with pytest.raises(InputError, match=rf"the tensor {known}\b.* (is|are) missing"):
            read_pretrained(theirs)


def test_an_output_that_is_not_the_embedding_is_kept(copied: Copies) -> None:
    """As by transformers 5, whatever tie_word_embeddings says."""
    theirs = copied("gpt2")
    with edited(theirs) as tensors:
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"] + 1
    found = read_pretrained(theirs)
    assert not found.config.tied
    state = found.weights.state
    assert torch.equal(state["output.weight"], state["embedding.weight"] + 1)
    assert any("lm_head.weight is no embedding" in note for note in found.notes)


@pytest.mark.parametrize(
    ("kind", "file", "message"),
    [
        ("llama", "config.json", r"config\.json is missing"),
        ("llama", "model.safetensors", r"model\.safetensors is missing; .*pytorch_model\.bin"),
        ("marian", "target.spm", r"found no target\.spm; copy it from the model"),
        ("marian", "vocab.json", r"found no vocab\.json; copy it from the model"),
        ("gpt2", "merges.txt", r"tokenizer\.json or vocab\.json and merges\.txt, found no merges"),
        ("bert", "vocab.txt", r"in tokenizer\.json or vocab\.txt, found no vocab\.txt; copy it"),
    ],
)
def test_a_missing_file_is_named(kind: str, file: str, message: str, copied: Copies) -> None:
    theirs = copied(kind)
    (theirs / file).unlink()
    with pytest.raises(InputError, match=message):
        read_pretrained(theirs)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n"
TO_PULL = ": expected the file, .*git lfs pull"
RUBBISH = b"\xff\x00{[rubbish"


@pytest.mark.parametrize(
    ("kind", "file", "content", "message"),
    [
        ("llama", "model.safetensors", POINTER, TO_PULL),
        ("llama", "tokenizer.json", POINTER, TO_PULL),
        ("llama", "config.json", RUBBISH, ""),
        ("llama", "tokenizer.json", RUBBISH, ""),
        ("marian", "source.spm", RUBBISH, ""),
        ("marian", "vocab.json", RUBBISH, ""),
        ("bert", "vocab.txt", RUBBISH, ""),
    ],
)
def test_a_file_of_other_content_is_refused(
    kind: str, file: str, content: bytes, message: str, copied: Copies
) -> None:
    theirs = copied(kind)
    (theirs / file).write_bytes(content)
    with pytest.raises(InputError, match=rf"{re.escape(file)}{message}"):
        read_pretrained(theirs)


@pytest.mark.parametrize(
    ("kind", "name", "value", "told"),
    [
        ("bert", "mask_token", None, r"_config\.json: mask_token is .*; supported: a token of the"),
        (
            "bert",
            "do_lower_case",
            3,
            r"tokenizer_config\.json: expected a tokenizer that transformers reads",
        ),
        (
            "marian",
            "eos_token",
            None,
            r"vocab\.json: expected an id of eos_token None, found none;",
        ),
        ("m2m_100", "unk_token", None, r" \(tokenizer\.json, tokenizer_config\.json\), found"),
    ],
)
def test_a_refusal_names_file_and_token(
    kind: str, name: str, value: Any, told: str, tmp_path: Path
) -> None:
    folder = tmp_path / kind
    if kind == "m2m_100":
        Folder(kind, TYPES[kind][0], 0, folder, old=False)
    else:
        save(kind, folder)
    path = folder / "tokenizer_config.json"
    if not path.exists():
        transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with pytest.raises(InputError, match=told):
        read_pretrained(folder)
