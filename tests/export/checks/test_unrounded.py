"""Quantised graphs without rounding: honest ones are torch's, a fault within the rounding shows."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnxruntime import quantization
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

from tests.export.subject.graphs import masked_model, saved
from transferry.build_model.checkpoint import Checkpoint, load_checkpoint, load_samples
from transferry.export.audit import audit
from transferry.export.checks.check import prove
from transferry.export.checks.numbers import numbers
from transferry.export.checks.unrounded import without_rounding
from transferry.export.oracle.cases import random_case
from transferry.export.oracle.oracle import Oracle
from transferry.export.subject.bundle_copy import add, constant
from transferry.export.subject.foreign import ForeignFolder
from transferry.export.subject.layout import read_layout
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.proof.compare import Tolerance

FORMATS: Any = quantization.QuantFormat


class Calibration(quantization.CalibrationDataReader):  # type: ignore[misc]
    """A few rows of random tokens."""

    def __init__(self, vocabulary: int) -> None:
        tokens = np.random.default_rng(0).integers(vocabulary, size=(3, 2, 9))
        self.rows = iter([{"input_ids": each, "attention_mask": each * 0 + 1} for each in tokens])

    def get_next(self) -> dict[str, np.ndarray] | None:
        """The next batch."""
        return next(self.rows, None)


def dynamic(path: Path, vocabulary: int) -> None:
    quantization.quantize_dynamic(path, path, per_channel=True)


def optimised(path: Path, level: str) -> None:
    """Rewrites a graph as onnxruntime does."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(path.with_suffix(".optimised"))
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    path.with_suffix(".optimised").rename(path)


def fused(path: Path, vocabulary: int) -> None:
    dynamic(path, vocabulary)
    optimised(path, "ORT_ENABLE_EXTENDED")


def static(form: Any, path: Path, vocabulary: int) -> None:
    given = path, path, Calibration(vocabulary)
    quantization.quantize_static(*given, quant_format=form, per_channel=form == FORMATS.QDQ)


def blocks(form: Any, symmetric: bool, path: Path, vocabulary: int) -> None:
    tool = MatMulNBitsQuantizer(
        onnx.load(path), block_size=16, is_symmetric=symmetric, quant_format=form
    )
    tool.process()
    onnx.save(tool.model.model, path)


FORMS: dict[str, Callable[[Path, int], None]] = {
    "dynamic": dynamic,
    "fused": fused,
    "QDQ": lambda *given: static(FORMATS.QDQ, *given),
    "QOperator": lambda *given: static(FORMATS.QOperator, *given),
    "blocks": lambda *given: blocks(FORMATS.QOperator, False, *given),
    "QDQ of blocks": lambda *given: blocks(FORMATS.QDQ, True, *given),
}


@pytest.fixture(scope="module")
def checkpoint(reader_run_folder: Path) -> Checkpoint:
    return load_checkpoint(reader_run_folder)


@pytest.fixture(scope="module", params=FORMS)
def graphs(
    request: pytest.FixtureRequest, reader_bundle_folder: Path, tmp_path_factory: Any
) -> Path:
    """A masked model in a quantised form."""
    folder: Path = tmp_path_factory.mktemp("rounded")
    bundle = Bundle.load(reader_bundle_folder)
    path = masked_model(bundle, folder)
    optimised(path, "ORT_ENABLE_BASIC")  # which folds the weights' Transpose
    FORMS[request.param](path, bundle.manifest.model["vocabulary_size"])
    return folder


def faults(folder: Path, checkpoint: Checkpoint) -> list[str]:
    """The faults of a folder's graph without rounding by the limits of float32, or why none is."""
    subject = ForeignFolder(read_layout(folder), SessionOptions(), checkpoint)
    exact, left = without_rounding(subject, checkpoint.model)
    if exact is None:
        return [each.skipped for each in prove(left).claims]
    model, special = checkpoint.model, checkpoint.tokenizer.special
    oracle = Oracle.of(model, special, Tolerance())
    cases = [random_case(model.config, 3, 12, 0, seed=seed) for seed in range(2)]
    return [item.fault for item in prove(numbers(exact, oracle, cases)).comparisons if item.fault]


def test_nothing_but_rounding_is_taken_away(graphs: Path, checkpoint: Checkpoint) -> None:
    assert faults(graphs, checkpoint) == []


def other_activation(model: ir.Model) -> None:
    """GELU by its tanh approximation."""
    for node in [each for each in model.graph.all_nodes() if each.op_type == "Gelu"]:
        node.op_type, node.domain = "FastGelu", "com.microsoft"
        node.attributes.clear()
    model.opset_imports["com.microsoft"] = 1


def other_epsilon(model: ir.Model) -> None:
    for node in model.graph.all_nodes():
        if node.op_type == "LayerNormalization":
            node.attributes["epsilon"] = ir.AttrFloat32("epsilon", 1e-3)


def smaller_residual(model: ir.Model) -> None:
    node = next(each for each in model.graph if "LayerNormalization" in each.op_type)
    value = node.inputs[0]
    assert value is not None
    factor = constant(node.outputs[0], np.float32(0.98))
    node.replace_input_with(0, add(node.outputs[0], "Mul", value, factor))


@pytest.mark.parametrize("graphs", ["dynamic", "QOperator"], indirect=True)
@pytest.mark.parametrize("fault", [other_activation, other_epsilon, smaller_residual])
def test_a_fault_within_the_rounding_is_found(
    fault: Callable[[ir.Model], None], graphs: Path, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    model = ir.load(graphs / "model.onnx")
    fault(model)
    saved(model, tmp_path / "model.onnx")
    found = faults(tmp_path, checkpoint)
    assert found and all("exceeds the budget" in each for each in found)


@pytest.mark.parametrize("graphs", ["dynamic"], indirect=True)
def test_an_audit_judges_rounding_apart(
    graphs: Path, reader_run_folder: Path, checkpoint: Checkpoint
) -> None:
    subject = ForeignFolder(read_layout(graphs), SessionOptions(), checkpoint)
    report = audit(graphs, subject, load_samples(reader_run_folder)[:3])
    assert report.faults == []
    stricter = [each for each in report.comparisons if each.case.startswith("without rounding, ")]
    assert 0 < len(stricter) < len(report.comparisons)
    assert max(each.budget for each in stricter) < 1e-3
    assert "mean cosine" in {each.measure for each in report.task_metrics}


@pytest.mark.parametrize("graphs", ["blocks"], indirect=True)
def test_weights_that_are_not_the_reference_s_are_told(
    graphs: Path, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    model = ir.load(graphs / "model.onnx")
    value = next(each for name, each in model.graph.initializers.items() if "_scales" in name)
    assert value.const_value is not None
    value.const_value = ir.Tensor(value.const_value.numpy() * np.float32(1.3), name=value.name)
    saved(model, tmp_path / "model.onnx")
    (told,) = faults(tmp_path, checkpoint)
    assert re.search(r"are not .* rounded|no weight of the reference", told)
