"""Stored weights of another tool's graphs beside the reference's, without running a graph.

Sees faults that the rounding of a precision hides: rounding is deterministic, so a weight in
float16 is the reference's rounded, and an integer the nearest one of its scale. Tools name and
arrange weights as they like, so each is looked for by its content, whole or as one of several
that are stored side by side, in both orientations.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

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
PADDED = 2  # of RoBERTa and BART; at position 1 they pad
DISTINCT = 8  # least numbers of unequal entries that tell a weight from a constant
# Share of entries that may differ by one step, as where an adapter was merged in another order.
FEW = 0.001
SMALLEST = 2.0**-22  # of float16; converters raise what is smaller
SCALE = 2.0**-11  # rounding of a scale in float16, of an entry
STEPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-20}  # of an entry
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Integers:
    """How integers stand for a matrix; every array is of its shape.

    Attributes:
        step: Distance of neighbouring integers.
        zero: The integers that stand for 0.
        ends: Where an integer is the least or the largest one.
    """

    step: Floats
    zero: Floats
    ends: NDArray[np.bool_]


@dataclass(frozen=True)
class Matrix:
    """A stored weight.

    Attributes:
        values: `[rows, width]`; a vector is `[rows, 1]`.
        turned: Whether the rows are columns of the stored matrix.
        added: Row of another table that was added to `values`.
    """

    name: str
    values: Floats
    dimensions: int = 2
    integers: Integers | None = None
    turned: bool = False
    added: Floats | None = None

    @property
    def sides(self) -> list[Self]:
        """The matrix, and with its columns as rows."""
        if self.dimensions == 1:
            return [self]
        given = self.integers
        turned = given and Integers(given.step.T, given.zero.T, given.ends.T)
        return [self, replace(self, values=self.values.T, integers=turned, turned=True)]


@dataclass(frozen=True)
class Side:
    """A matrix or its transpose beside the weights that its blocks of rows stand for."""

    matrix: Matrix
    blocks: list[tuple[slice, str]]
    problems: list[str]  # of blocks that are not these weights rounded


def counterparts(layout: Layout, weights: Mapping[str, Floats]) -> list[tuple[Matrix, Side | None]]:
    """Returns every stored matrix and vector, with its best side; None without known weights."""

    def side(matrix: Matrix) -> Side | None:
        blocks = blocks_of(matrix, weights)
        told = (_problem(matrix, rows, name, weights[name]) for rows, name in blocks)
        return Side(matrix, blocks, [*filter(None, told)]) if blocks else None

    def best(sides: Iterable[Side | None]) -> Side | None:
        known = (each for each in sides if each is not None)
        return min(known, key=lambda each: len(each.problems), default=None)

    stored = {each.name: each for each in _matrices(layout)}.values()
    found = {each.name: best(map(side, each.sides)) for each in stored}
    unknown = [each for each in stored if found[each.name] is None and each.dimensions == 2]
    for table, other in itertools.product(stored, unknown):
        rows, width = table.values.shape
        if len(other.values) >= rows or other.values.shape[1] != width or table.dimensions == 1:
            continue
        # A reference without segments adds the vector of the first one to its positions.
        row, integers = other.values[:1], table.integers
        if integers is not None and other.integers is not None:
            step = np.abs(integers.step) + np.abs(other.integers.step[:1])
            integers = replace(integers, step=step)
        folded = side(replace(table, values=table.values + row, integers=integers, added=row))
        if folded is not None and best([folded, found[table.name]]) is folded:
            found |= {table.name: folded, other.name: Side(other, [], [])}
    return [(each, found[each.name]) for each in stored]


def foreign_weights(model: nn.Module, layout: Layout) -> Claim:
    """Compares every stored weight of foreign graphs that the reference has.

    Of a kind of weights that mostly differ (GPTQ, AWQ, folded norms) none is held against the
    graphs: the claim tells that they were not compared.
    """
    equal: Counter[tuple[int, bool]] = Counter()
    problems: dict[tuple[int, bool], list[str]] = {}
    unknown = 0
    for matrix, side in counterparts(layout, reference_weights(model)):
        kind = matrix.dimensions, matrix.integers is None
        unknown += side is None
        if side is not None:
            equal[kind] += not side.problems
            problems.setdefault(kind, []).extend(side.problems[:1])
    unlike = [each for kind, each in problems.items() if len(each) > equal[kind]]
    told = [told for each in problems.values() if each not in unlike for told in each]
    unknown += sum(map(len, unlike))
    total = unknown + sum(equal.values()) + len(told)
    left = f"{unknown} of {total}, which are no weights of the reference" if unknown else ""
    return Claim(WEIGHTS, "; ".join(told), skipped=left)


def reference_weights(model: nn.Module) -> dict[str, Floats]:
    """Returns the weights to look for, as `[rows, width]`; a vector is `[rows, 1]`."""
    return {
        name: weight.reshape(len(weight), -1)
        for name, each in model.state_dict().items()
        if each.is_floating_point()
        if _tells(weight := each.detach().float().cpu().numpy())
    }


def _tells(weight: Floats) -> bool:
    """Whether a weight can be told from a constant by its entries."""
    if weight.ndim == 1:
        return len(np.unique(weight)) >= DISTINCT
    return weight.ndim == 2 and weight.size > 0


def blocks_of(matrix: Matrix, weights: Mapping[str, Floats]) -> list[tuple[slice, str]]:
    """Returns the weight that each block of rows is taken for; nothing if one is unknown.

    Of a table of positions up to `PADDED` rows precede the first position.
    """
    rows, width = matrix.values.shape
    for at in range(PADDED + 1):
        found = []
        while at < rows:
            fitting = (
                (_distance(matrix.values[at : at + len(weight)], weight), name)
                for name, weight in weights.items()
                if weight.shape[1] == width and at + len(weight) <= rows
            )
            distance, name = min(fitting, default=(np.inf, ""))
            if not distance < NEAR[matrix.dimensions]:
                break
            found.append((slice(at, at + len(weights[name])), name))
            at += len(weights[name])
        if at >= rows:
            return found
    return []


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
    if (integers := matrix.integers) is None:
        size = np.abs(weight)
        sides = []
        for kind, step in STEPS.items():
            rounded = torch.from_numpy(weight).to(getattr(torch, kind)).float().numpy()
            far = np.abs(values - rounded)
            sides.append((far > SMALLEST + STEPS["float32"] * size, far > SMALLEST + step * size))
    else:
        steps, far = np.abs(integers.step[rows]), np.abs(values - weight)
        cut = integers.ends[rows] & (np.abs(weight) > np.abs(values))
        slack = SCALE * np.abs(weight)
        sides = [((far > steps / 2 + slack) & ~cut, far > 1.5 * steps + slack)]
    off, beyond = min(sides, key=lambda side: int(side[0].sum()))
    if not beyond.any() and off.mean() <= FEW:
        return ""
    return f"{int(off.sum()):,} of {off.size:,} entries of {matrix.name} are not {name} rounded"


def _matrices(layout: Layout) -> Iterator[Matrix]:
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
            rank = len(tensor.shape)
            if base != name and scale is not None and name not in read and rank in NEAR:
                zero = constants.get(f"{base}_zero_point")
                given = (scale.numpy(), None if zero is None else zero.numpy())
                array = tensor.numpy()
                whole = _dequantised(name, array.reshape(len(array), -1), *given, axis=rank - 1)
                yield replace(whole, dimensions=rank)
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

    given = scale, np.zeros_like(scale) if zero is None else zero
    step, middle = (np.broadcast_to(spread(each), wide.shape) for each in given)
    return Matrix(name, (wide - middle) * step, 2, Integers(step, middle, ends))


def _nibbles(packed: NDArray[Any], bits: int) -> NDArray[np.uint8]:
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
