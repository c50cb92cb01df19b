"""The encoder-decoder Transformer of "Attention Is All You Need" (Vaswani et al. 2017)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transferry.build_model.attention import KeyValues, causal_bias, padding_bias
from transferry.build_model.config import ModelConfig
from transferry.build_model.layers import Layer, sinusoidal_positions


class Transformer(nn.Module):
    """Source and target share one embedding, which is also the output projection.

    The cache of the decoder is a value: `decode` takes the past and returns the present.
    """

    positions: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary_size, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = nn.ModuleList(
            Layer(config, cross=False) for _ in range(config.encoder_layers)
        )
        self.decoder = nn.ModuleList(
            Layer(config, cross=True) for _ in range(config.decoder_layers)
        )
        table = sinusoidal_positions(config.max_positions, config.d_model)
        self.register_buffer("positions", table.to(torch.get_default_dtype()), persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        """Xavier (Glorot and Bengio 2010, eq. 16); W_Q, W_K and W_V as parts of one matrix.

        The smaller query, key and value are what keeps a post-norm encoder alive: with the full
        gain, attention outweighs the residual, and within 2,500 steps at a rate of 4e-3 every
        position of the encoder had become the same vector (docs/training.md).
        """
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                part = name.rpartition(".")[2] in ("query", "key", "value")
                nn.init.xavier_uniform_(module.weight, gain=0.5**0.5 if part else 1.0)
                nn.init.zeros_(module.bias)
        # Times sqrt(d_model) in `embed` this makes entries of variance 1, as large as positions.
        nn.init.normal_(self.embedding.weight, std=self.config.d_model**-0.5)

    def double(self) -> Transformer:
        """Turns the model into its float64 oracle: positions are made anew, not widened."""
        super().double()
        table = sinusoidal_positions(self.config.max_positions, self.config.d_model)
        self.positions = table.to(self.positions.device)
        return self

    def embed(self, tokens: Tensor, past: int = 0) -> Tensor:
        """Embedding(token) * sqrt(d_model) + PE(position), sections 3.4 and 3.5 of the paper.

        Args:
            tokens: [batch, length] int64
            past: Position of the first of them.

        Returns:
            [batch, length, d_model]
        """
        embedded = self.embedding(tokens) * math.sqrt(self.config.d_model)
        x: Tensor = self.dropout(embedded + self.positions[past : past + tokens.shape[1]])
        return x

    def encode(self, source: Tensor, source_mask: Tensor) -> Tensor:
        """Encodes the source.

        Args:
            source: [batch, source] int64
            source_mask: [batch, source] bool, True at a token, False at padding.

        Returns:
            [batch, source, d_model]; rows at padding mean nothing.
        """
        x = self.embed(source)
        bias = padding_bias(source_mask, x.dtype)
        for layer in self.encoder:
            x, _ = layer(x, bias)
        return x

    def cross(self, encoded: Tensor) -> list[KeyValues]:
        """Returns each decoder layer's keys and values of the encoded source, made once."""
        return [layer.cross_attention.project(encoded) for layer in self.decoder]  # type: ignore[union-attr, operator]

    def empty_past(self, batch: int) -> list[KeyValues]:
        """Returns the cache before the first target position: length 0 in every layer."""
        weight = self.embedding.weight
        nothing = weight.new_zeros(batch, self.config.heads, 0, self.config.d_head)
        return [KeyValues(nothing, nothing) for _ in self.decoder]

    def decode(
        self,
        target: Tensor,
        source_mask: Tensor,
        cross: Sequence[KeyValues],
        past: Sequence[KeyValues],
    ) -> tuple[Tensor, list[KeyValues]]:
        """Runs the decoder over new target positions.

        Args:
            target: [batch, target] int64, the tokens at positions past .. past + target - 1.
            source_mask: [batch, source] bool, True at a token.
            cross: A decoder layer's keys and values of the source, from `cross`.
            past: A decoder layer's keys and values of earlier positions; `empty_past` at first.

        Returns:
            Logits [batch, target, vocabulary], and the present, which is the next call's past.
        """
        length = past[0].keys.shape[2]
        x = self.embed(target, length)
        bias = causal_bias(length, target.shape[1], x)
        cross_bias = padding_bias(source_mask, x.dtype)
        presents = []
        for layer, layer_cross, layer_past in zip(self.decoder, cross, past, strict=True):
            x, present = layer(x, bias, layer_past, layer_cross, cross_bias)
            presents.append(present)
        return F.linear(x, self.embedding.weight), presents

    def forward(self, source: Tensor, source_mask: Tensor, target: Tensor) -> Tensor:
        """Scores every next target token at once, as training does.

        Args:
            source: [batch, source] int64
            source_mask: [batch, source] bool, True at a token.
            target: [batch, target] int64, beginning with the start token. Padding at the end
                needs no mask: no earlier position sees it.

        Returns:
            Logits [batch, target, vocabulary]; those at position t are of the token at t + 1.
        """
        cross = self.cross(self.encode(source, source_mask))
        return self.decode(target, source_mask, cross, self.empty_past(source.shape[0]))[0]


@torch.inference_mode()
def greedy(
    model: Transformer,
    source: Tensor,
    source_mask: Tensor,
    *,
    bos_id: int,
    eos_id: int,
    max_length: int,
    use_cache: bool = True,
) -> list[list[int]]:
    """The plainest generation loop; without the cache it is the independent oracle of the search.

    Args:
        model: The model, in eval mode.
        source: [batch, source] int64
        source_mask: [batch, source] bool, True at a token.
        bos_id: The token that every target begins with.
        eos_id: The token that ends a target.
        max_length: Largest number of generated tokens.
        use_cache: False scores the whole target anew for each token.

    Returns:
        The generated tokens of each row, the ending `eos_id` left out.
    """
    cross = model.cross(model.encode(source, source_mask))
    nothing = past = model.empty_past(source.shape[0])
    target = torch.full((source.shape[0], 1), bos_id, device=source.device)
    ended = torch.zeros(source.shape[0], dtype=torch.bool, device=source.device)
    while target.shape[1] <= max_length and not ended.all():
        if use_cache:
            logits, past = model.decode(target[:, -1:], source_mask, cross, past)
        else:
            logits, _ = model.decode(target, source_mask, cross, nothing)
        chosen = logits[:, -1].argmax(dim=-1)
        ended = ended | (chosen == eos_id)
        target = torch.cat([target, chosen[:, None]], dim=1)
    rows = target[:, 1:].tolist()
    return [row[: row.index(eos_id)] if eos_id in row else row for row in rows]
