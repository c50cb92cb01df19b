"""Scales of the int8 KV cache: one per channel of a head, folded into the weights.

The scales are measured on the user's text, as the ranges of activations are. They cost nothing at
run time: the weights of keys and values are divided by their scales, those of query and output are
multiplied, which cancels (Nagel et al. 2019, Data-Free Quantization Through Weight Equalization and
Bias Correction, section 4.1, with the range of the integers as the target). Quantising the cache
then is rounding alone.
"""

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from transferry.build_model.model.attention import MultiHeadAttention
from transferry.build_model.model.config import ModelConfig
from transferry.build_model.model.parts.shapes import OffsetNorm
from transferry.build_model.model.transformer import Transformer
from transferry.runtime.errors import InputError

LARGEST = 127
CACHED = re.compile(r"decoder\.\d+\.(self|cross)_attention\.(key|value)\.weight")
# Other text exceeds the measured ranges. After measuring 200 captions and the vocabulary, one
# channel of a hundred exceeded its range by more than this factor in the answers to 1,000 others.
HEADROOM = 1.25


def has_int8_cache(config: ModelConfig) -> bool:
    """Whether GroupQueryAttention, which reads an int8 cache, can stand for the attention.

    It takes no bias of distances, and heads of a multiple of 8 features.
    """
    return not config.relative_buckets and config.d_head % 8 == 0


@dataclass(frozen=True)
class KVScales:
    """Scales of the keys and values of one attention.

    Attributes:
        keys: `[kv_heads, d_head]`
        values: `[kv_heads, d_head]`
    """

    keys: Tensor
    values: Tensor


class KVRanges:
    """The largest keys and values of a decoder, collected from its linear layers."""

    def __init__(self, model: Transformer) -> None:
        self._model, self._d_head = model, model.config.d_head
        cosines = model.cosines if model.config.positions == "rotary" else None
        self._turned = 0 if cosines is None else cosines.shape[1]
        self._largest: dict[str, Tensor] = {}

    def add(self, name: str, output: Tensor) -> None:
        """Adds the output `[..., kv_heads * d_head]` of the linear layer of a weight.

        Raises InputError for an output that is not finite.
        """
        if not CACHED.fullmatch(name):
            return
        attention = self._model.get_submodule(name.rpartition("_attention.")[0] + "_attention")
        assert isinstance(attention, MultiHeadAttention)
        is_key = name.endswith(".key.weight")
        cached = attention.normed_key(output) if is_key else output
        sizes = cached.detach().cpu().reshape(-1, cached.shape[-1] // self._d_head, self._d_head)
        sizes = sizes.abs()
        if self._turned and "self_attention.key" in name:
            # At any angle, neither channel of a pair is larger than the length of the pair.
            turned, rest = sizes[..., : self._turned], sizes[..., self._turned :]
            pairs = torch.hypot(*turned.chunk(2, dim=2)) * self._model.config.rotary_scale
            sizes = torch.cat([pairs, pairs, rest], dim=2)
        largest = sizes.amax(dim=0)
        if is_key and self._model.config.query_key_norm == "head":
            # One norm serves all heads, and its weight takes up the scales.
            largest = largest.amax(dim=0, keepdim=True).expand_as(largest).clone()
        if not torch.isfinite(largest).all():
            raise InputError(
                f"expected finite outputs of {name}, found NaN or infinity: the model cannot be "
                "calibrated; does it pass verify?"
            )
        self._largest[name] = torch.maximum(largest, self._largest.get(name, largest))

    def scales(self) -> dict[str, KVScales]:
        """Returns scales by the attention's name that keep what was added within -127..127."""
        found = {
            name: torch.where(largest > 0, HEADROOM * largest / LARGEST, 1.0)
            for name, largest in self._largest.items()
        }
        return {
            name.removesuffix(".key.weight"): KVScales(keys, found[name.replace("key", "value")])
            for name, keys in found.items()
            if ".key." in name
        }


@torch.no_grad()
def fold_kv_scales(model: Transformer, scales: Mapping[str, KVScales]) -> Transformer:
    """Returns an equivalent copy of a model that computes keys and values divided by their scales.

    The scales come by the attention's name. The copy shares all other weights with the model.
    """
    changed = [id(each) for name in scales for each in model.get_submodule(name).parameters()]
    weights = [*model.parameters(), *model.buffers()]
    model = copy.deepcopy(model, {id(each): each for each in weights if id(each) not in changed})
    for name, scale in scales.items():
        attention = model.get_submodule(name)
        assert isinstance(attention, MultiHeadAttention)
        groups = attention.query.out_features // attention.key.out_features
        # A factor per channel of each query head; several query heads share a head of keys.
        keys, values = (
            each.repeat_interleave(groups, dim=0).flatten() for each in (scale.keys, scale.values)
        )
        _multiply(attention.value, 1 / scale.values.flatten())
        for linear, norm, factors in (
            (attention.key, getattr(attention, "key_norm", None), 1 / scale.keys.flatten()),
            (attention.query, getattr(attention, "query_norm", None), keys),
        ):
            _multiply(linear if norm is None else norm, factors)
        attention.output.weight.mul_(values.to(attention.output.weight.device))
        model.release()
    return model


def _multiply(layer: nn.Module, factors: Tensor) -> None:
    """Multiplies each output of a linear layer, or of a norm, by its factor."""
    for parameter in layer.parameters():
        # A norm of each head takes the factors of the first head, equal to all others.
        shape = (-1, *[1] * (parameter.dim() - 1))
        each = factors.to(parameter.device)[: parameter.shape[0]].reshape(shape)
        offset = 1.0 if isinstance(layer, OffsetNorm) else 0.0
        parameter.add_(offset).mul_(each).sub_(offset)
