"""Heads of encoder-only models: pooling and linear layers."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transferry.build_model.model.layers import ACTIVATIONS
from transferry.build_model.model.norms import make_norm
from transferry.build_model.model.shape import LATER, Size, TransformerConfig
from transferry.build_model.model.transformer import Transformer
from transferry.runtime.errors import require

# Activation of a layer of the head.
HeadActivation = Literal[
    "none", "tanh", "sigmoid", "relu", "gelu", "gelu-tanh", "gelu-quick", "swish"
]
# How the hidden states of a text become one vector: first or last token, maximum or mean of each
# feature, sum divided by the root of the length, or mean weighted by position 1, 2, ...
# (Muennighoff 2022, SGPT). Those of "splade" pool log(1 + max(0, logit)) of each token of the
# vocabulary (Formal et al. 2021, SPLADE v2, eq. 1 and 2), or log(1 + that) (Geng et al. 2025).
Pooling = Literal[
    "first",
    "last",
    "max",
    "mean",
    "root-mean",
    "weighted",
    "splade-max",
    "splade-sum",
    "splade-log-max",
    "splade-log-sum",
]
HEAD_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **ACTIVATIONS,
    "none": nn.Identity(),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


@dataclass(frozen=True)
class HeadConfig(TransformerConfig):
    """Head of an encoder-only model.

    Attributes:
        pooling: Poolings of the hidden states of a text, concatenated; empty where the head of an
            encoder-only model reads each token.
        head_widths: Width of each linear layer of the head.
        head_activations: The activation after each.
        head_biases: Whether each has a bias.
        head_norm: Norm after the first of them, as in ModernBERT.
        late_pooling: Pool the first layer's output and not its input, as in EuroBERT.
        unit_length: The head scales its vectors to length 1.
        unseen_token: Token id that no token sees, and that sees all others, as the masks that a
            query of ColBERT is filled up with (Khattab and Zaharia 2020, section 3.2); -1 for none.
    """

    pooling: tuple[Pooling, ...] = ()
    head_widths: tuple[Size, ...] = ()
    head_activations: tuple[HeadActivation, ...] = ()
    head_biases: tuple[bool, ...] = ()
    head_norm: bool = False
    late_pooling: bool = field(default=False, metadata=LATER)
    unit_length: bool = False
    unseen_token: Annotated[int, msgspec.Meta(ge=-1)] = field(default=-1, metadata=LATER)

    def check(self) -> None:
        super().check()
        expected = "false unless the model has a head"
        require(self.has_head or not self.unit_length, "unit_length", expected, "true")
        # Masks that are to be filled are seen, and in a window there may be nothing else.
        fits = not self.has_logits and self.unseen_token < self.source_vocabulary
        expected = "-1 unless an id of a model without logits"
        require(fits or self.unseen_token < 0, "unseen_token", expected, self.unseen_token)
        fits, expected = not self.weighs_tokens or self.has_logits, "another kind without logits"
        require(fits, "pooling", expected, self.pooling)

    def parts(self) -> tuple[type[Any], ...]:
        part = WithTokenWeights if self.weighs_tokens else WithHead
        parts = (*super().parts(), *[part] * self.has_head)
        return (*parts, UnseenToken) if self.unseen_token >= 0 else parts

    @property
    def has_head(self) -> bool:
        """Whether an encoder-only model has a head besides that for logits."""
        return bool(self.pooling or self.head_widths)

    @property
    def weighs_tokens(self) -> bool:
        """Whether the head makes a weight for each token of the vocabulary."""
        return bool(self.pooling) and self.pooling[0].startswith("splade")

    @property
    def d_head_output(self) -> int:
        """Width of the head's output, for a text or each token."""
        if self.weighs_tokens:
            return self.vocabulary_size
        return self.head_widths[-1] if self.head_widths else self.d_model * len(self.pooling)


class WithHead(Transformer):
    """An encoder with a head."""

    config: HeadConfig

    def build(self) -> None:
        super().build()
        self.head = Head(self.config)


class UnseenToken(Transformer):
    """An encoder with a token that none sees; attention alone leaves it out."""

    config: HeadConfig

    def encode(self, source: Tensor, source_mask: Tensor) -> Tensor:
        seen = torch.logical_and(source_mask, source != self.config.unseen_token)
        return super().encode(source, seen)


class WithTokenWeights(Transformer):
    """An encoder whose logits are pooled to a sparse vector, as in SPLADE."""

    config: HeadConfig

    def build(self) -> None:
        super().build()
        self.head = self.weigh

    def weigh(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Returns the weights of hidden states: [batch, vocabulary]; arguments as `Head`."""
        return pooled(self.logits(hidden), mask, self.config.pooling[0])

    def answers(self, source: Tensor, source_mask: Tensor) -> dict[str, Tensor]:
        """See `Transformer.answers`; logits are computed once."""
        hidden = self.encode(source, source_mask)
        logits = self.logits(hidden)
        weights = pooled(logits, source_mask, self.config.pooling[0])
        return {"hidden": hidden, "head": weights, "logits": logits}


class Head(nn.Module):
    """Pooling, linear layers and scaling: a vector or scores of a text, or scores of each token."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        widths = [config.d_model * max(1, len(config.pooling)), *config.head_widths]
        own = config.head_widths, config.head_activations, config.head_biases
        layers = enumerate(zip(widths, *own, strict=False))
        self.layers = nn.ModuleList(
            HeadLayer(config, *layer, norm=config.head_norm and not number)
            for number, layer in layers
        )

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Reads hidden states [batch, length, d_model]; mask [batch, length] is True at a token.

        Returns [batch, width]; where nothing is pooled [batch, length, width], which means nothing
        at padding.
        """
        x, layers = hidden, [*self.layers]
        if self.config.late_pooling:
            x = layers.pop(0)(x)
        if self.config.pooling:
            x = torch.cat([pooled(x, mask, kind) for kind in self.config.pooling], dim=-1)
        for layer in layers:
            x = layer(x)
        return F.normalize(x, dim=-1) if self.config.unit_length else x


class HeadLayer(nn.Module):
    """Activation(x W + b), with a norm after it if there is one."""

    def __init__(
        self,
        config: TransformerConfig,
        read: int,
        width: int,
        activation: str,
        bias: bool,
        *,
        norm: bool,
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(read, width, bias=bias)
        self.activation = HEAD_ACTIVATIONS[activation]
        self.norm = make_norm(config, width) if norm else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., read] -> [..., width]."""
        x = self.activation(self.linear(x))
        return x if self.norm is None else self.norm(x)


def pooled(hidden: Tensor, mask: Tensor, kind: Pooling) -> Tensor:
    """Makes one vector of the hidden states of each text.

    Args:
        hidden: [batch, length, d_model]; for "splade" logits [batch, length, vocabulary].
        mask: [batch, length] bool, True at a token; padding comes after the tokens.
        kind: See `Pooling`.

    Returns:
        [batch, width], of the width of `hidden`.
    """
    if kind == "first":
        return hidden[:, 0]
    there, ones = mask[..., None], mask.to(hidden.dtype)
    if kind.startswith("splade"):
        weights = torch.log1p(F.relu(hidden.masked_fill(~there, 0.0)))
        weights = torch.log1p(weights) if "log" in kind else weights
        return weights.amax(dim=1) if kind.endswith("max") else _sums(weights, ones)
    if kind == "max":
        return hidden.masked_fill(~there, -torch.inf).amax(dim=1)
    length, place = ones.sum(dim=1, keepdim=True), ones.cumsum(dim=1)
    if kind == "last":
        weights = ones * (place == length)
    elif kind == "weighted":
        weights = ones * place / (ones * place).sum(dim=1, keepdim=True)
    else:
        weights = ones / (length if kind == "mean" else length.sqrt())
    return _sums(hidden.masked_fill(~there, 0.0), weights)


def _sums(values: Tensor, weights: Tensor) -> Tensor:
    """Sums values [batch, length, width] times weights [batch, length] over positions.

    As a product of two equal rows, whose terms onnxruntime adds in order: those of a sum, or of a
    product of one row, it adds in another order for a single text, or with other padding.
    """
    return torch.matmul(weights[:, None].expand(-1, 2, -1), values)[:, 0]
