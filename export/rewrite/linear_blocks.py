"""Linear layers with weights in blocks of 4 or 8 bits: MatMulNBits.

At accuracy level 4 the kernel rounds each block of an input to 127 steps of its largest value, as
it computes: nothing is calibrated, no row depends on its neighbours, and sums of integers are
exact. Level 1, float32 arithmetic on the rounded weights, is a fifth as fast with one row.
"""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from transferry.build_model.model.transformer import Transformer
from transferry.export.recipes import Recipe
from transferry.export.rewrite.calibration import Calibration
from transferry.export.rewrite.fused import fused_graphs
from transferry.export.rewrite.fusion import Linear
from transferry.export.rewrite.linear_int8 import parameter
from transferry.export.rewrite.rounded_weights import BLOCK, WIDE, bits_of, blocks
from transferry.export.trace.editing import (
    CONTRIB,
    array_of,
    cast,
    constant,
    register,
    replace_lookups,
    shared,
)
from transferry.export.trace.graph import Graph, Traces

ACCURACY_LEVEL = 4


def in_blocks(
    model: Transformer, recipe: Recipe, traces: Traces, calibration: Calibration | None
) -> dict[str, Graph]:
    """Makes a fused variant with weights in blocks; see `make.Maker`."""
    return fused_graphs(model, recipe, traces, BlockKernels(recipe.precision.block_bits))


class BlockKernels:
    """MatMulNBits: (q_x s_x) (q_W s_W) + b, summed in int32 within a block."""

    def __init__(self, bits: int) -> None:
        """Takes the bits of a weight of most layers; see `bits_of`."""
        self._bits = bits

    def emit(self, linear: Linear, x: ir.Value, graph: ir.Graph) -> Sequence[ir.Node]:
        """See `Kernels.emit`."""
        weight, scales = block_weight(graph, linear.weight, self._bits)
        bias, name = linear.bias, parameter(linear.weight)
        if linear.divisor != 1:  # a power of two, so that the quotients are exact
            divisor = np.float32(linear.divisor)
            scales = register(graph, f"{name}.divided_scales", array_of(scales) / divisor)
            if bias is not None:
                bias = register(graph, f"{name}.divided_bias", array_of(bias) / divisor)
        outputs, inputs = array_of(linear.weight).shape
        attributes = {
            "N": outputs,
            "K": inputs,
            "bits": bits_of(name, self._bits),
            "block_size": BLOCK,
            "accuracy_level": ACCURACY_LEVEL,
        }
        tape = ir.tape.Tape()
        # With AVX2 alone the kernels of one row and of several sum blocks of 4 bits in different
        # orders: a row of zeros always selects the kernel of several.
        single = attributes["bits"] == 4
        if single:
            zeros = shared(graph, f"zeros_{inputs}", np.zeros((1, inputs), np.float32))
            x = tape.op("Concat", [x, zeros], {"axis": 0})
        product = tape.op(
            "MatMulNBits", [x, weight, scales, None, None, bias], attributes, domain=CONTRIB
        )
        if single:
            first, last = constant(graph, "first", [0]), constant(graph, "last_row", [-1])
            product = tape.op("Slice", [product, first, last, first])
        if linear.relu:
            tape.op("Relu", [product])
        return tape.nodes

    def look_up(self, graph: ir.Graph) -> None:
        """Looks up rows in 8 bits; a tied embedding shares its blocks with the LM head."""
        for name in WIDE:
            replace_lookups(graph, f"model.{name}", _rows)


def _rows(tape: ir.tape.Tape, weight: ir.Value, node: ir.Node) -> ir.Value:
    graph, ids, width = node.graph, node.inputs[1], array_of(weight).shape[1]
    assert isinstance(graph, ir.Graph)
    integers, scales = block_weight(graph, weight, 8)
    rows = cast(tape, tape.op("Gather", [integers, ids]), ir.DataType.FLOAT)
    middle = register(graph, f"{node.name}.middle", np.float32(128))
    last = constant(graph, "last", [-1])
    factors = tape.op("Unsqueeze", [tape.op("Gather", [scales, ids]), last])
    product = tape.op("Mul", [tape.op("Sub", [rows, middle]), factors])
    joined = constant(graph, "joined", [0, 0, -1])  # batch, length, blocks times 32
    product = tape.op("Reshape", [product, joined])
    if width % BLOCK:
        ends = [constant(graph, "cut", [number]) for number in (0, width)]
        product = tape.op("Slice", [product, *ends, last])
    return product


def block_weight(graph: ir.Graph, weight: ir.Value, bits: int) -> tuple[ir.Value, ir.Value]:
    """Returns a weight's integers and scales as initializers of the graph."""
    name = parameter(weight)
    if f"{name}.blocks" not in graph.initializers:
        found = blocks(array_of(weight), bits_of(name, bits))
        register(graph, f"{name}.blocks", found.packed())
        register(graph, f"{name}.block_scales", found.scales)
    return graph.initializers[f"{name}.blocks"], graph.initializers[f"{name}.block_scales"]
