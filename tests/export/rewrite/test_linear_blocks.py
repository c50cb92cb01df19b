"""Weights in blocks of 4 or 8 bits: the rounding, and whole models in onnxruntime."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.export.conftest import graphs_of, opened, written
from tests.export.test_family import config_of
from transferry.build_model.model.transformer import Transformer
from transferry.export.checks.numbers import compare_cases
from transferry.export.oracle.cases import single_tokens, sizes
from transferry.export.oracle.oracle import Oracle
from transferry.export.rewrite.rounded_weights import BLOCK, WIDE, block_weights, blocks
from transferry.runtime.precision import Precision
from transferry.runtime.proof.compare import Tolerance
from transferry.runtime.tokenizer.byte_pair import SOURCES

# No width is a multiple of a block, and heads of 5 features make no power of two.
ODD: dict[str, Any] = dict(d_model=20, heads=4, d_ff=52, vocabulary_size=61, max_positions=24)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "both, tied": ("encoder-decoder", ODD),
    "a writer with a head of its own": (
        "decoder-only",
        {**ODD, "d_model": 32, "heads": 2, "tied": False, "positions": "rotary", "norm": "rms"},
    ),
    "a reader": ("encoder-only", {**ODD, "output_transform": True, "embedding_norm": True}),
}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("inputs", [1, 31, 32, 33, 96])
def test_no_weight_is_further_off_than_half_a_step(inputs: int, bits: int) -> None:
    weight = np.random.default_rng(0).standard_normal((7, inputs)).astype(np.float32)
    weight[3] = 0
    found = blocks(weight, bits)
    count = -(-inputs // BLOCK)
    assert found.integers.shape == (7, count, BLOCK)
    assert found.scales.shape == (7, count)
    values = (found.integers * found.scales[..., None]).reshape(7, -1)
    assert not values[:, inputs:].any()
    steps = np.abs(found.scales).repeat(BLOCK, axis=1)[:, :inputs]
    off = np.abs(values[:, :inputs] - weight) / steps
    # A block has one integer more on one side: at the far end of the other a value loses a step.
    assert off.max() <= 1.0001
    assert np.mean(off <= 0.5001) > 0.98
    largest = np.abs(weight).max(axis=1) == np.abs(values).max(axis=1)
    assert largest.mean() > 0.5
    assert not values[3].any()


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *((name, "int4") for name in MODELS),
        ("both, tied", "int8-blocks"),
        ("a reader", "int8-blocks"),
    ],
)
def test_a_model_is_what_torch_rounding_alike_computes(
    name: str, precision: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = Transformer(config_of(*MODELS[name])).eval()
    variant = f"cpu-{precision}"
    decoder = opened(written(tmp_path, model, variant, graphs_of(model, variant)))
    oracle = Oracle.of(model, SOURCES, Tolerance.of(precision), precision=Precision.of(precision))
    found = compare_cases(oracle, decoder, [single_tokens(model.config), *sizes(model.config)])
    assert not [item for item in found if item.fault]
    sharp = [item for item in found if item.budget < 1e-5]
    assert sharp
    assert max(item.error for item in sharp) < 2e-6
    # And it does round: the model as trained is further off.
    trained = Oracle.of(model, SOURCES, Tolerance())
    plain = compare_cases(trained, decoder, [single_tokens(model.config)])
    assert max(item.error for item in plain) > 1e-3
    # Nor is it a model whose layers have other bits.
    other = Precision.of("int4" if precision == "int8-blocks" else "int8-blocks")
    unlike = Oracle.of(model, SOURCES, Tolerance.of(other.name), precision=other)
    assert any(item.fault for item in compare_cases(unlike, decoder, [single_tokens(model.config)]))


@pytest.mark.parametrize("bits", [4, 8])
def test_the_last_matrix_has_eight_bits_and_all_others_those_asked_for(bits: int) -> None:
    model = Transformer(config_of("decoder-only", {"tied": False}))
    found = {name: weight.bits for name, weight in block_weights(model, bits)}
    linear = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    assert found.keys() == {*linear, "embedding.weight"}
    assert {found[name] for name in found.keys() & set(WIDE)} == {8}
    assert {found[name] for name in found.keys() - set(WIDE)} == {bits}
