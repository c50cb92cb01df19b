"""Faults of the graphs themselves: masks, norms, activations, residuals, the cache."""

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import onnx_ir as ir

from transferry.export.faults.gate import Faults, decodes, given, last, tables
from transferry.export.subject.bundle_copy import (
    BundleCopy,
    add,
    always,
    backwards,
    constant,
    constants,
    replace,
    row_numbers,
    rows_from,
    scalar,
    scaled_rows,
)
from transferry.export.trace.editing import argument
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
    mask = copy.tensor("decoder", *copy.specs["decoder"].names("past_mask"))
    for cast in copy.users(mask, "Cast"):
        cast.replace_input_with(0, always(mask))
    return "decoder: positions of a row go on behind its padding"


def _made_by(value: ir.Value, operator: str) -> bool:
    producer = value.producer()
    return producer is not None and producer.op_type == operator


# Masks.


def _masks(copy: BundleCopy) -> list[ir.Value]:
    return [
        copy.tensor(graph, name)
        for graph, spec in copy.specs.items()
        for name in (*spec.names("source_mask"), *spec.names("past_mask"))
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
            replace(where.outputs[0], given(argument(where, 2)))
    return "padding is seen"


@FAULTS.kind("causal mask off by one", decodes)
def _causal_shifted(copy: BundleCopy) -> str:
    for node in copy.nodes("Greater", graph="decoder", wanted="the causal mask"):
        limit = argument(node, 1)
        node.replace_input_with(1, add(limit, "Add", limit, constant(limit, 1)))
    return "decoder: each position sees the next one"


# Operators between the weights.


@FAULTS.kind("norm epsilon changed")
def _epsilon(copy: BundleCopy) -> str:
    # Ten times as large, but at least torch's default.
    wrong = max(10 * copy.config.norm_epsilon, 1e-5)
    norms = copy.nodes("LayerNormalization")
    for node in norms:
        node.attributes["epsilon"] = ir.AttrFloat32("epsilon", wrong)
    changed = len(norms)
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
                factors = (argument(product, 0), argument(product, 1))
                inner = next(value for value in factors if not _made_by(value, "Reciprocal"))
            replace(node.outputs[0], given(inner))
    return name.removesuffix(".weight")


@FAULTS.kind("query scale missing", lambda config: config.d_head > 1)
def _scale_missing(copy: BundleCopy) -> str:
    wanted = math.sqrt(copy.config.d_head)
    for node in reversed(copy.nodes("Div")):
        if scalar(node, wanted) is not None:
            replace(node.outputs[0], given(argument(node, 0)))
            return f"the last attention: not divided by {wanted:.4g}"
    raise copy.absent("the scale of a query")


@FAULTS.kind(
    "embedding scale missing", lambda config: config.scale_embedding and config.d_model > 1
)
def _embedding_scale_missing(copy: BundleCopy) -> str:
    for weight in copy.named("embedding.weight"):
        for node in copy.users(weight, "Gather", "Mul"):
            value = argument(node, 1 if argument(node, 0) in constants(node) else 0)
            replace(node.outputs[0], given(value))
    return f"not multiplied by {math.sqrt(copy.config.d_model):.4g}"


@FAULTS.kind("another activation")
def _activation(copy: BundleCopy) -> str:
    kinds = {"relu": "Relu", "gelu": "Gelu", "gelu-tanh": "Gelu"}
    wanted = kinds.get(copy.config.activation, "Sigmoid")
    node = copy.nodes(wanted, wanted=f"the activation {wanted}")[0]
    value, other = argument(node, 0), "Relu" if wanted == "Gelu" else "Gelu"
    if wanted == "Sigmoid":
        # swish is x * sigmoid(x).
        (node,) = copy.users(node.outputs[0], "Mul")
    replace(node.outputs[0], lambda _: add(value, other, value))
    return f"the first {copy.config.activation} is {other}"


@FAULTS.kind("GELU's other form", lambda config: config.activation in ("gelu", "gelu-tanh"))
def _other_gelu(copy: BundleCopy) -> str:
    form = "tanh" if copy.config.activation == "gelu" else "none"
    node = copy.nodes("Gelu", wanted="GELU")[-1]
    node.attributes["approximate"] = ir.AttrString("approximate", form)
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
    shapes = [node for name in ("encoder", "decoder") for node in copy.nodes("Shape", graph=name)]
    found = [
        node.outputs[0]
        for node in shapes
        if [node.attributes.get_int(each, -1) for each in ("start", "end")] == [0, 1]
    ]
    if not found:
        raise copy.absent("the size of the batch")
    for value in found:
        replace(value, lambda value: constant(value, [2]))
    return "the batch is 2"


# The cache.


def double_from_row(copy: BundleCopy, first: int) -> str:
    """Doubles the embedding of a graph's rows from one on, which smaller batches do not have."""
    name = "decoder" if "decoder" in copy.graphs else "encoder"
    table = copy.graphs[name].graph.initializers["model.embedding.weight"]
    for gather in copy.users(table, "Gather"):
        late = rows_from(first, gather.outputs[0], argument(gather, 1))
        replace(gather.outputs[0], partial(scaled_rows, chosen=late, factor=2.0))
    return f"{name}: the embedding is doubled from row {first} on"


@FAULTS.kind("the last row of a full batch wrong")
def _last_row(copy: BundleCopy) -> str:
    return double_from_row(copy, BatchOptions().rows - 1)


@FAULTS.kind("stale cache positions", decodes)
def _stale_positions(copy: BundleCopy) -> str:
    name = copy.specs["decoder"].names("present")[-1]
    present = copy.tensor("decoder", name)
    join = present.producer()
    if join is None or join.op_type != "Concat" or None in join.inputs:
        raise copy.absent(f"the concatenation that gives {name}")
    past, new = join.inputs
    nothing = add(present, "Sub", new, new)
    replace(present, lambda value: add(value, "Concat", past, nothing, axis=2), outside=True)
    return f"{name}: what a step adds is not written"


def _select(copy: BundleCopy, make: Callable[[ir.Value, ir.Value], ir.Value], which: int) -> str:
    """Selects other rows of one tensor, computed from the rows and the batch size `[1]`."""
    node = copy.nodes("Gather", graph="select")[which]
    state, rows = argument(node, 0), argument(node, 1)
    node.replace_input_with(1, make(rows, add(rows, "Shape", state, start=0, end=1)))
    return str(node.outputs[0].name)


@FAULTS.kind("stale cache rows", decodes)
def _stale_rows(copy: BundleCopy) -> str:
    name = _select(copy, lambda rows, size: add(rows, "Mod", row_numbers(rows, rows)[1], size), -1)
    return f"{name} is as before the selection"


@FAULTS.kind("swapped cache rows", decodes)
def _swapped_rows(copy: BundleCopy) -> str:
    name = _select(copy, lambda rows, size: backwards(rows), 0)
    return f"{name} has the rows from last to first"


@FAULTS.kind("wrong beam index", decodes)
def _wrong_rows(copy: BundleCopy) -> str:
    def next_one(rows: ir.Value, size: ir.Value) -> ir.Value:
        return add(rows, "Mod", add(rows, "Add", rows, constant(rows, 1)), size)

    return f"{_select(copy, next_one, 1)} has the row after the chosen one"


@FAULTS.kind("one beam for all", decodes)
def _one_row(copy: BundleCopy) -> str:
    name = _select(copy, lambda rows, _: add(rows, "Mul", rows, constant(rows, 0)), -1)
    return f"{name} repeats row 0"
