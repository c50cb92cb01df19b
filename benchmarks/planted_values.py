"""Places in a copy of a bundle where faults are planted; conditions on values, and changes of them.

A kind of fault is a function of a `Site`, decorated with its name: `everywhere` and `somewhere`
change a value that the function chooses, `described` leaves all to the function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, TypeAlias, TypeVar

import numpy as np
import onnx_ir as ir

from transferry.export.subject.bundle_copy import BundleCopy, add, constant, replace

FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
INT64 = ir.DataType.INT64
WHOLE = (ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT32)
TOKENS_IN = "source", "target"  # inputs of token ids
MASKS = "source_mask", "past_mask"

Item = TypeVar("Item")
# Makes another value of an honest one, or a condition on it.
Change: TypeAlias = Callable[[ir.Value], ir.Value]
Tokens: TypeAlias = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Site:
    """A copy, and the numbers that choose a place in it; without any, methods raise InputError."""

    copy: BundleCopy
    generator: np.random.Generator
    tokens: Tokens

    def integer(self, low: int, high: int | None = None) -> int:
        """Returns an integer from `low` on below `high`, or from 0 on below `low`."""
        return int(self.generator.integers(low, high))

    def choice(self, options: Sequence[Any]) -> Any:
        """Returns one of some numbers or names."""
        return self.generator.choice(options).item()

    def drawn(self, found: Sequence[Item], what: str = "places") -> Item:
        """Returns one of some places."""
        if not found:
            raise self.copy.absent(what)
        return found[self.integer(len(found))]

    def floats(self) -> list[ir.Value]:
        """Returns the outputs of nodes that are floats or integers of a product, of known shape."""
        return [
            output
            for model in self.copy.graphs.values()
            for node in model.graph
            for output in node.outputs
            if output.dtype in (*FLOATS, *WHOLE) and output.shape is not None
        ]

    def value(self, *inputs: str) -> ir.Value:
        """Returns a value, in a graph that has one of the inputs, if any are named."""
        found = [
            value
            for value in self.floats()
            if not inputs or (value.graph and graph_input(value, *inputs) is not None)
        ]
        return self.drawn(found, f"values beside an input {' or '.join(inputs)}")

    def beside(self, *inputs: str) -> tuple[ir.Value, ir.Value]:
        """Returns a value, and the first input of its graph that has one of the names."""
        value = self.value(*inputs)
        given = graph_input(value, *inputs)
        assert given is not None
        return value, given

    def beside_tokens(self, *inputs: str) -> tuple[ir.Value, ir.Value]:
        """Returns a value, and the input of its graph that has token ids."""
        value, given = self.beside(*inputs)
        if given.dtype != INT64:
            raise self.copy.absent("token ids among the inputs")
        return value, given

    def rows_of(self, *inputs: str) -> tuple[ir.Value, ir.Value]:
        """Returns a value whose first axis is the rows of an input, and the input."""
        found = [
            (value, given)
            for value in self.floats()
            if value.graph and (given := graph_input(value, *inputs)) is not None
            if value.shape and given.shape and value.shape[0] == given.shape[0]
        ]
        return self.drawn(found, f"rows of {' or '.join(inputs)}")

    def input_axis(self, value: ir.Value) -> tuple[ir.Value, int]:
        """Returns an input of the graph of a value, and an axis of it that may have any size."""
        assert isinstance(value.graph, ir.Graph)
        found = [
            (each, axis)
            for each in value.graph.inputs
            for axis, size in enumerate(each.shape or ())
            if not isinstance(size, int)
        ]
        return self.drawn(found, "inputs of any size")

    def inputs(self, *names: str) -> list[ir.Value]:
        """Returns the inputs of all graphs that have one of the names."""
        graphs = self.copy.graphs.values()
        return [each for one in graphs for each in one.graph.inputs if each.name in names]

    def axis(self) -> tuple[ir.Value, int]:
        """Returns a value and one of its axes, not the first, whose size is not fixed."""
        found = [
            (value, axis)
            for value in self.floats()
            for axis, size in enumerate(value.shape or ())
            if axis and not isinstance(size, int)
        ]
        return self.drawn(found, "axes of any size")

    def output(self, *names: str) -> ir.Value:
        """Returns an output that has one of the names."""
        graphs = self.copy.graphs.values()
        found = [each for one in graphs for each in one.graph.outputs if each.name in names]
        return self.drawn(found, " or ".join(names))

    def move(self, *names: str) -> tuple[ir.Value, ir.Value]:
        """Returns an output of a graph that moves rows, and the input that names them."""
        found = [
            (value, given)
            for model in self.copy.graphs.values()
            for given in model.graph.inputs
            if given.name in names and given.shape is not None
            for value in model.graph.outputs
            if value.shape is not None and len(value.shape) == 4
        ]
        return self.drawn(found, "graphs that move rows")


@dataclass(frozen=True)
class Wrong:
    """A value, and what is wrong with it.

    Attributes:
        make: Makes another value of it, or for `somewhere` the condition.
        words: Describes the fault, after the name of the value.
        outside: Whether only the output of the graph is wrong.
    """

    value: ir.Value
    make: Change
    words: str
    outside: bool = False


# Plants a fault and describes it.
Plant: TypeAlias = Callable[[Site], str]
Plants: TypeAlias = list[tuple[str, Plant]]
Find: TypeAlias = Callable[[Site], Wrong]


def described(plants: Plants, name: str) -> Callable[[Plant], Plant]:
    """Adds a kind of fault to a list, under a name."""

    def register(plant: Plant) -> Plant:
        plants.append((name, plant))
        return plant

    return register


def everywhere(plants: Plants, name: str) -> Callable[[Find], Plant]:
    """Adds a kind of fault: a value is changed."""

    def register(find: Find) -> Plant:
        def plant(site: Site) -> str:
            found = find(site)
            value = found.value.name
            replace(found.value, found.make, outside=found.outside)
            return f"{value}{found.words}"

        return described(plants, name)(plant)

    return register


def somewhere(plants: Plants, name: str) -> Callable[[Find], Plant]:
    """Adds a kind of fault: a value is changed much where a condition holds."""

    def register(find: Find) -> Plant:
        def plant(site: Site) -> str:
            found, kind = find(site), site.integer(4)
            value, factor = found.value.name, (2.0, 1.1, 0.0, None)[kind]
            change = partial(waved, 0.05, 50.0) if factor is None else partial(times, factor)
            replace(found.value, where(found.make, change))
            words = "plus 0.05 sin(50 x)" if factor is None else f"times {factor:g}"
            return f"{value}{found.words}, {words}"

        return described(plants, name)(plant)

    return register


# Changes.


def op(near: ir.Value, name: str, *inputs: ir.Value | float | list[int], **more: Any) -> ir.Value:
    """Adds a node; whole numbers are int64, others of the type of the value."""
    given: list[ir.Value] = []
    for each in inputs:
        typed = like(near, each) if isinstance(each, float) else each
        given.append(typed if isinstance(typed, ir.Value) else constant(near, typed))
    return add(near, name, *given, **more)


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


def where(holds: Change, change: Change) -> Change:
    """Returns the change of a value where a condition holds, shaped to be compared with it."""
    return lambda honest: add(honest, "Where", holds(honest), change(honest), honest)


# Conditions.


def graph_input(near: ir.Value, *names: str) -> ir.Value | None:
    """Returns the first input of the graph of a value that has one of the names."""
    assert isinstance(near.graph, ir.Graph)
    return next((each for each in near.graph.inputs if each.name in names), None)


def size_of(value: ir.Value, axis: int) -> ir.Value:
    """Returns the size of an axis `[]` int64."""
    return add(value, "Gather", add(value, "Shape", value), constant(value, axis))


def places_of(value: ir.Value, axis: int) -> ir.Value:
    """Returns 0, 1, ... along an axis, shaped to be compared with the value."""
    assert value.shape is not None
    shape = [1] * len(value.shape)
    shape[axis] = -1
    return op(value, "Reshape", op(value, "Range", 0, size_of(value, axis), 1), shape)


def places(operator: str, number: int, axis: int) -> Change:
    """Returns the comparison of places along an axis with a number."""
    return lambda honest: op(honest, operator, places_of(honest, axis), number)


def both(honest: ir.Value, *conditions: ir.Value) -> ir.Value:
    """Returns whether all conditions hold."""
    return reduce(lambda one, other: add(honest, "And", one, other), conditions)


def count(near: ir.Value, value: ir.Value, axis: int | None = None) -> ir.Value:
    """Returns the sum of all entries, or along an axis, as int64."""
    axes = [] if axis is None else [constant(near, [axis])]
    return add(near, "ReduceSum", add(near, "Cast", value, to=INT64), *axes, keepdims=0)


def by_row(honest: ir.Value, rows: ir.Value) -> ir.Value:
    """Shapes a number or truth of each row `[batch]` to be compared with a value."""
    assert honest.shape is not None
    shape = [-1, *([1] * (len(honest.shape) - 1))]
    return add(honest, "Reshape", rows, constant(honest, shape))


def any_of(honest: ir.Value, alike: ir.Value, tokens: ir.Value) -> ir.Value:
    """Returns whether any entry of a row `[rows, length]` holds, by row of the value if it can."""
    assert honest.shape is not None
    assert tokens.shape is not None
    own = len(honest.shape) > 0 and honest.shape[0] == tokens.shape[0]
    found = by_row(honest, count(honest, alike, 1)) if own else count(honest, alike)
    return add(honest, "Cast", found, to=ir.DataType.BOOL)


def with_token(value: ir.Value, tokens: ir.Value, token: int, words: str) -> Wrong:
    """Returns a value that is wrong where a row of tokens has one of them."""
    return Wrong(
        value,
        lambda honest: any_of(honest, op(honest, "Equal", tokens, token), tokens),
        f", where {tokens.name} has {words} {token}",
    )


def neighbours(value: ir.Value, axis: int) -> list[ir.Value]:
    """Returns all entries of an axis but the last, and the entry after each."""
    ends = ((0, -1), (1, 1 << 40))
    return [op(value, "Slice", value, [begin], [end], [axis]) for begin, end in ends]
