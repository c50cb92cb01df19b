"""Linear layers in 8 bits: weights signed, a scale an output; activations unsigned, scales fixed.

A scale measured on the batch at hand would make an answer depend on its neighbours in the batch.
These are measured once, on text of the user's (`export.calibration`).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from transferry.export.optimise.calibration import Activation
from transferry.export.optimise.fusion import CONTRIB, Linear, find_linear, register
from transferry.export.optimise.weight_int8 import quantised


class Int8Kernels:
    """x and W in 8 bits, products summed up in 32, the result in float32.

    MatMulIntegerToFloat: (q_x - z_x) s_x (q_W s_W) + b.
    """

    def __init__(self, activations: Mapping[str, Activation]) -> None:
        """Takes what the inputs of the linear layers are quantised with, by name of the weight."""
        self.activations = activations
        self._inputs: dict[tuple[ir.Value, float], ir.Value] = {}

    def emit(self, linear: Linear, x: ir.Value, graph: ir.Graph) -> list[ir.Node]:
        """See `Kernels.emit`."""
        weight, scales = quantised_weight(graph, linear.weight)
        activation = self._activation(linear)
        name = parameter(linear.weight)
        scale = register(graph, f"{name}.input_scale", np.float32(activation.scale))
        zero = register(graph, f"{name}.input_zero", np.uint8(activation.zero_point))
        nodes = []
        key = (x, activation.scale)
        if key not in self._inputs:
            nodes.append(ir.node("QuantizeLinear", [x, scale, zero]))
            self._inputs[key] = nodes[-1].outputs[0]
        # onnxruntime folds the Transpose when it opens the graph.
        nodes.append(ir.node("Transpose", [weight], {"perm": [1, 0]}))
        bias = linear.bias
        if linear.divisor != 1:
            divided = np.float32(activation.scale / linear.divisor)
            scale = register(graph, f"{name}.divided_scale", divided)
            if bias is not None:
                assert bias.const_value is not None
                array = bias.const_value.numpy() / np.float32(linear.divisor)
                bias = register(graph, f"{name}.divided_bias", array)
        inputs = [self._inputs[key], nodes[-1].outputs[0], scale, scales, zero, None, bias]
        nodes.append(ir.node("MatMulIntegerToFloat", inputs, domain=CONTRIB))
        if linear.relu and not self._clamped(linear):
            nodes.append(ir.node("Relu", [nodes[-1].outputs[0]]))
        return nodes

    def _activation(self, linear: Linear) -> Activation:
        return self.activations[parameter(linear.weight)]

    def _clamped(self, linear: Linear) -> bool:
        """Whether all that read the output quantise it from 0 upwards, which is a ReLU too."""
        readers = [find_linear(node) for node in linear.output.consumers()]
        return not linear.output.is_graph_output() and all(
            reader is not None and self._activation(reader).zero_point == 0 for reader in readers
        )


def quantise_embedding(graph: ir.Graph, name: str) -> None:
    """Lets the embedding look up 8 bits and their scale: where tied, those of the output layer.

    Args:
        graph: Changed in place; one without an embedding stays as it is.
        name: Of the embedding [vocabulary, d_model].
    """
    weight = graph.initializers.get(name)
    if weight is None:
        return
    for node in list(weight.consumers()):
        if node.op_type == "Gather":
            integers, scales = quantised_weight(graph, weight)
            column = _column(graph, scales)
            ids = node.inputs[1]
            rows = ir.node("Gather", [integers, ids])
            floats = ir.node("Cast", [rows.outputs[0]], {"to": int(ir.DataType.FLOAT)})
            scale = ir.node("Gather", [column, ids])
            product = ir.node("Mul", [floats.outputs[0], scale.outputs[0]])
            product.outputs[0].type = node.outputs[0].type
            product.outputs[0].shape = node.outputs[0].shape
            graph.insert_before(node, [rows, floats, scale, product])
            node.outputs[0].replace_all_uses_with(product.outputs[0])
            graph.remove(node, safe=True)


def parameter(weight: ir.Value) -> str:
    """Returns torch's name of a weight of an exported graph."""
    return str(weight.name).removeprefix("model.")


def quantised_weight(graph: ir.Graph, weight: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Returns a weight's integers and scales as initializers of the graph."""
    name = parameter(weight)
    if f"{name}.int8" not in graph.initializers:
        assert weight.const_value is not None
        integers, scales = quantised(weight.const_value.numpy())
        register(graph, f"{name}.int8", integers)
        register(graph, f"{name}.scales", scales)
    return graph.initializers[f"{name}.int8"], graph.initializers[f"{name}.scales"]


def _column(graph: ir.Graph, scales: ir.Value) -> ir.Value:
    name = f"{scales.name}.column"
    if name not in graph.initializers:
        assert scales.const_value is not None
        register(graph, name, scales.const_value.numpy()[:, None])
    return graph.initializers[name]
