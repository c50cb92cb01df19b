"""Another tool's quantised graphs without their rounding: the reference's weights, and floats.

Every operator of integers becomes the same one of real numbers: scales and zero points stay, and
nothing is rounded. Such a graph differs from torch by rounding in float32 alone, so that faults of
other operators show, however coarse the integers are.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import LiftConstantsToInitializersPass, RemoveUnusedNodesPass
from torch import nn

from transferry.export.checks.check import Check, Findings, claim
from transferry.export.checks.foreign_weights import (
    Floats,
    Matrix,
    Side,
    blocks_of,
    counterparts,
    reference_weights,
)
from transferry.export.subject.bundle_copy import add, constant
from transferry.export.subject.bundle_copy import replace as rewired
from transferry.export.subject.foreign import GraphsSubject, save_graph
from transferry.export.subject.layout import BITS, EIGHT_BITS, FOUR_BITS, PACKED, Layout
from transferry.runtime.errors import InputError
from transferry.runtime.io.folders import temporary_folder
from transferry.runtime.precision import FLOAT32, PRECISIONS
from transferry.runtime.proof.compare import Tolerance
from transferry.runtime.proof.report import Claim

UNROUNDED = "without rounding"
INTEGERS = EIGHT_BITS | FOUR_BITS
ROUNDED = INTEGERS | {ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
FLOAT, DOUBLE = ir.TensorType(ir.DataType.FLOAT), int(ir.DataType.DOUBLE)
# Operators whose weights become real numbers; others read them in steps of their scale.
REAL = frozenset({"DequantizeLinear", *PACKED})
# Operators of inputs `x, scale, zero point` each, and of a scale and a zero point of the output.
LINEAR = {
    "QLinearMatMul": ("MatMul", 2),
    "QLinearAdd": ("Add", 2),
    "QLinearMul": ("Mul", 2),
    "QLinearSigmoid": ("Sigmoid", 1),
    "QLinearLeakyRelu": ("LeakyRelu", 1),
    "QLinearSoftmax": ("Softmax", 1),
    "QLinearReduceMean": ("ReduceMean", 1),
}
Weights = Mapping[str, Floats]
Value = ir.Value | None
SubjectT = TypeVar("SubjectT", bound=GraphsSubject)


def without_rounding(subject: SubjectT, model: nn.Module) -> tuple[SubjectT | None, list[Check]]:
    """Opens quantised graphs without their rounding.

    Returns:
        None for graphs of floats, for weights that are not the reference's rounded, and for an
        operator without a counterpart; then with a claim that tells why.
    """
    if all(PRECISIONS[name].foreign is None for name in subject.layout.precisions()):
        return None, []
    try:
        with temporary_folder() as folder:
            _write(subject.layout, reference_weights(model), folder)
            opened = subject.reopened(folder)
            _ = opened.model
    except InputError as error:
        reason = Claim(UNROUNDED, skipped=f"the graphs {UNROUNDED}: {error}")
        return None, [claim(UNROUNDED, lambda: [reason])]
    return opened, []


def tolerance_of_floats(layout: Layout) -> Tolerance:
    """Returns the tolerance of the coarsest floats of graphs."""
    names = layout.precisions()
    floats = [name for name in PRECISIONS if name in names and not PRECISIONS[name].rounded]
    return Tolerance.of(floats[-1] if floats else FLOAT32.name)


def told(check: Check) -> Check:
    """Returns a check whose comparisons alone are kept, and say that nothing was rounded."""

    def run(so_far: Findings) -> Iterator[Findings]:
        for found in check.run(so_far):
            items = [replace(each, case=f"{UNROUNDED}, {each.case}") for each in found.comparisons]
            yield Findings(comparisons=items, steps=found.steps)

    return replace(check, run=run, kind=UNROUNDED)


def _write(layout: Layout, weights: Weights, folder: Path) -> None:
    """Writes graphs without rounding into an existing folder."""
    found = {matrix.name: (matrix, side) for matrix, side in counterparts(layout, weights)}
    for graph in layout.graphs:
        model = ir.load(graph.path)
        ir.external_data.load_to_model(model)
        LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
        for number, part in enumerate((model.graph, *model.graph.subgraphs())):
            part.name = f"unrounded.{number}"  # begins the names of added values
        for node in [*model.graph.all_nodes()]:
            if node.op_type in OPERATORS:
                rewired(node.outputs[0], _Real(node, weights).made)
        for part in (model.graph, *model.graph.subgraphs()):
            for value in part.initializers.values():
                _store(value, found.get(str(value.name)), weights)
        RemoveUnusedNodesPass()(model)
        _retype(model)
        save_graph(model, folder / graph.path.name, "unrounded.bin")


def _store(value: ir.Value, known: tuple[Matrix, Side | None] | None, weights: Weights) -> None:
    """Puts a constant in its place that is not rounded."""
    tensor, integers = value.const_value, known and known[0].integers
    if tensor is None or (integers is None and tensor.dtype not in ROUNDED):
        return
    read = {node.op_type for node, _ in value.uses()}
    if known is None and len(tensor.shape) > 1 and tensor.dtype in INTEGERS and read - {*OPERATORS}:
        raise InputError(f"the scale of {value.name} is unknown")
    array = tensor.numpy() if known is None else _real(*known, weights)
    real = integers is not None and REAL & read
    if integers is not None and not real:
        array = array / integers.step + integers.zero
    if array.size == tensor.size:  # else it was packed
        array = array.reshape(tensor.shape.numpy())
    # Steps in float64, since a zero point would round the numbers of a wide range away.
    kind = np.float64 if tensor.dtype in INTEGERS and not real else np.float32
    value.const_value = ir.Tensor(np.ascontiguousarray(array, kind), name=value.name)
    value.type, value.shape = ir.TensorType(value.const_value.dtype), value.const_value.shape


def _real(matrix: Matrix, side: Side | None, weights: Weights) -> Floats:
    """Returns the weights that a matrix stands for, in its own shape."""
    if side is None:
        if matrix.integers is not None and matrix.dimensions > 1:
            raise InputError(f"{matrix.name} is no weight of the reference")
        return matrix.values
    if side.problems and matrix.integers is not None:
        raise InputError(side.problems[0])
    values = side.matrix.values.copy()
    for rows, name in side.blocks:
        values[rows] = weights[name]
    if side.matrix.added is not None:
        values -= side.matrix.added
    return values.T if side.matrix.turned else values


def _retype(model: ir.Model) -> None:
    """Makes floats of the types that operators, inputs and outputs name."""
    graph = model.graph
    for node in graph.all_nodes():
        for attribute in [*node.attributes.values()]:
            if attribute.type == ir.AttributeType.TENSOR:
                if (tensor := attribute.as_tensor()).dtype in ROUNDED:
                    kind = np.float64 if tensor.dtype in INTEGERS else np.float32
                    floats = ir.Tensor(tensor.numpy().astype(kind))
                    node.attributes.add(ir.AttrTensor(attribute.name, floats))
            elif node.op_type == "Cast" and attribute.value in ROUNDED:
                to = DOUBLE if attribute.value in INTEGERS else int(ir.DataType.FLOAT)
                node.attributes.add(ir.AttrInt64(attribute.name, to))
        for value in node.outputs:
            if not value.is_graph_output():
                value.type = value.shape = None
    for value in (*graph.inputs, *graph.outputs):
        if value.dtype in ROUNDED:
            value.type = FLOAT


class _Real:
    """The operator of real numbers in the place of one of integers."""

    def __init__(self, node: ir.Node, weights: Weights) -> None:
        self.node, self.old, self.weights = node, node.outputs[0], weights
        self.op = partial(add, self.old)
        self.kept = {name: each.value for name, each in node.attributes.items() if name != "opset"}

    def made(self, old: ir.Value) -> ir.Value:
        return OPERATORS[self.node.op_type](self, *self.node.inputs)

    def spread(self, x: Value, scale: ir.Value) -> ir.Value:
        """Returns a scale or a zero point of an axis, so that it broadcasts over `x`."""
        if scale.const_value is None or scale.const_value.size == 1:
            return scale
        if x is None or x.shape is None or scale.const_value.shape.rank() != 1:
            raise InputError(f"{self.node.op_type} has several scales along unknown axes")
        axis = self.kept.get("axis", len(x.shape) - 1)
        after = (-axis if axis < 0 else len(x.shape) - axis) - 1
        return self.op("Reshape", scale, constant(self.old, [-1, *[1] * after]))

    def real(self, x: Value, scale: Value, zero: Value = None) -> ir.Value:
        """Returns the numbers that integers stand for."""
        assert x is not None and scale is not None
        found = x if zero is None else self.op("Sub", x, self.spread(x, zero))
        wide = self.op("Cast", self.spread(x, scale), to=DOUBLE)
        return self.op("Cast", self.op("Mul", found, wide), to=1)

    def reals(self, inputs: tuple[Value, ...]) -> list[ir.Value]:
        """Returns the numbers of tensors that each have a scale and a zero point."""
        return [self.real(*inputs[at : at + 3]) for at in range(0, len(inputs), 3)]

    def steps(self, x: Value, scale: Value, zero: Value = None) -> ir.Value:
        """Returns numbers in steps of a scale; cut where the zero point is an end of the integers.

        There a tool may have left out a Relu.
        """
        assert scale is not None
        wide = [self.op("Cast", each, to=DOUBLE) for each in (x, self.spread(x, scale))]
        found, kind, number = self.op("Div", *wide), ir.DataType.UINT8, 0
        if zero is not None:
            found = self.op("Add", found, self.spread(x, zero))
            if zero.const_value is None or zero.const_value.size > 1:
                return found
            kind, number = zero.const_value.dtype, int(zero.const_value.numpy().reshape(-1)[0])
        for operator, end in ("Max", kind.min), ("Min", kind.max):
            if number == end:
                found = self.op(operator, found, constant(self.old, np.float64(end)))
        return found

    def dynamic(self, x: Value) -> ir.Value:
        """DynamicQuantizeLinear, which gives the scale and the zero point still."""
        _, scale, zero = self.node.outputs
        wide = [self.op("Cast", each, to=DOUBLE) for each in (x, scale, zero)]
        for user, at in [*zero.uses()]:
            if user is not wide[2].producer():
                user.replace_input_with(at, wide[2])
        return self.op("Add", self.op("Div", *wide[:2]), wide[2])

    def dequantised(self, x: Value, scale: Value, zero: Value = None) -> ir.Value:
        assert x is not None and scale is not None
        if x.const_value is None or scale.const_value is None or len(x.const_value.shape) > 2:
            return self.real(x, scale, zero)
        vector = len(x.const_value.shape) < 2
        return self.bias(x, scale, zero=zero) if vector else x

    def bias(self, *factors: Value, zero: Value = None) -> ir.Value:
        """Returns a vector, the product of integers and scales, as the reference has it."""
        given = [each for each in (*factors, zero) if each is not None]
        tensors = [each.const_value for each in given if each.const_value is not None]
        arrays = [each.numpy().astype(np.float64) for each in tensors]
        if len(arrays) < len(given):
            raise InputError(f"{self.node.op_type} adds a bias that is computed")
        if zero is not None:
            arrays[0] = arrays[0] - arrays.pop()
        values: NDArray[Any] = np.prod(np.broadcast_arrays(*arrays), axis=0).astype(np.float32)
        column = Matrix("", values.reshape(-1, 1), 1)
        if blocks := blocks_of(column, self.weights):
            values = _real(column, Side(column, blocks, []), self.weights).reshape(-1)
        return constant(self.old, values)

    def plus(self, product: ir.Value, *bias: Value) -> ir.Value:
        given = [each for each in bias if each is not None]
        return self.op("Add", product, given[0]) if given else product

    def product(self, a: Value, b: Value, za: Value = None, zb: Value = None) -> ir.Value:
        """MatMulInteger, whose product another operator scales."""
        a = a if za is None else self.op("Sub", a, za)
        return self.op("MatMul", a, b if zb is None else self.op("Sub", b, zb))

    def scaled_product(self, a: Value, b: Value, sa: Value, sb: Value, *more: Value) -> ir.Value:
        za, zb, bias = (*more, None, None, None)[:3]
        return self.plus(self.op("MatMul", self.real(a, sa, za), self.real(b, sb, zb)), bias)

    def dynamic_product(self, a: Value, b: Value, scale: Value, *more: Value) -> ir.Value:
        zero, bias = (*more, None, None)[:2]
        return self.plus(self.op("MatMul", a, self.real(b, scale, zero)), bias)

    def linear(self, *inputs: Value) -> ir.Value:
        operator, count = LINEAR[self.node.op_type]
        found = self.op(operator, *self.reals(inputs[: 3 * count]), **self.kept)
        return self.steps(found, *inputs[3 * count :])

    def gemm(self, *inputs: Value) -> ir.Value:
        *given, c, scale, zero = [*inputs, None, None, None][:9]
        vector = [] if c is None else [self.bias(c, given[1], given[4])]
        found = self.op("Gemm", *self.reals(tuple(given)), *vector, **self.kept)
        return found if scale is None else self.steps(found, scale, zero)

    def attention(self, x: Value, weight: Value, bias: Value, *more: Value) -> ir.Value:
        sx, sw, mask, zx, zw, past = (*more, *[None] * 6)[:6]
        given = self.real(x, sx, zx), self.real(weight, sw, zw), bias, mask, past
        found = self.op("Attention", *given, **self.kept)
        found.producer().domain = "com.microsoft"  # type: ignore[union-attr]
        return found

    def where(self, condition: Value, *inputs: Value) -> ir.Value:
        return self.steps(self.op("Where", condition, *self.reals(inputs[:6])), *inputs[6:])

    def concat(self, scale: Value, zero: Value, *inputs: Value) -> ir.Value:
        return self.steps(self.op("Concat", *self.reals(inputs), **self.kept), scale, zero)

    def bits(self, x: Value, packed: Value, *more: Value) -> ir.Value:
        weight = self.op("Transpose", self.packed(packed), perm=[1, 0])
        return self.plus(self.op("MatMul", x, weight), *more[3:])

    def gathered(self, table: Value, ids: Value, *more: Value) -> ir.Value:
        return self.op("Gather", self.packed(table), ids)

    def packed(self, value: Value) -> ir.Value:
        """Returns the weights that a packed constant, perhaps in another shape, stands for."""
        while value is not None and (node := value.producer()) and node.op_type == "Reshape":
            value = node.inputs[0]
        if value is None or value.const_value is None:
            raise InputError(f"{self.node.op_type} reads weights that are computed")
        return value


OPERATORS: dict[str, Callable[..., ir.Value]] = {
    "DynamicQuantizeLinear": _Real.dynamic,
    "QuantizeLinear": _Real.steps,
    "DequantizeLinear": _Real.dequantised,
    "MatMulInteger": _Real.product,
    "MatMulIntegerToFloat": _Real.scaled_product,
    "DynamicQuantizeMatMul": _Real.dynamic_product,
    "QGemm": _Real.gemm,
    "QAttention": _Real.attention,
    "QLinearWhere": _Real.where,
    "QLinearConcat": _Real.concat,
    BITS: _Real.bits,
    "GatherBlockQuantized": _Real.gathered,
    **dict.fromkeys(LINEAR, _Real.linear),
}
