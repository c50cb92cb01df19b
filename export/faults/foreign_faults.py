"""Faults in copies of foreign graphs: is each caught, and would the user's tolerance have been?"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from transferry.export.faults.bundle_copy import add, constant, replace
from transferry.export.faults.self_test import rounding_of
from transferry.export.oracle.oracle import Oracle
from transferry.export.subject.layout import BITS, PRODUCTS, GraphFile, Layout
from transferry.export.subject.model import Observable
from transferry.runtime.errors import InputError, TransferryError
from transferry.runtime.io.folders import temporary_folder
from transferry.runtime.proof.compare import Case, Comparison, compare, observe
from transferry.runtime.proof.report import Claim, Decisions, PlantedFault

Checks = Callable[[Layout], Iterator[Claim | Decisions | list[Comparison]]]
Answers = Callable[[Layout], Sequence[NDArray[Any]]]
# What a fault changed, and where; None where a graph has no place for it.
Plant = Callable[[ir.Model, GraphFile], str | None]


def _weights(model: ir.Model) -> list[ir.Value]:
    """Matrices of floats, the smallest first."""
    found = [
        value
        for value in model.graph.initializers.values()
        if value.const_value is not None
        and len(value.const_value.shape) == 2
        and value.const_value.dtype.is_floating_point()
    ]
    return sorted(found, key=lambda value: (value.const_value.size, str(value.name)))  # type: ignore[union-attr]


def _set(value: ir.Value, array: NDArray[Any]) -> None:
    value.const_value = ir.Tensor(array, name=value.name)


def _scaled(model: ir.Model, graph: GraphFile) -> str | None:
    weights = _weights(model)
    if not weights:
        return None
    value = weights[len(weights) // 2]
    _set(value, value.const_value.numpy() * np.float32(1.001))  # type: ignore[union-attr]
    return f"{value.name} times 1.001"


def _swapped(model: ir.Model, graph: GraphFile) -> str | None:
    weights = _weights(model)
    if not weights:
        return None
    value = weights[len(weights) // 2]
    array = value.const_value.numpy().copy()  # type: ignore[union-attr]
    array[:, [0, 1]] = array[:, [1, 0]]
    _set(value, array)
    return f"{value.name}: columns 0 and 1"


def _rare_row(model: ir.Model, graph: GraphFile) -> str | None:
    for node in model.graph.all_nodes():
        table = node.inputs[0] if node.op_type == "Gather" else None
        if table is None or table.const_value is None or len(table.const_value.shape) != 2:
            continue
        array = table.const_value.numpy().copy()
        if array.dtype.kind == "f" and len(array) > 64:
            array[len(array) // 3] *= 1.05
            _set(table, array)
            return f"{table.name}: row {len(array) // 3} times 1.05"
    return None


def _rounded(model: ir.Model, graph: GraphFile) -> str | None:
    weights = _weights(model)
    if not weights:
        return None
    value = weights[len(weights) // 2]
    array = value.const_value.numpy()  # type: ignore[union-attr]
    step = np.abs(array).max() / 127
    _set(value, (np.round(array / step) * step).astype(array.dtype))
    return f"{value.name} rounded to 8 bits"


def _reversed(model: ir.Model, graph: GraphFile) -> str | None:
    found = [
        node.inputs[1]
        for node in model.graph.all_nodes()
        if node.op_type in (BITS, *PRODUCTS) and len(node.inputs) > 1
    ]
    weights = [value for value in found if value is not None and value.const_value is not None]
    if not weights:
        return None
    value = weights[len(weights) // 2]
    _set(value, value.const_value.numpy()[::-1].copy())  # type: ignore[union-attr]
    return f"{value.name}: its first axis backwards"


def _epsilon(model: ir.Model, graph: GraphFile) -> str | None:
    count = 0
    for node in model.graph.all_nodes():
        if (found := node.attributes.get("epsilon")) is not None:
            node.attributes["epsilon"] = ir.AttrFloat32("epsilon", max(10 * found.value, 1e-5))
            count += 1
    return f"{count} norms, ten times as large" if count else None


def _input(model: ir.Model, graph: GraphFile, role: str) -> ir.Value | None:
    name = graph.inputs.get(role)
    return next((value for value in model.graph.inputs if value.name == name), None)


def _unmasked(model: ir.Model, graph: GraphFile) -> str | None:
    mask = _input(model, graph, "states_mask") or _input(model, graph, "mask")
    if mask is None or mask.dtype is None or not mask.uses():
        return None
    one = np.array(1, mask.dtype.numpy())
    replace(
        mask,
        lambda value: add(value, "Add", add(value, "Sub", value, value), constant(value, one)),
    )
    return f"{mask.name} is 1 everywhere"


def _shifted(model: ir.Model, graph: GraphFile) -> str | None:
    positions = _input(model, graph, "positions")
    if positions is None or not positions.uses():
        return None
    replace(
        positions,
        lambda value: add(
            value, "Max", add(value, "Sub", value, constant(value, 1)), constant(value, 0)
        ),
    )
    return f"{positions.name}: each position but the first is one too low"


def _output(model: ir.Model, graph: GraphFile) -> ir.Value:
    names = [graph.outputs.get(role) for role in ("logits", "head", "hidden")]
    wanted = next((name for name in names if name), None)
    return next(
        (value for value in model.graph.outputs if value.name == wanted), model.graph.outputs[0]
    )


def _last_row(model: ir.Model, graph: GraphFile) -> str | None:
    output = _output(model, graph)

    def scaled(value: ir.Value) -> ir.Value:
        rows = add(value, "Squeeze", add(value, "Shape", value, start=0, end=1))
        numbers = add(value, "Range", constant(value, 0), rows, constant(value, 1))
        late = add(value, "Cast", add(value, "Greater", numbers, constant(value, 1)), to=1)
        factor = add(
            value,
            "Add",
            add(value, "Mul", late, constant(value, np.float32(0.0005))),
            constant(value, np.float32(1)),
        )
        ones = [-1] + [1] * (len(value.shape or (1, 1, 1)) - 1)
        column = add(value, "Reshape", factor, constant(value, ones))
        return add(value, "Mul", value, add(value, "CastLike", column, value))

    name = output.name
    replace(output, scaled, outside=True)
    return f"{name}: rows from the third on times 1.0005"


def _stale(model: ir.Model, graph: GraphFile) -> str | None:
    names = [present for name, present in graph.past.items() if ".encoder." not in name]
    present = next((v for v in reversed(list(model.graph.outputs)) if v.name in names), None)
    if present is None:
        return None

    def backwards(value: ir.Value) -> ir.Value:
        ends = [constant(value, [number]) for number in (-1, np.iinfo(np.int64).min, 0)]
        return add(value, "Slice", value, ends[0], ends[1], ends[2], ends[0])

    name = present.name
    replace(present, backwards, outside=True)
    return f"{name}: rows from last to first"


def _noise(model: ir.Model, graph: GraphFile) -> str | None:
    output = _output(model, graph)

    def noisy(value: ir.Value) -> ir.Value:
        drawn = add(value, "RandomNormalLike", value, scale=1e-5)
        return add(value, "Add", value, drawn)

    name = output.name
    replace(output, noisy, outside=True)
    return f"{name}: normal noise of 1e-5"


def _declared(model: ir.Model, graph: GraphFile) -> str | None:
    output = _output(model, graph)
    if output.shape is None:
        return None
    sizes = list(output.shape)
    sizes[-1] = 3 if sizes[-1] != 3 else 5
    output.shape = ir.Shape(sizes)
    return f"{output.name} declares {sizes[-1]} in its last axis"


FAULTS: dict[str, Plant] = {
    "a weight scaled": _scaled,
    "two columns of a weight swapped": _swapped,
    "one row of the embedding": _rare_row,
    "a weight in 8 bits": _rounded,
    "a weight of integers reversed": _reversed,
    "norm epsilon changed": _epsilon,
    "padding mask dropped": _unmasked,
    "positions one too low": _shifted,
    "later rows of a batch": _last_row,
    "swapped cache rows": _stale,
    "noise": _noise,
    "another declared shape": _declared,
}


def self_test(
    layout: Layout,
    checks: Checks,
    answers: Answers,
    changes: Callable[[Layout], bool],
    atol: float | None,
    done: Callable[[int, int], None] = lambda done, total: None,
) -> list[PlantedFault]:
    """Plants every kind of fault that the graphs have a place for, and checks each copy.

    Args:
        layout: Honest graphs; they are copied, never changed.
        checks: Yields the results of the checks of graphs.
        answers: Returns what graphs give on the input that a tolerance is usually tried on.
        changes: Whether graphs that pass the checks answer otherwise than the honest ones.
        atol: The user's own tolerance of these answers; None if there is none.
        done: Called with the number of faults finished and of all faults.

    Returns:
        The faults; with a tolerance, whether that would have let them pass.

    Raises:
        InputError: The graphs take no fault.
    """
    planted: list[PlantedFault] = []
    honest = answers(layout) if atol is not None else []
    last = layout.step or layout.decoder
    with temporary_folder() as made:
        for number, (kind, plant) in enumerate(FAULTS.items(), start=1):
            folder = made / f"copy-{number}"
            shutil.copytree(last.path.parent, folder)
            copied = _moved(layout, folder)
            target = copied.step if kind == "swapped cache rows" and copied.step else copied.decoder
            model = ir.load(target.path)
            where = plant(model, target)
            if where is not None:
                _save(model, target.path)
                caught = _first_failure(copied, checks)
                fault = PlantedFault(kind, where, bool(caught) or changes(copied), caught)
                if atol is not None:
                    found = None
                    with contextlib.suppress(TransferryError):
                        found = answers(copied)
                    distance = _distance(honest, found)
                    fault = changed(fault, difference=distance, tolerated=distance <= atol)
                planted.append(fault)
            shutil.rmtree(folder)
            done(number, len(FAULTS))
    if not planted:
        raise InputError(f"{layout.decoder.path}: no fault can be planted in these graphs")
    return planted


def answers_otherwise(
    oracle: Oracle,
    honest: Observable,
    found: Callable[[], Observable],
    cases: Sequence[Case],
    precision: str,
) -> bool:
    """Whether a model's numbers differ from the honest one's by more than rounding.

    Args:
        oracle: Tells how much torch rounds.
        honest: The honest graphs.
        found: Opens the others.
        cases: Inputs that the checks do not use.
        precision: Precision of the graphs.
    """
    rounding = rounding_of(precision)
    try:
        model = found()
        for case in cases:
            wanted = changed(oracle.truth(case), oracle=observe(honest, case))
            if any(item.fault for item in compare(case, wanted, observe(model, case), rounding)):
                return True
    except TransferryError:
        return True
    return False


def _distance(honest: Sequence[NDArray[Any]], found: Sequence[NDArray[Any]] | None) -> float:
    if found is None or any(a.shape != b.shape for a, b in zip(honest, found, strict=True)):
        return float("inf")
    pairs = zip(honest, found, strict=True)
    return max(float(np.abs(a.astype(np.float64) - b).max(initial=0.0)) for a, b in pairs)


def _moved(layout: Layout, folder: Path) -> Layout:
    def move(graph: GraphFile) -> GraphFile:
        return changed(graph, path=folder / graph.path.name)

    return changed(
        layout,
        decoder=move(layout.decoder),
        encoder=layout.encoder and move(layout.encoder),
        step=layout.step and move(layout.step),
    )


def _save(model: ir.Model, path: Path) -> None:
    """Writes a graph whose weights are partly in a file beside it, to another file of weights."""
    model.graph.sort()
    ir.external_data.load_to_model(model)
    large = sum(
        value.const_value.nbytes
        for value in model.graph.initializers.values()
        if value.const_value is not None
    )
    if large > 1 << 30:
        ir.save(model, path, external_data="planted.bin")
    else:
        ir.save(model, path)


def _first_failure(layout: Layout, checks: Checks) -> str:
    """Returns the first check that fails; empty if all pass."""
    try:
        for found in checks(layout):
            if isinstance(found, Claim):
                failed = found.name if found.problem else ""
            elif isinstance(found, Decisions):
                failed = "" if found.passed else found.search
            else:
                failed = next((_named(item) for item in found if item.fault), "")
            if failed:
                return failed
    except TransferryError:
        return "running"
    return ""


def _named(item: Comparison) -> str:
    return "batch independence" if " alone and in " in item.case else item.stage
