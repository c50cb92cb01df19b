"""Graphs beside a fused LM head, for search: top-k, and approximate logits for screened argmax.

Top-k runs on the device, so that few numbers are copied to the host. Screened argmax is explained
in `runtime.ort.screened_argmax`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from transferry.build_model.model.transformer import Transformer
from transferry.export.rewrite.linear_int8 import quantised_weight, transposed
from transferry.export.trace.editing import (
    CONTRIB,
    KERNELS,
    argument,
    described,
    drop_unused,
    register,
)
from transferry.export.trace.graph import Graph, spec
from transferry.runtime.bundle.specs import GraphSpec, Role, StoredTensor
from transferry.runtime.errors import ParityError

# With fewer tokens the LM head is a small part of a step.
SMALLEST_VOCABULARY = 2048
COUNT = spec("count", "int64", 1)  # k
LINEAR_INPUTS = 7  # of the kernel Linear, with the bias


def top_k_graph(head: Graph) -> Graph:
    """Returns a fused LM head with top-k: hidden, count -> top_logits, top_tokens, relative_sums.

    The log-sum-exp of a row is log(relative_sums) plus its largest logit. It is NaN where a logit
    is NaN or infinite, or no logit is finite.
    """
    model = head.model.clone()
    graph, tape = model.graph, ir.tape.Tape(model.graph)
    logits, count = graph.outputs[0], described(ir.Value(), COUNT)
    first, second = (register(graph, f"rank.{n}", np.array([n])) for n in (0, 1))
    # Of equal logits the lower token comes first (ONNX, TopK).
    top = tape.op_multi_out("TopK", [logits, count], {"axis": 1}, num_outputs=2)
    largest = tape.op("Slice", [top[0], first, second, second])
    powers = tape.op("Exp", [tape.op("Sub", [logits, largest])])
    sums = tape.op("ReduceSum", [powers, second], {"keepdims": 0})
    return _ranked(head, model, count, (*top, sums), "relative_sums")


def ranked_layer_graph(head: Graph) -> Graph:
    """Returns an LM head of one Linear with top-k: hidden, count -> ..., exp_sums.

    The operators are those of transferry-kernels.
    """
    model = head.model.clone()
    (layer,), count = model.graph, described(ir.Value(), COUNT)
    inputs = *layer.inputs, *[None] * (LINEAR_INPUTS - len(layer.inputs)), count
    outputs = ir.tape.Tape(model.graph).op_multi_out(
        "LinearRank", inputs, domain=KERNELS, num_outputs=3
    )
    model.graph.outputs.clear()
    model.graph.remove(layer, safe=True)
    return _ranked(head, model, count, outputs, "exp_sums")


def _ranked(
    head: Graph, model: ir.Model, count: ir.Value, outputs: Sequence[ir.Value], sums: Role
) -> Graph:
    model.graph.inputs.append(count)
    specs = (
        spec("top_logits", "float32", "rows", "count"),
        spec("top_tokens", "int64", "rows", "count"),
        spec(sums, "float32", "rows"),
    )
    model.graph.outputs[:] = [described(*both) for both in zip(outputs, specs, strict=True)]
    return Graph(model, GraphSpec("top_k.onnx", (*head.spec.inputs, COUNT), specs))


def is_screened(model: Transformer) -> bool:
    """Whether the LM head is a product with one large matrix and nothing else."""
    config = model.config
    one = not config.output_transform and config.d_embedding == config.d_model
    large = config.vocabulary_size >= SMALLEST_VOCABULARY
    return one and large and not config.output_softcap


def approximate_graph(head: Graph) -> Graph:
    """Returns a fused LM head in int8: hidden -> approximate logits.

    Hidden states are quantised with a scale of the batch; the result of screening is exact and does
    not depend on it.

    Raises:
        ParityError: The LM head is not a single linear layer.
    """
    model = head.model.clone()
    graph, (product, *others) = model.graph, list(model.graph)
    if product.op_type != "Gemm" or others:
        raise ParityError(f"expected one Gemm in {head.spec.file}, found {len(others) + 1} nodes")
    integers, scales = quantised_weight(graph, argument(product, 1))
    tape, bias = ir.tape.Tape(graph), (*product.inputs, None)[2]
    inputs = [product.inputs[0], transposed(tape, integers), scales, None, bias]
    approximate = tape.op("DynamicQuantizeMatMul", inputs, domain=CONTRIB)
    (output,) = (
        replace(logits, name="approximate_logits", role="approximate_logits")
        for logits in head.spec.outputs
    )
    graph.outputs[0] = described(approximate, output)
    graph.remove(product, safe=True)
    drop_unused(graph)
    return Graph(model, GraphSpec("approximate_logits.onnx", head.spec.inputs, (output,)))


def segment_maxima_graph(sums: Graph) -> Graph:
    """Returns the graph of segment maxima alone: `sums` without its first output."""
    model = sums.model.clone()
    model.graph.outputs.pop(0)
    drop_unused(model.graph)
    return Graph(model, GraphSpec("segment_maxima.onnx", sums.spec.inputs, sums.spec.outputs[1:]))


def screen_tensors(graphs: Mapping[str, Graph]) -> dict[str, StoredTensor]:
    """Returns the places of a screened LM head's weights, float32 and int8, in written files."""
    if "approximate_logits" not in graphs:
        return {}
    head = graphs["lm_head"]
    (product,) = head.model.graph
    transpose, int8_product = graphs["approximate_logits"].model.graph
    values = {
        "weight": product.inputs[1],
        "quantised": transpose.inputs[0],
        "scales": int8_product.inputs[2],
        "bias": (*product.inputs, None)[2],
    }
    folder = head.spec.file.rpartition("/")[0]
    return {name: _stored(value, folder) for name, value in values.items() if value is not None}


def _stored(value: ir.Value, folder: str) -> StoredTensor:
    tensor = value.const_value
    assert isinstance(tensor, ir.ExternalTensor), value.name
    shape = tuple(int(size) for size in tensor.shape.numpy())
    kind = str(tensor.dtype.numpy())
    return StoredTensor(f"{folder}/{tensor.location}", int(tensor.offset or 0), kind, shape)
