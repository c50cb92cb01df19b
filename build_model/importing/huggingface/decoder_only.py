"""Decoder-only model types of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from transferry.build_model.importing.huggingface.decoders.layer_norm import (
    OLMO,
    PHI,
    STABLELM,
    STARCODER2,
    olmo_norms,
    olmo_shape,
    phi_shape,
    stablelm_shape,
    starcoder2_shape,
)
from transferry.build_model.importing.huggingface.decoders.llama import (
    LLAMA,
    PRE_NORM,
    Shape,
    attention_biases,
    llama_fields,
    rotary_fields,
    windows,
)
from transferry.build_model.importing.huggingface.folder import Settings
from transferry.build_model.importing.huggingface.heads import generating, scored
from transferry.build_model.importing.huggingface.rope import FULL, SLIDING, RotaryKeys, read_rotary
from transferry.build_model.importing.huggingface.tables import (
    ACTIVATIONS,
    BUFFER,
    GATES,
    Classifier,
    Family,
    Table,
    conv1d,
    head_width,
    heads_of_three,
    layer_types,
    parts,
    renamed,
    sizes,
    without_first,
)
from transferry.build_model.model.config import ModelConfig


def _gpt2_shape(config: Settings, names: set[str]) -> ModelConfig:
    """GPT-2 (Radford et al. 2019)."""
    config.only("add_cross_attention", False)
    renamed(
        config,
        hidden_size="n_embd",
        max_position_embeddings="n_positions",
        num_attention_heads="n_head",
        num_hidden_layers="n_layer",
    )
    d_model = config.whole("n_embd")
    return ModelConfig(
        **PRE_NORM,
        vocabulary_size=config.whole("vocab_size"),
        d_model=d_model,
        heads=config.whole("n_head"),
        decoder_layers=config.whole("n_layer"),
        d_ff=config.whole("n_inner", 4 * d_model),
        max_positions=config.whole("n_positions"),
        norm_epsilon=config.number("layer_norm_epsilon", 1e-5),
        positions="learned",
        activation=config.choice("activation_function", ACTIVATIONS, "gelu_new"),
        tied=config.flag("tie_word_embeddings", True),
        attention_divisor=0.0 if config.flag("scale_attn_weights", True) else 1.0,
        divide_by_layer=config.flag("scale_attn_by_inverse_layer_idx", False),
    )


GPT2: Table = {
    "wte.weight": "embedding.weight",
    "wpe.weight": "positions",
    "h.#.ln_1.*": "decoder.#.self_residual.norm.*",
    "h.#.attn.c_attn.*": conv1d(
        "decoder.#.self_attention.query.*",
        "decoder.#.self_attention.key.*",
        "decoder.#.self_attention.value.*",
    ),
    "h.#.attn.c_proj.*": conv1d("decoder.#.self_attention.output.*"),
    "h.#.ln_2.*": "decoder.#.feed_forward_residual.norm.*",
    "h.#.mlp.c_fc.*": conv1d("decoder.#.feed_forward.inner.*"),
    "h.#.mlp.c_proj.*": conv1d("decoder.#.feed_forward.outer.*"),
    "ln_f.*": "decoder_norm.*",
    "lm_head.weight": "output.weight",
    # Causal mask, saved by older versions of transformers.
    "h.#.attn.bias": BUFFER,
    "h.#.attn.masked_bias": BUFFER,
}


# --- Llama and its kin ----------------------------------------------------------------------------


def _llama_shape(config: Settings, names: set[str]) -> ModelConfig:
    """Llama (Touvron et al. 2023), to 3.3."""
    fields = rotary_fields(config, llama_fields(config))
    return ModelConfig(
        **fields | attention_biases(config), feed_forward_bias=config.flag("mlp_bias", False)
    )


def _mistral_shape(config: Settings, names: set[str]) -> ModelConfig:
    """Mistral (Jiang et al. 2023): Llama with or without a window in every layer."""
    config.only("layer_types", None)
    config.values.setdefault("num_key_value_heads", 8)
    fields = rotary_fields(config, llama_fields(config, 4096 * 32))
    return ModelConfig(**fields, windows=windows(config, fields, 4096))


def _qwen2_fields(config: Settings) -> dict[str, Any]:
    fields = rotary_fields(config, llama_fields(config, 32768))
    first, layers = config.whole("max_window_layers", 28), fields["decoder_layers"]
    sliding = layer_types(config, layers, [each >= first for each in range(layers)])
    if not config.flag("use_sliding_window", False):
        config.get("sliding_window")
        return fields
    return fields | {"windows": windows(config, fields, 4096, sliding)}


def _qwen2_shape(config: Settings, names: set[str]) -> ModelConfig:
    """Qwen 2 and 2.5 (Yang et al. 2024): biases of queries, keys and values."""
    return ModelConfig(**_qwen2_fields(config), query_key_value_bias=True)


def _qwen3_shape(config: Settings, names: set[str]) -> ModelConfig:
    """Qwen 3 (Yang et al. 2025): norms of queries and keys."""
    config.values.setdefault("head_dim", 128)
    fields = _qwen2_fields(config) | attention_biases(config)
    return ModelConfig(**fields, query_key_norm="head")


def _phi3_shape(config: Settings, names: set[str]) -> ModelConfig:
    """Phi 3 (Abdin et al. 2024): Llama with matrices that hold several."""
    config.only("head_dim", None)
    # Both are older names of the same.
    renamed = {"su": "longrope", "yarn": "longrope"}
    for name, value in (("rms_norm_eps", 1e-5), ("original_max_position_embeddings", 4096)):
        config.values.setdefault(name, value)
    fields = llama_fields(config, 4096)
    fields = rotary_fields(config, fields, share_key="partial_rotary_factor", renamed=renamed)
    config.get("original_max_position_embeddings")
    return ModelConfig(**fields, windows=windows(config, fields, 0))


def _olmo2_shape(config: Settings, names: set[str]) -> ModelConfig:
    """OLMo 2 (OLMo Team 2024): norms after the sublayers, and of all queries and keys."""
    fields = rotary_fields(config, llama_fields(config)) | {"norm_order": "res-post"}
    fields |= {"norm_epsilon": config.number("rms_norm_eps", 1e-5)} | attention_biases(config)
    return ModelConfig(**fields, query_key_norm="all")


def _olmo3_shape(config: Settings, names: set[str]) -> ModelConfig:
    """OLMo 3 (OLMo Team 2025): OLMo 2 with windows, in which positions are not scaled."""
    fields = llama_fields(config) | {"norm_order": "res-post"} | attention_biases(config)
    fields |= {"norm_epsilon": config.number("rms_norm_eps", 1e-5)}
    layers = fields["decoder_layers"]
    sliding = layer_types(config, layers, [(each + 1) % 4 != 0 for each in range(layers)])
    near, base = _near(config, fields, RotaryKeys(500_000.0))
    fields = rotary_fields(config, fields, base=base)
    seen = windows(config, fields, 4096, sliding, always=True)
    rates = near if any(seen) else ()
    return ModelConfig(**fields, query_key_norm="all", windows=seen, window_rotary_rates=rates)


def _near(
    config: Settings, fields: dict[str, Any], keys: RotaryKeys
) -> tuple[tuple[float, ...], float]:
    """Returns the rates of OLMo 3's layers with a window, and the base of the others."""
    parameters = config.get("rope_parameters")
    nested = isinstance(parameters, dict) and isinstance(parameters.get(SLIDING), dict)
    if parameters and not nested:
        config.refuse("rope_parameters", parameters, f"an object for {SLIDING} and one for {FULL}")
    base = config.number("rope_theta", keys.base)
    own = config if nested else Settings(config.path, {"rope_theta": base})
    near = read_rotary(own, head_width(fields), fields["max_positions"], keys, SLIDING)
    if near.scale != 1.0:
        config.refuse("rope_parameters", parameters, "no yarn in sliding layers")
    return near.rates, base


def _granite_shape(config: Settings, names: set[str]) -> ModelConfig:
    """Granite 3 (Granite Team 2024): Llama with multipliers."""
    fields = rotary_fields(config, llama_fields(config)) | attention_biases(config)
    multiplier = config.number("attention_multiplier", 1.0)
    if multiplier <= 0:
        config.refuse("attention_multiplier", multiplier, "a number above 0")
    return ModelConfig(
        **fields,
        feed_forward_bias=config.flag("mlp_bias", False),
        attention_divisor=1 / multiplier,
        embedding_multiplier=config.number("embedding_multiplier", 1.0),
        residual_multiplier=config.number("residual_multiplier", 1.0),
        logit_divisor=config.number("logits_scaling", 1.0),
    )


def _gemma_shape(config: Settings, names: set[str]) -> ModelConfig:
    """Gemma 1 (Gemma Team 2024)."""
    config.only("use_bidirectional_attention", False)
    # transformers takes the first for the second.
    activations = {**GATES, "gelu": GATES["gelu_pytorch_tanh"]}
    activation = config.choice("hidden_act", activations, "gelu_pytorch_tanh")
    config.get("hidden_activation")
    for name, value in (("head_dim", 256), ("num_key_value_heads", 16)):
        config.values.setdefault(name, value)
    config.values.setdefault("tie_word_embeddings", True)
    config.values["hidden_act"] = "silu"  # of `llama_fields`, which reads no other names
    fields = rotary_fields(config, llama_fields(config, 8192)) | attention_biases(config)
    fields |= {"activation": activation, "norm_offset": True, "scale_embedding": True}
    return ModelConfig(**fields)


def _smollm3_shape(config: Settings, names: set[str]) -> ModelConfig:
    """SmolLM 3 (Bakouch et al. 2025): every fourth layer does not turn queries and keys."""
    config.values.setdefault("num_key_value_heads", 4)
    fields = llama_fields(config, 32768)
    fields = rotary_fields(config, fields, base=2_000_000.0)
    layers, every = fields["decoder_layers"], config.whole("no_rope_layer_interval", 4)
    turns = config.get("no_rope_layers", [(each + 1) % max(1, every) for each in range(layers)])
    if not isinstance(turns, list) or len(turns) != layers:
        config.refuse("no_rope_layers", turns, f"0 or 1 for each of {layers} layers")
    unrotated = tuple(number for number, turn in enumerate(turns) if not turn)
    slides = config.flag("use_sliding_window", False)  # only where layer_types is absent
    sliding = layer_types(config, layers, [slides and not turn for turn in turns])
    seen = windows(config, fields, 0, sliding)
    return ModelConfig(
        **fields | attention_biases(config) | {"tied": config.flag("tie_word_embeddings", True)},
        feed_forward_bias=config.flag("mlp_bias", False),
        unrotated=unrotated,
        windows=seen,
    )


def _gemma_fields(config: Settings, longest: int, every: int) -> dict[str, Any]:
    """Returns the common options of Gemma 2 and 3; the last layer of each group has no window."""
    if generating(config) or config.get("model_type") == "gemma2":
        config.only("use_bidirectional_attention", False)
    activation = config.choice("hidden_activation", GATES, "gelu_pytorch_tanh")
    config.get("hidden_act")  # of older files, and not followed by transformers
    for name, value in (("head_dim", 256), ("num_key_value_heads", 4)):
        config.values.setdefault(name, value)
    config.values.setdefault("tie_word_embeddings", True)
    fields = llama_fields(config, longest) | attention_biases(config)
    layers = fields["decoder_layers"]
    sliding = layer_types(config, layers, [(each + 1) % every != 0 for each in range(layers)])
    return fields | dict(
        activation=activation,
        norm_order="sandwich",
        norm_offset=True,
        scale_embedding=True,
        attention_divisor=config.number("query_pre_attn_scalar", 256) ** 0.5,
        windows=windows(config, fields, 4096, sliding, always=True),
    )


def _gemma2_shape(config: Settings, names: set[str]) -> ModelConfig:
    """Gemma 2 (Gemma Team 2024)."""
    fields = rotary_fields(config, _gemma_fields(config, 8192, 2))
    return ModelConfig(
        **fields,
        attention_softcap=_softcap(config, "attn_logit_softcapping", 50.0),
        output_softcap=_softcap(config, "final_logit_softcapping", 30.0),
    )


def _softcap(config: Settings, name: str, default: float) -> float:
    return config.number(name, config.unless_null(name, default))


def _gemma3_shape(config: Settings, names: set[str]) -> ModelConfig:
    """Gemma 3 (Gemma Team 2025), its text model."""
    for name, value in (("vocab_size", 262_208), ("num_attention_heads", 8)):
        config.values.setdefault(name, value)
    every = config.whole("sliding_window_pattern", 6)
    fields = _gemma_fields(config, 131072, max(1, every))
    d_head, longest = head_width(fields), fields["max_positions"]
    parameters = config.get("rope_parameters")
    nested = isinstance(parameters, dict) and isinstance(parameters.get(SLIDING), dict)
    if parameters and not nested:  # transformers ignores those
        config.refuse("rope_parameters", parameters, f"an object for {SLIDING} and one for {FULL}")
    own = config if nested else Settings(config.path, {})
    local_base = "rope_local_base_freq"
    keys = RotaryKeys(config.number(local_base, 10000.0), local_base)
    local = read_rotary(own, d_head, longest, keys, SLIDING)
    if local.scale != 1.0:
        config.refuse("rope_parameters", config.get("rope_parameters"), "no yarn in sliding layers")
    fields = rotary_fields(config, fields, base=1_000_000.0)
    return ModelConfig(
        **fields,
        query_key_norm="head",
        window_rotary_rates=local.rates if any(fields["windows"]) else (),
        # transformers reads attn_logit_softcapping and does not use it.
        output_softcap=_softcap(config, "final_logit_softcapping", 0.0),
    )


PHI3: Table = {
    **LLAMA,
    "layers.#.self_attn.qkv_proj.weight": parts(
        lambda config: [config.heads * config.d_head, *[config.kv_heads * config.d_head] * 2],
        *(f"decoder.#.self_attention.{name}.weight" for name in ("query", "key", "value")),
    ),
    "layers.#.mlp.gate_up_proj.weight": parts(
        lambda config: [config.d_ff] * 2,
        *(f"decoder.#.feed_forward.{name}.weight" for name in ("gate", "inner")),
    ),
}

OLMO2: Table = {
    **LLAMA,
    "layers.#.post_attention_layernorm.weight": "decoder.#.self_residual.norm.weight",
    "layers.#.post_feedforward_layernorm.weight": "decoder.#.feed_forward_residual.norm.weight",
}

GEMMA: Table = {
    **LLAMA,
    "layers.#.post_attention_layernorm.weight": "decoder.#.self_residual.outer_norm.weight",
    "layers.#.pre_feedforward_layernorm.weight": "decoder.#.feed_forward_residual.norm.weight",
    "layers.#.post_feedforward_layernorm.weight": (
        "decoder.#.feed_forward_residual.outer_norm.weight"
    ),
}

# --- GPT-NeoX and OPT -----------------------------------------------------------------------------


def _gpt_neox_shape(config: Settings, names: set[str]) -> ModelConfig:
    """GPT-NeoX (Black et al. 2022), so Pythia."""
    fields = sizes(config)
    longest = config.whole("max_position_embeddings", 2048)
    keys = RotaryKeys(base_key="rotary_emb_base", share=0.25, share_key="rotary_pct")
    rotary = read_rotary(config, head_width(fields), longest, keys)
    bias = config.flag("attention_bias", True)
    return ModelConfig(
        **PRE_NORM,
        **fields,
        decoder_layers=config.whole("num_hidden_layers"),
        norm_epsilon=config.number("layer_norm_eps", 1e-5),
        positions="rotary",
        activation=config.choice("hidden_act", ACTIVATIONS, "gelu"),
        tied=config.flag("tie_word_embeddings", False),
        parallel=config.flag("use_parallel_residual", True),
        query_key_value_bias=bias,
        attention_output_bias=bias,
        **rotary.fields(),
    )


GPT_NEOX: Table = {
    "embed_in.weight": "embedding.weight",
    "layers.#.input_layernorm.*": "decoder.#.self_residual.norm.*",
    "layers.#.post_attention_layernorm.*": "decoder.#.feed_forward_residual.norm.*",
    "layers.#.attention.query_key_value.*": heads_of_three(
        *(f"decoder.#.self_attention.{name}.*" for name in ("query", "key", "value"))
    ),
    "layers.#.attention.dense.*": "decoder.#.self_attention.output.*",
    "layers.#.mlp.dense_h_to_4h.*": "decoder.#.feed_forward.inner.*",
    "layers.#.mlp.dense_4h_to_h.*": "decoder.#.feed_forward.outer.*",
    "final_layer_norm.*": "decoder_norm.*",
    "embed_out.weight": "output.weight",
    "lm_head.weight": "output.weight",
    # Masks, saved by older versions of transformers.
    "layers.#.attention.bias": BUFFER,
    "layers.#.attention.masked_bias": BUFFER,
}


def _opt_shape(config: Settings, names: set[str]) -> ModelConfig:
    """OPT (Zhang et al. 2022)."""
    fields = PRE_NORM | sizes(config, d_ff="ffn_dim")
    width = config.whole("word_embed_proj_dim", fields["d_model"])
    if not config.flag("do_layer_norm_before", True):
        fields["norm_order"] = "post"
    return ModelConfig(
        **fields,
        decoder_layers=config.whole("num_hidden_layers"),
        max_positions=config.whole("max_position_embeddings", 2048),
        final_norm=not config.flag("_remove_final_layer_norm", False),
        positions="learned",
        activation=config.choice("activation_function", ACTIVATIONS, "relu"),
        tied=config.flag("tie_word_embeddings", True),
        bias=config.flag("enable_bias", True),
        norm_bias=True,
        embedding_width=0 if width == fields["d_model"] else width,
    )


def _opt_norms(config: ModelConfig) -> dict[str, Tensor]:
    """Norms without weights (layer_norm_elementwise_affine) as those with weights of one."""
    names = [
        f"decoder.{number}.{part}_residual.norm"
        for number in range(config.decoder_layers)
        for part in ("self", "feed_forward")
    ]
    names += ["decoder_norm"] if config.norm_order == "pre" and config.final_norm else []
    made = {"weight": torch.ones, "bias": torch.zeros}
    return {f"{name}.{part}": make(config.d_model) for name in names for part, make in made.items()}


def _opt_head(config: Settings) -> Classifier | None:
    """Head of OPT, which reads hidden states that were made as narrow as the embedding."""
    found, width = scored(config), config.whole("word_embed_proj_dim", 0)
    if found is None or width in (0, config.whole("hidden_size")):
        return found
    first = {"head_widths": width, "head_activations": "none", "head_biases": False}
    fields = {**found.fields, **{name: (each, *found.fields[name]) for name, each in first.items()}}
    table = dict.fromkeys(found.table, "head.layers.1.linear.*")
    table["project_out.*"] = "head.layers.0.linear.*"
    return Classifier(fields, table, found.settings)


OPT: Table = {
    "embed_tokens.weight": "embedding.weight",
    "embed_positions.weight": without_first(2, "positions"),
    "project_in.weight": "embedding_projection.weight",
    "project_out.*": "output_projection.*",
    "layers.#.self_attn.q_proj.*": "decoder.#.self_attention.query.*",
    "layers.#.self_attn.k_proj.*": "decoder.#.self_attention.key.*",
    "layers.#.self_attn.v_proj.*": "decoder.#.self_attention.value.*",
    "layers.#.self_attn.out_proj.*": "decoder.#.self_attention.output.*",
    "layers.#.self_attn_layer_norm.*": "decoder.#.self_residual.norm.*",
    "layers.#.fc1.*": "decoder.#.feed_forward.inner.*",
    "layers.#.fc2.*": "decoder.#.feed_forward.outer.*",
    "layers.#.final_layer_norm.*": "decoder.#.feed_forward_residual.norm.*",
    "final_layer_norm.*": "decoder_norm.*",
    "lm_head.weight": "output.weight",
}

# Type, models, beginnings of its classes, shape, table and prefixes of the tensors' names, without
# that of question answering.
TYPES: list[tuple[str, str, str, Shape, Table, str]] = [
    ("gpt2", "GPT-2, DistilGPT-2", "GPT2", _gpt2_shape, GPT2, "transformer."),
    ("llama", "Llama 1 to 3.3, SmolLM 2, TinyLlama", "Llama", _llama_shape, LLAMA, "model."),
    ("mistral", "Mistral 7B, Small 3 (`mistral3`)", "Mistral", _mistral_shape, LLAMA, "model."),
    ("qwen2", "Qwen 2, 2.5", "Qwen2", _qwen2_shape, LLAMA, "model."),
    ("qwen3", "Qwen 3, dense", "Qwen3", _qwen3_shape, LLAMA, "model."),
    ("phi3", "Phi 3, Phi 4", "Phi3", _phi3_shape, PHI3, "model."),
    ("granite", "Granite 3", "Granite", _granite_shape, LLAMA, "model."),
    ("phi", "Phi 1 to 2", "Phi", phi_shape, PHI, "model."),
    ("stablelm", "StableLM 2", "StableLm", stablelm_shape, STABLELM, "model."),
    ("starcoder2", "StarCoder 2", "Starcoder2", starcoder2_shape, STARCODER2, "model."),
    ("gemma", "Gemma 1", "Gemma", _gemma_shape, LLAMA, "model."),
    ("gemma2", "Gemma 2", "Gemma2", _gemma2_shape, GEMMA, "model."),
    ("gemma3_text", "Gemma 3 (`gemma3` too)", "Gemma3 Gemma3Text", _gemma3_shape, GEMMA, "model."),
    ("olmo", "OLMo", "Olmo", olmo_shape, OLMO, "model."),
    ("olmo3", "OLMo 3", "Olmo3", _olmo3_shape, OLMO2, "model."),
    ("olmo2", "OLMo 2", "Olmo2", _olmo2_shape, OLMO2, "model."),
    ("smollm3", "SmolLM 3", "SmolLM3", _smollm3_shape, LLAMA, "model."),
    ("gpt_neox", "GPT-NeoX, Pythia", "GPTNeoX", _gpt_neox_shape, GPT_NEOX, "gpt_neox."),
    ("opt", "OPT", "OPT", _opt_shape, OPT, "model.decoder. decoder."),
]
COMPUTED = {"opt": _opt_norms, "olmo": olmo_norms}
FAMILIES = {
    kind: Family(
        *(models, shape, table, (*prefixes.split(), "transformer.")),
        classifier=_opt_head if kind == "opt" else scored,
        stems=stems,
        computes=COMPUTED.get(kind, lambda config: {}),
    )
    for kind, models, stems, shape, table, prefixes in TYPES
}
