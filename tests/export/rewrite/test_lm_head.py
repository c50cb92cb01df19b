"""The graph of approximate logits, and the weights that the runtime reads for screening."""

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest

from tests.export.conftest import graphs_of
from transferry.build_model.checkpoint import Checkpoint
from transferry.export.rewrite.lm_head import approximate_graph
from transferry.export.rewrite.rounded_weights import quantised
from transferry.export.trace.graph import Graph
from transferry.export.trace.store import WEIGHTS
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.errors import ParityError
from transferry.runtime.ort.graph_runner import GraphRunner
from transferry.runtime.ort.session import SessionOptions


@pytest.fixture
def head(all_variants: Bundle) -> Graph:
    spec = all_variants.variant("cpu-fp32").graphs["lm_head"]
    return Graph(ir.load(all_variants.graph(spec)), spec)


def test_screened_weights_are_those_of_the_run(all_variants: Bundle, calm: Checkpoint) -> None:
    stored = all_variants.variant("cpu-fp32").screen
    found = {name: tensor.read(all_variants.files) for name, tensor in stored.items()}
    assert found.keys() == {"weight", "quantised", "scales"}
    weight = calm.model.embedding.weight.detach().numpy()
    integers, scales = quantised(weight)
    for name, expected in (("weight", weight), ("quantised", integers), ("scales", scales)):
        array = found[name]
        assert not array.flags.writeable
        assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
        assert array.tobytes() == expected.tobytes()
        assert stored[name].file == f"portable/{WEIGHTS}"


def test_approximate_logits_are_near_the_exact_ones(all_variants: Bundle) -> None:
    graphs = all_variants.variant("cpu-fp32").graphs
    hidden = np.random.default_rng(0).standard_normal((7, 32)).astype(np.float32)
    found = []
    for name, role in (("lm_head", "logits"), ("approximate_logits", "approximate_logits")):
        runner = GraphRunner(all_variants, graphs[name], SessionOptions())
        found.append(runner.run({"hidden": [runner.value(hidden)]}, role)[0].numpy())
    exact, approximate = found
    assert exact.shape == approximate.shape
    assert 0 < np.abs(exact - approximate).max() < 0.02 * np.abs(exact).max()


def no_product(graph: ir.Graph) -> None:
    graph[0].op_type = "MatMul"


def another_node(graph: ir.Graph) -> None:
    graph.append(ir.node("Relu", [graph.outputs[0]]))


@pytest.mark.parametrize(("damage", "nodes"), [(no_product, 1), (another_node, 2)])
def test_a_head_that_is_not_one_product_is_refused(
    head: Graph, damage: Callable[[ir.Graph], None], nodes: int
) -> None:
    approximate_graph(head)
    damage(head.model.graph)
    with pytest.raises(ParityError, match=rf"expected one Gemm in .*head\.onnx, found {nodes}"):
        approximate_graph(head)


def test_the_head_stays_as_it_is(head: Graph) -> None:
    before = ir.to_proto(head.model).SerializeToString()
    approximate_graph(head)
    assert ir.to_proto(head.model).SerializeToString() == before


@pytest.mark.parametrize("more", [0, 1])
def test_small_vocabularies_are_not_screened(
    calm: Checkpoint, monkeypatch: pytest.MonkeyPatch, more: int
) -> None:
    smallest = calm.model.config.vocabulary_size + more
    monkeypatch.setattr("transferry.export.rewrite.lm_head.SMALLEST_VOCABULARY", smallest)
    assert ("approximate_logits" in graphs_of(calm.model)) == (more == 0)
