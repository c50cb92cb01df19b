"""Encoder-decoder model types of transformers."""

import math
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transferry.build_model.importing.huggingface.folder import Settings
from transferry.build_model.importing.huggingface.heads import classifier
from transferry.build_model.importing.huggingface.tables import (
    ACTIVATIONS,
    BUFFER,
    GATES,
    LAYER,
    Family,
    NoPlace,
    Table,
    flat,
    modules,
    renamed,
    sizes,
    without_first,
)
from transferry.build_model.model.config import ModelConfig


def _shared_fields(
    config: Settings, names: set[str], *, activation: str = "gelu", scaled: bool = False
) -> dict[str, Any]:
    """Fields of all types but T5; `activation` and `scaled` are the type's defaults."""
    general = {"num_attention_heads": "encoder_attention_heads", "hidden_size": "d_model"}
    renamed(config, **general, num_hidden_layers="encoder_layers")
    heads, d_ff = (config.whole(f"decoder_{name}") for name in ("attention_heads", "ffn_dim"))
    own = config.whole("encoder_attention_heads"), config.whole("encoder_ffn_dim")
    size, tied = config.whole("vocab_size"), config.flag("tie_word_embeddings", True)
    # An untied model of transformers 5 has an embedding of each side.
    apart = not tied and any(name.endswith("encoder.embed_tokens.weight") for name in names)
    return dict(
        vocabulary_size=size,
        source_vocabulary_size=size if apart else 0,
        d_model=config.whole("d_model"),
        heads=heads,
        encoder_heads=0 if own[0] == heads else own[0],
        encoder_layers=config.whole("encoder_layers"),
        decoder_layers=config.whole("decoder_layers"),
        d_ff=d_ff,
        encoder_d_ff=0 if own[1] == d_ff else own[1],
        max_positions=config.whole("max_position_embeddings", 1024),
        positions="learned",
        activation=config.choice("activation_function", ACTIVATIONS, activation),
        tied=tied,
        scale_embedding=config.flag("scale_embedding", scaled),
    )


def _sequence_shape(
    config: Settings, names: set[str], *, activation: str = "gelu", scaled: bool = False, **own: Any
) -> ModelConfig:
    """A type with fields of its own."""
    fields = _shared_fields(config, names, activation=activation, scaled=scaled)
    return ModelConfig(**fields, **own)


def _marian_shape(config: Settings, names: set[str]) -> ModelConfig:
    """MarianMT (Junczys-Dowmunt et al. 2018): the paper's Transformer with another activation."""
    fields = _shared_fields(config, names)
    source = fields["vocabulary_size"]
    target = config.whole("decoder_vocab_size", source)
    shared = config.flag("share_encoder_decoder_embeddings", True)
    if shared and target != source:
        config.refuse("decoder_vocab_size", target, f"vocab_size ({source}) where they are shared")
    # Marian's sinusoids have all sines before all cosines, and transformers keeps them as float32
    # numbers whatever the model computes in. A table holds exactly these numbers, our formula would
    # give others.
    return ModelConfig(
        **fields
        | {"vocabulary_size": target}
        | ({} if shared else {"source_vocabulary_size": source}),
        output_bias=True,
    )


def marian_positions(config: ModelConfig) -> dict[str, Tensor]:
    """Table of transformers' MarianSinusoidalPositionalEmbedding: float64, rounded to float32."""
    width = config.d_model
    rates = np.power(10000, 2 * (np.arange(width) // 2) / width)
    angles = np.arange(config.max_positions)[:, None] / rates
    table = np.concatenate([np.sin(angles[:, 0::2]), np.cos(angles[:, 1::2])], axis=1)
    return {"positions": torch.from_numpy(table.astype(np.float32))}


ATTENTION = "{0}.q_proj {0}.k_proj {0}.v_proj {0}.out_proj {0}_layer_norm"
LAYERS: Table = {
    theirs: ours
    for stack in ("encoder", "decoder")
    for names, own in (
        (f"{ATTENTION.format('self_attn')} fc1 fc2 final_layer_norm", LAYER),
        (ATTENTION.format("encoder_attn"), [name.replace("self", "cross") for name in LAYER]),
    )
    for theirs, ours in modules(f"{stack}.layers.#", f"{stack}.#", names, own).items()
}

EMBEDDINGS: Table = {
    "shared.weight": "embedding.weight",
    # The embedding itself, where both stacks share it.
    "encoder.embed_tokens.weight": "source_embedding.weight",
    "decoder.embed_tokens.weight": "embedding.weight",
    "lm_head.weight": "output.weight",
    "final_logits_bias": flat("output_bias"),
}
MARIAN: Table = {
    **LAYERS,
    **EMBEDDINGS,
    "encoder.embed_positions.weight": "positions",
    "decoder.embed_positions.weight": "positions",
}


# PEGASUS (Zhang et al. 2020): pre-norm, with Marian's table of positions.
_pegasus_shape = partial(_sequence_shape, norm_order="pre", output_bias=True)


LAST_NORMS: Table = {
    "encoder.layer_norm.*": "encoder_norm.*",
    "decoder.layer_norm.*": "decoder_norm.*",
}
PEGASUS: Table = {**MARIAN, **LAST_NORMS}


# BART (Lewis et al. 2020); mBART (Liu et al. 2020) has norms before the sublayers.
_bart_shape = partial(
    _sequence_shape, embedding_norm=True, separate_positions=True, output_bias=True
)
_mbart_shape = partial(_bart_shape, norm_order="pre")


BART: Table = {
    **LAYERS,
    **EMBEDDINGS,
    "encoder.embed_positions.weight": without_first(2, "source_positions"),
    "decoder.embed_positions.weight": without_first(2, "positions"),
    "encoder.layernorm_embedding.*": "source_embedding_norm.*",
    "decoder.layernorm_embedding.*": "embedding_norm.*",
}
MBART: Table = {**BART, **LAST_NORMS}


# M2M-100 (Fan et al. 2021) and NLLB (NLLB Team 2022): pre-norm, with a table of positions.
_m2m_shape = partial(
    _sequence_shape, activation="relu", scaled=True, norm_order="pre", padding_token=1
)


def m2m_positions(config: ModelConfig) -> dict[str, Tensor]:
    """Table of transformers' M2M100SinusoidalPositionalEmbedding: float32 throughout."""
    half = config.d_model // 2
    rates = torch.exp(torch.arange(half).float() * -(math.log(10000) / (half - 1)))
    angles = torch.arange(2, config.max_positions + 2).float()[:, None] * rates
    table = torch.cat([angles.sin(), angles.cos()], dim=1)
    return {"positions": table, "padding_position": torch.zeros(1, table.shape[1])}


M2M: Table = {
    **LAYERS,
    **EMBEDDINGS,
    **LAST_NORMS,
    # Positions, saved by older versions of transformers.
    "encoder.embed_positions.weights": BUFFER,
    "decoder.embed_positions.weights": BUFFER,
}


def _t5_shape(config: Settings, names: set[str]) -> ModelConfig:
    """T5 (Raffel et al. 2020), so T5 1.1, Flan-T5, mT5 and UMT5."""
    activations = ACTIVATIONS | {f"gated-{name}": unit for name, unit in GATES.items()}
    # The first of these means the tanh form, whatever it says.
    activations["gated-gelu"] = "geglu-tanh"
    general = {"num_attention_heads": "num_heads", "hidden_size": "d_model"}
    renamed(config, **general, num_hidden_layers="num_layers", head_dim="d_kv")
    kind = config.get("model_type")
    default = "relu" if kind == "t5" else "gated-gelu"
    fields = sizes(config, d_model="d_model", heads="num_heads", d_ff="d_ff")
    width, layers = config.whole("d_kv", 64), config.whole("num_layers")
    activation = config.choice("feed_forward_proj", activations, default)
    unit = config.get("feed_forward_proj", default)
    # Settings that transformers writes beside it, and follows where they differ.
    config.only("dense_act_fn", "gelu_new" if unit == "gated-gelu" else unit.split("-")[-1])
    config.only("is_gated_act", unit.startswith("gated-"))
    buckets = config.whole("relative_attention_num_buckets", 32)
    distance = config.whole("relative_attention_max_distance", 128)
    if distance <= buckets // 2:  # transformers fails on longer texts
        name = "relative_attention_max_distance"
        config.refuse(name, distance, f"more than half of the {buckets} buckets")
    # T5 1.1 does not scale its output, as the file's tie_word_embeddings says; mT5 never does.
    scaled = config.flag("tie_word_embeddings", True)
    scaled = bool(config.unless_null("scale_decoder_outputs", scaled))
    scaled = config.flag("scale_decoder_outputs", scaled) and kind != "mt5"
    return ModelConfig(
        **fields,
        head_width=0 if width * fields["heads"] == fields["d_model"] else width,
        encoder_layers=layers,
        decoder_layers=config.whole("num_decoder_layers", layers),
        max_positions=config.whole("n_positions", 512),
        norm_epsilon=config.number("layer_norm_epsilon", 1e-6),
        norm="rms",
        norm_order="pre",
        positions="none",
        activation=activation,
        tied="lm_head.weight" not in names,
        bias=False,
        scale_embedding=False,
        attention_divisor=1.0,
        relative_buckets=buckets,
        relative_distance=distance,
        relative_by_layer=kind == "umt5",
        scale_output=scaled,
    )


T5: Table = {
    "shared.weight": "embedding.weight",
    "encoder.embed_tokens.weight": "embedding.weight",
    "decoder.embed_tokens.weight": "embedding.weight",
    "lm_head.weight": "output.weight",
    **{
        f"{stack}.block.#.layer.{number}.{theirs}": f"{stack}.#.{ours}"
        for stack, numbers in {"encoder": (0, None, 1), "decoder": (0, 1, 2)}.items()
        for number, kind, part in zip(
            numbers,
            ("SelfAttention", "EncDecAttention", "DenseReluDense"),
            ("self", "cross", "feed_forward"),
            strict=True,
        )
        if number is not None
        for theirs, ours in {
            **{
                f"{kind}.{theirs}.weight": f"{part}_attention.{ours}.weight"
                for theirs, ours in {"q": "query", "k": "key", "v": "value", "o": "output"}.items()
            },
            f"{kind}.wi.weight": "feed_forward.inner.weight",
            f"{kind}.wi_0.weight": "feed_forward.gate.weight",
            f"{kind}.wi_1.weight": "feed_forward.inner.weight",
            f"{kind}.wo.weight": "feed_forward.outer.weight",
            "layer_norm.weight": f"{part}_residual.norm.weight",
        }.items()
    },
    **{
        f"{stack}.block.#.layer.0.SelfAttention.relative_attention_bias.weight": (
            f"{stack}_distance.weight"
        )
        for stack in ("encoder", "decoder")
    },
    # transformers has one in the first layer of cross-attention that nobody reads.
    "decoder.block.#.layer.1.EncDecAttention.relative_attention_bias.weight": NoPlace("unused"),
    "encoder.final_layer_norm.weight": "encoder_norm.weight",
    "decoder.final_layer_norm.weight": "decoder_norm.weight",
}


UMT5: Table = {
    **T5,
    **{
        f"{stack}.block.#.layer.0.SelfAttention.relative_attention_bias.weight": (
            f"{stack}_distance.#.weight"
        )
        for stack in ("encoder", "decoder")
    },
}


def _no_bias(config: ModelConfig) -> dict[str, Tensor]:
    """The bias of the output, which a file may lack and which is 0 then."""
    return {"output_bias": torch.zeros(config.vocabulary_size)}


def _older(*values: bool) -> dict[str, tuple[bool]]:
    """Settings of older files: Marian supports other values, transformers' classes have these."""
    norms = "normalize_before", "add_final_layer_norm", "normalize_embedding"
    names = *norms, "static_position_embeddings"
    return {name: (value,) for name, value in zip(names, values, strict=True)}


def _marian_computes(config: ModelConfig) -> dict[str, Tensor]:
    return marian_positions(config) | _no_bias(config)


# Of a text: the decoder's output at the last token.
CLASSIFIER = classifier(
    *("classification_head.dense", "classification_head.out_proj"),
    width="d_model",
    poolings={"last": {"pooling": ("last",)}},
)
_BART_IDS = {"pad_token_id": 1, "eos_token_id": 2}
_M2M_IDS = {"pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
_T5_IDS = {"pad_token_id": 0, "eos_token_id": 1}

FAMILIES = {
    "marian": Family(
        *("opus-mt", _marian_shape, MARIAN, ("model.",), _marian_computes),
        defaults={"eos_token_id": 0},
        only=_older(False, False, False, True),
    ),
    "pegasus": Family(
        *("PEGASUS", _pegasus_shape, PEGASUS, ("model.",), _marian_computes),
        reads_lines=True,
        defaults={**_T5_IDS, "decoder_start_token_id": 0},
        only=_older(True, True, False, True),
    ),
    "bart": Family(
        *("BART", _bart_shape, BART, ("model.",), _no_bias, CLASSIFIER),
        reads_lines=True,
        defaults={**_BART_IDS, "decoder_start_token_id": 2},
        only=_older(False, False, True, False),
    ),
    "mbart": Family(
        *("mBART, mBART-50", _mbart_shape, MBART, ("model.",), _no_bias, CLASSIFIER),
        defaults=_BART_IDS,
        only=_older(True, True, True, False),
    ),
    "m2m_100": Family(
        *("M2M-100, NLLB-200", _m2m_shape, M2M, ("model.",), m2m_positions),
        defaults=_M2M_IDS,
        # Positions begin after that of padding, which is 1 in fairseq's vocabularies.
        only={"pad_token_id": (1,)},
    ),
    **{
        kind: Family(
            *(models, _t5_shape, table, ("transformer.",)),
            classifier=CLASSIFIER,
            stems=stems,
            reads_lines=True,
            defaults={**_T5_IDS, **begin},
        )
        for kind, models, table, stems, begin in (
            ("t5", "T5, T5 1.1, Flan-T5, ByT5", T5, "T5", {}),
            ("mt5", "mT5", T5, "MT5", {"decoder_start_token_id": 0}),
            ("umt5", "UMT5", UMT5, "UMT5", {"decoder_start_token_id": 0}),
        )
    },
}
