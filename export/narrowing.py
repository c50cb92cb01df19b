"""The graphs that score some tokens alone: the output layer's rows of these, and the product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import dropwhile

import numpy as np
import onnx_ir as ir

from transferry.export.fusion import drop_unused
from transferry.export.graphs import Graph
from transferry.runtime.bundle import GraphSpec, TensorSpec
from transferry.runtime.errors import ParityError
from transferry.runtime.search import begin
from transferry.runtime.slot_decoder import SlotDecoder
from transferry.runtime.special_tokens import SpecialTokens

# Where a product has what is of the single tokens.
PARAMETERS = {
    "Gemm": {"weight": 1, "bias": 2},
    "MatMulIntegerToFloat": {"weight": 1, "scales": 3, "bias": 6},
}
# By how much a logit may differ, relative to the largest: products are rounded in another order.
ROUNDING, HALF_ROUNDING = 1e-5, 1e-2


def narrow_graphs(head: Graph) -> dict[str, Graph]:
    """Makes two graphs of the output layer's.

    "part": tokens -> part, what the layer has of these tokens, the weights as [d_model, tokens].
    "narrow": hidden, part -> logits.

    Args:
        head: hidden -> logits, fused, in any precision.

    Raises:
        ParityError: Its last product is none that is known.
    """
    model = head.model.clone()
    graph = model.graph
    product = next((node for node in reversed(graph) if node.op_type in PARAMETERS), None)
    if product is None:
        raise ParityError(f"expected a linear layer in {head.spec.file}, found none")
    tokens = ir.Value(
        name="tokens", shape=ir.Shape(["tokens"]), type=ir.TensorType(ir.DataType.INT64)
    )
    opset = {"": graph.opset_imports[""]}
    part = ir.Graph([tokens], [], nodes=[], opset_imports=opset, name="part")
    for name, place in PARAMETERS[product.op_type].items():
        value = (*product.inputs, None)[place]
        if value is None:
            continue
        if name == "weight" and (transpose := value.producer()) is not None:
            value = transpose.inputs[0]
        assert value is not None
        stored = ir.Value(name=value.name, shape=value.shape, const_value=value.const_value)
        stored.type = value.type
        part.register_initializer(stored)
        nodes = [ir.node("Gather", [stored, tokens])]
        shape = ir.Shape(["tokens"])
        if name == "weight":
            nodes.append(ir.node("Transpose", nodes[0].outputs, {"perm": [1, 0]}))
            shape = ir.Shape([value.shape[1] if value.shape else None, "tokens"])
        part.extend(nodes)
        output = nodes[-1].outputs[0]
        output.name, output.shape, output.type = f"part.{name}", shape, value.type
        part.outputs.append(output)
        given = ir.Value(name=output.name, shape=shape, type=output.type)
        graph.inputs.append(given)
        product.replace_input_with(place, given)
    if product.op_type == "Gemm":
        product.attributes["transB"] = ir.AttrInt64("transB", 0)
    for node in dropwhile(lambda node: node is not product, graph):
        node.outputs[0].shape = ir.Shape(["rows", "tokens"])
    drop_unused(graph)
    specs = tuple(
        TensorSpec(
            str(value.name),
            "part",
            str(value.dtype.numpy()) if value.dtype else "",
            tuple(size if isinstance(size, int) else "tokens" for size in value.shape or ()),
        )
        for value in part.outputs
    )
    (logits,) = head.spec.outputs

    def file(name: str) -> str:
        return head.spec.file.replace("head.onnx", f"{name}.onnx")

    chosen = TensorSpec("tokens", "tokens", "int64", ("tokens",))
    narrow = GraphSpec(
        file("narrow"), (*head.spec.inputs, *specs), (replace(logits, shape=("rows", "tokens")),)
    )
    return {
        "part": Graph(
            ir.Model(part, ir_version=model.ir_version), GraphSpec(file("part"), (chosen,), specs)
        ),
        "narrow": Graph(model, narrow),
    }


def require_narrow(
    decoder: SlotDecoder, sources: Sequence[Sequence[int]], special: SpecialTokens
) -> None:
    """Does nothing if tokens that are scored alone score as they do among all.

    Args:
        decoder: One that has these graphs.
        sources: Token ids of sentences; their first step is compared.
        special: The ids that pad, begin and end.

    Raises:
        ParityError: They do not.
    """
    state, first = begin(decoder, sources, special)
    tokens = np.arange(0, decoder.vocabulary_size, 2)
    expected = decoder.step(first[:, None], state)[0][..., tokens]
    found, _ = decoder.step_part(first[:, None], state, decoder.part(tokens))
    error = float(np.abs(found - expected).max() / np.abs(expected).max())
    allowed = HALF_ROUNDING if "16" in decoder.variant.precision else ROUNDING
    if not error <= allowed:
        raise ParityError(
            f"variant {decoder.variant.name}: tokens that are scored alone differ by {error:.1e} "
            f"of the largest logit from what they score among all, at most {allowed:.1e} expected"
        )
