"""Base of the reference's modules, which a family may extend."""

from typing import Any, Self

from torch import nn

from transferry.build_model.model.shape import TransformerConfig


class Composed(nn.Module):
    """A module that is made as a subclass with the parts of its config.

    `Transformer(config)` is a Transformer as in the papers where the config has no part, and
    otherwise of a class that also inherits from each part (`TransformerConfig.composed`).
    """

    def __new__(cls, config: TransformerConfig | None = None, *_: Any, **__: Any) -> Self:
        """Chooses the class; a copy, made without arguments, has it already."""
        return super().__new__(cls if config is None else config.composed(cls))
