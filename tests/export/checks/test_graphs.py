"""A graph that export would not write is refused, whatever it computes."""

import dataclasses
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from tests.traced import TRACES
from transferry.build_model.checkpoint import Checkpoint
from transferry.build_model.model.config import ModelConfig
from transferry.export.checks.graphs import fresh_graphs, graphs_claim, tokens_claim
from transferry.export.rewrite.calibration import Calibration
from transferry.export.trace.graph import Graph
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.proof.certificates.strength import GRAPHS, strength_of
from transferry.runtime.proof.compare import Tolerance
from transferry.runtime.proof.report import ParityReport
from transferry.runtime.proof.views import report_text, to_junit

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


def another_opset(graph: ir.Graph) -> None:
    graph.opset_imports[""] = 21


def another_declaration(graph: ir.Graph) -> None:
    """Of the shape of an inner value, which onnxruntime would fold."""
    value = node_of(graph, "LayerNormalization").outputs[0]
    assert value.shape is not None
    value.shape = ir.Shape([2, *value.shape[1:]])


def metadata(graph: ir.Graph) -> None:
    graph.metadata_props["ort_config"] = "{}"


def an_unused_weight(graph: ir.Graph) -> None:
    tensor = ir.Tensor(np.ones(1, np.float32), name="unused")
    graph.register_initializer(ir.Value(name="unused", const_value=tensor))


def an_initializer_in_a_body(graph: ir.Graph) -> None:
    """A small weight, stored where no list of the model's weights has it."""
    body, (value, *_) = body_of(graph, lambda value: value.const_value is not None)
    assert value.const_value is not None
    tensor = ir.Tensor(value.const_value.numpy() + 1, name="moved")
    moved = ir.Value(name="moved", const_value=tensor)
    body.register_initializer(moved)
    for node in body:
        for place, each in enumerate(node.inputs):
            if each is value:
                node.replace_input_with(place, moved)


def inner_nodes_swapped(graph: ir.Graph) -> None:
    """Two nodes of a body in another order than their edge allows: the edge turns round."""
    for body in graph.subgraphs():
        for node in body:
            given = node.inputs[0] if node.inputs else None
            before = given.producer() if given is not None else None
            if before is not None and before.graph is body and len(before.inputs) > 0:
                node.replace_input_with(0, before.inputs[0])
                return
    raise AssertionError("no such nodes")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (another_epsilon, "LayerNormalization .*: attribute epsilon is "),
        (another_operator, "Div .*: operator is Div, export writes Mul"),
        (another_edge, "Mul .*: input 0 is .*, export writes "),
        (another_constant, "the constant FLOAT.*export writes the constant FLOAT"),
        (another_node, "export writes no such node"),
        (captured_values_swapped, "If .*: attribute .*_branch 0: .*: input . differs"),
        (another_constant_of_a_body, "export writes the constant|If .*the constant"),
        (an_initializer_in_a_body, "If .*: attribute .*_branch 0: .*input . is the constant"),
        (inner_nodes_swapped, "If .*: attribute .*_branch 0: .*input 0 is "),
        (an_unused_weight, "has other constants and weights"),
        (another_opset, "another opset versions"),
        (another_declaration, r"LayerNormalization .*: .* is declared as FLOAT \[2,"),
        (metadata, "has other metadata"),
    ],
)
def test_a_changed_graph_is_named(
    fresh: dict[str, Graph], all_variants: Bundle, tmp_path: Path, change: Any, named: str
) -> None:
    problem = problem_of(fresh, all_variants, tmp_path, lambda model: change(model.graph))
    assert re.match(f"decoder: .*{named}", problem), problem


def problem_of(
    fresh: dict[str, Graph], bundle: Bundle, folder: Path, change: Any, raw: bool = False
) -> str:
    """The claim of a bundle whose decoder is changed in memory, or as the message in its file."""
    return graphs_claim(fresh, changed(bundle, folder, change, raw), bundle.variant(NAME)).problem


def changed(bundle: Bundle, folder: Path, change: Any, raw: bool = False) -> Bundle:
    variant = bundle.variant(NAME)
    copy = dataclasses.replace(bundle, folder=shutil.copytree(bundle.folder, folder / "copy"))
    path = copy.graph(variant.graphs["decoder"])
    model = onnx.load(path, load_external_data=False)
    if raw:
        change(model)
    else:
        edited = ir.from_proto(model)
        change(edited)
        model = ir.to_proto(edited)
    path.write_bytes(model.SerializeToString())
    return copy


def compared(model: ir.Model) -> None:
    """A branch on two neighbouring tokens that no text may have."""
    target = next(value for value in model.graph.inputs if value.name == "target")
    later = ir.node("Slice", [target, *(ir.Value(name=f"end{each}") for each in range(2))])
    one = ir.node("Equal", [later.outputs[0], ir.Value(name="token")])
    model.graph.extend([later, one])


def looked_up(model: ir.Model) -> None:
    """A table of flags of tokens that the graph computes itself."""
    table = ir.node("Not", [ir.Value(name="flags")])
    target = next(value for value in model.graph.inputs if value.name == "target")
    model.graph.extend([table, ir.node("Gather", [table.outputs[0], target])])


def counted(model: ir.Model) -> None:
    """Token ids as the sizes of another tensor."""
    target = next(value for value in model.graph.inputs if value.name == "target")
    node = next(node for node in model.graph if node.op_type == "Reshape")
    node.replace_input_with(1, target)


@pytest.mark.parametrize(
    ("change", "named"), [(compared, "Equal"), (looked_up, "Gather"), (counted, "Reshape")]
)
def test_a_graph_that_waits_for_tokens_is_named(
    all_variants: Bundle, tmp_path: Path, change: Any, named: str
) -> None:
    config = ModelConfig.from_dict(dict(all_variants.manifest.model))
    honest = all_variants.manifest.variants.values()
    assert {tokens_claim(config, all_variants, each).problem for each in honest} == {""}
    copy = changed(all_variants, tmp_path, change)
    found = tokens_claim(config, copy, all_variants.variant(NAME))
    assert re.match(f"decoder: {named} .* reads token ids", found.problem)


def renamed_and_reordered(model: ir.Model) -> None:
    """Renames what has a meaning only inside, and takes the last node that is ready first."""
    weights = {id(value) for value in model.graph.initializers.values()}
    for graph in (model.graph, *model.graph.subgraphs()):
        ends = {id(value) for value in (*model.graph.inputs, *model.graph.outputs)} | weights
        nodes = list(graph)
        for number, node in enumerate(nodes):
            node.name = f"other{number}"
            for value in node.outputs:
                if id(value) not in ends and value.name:
                    value.name = f"renamed.{value.name}"
        graph.remove(nodes)
        placed: set[int] = set()
        while nodes:
            ready = next(
                node
                for node in reversed(nodes)
                if all(id(each) in placed or each not in nodes for each in before(node))
            )
            nodes.remove(ready)
            placed.add(id(ready))
            graph.append(ready)


def before(node: ir.Node) -> list[ir.Node]:
    """The nodes around a node that it or its bodies read."""
    read = list(node.inputs)
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            read += [value for inner in attribute.as_graph().all_nodes() for value in inner.inputs]
    producers = [value.producer() for value in read if value is not None]
    return [each for each in producers if each is not None]


def constants_rounded_otherwise(model: ir.Model) -> None:
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and tensor.dtype == ir.DataType.FLOAT and tensor.nbytes < 1024:
            off = np.nextafter(tensor.numpy(), np.float32(1))
            value.const_value = ir.Tensor(off, name=value.name)


def as_written_before(model: ir.Model) -> None:
    """The version of the format that bundles of before have, and torch's numbered names."""
    model.ir_version = 10
    values = [value for node in model.graph for value in node.outputs]
    for number, value in enumerate(values):
        if not value.is_graph_output():
            value.name = f"val_{number}"


@pytest.mark.parametrize(
    "change", [renamed_and_reordered, constants_rounded_otherwise, as_written_before]
)
def test_names_the_order_of_independent_nodes_and_rounding_do_not_count(
    fresh: dict[str, Graph], all_variants: Bundle, tmp_path: Path, change: Any
) -> None:
    orders = []

    def noted(model: ir.Model) -> None:
        orders.append([node.op_type for node in model.graph])
        change(model)
        orders.append([node.op_type for node in model.graph])

    assert problem_of(fresh, all_variants, tmp_path, noted) == ""
    assert (orders[0] != orders[1]) is (change is renamed_and_reordered)


def sparse(model: onnx.ModelProto) -> None:
    model.graph.sparse_initializer.add().values.name = "x"


def twice(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(model.graph.initializer[0])


def attribute_twice(model: onnx.ModelProto) -> None:
    node = next(node for node in model.graph.node if node.attribute)
    node.attribute.append(node.attribute[0])


def two_offsets(model: onnx.ModelProto) -> None:
    outside = next(each for each in model.graph.initializer if each.external_data)
    outside.external_data.add(key="offset", value="0")


def unknown(model: onnx.ModelProto) -> None:
    model.graph.node[0].MergeFromString(bytes([0xF8, 0x07, 1]))  # field 127


def another_format(model: onnx.ModelProto) -> None:
    model.ir_version = 8


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (another_format, "has another IR version"),
        (sparse, "sparse"),
        (twice, "names two tensors alike"),
        (attribute_twice, "has an attribute twice"),
        (two_offsets, "lies outside of the graph at length, location, offset, offset"),
        (unknown, "fields that onnx does not know"),
    ],
)
def test_content_that_readers_understand_differently_is_named(
    fresh: dict[str, Graph], all_variants: Bundle, tmp_path: Path, change: Any, named: str
) -> None:
    assert named in problem_of(fresh, all_variants, tmp_path, change, raw=True)


def test_an_entry_of_the_manifest_that_export_would_not_write_is_named(
    fresh: dict[str, Graph], all_variants: Bundle
) -> None:
    variant = all_variants.variant(NAME)
    spec = variant.graphs["decoder"]
    swapped = dataclasses.replace(spec, outputs=spec.outputs[::-1])
    graphs = {**variant.graphs, "decoder": swapped}
    changed = dataclasses.replace(variant, graphs=graphs)
    assert "the manifest lists other" in graphs_claim(fresh, all_variants, changed).problem


def test_the_graphs_that_export_writes_pass_and_a_missing_one_is_named(
    fresh: dict[str, Graph], all_variants: Bundle
) -> None:
    assert len(fresh) > 5
    assert graphs_claim(fresh, all_variants, all_variants.variant(NAME)).problem == ""
    few = {name: graph for name, graph in fresh.items() if name != "gather"}
    problem = graphs_claim(few, all_variants, all_variants.variant(NAME)).problem
    assert problem.startswith("expected ")


@pytest.mark.parametrize(
    ("name", "version", "compared"),
    [
        *(("torch", "{}+cu130", True), ("torch", "1.0", False), ("torch", "", False)),
        *((name, "1.0", False) for name in ("transferry", "onnx", "onnxscript")),
    ],
)
def test_graphs_of_other_versions_are_not_compared_and_the_report_says_so(
    calm: Checkpoint, all_variants: Bundle, name: str, version: str, compared: bool
) -> None:
    """A build of the same version for other devices is no other version."""
    own = all_variants.manifest.versions
    versions = {**own, name: version.format(own[name].partition("+")[0])}
    manifest = dataclasses.replace(all_variants.manifest, versions=versions)
    other = dataclasses.replace(all_variants, manifest=manifest)
    fresh = anew(calm, other) or None
    claim = graphs_claim(fresh, other, other.variant(NAME))
    assert (bool(fresh), claim.problem) == (compared, "")
    strength = strength_of("the checkpoint", {GRAPHS: claim.skipped})
    if compared:
        assert (claim.skipped, strength) == ("", "checkpoint")
        return
    assert f"exported with {name} {versions[name]}, here is " in claim.skipped
    assert strength == "checkpoint without fresh graphs"
    report = ParityReport("bundle", {"variant": NAME}, Tolerance(), [], claims=[claim])
    assert f"0 of 1 claims hold, 1 not compared\n  {GRAPHS}, not compared" in report_text(report)
    assert '<skipped message="the bundle was exported with' in to_junit(report)
