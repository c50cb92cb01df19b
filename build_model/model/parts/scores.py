"""Norms of queries and keys, and soft caps of scores and logits."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from transferry.build_model.model.attention import MultiHeadAttention
from transferry.build_model.model.norms import make_norm
from transferry.build_model.model.parts.shapes import Cap
from transferry.build_model.model.shape import TransformerConfig
from transferry.build_model.model.transformer import Transformer


@dataclass(frozen=True)
class QueryKeyNormConfig(TransformerConfig):
    """Norms of queries and keys.

    Attributes:
        query_key_norm: Norm of queries and keys (Henry et al. 2020): "head" of each head, as in
            Qwen 3, "all" of all heads together, as in OLMo 2.
    """

    query_key_norm: Literal["none", "head", "all"] = "none"

    def parts(self) -> tuple[type[Any], ...]:
        own = () if self.query_key_norm == "none" else (NormedAttention,)
        return (*super().parts(), *own)


class NormedAttention(MultiHeadAttention):
    """Attention that normalises its queries and keys."""

    def __init__(self, config: QueryKeyNormConfig, layer: int = 0) -> None:
        super().__init__(config, layer)
        each = config.query_key_norm == "head"
        wide, narrow = self.query.out_features, self.key.out_features
        self.query_norm = make_norm(config, config.d_head if each else wide)
        self.key_norm = make_norm(config, config.d_head if each else narrow)

    def normed_query(self, x: Tensor) -> Tensor:
        return _normed(x, self.query_norm)

    def normed_key(self, x: Tensor) -> Tensor:
        return _normed(x, self.key_norm)


def _normed(x: Tensor, norm: nn.Module) -> Tensor:
    """Normalises each head of x [..., heads * d_head], or all together."""
    heads: Tensor = norm(x.reshape(*x.shape[:-1], -1, norm.weight.shape[0]))  # type: ignore[index, arg-type]
    return heads.reshape(x.shape)


@dataclass(frozen=True)
class SoftcapConfig(TransformerConfig):
    """Soft caps.

    Attributes:
        attention_softcap: Scores s become cap * tanh(s / cap), as in Gemma 2; 0 disables it.
        output_softcap: Likewise for the logits.
    """

    attention_softcap: Cap = 0.0
    output_softcap: Cap = 0.0

    def parts(self) -> tuple[type[Any], ...]:
        scores = (CappedAttention,) if self.attention_softcap else ()
        return (*super().parts(), *scores, *((CappedLogits,) if self.output_softcap else ()))


def softcapped(x: Tensor, cap: float) -> Tensor:
    """Returns cap * tanh(x / cap), which stays below the cap.

    Gemma Team (2024), section 2, "Logit soft-capping".
    """
    return cap * torch.tanh(x / cap)


class CappedAttention(MultiHeadAttention):
    """Attention whose scores stay below a cap."""

    def __init__(self, config: SoftcapConfig, layer: int = 0) -> None:
        super().__init__(config, layer)
        self.softcap = config.attention_softcap

    def adjusted(self, scores: Tensor) -> Tensor:
        return softcapped(scores, self.softcap)


class CappedLogits(Transformer):
    """A Transformer whose logits stay below a cap."""

    config: SoftcapConfig

    def logits(self, x: Tensor) -> Tensor:
        return softcapped(super().logits(x), self.config.output_softcap)
