"""The model is the paper's: by its size, by published positions, and by torch.nn.Transformer."""

import dataclasses
import math
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from transferry.build_model.model.attention import KeyValues, MultiHeadAttention
from transferry.build_model.model.config import ModelConfig
from transferry.build_model.model.layers import Layer, sinusoidal_positions
from transferry.build_model.model.transformer import Transformer, greedy
from transferry.build_model.train.presets import PRESETS

BOS = 1
SHAPE = ModelConfig(
    vocabulary_size=40,
    d_model=32,
    heads=4,
    encoder_layers=2,
    decoder_layers=3,
    d_ff=48,
    dropout=0.0,
    max_positions=24,
)
LENGTHS = (9, 4, 1, 7)
TARGET_LENGTH = 8


@pytest.fixture(scope="module", params=["post-norm, ReLU", "pre-norm, GELU"])
def model(request: pytest.FixtureRequest) -> Transformer:
    """Every parameter is random, biases and norms too: none can be copied wrongly unnoticed."""
    torch.manual_seed(0)
    shape = SHAPE
    if request.param == "pre-norm, GELU":
        shape = dataclasses.replace(SHAPE, norm_order="pre", activation="gelu")
    model = Transformer(shape).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if name.endswith("norm.weight") else 0.0
            parameter.normal_(centre, 0.3)
    return model


@pytest.fixture(scope="module")
def source() -> Tensor:
    """[4, 9]: rows of unequal length, padded with 0."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, SHAPE.vocabulary_size, (len(LENGTHS), 9), generator=generator)
    return tokens * (torch.arange(9) < torch.tensor(LENGTHS)[:, None])


@pytest.fixture(scope="module")
def target() -> Tensor:
    """[4, 8]"""
    generator = torch.Generator().manual_seed(2)
    shape = (len(LENGTHS), TARGET_LENGTH)
    return torch.randint(3, SHAPE.vocabulary_size, shape, generator=generator)


def largest_difference(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    assert a.numel()
    return (a - b).abs().max().item()


@pytest.mark.parametrize(("preset", "count"), [("base", 63_082_496), ("big", 214_245_376)])
def test_parameters(preset: str, count: int) -> None:
    with torch.device("meta"):
        model = Transformer(PRESETS[preset].model_config(37_000))
    assert sum(parameter.numel() for parameter in model.parameters()) == count


def test_published_positions() -> None:
    table = sinusoidal_positions(16, 64)
    assert table.dtype == torch.float64
    row = [0.841471, 0.540302, 0.681561, 0.731761, 0.533168]
    assert table[1, :5].tolist() == pytest.approx(row, abs=5e-7)
    row = [0.650288, -0.759688, -0.968206, 0.250154]
    assert table[15, :4].tolist() == pytest.approx(row, abs=5e-7)
    assert sinusoidal_positions(1, 512)[0, :4].tolist() == [0.0, 1.0, 0.0, 1.0]


def test_the_oracle_has_positions_of_full_precision() -> None:
    torch.testing.assert_close(
        Transformer(SHAPE).double().positions, sinusoidal_positions(24, 32), rtol=0, atol=0
    )


def copy_attention(mine: MultiHeadAttention, theirs: nn.MultiheadAttention) -> None:
    parts = (mine.query, mine.key, mine.value)
    theirs.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
    theirs.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
    theirs.out_proj.load_state_dict(mine.output.state_dict())


def copy_layer(
    mine: Layer, theirs: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer
) -> None:
    assert mine.self_attention is not None
    copy_attention(mine.self_attention, theirs.self_attn)
    norms = [mine.self_residual.norm, mine.feed_forward_residual.norm]
    if isinstance(theirs, nn.TransformerDecoderLayer):
        assert mine.cross_attention is not None
        assert mine.cross_residual is not None
        copy_attention(mine.cross_attention, theirs.multihead_attn)
        norms.insert(1, mine.cross_residual.norm)
    for number, norm in enumerate(norms, start=1):
        theirs.get_submodule(f"norm{number}").load_state_dict(norm.state_dict())
    theirs.linear1.load_state_dict(mine.feed_forward.inner.state_dict())
    theirs.linear2.load_state_dict(mine.feed_forward.outer.state_dict())


@pytest.fixture(scope="module")
def reference(model: Transformer) -> nn.Transformer:
    """torch's own Transformer with the model's weights; post-norm has no norms after the stacks."""
    theirs = nn.Transformer(
        SHAPE.d_model,
        SHAPE.heads,
        SHAPE.encoder_layers,
        SHAPE.decoder_layers,
        SHAPE.d_ff,
        dropout=0.0,
        activation=model.config.activation,
        layer_norm_eps=SHAPE.norm_epsilon,
        batch_first=True,
        norm_first=model.config.norm_order == "pre",
        dtype=torch.float64,
    )
    theirs.encoder.norm = model.encoder_norm
    theirs.decoder.norm = model.decoder_norm
    with torch.no_grad():
        for mine, layer in zip(model.encoder, theirs.encoder.layers, strict=True):
            copy_layer(mine, layer)  # type: ignore[arg-type]
        for mine, layer in zip(model.decoder, theirs.decoder.layers, strict=True):
            copy_layer(mine, layer)  # type: ignore[arg-type]
    return theirs


def embed(model: Transformer, tokens: Tensor) -> Tensor:
    """Sections 3.4 and 3.5 of the paper, element by element."""
    rows = [
        [
            math.cos(position / 10000 ** ((i - 1) / SHAPE.d_model))
            if i % 2
            else math.sin(position / 10000 ** (i / SHAPE.d_model))
            for i in range(SHAPE.d_model)
        ]
        for position in range(tokens.shape[1])
    ]
    table = torch.tensor(rows, dtype=torch.float64)
    return model.embedding.weight[tokens] * math.sqrt(SHAPE.d_model) + table


@pytest.fixture(scope="module")
def answers(
    model: Transformer, reference: nn.Transformer, source: Tensor, target: Tensor
) -> tuple[Tensor, Tensor]:
    """torch.nn.Transformer's encoder output, and logits at every target position."""
    padding = source == 0
    with torch.no_grad():
        encoded = reference.encoder(embed(model, source), src_key_padding_mask=padding)
        decoded = reference.decoder(
            embed(model, target),
            encoded,
            tgt_mask=nn.Transformer.generate_square_subsequent_mask(
                TARGET_LENGTH, dtype=torch.float64
            ),
            memory_key_padding_mask=padding,
        )
        return encoded, decoded @ model.embedding.weight.T


@pytest.mark.parametrize("chunks", [(8,), (1,) * 8, (1, 7), (3, 5), (2, 1, 1, 4)])
@torch.no_grad()
def test_torch_scores_the_same_at_once_and_with_the_cache(
    model: Transformer,
    source: Tensor,
    target: Tensor,
    answers: tuple[Tensor, Tensor],
    chunks: tuple[int, ...],
) -> None:
    mask = source != 0
    encoded = model.encode(source, mask)
    assert largest_difference(encoded[mask], answers[0][mask]) <= 1e-12
    assert answers[1].abs().max() > 1.0
    assert largest_difference(model(source, mask, target), answers[1]) <= 1e-12
    cross, past = model.cross(encoded), model.empty_past(len(source))
    pieces = []
    for start, end in pairwise(accumulate(chunks, initial=0)):
        assert isinstance(past[0], KeyValues)
        assert past[0].keys.shape == (len(source), SHAPE.heads, start, SHAPE.d_head)
        logits, past = model.decode(target[:, start:end], mask, cross, past)
        pieces.append(logits)
    assert largest_difference(torch.cat(pieces, dim=1), answers[1]) <= 1e-12


@torch.no_grad()
def test_the_past_is_a_value(model: Transformer, source: Tensor, target: Tensor) -> None:
    mask = source != 0
    cross = model.cross(model.encode(source, mask))
    _, past = model.decode(target[:, :3], mask, cross, model.empty_past(len(source)))
    first, _ = model.decode(target[:, 3:4], mask, cross, past)
    model.decode(target[:, 4:8], mask, cross, past)
    again, _ = model.decode(target[:, 3:4], mask, cross, past)
    assert past[0].keys.shape[2] == 3
    assert torch.equal(first, again)


def test_dropout_is_for_training_only(source: Tensor, target: Tensor) -> None:
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**{**SHAPE.to_dict(), "dropout": 0.5}))
    given = (source, source != 0, target)
    assert not torch.equal(model(*given), model(*given))
    model.eval()
    assert torch.equal(model(*given), model(*given))


def generate(
    model: Transformer, source: Tensor, max_length: int, eos_id: int = SHAPE.vocabulary_size
) -> list[list[int]]:
    """Without an end token no row ends."""
    return greedy(model, source, source != 0, bos_id=BOS, eos_id=eos_id, max_length=max_length)


def by_argmax(model: Transformer, row: Tensor, length: int) -> list[int]:
    """One row alone, through `forward` only."""
    said = [BOS]
    with torch.no_grad():
        for _ in range(length):
            logits = model(row[None], torch.ones(1, len(row)).bool(), torch.tensor([said]))
            said.append(int(logits[0, -1].argmax()))
    return said[1:]


def test_greedy_is_that_of_each_row_alone_without_a_cache(
    model: Transformer, source: Tensor
) -> None:
    plain = [
        by_argmax(model, row[:length], 12) for row, length in zip(source, LENGTHS, strict=True)
    ]
    assert len({tuple(row) for row in plain}) > 1
    assert generate(model, source, 12) == plain


def test_greedy_ends_each_row_at_its_own_end_and_at_its_length(
    model: Transformer, source: Tensor
) -> None:
    endless = generate(model, source, 12)
    end = endless[0][4]
    cut = [row[: row.index(end)] if end in row else row for row in endless]
    assert len(cut[0]) <= 4
    assert len({len(row) for row in cut}) > 1
    assert generate(model, source, 12, end) == cut
    longest = generate(model, source, SHAPE.max_positions)
    assert {len(row) for row in longest} == {SHAPE.max_positions}
    for length in (0, 1, 5):
        assert generate(model, source, length) == [row[:length] for row in longest]


def test_greedy_stops_when_all_rows_have_ended(
    model: Transformer, source: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = generate(model, source[:1], 1)
    calls: list[tuple[int, ...]] = []
    decode = model.decode

    def counted(target: Tensor, *rest: Any) -> Any:
        calls.append(tuple(target.shape))
        return decode(target, *rest)

    monkeypatch.setattr(model, "decode", counted)
    assert generate(model, source[:1], 20, end[0][0]) == [[]]
    assert calls == [(1, 1)]
