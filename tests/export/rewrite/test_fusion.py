"""Every linear layer becomes one product of matrices, and results stay the same."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn

from tests.export.conftest import (
    exported_layers,
    graphs_of,
    in_onnxruntime,
    opened,
    random_reader,
    require_torchs_answers,
    written,
)
from transferry.build_model.checkpoint import Checkpoint, load_checkpoint
from transferry.build_model.model.transformer import Transformer
from transferry.export.bundle import check_graphs
from transferry.export.rewrite import fused, fusion
from transferry.export.rewrite.fused import linear_layers
from transferry.export.rewrite.fusion import FloatKernels, Fusion, find_linear
from transferry.export.rewrite.lm_head import approximate_graph
from transferry.export.trace.editing import drop_unused
from transferry.export.trace.graph import Graph
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.errors import ParityError
from transferry.runtime.ort.open_model import ServedModel
from transferry.runtime.tokenizer.byte_pair import PASSAGES

Graphs = dict[str, Graph]
Made = tuple[Transformer, Graphs, ServedModel]


@pytest.fixture(scope="module", params=["both", "writer", "reader", "pre-norm reader"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A model of each architecture, its fused variant, and the opened variant."""
    if request.param == "pre-norm reader":
        # GELU by tanh, and a norm before each sublayer instead of after it.
        model = random_reader(heads=4, encoder_layers=1, norm_order="pre", activation="gelu-tanh")
    else:
        run = {"both": "run_folder"}.get(request.param, f"{request.param}_run_folder")
        model = load_checkpoint(request.getfixturevalue(run)).model
    graphs = graphs_of(model)
    bundle = written(tmp_path_factory.mktemp("fused"), model, "cpu-fp32", graphs)
    return model, graphs, opened(bundle)


def operators(graphs: Graphs) -> Counter[str]:
    return Counter(node.op_type for graph in graphs.values() for node in graph.model.graph)


# Four per attention, two per feed-forward or three with SwiGLU, and the LM head.
LINEARS = {
    ("encoder-decoder", "post"): 1 * 6 + 2 * 10 + 1,
    ("decoder-only", "pre"): 2 * 7 + 1,
    ("encoder-only", "post"): 2 * 6 + 1 + 1,
    ("encoder-only", "pre"): 1 * 6 + 1,
}


def test_every_linear_layer_is_one_product(made: Made) -> None:
    model, graphs, _ = made
    config = model.config
    expected = LINEARS[config.architecture, config.norm_order]
    assert linear_layers(model) == expected
    count = operators(graphs)
    assert count["Gemm"] + count["FusedGemm"] == expected
    relus = config.encoder_layers + config.decoder_layers if config.activation == "relu" else 0
    assert (count["FusedGemm"], count["Relu"]) == (relus, 0)
    for graph in graphs.values():
        for node in graph.model.graph:
            if node.op_type == "MatMul":
                assert not any(value.is_initializer() for value in node.inputs if value)
            assert find_linear(node) is None or node.op_type == "Gemm"


def test_fused_graphs_answer_as_torch(made: Made) -> None:
    model, _, served = made
    require_torchs_answers(model, served)


def test_a_linear_layer_that_is_not_found_is_refused(
    reader_run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_checkpoint(reader_run_folder).model

    def misses_one(node: ir.Node) -> fusion.Linear | None:
        linear = find_linear(node)
        missed = "model.encoder.0.feed_forward.outer.weight"
        return None if linear is not None and linear.weight.name == missed else linear

    monkeypatch.setattr(fusion, "find_linear", misses_one)
    with pytest.raises(ParityError, match=r"variant cpu-fp32: expected 14 linear.*found 13"):
        graphs_of(model)


class Mixed(nn.Module):
    """Operators that work on rows beside others that mix them: tokens -> three outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.table = nn.Parameter(torch.randn(32, 4))
        self.one, self.two, self.three = nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(4, 6)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.embedding(tokens)
        inner = self.one(x).relu()
        y = self.two(inner) + x
        # Of one shape with a matrix but for a dimension that is broadcast.
        shifted = y + self.table[: tokens.shape[1]]
        centred = y - y.mean(dim=1, keepdim=True)
        first = y - y[:1]
        return inner.cumsum(dim=1), self.three(shifted * centred).sigmoid(), first * y


def test_a_value_may_be_read_as_a_matrix_and_in_three_dimensions() -> None:
    torch.manual_seed(0)
    module = Mixed()
    graph = exported_layers(module, sums=6, scores=6, squares=4)
    assert Fusion(graph, FloatKernels(with_relu=True)).run() == 3
    drop_unused(graph.model.graph)
    count = Counter(node.op_type for node in graph.model.graph)
    assert (count["Gemm"], count["FusedGemm"], count["MatMul"]) == (2, 1, 0)
    run = in_onnxruntime(graph.model)
    for shape in ((1, 1), (2, 3), (3, 2), (4, 7)):
        ids = torch.randint(0, 9, shape)
        with torch.inference_mode():
            expected = module(ids)
        for one, other in zip(run(ids.numpy()), expected, strict=True):
            assert one.shape == other.shape
            np.testing.assert_allclose(one, other.numpy(), rtol=1e-5, atol=1e-6)


# Of each quotient the divisor, whether the product divides it instead, and whether a Div is left.
QUOTIENTS = [
    (8.0, False, False),
    (0.25, False, False),
    (-2.0, False, True),
    (3.0, False, True),
    (8.0, True, True),
]


class Divided(nn.Module):
    """Linear layers whose results are divided, or divide, or are left as they are."""

    def __init__(self, bias: bool, divided: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.divided = divided
        self.embedding = nn.Embedding(9, 4)
        self.linears = nn.ModuleList(nn.Linear(4, 6, bias=bias) for _ in QUOTIENTS)

    def forward(self, tokens: Tensor) -> tuple[Tensor, ...]:
        x = self.embedding(tokens)
        whole = [linear(x) for linear in self.linears]
        if not self.divided:
            return tuple(whole)
        return tuple(
            torch.tensor(divisor) / y if inverse else y / divisor
            for y, (divisor, inverse, _) in zip(whole, QUOTIENTS, strict=True)
        )


def upstream(value: ir.Value) -> set[str]:
    """The operators that a value is made by."""
    node = value.producer()
    if node is None:
        return set()
    return {node.op_type}.union(*(upstream(given) for given in node.inputs if given))


@pytest.mark.parametrize("bias", [True, False])
def test_a_power_of_two_divides_within_the_product_to_the_bit(bias: bool) -> None:
    results = []
    for divided in (False, True):
        graph = exported_layers(Divided(bias, divided), **dict.fromkeys("abcde", 6))
        Fusion(graph, FloatKernels(with_relu=True)).run()
        model = graph.model
        assert Counter(node.op_type for node in model.graph)["Gemm"] == len(QUOTIENTS)
        results.append(in_onnxruntime(model)(np.arange(9).reshape(3, 3)))
    for whole, found, value, (divisor, inverse, left) in zip(
        *results, model.graph.outputs, QUOTIENTS, strict=True
    ):
        assert ("Div" in upstream(value)) == left
        expected = np.float32(divisor) / whole if inverse else whole / np.float32(divisor)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "changes, fused",
    [
        pytest.param({}, 2, id="padding"),
        pytest.param(dict(positions="none", relative_buckets=8), 2, id="distances"),
        pytest.param(dict(windows=(3, 0), query_key_norm="head"), 2, id="windows"),
        pytest.param(dict(positions="rotary"), 0, id="rotary"),
        pytest.param(dict(key_value_heads=1), 0, id="grouped", marks=pytest.mark.thorough),
        pytest.param(dict(attention_softcap=5.0), 0, id="capped", marks=pytest.mark.thorough),
    ],
)
def test_an_encoder_of_fused_attentions_answers_as_torch(
    changes: dict[str, Any], fused: int, tmp_path: Path
) -> None:
    model = random_reader(**changes)
    graphs = graphs_of(model)
    operators = [node.op_type for node in graphs["encoder"].model.graph]
    assert operators.count("Attention") == fused
    assert operators.count("Softmax") == 2 - fused
    if fused:
        assert operators.count("MatMul") == 0
        assert operators.count("Expand") <= 2  # the bias is repeated once, not in every layer
    bundle = written(tmp_path, model, "cpu-fp32", graphs)
    check_graphs(bundle, bundle.variant())
    sizes = [(1, 1, 0), (3, 7, 0), (2, 13, 2)]
    require_torchs_answers(model, opened(bundle), PASSAGES, sizes)


def test_an_attention_written_in_another_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "KEYS_IN_HEADS", [0, 2, 1, 3])
    with pytest.raises(ParityError, match=r"cpu-fp32: expected 2 attentions of the enc.*found 0"):
        graphs_of(random_reader())


def test_a_variant_for_a_gpu_keeps_what_every_provider_has() -> None:
    graphs = graphs_of(random_reader(), "cuda-fp16")
    operators = {node.op_type for node in graphs["encoder"].model.graph}
    assert "Softmax" in operators
    assert "Attention" not in operators


@pytest.fixture
def head(all_variants: Bundle) -> Graph:
    spec = all_variants.variant("cpu-fp32").graphs["lm_head"]
    return Graph(ir.load(all_variants.graph(spec)), spec)


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


@pytest.mark.parametrize("more", [0, 1])
def test_small_vocabularies_are_not_screened(
    calm: Checkpoint, monkeypatch: pytest.MonkeyPatch, more: int
) -> None:
    smallest = calm.model.config.vocabulary_size + more
    monkeypatch.setattr("transferry.export.rewrite.lm_head.SMALLEST_VOCABULARY", smallest)
    assert ("approximate_logits" in graphs_of(calm.model)) == (more == 0)
