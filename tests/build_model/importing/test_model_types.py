"""Every model type gives transformers' numbers and tokens, whatever its config.json says.

Configurations are drawn: two of each type in `make test`, as many as wanted with EXAMPLES=….
"""

from __future__ import annotations

import contextlib
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from transferry.build_model.importing.huggingface import encoder_decoder
from transferry.build_model.importing.huggingface.folder import PretrainedFolder
from transferry.build_model.importing.huggingface.importer import FAMILIES, import_checkpoint
from transferry.build_model.importing.huggingface.weights import convert_weights
from transferry.build_model.model.transformer import Transformer
from transferry.export.torch_model import TorchDecoder
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.decoding.search import search
from transferry.runtime.errors import InputError
from transferry.runtime.tokenizer.byte_pair import load_tokenizer
from transferry.runtime.tokenizer.special_tokens import SpecialTokens

REASON = "a test dependency, which is not installed: it is what the import is held against"
transformers = pytest.importorskip("transformers", reason=REASON)

SEEDS = range(int(os.environ.get("EXAMPLES", "2")))
VOCABULARY = 97
LONGEST = 64
KINDS = ("default", "linear")

Draw = random.Random


def rope(draw: Draw, *, share: bool = False, kinds: tuple[str, ...] = ()) -> dict[str, Any]:
    """Parameters of rotary positions, as transformers 5 writes them."""
    kind = draw.choice(kinds or ("default", "linear", "dynamic", "llama3", "yarn"))
    found: dict[str, Any] = {"rope_type": kind, "rope_theta": draw.choice([100.0, 10000.0, 5e5])}
    if kind != "default":
        found["factor"] = draw.choice([2.0, 4.0, 8.0])
    if kind == "llama3":
        found |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        found["original_max_position_embeddings"] = 16
    if kind == "yarn":
        found |= draw.choice(
            [
                {"original_max_position_embeddings": 16},
                {"original_max_position_embeddings": 32, "beta_fast": 16.0, "beta_slow": 2.0},
                {"original_max_position_embeddings": 32, "attention_factor": 1.3},
                {"original_max_position_embeddings": 16, "truncate": False},
                {"original_max_position_embeddings": 16, "mscale": 0.7, "mscale_all_dim": 0.4},
            ]
        )
    return found | ({"partial_rotary_factor": draw.choice([0.25, 0.5, 0.75])} if share else {})


def layer_types(draw: Draw, layers: int) -> list[str] | None:
    kinds = [draw.choice(["sliding_attention", "full_attention"]) for _ in range(layers)]
    return draw.choice([None, kinds])


def llama_like(draw: Draw, **more: Any) -> dict[str, Any]:
    heads = draw.choice([2, 4])
    return {
        "hidden_size": 32,
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice([each for each in (1, 2, 4) if heads % each == 0]),
        "intermediate_size": draw.choice([40, 48]),
        "num_hidden_layers": 3,
        "rms_norm_eps": draw.choice([1e-6, 1e-5]),
        "tie_word_embeddings": draw.choice([True, False]),
        "rope_parameters": rope(draw),
        **more,
    }


def llama(draw: Draw) -> dict[str, Any]:
    return llama_like(
        draw,
        head_dim=draw.choice([None, 6, 16]),
        attention_bias=draw.choice([True, False]),
        mlp_bias=draw.choice([True, False]),
        hidden_act=draw.choice(["silu", "gelu", "gelu_pytorch_tanh", "relu"]),
    )


def mistral(draw: Draw) -> dict[str, Any]:
    return llama_like(
        # Not a window of 1: transformers' cache keeps the last 0 positions of it as [-0:], all.
        draw,
        head_dim=draw.choice([None, 12]),
        sliding_window=draw.choice([None, 2, 3, 7]),
    )


def qwen2(draw: Draw) -> dict[str, Any]:
    slides = draw.choice([True, True, False])
    return llama_like(
        draw,
        use_sliding_window=slides,
        sliding_window=draw.choice([3, 5]),
        max_window_layers=draw.choice([0, 1, 28]),
        layer_types=layer_types(draw, 3) if slides else None,
    )


def qwen3(draw: Draw) -> dict[str, Any]:
    return qwen2(draw) | {
        "head_dim": draw.choice([8, 12, 128]),
        "attention_bias": draw.choice([True, False]),
    }


def phi3(draw: Draw) -> dict[str, Any]:
    changes = llama_like(draw, sliding_window=draw.choice([None, 4]))
    width = 32 // changes["num_attention_heads"]
    share = draw.choice([1.0, 0.5])
    parameters: dict[str, Any] = {"rope_theta": 10000.0, "partial_rotary_factor": share}
    if draw.choice([True, False]):
        pairs = int(width * share) // 2
        factors = {
            f"{name}_factor": [draw.choice([1.0, 1.25, 2.5]) for _ in range(pairs)]
            for name in ("short", "long")
        }
        parameters |= {"rope_type": "longrope", **factors}
        changes["original_max_position_embeddings"] = draw.choice([32, 64])
    else:
        parameters["rope_type"] = "default"
    return changes | {"rope_parameters": parameters}


def gemma2(draw: Draw) -> dict[str, Any]:
    return llama_like(
        draw,
        head_dim=draw.choice([8, 12]),
        query_pre_attn_scalar=draw.choice([8, 24, 256]),
        sliding_window=draw.choice([3, 6]),
        layer_types=layer_types(draw, 3),
        attn_logit_softcapping=draw.choice([None, 5.0, 50.0]),
        final_logit_softcapping=draw.choice([None, 4.0, 30.0]),
        attention_bias=draw.choice([True, False]),
        hidden_activation=draw.choice(["gelu_pytorch_tanh", "silu"]),
    )


def gemma3(draw: Draw) -> dict[str, Any]:
    return gemma2(draw) | {
        "attn_logit_softcapping": None,
        "rope_parameters": {
            "sliding_attention": rope(draw, kinds=KINDS),
            "full_attention": rope(draw, kinds=("default", "linear", "llama3")),
        },
    }


def olmo2(draw: Draw) -> dict[str, Any]:
    return llama_like(draw, attention_bias=draw.choice([True, False]))


def smollm3(draw: Draw) -> dict[str, Any]:
    slides = draw.choice([True, False])
    return llama_like(
        draw,
        use_sliding_window=slides,
        sliding_window=4 if slides else draw.choice([None, 4]),
        no_rope_layer_interval=draw.choice([2, 4]),
        no_rope_layers=draw.choice([None, [1, 0, 0]]),
        layer_types=layer_types(draw, 3) if slides else None,
        attention_bias=draw.choice([True, False]),
        mlp_bias=draw.choice([True, False]),
    )


def gpt_neox(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_size": 32,
        "num_attention_heads": draw.choice([2, 4]),
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "hidden_act": draw.choice(["gelu", "gelu_fast", "relu"]),
        "rope_parameters": rope(draw, share=draw.choice([True, False]), kinds=KINDS),
        "use_parallel_residual": draw.choice([True, False]),
        "attention_bias": draw.choice([True, False]),
        "tie_word_embeddings": draw.choice([True, False]),
    }


def opt(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_size": 32,
        "num_attention_heads": draw.choice([2, 4]),
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "word_embed_proj_dim": draw.choice([None, 16, 48]),
        "do_layer_norm_before": draw.choice([True, False]),
        "_remove_final_layer_norm": draw.choice([True, False]),
        "enable_bias": draw.choice([True, False]),
        "layer_norm_elementwise_affine": draw.choice([True, True, False]),
        "activation_function": draw.choice(["relu", "gelu"]),
    }


def gpt2(draw: Draw) -> dict[str, Any]:
    return {
        "n_embd": 32,
        "n_head": draw.choice([2, 4]),
        "n_layer": 3,
        "n_inner": draw.choice([None, 40]),
        "n_positions": LONGEST,
        "activation_function": draw.choice(["gelu_new", "quick_gelu", "gelu", "relu", "silu"]),
        "scale_attn_weights": draw.choice([True, False]),
        "scale_attn_by_inverse_layer_idx": draw.choice([True, False]),
        "tie_word_embeddings": draw.choice([True, False]),
    }


def sides(draw: Draw, **more: Any) -> dict[str, Any]:
    """Settings of an encoder-decoder of BART's kin."""
    return {
        "d_model": 32,
        "encoder_layers": draw.choice([1, 3]),
        "decoder_layers": draw.choice([1, 2]),
        "encoder_attention_heads": draw.choice([2, 4]),
        "decoder_attention_heads": draw.choice([2, 4]),
        "encoder_ffn_dim": draw.choice([40, 48]),
        "decoder_ffn_dim": draw.choice([40, 48]),
        "activation_function": draw.choice(["gelu", "relu", "swish", "gelu_new"]),
        "scale_embedding": draw.choice([True, False]),
        "decoder_start_token_id": 2,
        "forced_eos_token_id": None,
        "forced_bos_token_id": None,
        **more,
    }


def marian(draw: Draw) -> dict[str, Any]:
    shared = draw.choice([True, False])
    own = {} if shared else {"decoder_vocab_size": draw.choice([VOCABULARY, 83])}
    return sides(draw, share_encoder_decoder_embeddings=shared, **own)


def t5(draw: Draw) -> dict[str, Any]:
    return {
        "d_model": 32,
        "d_kv": draw.choice([8, 12]),
        "d_ff": 48,
        "num_layers": draw.choice([1, 2]),
        # transformers' cache has no more layers than the encoder.
        "num_decoder_layers": draw.choice([None, 1]),
        "num_heads": draw.choice([2, 4]),
        "relative_attention_num_buckets": draw.choice([8, 32]),
        "relative_attention_max_distance": draw.choice([16, 128]),
        "feed_forward_proj": draw.choice(["relu", "gated-gelu", "gated-silu", "gelu"]),
        "tie_word_embeddings": draw.choice([True, False]),
        "decoder_start_token_id": 0,
    }


def masked(draw: Draw, **more: Any) -> dict[str, Any]:
    """Settings of an encoder in BERT's words."""
    return {
        "hidden_size": 32,
        "num_hidden_layers": draw.choice([1, 2]),
        "num_attention_heads": draw.choice([2, 4]),
        "intermediate_size": draw.choice([40, 48]),
        "hidden_act": draw.choice(["gelu", "relu", "gelu_new"]),
        "layer_norm_eps": draw.choice([1e-12, 1e-5]),
        "type_vocab_size": draw.choice([1, 2]),
        **more,
    }


def electra(draw: Draw) -> dict[str, Any]:
    return masked(draw, embedding_size=draw.choice([16, 32, 40]))


def distilbert(draw: Draw) -> dict[str, Any]:
    return {
        "dim": 32,
        "n_layers": 2,
        "n_heads": draw.choice([2, 4]),
        "hidden_dim": 48,
        "activation": draw.choice(["gelu", "relu"]),
        "sinusoidal_pos_embds": draw.choice([True, False]),
    }


def modernbert(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 4,
        "num_attention_heads": draw.choice([2, 4]),
        "hidden_activation": draw.choice(["gelu", "silu"]),
        "classifier_activation": draw.choice(["gelu", "relu"]),
        "local_attention": draw.choice([2, 4, 6, 128]),
        "layer_types": layer_types(draw, 4),
        "attention_bias": draw.choice([True, False]),
        "mlp_bias": draw.choice([True, False]),
        "norm_bias": draw.choice([True, False]),
        "classifier_bias": draw.choice([True, False]),
        "decoder_bias": draw.choice([True, False]),
    }


# Model class and settings, by model_type.
TYPES: dict[str, tuple[str, Callable[[Draw], dict[str, Any]]]] = {
    "gpt2": ("GPT2LMHeadModel", gpt2),
    "llama": ("LlamaForCausalLM", llama),
    "mistral": ("MistralForCausalLM", mistral),
    "qwen2": ("Qwen2ForCausalLM", qwen2),
    "qwen3": ("Qwen3ForCausalLM", qwen3),
    "phi3": ("Phi3ForCausalLM", phi3),
    "gemma2": ("Gemma2ForCausalLM", gemma2),
    "gemma3_text": ("Gemma3ForCausalLM", gemma3),
    "olmo2": ("Olmo2ForCausalLM", olmo2),
    "smollm3": ("SmolLM3ForCausalLM", smollm3),
    "gpt_neox": ("GPTNeoXForCausalLM", gpt_neox),
    "opt": ("OPTForCausalLM", opt),
    "marian": ("MarianMTModel", marian),
    "bart": ("BartForConditionalGeneration", sides),
    "mbart": ("MBartForConditionalGeneration", sides),
    "pegasus": ("PegasusForConditionalGeneration", sides),
    "m2m_100": ("M2M100ForConditionalGeneration", sides),
    "t5": ("T5ForConditionalGeneration", t5),
    "mt5": ("MT5ForConditionalGeneration", t5),
    "bert": ("BertForMaskedLM", masked),
    "roberta": ("RobertaForMaskedLM", masked),
    "xlm-roberta": ("XLMRobertaForMaskedLM", masked),
    "distilbert": ("DistilBertForMaskedLM", distilbert),
    "electra": ("ElectraForMaskedLM", electra),
    "mpnet": ("MPNetForMaskedLM", masked),
    "modernbert": ("ModernBertForMaskedLM", modernbert),
}
ROTARY = (
    *("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text", "olmo2", "smollm3"),
    "gpt_neox",
)
# Types whose positions begin after that of padding.
AFTER_PADDING = {"m2m_100", "roberta", "xlm-roberta", "mpnet"}


@contextlib.contextmanager
def exact() -> Iterator[None]:
    """Lets transformers compute in float64 what it computes in float32 whatever the model's type.

    Norms, angles and softmax would else agree to seven digits only. The formulas are the same.
    """
    with contextlib.ExitStack() as stack:
        for name in ("float", "float32"):
            stack.enter_context(mock.patch.object(torch, name, torch.float64))
        stack.enter_context(mock.patch.object(Tensor, "float", Tensor.double))
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        stack.callback(torch.set_default_dtype, default)
        yield


def randomise(model: Any) -> None:
    """Every weight, bias and norm becomes its own number, of which float32 holds all digits."""
    tables = [module for module in model.modules() if "Sinusoidal" in type(module).__name__]
    kept = {id(each) for module in tables for each in module.parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if id(parameter) in kept:
                continue
            centre = 1.0 if parameter.dim() == 1 and name.endswith("weight") else 0.0
            drawn = centre + 0.3 * torch.randn(parameter.shape, dtype=torch.float32)
            parameter.copy_((drawn * 1024).round() / 1024)


class Drawn:
    """A checkpoint of a drawn configuration, transformers' model in float64, and ours."""

    def __init__(
        self,
        kind: str,
        seed: int,
        folder: Path,
        vocabulary: int = VOCABULARY,
        depth: int = 3,
        rewrite: Callable[[dict[str, Any]], None] = lambda record: None,
        **changes: Any,
    ) -> None:
        name, settings = TYPES[kind]
        chosen = settings(Draw(f"{kind} {seed}"))
        for key, value in chosen.items():
            if key.endswith(("layers", "n_layer")) and type(value) is int:
                chosen[key] = min(value, depth)
            if key in ("layer_types", "no_rope_layers") and value is not None:
                chosen[key] = value[:depth]
        positions = {} if kind == "gpt2" else {"max_position_embeddings": LONGEST}
        ends = {"pad_token_id": 0, "bos_token_id": 3, "eos_token_id": 2}
        if kind in AFTER_PADDING:
            ends |= {"pad_token_id": 1}
        everything = {"vocab_size": vocabulary} | positions | ends | chosen | changes
        self.config = getattr(transformers, name).config_class(**everything)
        torch.manual_seed(seed)
        made = getattr(transformers, name)(self.config).eval()
        randomise(made)
        made.save_pretrained(folder)
        record = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        rewrite(record)
        (folder / "config.json").write_text(json.dumps(record), encoding="utf-8")
        checkpoint = PretrainedFolder(folder)
        family = FAMILIES[kind]
        self.shape = family.shape(checkpoint.config, checkpoint.names())
        self.unread = checkpoint.config.unread()
        converted = convert_weights(family, self.shape, checkpoint.tensors(), str(folder))
        self.ours = Transformer(self.shape)
        self.ours.load_state_dict(converted.state)
        self.ours.eval().double()
        with exact():
            self.theirs = getattr(transformers, name)(type(made.config).from_pretrained(folder))
        self.theirs.load_state_dict(made.double().state_dict())
        self.theirs.eval().double()
        # These are float32 numbers by design.
        for name, buffer in made.named_buffers():
            if name.endswith("embed_positions.weights"):
                self.theirs.get_submodule(name.rpartition(".")[0]).weights = buffer.double()


def test_every_type_has_a_case() -> None:
    assert set(TYPES) == set(FAMILIES)


def require_same_logits(drawn: Drawn) -> None:
    rows = torch.randint(3, drawn.shape.source_vocabulary, (3, 13))
    target = torch.randint(3, drawn.shape.vocabulary_size, (3, 9))
    mask = torch.arange(13) < torch.tensor([13, 6, 1])[:, None]
    architecture = drawn.shape.architecture
    both = architecture == "encoder-decoder"
    fed = {} if architecture == "decoder-only" else {"attention_mask": mask.long()}
    with exact():
        wanted = drawn.theirs(rows, **fed, **({"decoder_input_ids": target} if both else {})).logits
    nothing = rows[:, :0]
    read = (
        (nothing, nothing.bool(), rows) if architecture == "decoder-only" else (rows, mask, target)
    )
    found = drawn.ours(*read)
    if architecture == "encoder-only":
        wanted, found = wanted[mask], found[mask]
    assert wanted.abs().max() > 0.1
    assert (found - wanted).abs().max() <= 1e-9 * wanted.abs().max(), drawn.shape


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", TYPES)
@torch.inference_mode()
def test_logits_and_tokens_are_theirs(kind: str, seed: int, tmp_path: Path) -> None:
    drawn = Drawn(kind, seed, tmp_path)
    require_same_logits(drawn)
    both = drawn.shape.architecture == "encoder-decoder"
    if drawn.shape.architecture == "encoder-only":
        return

    prompts = [[3, 5, 7], [9], [3, 4, 5, 6, 7, 8, 9, 10, 11]]
    begin = drawn.config.decoder_start_token_id if both else 3
    special = SpecialTokens(drawn.config.pad_token_id, begin, eos_id=2, after=())
    for beam in (1, 3):
        expected = []
        for prompt in prompts:
            with exact():
                answer = drawn.theirs.generate(
                    torch.tensor([prompt]),
                    attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                    do_sample=False,
                    num_beams=beam,
                    max_new_tokens=12,
                    early_stopping=beam > 1,
                )[0].tolist()
            answer = answer[1 if both else len(prompt) :]
            expected.append(answer[: answer.index(2)] if 2 in answer else answer)
        options = GenerationOptions(beam=beam, max_length=12)
        answers = search(TorchDecoder.oracle(drawn.ours), prompts, options, special)
        assert [list(row[0].tokens) for row in answers] == expected


# Types whose tokenizer.json may be of any kind, as of the class TokenizersBackend.
AS_THEY_STAND = (
    *("roberta", "xlm-roberta", "mpnet", "modernbert"),
    *(kind for kind in encoder_decoder.FAMILIES if kind != "marian"),
)
# Keys that other parts of a folder must follow, or that cannot be saved.
NOT_DRAWN = (
    *("vocab_size", "decoder_vocab_size", "pad_token_id", "max_position_embeddings"),
    "output_attentions",
)
# What transformers raises for a value that it does not support.
ILLEGAL = (
    *(ValueError, TypeError, RuntimeError, IndexError, KeyError, AttributeError),
    StrictDataclassError,
)


def is_legal(name: str, config: Any, change: dict[str, Any]) -> bool:
    """Whether transformers computes with a changed configuration."""
    with contextlib.suppress(*ILLEGAL):
        changed = type(config)(**config.to_dict() | change)
        torch.manual_seed(0)
        made = getattr(transformers, name)(changed).eval()
        fed = {"decoder_input_ids": torch.tensor([[5, 6]])} if changed.is_encoder_decoder else {}
        made(torch.tensor([[4, 5, 7]]), **fed)
        return True
    return False


def other_values(key: str, value: Any) -> list[Any]:
    """Values of the same type, some of which may be illegal."""
    if type(value) is bool:
        return [not value]
    if type(value) is int:
        return [value + 1, 2 * value, value // 2]
    if type(value) is float:
        return [value / 2, value + 0.25]
    if type(value) is str and "act" in key:
        return [other for other in ("relu", "gelu", "silu", "tanh") if other != value]
    return []


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", TYPES)
@torch.inference_mode()
def test_a_changed_key_is_carried_told_or_refused(kind: str, seed: int, tmp_path: Path) -> None:
    name, _ = TYPES[kind]
    drawn = Drawn(kind, seed, tmp_path / "before")
    settings = {
        key: values
        for key, value in drawn.config.to_dict().items()
        if key not in NOT_DRAWN and (values := other_values(key, value))
    }
    draw = Draw(f"changed {kind} {seed}")
    for key in draw.sample(sorted(settings), 6):
        change = {key: draw.choice(settings[key])}
        if is_legal(name, drawn.config, change):
            break
    else:
        pytest.fail("no legal change was drawn")
    try:
        changed = Drawn(kind, seed, tmp_path / "after", **change)
    except InputError as error:
        # By the key, or by the tensors that the change brought into the file.
        assert key in str(error) or "tensor" in str(error), change
        return
    if key not in changed.unread:
        require_same_logits(changed)


# Whole numbers that are no sizes, so that their default fits a small model.
NO_SIZES = (
    *("original_max_position_embeddings", "sliding_window", "max_window_layers"),
    *("query_pre_attn_scalar", "local_attention", "global_attn_every_n_layers"),
    *("relative_attention_num_buckets", "relative_attention_max_distance"),
    *("no_rope_layer_interval", "layer_types", "no_rope_layers", "rope_parameters"),
)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", TYPES)
@torch.inference_mode()
def test_an_absent_key_has_their_default(kind: str, seed: int, tmp_path: Path) -> None:
    """As in files of older versions, and of others."""
    name, _ = TYPES[kind]
    written = getattr(transformers, name).config_class().to_dict()
    keys = [
        key
        for key, value in written.items()
        if (type(value) in (bool, float, str) or key in NO_SIZES) and key not in NOT_DRAWN
    ]
    keys = sorted({*keys} - {"model_type", "transformers_version", "is_encoder_decoder"})
    drawn = Drawn(kind, seed, tmp_path / "before")
    for key in Draw(f"absent {kind} {seed}").sample(keys, 3):
        change: dict[str, Any] = {key: None if isinstance(written[key], list) else written[key]}
        if not is_legal(name, drawn.config, change):
            continue
        try:
            changed = Drawn(kind, seed, tmp_path / key, rewrite=without(key), **change)
        except InputError as error:
            assert key in str(error) or "tensor" in str(error), key
        else:
            require_same_logits(changed)


def without(key: str) -> Callable[[dict[str, Any]], None]:
    def rewrite(record: dict[str, Any]) -> None:
        record.pop(key, None)

    return rewrite


def in_older_words(record: dict[str, Any]) -> None:
    """Writes rotary positions as versions before 5 did."""
    found, neox = record.pop("rope_parameters"), record["model_type"] == "gpt_neox"
    outer = {
        "rope_theta": "rotary_emb_base" if neox else "rope_theta",
        "partial_rotary_factor": "rotary_pct" if neox else "partial_rotary_factor",
    }
    record |= {name: found.pop(key) for key, name in outer.items() if key in found}
    kind = found.pop("rope_type")
    if kind != "default":
        record["rope_scaling"] = {"type": kind, **found}
    # Names of other types, which transformers does not read.
    record |= {"rope_theta": 7.0, "partial_rotary_factor": 0.1} if neox else {"rotary_pct": 0.1}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", [kind for kind in ROTARY if not kind.startswith("gemma3")])
@torch.inference_mode()
def test_rotary_positions_may_stand_under_older_names(kind: str, seed: int, tmp_path: Path) -> None:
    require_same_logits(Drawn(kind, seed, tmp_path, rewrite=in_older_words))


@pytest.mark.parametrize("kind", [kind for kind in ROTARY if kind not in ("phi3", "gpt_neox")])
@torch.inference_mode()
def test_a_share_that_turns_is_told_where_transformers_turns_all(kind: str, tmp_path: Path) -> None:
    own = {"rope_theta": 100.0, "rope_type": "default", "partial_rotary_factor": 0.5}
    both = {"sliding_attention": own, "full_attention": own}
    nested = kind.startswith("gemma3")
    drawn = Drawn(kind, 0, tmp_path, rope_parameters=both if nested else own)
    assert drawn.unread["partial_rotary_factor"] == 0.5
    require_same_logits(drawn)


@pytest.mark.parametrize("kind", ["gpt2", "bart", "t5", "distilbert"])
def test_another_number_of_heads_under_the_other_name_is_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="num_attention_heads is 1, which cannot be imported"):
        Drawn(kind, 0, tmp_path, rewrite=lambda record: record.update(num_attention_heads=1))


@pytest.mark.parametrize("kind", ["bart", "marian", "pegasus", "m2m_100"])
@torch.inference_mode()
def test_untied_sides_have_embeddings_of_their_own(kind: str, tmp_path: Path) -> None:
    own: dict[str, Any] = {"share_encoder_decoder_embeddings": True} if kind == "marian" else {}
    drawn = Drawn(kind, 0, tmp_path, tie_word_embeddings=False, **own)
    assert drawn.shape.source_vocabulary_size == VOCABULARY
    require_same_logits(drawn)


def byte_level_tokenizer(folder: Path, begin: str, end: str) -> Any:
    """A tokenizer.json with tokens before and after a text, as save_pretrained writes it."""
    tokenizers = pytest.importorskip("tokenizers", reason=REASON)
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=290, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["the cat sat on the mat", "Straße über Häuser"] * 9, trainer)
    ids = [(token, made.token_to_id(token)) for token in (begin, end) if token]
    template = f"{begin} $A {end}".strip()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single=template, special_tokens=ids
    )
    names = {f"{name}_token": f"<{name}>" for name in ("pad", "unk", "mask")}
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<s>",
        eos_token="</s>",
        cls_token="<s>",
        sep_token="</s>",
        **names,
    )
    theirs.save_pretrained(folder)
    return theirs


@pytest.mark.parametrize(
    "kind",
    [
        *("roberta", "xlm-roberta", "mpnet", "modernbert"),
        *sorted(encoder_decoder.FAMILIES.keys() - {"marian"}),
    ],
)
def test_tokenizers_of_encoders_are_theirs(kind: str, tmp_path: Path) -> None:
    folder, run = tmp_path / "theirs", tmp_path / "run"
    begin = "" if kind in ("t5", "mt5", "pegasus") else "<s>"
    theirs = byte_level_tokenizer(folder, begin, "</s>")
    Drawn(kind, 0, folder, vocabulary=len(theirs) + 3)
    import_checkpoint(folder, run)
    ours = load_tokenizer(run)
    for text in ["the cat sat", "Straße über", "日本 😀", "", "  a  b"]:
        assert ours.special.wrap(ours.encode(text)) == theirs(text)["input_ids"]
        ids = ours.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    # What looks like a special token is text.
    assert set(ours.encode("<s></s>")).isdisjoint(ours.special.ids())
