"""Fused variants: the cache in place, and linear layers on onnxruntime's own kernels."""

import copy

import onnx_ir as ir
import torch

from transferry.build_model.model.config import ModelConfig
from transferry.build_model.model.transformer import Transformer
from transferry.build_model.own.model import OwnModel
from transferry.export.recipes import Recipe
from transferry.export.rewrite.calibration import Calibration
from transferry.export.rewrite.fusion import FloatKernels, Fusion, Kernels
from transferry.export.rewrite.lm_head import (
    approximate_graph,
    is_screened,
    segment_maxima_graph,
    top_k_graph,
)
from transferry.export.trace.editing import (
    alike,
    argument,
    cast,
    constant,
    drop_unused,
    only_consumer,
    rank,
    size,
)
from transferry.export.trace.graph import Graph, Traces
from transferry.export.trace.in_place import FUSED_OPSET, export_fused_graphs
from transferry.export.trace.portable import export_graphs
from transferry.runtime.errors import ParityError, UsageError
from transferry.runtime.precision import BFLOAT16, FLOAT32, INT8_KERNELS

BFLOAT16_TYPE = ir.DataType.BFLOAT16
IN_HEADS = [0, 2, 1, 3]  # from [batch, length, heads, d_head] to the heads first, and back
LAST_TWO = [0, 1, 3, 2]
KEYS_IN_HEADS = [0, 2, 3, 1]  # likewise, with the features of a key in a column


def floats(
    model: Transformer, recipe: Recipe, traces: Traces, calibration: Calibration | None
) -> dict[str, Graph]:
    """Makes a fused variant in float32, float16 or bfloat16; see `make.Maker`."""
    if recipe.precision != FLOAT32:
        model = copy.deepcopy(model).to(getattr(torch, recipe.precision.name))
    graphs = fused_graphs(model, recipe, traces, FloatKernels(with_relu=recipe.on_cpu))
    if recipe.precision == BFLOAT16:
        for each in graphs.values():
            widen_roots(each.model.graph)
    if not model.config.decoder_layers:
        return graphs
    if not recipe.on_cpu:
        graphs["top_k"] = top_k_graph(graphs["lm_head"])
    elif is_screened(model):
        graphs["approximate_logits"] = approximate_graph(graphs["lm_head"])
        graphs["segment_maxima"] = segment_maxima_graph(graphs["exp_sums"])
    return graphs


def widen_roots(graph: ir.Graph) -> None:
    """Computes Sqrt and Reciprocal of bfloat16 in float32, as torch does.

    onnxruntime has no kernel of theirs for bfloat16, and opens no graph with RMSNorm in it.
    """
    for node in list(graph):
        if node.op_type in ("Sqrt", "Reciprocal") and argument(node, 0).dtype == BFLOAT16_TYPE:
            tape = ir.tape.Tape()
            wide = cast(tape, argument(node, 0), ir.DataType.FLOAT)
            found = cast(tape, tape.op(node.op_type, [wide]), BFLOAT16_TYPE)
            graph.insert_before(node, tape.nodes)
            node.outputs[0].replace_all_uses_with(alike(found, node.outputs[0]))
            graph.remove(node, safe=True)


def fused_graphs(
    model: Transformer,
    recipe: Recipe,
    traces: Traces,
    kernels: Kernels,
    cache_type: str | None = None,
) -> dict[str, Graph]:
    """Traces a model and puts its linear layers, lookups and encoder attentions on kernels.

    The cache has `cache_type`, by default that of the weights.
    """
    own = isinstance(model, OwnModel)
    if own and model.config.decoder_layers:
        raise UsageError(
            f"variant {recipe.name} writes the cache in place, as only the reference's decoder "
            "does; choose --variant portable or portable-int8 for a module of your own"
        )
    if model.config.decoder_layers:
        graphs = export_fused_graphs(model, cache_type, traces)
    else:
        graphs = export_graphs(model, traces=traces)
    linears = 0
    for key, graph in graphs.items():
        fuses = key == "encoder" and recipe.on_cpu
        # The operators of transferry-kernels read padding.
        packed = fuses and recipe.precision != INT8_KERNELS
        linears += Fusion(graph, kernels, packed=packed).run()
        if fuses:
            found = fuse_attentions(graph)
            expected = found if own else attentions_to_fuse(model.config)
            require_all(recipe, "attentions of the encoder in one operator", expected, found)
        kernels.look_up(graph.model.graph)
        drop_unused(graph.model.graph)
    expected = linears or 1 if own else linear_layers(model)
    require_all(recipe, "linear layers in the graphs", expected, linears)
    return graphs


def require_all(recipe: Recipe, things: str, expected: int, found: int) -> None:
    """Raises ParityError unless a rewrite found as many places as the model has."""
    if found != expected:
        raise ParityError(
            f"variant {recipe.name}: expected {expected} {things}, found {found}; the exporter "
            "wrote some in another way"
        )


def linear_layers(model: Transformer) -> int:
    """Returns the number of linear layers of a model's graphs, a tied LM head included."""
    linears = sum(isinstance(module, torch.nn.Linear) for module in model.modules())
    linears += sum(int(getattr(module, "reused", 0)) for module in model.modules())
    # Encoder and decoder each have the embedding.
    narrow = model.config.d_embedding != model.config.d_model
    twice = narrow and model.encoder and model.decoder
    tied = model.config.lm_head and model.output is None
    return linears + tied + bool(twice)


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

    inputs = [
        value if rank(value) == 3 else tape.op("Reshape", [value, sizes], output=of_width())
        for value in split
        if value is not None
    ]
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
