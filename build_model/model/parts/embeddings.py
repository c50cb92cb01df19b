"""Narrow embeddings, encoders with their own, segments, and positions that leave padding out."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, Self

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transferry.build_model.model.norms import make_norm
from transferry.build_model.model.shape import SizeOrNone, TransformerConfig
from transferry.build_model.model.transformer import Transformer
from transferry.runtime.errors import require
from transferry.runtime.settings import Whole


@dataclass(frozen=True)
class NarrowConfig(TransformerConfig):
    """A narrow embedding.

    Attributes:
        embedding_width: Width of the embedding where a matrix brings it to d_model, and another
            back before the output, as in OPT; 0 means d_model.
    """

    embedding_width: SizeOrNone = 0

    @property
    def d_embedding(self) -> int:
        return self.embedding_width or super().d_embedding


@dataclass(frozen=True)
class ProjectedSumConfig(NarrowConfig):
    """The place of its projection.

    Attributes:
        project_sum: The matrix of embedding_width takes the sum of embedding and position,
            normalised, and has a bias, as in ELECTRA.
    """

    project_sum: bool = False

    def parts(self) -> tuple[type[Any], ...]:
        own = self.project_sum or self.d_embedding != self.d_model
        return (*super().parts(), Narrow) if own else super().parts()

    @property
    def d_positions(self) -> int:
        return self.d_embedding if self.project_sum else super().d_positions


class Narrow(Transformer):
    """A Transformer with a matrix after the embedding, which may have another width."""

    config: ProjectedSumConfig

    def build(self) -> None:
        super().build()
        config = self.config
        back = config.has_logits and not config.output_transform
        projection = nn.Linear(config.d_model, config.d_embedding, False) if back else None
        self.output_projection = projection

    def build_embedding(self) -> None:
        super().build_embedding()
        config = self.config
        projection = nn.Linear(config.d_embedding, config.d_model, bias=config.project_sum)
        self.embedding_projection = projection

    def token_vectors(self, tokens: Tensor, *, source: bool) -> Tensor:
        x = super().token_vectors(tokens, source=source)
        return x if self.config.project_sum else self.embedding_projection(x)

    def normed(self, x: Tensor, *, source: bool) -> Tensor:
        x = super().normed(x, source=source)
        return self.embedding_projection(x) if self.config.project_sum else x

    def transformed(self, x: Tensor) -> Tensor:
        x = super().transformed(x)
        return x if self.output_projection is None else self.output_projection(x)


@dataclass(frozen=True)
class SourceConfig(TransformerConfig):
    """An encoder with a shape and embeddings of its own.

    Attributes:
        source_vocabulary_size: Rows of the encoder's embedding, where it has one of its own; 0
            means that it shares the decoder's.
        encoder_heads: Attention heads of the encoder, where it has another number; 0 means `heads`.
        encoder_d_ff: Likewise for the inner width of its feed-forward sublayer.
        separate_positions: Encoder and decoder each have learned positions, and a norm of the
            embedding, of their own, as in BART.
    """

    source_vocabulary_size: SizeOrNone = 0
    encoder_heads: SizeOrNone = 0
    encoder_d_ff: SizeOrNone = 0
    separate_positions: bool = False

    def check(self) -> None:
        super().check()
        self.encoder_config()

    def parts(self) -> tuple[type[Any], ...]:
        own = self.source_vocabulary_size or self.separate_positions
        return (*super().parts(), OwnSource) if own else super().parts()

    @property
    def source_vocabulary(self) -> int:
        return self.source_vocabulary_size or super().source_vocabulary

    def encoder_config(self) -> Self:
        if not self.encoder_heads and not self.encoder_d_ff:
            return self
        heads, d_ff = self.encoder_heads or self.heads, self.encoder_d_ff or self.d_ff
        return dataclasses.replace(self, heads=heads, d_ff=d_ff, encoder_heads=0, encoder_d_ff=0)


class OwnSource(Transformer):
    """A Transformer whose encoder has embeddings of its own."""

    config: SourceConfig

    def build(self) -> None:
        super().build()
        if self.config.separate_positions:
            self.source_positions = nn.Parameter(torch.empty_like(self.positions))

    def build_embedding(self) -> None:
        super().build_embedding()
        if rows := self.config.source_vocabulary_size:
            self.source_embedding = nn.Embedding(rows, self.config.d_embedding)

    def build_embedding_norm(self) -> None:
        super().build_embedding_norm()
        if self.config.separate_positions and self.config.embedding_norm:
            self.source_embedding_norm = make_norm(self.config)

    def token_vectors(self, tokens: Tensor, *, source: bool) -> Tensor:
        if source and self.config.source_vocabulary_size:
            vectors: Tensor = self.source_embedding(tokens)
            return vectors
        return super().token_vectors(tokens, source=source)

    def position_table(self, *, source: bool) -> Tensor:
        own = source and self.config.separate_positions
        return self.source_positions if own else super().position_table(source=source)

    def normed(self, x: Tensor, *, source: bool) -> Tensor:
        if source and self.config.separate_positions and self.config.embedding_norm:
            y: Tensor = self.source_embedding_norm(x)
            return y
        return super().normed(x, source=source)


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
