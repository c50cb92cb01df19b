"""Faults of the graph `generate`: in its outputs, its stored weights, and the search around them.

They leave the step graphs as they are, so that only the comparison of whole answers can tell.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from transferry.export.faults.gate import Fault, Faults, given
from transferry.export.faults.variant_faults import variant_faults
from transferry.export.subject.bundle_copy import (
    BundleCopy,
    add,
    always,
    backwards,
    constant,
    never,
    replace,
)
from transferry.export.trace.editing import argument
from transferry.runtime.bundle.specs import ONE_GRAPH
from transferry.runtime.proof.one_graph import beams_of

FAULTS = Faults()
GREEDY = ("padding of ended rows scored", "forced first tokens not scored")
BEAMS = ("cache rows not selected", "length penalty dropped")
# Only where the model has such rules.
RULES, FORCED = "forbidden tokens allowed", "the last token not forced"
# Place of the Loop's carried values among the outputs of its body, after whether to go on.
LOG_PROBABILITIES = 5


def one_graph_faults(copy: BundleCopy) -> list[Fault]:
    """Returns the faults of the graph `generate` that a copy made with `whole` can have."""
    absent = [*(BEAMS if beams_of(copy.specs[ONE_GRAPH]) == 1 else GREEDY)]
    absent += [] if [*_scattered(copy)] else [RULES]
    absent += [] if _forced_end(copy) else [FORCED]
    absent += [] if _choices(copy, "Pow") else [BEAMS[1]]
    found = [fault for fault in FAULTS if fault.applies(copy.config) and fault.kind not in absent]
    return [
        dataclasses.replace(fault, kind=f"{ONE_GRAPH}: {fault.kind.removeprefix(f'{ONE_GRAPH}: ')}")
        for fault in (*found, *variant_faults(copy))
    ]


def _loop(copy: BundleCopy) -> ir.Node:
    loops = [node for node in copy.graphs[ONE_GRAPH].graph if node.op_type == "Loop"]
    if len(loops) != 1:
        raise copy.absent("the Loop over the steps")
    return loops[0]


def _body(copy: BundleCopy) -> ir.Graph:
    return _loop(copy).attributes["body"].as_graph()


def _choices(copy: BundleCopy, operator: str) -> list[ir.Node]:
    """Returns the nodes of an operator among those that choose tokens, in the Loop."""
    return [
        node
        for node in _body(copy)
        if node.op_type == operator and str(node.name).startswith("choice.")
    ]


def _choice(copy: BundleCopy, operator: str) -> ir.Node:
    found = _choices(copy, operator)
    if not found:
        raise copy.absent(f"{operator} among the nodes that choose tokens")
    return found[-1]


def _carried(copy: BundleCopy, place: int) -> tuple[ir.Node, ir.Node]:
    """Returns the node that passes a value to the next step, and the one that computes it."""
    passes = _body(copy).outputs[place].producer()
    value = passes.inputs[0] if passes is not None else None
    computes = value.producer() if value is not None else None
    if passes is None or computes is None:
        raise copy.absent("what the Loop carries")
    return passes, computes


@FAULTS.kind("end tokens ignored")
def _endless(copy: BundleCopy) -> str:
    replace(_choice(copy, "Equal").outputs[0], never)
    return "no token ends an answer"


@FAULTS.kind("the limit one too large")
def _one_longer(copy: BundleCopy) -> str:
    inner = set(_body(copy))
    # The limit comes from outside of the Loop.
    full = next(
        node
        for node in _choices(copy, "GreaterOrEqual")
        if (limit := node.inputs[1]) is not None and limit.producer() not in inner
    )
    replace(full.outputs[0], lambda value: add(value, "Greater", *full.inputs))
    # The Loop itself must not stop before.
    loop = _loop(copy)
    trips = argument(loop, 0)
    loop.replace_input_with(0, add(trips, "Add", trips, constant(trips, 1)))
    return "an answer may be one token longer than max_length"


@FAULTS.kind("stops with the first row")
def _stops_early(copy: BundleCopy) -> str:
    reduced = next(
        node
        for node in reversed(_choices(copy, "ReduceMax"))
        if node.outputs[0] in [node.inputs[0] for node in _choices(copy, "Cast")]
    )
    replace(reduced.outputs[0], lambda value: add(value, "ReduceMin", *reduced.inputs, keepdims=0))
    return "the Loop stops once one row has ended"


@FAULTS.kind("padding of ended rows scored")
def _scored_on(copy: BundleCopy) -> str:
    _, sum_ = _carried(copy, LOG_PROBABILITIES)
    gain = sum_.inputs[1]
    where = gain.producer() if gain is not None else None
    if where is None or where.op_type != "Where":
        raise copy.absent("the log-probability of a step")
    sum_.replace_input_with(1, where.inputs[2])
    return "the log-probability of an ended row goes on falling"


@FAULTS.kind("forced first tokens not scored", lambda config: bool(config.encoder_layers))
def _unscored(copy: BundleCopy) -> str:
    sum_ = _choices(copy, "ReduceSum")[-1]
    each = argument(sum_, 0)
    ends = [constant(each, [number]) for number in (-1, 1 << 40, 1)]
    sum_.replace_input_with(0, add(each, "Slice", each, *ends))
    return "a log-probability counts the chosen tokens alone"


def _scattered(copy: BundleCopy) -> Iterator[ir.Node]:
    """Yields the nodes that write what rules forbid or change into a table."""
    for operator in ("ScatterND", "ScatterElements"):
        yield from _choices(copy, operator)


@FAULTS.kind(RULES)
def _allowed(copy: BundleCopy) -> str:
    for node in _scattered(copy):
        replace(node.outputs[0], given(argument(node, 0)))
    return "no rule forbids a token"


def _forced_end(copy: BundleCopy) -> ir.Node | None:
    """Returns the comparison of an answer's next length with the limit, where its end is forced."""
    inner = set(_body(copy))
    for node in _choices(copy, "Equal"):
        length, limit = (value.producer() if value is not None else None for value in node.inputs)
        if length is not None and length.op_type == "Add" and limit not in inner:
            return node
    return None


@FAULTS.kind(FORCED)
def _unforced(copy: BundleCopy) -> str:
    node = _forced_end(copy)
    if node is None:
        raise copy.absent("the limit at which an answer is forced to end")
    replace(node.outputs[0], never)
    return "any token may be the last"


@FAULTS.kind("stale cache positions")
def _stale(copy: BundleCopy) -> str:
    reads, join = _carried(copy, -1)
    if join.op_type == "Gather" and (present := join.inputs[0]) is not None:  # the beams' rows
        reads, join = join, present.producer() or join
    if join.op_type != "Concat" or None in join.inputs:
        raise copy.absent("the concatenation of past and present")
    past, new = join.inputs
    value = join.outputs[0]
    nothing = add(value, "Sub", new, new)
    reads.replace_input_with(0, add(value, "Concat", past, nothing, axis=2))
    return "what a step adds to the last cache is not kept"


@FAULTS.kind("cache rows not selected")
def _unselected(copy: BundleCopy) -> str:
    passes, gather = _carried(copy, -1)
    if gather.op_type != "Gather":
        raise copy.absent("the selection of the beams' rows")
    passes.replace_input_with(0, gather.inputs[0])
    return "the last cache stays with the beam that was there"


@FAULTS.kind("length penalty dropped")
def _unpenalised(copy: BundleCopy) -> str:
    for node in _choices(copy, "Pow"):
        one = constant(node.outputs[0], np.ones(1, np.float32))
        replace(node.outputs[0], given(one))
    return "hypotheses are ranked by their log-probabilities"


@FAULTS.kind("swapped cache rows")
def _swapped(copy: BundleCopy) -> str:
    passes, join = _carried(copy, -1)
    passes.replace_input_with(0, backwards(join.outputs[0]))
    return "the last cache has the rows from last to first"


def _order(copy: BundleCopy) -> ir.Node:
    """Returns the node that orders the columns of each row, tokens before padding."""
    for node in copy.graphs[ONE_GRAPH].graph:
        if node.op_type == "TopK" and str(node.name).startswith("search."):
            return node
    raise copy.absent("the order of a source's tokens")


@FAULTS.kind("padding on the left stays there")
def _left(copy: BundleCopy) -> str:
    order = _order(copy)
    keys = order.inputs[0]
    difference = keys.producer() if keys is not None else None
    if difference is None or difference.op_type != "Sub":
        raise copy.absent("the places of a source's tokens")
    places = difference.inputs[1]

    def as_given(value: ir.Value) -> ir.Value:
        return add(value, "Add", add(value, "Mul", value, constant(value, 0)), places)

    replace(order.outputs[1], as_given)
    return "a source is read where it lies"


@FAULTS.kind("padding is read")
def _padding(copy: BundleCopy) -> str:
    for node in copy.users(_order(copy).outputs[1], "GatherElements", "Cast"):
        replace(node.outputs[0], always)
    return "every column of a source counts as a token"
