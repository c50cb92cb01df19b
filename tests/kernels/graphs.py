"""Graphs of one operator, and float64's or the integers' answers to them."""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

Array = NDArray[Any]
# Arrays by name; None for an input that is left out.
Values = dict[str, Any]

DOMAIN = "transferry.kernels"
TYPES = {
    **dict.fromkeys(("y", "hidden", "top_logits", "sums", "maxima"), TensorProto.FLOAT),
    "top_tokens": TensorProto.INT64,
    **dict.fromkeys(("integers", "inner"), TensorProto.UINT8),
    **dict.fromkeys(("heads", "keys", "values"), TensorProto.INT8),
}
# Outputs of each operator, those that a graph may leave out last.
OUTPUTS = {
    **dict.fromkeys(("Linear", "LinearNorm"), "y integers"),
    "FeedForward": "y integers hidden inner",
    "LinearToHeads": "heads integers",
    **dict.fromkeys(("SelfAttention", "CrossAttention"), "y keys values"),
    **dict.fromkeys(("EncoderAttention", "Embed"), "y"),
    "ExpSums": "sums maxima",
    "LinearRank": "top_logits top_tokens sums",
}


class Operator:
    """A session over a graph of one operator.

    Args:
        library: The kernels.
        kind: The operator.
        values: All inputs in order, by name; one of None is left out.
        given: Names of the inputs that are no constants.
        outputs: Names of the outputs; the others are left out. Default: all.
        threads: Of the session.
        attributes: The node's.
    """

    def __init__(
        self,
        library: Path,
        kind: str,
        values: Values,
        given: str,
        outputs: str = "",
        threads: int = 1,
        **attributes: Any,
    ) -> None:
        self.given = given.split()
        outputs = outputs or OUTPUTS[kind]
        names = [name if name in outputs.split() else "" for name in OUTPUTS[kind].split()]
        inputs = [name if value is not None else "" for name, value in values.items()]
        node = helper.make_node(kind, inputs, names, domain=DOMAIN, **attributes)
        there = {name: value for name, value in values.items() if value is not None}
        graph = helper.make_graph(
            [node],
            kind,
            [
                helper.make_tensor_value_info(name, onnx_type(there[name]), None)
                for name in self.given
            ],
            [helper.make_tensor_value_info(name, TYPES[name], None) for name in outputs.split()],
            [
                numpy_helper.from_array(np.asarray(value), name)
                for name, value in there.items()
                if name not in self.given
            ],
        )
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        settings = onnxruntime.SessionOptions()
        settings.register_custom_ops_library(str(library))
        settings.log_severity_level = 4
        settings.intra_op_num_threads = threads
        settings.enable_cpu_mem_arena = False  # so that a sanitizer sees each tensor's end
        self.session = onnxruntime.InferenceSession(
            model.SerializeToString(), settings, providers=["CPUExecutionProvider"]
        )

    def __call__(self, values: Values) -> list[Array]:
        """Runs the operator over inputs by name; constants are ignored."""
        found: list[Array] = self.session.run(
            None, {name: np.asarray(values[name]) for name in self.given}
        )
        return found


def onnx_type(value: Array) -> int:
    return helper.np_dtype_to_tensor_dtype(value.dtype)


def layer(
    rng: np.random.Generator, inputs: int, outputs: int, *, bias: bool = True, zero: int = 117
) -> Values:
    """Constants of a linear layer whose neighbouring weights do not saturate AVX2."""
    weight = rng.integers(-127, 128, (outputs, inputs))
    odd = weight[:, 1::2]
    odd[:] = np.clip(odd, -128 - weight[:, ::2], 128 - weight[:, ::2])
    return {
        "x_scale": np.float32(0.021),
        "x_zero": np.uint8(zero),
        "weight": weight.astype(np.int8),
        "scale": np.float32(0.021 / 8),
        "scales": rng.uniform(1e-3, 2e-3, outputs).astype(np.float32),
        "bias": rng.standard_normal(outputs).astype(np.float32) if bias else None,
    }


def norm(rng: np.random.Generator, width: int) -> Values:
    gamma, beta = rng.uniform(0.5, 1.5, (2, width)).astype(np.float32)
    return {"gamma": gamma, "beta": beta}


def quantised(x: Array, values: Values, prefix: str = "") -> Array:
    """QuantizeLinear to uint8."""
    zero = int(values[prefix + "x_zero"])
    rounded = np.clip(np.rint(x / values[prefix + "x_scale"]), -zero, 255 - zero)
    q: Array = (rounded + zero).astype(np.uint8)
    return q


def product(q: Array, values: Values, prefix: str = "") -> Array:
    """A layer's outputs from its integers, to the bit."""
    zero, weight = int(values[prefix + "x_zero"]), values[prefix + "weight"]
    sums = (q.astype(np.int64) - zero) @ weight.T.astype(np.int64)
    y: Array = sums.astype(np.float32) * (values[prefix + "scale"] * values[prefix + "scales"])
    bias = values[prefix + "bias"]
    return y if bias is None else y + bias


def normalised(x: Array, values: Values, epsilon: float) -> Array:
    """LayerNormalization in float64."""
    x = x.astype(np.float64)
    centred = x - x.mean(axis=1, keepdims=True)
    deviation = np.sqrt((centred**2).mean(axis=1, keepdims=True) + epsilon)
    y: Array = centred / deviation * values["gamma"] + values["beta"]
    return y


def attended(query: Array, keys: Array, values: Array, bias: Array) -> Array:
    """Attention in float64: `[..., rows, width]` of `[..., columns, width]`."""
    scores = query.astype(np.float64) @ keys.astype(np.float64).swapaxes(-1, -2) + bias
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    y: Array = weights / weights.sum(axis=-1, keepdims=True) @ values.astype(np.float64)
    return y


def prefixed(prefix: str, values: Values) -> Values:
    return {prefix + name: value for name, value in values.items()}
