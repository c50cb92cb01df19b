"""Top-k of the logits on the device, so that few numbers are copied to the host."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from transferry.export.trace.editing import described, register
from transferry.export.trace.graph import Graph, spec
from transferry.runtime.bundle.specs import GraphSpec


def top_k_graph(head: Graph) -> Graph:
    """Returns a fused LM head with top-k: hidden, count -> top_logits, top_tokens, relative_sums.

    The log-sum-exp of a row is log(relative_sums) plus its largest logit. It is NaN where a logit
    is NaN or infinite, or none is finite.
    """
    model = head.model.clone()
    graph, tape = model.graph, ir.tape.Tape(model.graph)
    logits = graph.outputs[0]
    count = spec("count", "int64", 1)
    graph.inputs.append(described(ir.Value(), count))
    first, second = (register(graph, f"rank.{n}", np.array([n])) for n in (0, 1))
    # Of equal logits the lower token comes first (ONNX, TopK).
    top = tape.op_multi_out("TopK", [logits, graph.inputs[-1]], {"axis": 1}, num_outputs=2)
    largest = tape.op("Slice", [top[0], first, second, second])
    powers = tape.op("Exp", [tape.op("Sub", [logits, largest])])
    sums = tape.op("ReduceSum", [powers, second], {"keepdims": 0})
    specs = (
        spec("top_logits", "float32", "rows", "count"),
        spec("top_tokens", "int64", "rows", "count"),
        spec("relative_sums", "float32", "rows"),
    )
    graph.outputs[:] = [described(*both) for both in zip((*top, sums), specs, strict=True)]
    return Graph(model, GraphSpec("top_k.onnx", (*head.spec.inputs, count), specs))
