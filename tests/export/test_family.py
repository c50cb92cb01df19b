"""Every option in every architecture: trained a little, exported, and the same in onnxruntime."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch

from tests.export.conftest import written
from transferry.build_model.config import ModelConfig
from transferry.build_model.evaluation import cross_entropy
from transferry.build_model.transformer import Transformer
from transferry.export.parity.cases import random_case
from transferry.export.parity.oracle import Oracle
from transferry.export.variants import make_variant
from transferry.runtime.ort.open_model import Model, open_model
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.parity.compare import Tolerance
from transferry.runtime.tokenizer.byte_pair import SOURCES

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
    "LayerNorm without bias": dict(norm_order="pre", bias=False, tied=False),
}


def test_every_choice_is_in_a_cell() -> None:
    configs = [
        ModelConfig.from_dict({**SHAPE, **STACKS["encoder-decoder"], **options})
        for options in OPTIONS.values()
    ]
    for name, hint in get_type_hints(ModelConfig).items():
        found = {getattr(config, name) for config in configs}
        if get_origin(hint) is Literal and name != "architecture":
            assert found == set(get_args(hint)), name
        if hint is bool:
            assert found == {True, False}, name
    assert {config.kv_heads for config in configs} == {1, 2, 4}


def cells() -> Iterator[Any]:
    for architecture, stacks in STACKS.items():
        for name, options in OPTIONS.items():
            config = ModelConfig.from_dict(
                {**SHAPE, **stacks, **options, "architecture": architecture}
            )
            yield pytest.param(config, id=f"{architecture}, {name}")
    deep = {**SHAPE, "encoder_layers": 3, "decoder_layers": 1}
    yield pytest.param(ModelConfig.from_dict(deep), id="deep encoder, shallow decoder")


def trained_a_little(config: ModelConfig) -> Transformer:
    """Wide random weights after three steps, each of which must reach every parameter."""
    torch.manual_seed(0)
    model = Transformer(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(3, config.vocabulary_size, (4, 12))
    source = tokens if config.encoder_layers else tokens[:, :0]
    mask = torch.ones(source.shape, dtype=torch.bool)
    losses = []
    for _ in range(3):
        logits = model(source, mask, tokens)
        loss = cross_entropy(logits[:, :-1], tokens[:, 1:], 0)
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


def opened(model: Transformer, folder: Path) -> Model:
    """The graphs in onnxruntime, without what a bundle has besides."""
    bundle = written(folder, model, "portable", make_variant(model, "portable"))
    return open_model(bundle, bundle.variant(), SessionOptions())


@pytest.mark.parametrize("config", list(cells()))
def test_what_is_exported_is_what_was_trained(config: ModelConfig, tmp_path: Path) -> None:
    model = trained_a_little(config)
    sizes = [(1, 1, 0), (3, 7, 0), (2, 5, 4)]
    cases = [random_case(config, *size, seed=number) for number, size in enumerate(sizes)]
    comparisons = Oracle(model, SOURCES, Tolerance()).numbers(opened(model, tmp_path), cases)
    assert len(comparisons) >= 2 * len(cases)
    assert [f"{item.case}: {item.tensor}: {item.fault}" for item in comparisons if item.fault] == []
