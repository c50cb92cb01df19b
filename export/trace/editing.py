"""Edits of ONNX graphs that several rewrites share."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from transferry.runtime.bundle.specs import TensorSpec
from transferry.runtime.ort.session import KERNELS as KERNELS

CONTRIB = "com.microsoft"  # domain of onnxruntime's own operators
END = 1 << 40  # behind the last column


def register(graph: ir.Graph, name: str, array: NDArray[Any] | np.generic) -> ir.Value:
    """Adds an initializer to a graph; one of equal name and content serves again."""
    tensor = ir.tensor(np.asarray(array), name=name)
    known = graph.initializers.get(name)
    if known is not None and np.array_equal(array_of(known), array):
        return known
    value = ir.Value(name=name, shape=ir.Shape(array.shape), const_value=tensor)
    value.dtype = tensor.dtype
    graph.register_initializer(value)
    return value


def shared(graph: ir.Graph, name: str, array: NDArray[Any] | np.generic) -> ir.Value:
    """Returns the initializer of a name, added if it is absent."""
    return graph.initializers.get(name) or register(graph, name, array)


def constant(graph: ir.Graph, name: str, numbers: Sequence[int]) -> ir.Value:
    """Returns an int64 initializer `[numbers]`, shared by equal name and numbers."""
    return shared(graph, f"{name}.{'x'.join(map(str, numbers))}", np.array(numbers, np.int64))


def array_of(value: ir.Value) -> NDArray[Any]:
    """Returns the content of an initializer."""
    assert value.const_value is not None, value.name
    return value.const_value.numpy()


def described(value: ir.Value, spec: TensorSpec) -> ir.Value:
    """Gives a value the name, type and shape of a spec, and returns it."""
    value.name, value.shape = spec.name, ir.Shape(spec.shape)
    value.type = ir.TensorType(ir.DataType.from_numpy(np.dtype(spec.type)))
    return value


def alike(value: ir.Value, model: ir.Value) -> ir.Value:
    """Gives a value the type and shape of another, and returns it."""
    value.type, value.shape = model.type, model.shape
    return value


def cast(tape: ir.tape.Tape, value: ir.Value, to: ir.DataType) -> ir.Value:
    """Casts a value to another element type."""
    return tape.op("Cast", [value], {"to": int(to)})


def argument(node: ir.Node, index: int) -> ir.Value:
    """Returns an input of a node that must be present."""
    value = node.inputs[index]
    assert value is not None, f"input {index} of {node.op_type}"
    return value


def only_consumer(value: ir.Value) -> ir.Node | None:
    """Returns the node that reads a value, if exactly one does and the value is no output."""
    consumers = list(value.consumers())
    return consumers[0] if len(consumers) == 1 and not value.is_graph_output() else None


def transposed_from(value: ir.Value) -> ir.Value | None:
    """Returns the input of the Transpose that computes a value, or None."""
    producer = value.producer()
    return producer.inputs[0] if producer is not None and producer.op_type == "Transpose" else None


def replace_lookups(
    graph: ir.Graph, name: str, rows_of: Callable[[ir.tape.Tape, ir.Value, ir.Node], ir.Value]
) -> None:
    """Replaces lookups in the embedding of a name, if there is one, by the rows of `rows_of`."""
    weight = graph.initializers.get(name)
    for node in list(weight.consumers()) if weight is not None else ():
        if node.op_type == "Gather" and weight is not None:
            tape = ir.tape.Tape()
            rows = rows_of(tape, weight, node)
            graph.insert_before(node, tape.nodes)
            node.outputs[0].replace_all_uses_with(alike(rows, node.outputs[0]))
            graph.remove(node, safe=True)


def drop_unused(graph: ir.Graph) -> None:
    """Drops nodes and initializers without a reader."""
    for node in reversed(list(graph)):
        if not any(value.is_graph_output() or list(value.uses()) for value in node.outputs):
            graph.remove(node, safe=True)
    for name, value in list(graph.initializers.items()):
        if not list(value.uses()):
            del graph.initializers[name]


def of_weights(value: ir.Value | None) -> bool:
    """Whether a value depends on weights alone, as a table stored in integers does."""
    if value is None or value.is_initializer():
        return True
    node = value.producer()
    return node is not None and all(map(of_weights, node.inputs))


def rank(value: ir.Value) -> int:
    """Returns the number of dimensions of a value."""
    if value.shape is None:
        raise ValueError(f"value {value.name!r} of the exported graph has no known shape")
    return len(value.shape)


def size(value: ir.Value, axis: int) -> int:
    """Returns the size of a fixed dimension of a value."""
    found = value.shape[axis] if value.shape is not None else None
    if not isinstance(found, int):
        raise ValueError(f"dimension {axis} of value {value.name!r} of the exported graph varies")
    return found


class Tape(ir.tape.Tape):
    """Nodes of one graph, with the combinations of operators that searches repeat."""

    def of(self, *numbers: int, flat: bool = True) -> ir.Value:
        """Returns an int64 constant: `[numbers]`, or a scalar if not flat."""
        return self.constant(np.array(numbers if flat else numbers[0], np.int64))

    def constant(self, array: NDArray[Any] | np.generic) -> ir.Value:
        """Returns a constant."""
        return self.op("Constant", [], {"value": ir.tensor(array)})

    def integers(self, value: ir.Value) -> ir.Value:
        """Casts to int64."""
        return cast(self, value, ir.DataType.INT64)

    def size(self, value: ir.Value, axis: int) -> ir.Value:
        """Returns the size of one dimension `[1]` int64."""
        return self.op("Shape", [value], {"start": axis, "end": axis + 1})

    def filled(self, number: Any, *shape: ir.Value) -> ir.Value:
        """Returns a tensor of equal entries, whose sizes are given as `[1]` each."""
        sizes = self.op("Concat", list(shape), {"axis": 0})
        return self.op("ConstantOfShape", [sizes], {"value": ir.tensor(np.array([number]))})

    def joined(self, *values: ir.Value) -> ir.Value:
        """Concatenates columns."""
        return self.op("Concat", list(values), {"axis": 1})

    def any(self, values: ir.Value, axis: int) -> ir.Value:
        """Whether any entry along an axis is true."""
        most = self.op("ReduceMax", [self.integers(values), self.of(axis)], {"keepdims": 0})
        return cast(self, most, ir.DataType.BOOL)

    def columns(self, value: ir.Value, first: int, last: int) -> ir.Value:
        """Returns the columns from `first` up to `last`, excluded."""
        return self.op("Slice", [value, self.of(first), self.of(last), self.of(1)])

    def picked(self, value: ir.Value, places: ir.Value) -> ir.Value:
        """Returns entries of each row by their columns."""
        return self.op("GatherElements", [value, places], {"axis": 1})

    def range(self, count: ir.Value) -> ir.Value:
        """Returns 0, 1, 2, ... up to a count `[1]`."""
        count = self.op("Squeeze", [count, self.of(0)])
        return self.op("Range", [self.of(0, flat=False), count, self.of(1, flat=False)])

    def unsqueezed(self, value: ir.Value, axis: int) -> ir.Value:
        """Adds a dimension of size 1."""
        return self.op("Unsqueeze", [value, self.of(axis)])
