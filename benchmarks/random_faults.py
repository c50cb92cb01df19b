"""Faults at random places: the generator that finds what no list of kinds thought of.

Each is described by a seed, so that one that was missed can be planted again. Those of graphs are
here, those of weights and other files in `random_file_faults.py`, and those under conditions that
seldom hold in `rare_faults.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import onnx_ir as ir

from planted_values import (
    FLOATS,
    WHOLE,
    Generator,
    any_of,
    beside_tokens,
    change_everywhere,
    change_where,
    clipped,
    compared,
    drawn,
    graph_input,
    input_axis,
    like,
    narrowed,
    neighbours,
    places_of,
    size_of,
    some_axis,
    some_change,
    some_value,
    times,
    waved,
)
from random_file_faults import FILE_PLANTS, Plant, Tokens
from transferry.export.faults.fault import Fault
from transferry.export.subject.bundle_copy import BundleCopy, add, constant, replace

FACTORS = (1.001, 1.01, 1.1, 0.5, -1.0)
FIRST_ROWS = (1, 7, 8, 33, 64, 100, 200)  # of a batch, that are right
LENGTHS = (1, 40)  # from and to
BOUNDS = (0.5, 1.0, 2.0, 4.0)
# Operators that take the shape of their input, and others in their place.
OPERATORS = {
    "Relu": ("Gelu", "Abs"),
    "Gelu": ("Relu", "Tanh"),
    "Sigmoid": ("HardSigmoid", "Tanh"),
    "Softmax": ("Sigmoid", "Exp"),
    "Add": ("Sub", "Max"),
    "Mul": ("Add", "Max"),
    "Div": ("Mul", "Sub"),
    "Greater": ("GreaterOrEqual", "Less"),
    "Not": ("Identity",),
    "ReduceMax": ("ReduceMin", "ReduceMean"),
    "ReduceSum": ("ReduceMean", "ReduceMax"),
    "ReduceMean": ("ReduceMax", "ReduceSum"),
    "Cos": ("Sin",),
    "Sin": ("Cos",),
}


def random_faults(
    count: int, tokens: Tokens, *, seed: int = 0, plants: Sequence[tuple[str, Plant]] = ()
) -> Iterator[Fault]:
    """Yields faults, of each kind in turn.

    A fault that has no place in a variant raises InputError when it is planted.

    Args:
        count: Number of faults.
        tokens: Token ids of texts, from which faults of single tokens and pairs draw.
        seed: Seed of all of them.
        plants: Kinds. Default: those of this module and of files.
    """
    plants = plants or (*PLANTS, *FILE_PLANTS)
    for number in range(count):
        name, plant = plants[number % len(plants)]
        planted = partial(_planted, plant, (seed, number), tokens)
        yield Fault(f"{name} (seed {seed}, {number})", planted, everywhere=True)


def _planted(plant: Plant, seed: tuple[int, int], tokens: Tokens, copy: BundleCopy) -> str:
    return plant(copy, np.random.default_rng(seed), tokens)


# Values, and their changes.


# Kinds.


def _scaled(copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    value, factor = some_value(copy, generator), float(generator.choice(FACTORS))
    name = value.name
    change_everywhere(value, partial(times, factor))
    return f"{name} times {factor:g}"


def _noisy(copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    value = some_value(copy, generator)
    name, size = value.name, float(generator.choice((1e-3, 1e-2)))
    change_everywhere(value, partial(waved, size, 1e4))
    return f"{name} plus {size:g} sin(10000 x)"


def _nonlinear_output(copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    names = ("logits", "hidden", "head")
    found = [
        value
        for each in copy.graphs.values()
        for value in each.graph.outputs
        if value.name in names
    ]
    value = drawn(copy, generator, found, "logits")
    name = value.name
    change_everywhere(value, partial(waved, 0.008, 50.0))
    return f"{name} plus 0.008 sin(50 x)"


def _lower_precision(copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    value = some_value(copy, generator)
    if value.dtype in WHOLE:
        raise copy.absent("a lower precision of integers")
    kind = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)[generator.integers(2)]
    name = value.name
    change_everywhere(value, partial(narrowed, kind))
    return f"{name} in {kind.name}"


def _clip(copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    value, bound = some_value(copy, generator), float(generator.choice(BOUNDS))
    name = value.name
    bound *= 50 if value.dtype in WHOLE else 1
    change_everywhere(value, partial(clipped, bound))
    return f"{name} clipped at {bound:g}"


def _late_rows(copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    value, first = some_value(copy, generator), int(generator.choice(FIRST_ROWS))
    name, (change, words) = value.name, some_change(generator)
    change_where(
        value, compared("GreaterOrEqual", first, lambda honest: places_of(honest, 0)), change
    )
    return f"{name}, rows from {first} on, {words}"


def _embedding_late(copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    first = int(generator.choice(FIRST_ROWS))
    found = [
        node.outputs[0]
        for node in copy.nodes("Gather")
        if node.inputs[0] in copy.named("embedding.weight")
    ]
    value = drawn(copy, generator, found, "embedded tokens")
    at = compared("GreaterOrEqual", first, lambda honest: places_of(honest, 0))
    change_where(value, at, partial(times, 2.0))
    return f"the embedding of rows from {first} on is doubled"


def _of_length(copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    (value, axis), length = some_axis(copy, generator), int(generator.integers(*LENGTHS))
    name, (change, words) = value.name, some_change(generator)
    change_where(value, compared("Equal", length, lambda honest: size_of(honest, axis)), change)
    return f"{name}, where axis {axis} has {length} entries, {words}"


def _at_place(copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    (value, axis), place = some_axis(copy, generator), int(generator.integers(*LENGTHS))
    name, (change, words) = value.name, some_change(generator)
    change_where(value, compared("Equal", place, lambda honest: places_of(honest, axis)), change)
    return f"{name}, entry {place} of axis {axis}, {words}"


def _of_input_size(copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    """Where a graph is run with a batch, a source or a past of one size."""
    value = some_value(copy, generator)
    (source, axis), size = input_axis(copy, generator, value), int(generator.integers(*LENGTHS))
    name, (change, words) = value.name, some_change(generator)
    change_where(value, compared("Equal", size, lambda honest: size_of(source, axis)), change)
    return f"{name}, where axis {axis} of {source.name} has {size} entries, {words}"


def _with_token(copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    value, given = beside_tokens(copy, generator, "source", "target")
    row = tokens[int(generator.integers(len(tokens)))]
    token = int(row[int(generator.integers(len(row)))])
    name, (change, words) = value.name, some_change(generator)

    def holds(honest: ir.Value) -> ir.Value:
        return any_of(honest, add(honest, "Equal", given, constant(honest, token)), given)

    change_where(value, holds, change)
    return f"{name}, where {given.name} has token {token}, {words}"


def _with_pair(copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    value, given = beside_tokens(copy, generator, "source")
    pairs = list(pairwise(tokens[int(generator.integers(len(tokens)))]))
    one, other = (int(each) for each in pairs[generator.integers(len(pairs))])
    name, (change, words) = value.name, some_change(generator)

    def holds(honest: ir.Value) -> ir.Value:
        first, after = neighbours(given, 1)
        alike = (
            add(honest, "Equal", value, constant(honest, token))
            for value, token in ((first, one), (after, other))
        )
        return any_of(honest, add(honest, "And", *alike), given)

    change_where(value, holds, change)
    return f"{name}, where {given.name} has tokens {one}, {other}, {words}"


def _padded(copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    value = some_value(copy, generator, "source_mask", "past_mask")
    given = graph_input(value, "source_mask", "past_mask")
    assert given is not None
    name, (change, words) = value.name, some_change(generator)
    change_where(value, lambda honest: any_of(honest, add(honest, "Not", given), given), change)
    return f"{name}, where {given.name} has padding, {words}"


def _other_token(copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    inputs = [
        value
        for model in copy.graphs.values()
        for value in model.graph.inputs
        if value.name in ("source", "target")
    ]
    value = drawn(copy, generator, inputs, "token ids among the inputs")
    size = copy.config.vocabulary_size
    token, other = (int(each) for each in generator.choice(size, 2, replace=False))

    def wrong(honest: ir.Value) -> ir.Value:
        alike = add(honest, "Equal", honest, constant(honest, token))
        return add(honest, "Where", alike, constant(honest, other), honest)

    replace(value, wrong)
    return f"{value.name}: token {token} read as {other}"


def _wrong_index(copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    """One entry of the input of rows, columns, cells or positions is off by one."""
    found = [
        value
        for model in copy.graphs.values()
        for value in model.graph.inputs
        if value.dtype == ir.DataType.INT64 and value.name not in ("source", "target")
        if value.shape is not None and len(value.shape)
    ]
    value = drawn(copy, generator, found, "indices among the inputs")
    place = int(generator.integers(6))
    by = int(generator.choice((-1, 1)))

    def wrong(honest: ir.Value) -> ir.Value:
        zero, moved = (
            constant(honest, 0),
            add(honest, "Add", honest, constant(honest, by)),
        )
        return add(honest, "Max", moved, zero)

    change_where(value, compared("Equal", place, lambda honest: places_of(honest, 0)), wrong)
    return f"{value.name}, entry {place}, plus {by}"


def _wrong_integer(copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    """A position, size or index that a graph computes is one larger."""
    found = [
        output
        for model in copy.graphs.values()
        for node in model.graph
        for output in node.outputs
        if output.dtype == ir.DataType.INT64
    ]
    value = drawn(copy, generator, found, "integers")
    name = value.name
    change_everywhere(value, lambda honest: add(honest, "Add", honest, constant(honest, 1)))
    return f"{name} plus 1"


def _output_entry(copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    """One entry of the last axis of an output of a graph: a segment, a candidate, a channel."""
    found = [
        value
        for model in copy.graphs.values()
        for value in model.graph.outputs
        if value.shape is not None and len(value.shape) and value.dtype is not None
    ]
    value = drawn(copy, generator, found, "outputs")
    assert value.shape is not None
    axis, place = len(value.shape) - 1, int(generator.integers(8))
    name = value.name
    at = compared("Equal", place, lambda honest: places_of(honest, axis))

    def wrong(honest: ir.Value) -> ir.Value:
        if honest.dtype in FLOATS:
            return times(1.01, honest)
        return add(honest, "Add", honest, like(honest, 1.0))

    def changed(honest: ir.Value) -> ir.Value:
        return add(honest, "Where", at(honest), wrong(honest), honest)

    replace(value, changed, outside=True)
    return f"entry {place} of the last axis of output {name}: 1 % or 1 more"


def _stale_rows(copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    """After a selection or a move, one row of one state is the copy of the row before it."""
    found = [
        value
        for name, model in copy.graphs.items()
        if name in ("select", "move", "gather", "place")
        for value in model.graph.outputs
        if value.shape is not None and len(value.shape)
    ]
    value = drawn(copy, generator, found, "graphs that move rows")
    row = int(generator.integers(1, 8))
    name = value.name

    def wrong(honest: ir.Value) -> ir.Value:
        places = add(honest, "Squeeze", places_of(honest, 0), _others_of(honest))
        at = add(honest, "Equal", places, constant(honest, row))
        before = add(honest, "Sub", places, constant(honest, 1))
        return add(honest, "Gather", honest, add(honest, "Where", at, before, places), axis=0)

    replace(value, wrong, outside=True)
    return f"row {row} of {name} is row {row - 1}"


def _others_of(value: ir.Value) -> ir.Value:
    assert value.shape is not None
    return constant(value, list(range(1, len(value.shape))))


def _attribute(copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    """Any attribute of any operator: a float 1 % or an epsilon 100 times larger, an integer off."""
    found = [
        (node, attribute)
        for model in copy.graphs.values()
        for node in model.graph.all_nodes()
        for attribute in node.attributes.values()
        if attribute.type in (ir.AttributeType.FLOAT, ir.AttributeType.INT, ir.AttributeType.INTS)
        and node.op_type not in ("Cast", "Constant")
    ]
    if not found:
        raise copy.absent("attributes")
    kinds = sorted({node.op_type for node, _ in found})
    kind = kinds[generator.integers(len(kinds))]
    found = [each for each in found if each[0].op_type == kind]
    node, attribute = drawn(copy, generator, found, "attributes")
    name, before = attribute.name, attribute.value
    wrong: Any
    if attribute.type == ir.AttributeType.FLOAT:
        wrong = ir.AttrFloat32(name, before * (100 if name == "epsilon" else 1.01))
    elif attribute.type == ir.AttributeType.INT:
        wrong = ir.AttrInt64(name, 1 - before if before in (0, 1) else before - 1)
    else:
        wrong = ir.AttrInt64s(name, [*before[:-2], *reversed(before[-2:])])
    if wrong.value == before:
        raise copy.absent(f"another {name}")
    node.attributes[name] = wrong
    return f"{name} of {kind}, output {node.outputs[0].name}: {before} became {wrong.value}"


def _operator(copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    nodes = [node for node in copy.nodes(*OPERATORS) if not node.attributes]
    node = drawn(copy, generator, nodes, "operators with a twin")
    others = OPERATORS[node.op_type]
    other, name = others[generator.integers(len(others))], node.outputs[0].name
    replace(node.outputs[0], lambda honest: add(honest, other, *node.inputs))
    return f"{node.op_type} of {name} is {other}"


def _rewired(copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    """An input of an operator is another value of the same type and shape."""
    found = []
    for model in copy.graphs.values():
        earlier: dict[Any, list[ir.Value]] = {}
        for node in model.graph:
            for index, value in enumerate(node.inputs):
                if value is not None and value.shape is not None and not value.is_initializer():
                    alike = earlier.get((value.dtype, str(value.shape)), [])
                    found += [(node, index, other) for other in alike if other is not value]
            for output in node.outputs:
                if output.shape is not None:
                    earlier.setdefault((output.dtype, str(output.shape)), []).append(output)
    node, index, other = drawn(copy, generator, found, "values of one shape")
    before = node.inputs[index]
    node.replace_input_with(index, other)
    name = node.outputs[0].name
    return f"{node.op_type} of {name} reads {other.name} for {before and before.name}"


def _skipped(copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    nodes = [
        node
        for node in copy.nodes("Add", "Mul", "LayerNormalization", "Relu", "Gelu", "Softmax")
        if node.outputs[0].shape is not None
    ]
    node = drawn(copy, generator, nodes, "operators to skip")
    output = node.outputs[0]
    alike = [v for v in node.inputs if v is not None and str(v.shape) == str(output.shape)]
    first = alike[0] if alike else node.inputs[0]
    if first is None or first.is_initializer():
        raise copy.absent(f"an input of {node.op_type} of the shape of its output")
    honest = first
    replace(output, lambda _: add(honest, "Identity", honest))
    return f"{node.op_type} of {output.name} skipped"


PLANTS: tuple[tuple[str, Plant], ...] = (
    ("a value scaled", _scaled),
    ("noise by value", _noisy),
    ("a nonlinear output", _nonlinear_output),
    ("a lower precision", _lower_precision),
    ("a value clipped", _clip),
    ("rows late in a batch", _late_rows),
    ("embeddings late in a batch", _embedding_late),
    ("one length", _of_length),
    ("one position", _at_place),
    ("one size of an input", _of_input_size),
    ("with one token", _with_token),
    ("with one pair of tokens", _with_pair),
    ("with padding", _padded),
    ("one token", _other_token),
    ("an index off", _wrong_index),
    ("an integer off", _wrong_integer),
    ("an entry of an output", _output_entry),
    ("stale rows", _stale_rows),
    ("an attribute", _attribute),
    ("another operator", _operator),
    ("another edge", _rewired),
    ("an operator skipped", _skipped),
)
