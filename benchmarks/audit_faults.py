"""How many random faults in other tools' graphs does an audit catch?

    python benchmarks/audit_faults.py TEXT --faults 6 --seed 0 FOLDER:REFERENCE...

Each fault goes through all checks of `audit`, up to the first that fails. Of one that passes and
changes outputs, `rows_changed` is the share of TEXT whose greedy answer changes (of graphs without
a decoder: whose outputs move by more than 1 % of the largest). The last line is JSON; a missed
fault that changes answers gives exit code 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from transferry.export.audit import Audit
from transferry.export.faults.fault import Fault
from transferry.export.faults.foreign_faults import FAULTS
from transferry.export.faults.gate import Gate
from transferry.export.subject.bundle_copy import add, constant
from transferry.export.subject.bundle_copy import replace as rewired
from transferry.export.subject.foreign import ForeignFolder
from transferry.export.subject.graph_copy import GraphCopy
from transferry.export.subject.layout import GraphFile, read_layout
from transferry.export.subject.reference import load_reference
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.decoding.search import search
from transferry.runtime.io.folders import temporary_folder
from transferry.runtime.ort.session import SessionOptions

Generator = np.random.Generator
Plant = Callable[[Generator, ir.Model, GraphFile], str | None]
CLOSE = (1.02, 0.98, 1.005, 1.1)  # factors that rounding may hide


def _some(generator: Generator, found: list[Any]) -> Any:
    return found[int(generator.integers(len(found)))] if found else None


def _stored(model: ir.Model, least: int, dimensions: int | None = None) -> list[ir.Value]:
    """Initializers of at least so many entries."""
    return [
        value
        for value in model.graph.initializers.values()
        if value.const_value is not None and value.const_value.size >= least
        if dimensions is None or len(value.const_value.shape) == dimensions
        if value.uses() and not value.const_value.dtype.is_string()
    ]


def _set(value: ir.Value, array: Any) -> None:
    old = value.const_value
    assert old is not None
    value.const_value = ir.Tensor(array.astype(old.numpy().dtype), dtype=old.dtype, name=value.name)


def _scaled(generator: Generator, model: ir.Model, graph: GraphFile) -> str | None:
    """A matrix, or the scales of one in integers."""
    found = [
        each
        for each in _stored(model, 1)
        if each.const_value.dtype.is_floating_point()  # type: ignore[union-attr]
        and (len(each.const_value.shape) == 2 or "scale" in str(each.name))  # type: ignore[union-attr]
    ]
    if (value := _some(generator, found)) is None:
        return None
    factor = float(generator.choice(CLOSE))
    _set(value, value.const_value.numpy().astype(np.float32) * factor)
    return f"{value.name} times {factor}"


def _vector(generator: Generator, model: ir.Model, graph: GraphFile) -> str | None:
    found = [
        each
        for each in _stored(model, 8, 1)
        if each.const_value.dtype.is_floating_point()  # type: ignore[union-attr]
    ]
    if (value := _some(generator, found)) is None:
        return None
    factor, array = float(generator.choice(CLOSE)), value.const_value.numpy().astype(np.float32)
    if not len(np.unique(array)) > 1:
        return None
    _set(value, array * factor)
    return f"{value.name} times {factor}"


def _moved(generator: Generator, model: ir.Model, graph: GraphFile) -> str | None:
    """Two neighbours along an axis of a matrix change places."""
    if (value := _some(generator, [each for each in _stored(model, 64) if each.shape])) is None:
        return None
    array = value.const_value.numpy().copy()
    axis = int(generator.integers(array.ndim))
    if array.shape[axis] < 2 or array.ndim < 2:
        return None
    at = int(generator.integers(array.shape[axis] - 1))
    order = np.arange(array.shape[axis])
    order[[at, at + 1]] = at + 1, at
    if np.array_equal(moved := np.take(array, order, axis), array):
        return None
    _set(value, moved)
    return f"{value.name}: {at} and {at + 1} of axis {axis} swapped"


def _entries(generator: Generator, model: ir.Model, graph: GraphFile) -> str | None:
    """Some entries of a weight are negated, in integers inverted."""
    if (value := _some(generator, _stored(model, 64))) is None:
        return None
    array = value.const_value.numpy().copy()
    flat, share = array.reshape(-1), float(generator.choice((0.002, 0.01, 0.05)))
    at = generator.choice(len(flat), max(1, int(share * len(flat))), replace=False)
    flat[at] = ~flat[at] if array.dtype.kind in "ui" else -flat[at]
    _set(value, array)
    return f"{value.name}: {len(at)} of {len(flat)} entries negated"


def _exchanged(generator: Generator, model: ir.Model, graph: GraphFile) -> str | None:
    """Two weights of one shape change places."""
    found = _stored(model, 16)
    value = _some(generator, found)
    alike = [
        each
        for each in found
        if each is not value
        and each.const_value.shape == value.const_value.shape  # type: ignore[union-attr]
        and each.const_value.dtype == value.const_value.dtype  # type: ignore[union-attr]
        and not np.array_equal(each.const_value.numpy(), value.const_value.numpy())  # type: ignore[union-attr]
    ]
    if (other := _some(generator, alike)) is None:
        return None
    first, second = value.const_value.numpy().copy(), other.const_value.numpy().copy()
    _set(value, second)
    _set(other, first)
    return f"{value.name} and {other.name} exchanged"


def _number(generator: Generator, model: ir.Model, graph: GraphFile) -> str | None:
    """A scalar, or an attribute of an operator."""
    attributes = [
        (node, each)
        for node in model.graph.all_nodes()
        for each in node.attributes.values()
        if each.type == ir.AttributeType.FLOAT and each.name in ("scale", "alpha", "epsilon")
    ]
    constants = [
        (node, each)
        for node in model.graph.all_nodes()
        if node.op_type == "Constant"
        and (each := node.attributes.get("value")) is not None
        and each.as_tensor().dtype.is_floating_point()
        and each.as_tensor().size == 1
    ]
    if (found := _some(generator, [*attributes, *constants])) is None:
        return None
    node, each = found
    factor = float(generator.choice((*CLOSE, 0.5, 2.0)))
    if each.type == ir.AttributeType.FLOAT:
        node.attributes[each.name] = ir.AttrFloat32(each.name, each.value * factor)
        return f"{each.name} {each.value:g} of {node.op_type} {node.name} times {factor}"
    old = each.as_tensor()
    array = (old.numpy().astype(np.float32) * factor).astype(old.numpy().dtype)
    node.attributes["value"] = ir.AttrTensor("value", ir.Tensor(array, name=old.name))
    return f"the constant {float(old.numpy().reshape(-1)[0]):g} of {node.name} times {factor}"


OTHERS = {
    "Erf": "Tanh", "Tanh": "Erf", "Relu": "LeakyRelu", "Sigmoid": "HardSigmoid",
    "Gelu": "FastGelu", "FastGelu": "Gelu", "BiasGelu": "FastGelu", "Softmax": "LogSoftmax",
    "Sqrt": "Abs", "LessOrEqual": "Less", "Sub": "Add", "Cos": "Sin", "Max": "Min",
    "Where": "Where",
}  # fmt: skip


def _operator(generator: Generator, model: ir.Model, graph: GraphFile) -> str | None:
    found = [node for node in model.graph if node.op_type in OTHERS]
    if (node := _some(generator, found)) is None:
        return None
    kind = OTHERS[node.op_type]
    if node.op_type == "Where":
        one, other = node.inputs[1:]
        node.replace_input_with(1, other)
        node.replace_input_with(2, one)
    told = f"{node.op_type} {node.name} computes {kind}"
    node.op_type = kind
    if "Gelu" in kind:
        node.domain = "com.microsoft"
    return told


def _value(
    change: Callable[[Generator, ir.Value], tuple[Callable[[ir.Value], ir.Value], str]],
    generator: Generator,
    model: ir.Model,
    graph: GraphFile,
) -> str | None:
    """Changes a value of floats somewhere inside, or an output."""
    found = [
        value
        for node in model.graph
        for value in node.outputs
        if node.op_type in ("MatMul", "Gemm", "Add", "MatMulNBits", "Mul", "Softmax", "Concat")
        and value.dtype is not None
        and value.dtype.is_floating_point()
        and value.uses()
    ] + [each for each in model.graph.outputs if each.dtype and each.dtype.is_floating_point()]
    if (value := _some(generator, found)) is None:
        return None
    name, (made, told) = value.name, change(generator, value)
    rewired(value, made, outside=value.is_graph_output())
    return f"{name}: {told}"


def _same(value: ir.Value, number: float) -> ir.Value:
    return add(value, "CastLike", constant(value, np.float32(number)), value)


def _rows(value: ir.Value) -> ir.Value:
    return add(value, "Squeeze", add(value, "Shape", value, start=0, end=1))


def _many(generator: Generator, value: ir.Value) -> tuple[Callable[[ir.Value], ir.Value], str]:
    """Otherwise in large batches."""
    least, factor = int(generator.choice((3, 9, 17, 65))), float(generator.choice((1.1, 0.0)))

    def made(honest: ir.Value) -> ir.Value:
        at = add(honest, "GreaterOrEqual", _rows(honest), constant(honest, least))
        return add(honest, "Where", at, add(honest, "Mul", honest, _same(honest, factor)), honest)

    return made, f"times {factor} in batches of {least} rows or more"


def _times(generator: Generator, value: ir.Value) -> tuple[Callable[[ir.Value], ir.Value], str]:
    factor = float(generator.choice(CLOSE))

    def made(honest: ir.Value) -> ir.Value:
        return add(honest, "Mul", honest, _same(honest, factor))

    return made, f"times {factor}"


def _cut(generator: Generator, value: ir.Value) -> tuple[Callable[[ir.Value], ir.Value], str]:
    most = float(generator.choice((0.5, 2.0, 6.0)))

    def made(honest: ir.Value) -> ir.Value:
        return add(honest, "Clip", honest, _same(honest, -most), _same(honest, most))

    return made, f"cut to {most}"


def _coarse(generator: Generator, value: ir.Value) -> tuple[Callable[[ir.Value], ir.Value], str]:
    kind = ir.DataType(int(generator.choice((int(ir.DataType.FLOAT16), int(ir.DataType.BFLOAT16)))))

    def made(honest: ir.Value) -> ir.Value:
        return add(honest, "CastLike", add(honest, "Cast", honest, to=int(kind)), honest)

    return made, f"rounded to {kind.name}"


def _last(generator: Generator, value: ir.Value) -> tuple[Callable[[ir.Value], ir.Value], str]:
    """The last row is that before it."""

    def made(honest: ir.Value) -> ir.Value:
        one = constant(honest, 1)
        rows = add(honest, "Range", constant(honest, 0), _rows(honest), one)
        most = add(
            honest,
            "Max",
            add(honest, "Sub", _rows(honest), constant(honest, 2)),
            constant(honest, 0),
        )
        return add(honest, "Gather", honest, add(honest, "Min", rows, most), axis=0)

    return made, "the last row repeats that before it"


def _known(kind: str, generator: Generator, model: ir.Model, graph: GraphFile) -> str | None:
    return FAULTS[kind](model, graph)


PLANTS: dict[str, Plant] = {
    "scaled": _scaled,
    "vector": _vector,
    "moved": _moved,
    "entries": _entries,
    "exchanged": _exchanged,
    "number": _number,
    "operator": _operator,
    "batch": partial(_value, _many),
    "times": partial(_value, _times),
    "cut": partial(_value, _cut),
    "coarse": partial(_value, _coarse),
    "last row": partial(_value, _last),
    **{kind: partial(_known, kind) for kind in FAULTS},
}


def _planted(kind: str, seed: int, copy: GraphCopy) -> str | None:
    generator = np.random.default_rng(seed)
    graphs = copy.layout.graphs
    copy.edit(graphs[int(generator.integers(len(graphs)))])
    return PLANTS[kind](generator, copy.model, copy.graph)


def consequence(honest: ForeignFolder, copy: ForeignFolder, rows: list[list[int]]) -> float:
    """Returns the share of rows that are answered otherwise."""
    special, changed = honest.checkpoint.tokenizer.special, 0
    options = GenerationOptions(max_length=24)
    for row in rows:
        if honest.decodes:
            answers = (search(each.model, [row], options, special) for each in (honest, copy))
            one, other = (next(iter(each))[0].tokens for each in answers)
            changed += one != other
        else:
            one, other = (each.model.read([row], "right")[0] for each in (honest, copy))
            moved = (np.abs(one[key] - other[key]).max() / np.abs(one[key]).max() for key in one)
            changed += max(moved) > 0.01
    return changed / max(1, len(rows))


def main() -> None:
    """Reads the arguments, plants and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("folders", nargs="+", metavar="FOLDER:REFERENCE")
    parser.add_argument("--faults", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(PLANTS), help="comma-separated")
    parser.add_argument("--rows", type=int, default=1000)
    arguments = parser.parse_args()
    lines = arguments.text.read_text(encoding="utf-8").splitlines()
    counts = {"planted": 0, "caught": 0, "harmless": 0, "missed": 0}
    for number, given in enumerate(arguments.folders):
        folder, reference = map(Path, given.split(":"))
        checkpoint = load_reference(reference)
        subject = ForeignFolder(read_layout(folder), SessionOptions(threads=1), checkpoint)
        precision = subject.layout.precision()
        whole = Audit.of(checkpoint, lines[:16], precision, pairs=subject.reads_pairs)
        work = replace(whole, oracle=whole.oracle.remembering())
        changed = work.gate(subject, precision).differs
        gate = Gate(subject, work.checks, changed, faults=True)
        if caught := gate.caught_by(subject):
            print(json.dumps({"folder": folder.name, "honest": f"fails by {caught}"}), flush=True)
            continue
        generator = np.random.default_rng([arguments.seed, number])
        kinds = generator.permutation(arguments.kinds.split(",")).tolist()
        faults = [
            Fault(kind, partial(_planted, kind, int(generator.integers(2**31)))) for kind in kinds
        ]
        planted = 0
        with temporary_folder() as place:
            for found in gate.plant(faults, place / "copy"):
                if found is None:
                    continue
                told: dict[str, Any] = {"folder": folder.name, **asdict(found)}
                counts["planted"] += 1
                if found.caught_by:
                    counts["caught"] += 1
                else:
                    share = 0.0
                    if found.changes_answer:
                        special, encode = checkpoint.tokenizer.special, checkpoint.tokenizer.encode
                        rows = [special.wrap(encode(each)[:60]) for each in lines]
                        copy = subject.reopened(place / "copy")
                        share = consequence(subject, copy, rows[: arguments.rows])
                    told["rows_changed"] = share
                    counts["missed" if share else "harmless"] += 1
                print(json.dumps({k: v for k, v in told.items() if v is not None}), flush=True)
                planted += 1
                if planted == arguments.faults:
                    break
    print(json.dumps(counts))
    sys.exit(counts["missed"] > 0)


if __name__ == "__main__":
    main()
