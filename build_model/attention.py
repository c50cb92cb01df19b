"""Multi-head scaled dot-product attention (Vaswani et al. 2017, section 3.2) and its masks."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn


class KeyValues(NamedTuple):
    """What attention reads: one key and one value a position and head.

    Attributes:
        keys: [batch, heads, length, d_head]
        values: [batch, heads, length, d_head]
    """

    keys: Tensor
    values: Tensor

    def append(self, newer: KeyValues) -> KeyValues:
        """Returns self followed by `newer` along the length."""
        return KeyValues(
            torch.cat([self.keys, newer.keys], dim=2), torch.cat([self.values, newer.values], dim=2)
        )


def padding_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns M of the attention formula for padding: 0 at a token, minus infinity elsewhere.

    Args:
        mask: [batch, length] bool, True at a token.
        dtype: The floating type of the scores.

    Returns:
        [batch, 1, 1, length], broadcast over heads and queries.
    """
    bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return bias.masked_fill(~mask, -math.inf)[:, None, None, :]


def causal_bias(past: int, length: int, like: Tensor) -> Tensor:
    """Returns M that hides the future: query i, at position past + i, sees positions up to it.

    Args:
        past: Positions that lie before the queries, in the cache.
        length: Number of queries.
        like: Gives the result its type and device.

    Returns:
        [length, past + length]
    """
    positions = torch.arange(past + length, device=like.device)
    hidden = positions[None, :] > positions[past:, None]
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill(
        hidden, -math.inf
    )


def attend(query: Tensor, memory: KeyValues, bias: Tensor | None) -> Tensor:
    """Scaled dot-product attention: softmax(Q K^T / sqrt(d_k) + M) V (eq. 1 of the paper).

    Args:
        query: [batch, heads, queries, d_head]
        memory: Keys and values, [batch, heads, length, d_head] each.
        bias: M, broadcastable to [batch, heads, queries, length]; None where all is seen.

    Returns:
        [batch, heads, queries, d_head]
    """
    # Scaling the query instead of the scores is the same product over fewer elements.
    scores = (query / math.sqrt(query.shape[-1])) @ memory.keys.transpose(-2, -1)
    if bias is not None:
        scores = scores + bias
    return torch.softmax(scores, dim=-1) @ memory.values


class MultiHeadAttention(nn.Module):
    """Concat(head_1, ..., head_h) W_O with head_i = Attention(Q W_Q, K W_K, V W_V).

    Keys and values are made by `project` and passed in, so that self-attention, self-attention
    over a cache and cross-attention are one `forward`.
    """

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(d_model, d_model)
        self.key = nn.Linear(d_model, d_model)
        self.value = nn.Linear(d_model, d_model)
        self.output = nn.Linear(d_model, d_model)

    def _split(self, x: Tensor) -> Tensor:
        """[batch, length, d_model] -> [batch, heads, length, d_head]."""
        return x.reshape(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)

    def project(self, x: Tensor) -> KeyValues:
        """Returns the keys and values of x [batch, length, d_model]."""
        return KeyValues(self._split(self.key(x)), self._split(self.value(x)))

    def forward(self, x: Tensor, memory: KeyValues, bias: Tensor | None) -> Tensor:
        """Lets every position of x look at `memory`.

        Args:
            x: [batch, queries, d_model]
            memory: Keys and values, [batch, heads, length, d_head] each.
            bias: M, broadcastable to [batch, heads, queries, length], or None.

        Returns:
            [batch, queries, d_model]
        """
        heads = attend(self._split(self.query(x)), memory, bias)
        joined: Tensor = self.output(heads.transpose(1, 2).flatten(2))
        return joined
