"""The manifest of a bundle: its fields and their consistency."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Self

import numpy as np
from msgspec import Meta, Struct

from transferry.runtime.bundle.card import UNKNOWN, ModelCard, joined
from transferry.runtime.bundle.head import HeadSettings
from transferry.runtime.bundle.specs import (
    ANSWERS,
    ONE_GRAPH,
    SCORES,
    Architecture,
    TensorSpec,
    Variant,
)
from transferry.runtime.decoding.generation_options import generation_options
from transferry.runtime.errors import InputError, UsageError, install_command
from transferry.runtime.io.documents import checked, parse_document
from transferry.runtime.io.sealed_folder import FileRecord, Name, RelativePath
from transferry.runtime.tables import facts, table

FORMAT = 9
MANIFEST = "manifest.json"
REMEDY = "export the bundle again"


class ModelLimits(Struct):
    """Fields of a model's configuration that the runtime reads."""

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
        head: Purpose of an encoder-only model's head; None without one.
        card: Name, licence and origin of the model, as its publisher states them.
    """

    architecture: Architecture
    model: Mapping[str, Any]
    generation: Mapping[str, Any]
    variants: Annotated[Mapping[Name, Variant], Meta(min_length=1)]
    files: Mapping[RelativePath, FileRecord]
    versions: Mapping[str, str]
    head: HeadSettings | None = None
    card: ModelCard = UNKNOWN

    def to_json(self) -> str:
        """Returns the text of manifest.json."""
        record = {"format": FORMAT, **asdict(self), "card": self.card.to_dict()}
        if not record["card"]:
            del record["card"]
        return json.dumps(record, indent=1, ensure_ascii=False) + "\n"

    def summary(self, extras: Mapping[str, str]) -> str:
        """Returns the most wanted facts, in a few lines; `extras` are those of the bundle."""
        model, size = self.model, sum(entry.size for entry in self.files.values())
        stacks = {name: model.get(f"{name}_layers", 0) for name in ("encoder", "decoder")}
        layers = ", ".join(f"{count} {name} layers" for name, count in stacks.items() if count)
        labels = () if self.head is None else self.head.labels
        rows = [
            *((name.replace("_", " "), text) for name, text in self.card.facts().items()),
            *([("labels", joined(labels))] if labels else []),
            ("model", f"{self.architecture}: {layers}, width {model['d_model']}"),
            ("", f"vocabulary {model['vocabulary_size']:,}, positions {model['max_positions']:,}"),
            ("made by", _named(self.versions)),
            ("files", f"{len(self.files)}, {size / 1e6:,.1f} MB, as listed in the manifest"),
            ("generation", _named(self.generation) or "greedy"),
        ]
        if extras:
            needs = ", ".join(f"{name} for {user}" for name, user in extras.items())
            rows.append(("extras", f"{needs}: {install_command(','.join(extras))}"))
        variants = [
            (variant.name, variant.precision, ", ".join(variant.providers), len(variant.graphs))
            for variant in self.variants.values()
        ]
        head = ("variant", "computes in", "for", "graphs")
        return f"{facts(rows)}\n\n{table(head, variants)}"

    def to_text(self) -> str:
        """Returns the whole manifest as text for people."""
        files = [(name, entry.size, entry.sha256[:16]) for name, entry in self.files.items()]
        parts = [
            f"{self.architecture}: {_named(self.model)}\nmade by {_named(self.versions)}",
            table(("file", "bytes", "sha256"), files),
        ]
        for variant in self.variants.values():
            rows = [
                (name, direction, spec.name, spec.role, spec.type, _shape(spec))
                for name, graph in variant.graphs.items()
                for direction, specs in (("in", graph.inputs), ("out", graph.outputs))
                for spec in specs
            ]
            parts.append(f"variant {variant.name}: {variant.precision}, opset {variant.opset}")
            parts.append(table(("graph", "", "tensor", "role", "type", "shape"), rows))
        return "\n\n".join(parts)

    @classmethod
    def from_json(cls, text: str | bytes, origin: str) -> Self:
        """Parses the text that `to_json` wrote; `origin` names the file in errors.

        Raises InputError for text that is not JSON, inconsistent, or of another format version.
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
            options = generation_options(manifest.generation)
        except UsageError as error:
            raise InputError(f"{origin}: generation: {error}; {REMEDY}") from error
        positions = manifest.model["max_positions"]
        if manifest.architecture != "encoder-only" and options.max_length > positions:
            found = f"max_length is {options.max_length}, but the model has {positions} positions"
            raise InputError(f"{origin}: generation: {found}; {REMEDY}")
        generation = {name: getattr(options, name) for name in manifest.generation}
        return replace(manifest, generation=generation)


def _problem(manifest: Manifest) -> str:
    """First reason why a variant cannot run, or a file has no hash; "" without one."""
    alone = manifest.architecture == "encoder-only"
    for name, variant in manifest.variants.items():
        if whole := variant.graphs.get(ONE_GRAPH):
            roles = tuple(spec.role for spec in whole.outputs)
            if alone or variant.in_place or roles not in (ANSWERS, (*ANSWERS, SCORES)):
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
        for spec in (spec for graph in variant.graphs.values() for spec in graph.outputs):
            fixed = bool(spec.shape) and isinstance(spec.shape[-1], int)
            if spec.role in ("logits", "hidden") and not fixed:
                return f"variant {name!r} has an output {spec.name!r} without a fixed width"
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
    """Mismatch between a graph and the head's settings; "" without one."""
    outputs = variant.graphs["encoder"].outputs if "encoder" in variant.graphs else ()
    found = [spec.shape for spec in outputs if spec.role == "head"]
    rank = 3 if head.task in ("tag", "answer") or head.vectors == "tokens" else 2
    width = len(head.labels)
    if len(found) != 1 or len(found[0]) != rank or not isinstance(found[0][-1], int):
        return f"gives no scores or vectors for task {head.task}"
    if head.task != "embed" and head.vectors != "dense":
        return f"gives scores for task {head.task}, and no {head.vectors} vectors"
    if head.task != "embed" and found[0][-1] != width:
        return f"gives {found[0][-1]} scores, and there are {width} labels"
    if head.default_prompt and head.default_prompt not in {*head.prompts, *head.sides}:
        return f"has no prompt {head.default_prompt!r}"
    return ""


def _named(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _shape(spec: TensorSpec) -> str:
    return f"[{', '.join(map(str, spec.shape))}]"
