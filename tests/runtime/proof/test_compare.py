"""A difference is measured against the oracle, and nothing that is wrong can pass."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from transferry.runtime.proof.compare import (
    Case,
    Comparison,
    Tolerance,
    Truth,
    compare,
    truth,
)
from transferry.runtime.proof.units import Units, logit_errors, logit_units

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
# Positions of logits 2 x 2 and of caches 2 x 3, less 2 of padding in the source.
POSITIONS = {"logits": 4, "cross.0.keys": 4, "past.0.keys": 6}
TRUTH = Truth(ORACLE, {name: np.full(count, 1e-6) for name, count in POSITIONS.items()})


def answer() -> Arrays:
    return {name: tensor.copy() for name, tensor in ORACLE.items()}


def errors_of(exact: Array, found: Array, *, logits: bool = False) -> Array:
    return np.concatenate(list(Units.of(exact, logits=logits).errors(found)))


def normal(*shape: int, seed: int = 1) -> Array:
    return np.random.default_rng(seed).normal(size=shape)


def test_one_large_entry_widens_no_other_unit() -> None:
    """A channel of hidden states times 1e4, one entry times 1e4, one position times 100."""
    exact = normal(40, 64)
    plain = errors_of(exact, exact + 1e-3)
    for place, times in (((slice(None), 5), 1e4), ((7, 9), 1e4), (11, 100.0)):
        changed = exact.copy()
        changed[place] *= times
        found = changed + 1e-3
        others = np.ones(exact.shape, np.bool_)
        others[place] = False
        ratio = (errors_of(changed, found) / plain)[others]
        assert 0.5 < ratio.min() <= ratio.max() < 2.0
    assert plain.max() < 1e-3


def test_an_entry_that_is_small_by_chance_has_no_small_unit() -> None:
    exact = normal(1, 64)
    exact[0, 3] = 1e-9
    assert errors_of(exact, exact + 1e-3).max() < 3e-3
    rows = normal(8, 64)
    rows[2] *= 1e-9  # a position that cancels
    assert errors_of(rows, rows + 1e-3)[2].max() < 1e-2
    assert errors_of(np.zeros((2, 3)), np.full((2, 3), 0.25)).max() == 0.25
    assert Units.of(np.zeros((0, 3))).largest_error(np.zeros((0, 3))) == 0.0


def test_logits_are_compared_less_their_log_sum_exp_which_is_compared_too() -> None:
    exact = normal(6, 500)
    shifted = errors_of(exact, exact + 1e-3, logits=True)
    assert shifted.shape == (6, 501)
    assert shifted[:, :-1].max() < 1e-12
    assert shifted[:, -1].min() > 1e-4
    far = exact.copy()
    far[:, 40] -= 1e4
    wrong = errors_of(far, far + 8e-3 * np.sin(50 * far), logits=True)
    assert wrong[:, :40].max() > 1e-3
    assert errors_of(far, far + 1e-3 * (far < -1e3), logits=True).max() < 1e-6


@pytest.mark.parametrize("bias", [0.0, -1e4])
def test_a_sine_of_logits_is_found_beside_one_bias(bias: float) -> None:
    oracle = {"logits": 5 * normal(2, 2, 500)}
    oracle["logits"][..., 40] += bias
    reference = {"logits": oracle["logits"].astype(np.float32)}
    expected = truth(CASE, oracle, reference)
    wrong = {"logits": oracle["logits"] + 0.008 * np.sin(50 * oracle["logits"])}
    right = {"logits": (oracle["logits"] + 1e-6).astype(np.float32)}
    assert compare(CASE, expected, wrong, Tolerance())[0].fault
    assert not compare(CASE, expected, right, Tolerance())[0].fault


def test_a_small_channel_of_a_cache_is_judged_beside_a_large_one() -> None:
    keys = normal(2, 2, 3, 4)
    keys[:, 0, :, 1] *= 1e4
    reference = {"past.0.keys": keys.astype(np.float32)}
    expected = truth(CASE, {"past.0.keys": keys}, reference)
    wrong = keys.copy()
    wrong[:, 1, :, 2] *= 1.01
    assert compare(CASE, expected, {"past.0.keys": wrong}, Tolerance())[0].fault
    assert not compare(CASE, expected, reference, Tolerance())[0].fault


def test_truth_holds_the_error_that_torch_makes_at_each_position() -> None:
    reference = answer()
    reference["logits"][0, 1] += 0.01
    reference["logits"][0, 1, 0] += 0.01
    reference["cross.0.keys"][1, 0, 2] += 5.0  # padding
    found = truth(CASE, ORACLE, reference)
    assert {name: len(own) for name, own in found.errors.items()} == POSITIONS
    worst = found.errors["logits"]
    assert 1e-3 < worst[1] < 2e-2
    # The other positions have no error of their own: 64 times the median of nothing.
    np.testing.assert_array_equal(np.delete(worst, 1), np.full(3, 2.0**-21 * 1.25))
    assert found.worst("logits") == worst[1]
    assert found.worst("past.0.keys") == 2.0**-21 * (1 + 1 / 6)
    assert found.worst("past.9.keys") == 0.0
    assert found.oracle is ORACLE


def test_a_value_at_a_border_widens_the_budget_of_its_position_alone() -> None:
    """Of several references, as of int8: the others round to the other integer."""
    crossed = answer()
    crossed["logits"][1, 0, 3] += 0.05
    expected = truth(CASE, ORACLE, answer(), crossed, answer(), borders=True)
    tolerance = Tolerance.of("int8")
    assert not compare(CASE, expected, crossed, tolerance)[0].fault
    # One more may cross unforeseen, and two may not.
    for places, faults in ((((0, 1),), False), (((0, 1), (1, 1)), True)):
        found = answer()
        for row, step in places:
            found["logits"][row, step, 5] += 0.02
        assert bool(compare(CASE, expected, found, tolerance)[0].fault) is faults
    # Where none crossed, none may.
    calm = truth(CASE, ORACLE, answer(), answer(), answer(), borders=True)
    assert compare(CASE, calm, crossed, tolerance)[0].fault


LOGITS, PAST = ORACLE["logits"], ORACLE["past.0.keys"]


def layers(*sizes: float) -> Arrays:
    """Keys of several layers, each times a size, beside the same logits."""
    return {
        "logits": ORACLE["logits"],
        **{f"past.{layer}.keys": size * PAST for layer, size in enumerate(sizes)},
    }


def test_the_error_of_a_layer_widens_no_other() -> None:
    oracle = layers(1.0, 1.0)
    reference = {**oracle, "past.1.keys": oracle["past.1.keys"] + 0.001}
    found = truth(CASE, oracle, reference)
    assert found.worst("past.1.keys") > 1e-4
    assert found.worst("past.0.keys") < 1e-6


def test_a_tensor_that_cancels_widens_no_budget() -> None:
    """Entries of 1e-12 with an error of 1e-7 are a million times off, by rounding alone."""
    oracle = layers(1.0, 1e-12)
    reference = {**oracle, "past.1.keys": oracle["past.1.keys"] + 1e-7}
    expected = truth(CASE, oracle, reference)
    assert 1e-5 < expected.worst("past.1.keys") < 1e-3
    assert not any(item.fault for item in compare(CASE, expected, reference, Tolerance()))
    wrong = {**oracle, "past.0.keys": PAST + 0.01, "logits": oracle["logits"] + normal(10) / 100}
    faults = [item.tensor for item in compare(CASE, expected, wrong, Tolerance()) if item.fault]
    assert faults == ["logits", "past.0.keys"]


def test_a_budget_that_proves_nothing_fails() -> None:
    reference = {**ORACLE, "past.0.keys": ORACLE["past.0.keys"] + 0.02}
    expected = truth(CASE, ORACLE, reference)
    (fault,) = [item.fault for item in compare(CASE, expected, ORACLE, Tolerance()) if item.fault]
    assert "of the unit of an entry: a budget of" in fault
    assert "proves nothing (at most 1.6e-02)" in fault
    assert not any(item.fault for item in compare(CASE, expected, ORACLE, Tolerance(most=1.0)))


@pytest.mark.parametrize(("error", "told"), [(0.01, ""), (0.02, "proves"), (1.0, "exceeds the")])
def test_a_position_whose_budget_proves_nothing_accuses_no_model(error: float, told: str) -> None:
    name, far = "past.0.keys", np.array([1e-6, 1e-6, 0.02, 1e-6, 1e-6, 1e-6])
    expected, found = Truth(ORACLE, TRUTH.errors | {name: far}), answer()
    found[name][0, :, 2] += 1.0
    whole = expected.units(CASE)[name].largest_error(found[name])
    found[name][0, :, 2] += error / whole - 1.0
    (item,) = compare(CASE, expected, found, Tolerance(), only=[name])
    assert told in item.fault and bool(item.fault) is bool(told)


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
            changed("past.0.keys", (1, 0, 2, 3), 2e-5),
            "past.0.keys",
            "of the entry's unit exceeds the budget 4.00e-06 (4 x torch's own 1.00e-06)",
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
    found["past.0.keys"][1, 0, 2, 3] += 3e-6
    *_, past = compare(CASE, TRUTH, found, TOLERANCE)
    assert past.fault == ""
    assert past.error == errors_of(PAST, found["past.0.keys"]).max() > 1e-7


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
    oracle = {"logits": np.zeros((2, 3, 1)), "cross.0.keys": keys}
    for given, wanted in ((case, stages), (text, ("text", "text"))):
        found = compare(given, Truth(oracle, {}), {}, TOLERANCE)
        assert tuple(item.stage for item in found) == wanted


@pytest.mark.parametrize("error", [np.nan, np.inf])
def test_a_reference_that_overflowed_excuses_nothing(error: float) -> None:
    expected = Truth(ORACLE, {**TRUTH.errors, "logits": np.full(4, error)})
    logits, *others = compare(CASE, expected, ORACLE, TOLERANCE)
    assert logits.fault == "torch's own answer holds NaN or infinity, so it proves nothing"
    assert not any(item.fault for item in others)


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
    assert logit_errors(logits, logits + 100.0)[1][0].max() < 1e-14
    found = logits.copy()
    found[:, 7] += 1e-3  # float32's rounding of such a logit
    assert logit_errors(logits, found)[1][0].max() < 2e-7
    found[2, 3] += 1e-3
    _, (errors,) = logit_errors(logits, found)
    assert errors.argmax() == 2
    assert 1e-5 < errors[2] < 1e-3


def test_equal_logits_have_the_unit_1() -> None:
    assert logit_units(np.zeros((2, 9))).tolist() == [1.0, 1.0]
    rounded = 3.0 + np.arange(40) * 2.0**-51  # in float64, by the order of its sums
    assert logit_units(rounded[None]).tolist() == [1.0]
    assert logit_units(rounded[None] + 2 * np.eye(1, 40)).tolist() == [pytest.approx(2)]
