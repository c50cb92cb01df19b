"""Shape of a model: the paper's fields, then those of imported models; checked on construction."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

import msgspec

from transferry.runtime.errors import UsageError, require
from transferry.runtime.settings import Count, Probability, Whole, check_fields, check_value, shown

# Sizes whose products torch can still count.
_Size = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
_SizeOrNone = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
_Layers = Annotated[int, msgspec.Meta(ge=0, le=1000)]
_Rate = Annotated[float, msgspec.Meta(gt=0, le=1000)]
_Cap = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
_Turn = Annotated[float, msgspec.Meta(ge=0, le=1000)]


class JsonConfig:
    """Round trip through a dictionary; unknown fields are errors."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as plain JSON values."""
        values = dataclasses.asdict(self)  # type: ignore[call-overload]
        # JSON has lists instead of tuples.
        return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Makes the config from the result of `to_dict`.

        Raises:
            UsageError: A field is unknown, missing or outside its range.
        """
        if not isinstance(values, dict):
            raise UsageError(f"{cls.__name__} must be a table, found {shown(values)}")
        fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        tuples = {name for name, field in fields.items() if str(field.type).startswith("tuple")}
        values = {
            name: tuple(value) if name in tuples and isinstance(value, list) else value
            for name, value in values.items()
        }
        if unknown := sorted(values.keys() - fields.keys()):
            raise UsageError(
                f"{cls.__name__} has no {', '.join(unknown)}; it knows {', '.join(fields)}"
            )
        required = {name for name, field in fields.items() if field.default is dataclasses.MISSING}
        if missing := sorted(required - values.keys()):
            raise UsageError(f"{cls.__name__} needs {', '.join(missing)}, which is not given")
        return cls(**values)


Architecture = Literal["encoder-decoder", "decoder-only", "encoder-only"]
Activation = Literal[
    "relu", "gelu", "gelu-tanh", "gelu-quick", "swish", "swiglu", "geglu", "geglu-tanh", "reglu"
]
# Activation of a layer of the head.
HeadActivation = Literal[
    "none", "tanh", "sigmoid", "relu", "gelu", "gelu-tanh", "gelu-quick", "swish"
]
# How the hidden states of a text become one vector: first or last token, maximum or mean of each
# feature, sum divided by the root of the length, or mean weighted by position 1, 2, ...
# (Muennighoff 2022, SGPT).
Pooling = Literal["first", "last", "max", "mean", "root-mean", "weighted"]
# Activations of the gate, by the name of the gated unit.
GATED: dict[Activation, Activation] = {
    "swiglu": "swish",
    "geglu": "gelu",
    "geglu-tanh": "gelu-tanh",
    "reglu": "relu",
}
# Stacks of layers by architecture.
STACKS: dict[Architecture, tuple[str, ...]] = {
    "encoder-decoder": ("encoder_layers", "decoder_layers"),
    "decoder-only": ("decoder_layers",),
    "encoder-only": ("encoder_layers",),
}


@dataclass(frozen=True)
class TransformerConfig(JsonConfig):
    """Shape of a Transformer, in the terms of Vaswani et al. (2017), as `train` offers it.

    The defaults are that paper's model; the alternatives cover its descendants and mixtures.

    Attributes:
        vocabulary_size: Rows of the embedding shared by source, target and output.
        d_model: Width of the hidden states.
        heads: Attention heads.
        encoder_layers: Encoder layers; 0 for decoder-only.
        decoder_layers: Decoder layers; 0 for encoder-only.
        d_ff: Inner width of the feed-forward sublayer.
        dropout: Dropout probability of sublayer outputs and embedding sums.
        max_positions: Longest source or target, in tokens.
        norm_epsilon: Epsilon of the norm.
        architecture: Source to target, a text continued, or a text read.
        norm: "layer" is LayerNorm (Ba et al. 2016), "rms" RMSNorm (Zhang and Sennrich 2019).
        norm_order: "post" is Norm(x + Sublayer(x)) as in the paper; "pre" x + Sublayer(Norm(x))
            (Xiong et al. 2020); "sandwich" x + Norm(Sublayer(Norm(x))), as in Gemma 2; "res-post" x
            + Norm(Sublayer(x)), as in OLMo 2.
        positions: "sinusoidal" and "learned" are added to the embedding; "rotary" rotates queries
            and keys (Su et al. 2021); "none" is for relative_buckets, as in T5.
        rotary_base: Base of the rotary angles, theta in Llama.
        activation: Feed-forward activation; "gelu-tanh" is GPT-2's approximation, "gelu-quick" x
            sigmoid(1.702 x); the last four are gated by a third matrix (Shazeer 2020).
        key_value_heads: Key-value heads, shared by equal groups of query heads (Ainslie et al.
            2023); 1 is multi-query attention, 0 as many as heads.
        tied: Use the embedding as the output projection.
        bias: Add a bias to linear layers and LayerNorm.
        scale_embedding: Multiply the embedding by sqrt(d_model).
        embedding_norm: Normalise the sum of embedding and position, as in BERT.
        output_transform: Put a linear layer, activation and norm before the output projection, as
            in BERT.
        output_bias: Add a bias to the output projection, as in BERT and MarianMT.
        decoder_cell: "ssru" replaces the decoder's self-attention and its growing cache by a
            recurrent state of d_model numbers (Kim et al. 2019).
    """

    vocabulary_size: _Size
    d_model: _Size
    heads: _Size
    encoder_layers: _Layers
    decoder_layers: _Layers
    d_ff: _Size
    dropout: Probability = 0.1
    max_positions: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)] = 512
    norm_epsilon: _Rate = 1e-5
    architecture: Architecture = "encoder-decoder"
    norm: Literal["layer", "rms"] = "layer"
    norm_order: Literal["post", "pre", "sandwich", "res-post"] = "post"
    positions: Literal["sinusoidal", "learned", "rotary", "none"] = "sinusoidal"
    rotary_base: Annotated[float, msgspec.Meta(gt=0, le=1e12)] = 10000.0
    activation: Activation = "relu"
    key_value_heads: _SizeOrNone = 0
    tied: bool = True
    bias: bool = True
    scale_embedding: bool = True
    embedding_norm: bool = False
    output_transform: bool = False
    output_bias: bool = False
    decoder_cell: Literal["attention", "ssru"] = "attention"


@dataclass(frozen=True)
class ModelConfig(TransformerConfig):
    """Shape of a model, with the variations of imported models.

    Attributes:
        head_width: Width of an attention head; 0 means d_model / heads.
        query_key_value_bias: Add a bias to the queries, keys and values; None means as `bias`.
        attention_output_bias: Likewise for the output of attention.
        feed_forward_bias: Likewise for the feed-forward sublayer.
        norm_bias: Likewise for LayerNorm.
        norm_offset: Norms multiply by 1 + weight, as in Gemma.
        final_norm: Norm after each stack, where norm_order is not "post".
        query_key_norm: Norm of queries and keys (Henry et al. 2020): "head" of each head, as in
            Qwen 3, "all" of all heads together, as in OLMo 2.
        parallel: Attention and feed-forward read the same x, as in GPT-NeoX (Wang and Komatsuzaki
            2021).
        attention_divisor: Divisor of the scores; 0 means sqrt(head width), as in the paper.
        divide_by_layer: Divide the scores of the first layer by 1, of the second by 2, and so on,
            as scale_attn_by_inverse_layer_idx of GPT-2.
        attention_softcap: Scores s become cap * tanh(s / cap), as in Gemma 2; 0 disables it.
        output_softcap: Likewise for the logits.
        windows: For each layer, how many positions a token sees to the left, itself included
            (Beltagy et al. 2020); an encoder's token sees as many to the right. 0 means all; none
            given means all in every layer.
        rotary_rates: Radians per position of each pair of features, in place of those of
            rotary_base; features beyond these pairs do not turn.
        rotary_scale: Factor of the cosines and sines (YaRN, Peng et al. 2023, section 3.4).
        window_rotary_rates: Rates of the layers with a window, where they differ.
        unrotated: Layers, from 0, whose queries and keys do not turn, as in SmolLM 3.
        embedding_width: Width of the embedding where a matrix brings it to d_model, and another
            back before the output, as in OPT; 0 means d_model.
        source_vocabulary_size: Rows of the encoder's embedding, where it has one of its own; 0
            means that it shares the decoder's.
        encoder_heads: Attention heads of the encoder, where it has another number; 0 means `heads`.
        encoder_d_ff: Likewise for the inner width of its feed-forward sublayer.
        separate_positions: Encoder and decoder each have learned positions, and a norm of the
            embedding, of their own, as in BART.
        relative_buckets: Buckets of distances; the number of a bucket and head is added to the
            scores (Raffel et al. 2020, section 2.1). 0 disables them.
        relative_distance: The distance from which all share the last bucket.
        scale_output: Divide the decoder's output by sqrt(d_model), as in T5.
        project_sum: The matrix of embedding_width takes the sum of embedding and position,
            normalised, and has a bias, as in ELECTRA.
        first_norm: Norm before the first sublayer; false in ModernBERT, whose embedding is
            normalised.
        output_activation: Activation of output_transform; None means as `activation`.
        output_transform_bias: Add a bias to its linear layer; None means as `bias`.
        lm_head: Project hidden states to logits; only an encoder-only model may go without.
        pooling: Poolings of the hidden states of a text, concatenated; empty where the head of an
            encoder-only model reads each token.
        head_widths: Width of each linear layer of the head.
        head_activations: The activation after each.
        head_biases: Whether each has a bias.
        head_norm: Norm after the first of them, as in ModernBERT.
        unit_length: The head scales its vector to length 1.
        segments: Kinds of segments of an encoder-only model, each with a vector that is added to
            the embedding, as in BERT; 0 means that it does not tell them apart.
        causal: An encoder-only model's tokens see no later ones, as in a decoder that only reads.
        segment_end: Token id that ends a segment: tokens after the first belong to the second.
        padding_token: Token id without a position of its own in a source: it takes that of padding
            and the next token the next position, as in RoBERTa; -1 for no such token.
    """

    head_width: _SizeOrNone = 0
    query_key_value_bias: bool | None = None
    attention_output_bias: bool | None = None
    feed_forward_bias: bool | None = None
    norm_bias: bool | None = None
    norm_offset: bool = False
    final_norm: bool = True
    query_key_norm: Literal["none", "head", "all"] = "none"
    parallel: bool = False
    attention_divisor: _Cap = 0.0
    divide_by_layer: bool = False
    attention_softcap: _Cap = 0.0
    output_softcap: _Cap = 0.0
    windows: tuple[Whole, ...] = ()
    rotary_rates: tuple[_Turn, ...] = ()
    rotary_scale: Annotated[float, msgspec.Meta(gt=0, le=1000)] = 1.0
    window_rotary_rates: tuple[_Turn, ...] = ()
    unrotated: tuple[Whole, ...] = ()
    embedding_width: _SizeOrNone = 0
    source_vocabulary_size: _SizeOrNone = 0
    encoder_heads: _SizeOrNone = 0
    encoder_d_ff: _SizeOrNone = 0
    separate_positions: bool = False
    relative_buckets: _SizeOrNone = 0
    relative_distance: _Size = 128
    scale_output: bool = False
    project_sum: bool = False
    first_norm: bool = True
    output_activation: Activation | None = None
    output_transform_bias: bool | None = None
    lm_head: bool = True
    pooling: tuple[Pooling, ...] = ()
    head_widths: tuple[_Size, ...] = ()
    head_activations: tuple[HeadActivation, ...] = ()
    head_biases: tuple[bool, ...] = ()
    head_norm: bool = False
    unit_length: bool = False
    causal: bool = False
    segments: _SizeOrNone = 0
    segment_end: Whole = 0
    padding_token: Annotated[int, msgspec.Meta(ge=-1)] = -1

    def __post_init__(self) -> None:
        check_value("architecture", self.architecture, Architecture)
        stacks = STACKS[self.architecture]
        for name in stacks:
            check_value(name, getattr(self, name), Count)
        check_fields(self)
        for name in {"encoder_layers", "decoder_layers"} - set(stacks):
            layers = getattr(self, name)
            require(layers == 0, name, f"0 for architecture {self.architecture}", repr(layers))
        fits = bool(self.head_width) or self.d_model % self.heads == 0
        require(fits, "d_model", f"a multiple of heads ({self.heads})", self.d_model)
        expected = f"a multiple of key_value_heads ({self.kv_heads})"
        require(self.heads % self.kv_heads == 0, "heads", expected, self.heads)
        if self.positions == "sinusoidal":
            expected = "even for sinusoidal positions, which are pairs of sine and cosine"
            require(self.d_model % 2 == 0, "d_model", expected, self.d_model)
        if self.positions == "rotary":
            name = "head_width" if self.head_width else "d_model / heads"
            expected = "even for rotary positions, which turn pairs of features"
            require(self.d_head % 2 == 0, name, expected, self.d_head)
        expected = "false unless the norm is rms, which has no bias to offset with"
        require(self.norm == "rms" or not self.norm_offset, "norm_offset", expected, "true")
        expected = "false where norm_order is post, which normalises one sum after the other"
        require(self.norm_order != "post" or not self.parallel, "parallel", expected, "true")
        expected = "false unless there is an embedding_width, and one stack"
        one = bool(self.embedding_width) and self.architecture != "encoder-decoder"
        require(one or not self.project_sum, "project_sum", expected, "true")
        if self.recurrent:
            expected = "attention unless two stacks share sinusoidal or learned positions"
            fits = self.architecture == "encoder-decoder" and not self.parallel
            fits &= self.positions in ("sinusoidal", "learned") and not self.relative_buckets
            fits &= not self.separate_positions
            require(fits, "decoder_cell", expected, "ssru")
        fits = self.positions == "learned" and bool(self.encoder_layers)
        expected = "-1 without an encoder that learned its positions"
        require(fits or self.padding_token < 0, "padding_token", expected, self.padding_token)
        expected = f"an id below {self.source_vocabulary}"
        fits = self.padding_token < self.source_vocabulary
        require(fits, "padding_token", expected, self.padding_token)
        self._check_layers()
        self._check_head()

    def _check_head(self) -> None:
        """Checks the fields of encoder-only models."""
        alone = self.architecture == "encoder-only"
        for name in ("pooling", "head_widths", "segments", "causal"):
            value = getattr(self, name)
            require(alone or not value, name, "none unless encoder-only", value)
        require(alone or self.lm_head, "lm_head", "true unless encoder-only", "false")
        layers = len(self.head_widths)
        for name in ("head_activations", "head_biases"):
            given = len(getattr(self, name))
            require(given == layers, name, f"one for each of {layers} layers of the head", given)
        expected = "false unless the head has a linear layer"
        require(bool(layers) or not self.head_norm, "head_norm", expected, "true")
        expected = "false unless hidden states are pooled"
        require(bool(self.pooling) or not self.unit_length, "unit_length", expected, "true")
        expected = f"an id below {self.vocabulary_size}"
        require(self.segment_end < self.vocabulary_size, "segment_end", expected, self.segment_end)

    @property
    def has_head(self) -> bool:
        """Whether an encoder-only model has a head besides that for logits."""
        return bool(self.pooling or self.head_widths)

    @property
    def d_head_output(self) -> int:
        """Width of the head's output, for a text or each token."""
        return self.head_widths[-1] if self.head_widths else self.d_model * len(self.pooling)

    def _check_layers(self) -> None:
        """Checks the fields with a value for each layer, or for each pair of features."""
        layers, pairs = self.encoder_layers + self.decoder_layers, self.d_head // 2
        both = self.architecture == "encoder-decoder"
        for name in ("source_vocabulary_size", "encoder_heads", "encoder_d_ff"):
            value = getattr(self, name)
            require(both or not value, name, "0 unless there are two stacks", value)
        expected = "false unless there are two stacks with learned positions"
        learned = both and self.positions == "learned"
        require(learned or not self.separate_positions, "separate_positions", expected, "true")
        expected = "0 where positions are rotary, whose angles all layers share"
        require(self.positions != "rotary" or not self.encoder_heads, "encoder_heads", expected, 1)
        if both:
            self.encoder_config()
        for name in ("windows", "unrotated"):
            given = len(getattr(self, name))
            require(not (both and given), name, "empty where there are two stacks", given)
        expected = f"one for each of {layers} layers, or empty"
        require(len(self.windows) in (0, layers), "windows", expected, len(self.windows))
        last = max(self.unrotated, default=0)
        require(last < max(1, layers), "unrotated", f"layers below {layers}", last)
        for name in ("rotary_rates", "window_rotary_rates"):
            given = len(getattr(self, name))
            rotary = self.positions == "rotary"
            require(rotary or not given, name, "empty where positions are not rotary", given)
            require(given <= pairs, name, f"at most {pairs}, the pairs of a head", given)

    @property
    def recurrent(self) -> bool:
        """Whether the decoder carries a state of fixed size instead of a growing cache."""
        return self.decoder_cell == "ssru"

    @property
    def d_head(self) -> int:
        """Width of one attention head, d_k in the paper."""
        return self.head_width or self.d_model // self.heads

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.key_value_heads or self.heads

    @property
    def d_embedding(self) -> int:
        """Width of the embedding."""
        return self.embedding_width or self.d_model

    def divisor(self, layer: int) -> float:
        """Divisor of the attention scores of a layer, from 0."""
        by_layer = layer + 1 if self.divide_by_layer else 1
        return (self.attention_divisor or math.sqrt(self.d_head)) * by_layer

    def has_bias(self, part: str) -> bool:
        """Whether a part has a bias, as the fields that end in _bias say."""
        own: bool | None = getattr(self, f"{part}_bias")
        return self.bias if own is None else own

    def encoder_config(self) -> ModelConfig:
        """Returns the shape of the encoder's layers."""
        if not self.encoder_heads and not self.encoder_d_ff:
            return self
        heads, d_ff = self.encoder_heads or self.heads, self.encoder_d_ff or self.d_ff
        return dataclasses.replace(self, heads=heads, d_ff=d_ff, encoder_heads=0, encoder_d_ff=0)

    @property
    def d_positions(self) -> int:
        """Width of the positions that are added to the embedding, and of its norm."""
        return self.d_embedding if self.project_sum else self.d_model

    @property
    def looks_at_columns(self) -> bool:
        """Whether attention depends on positions in the cache, and not on their order alone."""
        return any(self.windows) or bool(self.relative_buckets)

    @property
    def source_vocabulary(self) -> int:
        """Size of the encoder's vocabulary."""
        return self.source_vocabulary_size or self.vocabulary_size

    def window(self, layer: int) -> int:
        """Positions that a token of a layer sees to the left, itself included; 0 means all."""
        return self.windows[layer] if self.windows else 0
