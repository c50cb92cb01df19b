"""Llama and its kin, with RMSNorm or LayerNorm: settings, windows, tensors; rotary positions."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from transferry.build_model.importing.huggingface.folder import Settings
from transferry.build_model.importing.huggingface.rope import RotaryKeys, read_rotary
from transferry.build_model.importing.huggingface.tables import (
    GATES,
    Move,
    Table,
    head_width,
    modules,
    sizes,
)
from transferry.build_model.model.config import ModelConfig
from transferry.build_model.model.shape import Activation

Shape = Callable[[Settings, set[str]], ModelConfig]
# Fields of all types; only some sizes of OPT are post-norm.
PRE_NORM: dict[str, Any] = dict(
    architecture="decoder-only", encoder_layers=0, norm_order="pre", scale_embedding=False
)
# Settings of biases: of all four matrices of attention, and of the feed-forward sublayer.
ATTENTION = {"query_key_value_bias": "attention_bias", "attention_output_bias": "attention_bias"}
ALL_BIASES = {**ATTENTION, "feed_forward_bias": "mlp_bias"}


def llama_fields(
    config: Settings,
    longest: int = 2048,
    *,
    flags: Mapping[str, str] = ATTENTION,
    epsilon: str = "",
    units: Mapping[str, Activation] = GATES,
    **own: Any,
) -> dict[str, Any]:
    """Fields that Llama and its kin share, except positions, and those in which a type differs.

    `longest` is max_position_embeddings by default, `flags` are settings that are off by default,
    by field, and `epsilon` is the setting of LayerNorm's, in place of RMSNorm's.
    """
    fields = sizes(config)
    d_model, heads = fields["d_model"], fields["heads"]
    width = config.whole("head_dim", head_width(fields))
    fields |= PRE_NORM | dict(
        head_width=0 if width * heads == d_model else width,
        decoder_layers=config.whole("num_hidden_layers"),
        max_positions=config.whole("max_position_embeddings", longest),
        norm_epsilon=config.number("rms_norm_eps", 1e-6),
        norm="rms",
        positions="rotary",
        activation=config.choice("hidden_act", units, "silu"),
        key_value_heads=config.whole("num_key_value_heads", heads),
        tied=config.flag("tie_word_embeddings", False),
        bias=False,
    )
    if epsilon:
        fields["norm_epsilon"] = config.number(epsilon, 1e-5)
    return fields | {ours: config.flag(name, False) for ours, name in flags.items()} | own


def rotary_fields(config: Settings, fields: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Returns the fields with those of rotary positions."""
    keys = RotaryKeys(**options)
    return fields | read_rotary(config, head_width(fields), fields["max_positions"], keys).fields


def llama_shape(
    config: Settings,
    names: set[str],
    *,
    rope: Mapping[str, Any] | None = None,
    window: int | None = None,
    **options: Any,
) -> ModelConfig:
    """A type of Llama's kin, by the arguments of `llama_fields` and the fields of RotaryKeys.

    `window` is the sliding_window of every layer by default; None for a type without.
    """
    fields = rotary_fields(config, llama_fields(config, **options), **(rope or {}))
    return ModelConfig(**fields, windows=() if window is None else windows(config, fields, window))


def windows(
    config: Settings,
    fields: dict[str, Any],
    default: int,
    sliding: list[bool] | None = None,
    *,
    always: bool = False,
) -> tuple[int, ...]:
    """Returns the window of each layer; `always` if layers with one differ in more than that."""
    window = config.whole("sliding_window", config.unless_null("sliding_window", default))
    slides = [True] * fields["decoder_layers"] if sliding is None else sliding
    # A text may lie within the window of all layers alike, where it has no effect.
    unseen = all(slides) and window >= fields["max_positions"] and not always
    if not any(slides) or not window or unseen:
        return ()
    return tuple(window if each else 0 for each in slides)


LLAMA: Table = {
    "embed_tokens.weight": "embedding.weight",
    "layers.#.input_layernorm.weight": "decoder.#.self_residual.norm.weight",
    **modules("layers.#.self_attn", "decoder.#", "q_proj k_proj v_proj o_proj"),
    "layers.#.self_attn.q_norm.weight": "decoder.#.self_attention.query_norm.weight",
    "layers.#.self_attn.k_norm.weight": "decoder.#.self_attention.key_norm.weight",
    "layers.#.post_attention_layernorm.weight": "decoder.#.feed_forward_residual.norm.weight",
    "layers.#.mlp.gate_proj.*": "decoder.#.feed_forward.gate.*",
    "layers.#.mlp.up_proj.*": "decoder.#.feed_forward.inner.*",
    "layers.#.mlp.down_proj.*": "decoder.#.feed_forward.outer.*",
    "norm.weight": "decoder_norm.weight",
    "lm_head.weight": "output.weight",
}


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


def plain_norms(config: ModelConfig) -> dict[str, Tensor]:
    """Norms without weights, of OLMo and of OPT, as those with weights of one."""
    names = [
        f"decoder.{number}.{sublayer}_residual.norm"
        for number in range(config.decoder_layers)
        for sublayer in ("self", "feed_forward")
    ]
    names += ["decoder_norm"] * config.has_final_norm
    made = {"weight": torch.ones, **({"bias": torch.zeros} if config.has_bias("norm") else {})}
    return {f"{name}.{part}": make(config.d_model) for part, make in made.items() for name in names}
