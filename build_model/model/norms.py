"""Norms: LayerNorm and RMSNorm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from transferry.build_model.model.config import ModelConfig


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * w (Zhang and Sennrich 2019, eq. 4).

    With an offset, w + 1 in place of w, so that decay of the weights pulls towards 1.
    """

    def __init__(self, width: int, eps: float, *, offset: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width) if offset else torch.ones(width))
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last dimension of x [..., width]."""
        weight = self.weight + 1 if self.offset else self.weight
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * weight


def make_norm(config: ModelConfig, width: int | None = None) -> nn.Module:
    """Returns the norm that the config names, of d_model features unless told otherwise."""
    width = config.d_model if width is None else width
    if config.norm == "rms":
        return RMSNorm(width, config.norm_epsilon, offset=config.norm_offset)
    return nn.LayerNorm(width, config.norm_epsilon, bias=config.has_bias("norm"))
