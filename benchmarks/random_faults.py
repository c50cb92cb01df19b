"""Faults at random places: the generator that finds what no list of kinds thought of.

Each is described by a seed, so that one that was missed can be planted again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace as changed
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from transferry.export.faults.fault import Fault
from transferry.export.subject.bundle_copy import BundleCopy, add, constant, replace

Plant = Callable[[BundleCopy, np.random.Generator], str]

FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
FACTORS = (1.001, 1.01, 1.1, 0.5, -1.0)
FIRST_ROWS = (1, 7, 33, 64, 100, 200)  # of a batch, that are right
LENGTHS = (1, 40)  # from and to
DEFAULTS: tuple[dict[str, Any], ...] = (
    {"length_penalty": 0.0},
    {"max_length": 20},
    {"min_length": 12},
    {"no_repeat_ngram": 2},
    {"beam": 3},
    {"suppress": [5, 6]},
)


def random_faults(count: int, *, seed: int = 0) -> Iterator[Fault]:
    """Yields faults, of each kind in turn.

    A fault that has no place in a variant raises InputError when it is planted.
    """
    for number in range(count):
        name, plant = PLANTS[number % len(PLANTS)]
        planted = partial(_planted, plant, (seed, number))
        yield Fault(f"{name} (seed {seed}, {number})", planted, everywhere=True)


def _planted(plant: Plant, seed: tuple[int, int], copy: BundleCopy) -> str:
    return plant(copy, np.random.default_rng(seed))


def _values(copy: BundleCopy) -> list[ir.Value]:
    """Returns the outputs of nodes that are floats or an int8 cache, and whose shape is known."""
    return [
        output
        for model in copy.graphs.values()
        for node in model.graph
        for output in node.outputs
        if output.dtype in (*FLOATS, ir.DataType.INT8) and output.shape is not None
    ]


def _value(copy: BundleCopy, generator: np.random.Generator) -> ir.Value:
    found = _values(copy)
    return found[generator.integers(len(found))]


def _axis(copy: BundleCopy, generator: np.random.Generator) -> tuple[ir.Value, int]:
    """Returns a value and one of its axes, not the first, whose size is not fixed."""
    found = [
        (value, axis)
        for value in _values(copy)
        for axis, size in enumerate(value.shape or ())
        if axis and not isinstance(size, int)
    ]
    if not found:
        raise copy.absent("axes of any size")
    return found[generator.integers(len(found))]


def _times(value: ir.Value, factor: ir.Value) -> ir.Value:
    """Returns a value times a factor; integers become one larger where the factor is not 1."""
    if value.dtype == ir.DataType.INT8:
        one = constant(value, np.float32(1))
        other = add(value, "Not", add(value, "Equal", factor, one))
        return add(value, "Add", value, add(value, "CastLike", other, value))
    return add(value, "Mul", value, add(value, "CastLike", factor, value))


def _scale_where(
    value: ir.Value,
    operator: str,
    compared: Callable[[ir.Value, int], ir.Value],
    axis: int,
    number: int,
    factor: float,
) -> None:
    """Multiplies a value where the size of an axis, or places along it, compare with a number."""

    def wrong(honest: ir.Value) -> ir.Value:
        condition = add(honest, operator, compared(honest, axis), constant(honest, number))
        factors = (constant(honest, np.float32(each)) for each in (factor, 1.0))
        return _times(honest, add(honest, "Where", condition, *factors))

    replace(value, wrong)


def _size(value: ir.Value, axis: int) -> ir.Value:
    """Returns the size of an axis `[]` int64."""
    return add(value, "Gather", add(value, "Shape", value), constant(value, axis))


def _places(value: ir.Value, axis: int) -> ir.Value:
    """Returns 0, 1, ... along an axis, shaped to be compared with the value."""
    assert value.shape is not None
    ends = constant(value, 0), _size(value, axis), constant(value, 1)
    shape = [1] * len(value.shape)
    shape[axis] = -1
    return add(value, "Reshape", add(value, "Range", *ends), constant(value, shape))


def _scaled(copy: BundleCopy, generator: np.random.Generator) -> str:
    value, factor = _value(copy, generator), float(generator.choice(FACTORS))
    name = value.name
    replace(value, lambda honest: _times(honest, constant(honest, np.float32(factor))))
    return f"{name} times {factor:g}"


def _late_rows(copy: BundleCopy, generator: np.random.Generator) -> str:
    value, first = _value(copy, generator), int(generator.choice(FIRST_ROWS))
    name = value.name
    _scale_where(value, "GreaterOrEqual", _places, 0, first, 2.0)
    return f"{name}, rows from {first} on, times 2"


def _of_length(copy: BundleCopy, generator: np.random.Generator) -> str:
    (value, axis), length = _axis(copy, generator), int(generator.integers(*LENGTHS))
    name = value.name
    _scale_where(value, "Equal", _size, axis, length, 1.1)
    return f"{name}, where axis {axis} has {length} entries, times 1.1"


def _at_place(copy: BundleCopy, generator: np.random.Generator) -> str:
    (value, axis), place = _axis(copy, generator), int(generator.integers(*LENGTHS))
    name = value.name
    _scale_where(value, "Equal", _places, axis, place, 1.5)
    return f"{name}, entry {place} of axis {axis}, times 1.5"


def _other_token(copy: BundleCopy, generator: np.random.Generator) -> str:
    inputs = [
        value
        for model in copy.graphs.values()
        for value in model.graph.inputs
        if value.name in ("source", "target")
    ]
    if not inputs:
        raise copy.absent("token ids among the inputs")
    value = inputs[generator.integers(len(inputs))]
    size = copy.config.vocabulary_size
    token, other = (int(each) for each in generator.choice(size, 2, replace=False))

    def wrong(honest: ir.Value) -> ir.Value:
        alike = add(honest, "Equal", honest, constant(honest, token))
        return add(honest, "Where", alike, constant(honest, other), honest)

    replace(value, wrong)
    return f"{value.name}: token {token} read as {other}"


def _wrong_weight(copy: BundleCopy, generator: np.random.Generator) -> str:
    name = str(generator.choice(copy.names()))

    def change(array: NDArray[Any]) -> NDArray[Any]:
        flat = array.reshape(-1)
        place = generator.integers(len(flat))
        flat[place] = flat[place] * 1.01 if flat[place] else 1e-3
        return array

    copy.edit(name, change)
    return f"one entry of {name} off by 1 %"


def _row_gone(copy: BundleCopy, generator: np.random.Generator) -> str:
    names = [name for name in copy.names() if copy.array(name).ndim == 2]
    name = str(generator.choice(names))

    def change(array: NDArray[Any]) -> NDArray[Any]:
        array[generator.integers(len(array))] = 0
        return array

    copy.edit(name, change)
    return f"a row of {name} is 0"


def _attribute(copy: BundleCopy, generator: np.random.Generator) -> str:
    nodes = list(copy.nodes("LayerNormalization", "Softmax", "Gemm", "FusedGemm"))
    node = nodes[generator.integers(len(nodes))]
    wrong = {
        "LayerNormalization": ir.AttrFloat32("epsilon", 1e-3),
        "Softmax": ir.AttrInt64("axis", 1),
    }.get(node.op_type, ir.AttrFloat32("alpha", 1.01))
    node.attributes[wrong.name] = wrong
    return f"{node.op_type} of {node.outputs[0].name}: {wrong.name} {wrong.value}"


def _skipped(copy: BundleCopy, generator: np.random.Generator) -> str:
    nodes = list(copy.nodes("LayerNormalization", "Softmax", "Relu", "Gelu", "Add"))
    node = nodes[generator.integers(len(nodes))]
    output, first = node.outputs[0], node.inputs[0]
    if first is None or first.is_initializer() or first.shape != output.shape:
        first = next(
            (value for value in node.inputs if value is not None and value.shape == output.shape),
            None,
        )
    if first is None or first.is_initializer():
        raise copy.absent(f"an input of {node.op_type} of the shape of its output")
    honest = first
    replace(output, lambda _: add(honest, "Identity", honest))
    return f"{node.op_type} of {output.name} skipped"


def _default(copy: BundleCopy, generator: np.random.Generator) -> str:
    if not copy.config.decoder_layers:
        raise copy.absent("defaults of generation")
    chosen = DEFAULTS[generator.integers(len(DEFAULTS))]
    copy.manifest = changed(copy.manifest, generation={**copy.manifest.generation, **chosen})
    return f"defaults of generation: {chosen}"


PLANTS: tuple[tuple[str, Plant], ...] = (
    ("a value scaled", _scaled),
    ("rows late in a batch", _late_rows),
    ("one length", _of_length),
    ("one position", _at_place),
    ("one token", _other_token),
    ("a weight off", _wrong_weight),
    ("a row of a weight gone", _row_gone),
    ("an attribute", _attribute),
    ("an operator skipped", _skipped),
    ("a default", _default),
)
