"""Graphs of any inputs and outputs, beside any reference: an audit refuses them or fails them."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from transferry.build_model.checkpoint import Checkpoint, load_checkpoint, load_samples
from transferry.export.audit import audit
from transferry.export.oracle.effort import Effort
from transferry.export.subject.foreign import ForeignFolder
from transferry.export.subject.layout import INPUTS, OUTPUTS, PAST, PRESENT, read_layout
from transferry.runtime.errors import InputError
from transferry.runtime.ort.session import SessionOptions

CACHES = [f"{layer}.{name}" for layer in (0, 1) for name in ("decoder.key", "encoder.key", "key")]
FILES = [
    ("model.onnx",),
    ("encoder_model.onnx", "decoder_model.onnx"),
    ("encoder_model.onnx", "decoder_model.onnx", "decoder_with_past_model.onnx"),
    ("encoder_model.onnx", "decoder_model_merged.onnx"),
]
INTEGERS, FLOATS = (TensorProto.INT64, TensorProto.INT32), (TensorProto.FLOAT, TensorProto.FLOAT16)
# Sizes of an output: rows and columns of the tokens, and such as the references have.
SIZES = st.sampled_from(["rows", "columns", 0, 1, 2, 32, 400])
# Mostly what optimum writes, so that an audit gets beyond the first look.
SHAPES = st.one_of(
    st.sampled_from(
        [["rows", "columns", 400], ["rows", "columns", 32], ["rows", 2, "columns", 16]]
    ),
    st.lists(SIZES, max_size=4),
)


@st.composite
def graphs(draw: st.DrawFn) -> onnx.ModelProto:
    """Inputs that are read for their shape at most, and outputs of ones."""
    names = draw(st.lists(st.sampled_from([*INPUTS]), unique=True, max_size=4))
    names = draw(st.sampled_from([["input_ids", "attention_mask"], ["input_ids", *names], names]))
    names = list(dict.fromkeys(names))
    caches = draw(st.lists(st.sampled_from(CACHES), unique=True, max_size=2))
    inputs = [
        helper.make_tensor_value_info(name, draw(st.sampled_from(INTEGERS)), ["rows", "columns"])
        for name in names
    ]
    inputs += [
        helper.make_tensor_value_info(f"{PAST}.{name}", TensorProto.FLOAT, ["rows", 2, "past", 16])
        for name in caches
    ]
    nodes, outputs = [], []
    tokens = next((name for name in names if name != "use_cache_branch"), "")
    given = [*draw(st.lists(st.sampled_from([*OUTPUTS]), unique=True, max_size=2))]
    given = draw(st.sampled_from([["logits"], ["last_hidden_state"], given]))
    for name in [*given, *(f"{PRESENT}.{name}" for name in draw(st.sampled_from([caches, []])))]:
        shape: list[Any] = draw(SHAPES)
        sizes = []
        for number, size in enumerate(shape):
            size_name = f"{name}.{number}"
            if isinstance(size, str) and tokens:
                start = int(size == "columns")
                node = helper.make_node("Shape", [tokens], [size_name], start=start, end=start + 1)
                nodes.append(node)
            else:
                value = size if isinstance(size, int) else 3
                tensor = helper.make_tensor("", TensorProto.INT64, [1], [value])
                nodes.append(helper.make_node("Constant", [], [size_name], value=tensor))
            sizes.append(size_name)
        if sizes:
            nodes.append(helper.make_node("Concat", sizes, [f"{name}.shape"], axis=0))
        else:
            empty = helper.make_tensor("", TensorProto.INT64, [0], [])
            nodes.append(helper.make_node("Constant", [], [f"{name}.shape"], value=empty))
        kind = draw(st.sampled_from([*FLOATS, TensorProto.INT64]))
        one = helper.make_tensor("", kind, [1], [1])
        nodes.append(helper.make_node("ConstantOfShape", [f"{name}.shape"], [name], value=one))
        outputs.append(helper.make_tensor_value_info(name, kind, shape))
    graph = helper.make_graph(nodes, "graph", inputs, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


@pytest.fixture(scope="module")
def references(
    run_folder: Path, writer_run_folder: Path, reader_run_folder: Path
) -> dict[str, tuple[Checkpoint, list[str]]]:
    folders = {"both": run_folder, "writer": writer_run_folder, "reader": reader_run_folder}
    return {
        name: (load_checkpoint(folder), load_samples(folder)[:2])
        for name, folder in folders.items()
    }


@pytest.fixture(autouse=True)
def few_cases() -> Iterator[None]:
    few = Effort(positions=8, vocabulary=False, longest=4, rows=2, most_cases=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Effort, "at_export", classmethod(lambda *_: few))
        yield


@pytest.mark.parametrize("reference", ["both", "writer", "reader"])
@pytest.mark.parametrize("files", FILES)
@given(data=st.data())
def test_no_graph_passes_or_ends_in_a_traceback(
    references: dict[str, tuple[Checkpoint, list[str]]],
    tmp_path: Path,
    files: tuple[str, ...],
    reference: str,
    data: st.DataObject,
) -> None:
    folder = tmp_path / "graphs"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name in files:
        onnx.save(data.draw(graphs()), folder / name)
    checkpoint, texts = references[reference]
    try:
        subject = ForeignFolder(read_layout(folder), SessionOptions(), checkpoint)
        report = audit(folder, subject, texts)
    except InputError as error:
        assert str(error)
    else:
        assert not report.passed
