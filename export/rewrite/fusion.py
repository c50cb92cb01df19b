"""Rewrites the linear layers of an exported graph for onnxruntime's fastest kernels.

One pass over the nodes, in order. The exporter writes a linear layer as MatMul and Add over
`[batch, length, width]`. onnxruntime adds the bias within its Gemm kernel and applies ReLU there
too, but only to matrices. So everything between two reshapes becomes a matrix
`[batch * length, width]`; elementwise operators and those on the last dimension give the same
result on it. In a packed graph the matrix has the rows of tokens alone, without padding.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import onnx_ir as ir

from transferry.export.trace.editing import (
    CONTRIB,
    alike,
    argument,
    cast,
    constant,
    only_consumer,
    rank,
    shared,
    size,
    transposed_from,
)
from transferry.export.trace.graph import Graph

ELEMENTWISE = frozenset(
    {
        *("Add", "Sub", "Mul", "Div", "Pow", "Sqrt", "Reciprocal", "Neg"),
        *("Erf", "Tanh", "Sigmoid", "Relu", "Gelu", "Cast"),
    }
)


@dataclass(frozen=True)
class Linear:
    """x W^T + b as the exporter writes it, with a following ReLU or division.

    Attributes:
        nodes: MatMul, then Add, Relu and Div where present, in order.
        x: `[batch, length, inputs]` or `[rows, inputs]`.
        weight: `[outputs, inputs]`, as in torch.
        bias: `[outputs]` or None.
        relu: Whether the last node is a Relu.
        divisor: Divisor of the result, a power of two: dividing before the sums are rounded gives
            the same bits as dividing afterwards.
    """

    nodes: list[ir.Node]
    x: ir.Value
    weight: ir.Value
    bias: ir.Value | None
    relu: bool
    divisor: float = 1.0

    @property
    def output(self) -> ir.Value:
        """The layer's result `[batch, length, outputs]`."""
        return self.nodes[-1].outputs[0]


def find_linear(node: ir.Node) -> Linear | None:
    """Returns the linear layer that begins with a node, or None."""
    nodes, bias = [node], None
    if node.op_type == "Gemm" and node.attributes.get_int("transB", 0) == 1:
        weight, bias = node.inputs[1], (*node.inputs, None)[2]  # of a matrix, and with a bias
    elif node.op_type == "MatMul" and (weight := transposed_from(argument(node, 1))) is not None:
        following = only_consumer(node.outputs[0])
        if following is not None and following.op_type == "Add":
            other = next(value for value in following.inputs if value is not node.outputs[0])
            if other is not None and other.is_initializer() and rank(other) == 1:
                bias = other
                nodes.append(following)
    else:
        return None
    if weight is None or not weight.is_initializer():
        return None
    following = only_consumer(nodes[-1].outputs[0])
    relu = following is not None and following.op_type == "Relu"
    divisor = _divisor(following, nodes[-1].outputs[0])
    if following is not None and (relu or divisor != 1):
        nodes.append(following)
    return Linear(nodes, argument(node, 0), weight, bias, relu, divisor)


def _divisor(node: ir.Node | None, dividend: ir.Value) -> float:
    """Returns the constant power of two by which a node divides a value, or 1."""
    if node is None or node.op_type != "Div" or node.inputs[0] is not dividend:
        return 1.0
    constant = argument(node, 1).const_value
    if constant is None or constant.size != 1:
        return 1.0
    divisor = float(constant.numpy().item())
    return divisor if math.frexp(divisor)[0] == 0.5 else 1.0


class Kernels(Protocol):
    """The operators for linear layers and lookups, in one precision."""

    def emit(self, linear: Linear, x: ir.Value, graph: ir.Graph) -> Sequence[ir.Node]:
        """Returns the nodes from x `[rows, inputs]` to a linear layer's output `[rows, outputs]`.

        New initializers are added to the graph.
        """
        ...

    def look_up(self, graph: ir.Graph) -> None:
        """Replaces lookups in embeddings where the precision stores these in integers."""
        ...


class FloatKernels:
    """Linear layers in the graph's own precision, with fused bias and optionally fused ReLU."""

    def __init__(self, *, with_relu: bool) -> None:
        """Takes whether onnxruntime can fuse ReLU: only the CPU provider, in float32."""
        self.with_relu = with_relu

    def emit(self, linear: Linear, x: ir.Value, graph: ir.Graph) -> Sequence[ir.Node]:
        """See `Kernels.emit`."""
        tape, factor = ir.tape.Tape(), 1 / linear.divisor
        inputs = [x, linear.weight, *([linear.bias] if linear.bias is not None else [])]
        if linear.relu and self.with_relu:
            tape.op("FusedGemm", inputs, {"transB": 1, "activation": "Relu"}, domain=CONTRIB)
            return tape.nodes
        product = tape.op("Gemm", inputs, {"transB": 1, "alpha": factor, "beta": factor})
        if linear.relu:
            tape.op("Relu", [product])
        return tape.nodes

    def look_up(self, graph: ir.Graph) -> None:
        """Keeps lookups as they are."""


class Fusion:
    """Rewrites the linear layers of one graph."""

    def __init__(self, graph: Graph, kernels: Kernels, *, packed: bool = False) -> None:
        """Takes the graph, changed in place; its spec says which outputs become matrices.

        With `packed`, the inputs are ids and their mask, and matrices have no rows of padding.
        """
        self.graph, self.kernels, self.linears = graph.model.graph, kernels, 0
        self.matrix_outputs = [spec.name for spec in graph.spec.outputs if len(spec.shape) == 2]
        # Value to its matrix form; a value that has become a matrix maps to itself.
        self._matrices: dict[ir.Value, ir.Value] = {}
        self._whole: dict[ir.Value, ir.Value] = {}  # the reverse
        self._batch_and_length: ir.Value | None = None
        self._nodes = list(self.graph)
        self._packing = _Packing(self.graph) if packed and _is_of_positions(self.graph) else None
        graph.model.opset_imports[CONTRIB] = 1

    def run(self) -> int:
        """Rewrites every linear layer; returns their number."""
        for node in self._nodes:
            if node.graph is None:
                continue  # removed with a linear layer
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
        """Replaces a linear layer by its kernel on a matrix."""
        first, old, name = linear.nodes[0], linear.output, linear.output.name
        nodes = self.kernels.emit(linear, self._matrix(linear.x, before=first), self.graph)
        output = alike(nodes[-1].outputs[0], old)
        if rank(old) != 2:
            self._as_matrix(output)
        self.graph.insert_before(first, nodes)
        old.replace_all_uses_with(output, replace_graph_outputs=True)
        self.graph.remove(list(reversed(linear.nodes)), safe=True)
        output.name = name
        self.linears += 1

    def _works_on_matrices(self, node: ir.Node) -> bool:
        """Makes a node read matrices if it can; returns whether it does."""
        output = node.outputs[0]
        tensors = [value for value in node.inputs if value is not None and rank(value) > 1]
        if not (
            _is_pointwise(node)
            and any(self._is_matrix(value) for value in tensors)
            # No broadcast tensor among the others: before a pre-norm the embedding is no matrix.
            and all(value in self._matrices or value.shape == output.shape for value in tensors)
        ):
            return False
        for index, value in enumerate(node.inputs):
            if value in tensors:
                node.replace_input_with(index, self._matrix(value, before=node))
        self._as_matrix(output)
        return True

    def _restore_inputs(self, node: ir.Node) -> None:
        for index, value in enumerate(node.inputs):
            # A Reshape names all dimensions of its result, but adds no rows.
            reshapes = node.op_type == "Reshape" and self._packing is None
            if value is not None and self._is_matrix(value) and not reshapes:
                node.replace_input_with(index, self._restored(value, before=node))

    def _is_matrix(self, value: ir.Value) -> bool:
        return self._matrices.get(value) is value

    def _as_matrix(self, value: ir.Value) -> None:
        value.shape = ir.Shape(["rows", value.shape[-1]]) if value.shape is not None else None
        self._matrices[value] = value

    def _matrix(self, value: ir.Value, before: ir.Node | None) -> ir.Value:
        if rank(value) == 2:
            return value
        if value not in self._matrices:
            width = size(value, -1)
            shape = constant(self.graph, "matrix", [-1, width])
            producer = value.producer()
            reshaped = producer is not None and producer.op_type == "Reshape"
            origin = producer.inputs[0] if producer is not None and reshaped else value
            matrix = self._insert(ir.node("Reshape", [origin, shape]), before)
            if self._packing is not None:
                given = [matrix, self._packing.tokens]
                matrix = self._insert(ir.node("Gather", given, {"axis": 0}), before)
            matrix.type, matrix.shape = value.type, ir.Shape(["rows", width])
            self._matrices[value] = matrix
        return self._matrices[value]

    def _restored(self, value: ir.Value, before: ir.Node | None) -> ir.Value:
        """Returns a matrix as `[batch, length, width]`."""
        if value in self._whole:
            return self._whole[value]
        width = size(value, -1)
        if self._packing is not None:
            node = ir.node("Gather", [value, self._packing.places], {"axis": 0})
        else:
            if self._batch_and_length is None:
                ids = self.graph.inputs[0]
                self._batch_and_length = self._insert(ir.node("Shape", [ids]), self.graph[0])
            last = constant(self.graph, "width", [width])
            shape = ir.node("Concat", [self._batch_and_length, last], {"axis": 0})
            node = ir.node("Reshape", [value, self._insert(shape, before)])
        restored = self._insert(node, before)
        restored.type, restored.shape = value.type, ir.Shape(["batch", "length", width])
        self._whole[value] = restored
        return restored

    def _insert(self, node: ir.Node, before: ir.Node | None) -> ir.Value:
        if before is None:
            self.graph.append(node)
        else:
            self.graph.insert_before(before, node)
        return node.outputs[0]


def _is_pointwise(node: ir.Node) -> bool:
    """Whether a node works on single elements or along the last dimension alone."""
    if node.op_type == "LayerNormalization":
        return node.attributes.get_int("axis", -1) == -1
    if node.op_type == "ReduceMean":
        axes = node.inputs[1].const_value if len(node.inputs) > 1 and node.inputs[1] else None
        return axes is not None and axes.numpy().tolist() == [-1]
    return node.op_type in ELEMENTWISE


class _Packing:
    """Leaves out padding, and puts it back.

    Attributes:
        tokens: Which of all positions are tokens `[rows]`.
        places: Row of each position `[batch, length]`; at padding that of its text's last token, so
            that infinities of one text do not reach another.
    """

    def __init__(self, graph: ir.Graph) -> None:
        """Inserts the nodes into a graph with ids and mask `[batch, length]` as inputs."""
        mask, tape = graph.inputs[1], ir.tape.Tape()
        flat, first = constant(graph, "flat", [-1]), shared(graph, "axis", np.int64(0))
        of_all = tape.op("Reshape", [mask, flat])
        self.tokens = tape.op("Reshape", [tape.op("NonZero", [of_all]), flat])
        counts = tape.op("CumSum", [cast(tape, of_all, ir.DataType.INT64), first])
        rows = tape.op("Sub", [counts, shared(graph, "row", np.int64(1))])
        self.places = tape.op("Reshape", [rows, tape.op("Shape", [mask])])
        graph.insert_before(graph[0], tape.nodes)


def _is_of_positions(graph: ir.Graph) -> bool:
    """Whether linear layers read every position, or one vector of each text, and nothing else."""
    ids = graph.inputs[0].shape
    read = [linear.x for linear in map(find_linear, graph) if linear is not None]
    return ids is not None and all(
        rank(x) == 2 or (rank(x) == 3 and [*(x.shape or ())][:2] == [*ids]) for x in read
    )
