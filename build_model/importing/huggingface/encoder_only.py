"""Encoder-only model types of transformers."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from transferry.build_model.importing.huggingface.encoders.rotary import (
    EUROBERT,
    EUROBERT_POOLINGS,
    GTE_ONLY,
    MODERN_POOLINGS,
    MODERNBERT,
    NOMIC_ONLY,
    POST_NORM,
    eurobert_shape,
    gte_computes,
    gte_shape,
    jina_shape,
    modernbert_shape,
    nomic_shape,
)
from transferry.build_model.importing.huggingface.folder import Settings
from transferry.build_model.importing.huggingface.heads import UNITS, classifier
from transferry.build_model.importing.huggingface.tables import (
    ACTIVATIONS,
    Family,
    Move,
    NoPlace,
    Table,
    after_padding,
    every_layer,
    first_row_into,
    heads_of_three,
    masked_fields,
    masked_head,
    modules,
    renamed,
    sizes,
)
from transferry.build_model.model.config import ModelConfig
from transferry.build_model.model.parts.disentangled import Convolution, Disentangled

BERT_HEAD = "cls.predictions.bias"


def _bert_fields(config: Settings, *, head: bool) -> dict[str, Any]:
    """Fields of the types that use BERT's names of settings."""
    return masked_fields(config, head=head) | dict(
        sizes(config),
        encoder_layers=config.whole("num_hidden_layers"),
        norm_epsilon=config.number("layer_norm_eps", 1e-12),
        activation=config.choice("hidden_act", ACTIVATIONS, "gelu"),
    )


def _bert_shape(config: Settings, names: set[str], **own: Any) -> ModelConfig:
    """BERT (Devlin et al. 2019), with a type's own fields."""
    return ModelConfig(**_bert_fields(config, head=BERT_HEAD in names) | own)


BERT: Table = {
    "embeddings.word_embeddings.weight": "embedding.weight",
    "embeddings.position_embeddings.weight": "positions",
    # A text is a single segment of type 0, whose vector is added to every position.
    "embeddings.token_type_embeddings.weight": first_row_into("token types", "positions"),
    "embeddings.LayerNorm.*": "embedding_norm.*",
    **modules(
        *("encoder.layer.#", "encoder.#"),
        "attention.self.query attention.self.key attention.self.value attention.output.dense "
        "attention.output.LayerNorm intermediate.dense output.dense output.LayerNorm",
    ),
    **masked_head("cls.predictions.", "transform.dense", "transform.LayerNorm", "decoder"),
    BERT_HEAD: "output_bias",
    "cls.seq_relationship.*": NoPlace("next-sentence head"),
    "pooler.dense.*": NoPlace("pooler"),
}


def _ernie_shape(config: Settings, names: set[str]) -> ModelConfig:
    """ERNIE (Sun et al. 2020): BERT, with a task of number 0 for every text."""
    found = any(name.endswith(TASKS) for name in names)
    if config.flag("use_task_id", False) is not found:
        config.refuse("use_task_id", not found, f"{json.dumps(found)}, as the tensors are")
    config.get("task_type_vocab_size")  # the tensors decide
    return _bert_shape(config, names)


TASKS = "embeddings.task_type_embeddings.weight"
ERNIE: Table = {
    **BERT,
    TASKS: replace(first_row_into("task types", "positions"), optional=True),
}


def _pre_norm(table: Table, before: str, between: str, after: str) -> Table:
    """Names of a type with norms before the sublayers, and after the last layer."""
    kept = {
        name: place
        for name, place in table.items()
        if not name.startswith("encoder.layer") or "LayerNorm" not in name
    }
    return {
        **kept,
        f"encoder.layer.#.{before}.*": "encoder.#.self_residual.norm.*",
        f"encoder.layer.#.{between}.*": "encoder.#.feed_forward_residual.norm.*",
        f"{after}.*": "encoder_norm.*",
    }


# Norms before the sublayers; the embedding has no norm.
PRE_NORM: dict[str, Any] = {"norm_order": "pre", "embedding_norm": False}
MEGATRON = _pre_norm(BERT, "attention.ln", "ln", "encoder.ln")

# --- RoBERTa, XLM-R, DistilBERT, ELECTRA and MPNet -----------------------------------------------


def _roberta_shape(config: Settings, names: set[str], **own: Any) -> ModelConfig:
    """RoBERTa (Liu et al. 2019), XLM-R (Conneau et al. 2020) and those with fields of their own.

    Positions begin after that of padding, and the head is GELU whatever the rest has.
    """
    fields = _bert_fields(config, head="lm_head.dense.weight" in names)
    padding = config.whole("pad_token_id", 1)
    fields["max_positions"] = max(0, fields["max_positions"] - padding - 1)
    return ModelConfig(**fields | own, padding_token=padding, output_activation="gelu")


ROBERTA: Table = {
    **BERT,
    "embeddings.position_embeddings.weight": after_padding("positions", "padding_position"),
    "embeddings.token_type_embeddings.weight": first_row_into(
        "token types", "positions", "padding_position"
    ),
    **masked_head("lm_head.", "dense", "layer_norm", "decoder"),
    "lm_head.bias": "output_bias",
}

ROBERTA_PRE_NORM = _pre_norm(ROBERTA, "attention.LayerNorm", "intermediate.LayerNorm", "LayerNorm")
XLM_ROBERTA_XL = _pre_norm(
    ROBERTA, "attention.self_attn_layer_norm", "LayerNorm", "encoder.LayerNorm"
)


# MPNet (Song et al. 2020): with a bias of distances.
_mpnet_shape = partial(_roberta_shape, relative_buckets=32, relative_distance=128)


MPNET: Table = {
    **{name: place for name, place in ROBERTA.items() if "token_type" not in name},
    **modules("encoder.layer.#.attention.attn", "encoder.#", "q k v o"),
    "encoder.layer.#.attention.LayerNorm.*": "encoder.#.self_residual.norm.*",
    "encoder.relative_attention_bias.weight": "encoder_distance.weight",
}


def _distilbert_shape(config: Settings, names: set[str]) -> ModelConfig:
    """DistilBERT (Sanh et al. 2019)."""
    general = {"hidden_size": "dim", "num_attention_heads": "n_heads"}
    renamed(config, **general, num_hidden_layers="n_layers")
    fields = masked_fields(config, head="vocab_transform.weight" in names) | dict(
        vocabulary_size=config.whole("vocab_size"),
        d_model=config.whole("dim", 768),
        heads=config.whole("n_heads", 12),
        encoder_layers=config.whole("n_layers", 6),
        d_ff=config.whole("hidden_dim", 3072),
        norm_epsilon=1e-12,
        activation=config.choice("activation", ACTIVATIONS, "gelu"),
    )
    return ModelConfig(**fields)


DISTILBERT: Table = {
    "embeddings.word_embeddings.weight": "embedding.weight",
    "embeddings.position_embeddings.weight": "positions",
    "embeddings.LayerNorm.*": "embedding_norm.*",
    **modules(
        *("transformer.layer.#", "encoder.#"),
        "attention.q_lin attention.k_lin attention.v_lin attention.out_lin "
        "sa_layer_norm ffn.lin1 ffn.lin2 output_layer_norm",
    ),
    **masked_head("vocab_", "transform", "layer_norm", "projector"),
}


def _electra_shape(config: Settings, names: set[str]) -> ModelConfig:
    """ELECTRA (Clark et al. 2020): a narrow embedding; of the generator with its head."""
    head = "generator_predictions.dense.weight" in names
    fields = _bert_fields(config, head=head) | {"output_activation": "gelu"}
    width = config.whole("embedding_size", fields["d_model"])
    narrow = width != fields["d_model"]
    return ModelConfig(**fields, embedding_width=width if narrow else 0, project_sum=narrow)


ELECTRA: Table = {
    **BERT,
    "embeddings_project.*": "embedding_projection.*",
    **masked_head("generator_", "predictions.dense", "predictions.LayerNorm", "lm_head"),
    "discriminator_predictions.dense.*": NoPlace("discriminator head"),
    "discriminator_predictions.dense_prediction.*": NoPlace("discriminator head"),
}


# A tensor of the head that the published files of v3 hold, and "legacy": false names.
MASKED = "lm_predictions.lm_head.bias"


def _deberta_v2_shape(config: Settings, names: set[str]) -> ModelConfig:
    """DeBERTa-v2 and -v3 (He et al. 2021): attention to contents and to positions apart."""
    head = any(name.endswith((BERT_HEAD, MASKED)) for name in names)
    fields = _bert_fields(config, head=head)
    placed, kinds = config.flag("position_biased_input", True), config.whole("type_vocab_size", 0)
    if kinds and not placed:
        config.refuse("type_vocab_size", kinds, "0 where position_biased_input is false")
    config.get("legacy")  # the tensors decide
    width, heads = fields["d_model"], max(1, fields["heads"])
    for name in ("embedding_size", "pooler_hidden_size"):
        config.only(name, width)
    config.only("attention_head_size", width // heads)
    kernel = config.whole("conv_kernel_size", 0)
    unit, groups = config.choice("conv_act", UNITS, "tanh"), config.whole("conv_groups", 1)
    relative, kinds = _disentangled(config, fields["max_positions"])
    own: dict[str, Any] = dict(
        positions="learned" if placed else "none",
        norm_epsilon=config.number("layer_norm_eps", 1e-7),
        attention_divisor=math.sqrt(width // heads * (1 + kinds)),
        disentangled=relative,
        convolution=Convolution(kernel, groups, unit) if kernel else None,
    )
    return ModelConfig(**fields | own)


def _disentangled(config: Settings, longest: int) -> tuple[Disentangled | None, int]:
    """Returns the relative positions, and how many kinds of their scores divide all scores."""
    given = config.get("pos_att_type") or []
    given = given.lower().split("|") if isinstance(given, str) else given
    if not isinstance(given, list):
        config.refuse("pos_att_type", given, "c2p, p2c or both")
    kinds = [kind in [str(each).strip() for each in given] for kind in ("c2p", "p2c")]
    norms = str(config.get("norm_rel_ebd", "none")).lower().split("|")
    normed = "layer_norm" in [each.strip() for each in norms]
    buckets, farthest = (
        0 if config.get(name) == -1 else config.whole(name, 0)
        for name in ("position_buckets", "max_relative_positions")
    )
    farthest, shared = farthest or longest, config.flag("share_att_key", False)
    if not config.flag("relative_attention", False):
        return None, sum(kinds)
    if not any(kinds):
        config.refuse("pos_att_type", given, "c2p, p2c or both")
    span, far = (buckets, farthest) if buckets else (farthest, 0)
    return Disentangled(span, far, kinds[0], kinds[1], shared, normed), sum(kinds)


DEBERTA_V2: Table = {
    **{name: place for name, place in BERT.items() if ".self." not in name},
    **modules(
        *("encoder.layer.#.attention.self", "encoder.#.self_attention"),
        "query_proj key_proj value_proj pos_key_proj pos_query_proj",
        ("query", "key", "value", "position_key", "position_query"),
    ),
    "embeddings.position_embeddings.weight": Move(("positions",), what="unused positions"),
    "embeddings.token_type_embeddings.weight": replace(
        first_row_into("token types", "positions"), optional=True
    ),
    "encoder.rel_embeddings.weight": "relative_embedding.weight",
    "encoder.LayerNorm.*": Move(("relative_norm.*",), what="unused norm"),
    "encoder.conv.conv.*": "encoder.0.convolution.*",
    "encoder.conv.LayerNorm.*": "encoder.0.convolution_norm.*",
    "lm_predictions.lm_head.dense.*": "output_transform.linear.*",
    "lm_predictions.lm_head.LayerNorm.*": "output_transform.norm.*",
    MASKED: "output_bias",
    **{
        f"mask_predictions.{name}.*": NoPlace("replaced token head")
        for name in ("dense", "LayerNorm", "classifier")
    },
}


def _deberta_shape(config: Settings, names: set[str]) -> ModelConfig:
    """The first DeBERTa, which has no buckets, convolution or shared keys."""
    for name in ("position_buckets", "share_att_key", "norm_rel_ebd", "conv_kernel_size"):
        config.values.pop(name, None)  # transformers does not read them in this type
    return _deberta_v2_shape(config, names)


_OWN, _QUERY = "encoder.layer.#.attention.self", "encoder.#.self_attention"
DEBERTA: Table = {
    **{name: place for name, place in DEBERTA_V2.items() if not name.startswith(_OWN)},
    f"{_OWN}.in_proj.weight": heads_of_three("encoder.#", "weight"),
    f"{_OWN}.q_bias": f"{_QUERY}.query.bias",
    f"{_OWN}.v_bias": f"{_QUERY}.value.bias",
    f"{_OWN}.pos_proj.weight": f"{_QUERY}.position_key.weight",
    f"{_OWN}.pos_q_proj.*": f"{_QUERY}.position_query.*",
}


def _deberta_biases(config: ModelConfig) -> dict[str, Tensor]:
    """Biases of keys, which it lacks."""
    own = config.disentangled
    names = ["key", *["position_key"] * (own is not None and own.content_to_position)]
    return {
        f"encoder.{layer}.self_attention.{name}.bias": torch.zeros(config.d_model)
        for layer in range(config.encoder_layers)
        for name in names
    }


def _albert_shape(config: Settings, names: set[str]) -> ModelConfig:
    """ALBERT (Lan et al. 2020): a narrow embedding, and layers that share their weights."""
    fields = _bert_fields(config, head="predictions.bias" in names)
    return ModelConfig(
        **fields, embedding_width=config.whole("embedding_size", 128), project_sum=True
    )


ALBERT: Table = {
    **{name: place for name, place in BERT.items() if name.startswith("embeddings.")},
    "encoder.embedding_hidden_mapping_in.*": "embedding_projection.*",
    **{
        name: every_layer(ours)
        for name, ours in modules(
            *("encoder.albert_layer_groups.#.albert_layers.0", "encoder.@"),
            "attention.query attention.key attention.value attention.dense attention.LayerNorm "
            "ffn ffn_output full_layer_layer_norm",
        ).items()
    },
    **masked_head("predictions.", "dense", "LayerNorm", "decoder"),
    "predictions.bias": "output_bias",
    "sop_classifier.classifier.*": NoPlace("sentence order head"),
    "pooler.*": NoPlace("pooler"),
}


# --- All types -----------------------------------------------------------------------------------

POOLED = classifier("pooler.dense")
PROJECTED = classifier("classifier.dense", "classifier.out_proj")
HEADS = {
    **dict.fromkeys(
        ("deberta-v2", "deberta"),
        classifier("pooler.dense", activation="gelu", setting="pooler_hidden_act"),
    ),
    "albert": classifier("pooler"),
    "distilbert": classifier("pre_classifier", activation="relu", width="dim"),
    "electra": classifier("classifier.dense", "classifier.out_proj", "gelu"),
    "modernbert": classifier("head.dense", modern=True, poolings=MODERN_POOLINGS),
    "eurobert": classifier("dense", activation="gelu", poolings=EUROBERT_POOLINGS),
}
# Type, models, shape, table and prefixes of the tensors' names.
Rows = list[tuple[str, str, Callable[[Settings, set[str]], ModelConfig], Table, str]]
# Types that tell segments apart, with BERT's head of classification where `HEADS` has no other.
SEGMENTED: Rows = [
    ("deberta-v2", "DeBERTa-v2 and -v3", _deberta_v2_shape, DEBERTA_V2, "deberta."),
    ("deberta", "DeBERTa", _deberta_shape, DEBERTA, "deberta."),
    ("albert", "ALBERT", _albert_shape, ALBERT, "albert."),
    ("bert", "BERT", _bert_shape, BERT, "bert."),
    ("ernie", "ERNIE", _ernie_shape, ERNIE, "ernie."),
    ("megatron-bert", "Megatron-BERT", partial(_bert_shape, **PRE_NORM), MEGATRON, "bert."),
    ("electra", "ELECTRA", _electra_shape, ELECTRA, "electra."),
    ("nomic_bert", "nomic-embed-text v1, v1.5", nomic_shape, POST_NORM, "nomic_bert. bert."),
    ("gte", "GTE", gte_shape, POST_NORM, "gte."),
    ("new", "GTE as published", gte_shape, POST_NORM, "new."),
]
# Types that do not, with RoBERTa's.
ALIKE: Rows = [
    ("roberta", "RoBERTa", _roberta_shape, ROBERTA, "roberta."),
    ("xlm-roberta", "XLM-RoBERTa", _roberta_shape, ROBERTA, "roberta."),
    ("camembert", "CamemBERT", _roberta_shape, ROBERTA, "roberta."),
    ("data2vec-text", "data2vec", _roberta_shape, ROBERTA, "data2vec_text."),
    (
        *("roberta-prelayernorm", "RoBERTa-PreLayerNorm"),
        *(partial(_roberta_shape, norm_order="pre"), ROBERTA_PRE_NORM, "roberta_prelayernorm."),
    ),
    (
        *("xlm-roberta-xl", "XLM-RoBERTa-XL"),  # Goyal et al. 2021
        *(partial(_roberta_shape, **PRE_NORM), XLM_ROBERTA_XL, "roberta."),
    ),
    ("distilbert", "DistilBERT", _distilbert_shape, DISTILBERT, "distilbert."),
    ("mpnet", "MPNet", _mpnet_shape, MPNET, "mpnet."),
    ("modernbert", "ModernBERT", modernbert_shape, MODERNBERT, "model."),
    ("jina_embeddings_v3", "jina-embeddings-v3", jina_shape, POST_NORM, "roberta."),
    ("eurobert", "EuroBERT", eurobert_shape, EUROBERT, "model."),
]
COMPUTED = {"deberta": _deberta_biases, "gte": gte_computes, "new": gte_computes}
DEFAULTS: dict[str, dict[str, Any]] = {
    **{kind: {"type_vocab_size": 0} for kind in ("deberta-v2", "deberta")},
    "albert": {"hidden_act": "gelu_new"},
    "xlm-roberta-xl": {"layer_norm_eps": 1e-5},
}
ABSOLUTE = {
    "position_embedding_type": ("absolute",),
    **dict.fromkeys(("is_decoder", "add_cross_attention"), (False,)),
}
ONLY: dict[str, Mapping[str, tuple[Any, ...]]] = {
    **dict.fromkeys(("deberta-v2", "bert", "ernie", "megatron-bert", "electra"), ABSOLUTE),
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert", "data2vec-text"), ABSOLUTE),
    **dict.fromkeys(("roberta-prelayernorm", "xlm-roberta-xl"), ABSOLUTE),
    "deberta": {**ABSOLUTE, "talking_head": (False,)},
    "albert": {**ABSOLUTE, **dict.fromkeys(("num_hidden_groups", "inner_group_num"), (1,))},
    # Its code has a constant for padding, and computes with 32 buckets whatever the table has.
    "mpnet": {**ABSOLUTE, "pad_token_id": (1,), "relative_attention_num_buckets": (32,)},
    "nomic_bert": NOMIC_ONLY,
    **dict.fromkeys(("gte", "new"), GTE_ONLY),
    "eurobert": {"pretraining_tp": (1,)},
}
FAMILIES = {
    kind: Family(
        *(models, shape, table, (*prefixes.split(),)),
        computes=COMPUTED.get(kind, lambda config: {}),
        classifier=HEADS.get(kind, POOLED if segments else PROJECTED),
        segments=segments,
        defaults=DEFAULTS.get(kind, {}),
        only=ONLY.get(kind, {}),
    )
    for rows, segments in ((SEGMENTED, "embeddings.token_type_embeddings.weight"), (ALIKE, ""))
    for kind, models, shape, table, prefixes in rows
}
