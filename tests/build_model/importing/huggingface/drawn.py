"""Drawn configurations of every model type, transformers' model and ours."""

import contextlib
import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.build_model.importing.huggingface.encoder_types import (
    ENCODERS,
    LIKE_ROBERTA,
    flags,
    layer_types,
    rope,
)
from tests.runtime.tokenizer.vocabularies import byte_level
from transferry.build_model.importing.huggingface.folder import PretrainedFolder
from transferry.build_model.importing.huggingface.importer import FAMILIES
from transferry.build_model.importing.huggingface.weights import convert_weights
from transferry.build_model.model.transformer import Transformer

REASON = "a test dependency, which is not installed: it is what the import is held against"
transformers = pytest.importorskip("transformers", reason=REASON)
tokenizers = pytest.importorskip("tokenizers", reason=REASON)

SEEDS = range(int(os.environ.get("EXAMPLES", "1")))
VOCABULARY = 97
LONGEST = 64
KINDS = ("default", "linear")

Draw = random.Random


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
        **flags(draw, "attention_bias mlp_bias"),
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


def olmo3(draw: Draw) -> dict[str, Any]:
    kinds = ("default", "linear", "llama3", "yarn")
    far = {"sliding_attention": rope(draw, kinds=KINDS), "full_attention": rope(draw, kinds=kinds)}
    more = {"sliding_window": draw.choice([3, 6]), "layer_types": layer_types(draw, 3)}
    return olmo2(draw) | more | {"rope_parameters": far}


def olmo(draw: Draw) -> dict[str, Any]:
    found = llama_like(draw, attention_bias=draw.choice([True, False]))
    return {name: value for name, value in found.items() if name != "rms_norm_eps"}


def granite(draw: Draw) -> dict[str, Any]:
    return llama_like(
        draw,
        **flags(draw, "attention_bias mlp_bias"),
        attention_multiplier=draw.choice([0.0625, 0.3]),
        embedding_multiplier=draw.choice([1.0, 12.0]),
        residual_multiplier=draw.choice([1.0, 0.22]),
        logits_scaling=draw.choice([1.0, 8.0, 6.3]),
    )


def gemma(draw: Draw) -> dict[str, Any]:
    return llama_like(
        draw,
        head_dim=draw.choice([8, 16]),
        attention_bias=draw.choice([True, False]),
        hidden_act=draw.choice(["gelu_pytorch_tanh", "gelu", "silu"]),
    )


def layer_normed(draw: Draw, **more: Any) -> dict[str, Any]:
    """Settings of a decoder with LayerNorm and, where `share`, partly rotary positions."""
    found = llama_like(draw) | {"layer_norm_eps": draw.choice([1e-5, 1e-6])} | more
    share = found.pop("share", True)
    parameters = rope(draw, share=share, kinds=KINDS)
    return {name: each for name, each in found.items() if name != "rms_norm_eps"} | {
        "rope_parameters": parameters
    }


def phi(draw: Draw) -> dict[str, Any]:
    return layer_normed(draw, qk_layernorm=draw.choice([True, False]), hidden_act="gelu_new")


def stablelm(draw: Draw) -> dict[str, Any]:
    return layer_normed(
        draw,
        **flags(draw, "use_qkv_bias use_parallel_residual"),
    )


def starcoder2(draw: Draw) -> dict[str, Any]:
    more = {"use_bias": draw.choice([True, False]), "sliding_window": draw.choice([None, 4])}
    acts = draw.choice(["gelu_pytorch_tanh", "relu"])
    found = layer_normed(draw, share=False, norm_epsilon=1e-6, hidden_act=acts, **more)
    return {name: each for name, each in found.items() if name != "layer_norm_eps"}


def smollm3(draw: Draw) -> dict[str, Any]:
    slides, window = draw.choice([True, False]), draw.choice([None, 4, 4])
    return llama_like(
        draw,
        use_sliding_window=slides,
        sliding_window=window,
        no_rope_layer_interval=draw.choice([2, 4]),
        no_rope_layers=draw.choice([None, [1, 0, 0]]),
        layer_types=layer_types(draw, 3) if window else None,
        **flags(draw, "attention_bias mlp_bias"),
    )


def gpt_neox(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_size": 32,
        "num_attention_heads": draw.choice([2, 4]),
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "hidden_act": draw.choice(["gelu", "gelu_fast", "relu"]),
        "rope_parameters": rope(draw, share=draw.choice([True, False]), kinds=KINDS),
        **flags(draw, "use_parallel_residual attention_bias tie_word_embeddings"),
    }


def opt(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_size": 32,
        "num_attention_heads": draw.choice([2, 4]),
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "word_embed_proj_dim": draw.choice([None, 16, 48]),
        **flags(draw, "do_layer_norm_before _remove_final_layer_norm enable_bias"),
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
        **flags(draw, "scale_attn_weights scale_attn_by_inverse_layer_idx tie_word_embeddings"),
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
        "relative_attention_max_distance": draw.choice([20, 128]),
        "feed_forward_proj": draw.choice(["relu", "gated-gelu", "gated-silu", "gelu"]),
        "tie_word_embeddings": draw.choice([True, False]),
        "decoder_start_token_id": 0,
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
    "olmo": ("OlmoForCausalLM", olmo),
    "olmo3": ("Olmo3ForCausalLM", olmo3),
    "granite": ("GraniteForCausalLM", granite),
    "gemma": ("GemmaForCausalLM", gemma),
    "phi": ("PhiForCausalLM", phi),
    "stablelm": ("StableLmForCausalLM", stablelm),
    "starcoder2": ("Starcoder2ForCausalLM", starcoder2),
    "gpt_neox": ("GPTNeoXForCausalLM", gpt_neox),
    "opt": ("OPTForCausalLM", opt),
    "marian": ("MarianMTModel", marian),
    "bart": ("BartForConditionalGeneration", sides),
    "mbart": ("MBartForConditionalGeneration", sides),
    "pegasus": ("PegasusForConditionalGeneration", sides),
    "m2m_100": ("M2M100ForConditionalGeneration", sides),
    "t5": ("T5ForConditionalGeneration", t5),
    "mt5": ("MT5ForConditionalGeneration", t5),
    "umt5": ("UMT5ForConditionalGeneration", t5),
    **ENCODERS,
}
NOT_ROTARY = ("gpt2", "opt", "marian", "bart", "mbart", "pegasus", "m2m_100", "t5", "mt5", "umt5")
ROTARY = (
    *(kind for kind in TYPES if kind not in (*NOT_ROTARY, *ENCODERS)),
    *("modernbert", "nomic_bert", "gte", "jina_embeddings_v3", "eurobert"),
)
AFTER_PADDING = {"m2m_100", "mpnet", *LIKE_ROBERTA}


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


def on_a_grid(tensor: Tensor) -> Tensor:
    """Multiples of 2^-10, so that the sum of two rows of BERT's embeddings is no rounded number."""
    return (tensor * 1024).round() / 1024


def randomise(model: Any) -> None:
    """Every weight, bias and norm becomes a number of its own that float32 holds exactly."""
    tables = [module for module in model.modules() if "Sinusoidal" in type(module).__name__]
    kept = {id(each) for module in tables for each in module.parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if id(parameter) in kept:
                continue
            centre = 1.0 if parameter.dim() == 1 and name.endswith("weight") else 0.0
            drawn = centre + 0.3 * torch.randn(parameter.shape, dtype=torch.float32)
            parameter.copy_(on_a_grid(drawn))


def drawn_model(config: Any, model_class: Any, seed: int = 0) -> Any:
    """A model of transformers with numbers of its own, in eval mode."""
    torch.manual_seed(seed)
    model = model_class(config).eval()
    randomise(model)
    return model


def in_float64(made: Any, config: Any = None) -> Any:
    """The same model in float64, made anew so that its tables are exact; `made` is widened."""
    with exact():
        model = type(made)(made.config if config is None else config).eval()
    model.load_state_dict(made.double().state_dict())
    return model.double()


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
        model_class = getattr(transformers, name)
        self.config = model_class.config_class(**everything)
        made = drawn_model(self.config, model_class, seed)
        made.save_pretrained(folder)
        record = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        rewrite(record)
        (folder / "config.json").write_text(json.dumps(record), encoding="utf-8")
        checkpoint = PretrainedFolder(folder)
        family = FAMILIES[kind]
        self.shape = family.shape(checkpoint.config, checkpoint.names())
        self.settings = checkpoint.config
        converted = convert_weights(family, self.shape, checkpoint.tensors(), str(folder))
        self.ours = Transformer(self.shape)
        self.ours.load_state_dict(converted.state)
        self.ours.eval().double()
        self.theirs = in_float64(made, type(made.config).from_pretrained(folder))
        # These are float32 numbers by design.
        for name, buffer in made.named_buffers():
            if name.endswith("embed_positions.weights"):
                self.theirs.get_submodule(name.rpartition(".")[0]).weights = buffer.double()


def require_equal(ours: Tensor, theirs: Tensor) -> None:
    """To 1e-9 of the largest, in float64."""
    assert ours.dtype == theirs.dtype == torch.float64
    assert ours.shape == theirs.shape
    assert theirs.abs().max() > 0.1
    assert (ours - theirs).abs().max() <= 1e-9 * theirs.abs().max()


@torch.inference_mode()
def require_same_logits(ours: Transformer, theirs: Any) -> None:
    for lengths in ([13, 6, 1], [13, 13, 13]):  # transformers drops a mask without padding
        _require_same_logits(ours, theirs, lengths)


def _require_same_logits(ours: Transformer, theirs: Any, lengths: Sequence[int]) -> None:
    config, architecture = ours.config, ours.config.architecture
    rows = torch.randint(0, config.source_vocabulary, (3, 13))
    rows[:, 2] = 1  # padding within a text
    target = torch.randint(3, config.vocabulary_size, (3, 9))
    mask = torch.arange(13) < torch.tensor(lengths)[:, None]
    alone = architecture == "encoder-only"
    fed: dict[str, Any] = {} if architecture == "decoder-only" else {"attention_mask": mask.long()}
    if architecture == "encoder-decoder":
        fed["decoder_input_ids"] = target
    with exact():
        found = theirs(rows, **fed, output_hidden_states=alone)
    wanted = found.prediction_logits if "prediction_logits" in found else found.logits
    nothing = rows[:, :0]
    read = (
        (nothing, nothing.bool(), rows) if architecture == "decoder-only" else (rows, mask, target)
    )
    if alone:
        require_equal(ours.encode(rows, mask)[mask], found.hidden_states[-1][mask])
        require_equal(ours(*read)[mask], wanted[mask])
    else:
        require_equal(ours(*read), wanted)


def byte_level_tokenizer(folder: Path, begin: str, end: str) -> Any:
    """A tokenizer.json with tokens before and after a text, as save_pretrained writes it."""
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    texts = ["the cat sat on the mat", "Straße über Häuser"] * 9
    made = byte_level(texts, 290, special, blank=True, unk_token="<unk>")
    made.decoder = tokenizers.decoders.ByteLevel()
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
