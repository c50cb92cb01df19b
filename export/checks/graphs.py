"""The graphs of a variant against those that export makes of the checkpoint now.

A fault may wait for a batch or a pair of tokens that no case has, or hide in the tolerance of
a reduced precision. But the same run and versions give the same graphs, so that an operator, an
attribute or an edge that differs is a fault whatever it does to the answers. What export itself
gets wrong, the comparison with torch shows.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping
from typing import Any

import onnx_ir as ir

from transferry.build_model.model.transformer import Transformer
from transferry.export.make import add_one_graph, make
from transferry.export.recipes import RECIPES
from transferry.export.rewrite.calibration import Calibration
from transferry.export.trace.graph import Graph, Traces
from transferry.export.trace.store import SMALLEST
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.specs import ONE_GRAPH, Variant
from transferry.runtime.proof.one_graph import beams_of
from transferry.runtime.proof.report import Claim

GRAPHS = "graphs"
# Graphs that export makes now, by name; None if versions differ.
Fresh = Mapping[str, Graph] | None
# Packages that decide the graphs.
WRITERS = ("transferry", "torch", "onnx", "onnxscript")


def fresh_graphs(
    model: Transformer,
    bundle: Bundle,
    variant: Variant,
    calibration: Calibration | None,
    traces: Traces | None = None,
) -> Fresh:
    """Exports the graphs of a variant anew, for `graphs_claim`.

    Args:
        model: The trained model.
        bundle: The bundle; `require_exported_from` holds.
        variant: One of its variants.
        calibration: Of an int8 variant.
        traces: Graphs traced before.

    Returns:
        The graphs by name; None if the bundle was exported with other versions, whose graphs may
        differ.
    """
    versions = bundle.manifest.versions
    same = all(
        _release(versions.get(name, "")) == _release(importlib.metadata.version(name))
        for name in WRITERS
    )
    if not same or variant.name not in RECIPES:
        return None
    made = make(model, RECIPES[variant.name], traces, calibration)
    if whole := variant.graphs.get(ONE_GRAPH):
        special, generation = bundle.tokenizer.special, bundle.manifest.generation
        add_one_graph(made, model.config, special, generation, beams_of(whole))
    return made


def _release(version: str) -> str:
    """Returns a version without its local label: 2.13.0+cpu writes the graphs of 2.13.0+cu130."""
    return version.partition("+")[0]


def graphs_claim(fresh: Mapping[str, Graph], bundle: Bundle, variant: Variant) -> Claim:
    """Compares the graphs of a variant with those of `fresh_graphs`.

    Large weights are left out: `weights_claim` compares them.
    """
    if fresh.keys() != variant.graphs.keys():
        return Claim(GRAPHS, f"expected {', '.join(fresh)}, found {', '.join(variant.graphs)}")
    for name, graph in fresh.items():
        stored = ir.load(bundle.graph(variant.graphs[name]))
        pairs = zip(_nodes(graph.model), _nodes(stored), strict=False)
        differing = (number for number, (wanted, found) in enumerate(pairs) if wanted != found)
        if (first := next(differing, None)) is not None:
            kind = stored.graph[first].op_type
            return Claim(GRAPHS, f"{name}: node {first}, {kind}, is not what export writes")
        if len(graph.model.graph) != len(stored.graph) or _ends(graph.model) != _ends(stored):
            return Claim(GRAPHS, f"{name}: has other nodes, inputs or outputs than export writes")
    return Claim(GRAPHS, "")


def _nodes(model: ir.Model) -> Iterator[tuple[Any, ...]]:
    """Yields each node: operator, attributes, origin of its inputs, number of outputs.

    Its inputs are also the outer values that bodies of If and Loop read.
    """
    numbers = _numbers(model)
    for node in model.graph:
        attributes = sorted(
            (name, ir.to_proto(attribute).SerializeToString(deterministic=True))
            for name, attribute in node.attributes.items()
        )
        inputs = [_origin(value, numbers) for value in (*node.inputs, *_captured(node))]
        yield node.domain, node.op_type, attributes, inputs, len(node.outputs)


def _captured(node: ir.Node) -> Iterator[ir.Value]:
    """Yields the values around a node that the bodies of its attributes read, in order."""
    for _, attribute in sorted(node.attributes.items()):
        if attribute.type == ir.AttributeType.GRAPH:
            body = attribute.as_graph()
            read = [value for inner in body.all_nodes() for value in inner.inputs]
            read += [value for graph in (body, *body.subgraphs()) for value in graph.outputs]
            yield from (value for value in read if value is not None and value.graph is node.graph)


def _ends(model: ir.Model) -> list[Any]:
    numbers = _numbers(model)
    ends = [[(value.name, str(value.type)) for value in model.graph.inputs]]
    return [*ends, [(value.name, _origin(value, numbers)) for value in model.graph.outputs]]


def _numbers(model: ir.Model) -> dict[int, tuple[int, int]]:
    """Returns the place of each computed value: its node and its output there."""
    return {
        id(value): (number, place)
        for number, node in enumerate(model.graph)
        for place, value in enumerate(node.outputs)
    }


def _origin(value: ir.Value | None, numbers: dict[int, tuple[int, int]]) -> Any:
    """Describes a value without inner names."""
    if value is None:
        return None
    if id(value) in numbers:
        return numbers[id(value)]
    tensor = value.const_value
    if tensor is None or tensor.nbytes >= SMALLEST:
        return value.name  # an input or a weight
    return str(tensor.dtype), tuple(tensor.shape.numpy()), tensor.tobytes()
