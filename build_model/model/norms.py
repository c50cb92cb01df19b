"""Norms: LayerNorm and RMSNorm."""

import torch
from torch import Tensor, nn

from transferry.build_model.model.composed import Composed
from transferry.build_model.model.shape import TransformerConfig


class RMSNorm(Composed):
    """x / sqrt(mean(x^2) + eps) * w (Zhang and Sennrich 2019, eq. 4)."""

    def __init__(self, config: TransformerConfig, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = config.norm_epsilon

    def scale(self) -> Tensor:
        """Returns w [width]."""
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last dimension of x [..., width]."""
        weight = self.scale()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * weight


def make_norm(config: TransformerConfig, width: int | None = None) -> nn.Module:
    """Returns the norm that the config names, of d_model features unless told otherwise."""
    width = config.d_model if width is None else width
    if config.norm == "rms":
        return RMSNorm(config, width)
    return nn.LayerNorm(width, config.norm_epsilon, bias=config.has_bias("norm"))
