"""Options of a layer that no configuration of transformers shows; test_model_types.py has those."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from transferry.build_model.model.config import ModelConfig
from transferry.build_model.model.layers import rotary_angles, rotary_rates
from transferry.build_model.model.parts.disentangled import Disentangled
from transferry.build_model.model.transformer import Transformer

SHAPE = ModelConfig(
    vocabulary_size=40,
    d_model=32,
    heads=4,
    encoder_layers=0,
    decoder_layers=3,
    d_ff=48,
    dropout=0.0,
    max_positions=24,
    architecture="decoder-only",
)
LENGTHS = torch.tensor([6, 1, 4])


def randomised(**changes: Any) -> Transformer:
    """Every parameter is random, norms too."""
    torch.manual_seed(0)
    model = Transformer(dataclasses.replace(SHAPE, **changes)).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.3)
    return model


def random_tokens(rows: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, SHAPE.vocabulary_size, (rows, length), generator=generator)


def scores(model: Transformer, tokens: Tensor) -> Tensor:
    nothing = torch.zeros(len(tokens), 0, dtype=torch.bool)
    return model.decode(tokens, nothing, [], model.empty_past(len(tokens)))[0]


def test_rotation_is_multiplication_by_a_complex_number() -> None:
    """Su et al. (2021): the pair (x_i, x_(i + d/2)) as one complex number, times e^(i m theta)."""
    x = torch.randn(2, 3, 11, 8, dtype=torch.float64)
    found = rotary_angles(11, rotary_rates(8, 100.0)).turn(x)
    theta = 100.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    angle = torch.arange(11, dtype=torch.float64)[:, None] * theta
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angle), angle)
    torch.testing.assert_close(found, torch.cat([turned.real, turned.imag], -1), rtol=0, atol=1e-13)


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary"])
@torch.no_grad()
def test_padding_takes_no_position(positions: str) -> None:
    """Prompts of unequal length, padded where they end, go on as each would alone."""
    model = randomised(norm_order="pre", positions=positions, key_value_heads=2)
    prompts, new = random_tokens(3, 6), random_tokens(3, 4)
    mask = torch.arange(6) < LENGTHS[:, None]
    _, past = model.decode(prompts, mask[:, :0], [], model.empty_past(3))
    first, past = model.decode(new[:, :1], mask, [], past)
    mask = torch.cat([mask, torch.ones(3, 1, dtype=torch.bool)], dim=1)
    later, _ = model.decode(new[:, 1:], mask, [], past)
    for row, length in enumerate(LENGTHS.tolist()):
        alone = scores(model, torch.cat([prompts[row, :length], new[row]])[None])[0, length:]
        found = torch.cat([first[row], later[row]])
        torch.testing.assert_close(found, alone, rtol=0, atol=1e-12)


@torch.no_grad()
def test_a_separate_output_and_no_biases() -> None:
    model = randomised(tied=False, bias=False)
    names = [name for name, _ in model.named_parameters()]
    assert "output.weight" in names
    assert not [name for name in names if name.endswith("bias")]
    before = scores(model, random_tokens(1, 4))
    assert model.output is not None
    model.output.weight.mul_(2.0)
    torch.testing.assert_close(scores(model, random_tokens(1, 4)), 2.0 * before)


@pytest.mark.parametrize(("span", "longest"), [(256, 512), (9, 64), (64, 0)])
def test_vectors_of_distances_are_deberta_s(span: int, longest: int) -> None:
    theirs = pytest.importorskip("transformers.models.deberta_v2.modeling_deberta_v2")
    tokens = torch.empty(1, 64 if longest < 512 else 512, 1)
    wanted = theirs.build_relative_position(tokens, tokens, span if longest else -1, longest)
    length = tokens.shape[1]
    rows = Disentangled(span, longest, True, True, False, False).rows(length - 1)
    distance = torch.arange(length)[:, None] - torch.arange(length) + length - 1
    assert (rows[distance] == (wanted[0] + span).clamp(0, 2 * span - 1)).all()
