"""Rows of the tables of model types: a tensor of theirs, and its conversion.

In a table "#" stands for a layer's number and "*" for weight or bias. A value is the name of our
tensor, a `Move` if the tensor changes, or `NoPlace` if our model has no such tensor.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transferry.build_model.importing.huggingface.folder import Settings
from transferry.build_model.importing.huggingface.rope import FULL, SLIDING
from transferry.build_model.model.config import ModelConfig
from transferry.build_model.model.shape import GATED, Activation
from transferry.runtime.bundle.head import HeadSettings


@dataclass(frozen=True)
class Move:
    """A tensor that changes in the conversion.

    Attributes:
        ours: Names of our tensors, in order; "@" stands for every layer of the encoder,
            which all get copies.
        change: Converts their tensor to ours, which the shape of our model may determine.
        adds: Name for the report, if the result is added to another tensor.
        turned: Whether their matrix is [in, out].
        optional: Whether a file may lack it.
        what: Name for the report of a tensor that a file may have and our model not.
    """

    ours: tuple[str, ...]
    change: Callable[[Tensor, ModelConfig], tuple[Tensor, ...]] = lambda tensor, config: (tensor,)
    adds: str = ""
    turned: bool = False
    optional: bool = False
    what: str = ""


@dataclass(frozen=True)
class NoPlace:
    """A tensor that our model does not have: its part for the report, empty for constants."""

    what: str = ""


Table = Mapping[str, str | Move | NoPlace]


class Classifier(NamedTuple):
    """The head of a sequence or token classification: fields of ModelConfig, and its tensors."""

    fields: Mapping[str, Any]
    table: Table
    settings: HeadSettings


@dataclass(frozen=True)
class Family:
    """A model type.

    Attributes:
        models: Models of this type, as people call them.
        read: Makes the ModelConfig from config.json and the names of all tensors.
        table: Our tensors by theirs.
        prefixes: Prefixes of the names; the first that fits is dropped.
        computes: Tensors that a formula gives if the file lacks them.
        classifier: Returns the head that config.json names, None without one.
        segments: Name of the vectors of segments; empty if the type does not tell them apart.
        stems: Beginnings of the names of its classes, such as Llama, of a decoder-only type,
            or of an encoder-decoder type with a class of the encoder alone.
        reads_lines: Whether such models were trained on texts with line breaks, and must get them
            whole; translators of sentences were not.
        defaults: Settings where config.json lacks the key, as in transformers.
        only: Values of settings that have no others.
    """

    models: str
    read: Callable[[Settings, set[str]], ModelConfig]
    table: Table
    prefixes: tuple[str, ...]
    computes: Callable[[ModelConfig], dict[str, Tensor]] = field(default=lambda config: {})
    classifier: Callable[[Settings], Classifier | None] = field(default=lambda config: None)
    segments: str = ""
    stems: str = ""
    reads_lines: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def shape(self, config: Settings, names: set[str]) -> ModelConfig:
        """Returns the shape of a model, from config.json and the names of all tensors.

        Raises:
            InputError: A setting is unsupported.
            UsageError: Settings do not fit each other.
        """
        config.values = {**self.defaults, **config.values}
        for name, supported in self.only.items():
            config.only(name, *supported)
        shape = self.read(config, names)
        if shape.architecture != "decoder-only":  # which ignores true, and `as_reader` reads false
            config.only("is_causal", None if shape.two_stacks else False)
        return shape


LAYER = (
    *(f"self_attention.{name}" for name in ("query", "key", "value", "output")),
    *("self_residual.norm", "feed_forward.inner", "feed_forward.outer"),
    "feed_forward_residual.norm",
)


def modules(theirs: str, ours: str, names: str, own: Iterable[str] = LAYER) -> dict[str, str]:
    """Rows of the modules of a layer by `names` in the order of `own`, with weight and bias."""
    pairs = zip(names.split(), own, strict=False)
    return {f"{theirs}.{name}.*": f"{ours}.{each}.*" for name, each in pairs}


def masked_head(theirs: str, linear: str, norm: str, output: str) -> dict[str, str]:
    """Rows of a head for masked tokens, by the names of its modules after `theirs`."""
    return {
        f"{theirs}{linear}.*": "output_transform.linear.*",
        f"{theirs}{norm}.*": "output_transform.norm.*",
        f"{theirs}{output}.weight": "output.weight",
        f"{theirs}{output}.bias": "output_bias",
    }


def conv1d(*ours: str) -> Move:
    """Weight of GPT-2's Conv1D, `[in, out]`; may concatenate several matrices."""
    return Move(ours, lambda tensor, config: tensor.t().tensor_split(len(ours)), turned=True)


def first_row_into(what: str, *ours: str) -> Move:
    """Adds the first row to every row of our tensors."""
    left_out = f"{what} (the first is in the {ours[0]})"
    return Move(ours, lambda tensor, config: (tensor[:1],) * len(ours), left_out)


def every_layer(ours: str) -> Move:
    """A tensor that all layers of the encoder share, as in ALBERT."""
    return Move((ours,), lambda tensor, config: (tensor,) * config.encoder_layers)


def parts(sizes: Callable[[ModelConfig], list[int]], *ours: str) -> Move:
    """Several matrices in one, the outputs of one after those of the other."""
    return Move(ours, lambda tensor, config: torch.split(tensor, sizes(config)))


def heads_of_three(layer: str, kind: str) -> Move:
    """Queries, keys and values of one head after those of the other, as in GPT-NeoX."""

    def change(tensor: Tensor, config: ModelConfig) -> tuple[Tensor, ...]:
        by_head = tensor.reshape(config.heads, 3, config.d_head, *tensor.shape[1:])
        return tuple(each.flatten(0, 1) for each in by_head.unbind(1))

    return Move(tuple(f"{layer}.{name}.{kind}" for name in LAYER[:3]), change)


def after_padding(ours: str, padding: str) -> Move:
    """Rows after that of the padding token, and its row."""

    def change(tensor: Tensor, config: ModelConfig) -> tuple[Tensor, ...]:
        first = config.padding_token
        return tensor[first + 1 :], tensor[first : first + 1]

    return Move((ours, padding), change)


def without_first(count: int, ours: str) -> Move:
    """Rows after the first few, which stand for positions that no token has."""
    return Move((ours,), lambda tensor, config: (tensor[count:],))


def flat(ours: str) -> Move:
    """`[1, n]` to `[n]`."""
    return Move((ours,), lambda tensor, config: (tensor.flatten(),))


BUFFER = NoPlace()
# The embedding of both sides; unused where each side has its own.
SHARED = "shared.weight"

ACTIVATIONS: dict[str, Activation] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu-tanh",
    "gelu_fast": "gelu-tanh",
    "gelu_pytorch_tanh": "gelu-tanh",
    "gelu_python_tanh": "gelu-tanh",
    "gelu_accurate": "gelu-tanh",
    "quick_gelu": "gelu-quick",
    "silu": "swish",
    "swish": "swish",
}
# Of the gate, where a third matrix is gated.
GATES: dict[str, Activation] = {
    name: unit for unit, gate in GATED.items() for name, ours in ACTIVATIONS.items() if ours == gate
}


def sizes(config: Settings, **names: str) -> dict[str, Any]:
    """Reads the sizes of a model; `names` are settings under other names, by ModelConfig field."""
    usual = {
        "vocabulary_size": "vocab_size",
        "d_model": "hidden_size",
        "heads": "num_attention_heads",
        "d_ff": "intermediate_size",
    }
    return {field: config.whole(name) for field, name in (usual | names).items()}


def masked_fields(config: Settings, *, head: bool) -> dict[str, Any]:
    """Fields of BERT and its descendants; without a head for masked tokens, it has no logits."""
    return dict(
        encoder_layers=0,
        decoder_layers=0,
        max_positions=config.whole("max_position_embeddings", 512),
        architecture="encoder-only",
        positions="learned",
        tied=config.flag("tie_word_embeddings", True) or not head,
        scale_embedding=False,
        embedding_norm=True,
        output_transform=head,
        output_bias=head,
        lm_head=head,
    )


def head_width(fields: Mapping[str, Any]) -> int:
    """Width of a head: its own, or d_model / heads; a wrong number of heads is refused later."""
    return int(fields.get("head_width") or fields["d_model"] // max(1, fields["heads"]))


def renamed(config: Settings, **names: str) -> None:
    """Takes settings under their general names, as transformers does (`attribute_map`)."""
    for general, own in names.items():
        if config.values.get(general) is not None:
            if config.values.get(own) is None:
                config.values[own] = config.values[general]
            config.only(general, config.get(own))


def layer_types(config: Settings, layers: int, default: list[bool]) -> list[bool]:
    """Returns which layers have a window."""
    types = config.get("layer_types")
    if types is None:
        return default
    named = isinstance(types, list) and all(each in (SLIDING, FULL) for each in types)
    if not named or len(types) != layers:
        config.refuse("layer_types", types, f"{SLIDING} or {FULL} for each of {layers} layers")
    return [kind == SLIDING for kind in types]
