"""Another precision without a copy gives a copy's results, for every kind of model."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tests.export.test_family import OTHERS, config_of
from transferry.build_model.checkpoint import Checkpoint
from transferry.build_model.model.transformer import Transformer
from transferry.export import arithmetic, torch_model
from transferry.export.arithmetic import (
    Arithmetic,
    Moved,
    Rounded,
    Shaken,
    round_blocks,
    round_to,
)
from transferry.export.oracle.cases import random_case
from transferry.export.torch_model import TorchDecoder
from transferry.runtime.proof.compare import Case, observe

KINDS = {
    **OTHERS,
    "as the first": ("encoder-decoder", {}),
    "a reader": ("encoder-only", {"embedding_norm": True, "output_transform": True}),
    "a writer": ("decoder-only", {"positions": "learned", "tied": False}),
}


def random_model(name: str) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(config_of(*KINDS[name])).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model


@pytest.mark.parametrize("name", KINDS)
def test_float64_of_shared_weights_is_that_of_a_copy(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model(name)
    copied = TorchDecoder.oracle(model)
    assert copied.model is not model
    monkeypatch.setattr(arithmetic, "KEPT", 0)
    sharing = TorchDecoder.oracle(model)
    assert sharing.model is model
    case = random_case(model.config, 3, 7, 4, seed=0)
    decodes = bool(model.config.decoder_layers)
    sides = [observe(each if decodes else each.encoder, case) for each in (copied, sharing)]
    assert sides[0].keys() == sides[1].keys()
    for tensor, wanted in sides[0].items():
        found = sides[1][tensor]
        assert found.dtype == wanted.dtype == np.float64
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12)
    assert {each.dtype for each in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounded_weights_stand_for_the_models_own(dtype: torch.dtype) -> None:
    model = random_model("as the first")
    name = "encoder.0.feed_forward.inner.weight"
    weight = model.get_parameter(name)
    integers = torch.randint(-7, 8, weight.shape, dtype=torch.int8)
    scales = torch.full((len(weight), 1), 2.0**-6)
    changed = copy.deepcopy(model).to(dtype)
    with torch.no_grad():
        changed.get_parameter(name).copy_(integers * scales)
    case = random_case(model.config, 2, 5, 2, seed=0)

    def doubled(x: Tensor, shift: float) -> Tensor:
        return (x + shift) * 2

    halved = {name: Rounded(integers, scales / 2, weight.shape[1], doubled)}
    wanted, copied = observe(TorchDecoder(changed), case), arithmetic.copied(model, dtype, halved)
    for shift in (0.0, 0.1):
        sides = [
            TorchDecoder(model, Arithmetic(model, dtype, halved, shift)),
            TorchDecoder(copied, Moved(shift)),
        ]
        for found in (observe(side, case) for side in sides):
            apart = max(np.abs(found[tensor] - wanted[tensor]).max() for tensor in wanted)
            assert apart > 1e-3 if shift else apart < 1e-5


def test_inputs_are_rounded_by_block_and_row() -> None:
    x = torch.tensor([[127.0, 0.4, -3.6, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0, -2.54]])
    found = round_blocks(x, 0.0, 4)
    wanted = torch.tensor([[127.0, 0.0, -4.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0, -2.54]])
    torch.testing.assert_close(found, wanted)
    assert round_blocks(x, 0.2, 4)[0, 1] == 1.0
    assert round_to(torch.tensor([-9.0, 0.26, 9.0]), 0.5, 0.0, -2, 3).tolist() == [-1.0, 0.5, 1.5]


def test_new_zeros_convert_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache is made from the embedding, which of a large model takes 500 MB in float64."""
    model, converted = random_model("a writer"), list[torch.Size]()

    def convert(self: Arithmetic, value: Any) -> Any:
        converted.append(value.shape)
        return value

    monkeypatch.setattr(Arithmetic, "_converted", convert)
    with Arithmetic(model, torch.float64):
        (past, *_) = model.empty_past(2)
    assert (past[0].dtype, past[0].shape[2], converted) == (torch.float64, 0, [])


LENGTH = 30


@pytest.fixture(scope="module")
def oracle(checkpoint: Checkpoint) -> TorchDecoder:
    return TorchDecoder.oracle(checkpoint.model)


@pytest.fixture(scope="module")
def case(checkpoint: Checkpoint) -> Case:
    """Three rows of unequal length and nine target tokens."""
    case = random_case(checkpoint.model.config, 3, 8, 6, seed=3)
    assert len(set(case.mask.sum(axis=1).tolist())) > 1
    return case


def logits_of_model(decoder: TorchDecoder, case: Case) -> NDArray[np.float64]:
    """Logits of the model in one call, without a cache."""
    tensors = [torch.from_numpy(array) for array in (case.source, case.mask, case.target)]
    with torch.inference_mode():
        logits: NDArray[np.float64] = decoder.model(*tensors).numpy()
    return logits


def test_the_same_source_is_read_once(
    oracle: TorchDecoder, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = oracle.start(case.source, case.mask)
    assert oracle.start(case.source.copy(), case.mask.copy()) is state
    shorter = case.mask.copy()
    shorter[0, -1] = not shorter[0, -1]
    assert oracle.start(case.source, shorter) is not state
    monkeypatch.setattr(torch_model, "KEPT_STATE", case.source.size)
    long = oracle.start(case.source, case.mask)
    assert oracle.start(case.source, case.mask) is not long


def test_dropout_is_off(checkpoint: Checkpoint, case: Case) -> None:
    model = TorchDecoder.oracle(checkpoint.model).model.train()
    decoder = TorchDecoder(model)
    np.testing.assert_array_equal(logits_of_model(decoder, case), logits_of_model(decoder, case))


@pytest.mark.parametrize("layer", [nn.LayerNorm(8), nn.Linear(8, 8)])
def test_a_shaken_layer_rounds_in_another_way(layer: nn.Module) -> None:
    x = torch.randn(5, 8)
    plain = layer(x)
    with Shaken(0):
        assert 0 < (layer(x) - plain).abs().max() < 1e-5


def test_shaking_moves_what_a_large_bias_rounds_away() -> None:
    """A sum may begin with its bias, so that each product is rounded to the bias's last unit."""
    layer = nn.Linear(8, 8)
    nn.init.constant_(layer.bias, -1e4)
    x = torch.randn(5, 8)
    exact, plain = layer.double()(x.double()), layer.float()(x)
    with Shaken(0):
        shaken = layer(x)
    unit = 1e4 * 2.0**-23
    assert (plain - exact).abs().max() < 0.5 * unit
    assert 0.5 * unit < (shaken - exact).abs().max() < 2 * unit


def test_shaking_moves_what_attention_multiplies() -> None:
    queries, keys = torch.randn(2, 5, 8)
    plain = queries @ keys.T
    with Shaken(0):
        assert 0 < (queries @ keys.T - plain).abs().max() < 1e-5
