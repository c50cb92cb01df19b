import gc
import weakref
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from transferry.export.trace import graph as graphs
from transferry.export.trace.editing import array_of
from transferry.export.trace.graph import OPSET, Graph, Traces, export_graph, spec
from transferry.runtime.bundle.specs import GraphSpec

WIDTH = 4


def scaled_spec(kind: Literal["float32", "float16"]) -> GraphSpec:
    given, returned = (spec(name, kind, "rows", WIDTH) for name in ("hidden", "logits"))
    return GraphSpec("scaled.onnx", (given,), (returned,))


SPEC = scaled_spec("float32")


class Scaled(nn.Module):
    def __init__(self, scale: float, bias: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), scale))
        self.bias = nn.Parameter(torch.full((WIDTH,), bias))
        self.unread = nn.Parameter(torch.full((WIDTH,), 7.0))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.scale + self.bias


class Counted(Traces):
    """Traces that keep the modules they traced."""

    def __init__(self) -> None:
        super().__init__(self._counted)
        self.modules: list[nn.Module] = []

    def _counted(self, module: nn.Module, spec: GraphSpec, opset: int) -> Graph:
        self.modules.append(module)
        return export_graph(module, spec, opset)


def weights(graph: Graph) -> dict[str, float]:
    found = {}
    for name, value in graph.model.graph.initializers.items():
        assert value.const_value is not None
        found[name] = float(np.unique(value.const_value.numpy()).item())
    return found


def test_one_trace_serves_other_weights() -> None:
    traces = Counted()
    first = traces.graph(Scaled(2.0, 3.0), SPEC, OPSET)
    second = traces.graph(Scaled(5.0, 6.0), SPEC, OPSET)
    assert len(traces.modules) == 1
    assert weights(first) == {"scale": 2.0, "bias": 3.0}
    assert weights(second) == {"scale": 5.0, "bias": 6.0}
    first.model.graph[0].name = "changed"
    assert second.model.graph[0].name != "changed"
    # Also for values added to them.
    names = []
    for graph in (second, Traces().graph(Scaled(2.0, 3.0), SPEC, OPSET)):
        graph.model.graph.append(ir.node("Neg", [graph.model.graph.outputs[0]]))
        names.append([(node.name, node.outputs[0].name) for node in graph.model.graph])
    assert names[0] == names[1]


@pytest.mark.parametrize(("scale", "bias"), [(2.0, 2.0), (1.0, 0.0), (0.0, 0.0)])
def test_values_of_weights_decide_no_graph(scale: float, bias: float) -> None:
    graph = Traces().graph(Scaled(scale, bias), SPEC, OPSET)
    assert weights(graph) == {"scale": scale, "bias": bias}
    usual = Traces().graph(Scaled(2.0, 3.0), SPEC, OPSET)
    assert [each.op_type for each in graph.model.graph] == [
        each.op_type for each in usual.model.graph
    ]


class Nearly(nn.Module):
    """Constants near those by which an operation changes nothing."""

    def forward(self, hidden: Tensor) -> Tensor:
        return ((hidden * 0.999995 + 1e-12) - 1e-9) / 1.000005


def test_small_constants_stay() -> None:
    graph = Traces().graph(Nearly(), SPEC, OPSET)
    assert [each.op_type for each in graph.model.graph] == ["Mul", "Add", "Sub", "Div"]


def test_other_shapes_types_and_modules_are_traced() -> None:
    class Unscaled(Scaled):
        def forward(self, hidden: Tensor) -> Tensor:
            return hidden + self.bias

    traces = Counted()
    halves = scaled_spec("float16")
    for module, kind in (
        (Scaled(2.0, 3.0), SPEC),
        (Unscaled(2.0, 3.0), SPEC),
        (Scaled(2.0, 3.0).half(), halves),
    ):
        graph = traces.graph(module, kind, OPSET)
        stored = graph.model.graph.initializers["bias"].dtype
        assert stored == (ir.DataType.FLOAT if kind is SPEC else ir.DataType.FLOAT16)
    assert len(traces.modules) == 3


def test_a_trace_keeps_no_weights() -> None:
    module, traces = Scaled(2.0, 3.0), Counted()
    traces.graph(module, SPEC, OPSET)
    weight = weakref.ref(module.scale)
    del module
    traces.modules.clear()
    export_graph(Scaled(4.0, 5.0), SPEC, OPSET)  # the exporter holds the module traced last
    gc.collect()
    assert weight() is None


def test_models_of_equal_shapes_and_other_settings_share_no_trace() -> None:
    class OfModel(Scaled):
        def __init__(self, shift: float) -> None:
            super().__init__(2.0, 3.0)
            self.model = SimpleNamespace(config=shift)

        def forward(self, hidden: Tensor) -> Tensor:
            return torch.add(super().forward(hidden), self.model.config)

    traces = Counted()
    for shift in (0.5, 0.25, 0.5):
        graph = traces.graph(OfModel(shift), SPEC, OPSET).model.graph
        assert shift in [array_of(each).max() for each in graph.initializers.values()]
    assert len(traces.modules) == 2


def test_collection_is_rare_only_while_a_graph_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen = gc.get_threshold(), []

    class Watching(Scaled):
        def forward(self, hidden: Tensor) -> Tensor:
            seen.append(gc.get_threshold())
            return super().forward(hidden)

    Traces().graph(Watching(2.0, 3.0), SPEC, OPSET)
    assert seen[0] != before
    assert gc.get_threshold() == before


@pytest.mark.parametrize("in_place", [False, True])
def test_a_program_is_taken_apart_only_where_it_must(
    in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart, decompose = [], graphs._decompose

    def counted(*arguments: Any) -> Any:
        apart.append(arguments)
        return decompose(*arguments)

    class Other(Scaled):
        def forward(self, hidden: Tensor) -> Tensor:
            scaled = torch.softmax(hidden.half().float() * self.scale, dim=-1).reshape(-1, WIDTH)
            return scaled.add_(self.bias) if in_place else scaled + self.bias

    monkeypatch.setattr(graphs, "_decompose", counted)
    module = Other(2.0, 3.0)
    graph = export_graph(module, SPEC)
    assert len(apart) == in_place
    monkeypatch.setattr(graphs, "_decomposed", decompose)
    whole = export_graph(module, SPEC)
    kinds = [[node.op_type for node in each.model.graph] for each in (graph, whole)]
    assert kinds[0] == kinds[1]
    session = onnxruntime.InferenceSession(ir.to_proto(graph.model).SerializeToString())
    hidden = np.random.default_rng(0).normal(size=(3, WIDTH)).astype(np.float32)
    (found,) = session.run(None, {"hidden": hidden})
    with torch.no_grad():
        np.testing.assert_allclose(found, module(torch.tensor(hidden)).numpy(), atol=1e-6)
