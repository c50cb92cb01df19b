"""Faults by hand: two conditions at once, rows beside each other, the inside of files, claims.

`faults.py --hand` plants them. Most differ from one seed to another in place alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace as changed
from functools import partial
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from planted_values import (
    Generator,
    change_where,
    drawn,
    float_values,
    graph_input,
    input_axis,
    like,
    size_of,
    some_change,
    some_value,
    times,
)
from random_file_faults import Plant, Tokens
from transferry.export.subject.bundle_copy import BundleCopy, add, constant, replace
from transferry.runtime.tokenizer.special_tokens import read_settings

TOKENS_IN = "source", "target"
MASKS = "source_mask", "past_mask"
# Whether a condition holds `[]`, or by row of a value, given the value.
Holds = Callable[[ir.Value], ir.Value]


def _where(value: ir.Value, holds: Holds, generator: Generator, words: str) -> str:
    """Changes a value where a condition holds."""
    name, (change, changed_by) = value.name, some_change(generator)
    change_where(value, holds, change)
    return f"{name}, {words}, {changed_by}"


def _whole(near: ir.Value, value: ir.Value) -> ir.Value:
    return add(near, "Cast", value, to=ir.DataType.INT64)


def _sum(near: ir.Value, value: ir.Value, axis: int | None = None) -> ir.Value:
    axes = [] if axis is None else [constant(near, [axis])]
    return add(near, "ReduceSum", _whole(near, value), *axes, keepdims=0)


def _by_row(honest: ir.Value, rows: ir.Value) -> ir.Value:
    """Shapes a number or truth of each row `[batch]` to be compared with a value."""
    assert honest.shape is not None
    shape = [-1, *([1] * (len(honest.shape) - 1))]
    return add(honest, "Reshape", rows, constant(honest, shape))


def _rows_of(copy: BundleCopy, generator: Generator, *inputs: str) -> tuple[ir.Value, ir.Value]:
    """Returns a value whose first axis is the rows of an input, and the input."""
    found = [
        (value, given)
        for value in float_values(copy)
        if value.graph and (given := graph_input(value, *inputs)) is not None
        if value.shape and given.shape and value.shape[0] == given.shape[0]
    ]
    return drawn(copy, generator, found, f"rows of {' or '.join(inputs)}")


# Of sizes.


def _two_sizes(copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    value = some_value(copy, generator)
    found = [input_axis(copy, generator, value) for _ in range(2)]
    sizes = [int(each) for each in generator.integers(2, 9, size=2)]

    def holds(honest: ir.Value) -> ir.Value:
        both = (
            add(honest, "Equal", size_of(given, axis), constant(honest, size))
            for (given, axis), size in zip(found, sizes, strict=True)
        )
        return add(honest, "And", *both)

    named = " and ".join(f"axis {axis} of {given.name}" for given, axis in found)
    return _where(value, holds, generator, f"sizes {sizes} of {named}")


def _batch_and_length(copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    """From a batch of several rows on, where the first row is long."""
    value = some_value(copy, generator, *TOKENS_IN)
    given = graph_input(value, *TOKENS_IN)
    assert given is not None
    least = int(generator.choice((3, 5, 9))), int(generator.choice((5, 9, 17)))

    def holds(honest: ir.Value) -> ir.Value:
        both = (
            add(honest, "GreaterOrEqual", size_of(given, axis), constant(honest, size))
            for axis, size in enumerate(least)
        )
        return add(honest, "And", *both)

    return _where(value, holds, generator, f"{given.name} of {least} or more")


def _long_cache(copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    value = some_value(copy, generator, "past.0.keys", "positions")
    given = graph_input(value, "positions", "past.0.keys")
    assert given is not None
    least = int(generator.choice((9, 17, 33, 100)))

    def holds(honest: ir.Value) -> ir.Value:
        last = (
            add(honest, "ReduceMax", given, keepdims=0)
            if given.name == "positions"
            else size_of(given, 2)
        )
        return add(honest, "GreaterOrEqual", last, constant(honest, least))

    return _where(value, holds, generator, f"with {least} positions before or more")


# Of rows beside each other.


def _ragged(kind: str, copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    value, mask = _rows_of(copy, generator, *MASKS)

    def holds(honest: ir.Value) -> ir.Value:
        sums, several = _sum(honest, mask, 1), constant(honest, 1)
        several = add(honest, "Greater", size_of(mask, 0), several)
        most, least = (
            add(honest, operator, sums, keepdims=0) for operator in ("ReduceMax", "ReduceMin")
        )
        if kind == "no row is padded":
            return add(honest, "And", add(honest, "Equal", most, least), several)
        end = {"the longest row": most, "the shortest row": least}.get(kind)
        if end is None:  # less than half of the longest
            double = add(honest, "Mul", sums, constant(honest, 2))
            return _by_row(honest, add(honest, "Less", double, most))
        return _by_row(honest, add(honest, "And", add(honest, "Equal", sums, end), several))

    return _where(value, holds, generator, kind)


def _ended(copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    """Where a row reads the end token and another one does not."""
    value, target = _rows_of(copy, generator, "target")
    ends = read_settings(copy.folder)["special"]["eos_id"]

    def holds(honest: ir.Value) -> ir.Value:
        at = add(honest, "Equal", target, constant(honest, int(ends)))
        count = _sum(honest, at)
        some = add(honest, "Greater", count, constant(honest, 0))
        return add(honest, "And", some, add(honest, "Less", count, size_of(target, 0)))

    return _where(value, holds, generator, "where some rows have ended")


def _same_token(copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    """Where all rows read the same token, as the first step of a search."""
    value, target = _rows_of(copy, generator, "target")

    def holds(honest: ir.Value) -> ir.Value:
        most, least = (
            add(honest, operator, target, keepdims=0) for operator in ("ReduceMax", "ReduceMin")
        )
        several = add(honest, "Greater", size_of(target, 0), constant(honest, 1))
        return add(honest, "And", add(honest, "Equal", most, least), several)

    return _where(value, holds, generator, "where all rows read one token")


# Of values.


def _branch(copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    """An If whose condition is a sum of token ids, and whose other body is wrong."""
    value = some_value(copy, generator, *TOKENS_IN)
    given = graph_input(value, *TOKENS_IN)
    assert given is not None
    divisor, factor = int(generator.choice((3, 7, 17))), float(generator.choice((1.02, 1.1, 0.0)))
    name = value.name

    def wrong(honest: ir.Value) -> ir.Value:
        left = add(honest, "Mod", _sum(honest, given), constant(honest, divisor))
        at = add(honest, "Equal", left, constant(honest, 1))
        bodies = []
        for each in (factor, 1.0):
            scale = ir.node("Constant", [], {"value": ir.tensor(np.float32(each))})
            typed = ir.node("CastLike", [scale.outputs[0], honest])
            product = ir.node("Mul", [honest, typed.outputs[0]])
            for number, node in enumerate((scale, typed, product)):
                node.outputs[0].name = f"planted.body.{each}.{number}"
            out = product.outputs[0]
            out.type, out.shape = honest.type, honest.shape
            nodes = [scale, typed, product]
            bodies.append(ir.Graph([], [out], nodes=nodes, name=f"body {each}"))
        return add(honest, "If", at, then_branch=bodies[0], else_branch=bodies[1])

    if value.dtype != ir.DataType.FLOAT:
        raise copy.absent("a float32")
    replace(value, wrong)
    return f"{name} times {factor:g} where the sum of {given.name} is 1 modulo {divisor}"


def _mild_mask(copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    """Scores of attention are at least -8, so that padding takes part a little."""
    found = [node for node in copy.nodes("Softmax") if node.inputs[0] is not None]
    node = drawn(copy, generator, found, "softmax")
    least, scores = float(generator.choice((-4, -8, -12, -16))), node.inputs[0]
    assert scores is not None
    node.replace_input_with(0, add(scores, "Max", scores, like(scores, least)))
    return f"scores of {node.outputs[0].name} are at least {least:g}"


def _tail(copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    """Logits far below the best one: only samples and log-probabilities change."""
    outputs = [each for one in copy.graphs.values() for each in one.graph.outputs]
    found = [each for each in outputs if each.name == "logits"]
    value, gap = drawn(copy, generator, found, "logits"), float(generator.choice((3, 6, 10)))
    name = value.name

    def wrong(honest: ir.Value) -> ir.Value:
        best = add(honest, "ReduceMax", honest, constant(honest, [-1]), keepdims=1)
        far = add(honest, "Greater", add(honest, "Sub", best, honest), like(honest, gap))
        lower = add(honest, "Sub", honest, like(honest, 0.25))
        return add(honest, "Where", far, lower, honest)

    replace(value, wrong, outside=bool(generator.integers(2)))
    return f"{name} more than {gap:g} below the best are 0.25 lower"


def _reversed_rows(copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    """Where a move takes the last row first."""
    found = [
        (value, given)
        for model in copy.graphs.values()
        for given in model.graph.inputs
        if given.name == "rows" and given.shape is not None and len(given.shape) == 1
        for value in model.graph.outputs
        if value.shape is not None and len(value.shape) == 4
    ]
    value, given = drawn(copy, generator, found, "graphs that move rows")
    name, several = value.name, int(generator.choice((2, 4)))

    def wrong(honest: ir.Value) -> ir.Value:
        most = add(honest, "ReduceMax", given, keepdims=0)
        first = add(honest, "Gather", given, constant(honest, 0))
        enough = add(honest, "GreaterOrEqual", size_of(given, 0), constant(honest, several))
        at = add(honest, "And", add(honest, "Equal", first, most), enough)
        return add(honest, "Where", at, times(1.1, honest), honest)

    replace(value, wrong, outside=True)
    return f"{name} times 1.1 where the first of {several} rows or more is the last one"


# Inside of files.


def _edited(
    copy: BundleCopy, generator: Generator, edit: Callable[[onnx.ModelProto], str | None]
) -> str:
    """Edits the file of a graph behind the back of everything that knows graphs."""
    names = sorted(copy.specs)
    for name in generator.permutation(names).tolist():
        file = copy.specs[name].file
        model = onnx.load(copy.folder / file, load_external_data=False)
        if (words := edit(model)) is not None:
            copy.truncate(file, vouched=True)  # the graphs are not written again
            copy.write(file, model.SerializeToString())
            return f"{name}: {words}"
    raise copy.absent("such a part of a file")


def _aliased(copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    """Two stored tensors of one shape share one range of the file."""

    def edit(model: onnx.ModelProto) -> str | None:
        stored = [each for each in model.graph.initializer if each.external_data]
        pairs = [
            (one, other)
            for one in stored
            for other in stored
            if one.name != other.name and (one.dims, one.data_type) == (other.dims, other.data_type)
        ]
        if not pairs:
            return None
        one, other = pairs[int(generator.integers(len(pairs)))]
        del one.external_data[:]
        one.external_data.extend(other.external_data)
        return f"{one.name} is stored where {other.name} is"

    return _edited(copy, generator, edit)


def _shifted(copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    """A stored tensor begins one float late."""

    def edit(model: onnx.ModelProto) -> str | None:
        stored = [each for each in model.graph.initializer if each.external_data]
        if not stored:
            return None
        one = stored[int(generator.integers(len(stored)))]
        for each in one.external_data:
            if each.key == "offset":
                each.value = str(max(0, int(each.value) - 4 if int(each.value) else 4))
        return f"{one.name} is stored 4 bytes beside its place"

    return _edited(copy, generator, edit)


def _metadata(copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    def edit(model: onnx.ModelProto) -> str:
        entry = model.metadata_props.add()
        entry.key = "ort_config"
        entry.value = json.dumps({"session_options": {"graph_optimization_level": 0}})
        return "holds a configuration of onnxruntime"

    return _edited(copy, generator, edit)


def _overridable(copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    """A weight is an input too, so that it is no constant."""

    def edit(model: onnx.ModelProto) -> str | None:
        found = [each for each in model.graph.initializer if len(each.dims)]
        if not found:
            return None
        one = found[int(generator.integers(len(found)))]
        given = onnx.helper.make_tensor_value_info(one.name, one.data_type, one.dims)
        model.graph.input.append(given)
        return f"{one.name} is an input too"

    return _edited(copy, generator, edit)


def _function(copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    """An operator becomes a function of the model that does something else."""

    def edit(model: onnx.ModelProto) -> str | None:
        nodes = [node for node in model.graph.node if node.op_type in ("Relu", "Gelu", "Softmax")]
        nodes = nodes or [node for node in model.graph.node if node.op_type == "Add"]
        if not nodes:
            return None
        node = nodes[int(generator.integers(len(nodes)))]
        inside = onnx.helper.make_node(node.op_type, [*"xy"][: len(node.input)], ["inside"])
        inside.attribute.extend(node.attribute)
        more = onnx.helper.make_node("Mul", ["inside", "inside"], ["square"])
        mean = onnx.helper.make_node("Sqrt", ["square"], ["out"])
        opset = [onnx.helper.make_opsetid("", model.opset_import[0].version)]
        made = onnx.helper.make_function(
            "local", node.op_type, [*"xy"][: len(node.input)], ["out"], [inside, more, mean], opset
        )
        model.functions.append(made)
        model.opset_import.append(onnx.helper.make_opsetid("local", 1))
        node.domain = "local"
        del node.attribute[:]
        return f"{node.op_type} {node.output[0]} is a function: its absolute value"

    return _edited(copy, generator, edit)


def _declared(copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    """The batch of an input or output is declared as one size."""

    def edit(model: onnx.ModelProto) -> str | None:
        found = [
            (each, size)
            for each in (*model.graph.input, *model.graph.output, *model.graph.value_info)
            for size in each.type.tensor_type.shape.dim
            if size.dim_param
        ]
        if not found:
            return None
        each, size = found[int(generator.integers(len(found)))]
        name, size.dim_value = size.dim_param, int(generator.choice((1, 7, 64)))
        return f"{each.name}: {name} is declared as {size.dim_value}"

    return _edited(copy, generator, edit)


def _swapped_outputs(copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    """Two outputs of one role change places, in file and manifest alike."""
    names = [name for name, spec in copy.specs.items() if len(spec.outputs) > 2]
    name = str(drawn(copy, generator, names, "graphs of several outputs"))
    spec = copy.specs[name]
    pairs = [
        (one, other)
        for one, first in enumerate(spec.outputs)
        for other, second in enumerate(spec.outputs)
        if one < other and (first.role, first.shape) == (second.role, second.shape)
    ]
    one, other = drawn(copy, generator, pairs, "outputs of one role")
    outputs = [*spec.outputs]
    outputs[one], outputs[other] = outputs[other], outputs[one]
    graph = copy.graphs[name].graph
    graph.outputs[one], graph.outputs[other] = graph.outputs[other], graph.outputs[one]
    _respecified(copy, name, changed(spec, outputs=tuple(outputs)))
    return f"{name}: outputs {outputs[one].name} and {outputs[other].name} changed places"


def _respecified(copy: BundleCopy, name: str, spec: Any) -> None:
    variant = changed(copy.variant, graphs={**copy.variant.graphs, name: spec})
    variants = {**copy.manifest.variants, variant.name: variant}
    copy.manifest = changed(copy.manifest, variants=variants)


def _other_file(copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    """Another variant's graph stands in its place."""
    found = [
        (name, spec, other.graphs[name])
        for other in copy.manifest.variants.values()
        for name, spec in copy.variant.graphs.items()
        if name in other.graphs and other.graphs[name].file != spec.file
    ]
    name, spec, other = drawn(copy, generator, found, "graphs of another variant")
    _respecified(copy, name, other)
    return f"{name} is {other.file} in place of {spec.file}"


def _other_name(copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    """Roles of two inputs of one type change places in the manifest."""
    found = [
        (name, one, other)
        for name, spec in copy.specs.items()
        for one, first in enumerate(spec.inputs)
        for other, second in enumerate(spec.inputs)
        if one < other and (first.role, first.type) == (second.role, second.type)
    ]
    name, one, other = drawn(copy, generator, found, "inputs of one role")
    spec = copy.specs[name]
    inputs = [*spec.inputs]
    inputs[one], inputs[other] = inputs[other], inputs[one]
    _respecified(copy, name, changed(spec, inputs=tuple(inputs)))
    return f"{name}: the manifest lists {inputs[one].name} in place of {inputs[other].name}"


def _screen(copy: BundleCopy, generator: Generator, tokens: Tokens) -> str:
    """The screen of the LM head reads a row further."""
    screen = dict(copy.variant.screen)
    name = str(drawn(copy, generator, sorted(screen), "a screen"))
    stored = screen[name]
    step = 4 if stored.type != "int8" else 1
    screen[name] = changed(stored, offset=max(0, stored.offset - step * 8))
    variant = changed(copy.variant, screen=screen)
    copy.manifest = changed(
        copy.manifest, variants={**copy.manifest.variants, variant.name: variant}
    )
    return f"screen: {name} begins 8 entries early"


PLANTS: tuple[tuple[str, Plant], ...] = (
    ("hand: two sizes", _two_sizes),
    ("hand: batch and length", _batch_and_length),
    ("hand: a long cache", _long_cache),
    ("hand: no row padded", partial(_ragged, "no row is padded")),
    ("hand: the longest row", partial(_ragged, "the longest row")),
    ("hand: the shortest row", partial(_ragged, "the shortest row")),
    ("hand: half as long", partial(_ragged, "less than half of the longest")),
    ("hand: ended rows", _ended),
    ("hand: one token for all", _same_token),
    ("hand: a branch", _branch),
    ("hand: a mild mask", _mild_mask),
    ("hand: the tail of logits", _tail),
    ("hand: reversed rows", _reversed_rows),
    ("hand: aliased weights", _aliased),
    ("hand: a shifted weight", _shifted),
    ("hand: metadata", _metadata),
    ("hand: an overridable weight", _overridable),
    ("hand: a function", _function),
    ("hand: a declared size", _declared),
    ("hand: outputs swapped", _swapped_outputs),
    ("hand: another variant's graph", _other_file),
    ("hand: inputs swapped", _other_name),
    ("hand: the screen", _screen),
)
