"""Faults of any variant: in every output of every graph, and in every kind of stored weight.

The faults of `graph_faults` know how the portable graphs are built. These know only the manifest,
so that no graph is left out, whichever is added.
"""

from __future__ import annotations

import re
from functools import partial

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from transferry.export.faults.fault import Fault
from transferry.export.subject.bundle_copy import BundleCopy, add, constant, replace
from transferry.runtime.bundle.specs import TensorSpec

SMALL = 1.01  # factor of a wrong value
LARGE = 2.0  # the same of a value that is good to a bound
# Constants that torch's exporter numbers, and those of `export.optimise`, have no names of weights.
NAMED = re.compile(r"(model\.|scale\.|.*\.weight\.|.*\.bias)")


def variant_faults(copy: BundleCopy) -> list[Fault]:
    """Returns a fault for each role of each graph's outputs, and for each kind of weight."""
    return [*_output_faults(copy), *_weight_faults(copy)]


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
    outputs = copy.graphs[graph].graph.outputs
    factor = LARGE if tensor.role == "approximate_logits" else SMALL
    (value,) = [output for output in outputs if output.name == tensor.name]

    def wrong(value: ir.Value) -> ir.Value:
        whole = tensor.type.startswith("int")
        by = constant(value, 1) if whole else constant(value, np.float32(factor))
        return add(value, "Add" if whole else "Mul", value, add(value, "CastLike", by, value))

    replace(value, wrong, outside=True)
    return f"{tensor.name}: {'plus 1' if tensor.type.startswith('int') else f'times {factor}'}"


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
    """Makes the entry of median size 1 % larger, or an integer one larger."""
    place = 0

    def change(array: NDArray[np.generic]) -> NDArray[np.generic]:
        nonlocal place
        flat = array.ravel()
        sizes = np.abs(flat.astype(np.float64))
        place = int(np.argsort(sizes)[len(sizes) // 2])
        if array.dtype.kind in "iu":
            flat[place] = flat[place] + 1 if flat[place] < 127 else flat[place] - 1
        else:
            flat[place] = flat[place] * SMALL if flat[place] else 0.01
        return flat.reshape(array.shape)

    copy.edit(name.removeprefix("model."), change)
    return f"{name}, entry {place} of {copy.array(name.removeprefix('model.')).size}"
