"""Values of graphs in which faults are planted, and how they are changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias, TypeVar

import numpy as np
import onnx_ir as ir

from transferry.export.subject.bundle_copy import BundleCopy, add, constant, replace

FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
WHOLE = (ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT32)

Item = TypeVar("Item")
Generator: TypeAlias = np.random.Generator
# Makes another value of an honest one.
Change: TypeAlias = Callable[[ir.Value], ir.Value]


def drawn(copy: BundleCopy, generator: Generator, found: Sequence[Item], what: str) -> Item:
    """Returns one of some places; without any, raises InputError, which names them."""
    if not found:
        raise copy.absent(what)
    return found[int(generator.integers(len(found)))]


def float_values(copy: BundleCopy) -> list[ir.Value]:
    """Returns the outputs of nodes that are floats or integers of a product, of known shape."""
    return [
        output
        for model in copy.graphs.values()
        for node in model.graph
        for output in node.outputs
        if output.dtype in (*FLOATS, *WHOLE) and output.shape is not None
    ]


def some_value(copy: BundleCopy, generator: Generator, *inputs: str) -> ir.Value:
    """Returns a value, in a graph that has one of the inputs, if any are named."""
    found = [
        value
        for value in float_values(copy)
        if not inputs or (value.graph and graph_input(value, *inputs) is not None)
    ]
    return drawn(copy, generator, found, f"values beside an input {' or '.join(inputs)}")


def graph_input(near: ir.Value, *names: str) -> ir.Value | None:
    """Returns the first input of the graph of a value that has one of the names."""
    assert isinstance(near.graph, ir.Graph)
    return next((each for each in near.graph.inputs if each.name in names), None)


def beside_tokens(
    copy: BundleCopy, generator: Generator, *inputs: str
) -> tuple[ir.Value, ir.Value]:
    """Returns a value, and the input of its graph that has token ids."""
    value = some_value(copy, generator, *inputs)
    given = graph_input(value, *inputs)
    if given is None or given.dtype != ir.DataType.INT64:
        raise copy.absent("token ids among the inputs")
    return value, given


def input_axis(copy: BundleCopy, generator: Generator, value: ir.Value) -> tuple[ir.Value, int]:
    """Returns an input of the graph of a value, and an axis of it that may have any size."""
    assert isinstance(value.graph, ir.Graph)
    found = [
        (each, axis)
        for each in value.graph.inputs
        for axis, size in enumerate(each.shape or ())
        if not isinstance(size, int)
    ]
    return drawn(copy, generator, found, "inputs of any size")


def some_axis(copy: BundleCopy, generator: Generator) -> tuple[ir.Value, int]:
    """Returns a value and one of its axes, not the first, whose size is not fixed."""
    found = [
        (value, axis)
        for value in float_values(copy)
        for axis, size in enumerate(value.shape or ())
        if axis and not isinstance(size, int)
    ]
    return drawn(copy, generator, found, "axes of any size")


def like(value: ir.Value, number: float) -> ir.Value:
    """Returns a number in the type of a value `[]`."""
    return add(value, "CastLike", constant(value, np.float32(number)), value)


def times(factor: float, value: ir.Value) -> ir.Value:
    """Returns a value times a factor, in its type and range."""
    if value.dtype in WHOLE:
        whole = np.iinfo(value.dtype.numpy())
        scaled = add(value, "Cast", value, to=ir.DataType.FLOAT)
        scaled = add(value, "Round", add(value, "Mul", scaled, constant(value, np.float32(factor))))
        ends = (constant(value, np.float32(each)) for each in (whole.min, whole.max))
        return add(value, "Cast", add(value, "Clip", scaled, *ends), to=value.dtype)
    return add(value, "Mul", value, like(value, factor))


def waved(size: float, rate: float, value: ir.Value) -> ir.Value:
    """Adds noise that depends on the value alone: a sine."""
    if value.dtype in WHOLE:
        return add(value, "Add", value, like(value, 1.0))
    wave = add(value, "Sin", add(value, "Mul", value, like(value, rate)))
    return add(value, "Add", value, add(value, "Mul", wave, like(value, size)))


def narrowed(kind: ir.DataType, value: ir.Value) -> ir.Value:
    """Returns a value cast to a narrower type and back."""
    return add(value, "CastLike", add(value, "Cast", value, to=kind), value)


def clipped(bound: float, value: ir.Value) -> ir.Value:
    """Returns a value between two bounds."""
    low, high = (like(value, each) for each in (-bound, bound))
    return add(value, "Max", add(value, "Min", value, high), low)


def some_change(generator: Generator) -> tuple[Change, str]:
    """Returns a large change, for a value that is wrong under a condition alone, and its words."""
    chosen = int(generator.integers(4))
    if chosen == 3:
        return partial(waved, 0.05, 50.0), "plus 0.05 sin(50 x)"
    factor = (2.0, 1.1, 0.0)[chosen]
    return partial(times, factor), f"times {factor:g}"


def change_everywhere(value: ir.Value, change: Change) -> None:
    """Changes a value in all its entries."""
    replace(value, change)


def change_where(value: ir.Value, condition: Change, change: Change) -> None:
    """Changes a value where a condition holds, shaped to be compared with it."""
    replace(value, lambda honest: add(honest, "Where", condition(honest), change(honest), honest))


# Conditions.


def size_of(value: ir.Value, axis: int) -> ir.Value:
    """Returns the size of an axis `[]` int64."""
    return add(value, "Gather", add(value, "Shape", value), constant(value, axis))


def places_of(value: ir.Value, axis: int) -> ir.Value:
    """Returns 0, 1, ... along an axis, shaped to be compared with the value."""
    assert value.shape is not None
    ends = constant(value, 0), size_of(value, axis), constant(value, 1)
    shape = [1] * len(value.shape)
    shape[axis] = -1
    return add(value, "Reshape", add(value, "Range", *ends), constant(value, shape))


def compared(operator: str, number: int, of: Change) -> Change:
    """Returns the comparison of something of a value with a number."""
    return lambda honest: add(honest, operator, of(honest), constant(honest, number))


def any_of(honest: ir.Value, alike: ir.Value, tokens: ir.Value) -> ir.Value:
    """Returns whether any entry of a row `[rows, length]` holds, by row of the value if it can."""
    assert honest.shape is not None
    assert tokens.shape is not None
    whole = add(honest, "Cast", alike, to=ir.DataType.INT32)
    if len(honest.shape) and honest.shape[0] == tokens.shape[0]:
        rows = add(honest, "ReduceSum", whole, constant(honest, [1]), keepdims=0)
        shape = [-1, *([1] * (len(honest.shape) - 1))]
        rows = add(honest, "Reshape", rows, constant(honest, shape))
    else:
        rows = add(honest, "ReduceSum", whole, keepdims=0)
    return add(honest, "Cast", rows, to=ir.DataType.BOOL)


def neighbours(value: ir.Value, axis: int) -> tuple[ir.Value, ir.Value]:
    """Returns all entries of an axis but the last, and the entry after each."""
    ends = ((0, -1), (1, 1 << 40))
    one, other = (
        add(value, "Slice", value, *(constant(value, [each]) for each in (*places, axis)))
        for places in ends
    )
    return one, other
