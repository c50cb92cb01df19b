"""The encoder's attention as one operator, ONNX's Attention of opset 24.

The exporter splits queries, keys and values into heads and transposes each, so that products of
matrices can read them. onnxruntime's kernel reads the heads where the linear layers left them, and
adds the bias within its product.
"""

from __future__ import annotations

import onnx_ir as ir

from transferry.build_model.model.config import ModelConfig
from transferry.export.trace.editing import argument, constant, only_consumer, size
from transferry.export.trace.graph import Graph
from transferry.export.trace.in_place import FUSED_OPSET

IN_HEADS = [0, 2, 1, 3]  # from [batch, length, heads, d_head] to the heads first, and back
LAST_TWO = [0, 1, 3, 2]
KEYS_IN_HEADS = [0, 2, 3, 1]  # likewise, with the features of a key in a column


def attentions_to_fuse(config: ModelConfig) -> int:
    """Returns the number of encoder attentions that `fuse_attentions` replaces.

    Zero where an operator stands between the linear layers and the products of heads, or between
    these products and the softmax.
    """
    plain = config.positions != "rotary" and config.kv_heads == config.heads
    attentions = config.encoder_layers + 2 * config.rereading_layers
    return attentions if plain and not config.attention_softcap else 0


def fuse_attentions(encoder: Graph) -> int:
    """Replaces softmax(Q K^T + M) V between linear layers by one operator; returns their number.

    The encoder is fused, in float32, and its first input is the source.
    """
    graph = encoder.model.graph
    encoder.model.opset_imports[""] = FUSED_OPSET
    biases: dict[ir.Value, ir.Value] = {}
    softmaxes = [node for node in graph if node.op_type == "Softmax"]
    return sum(_fuse(softmax, graph, biases) for softmax in softmaxes)


def _fuse(softmax: ir.Node, graph: ir.Graph, biases: dict[ir.Value, ir.Value]) -> bool:
    """Fuses the attention around a softmax; returns whether it is written as expected."""
    total = argument(softmax, 0).producer()
    product = only_consumer(softmax.outputs[0])
    if total is None or total.op_type != "Add" or product is None or product.op_type != "MatMul":
        return False
    scores, bias = argument(total, 0).producer(), argument(total, 1)
    joined = only_consumer(product.outputs[0])
    if scores is None or scores.op_type != "MatMul" or joined is None:
        return False
    split = [
        _before(argument(scores, 0), IN_HEADS),
        _before(argument(scores, 1), KEYS_IN_HEADS),
        _before(argument(product, 1), IN_HEADS),
    ]
    heads_first = joined.op_type == "Transpose" and _permutation(joined) == IN_HEADS
    if None in split or not heads_first:
        return False
    tape = ir.tape.Tape()
    heads, d_head = size(argument(scores, 0), 1), size(argument(scores, 0), 3)
    width, kind = heads * d_head, product.outputs[0].type
    last = constant(graph, "width", [width])
    sizes = tape.op("Concat", [tape.op("Shape", [graph.inputs[0]]), last], {"axis": 0})

    def of_width() -> ir.Value:
        return ir.Value(shape=ir.Shape(["batch", "source", width]), type=kind)

    inputs = [tape.op("Reshape", [value, sizes], output=of_width()) for value in split]
    if bias not in biases:
        biases[bias] = bias
        if bias.shape is not None and bias.shape[2] == 1:
            # The operator has no broadcast over queries.
            length = tape.op("Shape", [graph.inputs[0]], {"start": 1, "end": 2})
            one = constant(graph, "one", [1])
            queries = tape.op("Concat", [one, one, length, one], {"axis": 0})
            biases[bias] = tape.op("Expand", [bias, queries])
    attended = tape.op(
        "Attention",
        [*inputs, biases[bias]],
        # The query is scaled already.
        {"q_num_heads": heads, "kv_num_heads": heads, "scale": 1.0},
        output=of_width(),
    )
    graph.insert_before(product, tape.nodes)
    # Its reader reshapes it into a matrix, with the numbers in the same order.
    joined.outputs[0].replace_all_uses_with(attended)
    return True


def _before(value: ir.Value, permutation: list[int]) -> ir.Value | None:
    """Returns the value before a permutation split it into heads, or None."""
    transpose = value.producer()
    if transpose is None or transpose.op_type != "Transpose":
        return None
    if permutation == KEYS_IN_HEADS and _permutation(transpose) == LAST_TWO:
        return _before(argument(transpose, 0), IN_HEADS)  # others read the heads of keys, too
    split = argument(transpose, 0)
    reshape = split.producer()
    if _permutation(transpose) != permutation:
        return None
    return argument(reshape, 0) if reshape is not None and reshape.op_type == "Reshape" else split


def _permutation(transpose: ir.Node) -> list[int]:
    return list(transpose.attributes["perm"].as_ints())
