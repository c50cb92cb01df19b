"""Tensors of decoders with LayerNorm and rotary positions: Phi, StableLM, StarCoder 2, OLMo."""

from __future__ import annotations

import torch
from torch import Tensor

from transferry.build_model.importing.huggingface.decoders.llama import LLAMA
from transferry.build_model.importing.huggingface.tables import Move, Table
from transferry.build_model.model.config import ModelConfig

OLMO: Table = {name: ours for name, ours in LLAMA.items() if "norm" not in name}
# One norm before two sublayers side by side.
BOTH = Move(
    ("decoder.#.self_residual.norm.*", "decoder.#.feed_forward_residual.norm.*"),
    lambda tensor, config: (tensor, tensor),
)
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
STABLELM: Table = {
    **OLMO,
    # Side by side, both sublayers read the first norm.
    "layers.#.input_layernorm.*": Move(
        BOTH.ours, lambda tensor, config: (tensor,) * (2 if config.parallel else 1)
    ),
    "layers.#.post_attention_layernorm.*": "decoder.#.feed_forward_residual.norm.*",
    "norm.*": "decoder_norm.*",
}
STARCODER2: Table = {
    **STABLELM,
    "layers.#.input_layernorm.*": "decoder.#.self_residual.norm.*",
    "layers.#.mlp.c_fc.*": "decoder.#.feed_forward.inner.*",
    "layers.#.mlp.c_proj.*": "decoder.#.feed_forward.outer.*",
}


def olmo_norms(config: ModelConfig) -> dict[str, Tensor]:
    """Weights of one, of norms without weights."""
    return {name: torch.ones(config.d_model) for name in norms_of(config, "weight")}


def opt_norms(config: ModelConfig) -> dict[str, Tensor]:
    """Norms without weights (layer_norm_elementwise_affine) as those with weights of one."""
    made = {"weight": torch.ones, "bias": torch.zeros}
    return {
        name: make(config.d_model) for part, make in made.items() for name in norms_of(config, part)
    }


def norms_of(config: ModelConfig, part: str) -> list[str]:
    """Names of the weights or biases of a decoder's norms."""
    names = [
        f"decoder.{number}.{sublayer}_residual.norm"
        for number in range(config.decoder_layers)
        for sublayer in ("self", "feed_forward")
    ]
    return [f"{name}.{part}" for name in (*names, *["decoder_norm"] * config.has_final_norm)]
