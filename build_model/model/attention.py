"""Multi-head scaled dot-product attention (Vaswani et al. 2017, section 3.2) and its masks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transferry.build_model.model.composed import Composed
from transferry.build_model.model.shape import TransformerConfig


class KeyValues(NamedTuple):
    """Keys and values of attention, one of each per position and head.

    Attributes:
        keys: [batch, kv_heads, length, d_head]
        values: [batch, kv_heads, length, d_head]
    """

    keys: Tensor
    values: Tensor

    def append(self, newer: KeyValues) -> KeyValues:
        """Returns self followed by `newer` along the length."""
        return KeyValues(
            torch.cat([self.keys, newer.keys], dim=2), torch.cat([self.values, newer.values], dim=2)
        )


class Past(Protocol):
    """A cache of keys and values that grows, or is written in place."""

    def append(self, newer: KeyValues) -> KeyValues:
        """Adds keys and values of new positions; returns these after the earlier ones."""
        ...


class Places(NamedTuple):
    """Positions of the queries and keys of attention.

    Attributes:
        positions: Of the queries, [queries] or [batch, queries] int64.
        columns: Of the keys, [length] or [batch, length] int64.
        queries: [batch, queries] bool, False at padding; None without padding.
    """

    positions: Tensor
    columns: Tensor
    queries: Tensor | None = None

    @property
    def distance(self) -> Tensor:
        """Position of each query less that of each key: [queries, length], or with a batch."""
        return self.positions[..., :, None] - self.columns[..., None, :]


def padding_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns M [batch, 1, 1, length] of a mask [batch, length] bool, True at a token.

    It is 0 at a token, minus infinity at padding, and broadcast over heads and queries.
    """
    bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return bias.masked_fill(~mask, -math.inf)[:, None, None, :]


def causal_bias(
    past: int, length: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Tensor:
    """Returns M [length, past + length] that hides the future.

    Query i, at position past + i, sees positions up to it.
    """
    positions = torch.arange(past + length, device=device)
    hidden = positions[None, :] > positions[past:, None]
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill(hidden, -math.inf)


class Rotation(NamedTuple):
    """The angles by which rotary positions turn queries and keys.

    Attributes:
        cosines: [positions, turned] or [batch, 1, positions, turned], turned features of d_head
        sines: Likewise.
    """

    cosines: Tensor
    sines: Tensor

    def at(self, positions: Tensor) -> Rotation:
        """Returns the rows of a table for positions [length] or [batch, length]."""
        rows = Rotation(F.embedding(positions, self.cosines), F.embedding(positions, self.sines))
        if positions.dim() == 1:
            return rows
        return Rotation(rows.cosines[:, None], rows.sines[:, None])

    def turn(self, x: Tensor) -> Tensor:
        """Turns the pairs (x_i, x_(i + turned / 2)) of x [batch, heads, length, d_head].

        Su et al. (2021), eq. 34, in the order of features that GPT-NeoX and Llama use.
        """
        turned = self.cosines.shape[-1]
        if turned < x.shape[-1]:
            return torch.cat([self.turn(x[..., :turned]), x[..., turned:]], dim=-1)
        first, second = x.chunk(2, dim=-1)
        return x * self.cosines + torch.cat([-second, first], dim=-1) * self.sines


def attend(
    query: Tensor,
    memory: KeyValues,
    bias: Tensor | None,
    adjusted: Callable[[Tensor], Tensor] = lambda scores: scores,
) -> Tensor:
    """Dot-product attention: softmax(Q K^T + M) V, eq. 1 of the paper with Q scaled already.

    Args:
        query: [batch, heads, queries, d_head], divided by sqrt(d_head).
        memory: Keys and values, [batch, kv_heads, length, d_head] each; where there are fewer of
            their heads, each serves as many neighbouring heads of the query.
        bias: M, broadcastable to [batch, heads, queries, length]; None where all is seen.
        adjusted: Applied to Q K^T.

    Returns:
        [batch, heads, queries, d_head]
    """
    keys, values = memory
    heads, kv_heads = query.shape[1], keys.shape[1]
    grouped = heads != kv_heads
    if grouped:
        # A dimension for the group, over which keys and values are broadcast and not copied.
        batch, _, queries, d_head = query.shape
        query = query.reshape(batch, kv_heads, heads // kv_heads, queries, d_head)
        keys, values = keys[:, :, None], values[:, :, None]
        bias = bias if bias is None or bias.dim() == 2 else bias[:, None]
    scores = adjusted(query @ keys.transpose(-2, -1))
    if bias is not None:
        scores = scores + bias
    heads_out = torch.softmax(scores, dim=-1) @ values
    return heads_out.reshape(batch, heads, queries, d_head) if grouped else heads_out


class MultiHeadAttention(Composed):
    """Concat(head_1, ..., head_h) W_O with head_i = Attention(Q W_Q, K W_K, V W_V).

    Keys and values are made by `project` and passed in, so that self-attention, self-attention
    over a cache and cross-attention are one `forward`.
    """

    def __init__(self, config: TransformerConfig, layer: int = 0) -> None:
        super().__init__()
        self.d_head, self.divisor = config.d_head, config.divisor(layer)
        wide, narrow = config.heads * config.d_head, config.kv_heads * config.d_head
        bias = config.has_bias("query_key_value")
        self.query = nn.Linear(config.d_model, wide, bias=bias)
        self.key = nn.Linear(config.d_model, narrow, bias=bias)
        self.value = nn.Linear(config.d_model, narrow, bias=bias)
        self.output = nn.Linear(wide, config.d_model, bias=config.has_bias("attention_output"))

    def _split(self, x: Tensor) -> Tensor:
        """[batch, length, heads * d_head] -> [batch, heads, length, d_head]."""
        return x.reshape(x.shape[0], x.shape[1], -1, self.d_head).transpose(1, 2)

    def normed_query(self, x: Tensor) -> Tensor:
        """Returns queries [batch, length, heads * d_head] as attention reads them."""
        return x

    def normed_key(self, x: Tensor) -> Tensor:
        """Returns keys [batch, length, kv_heads * d_head] as attention reads them."""
        return x

    def adjusted(self, scores: Tensor) -> Tensor:
        """Returns scores Q K^T [..., queries, length] as M is added to them."""
        return scores

    def project(self, x: Tensor, rotation: Rotation | None = None) -> KeyValues:
        """Returns the keys and values of x [batch, length, d_model]."""
        keys = self._split(self.normed_key(self.key(x)))
        return KeyValues(
            rotation.turn(keys) if rotation else keys,
            self._split(self.value(x)),
        )

    def forward(
        self,
        x: Tensor,
        memory: KeyValues,
        bias: Tensor | None,
        rotation: Rotation | None = None,
    ) -> Tensor:
        """Lets every position of x [batch, queries, d_model] look at `memory`, see `attend`.

        `rotation` has the angles of the queries' positions, where positions are rotary.
        """
        # Scaling the query instead of the scores is the same product over fewer elements. Scaled
        # before it is split into heads, since onnxruntime would draw a factor right before a
        # product into it, and leaves its fast kernel for a single query then.
        query = self._split(self.normed_query(self.query(x)) / self.divisor)
        turned = rotation.turn(query) if rotation else query
        heads = attend(turned, memory, bias, self.adjusted)
        joined: Tensor = self.output(heads.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1))
        return joined
