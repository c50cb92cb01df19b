"""The Transformer of "Attention Is All You Need" (Vaswani et al. 2017) and its descendants."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transferry.build_model.model.attention import (
    KeyValues,
    Past,
    Places,
    Rotation,
    causal_bias,
    padding_bias,
)
from transferry.build_model.model.composed import Composed
from transferry.build_model.model.layers import (
    Layer,
    OutputTransform,
    rotary_angles,
    rotary_rates,
    sinusoidal_positions,
)
from transferry.build_model.model.mapped_weights import MappedWeights
from transferry.build_model.model.norms import make_norm
from transferry.build_model.model.recurrence import CellState
from transferry.build_model.model.shape import TransformerConfig

Stack = Literal["encoder", "decoder", "rereading"]


class Transformer(Composed):
    """Encoder and decoder, or one of them; the shape is the config's.

    Source and target share one embedding. The cache of the decoder is a value: `decode` takes the
    past and returns the present. What a family does in another way is a part (`parts/`): a subclass
    that overrides a method, which `Transformer(config)` chooses.

    Attributes:
        config: The shape.
        mapped: The file that holds the weights; None if they are in memory.
    """

    mapped: MappedWeights | None = None
    config: Any  # a ModelConfig, whose parts import this module
    positions: Tensor
    cosines: Tensor
    sines: Tensor

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.build()
        for name, table in self.tables().items():
            self.register_buffer(name, table.to(torch.get_default_dtype()), persistent=False)
        self._initialise()

    def build(self) -> None:
        """Makes the modules and weights."""
        config, final = self.config, self.config.has_final_norm
        self.build_embedding()
        self.build_embedding_norm()
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = nn.ModuleList(
            Layer(config.encoder_config(), number, cross=False)
            for number in range(config.encoder_layers)
        )
        self.decoder = nn.ModuleList(
            Layer(config, number, cross=bool(config.encoder_layers))
            for number in range(config.decoder_layers)
        )
        self.encoder_norm = make_norm(config) if final and config.encoder_layers else None
        self.decoder_norm = make_norm(config) if final and config.decoder_layers else None
        self.output_transform = OutputTransform(config) if config.output_transform else None
        own = config.has_logits and not config.tied
        rows, width = config.vocabulary_size, config.d_embedding
        self.output = nn.Linear(width, rows, bias=False) if own else None
        self.output_bias = nn.Parameter(torch.zeros(rows)) if config.output_bias else None
        self.head: Callable[[Tensor, Tensor], Tensor] | None = None
        if config.positions == "learned":
            self.positions = nn.Parameter(torch.empty(config.max_positions, config.d_positions))

    def build_embedding(self) -> None:
        """Makes the embedding."""
        config = self.config
        self.embedding = nn.Embedding(config.vocabulary_size, config.d_embedding)

    def build_embedding_norm(self) -> None:
        """Makes its norm."""
        config = self.config
        norm = make_norm(config, config.d_positions) if config.embedding_norm else None
        self.embedding_norm = norm

    def tables(self) -> dict[str, Tensor]:
        """The positions that are a formula and no weights, in float64."""
        config = self.config
        if config.positions == "sinusoidal":
            return {"positions": sinusoidal_positions(config.max_positions, config.d_positions)}
        if config.positions == "rotary":
            rates = rotary_rates(config.d_head, config.rotary_base)
            return rotary_angles(config.max_positions, rates)._asdict()
        return {}

    def _initialise(self) -> None:
        """Xavier (Glorot and Bengio 2010, eq. 16); W_Q, W_K and W_V as parts of one matrix.

        Smaller queries, keys and values keep a post-norm encoder alive: with the full
        gain, attention outweighs the residual, and within 2,500 steps at a rate of 4e-3 every
        position of the encoder had become the same vector (docs/training.md).
        """
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                part = name.rpartition(".")[2] in ("query", "key", "value")
                nn.init.xavier_uniform_(module.weight, gain=0.5**0.5 if part else 1.0)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        # Times sqrt(d_model) in `embed` this makes entries of variance 1, as large as positions;
        # without that factor GPT-2's 0.02.
        scaled = self.config.scale_embedding
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=self.config.d_model**-0.5 if scaled else 0.02)
        for name, table in self.named_parameters(recurse=False):
            if name.endswith("positions"):
                nn.init.normal_(table, std=1.0 if scaled else 0.02)

    def release(self) -> None:
        """Releases the pages of mapped weights from memory."""
        if self.mapped is not None:
            self.mapped.release()

    def double(self) -> Self:
        """Turns the model into its float64 oracle: tables are made anew, not widened."""
        super().double()
        for name, table in self.tables().items():
            setattr(self, name, table.to(self.embedding.weight.device))
        return self

    def embed(self, tokens: Tensor, positions: Tensor | None, *, source: bool = False) -> Tensor:
        """Embedding(token) * sqrt(d_model) + PE(position), sections 3.4 and 3.5 of the paper.

        Tokens [batch, length] int64 become [batch, length, d_model]; positions are [length] or
        [batch, length] int64, or left out.
        """
        x = self.token_vectors(tokens, source=source)
        if self.config.scale_embedding:
            x = x * math.sqrt(self.config.d_model)
        x = self.placed(x, tokens, positions, source=source)
        embedded: Tensor = self.dropout(self.normed(x, source=source))
        return embedded

    def token_vectors(self, tokens: Tensor, *, source: bool) -> Tensor:
        """Looks up tokens [batch, length] in the embedding of source or target."""
        vectors: Tensor = self.embedding(tokens)
        return vectors

    def placed(
        self, x: Tensor, tokens: Tensor, positions: Tensor | None, *, source: bool
    ) -> Tensor:
        """Adds the positions to the tokens' vectors x [batch, length, d_positions]."""
        if positions is None or self.config.positions not in ("sinusoidal", "learned"):
            return x
        # Not table[positions]: the exporter would make a copy and a GatherND.
        return x + F.embedding(positions, self.position_table(source=source))

    def position_table(self, *, source: bool) -> Tensor:
        """Returns the positions that are added [max_positions, d_positions]."""
        return self.positions

    def normed(self, x: Tensor, *, source: bool) -> Tensor:
        """Normalises the sum of embedding and position, if there is an embedding_norm."""
        return x if self.embedding_norm is None else self.embedding_norm(x)

    def rotations(self, stack: Stack, positions: Tensor) -> list[Rotation | None]:
        """Returns the rotation of queries and keys at positions, for each layer of a stack."""
        turn = None
        if self.config.positions == "rotary":
            turn = Rotation(self.cosines, self.sines).at(positions)
        return [turn] * len(self.get_submodule(stack))  # type: ignore[arg-type]

    def biases(self, stack: Stack, bias: Tensor, places: Places) -> list[Tensor]:
        """Returns M for each layer of a stack, from M of padding and of the future."""
        return [bias] * len(self.get_submodule(stack))  # type: ignore[arg-type]

    def encode(self, source: Tensor, source_mask: Tensor) -> Tensor:
        """Encodes the source.

        Args:
            source: [batch, source] int64
            source_mask: [batch, source] bool, True at a token, False at padding.

        Returns:
            [batch, source, d_model]; rows at padding mean nothing.
        """
        positions = torch.arange(source.shape[1], device=source.device)
        x = self.embed(source, positions, source=True)
        bias = padding_bias(source_mask, x.dtype)
        biases = self.biases("encoder", bias, Places(positions, positions, source_mask))
        rotations = self.rotations("encoder", positions)
        for layer, bias, rotation in zip(self.encoder, biases, rotations, strict=True):
            x, _ = layer(x, bias, rotation=rotation)
        return x if self.encoder_norm is None else self.encoder_norm(x)

    def cross(self, encoded: Tensor) -> list[KeyValues]:
        """Returns each decoder layer's keys and values of the encoded source, made once."""
        return [layer.cross_attention.project(encoded) for layer in self.decoder]  # type: ignore[union-attr, operator]

    def empty_past(self, batch: int) -> list[KeyValues] | list[CellState]:
        """Returns the cache before the first target position: length 0 in every layer.

        The state of an SSRU is zero.
        """
        weight = self.embedding.weight
        if self.config.recurrent:
            cell = weight.new_zeros(batch, 1, 1, self.config.d_model)
            return [CellState(cell) for _ in self.decoder]
        nothing = weight.new_zeros(batch, self.config.kv_heads, 0, self.config.d_head)
        return [KeyValues(nothing, nothing) for _ in self.decoder]

    def decode(
        self,
        target: Tensor,
        mask: Tensor,
        cross: Sequence[KeyValues],
        past: Sequence[KeyValues] | Sequence[CellState],
    ) -> tuple[Tensor, list[Any]]:
        """Runs the decoder over new target positions.

        Args:
            target: [batch, target] int64, the tokens that follow the past.
            mask: Of the source, [batch, source] bool, True at a token; where there is no encoder
                of the past, [batch, past]. Padding takes up room in the past but no position, so
                that texts of unequal length may be padded where they end and then go on.
            cross: A decoder layer's keys and values of the source, from `cross`; empty where
                there is no encoder.
            past: A decoder layer's keys and values of earlier positions; `empty_past` at first.

        Returns:
            Logits [batch, target, vocabulary], and the present, which is the next call's past.
        """
        if self.config.recurrent:
            cross_bias = padding_bias(mask, self.embedding.weight.dtype)
            x, present = self.decode_at(target, None, None, None, cross_bias, cross, past)
            return self.logits(x), present
        length, new = past[0][0].shape[2], target.shape[1]
        positions = torch.arange(new, device=target.device)
        columns = torch.arange(length + new, device=target.device)
        if not cross and self.config.looks_at_columns:
            earlier = mask.cumsum(dim=1) - 1
            columns = torch.cat([earlier, positions + mask.sum(dim=1, keepdim=True)], dim=1)
        positions = positions + (length if cross else mask.sum(dim=1, keepdim=True))
        dtype = self.embedding.weight.dtype
        bias = causal_bias(length, new, dtype, target.device)
        cross_bias = padding_bias(mask, dtype)
        if not cross:
            bias = bias + F.pad(cross_bias, (0, new))
        x, present = self.decode_at(target, positions, columns, bias, cross_bias, cross, past)
        return self.logits(x), present

    def decode_at(
        self,
        target: Tensor,
        positions: Tensor | None,
        columns: Tensor | None,
        bias: Tensor | None,
        cross_bias: Tensor | None,
        cross: Sequence[KeyValues],
        past: Sequence[Past] | Sequence[CellState],
    ) -> tuple[Tensor, list[Any]]:
        """Runs the decoder over target tokens wherever they stand and whatever they see.

        Args:
            target: [batch, target] int64
            positions: Of the tokens, [target] or [batch, target] int64; None, as the next
                two, where the decoder is recurrent.
            columns: Positions of all keys, [present] or [batch, present] int64; read where the
                config looks at columns.
            bias: M of self-attention, broadcastable to [batch, heads, target, present].
            cross_bias: M of cross-attention, broadcastable to [batch, heads, target, source];
                not used where there is no encoder.
            cross: As for `decode`.
            past: Cache of each layer; see `Past`.

        Returns:
            Hidden states for `logits` [batch, target, d_model], and the present.
        """
        x = self.embed(target, positions)
        rotations: list[Rotation | None] = [None] * len(self.decoder)
        biases: list[Tensor | None] = [None] * len(self.decoder)
        if positions is not None and columns is not None and bias is not None:
            rotations = self.rotations("decoder", positions)
            biases = [*self.biases("decoder", bias, Places(positions, columns))]
        presents = []
        for number, (layer, layer_past) in enumerate(zip(self.decoder, past, strict=True)):
            layer_cross = cross[number] if cross else None
            rotation, own_bias = rotations[number], biases[number]
            x, present = layer(x, own_bias, layer_past, layer_cross, cross_bias, rotation)
            presents.append(present)
        return self.finished(x), presents

    def finished(self, x: Tensor) -> Tensor:
        """Returns the decoder's output for x [batch, target, d_model] of its last layer."""
        return x if self.decoder_norm is None else self.decoder_norm(x)

    def logits(self, x: Tensor) -> Tensor:
        """Projects x [batch, length, d_model] to scores [batch, length, vocabulary]."""
        weight = self.embedding.weight if self.output is None else self.output.weight
        return F.linear(self.transformed(x), weight, self.output_bias)

    def transformed(self, x: Tensor) -> Tensor:
        """Returns the input of the output projection [batch, length, d_embedding]."""
        return x if self.output_transform is None else self.output_transform(x)

    def answers(self, source: Tensor, source_mask: Tensor) -> dict[str, Tensor]:
        """Returns the outputs of an encoder-only model, as far as it has the parts.

        "hidden" [batch, source, d_model] as `encode`, "head" as `Head.forward`, and "logits"
        [batch, source, vocabulary], those at position t of the token there.
        """
        hidden = self.encode(source, source_mask)
        found = {"hidden": hidden}
        if self.head is not None:
            found["head"] = self.head(hidden, source_mask)
        if self.config.has_logits:
            found["logits"] = self.logits(hidden)
        return found

    def forward(self, source: Tensor, source_mask: Tensor, target: Tensor) -> Tensor:
        """Scores every position at once, as training does.

        Args:
            source: [batch, source] int64; of no length where there is no encoder.
            source_mask: [batch, source] bool, True at a token.
            target: [batch, target] int64, input of the decoder, if any.
                Padding at the end needs no mask: no earlier position sees it.

        Returns:
            Logits [batch, target, vocabulary], those at position t of the token at t + 1; of an
            encoder alone the last of `answers`.
        """
        if not self.decoder:
            return list(self.answers(source, source_mask).values())[-1]
        cross = self.cross(self.encode(source, source_mask)) if self.encoder else []
        return self.decode(target, source_mask, cross, self.empty_past(target.shape[0]))[0]


@torch.inference_mode()
def greedy(
    model: Transformer,
    source: Tensor,
    source_mask: Tensor,
    *,
    bos_id: int,
    eos_id: int,
    max_length: int,
    check: Callable[[], None] = lambda: None,
) -> list[list[int]]:
    """The plainest generation loop, over a source as in `Transformer.encode`.

    Returns the tokens of each row, the ending `eos_id` left out; calls `check` before each token.
    """
    cross = model.cross(model.encode(source, source_mask))
    past = model.empty_past(source.shape[0])
    target = torch.full((source.shape[0], 1), bos_id, device=source.device)
    ended = torch.zeros(source.shape[0], dtype=torch.bool, device=source.device)
    while target.shape[1] <= max_length and not ended.all():
        check()
        logits, past = model.decode(target[:, -1:], source_mask, cross, past)
        chosen = logits[:, -1].argmax(dim=-1)
        ended = ended | (chosen == eos_id)
        target = torch.cat([target, chosen[:, None]], dim=1)
    rows = target[:, 1:].tolist()
    return [row[: row.index(eos_id)] if eos_id in row else row for row in rows]
