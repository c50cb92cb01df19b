"""A merged adapter is the formula's, and PEFT's own merge number by number."""

import importlib
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.build_model.importing.huggingface.drawn import tokenizers, transformers
from tests.build_model.importing.huggingface.heads import Theirs
from tests.commands import done
from transferry.build_model.checkpoint import load_checkpoint
from transferry.build_model.importing.formats.lora import Adapter
from transferry.build_model.importing.huggingface.folder import PretrainedFolder
from transferry.build_model.importing.huggingface.importer import FAMILIES, read_pretrained
from transferry.build_model.importing.huggingface.weights import Converted, adapted, convert_weights
from transferry.runtime.errors import InputError

RANK, WIDTH = 4, 32
PREFIX = "base_model.model."


def llama(folder: Path, **settings: Any) -> Any:
    torch.manual_seed(1)
    shape = dict(hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=2, vocab_size=97)
    heads = dict(num_attention_heads=4, max_position_embeddings=32)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **heads, **settings))
    model.eval().save_pretrained(folder)
    return model


def gpt2(folder: Path) -> Any:
    torch.manual_seed(2)
    shape = dict(n_embd=WIDTH, n_layer=2, n_head=4, n_positions=32, vocab_size=97)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape))
    model.eval().save_pretrained(folder)
    return model


def converted(kind: str, folder: Path, adapter: Path | None = None) -> Converted:
    checkpoint, family = PretrainedFolder(folder), FAMILIES[kind]
    tensors = checkpoint.tensors()
    shape = family.shape(checkpoint.config, set(tensors.shapes))
    if adapter is not None:
        tensors = adapted(family, shape, tensors, Adapter(adapter))
    return convert_weights(family, shape, tensors)


def save_adapter(folder: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": 6, "target_modules": ["x"]} | config
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def factors(module: str, out: int, into: int, rank: int = RANK) -> dict[str, Tensor]:
    return {
        f"{PREFIX}{module}.lora_A.weight": torch.randn(rank, into),
        f"{PREFIX}{module}.lora_B.weight": torch.randn(out, rank),
    }


QUERY = "model.layers.1.self_attn.q_proj"
OURS = "decoder.1.self_attention.query.weight"


# --- the formula ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 6 / RANK),
        ({"use_rslora": True}, 6 / math.sqrt(RANK)),
        ({"alpha_pattern": {"q_proj": 10}}, 10 / RANK),
        ({"alpha_pattern": {"layers.0.self_attn.q_proj": 10}}, 6 / RANK),
        ({"alpha_pattern": {r"^model\.layers\.1\.self_attn.q_proj": 10}}, 10 / RANK),
        ({"rank_pattern": {"q_proj": RANK}, "r": 2, "lora_alpha": 3}, 3 / RANK),
        ({"fan_in_fan_out": True}, 6 / RANK),  # said of another kind of layer: PEFT corrects it
    ],
)
def test_the_change_is_added(config: dict[str, Any], scale: float, tmp_path: Path) -> None:
    llama(tmp_path / "base")
    tensors = factors(QUERY, WIDTH, WIDTH)
    a, b = (tensor.double() for tensor in tensors.values())
    adapter = save_adapter(tmp_path / "adapter", tensors, **config)
    before = converted("llama", tmp_path / "base").state
    after = converted("llama", tmp_path / "base", adapter).state
    wanted = before[OURS].double() + scale * (b @ a)
    assert torch.allclose(after[OURS].double(), wanted, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(after[OURS], before[OURS], atol=0.1)
    rest = before.keys() - {OURS}
    assert all(torch.equal(after[name], before[name]) for name in rest)


def test_a_turned_matrix_is_changed_along_its_own_axes(tmp_path: Path) -> None:
    """Square, so that no shape tells. The file lacks the prefix that the adapter has."""
    gpt2(tmp_path / "base")
    path = tmp_path / "base" / "model.safetensors"
    bare = {name.removeprefix("transformer."): each for name, each in load_file(path).items()}
    save_file(bare, path)
    tensors = factors("transformer.h.0.attn.c_proj", WIDTH, WIDTH)
    a, b = tensors.values()
    adapter = save_adapter(tmp_path / "adapter", tensors)
    ours = "decoder.0.self_attention.output.weight"
    before = converted("gpt2", tmp_path / "base").state[ours]
    after = converted("gpt2", tmp_path / "base", adapter).state[ours]
    assert torch.allclose(after, before + 6 / RANK * (b @ a), atol=1e-5)


def test_magnitudes_are_those_of_the_outputs(tmp_path: Path) -> None:
    llama(tmp_path / "base")
    tensors = factors(QUERY, WIDTH, WIDTH)
    a, b = tensors.values()
    wanted = torch.rand(WIDTH) + 1
    tensors[f"{PREFIX}{QUERY}.lora_magnitude_vector"] = wanted
    adapter = save_adapter(tmp_path / "adapter", tensors, use_dora=True)
    before = converted("llama", tmp_path / "base").state[OURS]
    after = converted("llama", tmp_path / "base", adapter).state[OURS]
    assert torch.allclose(after.norm(dim=1), wanted, atol=1e-5)
    direction = before + 6 / RANK * (b @ a)
    assert torch.allclose(torch.cosine_similarity(after, direction), torch.ones(WIDTH))


def test_whole_tensors_are_replaced_and_half_precision_is_widened(tmp_path: Path) -> None:
    model = llama(tmp_path / "base")
    model.to(torch.bfloat16).save_pretrained(tmp_path / "base")
    norm = torch.randn(WIDTH)
    rows = {
        f"{PREFIX}model.embed_tokens.lora_embedding_A": torch.randn(RANK, 97),
        f"{PREFIX}model.embed_tokens.lora_embedding_B": torch.randn(WIDTH, RANK),
    }
    a, b = rows.values()
    adapter = save_adapter(tmp_path / "adapter", {f"{PREFIX}model.norm.weight": norm, **rows})
    before = converted("llama", tmp_path / "base").state
    found = converted("llama", tmp_path / "base", adapter)
    after = found.state
    assert torch.equal(after["decoder_norm.weight"], norm)
    wanted = before["embedding.weight"].float() + 6 / RANK * (b @ a).T
    assert torch.allclose(after["embedding.weight"], wanted, atol=1e-5)
    float32 = {name for name, shape in found.shapes.items() if shape.dtype == torch.float32}
    assert float32 == {"decoder_norm.weight", "embedding.weight"}


# --- PEFT -----------------------------------------------------------------------------------------

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", dict(target_modules=["q_proj", "down_proj", "lm_head"], lora_alpha=5)),
    "rslora": ("llama", dict(target_modules="all-linear", use_rslora=True)),
    "dora": ("llama", dict(target_modules=["k_proj", "up_proj"], use_dora=True)),
    "patterns": (
        "llama",
        dict(
            target_modules=["q_proj", "v_proj"],
            rank_pattern={"layers.1.self_attn.q_proj": 2, "v_proj": 6},
            alpha_pattern={"v_proj": 11},
        ),
    ),
    "embedding": ("llama", dict(target_modules=["embed_tokens", "o_proj"])),
    "saved modules": (
        "llama",
        dict(target_modules=["q_proj"], modules_to_save=["lm_head", "norm"]),
    ),
    "gpt2": ("gpt2", dict(target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True)),
    "gpt2, dora": ("gpt2", dict(target_modules=["c_attn", "c_proj"], use_dora=True)),
    "gpt2, biases": ("gpt2", dict(target_modules=["c_attn"], bias="lora_only")),
    "gpt2, all biases": ("gpt2", dict(target_modules=["c_attn"], bias="all")),
}


@pytest.mark.optional("peft")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_it_is_what_peft_merges(name: str, tmp_path: Path) -> None:
    peft = importlib.import_module("peft")
    kind, settings = CASES[name]
    model = {"llama": llama, "gpt2": gpt2}[kind](tmp_path / "base")
    made = peft.get_peft_model(model, peft.LoraConfig(r=RANK, **settings))
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn_like(parameter))
    made.save_pretrained(tmp_path / "adapter")
    base = {"llama": llama, "gpt2": gpt2}[kind](tmp_path / "base")
    merged = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    wanted = converted(kind, tmp_path / "merged").state
    found = converted(kind, tmp_path / "base", tmp_path / "adapter").state
    plain = converted(kind, tmp_path / "base").state
    assert any(not torch.equal(found[each], plain[each]) for each in plain)
    for each in wanted:
        if settings.get("use_dora"):  # PEFT adds the squares of a norm in another order
            assert torch.allclose(found[each], wanted[each], rtol=1e-6, atol=0), each
        else:
            assert torch.equal(found[each], wanted[each]), each


@pytest.mark.optional("peft")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_the_adapter_of_a_classifier_has_its_embedding_and_head(kind: str, tmp_path: Path) -> None:
    peft = importlib.import_module("peft")
    base, merged = tmp_path / "base", tmp_path / "merged"
    told = {"num_labels": 3, "tie_word_embeddings": True}
    made = type(Theirs(kind, 0, base, "ForSequenceClassification", **told).model)
    query = {"bert": "query", "llama": "q_proj"}[kind]
    settings = dict(task_type="SEQ_CLS", target_modules=[query], bias="all")
    trained = peft.get_peft_model(made.from_pretrained(base), peft.LoraConfig(**settings))
    with torch.no_grad():
        for parameter in trained.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn_like(parameter))
    trained.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    shutil.copytree(base, merged)
    model = peft.PeftModel.from_pretrained(made.from_pretrained(base), tmp_path / "adapter")
    model.merge_and_unload().save_pretrained(merged)
    found, wanted = (read_pretrained(base, tmp_path / "adapter"), read_pretrained(merged))
    assert found.config == wanted.config
    state, plain = wanted.weights.state, read_pretrained(base).weights.state
    assert any(not torch.equal(state[each], plain[each]) for each in state)
    for name, tensor in found.weights.state.items():
        assert torch.equal(tensor, state[name]), name


# --- refusals and the command ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, 'peft_type is "IA3", which cannot be merged; supported: LORA'),
        ({"lora_bias": True}, "lora_bias is true"),
        ({"unheard_of": 3}, "unheard_of is 3"),
        ({"init_lora_weights": "pissa"}, 'init_lora_weights is "pissa"'),
        ({"r": 0}, "r is 0"),
        ({"lora_alpha": "6"}, 'lora_alpha is "6"'),
        ({"use_rslora": "yes"}, "use_rslora is"),
        ({"alpha_pattern": {"(a+)+": 3}}, "alpha_pattern is"),
        ({"rank_pattern": {"q_proj": 5}}, "of rank 5 by adapter_config.json, found"),
        ({"use_dora": True}, "and its magnitude"),
    ],
)
def test_a_setting_is_refused_by_name(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "adapter", factors(QUERY, WIDTH, WIDTH), **config)
    with pytest.raises(InputError, match=message.replace("(", r"\(")):
        Adapter(folder)


Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda own: factors(QUERY.replace("1", "7"), WIDTH, WIDTH), "no place in .* of another"),
        (lambda own: factors(QUERY, WIDTH, 48), r"of shape \[32, 32\], found \[32, 48\]"),
        (lambda own: dict([*own.items()][:1]), "expected A and B of"),
        (lambda own: own | {f"{PREFIX}x.lora_C.weight": torch.ones(2)}, "cannot be merged"),
        (lambda own: own | {f"{PREFIX}score.weight": torch.ones(2)}, "score.weight is unknown"),
        (lambda own: {name: each.to(torch.int8) for name, each in own.items()}, "quantised"),
        (
            lambda own: own | {f"{PREFIX}model.embed_tokens.weight": torch.randn(97, WIDTH)},
            "which the model shares between embedding and output",
        ),
        (lambda own: factors("lm_head", 97, WIDTH), "changes lm_head.weight, which .* a copy as"),
    ],
)
def test_a_tensor_is_refused_by_name(change: Change, message: str, tmp_path: Path) -> None:
    llama(tmp_path / "base", tie_word_embeddings=True)
    tensors = change(factors(QUERY, WIDTH, WIDTH))
    adapter = save_adapter(tmp_path / "adapter", tensors)
    with pytest.raises(InputError, match=message):
        converted("llama", tmp_path / "base", adapter)


def test_the_command_tells_what_it_merged(tmp_path: Path) -> None:
    llama(tmp_path / "base")
    ids = {f"t{number}": number for number in range(96)} | {"a": 96}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="t0"))
    made.save(str(tmp_path / "base" / "tokenizer.json"))
    tensors = factors(QUERY, WIDTH, WIDTH)
    adapter = save_adapter(tmp_path / "adapter", tensors, base_model_name_or_path="me/base")
    (adapter / "adapter_model.safetensors").unlink()
    torch.save(tensors, adapter / "adapter_model.bin")
    result = done("import", tmp_path / "base", "--adapter", adapter, "--out", tmp_path / "run")
    assert "adapter: LoRA of rank 4, 1 matrices merged; made for me/base" in result.stderr
    wanted = converted("llama", tmp_path / "base", adapter).state[OURS]
    assert torch.equal(load_checkpoint(tmp_path / "run").model.state_dict()[OURS], wanted)
    assert "adapter" in (tmp_path / "run" / "settings.toml").read_text()

    save_adapter(tmp_path / "base", tensors)  # beside the model, as transformers looks for one
    done("import", tmp_path / "base", "--out", tmp_path / "inside")
    assert torch.equal(load_checkpoint(tmp_path / "inside").model.state_dict()[OURS], wanted)
    with pytest.raises(InputError, match=r"one adapter, found adapter_config\.json there"):
        read_pretrained(tmp_path / "base", adapter)
