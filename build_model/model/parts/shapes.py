"""Widths, biases, divisors, multipliers, norms and soft caps that differ from the paper's."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
import torch
from torch import Tensor, nn

from transferry.build_model.model.attention import MultiHeadAttention
from transferry.build_model.model.layers import Layer, Residual
from transferry.build_model.model.norms import RMSNorm, make_norm
from transferry.build_model.model.shape import LATER, Activation, SizeOrNone, TransformerConfig
from transferry.build_model.model.transformer import Transformer

Cap = Annotated[float, msgspec.Meta(ge=0, le=1e6)]


@dataclass(frozen=True)
class ShapesConfig(TransformerConfig):
    """Widths, biases and norms.

    Attributes:
        head_width: Width of an attention head; 0 means d_model / heads.
        query_key_value_bias: Add a bias to the queries, keys and values; None means as `bias`.
        attention_output_bias: Likewise for the output of attention.
        feed_forward_bias: Likewise for the feed-forward sublayer.
        norm_bias: Likewise for LayerNorm.
        norm_offset: Norms multiply by 1 + weight, as in Gemma.
        final_norm: Norm after each stack, where norm_order is not "post".
    """

    head_width: SizeOrNone = 0
    query_key_value_bias: bool | None = None
    attention_output_bias: bool | None = None
    feed_forward_bias: bool | None = None
    norm_bias: bool | None = None
    norm_offset: bool = False
    final_norm: bool = True

    def check_width(self) -> None:
        if self.head_width:
            self.check_turns("head_width")
        else:
            super().check_width()

    def parts(self) -> tuple[type[Any], ...]:
        return (*super().parts(), OffsetNorm) if self.norm_offset else super().parts()

    @property
    def d_head(self) -> int:
        return self.head_width or super().d_head

    @property
    def has_final_norm(self) -> bool:
        return self.final_norm and super().has_final_norm

    def has_bias(self, part: str) -> bool:
        """Whether a part has a bias, as the fields that end in _bias say."""
        own: bool | None = getattr(self, f"{part}_bias")
        return super().has_bias(part) if own is None else own


class OffsetNorm(RMSNorm):
    """RMSNorm with w + 1 in place of w, so that decay of the weights pulls towards 1."""

    def __init__(self, config: TransformerConfig, width: int) -> None:
        super().__init__(config, width)
        nn.init.zeros_(self.weight)

    def scale(self) -> Tensor:
        return self.weight + 1


@dataclass(frozen=True)
class ParallelConfig(TransformerConfig):
    """Sublayers side by side.

    Attributes:
        parallel: Attention and feed-forward read the same x, as in GPT-NeoX (Wang and Komatsuzaki
            2021).
    """

    parallel: bool = False

    def parts(self) -> tuple[type[Any], ...]:
        return (*super().parts(), ParallelLayer) if self.parallel else super().parts()


class ParallelLayer(Layer):
    """x + Attention(Norm(x)) + FeedForward(Norm(x))."""

    def sublayers(self, x: Tensor, attend_self: Any, attend_source: Any) -> Tensor:
        seen = self.self_residual.change(x, attend_self)
        return x + seen + self.feed_forward_residual.change(x, self.feed_forward)


@dataclass(frozen=True)
class DivisorConfig(TransformerConfig):
    """Divisors of the attention scores.

    Attributes:
        attention_divisor: Divisor of the scores; 0 means sqrt(head width), as in the paper.
        divide_by_layer: Divide the scores of the first layer by 1, of the second by 2, and so on,
            as scale_attn_by_inverse_layer_idx of GPT-2.
    """

    attention_divisor: Cap = 0.0
    divide_by_layer: bool = False

    def divisor(self, layer: int) -> float:
        by_layer = layer + 1 if self.divide_by_layer else 1
        return (self.attention_divisor or super().divisor(layer)) * by_layer


@dataclass(frozen=True)
class OutputsConfig(TransformerConfig):
    """Norms and outputs of encoders.

    Attributes:
        first_norm: Norm before the first sublayer; false in ModernBERT, whose embedding is
            normalised.
        output_activation: Activation of output_transform; None means as `activation`.
        output_transform_bias: Add a bias to its linear layer; None means as `bias`.
        lm_head: Project hidden states to logits; only an encoder-only model may go without.
    """

    first_norm: bool = True
    output_activation: Activation | None = None
    output_transform_bias: bool | None = None
    lm_head: bool = True

    @property
    def has_first_norm(self) -> bool:
        return self.first_norm

    @property
    def has_logits(self) -> bool:
        return self.lm_head

    @property
    def transform_activation(self) -> Activation:
        return self.output_activation or super().transform_activation


Factor = Annotated[float, msgspec.Meta(gt=0, le=1e6)]


@dataclass(frozen=True)
class MultipliersConfig(TransformerConfig):
    """Multipliers, as in Granite (Yang et al. 2022, Tensor Programs V).

    Attributes:
        embedding_multiplier: Factor of the embedding.
        residual_multiplier: Factor of each sublayer's output.
        logit_divisor: Divisor of the logits.
    """

    embedding_multiplier: Factor = field(default=1.0, metadata=LATER)
    residual_multiplier: Factor = field(default=1.0, metadata=LATER)
    logit_divisor: Factor = field(default=1.0, metadata=LATER)

    def parts(self) -> tuple[type[Any], ...]:
        whole = self.embedding_multiplier != 1.0 or self.logit_divisor != 1.0
        own: tuple[type[Any], ...] = (Multiplied,) if whole else ()
        own += (MultipliedResidual,) if self.residual_multiplier != 1.0 else ()
        return (*super().parts(), *own)


class Multiplied(Transformer):
    """A Transformer whose embedding and logits have factors."""

    config: MultipliersConfig

    def token_vectors(self, tokens: Tensor, *, source: bool) -> Tensor:
        vectors = super().token_vectors(tokens, source=source)
        return vectors * self.config.embedding_multiplier

    def transformed(self, x: Tensor) -> Tensor:
        """See `Transformer.transformed`; the projection is linear, so its input is divided."""
        return super().transformed(x) / self.config.logit_divisor


class MultipliedResidual(Residual):
    """x + factor * Sublayer(Norm(x))."""

    def __init__(self, config: MultipliersConfig, **options: Any) -> None:
        super().__init__(config, **options)
        self.multiplier = config.residual_multiplier

    def change(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        return super().change(x, sublayer) * self.multiplier


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
