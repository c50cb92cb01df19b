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

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from transferry.runtime.decoding.options import GenerationOptions, options_of_json
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.files import sha256
from transferry.runtime.hardware import usable_cores
from transferry.runtime.tables import table
from transferry.runtime.tokenizer.byte_pair import AnyTokenizer, load_tokenizer

FORMAT = 7
MANIFEST = "manifest.json"
REFERENCE = "reference.npz"
# Which graphs a variant has at least, by architecture.
GRAPHS = {
    "encoder-decoder": ("encoder", "decoder", "select"),
    "decoder-only": ("decoder", "select"),
    "encoder-only": ("encoder",),
}
# The same where the cache lies in place.
IN_PLACE = {
    "encoder-decoder": ("encoder", "decoder", "head", "sums", "gather", "move", "place", "select"),
    "decoder-only": ("decoder", "head", "sums", "gather", "move"),
}

Role = Literal[
    "source",  # int64 [batch, source]: token ids
    "source_mask",  # bool [batch, source]: True at a token
    "cross",  # [batch, heads, source, d_head]: keys or values of the source; like past in units
    #           that graph "unrounded" knows where it is int8
    "target",  # int64 [batch, target]: token ids
    "past_mask",  # bool [batch, past]: True at a token; where there is no encoder
    "past",  # [batch, heads, past, d_head]: keys or values of earlier positions
    "present",  # [batch, heads, past + target, d_head]: the next step's past; where the cache lies
    #             in place both are [batch, heads, capacity, d_head]
    "rough",  # [batch * target, vocabulary]: the logits as int8 gives them, for screening
    "count",  # int64 [1]: how many tokens are wanted of each row, on the host
    "top_logits",  # [rows, count]: the largest logits of each row, the largest first
    "top_tokens",  # int64 [rows, count]: whose they are
    "relative_sums",  # [rows]: of the exponentials of the logits less the largest
    "sums",  # [rows]: of the exponentials of the logits
    "peaks",  # [rows, segments]: the largest of each 64 neighbouring logits, then those left over
    "logits",  # [batch, target, vocabulary], or of an encoder alone [batch, source, vocabulary];
    #            where the cache lies in place [batch * target, vocabulary], or of some tokens
    #            alone [batch * target, tokens]
    "hidden",  # [batch, source, d_model]: what an encoder alone makes of the source; of a decoder
    #            [batch * target, d_model], what its logits are made of
    "positions",  # int64 [batch, target]: of the target; where the cache lies in place
    "cells",  # int64 [batch, target, heads, 3]: where in the cache the keys and values of the
    #           target go, by slot, head and column; likewise
    "write",  # int64 [batch]: the column from which what is fresh is written into a state
    "bias",  # [batch, 1, target, capacity]: 0 at columns that a token sees, else minus infinity
    "source_bias",  # [batch, 1, 1, source]: the same for the source
    "source_length",  # int64 [batch]: tokens of the source; where the cache is int8
    "single",  # bool []: whether the target is one token, which sees all columns before; likewise
    "kept",  # [batch, heads, source, d_head]: cross once more, where it lies; likewise
    "rows",  # int64 [selected]: which rows to take
    "places",  # int64 [selected]: and where to put them
    "moved",  # [batch, heads, length, d_head]: the state after that
    "index",  # int64 [selected, heads, columns]: which columns of the cache to take
    "gathered",  # [selected, heads, columns, d_head]: the cache with these columns
    "fresh",  # [batch, heads, columns, d_head]: cross of a few sentences, to be written into
    #           that of all
    "placed",  # [batch, heads, length, d_head]: the state after that
    "state",  # [batch, heads, length, d_head]: past or cross, before a selection
    "selected",  # [selected, heads, length, d_head]: and after it
]


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of a graph.

    Attributes:
        name: Its name in the graph.
        role: What it is for.
        type: numpy's name of the element type, such as "float32".
        shape: A number where the dimension is fixed, its symbol where it varies.
    """

    name: str
    role: Role
    type: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class GraphSpec:
    """One ONNX file, with its inputs and outputs in the file's order."""

    file: str
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
    """A weight that the runtime reads itself: where it lies, from which byte, and what it is."""

    file: str
    offset: int
    type: str
    shape: tuple[int, ...]

    def read(self, folder: Path) -> NDArray[Any]:
        """Maps it into memory, read-only."""
        return np.memmap(folder / self.file, self.type, "r", self.offset, self.shape)


@dataclass(frozen=True)
class CacheSpec:
    """The KV cache of a variant.

    Attributes:
        in_place: Whether steps write into it; else each step returns a longer one.
        type: numpy's name of its element type, or "bfloat16".
    """

    in_place: bool
    type: str


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
        top_k: Whether graph "rank" ranks tokens on the device, so that few numbers leave it.
        screen: Weights of the LM head that `ScreenedArgmax` reads, by its parameters; empty if
            greedy search computes all logits.
    """

    name: str
    precision: str
    providers: tuple[str, ...]
    opset: int
    graphs: Mapping[str, GraphSpec]
    cache: CacheSpec | None = None
    top_k: bool = False
    screen: Mapping[str, StoredTensor] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        """Whether it computes in the precision of the model; another may choose other tokens."""
        return self.precision == "float32"

    @property
    def in_place(self) -> bool:
        """Whether steps write into the KV cache in place; else each step returns a longer one."""
        return self.cache is not None and self.cache.in_place

    def required_graphs(self, architecture: str) -> tuple[str, ...]:
        """Returns the names of the graphs that the variant must have, by what it says of itself."""
        return (
            *(IN_PLACE if self.in_place else GRAPHS)[architecture],
            *(("unrounded",) if self.cache is not None and self.cache.type == "int8" else ()),
            *(("rank",) if self.top_k else ()),
            *(("rough", "peaks") if self.screen else ()),
        )


@dataclass(frozen=True)
class FileRecord:
    """What a file of the bundle must be."""

    sha256: str
    size: int


@dataclass(frozen=True)
class Manifest:
    """manifest.json as a value.

    Attributes:
        architecture: One of `GRAPHS`.
        model: The shape of the model, as build_model's ModelConfig writes it.
        generation: Defaults of GenerationOptions that differ from its own.
        variants: By name.
        files: Every file but the manifest, by its path inside the bundle.
        versions: Of the packages that made the bundle.
    """

    architecture: str
    model: Mapping[str, Any]
    generation: Mapping[str, Any]
    variants: Mapping[str, Variant]
    files: Mapping[str, FileRecord]
    versions: Mapping[str, str]

    def to_json(self) -> str:
        """Returns the text of manifest.json."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1, ensure_ascii=False) + "\n"

    def to_text(self) -> str:
        """Returns the manifest as a person reads it."""
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
        """Makes the manifest from `to_json`'s text.

        Args:
            text: The text.
            origin: Names it in errors.

        Raises:
            InputError: It is no JSON, of another format version, or incomplete.
        """
        try:
            record = json.loads(text)
            found = record["format"]
            if found != FORMAT:
                raise InputError(
                    f"{origin} has bundle format {found!r}, but this transferry reads format "
                    f"{FORMAT}; export the bundle again, or install the version that wrote it"
                )
            manifest = cls(
                record["architecture"],
                record["model"],
                options_of_json(record["generation"]),
                {name: _variant(variant) for name, variant in record["variants"].items()},
                {name: FileRecord(**entry) for name, entry in record["files"].items()},
                record["versions"],
            )
            _check_graphs(manifest)
            int(manifest.model["max_positions"])
            GenerationOptions(**manifest.generation)
            return manifest
        except (ValueError, KeyError, TypeError, AttributeError, UsageError) as error:
            raise InputError(
                f"{origin} is not the manifest of a bundle ({type(error).__name__}: {error}); "
                "export the bundle again"
            ) from error


def _check_graphs(manifest: Manifest) -> None:
    """Refuses what could not be run, and graphs that no hash vouches for."""
    if manifest.architecture not in GRAPHS:
        raise ValueError(f"its architecture {manifest.architecture!r} is none of {list(GRAPHS)}")
    if not manifest.variants:
        raise ValueError("it has no variant")
    for variant in manifest.variants.values():
        if (variant.cache is None) != (manifest.architecture == "encoder-only"):
            raise ValueError(f"variant {variant.name!r} must say what its KV cache is")
        for name in variant.required_graphs(manifest.architecture):
            if name not in variant.graphs:
                raise ValueError(f"variant {variant.name!r} has no graph {name!r}")
        for graph in variant.graphs.values():
            if graph.file not in manifest.files:
                raise ValueError(f"graph {graph.file!r} is not among its files")
        for tensor in variant.screen.values():
            if tensor.file not in manifest.files:
                raise ValueError(f"file {tensor.file!r} of a weight is not among its files")


def _shape(spec: TensorSpec) -> str:
    return f"[{', '.join(map(str, spec.shape))}]"


def _variant(record: dict[str, Any]) -> Variant:
    graphs = {
        name: GraphSpec(graph["file"], _tensors(graph["inputs"]), _tensors(graph["outputs"]))
        for name, graph in record["graphs"].items()
    }
    return Variant(
        record["name"],
        record["precision"],
        tuple(record["providers"]),
        record["opset"],
        graphs,
        CacheSpec(**record["cache"]) if record["cache"] is not None else None,
        record["top_k"],
        {
            name: StoredTensor(**{**tensor, "shape": tuple(tensor["shape"])})
            for name, tensor in record["screen"].items()
        },
    )


def _tensors(records: list[dict[str, Any]]) -> tuple[TensorSpec, ...]:
    for record in records:
        if record["role"] not in get_args(Role):
            raise ValueError(f"tensor {record['name']!r} has the unknown role {record['role']!r}")
    return tuple(
        TensorSpec(record["name"], record["role"], record["type"], tuple(record["shape"]))
        for record in records
    )


@dataclass(frozen=True)
class Bundle:
    """A bundle whose files are what its manifest says."""

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
        path = folder / MANIFEST
        try:
            text = path.read_bytes()
        except OSError as error:
            raise InputError(
                f"{path} cannot be read ({error.strerror}); expected the folder that "
                "`transferry export` wrote"
            ) from error
        manifest = Manifest.from_json(text, str(path))
        files = manifest.files
        with ThreadPoolExecutor(usable_cores()) as pool:  # hashing leaves Python alone
            list(pool.map(partial(_check_file, folder), files, files.values()))
        return cls(folder, manifest, load_tokenizer(folder))

    def variant(self, name: str | None = None) -> Variant:
        """Returns a variant by name; without a name the first.

        Raises:
            UsageError: The bundle has none of that name.
        """
        variants = self.manifest.variants
        if name is None:
            return next(iter(variants.values()))
        if name not in variants:
            raise UsageError(f"{self.folder} has no variant {name!r}; it has {', '.join(variants)}")
        return variants[name]

    def graph(self, spec: GraphSpec) -> Path:
        """Returns where a graph's file lies."""
        return self.folder / spec.file


def _check_file(folder: Path, name: str, record: FileRecord) -> None:
    path = folder / name
    mend = "copy the bundle again, or export it again"
    if not path.resolve().is_relative_to(folder.resolve()):
        raise InputError(f"{folder / MANIFEST} names {name!r}, which lies outside the bundle")
    if not path.is_file():
        raise InputError(f"{path} is missing; {mend}")
    size = path.stat().st_size
    if size != record.size:
        raise InputError(f"{path} must have {record.size} bytes, but has {size}; {mend}")
    digest = sha256(path)
    if digest != record.sha256:
        raise InputError(
            f"{path} has changed: its sha256 must be {record.sha256}, but is {digest}; {mend}"
        )
