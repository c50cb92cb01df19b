"""Disentangled attention, and the convolution beside the first layer, of DeBERTa."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transferry.build_model.model.attention import KeyValues, MultiHeadAttention, attend
from transferry.build_model.model.layers import Layer
from transferry.build_model.model.norms import make_norm
from transferry.build_model.model.parts.heads import HEAD_ACTIVATIONS, HeadActivation
from transferry.build_model.model.shape import (
    JsonConfig,
    Size,
    SizeOrNone,
    TransformerConfig,
    later,
)
from transferry.build_model.model.transformer import Stack, Transformer
from transferry.runtime.errors import require


@dataclass(frozen=True)
class Disentangled(JsonConfig):
    """Vectors of relative positions (He et al. 2021, "DeBERTa", section 3.1).

    Attributes:
        span: Vectors to each side; farther keys share the last.
        longest: The distance of the last vector, where the distances of the outer half of the
            vectors grow with the logarithm, as in DeBERTa-v2; 0 means one vector a distance.
        content_to_position: Add the products of queries with the positions' keys to the scores.
        position_to_content: Likewise those of the positions' queries with keys.
        shared: Positions are projected by the matrices of the tokens.
        norm: Normalise the vectors first.
    """

    span: Size
    longest: SizeOrNone
    content_to_position: bool
    position_to_content: bool
    shared: bool
    norm: bool

    def rows(self, farthest: int) -> Tensor:
        """Returns the vector of each distance from -farthest to farthest, query less key.

        DeBERTa's code, which the paper leaves out: in float32, as transformers computes it.
        """
        distance = torch.arange(-farthest, farthest + 1)
        if self.longest:
            middle = self.span // 2
            far = distance.abs()
            growth = torch.log(far / middle) / torch.log(
                torch.tensor((self.longest - 1) / middle, dtype=torch.float32)
            )
            grown = (torch.ceil(growth * (middle - 1)) + middle) * distance.sign()
            distance = torch.where(far <= middle, distance, grown).long()
        return (distance + self.span).clamp(0, 2 * self.span - 1)


@dataclass(frozen=True)
class Convolution(JsonConfig):
    """Convolution of the embedding, added to the output of the first layer, as in DeBERTa-v2.

    Attributes:
        width: Positions that an output reads, odd.
        groups: Groups of features that are convolved apart.
        activation: Activation of its output.
    """

    width: Size
    groups: Size
    activation: HeadActivation


@dataclass(frozen=True)
class DisentangledConfig(TransformerConfig):
    """Parts of DeBERTa.

    Attributes:
        disentangled: Vectors of relative positions; None without.
        convolution: Convolution beside the first layer; None without.
    """

    disentangled: Disentangled | None = field(default=None, metadata=later(Disentangled))
    convolution: Convolution | None = field(default=None, metadata=later(Convolution))

    def check(self) -> None:
        super().check()
        if (own := self.disentangled) is not None:
            half, expected = own.span // 2, "0, or above half of the span + 1"
            # Where all distances lie in the inner half, none is in the outer one.
            inner = self.max_positions - 1 <= half
            fits = not own.longest or (half > 0 and (inner or own.longest - 1 > half))
            require(fits, "longest", expected, own.longest)
        if self.convolution is not None:
            width, groups = self.convolution.width, self.convolution.groups
            require(width % 2 == 1, "width", "odd, to keep the length", width)
            require(self.d_model % groups == 0, "groups", "a divisor of d_model", groups)

    def parts(self) -> tuple[type[Any], ...]:
        own = (RelativePositions, DisentangledAttention) if self.disentangled else ()
        return (*super().parts(), *own, *((ConvolvedLayer,) if self.convolution else ()))


class Relative(NamedTuple):
    """Relative positions of a batch.

    Attributes:
        vectors: Of each distance, [2 * length - 1, d_model].
        rows: The row for each query and key, [length, length] int64.
    """

    vectors: Tensor
    rows: Tensor


class RelativePositions(Transformer):
    """An encoder with vectors of relative positions, which all layers read."""

    config: DisentangledConfig
    relative_rows: Tensor

    def build(self) -> None:
        super().build()
        own, config = self.config.disentangled, self.config
        assert own is not None
        self.relative_embedding = nn.Embedding(2 * own.span, config.d_model)
        self.relative_norm = make_norm(config) if own.norm else None
        # As the table of a lookup, see `RelativeBias`.
        rows = own.rows(config.max_positions - 1)[:, None]
        self.register_buffer("relative_rows", rows, persistent=False)

    def rotations(self, stack: Stack, positions: Tensor) -> list[Any]:
        """Returns the relative positions in the place of angles, which DeBERTa does not have."""
        length = positions.shape[0]
        # Those of the distances that there are, from 1 - length to length - 1: few in short texts.
        distances = torch.arange(2 * length - 1, device=positions.device) - length
        places = distances + self.config.max_positions
        vectors = self.relative_embedding(F.embedding(places, self.relative_rows).squeeze(-1))
        if self.relative_norm is not None:
            vectors = self.relative_norm(vectors)
        rows = positions[:, None] - positions[None, :] + length - 1
        relative = Relative(vectors, rows)
        return [relative] * len(self.encoder)


class DisentangledAttention(MultiHeadAttention):
    """Attention with scores of content to position and position to content.

    He et al. (2021), eq. 4. The divisor sqrt(3 d) of its eq. 5 is `attention_divisor`.

    Attributes:
        reused: How often its linear layers are applied a second time, to positions.
    """

    def __init__(self, config: DisentangledConfig, layer: int = 0) -> None:
        super().__init__(config, layer)
        own = config.disentangled
        assert own is not None
        self.own, self.reused = own, 0
        self.position_key, self.position_query = None, None
        wide = self.query.out_features
        if own.shared:
            self.reused = own.content_to_position + own.position_to_content
        elif own.content_to_position:
            self.position_key = nn.Linear(config.d_model, wide)
        if not own.shared and own.position_to_content:
            self.position_query = nn.Linear(config.d_model, wide)

    def project(self, x: Tensor, rotation: Any = None) -> KeyValues:
        """See `MultiHeadAttention.project`; keys do not turn."""
        return super().project(x)

    def forward(
        self, x: Tensor, memory: KeyValues, bias: Tensor | None, rotation: Any = None
    ) -> Tensor:
        """See `MultiHeadAttention.forward`; `rotation` holds the relative positions."""
        query = self._split(self.query(x) / self.divisor)
        relative = self._scores(query, memory.keys, rotation)
        heads = attend(query, memory, relative if bias is None else relative + bias)
        joined: Tensor = self.output(heads.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1))
        return joined

    def _scores(self, query: Tensor, keys: Tensor, relative: Relative) -> Tensor:
        """Returns the scores of positions [batch, heads, length, length]."""
        index = relative.rows.expand(query.shape[0], query.shape[1], -1, -1)
        scores = []
        if self.own.content_to_position:
            vectors = (self.position_key or self.key)(relative.vectors)
            scores.append((query @ self._by_head(vectors)).gather(3, index))
        if self.own.position_to_content:
            vectors = (self.position_query or self.query)(relative.vectors) / self.divisor
            by_head = self._by_head(vectors).transpose(-2, -1)
            scores.append((by_head @ keys.transpose(-2, -1)).gather(2, index))
        return scores[0] + scores[1] if scores[1:] else scores[0]

    def _by_head(self, x: Tensor) -> Tensor:
        """[rows, heads * d_head] -> [heads, d_head, rows]."""
        return x.reshape(x.shape[0], -1, self.d_head).permute(1, 2, 0)


class ConvolvedLayer(Layer):
    """Norm(Layer(x) + Activation(x * W + b)) in the first layer; padding counts as zeros."""

    def __init__(self, config: DisentangledConfig, layer: int, *, cross: bool) -> None:
        super().__init__(config, layer, cross=cross)
        own, width = config.convolution, config.d_model
        assert own is not None
        self.convolution = None
        if layer == 0:
            sides = own.width // 2
            self.convolution = nn.Conv1d(width, width, own.width, padding=sides, groups=own.groups)
            self.convolution_norm = make_norm(config)
            self.convolution_activation = HEAD_ACTIVATIONS[own.activation]

    def forward(self, x: Tensor, bias: Tensor | None, *others: Any, **named: Any) -> Any:
        """See `Layer.forward`; `bias` hides padding [batch, 1, 1, length]."""
        y, present = super().forward(x, bias, *others, **named)
        if self.convolution is not None:
            assert bias is not None
            there = bias[:, 0, 0, :, None] == 0
            read = torch.where(there, x, 0.0).transpose(1, 2)
            added = self.convolution(read).transpose(1, 2)
            y = self.convolution_norm(y + self.convolution_activation(added))
        return y, present
