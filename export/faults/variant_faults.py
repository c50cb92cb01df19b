"""Faults of any variant: in outputs, in kinds of stored weight, and in batches of an encoder alone.

The faults of `graph_faults` know how the portable graphs are built. These know only the manifest,
so that no graph is left out, whichever is added.
"""

import re
from collections.abc import Callable
from functools import partial

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from transferry.export.faults.gate import Fault, decodes
from transferry.export.subject.bundle_copy import (
    BundleCopy,
    add,
    constant,
    replace,
    row_numbers,
    rows_from,
    scaled_rows,
)
from transferry.runtime.bundle.specs import TensorSpec
from transferry.runtime.decoding.batching import BatchOptions

SMALL = 1.01  # factor of a wrong value
LARGE = 2.0  # the same of a value that is good to a bound
# Constants that torch's exporter numbers, and those of `export.optimise`, have no names of weights.
NAMED = re.compile(r"(model\.|scale\.|.*\.weight\.|.*\.bias)")


def variant_faults(copy: BundleCopy) -> list[Fault]:
    """Returns a fault for each role of each graph's outputs, and for each kind of weight.

    Of an encoder alone also those of batches, which no search would show.
    """
    batches = [] if decodes(copy.config) else batch_faults()
    return [*_output_faults(copy), *_weight_faults(copy), *batches]


def _output_faults(copy: BundleCopy) -> list[Fault]:
    found = []
    for graph, spec in copy.specs.items():
        # The last of each role: of the last layer.
        for role, tensor in {tensor.role: tensor for tensor in spec.outputs}.items():
            plant = partial(_wrong_output, graph, tensor)
            kind = f"{graph}: wrong {role.replace('_', ' ')}"
            found.append(Fault(kind, plant))
    return found


def _wrong_output(graph: str, tensor: TensorSpec, copy: BundleCopy) -> str:
    """Makes numbers 1 % larger, integers one larger."""
    whole = tensor.type.startswith("int")
    by = 1 if whole else LARGE if tensor.role == "approximate_logits" else SMALL

    def wrong(value: ir.Value) -> ir.Value:
        number = add(value, "CastLike", constant(value, np.asarray(by, np.float32)), value)
        return add(value, "Add" if whole else "Mul", value, number)

    replace(copy.tensor(graph, tensor.name), wrong, outside=True)
    return f"{tensor.name}: {'plus' if whole else 'times'} {by}"


def _weight_faults(copy: BundleCopy) -> list[Fault]:
    """One fault for each last part of a weight's name, in the last weight that has it."""
    chosen: dict[str, str] = {}
    for model in copy.graphs.values():
        for name, value in model.graph.initializers.items():
            if value.dtype not in (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL):
                kind = name.rpartition(".")[2] if NAMED.match(name) else "constant"
                chosen[kind] = name
    return [
        Fault(f"stored {kind.replace('_', ' ')} off", partial(_wrong_entry, name))
        for kind, name in chosen.items()
    ]


def _wrong_entry(name: str, copy: BundleCopy) -> str:
    """Makes the entry of median size 1 % larger, an integer one larger, zero or infinity 0.01."""
    place = 0

    def change(array: NDArray[np.generic]) -> NDArray[np.generic]:
        nonlocal place
        flat = array.ravel()
        sizes = np.abs(flat.astype(np.float64))
        place = int(np.argsort(sizes)[len(sizes) // 2])
        if array.dtype.kind in "iu":
            flat[place] = flat[place] + 1 if flat[place] < 127 else flat[place] - 1
        else:
            scales = flat[place] and np.isfinite(flat[place])
            flat[place] = flat[place] * SMALL if scales else 0.01
        return flat.reshape(array.shape)

    copy.edit(name.removeprefix("model."), change)
    return f"{name}, entry {place} of {copy.array(name.removeprefix('model.')).size}"


# Gives which rows of a batch are wrong `[rows]`, from the mask.
Which = Callable[[ir.Value], ir.Value]


def batch_faults() -> list[Fault]:
    """Returns faults that only rows beside others show, or late rows of a batch."""
    last = BatchOptions().rows - 1
    scaled: dict[str, Which] = {
        "rows from the 8th on wrong": lambda mask: rows_from(7, mask, mask),
        "the last row of a batch of the most rows wrong": lambda mask: rows_from(last, mask, mask),
        "rows with padding wrong": _padded,
        "batches of unequal rows wrong": lambda mask: _any(_padded(mask)),
    }
    found = [Fault(kind, partial(_wrong_rows, which)) for kind, which in scaled.items()]
    return [*found, Fault("rows of a batch's last quarter swapped", _swapped)]


def _padded(mask: ir.Value) -> ir.Value:
    tokens = add(mask, "CastLike", mask, constant(mask, 1))
    lengths = add(mask, "ReduceSum", tokens, constant(mask, [1]), keepdims=0)
    return add(mask, "Less", lengths, add(mask, "Shape", mask, start=1, end=2))


def _any(rows: ir.Value) -> ir.Value:
    several = add(rows, "CastLike", rows, constant(rows, 1))
    count = add(rows, "ReduceSum", several, constant(rows, [0]), keepdims=1)
    return add(rows, "Greater", count, constant(rows, 0))


def _each_output(copy: BundleCopy, wrong: Callable[[ir.Value, ir.Value], ir.Value]) -> None:
    """Replaces each output of the encoder by a function of it and the mask."""
    mask = copy.tensor("encoder", *copy.specs["encoder"].names("source_mask"))
    for output in list(copy.graphs["encoder"].graph.outputs):
        replace(output, partial(wrong, mask), outside=True)


def _wrong_rows(which: Which, copy: BundleCopy) -> str:
    _each_output(copy, lambda mask, value: scaled_rows(value, which(mask), 2.0))
    return "encoder: outputs times 2"


def _swapped(copy: BundleCopy) -> str:
    def wrong(mask: ir.Value, value: ir.Value) -> ir.Value:
        count, rows = row_numbers(mask, mask)
        quarter = add(value, "Div", count, constant(value, 4))
        first = add(value, "Sub", count, quarter)
        ends = add(value, "Sub", add(value, "Add", first, count), constant(value, 1))
        late = add(value, "GreaterOrEqual", rows, first)
        order = add(value, "Where", late, add(value, "Sub", ends, rows), rows)
        return add(value, "Gather", value, order, axis=0)

    _each_output(copy, wrong)
    return "encoder: outputs, from last to first"
