"""torch follows the integers of an int8 variant, and is then as near as in float32."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.export.conftest import opened
from transferry.build_model.checkpoint import Checkpoint
from transferry.export.oracle.cases import lines, random_case
from transferry.export.oracle.followed import Followed, ShownModel, _of_distances, followed
from transferry.export.oracle.oracle import Oracle
from transferry.export.rewrite.calibration import Calibration
from transferry.export.subject.bundle_copy import BundleCopy, add, constant, replace
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.decoding.batching import blocks
from transferry.runtime.ort.encoder import PASS_TOKENS
from transferry.runtime.proof.compare import Case, Comparison, Tolerance, observe

INT8 = "cpu-int8"
LARGER = np.float32(1.0001)  # a step of 8 bits is a hundred times as much
SIDES = {
    "keys and values in a cache": ("calm", "all_variants"),
    "a recurrent state": ("calm_recurrent", "calm_recurrent_variants"),
}


@pytest.fixture(scope="module", params=SIDES.values(), ids=list(SIDES))
def side(request: pytest.FixtureRequest) -> tuple[Oracle, Bundle]:
    run: Checkpoint
    run, bundle = map(request.getfixturevalue, request.param)
    calibration = Calibration.of(bundle, bundle.variant(INT8))
    given = run.model, run.tokenizer.special, Tolerance.of("int8")
    return Oracle.of(*given, calibration=calibration), bundle


def case_of(oracle: Oracle) -> Case:
    return random_case(oracle.config, 9, 11, 4, seed=3)


def judged(oracle: Oracle, bundle: Bundle, case: Case | None = None) -> list[Comparison]:
    model = ShownModel(bundle, opened(bundle, INT8))
    return followed(oracle, model, case or case_of(oracle))[1]


def test_every_tensor_is_as_exact_as_in_float32(side: tuple[Oracle, Bundle]) -> None:
    oracle, bundle = side
    texts = [[5 + row % 7] * (1 + row % 5) for row in range(12)]
    for case in (case_of(oracle), *lines(oracle.config, texts, oracle.special.pad_id)):
        found = judged(oracle, bundle, case)
        assert not [item for item in found if item.fault]
        assert max(item.budget for item in found[1:]) < 1e-4
    # Without the graph's integers, values at a border excuse more.
    assert max(each.max() for each in oracle.truth(case_of(oracle)).errors.values()) > 1e-3


def test_graphs_that_show_their_integers_give_the_served_bits(side: tuple[Oracle, Bundle]) -> None:
    oracle, bundle = side
    model, case = opened(bundle, INT8), case_of(oracle)
    shown, _ = followed(oracle, ShownModel(bundle, model), case)
    for name, tensor in observe(model, case).items():
        np.testing.assert_array_equal(tensor, shown[name])


def one(array: Any, more: float) -> Any:
    array.flat[int(np.abs(array.astype(np.float64)).argmin())] += more
    return array


def swapped(array: Any) -> Any:
    array[[0, 1]] = array[[1, 0]]
    return array


OUTER = "encoder.0.feed_forward.outer"
EDITS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "one integer": ("encoder.0.self_attention.output.weight.int8", lambda a: one(a, 1)),
    "one scale": ("encoder.0.self_attention.query.weight.scales", lambda a: one(a, 1e-5)),
    "swapped rows": ("encoder.0.self_attention.value.weight.int8", swapped),
    "a zero point": ("encoder.0.self_attention.output.weight.input_zero", lambda a: a + 1),
    "a step": (f"{OUTER}.weight.input_scale", lambda a: a * np.float32(1.001)),
    "a bias": (f"{OUTER}.bias", lambda a: one(a, 1e-4)),
}


@pytest.mark.parametrize("fault", EDITS)
def test_a_step_of_one_weight_and_less_is_caught(
    side: tuple[Oracle, Bundle], tmp_path: Path, fault: str
) -> None:
    oracle, bundle = side
    copy = BundleCopy(bundle, bundle.variant(INT8), tmp_path / "copy")
    copy.edit(*EDITS[fault])
    copy.seal()
    assert [item for item in judged(oracle, Bundle.load(copy.folder)) if item.fault]


@pytest.mark.parametrize("operator", ["MatMulIntegerToFloat", "LayerNormalization"])
def test_a_value_a_little_larger_is_caught(
    side: tuple[Oracle, Bundle], tmp_path: Path, operator: str
) -> None:
    oracle, bundle = side
    copy = BundleCopy(bundle, bundle.variant(INT8), tmp_path / "copy")
    *_, node = copy.nodes(operator, graph="decoder")
    replace(node.outputs[0], lambda value: add(value, "Mul", value, constant(value, LARGER)))
    copy.seal()
    found = judged(oracle, Bundle.load(copy.folder))
    assert [item for item in found if item.fault]


def test_a_value_of_zeros_is_judged(side: tuple[Oracle, Bundle]) -> None:
    oracle, bundle = side
    model = ShownModel(bundle, opened(bundle, INT8))
    followed(oracle, model, case_of(oracle))
    following = Followed(model, oracle.reference)
    following.begin()
    following(torch.zeros(5, 7), 1.0, 0, 255)
    assert following.worst[0] == np.inf, "no value of the graph has this size"


def test_of_values_with_equal_integers_the_one_before_rounding_tells(
    side: tuple[Oracle, Bundle],
) -> None:
    oracle, bundle = side
    model = ShownModel(bundle, opened(bundle, INT8))
    followed(oracle, model, case_of(oracle))
    call, value = model.calls[0], np.array([[1.2, 2.3]], np.float32)
    call.products.clear()
    for name, moved in (("another", -0.4), ("right", 1e-4)):
        call.products[name] = np.array([[1, 2]], np.int8)
        call.rounded[name] = value + np.float32(moved)
    following = Followed(model, oracle.reference)
    following.begin()
    following(torch.from_numpy(value), 1.0, -128, 127)
    assert following.sites[0, 0].name == "right"


def test_equal_passes_of_a_head_are_all_of_its_rows() -> None:
    """Where its function saturates, as tanh, both passes have the same values."""
    mask = np.ones((24, 64), np.bool_)
    passes = [len(mask[rows]) for rows, _ in blocks(mask, PASS_TOKENS["cpu"])]
    assert passes[0] == passes[1]
    parts = [np.ones((rows, 3), np.float32) for rows in passes]
    runner = SimpleNamespace(
        written={"integers": parts, "value": parts},
        rounded={"integers": "value"},
        graph=SimpleNamespace(file="encoder.onnx"),
    )
    model = ShownModel.__new__(ShownModel)
    model._runners = [runner]  # type: ignore[list-item]
    ((integers,), (values,)) = (each.values() for each in model._read(mask))
    assert integers.shape == values.shape == (24, 3)


def test_embeddings_of_distances_are_those_of_the_longest_rows() -> None:
    whole = np.arange(18.0).reshape(9, 2)
    assert _of_distances([whole[2:7], whole, whole[1:8]]) is whole
    parts = [whole[1:6], whole]
    assert np.array_equal(_of_distances(parts), np.concatenate(parts))
