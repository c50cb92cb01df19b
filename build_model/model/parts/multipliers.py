"""Multipliers of embeddings, sublayers and logits (Yang et al. 2022, Tensor Programs V)."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from torch import Tensor

from transferry.build_model.model.layers import Residual
from transferry.build_model.model.shape import LATER, TransformerConfig
from transferry.build_model.model.transformer import Transformer

Factor = Annotated[float, msgspec.Meta(gt=0, le=1e6)]


@dataclass(frozen=True)
class MultipliersConfig(TransformerConfig):
    """Multipliers, as in Granite.

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
