"""Encoder-only model types with rotary positions and gated feed-forward sublayers."""

from typing import Any

import torch
from torch import Tensor

from transferry.build_model.importing.huggingface.decoders.llama import LLAMA
from transferry.build_model.importing.huggingface.folder import Settings
from transferry.build_model.importing.huggingface.rope import (
    FIXED_NTK,
    SLIDING,
    Rotary,
    RotaryKeys,
    read_rotary,
    require_plain_scaling,
)
from transferry.build_model.importing.huggingface.tables import (
    ACTIVATIONS,
    GATES,
    Move,
    NoPlace,
    Table,
    head_width,
    layer_types,
    masked_fields,
    masked_head,
    parts,
    renamed,
    sizes,
)
from transferry.build_model.model.config import ModelConfig

# Several matrices in one, by their name.
QKV = parts(
    lambda config: [config.d_model] * 3,
    *(f"encoder.#.self_attention.{name}.*" for name in ("query", "key", "value")),
)
# A text is a single segment of type 0, whose vector is added to every token.
FIRST_TYPE = Move(
    ("segment_embedding.weight",), lambda tensor, config: (tensor[: config.segments],)
)


def modernbert_shape(config: Settings, names: set[str]) -> ModelConfig:
    """ModernBERT (Warner et al. 2024): pre-norm, gated, rotary, with windows."""
    head = "head.dense.weight" in names
    fields = sizes(config)
    layers, longest = config.whole("num_hidden_layers"), config.whole("max_position_embeddings")
    every = max(1, config.whole("global_attn_every_n_layers", 3))
    sliding = layer_types(config, layers, [each % every != 0 for each in range(layers)])
    window, d_head = config.whole("local_attention", 128) // 2 + 1, head_width(fields)
    require_plain_scaling(config)
    near = read_rotary(config, d_head, longest, RotaryKeys(base_key="local_rope_theta"), SLIDING)
    far = read_rotary(config, d_head, longest, RotaryKeys(160000.0, "global_rope_theta"))
    if near.scale != 1.0:
        config.refuse("rope_parameters", config.get("rope_parameters"), "no yarn in sliding layers")
    biases: dict[str, Any] = {
        ours: config.flag(theirs, False)
        for ours, theirs in {
            "query_key_value_bias": "attention_bias",
            "attention_output_bias": "attention_bias",
            "feed_forward_bias": "mlp_bias",
            "norm_bias": "norm_bias",
            "output_transform_bias": "classifier_bias",
        }.items()
    }
    own: dict[str, Any] = dict(
        encoder_layers=layers,
        norm_epsilon=config.number("norm_eps", 1e-5),
        norm_order="pre",
        first_norm=False,
        positions="rotary",
        activation=config.choice("hidden_activation", GATES, "gelu"),
        output_activation=config.choice("classifier_activation", ACTIVATIONS, "gelu"),
        bias=False,
        output_bias=head and config.flag("decoder_bias", True),
        windows=tuple(window if slides else 0 for slides in sliding) if any(sliding) else (),
        window_rotary_rates=near.rates if any(sliding) else (),
    )
    return ModelConfig(**masked_fields(config, head=head) | fields | own | biases | far.fields)


MODERN_POOLINGS: dict[str, dict[str, Any]] = {
    "cls": {"pooling": ("first",)},
    "mean": {"pooling": ("mean",)},
}
MODERNBERT: Table = {
    "embeddings.tok_embeddings.weight": "embedding.weight",
    "embeddings.norm.*": "embedding_norm.*",
    "layers.#.attn_norm.*": "encoder.#.self_residual.norm.*",
    "layers.#.attn.Wqkv.*": QKV,
    "layers.#.attn.Wo.*": "encoder.#.self_attention.output.*",
    "layers.#.mlp_norm.*": "encoder.#.feed_forward_residual.norm.*",
    "layers.#.mlp.Wi.*": parts(
        lambda config: [config.d_ff] * 2,
        *(f"encoder.#.feed_forward.{name}.*" for name in ("gate", "inner")),
    ),
    "layers.#.mlp.Wo.*": "encoder.#.feed_forward.outer.*",
    "final_norm.*": "encoder_norm.*",
    **masked_head("", "head.dense", "head.norm", "decoder"),
}

# --- NomicBERT, GTE, jina-embeddings-v3 -----------------------------------------------------------


def _post_norm_fields(
    config: Settings, rotary: Rotary, *, head: bool, kinds: int
) -> dict[str, Any]:
    """Fields of BERT with rotary positions; `kinds` is the number of segments by default."""
    return masked_fields(config, head=head) | dict(
        **sizes(config),
        **rotary.fields,
        encoder_layers=config.whole("num_hidden_layers"),
        norm_epsilon=config.number("layer_norm_eps", 1e-12),
        positions="rotary",
        segments=min(1, config.whole("type_vocab_size", kinds)),
    )


NOMIC_ONLY: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("prenorm", "parallel_block", "use_rms_norm", "causal"), (False,)),
    **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), (False,)),
    **dict.fromkeys(("rotary_emb_scale_base", "num_heads_kv"), (None,)),
    "rotary_emb_interleaved": (False,),
    "moe_every_n_layers": (0,),
    "rotary_emb_fraction": (1.0, 1),  # transformers turns all features
}


def nomic_shape(config: Settings, names: set[str]) -> ModelConfig:
    """NomicBERT (Nussbaum et al. 2024): post-norm, gated by SwiGLU, without biases.

    Published folders have the names of GPT-2's settings, and transformers those of BERT's.
    """
    renamed(config, n_embd="hidden_size", n_head="num_attention_heads", n_inner="intermediate_size")
    renamed(config, n_layer="num_hidden_layers", n_positions="max_position_embeddings")
    renamed(config, layer_norm_epsilon="layer_norm_eps", rope_theta="rotary_emb_base")
    units = {"swiglu": "silu", "geglu": "gelu"}
    if config.get("activation_function") is not None:
        config.values["hidden_act"] = config.choice("activation_function", units, "swiglu")
    longest = config.whole("max_position_embeddings", 2048)
    trained = config.whole("max_trained_positions", longest)
    if config.get("rotary_scaling_factor") is not None:
        # Beyond these, the rates depend on the length of a text.
        config.leave("rotary_scaling_factor", config.get("rotary_scaling_factor"))
        longest = min(longest, trained)
    shape = sizes(config)
    keys = RotaryKeys(1000.0, "rotary_emb_base")
    head = "cls.predictions.transform.dense.weight" in names
    rotary = read_rotary(config, head_width(shape), longest, keys)
    return ModelConfig(
        **_post_norm_fields(config, rotary, head=head, kinds=2),
        bias=False,
        norm_bias=True,
        output_transform_bias=True,
        activation=config.choice("hidden_act", GATES, "silu"),
    )


GTE_ONLY: dict[str, tuple[Any, ...]] = {
    "position_embedding_type": ("rope", "absolute"),
    "layer_norm_type": ("layer_norm",),
    **dict.fromkeys(("logn_attention_scale", "logn_attention_clip1"), (False,)),
}


def gte_shape(config: Settings, names: set[str]) -> ModelConfig:
    """GTE of model type gte and new (Zhang et al. 2024, mGTE): post-norm, gated by GELU."""
    published = config.get("model_type") == "new"
    keys = RotaryKeys(10000.0 if published else 160000.0, renamed={"ntk": FIXED_NTK})
    longest = config.whole("max_position_embeddings", 8192)
    rotary = read_rotary(config, head_width(sizes(config)), longest, keys)
    unit = config.choice("hidden_act", GATES, "gelu")
    head = "lm_head.dense.weight" in names
    if head and published:
        config.only("hidden_act", "gelu")  # of its head too, where transformers has GELU always
    return ModelConfig(
        **_post_norm_fields(config, rotary, head=head, kinds=1),
        activation=unit,
        output_activation="gelu",
    )


def gte_computes(config: ModelConfig) -> dict[str, Tensor]:
    """Zero biases of the feed-forward matrices that have none: gate and inner."""
    zeros = torch.zeros(config.d_ff)
    return {
        f"encoder.{layer}.feed_forward.{name}.bias": zeros
        for layer in range(config.encoder_layers)
        for name in ("gate", "inner")
    }


def jina_shape(config: Settings, names: set[str]) -> ModelConfig:
    """jina-embeddings-v3 (Sturua et al. 2024), without adapters: XLM-R with rotary positions."""
    longest = config.whole("max_position_embeddings", 8194)
    rotary = read_rotary(config, head_width(sizes(config)), longest, RotaryKeys(20000.0))
    return ModelConfig(
        **_post_norm_fields(config, rotary, head="lm_head.dense.weight" in names, kinds=1)
        | {"norm_epsilon": config.number("layer_norm_eps", 1e-5)},
        activation=config.choice("hidden_act", ACTIVATIONS, "gelu"),
        output_activation="gelu",
    )


# transformers has names of its own for these types, and writes those of the published files.
POST_NORM: Table = {
    "embeddings.word_embeddings.weight": "embedding.weight",
    "embeddings.token_type_embeddings.weight": FIRST_TYPE,
    "embeddings.LayerNorm.*": "embedding_norm.*",
    "emb_ln.*": "embedding_norm.*",
    **{
        f"{stack}.#.{theirs}.*": f"encoder.#.{ours}.*"
        for stack in ("layers", "encoder.layers", "encoder.layer")
        for ours, names in {
            "self_attention.query": "self_attn.q_proj",
            "self_attention.key": "self_attn.k_proj",
            "self_attention.value": "self_attn.v_proj",
            "self_attention.output": (
                "self_attn.o_proj attn.out_proj attention.o_proj mixer.out_proj"
            ),
            "self_residual.norm": "post_attention_layernorm norm1 attn_ln",
            "feed_forward_residual.norm": "post_mlp_layernorm norm2 mlp_ln",
            "feed_forward.inner": "mlp.up_proj mlp.fc11 mlp.fc1",
            "feed_forward.gate": "mlp.gate_proj mlp.fc12",
            "feed_forward.outer": "mlp.down_proj mlp.fc2",
        }.items()
        for theirs in names.split()
    },
    "encoder.layers.#.attn.Wqkv.*": QKV,
    "encoder.layers.#.mixer.Wqkv.*": QKV,
    "encoder.layer.#.attention.qkv_proj.*": QKV,
    "encoder.layer.#.mlp.up_gate_proj.*": parts(
        lambda config: [config.d_ff] * 2,
        *(f"encoder.#.feed_forward.{name}.*" for name in ("inner", "gate")),
    ),
    **masked_head("cls.predictions.", "transform.dense", "transform.layer_norm", "decoder"),
    **masked_head("lm_head.", "dense", "norm", "decoder"),
    "lm_head.layer_norm.*": "output_transform.norm.*",
    **dict.fromkeys(("cls.predictions.bias", "lm_head.bias"), "output_bias"),
    "pooler.dense.*": NoPlace("pooler"),
}

# --- EuroBERT ------------------------------------------------------------------------------------


def eurobert_shape(config: Settings, names: set[str]) -> ModelConfig:
    """EuroBERT (Boizard et al. 2025): Llama that reads both ways."""
    fields = sizes(config)
    tied = config.flag("tie_word_embeddings", False)
    # A tied head has no tensors.
    classes = str(config.get("architectures"))
    head = "lm_head.weight" in names or (tied and "EuroBertForMaskedLM" in classes)
    width = config.whole("head_dim", head_width(fields))
    rotary = read_rotary(config, width, config.whole("max_position_embeddings", 8192))
    bias = config.flag("mlp_bias", False)
    return ModelConfig(
        **fields,
        **rotary.fields,
        encoder_layers=config.whole("num_hidden_layers"),
        decoder_layers=0,
        head_width=0 if width == head_width(fields) else width,
        key_value_heads=config.whole("num_key_value_heads", fields["heads"]),
        norm_epsilon=config.number("rms_norm_eps", 1e-5),
        architecture="encoder-only",
        norm="rms",
        norm_order="pre",
        positions="rotary",
        activation=config.choice("hidden_act", GATES, "silu"),
        tied=tied or not head,
        bias=False,
        query_key_value_bias=config.flag("attention_bias", False),
        attention_output_bias=config.flag("attention_bias", False),
        feed_forward_bias=bias,
        scale_embedding=False,
        output_bias=head and bias,
        lm_head=head,
    )


# By classifier_pooling, the default first; late is the mean of the first layer's output.
EUROBERT_POOLINGS: dict[str, dict[str, Any]] = {
    "late": {"pooling": ("mean",), "late_pooling": True},
    "bos": {"pooling": ("first",)},
    "mean": {"pooling": ("mean",)},
}
EUROBERT: Table = {
    **{
        name: str(ours).replace("decoder", "encoder", 1)
        for name, ours in LLAMA.items()
        if "self_attn.q_norm" not in name and "self_attn.k_norm" not in name
    },
    "lm_head.bias": "output_bias",
}
