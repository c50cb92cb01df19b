"""Positions, feed-forward sublayer and layer of a Transformer."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transferry.build_model.model.attention import KeyValues, MultiHeadAttention, Past, Rotation
from transferry.build_model.model.config import GATED, ModelConfig, Pooling
from transferry.build_model.model.norms import make_norm
from transferry.build_model.model.recurrence import SSRU, CellState


def sinusoidal_positions(length: int, d_model: int) -> Tensor:
    """Returns the table of section 3.5 of the paper.

    PE(pos, 2i) = sin(pos / 10000^(2i / d_model)), PE(pos, 2i + 1) = cos(pos / 10000^(2i / d_model))

    Returns:
        [length, d_model] float64: rounding to the model's type is left to the caller.
    """
    positions = torch.arange(length, dtype=torch.float64)[:, None]
    even = torch.arange(0, d_model, 2, dtype=torch.float64)
    angles = positions / 10000.0 ** (even / d_model)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


def rotary_rates(d_head: int, base: float) -> list[float]:
    """Returns the angle per position of each pair of features: base^(-2i / d_head).

    Su et al. (2021), section 3.4.2.
    """
    return [1.0 / base ** (even / d_head) for even in range(0, d_head, 2)]


def rotary_angles(length: int, rates: Sequence[float], scale: float = 1.0) -> Rotation:
    """Returns the table of rotary positions: position times rate, for each half of the features.

    Args:
        length: Number of positions.
        rates: Radians per position, for each pair of features.
        scale: Factor of cosines and sines.

    Returns:
        Cosines and sines [length, 2 * pairs] float64.
    """
    positions = torch.arange(length, dtype=torch.float64)[:, None]
    angles = (positions * torch.tensor(rates, dtype=torch.float64)).repeat(1, 2)
    return Rotation(angles.cos() * scale, angles.sin() * scale)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu-tanh": functools.partial(F.gelu, approximate="tanh"),
    "gelu-quick": lambda x: x * torch.sigmoid(1.702 * x),
    "swish": F.silu,
}
HEAD_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **ACTIVATIONS,
    "none": nn.Identity(),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


class FeedForward(nn.Module):
    """max(0, x W1 + b1) W2 + b2, at each position alone (eq. 2 of the paper).

    Other activations stand in the place of max(0, ...). SwiGLU is (swish(x W) * x V) W2 (Shazeer
    2020, eq. 6), W being `gate` and V `inner`, and the other gated units are like it.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        gate, bias = GATED.get(config.activation), config.has_bias("feed_forward")
        self.activation = ACTIVATIONS[gate or config.activation]
        self.inner = nn.Linear(config.d_model, config.d_ff, bias=bias)
        self.gate = nn.Linear(config.d_model, config.d_ff, bias=bias) if gate else None
        self.outer = nn.Linear(config.d_ff, config.d_model, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, d_model] -> [batch, length, d_model]."""
        inner = self.inner(x)
        if self.gate is None:
            inner = self.activation(inner)
        else:
            inner = self.activation(self.gate(x)) * inner
        y: Tensor = self.outer(inner)
        return y


class Residual(nn.Module):
    """Norm(x + Dropout(Sublayer(x))), the paper's, or another order of `ModelConfig.norm_order`."""

    def __init__(self, config: ModelConfig, *, first: bool = False) -> None:
        super().__init__()
        self.order = config.norm_order
        self.norm = nn.Identity() if first and not config.first_norm else make_norm(config)
        self.outer_norm = make_norm(config) if self.order == "sandwich" else None
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Applies `sublayer` to x [batch, length, d_model] and keeps the shape."""
        if self.order == "post":
            y: Tensor = self.norm(x + self.dropout(sublayer(x)))
            return y
        return x + self.change(x, sublayer)

    def change(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns the summand of x [batch, length, d_model], where the order is not "post"."""
        before = self.order in ("pre", "sandwich")
        y: Tensor = self.dropout(sublayer(self.norm(x) if before else x))
        after = self.outer_norm if before else self.norm
        return y if after is None else after(y)


class Layer(nn.Module):
    """Self-attention or SSRU, cross-attention where there is a source, feed-forward.

    The encoder's layer is this without cross-attention, the decoder's is this with it.
    """

    def __init__(self, config: ModelConfig, layer: int, *, cross: bool) -> None:
        super().__init__()
        self.parallel = config.parallel
        recurrent = cross and config.recurrent
        self.recurrence = SSRU(config) if recurrent else None
        self.self_attention = None if recurrent else MultiHeadAttention(config, layer)
        self.self_residual = Residual(config, first=layer == 0)
        self.cross_attention = MultiHeadAttention(config, layer) if cross else None
        self.cross_residual = Residual(config) if cross else None
        self.feed_forward = FeedForward(config)
        self.feed_forward_residual = Residual(config)

    def forward(
        self,
        x: Tensor,
        bias: Tensor | None,
        past: Past | CellState | None = None,
        cross: KeyValues | None = None,
        cross_bias: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> tuple[Tensor, KeyValues | CellState]:
        """Runs the layer over new positions.

        Args:
            x: [batch, length, d_model]
            bias: M of self-attention, broadcastable to [batch, heads, length, past + length].
            past: Keys and values of earlier positions, [batch, kv_heads, past, d_head] each, or
                another cache that takes up the new ones; the state of an SSRU.
            cross: Keys and values of the source, [batch, kv_heads, source, d_head] each.
            cross_bias: M of cross-attention, broadcastable to [batch, heads, length, source].
            rotation: The angles of the new positions, where positions are rotary.

        Returns:
            The new x, and the keys and values of earlier and new positions together, or the state.
        """
        present: KeyValues | CellState

        def attend_self(y: Tensor) -> Tensor:
            nonlocal present
            if self.recurrence is not None:
                read, present = self.recurrence(y, past)
                return read  # type: ignore[no-any-return]
            assert self.self_attention is not None
            memory = self.self_attention.project(y, rotation)
            if past is not None:
                assert not isinstance(past, CellState)
                memory = past.append(memory)
            present = memory
            return self.self_attention(y, memory, bias, rotation)  # type: ignore[no-any-return]

        if self.parallel:
            seen = self.self_residual.change(x, attend_self)
            return x + seen + self.feed_forward_residual.change(x, self.feed_forward), present
        x = self.self_residual(x, attend_self)
        if self.cross_attention is not None and self.cross_residual is not None:
            attention = self.cross_attention
            x = self.cross_residual(x, lambda y: attention(y, cross, cross_bias))
        return self.feed_forward_residual(x, self.feed_forward), present


class RelativeBias(nn.Module):
    """A number for each head and bucket of distances, added to the scores.

    Raffel et al. (2020), section 2.1: half of the buckets are single distances, the rest grow with
    the logarithm up to the longest distance, beyond which all share the last one.
    """

    buckets: Tensor

    def __init__(self, config: ModelConfig, *, both_ways: bool) -> None:
        super().__init__()
        self.longest = config.relative_distance
        self.weight = nn.Parameter(torch.zeros(config.relative_buckets, config.heads))
        # As the table of a lookup: the exporter would store a reshaped copy, unknown to verify.
        buckets = self._buckets(config, both_ways)[:, None]
        self.register_buffer("buckets", buckets, persistent=False)

    def _buckets(self, config: ModelConfig, both_ways: bool) -> Tensor:
        """Returns the bucket of each distance from -longest to longest, key less query."""
        distance = torch.arange(-self.longest, self.longest + 1)
        count, after = config.relative_buckets, torch.zeros_like(distance)
        if both_ways:
            count //= 2
            after = (distance > 0).long() * count
            distance = distance.abs()
        else:
            distance = (-distance).clamp(min=0)
        single = count // 2
        # In float32, as Mesh TensorFlow and transformers do: its rounding decides at the bounds.
        growth = torch.log(distance.to(torch.float32) / single)
        growth = growth / math.log(self.longest / single) * (count - single)
        wide = (single + growth.clamp(min=0).long()).clamp(max=count - 1)
        return torch.where(distance < single, distance, wide) + after

    def forward(self, distance: Tensor) -> Tensor:
        """Returns the bias of distances of keys less queries.

        Args:
            distance: [queries, length] or [batch, queries, length] int64

        Returns:
            [heads, queries, length] or [batch, heads, queries, length]
        """
        place = distance.clamp(-self.longest, self.longest) + self.longest
        bucket = F.embedding(place, self.buckets).squeeze(-1)
        return F.embedding(bucket, self.weight).movedim(-1, -3)


class Head(nn.Module):
    """Pooling, linear layers and scaling: a vector or scores of a text, or scores of each token."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        widths = [config.d_model * max(1, len(config.pooling)), *config.head_widths]
        layers = enumerate(
            zip(
                widths,
                config.head_widths,
                config.head_activations,
                config.head_biases,
                strict=False,
            )
        )
        self.layers = nn.ModuleList(
            HeadLayer(config, *layer, norm=config.head_norm and not number)
            for number, layer in layers
        )

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Reads the hidden states of texts.

        Args:
            hidden: [batch, length, d_model]
            mask: [batch, length] bool, True at a token, False at padding.

        Returns:
            [batch, width]; where nothing is pooled [batch, length, width], which means nothing at
            padding.
        """
        x = hidden
        if self.config.pooling:
            x = torch.cat([pooled(hidden, mask, kind) for kind in self.config.pooling], dim=-1)
        for layer in self.layers:
            x = layer(x)
        return F.normalize(x, dim=-1) if self.config.unit_length else x


class HeadLayer(nn.Module):
    """Activation(x W + b), with a norm after it if there is one."""

    def __init__(
        self, config: ModelConfig, read: int, width: int, activation: str, bias: bool, *, norm: bool
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(read, width, bias=bias)
        self.activation = HEAD_ACTIVATIONS[activation]
        self.norm = make_norm(config, width) if norm else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., read] -> [..., width]."""
        x = self.activation(self.linear(x))
        return x if self.norm is None else self.norm(x)


def pooled(hidden: Tensor, mask: Tensor, kind: Pooling) -> Tensor:
    """Makes one vector of the hidden states of each text.

    Args:
        hidden: [batch, length, d_model]
        mask: [batch, length] bool, True at a token; padding comes after the tokens.
        kind: See `Pooling`.

    Returns:
        [batch, d_model]
    """
    if kind == "first":
        return hidden[:, 0]
    there = mask[..., None]
    if kind == "max":
        return hidden.masked_fill(~there, -torch.inf).amax(dim=1)
    hidden, ones = hidden.masked_fill(~there, 0.0), mask.to(hidden.dtype)
    length, place = ones.sum(dim=1, keepdim=True), ones.cumsum(dim=1)
    if kind == "last":
        weights = ones * (place == length)
    elif kind == "weighted":
        weights = ones * place / (ones * place).sum(dim=1, keepdim=True)
    else:
        weights = ones / (length if kind == "mean" else length.sqrt())
    return (hidden * weights[..., None]).sum(dim=1)


class OutputTransform(nn.Module):
    """Norm(Activation(x W + b)), BERT's `cls.predictions.transform`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        bias, activation = config.has_bias("output_transform"), config.output_activation
        activation = activation or GATED.get(config.activation, config.activation)
        self.linear = nn.Linear(config.d_model, config.d_embedding, bias=bias)
        self.activation = ACTIVATIONS[activation]
        self.norm = make_norm(config, config.d_embedding)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, d_model] -> [batch, length, d_embedding]."""
        y: Tensor = self.norm(self.activation(self.linear(x)))
        return y
