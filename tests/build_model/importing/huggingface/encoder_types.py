"""Drawn configurations of the encoder-only model types."""

import random
from collections.abc import Callable
from typing import Any

Draw = random.Random


def rope(draw: Draw, *, share: bool = False, kinds: tuple[str, ...] = ()) -> dict[str, Any]:
    """Parameters of rotary positions, as transformers 5 writes them."""
    kind = draw.choice(kinds or ("default", "linear", "dynamic", "llama3", "yarn"))
    found: dict[str, Any] = {"rope_type": kind, "rope_theta": draw.choice([100.0, 10000.0, 5e5])}
    if kind != "default":
        found["factor"] = draw.choice([2.0, 4.0, 8.0])
    if kind == "llama3":
        found |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        found["original_max_position_embeddings"] = 16
    if kind == "yarn":
        found |= draw.choice(
            [
                {"original_max_position_embeddings": 16},
                {"original_max_position_embeddings": 32, "beta_fast": 16.0, "beta_slow": 2.0},
                {"original_max_position_embeddings": 32, "attention_factor": 1.3},
                {"original_max_position_embeddings": 16, "truncate": False},
                {"original_max_position_embeddings": 16, "mscale": 0.7, "mscale_all_dim": 0.4},
            ]
        )
    return found | ({"partial_rotary_factor": draw.choice([0.25, 0.5, 0.75])} if share else {})


def flags(draw: Draw, names: str) -> dict[str, bool]:
    return {name: draw.choice([True, False]) for name in names.split()}


def layer_types(draw: Draw, layers: int) -> list[str] | None:
    kinds = [draw.choice(["sliding_attention", "full_attention"]) for _ in range(layers)]
    return draw.choice([None, kinds])


def masked(draw: Draw, **more: Any) -> dict[str, Any]:
    """Settings of an encoder in BERT's words."""
    return {
        "hidden_size": 32,
        "num_hidden_layers": draw.choice([1, 2]),
        "num_attention_heads": draw.choice([2, 4]),
        "intermediate_size": draw.choice([40, 48]),
        "hidden_act": draw.choice(["gelu", "relu", "gelu_new"]),
        "layer_norm_eps": draw.choice([1e-12, 1e-5]),
        "type_vocab_size": draw.choice([1, 2]),
        **more,
    }


def ernie(draw: Draw) -> dict[str, Any]:
    return masked(draw, use_task_id=draw.choice([True, False]), task_type_vocab_size=3)


def electra(draw: Draw) -> dict[str, Any]:
    return masked(draw, embedding_size=draw.choice([16, 32, 40]))


def distilbert(draw: Draw) -> dict[str, Any]:
    return {
        "dim": 32,
        "n_layers": 2,
        "n_heads": draw.choice([2, 4]),
        "hidden_dim": 48,
        "activation": draw.choice(["gelu", "relu"]),
        "sinusoidal_pos_embds": draw.choice([True, False]),
    }


def modernbert(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 4,
        "num_attention_heads": draw.choice([2, 4]),
        "hidden_activation": draw.choice(["gelu", "silu"]),
        "classifier_activation": draw.choice(["gelu", "relu"]),
        "local_attention": draw.choice([2, 4, 6, 128]),
        "layer_types": layer_types(draw, 4),
        **flags(draw, "attention_bias mlp_bias norm_bias classifier_bias decoder_bias"),
    }


def rotary(draw: Draw, **more: Any) -> dict[str, Any]:
    return masked(draw, rope_parameters=rope(draw), **more)


def nomic(draw: Draw) -> dict[str, Any]:
    return rotary(draw, hidden_act=draw.choice(["silu", "gelu"]))


def gte(draw: Draw) -> dict[str, Any]:
    return rotary(draw, type_vocab_size=draw.choice([0, 1, 2]))


def eurobert(draw: Draw) -> dict[str, Any]:
    return {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": draw.choice([None, 1, 2, 4]),
        "head_dim": draw.choice([None, 6, 16]),
        "intermediate_size": draw.choice([40, 48]),
        "hidden_act": draw.choice(["silu", "gelu"]),
        "rms_norm_eps": draw.choice([1e-6, 1e-5]),
        **flags(draw, "attention_bias mlp_bias tie_word_embeddings"),
        "classifier_pooling": draw.choice(["bos", "mean", "late", "late"]),
        "rope_parameters": rope(draw),
    }


def deberta_v2(draw: Draw) -> dict[str, Any]:
    return masked(
        draw,
        type_vocab_size=0,
        layer_norm_eps=draw.choice([1e-7, 1e-5]),
        relative_attention=draw.choice([True, True, True, False]),
        position_buckets=draw.choice([-1, 4, 9, 256]),
        max_relative_positions=draw.choice([-1, 12, 200]),
        position_biased_input=draw.choice([True, False]),
        pos_att_type=draw.choice(["p2c|c2p", "c2p", ["p2c"]]),
        share_att_key=draw.choice([True, False]),
        norm_rel_ebd=draw.choice(["none", "layer_norm"]),
        conv_kernel_size=draw.choice([0, 1, 3, 5]),
        conv_groups=draw.choice([1, 2]),
        conv_act=draw.choice(["tanh", "gelu"]),
        pooler_hidden_act=draw.choice(["gelu", "tanh"]),
        legacy=draw.choice([True, True, False]),
    )


def deberta(draw: Draw) -> dict[str, Any]:
    return masked(
        draw,
        layer_norm_eps=draw.choice([1e-7, 1e-5]),
        relative_attention=draw.choice([True, True, True, False]),
        max_relative_positions=draw.choice([-1, 12, 200]),
        position_biased_input=draw.choice([True, False]),
        type_vocab_size=0,
        pos_att_type=draw.choice(["p2c|c2p", "c2p", ["p2c"]]),
        pooler_hidden_act=draw.choice(["gelu", "tanh"]),
    )


def albert(draw: Draw) -> dict[str, Any]:
    return masked(draw, embedding_size=draw.choice([16, 32, 40]))


# Model class and settings, by model_type.
ENCODERS: dict[str, tuple[str, Callable[[Draw], dict[str, Any]]]] = {
    "bert": ("BertForMaskedLM", masked),
    "roberta": ("RobertaForMaskedLM", masked),
    "xlm-roberta": ("XLMRobertaForMaskedLM", masked),
    "distilbert": ("DistilBertForMaskedLM", distilbert),
    "electra": ("ElectraForMaskedLM", electra),
    "mpnet": ("MPNetForMaskedLM", masked),
    "modernbert": ("ModernBertForMaskedLM", modernbert),
    "deberta-v2": ("DebertaV2ForMaskedLM", deberta_v2),
    "deberta": ("DebertaForMaskedLM", deberta),
    "albert": ("AlbertForMaskedLM", albert),
    "ernie": ("ErnieForMaskedLM", ernie),
    "megatron-bert": ("MegatronBertForMaskedLM", masked),
    "camembert": ("CamembertForMaskedLM", masked),
    "data2vec-text": ("Data2VecTextForMaskedLM", masked),
    "roberta-prelayernorm": ("RobertaPreLayerNormForMaskedLM", masked),
    "xlm-roberta-xl": ("XLMRobertaXLForMaskedLM", masked),
    "nomic_bert": ("NomicBertForMaskedLM", nomic),
    "gte": ("GteForMaskedLM", gte),
    "jina_embeddings_v3": ("JinaEmbeddingsV3ForMaskedLM", rotary),
    "eurobert": ("EuroBertForMaskedLM", eurobert),
}
# Types whose positions are RoBERTa's.
LIKE_ROBERTA = (
    *("roberta", "xlm-roberta", "camembert", "data2vec-text", "roberta-prelayernorm"),
    "xlm-roberta-xl",
)
# Types that tell the segments of a pair apart.
WITH_SEGMENTS = ("bert", "electra", "ernie", "megatron-bert", "nomic_bert", "albert")
# Types that share their code with another: a second configuration of heads and keys tells no more.
LIKE_OTHERS = (*LIKE_ROBERTA[1:], "ernie", "megatron-bert", "gte", "jina_embeddings_v3")
