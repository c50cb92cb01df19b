"""Segments of a pair of texts, and positions that leave padding tokens out."""

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transferry.build_model.model.shape import SizeOrNone, TransformerConfig
from transferry.build_model.model.transformer import Transformer
from transferry.runtime.errors import require
from transferry.runtime.settings import Whole


@dataclass(frozen=True)
class InputsConfig(TransformerConfig):
    """Segments, and positions of padding.

    Attributes:
        segments: Kinds of segments of an encoder-only model, each with a vector that is added to
            the embedding, as in BERT; 0 means that it does not tell them apart.
        segment_end: Token id that ends a segment: tokens after the first belong to the second.
        padding_token: Token id without a position of its own in a source: it takes that of padding
            and the next token the next position, as in RoBERTa; -1 for no such token.
    """

    segments: SizeOrNone = 0
    segment_end: Whole = 0
    padding_token: Annotated[int, msgspec.Meta(ge=-1)] = -1

    def check(self) -> None:
        super().check()
        expected = f"an id below {self.source_vocabulary}"
        fits = self.padding_token < self.source_vocabulary
        require(fits, "padding_token", expected, self.padding_token)

    def parts(self) -> tuple[type[Any], ...]:
        padding = (PaddingPosition,) if self.padding_token >= 0 else ()
        return (*super().parts(), *padding, *((Segments,) if self.segments else ()))


class Segments(Transformer):
    """An encoder that tells two texts apart."""

    config: InputsConfig

    def build(self) -> None:
        super().build()
        self.segment_embedding = nn.Embedding(self.config.segments, self.config.d_positions)

    def placed(
        self, x: Tensor, tokens: Tensor, positions: Tensor | None, *, source: bool
    ) -> Tensor:
        x = super().placed(x, tokens, positions, source=source)
        # Of the tokens after the first end of a segment; an end belongs to its segment.
        ends = (tokens == self.config.segment_end).long()
        before = ends.cumsum(dim=1) - ends
        added: Tensor = self.segment_embedding(before.clamp(max=self.config.segments - 1))
        return x + added


class PaddingPosition(Transformer):
    """A Transformer whose source has padding tokens that take up no position."""

    config: InputsConfig

    def build(self) -> None:
        super().build()
        self.padding_position = nn.Parameter(torch.zeros(1, self.config.d_positions))

    def placed(
        self, x: Tensor, tokens: Tensor, positions: Tensor | None, *, source: bool
    ) -> Tensor:
        if positions is None or not source:
            return super().placed(x, tokens, positions, source=source)
        counted = tokens != self.config.padding_token
        places = (counted.long().cumsum(dim=1) - 1).clamp(min=0)
        found = F.embedding(places, self.position_table(source=True))
        return x + torch.where(counted[..., None], found, self.padding_position)
