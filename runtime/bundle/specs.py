"""Tensors, graphs, caches and variants of a bundle, as its manifest describes them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from transferry.runtime.errors import InputError
from transferry.runtime.io.sealed_folder import Name, RelativePath, SealedFolder
from transferry.runtime.precision import FLOAT32, PRECISIONS

REFERENCE = "reference.npz"
PORTABLE = "portable"  # float32 in standard ONNX operators
STANDARD = (PORTABLE, "portable-int8")  # the variants of standard ONNX operators only
ONE_GRAPH = "generate"  # optional graph of the portable variant: greedy search whole
ANSWERS = ("tokens", "lengths", "log_probabilities")  # roles of its outputs
SCORES: Literal["scores"] = "scores"  # another, of beams that rules rank by other values

Size = Annotated[int, Meta(ge=1, le=1 << 40)]
# The types that the runtime handles: numpy would read "O" as pointers into memory.
ElementType = Annotated[str, Meta(pattern=r"^(bool|u?int8|int32|int64|b?float16|float32)\Z")]
StoredType = Annotated[str, Meta(pattern=r"^(int8|int32|float32)\Z")]
PrecisionName = Annotated[str, Meta(pattern=rf"^({'|'.join(PRECISIONS)})\Z")]
Provider = Annotated[str, Meta(pattern=r"^(cpu|cuda)\Z")]
Architecture = Annotated[str, Meta(pattern=r"^(encoder-decoder|decoder-only|encoder-only)\Z")]

# Graphs of a variant whose steps return a longer cache, by architecture.
GRAPHS = {
    "encoder-decoder": ("encoder", "decoder", "select"),
    "decoder-only": ("decoder", "select"),
    "encoder-only": ("encoder",),
}
# Graphs of a variant whose steps write into the cache in place; a recurrent decoder has no columns
# to gather.
IN_PLACE = {
    "encoder-decoder": (
        *("encoder", "decoder", "lm_head", "exp_sums", "gather", "move", "place", "select"),
    ),
    "decoder-only": ("decoder", "lm_head", "exp_sums", "gather", "move"),
}

# Heads are of keys and values. Where the cache is in place, the batch dimension counts slots.
Role = Literal[
    "source",  # [batch, source] int64: token ids
    "source_mask",  # [batch, source] bool: True at a token
    "cross",  # [batch, heads, source, d_head]: keys or values of the source
    "target",  # [batch, target] int64: token ids
    "past_mask",  # [batch, past] bool: True at a token; without an encoder
    "past",  # [batch, heads, past, d_head]: keys or values of earlier positions; in place
    #          [batch, heads, capacity, d_head]; of an SSRU its state [batch, 1, 1, d_model], in
    #          place [past, d_model]
    "present",  # [batch, heads, past + target, d_head]: the next step's past; in place as past
    "logits",  # [batch, target, vocabulary]; in place [batch * target, vocabulary]; of an encoder
    #            alone [batch, source, vocabulary]
    "hidden",  # [batch * target, d_model]: input of the LM head; of an encoder alone
    #            [batch, source, d_model]
    "head",  # [batch, width]: of an encoder alone, its head's vector or scores of the text; of each
    #          token [batch, source, width]
    "approximate_logits",  # [batch * target, vocabulary]: logits of the int8 LM head
    "exp_sums",  # [rows]: sums of the exponentials of the logits
    "segment_maxima",  # [rows, segments]: largest of each 64 neighbouring logits, then the rest
    "count",  # [1] int64, on the host: k of the top k
    "top_logits",  # [rows, count]: the largest logits of each row, the largest first
    "top_tokens",  # [rows, count] int64: their tokens
    "relative_sums",  # [rows]: sums of the exponentials of the logits less the largest
    "positions",  # [batch, target] int64: positions of the target
    "columns",  # [batch, capacity] int64: positions of the keys in the cache; where a layer has a
    #             window, or distances count
    "cells",  # [batch, target, heads, 3] int64: slot, head and column of its keys and values
    "bias",  # [batch, 1, target, capacity]: 0 where a token attends, else minus infinity
    "source_bias",  # [batch, 1, 1, source]: the same for the source
    "source_length",  # [batch] int64: tokens of the source; of an int8 cache
    "single",  # [] bool: whether the target is one token a slot without gaps before it; likewise
    "kept",  # [batch, heads, source, d_head]: cross again, in place; likewise
    "rows",  # [selected] int64: rows to take; of an SSRU in place [batch, target]: the row of past
    #          that each token continues
    "places",  # [selected] int64: where to put them
    "state",  # [batch, heads, length, d_head]: past or cross, before a selection
    "selected",  # [selected, heads, length, d_head]: after it
    "moved",  # [batch, heads, length, d_head]: state after rows moved to other places
    "index",  # [selected, heads, columns] int64: columns of the cache to take
    "gathered",  # [selected, heads, columns, d_head]: the cache with these columns
    "write",  # [batch] int64: the column from which fresh is written into state
    "fresh",  # [batch, heads, columns, d_head]: cross of a few sentences
    "placed",  # [batch, heads, length, d_head]: state with fresh written into it
    "max_length",  # [1] int64: limit on the tokens of an answer; of one graph, as the next three
    "tokens",  # [batch, length] int64: the answers, an end token included, then padding
    "lengths",  # [batch] int64: tokens of each answer, an end token included
    "log_probabilities",  # [batch]: of each answer, in nats
    "scores",  # [batch, beam]: values by which rules rank the answers, divided by the length
]


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of a graph, by its name there.

    Attributes:
        type: numpy's name of the element type, such as "float32".
        shape: Sizes of fixed dimensions, symbols of dynamic ones.
    """

    name: str
    role: Role
    type: ElementType
    shape: tuple[Size | str, ...]


@dataclass(frozen=True)
class GraphSpec:
    """One ONNX file, with its inputs and outputs in the file's order."""

    file: RelativePath
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def names(self, role: Role) -> list[str]:
        """Returns the names of the tensors of a role, inputs first, in order."""
        return [spec.name for spec in (*self.inputs, *self.outputs) if spec.role == role]

    def tensor(self, role: Role) -> TensorSpec:
        """Returns the first tensor of a role; raises InputError without one."""
        for spec in (*self.inputs, *self.outputs):
            if spec.role == role:
                return spec
        raise InputError(f"{self.file} has no tensor of role {role!r}; export the bundle again")


@dataclass(frozen=True)
class StoredTensor:
    """A weight that the runtime reads itself: its file, byte offset, type and shape."""

    file: RelativePath
    offset: Annotated[int, Meta(ge=0, le=1 << 50)]
    type: StoredType
    shape: Annotated[tuple[Size, ...], Meta(max_length=4)]

    @property
    def end(self) -> int:
        """The byte after its last one."""
        return self.offset + math.prod(self.shape) * np.dtype(self.type).itemsize

    def read(self, files: SealedFolder) -> NDArray[Any]:
        """Returns a copy; raises InputError if the file differs from its record."""
        return files.array(self.file, self.type, self.offset, self.shape)


@dataclass(frozen=True)
class CacheSpec:
    """The cache of a variant's decoder.

    Attributes:
        in_place: Whether steps write into buffers; else each step returns another cache.
        type: numpy's name of the element type of keys and values, or "bfloat16".
        kind: Content of past and present: "columns" of keys and values, one more for each token, or
            the "state" of a recurrent decoder, of constant size.
    """

    in_place: bool
    type: PrecisionName
    kind: Literal["columns", "state"] = "columns"


@dataclass(frozen=True)
class Variant:
    """One way to compute the model.

    Attributes:
        name: Such as "portable".
        precision: Type of weights and arithmetic.
        providers: Execution providers that it is made for.
        opset: Version of the standard ONNX operators that the graphs use.
        graphs: By name; `required_graphs` lists the necessary ones.
        cache: The KV cache of the decoder; None for an encoder-only model.
        top_k: Whether a graph ranks tokens on the device, so that few numbers leave it.
        screen: Weights of the LM head that `ScreenedArgmax` reads, by its parameters; empty if
            greedy search computes all logits.
        reference: File of torch's recorded answers; an int8 variant has a file of its own, made by
            torch with the same rounding to integers.
    """

    name: Name
    precision: PrecisionName
    providers: Annotated[tuple[Provider, ...], Meta(min_length=1)]
    opset: Annotated[int, Meta(ge=1, le=1000)]
    graphs: Mapping[Name, GraphSpec]
    cache: CacheSpec | None = None
    top_k: bool = False
    screen: Mapping[str, StoredTensor] = field(default_factory=dict)
    reference: RelativePath = REFERENCE

    @property
    def exact(self) -> bool:
        """Whether it computes in the model's own precision, so that its tokens must be equal."""
        return self.precision == FLOAT32.name

    @property
    def in_place(self) -> bool:
        """Whether steps write into the KV cache in place; else each step returns a longer one."""
        return self.cache is not None and self.cache.in_place

    @property
    def recurrent(self) -> bool:
        """Whether the decoder carries a state of fixed size instead of keys and values."""
        return self.cache is not None and self.cache.kind == "state"

    @property
    def steps(self) -> Mapping[str, GraphSpec]:
        """The graphs that a search outside of the graphs drives."""
        return {name: graph for name, graph in self.graphs.items() if name != ONE_GRAPH}

    def required_graphs(self, architecture: str) -> tuple[str, ...]:
        """Names of the graphs that the variant must have, given its cache, top k and screen."""
        graphs = (IN_PLACE if self.in_place else GRAPHS)[architecture]
        return (
            *(name for name in graphs if name != "gather" or not self.recurrent),
            *(("dequantise",) if self.cache is not None and self.cache.type == "int8" else ()),
            *(("top_k",) if self.top_k else ()),
            *(("approximate_logits", "segment_maxima") if self.screen else ()),
        )
