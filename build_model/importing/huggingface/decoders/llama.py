"""Parts of the rows of decoder-only types: fields and tensors of Llama and its kin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transferry.build_model.importing.huggingface.folder import Settings
from transferry.build_model.importing.huggingface.rope import RotaryKeys, read_rotary
from transferry.build_model.importing.huggingface.tables import GATES, Table, head_width, sizes
from transferry.build_model.model.config import ModelConfig

Shape = Callable[[Settings, set[str]], ModelConfig]
# Fields of all types; only some sizes of OPT are post-norm.
PRE_NORM: dict[str, Any] = dict(
    architecture="decoder-only", encoder_layers=0, norm_order="pre", scale_embedding=False
)


def llama_fields(config: Settings, longest: int = 2048) -> dict[str, Any]:
    """Fields that Llama and its kin share, except positions and biases."""
    fields = sizes(config)
    d_model, heads = fields["d_model"], fields["heads"]
    width = config.whole("head_dim", head_width(fields))
    return PRE_NORM | dict(
        fields,
        head_width=0 if width * heads == d_model else width,
        decoder_layers=config.whole("num_hidden_layers"),
        max_positions=config.whole("max_position_embeddings", longest),
        norm_epsilon=config.number("rms_norm_eps", 1e-6),
        norm="rms",
        positions="rotary",
        activation=config.choice("hidden_act", GATES, "silu"),
        key_value_heads=config.whole("num_key_value_heads", heads),
        tied=config.flag("tie_word_embeddings", False),
        bias=False,
    )


def rotary_fields(config: Settings, fields: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Returns the fields with those of rotary positions."""
    keys = RotaryKeys(**options)
    rotary = read_rotary(config, head_width(fields), fields["max_positions"], keys)
    return fields | rotary.fields()


def attention_biases(config: Settings) -> dict[str, bool]:
    """Biases of all four matrices of attention, or of no one."""
    bias = config.flag("attention_bias", False)
    return {"query_key_value_bias": bias, "attention_output_bias": bias}


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
    "layers.#.self_attn.q_proj.*": "decoder.#.self_attention.query.*",
    "layers.#.self_attn.k_proj.*": "decoder.#.self_attention.key.*",
    "layers.#.self_attn.v_proj.*": "decoder.#.self_attention.value.*",
    "layers.#.self_attn.o_proj.*": "decoder.#.self_attention.output.*",
    "layers.#.self_attn.q_norm.weight": "decoder.#.self_attention.query_norm.weight",
    "layers.#.self_attn.k_norm.weight": "decoder.#.self_attention.key_norm.weight",
    "layers.#.post_attention_layernorm.weight": "decoder.#.feed_forward_residual.norm.weight",
    "layers.#.mlp.gate_proj.*": "decoder.#.feed_forward.gate.*",
    "layers.#.mlp.up_proj.*": "decoder.#.feed_forward.inner.*",
    "layers.#.mlp.down_proj.*": "decoder.#.feed_forward.outer.*",
    "norm.weight": "decoder_norm.weight",
    "lm_head.weight": "output.weight",
}
