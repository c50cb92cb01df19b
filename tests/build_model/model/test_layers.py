"""The options of a layer against formulas, and against each other where one contains another."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.build_model.model.test_transformer import copy_layer
from transferry.build_model.model.attention import KeyValues, Rotation, attend
from transferry.build_model.model.config import ModelConfig
from transferry.build_model.model.layers import FeedForward, rotary_angles, rotary_rates
from transferry.build_model.model.norms import RMSNorm, make_norm
from transferry.build_model.model.parts.disentangled import Disentangled
from transferry.build_model.model.transformer import Transformer, greedy

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


def test_rms_norm_is_torch_s() -> None:
    norm = RMSNorm(dataclasses.replace(SHAPE, norm_epsilon=1e-3), 32).double()
    x = torch.randn(5, 7, 32, dtype=torch.float64)
    with torch.no_grad():
        norm.weight.normal_()
        found = norm(x)
    torch.testing.assert_close(found, F.rms_norm(x, [32], norm.weight, 1e-3), rtol=1e-13, atol=0)


def test_norms_without_bias() -> None:
    assert [
        name for name, _ in make_norm(dataclasses.replace(SHAPE, bias=False)).named_parameters()
    ] == ["weight"]
    assert isinstance(make_norm(dataclasses.replace(SHAPE, norm="rms")), RMSNorm)


def test_rotation_is_multiplication_by_a_complex_number() -> None:
    """Su et al. (2021): the pair (x_i, x_(i + d/2)) as one complex number, times e^(i m theta)."""
    x = torch.randn(2, 3, 11, 8, dtype=torch.float64)
    found = rotary_angles(11, rotary_rates(8, 100.0)).turn(x)
    theta = 100.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    angle = torch.arange(11, dtype=torch.float64)[:, None] * theta
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angle), angle)
    torch.testing.assert_close(found, torch.cat([turned.real, turned.imag], -1), rtol=0, atol=1e-13)


def test_rotary_scores_depend_on_distance_alone() -> None:
    table = rotary_angles(50, rotary_rates(8, 10000.0))
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def score(query: int, key: int) -> float:
        place = [table.at(torch.tensor([position])) for position in (query, key)]
        return float(place[0].turn(q).flatten() @ place[1].turn(k).flatten())

    assert score(7, 3) == pytest.approx(score(40, 36), abs=1e-12)
    assert score(7, 3) != pytest.approx(score(8, 3), abs=1e-3)


def test_a_table_is_read_at_each_row_s_positions() -> None:
    table = rotary_angles(20, rotary_rates(8, 10000.0))
    positions = torch.tensor([[3, 4], [9, 10]])
    rows = table.at(positions)
    assert rows.cosines.shape == (2, 1, 2, 8)
    torch.testing.assert_close(rows.sines[1, 0], table.sines[9:11])
    assert isinstance(table.at(torch.arange(4)), Rotation)


def test_swiglu() -> None:
    """Shazeer (2020), eq. 6, by hand."""
    layer = FeedForward(dataclasses.replace(SHAPE, activation="swiglu")).double()
    assert layer.gate is not None
    x = torch.randn(4, 32, dtype=torch.float64)
    gate = x @ layer.gate.weight.T + layer.gate.bias
    inner = x @ layer.inner.weight.T + layer.inner.bias
    wanted = (gate * torch.sigmoid(gate) * inner) @ layer.outer.weight.T + layer.outer.bias
    torch.testing.assert_close(layer(x), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("biased", ["nothing", "positions", "rows"])
def test_grouped_heads_are_heads_repeated(kv_heads: int, biased: str) -> None:
    query = torch.randn(3, 4, 5, 8, dtype=torch.float64)
    keys, values = torch.randn(2, 3, kv_heads, 6, 8, dtype=torch.float64)
    bias = {
        "nothing": None,
        "positions": torch.randn(5, 6, dtype=torch.float64),
        "rows": torch.randn(3, 1, 1, 6, dtype=torch.float64),
    }[biased]
    repeated = KeyValues(
        keys.repeat_interleave(4 // kv_heads, dim=1), values.repeat_interleave(4 // kv_heads, dim=1)
    )
    wanted = attend(query, repeated, bias)
    torch.testing.assert_close(attend(query, KeyValues(keys, values), bias), wanted)


@torch.no_grad()
def test_a_decoder_alone_is_torch_s_encoder_that_looks_back_only() -> None:
    model = randomised(norm_order="pre", positions="learned", scale_embedding=False)
    layer = torch.nn.TransformerEncoderLayer(
        32, 4, 48, dropout=0.0, batch_first=True, norm_first=True, dtype=torch.float64
    )
    theirs = torch.nn.TransformerEncoder(layer, 3, model.decoder_norm, enable_nested_tensor=False)
    for mine, other in zip(model.decoder, theirs.layers, strict=True):
        copy_layer(mine, other)  # type: ignore[arg-type]
    tokens = random_tokens(3, 9)
    x = model.embedding.weight[tokens] + model.positions[:9]
    hidden = theirs.eval()(
        x, torch.nn.Transformer.generate_square_subsequent_mask(9, dtype=torch.float64)
    )
    wanted = hidden @ model.embedding.weight.T
    torch.testing.assert_close(scores(model, tokens), wanted, rtol=0, atol=1e-12)


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
def test_the_output_s_transform_and_bias() -> None:
    shape = dict(architecture="encoder-only", encoder_layers=2, decoder_layers=0)
    model = randomised(**shape, output_transform=True, output_bias=True, activation="gelu")
    tokens = random_tokens(2, 5)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    hidden = model.encode(tokens, mask)
    transform = model.output_transform
    assert transform is not None
    assert model.output_bias is not None
    y = F.gelu(hidden @ transform.linear.weight.T + transform.linear.bias)
    wanted = transform.norm(y) @ model.embedding.weight.T + model.output_bias
    torch.testing.assert_close(model(tokens, mask, tokens), wanted, rtol=0, atol=1e-12)


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


@pytest.mark.parametrize("scaled", [True, False])
@torch.no_grad()
def test_embeddings_are_scaled_and_normalised(scaled: bool) -> None:
    model = randomised(scale_embedding=scaled, embedding_norm=True)
    assert model.embedding_norm is not None
    tokens, positions = random_tokens(1, 3), torch.arange(3)
    x = model.embedding.weight[tokens] * (32**0.5 if scaled else 1.0) + model.positions[:3]
    torch.testing.assert_close(model.embed(tokens, positions), model.embedding_norm(x))


def test_greedy_of_pairs_is_unchanged_by_a_deep_encoder() -> None:
    model = randomised(architecture="encoder-decoder", encoder_layers=4, decoder_layers=1)
    assert (len(model.encoder), len(model.decoder)) == (4, 1)
    source = random_tokens(2, 5)
    mask = torch.ones_like(source, dtype=torch.bool)
    rows = [
        greedy(model, source, mask, bos_id=1, eos_id=2, max_length=6, use_cache=cached)
        for cached in (True, False)
    ]
    assert rows[0] == rows[1]


@pytest.mark.parametrize(("span", "longest"), [(256, 512), (9, 64), (64, 0)])
def test_vectors_of_distances_are_deberta_s(span: int, longest: int) -> None:
    theirs = pytest.importorskip("transformers.models.deberta_v2.modeling_deberta_v2")
    tokens = torch.empty(1, 64 if longest < 512 else 512, 1)
    wanted = theirs.build_relative_position(tokens, tokens, span if longest else -1, longest)
    length = tokens.shape[1]
    rows = Disentangled(span, longest, True, True, False, False).rows(length - 1)
    distance = torch.arange(length)[:, None] - torch.arange(length) + length - 1
    assert (rows[distance] == (wanted[0] + span).clamp(0, 2 * span - 1)).all()
