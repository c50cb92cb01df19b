"""Graphs of other tools beside torch: sound ones pass, and each check finds its fault."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.commands import call
from tests.export.subject.graphs import decoder_with_past, linear_layer, masked_model, saved
from transferry.build_model.checkpoint import Checkpoint, load_checkpoint, load_samples
from transferry.export.audit import Audit, Planting, audit, tolerance_of
from transferry.export.faults.foreign_faults import FAULTS
from transferry.export.faults.gate import Gate
from transferry.export.subject.foreign import ForeignFolder
from transferry.export.subject.layout import GraphFile, read_layout, read_whole
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.proof.report import ParityReport


@pytest.fixture(scope="session")
def writer(writer_bundle_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("writer-graphs")
    decoder_with_past(Bundle.load(writer_bundle_folder), folder)
    return folder


@pytest.fixture(scope="session")
def reader(reader_bundle_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reader-graphs")
    masked_model(Bundle.load(reader_bundle_folder), folder)
    return folder


def audited(
    folder: Path, run: Path, padding: tuple[str, ...] = ("right",), plant: bool = False
) -> ParityReport:
    checkpoint: Checkpoint = load_checkpoint(run)
    texts = load_samples(run)[:9]
    sides: Any = padding
    subject = ForeignFolder(read_layout(folder), SessionOptions(), checkpoint, sides)
    return audit(folder, subject, texts, planting=Planting(plant))


def test_a_decoder_with_past_passes(writer: Path, writer_run_folder: Path) -> None:
    report = audited(writer, writer_run_folder)
    assert report.faults == []
    ways = {item.search: item.identical for item in report.decisions}
    assert set(ways) == {
        f"{name}, {way}"
        for name in ("greedy", "beam 4")
        for way in ("each row alone", "batches padded right")
    }
    assert {item.stage for item in report.comparisons} == {"first step", "later step", "text"}
    assert [claim.name for claim in report.claims] == ["repeated runs", "declared types and shapes"]


def test_padding_that_a_graph_does_not_read_is_found(writer: Path, writer_run_folder: Path) -> None:
    report = audited(writer, writer_run_folder, ("left", "right"))
    assert not report.passed
    assert all("padded left" in fault for fault in report.faults), report.faults


def test_a_masked_model_passes(reader: Path, reader_run_folder: Path) -> None:
    report = audited(reader, reader_run_folder)
    assert report.faults == []
    assert {item.tensor for item in report.comparisons} == {"hidden", "logits"}
    (decided,) = report.decisions
    assert decided.search == "fill-mask"


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("a weight scaled", "error .* of the largest entry exceeds"),
        ("two columns of a weight swapped", "error .* of the largest entry exceeds"),
        ("one row of the embedding", "vocabulary .*exceeds"),
        ("a weight in 8 bits", "error .* of the largest entry exceeds"),
        ("later rows of a batch", "alone and in batches padded right"),
        ("swapped cache rows", "padded right"),
        ("noise", "repeated runs: .* differs by"),
        ("another declared shape", "declared types and shapes: .*logits declares"),
    ],
)
def test_a_fault_is_found(
    kind: str, found: str, writer: Path, writer_run_folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(writer, tmp_path / "graphs")
    layout = read_layout(tmp_path / "graphs")
    model = ir.load(layout.decoder.path)
    assert FAULTS[kind](model, layout.decoder)
    saved(model, layout.decoder.path)
    report = audited(tmp_path / "graphs", writer_run_folder)
    assert any(re.search(found, fault) for fault in report.faults), report.faults[:5]


def test_a_dropped_mask_is_found(reader: Path, reader_run_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(reader, tmp_path / "graphs")
    layout = read_layout(tmp_path / "graphs")
    model = ir.load(layout.decoder.path)
    assert FAULTS["padding mask dropped"](model, layout.decoder)
    saved(model, layout.decoder.path)
    report = audited(tmp_path / "graphs", reader_run_folder, plant=True)
    assert any("alone and in batches padded right" in fault for fault in report.faults)
    assert report.settings["planted faults"] == "none, since the graphs fail as they are"
    assert not report.self_test


def test_a_size_that_breaks_is_found(reader: Path, reader_run_folder: Path, tmp_path: Path) -> None:
    """A graph that declares a batch of 2 runs on no other."""
    shutil.copytree(reader, tmp_path / "graphs")
    path = tmp_path / "graphs" / "model.onnx"
    model = ir.load(path)
    for value in model.graph.inputs:
        assert value.shape is not None
        value.shape = ir.Shape([2, *list(value.shape)[1:]])
    saved(model, path)
    report = audited(tmp_path / "graphs", reader_run_folder)
    broken = [fault for fault in report.faults if "does not run" in fault]
    assert any(fault.startswith("batch 1") for fault in broken)
    assert any(fault.startswith("batch 7") for fault in broken)
    assert not any(fault.startswith("batch 2,") for fault in broken)


def test_graphs_of_another_architecture_are_refused(run_folder: Path, writer: Path) -> None:
    done = call("audit", writer, "--reference", run_folder)
    assert done.exit_code == 3
    assert "the folder holds one graph without an encoder" in done.stderr


def test_the_self_test_tells_what_a_tolerance_would_have_missed(
    writer: Path, writer_run_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "text").write_text("\n".join(load_samples(writer_run_folder)[:5]) + "\n")
    files = {name: tmp_path / f"report.{name}" for name in ("html", "xml")}
    done = call(
        *("audit", writer, "--reference", writer_run_folder, "--text", tmp_path / "text"),
        *("--padding", "right", "--plant", "--atol", "1e-3", "--json", "--quiet"),
        *("--report", files["html"], "--junit", files["xml"]),
    )
    assert done.exit_code == 0, done.stderr
    record = json.loads(done.stdout)
    planted = {item["kind"]: item for item in record["self_test"]}
    assert all(item["passed"] and item["changes_answer"] for item in planted.values()), planted
    assert planted["swapped cache rows"]["difference"] == 0
    assert planted["swapped cache rows"]["tolerated"]
    assert not planted["two columns of a weight swapped"]["tolerated"]
    missed = sum(item["tolerated"] for item in planted.values())
    told = f"0.001 would have missed {missed} of {len(planted)} planted faults"
    assert record["settings"]["atol"] == told
    assert told in files["html"].read_text()
    assert 'classname="transferry.claims"' in files["xml"].read_text()


def test_faults_that_the_checks_miss_are_told(
    writer: Path, writer_run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gate, "caught_by", lambda *_: "")
    checkpoint = load_checkpoint(writer_run_folder)
    subject = ForeignFolder(read_layout(writer), SessionOptions(), checkpoint)
    report = audit(writer, subject, [], planting=Planting(plant=True))
    assert not report.passed
    harmless = {item.kind for item in report.self_test if not item.changes_answer}
    assert harmless == {"another declared shape"}


def test_names_of_a_toml_file(writer: Path, writer_run_folder: Path, tmp_path: Path) -> None:
    model = ir.load(writer / "model.onnx")
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.name = f"x.{value.name}"
    saved(model, tmp_path / "x.onnx")
    graph = read_layout(writer).decoder
    names = tmp_path / "names.toml"
    names.write_text(
        '[inputs]\ntokens = "x.input_ids"\nmask = "x.attention_mask"\n'
        f"past = {json.dumps([f'x.{name}' for name in graph.past])}\n"
        '[outputs]\nlogits = "x.logits"\n'
        f"present = {json.dumps([f'x.{name}' for name in graph.past.values()])}\n"
    )
    layout = read_layout(tmp_path / "x.onnx", names)
    assert layout.decoder.inputs["tokens"] == "x.input_ids"
    checkpoint = load_checkpoint(writer_run_folder)
    subject = ForeignFolder(layout, SessionOptions(), checkpoint, ["right"])
    report = audit(tmp_path, subject, ["a"])
    assert report.faults == []
    refused = call("audit", tmp_path / "x.onnx", "--reference", writer_run_folder)
    assert refused.exit_code == 3
    assert "say it with --names" in refused.stderr


def test_the_precision_is_read_from_the_operators(tmp_path: Path) -> None:
    node = helper.make_node("MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft", bits=4)
    packed = np.zeros((3, 1, 2), np.uint8)  # 12 numbers
    scales, table = np.ones((3, 1), np.float32), np.ones((9, 4), np.float32)
    _write(tmp_path / "model.onnx", [node], w=packed, s=scales, table=table)
    whole = read_whole(tmp_path)
    assert whole.precision() == "int4"
    assert whole.in_integers() == 12 / 48
    integers = [
        helper.make_node("DequantizeLinear", ["w", "s"], ["real"], axis=1),
        helper.make_node("MatMul", ["x", "real"], ["y"]),
    ]
    weight = np.ones((4, 3), np.int8)
    _write(tmp_path / "model.onnx", integers, w=weight, s=np.ones(3, np.float32))
    assert read_whole(tmp_path).precision() == "int8"
    assert read_whole(tmp_path).in_integers() == 1.0
    assert tolerance_of("int8").factor > tolerance_of("float32").factor


def test_a_weight_of_integers_can_be_at_fault(tmp_path: Path) -> None:
    weight = np.arange(12, dtype=np.int8).reshape(4, 3)
    node = helper.make_node("MatMulInteger", ["x", "w"], ["y"])
    _write(tmp_path / "model.onnx", [node], w=weight)
    model = ir.load(tmp_path / "model.onnx")
    graph = GraphFile(tmp_path / "model.onnx", {}, {})
    assert FAULTS["a weight of integers reversed"](model, graph) == "w: its first axis backwards"
    changed = model.graph.initializers["w"].const_value
    assert changed is not None
    np.testing.assert_array_equal(changed.numpy(), weight[::-1])
    assert FAULTS["a weight scaled"](model, graph) is None


@pytest.mark.parametrize(("precision", "limit"), [("int8", 0.125), ("int4", 0.375)])
def test_integers_have_one_limit(precision: str, limit: float) -> None:
    """torch's own error in float32 does not widen it."""
    tolerance = tolerance_of(precision)
    assert {tolerance.budget(own) for own in (0.0, 1e-7, 1e-5)} == {limit}


def _write(path: Path, nodes: list[onnx.NodeProto], **weights: np.ndarray) -> None:
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "graph",
        [value("input_ids" if not weights else "x", TensorProto.FLOAT, ["batch", 4])],
        [value("y", TensorProto.FLOAT, ["batch", 3])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)


FUNCTION = """
import torch

def audited():
    torch.manual_seed(0)
    return torch.nn.Module.__call__ and Linear(), {"x": torch.randn(5, 4)}

class Linear(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 3)

    def forward(self, x):
        return self.inner(x)

def wrong():
    return 3

def failing():
    raise ValueError("no weights")

def leaving():
    raise SystemExit("left early")

def of_gradients():
    torch.manual_seed(0)
    return Linear(), {"x": torch.randn(5, 4).bfloat16().requires_grad_()}
"""


@pytest.fixture
def linear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Path]:
    """A graph written by hand, and the module beside it."""
    name = f"audited_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(FUNCTION)
    monkeypatch.chdir(tmp_path)

    def make(scale: float) -> Path:
        import torch

        torch.manual_seed(0)
        inner = torch.nn.Linear(4, 3)
        nodes = [
            helper.make_node("MatMul", ["x", "w"], ["product"]),
            helper.make_node("Add", ["product", "b"], ["y"]),
        ]
        weight = inner.weight.detach().numpy().T * np.float32(scale)
        _write(tmp_path / "m.onnx", nodes, w=weight.copy(), b=inner.bias.detach().numpy())
        return Path(name)

    return make


def test_a_function_is_the_reference(linear: Callable[[float], Path]) -> None:
    name = linear(1.0)
    for function in ("audited", "of_gradients"):
        assert call("audit", "m.onnx", "--reference", f"{name}:{function}").exit_code == 0
    linear(1.0001)
    found = call("audit", "m.onnx", "--reference", f"{name}:audited")
    assert found.exit_code == 4
    assert "exceeds the budget" in " ".join(found.stdout.split())
    for function, message in (
        ("wrong", "to return a torch module and its inputs"),
        ("failing", "failed: no weights"),
        ("leaving", "failed: left early"),
        ("absent", "has no function 'absent'"),
    ):
        refused = call("audit", "m.onnx", "--reference", f"{name}:{function}")
        assert refused.exit_code == 2
        assert message in refused.stderr
    refused = call("audit", "m.onnx", "--reference", "no_such_module:f")
    assert refused.exit_code == 2
    assert "importing no_such_module failed" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("empty --reference run", 3, "expected model.onnx"),
        ("ct2 --reference run", 3, "ct2 holds a model of CTranslate2 (model.bin)"),
        ("absent --reference run", 3, "absent: cannot be read: No such file"),
        ("graphs --reference absent", 3, "expected a folder that `transferry import` reads"),
        ("graphs --reference run --atol 1e-3", 2, "--atol has no effect without --plant"),
        ("graphs", 2, "Missing option '--reference'"),
        ("graphs --reference run --names absent.toml", 3, "found a folder"),
        ("text.onnx --reference run", 3, "expected an ONNX graph"),
        ("graphs --reference run --suffix _int8", 3, "expected model_int8.onnx or decoder_model"),
        ("graph.onnx --reference run --names list.toml", 3, "list.toml: Expected `object`"),
        ("graph.onnx --reference run --names table.toml", 3, "expected the tables inputs, outputs"),
        ("graph.onnx --reference run --names several.toml", 3, "expected one name for tokens"),
    ],
)
def test_mistakes_are_told(
    arguments: str,
    code: int,
    message: str,
    writer: Path,
    writer_run_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "ct2").mkdir()
    (tmp_path / "ct2" / "model.bin").touch()
    (tmp_path / "graphs").symlink_to(writer)
    (tmp_path / "run").symlink_to(writer_run_folder)
    (tmp_path / "text.onnx").write_text("no graph")
    (tmp_path / "graph.onnx").symlink_to(writer / "model.onnx")
    (tmp_path / "list.toml").write_text('inputs = ["input_ids"]')
    (tmp_path / "table.toml").write_text('[cache]\npast = "k0"')
    (tmp_path / "several.toml").write_text('[inputs]\ntokens = ["input_ids"]')
    refused = call("audit", *arguments.split())
    assert refused.exit_code == code
    assert message in refused.stderr


def test_names_that_a_graph_lacks_are_told(writer: Path, tmp_path: Path) -> None:
    graph = GraphFile(writer / "model.onnx", {}, {})
    with pytest.raises(Exception, match="has no input 'ids'"):
        graph.of_names({"inputs": {"tokens": "ids"}})
    with pytest.raises(Exception, match="expected the meanings"):
        graph.of_names({"inputs": {"words": "input_ids"}})


def test_the_suffix_chooses_the_graphs(writer: Path, tmp_path: Path) -> None:
    (tmp_path / "onnx").mkdir()
    for name in ("encoder_model", "decoder_model_merged"):
        for suffix in ("", "_quantized"):
            shutil.copy(writer / "model.onnx", tmp_path / "onnx" / f"{name}{suffix}.onnx")
    found = [graph.path.name for graph in read_layout(tmp_path, suffix="_quantized").graphs]
    assert found == ["encoder_model_quantized.onnx", "decoder_model_merged_quantized.onnx"]


def test_the_token_that_pads_is_in_no_random_source(reader_run_folder: Path) -> None:
    """RoBERTa's kin count no position for it, so that torch would answer otherwise."""
    work = Audit.of(load_checkpoint(reader_run_folder), ["a"], "float32")
    assert not any((case.source == work.oracle.special.pad_id).any() for case in work.cases)


def test_random_cases_are_padded_on_the_side_that_is_named(
    writer: Path, writer_run_folder: Path
) -> None:
    """The graph reads padding on the right alone."""
    report = audited(writer, writer_run_folder, ("left",))
    assert any(fault.startswith("batch 7, source") for fault in report.faults), report.faults


def test_graphs_of_another_kind_are_refused(
    writer: Path, reader_run_folder: Path, run_folder: Path, tmp_path: Path
) -> None:
    done = call("audit", writer, "--reference", reader_run_folder)
    assert done.exit_code == 3
    assert "reads past_key_values.0.key and " in done.stderr
    assert "more, for which the reference has nothing" in done.stderr
    model = ir.load(writer / "model.onnx")
    whole = ir.Value(name="decoder_input_ids", type=ir.TensorType(ir.DataType.INT64))
    model.graph.inputs.append(whole)
    saved(model, tmp_path / "model.onnx")
    done = call("audit", tmp_path, "--reference", run_folder)
    assert done.exit_code == 3
    assert "reads input_ids and decoder_input_ids" in done.stderr


def test_inputs_without_rows_prove_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    linear_layer(tmp_path)
    monkeypatch.chdir(tmp_path)
    source = Path("linear.py").read_text().replace("torch.arange(20.0)", "torch.ones(0)")
    Path("rowless.py").write_text(source.replace("reshape(5, 4)", "reshape(0, 4)"))
    done = call("audit", "linear.onnx", "--reference", "rowless:audited")
    assert done.exit_code == 3
    assert "return inputs of at least one row" in done.stderr
