"""Graphs of other tools beside torch: sound ones pass, and each check finds its fault."""

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from tests.commands import call
from tests.export.subject.graphs import decoder_with_past, masked_model, saved
from transferry.build_model.checkpoint import load_checkpoint, load_samples
from transferry.export.audit import Audit, audit, tolerance_of
from transferry.export.faults.foreign_faults import FAULTS
from transferry.export.faults.gate import Gate
from transferry.export.subject.foreign import ForeignFolder, GraphCopy, default_paddings
from transferry.export.subject.foreign_model import Padding
from transferry.export.subject.layout import COUNTING, read_layout, read_whole
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
    graphs: Path, run: Path, *sides: Padding, plant: bool = False, rows: int = 9
) -> ParityReport:
    """Audits a folder, or one graph whose names a file beside it gives."""
    names = graphs.with_name("names.toml") if graphs.is_file() else None
    layout, sides = read_layout(graphs, names), sides or ("right",)
    subject = ForeignFolder(layout, SessionOptions(), load_checkpoint(run), sides)
    return audit(graphs, subject, load_samples(run)[:rows], plant=plant)


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
    assert [claim.name for claim in report.claims] == [
        *("repeated runs", "declared types and shapes", "weights")
    ]


def test_graphs_that_count_from_the_left_are_padded_on_the_right(
    writer: Path, writer_run_folder: Path, tmp_path: Path
) -> None:
    model = ir.load(shutil.copytree(writer, tmp_path / "graphs") / "model.onnx")
    next(node for node in model.graph if node.op_type == "Softmax").op_type = COUNTING
    saved(model, tmp_path / "graphs" / "model.onnx")
    checkpoint = load_checkpoint(writer_run_folder)
    assert default_paddings(checkpoint, read_layout(tmp_path / "graphs")) == ["right"]


def test_padding_that_a_graph_does_not_read_is_found(writer: Path, writer_run_folder: Path) -> None:
    report = audited(writer, writer_run_folder, "left", "right", rows=3)
    assert not report.passed
    assert all("padded left" in fault for fault in report.faults), report.faults


def test_a_masked_model_passes(reader: Path, reader_run_folder: Path) -> None:
    report = audited(reader, reader_run_folder)
    assert report.faults == []
    assert {item.tensor for item in report.comparisons} == {"hidden", "logits"}
    (decided,) = report.decisions
    assert decided.search == "fill-mask"


def spoiled(graphs: Path, folder: Path, *kinds: str) -> Path:
    """A copy of the graphs with faults."""
    copy = GraphCopy(read_layout(graphs), folder)
    for kind in kinds:
        assert FAULTS[kind](copy)
    copy.seal()
    return folder


# Check that finds each fault alone, in the self-test.
FIRST = ("a weight scaled", "two columns of a weight swapped", "one row of the embedding")
LATER = ("padding mask dropped", "later rows of a batch", "swapped cache rows")
CAUGHT = {
    **dict.fromkeys((*FIRST, "a weight in 8 bits", "repeated rows", "noise"), "first step"),
    **dict.fromkeys(LATER, "later step"),
    "another declared shape": "declared types and shapes",
}
# How the report tells faults.
TOLD = {
    "a weight in 8 bits": "error .* of the entry.s unit exceeds",
    "one row of the embedding": "vocabulary .*exceeds",
    "later rows of a batch": "alone and in batches padded right",
    "repeated rows": "batches of 1 to 128: logits: error",
    "noise": "repeated runs: .* differs by",
    "another declared shape": "declared types and shapes: .*logits declares",
}


def test_faults_are_told(writer: Path, writer_run_folder: Path, tmp_path: Path) -> None:
    report = audited(spoiled(writer, tmp_path / "graphs", *TOLD), writer_run_folder, rows=3)
    for told in TOLD.values():
        assert any(re.search(told, fault) for fault in report.faults), told


def test_a_dropped_mask_is_found(reader: Path, reader_run_folder: Path, tmp_path: Path) -> None:
    folder = spoiled(reader, tmp_path / "graphs", "padding mask dropped")
    report = audited(folder, reader_run_folder, plant=True)
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
    assert {kind: item["caught_by"] for kind, item in planted.items()} == CAUGHT
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
    report = audited(writer, writer_run_folder, plant=True, rows=0)
    assert not report.passed
    harmless = {item.kind for item in report.self_test if not item.changes_answer}
    assert harmless == {"another declared shape"}


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
    copy = GraphCopy(read_whole(tmp_path), tmp_path / "copy")
    assert FAULTS["a weight of integers reversed"](copy) == "w: its first axis backwards"
    changed = copy.model.graph.initializers["w"].const_value
    assert changed is not None
    np.testing.assert_array_equal(changed.numpy(), weight[::-1])
    assert FAULTS["a weight scaled"](copy) is None


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


FUNCTIONS = """
import torch

def audited():
    return Linear(), {"x": torch.randn(5, 4)}

class Linear(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = torch.nn.Linear(4, 3)

    def forward(self, x):
        return self.inner(x)

def wrong():
    return 3

def plain():
    return Linear().inner, {"x": torch.randn(5, 4)}

def listed():
    return Linear().inner, [torch.randn(5, 4)]

def cases():
    return Linear().inner, [[torch.randn(5, 4)], {"x": torch.randn(3, 4)}]

def misnamed():
    return Linear().inner, {"y": torch.randn(5, 4)}

def several():
    return Linear().inner, [torch.randn(5, 4)] * 2

def failing():
    raise ValueError("no weights")

def leaving():
    raise SystemExit("left early")

def of_gradients():
    return Linear(), {"x": torch.randn(5, 4).bfloat16().requires_grad_()}

def rowless():
    return Linear(), {"x": torch.randn(0, 4)}
"""


@pytest.fixture(scope="session")
def examples(
    writer: Path,
    writer_run_folder: Path,
    run_folder: Path,
    reader_run_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A folder of graphs, checkpoints, functions and mistakes, named as in the command line."""
    folder = tmp_path_factory.mktemp("examples")
    links = {"graphs": writer, "graph.onnx": writer / "model.onnx", "run": writer_run_folder}
    for name, target in {**links, "both": run_folder, "reader": reader_run_folder}.items():
        (folder / name).symlink_to(target)
    for name in ("empty", "ct2", "whole"):
        (folder / name).mkdir()
    (folder / "ct2" / "model.bin").touch()
    (folder / "text.onnx").write_text("no graph")
    (folder / "list.toml").write_text('inputs = ["input_ids"]')
    (folder / "table.toml").write_text('[cache]\npast = "k0"')
    (folder / "deep.toml").write_text(f"x = {'[' * 3000}{']' * 3000}")
    os.mkfifo(folder / "pipe.toml")
    for name in ("pipe", "deep", "typed"):
        (folder / name).mkdir()
    os.mkfifo(folder / "pipe" / "genai_config.json")
    (folder / "deep" / "genai_config.json").write_text("[" * 100_000 + "]" * 100_000)
    (folder / "typed" / "genai_config.json").write_text('{"model": [1]}')
    (folder / "several.toml").write_text('[inputs]\ntokens = ["input_ids"]')
    (folder / "lacking.toml").write_text('[inputs]\ntokens = "ids"\n[outputs]\nlogits = "logits"')
    (folder / "words.toml").write_text('[inputs]\nwords = "input_ids"')
    model = ir.load(writer / "model.onnx")
    both = ir.Value(name="decoder_input_ids", type=ir.TensorType(ir.DataType.INT64))
    model.graph.inputs.append(both)
    saved(model, folder / "whole" / "model.onnx")
    model.graph.inputs.remove(both)
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.name = f"x.{value.name}"
    saved(model, folder / "x.onnx")
    past = read_layout(writer).decoder.past
    (folder / "names.toml").write_text(
        '[inputs]\ntokens = "x.input_ids"\nmask = "x.attention_mask"\n'
        f"past = {json.dumps([f'x.{name}' for name in past])}\n"
        '[outputs]\nlogits = "x.logits"\n'
        f"present = {json.dumps([f'x.{name}' for name in past.values()])}\n"
    )
    (folder / "audited_functions.py").write_text(FUNCTIONS)
    torch.manual_seed(0)
    inner = torch.nn.Linear(4, 3)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["product"]),
        helper.make_node("Add", ["product", "b"], ["y"]),
    ]
    weight, bias = (each.detach().numpy() for each in (inner.weight, inner.bias))
    model = onnx.load(writer / "model.onnx", load_external_data=False)
    outside = max(model.graph.initializer, key=lambda each: len(each.raw_data))
    onnx.external_data_helper.set_external_data(outside, "../w.bin")
    outside.ClearField("raw_data")
    onnx.save(model, folder / "outside.onnx")
    for name, scale in (("m.onnx", 1.0), ("off.onnx", 1.0001)):
        _write(folder / name, nodes, w=weight.T * np.float32(scale), b=bias)
    return folder


@pytest.mark.parametrize(
    ("graph", "function", "code"),
    [
        *(("m", name, 0) for name in ("audited", "of_gradients", "plain", "listed", "cases")),
        *(("off", name, 4) for name in ("audited", "listed")),
    ],
)
def test_a_function_is_the_reference(
    graph: str, function: str, code: int, examples: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(examples)
    found = call("audit", f"{graph}.onnx", "--reference", f"audited_functions:{function}")
    assert found.exit_code == code
    assert ("exceeds the budget" in " ".join(found.stdout.split())) == (code == 4)


def test_names_of_a_toml_file(examples: Path, writer_run_folder: Path) -> None:
    layout = read_layout(examples / "x.onnx", examples / "names.toml")
    assert layout.decoder.inputs["tokens"] == "x.input_ids"
    assert audited(examples / "x.onnx", writer_run_folder, rows=1).faults == []


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
        ("graph.onnx --reference run --names deep.toml", 3, "deep.toml is not TOML: "),
        ("graph.onnx --reference run --names pipe.toml", 3, "found a pipe, a device or a socket"),
        ("pipe --reference run", 3, "genai_config.json: expected a file, found a pipe"),
        ("deep --reference run", 3, "genai_config.json is not JSON (it is nested too deeply)"),
        ("typed --reference run", 3, "genai_config.json: Expected `object`, got `array`"),
        ("outside.onnx --reference run", 3, "expected its weights in ../w.bin, a file beside it"),
        ("m.onnx --reference audited_functions:misnamed", 3, "gives y; return one tensor for each"),
        ("m.onnx --reference audited_functions:several", 3, "gives 2 tensors; return one tensor"),
        ("graph.onnx --reference run --names table.toml", 3, "unknown field `cache`"),
        (
            "graph.onnx --reference run --names several.toml",
            3,
            "got `array` - at `$.inputs.tokens`",
        ),
        ("graph.onnx --reference run --names lacking.toml", 3, "has no input 'ids'; it has "),
        ("graph.onnx --reference run --names words.toml", 3, "unknown field `words`"),
        ("x.onnx --reference run", 3, "say it with --names"),
        ("graphs --reference both", 3, "the folder holds one graph without an encoder"),
        ("graphs --reference reader", 3, "reads past_key_values.0.key and "),
        ("graphs --reference reader", 3, "more, for which the reference has nothing"),
        ("whole --reference both", 3, "reads input_ids and decoder_input_ids"),
        ("m.onnx --reference audited_functions:wrong", 2, "return a torch module and its inputs"),
        ("m.onnx --reference audited_functions:failing", 2, "failed: no weights"),
        ("m.onnx --reference audited_functions:leaving", 2, "failed: left early"),
        ("m.onnx --reference audited_functions:absent", 2, "has no function 'absent'"),
        ("m.onnx --reference audited_functions:rowless", 3, "return inputs of at least one row"),
        ("m.onnx --reference no_such_module:f", 2, "importing no_such_module failed"),
    ],
)
def test_mistakes_are_told(
    arguments: str, code: int, message: str, examples: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(examples)
    refused = call("audit", *arguments.split())
    assert refused.exit_code == code
    assert message in refused.stderr


def test_a_copy_holds_the_files_that_the_graphs_name(writer: Path, tmp_path: Path) -> None:
    """A graph may lie in a home directory, with gigabytes beside it."""
    folder = tmp_path / "graphs"
    folder.mkdir()
    model = ir.load(writer / "model.onnx")
    ir.save(model, folder / "model.onnx", external_data="weights.bin")
    for name in ("photo.jpg", "tokenizer.json"):
        (folder / name).touch()
    GraphCopy(read_layout(folder), tmp_path / "copy", ["tokenizer.json"])
    copied = {path.name for path in (tmp_path / "copy").iterdir()}
    assert copied == {"model.onnx", "weights.bin", "tokenizer.json"}


def test_the_suffix_chooses_the_graphs(writer: Path, tmp_path: Path) -> None:
    (tmp_path / "onnx").mkdir()
    for name in ("encoder_model", "decoder_model_merged"):
        for suffix in ("", "_quantized"):
            shutil.copy(writer / "model.onnx", tmp_path / "onnx" / f"{name}{suffix}.onnx")
    found = [graph.path.name for graph in read_layout(tmp_path, suffix="_quantized").graphs]
    assert found == ["encoder_model_quantized.onnx", "decoder_model_merged_quantized.onnx"]


def test_a_padding_that_a_graph_cannot_take_is_found_without_text(
    writer: Path, writer_run_folder: Path
) -> None:
    report = audited(writer, writer_run_folder, "left", rows=0)
    assert any("alone and in batches padded left" in fault for fault in report.faults)
    # The random cases are padded there too.
    assert any(fault.startswith("batch 7, source") for fault in report.faults), report.faults
    assert "tokens of searches on text (give 16 lines" in report.settings["compared"]


def test_the_token_that_pads_is_in_no_random_source(reader_run_folder: Path) -> None:
    """RoBERTa's kin count no position for it, so that torch would answer otherwise."""
    work = Audit.of(load_checkpoint(reader_run_folder), ["a"], "float32")
    assert not any((case.source == work.oracle.special.pad_id).any() for case in work.cases)
