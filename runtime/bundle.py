"""The bundle on disk: a folder that describes itself. The reader owns the contract.

    BUNDLE/
      manifest.json            everything below, with sha256 and size of every other file
      FOLDER/*.onnx            the graphs of a variant, or of several that share weights
      FOLDER/weights.bin       their weights, stored once and shared by the graphs
      tokenizer.json ...       the tokenizer: its settings, and the files of its kind
      reference.npz            inputs, and what torch answered to them

The runtime hard-codes no tensor name: each tensor of a graph has a role, and tensors of one role
are matched in the order in which the manifest lists them (the i-th present is the next step's i-th
past). See docs/bundle.md.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from transferry.runtime.decoding.options import (
    generation_options,
    options_of_json,
)
from transferry.runtime.documents import MOST_JSON, checked, parse_document
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.files import read_at_most
from transferry.runtime.folders import what_is
from transferry.runtime.sealed_folder import (
    FileRecord,
    Name,
    RelativePath,
    SealedFolder,
    open_inside,
)
from transferry.runtime.settings import HeadSettings
from transferry.runtime.tables import facts, table
from transferry.runtime.tokenizer.byte_pair import AnyTokenizer, load_tokenizer

FORMAT = 9
MANIFEST = "manifest.json"
REFERENCE = "reference.npz"
PORTABLE = "portable"  # the variant of standard ONNX operators only
ONE_GRAPH = "generate"  # optional graph of the portable variant: greedy search whole
ANSWERS = ("tokens", "lengths", "log_probabilities")  # roles of its outputs
REMEDY = "export the bundle again"

Size = Annotated[int, Meta(ge=1, le=1 << 40)]
# What the runtime handles, and no other: numpy would read "O" as pointers into memory.
ElementType = Annotated[str, Meta(pattern=r"^(bool|u?int8|int32|int64|b?float16|float32)\Z")]
StoredType = Annotated[str, Meta(pattern=r"^(int8|int32|float32)\Z")]
Precision = Annotated[str, Meta(pattern=r"^(float32|float16|bfloat16|int8|int4|int8-weights)\Z")]
Provider = Annotated[str, Meta(pattern=r"^(cpu|cuda)\Z")]
Architecture = Annotated[str, Meta(pattern=r"^(encoder-decoder|decoder-only|encoder-only)\Z")]

# Graphs of a variant whose steps return a longer cache, by architecture.
GRAPHS = {
    "encoder-decoder": ("encoder", "decoder", "select"),
    "decoder-only": ("decoder", "select"),
    "encoder-only": ("encoder",),
}
# Graphs of a variant whose steps write into the cache in place; the state of a recurrent decoder
# has no columns to gather.
IN_PLACE = {
    "encoder-decoder": (
        *("encoder", "decoder", "lm_head", "exp_sums", "gather", "move", "place", "select"),
    ),
    "decoder-only": ("decoder", "lm_head", "exp_sums", "gather", "move"),
}

# Heads are those of keys and values. Where the cache is in place, a batch is one of slots.
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
    "moved",  # [batch, heads, length, d_head]: state with rows copied to other places
    "index",  # [selected, heads, columns] int64: columns of the cache to take
    "gathered",  # [selected, heads, columns, d_head]: the cache with these columns
    "write",  # [batch] int64: the column from which fresh is written into state
    "fresh",  # [batch, heads, columns, d_head]: cross of a few sentences
    "placed",  # [batch, heads, length, d_head]: state with fresh written into it
    "max_length",  # [1] int64: limit on the tokens of an answer; of one graph, as what follows
    "tokens",  # [batch, length] int64: the answers, an end token included, then padding
    "lengths",  # [batch] int64: tokens of each answer, an end token included
    "log_probabilities",  # [batch]: of each answer, in nats
]


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of a graph.

    Attributes:
        name: Its name in the graph.
        role: Its purpose.
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
        """Returns the first tensor of a role.

        Raises:
            InputError: There is none.
        """
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
        """Returns a copy; raises InputError if the file is another than was recorded."""
        return files.array(self.file, self.type, self.offset, self.shape)


@dataclass(frozen=True)
class CacheSpec:
    """The cache of a variant's decoder.

    Attributes:
        in_place: Whether steps write into buffers; else each step returns another cache.
        type: numpy's name of the element type of keys and values, or "bfloat16".
        kind: What past and present are: "columns" of keys and values, one more for each token, or
            the "state" of a recurrent decoder, whose size stays.
    """

    in_place: bool
    type: Precision
    kind: Literal["columns", "state"] = "columns"


@dataclass(frozen=True)
class Variant:
    """One way to compute the model.

    Attributes:
        name: Such as "portable".
        precision: Type of weights and arithmetic.
        providers: Execution providers that it is made for.
        opset: Version of the standard ONNX operators that the graphs use.
        graphs: By name; `required_graphs` lists those that a variant must have.
        cache: The KV cache of the decoder; None for an encoder-only model.
        top_k: Whether a graph ranks tokens on the device, so that few numbers leave it.
        screen: Weights of the LM head that `ScreenedArgmax` reads, by its parameters; empty if
            greedy search computes all logits.
        reference: The file of torch's recorded answers; an int8 variant has one of its own, made by
            torch with the same rounding to integers.
    """

    name: Name
    precision: Precision
    providers: Annotated[tuple[Provider, ...], Meta(min_length=1)]
    opset: Annotated[int, Meta(ge=1, le=1000)]
    graphs: Mapping[Name, GraphSpec]
    cache: CacheSpec | None = None
    top_k: bool = False
    screen: Mapping[str, StoredTensor] = field(default_factory=dict)
    reference: RelativePath = REFERENCE

    @property
    def exact(self) -> bool:
        """Whether it computes in the model's own precision, so that its tokens must be the same."""
        return self.precision == "float32"

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
        """The graphs that a search outside of them drives."""
        return {name: graph for name, graph in self.graphs.items() if name != ONE_GRAPH}

    def required_graphs(self, architecture: str) -> tuple[str, ...]:
        """Returns the names of the graphs that the variant must have, by what it says of itself."""
        graphs = (IN_PLACE if self.in_place else GRAPHS)[architecture]
        return (
            *(name for name in graphs if name != "gather" or not self.recurrent),
            *(("dequantise",) if self.cache is not None and self.cache.type == "int8" else ()),
            *(("top_k",) if self.top_k else ()),
            *(("approximate_logits", "segment_maxima") if self.screen else ()),
        )


class ModelLimits(Struct):
    """What the runtime reads of a model's configuration."""

    max_positions: Annotated[int, Meta(ge=1, le=1 << 24)]
    d_model: Annotated[int, Meta(ge=1, le=1 << 20)]
    vocabulary_size: Annotated[int, Meta(ge=1, le=1 << 28)]


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json.

    Attributes:
        architecture: One of `GRAPHS`.
        model: Configuration of the model, as written by build_model's ModelConfig.
        generation: The bundle's defaults of GenerationOptions, where they differ from its own.
        variants: By name.
        files: Every file but the manifest, by path in the bundle.
        versions: Versions of the packages that made the bundle.
        head: What the head of an encoder-only model is for; None if it has none.
    """

    architecture: Architecture
    model: Mapping[str, Any]
    generation: Mapping[str, Any]
    variants: Annotated[Mapping[Name, Variant], Meta(min_length=1)]
    files: Mapping[RelativePath, FileRecord]
    versions: Mapping[str, str]
    head: HeadSettings | None = None

    def to_json(self) -> str:
        """Returns the text of manifest.json."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1, ensure_ascii=False) + "\n"

    def summary(self) -> str:
        """Returns what a person asks first, in a few lines."""
        model, size = self.model, sum(entry.size for entry in self.files.values())
        stacks = {name: model.get(f"{name}_layers", 0) for name in ("encoder", "decoder")}
        layers = ", ".join(f"{count} {name} layers" for name, count in stacks.items() if count)
        rows = [
            ("model", f"{self.architecture}: {layers}, width {model['d_model']}"),
            ("", f"vocabulary {model['vocabulary_size']:,}, positions {model['max_positions']:,}"),
            ("made by", ", ".join(f"{name} {version}" for name, version in self.versions.items())),
            ("files", f"{len(self.files)}, {size / 1e6:,.1f} MB, as the manifest has them"),
            (
                "generation",
                ", ".join(f"{name} {value}" for name, value in self.generation.items()) or "greedy",
            ),
        ]
        variants = [
            (variant.name, variant.precision, ", ".join(variant.providers), len(variant.graphs))
            for variant in self.variants.values()
        ]
        head = ("variant", "computes in", "for", "graphs")
        return f"{facts(rows)}\n\n{table(head, variants)}"

    def to_text(self) -> str:
        """Returns the whole manifest as text for people."""
        model = ", ".join(f"{name} {value}" for name, value in self.model.items())
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        files = [(name, entry.size, entry.sha256[:16]) for name, entry in self.files.items()]
        parts = [
            f"{self.architecture}: {model}\nmade by {versions}",
            table(("file", "bytes", "sha256"), files),
        ]
        for variant in self.variants.values():
            rows = [
                (
                    name,
                    direction,
                    spec.name,
                    spec.role,
                    spec.type,
                    _shape(spec),
                )
                for name, graph in variant.graphs.items()
                for direction, specs in (("in", graph.inputs), ("out", graph.outputs))
                for spec in specs
            ]
            parts.append(f"variant {variant.name}: {variant.precision}, opset {variant.opset}")
            parts.append(table(("graph", "", "tensor", "role", "type", "shape"), rows))
        return "\n\n".join(parts)

    @classmethod
    def from_json(cls, text: str | bytes, origin: str) -> Manifest:
        """Parses the text that `to_json` wrote.

        Args:
            text: The text.
            origin: Name of the file in errors.

        Raises:
            InputError: The text is not JSON, inconsistent, or of another format version.
        """
        content = text.encode() if isinstance(text, str) else text
        record = parse_document(content, dict[str, Any], origin, REMEDY)
        if (found := record.get("format")) != FORMAT:
            raise InputError(
                f"{origin} has bundle format {found!r}, but this transferry reads format "
                f"{FORMAT}; export the bundle again, or install the version that wrote it"
            )
        manifest = checked(record, cls, origin, REMEDY)
        checked(manifest.model, ModelLimits, f"{origin}: model", REMEDY)
        if problem := _problem(manifest):
            raise InputError(f"{origin}: {problem}; {REMEDY}")
        try:
            generation = options_of_json(manifest.generation)
            generation_options(generation)
        except UsageError as error:
            raise InputError(f"{origin}: generation: {error}; {REMEDY}") from error
        return replace(manifest, generation=generation)


def _problem(manifest: Manifest) -> str:
    """Describes why a variant could not run, or which file has no hash; empty if all is well."""
    alone = manifest.architecture == "encoder-only"
    for name, variant in manifest.variants.items():
        if whole := variant.graphs.get(ONE_GRAPH):
            roles = tuple(spec.role for spec in whole.outputs)
            if alone or variant.in_place or roles != ANSWERS:
                return f"variant {name!r} cannot have such a graph {ONE_GRAPH!r}"
        if name != variant.name:
            return f"variant {name!r} calls itself {variant.name!r}"
        if (variant.cache is None) != alone:
            return f"variant {name!r} must say what its KV cache is"
        if variant.recurrent and manifest.architecture != "encoder-decoder":
            return f"variant {name!r} cannot have a recurrent state: it has no encoder"
        for graph in variant.required_graphs(manifest.architecture):
            if graph not in variant.graphs:
                return f"variant {name!r} has no graph {graph!r}"
        if manifest.head is not None and (problem := _head_problem(manifest.head, variant)):
            return f"variant {name!r} {problem}"
        used = [graph.file for graph in variant.graphs.values()]
        used += [variant.reference, *(tensor.file for tensor in variant.screen.values())]
        for file in used:
            if file not in manifest.files:
                return f"{file!r} of variant {name!r} is not among its files"
        for key, tensor in variant.screen.items():
            size, itemsize = manifest.files[tensor.file].size, np.dtype(tensor.type).itemsize
            if tensor.end > size or tensor.offset % itemsize:
                return f"weight {key!r} of variant {name!r} does not lie inside {tensor.file!r}"
    if len({name.lower() for name in manifest.files}) < len(manifest.files):
        return "two of its files differ in case alone"
    return ""


def _head_problem(head: HeadSettings, variant: Variant) -> str:
    """Describes how a graph does not give what the head's settings speak of; "" if it does."""
    outputs = variant.graphs["encoder"].outputs if "encoder" in variant.graphs else ()
    found = [spec.shape for spec in outputs if spec.role == "head"]
    rank = 3 if head.task == "tag" else 2
    width = len(head.labels)
    if len(found) != 1 or len(found[0]) != rank or not isinstance(found[0][-1], int):
        return f"gives no scores or vectors for task {head.task}"
    if head.task != "embed" and found[0][-1] != width:
        return f"gives {found[0][-1]} scores, and there are {width} labels"
    if head.default_prompt and head.default_prompt not in head.prompts:
        return f"has no prompt {head.default_prompt!r}"
    return ""


def _shape(spec: TensorSpec) -> str:
    return f"[{', '.join(map(str, spec.shape))}]"


@dataclass(frozen=True)
class Bundle:
    """A bundle whose files match its manifest."""

    folder: Path
    manifest: Manifest
    tokenizer: AnyTokenizer

    @classmethod
    def load(cls, folder: Path) -> Bundle:
        """Opens a bundle and checks every file against the manifest.

        Raises:
            InputError: A file is missing, truncated, changed or unreadable, or the format version
                is another.
        """
        content = _manifest_of(folder)
        manifest = Manifest.from_json(content, str(folder / MANIFEST))
        files = SealedFolder(folder, manifest.files)
        files.check()
        tokenizer = load_tokenizer(folder, files.read)
        if tokenizer.vocabulary_size != (size := manifest.model["vocabulary_size"]):
            raise InputError(
                f"{folder}: expected a tokenizer of {size} ids as in {MANIFEST}, found "
                f"{tokenizer.vocabulary_size}; {REMEDY}"
            )
        bundle = cls(folder, manifest, tokenizer)
        # What a certificate speaks of is the manifest that was read.
        vars(bundle).update(files=files, sha256=hashlib.sha256(content).hexdigest())
        return bundle

    @property
    def embeds(self) -> bool:
        """Whether its model has a head that makes vectors of texts."""
        return self.manifest.head is not None and self.manifest.head.task == "embed"

    @property
    def tasks(self) -> tuple[str, ...]:
        """Tasks of an encoder-only model."""
        head, fills = self.manifest.head, self.tokenizer.special.mask_id is not None
        tasks = ["embed", *["fill-mask"] * fills]
        if head is not None and head.task != "embed":
            tasks.append(head.task)
            if head.task == "classify" and len(head.labels) == 1:
                tasks.append("rank")
        return tuple(tasks)

    @cached_property
    def files(self) -> SealedFolder:
        """The files, as the manifest lists them."""
        return SealedFolder(self.folder, self.manifest.files)

    @cached_property
    def sha256(self) -> str:
        """Hash of the manifest."""
        return hashlib.sha256(_manifest_of(self.folder)).hexdigest()

    def variant(self, name: str | None = None) -> Variant:
        """Returns a variant by name; without a name the first.

        Raises:
            UsageError: The bundle has no variant of that name.
        """
        variants = self.manifest.variants
        if name is None:
            return next(iter(variants.values()))
        if name not in variants:
            raise UsageError(f"{self.folder} has no variant {name!r}; it has {', '.join(variants)}")
        return variants[name]

    def graph(self, spec: GraphSpec) -> Path:
        """Returns the path of a graph's file."""
        return self.folder / spec.file


def _manifest_of(folder: Path) -> bytes:
    if not (folder / MANIFEST).is_file():
        raise InputError(
            f"{folder}: expected a bundle, with the {MANIFEST} that `transferry export` wrote, "
            f"{what_is(folder)}"
        )
    with open_inside(folder, MANIFEST) as file:
        return read_at_most(file, MOST_JSON, folder / MANIFEST)
