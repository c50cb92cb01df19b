"""The names found in the bytes of a graph are those that the onnx package finds."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from transferry.runtime.ort.external_files import external_files


def tensor(name: str, file: str = "") -> TensorProto:
    made = numpy_helper.from_array(np.zeros(3, np.float32), name)
    if file:
        onnx.external_data_helper.set_external_data(made, file, 0, 12)
    return made


def graph(name: str, *nodes: onnx.NodeProto, weight: TensorProto) -> onnx.GraphProto:
    return helper.make_graph(list(nodes), name, [], [], [weight])


def test_names_are_found_wherever_a_tensor_may_be() -> None:
    inner = graph("inner", weight=tensor("i", "subgraph.bin"))
    sparse = helper.make_sparse_tensor(tensor("v", "sparse.bin"), tensor("n"), [3])
    nodes = [
        helper.make_node("If", ["c"], ["o"], then_branch=inner, else_branch=inner),
        helper.make_node("Constant", [], ["k"], value=tensor("k", "attribute.bin")),
        helper.make_node("Constant", [], ["s"], sparse_value=sparse),
        helper.make_node("Custom", [], ["t"], many=[tensor("a"), tensor("b", "list.bin")]),
    ]
    outer = graph("outer", *nodes, weight=tensor("w", "weights.bin"))
    outer.initializer.append(tensor("u", "weights.bin"))
    inside = helper.make_node("Constant", [], ["k"], value=tensor("k", "function.bin"))
    opset = helper.make_opsetid("", 20)
    function = helper.make_function("d", "f", [], ["k"], [inside], [opset])
    model = helper.make_model(outer, functions=[function])
    places = ("attribute", "function", "list", "sparse", "subgraph", "weights")
    expected = [f"{place}.bin" for place in places]
    assert sorted(external_files(model.SerializeToString())) == expected


def test_a_graph_of_its_own_weights_names_nothing() -> None:
    model = helper.make_model(graph("g", weight=tensor("w")))
    assert external_files(model.SerializeToString()) == []


@pytest.mark.parametrize(
    "content", [b"\x3a\x05a", b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", b"\x0b", b"\x80"]
)
def test_what_is_no_message_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"longer|does not end|unknown"):
        external_files(content)
