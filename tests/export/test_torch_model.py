"""TorchDecoder gives the model's own logits, and the search drives it as a plain greedy loop."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from transferry.build_model.checkpoint import Checkpoint
from transferry.build_model.model.layers import sinusoidal_positions
from transferry.export import torch_model
from transferry.export.oracle.cases import random_case
from transferry.export.torch_model import TorchDecoder
from transferry.runtime.proof.compare import Case

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


@pytest.mark.parametrize("pieces", [[9], [1] * 9, [4, 1, 4]])
def test_steps_give_what_the_model_gives(
    oracle: TorchDecoder, case: Case, pieces: Sequence[int]
) -> None:
    state = oracle.start(case.source, case.mask)
    found = []
    for tokens in np.split(case.target, np.cumsum(pieces)[:-1], axis=1):
        output, state = oracle.step(tokens, state)
        found.append(output.all_logits)
    np.testing.assert_allclose(
        np.concatenate(found, axis=1), logits_of_model(oracle, case), rtol=0, atol=1e-12
    )


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


def test_oracle_is_a_float64_copy(checkpoint: Checkpoint, case: Case) -> None:
    oracle = TorchDecoder.oracle(checkpoint.model)
    assert {tensor.dtype for tensor in oracle.model.state_dict().values()} == {torch.float64}
    assert {tensor.dtype for tensor in checkpoint.model.state_dict().values()} == {torch.float32}
    assert checkpoint.model.positions.dtype == torch.float32
    assert logits_of_model(TorchDecoder(checkpoint.model), case).dtype == np.float32

    config = checkpoint.model.config
    exact = sinusoidal_positions(config.max_positions, config.d_model)
    assert exact.dtype == torch.float64
    assert torch.equal(oracle.model.positions, exact)
    for name, weight in checkpoint.model.state_dict().items():
        assert torch.equal(oracle.model.state_dict()[name], weight.double())


def test_dropout_is_off(checkpoint: Checkpoint, case: Case) -> None:
    model = TorchDecoder.oracle(checkpoint.model).model.train()
    decoder = TorchDecoder(model)
    np.testing.assert_array_equal(logits_of_model(decoder, case), logits_of_model(decoder, case))
