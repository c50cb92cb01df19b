"""Units for the keys and values of a decoder, so that 8 bits hold them.

The units are one a channel, measured on text of the user's as the ranges of activations are. The
model is changed so that it computes with the integers as they are: the weights that make keys and
values are divided by their units, those of the query and of the output are multiplied, which
cancels (Nagel et al. 2019, Data-Free Quantization Through Weight Equalization and Bias Correction,
section 4.1, with the integers' range for its target).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from transferry.build_model.attention import MultiHeadAttention
from transferry.build_model.transformer import Transformer
from transferry.runtime.errors import InputError

LARGEST = 127
CACHED = re.compile(r"decoder\.\d+\.(self|cross)_attention\.(key|value)\.weight")
# Other text goes beyond what was measured. With 200 captions and the vocabulary, one channel of a
# hundred went further beyond than this in the answers to 1,000 other captions.
HEADROOM = 1.25


@dataclass(frozen=True)
class Units:
    """What 1 stands for in the keys and values of an attention.

    Attributes:
        keys: [kv_heads, d_head]
        values: [kv_heads, d_head]
    """

    keys: Tensor
    values: Tensor


class Ranges:
    """The largest keys and values of a decoder, told of every linear product."""

    def __init__(self, model: Transformer) -> None:
        self._d_head, self._rotary = model.config.d_head, model.config.positions == "rotary"
        self._largest: dict[str, Tensor] = {}

    def see(self, name: str, found: Tensor) -> None:
        """Takes note of the output [..., kv_heads * d_head] of the linear layer of a weight.

        Raises:
            InputError: It is not finite.
        """
        if not CACHED.fullmatch(name):
            return
        heads = found.detach().cpu().reshape(-1, found.shape[-1] // self._d_head, self._d_head)
        sizes = heads.abs()
        if self._rotary and "self_attention.key" in name:
            # Turned by any angle, neither of a pair is longer than both together.
            pairs = torch.hypot(*heads.chunk(2, dim=2))
            sizes = torch.cat([pairs, pairs], dim=2)
        largest = sizes.amax(dim=0)
        if not torch.isfinite(largest).all():
            raise InputError(
                f"expected finite outputs of {name}, found NaN or infinity: the model cannot be "
                "calibrated; does it pass verify?"
            )
        self._largest[name] = torch.maximum(largest, self._largest.get(name, largest))

    def units(self) -> dict[str, Units]:
        """Units in which keys and values like those seen stay within -127..127."""
        return {
            name.removesuffix(".key.weight"): Units(
                _unit(largest), _unit(self._largest[name.replace(".key.", ".value.")])
            )
            for name, largest in self._largest.items()
            if ".key." in name
        }


def _unit(largest: Tensor) -> Tensor:
    return torch.where(largest > 0, HEADROOM * largest / LARGEST, 1.0)


@torch.no_grad()
def in_units(model: Transformer, units: Mapping[str, Units]) -> Transformer:
    """Returns a model that gives the same, whose keys and values count in units.

    Args:
        model: The model, which stays as it is.
        units: By the name of the attention.
    """
    model = copy.deepcopy(model)
    for name, unit in units.items():
        attention = model.get_submodule(name)
        assert isinstance(attention, MultiHeadAttention)
        groups = attention.query.out_features // attention.key.out_features
        # One a channel of a head of the query, of which several share a head of keys.
        keys, values = (
            each.repeat_interleave(groups, dim=0).flatten() for each in (unit.keys, unit.values)
        )
        _scale(attention.key, 1 / unit.keys.flatten())
        _scale(attention.value, 1 / unit.values.flatten())
        _scale(attention.query, keys)
        attention.output.weight.mul_(values.to(attention.output.weight.device))
    return model


def _scale(linear: nn.Linear, factors: Tensor) -> None:
    """Multiplies each output of a linear layer."""
    for parameter in linear.parameters():
        shape = (-1, *[1] * (parameter.dim() - 1))
        parameter.mul_(factors.to(parameter.device).reshape(shape))
