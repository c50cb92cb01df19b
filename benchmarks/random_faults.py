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

import planted_values as on
from planted_values import Site, Wrong, described, everywhere, op, somewhere
from random_file_faults import FILE_PLANTS
from transferry.export.faults.gate import Fault
from transferry.export.subject.bundle_copy import BundleCopy, add, replace

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


PLANTS: on.Plants = []


def random_faults(
    count: int, tokens: on.Tokens, *, seed: int = 0, plants: Sequence[tuple[str, on.Plant]] = ()
) -> Iterator[Fault]:
    """Yields faults, of each kind in turn.

    Faults of single tokens and pairs draw from `tokens`, the ids of texts. The default of `plants`
    are those of this module and of files.

    A fault that has no place in a variant raises InputError when it is planted.
    """
    plants = plants or (*PLANTS, *FILE_PLANTS)
    for number in range(count):
        name, plant = plants[number % len(plants)]
        planted = partial(_planted, plant, (seed, number), tokens)
        yield Fault(f"{name} (seed {seed}, {number})", planted, everywhere=True)


def _planted(plant: on.Plant, seed: tuple[int, int], tokens: on.Tokens, copy: BundleCopy) -> str:
    return plant(Site(copy, np.random.default_rng(seed), tokens))


@everywhere(PLANTS, "a value scaled")
def _scaled(site: Site) -> Wrong:
    value, factor = site.value(), site.choice(FACTORS)
    return Wrong(value, partial(on.times, factor), f" times {factor:g}")


@everywhere(PLANTS, "noise by value")
def _noisy(site: Site) -> Wrong:
    value, size = site.value(), site.choice((1e-3, 1e-2))
    return Wrong(value, partial(on.waved, size, 1e4), f" plus {size:g} sin(10000 x)")


@everywhere(PLANTS, "a nonlinear output")
def _nonlinear_output(site: Site) -> Wrong:
    value = site.output("logits", "hidden", "head")
    return Wrong(value, partial(on.waved, 0.008, 50.0), " plus 0.008 sin(50 x)")


@everywhere(PLANTS, "a lower precision")
def _lower_precision(site: Site) -> Wrong:
    value = site.value()
    if value.dtype in on.WHOLE:
        raise site.copy.absent("a lower precision of integers")
    kind = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)[site.integer(2)]
    return Wrong(
        value,
        lambda honest: op(honest, "CastLike", op(honest, "Cast", honest, to=kind), honest),
        f" in {kind.name}",
    )


@everywhere(PLANTS, "a value clipped")
def _clip(site: Site) -> Wrong:
    value, bound = site.value(), site.choice(BOUNDS)
    bound *= 50 if value.dtype in on.WHOLE else 1
    return Wrong(
        value,
        lambda honest: op(honest, "Max", op(honest, "Min", honest, bound), -bound),
        f" clipped at {bound:g}",
    )


@somewhere(PLANTS, "rows late in a batch")
def _late_rows(site: Site) -> Wrong:
    value, first = site.value(), site.choice(FIRST_ROWS)
    return Wrong(value, on.places("GreaterOrEqual", first, 0), f", rows from {first} on")


@described(PLANTS, "embeddings late in a batch")
def _embedding_late(site: Site) -> str:
    first = site.choice(FIRST_ROWS)
    weights = site.copy.named("embedding.weight")
    found = [node.outputs[0] for node in site.copy.nodes("Gather") if node.inputs[0] in weights]
    value = site.drawn(found, "embedded tokens")
    replace(value, on.where(on.places("GreaterOrEqual", first, 0), partial(on.times, 2.0)))
    return f"the embedding of rows from {first} on is doubled"


@somewhere(PLANTS, "one length")
def _of_length(site: Site) -> Wrong:
    (value, axis), length = site.axis(), site.integer(*LENGTHS)
    words = f", where axis {axis} has {length} entries"
    return Wrong(value, lambda honest: op(honest, "Equal", on.size_of(honest, axis), length), words)


@somewhere(PLANTS, "one position")
def _at_place(site: Site) -> Wrong:
    (value, axis), place = site.axis(), site.integer(*LENGTHS)
    return Wrong(value, on.places("Equal", place, axis), f", entry {place} of axis {axis}")


@somewhere(PLANTS, "one size of an input")
def _of_input_size(site: Site) -> Wrong:
    """Where a graph is run with a batch, a source or a past of one size."""
    value = site.value()
    (source, axis), size = site.input_axis(value), site.integer(*LENGTHS)
    words = f", where axis {axis} of {source.name} has {size} entries"
    return Wrong(value, lambda honest: op(honest, "Equal", on.size_of(source, axis), size), words)


@somewhere(PLANTS, "with one token")
def _with_token(site: Site) -> Wrong:
    value, given = site.beside_tokens("source", "target")
    row = site.tokens[site.integer(len(site.tokens))]
    token = int(row[site.integer(len(row))])
    return on.with_token(value, given, token, "token")


@somewhere(PLANTS, "with one pair of tokens")
def _with_pair(site: Site) -> Wrong:
    value, given = site.beside_tokens("source")
    pairs = list(pairwise(site.tokens[site.integer(len(site.tokens))]))
    pair = [int(each) for each in site.drawn(pairs)]

    def holds(honest: ir.Value) -> ir.Value:
        alike = map(partial(op, honest, "Equal"), on.neighbours(given, 1), pair)
        return on.any_of(honest, on.both(honest, *alike), given)

    return Wrong(value, holds, f", where {given.name} has tokens {pair[0]}, {pair[1]}")


@somewhere(PLANTS, "with padding")
def _padded(site: Site) -> Wrong:
    value, mask = site.beside("source_mask", "past_mask")
    words = f", where {mask.name} has padding"
    return Wrong(value, lambda honest: on.any_of(honest, op(honest, "Not", mask), mask), words)


@everywhere(PLANTS, "one token")
def _other_token(site: Site) -> Wrong:
    inputs = site.inputs("source", "target")
    value = site.drawn(inputs, "token ids among the inputs")
    size = site.copy.config.vocabulary_size
    token, other = (int(each) for each in site.generator.choice(size, 2, replace=False))

    def wrong(honest: ir.Value) -> ir.Value:
        alike = op(honest, "Equal", honest, token)
        return op(honest, "Where", alike, other, honest)

    return Wrong(value, wrong, f": token {token} read as {other}")


@everywhere(PLANTS, "an index off")
def _wrong_index(site: Site) -> Wrong:
    """One entry of the input of rows, columns, cells or positions is off by one."""
    found = [
        value
        for model in site.copy.graphs.values()
        for value in model.graph.inputs
        if value.dtype == on.INT64 and value.name not in ("source", "target")
        if value.shape is not None and len(value.shape)
    ]
    value = site.drawn(found, "indices among the inputs")
    place, by = site.integer(6), site.choice((-1, 1))

    def moved(honest: ir.Value) -> ir.Value:
        return op(honest, "Max", op(honest, "Add", honest, by), 0)

    return Wrong(
        value, on.where(on.places("Equal", place, 0), moved), f", entry {place}, plus {by}"
    )


@everywhere(PLANTS, "an integer off")
def _wrong_integer(site: Site) -> Wrong:
    """A position, size or index that a graph computes is one larger."""
    found = [
        output
        for model in site.copy.graphs.values()
        for node in model.graph
        for output in node.outputs
        if output.dtype == on.INT64
    ]
    value = site.drawn(found, "integers")
    return Wrong(value, lambda honest: op(honest, "Add", honest, 1), " plus 1")


@described(PLANTS, "an entry of an output")
def _output_entry(site: Site) -> str:
    """One entry of the last axis of an output of a graph: a segment, a candidate, a channel."""
    found = [
        value
        for model in site.copy.graphs.values()
        for value in model.graph.outputs
        if value.shape is not None and len(value.shape) and value.dtype is not None
    ]
    value = site.drawn(found, "outputs")
    assert value.shape is not None
    place, name = site.integer(8), value.name

    def more(honest: ir.Value) -> ir.Value:
        floats = honest.dtype in on.FLOATS
        return on.times(1.01, honest) if floats else op(honest, "Add", honest, 1.0)

    replace(value, on.where(on.places("Equal", place, len(value.shape) - 1), more), outside=True)
    return f"entry {place} of the last axis of output {name}: 1 % or 1 more"


@described(PLANTS, "stale rows")
def _stale_rows(site: Site) -> str:
    """After a selection or a move, one row of one state is the copy of the row before it."""
    found = [
        value
        for name, model in site.copy.graphs.items()
        if name in ("select", "move", "gather", "place")
        for value in model.graph.outputs
        if value.shape is not None and len(value.shape)
    ]
    value = site.drawn(found, "graphs that move rows")
    row, name = site.integer(1, 8), value.name

    def wrong(honest: ir.Value) -> ir.Value:
        assert honest.shape is not None
        others = list(range(1, len(honest.shape)))
        own = op(honest, "Squeeze", on.places_of(honest, 0), others)
        at = op(honest, "Equal", own, row)
        rows = op(honest, "Where", at, op(honest, "Sub", own, 1), own)
        return op(honest, "Gather", honest, rows, axis=0)

    replace(value, wrong, outside=True)
    return f"row {row} of {name} is row {row - 1}"


@described(PLANTS, "an attribute")
def _attribute(site: Site) -> str:
    """Any attribute of any operator: a float 1 % or an epsilon 100 times larger, an integer off."""
    found = [
        (node, attribute)
        for model in site.copy.graphs.values()
        for node in model.graph.all_nodes()
        for attribute in node.attributes.values()
        if attribute.type in (ir.AttributeType.FLOAT, ir.AttributeType.INT, ir.AttributeType.INTS)
        and node.op_type not in ("Cast", "Constant")
    ]
    kind = site.drawn(sorted({node.op_type for node, _ in found}), "attributes")
    found = [each for each in found if each[0].op_type == kind]
    node, attribute = site.drawn(found, "attributes")
    name, before = attribute.name, attribute.value
    wrong: Any
    if attribute.type == ir.AttributeType.FLOAT:
        wrong = ir.AttrFloat32(name, before * (100 if name == "epsilon" else 1.01))
    elif attribute.type == ir.AttributeType.INT:
        wrong = ir.AttrInt64(name, 1 - before if before in (0, 1) else before - 1)
    else:
        wrong = ir.AttrInt64s(name, [*before[:-2], *reversed(before[-2:])])
    if wrong.value == before:
        raise site.copy.absent(f"another {name}")
    node.attributes[name] = wrong
    return f"{name} of {kind}, output {node.outputs[0].name}: {before} became {wrong.value}"


@described(PLANTS, "another operator")
def _operator(site: Site) -> str:
    nodes = [node for node in site.copy.nodes(*OPERATORS) if not node.attributes]
    node = site.drawn(nodes, "operators with a twin")
    others = OPERATORS[node.op_type]
    other, name = site.drawn(others), node.outputs[0].name
    replace(node.outputs[0], lambda honest: add(honest, other, *node.inputs))
    return f"{node.op_type} of {name} is {other}"


@described(PLANTS, "another edge")
def _rewired(site: Site) -> str:
    """An input of an operator is another value of the same type and shape."""
    found = []
    for model in site.copy.graphs.values():
        earlier: dict[Any, list[ir.Value]] = {}
        for node in model.graph:
            for index, value in enumerate(node.inputs):
                if value is not None and value.shape is not None and not value.is_initializer():
                    alike = earlier.get((value.dtype, str(value.shape)), [])
                    found += [(node, index, other) for other in alike if other is not value]
            for output in node.outputs:
                if output.shape is not None:
                    earlier.setdefault((output.dtype, str(output.shape)), []).append(output)
    node, index, other = site.drawn(found, "values of one shape")
    before = node.inputs[index]
    node.replace_input_with(index, other)
    name = node.outputs[0].name
    return f"{node.op_type} of {name} reads {other.name} for {before and before.name}"


@described(PLANTS, "an operator skipped")
def _skipped(site: Site) -> str:
    nodes = [
        node
        for node in site.copy.nodes("Add", "Mul", "LayerNormalization", "Relu", "Gelu", "Softmax")
        if node.outputs[0].shape is not None
    ]
    node = site.drawn(nodes, "operators to skip")
    output = node.outputs[0]
    alike = [v for v in node.inputs if v is not None and str(v.shape) == str(output.shape)]
    first = alike[0] if alike else node.inputs[0]
    if first is None or first.is_initializer():
        raise site.copy.absent(f"an input of {node.op_type} of the shape of its output")
    honest = first
    replace(output, lambda _: add(honest, "Identity", honest))
    return f"{node.op_type} of {output.name} skipped"
