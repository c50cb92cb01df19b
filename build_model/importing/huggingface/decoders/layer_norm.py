"""Decoders with LayerNorm and rotary positions: Phi, StableLM, StarCoder 2, OLMo."""

from __future__ import annotations

import torch
from torch import Tensor

from transferry.build_model.importing.huggingface.decoders.llama import (
    LLAMA,
    attention_biases,
    llama_fields,
    rotary_fields,
    windows,
)
from transferry.build_model.importing.huggingface.folder import Settings
from transferry.build_model.importing.huggingface.tables import ACTIVATIONS, Move, Table
from transferry.build_model.model.config import ModelConfig

OLMO: Table = {name: ours for name, ours in LLAMA.items() if "norm" not in name}
# One norm before two sublayers side by side.
BOTH = Move(
    ("decoder.#.self_residual.norm.*", "decoder.#.feed_forward_residual.norm.*"),
    lambda tensor, config: (tensor, tensor),
)


def phi_shape(config: Settings, names: set[str]) -> ModelConfig:
    """Phi 1 to 2 (Gunasekar et al. 2023): sublayers side by side after one norm."""
    fields = llama_fields(config) | {"head_width": 0, "norm": "layer", "bias": True}
    fields |= {"norm_epsilon": config.number("layer_norm_eps", 1e-5), "parallel": True}
    fields["activation"] = config.choice("hidden_act", ACTIVATIONS, "gelu_new")
    fields["query_key_norm"] = "head" if config.flag("qk_layernorm", False) else "none"
    fields = rotary_fields(config, fields, share=0.5, share_key="partial_rotary_factor")
    return ModelConfig(**fields, output_bias=True)


PHI: Table = {
    **OLMO,
    "layers.#.input_layernorm.*": BOTH,
    "layers.#.self_attn.dense.*": "decoder.#.self_attention.output.*",
    "layers.#.self_attn.q_layernorm.*": "decoder.#.self_attention.query_norm.*",
    "layers.#.self_attn.k_layernorm.*": "decoder.#.self_attention.key_norm.*",
    "layers.#.mlp.fc1.*": "decoder.#.feed_forward.inner.*",
    "layers.#.mlp.fc2.*": "decoder.#.feed_forward.outer.*",
    "final_layernorm.*": "decoder_norm.*",
    "lm_head.bias": "output_bias",
}


def stablelm_shape(config: Settings, names: set[str]) -> ModelConfig:
    """StableLM 2 (Bellagente et al. 2024)."""
    config.only("qk_layernorm", False)
    fields = llama_fields(config, 4096) | {"head_width": 0, "norm": "layer", "norm_bias": True}
    fields |= {"norm_epsilon": config.number("layer_norm_eps", 1e-5)}
    fields = rotary_fields(config, fields, share=0.25, share_key="partial_rotary_factor")
    return ModelConfig(
        **fields,
        query_key_value_bias=config.flag("use_qkv_bias", False),
        parallel=config.flag("use_parallel_residual", False),
    )


STABLELM: Table = {
    **OLMO,
    # Side by side, both sublayers read the first norm.
    "layers.#.input_layernorm.*": Move(
        BOTH.ours, lambda tensor, config: (tensor,) * (2 if config.parallel else 1)
    ),
    "layers.#.post_attention_layernorm.*": "decoder.#.feed_forward_residual.norm.*",
    "norm.*": "decoder_norm.*",
}


def starcoder2_shape(config: Settings, names: set[str]) -> ModelConfig:
    """StarCoder 2 (Lozhkov et al. 2024)."""
    bias = config.flag("use_bias", True)
    config.values.setdefault("num_key_value_heads", 2)
    fields = llama_fields(config, 4096) | {"norm": "layer", "bias": bias, "norm_bias": True}
    fields |= {"norm_epsilon": config.number("norm_epsilon", 1e-5)}
    fields["activation"] = config.choice("hidden_act", ACTIVATIONS, "gelu_pytorch_tanh")
    fields["tied"] = config.flag("tie_word_embeddings", True)
    fields = rotary_fields(config, fields)
    return ModelConfig(**fields, windows=windows(config, fields, 0))


STARCODER2: Table = {
    **STABLELM,
    "layers.#.input_layernorm.*": "decoder.#.self_residual.norm.*",
    "layers.#.mlp.c_fc.*": "decoder.#.feed_forward.inner.*",
    "layers.#.mlp.c_proj.*": "decoder.#.feed_forward.outer.*",
}


def olmo_shape(config: Settings, names: set[str]) -> ModelConfig:
    """OLMo (Groeneveld et al. 2024): norms without weights."""
    config.only("clip_qkv", None)
    fields = rotary_fields(config, llama_fields(config)) | attention_biases(config)
    return ModelConfig(**fields | {"norm": "layer", "norm_epsilon": 1e-5, "norm_bias": False})


def olmo_norms(config: ModelConfig) -> dict[str, Tensor]:
    """Weights of one."""
    names = [
        f"decoder.{number}.{part}_residual.norm.weight"
        for number in range(config.decoder_layers)
        for part in ("self", "feed_forward")
    ]
    return {name: torch.ones(config.d_model) for name in (*names, "decoder_norm.weight")}
