"""Faults under conditions that seldom hold: of a row, a size, a token or two at once.

`faults.py --rare` plants them; those that hold more often are in `random_faults.py`.
"""

from __future__ import annotations

from collections import Counter
from functools import partial, reduce

import onnx_ir as ir

from planted_values import (
    Change,
    Generator,
    any_of,
    beside_tokens,
    change_where,
    compared,
    drawn,
    float_values,
    graph_input,
    input_axis,
    like,
    neighbours,
    places_of,
    size_of,
    some_axis,
    some_change,
    some_value,
    times,
)
from random_file_faults import Plant, Tokens
from transferry.export.subject.bundle_copy import BundleCopy, add, constant, replace

FULL_BATCHES = (2, 7, 64, 256)
SIZES = ("odd", "a multiple of 3", "24 or more", "40 or more")
MOVES = ("repeats a row", "goes back", "leaves a row out")
TOKENS_IN = "source", "target"


def _odd_places(copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    value, axis = some_axis(copy, generator)
    name, (change, words) = value.name, some_change(generator)
    change_where(value, lambda honest: _odd(honest, places_of(honest, axis)), change)
    return f"{name}, odd entries of axis {axis}, {words}"


def _kinds_of_size(copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    value = some_value(copy, generator)
    source, axis = input_axis(copy, generator, value)
    kind, name, (change, words) = int(generator.integers(4)), value.name, some_change(generator)

    def holds(honest: ir.Value) -> ir.Value:
        size = size_of(source, axis)
        if kind == 0:
            return _odd(honest, size)
        if kind == 1:
            left = add(honest, "Mod", size, constant(honest, 3))
            return add(honest, "Equal", left, constant(honest, 0))
        return add(honest, "GreaterOrEqual", size, constant(honest, (24, 40)[kind - 2]))

    change_where(value, holds, change)
    return f"{name}, where the size of axis {axis} of {source.name} is {SIZES[kind]}, {words}"


def _rare_token(copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    rows = Counter(token for row in tokens for token in {*row})
    rare = sorted(token for token, count in rows.items() if count <= 2)
    value, given = beside_tokens(copy, generator, *TOKENS_IN)
    token, name = drawn(copy, generator, rare, "rare tokens"), value.name
    change, words = some_change(generator)

    def holds(honest: ir.Value) -> ir.Value:
        return any_of(honest, add(honest, "Equal", given, constant(honest, token)), given)

    change_where(value, holds, change)
    return f"{name}, where {given.name} has the rare token {token}, {words}"


def _doubled_token(copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    value, given = beside_tokens(copy, generator, *TOKENS_IN)
    name, (change, words) = value.name, some_change(generator)

    def holds(honest: ir.Value) -> ir.Value:
        return any_of(honest, add(honest, "Equal", *neighbours(given, 1)), given)

    change_where(value, holds, change)
    return f"{name}, where {given.name} has a token twice in a row, {words}"


def _equal_rows(copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    value, given = beside_tokens(copy, generator, *TOKENS_IN)
    name, (change, words) = value.name, some_change(generator)

    def holds(honest: ir.Value) -> ir.Value:
        alike = add(honest, "Equal", *neighbours(given, 0))
        each = add(honest, "Cast", alike, to=ir.DataType.INT32)
        rows = add(honest, "ReduceMin", each, constant(honest, [1]), keepdims=0)
        found = add(honest, "ReduceSum", rows, keepdims=0)
        return add(honest, "Cast", found, to=ir.DataType.BOOL)

    change_where(value, holds, change)
    return f"{name}, where two rows of {given.name} are equal, {words}"


def _last_of_full(copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    value, least = some_value(copy, generator), int(generator.choice(FULL_BATCHES))
    name, (change, words) = value.name, some_change(generator)

    def holds(honest: ir.Value) -> ir.Value:
        size = size_of(honest, 0)
        last = add(honest, "Sub", size, constant(honest, 1))
        full = add(honest, "GreaterOrEqual", size, constant(honest, least))
        return add(honest, "And", add(honest, "Equal", places_of(honest, 0), last), full)

    change_where(value, holds, change)
    return f"{name}, the last of {least} rows or more, {words}"


def _two_places(copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    """A row and a place, a head and a place, or other entries of two axes."""
    found = [value for value in float_values(copy) if value.shape and len(value.shape) > 1]
    value = drawn(copy, generator, found, "values of two axes")
    assert value.shape is not None
    axes = sorted(int(each) for each in generator.choice(len(value.shape), 2, replace=False))
    places, name = [int(each) for each in generator.integers(0, 12, size=2)], value.name
    change, words = some_change(generator)

    def holds(honest: ir.Value) -> ir.Value:
        both = (
            compared("Equal", place, partial(places_of, axis=axis))(honest)
            for axis, place in zip(axes, places, strict=True)
        )
        return reduce(lambda one, other: add(honest, "And", one, other), both)

    change_where(value, holds, change)
    return f"{name}, entries {places} of axes {axes}, {words}"


def _moved_rows(copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    """Where a search moves rows in one way alone."""
    found = [
        (value, given)
        for model in copy.graphs.values()
        for given in model.graph.inputs
        if given.name in ("rows", "index") and given.shape is not None
        for value in model.graph.outputs
        if value.shape is not None and len(value.shape) == 4
    ]
    value, given = drawn(copy, generator, found, "graphs that move rows")
    kind, name = int(generator.integers(3)), value.name
    change = partial(times, (0.0, 1.1)[generator.integers(2)])

    def holds(honest: ir.Value) -> ir.Value:
        rows = add(honest, "Reshape", given, constant(honest, [-1]))
        before, after = neighbours(rows, 0)
        one = constant(honest, 1)
        further = add(honest, "Sub", after, add(honest, "Add", before, one))
        alike = {
            0: lambda: add(honest, "Equal", before, after),
            1: lambda: add(honest, "Greater", before, after),
            2: lambda: add(honest, "Greater", further, constant(honest, 0)),
        }[kind]()
        whole = add(honest, "Cast", alike, to=ir.DataType.INT32)
        return add(honest, "Cast", add(honest, "ReduceSum", whole, keepdims=0), to=ir.DataType.BOOL)

    def wrong(honest: ir.Value) -> ir.Value:
        return add(honest, "Where", holds(honest), change(honest), honest)

    replace(value, wrong, outside=True)
    return f"{name}, where {given.name} {MOVES[kind]}, times {change.args[0]:g}"


def _one_label(copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    """One token of the vocabulary, or one label, has other logits."""
    value = _output(copy, generator, "logits", "head")
    row = tokens[int(generator.integers(len(tokens)))]
    assert value.shape is not None
    axis, most = len(value.shape) - 1, value.shape[-1]
    label = int(row[int(generator.integers(len(row)))]) % (most if isinstance(most, int) else 2)
    at = compared("Equal", label, lambda honest: places_of(honest, axis))
    return _changed_output(value, at, generator) + f" at label {label}"


def _near_tie(copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    """Logits just below the best one are raised: only close choices change."""
    value, gap = _output(copy, generator, "logits"), float(generator.choice((0.03, 0.2)))

    def near(honest: ir.Value) -> ir.Value:
        best = add(honest, "ReduceMax", honest, constant(honest, [-1]), keepdims=1)
        below = add(honest, "Sub", best, honest)
        least, most = like(honest, 0.0), like(honest, gap)
        two = add(honest, "Greater", below, least), add(honest, "Less", below, most)
        return add(honest, "And", *two)

    def wrong(honest: ir.Value) -> ir.Value:
        raised = add(honest, "Add", honest, like(honest, gap))
        return add(honest, "Where", near(honest), raised, honest)

    name = value.name
    replace(value, wrong, outside=True)
    return f"{name} within {gap:g} of the best, plus {gap:g}"


def _short_rows(copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    """Rows of a few tokens alone: the empty text, one word."""
    value, most = some_value(copy, generator, "source_mask"), int(generator.integers(1, 5))
    given = graph_input(value, "source_mask")
    name, (change, words) = value.name, some_change(generator)
    if given is None or not value.shape or not given.shape or value.shape[0] != given.shape[0]:
        raise copy.absent("rows beside a mask")

    def holds(honest: ir.Value) -> ir.Value:
        whole = add(honest, "Cast", given, to=ir.DataType.INT64)
        sums = add(honest, "ReduceSum", whole, constant(honest, [1]), keepdims=0)
        assert honest.shape is not None
        shape = constant(honest, [-1, *([1] * (len(honest.shape) - 1))])
        sums = add(honest, "Reshape", sums, shape)
        return add(honest, "LessOrEqual", sums, constant(honest, most))

    change_where(value, holds, change)
    return f"{name}, rows of at most {most} tokens, {words}"


def _cached_prefix(copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    """Where several tokens are read at once after others."""
    value = some_value(copy, generator, "target")
    given = graph_input(value, "target")
    assert given is not None
    past = graph_input(value, "past.0.keys")
    first = graph_input(value, "positions")
    name, (change, words) = value.name, some_change(generator)
    if past is None and first is None:
        raise copy.absent("a cache")

    def holds(honest: ir.Value) -> ir.Value:
        several = add(honest, "Greater", size_of(given, 1), constant(honest, 1))
        if first is not None:
            length = add(honest, "ReduceMax", first, keepdims=0)
            length = add(honest, "Sub", length, size_of(given, 1))
        else:
            assert past is not None
            length = add(honest, "Sub", size_of(past, 2), constant(honest, 1))
        after = add(honest, "GreaterOrEqual", length, constant(honest, 0))
        return add(honest, "And", several, after)

    change_where(value, holds, change)
    return f"{name}, where several tokens follow a cache, {words}"


def _large(copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    found = [each for each in float_values(copy) if each.dtype == ir.DataType.FLOAT]
    value, bound = drawn(copy, generator, found, "floats"), float(generator.choice((3, 6, 12)))
    name, (change, words) = value.name, some_change(generator)
    change_where(
        value,
        lambda honest: add(honest, "Greater", add(honest, "Abs", honest), like(honest, bound)),
        change,
    )
    return f"{name} beyond {bound:g}, {words}"


def _odd(near: ir.Value, number: ir.Value) -> ir.Value:
    left = add(near, "Mod", number, constant(near, 2))
    return add(near, "Equal", left, constant(near, 1))


def _output(copy: BundleCopy, generator: Generator, *names: str) -> ir.Value:
    graphs = copy.graphs.values()
    found = [each for one in graphs for each in one.graph.outputs if each.name in names]
    return drawn(copy, generator, found, " or ".join(names))


def _changed_output(value: ir.Value, at: Change, generator: Generator) -> str:
    name, factor = value.name, float(generator.choice((1.02, 0.9)))

    def wrong(honest: ir.Value) -> ir.Value:
        return add(honest, "Where", at(honest), times(factor, honest), honest)

    replace(value, wrong, outside=bool(generator.integers(2)))
    return f"{name} times {factor:g}"


PLANTS: tuple[tuple[str, Plant], ...] = (
    ("rare: odd places", _odd_places),
    ("rare: kinds of size", _kinds_of_size),
    ("rare: a token", _rare_token),
    ("rare: a token twice", _doubled_token),
    ("rare: equal rows", _equal_rows),
    ("rare: last of a full batch", _last_of_full),
    ("rare: two places", _two_places),
    ("rare: moved rows", _moved_rows),
    ("rare: one label", _one_label),
    ("rare: near ties", _near_tie),
    ("rare: short rows", _short_rows),
    ("rare: a cached prefix", _cached_prefix),
    ("rare: large values", _large),
)
