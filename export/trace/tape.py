"""A tape of nodes with the combinations of operators that searches repeat."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from transferry.export.trace.editing import cast

END = 1 << 40  # behind the last column


class Tape(ir.tape.Tape):
    """Nodes of one graph, with the combinations of operators that searches repeat."""

    def of(self, *numbers: int, flat: bool = True) -> ir.Value:
        """Returns an int64 constant: `[numbers]`, or a scalar if not flat."""
        return self.constant(np.array(numbers if flat else numbers[0], np.int64))

    def constant(self, array: NDArray[Any] | np.generic) -> ir.Value:
        """Returns a constant."""
        return self.op("Constant", [], {"value": ir.tensor(array)})

    def integers(self, value: ir.Value) -> ir.Value:
        """Casts to int64."""
        return cast(self, value, ir.DataType.INT64)

    def size(self, value: ir.Value, axis: int) -> ir.Value:
        """Returns the size of one dimension `[1]` int64."""
        return self.op("Shape", [value], {"start": axis, "end": axis + 1})

    def filled(self, number: Any, *shape: ir.Value) -> ir.Value:
        """Returns a tensor of equal entries, whose sizes are given as `[1]` each."""
        sizes = self.op("Concat", list(shape), {"axis": 0})
        return self.op("ConstantOfShape", [sizes], {"value": ir.tensor(np.array([number]))})

    def joined(self, *values: ir.Value) -> ir.Value:
        """Concatenates columns."""
        return self.op("Concat", list(values), {"axis": 1})

    def any(self, values: ir.Value, axis: int) -> ir.Value:
        """Whether any entry along an axis is true."""
        most = self.op("ReduceMax", [self.integers(values), self.of(axis)], {"keepdims": 0})
        return cast(self, most, ir.DataType.BOOL)

    def columns(self, value: ir.Value, first: int, last: int) -> ir.Value:
        """Returns the columns from `first` up to `last`, excluded."""
        return self.op("Slice", [value, self.of(first), self.of(last), self.of(1)])

    def picked(self, value: ir.Value, places: ir.Value) -> ir.Value:
        """Returns entries of each row by their columns."""
        return self.op("GatherElements", [value, places], {"axis": 1})

    def range(self, count: ir.Value) -> ir.Value:
        """Returns 0, 1, 2, ... up to a scalar count."""
        return self.op("Range", [self.of(0, flat=False), count, self.of(1, flat=False)])

    def unsqueezed(self, value: ir.Value, axis: int) -> ir.Value:
        """Adds a dimension of size 1."""
        return self.op("Unsqueeze", [value, self.of(axis)])
