"""What a Transformer is stacked from: positions, norms, feed-forward, and one layer class."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transferry.build_model.attention import KeyValues, MultiHeadAttention, Past, Rotation
from transferry.build_model.config import ModelConfig


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


def rotary_angles(length: int, d_head: int, base: float) -> Rotation:
    """Returns the table of rotary positions: position times base^(-2i / d_head), for each half.

    Su et al. (2021), section 3.4.2.

    Returns:
        Cosines and sines [length, d_head] float64.
    """
    positions = torch.arange(length, dtype=torch.float64)[:, None]
    even = torch.arange(0, d_head, 2, dtype=torch.float64)
    angles = (positions / base ** (even / d_head)).repeat(1, 2)
    return Rotation(angles.cos(), angles.sin())


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * w (Zhang and Sennrich 2019, eq. 4)."""

    def __init__(self, d_model: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last dimension of x [..., d_model]."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def make_norm(config: ModelConfig) -> nn.Module:
    """Returns the norm that the config names."""
    if config.norm == "rms":
        return RMSNorm(config.d_model, config.norm_epsilon)
    return nn.LayerNorm(config.d_model, config.norm_epsilon, bias=config.bias)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu-tanh": functools.partial(F.gelu, approximate="tanh"),
    "swish": F.silu,
    "swiglu": F.silu,
}


class FeedForward(nn.Module):
    """max(0, x W1 + b1) W2 + b2, at each position alone (eq. 2 of the paper).

    Other activations stand in the place of max(0, ...). SwiGLU is (swish(x W) * x V) W2 (Shazeer
    2020, eq. 6), W being `gate` and V `inner`.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        self.inner = nn.Linear(config.d_model, config.d_ff, bias=config.bias)
        self.gate = (
            nn.Linear(config.d_model, config.d_ff, bias=config.bias)
            if config.activation == "swiglu"
            else None
        )
        self.outer = nn.Linear(config.d_ff, config.d_model, bias=config.bias)

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
    """Norm(x + Dropout(Sublayer(x))), the paper's, or x + Dropout(Sublayer(Norm(x)))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.pre = config.norm_order == "pre"
        self.norm = make_norm(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Applies `sublayer` to x [batch, length, d_model] and keeps the shape."""
        if self.pre:
            return x + self.dropout(sublayer(self.norm(x)))  # type: ignore[no-any-return]
        y: Tensor = self.norm(x + self.dropout(sublayer(x)))
        return y


class Layer(nn.Module):
    """Self-attention, cross-attention where there is something to cross to, feed-forward.

    The encoder's layer is this without cross-attention, the decoder's is this with it.
    """

    def __init__(self, config: ModelConfig, *, cross: bool) -> None:
        super().__init__()
        self.self_attention = MultiHeadAttention(config)
        self.self_residual = Residual(config)
        self.cross_attention = MultiHeadAttention(config) if cross else None
        self.cross_residual = Residual(config) if cross else None
        self.feed_forward = FeedForward(config)
        self.feed_forward_residual = Residual(config)

    def forward(
        self,
        x: Tensor,
        bias: Tensor | None,
        past: Past | None = None,
        cross: KeyValues | None = None,
        cross_bias: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> tuple[Tensor, KeyValues]:
        """Runs the layer over new positions.

        Args:
            x: [batch, length, d_model]
            bias: M of self-attention, broadcastable to [batch, heads, length, past + length].
            past: Keys and values of earlier positions, [batch, kv_heads, past, d_head] each, or
                another cache that takes up the new ones.
            cross: Keys and values of the source, [batch, kv_heads, source, d_head] each.
            cross_bias: M of cross-attention, broadcastable to [batch, heads, length, source].
            rotation: The angles of the new positions, where positions are rotary.

        Returns:
            The new x, and the keys and values of earlier and new positions together.
        """
        present: KeyValues

        def attend_self(y: Tensor) -> Tensor:
            nonlocal present
            present = self.self_attention.project(y, rotation)
            if past is not None:
                present = past.append(present)
            return self.self_attention(y, present, bias, rotation)  # type: ignore[no-any-return]

        x = self.self_residual(x, attend_self)
        if self.cross_attention is not None and self.cross_residual is not None:
            attention = self.cross_attention
            x = self.cross_residual(x, lambda y: attention(y, cross, cross_bias))
        return self.feed_forward_residual(x, self.feed_forward), present


class OutputTransform(nn.Module):
    """Norm(Activation(x W + b)), BERT's `cls.predictions.transform`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.linear = nn.Linear(config.d_model, config.d_model, bias=config.bias)
        self.activation = ACTIVATIONS[config.activation]
        self.norm = make_norm(config)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, d_model] -> [batch, length, d_model]."""
        y: Tensor = self.norm(self.activation(self.linear(x)))
        return y
