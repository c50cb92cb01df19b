"""Faults under conditions that seldom hold, of a row, a size, a token or two at once, and by hand.

`faults.py --rare` and `--hand` plant them: by hand two conditions at once, rows beside each other,
the inside of files, claims. Those that hold more often are in `random_faults.py`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace as changed
from functools import partial
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

import planted_values as on
from planted_values import Site, Wrong, described, everywhere, op, somewhere
from transferry.export.subject.bundle_copy import add
from transferry.runtime.tokenizer.special_tokens import read_settings

RARE: on.Plants = []
HAND: on.Plants = []  # most differ from one seed to another in place alone
FULL_BATCHES = (2, 7, 64, 256)
SIZES = ("odd", "a multiple of 3", "24 or more", "40 or more")
MOVES = ("repeats a row", "goes back", "leaves a row out")


def _left(near: ir.Value, number: ir.Value, divisor: int, rest: int) -> ir.Value:
    return op(near, "Equal", op(near, "Mod", number, divisor), rest)


def _some(near: ir.Value, truths: ir.Value) -> ir.Value:
    return add(near, "Cast", on.count(near, truths), to=ir.DataType.BOOL)


@somewhere(RARE, "rare: odd places")
def _odd_places(site: Site) -> Wrong:
    value, axis = site.axis()
    words = f", odd entries of axis {axis}"
    return Wrong(value, lambda honest: _left(honest, on.places_of(honest, axis), 2, 1), words)


@somewhere(RARE, "rare: kinds of size")
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


@somewhere(RARE, "rare: a token")
def _rare_token(site: Site) -> Wrong:
    rows = Counter(token for row in site.tokens for token in {*row})
    rare = sorted(token for token, count in rows.items() if count <= 2)
    value, given = site.beside_tokens(*on.TOKENS_IN)
    token = site.drawn(rare, "rare tokens")
    return on.with_token(value, given, token, "the rare token")


@somewhere(RARE, "rare: a token twice")
def _doubled_token(site: Site) -> Wrong:
    value, given = site.beside_tokens(*on.TOKENS_IN)
    return Wrong(
        value,
        lambda honest: on.any_of(honest, op(honest, "Equal", *on.neighbours(given, 1)), given),
        f", where {given.name} has a token twice in a row",
    )


@somewhere(RARE, "rare: equal rows")
def _equal_rows(site: Site) -> Wrong:
    value, given = site.beside_tokens(*on.TOKENS_IN)

    def holds(honest: ir.Value) -> ir.Value:
        alike = add(honest, "Cast", op(honest, "Equal", *on.neighbours(given, 0)), to=on.INT64)
        rows = op(honest, "ReduceMin", alike, [1], keepdims=0)
        return op(honest, "Cast", op(honest, "ReduceSum", rows, keepdims=0), to=ir.DataType.BOOL)

    return Wrong(value, holds, f", where two rows of {given.name} are equal")


@somewhere(RARE, "rare: last of a full batch")
def _last_of_full(site: Site) -> Wrong:
    value, least = site.value(), site.choice(FULL_BATCHES)

    def holds(honest: ir.Value) -> ir.Value:
        size = on.size_of(honest, 0)
        last = op(honest, "Equal", on.places_of(honest, 0), op(honest, "Sub", size, 1))
        return on.both(honest, last, op(honest, "GreaterOrEqual", size, least))

    return Wrong(value, holds, f", the last of {least} rows or more")


@somewhere(RARE, "rare: two places")
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


@everywhere(RARE, "rare: moved rows")
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


@everywhere(RARE, "rare: one label")
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


@everywhere(RARE, "rare: near ties")
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


@somewhere(RARE, "rare: short rows")
def _short_rows(site: Site) -> Wrong:
    """Rows of a few tokens alone: the empty text, one word."""
    value, most = site.value("source_mask"), site.integer(1, 5)
    given = on.graph_input(value, "source_mask")
    if given is None or not value.shape or not given.shape or value.shape[0] != given.shape[0]:
        raise site.copy.absent("rows beside a mask")

    def holds(honest: ir.Value) -> ir.Value:
        return op(honest, "LessOrEqual", on.by_row(honest, on.count(honest, given, 1)), most)

    return Wrong(value, holds, f", rows of at most {most} tokens")


@somewhere(RARE, "rare: a cached prefix")
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


@somewhere(RARE, "rare: large values")
def _large(site: Site) -> Wrong:
    found = [each for each in site.floats() if each.dtype == ir.DataType.FLOAT]
    value, bound = site.drawn(found, "floats"), site.choice((3.0, 6.0, 12.0))
    words = f" beyond {bound:g}"
    return Wrong(
        value, lambda honest: op(honest, "Greater", op(honest, "Abs", honest), bound), words
    )


def _ends(honest: ir.Value, value: ir.Value) -> list[ir.Value]:
    """Returns the largest and the smallest entry."""
    return [op(honest, each, value, keepdims=0) for each in ("ReduceMax", "ReduceMin")]


def _edited(name: str) -> Callable[[Callable[[Site, onnx.ModelProto], str | None]], on.Plant]:
    """Adds a kind that edits the file of a graph behind the back of all that knows graphs."""

    def register(edit: Callable[[Site, onnx.ModelProto], str | None]) -> on.Plant:
        @described(HAND, name)
        def plant(site: Site) -> str:
            copy = site.copy
            for graph in site.generator.permutation(sorted(copy.specs)).tolist():
                file = copy.specs[graph].file
                model = onnx.load(copy.folder / file, load_external_data=False)
                if (words := edit(site, model)) is not None:
                    copy.truncate(file, vouched=True)  # the graphs are not written again
                    copy.write(file, model.SerializeToString())
                    return f"{graph}: {words}"
            raise copy.absent("such a part of a file")

        return plant

    return register


def _revised(site: Site, **fields: Any) -> None:
    """Changes fields of the variant in the manifest."""
    variant, manifest = changed(site.copy.variant, **fields), site.copy.manifest
    variants = {**manifest.variants, variant.name: variant}
    site.copy.manifest = changed(manifest, variants=variants)


def _respecified(site: Site, name: str, spec: Any) -> None:
    _revised(site, graphs={**site.copy.variant.graphs, name: spec})


@somewhere(HAND, "hand: two sizes")
def _two_sizes(site: Site) -> Wrong:
    value = site.value()
    found = [site.input_axis(value) for _ in range(2)]
    sizes = [int(each) for each in site.generator.integers(2, 9, size=2)]

    def holds(honest: ir.Value) -> ir.Value:
        of = (on.size_of(*each) for each in found)
        return on.both(honest, *map(partial(op, honest, "Equal"), of, sizes))

    named = " and ".join(f"axis {axis} of {given.name}" for given, axis in found)
    return Wrong(value, holds, f", sizes {sizes} of {named}")


@somewhere(HAND, "hand: batch and length")
def _batch_and_length(site: Site) -> Wrong:
    """From a batch of several rows on, where the first row is long."""
    value, given = site.beside(*on.TOKENS_IN)
    least = site.choice((3, 5, 9)), site.choice((5, 9, 17))

    def holds(honest: ir.Value) -> ir.Value:
        of = (on.size_of(given, axis) for axis in range(2))
        return on.both(honest, *map(partial(op, honest, "GreaterOrEqual"), of, least))

    return Wrong(value, holds, f", {given.name} of {least} or more")


@somewhere(HAND, "hand: a long cache")
def _long_cache(site: Site) -> Wrong:
    value, given = site.beside("positions", "past.0.keys")
    least = site.choice((9, 17, 33, 100))

    def holds(honest: ir.Value) -> ir.Value:
        positions = given.name == "positions"
        last = op(honest, "ReduceMax", given, keepdims=0) if positions else on.size_of(given, 2)
        return op(honest, "GreaterOrEqual", last, least)

    return Wrong(value, holds, f", with {least} positions before or more")


def _ragged(name: str, kind: str) -> None:
    @somewhere(HAND, f"hand: {name}")
    def find(site: Site) -> Wrong:
        value, mask = site.rows_of(*on.MASKS)

        def holds(honest: ir.Value) -> ir.Value:
            sums, several = on.count(honest, mask, 1), op(honest, "Greater", on.size_of(mask, 0), 1)
            most, least = _ends(honest, sums)
            if kind == "no row is padded":
                return on.both(honest, op(honest, "Equal", most, least), several)
            end = {"the longest row": most, "the shortest row": least}.get(kind)
            if end is None:  # less than half of the longest
                return on.by_row(honest, op(honest, "Less", op(honest, "Mul", sums, 2), most))
            return on.by_row(honest, on.both(honest, op(honest, "Equal", sums, end), several))

        return Wrong(value, holds, f", {kind}")


_ragged("no row padded", "no row is padded")
_ragged("the longest row", "the longest row")
_ragged("the shortest row", "the shortest row")
_ragged("half as long", "less than half of the longest")


@somewhere(HAND, "hand: ended rows")
def _ended(site: Site) -> Wrong:
    """Where a row reads the end token and another one does not."""
    value, target = site.rows_of("target")
    end = int(read_settings(site.copy.folder)["special"]["eos_id"])

    def holds(honest: ir.Value) -> ir.Value:
        ended = on.count(honest, op(honest, "Equal", target, end))
        some = op(honest, "Greater", ended, 0)
        return on.both(honest, some, op(honest, "Less", ended, on.size_of(target, 0)))

    return Wrong(value, holds, ", where some rows have ended")


@somewhere(HAND, "hand: one token for all")
def _same_token(site: Site) -> Wrong:
    """Where all rows read the same token, as the first step of a search."""
    value, target = site.rows_of("target")

    def holds(honest: ir.Value) -> ir.Value:
        same = op(honest, "Equal", *_ends(honest, target))
        return on.both(honest, same, op(honest, "Greater", on.size_of(target, 0), 1))

    return Wrong(value, holds, ", where all rows read one token")


@everywhere(HAND, "hand: a branch")
def _branch(site: Site) -> Wrong:
    """An If whose condition is a sum of token ids, and whose other body is wrong."""
    value, given = site.beside(*on.TOKENS_IN)
    divisor, factor = site.choice((3, 7, 17)), site.choice((1.02, 1.1, 0.0))

    def wrong(honest: ir.Value) -> ir.Value:
        at = op(honest, "Equal", op(honest, "Mod", on.count(honest, given), divisor), 1)
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
        raise site.copy.absent("a float32")
    words = f" times {factor:g} where the sum of {given.name} is 1 modulo {divisor}"
    return Wrong(value, wrong, words)


@described(HAND, "hand: a mild mask")
def _mild_mask(site: Site) -> str:
    """Scores of attention are at least -8, so that padding takes part a little."""
    found = [node for node in site.copy.nodes("Softmax") if node.inputs[0] is not None]
    node = site.drawn(found, "softmax")
    least, scores = site.choice((-4.0, -8.0, -12.0, -16.0)), node.inputs[0]
    assert scores is not None
    node.replace_input_with(0, op(scores, "Max", scores, least))
    return f"scores of {node.outputs[0].name} are at least {least:g}"


@everywhere(HAND, "hand: the tail of logits")
def _tail(site: Site) -> Wrong:
    """Logits far below the best one: only samples and log-probabilities change."""
    value = site.output("logits")
    gap = site.choice((3.0, 6.0, 10.0))

    def far(honest: ir.Value) -> ir.Value:
        best = op(honest, "ReduceMax", honest, [-1], keepdims=1)
        return op(honest, "Greater", op(honest, "Sub", best, honest), gap)

    change = on.where(far, lambda honest: op(honest, "Sub", honest, 0.25))
    words = f" more than {gap:g} below the best are 0.25 lower"
    return Wrong(value, change, words, outside=bool(site.integer(2)))


@everywhere(HAND, "hand: reversed rows")
def _reversed_rows(site: Site) -> Wrong:
    """Where a move takes the last row first."""
    value, given = site.move("rows")
    several = site.choice((2, 4))

    def holds(honest: ir.Value) -> ir.Value:
        most = op(honest, "ReduceMax", given, keepdims=0)
        last = op(honest, "Equal", op(honest, "Gather", given, 0), most)
        return on.both(honest, last, op(honest, "GreaterOrEqual", on.size_of(given, 0), several))

    words = f" times 1.1 where the first of {several} rows or more is the last one"
    return Wrong(value, on.where(holds, partial(on.times, 1.1)), words, outside=True)


@_edited("hand: aliased weights")
def _aliased(site: Site, model: onnx.ModelProto) -> str | None:
    """Two stored tensors of one shape share one range of the file."""
    stored = [each for each in model.graph.initializer if each.external_data]
    pairs = [
        (one, other)
        for one in stored
        for other in stored
        if one.name != other.name and (one.dims, one.data_type) == (other.dims, other.data_type)
    ]
    if not pairs:
        return None
    one, other = pairs[site.integer(len(pairs))]
    del one.external_data[:]
    one.external_data.extend(other.external_data)
    return f"{one.name} is stored where {other.name} is"


@_edited("hand: a shifted weight")
def _shifted(site: Site, model: onnx.ModelProto) -> str | None:
    """A stored tensor begins one float late."""
    stored = [each for each in model.graph.initializer if each.external_data]
    if not stored:
        return None
    one = stored[site.integer(len(stored))]
    for each in one.external_data:
        if each.key == "offset":
            each.value = str(max(0, int(each.value) - 4 if int(each.value) else 4))
    return f"{one.name} is stored 4 bytes beside its place"


@_edited("hand: metadata")
def _metadata(site: Site, model: onnx.ModelProto) -> str | None:
    entry = model.metadata_props.add()
    entry.key = "ort_config"
    entry.value = json.dumps({"session_options": {"graph_optimization_level": 0}})
    return "holds a configuration of onnxruntime"


@_edited("hand: an overridable weight")
def _overridable(site: Site, model: onnx.ModelProto) -> str | None:
    """A weight is an input too, so that it is no constant."""
    found = [each for each in model.graph.initializer if len(each.dims)]
    if not found:
        return None
    one = found[site.integer(len(found))]
    given = onnx.helper.make_tensor_value_info(one.name, one.data_type, one.dims)
    model.graph.input.append(given)
    return f"{one.name} is an input too"


@_edited("hand: a function")
def _function(site: Site, model: onnx.ModelProto) -> str | None:
    """An operator becomes a function of the model that does something else."""
    nodes = [node for node in model.graph.node if node.op_type in ("Relu", "Gelu", "Softmax")]
    nodes = nodes or [node for node in model.graph.node if node.op_type == "Add"]
    if not nodes:
        return None
    node = nodes[site.integer(len(nodes))]
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


@_edited("hand: a declared size")
def _declared(site: Site, model: onnx.ModelProto) -> str | None:
    """The batch of an input or output is declared as one size."""
    found = [
        (each, size)
        for each in (*model.graph.input, *model.graph.output, *model.graph.value_info)
        for size in each.type.tensor_type.shape.dim
        if size.dim_param
    ]
    if not found:
        return None
    each, size = found[site.integer(len(found))]
    name, size.dim_value = size.dim_param, site.choice((1, 7, 64))
    return f"{each.name}: {name} is declared as {size.dim_value}"


@described(HAND, "hand: outputs swapped")
def _swapped_outputs(site: Site) -> str:
    """Two outputs of one role change places, in file and manifest alike."""
    names = [name for name, spec in site.copy.specs.items() if len(spec.outputs) > 2]
    name = str(site.drawn(names, "graphs of several outputs"))
    spec = site.copy.specs[name]
    pairs = [
        (one, other)
        for one, first in enumerate(spec.outputs)
        for other, second in enumerate(spec.outputs)
        if one < other and (first.role, first.shape) == (second.role, second.shape)
    ]
    one, other = site.drawn(pairs, "outputs of one role")
    outputs = [*spec.outputs]
    outputs[one], outputs[other] = outputs[other], outputs[one]
    graph = site.copy.graphs[name].graph
    graph.outputs[one], graph.outputs[other] = graph.outputs[other], graph.outputs[one]
    _respecified(site, name, changed(spec, outputs=tuple(outputs)))
    return f"{name}: outputs {outputs[one].name} and {outputs[other].name} changed places"


@described(HAND, "hand: another variant's graph")
def _other_file(site: Site) -> str:
    """Another variant's graph stands in its place."""
    found = [
        (name, spec, other.graphs[name])
        for other in site.copy.manifest.variants.values()
        for name, spec in site.copy.variant.graphs.items()
        if name in other.graphs and other.graphs[name].file != spec.file
    ]
    name, spec, other = site.drawn(found, "graphs of another variant")
    _respecified(site, name, other)
    return f"{name} is {other.file} in place of {spec.file}"


@described(HAND, "hand: inputs swapped")
def _other_name(site: Site) -> str:
    """Roles of two inputs of one type change places in the manifest."""
    found = [
        (name, one, other)
        for name, spec in site.copy.specs.items()
        for one, first in enumerate(spec.inputs)
        for other, second in enumerate(spec.inputs)
        if one < other and (first.role, first.type) == (second.role, second.type)
    ]
    name, one, other = site.drawn(found, "inputs of one role")
    spec = site.copy.specs[name]
    inputs = [*spec.inputs]
    inputs[one], inputs[other] = inputs[other], inputs[one]
    _respecified(site, name, changed(spec, inputs=tuple(inputs)))
    return f"{name}: the manifest lists {inputs[one].name} in place of {inputs[other].name}"


@described(HAND, "hand: the screen")
def _screen(site: Site) -> str:
    """The screen of the LM head reads a row further."""
    screen = dict(site.copy.variant.screen)
    name = str(site.drawn(sorted(screen), "a screen"))
    stored = screen[name]
    step = 4 if stored.type != "int8" else 1
    screen[name] = changed(stored, offset=max(0, stored.offset - step * 8))
    _revised(site, screen=screen)
    return f"screen: {name} begins 8 entries early"
