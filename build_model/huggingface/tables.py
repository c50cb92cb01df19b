"""Conversion tables: each model type's settings as ModelConfig, and its tensors as ours.

In a table "#" stands for a layer's number and "*" for weight or bias. A value is the name of our
tensor, a `Move` if the tensor changes, or `NoPlace` if our model has no such tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transferry.build_model.config import ModelConfig
from transferry.build_model.huggingface.folder import Settings


@dataclass(frozen=True)
class Move:
    """A tensor that changes in the conversion.

    Attributes:
        ours: Names of our tensors, in order.
        change: Converts their tensor to ours.
        adds: If the result is added to another tensor's: what it is, for the report.
    """

    ours: tuple[str, ...]
    change: Callable[[Tensor], tuple[Tensor, ...]] = lambda tensor: (tensor,)
    adds: str = ""


@dataclass(frozen=True)
class NoPlace:
    """A tensor that our model does not have.

    Attributes:
        what: What it belongs to, for the report; empty for constants.
    """

    what: str = ""


Table = Mapping[str, str | Move | NoPlace]


@dataclass(frozen=True)
class Family:
    """A model type.

    Attributes:
        shape: Makes the ModelConfig from config.json and the names of all tensors.
        table: Our tensors by theirs.
        prefix: Prefix of the names in a model with a head.
        computes: Tensors that a formula gives if the file lacks them.
    """

    shape: Callable[[Settings, set[str]], ModelConfig]
    table: Table
    prefix: str
    computes: Callable[[ModelConfig], dict[str, Tensor]] = field(default=lambda config: {})


def conv1d(*ours: str) -> Move:
    """Weight of GPT-2's Conv1D, `[in, out]`; may concatenate several matrices."""
    return Move(ours, lambda tensor: tensor.t().tensor_split(len(ours)))


def first_row_into(ours: str, what: str) -> Move:
    """Adds the first row to every row of our tensor."""
    return Move((ours,), lambda tensor: (tensor[:1],), f"{what} (the first is in the {ours})")


def flat(ours: str) -> Move:
    """`[1, n]` to `[n]`."""
    return Move((ours,), lambda tensor: (tensor.flatten(),))


BUFFER = NoPlace()

ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu-tanh",
    "gelu_pytorch_tanh": "gelu-tanh",
    "silu": "swish",
    "swish": "swish",
}


def _marian_shape(config: Settings, names: set[str]) -> ModelConfig:
    """MarianMT (Junczys-Dowmunt et al. 2018): the paper's Transformer with another activation."""
    config.only("share_encoder_decoder_embeddings", True)
    config.only("tie_word_embeddings", True)
    # Marian supports these, transformers' MarianMTModel does not.
    for name in ("normalize_before", "normalize_embedding", "add_final_layer_norm"):
        config.only(name, False)
    config.only("static_position_embeddings", True)
    for name in ("attention_heads", "ffn_dim"):
        config.only(f"decoder_{name}", config.whole(f"encoder_{name}"))
    vocabulary_size = config.whole("vocab_size")
    config.only("decoder_vocab_size", vocabulary_size)
    return ModelConfig(
        vocabulary_size=vocabulary_size,
        d_model=config.whole("d_model"),
        heads=config.whole("encoder_attention_heads"),
        encoder_layers=config.whole("encoder_layers"),
        decoder_layers=config.whole("decoder_layers"),
        d_ff=config.whole("encoder_ffn_dim"),
        max_positions=config.whole("max_position_embeddings", 1024),
        # Marian's sinusoids have all sines before all cosines, and transformers keeps them as
        # float32 numbers whatever the model computes in. A table holds exactly these numbers, our
        # formula would give others.
        positions="learned",
        activation=config.choice("activation_function", ACTIVATIONS, "gelu"),  # type: ignore[arg-type]
        scale_embedding=config.flag("scale_embedding", False),
        output_bias=True,
    )


def marian_positions(config: ModelConfig) -> dict[str, Tensor]:
    """Table of transformers' MarianSinusoidalPositionalEmbedding: float64, rounded to float32."""
    width = config.d_model
    rates = np.power(10000, 2 * (np.arange(width) // 2) / width)
    angles = np.arange(config.max_positions)[:, None] / rates
    table = np.concatenate([np.sin(angles[:, 0::2]), np.cos(angles[:, 1::2])], axis=1)
    return {"positions": torch.from_numpy(table.astype(np.float32))}


MARIAN: Table = {
    "shared.weight": "embedding.weight",
    "encoder.embed_tokens.weight": "embedding.weight",
    "decoder.embed_tokens.weight": "embedding.weight",
    "lm_head.weight": "embedding.weight",
    "final_logits_bias": flat("output_bias"),
    "encoder.embed_positions.weight": "positions",
    "decoder.embed_positions.weight": "positions",
    **{
        f"{stack}.layers.#.{theirs}": f"{stack}.#.{ours}"
        for stack in ("encoder", "decoder")
        for theirs, ours in {
            "self_attn.q_proj.*": "self_attention.query.*",
            "self_attn.k_proj.*": "self_attention.key.*",
            "self_attn.v_proj.*": "self_attention.value.*",
            "self_attn.out_proj.*": "self_attention.output.*",
            "self_attn_layer_norm.*": "self_residual.norm.*",
            "encoder_attn.q_proj.*": "cross_attention.query.*",
            "encoder_attn.k_proj.*": "cross_attention.key.*",
            "encoder_attn.v_proj.*": "cross_attention.value.*",
            "encoder_attn.out_proj.*": "cross_attention.output.*",
            "encoder_attn_layer_norm.*": "cross_residual.norm.*",
            "fc1.*": "feed_forward.inner.*",
            "fc2.*": "feed_forward.outer.*",
            "final_layer_norm.*": "feed_forward_residual.norm.*",
        }.items()
    },
}


def _gpt2_shape(config: Settings, names: set[str]) -> ModelConfig:
    """GPT-2 (Radford et al. 2019)."""
    config.only("scale_attn_weights", True)
    config.only("scale_attn_by_inverse_layer_idx", False)
    config.only("add_cross_attention", False)
    d_model = config.whole("n_embd")
    return ModelConfig(
        vocabulary_size=config.whole("vocab_size"),
        d_model=d_model,
        heads=config.whole("n_head"),
        encoder_layers=0,
        decoder_layers=config.whole("n_layer"),
        d_ff=config.whole("n_inner", 4 * d_model),
        max_positions=config.whole("n_positions"),
        norm_epsilon=config.number("layer_norm_epsilon", 1e-5),
        architecture="decoder-only",
        norm_order="pre",
        positions="learned",
        activation=config.choice("activation_function", ACTIVATIONS, "gelu_new"),  # type: ignore[arg-type]
        tied=config.flag("tie_word_embeddings", True),
        scale_embedding=False,
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


def _llama_shape(config: Settings, names: set[str]) -> ModelConfig:
    """Llama (Touvron et al. 2023)."""
    config.only("hidden_act", "silu", "swish")
    config.only("attention_bias", False)
    config.only("mlp_bias", False)
    d_model, heads = config.whole("hidden_size"), config.whole("num_attention_heads")
    if heads and not d_model % heads:
        config.only("head_dim", d_model // heads)
    return ModelConfig(
        vocabulary_size=config.whole("vocab_size"),
        d_model=d_model,
        heads=heads,
        encoder_layers=0,
        decoder_layers=config.whole("num_hidden_layers"),
        d_ff=config.whole("intermediate_size"),
        max_positions=config.whole("max_position_embeddings", 2048),
        norm_epsilon=config.number("rms_norm_eps", 1e-6),
        architecture="decoder-only",
        norm="rms",
        norm_order="pre",
        positions="rotary",
        rotary_base=_rotary_base(config),
        activation="swiglu",
        key_value_heads=config.whole("num_key_value_heads", heads),
        tied=config.flag("tie_word_embeddings", False),
        bias=False,
        scale_embedding=False,
    )


def _rotary_base(config: Settings) -> float:
    """Base of unscaled rotary positions; transformers 5 has it in `rope_parameters`."""
    base = config.number("rope_theta", 10000.0)
    for name in ("rope_scaling", "rope_parameters"):
        found = config.get(name, {})
        if not isinstance(found, dict):
            config.refuse(name, found, "null or an object of rope_type default")
        rest: dict[str, Any] = {key: value for key, value in found.items() if value is not None}
        base = float(rest.pop("rope_theta", base))
        kind = rest.pop("rope_type", rest.pop("type", "default"))
        # The older key may stand beside the newer one.
        rest.pop("type", None)
        if kind != "default" or rest.pop("partial_rotary_factor", 1.0) != 1.0 or rest:
            config.refuse(name, found, "null, or rope_type default with a rope_theta")
    return base


LLAMA: Table = {
    "embed_tokens.weight": "embedding.weight",
    "layers.#.input_layernorm.weight": "decoder.#.self_residual.norm.weight",
    "layers.#.self_attn.q_proj.weight": "decoder.#.self_attention.query.weight",
    "layers.#.self_attn.k_proj.weight": "decoder.#.self_attention.key.weight",
    "layers.#.self_attn.v_proj.weight": "decoder.#.self_attention.value.weight",
    "layers.#.self_attn.o_proj.weight": "decoder.#.self_attention.output.weight",
    "layers.#.post_attention_layernorm.weight": "decoder.#.feed_forward_residual.norm.weight",
    "layers.#.mlp.gate_proj.weight": "decoder.#.feed_forward.gate.weight",
    "layers.#.mlp.up_proj.weight": "decoder.#.feed_forward.inner.weight",
    "layers.#.mlp.down_proj.weight": "decoder.#.feed_forward.outer.weight",
    "norm.weight": "decoder_norm.weight",
    "lm_head.weight": "output.weight",
    # Angles, saved by older versions of transformers.
    "layers.#.self_attn.rotary_emb.inv_freq": BUFFER,
}

BERT_HEAD = "cls.predictions.bias"


def _bert_shape(config: Settings, names: set[str]) -> ModelConfig:
    """BERT (Devlin et al. 2019); without a masked language model head for embedding only."""
    config.only("position_embedding_type", "absolute")
    config.only("is_decoder", False)
    config.only("add_cross_attention", False)
    config.only("tie_word_embeddings", True)
    head = BERT_HEAD in names
    return ModelConfig(
        vocabulary_size=config.whole("vocab_size"),
        d_model=config.whole("hidden_size"),
        heads=config.whole("num_attention_heads"),
        encoder_layers=config.whole("num_hidden_layers"),
        decoder_layers=0,
        d_ff=config.whole("intermediate_size"),
        max_positions=config.whole("max_position_embeddings", 512),
        norm_epsilon=config.number("layer_norm_eps", 1e-12),
        architecture="encoder-only",
        positions="learned",
        activation=config.choice("hidden_act", ACTIVATIONS, "gelu"),  # type: ignore[arg-type]
        scale_embedding=False,
        embedding_norm=True,
        output_transform=head,
        output_bias=head,
    )


BERT: Table = {
    "embeddings.word_embeddings.weight": "embedding.weight",
    "embeddings.position_embeddings.weight": "positions",
    # A text is a single segment of type 0, whose vector is added to every position.
    "embeddings.token_type_embeddings.weight": first_row_into("positions", "token types"),
    "embeddings.LayerNorm.*": "embedding_norm.*",
    "encoder.layer.#.attention.self.query.*": "encoder.#.self_attention.query.*",
    "encoder.layer.#.attention.self.key.*": "encoder.#.self_attention.key.*",
    "encoder.layer.#.attention.self.value.*": "encoder.#.self_attention.value.*",
    "encoder.layer.#.attention.output.dense.*": "encoder.#.self_attention.output.*",
    "encoder.layer.#.attention.output.LayerNorm.*": "encoder.#.self_residual.norm.*",
    "encoder.layer.#.intermediate.dense.*": "encoder.#.feed_forward.inner.*",
    "encoder.layer.#.output.dense.*": "encoder.#.feed_forward.outer.*",
    "encoder.layer.#.output.LayerNorm.*": "encoder.#.feed_forward_residual.norm.*",
    "cls.predictions.transform.dense.*": "output_transform.linear.*",
    "cls.predictions.transform.LayerNorm.*": "output_transform.norm.*",
    "cls.predictions.decoder.weight": "embedding.weight",
    "cls.predictions.decoder.bias": "output_bias",
    BERT_HEAD: "output_bias",
    "cls.seq_relationship.*": NoPlace("next-sentence head"),
    "pooler.dense.*": NoPlace("pooler"),
    "embeddings.position_ids": BUFFER,
}

FAMILIES: Mapping[str, Family] = {
    "marian": Family(_marian_shape, MARIAN, "model.", marian_positions),
    "gpt2": Family(_gpt2_shape, GPT2, "transformer."),
    "llama": Family(_llama_shape, LLAMA, "model."),
    "bert": Family(_bert_shape, BERT, "bert."),
}
