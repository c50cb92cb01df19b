"""Stored weights of another tool's graphs beside the reference's, without running a graph.

Sees faults that the rounding of a precision hides: rounding is deterministic, so a weight in
float16 is the reference's rounded, and an integer the nearest one of its scale. Tools name and
arrange weights as they like, so each is looked for by its content, whole or as one of several
that are stored side by side, in both orientations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import nn

from transferry.export.checks.weights import WEIGHTS
from transferry.export.subject.layout import Layout, bits, stored
from transferry.runtime.proof.report import Claim

# Largest median distance, over the median entry, from the weight that a matrix or vector may stand
# for: 4 bits have 0.2, another matrix 1.4, and all gains of norms lie near 1.
NEAR = {2: 0.5, 1: 0.05}
ROWS = 9  # rows that are compared to find a weight
DISTINCT = 8  # least numbers of unequal entries that tell a weight from a constant
# Share of entries that may differ by one step, as where an adapter was merged in another order.
FEW = 0.001
SMALLEST = 2.0**-22  # of float16; converters raise what is smaller
SCALE = 2.0**-11  # rounding of a scale in float16, of an entry
STEPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-20}  # of an entry
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Matrix:
    """A stored weight.

    Attributes:
        name: Name of its initializer.
        values: `[rows, width]`; a vector is `[rows, 1]`.
        dimensions: Number of its axes.
        step: Distance of neighbouring integers, broadcastable to `values`; None of floats.
        ends: Where `values` are the least or the largest integer.
    """

    name: str
    values: Floats
    dimensions: int = 2
    step: Floats | None = None
    ends: NDArray[np.bool_] | None = None

    @property
    def transposed(self) -> Matrix:
        """The same weight, its columns as rows."""
        step, ends = self.step, self.ends
        turned = None if step is None else step.T, None if ends is None else ends.T
        return Matrix(self.name, self.values.T, self.dimensions, *turned)


def foreign_weights(model: nn.Module, layout: Layout) -> Claim:
    """Compares every stored weight of foreign graphs that the reference has.

    Of a kind of weights that mostly differ (GPTQ, AWQ, folded norms) none is held against the
    graphs: the claim tells that they were not compared.
    """
    weights = {
        name: weight.reshape(len(weight), -1)
        for name, each in model.state_dict().items()
        if each.is_floating_point()
        if _tells(weight := each.detach().float().cpu().numpy())
    }
    equal: Counter[tuple[int, bool]] = Counter()
    problems: dict[tuple[int, bool], list[str]] = {}
    unknown = 0
    for matrix in {each.name: each for each in _matrices(layout)}.values():
        kind = matrix.dimensions, matrix.step is None
        both = [matrix, matrix.transposed] if matrix.dimensions == 2 else [matrix]
        found = [parts for side in both if (parts := list(_parts(side, weights)))]
        if not found:
            unknown += 1
            continue
        wrong = [[problem for problem in parts if problem] for parts in found]
        best = min(wrong, key=len)
        equal[kind] += not best
        problems.setdefault(kind, []).extend(best[:1])
    unlike = [each for kind, each in problems.items() if len(each) > equal[kind]]
    told = [told for each in problems.values() if each not in unlike for told in each]
    unknown += sum(map(len, unlike))
    total = unknown + sum(equal.values()) + len(told)
    left = f"{unknown} of {total}, which are no weights of the reference" if unknown else ""
    return Claim(WEIGHTS, "; ".join(told), skipped=left)


def _tells(weight: Floats) -> bool:
    """Whether a weight can be told from a constant by its entries."""
    if weight.ndim == 1:
        return len(np.unique(weight)) >= DISTINCT
    return weight.ndim == 2 and weight.size > 0


def _parts(matrix: Matrix, weights: Mapping[str, Floats]) -> Iterator[str]:
    """Yields how each part differs from the weight that it is taken for; none if one is unknown."""
    at, found = 0, []
    while at < len(matrix.values):
        fitting = (
            (_distance(matrix.values[at : at + len(weight)], weight), name)
            for name, weight in weights.items()
            if weight.shape[1] == matrix.values.shape[1] and at + len(weight) <= len(matrix.values)
        )
        distance, name = min(fitting, default=(np.inf, ""))
        if not distance < NEAR[matrix.dimensions]:
            return
        found.append((at, name))
        at += len(weights[name])
    for begin, name in found:
        yield _problem(matrix, slice(begin, begin + len(weights[name])), name, weights[name])


def _distance(values: Floats, weight: Floats) -> float:
    """Returns the median distance of entries, which a few wrong ones do not move."""
    rows = np.unique(np.linspace(0, len(weight) - 1, ROWS).astype(np.int64))
    if weight.shape[1] == 1:
        rows = np.arange(len(weight))
    away, size = np.abs(values[rows] - weight[rows]), np.abs(weight[rows])
    return float(np.median(away) / max(float(np.median(size)), SMALLEST))


def _problem(matrix: Matrix, rows: slice, name: str, weight: Floats) -> str:
    """Describes how rows differ from a weight rounded; empty if they do not."""
    values = matrix.values[rows]
    if matrix.step is None or matrix.ends is None:
        size = np.abs(weight)
        sides = []
        for kind, step in STEPS.items():
            rounded = torch.from_numpy(weight).to(getattr(torch, kind)).float().numpy()
            far = np.abs(values - rounded)
            sides.append((far > SMALLEST + STEPS["float32"] * size, far > SMALLEST + step * size))
    else:
        steps, far = (
            np.broadcast_to(matrix.step, matrix.values.shape)[rows],
            np.abs(values - weight),
        )
        cut = matrix.ends[rows] & (np.abs(weight) > np.abs(values))
        slack = SCALE * np.abs(weight)
        sides = [((far > steps / 2 + slack) & ~cut, far > 1.5 * steps + slack)]
    off, beyond = min(sides, key=lambda side: int(side[0].sum()))
    if not beyond.any() and off.mean() <= FEW:
        return ""
    return f"{int(off.sum()):,} of {off.size:,} entries of {matrix.name} are not {name} rounded"


def _matrices(layout: Layout) -> Iterator[Matrix]:
    """Yields the matrices and vectors of all graphs."""
    for graph in layout.graphs:
        model = ir.load(graph.path)
        constants = {str(each.name): each for each in stored(model) if each.name}
        bases = {name.removesuffix("_quantized") for name in constants if "_quantized" in name}
        read = {f"{base}_scale" for base in bases}  # integers read below, and scales
        for node in model.graph.all_nodes():
            names = [str(value.name) if value is not None else "" for value in node.inputs]
            if (unpack := UNPACK.get(node.op_type)) is None:
                continue
            arrays = [constants[name].numpy() if name in constants else None for name in names]
            read |= {*names} & constants.keys()
            if (matrix := unpack(names, arrays, node)) is not None:
                yield matrix
        for name, tensor in constants.items():
            base = name.removesuffix("_quantized")
            scale = constants.get(f"{base}_scale")
            if base != name and scale is not None and name not in read:
                zero = constants.get(f"{base}_zero_point")
                given = (scale.numpy(), None if zero is None else zero.numpy())
                yield _dequantised(name, tensor.numpy(), *given, axis=1)
            elif name not in read and tensor.dtype.is_floating_point():
                values = tensor.numpy().astype(np.float32)
                if _tells(values):
                    yield Matrix(name, values.reshape(len(values), -1), values.ndim)


def _dequantised(
    name: str,
    integers: NDArray[Any],
    scale: NDArray[Any],
    zero: NDArray[Any] | None,
    axis: int = 1,
    block: int = 0,
) -> Matrix:
    """Returns a matrix of the integers of DequantizeLinear."""
    wide = integers.astype(np.float32)
    ends = (wide == wide.min()) | (wide == wide.max())

    def spread(each: NDArray[Any]) -> Floats:
        each = each.astype(np.float32)
        if block:
            return np.repeat(each, block, axis)[: wide.shape[0], : wide.shape[1]]
        return np.moveaxis(each.reshape(-1, 1), 0, axis) if each.size > 1 else each.reshape(1, 1)

    step = np.broadcast_to(spread(scale), wide.shape)
    if zero is not None:
        wide = wide - spread(zero)
    return Matrix(name, wide * step, 2, np.abs(step), ends)


def _nibbles(packed: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """Unpacks the last axis, the lowest bits first."""
    parts = [(packed >> np.uint8(at)) & np.uint8(2**bits - 1) for at in range(0, 8, bits)]
    return np.stack(parts, -1).reshape(*packed.shape[:-1], -1)


def _blocks(names: list[str], arrays: list[Any], node: ir.Node) -> Matrix | None:
    """Reads MatMulNBits: integers `[N, blocks, bytes]`, a scale and a zero point for each block."""
    packed, scales, zero = (*arrays[1:], None, None)[:3]
    if packed is None or scales is None:
        return None
    width, (rows, count, _) = bits(node), packed.shape
    block, inputs = (int(node.attributes[key].value) for key in ("block_size", "K"))
    integers = _nibbles(packed, width).reshape(rows, -1)[:, :inputs]
    if zero is None:
        zero = np.full((rows, count), 2 ** (width - 1))
    elif zero.dtype == np.uint8:
        zero = _nibbles(zero.reshape(rows, -1), width)[:, :count]
    shaped = scales.reshape(rows, count), zero.reshape(rows, count)
    return _dequantised(names[1], integers, *shaped, axis=1, block=block)


def _gathered(names: list[str], arrays: list[Any], node: ir.Node) -> Matrix | None:
    """Reads GatherBlockQuantized: a table whose rows are cut into blocks."""
    table, _, scales, zero = (*arrays, None)[:4]
    if table is None or scales is None:
        return None
    if table.dtype == np.uint8:
        table, middle = _nibbles(table, bits(node)), 2 ** (bits(node) - 1)
        zero = np.full(scales.shape, middle) if zero is None else _nibbles(zero, bits(node))
        zero = zero[:, : scales.shape[1]]
    block = int(node.attributes["block_size"].value) if "block_size" in node.attributes else 128
    return _dequantised(names[0], table, scales, zero, axis=1, block=block)


def _linear(names: list[str], arrays: list[Any], node: ir.Node) -> Matrix | None:
    """Reads DequantizeLinear."""
    integers, scale, zero = (*arrays, None)[:3]
    if integers is None or scale is None or integers.ndim != 2 or integers.dtype == np.int32:
        return None
    axis, block = (
        int(node.attributes[key].value) if key in node.attributes else default
        for key, default in (("axis", 1), ("block_size", 0))
    )
    return _dequantised(names[0], integers, scale, zero, axis % 2, block)


UNPACK: Mapping[str, Callable[[list[str], list[Any], ir.Node], Matrix | None]] = {
    "MatMulNBits": _blocks,
    "GatherBlockQuantized": _gathered,
    "DequantizeLinear": _linear,
}
