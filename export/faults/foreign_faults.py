"""Faults of other tools' graphs: weights, masks, positions, the cache, declared shapes."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from transferry.export.faults.gate import Fault, Plant
from transferry.export.subject.bundle_copy import (
    add,
    backwards,
    constant,
    replace,
    row_numbers,
    rows_from,
    scaled_rows,
)
from transferry.export.subject.foreign import GraphCopy
from transferry.export.subject.layout import BITS, PRODUCTS

Change = Callable[[NDArray[Any]], NDArray[Any]]


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


def _of_weight(change: Change, told: str, copy: GraphCopy) -> str | None:
    """Changes the matrix of median size."""
    return _changed(_weights(copy.model), change, told)


def _changed(weights: Sequence[ir.Value], change: Change, told: str) -> str | None:
    if not weights:
        return None
    value = weights[len(weights) // 2]
    array = value.const_value.numpy().copy()  # type: ignore[union-attr]
    _set(value, change(array).astype(array.dtype))
    return f"{value.name}{told}"


def _scaled(array: NDArray[Any]) -> NDArray[Any]:
    return np.asarray(array * np.float32(1.001))


def _swapped(array: NDArray[Any]) -> NDArray[Any]:
    array[:, [0, 1]] = array[:, [1, 0]]
    return array


def _rounded(array: NDArray[Any]) -> NDArray[Any]:
    step = np.abs(array).max() / 127
    return np.asarray(np.round(array / step) * step)


def _reversed(copy: GraphCopy) -> str | None:
    found = [
        node.inputs[1]
        for node in copy.model.graph.all_nodes()
        if node.op_type in (BITS, *PRODUCTS) and len(node.inputs) > 1
    ]
    weights = [value for value in found if value is not None and value.const_value is not None]
    return _changed(weights, lambda array: array[::-1].copy(), ": its first axis backwards")


def _rare_row(copy: GraphCopy) -> str | None:
    for node in copy.model.graph.all_nodes():
        table = node.inputs[0] if node.op_type == "Gather" else None
        if table is None or table.const_value is None or len(table.const_value.shape) != 2:
            continue
        array = table.const_value.numpy().copy()
        if array.dtype.kind == "f" and len(array) > 64:
            array[len(array) // 3] *= 1.05
            _set(table, array)
            return f"{table.name}: row {len(array) // 3} times 1.05"
    return None


def _epsilon(copy: GraphCopy) -> str | None:
    count = 0
    for node in copy.model.graph.all_nodes():
        if (found := node.attributes.get("epsilon")) is not None:
            node.attributes["epsilon"] = ir.AttrFloat32("epsilon", max(10 * found.value, 1e-5))
            count += 1
    return f"{count} norms, ten times as large" if count else None


def _input(copy: GraphCopy, role: str) -> ir.Value | None:
    name = copy.graph.inputs.get(role)
    return next((value for value in copy.model.graph.inputs if value.name == name), None)


def _unmasked(copy: GraphCopy) -> str | None:
    mask = _input(copy, "states_mask") or _input(copy, "mask")
    if mask is None or mask.dtype is None or not mask.uses():
        return None
    one = np.array(1, mask.dtype.numpy())
    replace(
        mask, lambda value: add(value, "Add", add(value, "Sub", value, value), constant(value, one))
    )
    return f"{mask.name} is 1 everywhere"


def _shifted(copy: GraphCopy) -> str | None:
    positions = _input(copy, "positions")
    if positions is None or not positions.uses():
        return None
    replace(
        positions,
        lambda value: add(
            value, "Max", add(value, "Sub", value, constant(value, 1)), constant(value, 0)
        ),
    )
    return f"{positions.name}: each position but the first is one too low"


def _output(copy: GraphCopy) -> ir.Value:
    """Returns the output that decides answers."""
    names = [copy.graph.outputs.get(role) for role in ("logits", "head", "hidden")]
    wanted = next((name for name in names if name), None)
    outputs = copy.model.graph.outputs
    return next((value for value in outputs if value.name == wanted), outputs[0])


def _of_output(change: Callable[[ir.Value], ir.Value], told: str, copy: GraphCopy) -> str:
    output = _output(copy)
    name = output.name
    replace(output, change, outside=True)
    return f"{name}: {told}"


def _later(value: ir.Value) -> ir.Value:
    return scaled_rows(value, rows_from(2, value, value), 1.0005)


def _repeated(value: ir.Value) -> ir.Value:
    numbers = row_numbers(value, value)[1]
    return add(value, "Gather", value, add(value, "Min", numbers, constant(value, 15)), axis=0)


def _stale(copy: GraphCopy) -> str | None:
    if copy.layout.step is not None:
        copy.edit(copy.layout.step)  # of later steps
    names = [present for name, present in copy.graph.past.items() if ".encoder." not in name]
    present = next((v for v in reversed(copy.model.graph.outputs) if v.name in names), None)
    if present is None:
        return None
    name = present.name
    replace(present, backwards, outside=True)
    return f"{name}: rows from last to first"


def _noise(copy: GraphCopy) -> str | None:
    def noisy(value: ir.Value) -> ir.Value:
        return add(value, "Add", value, add(value, "RandomNormalLike", value, scale=1e-5))

    if copy.model.opset_imports[""] >= 22:  # for which onnxruntime 1.31 has no random numbers
        return None
    return _of_output(noisy, "normal noise of 1e-5", copy)


def _declared(copy: GraphCopy) -> str | None:
    output = _output(copy)
    if output.shape is None:
        return None
    sizes = list(output.shape)
    sizes[-1] = 3 if sizes[-1] != 3 else 5
    output.shape = ir.Shape(sizes)
    return f"{output.name} declares {sizes[-1]} in its last axis"


FAULTS: dict[str, Plant] = {
    "a weight scaled": partial(_of_weight, _scaled, " times 1.001"),
    "two columns of a weight swapped": partial(_of_weight, _swapped, ": columns 0 and 1"),
    "one row of the embedding": _rare_row,
    "a weight in 8 bits": partial(_of_weight, _rounded, " rounded to 8 bits"),
    "a weight of integers reversed": _reversed,
    "norm epsilon changed": _epsilon,
    "padding mask dropped": _unmasked,
    "positions one too low": _shifted,
    "later rows of a batch": partial(_of_output, _later, "rows from the third on times 1.0005"),
    "repeated rows": partial(_of_output, _repeated, "rows from the 17th on repeat the 16th"),
    "swapped cache rows": _stale,
    "noise": _noise,
    "another declared shape": _declared,
}


def foreign_faults(beside: bool) -> list[Fault]:
    """Returns every kind of fault; a graph without a place for one is left as it is.

    With `beside`, the files beside the graphs are compared, and get faults too.
    """
    files = BESIDE if beside else {}
    return [
        *(Fault(kind, plant) for kind, plant in FAULTS.items()),
        *(Fault(kind, partial(_rewritten, *change)) for kind, change in files.items()),
    ]


def _rewritten(name: str, change: Callable[[dict[str, Any]], str | None], copy: GraphCopy) -> Any:
    """Plants a fault in a JSON file beside the graphs."""
    path = copy.folder / name
    if not path.is_file():
        return None
    settings = json.loads(path.read_bytes())
    if (where := change(settings)) is not None:
        copy.touched.add(name)
        path.write_text(json.dumps(settings), encoding="utf-8")
    return where


def _swapped_ids(settings: dict[str, Any]) -> str | None:
    vocabulary = settings.get("model", {}).get("vocab", {})
    if not isinstance(vocabulary, dict) or len(vocabulary) < 2:
        return None
    first, second = sorted(vocabulary, key=vocabulary.__getitem__)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    return f"{first!r} and {second!r} of tokenizer.json"


def _another_id(name: str, settings: dict[str, Any]) -> str | None:
    if type(old := settings.get(name)) is not int:
        return None
    settings[name] = old - 1 if old else old + 1
    return f"{name} {settings[name]} in the place of {old}"


def _swapped_labels(settings: dict[str, Any]) -> str | None:
    labels = settings.get("id2label", {})
    if len(labels) < 2:
        return None
    first, second = sorted(labels)[:2]
    labels[first], labels[second] = labels[second], labels[first]
    return f"{labels[second]!r} and {labels[first]!r} of config.json"


# File and change of each fault beside the graphs.
BESIDE: dict[str, tuple[str, Callable[[dict[str, Any]], str | None]]] = {
    "two ids of the tokenizer swapped": ("tokenizer.json", _swapped_ids),
    "another end token": ("generation_config.json", partial(_another_id, "eos_token_id")),
    "another end token of the model": ("config.json", partial(_another_id, "eos_token_id")),
    "another padding token": ("config.json", partial(_another_id, "pad_token_id")),
    "two labels swapped": ("config.json", _swapped_labels),
}
