"""Positions, feed-forward sublayer and layer of a Transformer."""

import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transferry.build_model.model.attention import KeyValues, MultiHeadAttention, Past, Rotation
from transferry.build_model.model.composed import Composed
from transferry.build_model.model.norms import make_norm
from transferry.build_model.model.recurrence import SSRU, CellState
from transferry.build_model.model.shape import GATED, TransformerConfig


def sinusoidal_positions(length: int, d_model: int) -> Tensor:
    """Returns the table of section 3.5 of the paper, [length, d_model] float64.

    PE(pos, 2i) = sin(pos / 10000^(2i / d_model)), PE(pos, 2i + 1) = cos(pos / 10000^(2i / d_model))
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

    Cosines and sines [length, 2 * pairs] float64, times `scale`; rates in radians per position.
    """
    positions = torch.arange(length, dtype=torch.float64)[:, None]
    angles = (positions * torch.tensor(rates, dtype=torch.float64)).repeat(1, 2)
    return Rotation(angles.cos() * scale, angles.sin() * scale)


Sublayer = Callable[[Tensor], Tensor]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu-tanh": functools.partial(F.gelu, approximate="tanh"),
    "gelu-quick": lambda x: x * torch.sigmoid(1.702 * x),
    "swish": F.silu,
}


class FeedForward(nn.Module):
    """max(0, x W1 + b1) W2 + b2, at each position alone (eq. 2 of the paper).

    Other activations stand in the place of max(0, ...). SwiGLU is (swish(x W) * x V) W2 (Shazeer
    2020, eq. 6), W being `gate` and V `inner`, and the other gated units are like it.
    """

    def __init__(self, config: TransformerConfig) -> None:
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


class Residual(Composed):
    """Norm(x + Dropout(Sublayer(x))), as in the paper, or another `norm_order`."""

    def __init__(self, config: TransformerConfig, *, first: bool = False) -> None:
        super().__init__()
        self.order = config.norm_order
        self.norm = nn.Identity() if first and not config.has_first_norm else make_norm(config)
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


class Layer(Composed):
    """Self-attention or SSRU, cross-attention where there is a source, feed-forward.

    The encoder's layer is this without cross-attention, the decoder's is this with it.
    """

    def __init__(self, config: TransformerConfig, layer: int, *, cross: bool) -> None:
        super().__init__()
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

        def attend_source(y: Tensor) -> Tensor:
            assert self.cross_attention is not None
            return self.cross_attention(y, cross, cross_bias)  # type: ignore[no-any-return]

        return self.sublayers(x, attend_self, attend_source), present

    def sublayers(self, x: Tensor, attend_self: Sublayer, attend_source: Sublayer) -> Tensor:
        """Runs the sublayers over x [batch, length, d_model], one after the other."""
        x = self.self_residual(x, attend_self)
        if self.cross_residual is not None:
            x = self.cross_residual(x, attend_source)
        return self.feed_forward_residual(x, self.feed_forward)  # type: ignore[no-any-return]


class OutputTransform(nn.Module):
    """Norm(Activation(x W + b)), BERT's `cls.predictions.transform`."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        bias = config.has_bias("output_transform")
        self.linear = nn.Linear(config.d_model, config.d_embedding, bias=bias)
        self.activation = ACTIVATIONS[config.transform_activation]
        self.norm = make_norm(config, config.d_embedding)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, d_model] -> [batch, length, d_embedding]."""
        y: Tensor = self.norm(self.activation(self.linear(x)))
        return y
