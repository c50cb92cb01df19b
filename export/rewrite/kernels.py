"""cpu-int8 with chains of operators as single operators of the package transferry-kernels.

With few rows, onnxruntime spends much of a step between operators. An operator here replaces a
chain that matches its pattern to the last attribute, constant and mask, so that torch rounds as for
cpu-int8; every other chain stays. Weights keep their names and bytes: both variants share them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, permutations, repeat, zip_longest
from typing import Any

import numpy as np
import onnx_ir as ir

from transferry.build_model.model.transformer import Transformer
from transferry.export.recipes import Recipe
from transferry.export.rewrite import kv_cache_int8
from transferry.export.rewrite.calibration import Calibration
from transferry.export.rewrite.fused import IN_HEADS, LAST_TWO
from transferry.export.rewrite.lm_head import ranked_layer_graph
from transferry.export.trace.editing import (
    KERNELS,
    alike,
    argument,
    array_of,
    drop_unused,
    of_weights,
    only_consumer,
    rank,
    shared,
    size,
)
from transferry.export.trace.graph import Graph, Traces
from transferry.runtime.errors import UsageError

VERSION = 2
GRAPHS = ("encoder", "decoder", "lm_head")
LANES, WIDEST_HEAD = 16, 256  # widths fill vectors of 16
MOST_INPUTS = 1 << 16  # whose sum of products fits int32
FEW = 8  # entries of a constant that is compared
SOURCE = ["batch", "source"]  # dimensions of the ids
FLOAT, INT32 = ir.DataType.FLOAT, ir.DataType.INT32

Values = dict[str, Any]  # by name, None for an input left out
# Operator, inputs and attributes.
Kernel = tuple[str, Sequence[ir.Value | None], Mapping[str, int | float]]


def int8(
    model: Transformer, recipe: Recipe, traces: Traces, calibration: Calibration | None
) -> dict[str, Graph]:
    """Makes the graphs of cpu-int8 with kernels of the package; see `make.Maker`.

    Raises:
        UsageError: No chain has a kernel. The variant would be cpu-int8, but need the package.
    """
    graphs = kv_cache_int8.int8(model, recipe, traces, calibration)
    found = sum(insert_kernels(graphs[name]) for name in GRAPHS if name in graphs)
    if not found:
        raise UsageError(
            f"variant {recipe.name}: no operator of this model has a kernel, which takes widths in "
            "multiples of 16; choose --variant cpu-int8"
        )
    if "lm_head" in graphs:
        _add_search_kernels(graphs)
    return graphs


def insert_kernels(graph: Graph) -> int:
    """Replaces the chains of a graph that have a kernel; returns the number of kernels."""
    nodes = graph.model.graph
    given: Values = {str(value.name): value for value in nodes.inputs}
    for node in list(nodes):
        rules = RULES.get(node.op_type, ()) if node.graph is not None else ()
        if (kernel := next(filter(None, (rule(node, given) for rule in rules)), None)) is None:
            continue
        kind, inputs, attributes = kernel
        count = len(node.outputs)
        new = ir.node(kind, inputs, attributes, domain=KERNELS, num_outputs=count)
        for old, output in zip(node.outputs, new.outputs, strict=True):
            alike(output, old).name = old.name
            old.replace_all_uses_with(output, replace_graph_outputs=True)
        nodes.insert_before(node, new)
        _drop(node)
    drop_unused(nodes)
    if found := sum(node.domain == KERNELS for node in nodes):
        graph.model.opset_imports[KERNELS] = VERSION
    return found


def _add_search_kernels(graphs: dict[str, Graph]) -> None:
    """Adds top-k, of an LM head that is one layer, and sums of exponentials in its order.

    So a score has the same bits, whether a step returns all logits or the largest ones.
    """
    head, sums = graphs["lm_head"], graphs["exp_sums"].model
    layers = [node.op_type for node in head.model.graph]
    if layers == ["Linear"]:
        graphs["top_k"] = ranked_layer_graph(head)
    node = ir.node("ExpSums", sums.graph.inputs, domain=KERNELS, num_outputs=2)
    for old, output in zip(sums.graph.outputs, node.outputs, strict=True):
        alike(output, old).name = old.name
    sums.graph.outputs[:] = node.outputs
    drop_unused(sums.graph)
    sums.graph.append(node)
    sums.opset_imports[KERNELS] = VERSION


def _drop(node: ir.Node) -> None:
    """Drops a node without readers, and then those that only it read."""
    graph = node.graph
    if graph is None or any(each.is_graph_output() or each.uses() for each in node.outputs):
        return
    origins = [each.producer() for each in node.inputs if each is not None]
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            body = attribute.as_graph()
            body.outputs.clear()
            body.remove(list(body), safe=True)
    graph.remove(node, safe=True)
    for origin in filter(None, origins):
        _drop(origin)


# Patterns


class _Op:
    """An operator that computes a value.

    An input is another operator, the name of a value, a number, or a list of numbers and names of
    dimensions. Attributes that are 0 are left out, as by default.
    """

    def __init__(self, kind: str, *inputs: Any, output: int = 0, **attributes: Any) -> None:
        self.kind, self.inputs, self.output, self.attributes = kind, inputs, output, attributes


def _matches(value: ir.Value | None, pattern: Any, found: Values) -> bool:
    """Whether a value is computed as in a pattern; `found` receives the values that it names."""
    if isinstance(pattern, str):
        return found.setdefault(pattern, value) is value
    if pattern is None or value is None:
        return pattern is value
    if not isinstance(pattern, _Op):
        return bool(pattern == _known(value))
    node = value.producer()
    if node is None or value is not node.outputs[pattern.output] or node.op_type != pattern.kind:
        return False
    attributes = {
        key: list(each.value) if isinstance(each.value, tuple) else each.value
        for key, each in node.attributes.items()
        if each.value != 0
    }
    pairs = zip_longest(node.inputs, pattern.inputs)
    return attributes == pattern.attributes and all(_matches(*pair, found) for pair in pairs)


def _known(value: ir.Value) -> Any:
    """Returns a small constant, or the sizes that a value holds; None if neither."""
    if value.is_initializer():
        return array_of(value).tolist() if array_of(value).size <= FEW else None
    node = value.producer()
    if node is None or node.op_type not in ("Shape", "Concat"):
        return None
    if node.op_type == "Concat":
        parts = [_known(each) for each in node.inputs if each is not None]
        return [*chain(*parts)] if all(isinstance(part, list) for part in parts) else None
    shape = argument(node, 0).shape or ()
    sizes = [each if isinstance(each, int) else each.value for each in shape]
    return sizes[node.attributes.get_int("start", 0) : node.attributes.get_int("end", len(sizes))]


# Rules: the kernel of the chain that ends at a node, given the inputs of the graph by name.


def _linear(node: ir.Node, given: Values) -> Kernel | None:
    """A product of integers; the kernel takes the weight as it is stored."""
    found: Values = {}
    integers = _Op("QuantizeLinear", "x", "x_scale", "x_zero")
    weight = _Op("Transpose", "weight", perm=[1, 0])
    product = _Op("MatMulIntegerToFloat", integers, weight, "scale", "scales", "zero", None, "bias")
    if not _matches(node.outputs[0], product, found):
        return None
    names = "x", "x_scale", "x_zero", "weight", "scale", "scales", "bias"
    x, *constants = (found[name] for name in names)
    if not all(map(of_weights, constants)) or rank(x) != 2:
        return None
    if size(x, 1) % LANES or size(x, 1) > MOST_INPUTS:
        return None
    if not np.array_equal(array_of(found["zero"]), array_of(found["x_zero"])):
        return None
    joined = found["weight"].producer()  # for queries, keys and values
    if joined is not None:
        if joined.op_type != "Concat" or joined.attributes.get_int("axis", 0) != 0:
            return None
        outputs = sum(size(argument(joined, place), 0) for place in range(len(joined.inputs)))
        node.outputs[0].dtype, node.outputs[0].shape = FLOAT, ir.Shape([x.shape[0], outputs])
    return "Linear", (x, *constants), {}


def _layer(value: ir.Value | None) -> ir.Node | None:
    """Returns the kernel Linear that computes a value for one reader alone, or None."""
    node = value.producer() if value is not None and only_consumer(value) else None
    return node if node is not None and (node.domain, node.op_type) == (KERNELS, "Linear") else None


def _norm(node: ir.Node, given: Values) -> Kernel | None:
    """The norm of a residual connection around one linear layer, or two with ReLU or nothing."""
    found, epsilon = dict(given), node.attributes.get_float("epsilon", 1e-5)
    settings: dict[str, Any] = {"axis": -1, "epsilon": epsilon, "stash_type": 1}
    norm = _Op("LayerNormalization", _Op("Add", "one", "other"), "gamma", "beta", **settings)
    if not _matches(node.outputs[0], norm, found) or size(node.outputs[0], -1) % LANES:
        return None
    weights = found["gamma"], found["beta"]
    if not only_consumer(argument(node, 0)) or not all(map(of_weights, weights)):
        return None
    for product, residual in permutations((found["one"], found["other"])):
        outer = _layer(product)
        if outer is None or product.shape != residual.shape:
            continue
        inner = _layer(outer.inputs[0])
        if inner is not None and inner.inputs[0] is residual:
            layers = *inner.inputs, *outer.inputs[1:]
            return "FeedForward", (*layers, *weights), {"epsilon": epsilon}
        return "LinearNorm", (*outer.inputs, residual, *weights), {"epsilon": epsilon}
    return None


def _to_heads(node: ir.Node, given: Values) -> Kernel | None:
    """Keys or values of the source, rounded to the cache's integers."""
    output, found = node.outputs[0], dict(given)
    if not output.is_graph_output() or output.dtype != ir.DataType.INT8 or rank(output) != 4:
        return None
    width = size(output, 3)
    split = _Op("Reshape", _Op("QuantizeLinear", "product", 1, 0), [*SOURCE, -1, width])
    if not _is_width(width) or not _matches(output, _Op("Transpose", split, perm=IN_HEADS), found):
        return None
    layer = _layer(found["product"])
    if layer is None or "source" not in given:
        return None
    return "LinearToHeads", (*layer.inputs, given["source"]), {"width": width}


def _encoder_attention(node: ir.Node, given: Values) -> Kernel | None:
    """Attention of an encoder to all tokens but padding."""
    origin, found, width = argument(node, 0).producer(), dict(given), _matrix_width(node)
    heads = origin.attributes.get_int("q_num_heads", 0) if origin is not None else 0
    mask = _Op("Where", _Op("Not", "source_mask"), -math.inf, _Op("Expand", 0, SOURCE))
    bias = _Op("Expand", _Op("Unsqueeze", mask, [1, 2]), [1, 1, SOURCE[1], 1])
    rows = [_Op("Reshape", name, [*SOURCE, width]) for name in ("query", "key", "value")]
    settings = {"q_num_heads": heads, "kv_num_heads": heads, "scale": 1}
    attended = _Op("Reshape", _Op("Attention", *rows, bias, **settings), [-1, width])
    names = "query", "key", "value", "source_mask"
    if not heads or not _is_width(width // heads) or not _matches(node.outputs[0], attended, found):
        return None
    return "EncoderAttention", [found[name] for name in names], {"width": width // heads}


def _embed(node: ir.Node, given: Values) -> Kernel | None:
    """Rows of the embedding in int8, times a factor, and of positions."""
    ids = "target" if "target" in given else "source"
    counted = _Op("Range", 0, _Op("Squeeze", [SOURCE[1]]), 1)
    places = _Op("Gather", "places", "positions" if "positions" in given else counted)
    rows = _Op(
        "Mul", _Op("Cast", _Op("Gather", "table", ids), to=FLOAT), _Op("Gather", "scales", ids)
    )
    width = _matrix_width(node)
    for scaled in (_Op("Mul", rows, "factor"), rows):
        found = dict(given)
        embedded = _Op("Reshape", _Op("Add", scaled, places), [-1, width])
        if _matches(node.outputs[0], embedded, found) and only_consumer(argument(node, 0)):
            break
    else:
        return None
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    factor = found.get("factor") or shared(graph, "one", np.float32(1))
    tables = found["table"], found["scales"], factor, found["places"]
    if not all(map(of_weights, tables)) or rank(factor) or width % LANES:
        return None
    index = given.get("positions", given[ids])
    return "Embed", (given[ids], index, *tables), {"counted": int(index is given[ids])}


def _decoder_attention(node: ir.Node, given: Values) -> Kernel | None:
    """Attention over the int8 cache: both branches, for one query a slot and for several."""
    single, several = (node.attributes[f"{name}_branch"].as_graph() for name in ("then", "else"))
    outputs = [*single.outputs, *several.outputs]
    read = next((each for each in single if each.op_type == "GroupQueryAttention"), None)
    if read is None or node.inputs[0] is not given.get("single"):
        return None
    heads, width = size(argument(read, 3), 1), size(argument(read, 3), 3)
    kinds = {"SelfAttention": _self_attention, "CrossAttention": _cross_attention}
    for kind, patterns in kinds.items():
        found = dict(given)
        wanted, names = patterns(heads, width)
        if _is_width(width) and all(map(_matches, outputs, wanted, repeat(found))):
            return kind, [found[name] for name in names], {"width": width}
    return None


def _self_attention(heads: int, width: int) -> tuple[list[_Op], tuple[str, ...]]:
    """Patterns of the outputs of both branches, and the inputs of the kernel."""
    whole, shape = heads * width, ["batch", "target", -1, width]
    past = _Op("Gather", "positions", 0, axis=1)
    columns = _Op("Cast", past, to=INT32), _Op("Cast", ["capacity"], to=INT32)
    rows = _Op("Reshape", "qkv", [-1, 1, 3 * whole]), None, None
    parts = [_Op("Split", "qkv", [whole] * 3, output=place, axis=1) for place in range(3)]
    keys, values = (
        _Op("ScatterND", name, "cells", _Op("QuantizeLinear", _Op("Reshape", part, shape), 1, 0))
        for name, part in zip(("keys", "values"), parts[1:], strict=True)
    )
    attended = _attended(_Op("Reshape", parts[0], shape), keys, values, "bias", whole)
    names = "qkv", "keys", "values", "positions", "cells", "bias", "single"
    return [*_single(rows, columns, heads, whole), attended, keys, values], names


def _cross_attention(heads: int, width: int) -> tuple[list[_Op], tuple[str, ...]]:
    """Likewise."""
    whole, shape = heads * width, ["batch", "target", -1, width]
    last = _Op("Sub", "source_length", [1])
    columns = _Op("Cast", last, to=INT32), _Op("Cast", ["source"], to=INT32)
    row = _Op("Reshape", "query", [-1, 1, whole])
    new = _Op("Slice", row, [0, 0], [0, whole], [1, 2])
    kept = [_Op("Identity", name) for name in ("keys", "values")]
    attended = _attended(_Op("Reshape", "query", shape), "keys", "values", "source_bias", whole)
    names = "query", "keys", "values", "source_bias"
    return [*_single((row, new, new), columns, heads, whole), attended, *kept], names


def _single(rows: Sequence[Any], columns: Sequence[Any], heads: int, whole: int) -> list[_Op]:
    """Patterns of the attention of one query a slot, and of the cache."""
    options: dict[str, Any] = {
        "num_heads": heads,
        "kv_num_heads": heads,
        "kv_cache_bit_width": 8,
        "scale": 1,
    }
    options |= {f"{name}_quant_type": "PER_TENSOR" for name in "kv"} | {"local_window_size": -1}
    inputs = *rows, "keys", "values", *columns, *[None] * 5, [1], [1]
    states = [_Op("GroupQueryAttention", *inputs, output=each, **options) for each in range(3)]
    return [_Op("Reshape", states[0], [-1, whole]), *states[1:]]


def _attended(query: Any, keys: Any, values: Any, bias: str, whole: int) -> _Op:
    """Pattern of softmax(Q K^T + bias) V of several queries a slot."""
    transposed = _Op("Transpose", _Op("Cast", keys, to=FLOAT), perm=LAST_TWO)
    scores = _Op("MatMul", _Op("Transpose", query, perm=IN_HEADS), transposed)
    weights = _Op("Softmax", _Op("Add", scores, bias), axis=-1)
    heads = _Op("MatMul", weights, _Op("Cast", values, to=FLOAT))
    return _Op("Reshape", _Op("Transpose", heads, perm=IN_HEADS), [-1, whole])


def _matrix_width(node: ir.Node) -> int:
    """Returns the width of a matrix that a node computes; 0 of another value."""
    shape = [*(node.outputs[0].shape or ())]
    return shape[1] if len(shape) == 2 and isinstance(shape[1], int) else 0


def _is_width(width: int) -> bool:
    return width % LANES == 0 and 0 < width <= WIDEST_HEAD


RULES: Mapping[str, Sequence[Callable[[ir.Node, Values], Kernel | None]]] = {
    "MatMulIntegerToFloat": (_linear,),
    "LayerNormalization": (_norm,),
    "Transpose": (_to_heads,),
    "Reshape": (_encoder_attention, _embed),
    "If": (_decoder_attention,),
}
