"""Weights in int8, products in float32: a quarter of the size, proven against the same weights."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.export.conftest import exported, opened, verified
from tests.export.faults.bundles import bundle_test
from transferry.build_model.checkpoint import Checkpoint, load_checkpoint, load_samples
from transferry.export.bundle import Contents
from transferry.export.faults.self_test import self_test
from transferry.export.make import store_in_int8
from transferry.export.rewrite.rounded_weights import quantised
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.engine.engine import Engine
from transferry.runtime.errors import ParityError

NAME = "portable-int8"


@pytest.fixture(scope="module")
def small(weight_only_bundle_folder: Path) -> Bundle:
    return Bundle.load(weight_only_bundle_folder)


def stored(bundle: Bundle, name: str) -> dict[str, onnx.TensorProto]:
    """The initializers of a variant, whose operators are all standard."""
    found: dict[str, onnx.TensorProto] = {}
    for graph in bundle.variant(name).graphs.values():
        model = onnx.load(bundle.graph(graph))
        assert {each.domain for each in model.opset_import} == {""}
        found |= {tensor.name: tensor for tensor in model.graph.initializer}
    return found


def test_a_bundle_has_a_quarter_of_the_weights(small: Bundle) -> None:
    variants = [stored(small, name) for name in (NAME, "portable")]
    sizes = [
        sum(onnx.numpy_helper.to_array(tensor).nbytes for tensor in tensors.values())
        for tensors in variants
    ]
    # Tables of positions, norms and biases stay.
    assert 0.25 < sizes[0] / sizes[1] < 0.35
    assert sum(name.endswith(".int8") for name in variants[0]) > 20


def test_integers_are_finer_without_the_limit_on_neighbours() -> None:
    weight = np.random.default_rng(0).normal(size=(50, 33)).astype(np.float32)
    fine, coarse = (
        np.abs(integers * scales[:, None] - weight).mean()
        for integers, scales in (quantised(weight, pairs=False), quantised(weight))
    )
    assert fine < 0.9 * coarse


def test_the_variant_passes(small: Bundle, checkpoint: Checkpoint, texts: list[str]) -> None:
    report = verified(checkpoint, small, texts[:4], NAME)
    assert report.passed, report.faults
    assert {item.search for item in report.decisions} >= {"greedy", "beam 4"}
    # Nothing is rounded but weights, so no difference is tolerated.
    assert not any(item.defects or item.tolerated for item in report.decisions)


@pytest.mark.thorough
def test_its_faults_are_caught(
    small: Bundle, checkpoint: Checkpoint, sources: list[list[int]]
) -> None:
    test = bundle_test((checkpoint, small, sources[:2]), variant=NAME)
    planted = self_test(test.honest, test.oracle, test.sources, test.fresh)
    assert sum(item.changes_answer for item in planted) >= 5
    assert all(item.passed for item in planted)


def test_other_weights_than_the_runs_are_refused(
    checkpoint: Checkpoint, texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def coarser(graph: object, model: object) -> None:
        monkeypatch.setattr(
            "transferry.export.rewrite.linear_int8.quantised",
            lambda weight, pairs, **_: quantised(weight),
        )
        store_in_int8(graph, model)  # type: ignore[arg-type]

    monkeypatch.setattr("transferry.export.make.store_in_int8", coarser)
    with pytest.raises(ParityError):
        exported(checkpoint, tmp_path / "bundle", Contents(texts, [NAME]))
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize(
    "fixture", [pytest.param("writer_run_folder", marks=pytest.mark.thorough), "reader_run_folder"]
)
def test_every_architecture_has_it(
    fixture: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = request.getfixturevalue(fixture)
    contents = Contents(load_samples(folder), [NAME])
    bundle = exported(load_checkpoint(folder), tmp_path / "bundle", contents)
    assert bundle.variant(NAME).precision == "int8-weights"


def test_it_is_served_only_if_named(small: Bundle) -> None:
    with Engine.load(small.folder) as engine:
        assert engine.model.variant.name == "portable"
    with Engine.load(small.folder, variant=NAME) as engine:
        assert engine.model.variant.name == NAME
        (answer,) = engine.generate(["a red cat"], max_length=5)
        assert answer.error is None


def test_the_graph_converts_each_matrix_once(small: Bundle) -> None:
    """Else every step would convert them all."""
    nodes = [opened(small, name).describe()["nodes"] for name in (NAME, "portable")]
    assert nodes[0] == nodes[1]
