"""Faults of the graphs themselves: masks, norms, activations, residuals, the cache."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from transferry.export.faults.fault import Faults, decodes, given, last, tables
from transferry.export.subject.bundle_copy import (
    BundleCopy,
    add,
    constant,
    constants,
    replace,
    scalar,
)
from transferry.runtime.decoding.batching import BatchOptions

FAULTS = Faults()


# Positions.


@FAULTS.kind("positions begin anew at each step", decodes)
def _restarted(copy: BundleCopy) -> str:
    table = copy.graphs["decoder"].graph.initializers[f"model.{tables(copy.config)[0]}"]
    for gather in copy.users(table, "Gather"):
        index = gather.inputs[1]
        sum_ = index.producer() if index is not None else None
        if sum_ is None or sum_.op_type != "Add":
            raise copy.absent("the sum of past and new positions")
        for place, value in enumerate(sum_.inputs):
            if value is not None and not _made_by(value, "Range"):
                sum_.replace_input_with(place, add(value, "Mul", value, constant(value, 0)))
    return "decoder: the length of the past is not added"


@FAULTS.kind(
    "padding counted as positions",
    lambda config: bool(config.decoder_layers and not config.encoder_layers),
)
def _padding_counted(copy: BundleCopy) -> str:
    mask = _input(copy, "decoder", "past_mask")
    for cast in copy.users(mask, "Cast"):
        every = add(mask, "Or", mask, add(mask, "Not", mask))
        cast.replace_input_with(0, every)
    return "decoder: positions of a row go on behind its padding"


def _made_by(value: ir.Value, operator: str) -> bool:
    producer = value.producer()
    return producer is not None and producer.op_type == operator


# Masks.


def _input(copy: BundleCopy, graph: str, role: Any) -> ir.Value:
    (name,) = copy.specs[graph].names(role)
    return next(value for value in copy.graphs[graph].graph.inputs if value.name == name)


def _masks(copy: BundleCopy) -> list[ir.Value]:
    return [
        _input(copy, name, role)
        for name, spec in copy.specs.items()
        for role in ("source_mask", "past_mask")
        if spec.names(role)
    ]


@FAULTS.kind("padding mask off by one")
def _mask_shifted(copy: BundleCopy) -> str:
    for mask in _masks(copy):
        for node in copy.users(mask, "Not"):
            ends = [constant(mask, [number]) for number in (0, 1, -1)]
            head = add(mask, "Slice", mask, ends[0], ends[1], ends[1])
            tail = add(mask, "Slice", mask, ends[0], ends[2], ends[1])
            node.replace_input_with(0, add(mask, "Concat", head, tail, axis=1))
    return "each row sees one position of its padding"


@FAULTS.kind("padding mask dropped")
def _mask_dropped(copy: BundleCopy) -> str:
    for mask in _masks(copy):
        for where in copy.users(mask, "Not", "Where"):
            nothing = where.inputs[2]
            assert nothing is not None
            replace(where.outputs[0], given(nothing))
    return "padding is seen"


@FAULTS.kind("causal mask off by one", decodes)
def _causal_shifted(copy: BundleCopy) -> str:
    found = list(copy.nodes("Greater", graph="decoder"))
    if not found:
        raise copy.absent("the causal mask")
    for node in found:
        limit = node.inputs[1]
        assert limit is not None
        node.replace_input_with(1, add(limit, "Add", limit, constant(limit, 1)))
    return "decoder: each position sees the next one"


# Operators between the weights.


@FAULTS.kind("norm epsilon changed")
def _epsilon(copy: BundleCopy) -> str:
    # Ten times as large, but at least torch's default.
    wrong = max(10 * copy.config.norm_epsilon, 1e-5)
    changed = 0
    for node in copy.nodes("LayerNormalization"):
        node.attributes["epsilon"] = ir.AttrFloat32("epsilon", wrong)
        changed += 1
    for mean in copy.nodes("ReduceMean") if copy.config.norm == "rms" else ():
        for sum_ in copy.users(mean.outputs[0], "Add"):
            epsilon = scalar(sum_)
            if epsilon is None or epsilon.const_value is None:
                raise copy.absent("the epsilon of RMSNorm")
            new = constant(sum_.outputs[0], np.asarray(wrong, epsilon.const_value.numpy().dtype))
            sum_.replace_input_with(list(sum_.inputs).index(epsilon), new)
            changed += 1
    if not changed:
        raise copy.absent("norms")
    return f"{copy.config.norm_epsilon:g} became {wrong:g} in {changed} norms"


@FAULTS.kind("a norm skipped")
def _norm_skipped(copy: BundleCopy) -> str:
    name = f"{last(copy.config)}.self_residual.norm.weight"
    for weight in copy.named(name):
        for node in weight.consumers():
            inner = next(value for value in node.inputs if value is not None and value != weight)
            if node.op_type == "Mul":
                # RMSNorm: (x * 1 / sqrt(...)) * weight.
                product = inner.producer()
                assert product is not None
                inner = next(
                    value
                    for value in product.inputs
                    if value is not None and not _made_by(value, "Reciprocal")
                )
            replace(node.outputs[0], given(inner))
    return name.removesuffix(".weight")


@FAULTS.kind("query scale missing", lambda config: config.d_head > 1)
def _scale_missing(copy: BundleCopy) -> str:
    wanted = math.sqrt(copy.config.d_head)
    for node in reversed(list(copy.nodes("Div"))):
        query = node.inputs[0]
        if scalar(node, wanted) is not None and query is not None:
            replace(node.outputs[0], given(query))
            return f"the last attention: not divided by {wanted:.4g}"
    raise copy.absent("the scale of a query")


@FAULTS.kind(
    "embedding scale missing", lambda config: config.scale_embedding and config.d_model > 1
)
def _embedding_scale_missing(copy: BundleCopy) -> str:
    for weight in copy.named("embedding.weight"):
        for node in copy.users(weight, "Gather", "Mul"):
            value = next(value for value in node.inputs if value not in constants(node))
            assert value is not None
            replace(node.outputs[0], given(value))
    return f"not multiplied by {math.sqrt(copy.config.d_model):.4g}"


@FAULTS.kind("another activation")
def _activation(copy: BundleCopy) -> str:
    kinds = {"relu": "Relu", "gelu": "Gelu", "gelu-tanh": "Gelu"}
    wanted = kinds.get(copy.config.activation, "Sigmoid")
    node = next(copy.nodes(wanted), None)
    if node is None or node.inputs[0] is None:
        raise copy.absent(f"the activation {wanted}")
    value, other = node.inputs[0], "Relu" if wanted == "Gelu" else "Gelu"
    if wanted == "Sigmoid":
        # swish is x * sigmoid(x).
        (node,) = copy.users(node.outputs[0], "Mul")
    replace(node.outputs[0], lambda _: add(value, other, value))
    return f"the first {copy.config.activation} is {other}"


@FAULTS.kind("GELU's other form", lambda config: config.activation in ("gelu", "gelu-tanh"))
def _other_gelu(copy: BundleCopy) -> str:
    found = list(copy.nodes("Gelu"))
    if not found:
        raise copy.absent("GELU")
    form = "tanh" if copy.config.activation == "gelu" else "none"
    found[-1].attributes["approximate"] = ir.AttrString("approximate", form)
    return f"approximate={form!r} in the last"


@FAULTS.kind("residual dropped")
def _residual_dropped(copy: BundleCopy) -> str:
    name = f"{last(copy.config)}.feed_forward.outer"
    for value in copy.linear(name):
        for node in copy.users(value, "Add"):
            replace(node.outputs[0], given(value))
    return f"only {name} goes on"


@FAULTS.kind("a dimension frozen while tracing")
def _frozen(copy: BundleCopy) -> str:
    found = 0
    for name in ("encoder", "decoder"):
        for node in copy.nodes("Shape", graph=name):
            start, end = (node.attributes.get(key) for key in ("start", "end"))
            if start and end and (start.value, end.value) == (0, 1):
                replace(node.outputs[0], lambda value: constant(value, [2]))
                found += 1
    if not found:
        raise copy.absent("the size of the batch")
    return "the batch is 2"


# The cache.


def double_from_row(copy: BundleCopy, first: int) -> str:
    """Doubles the embedding of a graph's rows from one on, which smaller batches do not have."""
    name = "decoder" if "decoder" in copy.graphs else "encoder"
    table = copy.graphs[name].graph.initializers["model.embedding.weight"]
    for gather in copy.users(table, "Gather"):
        embedded, tokens = gather.outputs[0], gather.inputs[1]
        rows = add(embedded, "Shape", tokens, start=0, end=1)
        ends = [constant(embedded, number) for number in (0, 1)]
        numbers = add(embedded, "Range", ends[0], add(embedded, "Squeeze", rows), ends[1])
        late = add(embedded, "GreaterOrEqual", numbers, constant(embedded, first))
        factor = add(
            embedded, "Add", add(embedded, "CastLike", late, table), _number_like(table, 1)
        )
        column = add(embedded, "Reshape", factor, constant(embedded, [-1, 1, 1]))
        replace(embedded, partial(_product, column))
    return f"{name}: the embedding is doubled from row {first} on"


def _product(factor: ir.Value, value: ir.Value) -> ir.Value:
    return add(value, "Mul", value, factor)


def _number_like(near: ir.Value, number: float) -> ir.Value:
    """Adds a number of the type of a weight to its graph."""
    assert near.const_value is not None
    return constant(near, np.asarray(number, near.const_value.numpy().dtype))


@FAULTS.kind("the last row of a full batch wrong")
def _last_row(copy: BundleCopy) -> str:
    return double_from_row(copy, BatchOptions().rows - 1)


@FAULTS.kind("stale cache positions", decodes)
def _stale_positions(copy: BundleCopy) -> str:
    name = copy.specs["decoder"].names("present")[-1]
    (present,) = [o for o in copy.graphs["decoder"].graph.outputs if o.name == name]
    join = present.producer()
    if join is None or join.op_type != "Concat" or None in join.inputs:
        raise copy.absent(f"the concatenation that gives {name}")
    past, new = join.inputs

    nothing = add(present, "Sub", new, new)
    replace(present, lambda value: add(value, "Concat", past, nothing, axis=2), outside=True)
    return f"{name}: what a step adds is not written"


def _select(copy: BundleCopy, make: Callable[[ir.Value, ir.Value], ir.Value], which: int) -> str:
    """Selects other rows of one tensor, computed from the rows and the batch size `[1]`."""
    node = list(copy.nodes("Gather", graph="select"))[which]
    state, rows = node.inputs
    assert state is not None
    assert rows is not None
    batch = add(rows, "Shape", state, start=0, end=1)
    node.replace_input_with(1, make(rows, batch))
    return str(node.outputs[0].name)


@FAULTS.kind("stale cache rows", decodes)
def _stale_rows(copy: BundleCopy) -> str:
    def unselected(rows: ir.Value, batch: ir.Value) -> ir.Value:
        axes = constant(rows, [0])
        count = add(rows, "Squeeze", add(rows, "Shape", rows), axes)
        every = add(rows, "Range", constant(rows, 0), count, constant(rows, 1))
        return add(rows, "Mod", every, batch)

    return f"{_select(copy, unselected, -1)} is as before the selection"


@FAULTS.kind("swapped cache rows", decodes)
def _swapped_rows(copy: BundleCopy) -> str:
    def backwards(rows: ir.Value, batch: ir.Value) -> ir.Value:
        last, least = constant(rows, [-1]), constant(rows, [np.iinfo(np.int64).min])
        return add(rows, "Slice", rows, last, least, constant(rows, [0]), last)

    return f"{_select(copy, backwards, 0)} has the rows from last to first"


@FAULTS.kind("wrong beam index", decodes)
def _wrong_rows(copy: BundleCopy) -> str:
    def next_one(rows: ir.Value, batch: ir.Value) -> ir.Value:
        return add(rows, "Mod", add(rows, "Add", rows, constant(rows, 1)), batch)

    return f"{_select(copy, next_one, 1)} has the row after the chosen one"


@FAULTS.kind("one beam for all", decodes)
def _one_row(copy: BundleCopy) -> str:
    name = _select(copy, lambda rows, _: add(rows, "Mul", rows, constant(rows, 0)), -1)
    return f"{name} repeats row 0"
