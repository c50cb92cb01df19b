"""Weights rounded to integers, and whole models of them, in blocks or with float32 products."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray

from tests.export.conftest import exported, graphs_of, opened, verified, written
from tests.export.faults.bundles import bundle_test
from tests.export.test_family import config_of
from transferry.build_model.checkpoint import Checkpoint, load_checkpoint, load_samples
from transferry.build_model.model.transformer import Transformer
from transferry.export.bundle import Contents
from transferry.export.checks.numbers import compare_cases
from transferry.export.faults.self_test import self_test
from transferry.export.make import store_in_int8
from transferry.export.oracle.cases import single_tokens, sizes
from transferry.export.oracle.oracle import Oracle
from transferry.export.rewrite.rounded_weights import BLOCK, WIDE, block_weights, blocks, quantised
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.engine.engine import Engine
from transferry.runtime.errors import ParityError
from transferry.runtime.precision import Precision
from transferry.runtime.proof.compare import Tolerance
from transferry.runtime.tokenizer.byte_pair import SOURCES


def saturated(activations: NDArray[np.uint8], weights: NDArray[np.int8]) -> NDArray[np.int64]:
    """Products on x86 without VNNI: vpmaddubsw adds neighbours in int16 and saturates."""
    products = activations.astype(np.int64) * weights
    pairs = products.reshape(*products.shape[:-1], -1, 2).sum(axis=-1)
    sums: NDArray[np.int64] = np.clip(pairs, -(2**15), 2**15 - 1).sum(axis=-1)
    return sums


@pytest.mark.parametrize("inputs", [1, 2, 7, 64])
def test_weights_are_rounded_to_the_nearest_step(inputs: int) -> None:
    weight = np.random.default_rng(0).standard_normal((50, inputs)).astype(np.float32)
    integers, scales = quantised(weight)
    assert integers.dtype == np.int8
    assert scales.dtype == np.float32
    assert np.abs(integers.astype(int)).max() <= 127
    error = np.abs(weight - integers * scales[:, None].astype(np.float64))
    assert (error <= scales[:, None] * 0.50001).all()


def test_the_scale_is_the_finest_that_fits() -> None:
    """A row of zeros has scale 1."""
    weight = np.array([[0.5, -1.0, 0.25, 0.0], [1.0, 1.0, 0.0, 0.0], [0.0] * 4], np.float32)
    integers, scales = quantised(weight)
    assert scales.tolist() == [np.float32(1 / 127), np.float32(2 / 127), 1]
    assert integers.tolist() == [[64, -127, 32, 0], [64, 64, 0, 0], [0] * 4]


def test_no_pair_of_products_saturates() -> None:
    weight = np.random.default_rng(1).standard_normal((200, 64)).astype(np.float32)
    weight[:50] = np.abs(weight[:50])
    weight[50] = 1.0
    integers, _ = quantised(weight)
    plain = np.rint(weight * 127 / np.abs(weight).max(axis=1, keepdims=True)).astype(np.int8)
    lost = 0
    for activations in (integers > 0, integers < 0):
        worst = np.where(activations, 255, 0).astype(np.uint8)
        exact = (worst.astype(np.int64) * integers).sum(axis=1)
        assert saturated(worst, integers).tolist() == exact.tolist()
        lost += (saturated(worst, plain) != (worst.astype(np.int64) * plain).sum(axis=1)).sum()
    assert lost > 100


# No width is a multiple of a block, and heads of 5 features make no power of two.
ODD: dict[str, Any] = dict(d_model=20, heads=4, d_ff=52, vocabulary_size=61, max_positions=24)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "both, tied": ("encoder-decoder", ODD),
    "a writer with a head of its own": (
        "decoder-only",
        {**ODD, "d_model": 32, "heads": 2, "tied": False, "positions": "rotary", "norm": "rms"},
    ),
    "a reader": ("encoder-only", {**ODD, "output_transform": True, "embedding_norm": True}),
}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("inputs", [1, 31, 32, 33, 96])
def test_no_weight_is_further_off_than_half_a_step(inputs: int, bits: int) -> None:
    weight = np.random.default_rng(0).standard_normal((7, inputs)).astype(np.float32)
    weight[3] = 0
    found = blocks(weight, bits)
    count = -(-inputs // BLOCK)
    assert found.integers.shape == (7, count, BLOCK)
    assert found.scales.shape == (7, count)
    values = (found.integers * found.scales[..., None]).reshape(7, -1)
    assert not values[:, inputs:].any()
    assert not found.scales[3].any()  # another scale would round, when the offset is subtracted
    assert not np.signbit(found.scales[3]).any()
    found.scales[3] = 1
    steps = np.abs(found.scales).repeat(BLOCK, axis=1)[:, :inputs]
    off = np.abs(values[:, :inputs] - weight) / steps
    # A block has one integer more on one side: at the far end of the other a value loses a step.
    assert off.max() <= 1.0001
    assert np.mean(off <= 0.5001) > 0.98
    largest = np.abs(weight).max(axis=1) == np.abs(values).max(axis=1)
    assert largest.mean() > 0.5
    assert not values[3].any()


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *((name, "int4") for name in MODELS),
        ("both, tied", "int8-blocks"),
        ("a reader", "int8-blocks"),
    ],
)
def test_a_model_is_what_torch_rounding_alike_computes(
    name: str, precision: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = Transformer(config_of(*MODELS[name])).eval()
    with torch.no_grad():
        next(each for at, each in model.named_parameters() if "value.weight" in at).zero_()
    variant = f"cpu-{precision}"
    decoder = opened(written(tmp_path, model, variant, graphs_of(model, variant)))
    oracle = Oracle.of(model, SOURCES, Tolerance.of(precision), precision=Precision.of(precision))
    found = compare_cases(oracle, decoder, [single_tokens(model.config), *sizes(model.config)])
    assert not [item for item in found if item.fault]
    sharp = [item for item in found if item.budget < 1e-5]
    assert sharp
    assert max(item.error for item in sharp) < 2e-6
    # And it does round: the model as trained is further off.
    trained = Oracle.of(model, SOURCES, Tolerance())
    plain = compare_cases(trained, decoder, [single_tokens(model.config)])
    assert max(item.error for item in plain) > 1e-3
    # Nor is it a model whose layers have other bits.
    other = Precision.of("int4" if precision == "int8-blocks" else "int8-blocks")
    unlike = Oracle.of(model, SOURCES, Tolerance.of(other.name), precision=other)
    assert any(item.fault for item in compare_cases(unlike, decoder, [single_tokens(model.config)]))


@pytest.mark.parametrize("bits", [4, 8])
def test_the_last_matrix_has_eight_bits_and_all_others_those_asked_for(bits: int) -> None:
    model = Transformer(config_of("decoder-only", {"tied": False}))
    found = {name: weight.bits for name, weight in block_weights(model, bits)}
    linear = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    assert found.keys() == {*linear, "embedding.weight"}
    assert {found[name] for name in found.keys() & set(WIDE)} == {8}
    assert {found[name] for name in found.keys() - set(WIDE)} == {bits}


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
    with Engine(small.folder) as engine:
        assert engine.model.variant.name == "portable"
    with Engine(small.folder, variant=NAME) as engine:
        assert engine.model.variant.name == NAME
        (answer,) = engine.generate(["a red cat"], max_length=5)
        assert answer.error is None


def test_the_graph_converts_each_matrix_once(small: Bundle) -> None:
    """Else every step would convert them all."""
    nodes = [opened(small, name).describe()["nodes"] for name in (NAME, "portable")]
    assert nodes[0] == nodes[1]
