"""A graph of a bundle, opened as it is served, that shows inner values."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx import helper

from transferry.export.blame.traced_program import TracedProgram
from transferry.export.trace.graph import Graph
from transferry.runtime.bundle.specs import GraphSpec
from transferry.runtime.ort.session import SessionOptions, open_session

# Values shown by one session besides the graph's own outputs. onnxruntime fuses no operators across
# an output, so that with many of them it would not run the served graph any more.
MOST_SHOWN = 8


class ServedGraph:
    """One graph of a bundle; nothing is written into the bundle's folder."""

    def __init__(self, path: Path, spec: GraphSpec, options: SessionOptions) -> None:
        self.path = path
        self.spec = spec
        self.options = options
        self.model = onnx.load(str(self.path), load_external_data=False)
        self.nodes = list(self.model.graph.node)
        self._plain = open_session(self.path, options)
        self._producers = {name: n for n, node in enumerate(self.nodes) for name in node.output}

    @property
    def outputs(self) -> list[str]:
        """The names of the graph's own outputs."""
        return [tensor.name for tensor in self.spec.outputs]

    def run(self, feeds: Mapping[str, NDArray[Any]], names: Sequence[str]) -> dict[str, Any]:
        """Runs the graph with further values as outputs, at most `MOST_SHOWN`."""
        added = [name for name in names if name not in self.outputs]
        assert len(added) <= MOST_SHOWN
        session = self._plain
        if added:
            model = onnx.ModelProto()
            model.CopyFrom(self.model)
            model.graph.output.extend(map(helper.make_empty_tensor_value_info, added))
            session = open_session(self.path, self.options, model.SerializeToString())
        found = session.run(list(names), dict(feeds))
        return {name: np.asarray(value) for name, value in zip(names, found, strict=True)}

    def position(self, value: str) -> int:
        """Returns the place in the graph of the node that computes a value."""
        return self._producers[value]

    def upstream(self, values: Iterable[str], stop: Collection[str] = ()) -> set[int]:
        """Returns the nodes that compute values, back to the values of `stop`."""
        reached: set[int] = set()
        left = list(values)
        while left:
            place = self._producers.get(left.pop())
            if place is not None and place not in reached:
                reached.add(place)
                left += [name for name in self.nodes[place].input if name not in stop]
        return reached

    def between(self, value: str, known: Collection[str]) -> tuple[list[onnx.NodeProto], list[str]]:
        """Returns the nodes from the nearest of `known` values to `value`, and their inputs.

        The inputs are values of `known` and inputs of the graph, in the order of the nodes.
        """
        places = sorted(self.upstream([value], {*known} - {value}))
        nodes = [self.nodes[place] for place in places]
        own = {name for node in nodes for name in node.output}
        weights = {tensor.name for tensor in self.model.graph.initializer}
        read = (name for node in nodes for name in node.input)
        return nodes, [name for name in dict.fromkeys(read) if name and name not in own | weights]


def align(served: ServedGraph, fresh: Graph, program: TracedProgram) -> dict[str, str]:
    """Maps values of a served graph to torch's names in the traced program.

    The names of the two differ if the served graph was changed: values of one module are numbered,
    so that one operator less renames those after it. Nodes are therefore matched like lines of two
    texts, by operator and by the weights they read, with those of a fresh export of the program.
    """
    weights = program.parameters
    ours = [_key(node.op_type, node.input, weights) for node in served.nodes]
    fresh_nodes = list(fresh.model.graph)
    theirs = [_key(node.op_type, _inputs(node), weights) for node in fresh_nodes]
    named = {name: traced for name, traced in fresh.names.items() if traced in program.values}
    named |= dict(zip([spec.name for spec in fresh.spec.outputs], program.outputs, strict=True))
    found = {}
    for tag, a, b, c, d in SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes():
        if tag == "equal" or (tag == "replace" and b - a == d - c):
            for node, other in zip(served.nodes[a:b], fresh_nodes[c:d], strict=True):
                for name, value in zip(node.output, other.outputs, strict=False):
                    if value.name in named:
                        found[name] = named[value.name]
    for spec, other_spec in zip(served.spec.outputs, fresh.spec.outputs, strict=True):
        found[spec.name] = named[other_spec.name]
    return found


def _key(operator: str, inputs: Iterable[str], weights: Collection[str]) -> tuple[str, ...]:
    return (operator, *(name for name in inputs if name in weights))


def _inputs(node: ir.Node) -> Iterator[str]:
    return (value.name or "" for value in node.inputs if value is not None)
