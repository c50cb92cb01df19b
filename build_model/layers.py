"""What a Transformer is stacked from: positions, feed-forward, residual, and one layer class."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from transferry.build_model.attention import KeyValues, MultiHeadAttention
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


class FeedForward(nn.Module):
    """max(0, x W1 + b1) W2 + b2, at each position alone (eq. 2 of the paper)."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.inner = nn.Linear(d_model, d_ff)
        self.outer = nn.Linear(d_ff, d_model)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, d_model] -> [batch, length, d_model]."""
        y: Tensor = self.outer(torch.relu(self.inner(x)))
        return y


class Residual(nn.Module):
    """LayerNorm(x + Dropout(Sublayer(x))), the post-norm arrangement of the paper."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.d_model, eps=config.norm_epsilon)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Applies `sublayer` to x [batch, length, d_model] and keeps the shape."""
        y: Tensor = self.norm(x + self.dropout(sublayer(x)))
        return y


class Layer(nn.Module):
    """Self-attention, cross-attention where there is something to cross to, feed-forward.

    The encoder's layer is this without cross-attention, the decoder's is this with it.
    """

    def __init__(self, config: ModelConfig, *, cross: bool) -> None:
        super().__init__()
        self.self_attention = MultiHeadAttention(config.d_model, config.heads)
        self.self_residual = Residual(config)
        self.cross_attention = MultiHeadAttention(config.d_model, config.heads) if cross else None
        self.cross_residual = Residual(config) if cross else None
        self.feed_forward = FeedForward(config.d_model, config.d_ff)
        self.feed_forward_residual = Residual(config)

    def forward(
        self,
        x: Tensor,
        bias: Tensor | None,
        past: KeyValues | None = None,
        cross: KeyValues | None = None,
        cross_bias: Tensor | None = None,
    ) -> tuple[Tensor, KeyValues]:
        """Runs the layer over new positions.

        Args:
            x: [batch, length, d_model]
            bias: M of self-attention, broadcastable to [batch, heads, length, past + length].
            past: Keys and values of earlier positions, [batch, heads, past, d_head] each.
            cross: Keys and values of the source, [batch, heads, source, d_head] each.
            cross_bias: M of cross-attention, broadcastable to [batch, heads, length, source].

        Returns:
            The new x, and the keys and values of earlier and new positions together.
        """
        present: KeyValues

        def attend_self(y: Tensor) -> Tensor:
            nonlocal present
            present = self.self_attention.project(y)
            if past is not None:
                present = past.append(present)
            return self.self_attention(y, present, bias)  # type: ignore[no-any-return]

        x = self.self_residual(x, attend_self)
        if self.cross_attention is not None and self.cross_residual is not None:
            attention = self.cross_attention
            x = self.cross_residual(x, lambda y: attention(y, cross, cross_bias))
        return self.feed_forward_residual(x, self.feed_forward), present
