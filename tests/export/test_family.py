"""Every option in every architecture: trained a little, exported, and the same in onnxruntime.

Tracing takes most of the time. So in `make test` options of one architecture go through one
variant, and each architecture through a part of the options that all have; with EXAMPLES=… all go
through all.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.export.conftest import graphs_of, opened, require_torchs_answers, written
from transferry.build_model.model.config import ModelConfig
from transferry.build_model.model.transformer import Transformer
from transferry.build_model.train.evaluation import cross_entropy
from transferry.export.checks.graphs import tokens_claim

SHAPE: dict[str, Any] = dict(
    vocabulary_size=40, d_model=16, heads=4, d_ff=24, max_positions=24, dropout=0.0
)
STACKS: dict[str, dict[str, Any]] = {
    "encoder-decoder": dict(encoder_layers=1, decoder_layers=1),
    "decoder-only": dict(encoder_layers=0, decoder_layers=1),
    "encoder-only": dict(encoder_layers=1, decoder_layers=0),
}
# Each choice of each option, several at a time: exporting takes seconds, and a fault is named by
# the tensor that it shows in. `test_every_choice_is_in_a_cell` counts them.
OPTIONS: dict[str, dict[str, Any]] = {
    "the paper's": {},
    "GPT-2's": dict(
        norm_order="pre", positions="learned", activation="gelu-tanh", scale_embedding=False
    ),
    "BERT's": dict(
        **dict(positions="learned", activation="gelu", scale_embedding=False),
        **dict(embedding_norm=True, output_transform=True, output_bias=True),
    ),
    "Llama's": dict(
        **dict(norm="rms", norm_order="pre", positions="rotary", activation="swiglu"),
        **dict(key_value_heads=2, tied=False, bias=False, scale_embedding=False),
    ),
    "MarianMT's": dict(activation="swish", positions="learned", output_bias=True),
    "multi-query after RMSNorm": dict(
        norm="rms", positions="rotary", rotary_base=100.0, key_value_heads=1
    ),
    "LayerNorm without bias": dict(
        norm_order="pre", bias=False, tied=False, feed_forward_bias=True, activation="reglu"
    ),
}
# Options of the models that people have, each in one architecture.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Kim et al.'s": ("encoder-decoder", dict(decoder_cell="ssru", norm_order="pre")),
    "Gemma's": (
        "decoder-only",
        dict(
            **dict(norm="rms", norm_order="sandwich", norm_offset=True, bias=False, head_width=6),
            **dict(positions="rotary", activation="geglu-tanh", query_key_norm="head"),
            **dict(attention_softcap=3.0, output_softcap=5.0, attention_divisor=4.0),
            **dict(query_key_value_bias=True, attention_output_bias=False),
        ),
    ),
    "OLMo's": (
        "decoder-only",
        dict(
            **dict(norm="rms", norm_order="res-post", positions="rotary", query_key_norm="all"),
            **dict(activation="geglu", key_value_heads=2, divide_by_layer=True),
            **dict(query_key_value_bias=False, attention_output_bias=True, feed_forward_bias=False),
        ),
    ),
    "GPT-NeoX's": (
        "decoder-only",
        dict(
            **dict(norm_order="pre", positions="rotary", rotary_rates=(1.0,), rotary_scale=1.2),
            **dict(activation="gelu-quick", norm_bias=False),
        ),
    ),
    "T5's": (
        "encoder-decoder",
        dict(
            **dict(
                norm="rms", norm_order="pre", positions="none", bias=False, scale_embedding=False
            ),
            **dict(
                relative_buckets=8,
                relative_distance=10,
                attention_divisor=1.0,
                scale_output=True,
                relative_by_layer=True,
            ),
        ),
    ),
    "OPT's": (
        "decoder-only",
        dict(
            **dict(norm_order="pre", positions="learned", embedding_width=8, final_norm=False),
            **dict(bias=False, norm_bias=True),
        ),
    ),
    "BART's": (
        "encoder-decoder",
        dict(
            **dict(positions="learned", separate_positions=True, embedding_norm=True),
            **dict(encoder_heads=2, encoder_d_ff=32),
        ),
    ),
    "two vocabularies": ("encoder-decoder", dict(source_vocabulary_size=30)),
    "parallel, with a window": (
        "decoder-only",
        dict(
            **dict(norm_order="pre", positions="rotary", parallel=True, windows=(3,)),
            **dict(window_rotary_rates=(1.0, 0.3)),
        ),
    ),
    "unrotated": ("decoder-only", dict(norm_order="pre", positions="rotary", unrotated=(0,))),
    "ELECTRA's": (
        "encoder-only",
        dict(
            **dict(positions="learned", embedding_norm=True, embedding_width=8, project_sum=True),
            **dict(output_transform=True, output_activation="relu", output_transform_bias=False),
        ),
    ),
    "ModernBERT's": (
        "encoder-only",
        dict(
            **dict(norm_order="pre", first_norm=False, embedding_norm=True, positions="rotary"),
            **dict(activation="geglu", windows=(2,), output_transform=True),
            **dict(output_transform_bias=True, bias=False),
        ),
    ),
    "sentence-transformers'": (
        "encoder-only",
        dict(
            **dict(lm_head=False, pooling=("first", "mean"), unit_length=True),
            **dict(head_widths=(12, 8), head_activations=("tanh", "none")),
            **dict(head_biases=(True, False)),
        ),
    ),
    "other poolings": ("encoder-only", dict(pooling=("max", "last", "weighted", "root-mean"))),
    "a classifier's": (
        "encoder-only",
        dict(
            **dict(lm_head=False, pooling=("mean",), head_widths=(16, 3), head_norm=True),
            **dict(late_pooling=True),
            **dict(head_activations=("gelu", "sigmoid"), head_biases=(False, True)),
            **dict(segments=2, segment_end=7, positions="learned", embedding_norm=True),
            padding_token=8,
        ),
    ),
    "DeBERTa's": (
        "encoder-only",
        dict(
            **dict(positions="none", embedding_norm=True, output_transform=True),
            disentangled={
                **dict(span=4, longest=12, content_to_position=True, position_to_content=True),
                **dict(shared=True, norm=True),
            },
            convolution=dict(width=3, groups=2, activation="tanh"),
        ),
    ),
    "DeBERTa's, with keys of positions": (
        "encoder-only",
        dict(
            causal=True,
            disentangled={
                **dict(span=5, longest=0, content_to_position=True, position_to_content=True),
                **dict(shared=False, norm=False),
            },
        ),
    ),
    "a tagger's": (
        "encoder-only",
        dict(lm_head=False, head_widths=(5,), head_activations=("none",), head_biases=(True,)),
    ),
}


def test_every_choice_is_in_a_cell() -> None:
    configs = [config_of("decoder-only", options) for options in OPTIONS.values()]
    configs += [config_of(*each) for each in OTHERS.values()]
    for name, hint in get_type_hints(ModelConfig).items():
        found = {getattr(config, name) for config in configs}
        if get_origin(hint) is Literal and name != "architecture":
            assert found == set(get_args(hint)), name
        if hint is bool:
            assert found == {True, False}, name
        if hint == bool | None and name != "output_transform_bias":
            assert found == {True, False, None}, name
        if isinstance(getattr(configs[0], name), tuple):
            assert len(found) > 1, name
    assert {config.kv_heads for config in configs} == {1, 2, 4}


def config_of(architecture: str, options: dict[str, Any]) -> ModelConfig:
    fields = {**SHAPE, **STACKS[architecture], **options, "architecture": architecture}
    return ModelConfig.from_dict(fields)


THOROUGH = "EXAMPLES" in os.environ
PART = {
    "encoder-decoder": ("the paper's", "Llama's", "MarianMT's", "multi-query after RMSNorm"),
    "decoder-only": ("GPT-2's", "Llama's", "LayerNorm without bias"),
    "encoder-only": ("BERT's", "Llama's"),
}


def cells() -> Iterator[Any]:
    for architecture in STACKS:
        for name, options in OPTIONS.items():
            if not THOROUGH and name not in PART[architecture]:
                continue
            config = config_of(architecture, options)
            yield pytest.param(config, "portable", id=f"{architecture}, {name}")
    for number, (name, (architecture, options)) in enumerate(OTHERS.items()):
        config = config_of(architecture, options)
        variants = ("portable", "cpu-fp32")
        for variant in variants if THOROUGH else [variants[1 - number % 2]]:
            yield pytest.param(config, variant, id=f"{architecture}, {name}, {variant}")
    deep = {**SHAPE, "encoder_layers": 3, "decoder_layers": 1}
    config = ModelConfig.from_dict(deep)
    yield pytest.param(config, "portable", id="deep encoder, shallow decoder")


def loss_of(model: Transformer, source: Tensor, mask: Tensor, tokens: Tensor) -> Tensor:
    loss = torch.zeros(())
    if model.head is not None:
        found = model.answers(source, mask)["head"]
        goal = torch.linspace(0.1, 0.9, found.shape[-1])
        loss = F.mse_loss(found, goal.expand_as(found))
    if model.config.lm_head:
        logits = model(source, mask, tokens)
        loss = loss + cross_entropy(logits[:, :-1], tokens[:, 1:], 0)
    return loss


def trained_a_little(config: ModelConfig) -> Transformer:
    """Wide random weights after three steps that reach every parameter."""
    torch.manual_seed(0)
    model = Transformer(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(3, min(config.vocabulary_size, config.source_vocabulary), (4, 12))
    source = tokens if config.encoder_layers else tokens[:, :0]
    mask = torch.ones(source.shape, dtype=torch.bool)
    losses = []
    for _ in range(3):
        loss = loss_of(model, source, mask, tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            assert gradient is not None, name
            # The same is added to every score of a query, which softmax does not see.
            if not name.endswith("key.bias"):
                assert gradient.any(), name
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[2] < losses[0]
    return model.eval()


@pytest.mark.parametrize(("config", "variant"), list(cells()))
def test_what_is_exported_is_what_was_trained(
    config: ModelConfig, variant: str, tmp_path: Path
) -> None:
    model = trained_a_little(config)
    bundle = written(tmp_path, model, variant, graphs_of(model, variant))
    require_torchs_answers(model, opened(bundle))
    assert not tokens_claim(config, bundle, bundle.variant(variant)).problem


@pytest.mark.parametrize("variant", ["cuda-fp16", "cuda-bf16"])
def test_an_encoder_gives_float32_in_every_precision(variant: str) -> None:
    model = Transformer(config_of(*OTHERS["other poolings"])).eval()
    graph = graphs_of(model, variant)["encoder"]
    outputs = {str(each.name): str(each.dtype) for each in graph.model.graph.outputs}
    assert outputs == {spec.name: "FLOAT" for spec in graph.spec.outputs}
    assert {spec.type for spec in graph.spec.outputs} == {"float32"}
