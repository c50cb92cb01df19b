"""Canonical form of a graph: equal for graphs that differ in names and order of nodes alone.

Each value has a digest of its origin: an input, a weight by name, a constant by content, or the
operator, attributes and inputs of its node. A graph is the multiset of its nodes' digests and the
digests of its outputs, the bodies of If, Loop and Scan included.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from transferry.export.trace.store import SMALLEST

# Sines, cosines and quotients may differ by a unit in the last place between processors.
COMPUTED = 2.0**-22
_SHOWN = 4  # entries of a constant in a message
_BODIES = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
_NUMBERS = (
    *(ir.AttributeType.INT, ir.AttributeType.INTS),
    *(ir.AttributeType.FLOAT, ir.AttributeType.FLOATS),
)
_TENSORS = (ir.AttributeType.TENSOR, ir.AttributeType.TENSORS)


@dataclass(frozen=True)
class NodeForm:
    """A node.

    Attributes:
        parts: Digest of the operator, of each input and attribute, and the number of outputs.
        bodies: Graphs among its attributes, by part.
    """

    node: ir.Node
    parts: dict[str, str]
    bodies: dict[str, GraphForm]

    @cached_property
    def digest(self) -> str:
        """Digest of the node, without its names."""
        return _digest(sorted(self.parts.items()))

    def declared(self) -> list[tuple[str, ...]]:
        """Returns type and shape of each output, as far as the graph declares them."""
        return [_declared(value) for value in self.node.outputs]


@dataclass(frozen=True)
class GraphForm:
    """A graph, a body or a function.

    Attributes:
        ends: Digests of inputs, outputs, initializers and metadata.
    """

    nodes: list[NodeForm]
    ends: dict[str, str]

    @cached_property
    def digest(self) -> str:
        """Digest of the graph; names count in the inputs and outputs of a whole model alone."""
        return _digest((sorted(each.digest for each in self.nodes), sorted(self.ends.items())))

    def everywhere(self) -> Iterator[NodeForm]:
        """Yields all nodes, those of bodies included."""
        for each in self.nodes:
            yield each
            for body in each.bodies.values():
                yield from body.everywhere()


@dataclass(frozen=True)
class Constants:
    """Small floating-point constants of a graph, by type and shape.

    Another version or processor may round a constant that export computes in another way.
    """

    known: dict[tuple[str, tuple[int, ...]], list[NDArray[Any]]] = field(default_factory=dict)

    def add(self, tensor: ir.TensorProtocol) -> ir.TensorProtocol:
        """Adds a constant and returns it."""
        self.known.setdefault(_kind(tensor), []).append(tensor.numpy())
        return tensor

    def nearest(self, tensor: ir.TensorProtocol) -> ir.TensorProtocol:
        """Returns the nearest added constant within `COMPUTED`, else the tensor itself."""
        if not tensor.dtype.is_floating_point() or tensor.dtype.itemsize < 4:
            return tensor
        values = tensor.numpy()
        best, least = tensor, np.inf
        for other in self.known.get(_kind(tensor), ()):
            if values.tobytes() == other.tobytes():
                return tensor
            off = np.abs(values - other)
            # NaN and infinity are never near.
            if (off <= COMPUTED * np.abs(other)).all() and (far := off.max(initial=0.0)) < least:
                best, least = ir.Tensor(other, dtype=tensor.dtype), far
        return best


class Canonical:
    """Canonical form of a model.

    Attributes:
        rest: Digests of opset, IR version, functions and metadata.
    """

    def __init__(self, model: ir.Model, of_export: Canonical | None = None) -> None:
        """Reads a model.

        Args:
            model: The model.
            of_export: Form of the same graph as export writes it now: constants that another
                processor may have computed count as those. Default: the model is that graph.
        """
        constants: Constants = of_export.constants if of_export else Constants()
        self.constants: Constants = constants
        self._settled = constants.nearest if of_export else constants.add
        self._values: dict[int, str] = {}
        self.graph = self._graph(model.graph, "")
        self.rest = {
            "opset versions": _digest(sorted(model.opset_imports.items())),
            # Bundles made before have 10, which changes nothing in graphs of 9.
            "IR version": str(9 if model.ir_version == 10 else model.ir_version),
            "functions": _digest(
                [
                    (key, self._graph(function, "function").digest)
                    for key, function in sorted(model.functions.items())
                ]
            ),
            "metadata": _digest(sorted(model.metadata_props.items())),
        }

    def _graph(self, graph: ir.Graph | ir.Function, place: str) -> GraphForm:
        """Reads a graph; `place` tells bodies and functions apart, and is empty for a model's."""
        inner = bool(place)
        initializers = [] if isinstance(graph, ir.Function) else [*graph.initializers.values()]
        begins = []
        for number, value in enumerate(graph.inputs):
            name = number if inner else value.name
            begins.append((name, _declared(value)))
            self._values[id(value)] = _digest(("input", place, name))
        stored = []
        for value in initializers:
            stored.append(self._constant(value, inner=inner))
            # A default of an input does not make it a constant.
            self._values.setdefault(id(value), stored[-1])
        nodes = [self._node(node) for node in graph]
        ends = [
            (number if inner else value.name, self._value(value), _declared(value))
            for number, value in enumerate(graph.outputs)
        ]
        return GraphForm(
            nodes,
            {
                "inputs": _digest(begins),
                "outputs": _digest(ends),
                "constants and weights": _digest(sorted(stored)),
                "metadata": _digest(sorted(graph.metadata_props.items())),
            },
        )

    def _node(self, node: ir.Node) -> NodeForm:
        overload, metadata = node.overload, sorted(node.metadata_props.items())
        kind = node.domain, node.op_type, overload, metadata, len(node.device_configurations)
        parts = {"operator": _digest(kind)}
        for number, value in enumerate(node.inputs):
            parts[f"input {number}"] = self._value(value)
        # Tells the inputs of its bodies apart from those of other nodes.
        place = _digest(sorted(parts.items()))
        bodies: dict[str, GraphForm] = {}
        for name, attribute in node.attributes.items():
            part = f"attribute {name}"
            if attribute.is_ref() or attribute.type not in _BODIES:
                parts[part] = self._attribute(attribute)
                continue
            one = attribute.type == ir.AttributeType.GRAPH
            for number, body in enumerate([attribute.value] if one else attribute.value):
                inside = f"{part} {number}"
                bodies[inside] = self._graph(body, f"{place} {inside}")
                parts[inside] = bodies[inside].digest
        # An output without a name is not computed.
        parts["outputs"] = _digest([bool(value.name) for value in node.outputs])
        form = NodeForm(node, parts, bodies)
        digest = form.digest
        for number, value in enumerate(node.outputs):
            self._values[id(value)] = _digest((digest, number))
        return form

    def _attribute(self, attribute: ir.Attr) -> str:
        kind, value = attribute.type, attribute.value
        if not attribute.is_ref() and kind in _NUMBERS:
            # A file holds float32; integers of any writer's type are equal.
            numbers = np.asarray(value, np.float32 if kind.name.startswith("FLOAT") else np.int64)
            return _digest((kind.name, numbers.shape, numbers.tobytes()))
        if attribute.is_ref() or kind not in _TENSORS:
            proto = ir.to_proto(attribute)
            proto.ClearField("doc_string")
            return _digest(proto.SerializeToString(deterministic=True))
        tensors = [value] if kind == ir.AttributeType.TENSOR else value
        return _digest((kind.name, [self._content(each) for each in tensors]))

    def _value(self, value: ir.Value | None) -> str:
        if value is None:
            return _digest("absent")
        return self._values.get(id(value)) or _digest(("read before it is computed", value.name))

    def _constant(self, value: ir.Value, *, inner: bool) -> str:
        tensor = value.const_value
        if tensor is None:
            return _digest(("without content", value.name))
        if tensor.nbytes >= SMALLEST and not inner:
            # The stored weights of a model are compared by name.
            return _digest(("weight", value.name, *_kind(tensor)))
        return self._content(tensor)

    def _content(self, tensor: ir.TensorProtocol) -> str:
        content = self._settled(tensor).tobytes()
        return _digest((*_kind(tensor), hashlib.sha256(content).hexdigest()))


def label(value: ir.Value | None) -> str:
    """Describes a value for a message."""
    if value is None:
        return "absent"
    if (producer := value.producer()) is not None:
        return f"{value.name} of {producer.op_type}"
    tensor = value.const_value
    if tensor is None or tensor.nbytes >= SMALLEST:
        return str(value.name)
    values = tensor.numpy().reshape(-1)
    shown = ", ".join(str(each) for each in values[:_SHOWN].tolist())
    more = ", ..." if len(values) > _SHOWN else ""
    return f"the constant {tensor.dtype.name}{list(tensor.shape.numpy())} {shown}{more}"


def _kind(tensor: ir.TensorProtocol) -> tuple[str, tuple[int, ...]]:
    return tensor.dtype.name, tuple(int(size) for size in tensor.shape.numpy())


def _declared(value: ir.Value) -> tuple[str, ...]:
    """Type and shape that a graph declares, each empty where it does not."""
    metadata = [str(sorted(value.metadata_props.items()))] if value.metadata_props else []
    kinds = ["" if each is None else str(each) for each in (value.type, value.shape)]
    return (*kinds, *metadata)


def _digest(content: Sequence[Any] | bytes | str) -> str:
    plain = content if isinstance(content, bytes) else repr(content).encode()
    return hashlib.sha256(plain).hexdigest()
