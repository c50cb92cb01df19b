"""DeBERTa-v2 and -v3: attention to contents and to positions apart (He et al. 2021)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from transferry.build_model.importing.huggingface.folder import Settings
from transferry.build_model.importing.huggingface.heads import UNITS
from transferry.build_model.importing.huggingface.tables import (
    Move,
    NoPlace,
    Table,
    first_row_into,
    heads_of_three,
)
from transferry.build_model.model.config import ModelConfig
from transferry.build_model.model.parts.disentangled import Convolution, Disentangled

# A tensor of the head that the published files of v3 hold, and "legacy": false names.
MASKED = "lm_predictions.lm_head.bias"


def deberta_fields(config: Settings, fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of ModelConfig, from those that are BERT's."""
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
    return fields | dict(
        positions="learned" if placed else "none",
        norm_epsilon=config.number("layer_norm_eps", 1e-7),
        attention_divisor=math.sqrt(width // heads * (1 + kinds)),
        disentangled=relative,
        convolution=Convolution(kernel, groups, unit) if kernel else None,
    )


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


def deberta_v2_table(bert: Table) -> Table:
    """Returns our tensors by theirs, from BERT's."""
    own = {
        "query_proj": "query",
        "key_proj": "key",
        "value_proj": "value",
        "pos_key_proj": "position_key",
        "pos_query_proj": "position_query",
    }
    types = replace(first_row_into("token types", "positions"), optional=True)
    return {
        **{name: place for name, place in bert.items() if ".self." not in name},
        **{
            f"encoder.layer.#.attention.self.{theirs}.*": f"encoder.#.self_attention.{ours}.*"
            for theirs, ours in own.items()
        },
        "embeddings.position_embeddings.weight": Move(("positions",), what="unused positions"),
        "embeddings.token_type_embeddings.weight": types,
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


# --- DeBERTa -------------------------------------------------------------------------------------


def deberta_table(v2: Table) -> Table:
    """Returns our tensors by theirs, from those of DeBERTa-v2."""
    attention = "encoder.layer.#.attention.self"
    ours = [f"encoder.#.self_attention.{name}" for name in ("query", "key", "value")]
    return {
        **{name: place for name, place in v2.items() if not name.startswith(attention)},
        f"{attention}.in_proj.weight": heads_of_three(*(f"{name}.weight" for name in ours)),
        f"{attention}.q_bias": f"{ours[0]}.bias",
        f"{attention}.v_bias": f"{ours[2]}.bias",
        f"{attention}.pos_proj.weight": "encoder.#.self_attention.position_key.weight",
        f"{attention}.pos_q_proj.*": "encoder.#.self_attention.position_query.*",
    }


def deberta_biases(config: ModelConfig) -> dict[str, Tensor]:
    """Biases of keys, which it lacks."""
    own = config.disentangled
    names = ["key", *["position_key"] * (own is not None and own.content_to_position)]
    return {
        f"encoder.{layer}.self_attention.{name}.bias": torch.zeros(config.d_model)
        for layer in range(config.encoder_layers)
        for name in names
    }
