"""Decoder-only model types of transformers."""

from functools import partial
from typing import Any

from transferry.build_model.importing.huggingface.decoders.llama import (
    ALL_BIASES,
    LLAMA,
    OLMO,
    PHI,
    PRE_NORM,
    STABLELM,
    STARCODER2,
    Shape,
    llama_fields,
    llama_shape,
    plain_norms,
    rotary_fields,
    windows,
)
from transferry.build_model.importing.huggingface.encoder_decoder import LAYERS
from transferry.build_model.importing.huggingface.folder import Settings
from transferry.build_model.importing.huggingface.heads import generating, scored
from transferry.build_model.importing.huggingface.rope import (
    FULL,
    SLIDING,
    RotaryKeys,
    read_rotary,
    require_plain_scaling,
)
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

# --- Shapes ---------------------------------------------------------------------------------------


def _gpt2_shape(config: Settings, names: set[str]) -> ModelConfig:
    """GPT-2 (Radford et al. 2019)."""
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


# Llama (Touvron et al. 2023), to 3.3.
_llama_shape = partial(llama_shape, flags=ALL_BIASES)
# Mistral (Jiang et al. 2023): Llama with or without a window in every layer.
_mistral_shape = partial(llama_shape, longest=4096 * 32, flags={}, window=4096)
# OLMo (Groeneveld et al. 2024): norms without weights.
_olmo_shape = partial(llama_shape, norm="layer", norm_epsilon=1e-5, norm_bias=False)
# OLMo 2 (OLMo Team 2024): norms after the sublayers, and of all queries and keys.
_olmo2_shape = partial(llama_shape, norm_order="res-post", query_key_norm="all")
# Gemma 1 (Gemma Team 2024); transformers takes gelu for its tanh form.
_gemma_shape = partial(
    llama_shape,
    longest=8192,
    units={**GATES, "gelu": GATES["gelu_pytorch_tanh"]},
    norm_offset=True,
    scale_embedding=True,
)
LAYER_NORM: dict[str, Any] = {"norm": "layer", "norm_bias": True}
# StableLM 2 (Bellagente et al. 2024).
_stablelm_shape = partial(
    llama_shape,
    longest=4096,
    flags={"query_key_value_bias": "use_qkv_bias", "parallel": "use_parallel_residual"},
    epsilon="layer_norm_eps",
    rope={"share": 0.25, "share_key": "partial_rotary_factor"},
    head_width=0,
    **LAYER_NORM,
)
# StarCoder 2 (Lozhkov et al. 2024).
_starcoder2_shape = partial(
    llama_shape,
    longest=4096,
    flags={"bias": "use_bias"},
    epsilon="norm_epsilon",
    units=ACTIVATIONS,
    window=0,
    **LAYER_NORM,
)


def _qwen_shape(config: Settings, names: set[str], **own: Any) -> ModelConfig:
    """Layers from max_window_layers on may have a window."""
    fields = rotary_fields(config, llama_fields(config, 32768, **own))
    first, layers = config.whole("max_window_layers", 28), fields["decoder_layers"]
    sliding = layer_types(config, layers, [each >= first for each in range(layers)])
    seen = windows(config, fields, 4096, sliding)
    return ModelConfig(**fields, windows=seen if config.flag("use_sliding_window", False) else ())


# Qwen 2 and 2.5 (Yang et al. 2024): biases of queries, keys and values.
_qwen2_shape = partial(_qwen_shape, flags={}, query_key_value_bias=True)
# Qwen 3 (Yang et al. 2025): norms of queries and keys.
_qwen3_shape = partial(_qwen_shape, query_key_norm="head")


def _phi3_shape(config: Settings, names: set[str]) -> ModelConfig:
    """Phi 3 (Abdin et al. 2024): Llama with matrices that hold several."""
    config.get("original_max_position_embeddings")  # of longrope alone
    # Both are older names of the same.
    rope = dict(renamed={"su": "longrope", "yarn": "longrope"}, share_key="partial_rotary_factor")
    return llama_shape(config, names, longest=4096, flags={}, rope=rope, window=0)


def _olmo3_shape(config: Settings, names: set[str]) -> ModelConfig:
    """OLMo 3 (OLMo Team 2025): OLMo 2 with windows, in which positions are not scaled."""
    fields = llama_fields(config, norm_order="res-post", query_key_norm="all")
    layers = fields["decoder_layers"]
    sliding = layer_types(config, layers, [(each + 1) % 4 != 0 for each in range(layers)])
    near = _near_rates(config, fields, 500_000.0, "rope_theta")
    fields = rotary_fields(config, fields, base=500_000.0)
    seen = windows(config, fields, 4096, sliding, always=True)
    return ModelConfig(**fields, windows=seen, window_rotary_rates=near if any(seen) else ())


def _near_rates(
    config: Settings, fields: dict[str, Any], base: float, base_key: str
) -> tuple[float, ...]:
    """Returns the rates of layers with a window, which rope_parameters lists apart."""
    require_plain_scaling(config)
    parameters = config.get("rope_parameters")
    nested = isinstance(parameters, dict) and isinstance(parameters.get(SLIDING), dict)
    if parameters and not nested:  # transformers ignores those
        config.refuse("rope_parameters", parameters, f"an object for {SLIDING} and one for {FULL}")
    own = config if nested else Settings(config.path, {})
    keys = RotaryKeys(config.number(base_key, base), base_key)
    near = read_rotary(own, head_width(fields), fields["max_positions"], keys, SLIDING)
    if near.scale != 1.0:
        config.refuse("rope_parameters", parameters, "no yarn in sliding layers")
    return near.rates


def _granite_shape(config: Settings, names: set[str]) -> ModelConfig:
    """Granite 3 (Granite Team 2024): Llama with multipliers."""
    multiplier = config.number("attention_multiplier", 1.0)
    if multiplier <= 0:
        config.refuse("attention_multiplier", multiplier, "a number above 0")
    return llama_shape(
        config,
        names,
        flags=ALL_BIASES,
        attention_divisor=1 / multiplier,
        embedding_multiplier=config.number("embedding_multiplier", 1.0),
        residual_multiplier=config.number("residual_multiplier", 1.0),
        logit_divisor=config.number("logits_scaling", 1.0),
    )


def _phi_shape(config: Settings, names: set[str]) -> ModelConfig:
    """Phi 1 to 2 (Gunasekar et al. 2023): sublayers side by side after one norm."""
    return llama_shape(
        config,
        names,
        flags={},
        epsilon="layer_norm_eps",
        units=ACTIVATIONS,
        rope=dict(share=0.5, share_key="partial_rotary_factor"),
        head_width=0,
        norm="layer",
        bias=True,
        output_bias=True,
        parallel=True,
        query_key_norm="head" if config.flag("qk_layernorm", False) else "none",
    )


def _smollm3_shape(config: Settings, names: set[str]) -> ModelConfig:
    """SmolLM 3 (Bakouch et al. 2025): every fourth layer does not turn queries and keys."""
    fields = llama_fields(config, 32768, flags=ALL_BIASES)
    fields = rotary_fields(config, fields, base=2_000_000.0)
    layers, every = fields["decoder_layers"], config.whole("no_rope_layer_interval", 4)
    turns = config.get("no_rope_layers", [(each + 1) % max(1, every) for each in range(layers)])
    if not isinstance(turns, list) or len(turns) != layers:
        config.refuse("no_rope_layers", turns, f"0 or 1 for each of {layers} layers")
    unrotated = tuple(number for number, turn in enumerate(turns) if not turn)
    slides = config.flag("use_sliding_window", False)  # only where layer_types is absent
    sliding = layer_types(config, layers, [slides and not turn for turn in turns])
    return ModelConfig(**fields, unrotated=unrotated, windows=windows(config, fields, 0, sliding))


def _gemma_fields(config: Settings, longest: int, every: int, **own: Any) -> dict[str, Any]:
    """Returns the common options of Gemma 2 and 3; the last layer of each group has no window."""
    activation = config.choice("hidden_activation", GATES, "gelu_pytorch_tanh")
    fields = llama_fields(config, longest, norm_order="sandwich", **own)
    fields["activation"] = activation  # hidden_act is of older files, and transformers ignores it
    layers = fields["decoder_layers"]
    sliding = layer_types(config, layers, [(each + 1) % every != 0 for each in range(layers)])
    return fields | dict(
        norm_offset=True,
        scale_embedding=True,
        attention_divisor=config.number("query_pre_attn_scalar", 256) ** 0.5,
        windows=windows(config, fields, 4096, sliding, always=True),
    )


def _softcap(config: Settings, name: str, default: float) -> float:
    return config.number(name, config.unless_null(name, default))


def _gemma2_shape(config: Settings, names: set[str]) -> ModelConfig:
    """Gemma 2 (Gemma Team 2024)."""
    fields = rotary_fields(config, _gemma_fields(config, 8192, 2))
    return ModelConfig(
        **fields,
        attention_softcap=_softcap(config, "attn_logit_softcapping", 50.0),
        output_softcap=_softcap(config, "final_logit_softcapping", 30.0),
    )


def _gemma3_shape(config: Settings, names: set[str]) -> ModelConfig:
    """Gemma 3 (Gemma Team 2025), its text model."""
    if generating(config):
        config.only("use_bidirectional_attention", False)
    every = config.whole("sliding_window_pattern", 6)
    fields = _gemma_fields(config, 131072, max(1, every), query_key_norm="head")
    near = _near_rates(config, fields, 10000.0, "rope_local_base_freq")
    fields = rotary_fields(config, fields, base=1_000_000.0)
    return ModelConfig(
        **fields,
        window_rotary_rates=near if any(fields["windows"]) else (),
        # transformers reads attn_logit_softcapping and does not use it.
        output_softcap=_softcap(config, "final_logit_softcapping", 0.0),
    )


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
        **rotary.fields,
    )


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


# --- Tensors --------------------------------------------------------------------------------------

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
GPT_NEOX: Table = {
    "embed_in.weight": "embedding.weight",
    "layers.#.input_layernorm.*": "decoder.#.self_residual.norm.*",
    "layers.#.post_attention_layernorm.*": "decoder.#.feed_forward_residual.norm.*",
    "layers.#.attention.query_key_value.*": heads_of_three("decoder.#", "*"),
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
OPT: Table = {
    "embed_tokens.weight": "embedding.weight",
    "embed_positions.weight": without_first(2, "positions"),
    "project_in.weight": "embedding_projection.weight",
    "project_out.*": "output_projection.*",
    **{
        theirs.removeprefix("decoder."): ours
        for theirs, ours in LAYERS.items()
        if theirs.startswith("decoder.") and "encoder_attn" not in theirs
    },
    "final_layer_norm.*": "decoder_norm.*",
    "lm_head.weight": "output.weight",
}


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


# --- Types ----------------------------------------------------------------------------------------

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
    ("phi", "Phi 1 to 2", "Phi", _phi_shape, PHI, "model."),
    ("stablelm", "StableLM 2", "StableLm", _stablelm_shape, STABLELM, "model."),
    ("starcoder2", "StarCoder 2", "Starcoder2", _starcoder2_shape, STARCODER2, "model."),
    ("gemma", "Gemma 1", "Gemma", _gemma_shape, LLAMA, "model."),
    ("gemma2", "Gemma 2", "Gemma2", _gemma2_shape, GEMMA, "model."),
    ("gemma3_text", "Gemma 3 (`gemma3` too)", "Gemma3 Gemma3Text", _gemma3_shape, GEMMA, "model."),
    ("olmo", "OLMo", "Olmo", _olmo_shape, OLMO, "model."),
    ("olmo3", "OLMo 3", "Olmo3", _olmo3_shape, OLMO2, "model."),
    ("olmo2", "OLMo 2", "Olmo2", _olmo2_shape, OLMO2, "model."),
    ("smollm3", "SmolLM 3", "SmolLM3", _smollm3_shape, LLAMA, "model."),
    ("gpt_neox", "GPT-NeoX, Pythia", "GPTNeoX", _gpt_neox_shape, GPT_NEOX, "gpt_neox."),
    ("opt", "OPT", "OPT", _opt_shape, OPT, "model.decoder. decoder."),
]
FURTHER: dict[str, dict[str, Any]] = {
    "opt": {"classifier": _opt_head, "computes": plain_norms},
    "olmo": {"computes": plain_norms},
}
_KV = "num_key_value_heads"
_GEMMA = {"tie_word_embeddings": True, "head_dim": 256, _KV: 4}
DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {_KV: 8},
    "qwen3": {"head_dim": 128},
    "phi3": {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    "phi": {"hidden_act": "gelu_new"},
    "starcoder2": {
        "use_bias": True,
        "tie_word_embeddings": True,
        "hidden_act": "gelu_pytorch_tanh",
        _KV: 2,
    },
    "gemma": {**_GEMMA, _KV: 16, "hidden_act": "gelu_pytorch_tanh"},
    "gemma2": _GEMMA,
    "gemma3_text": {**_GEMMA, "vocab_size": 262_208, "num_attention_heads": 8},
    "olmo3": {"rms_norm_eps": 1e-5},
    "olmo2": {"rms_norm_eps": 1e-5},
    "smollm3": {"tie_word_embeddings": True, _KV: 4},
}
ONLY: dict[str, dict[str, tuple[Any, ...]]] = {
    "gpt2": {"add_cross_attention": (False,)},
    "mistral": {"layer_types": (None,)},
    "stablelm": {"qk_layernorm": (False,)},
    **{kind: {"use_bidirectional_attention": (False,)} for kind in ("gemma", "gemma2")},
    "olmo": {"clip_qkv": (None,)},
    # transformers 5 gives another base outside of rope_parameters to a part of the layers.
    "olmo3": {"rope_theta": (500_000.0, 500_000)},
}
FAMILIES = {
    kind: Family(
        *(models, shape, table, (*prefixes.split(), "transformer.")),
        **{"classifier": scored, **FURTHER.get(kind, {})},
        stems=stems,
        defaults=DEFAULTS.get(kind, {}),
        only=ONLY.get(kind, {}),
    )
    for kind, models, stems, shape, table, prefixes in TYPES
}
