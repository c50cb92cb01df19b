"""A graph that export would not write is refused, whatever it computes."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from tests.traced import TRACES
from transferry.build_model.checkpoint import Checkpoint
from transferry.export.checks.graphs import fresh_graphs, graphs_claim
from transferry.export.rewrite.calibration import Calibration
from transferry.export.subject.bundle_copy import BundleCopy
from transferry.export.trace.graph import Graph
from transferry.runtime.bundle.bundle import Bundle

NAME = "cpu-int8"


def anew(checkpoint: Checkpoint, bundle: Bundle, name: str = NAME) -> dict[str, Graph]:
    variant = bundle.variant(name)
    calibration = Calibration.of(bundle, variant) if name == NAME else None
    return dict(fresh_graphs(checkpoint.model, bundle, variant, calibration, traces=TRACES) or {})


@pytest.fixture(scope="module")
def fresh(calm: Checkpoint, all_variants: Bundle) -> dict[str, Graph]:
    return anew(calm, all_variants)


def node_of(graph: ir.Graph, kind: str) -> ir.Node:
    return next(node for node in graph if node.op_type == kind)


def another_epsilon(graph: ir.Graph) -> None:
    node = node_of(graph, "LayerNormalization")
    node.attributes["epsilon"] = ir.AttrFloat32("epsilon", 1.1e-5)


def another_operator(graph: ir.Graph) -> None:
    node_of(graph, "Mul").op_type = "Div"


def another_edge(graph: ir.Graph) -> None:
    node = node_of(graph, "Mul")
    node.replace_input_with(0, node.inputs[1])


def another_constant(graph: ir.Graph) -> None:
    for value in graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and tensor.dtype == ir.DataType.FLOAT and tensor.nbytes == 4:
            value.const_value = ir.Tensor(np.float32(tensor.numpy() * 1.001), name=value.name)
            return
    raise AssertionError("no constant")


def body_of(graph: ir.Graph, outer: Any) -> tuple[ir.Graph, list[ir.Value]]:
    """The first body of an If that reads two such values of the graph around it."""
    for node in graph:
        for attribute in node.attributes.values() if node.op_type == "If" else ():
            body = attribute.as_graph()
            read = {id(value): value for each in body for value in each.inputs if value is not None}
            found = [value for value in read.values() if value.graph is graph and outer(value)]
            if len(found) > 1:
                return body, found
    raise AssertionError("no body reads two of them")


def captured_values_swapped(graph: ir.Graph) -> None:
    """A body whose text stays, between values that have exchanged their names."""
    body, (one, other, *_) = body_of(graph, lambda value: value.producer() is not None)
    swapped = {id(one): other, id(other): one}
    for node in body:
        for place, value in enumerate(node.inputs):
            if id(value) in swapped:
                node.replace_input_with(place, swapped[id(value)])
    one.name, other.name = other.name, one.name


def another_constant_of_a_body(graph: ir.Graph) -> None:
    _, (value, *_) = body_of(graph, lambda value: value.const_value is not None)
    assert value.const_value is not None
    value.const_value = ir.Tensor(value.const_value.numpy() + 1, name=value.name)


def another_node(graph: ir.Graph) -> None:
    graph.append(ir.node("Identity", [graph.outputs[0]]))


@pytest.mark.parametrize(
    "change",
    [
        *(another_epsilon, another_operator, another_edge, another_constant, another_node),
        *(captured_values_swapped, another_constant_of_a_body),
    ],
)
def test_a_changed_graph_is_named(
    fresh: dict[str, Graph], all_variants: Bundle, tmp_path: Path, change: Any
) -> None:
    copy = BundleCopy(all_variants, all_variants.variant(NAME), tmp_path / "copy")
    change(copy.graphs["decoder"].graph)
    copy.rewrite()
    copy.seal()
    problem = graphs_claim(fresh, Bundle.load(copy.folder), copy.variant).problem
    assert problem.startswith("decoder: ")


def test_the_graphs_that_export_writes_pass_and_a_missing_one_is_named(
    fresh: dict[str, Graph], all_variants: Bundle
) -> None:
    assert len(fresh) > 5
    assert graphs_claim(fresh, all_variants, all_variants.variant(NAME)).problem == ""
    few = {name: graph for name, graph in fresh.items() if name != "gather"}
    problem = graphs_claim(few, all_variants, all_variants.variant(NAME)).problem
    assert problem.startswith("expected ")


@pytest.mark.parametrize(("torch", "compared"), [("1.0", False), ("{}+cu130", True)])
def test_graphs_of_other_versions_are_not_compared(
    calm: Checkpoint, all_variants: Bundle, torch: str, compared: bool
) -> None:
    """A build of the same version for other devices is no other version."""
    own = all_variants.manifest.versions
    versions = {**own, "torch": torch.format(own["torch"].partition("+")[0])}
    manifest = dataclasses.replace(all_variants.manifest, versions=versions)
    assert bool(anew(calm, dataclasses.replace(all_variants, manifest=manifest))) is compared
