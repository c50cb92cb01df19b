"""Faults planted in the exporter, in a graph and in the optimiser are found where they are."""

import copy
import dataclasses
import functools
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import onnx
import onnx_ir as ir
import onnxscript.optimizer
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from tests.export.conftest import loaded, sweep
from transferry.build_model.checkpoint import Checkpoint, load_checkpoint
from transferry.build_model.model import attention, layers, transformer
from transferry.build_model.model.attention import KeyValues, MultiHeadAttention, Rotation
from transferry.build_model.model.transformer import Transformer
from transferry.export.blame import localise
from transferry.export.blame import traced_program as program
from transferry.export.blame.traced_program import value_error
from transferry.export.oracle.cases import random_case
from transferry.export.subject.bundle_copy import BundleCopy
from transferry.export.torch_model import TorchDecoder
from transferry.export.trace import portable as graphs
from transferry.export.trace.store import WEIGHTS, write_graphs
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.specs import Variant
from transferry.runtime.io.sealed_folder import records
from transferry.runtime.ort.session import SessionOptions, open_session
from transferry.runtime.proof.compare import Tolerance
from transferry.runtime.proof.report import Origin

Array = NDArray[Any]
Plant = Callable[[pytest.MonkeyPatch, Transformer], None]


def find(
    model: Transformer,
    bundle: Bundle,
    variant: Variant | None = None,
    session: SessionOptions | None = None,
) -> Origin | None:
    given = model, bundle, variant or bundle.variant(), session or SessionOptions()
    return localise.localise(*given, Tolerance(), list(sweep(model.config))[::3])


def found(model: Transformer, bundle: Bundle, variant: Variant | None = None) -> Origin:
    origin = find(model, bundle, variant)
    assert origin is not None
    return origin


def exported_wrongly(
    bundle: Bundle, model: Transformer, plant: Plant, name: str, folder: Path
) -> tuple[Bundle, Variant]:
    """A copy of the bundle in which one graph is made by an exporter with a defect."""
    copied = dataclasses.replace(bundle, folder=folder)
    shutil.copytree(bundle.folder, folder)
    (folder / "flawed").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        flawed = copy.deepcopy(model)
        plant(patch, flawed)
        graph = graphs.export_graphs(flawed, [name])[name].at(f"flawed/{name}.onnx")
        write_graphs([(graph.model, folder / graph.spec.file)])
    right = bundle.variant()
    return copied, dataclasses.replace(right, graphs={**right.graphs, name: graph.spec})


class Unscaled(MultiHeadAttention):
    """Forgets to divide by sqrt(d_k)."""

    def forward(
        self, x: Tensor, memory: KeyValues, bias: Tensor | None, rotation: Rotation | None = None
    ) -> Tensor:
        assert bias is not None
        scores = self._split(self.query(x)) @ memory.keys.transpose(-2, -1) + bias
        heads = torch.softmax(scores, dim=-1) @ memory.values
        joined: Tensor = self.output(heads.transpose(1, 2).flatten(2))
        return joined


def plant_epsilon(patch: pytest.MonkeyPatch, model: Transformer) -> None:
    optimise = onnxscript.optimizer.optimize_ir

    def careless(graph: ir.Model, **settings: Any) -> None:
        optimise(graph, **settings)
        (norm,) = reading(graph.graph, "model.encoder.0.self_residual.norm.weight")
        norm.attributes["epsilon"] = ir.AttrFloat32("epsilon", 1e-3)

    patch.setattr(onnxscript.optimizer, "optimize_ir", careless)


def reading(nodes: Iterable[ir.Node], weight: str) -> list[ir.Node]:
    return [node for node in nodes if any(value and value.name == weight for value in node.inputs)]


def plant_activation(patch: pytest.MonkeyPatch, model: Transformer) -> None:
    layer: Any = model.encoder[1]
    layer.feed_forward.activation = lambda x: F.gelu(x, approximate="tanh")


def plant_scale(patch: pytest.MonkeyPatch, model: Transformer) -> None:
    layer: Any = model.decoder[0]
    layer.cross_attention.__class__ = Unscaled


def plant_rotation(patch: pytest.MonkeyPatch, model: Transformer) -> None:
    right = Rotation.at
    patch.setattr(Rotation, "at", lambda self, positions: right(self, (positions - 1).clamp(0)))


def plant_mask(patch: pytest.MonkeyPatch, model: Transformer) -> None:
    def ignored(mask: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.zeros(mask.shape, dtype=dtype)[:, None, None, :]

    patch.setattr(transformer, "padding_bias", ignored)


def line_of(function: Any, text: str) -> str:
    """File and line, inside the package, of a text in a function's code."""
    code = function.__code__
    first = code.co_firstlineno
    lines = Path(code.co_filename).read_text().splitlines()[first - 1 :]
    number = next(number for number, line in enumerate(lines, first) if text in line)
    return f"{Path(code.co_filename).relative_to(program.PACKAGE).as_posix()}:{number}"


# Tracing takes most of the time, and the models of these fixtures do not change.
trace_once = functools.cache(program.trace)


@pytest.fixture(autouse=True)
def programs_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(localise, "trace", trace_once)


@pytest.fixture(autouse=True)
def added_outputs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many values each session shows; never more than the served graph bears."""
    counts: list[int] = []

    def watched(path: Path, options: SessionOptions, graph: bytes | None = None) -> Any:
        session = open_session(path, options, graph)
        own = len(onnx.load(str(path), load_external_data=False).graph.output)
        counts.append(len(session.get_outputs()) - own)
        assert counts[-1] <= 8
        return session

    monkeypatch.setattr(localise, "open_session", watched)
    return counts


class Defect(NamedTuple):
    """A defect of the exporter, and its expected report."""

    bundle: str
    plant: Plant
    graph: str
    module: str
    code: Any
    text: str
    operator: str


DEFECTS = [
    Defect(
        *("bundle_folder", plant_epsilon, "encoder", "encoder.0.self_residual.norm"),
        *(layers.Residual.forward, "self.norm(x + self.dropout(sublayer(x)))"),
        "LayerNormalization",
    ),
    Defect(
        *("bundle_folder", plant_scale, "decoder", "decoder.0.cross_attention"),
        *(attention.MultiHeadAttention._split, "x.reshape", "Reshape"),
    ),
    Defect(
        *("bundle_folder", plant_mask, "decoder", "Transformer"),
        *(attention.padding_bias, "bias.masked_fill", "Unsqueeze"),
    ),
    Defect(
        *("writer_bundle_folder", plant_rotation, "decoder", "Transformer"),
        *(Rotation.at, "F.embedding", "Gather"),
    ),
    Defect(
        *("reader_bundle_folder", plant_activation, "encoder", "encoder.1.feed_forward"),
        *(layers.FeedForward.forward, "self.activation(inner)", "Gelu"),
    ),
]


def test_an_honest_bundle_has_no_fault(pair: tuple[Checkpoint, Bundle]) -> None:
    assert find(pair[0].model, pair[1]) is None


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: str(defect.plant.__name__))
def test_a_defect_of_the_exporter_is_found_where_it_is(
    defect: Defect, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    model = loaded(request.getfixturevalue(defect.bundle.replace("bundle", "run"))).model
    right, folder = Bundle.load(request.getfixturevalue(defect.bundle)), tmp_path / "bundle"
    origin = found(model, *exported_wrongly(right, model, defect.plant, defect.graph, folder))
    assert (origin.graph, origin.module) == (defect.graph, defect.module)
    assert origin.source == line_of(defect.code, defect.text)
    assert defect.text in origin.code
    assert origin.operator.split(", ")[-1] == defect.operator
    assert "optimis" not in origin.message


def corrupted(bundle: Bundle, weight: str, folder: Path) -> Bundle:
    """A copy with one wrong number in one weight."""
    copied = BundleCopy(bundle, bundle.variant(), folder)

    def off(array: Array) -> Array:
        array.flat[array.argmax()] *= 1.01
        return array

    copied.edit(weight, off)
    copied.seal()
    return dataclasses.replace(bundle, folder=folder)


@pytest.mark.parametrize("part", ["feed_forward.inner.weight", "self_attention.value.bias"])
def test_one_corrupt_number_is_found(
    checkpoint: Checkpoint, bundle: Bundle, tmp_path: Path, added_outputs: list[int], part: str
) -> None:
    module = f"decoder.1.{part.rpartition('.')[0]}"
    flawed = corrupted(bundle, f"decoder.1.{part}", tmp_path / "bundle")
    before = records(flawed.folder)
    origin = found(checkpoint.model, flawed)
    assert (origin.graph, origin.module) == ("decoder", module)
    assert origin.source.startswith("build_model/")
    assert records(flawed.folder) == before
    # Bisection, not a look at all of a hundred values.
    assert 0 < max(added_outputs) <= 8
    assert len(added_outputs) < 12


def test_a_fault_of_a_fusion_is_told_as_one(
    checkpoint: Checkpoint, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The optimiser's fused norm has another epsilon; shown its input, it cannot fuse."""
    watched: Any = vars(localise)["open_session"]
    weight = "model.decoder.0.cross_residual.norm.weight"

    def norm_of(model: onnx.ModelProto) -> onnx.NodeProto:
        nodes: list[onnx.NodeProto] = [node for node in model.graph.node if weight in node.input]
        return nodes[0]

    def optimised(path: Path, options: SessionOptions, graph: bytes | None = None) -> Any:
        if path.stem != "decoder" or options.optimisation == "disable":
            return watched(path, options, graph)
        model = onnx.load_from_string(graph or path.read_bytes())
        norm = norm_of(model)
        if norm.input[0] not in {value.name for value in model.graph.output}:
            (epsilon,) = (item for item in norm.attribute if item.name == "epsilon")
            epsilon.f = 1e-2
        return watched(path, options, model.SerializeToString())

    monkeypatch.setattr(localise, "open_session", optimised)
    origin = found(checkpoint.model, bundle)
    path = bundle.graph(bundle.variant().graphs["decoder"])
    norm = norm_of(onnx.load(str(path), load_external_data=False))
    assert (origin.graph, origin.tensor) == ("decoder", norm.output[0])
    assert origin.module == "decoder.0.cross_residual.norm"
    assert "right with optimisation disable" in origin.message
    assert f"where {norm.input[0]} is an output too" in origin.message
    assert origin.operator == "Add, LayerNormalization"
    whole = SessionOptions(optimisation="disable")
    assert find(checkpoint.model, bundle, session=whole) is None


def test_a_program_that_was_traced_wrongly_is_told_as_one(
    run_folder: Path, bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = graphs.EncoderGraph.forward

    def reversed_layers(self: Any, source: Tensor, source_mask: Tensor) -> tuple[Tensor, ...]:
        return forward(self, source, source_mask)[::-1]

    def plant(patch: pytest.MonkeyPatch, model: Transformer) -> None:
        patch.setattr(graphs.EncoderGraph, "forward", reversed_layers)

    # Not the shared model, whose program is kept as the other tests trace it.
    model = load_checkpoint(run_folder).model
    flawed = exported_wrongly(bundle, model, plant, "encoder", tmp_path / "bundle")
    plant(monkeypatch, model)
    origin = found(model, *flawed)
    assert (origin.graph, origin.operator) == ("encoder", "torch.export")


def test_what_lies_before_a_right_value_is_looked_at_too(
    checkpoint: Checkpoint, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask that is wrong where only the second layer shows it."""
    search = localise._Search
    mask_line = line_of(attention.causal_bias, "torch.zeros")
    scores_line = line_of(attention.attend, "scores + bias")

    def verdicts(self: Any, names: list[str], served: Any = None) -> dict[str, Any]:
        at = {name: self.program.place(value) for name, value in self.torch_names.items()}
        (scores,) = (
            name
            for name, place in at.items()
            if (place.module, place.source) == ("decoder.1.self_attention", scores_line)
        )
        place = self.served.position(scores)
        wrong = {
            name
            for name in names
            if at[name].source == mask_line or place in self.served.upstream([name])
        }
        return {name: localise._Verdict(float(name in wrong), 0.5, "wrong") for name in names}

    def faults(call: Any, outputs: Any, tolerance: Tolerance, exact: bool) -> set[str]:
        return {"logits"} & set(outputs)

    # Each session judges the middle of the remaining values, so that the mask is not met by chance.
    monkeypatch.setattr(localise, "MOST_SHOWN", 2)
    monkeypatch.setattr(localise, "_faults", faults)
    monkeypatch.setattr(search, "_traced_fault", lambda self, faults: None)
    monkeypatch.setattr(search, "_verdicts", verdicts)
    origin = found(checkpoint.model, bundle)
    assert origin.source == mask_line


def test_values_that_another_operator_renamed_keep_their_modules(
    checkpoint: Checkpoint, bundle: Bundle, tmp_path: Path
) -> None:
    """One division less, and those after it have the names of others."""
    spec = bundle.variant().graphs["decoder"]
    graph = onnx.load(str(bundle.graph(spec)), load_external_data=False)
    divisions = [node for node in graph.graph.node if node.op_type == "Div"]
    first, second, third, fourth = (node.output[0] for node in divisions)
    gone = divisions[1]
    renamed = {second: gone.input[0], third: second, fourth: third}
    graph.graph.node.remove(gone)
    for node in graph.graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        node.output[:] = [renamed.get(name, name) for name in node.output]
    path = tmp_path / "decoder.onnx"
    shutil.copy(bundle.graph(spec).parent / WEIGHTS, tmp_path)
    path.write_bytes(graph.SerializeToString())
    model, fresh = checkpoint.model, trace_once(checkpoint.model, "decoder")
    assert fresh.program is not None
    traced = program.TracedProgram(fresh.program, model, model)
    names = localise.align(localise.ServedGraph(path, spec, SessionOptions()), fresh, traced)
    assert [names[each] for each in (first, second, third)] == ["div", "div_2", "div_3"]
    honest = localise.ServedGraph(bundle.graph(spec), spec, SessionOptions())
    same = localise.align(honest, fresh, traced)
    assert same.items() - fresh.names.items() == {
        (item.name, same[item.name]) for item in spec.outputs
    }
    assert len(same) > 90


@pytest.mark.parametrize(
    "pair",
    ["", pytest.param("writer_", marks=pytest.mark.thorough), "reader_"],
    ids=["both", "writer", "reader"],
    indirect=True,
)
def test_the_program_in_float64_is_the_oracle(pair: tuple[Checkpoint, Bundle]) -> None:
    model, bundle = pair[0].model, pair[1]
    oracle = copy.deepcopy(model).double()
    case = random_case(model.config, 2, 5, 3, seed=0)
    for name, spec in bundle.variant().graphs.items():
        fresh = trace_once(model, name)
        assert fresh.program is not None
        traced = program.TracedProgram(fresh.program, model, oracle)
        for call in localise._calls(name, spec, case, TorchDecoder(model), TorchDecoder(oracle)):
            kept, errors = traced.run(list(call.feeds.values()), traced.values)
            for exact, single in kept.values():
                kinds = (exact.dtype.name, single.dtype.name)
                assert kinds == ("float64", "float32") or exact.dtype.kind != "f"
            for value, output in zip(traced.outputs, spec.outputs, strict=True):
                exact, _ = kept[value]
                assert value_error(exact, call.truth.oracle[output.name]) < 1e-13
                # Two float32 computations of one graph, so no closer than any two that pass.
                assert errors[value] <= Tolerance().budget(call.truth.worst(output.name))


def test_rows_that_are_chosen_wrongly_are_found(
    checkpoint: Checkpoint, bundle: Bundle, tmp_path: Path
) -> None:
    flawed = dataclasses.replace(bundle, folder=tmp_path / "bundle")
    shutil.copytree(bundle.folder, flawed.folder)
    path = flawed.graph(bundle.variant().graphs["select"])
    graph = onnx.load(str(path))
    next(n for n in graph.graph.node if "state.0.keys" in n.input).input[0] = "state.0.values"
    path.write_bytes(graph.SerializeToString())
    origin = found(checkpoint.model, flawed)
    assert (origin.graph, origin.tensor) == ("select", "selected.0.keys")
