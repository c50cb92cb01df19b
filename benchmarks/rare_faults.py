"""Faults under conditions that seldom hold: of a row, a size, a token or two at once.

`faults.py --rare` plants them; those that hold more often are in `random_faults.py`.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

import onnx_ir as ir

import planted_values as on
from planted_values import Site, Wrong, everywhere, op, somewhere
from transferry.export.subject.bundle_copy import add

PLANTS: on.Plants = []
FULL_BATCHES = (2, 7, 64, 256)
SIZES = ("odd", "a multiple of 3", "24 or more", "40 or more")
MOVES = ("repeats a row", "goes back", "leaves a row out")


def _left(near: ir.Value, number: ir.Value, divisor: int, rest: int) -> ir.Value:
    return op(near, "Equal", op(near, "Mod", number, divisor), rest)


def _some(near: ir.Value, truths: ir.Value) -> ir.Value:
    return add(near, "Cast", on.count(near, truths), to=ir.DataType.BOOL)


@somewhere(PLANTS, "rare: odd places")
def _odd_places(site: Site) -> Wrong:
    value, axis = site.axis()
    words = f", odd entries of axis {axis}"
    return Wrong(value, lambda honest: _left(honest, on.places_of(honest, axis), 2, 1), words)


@somewhere(PLANTS, "rare: kinds of size")
def _kinds_of_size(site: Site) -> Wrong:
    value = site.value()
    source, axis = site.input_axis(value)
    kind = site.integer(4)

    def holds(honest: ir.Value) -> ir.Value:
        size = on.size_of(source, axis)
        if kind < 2:
            return _left(honest, size, (2, 3)[kind], (1, 0)[kind])
        return op(honest, "GreaterOrEqual", size, (24, 40)[kind - 2])

    words = f", where the size of axis {axis} of {source.name} is {SIZES[kind]}"
    return Wrong(value, holds, words)


@somewhere(PLANTS, "rare: a token")
def _rare_token(site: Site) -> Wrong:
    rows = Counter(token for row in site.tokens for token in {*row})
    rare = sorted(token for token, count in rows.items() if count <= 2)
    value, given = site.beside_tokens(*on.TOKENS_IN)
    token = site.drawn(rare, "rare tokens")
    return on.with_token(value, given, token, "the rare token")


@somewhere(PLANTS, "rare: a token twice")
def _doubled_token(site: Site) -> Wrong:
    value, given = site.beside_tokens(*on.TOKENS_IN)
    return Wrong(
        value,
        lambda honest: on.any_of(honest, op(honest, "Equal", *on.neighbours(given, 1)), given),
        f", where {given.name} has a token twice in a row",
    )


@somewhere(PLANTS, "rare: equal rows")
def _equal_rows(site: Site) -> Wrong:
    value, given = site.beside_tokens(*on.TOKENS_IN)

    def holds(honest: ir.Value) -> ir.Value:
        alike = add(honest, "Cast", op(honest, "Equal", *on.neighbours(given, 0)), to=on.INT64)
        rows = op(honest, "ReduceMin", alike, [1], keepdims=0)
        return op(honest, "Cast", op(honest, "ReduceSum", rows, keepdims=0), to=ir.DataType.BOOL)

    return Wrong(value, holds, f", where two rows of {given.name} are equal")


@somewhere(PLANTS, "rare: last of a full batch")
def _last_of_full(site: Site) -> Wrong:
    value, least = site.value(), site.choice(FULL_BATCHES)

    def holds(honest: ir.Value) -> ir.Value:
        size = on.size_of(honest, 0)
        last = op(honest, "Equal", on.places_of(honest, 0), op(honest, "Sub", size, 1))
        return on.both(honest, last, op(honest, "GreaterOrEqual", size, least))

    return Wrong(value, holds, f", the last of {least} rows or more")


@somewhere(PLANTS, "rare: two places")
def _two_places(site: Site) -> Wrong:
    """A row and a place, a head and a place, or other entries of two axes."""
    found = [value for value in site.floats() if value.shape and len(value.shape) > 1]
    value = site.drawn(found, "values of two axes")
    assert value.shape is not None
    axes = sorted(int(each) for each in site.generator.choice(len(value.shape), 2, replace=False))
    at = [int(each) for each in site.generator.integers(0, 12, size=2)]
    return Wrong(
        value,
        lambda honest: on.both(
            honest, *(on.places("Equal", *pair)(honest) for pair in zip(at, axes, strict=True))
        ),
        f", entries {at} of axes {axes}",
    )


@everywhere(PLANTS, "rare: moved rows")
def _moved_rows(site: Site) -> Wrong:
    """Where a search moves rows in one way alone."""
    value, given = site.move("rows", "index")
    kind = site.integer(3)
    factor = (0.0, 1.1)[site.integer(2)]

    def holds(honest: ir.Value) -> ir.Value:
        before, after = on.neighbours(op(honest, "Reshape", given, [-1]), 0)
        if kind == 2:
            after = op(honest, "Sub", after, op(honest, "Add", before, 1))
            return _some(honest, op(honest, "Greater", after, 0))
        return _some(honest, op(honest, ("Equal", "Greater")[kind], before, after))

    words = f", where {given.name} {MOVES[kind]}, times {factor:g}"
    return Wrong(value, on.where(holds, partial(on.times, factor)), words, outside=True)


@everywhere(PLANTS, "rare: one label")
def _one_label(site: Site) -> Wrong:
    """One token of the vocabulary, or one label, has other logits."""
    value = site.output("logits", "head")
    row = site.tokens[site.integer(len(site.tokens))]
    assert value.shape is not None
    axis, most = len(value.shape) - 1, value.shape[-1]
    label = int(row[site.integer(len(row))]) % (most if isinstance(most, int) else 2)
    factor = site.choice((1.02, 0.9))
    change = on.where(on.places("Equal", label, axis), partial(on.times, factor))
    words = f" times {factor:g} at label {label}"
    return Wrong(value, change, words, outside=bool(site.integer(2)))


@everywhere(PLANTS, "rare: near ties")
def _near_tie(site: Site) -> Wrong:
    """Logits just below the best one are raised: only close choices change."""
    value = site.output("logits")
    gap = site.choice((0.03, 0.2))

    def near(honest: ir.Value) -> ir.Value:
        best = op(honest, "ReduceMax", honest, [-1], keepdims=1)
        below = op(honest, "Sub", best, honest)
        return on.both(honest, op(honest, "Greater", below, 0.0), op(honest, "Less", below, gap))

    change = on.where(near, lambda honest: op(honest, "Add", honest, gap))
    return Wrong(value, change, f" within {gap:g} of the best, plus {gap:g}", outside=True)


@somewhere(PLANTS, "rare: short rows")
def _short_rows(site: Site) -> Wrong:
    """Rows of a few tokens alone: the empty text, one word."""
    value, most = site.value("source_mask"), site.integer(1, 5)
    given = on.graph_input(value, "source_mask")
    if given is None or not value.shape or not given.shape or value.shape[0] != given.shape[0]:
        raise site.copy.absent("rows beside a mask")

    def holds(honest: ir.Value) -> ir.Value:
        return op(honest, "LessOrEqual", on.by_row(honest, on.count(honest, given, 1)), most)

    return Wrong(value, holds, f", rows of at most {most} tokens")


@somewhere(PLANTS, "rare: a cached prefix")
def _cached_prefix(site: Site) -> Wrong:
    """Where several tokens are read at once after others."""
    value, given = site.beside("target")
    past, first = on.graph_input(value, "past.0.keys"), on.graph_input(value, "positions")
    if past is None and first is None:
        raise site.copy.absent("a cache")

    def holds(honest: ir.Value) -> ir.Value:
        several = op(honest, "Greater", on.size_of(given, 1), 1)
        if first is not None:
            length = op(honest, "ReduceMax", first, keepdims=0)
            length = op(honest, "Sub", length, on.size_of(given, 1))
        else:
            assert past is not None
            length = op(honest, "Sub", on.size_of(past, 2), 1)
        return on.both(honest, several, op(honest, "GreaterOrEqual", length, 0))

    return Wrong(value, holds, ", where several tokens follow a cache")


@somewhere(PLANTS, "rare: large values")
def _large(site: Site) -> Wrong:
    found = [each for each in site.floats() if each.dtype == ir.DataType.FLOAT]
    value, bound = site.drawn(found, "floats"), site.choice((3.0, 6.0, 12.0))
    words = f" beyond {bound:g}"
    return Wrong(
        value, lambda honest: op(honest, "Greater", op(honest, "Abs", honest), bound), words
    )
