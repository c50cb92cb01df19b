"""Rewrites an exported graph so that its linear layers run as fast as onnxruntime's kernels can.

One pass in the order of the nodes. A linear layer comes out of the exporter as MatMul and Add over
[batch, length, width]; onnxruntime adds the bias within its Gemm kernel, and applies ReLU there
too, but only to matrices. So everything between two reshapes becomes a matrix [batch * length,
width]: what works on the last dimension alone (sums, norms, activations) does not mind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

CONTRIB = "com.microsoft"
ELEMENTWISE = frozenset(
    {
        *("Add", "Sub", "Mul", "Div", "Pow", "Sqrt", "Reciprocal", "Neg"),
        *("Erf", "Tanh", "Sigmoid", "Relu", "Gelu", "Cast"),
    }
)


@dataclass(frozen=True)
class Linear:
    """x W^T + b, perhaps with a ReLU or a division behind it, as the exporter writes it.

    Attributes:
        nodes: MatMul, and what of Add and Relu or Div follows, in order.
        x: [batch, length, inputs] or [rows, inputs].
        weight: [outputs, inputs], as torch has it.
        bias: [outputs] or None.
        relu: Whether the last node is a Relu.
        divisor: What the layer is divided by, a power of two: dividing before the sums are rounded
            gives the same bits as after.
    """

    nodes: list[ir.Node]
    x: ir.Value
    weight: ir.Value
    bias: ir.Value | None
    relu: bool
    divisor: float = 1.0

    @property
    def output(self) -> ir.Value:
        """What leaves the layer [batch, length, outputs]."""
        return self.nodes[-1].outputs[0]


def find_linear(node: ir.Node) -> Linear | None:
    """Returns the linear layer that begins with a node, if one does."""
    if node.op_type == "Gemm" and node.attributes.get_int("transB", 0) == 1:
        x, weight, bias = (*node.inputs, None)[:3]  # of a matrix, and with a bias
        nodes = [node]
    elif node.op_type == "MatMul" and (origin := _transposed(node.inputs[1])) is not None:
        x, weight, bias = node.inputs[0], origin, None
        nodes = [node]
        following = _only_consumer(node.outputs[0])
        if following is not None and following.op_type == "Add":
            other = next(value for value in following.inputs if value is not node.outputs[0])
            if other is not None and other.is_initializer() and rank(other) == 1:
                bias = other
                nodes.append(following)
    else:
        return None
    if x is None or weight is None or not weight.is_initializer():
        return None
    following = _only_consumer(nodes[-1].outputs[0])
    relu = following is not None and following.op_type == "Relu"
    divisor = _divisor(following, nodes[-1].outputs[0])
    if following is not None and (relu or divisor != 1):
        nodes.append(following)
    return Linear(nodes, x, weight, bias, relu, divisor)


def _divisor(node: ir.Node | None, dividend: ir.Value) -> float:
    """What a node divides some value by, if that is a constant power of two; else 1."""
    if node is None or node.op_type != "Div" or node.inputs[0] is not dividend:
        return 1.0
    constant = node.inputs[1].const_value if node.inputs[1] is not None else None
    if constant is None or constant.size != 1:
        return 1.0
    divisor = float(constant.numpy().item())
    return divisor if math.frexp(divisor)[0] == 0.5 else 1.0


def _transposed(value: ir.Value | None) -> ir.Value | None:
    """Returns what a value is the transpose of, if it is one."""
    producer = value.producer() if value is not None else None
    if producer is None or producer.op_type != "Transpose":
        return None
    return producer.inputs[0]


class Kernels(Protocol):
    """What computes linear layers, and is told of each by `Fusion`."""

    def emit(self, linear: Linear, x: ir.Value, graph: ir.Graph) -> list[ir.Node]:
        """Returns the nodes that compute a linear layer of a matrix.

        Args:
            linear: The layer.
            x: Its input [rows, inputs].
            graph: Takes up new initializers.

        Returns:
            Nodes in order; the last has the output [rows, outputs] as its only one.
        """
        ...


class FloatKernels:
    """Linear layers in the graph's own precision: bias within the product, and perhaps ReLU."""

    def __init__(self, *, with_relu: bool) -> None:
        """Takes whether there is a kernel for the product with ReLU: float32 on the CPU has one."""
        self.with_relu = with_relu

    def emit(self, linear: Linear, x: ir.Value, graph: ir.Graph) -> list[ir.Node]:
        """See `Kernels.emit`."""
        inputs = [x, linear.weight, *([linear.bias] if linear.bias is not None else [])]
        if linear.relu and self.with_relu:
            return [
                ir.node("FusedGemm", inputs, {"transB": 1, "activation": "Relu"}, domain=CONTRIB)
            ]
        factor = 1 / linear.divisor
        nodes = [ir.node("Gemm", inputs, {"transB": 1, "alpha": factor, "beta": factor})]
        if linear.relu:
            nodes.append(ir.node("Relu", nodes[0].outputs))
        return nodes


class Fusion:
    """A graph whose linear layers are rewritten."""

    def __init__(self, model: ir.Model, kernels: Kernels, matrix_outputs: Sequence[str]) -> None:
        """Takes a graph.

        Args:
            model: The graph, changed in place.
            kernels: What computes the linear layers.
            matrix_outputs: Graph outputs that become [batch * length, width].
        """
        self.graph = model.graph
        self.kernels = kernels
        self.matrix_outputs = matrix_outputs
        self.linears = 0
        # The matrix that stands for a value; a value that has become a matrix stands for itself.
        self._matrices: dict[ir.Value, ir.Value] = {}
        self._batch_and_length: ir.Value | None = None
        model.opset_imports[CONTRIB] = 1

    def run(self) -> int:
        """Rewrites every linear layer, and returns how many there were."""
        for node in list(self.graph):
            if node.graph is None:
                continue  # part of a linear layer that was rewritten
            if (linear := find_linear(node)) is not None:
                self._rewrite(linear)
            elif not self._works_on_matrices(node):
                self._restore_inputs(node)
        for index, value in enumerate(self.graph.outputs):
            wanted = value.name in self.matrix_outputs
            if wanted != (rank(value) == 2) and (wanted or self._is_matrix(value)):
                change = self._matrix if wanted else self._restored
                name, value.name = value.name, f"{value.name}.before"
                self.graph.outputs[index] = change(value, before=None)
                self.graph.outputs[index].name = name
        return self.linears

    def _rewrite(self, linear: Linear) -> None:
        """Puts a linear layer of matrices in the place of one of three dimensions."""
        first, old, name = linear.nodes[0], linear.output, linear.output.name
        nodes = self.kernels.emit(linear, self._matrix(linear.x, before=first), self.graph)
        output = nodes[-1].outputs[0]
        already = rank(old) == 2
        output.type, output.shape = old.type, old.shape if already else _matrix_shape(old)
        self.graph.insert_before(first, nodes)
        old.replace_all_uses_with(output, replace_graph_outputs=True)
        self.graph.remove(list(reversed(linear.nodes)), safe=True)
        output.name = name
        if not already:
            self._matrices[output] = output
        self.linears += 1

    def _works_on_matrices(self, node: ir.Node) -> bool:
        """Gives a node matrices if it can do with them, and tells whether it now does."""
        output = node.outputs[0]
        tensors = [value for value in node.inputs if value is not None and rank(value) > 1]
        if not (
            _is_pointwise(node)
            and any(self._is_matrix(value) for value in tensors)
            # Of the others none that is broadcast: before a pre-norm the embedding is no matrix.
            and all(value in self._matrices or value.shape == output.shape for value in tensors)
        ):
            return False
        for index, value in enumerate(node.inputs):
            if value in tensors:
                node.replace_input_with(index, self._matrix(value, before=node))
        output.shape = _matrix_shape(output)
        self._matrices[output] = output
        return True

    def _restore_inputs(self, node: ir.Node) -> None:
        for index, value in enumerate(node.inputs):
            # A Reshape names all dimensions of its result.
            if value is not None and self._is_matrix(value) and node.op_type != "Reshape":
                node.replace_input_with(index, self._restored(value, before=node))

    def _is_matrix(self, value: ir.Value) -> bool:
        return self._matrices.get(value) is value

    def _matrix(self, value: ir.Value, before: ir.Node | None) -> ir.Value:
        if rank(value) == 2:
            return value
        if value not in self._matrices:
            shape = constant(self.graph, "matrix", [-1, width(value)])
            producer = value.producer()
            reshaped = producer is not None and producer.op_type == "Reshape"
            origin = producer.inputs[0] if producer is not None and reshaped else value
            (matrix,) = self._insert(ir.node("Reshape", [origin, shape]), before)
            matrix.type, matrix.shape = value.type, _matrix_shape(value)
            self._matrices[value] = matrix
        return self._matrices[value]

    def _restored(self, value: ir.Value, before: ir.Node | None) -> ir.Value:
        """Returns a matrix as [batch, length, width] again."""
        if self._batch_and_length is None:
            ids = self.graph.inputs[0]
            (self._batch_and_length,) = self._insert(ir.node("Shape", [ids]), self.graph[0])
        last = constant(self.graph, "width", [width(value)])
        axis = {"axis": 0}
        (shape,) = self._insert(ir.node("Concat", [self._batch_and_length, last], axis), before)
        (restored,) = self._insert(ir.node("Reshape", [value, shape]), before)
        restored.type = value.type
        restored.shape = ir.Shape(["batch", "length", width(value)])
        return restored

    def _insert(self, node: ir.Node, before: ir.Node | None) -> Sequence[ir.Value]:
        if before is None:
            self.graph.append(node)
        else:
            self.graph.insert_before(before, node)
        return node.outputs


def constant(graph: ir.Graph, name: str, numbers: Sequence[int]) -> ir.Value:
    """Returns an initializer of int64 [numbers], the same for the same name and numbers."""
    return shared(graph, f"{name}.{'x'.join(map(str, numbers))}", np.array(numbers, np.int64))


def shared(graph: ir.Graph, name: str, array: NDArray[Any] | np.generic) -> ir.Value:
    """Returns the initializer of a name, which is added if there is none."""
    if name not in graph.initializers:
        register(graph, name, array)
    return graph.initializers[name]


def register(graph: ir.Graph, name: str, array: NDArray[Any] | np.generic) -> ir.Value:
    """Adds an initializer to a graph."""
    tensor = ir.tensor(np.asarray(array), name=name)
    value = ir.Value(name=name, shape=ir.Shape(array.shape), const_value=tensor)
    value.dtype = tensor.dtype
    graph.register_initializer(value)
    return value


def _is_pointwise(node: ir.Node) -> bool:
    """Whether a node works on each element, or on the last dimension alone."""
    if node.op_type == "LayerNormalization":
        return node.attributes.get_int("axis", -1) == -1
    if node.op_type == "ReduceMean":
        axes = node.inputs[1].const_value if len(node.inputs) > 1 and node.inputs[1] else None
        return axes is not None and axes.numpy().tolist() == [-1]
    return node.op_type in ELEMENTWISE


def _only_consumer(value: ir.Value) -> ir.Node | None:
    consumers = list(value.consumers())
    return consumers[0] if len(consumers) == 1 and not value.is_graph_output() else None


def drop_unused(graph: ir.Graph) -> None:
    """Drops nodes and initializers that nothing reads any more."""
    for node in reversed(list(graph)):
        if not any(value.is_graph_output() or list(value.uses()) for value in node.outputs):
            graph.remove(node, safe=True)
    for name, value in list(graph.initializers.items()):
        if not list(value.uses()):
            del graph.initializers[name]


def rank(value: ir.Value) -> int:
    """Returns how many dimensions a value has."""
    if value.shape is None:
        raise ValueError(f"value {value.name!r} of the exported graph has no known shape")
    return len(value.shape)


def width(value: ir.Value) -> int:
    """Returns the size of a value's last dimension."""
    size = value.shape[-1] if value.shape is not None else None
    if not isinstance(size, int):
        raise ValueError(f"value {value.name!r} of the exported graph has no known width")
    return size


def _matrix_shape(value: ir.Value) -> ir.Shape:
    return ir.Shape(["rows", value.shape[-1]]) if value.shape is not None else ir.Shape([])
