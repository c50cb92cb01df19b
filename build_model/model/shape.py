"""Shape of a Transformer as in the papers; families of models add fields of their own."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, TypeVar, cast

import msgspec

from transferry.runtime.errors import UsageError, require
from transferry.runtime.settings import Count, Probability, check_fields, check_value, shown

# Sizes whose products torch can still count.
Size = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
SizeOrNone = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
_Layers = Annotated[int, msgspec.Meta(ge=0, le=1000)]
Rate = Annotated[float, msgspec.Meta(gt=0, le=1000)]

_Module = TypeVar("_Module")

# Metadata of a field that older files lack: its default is not written, so that bytes stay.
LATER = {"later": True}


def later(table: type[JsonConfig]) -> dict[str, Any]:
    """Returns the metadata of such a field that holds a table or None."""
    return LATER | {"table": table}


class JsonConfig:
    """Round trip through a dictionary; unknown fields are errors."""

    def __post_init__(self) -> None:
        check_fields(self)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as plain JSON values."""
        values = dataclasses.asdict(self)  # type: ignore[call-overload]
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if field.metadata.get("later") and values[field.name] == field.default:
                del values[field.name]
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
        values = {
            name: _read(fields[name], value) if name in fields else value
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


def _read(field: dataclasses.Field[Any], value: Any) -> Any:
    """Returns the value of a field from JSON."""
    table = field.metadata.get("table")
    if isinstance(value, dict) and table is not None:
        return table.from_dict(value)
    listed = isinstance(value, list) and str(field.type).startswith("tuple")
    return tuple(value) if listed else value


Architecture = Literal["encoder-decoder", "decoder-only", "encoder-only"]
Activation = Literal[
    "relu", "gelu", "gelu-tanh", "gelu-quick", "swish", "swiglu", "geglu", "geglu-tanh", "reglu"
]
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
            and keys (Su et al. 2021); "none" adds none, as in T5.
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

    vocabulary_size: Size
    d_model: Size
    heads: Size
    encoder_layers: _Layers
    decoder_layers: _Layers
    d_ff: Size
    dropout: Probability = 0.1
    max_positions: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)] = 512
    norm_epsilon: Rate = 1e-5
    architecture: Architecture = "encoder-decoder"
    norm: Literal["layer", "rms"] = "layer"
    norm_order: Literal["post", "pre", "sandwich", "res-post"] = "post"
    positions: Literal["sinusoidal", "learned", "rotary", "none"] = "sinusoidal"
    rotary_base: Annotated[float, msgspec.Meta(gt=0, le=1e12)] = 10000.0
    activation: Activation = "relu"
    key_value_heads: SizeOrNone = 0
    tied: bool = True
    bias: bool = True
    scale_embedding: bool = True
    embedding_norm: bool = False
    output_transform: bool = False
    output_bias: bool = False
    decoder_cell: Literal["attention", "ssru"] = "attention"

    def __post_init__(self) -> None:
        check_value("architecture", self.architecture, Architecture)
        stacks = STACKS[self.architecture]
        for name in stacks:
            check_value(name, getattr(self, name), Count)
        check_fields(self)
        for name in {"encoder_layers", "decoder_layers"} - set(stacks):
            layers = getattr(self, name)
            require(layers == 0, name, f"0 for architecture {self.architecture}", repr(layers))
        self.check()

    def check(self) -> None:
        """Checks fields against each other; a family's config checks those of its own, too.

        Raises:
            UsageError: Two fields do not fit.
        """
        self.check_width()
        expected = f"a multiple of key_value_heads ({self.kv_heads})"
        require(self.heads % self.kv_heads == 0, "heads", expected, self.heads)
        if self.positions == "sinusoidal":
            expected = "even for sinusoidal positions, which are pairs of sine and cosine"
            require(self.d_model % 2 == 0, "d_model", expected, self.d_model)
        if self.recurrent:
            shared = self.positions in ("sinusoidal", "learned")
            fits = shared and self.architecture == "encoder-decoder"
            expected = "attention unless two stacks share sinusoidal or learned positions"
            require(fits, "decoder_cell", expected, "ssru")

    def check_width(self) -> None:
        """Checks the width of a head."""
        fits = self.d_model % self.heads == 0
        require(fits, "d_model", f"a multiple of heads ({self.heads})", self.d_model)
        self.check_turns("d_model / heads")

    def check_turns(self, name: str) -> None:
        """Checks that rotary positions can turn a head, under the name of its width."""
        expected = "even for rotary positions, which turn pairs of features"
        fits = self.positions != "rotary" or self.d_head % 2 == 0
        require(fits, name, expected, self.d_head)

    def parts(self) -> tuple[type[Any], ...]:
        """Returns the parts of a family: subclasses of the reference's modules."""
        return ()

    def composed(self, base: type[_Module]) -> type[_Module]:
        """Returns a module's class with the family's parts, from the innermost to the outermost."""
        parts = tuple(part for part in self.parts() if issubclass(part, base))
        chosen: type[_Module] = _composed(cast(Hashable, base), parts)
        return chosen

    @property
    def recurrent(self) -> bool:
        """Whether the decoder carries a state of fixed size instead of a growing cache."""
        return self.decoder_cell == "ssru"

    @property
    def two_stacks(self) -> bool:
        """Whether one stack attends to the output of the other."""
        return self.architecture == "encoder-decoder"

    @property
    def d_head(self) -> int:
        """Width of one attention head, d_k in the paper."""
        return self.d_model // self.heads

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.key_value_heads or self.heads

    @property
    def d_embedding(self) -> int:
        """Width of the embedding."""
        return self.d_model

    @property
    def d_positions(self) -> int:
        """Width of the positions that are added to the embedding, and of its norm."""
        return self.d_model

    @property
    def source_vocabulary(self) -> int:
        """Size of the encoder's vocabulary."""
        return self.vocabulary_size

    @property
    def has_logits(self) -> bool:
        """Whether hidden states are projected to logits."""
        return True

    @property
    def has_first_norm(self) -> bool:
        """Whether there is a norm before the first sublayer, where the order has one there."""
        return True

    @property
    def has_final_norm(self) -> bool:
        """Whether a norm follows each stack."""
        return self.norm_order != "post"

    @property
    def transform_activation(self) -> Activation:
        """Activation of the output transform."""
        return GATED.get(self.activation, self.activation)

    @property
    def looks_at_columns(self) -> bool:
        """Whether attention depends on positions in the cache, and not on their order alone."""
        return False

    def divisor(self, layer: int) -> float:
        """Divisor of the attention scores of a layer, from 0."""
        return math.sqrt(self.d_head)

    def has_bias(self, part: str) -> bool:
        """Whether a part has a bias."""
        return self.bias

    def encoder_config(self) -> Self:
        """Returns the shape of the encoder's layers."""
        return self


@functools.cache
def _composed(base: Hashable, parts: tuple[Any, ...]) -> Any:
    if not parts:
        return base
    assert isinstance(base, type)
    name = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (*reversed(parts), base), name)
