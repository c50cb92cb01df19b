"""Linear layers in int8: signed weights with a scale per output, uint8 inputs with fixed scales.

A scale measured on the current batch would make a row's result depend on its neighbours. These
scales are measured once, on the user's text (`export.rewrite.calibration`). The few inputs whose
range is far wider than the others' are multiplied in float32 beside the integers, which then have
the range of the others (Dettmers et al. 2022, LLM.int8(), there with ranges of the batch).
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from transferry.export.rewrite.calibration import Activation
from transferry.export.rewrite.fusion import Linear, find_linear
from transferry.export.rewrite.rounded_weights import quantised
from transferry.export.trace.editing import (
    CONTRIB,
    array_of,
    cast,
    register,
    replace_lookups,
    shared,
)

EMBEDDING = "model.embedding.weight"


class Int8Kernels:
    """MatMulIntegerToFloat: (q_x - z_x) s_x (q_W s_W) + b, summed in int32, result in float32.

    A Gemm over the columns of wide inputs adds theirs.
    """

    def __init__(
        self, activations: Mapping[str, Activation], release: Callable[[], None] = lambda: None
    ) -> None:
        """Takes the quantisation of the layers' inputs by the weights' names.

        `release` is called when the weight of a layer was read.
        """
        self.activations, self.release = activations, release
        self._inputs: dict[tuple[ir.Value, Activation], ir.Value] = {}
        self._columns: dict[tuple[ir.Value, tuple[int, ...]], ir.Value] = {}

    def emit(self, linear: Linear, x: ir.Value, graph: ir.Graph) -> Sequence[ir.Node]:
        """See `Kernels.emit`."""
        activation, name = self._activation(linear), parameter(linear.weight)
        wide = activation.wide
        weight, scales = quantised_weight(graph, linear.weight, wide=wide)
        exact = array_of(linear.weight)[:, list(wide)] if wide else None
        self.release()
        scale = register(graph, f"{name}.input_scale", np.float32(activation.scale))
        zero = register(graph, f"{name}.input_zero", np.uint8(activation.zero_point))
        tape, key, bias = ir.tape.Tape(), (x, activation), linear.bias
        if key not in self._inputs:
            self._inputs[key] = tape.op("QuantizeLinear", [x, scale, zero])
        weight = transposed(tape, weight)
        if linear.divisor != 1:
            divided = np.float32(activation.scale / linear.divisor)
            scale = register(graph, f"{name}.divided_scale", divided)
            if bias is not None:
                quotient = array_of(bias) / np.float32(linear.divisor)
                bias = register(graph, f"{name}.divided_bias", quotient)
        inputs = [self._inputs[key], weight, scale, scales, zero, None, bias]
        product = tape.op("MatMulIntegerToFloat", inputs, domain=CONTRIB)
        if exact is not None:
            if (x, wide) not in self._columns:
                numbers = register(graph, f"{name}.wide_inputs", np.array(wide))
                self._columns[x, wide] = tape.op("Gather", [x, numbers], {"axis": 1})
            given = self._columns[x, wide], register(graph, f"{name}.wide", exact), product
            product = tape.op("Gemm", given, {"transB": 1, "alpha": 1 / linear.divisor})
        if linear.relu and not self._clamped(linear):
            tape.op("Relu", [product])
        return tape.nodes

    def look_up(self, graph: ir.Graph) -> None:
        """Looks up int8 rows; a tied embedding shares its integers and scales with the LM head."""
        replace_lookups(graph, EMBEDDING, int8_rows)

    def _activation(self, linear: Linear) -> Activation:
        return self.activations[parameter(linear.weight)]

    def _clamped(self, linear: Linear) -> bool:
        """Whether every reader quantises the output with zero point 0, which implies ReLU."""
        readers = [find_linear(node) for node in linear.output.consumers()]
        return not linear.output.is_graph_output() and all(
            reader is not None
            and self._activation(reader).zero_point == 0
            and not self._activation(reader).wide
            for reader in readers
        )


def int8_rows(tape: ir.tape.Tape, weight: ir.Value, node: ir.Node) -> ir.Value:
    """Looks up int8 rows and scales of an embedding; see `editing.replace_lookups`."""
    graph, ids = node.graph, node.inputs[1]
    assert isinstance(graph, ir.Graph)
    integers, scales = quantised_weight(graph, weight)
    column = shared(graph, f"{scales.name}.column", array_of(scales)[:, None])
    rows = cast(tape, tape.op("Gather", [integers, ids]), ir.DataType.FLOAT)
    return tape.op("Mul", [rows, tape.op("Gather", [column, ids])])


def parameter(weight: ir.Value) -> str:
    """Returns torch's name of a weight of an exported graph."""
    return str(weight.name).removeprefix("model.")


def quantised_weight(
    graph: ir.Graph, weight: ir.Value, *, pairs: bool = True, wide: Sequence[int] = ()
) -> tuple[ir.Value, ir.Value]:
    """Returns a weight's integers and scales as initializers of the graph; see `quantised`."""
    name = parameter(weight)
    if f"{name}.int8" not in graph.initializers:
        integers, scales = quantised(array_of(weight), pairs=pairs, wide=wide)
        register(graph, f"{name}.int8", integers)
        register(graph, f"{name}.scales", scales)
    return graph.initializers[f"{name}.int8"], graph.initializers[f"{name}.scales"]


def transposed(tape: ir.tape.Tape, weight: ir.Value) -> ir.Value:
    """Transposes a matrix; onnxruntime folds that when it opens the graph."""
    return tape.op("Transpose", [weight], {"perm": [1, 0]})
