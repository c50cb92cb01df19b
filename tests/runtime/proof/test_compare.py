"""A difference is measured against the oracle, and nothing that is wrong can pass."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from transferry.runtime.decoding.decoder import StepOutput
from transferry.runtime.proof.compare import (
    Case,
    Comparison,
    Tolerance,
    Truth,
    compare,
    logit_errors,
    logit_units,
    meaningful,
    observe,
    relative_error,
    truth,
)

Array = NDArray[Any]
Arrays = dict[str, Array]

MASK = np.array([[True, True, True], [True, False, False]])
CASE = Case(
    "batch 2, source 3, past 1",
    source=np.array([[5, 6, 2], [2, 0, 0]]),
    mask=MASK,
    target=np.array([[1, 7, 8], [1, 9, 4]]),
    past=1,
)
TOLERANCE = Tolerance(factor=4.0, floor=1e-6)


def tensors(seed: int) -> Arrays:
    """As a decoder gives them: two heads of size 4, three source positions, vocabulary 10."""
    generator = np.random.default_rng(seed)
    return {
        "logits": generator.normal(size=(2, 2, 10)),
        "cross.0.keys": generator.normal(size=(2, 2, 3, 4)),
        "past.0.keys": generator.normal(size=(2, 2, 3, 4)),
    }


ORACLE = tensors(0)
TRUTH = Truth(ORACLE, dict.fromkeys(ORACLE, 1e-6))


def answer() -> Arrays:
    return {name: tensor.copy() for name, tensor in ORACLE.items()}


def test_budget_is_a_multiple_of_the_error_that_torch_makes() -> None:
    assert Tolerance(factor=3.0, floor=1e-7).budget(1e-5) == pytest.approx(3e-5)
    assert Tolerance(factor=3.0, floor=1e-7).budget(0.0) == pytest.approx(3e-7)


def test_relative_error_is_measured_in_units_of_the_largest_entry() -> None:
    oracle = np.array([[100.0, -200.0], [1.0, 0.0]])
    found = np.array([[100.0, -200.0], [1.0, 0.5]])
    everywhere = np.ones((2, 2), np.bool_)
    assert relative_error(found, oracle, everywhere) == pytest.approx(0.5 / 200)
    assert relative_error(oracle, oracle, everywhere) == 0.0
    assert relative_error(np.array([0.25]), np.zeros(1), np.ones(1, np.bool_)) == 0.25


def test_relative_error_looks_where_the_mask_is_true() -> None:
    oracle = np.array([1.0, 2.0, 1000.0])
    found = np.array([1.0, 2.5, np.nan])
    assert relative_error(found, oracle, np.array([True, True, False])) == pytest.approx(0.25)
    assert math.isnan(relative_error(found, oracle, np.array([True, True, True])))
    assert relative_error(found, oracle, np.zeros(3, np.bool_)) == 0.0


def test_only_the_encoder_gives_what_padding_makes_meaningless() -> None:
    cross = meaningful(CASE, "cross.0.keys", ORACLE["cross.0.keys"])
    assert cross.shape == (2, 2, 3, 4)
    np.testing.assert_array_equal(cross[:, 1, :, 2], MASK)
    assert meaningful(CASE, "past.0.keys", ORACLE["past.0.keys"]).all()
    assert meaningful(CASE, "logits", ORACLE["logits"]).all()


def test_truth_holds_the_largest_error_that_torch_makes_in_a_kind_of_tensor() -> None:
    reference = answer()
    reference["logits"][0, 0, 0] += 0.01
    reference["past.0.keys"][0, 0, 0, 0] += 0.001
    reference["cross.0.keys"][0, 0, 0, 0] += 1e-6
    reference["cross.0.keys"][1, 0, 2] += 5.0  # padding
    found = truth(CASE, ORACLE, reference)
    step = 0.01 / np.abs(ORACLE["logits"]).max()
    past = 0.001 / np.abs(ORACLE["past.0.keys"]).max()
    encoder = 1e-6 / np.abs(ORACLE["cross.0.keys"]).max(where=MASK[:, None, :, None], initial=0)
    assert found.errors == {
        "logits": pytest.approx(step),
        "past.0.keys": pytest.approx(past),
        "cross.0.keys": pytest.approx(encoder),
    }
    assert found.oracle is ORACLE


LOGITS, PAST = ORACLE["logits"], ORACLE["past.0.keys"]


def layers(*sizes: float) -> Arrays:
    """Keys of several layers, each times a size, beside the same logits."""
    return {
        "logits": ORACLE["logits"],
        **{f"past.{layer}.keys": size * PAST for layer, size in enumerate(sizes)},
    }


def test_keys_of_all_layers_share_their_error_and_logits_do_not() -> None:
    oracle = layers(1.0, 1.0)
    reference = {**oracle, "past.1.keys": oracle["past.1.keys"] + 0.001}
    found = truth(CASE, oracle, reference).errors
    assert found["past.0.keys"] == found["past.1.keys"] == pytest.approx(0.001 / np.abs(PAST).max())
    assert found["logits"] == 0.0


def test_a_tensor_that_cancels_widens_no_budget() -> None:
    """Entries of 1e-12 with an error of 1e-7 are a million times off, by rounding alone."""
    oracle = layers(1.0, 1e-12)
    reference = {**oracle, "past.1.keys": oracle["past.1.keys"] + 1e-7}
    expected = truth(CASE, oracle, reference)
    unit = np.abs(PAST).max() * 2.0**-10
    assert expected.errors["past.1.keys"] == pytest.approx(1e-7 / unit)
    assert not any(item.fault for item in compare(CASE, expected, reference, Tolerance()))
    wrong = {**oracle, "past.0.keys": PAST + 0.01, "logits": oracle["logits"] + 0.01}
    faults = [item.tensor for item in compare(CASE, expected, wrong, Tolerance()) if item.fault]
    assert faults == ["logits", "past.0.keys"]


def test_a_budget_that_proves_nothing_fails() -> None:
    reference = {**ORACLE, "logits": ORACLE["logits"] + 0.1 * np.abs(ORACLE["logits"]).max()}
    expected = truth(CASE, ORACLE, reference)
    (fault,) = [item.fault for item in compare(CASE, expected, ORACLE, Tolerance()) if item.fault]
    assert "torch's own error is 1.0e-01" in fault
    assert "proves nothing (at most 1.6e-02)" in fault
    assert not any(item.fault for item in compare(CASE, expected, ORACLE, Tolerance(most=1.0)))


def test_equal_tensors_pass() -> None:
    comparisons = compare(CASE, TRUTH, ORACLE, TOLERANCE)
    assert [item.tensor for item in comparisons] == list(ORACLE)
    for item in comparisons:
        stage = "encoder" if item.tensor == "cross.0.keys" else "later step"
        expected = Comparison(
            CASE.name, item.tensor, stage, 0.0, 1e-6, TOLERANCE.budget(1e-6), "", 1
        )
        assert item == expected


def changed(name: str, place: tuple[int, ...], by: float) -> Arrays:
    tensor = ORACLE[name].copy()
    tensor[place] += by
    return {name: tensor}


@pytest.mark.parametrize(
    ("change", "tensor", "fault"),
    [
        ({"past.0.keys": None}, "past.0.keys", "expected, but the graph does not give it"),
        ({"past.1.keys": PAST}, "past.1.keys", "torch gives no such tensor"),
        ({"logits": LOGITS[:, :, :9]}, "logits", "expected shape [2, 2, 10], found [2, 2, 9]"),
        ({"logits": LOGITS[:1]}, "logits", "expected shape [2, 2, 10], found [1, 2, 10]"),
        (changed("logits", (1, 1, 3), np.nan), "logits", "holds NaN or infinity"),
        (changed("past.0.keys", (0, 0, 0, 0), -np.inf), "past.0.keys", "holds NaN or infinity"),
        (
            changed("cross.0.keys", (1, 1, 0, 0), 1e-2),
            "cross.0.keys",
            "exceeds the budget 4.00e-06",
        ),
        (
            changed("logits", (1, 0, 3), 5e-6 * np.abs(LOGITS).max()),
            "logits",
            "error 5.00e-06 of the largest entry exceeds the budget 4.00e-06",
        ),
    ],
)
def test_every_fault_is_found(change: dict[str, Array | None], tensor: str, fault: str) -> None:
    found = {name: value for name, value in (ORACLE | change).items() if value is not None}
    (faulty,) = [item for item in compare(CASE, TRUTH, found, TOLERANCE) if item.fault]
    assert faulty.tensor == tensor
    assert fault in faulty.fault


def test_error_within_the_budget_passes_and_is_reported() -> None:
    found = answer()
    found["logits"][1, 0, 3] += 3e-6 * np.abs(found["logits"]).max()
    logits, *_ = compare(CASE, TRUTH, found, TOLERANCE)
    assert logits.fault == ""
    assert logits.error == pytest.approx(3e-6)


@pytest.mark.parametrize("value", [1.0, np.nan, np.inf])
def test_padding_is_ignored(value: float) -> None:
    found = answer()
    found["cross.0.keys"][1, :, 1:] = value
    assert not any(item.fault for item in compare(CASE, TRUTH, found, TOLERANCE))


@pytest.mark.parametrize(
    ("past", "columns", "stages"),
    [
        (0, 3, ("first step", "encoder")),
        (1, 3, ("later step", "encoder")),
        (0, 0, ("encoder", "encoder")),
    ],
)
def test_a_case_knows_its_stage(past: int, columns: int, stages: tuple[str, str]) -> None:
    case = dataclasses.replace(CASE, past=past, target=CASE.target[:, :columns], stage="")
    text = dataclasses.replace(case, stage="text")
    assert case.stage == stages[0]
    # Two names stand for all, and are missing, so that nothing is measured.
    keys = np.zeros((2, 2, 3, 4) if columns else (2, 3, 4))
    oracle = {"logits": np.zeros(1), "cross.0.keys": keys}
    for given, wanted in ((case, stages), (text, ("text", "text"))):
        found = compare(given, Truth(oracle, dict.fromkeys(oracle, 0.0)), {}, TOLERANCE)
        assert tuple(item.stage for item in found) == wanted


@pytest.mark.parametrize("error", [np.nan, np.inf])
def test_a_reference_that_overflowed_excuses_nothing(error: float) -> None:
    expected = Truth(ORACLE, {**TRUTH.errors, "logits": error})
    logits, *others = compare(CASE, expected, ORACLE, TOLERANCE)
    assert logits.fault == "torch's own answer holds NaN or infinity, so it proves nothing"
    assert not any(item.fault for item in others)


class Recorder:
    """A decoder that writes down how it is called."""

    shares_cache = False

    vocabulary_size = 10
    has_encoder = True

    def start(self, source: NDArray[np.int64], mask: NDArray[np.bool_]) -> list[list[int]]:
        assert source is CASE.source
        assert mask is CASE.mask
        return []

    def step(
        self, tokens: NDArray[np.int64], state: list[list[int]], **wanted: Any
    ) -> tuple[StepOutput, list[list[int]]]:
        logits = np.full((2, tokens.shape[1], 10), len(state), np.float32)
        return StepOutput(logits), [*state, tokens.tolist()]

    def select(self, state: list[list[int]], rows: NDArray[np.int64]) -> list[list[int]]:
        raise NotImplementedError

    def tensors(self, state: list[list[int]]) -> dict[str, NDArray[np.floating[Any]]]:
        return {str(state): np.zeros(0)}


@pytest.mark.parametrize(
    ("past", "fed"), [(0, [[[1, 7, 8], [1, 9, 4]]]), (2, [[[1, 7], [1, 9]], [[8], [4]]])]
)
def test_observe_cuts_the_target_at_the_past(past: int, fed: list[list[list[int]]]) -> None:
    found = observe(Recorder(), dataclasses.replace(CASE, past=past))
    assert found.keys() == {"logits", str(fed)}
    assert found["logits"].shape == (2, 3 - past, 10)
    assert (found["logits"] == len(fed) - 1).all(), "the logits are those of the last step"


@pytest.mark.parametrize("biased", [0, 1, 300, 480], ids=lambda n: f"{n} biased")
def test_a_few_or_most_far_logits_do_not_widen_the_unit(biased: int) -> None:
    logits = np.random.default_rng(0).normal(0, 3, (20, 500))
    changed = logits.copy()
    changed[:, 500 - biased :] = -1e4
    ratio = logit_units(changed) / logit_units(logits)
    assert ratio.max() < 6
    assert ratio.min() > 0.25


def test_errors_of_logits_are_those_of_log_probabilities_by_position() -> None:
    logits = np.random.default_rng(0).normal(0, 3, (4, 500))
    logits[:, 7] = -1e4
    assert logit_errors(logits + 100.0, logits).max() < 1e-14
    found = logits.copy()
    found[:, 7] += 1e-3  # float32's rounding of such a logit
    assert logit_errors(found, logits).max() < 2e-7
    found[2, 3] += 1e-3
    errors = logit_errors(found, logits)
    assert errors.argmax() == 2
    assert 1e-5 < errors[2] < 1e-3


def test_equal_logits_have_the_unit_1() -> None:
    assert logit_units(np.zeros((2, 9))).tolist() == [1.0, 1.0]
