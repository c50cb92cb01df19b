"""Every position is compared one token a step and every size of a batch; a wrong one is named."""

import copy
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper

from transferry.export.audit import tolerance_of
from transferry.export.audit_function import FunctionGraph, audit_function
from transferry.export.checks.check import Findings, prove
from transferry.export.checks.numbers import (
    BLOCK,
    batch_sizes,
    compare_cases,
    independence,
    positions,
)
from transferry.export.checks.texts import given_answers
from transferry.export.oracle.cases import many_rows, random_case, sizes
from transferry.export.oracle.oracle import MORE_SHAKES, SHAKES, SINGLE, Oracle
from transferry.export.subject.layout import GraphFile, Layout
from transferry.export.subject.subject import OpenedModel
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.decoding.decoder import StepOutput, Tensors
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.ort.portable_decoder import PortableDecoder
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.proof.compare import NEAR, Case, Truth, compare, limited, observe
from transferry.runtime.proof.report import worst_ratio
from transferry.runtime.proof.units import LEAST


def as_kind(kind: type[Oracle], oracle: Oracle) -> Oracle:
    """The oracle with the methods of a subclass."""
    return kind(**{each.name: getattr(oracle, each.name) for each in fields(oracle)})


def walked(oracle: Oracle, decoder: PortableDecoder) -> Findings:
    return prove([positions(OpenedModel(decoder), oracle)])


def test_walk_reaches_the_last_position(oracle: Oracle, decoder: PortableDecoder) -> None:
    walk = walked(oracle, decoder)
    found = walk.comparisons
    most = oracle.config.max_positions
    assert len(found) == -(-most // BLOCK)
    assert found[-1].case == f"positions {(len(found) - 1) * BLOCK} to {most - 1}"
    assert not any(item.fault for item in found)
    assert not walk.failing


class Changed(PortableDecoder):
    """A decoder whose logits a function of them and the tokens changes."""

    def __init__(self, bundle: Bundle, change: Callable[[Any, Any], Any]) -> None:
        super().__init__(bundle, bundle.variant(), SessionOptions())
        self.change = change

    def step(self, tokens: Any, state: Any, **wanted: Any) -> Any:
        output, later = super().step(tokens, state, **wanted)
        return StepOutput(self.change(output.all_logits, tokens)), later


def larger(logits: Any, wrong: bool) -> Any:
    """Logits, 1 % too large if they shall be wrong."""
    return logits * np.float32(1.01 if wrong else 1.0)


@pytest.mark.parametrize("wrong", [3, 41])
def test_one_wrong_position_is_named(oracle: Oracle, bundle: Bundle, wrong: int) -> None:
    calls = iter(range(10_000))
    walk = walked(oracle, Changed(bundle, lambda each, _: larger(each, next(calls) == wrong)))
    found = walk.comparisons
    assert [bool(item.fault) for item in found].count(True) == 1
    (case,) = walk.failing
    assert (case.name, case.past, case.target.shape[1]) == (f"position {wrong}", wrong, wrong + 1)


@pytest.mark.parametrize("size", [0, 2, 37, 70])
def test_one_wrong_size_of_a_batch_is_named(oracle: Oracle, bundle: Bundle, size: int) -> None:
    wrong = Changed(bundle, lambda logits, tokens: larger(logits, len(tokens) == size))
    found = prove([batch_sizes(OpenedModel(wrong), oracle, many_rows(oracle.config, 70))])
    wrong_tensors = [item.tensor for item in found.comparisons if item.fault]
    assert wrong_tensors == (["logits"] if size else [])
    assert [case.name for case in found.failing] == ([f"batch of {size}"] if size else [])
    assert [len(case.source) for case in found.failing] == ([size] if size else [])


class WrongForEqualRows(Changed):
    """Gives scores that are 1 % too large where two sources are equal."""

    def start(self, source: Any, mask: Any) -> Any:
        alike = (source[1:] == source[:-1]).all(axis=1).any()
        self.change = lambda logits, _: larger(logits, alike)
        return super().start(source, mask)


def test_rows_are_equal_in_some_cases(oracle: Oracle, bundle: Bundle) -> None:
    wrong = WrongForEqualRows(bundle, larger)
    cases = [case for case in sizes(oracle.config) if case.source.shape == (7, 13)]
    found = compare_cases(oracle, wrong, cases[:1])
    assert [item.tensor for item in found if item.fault] == ["logits"]


def limit_at(oracle: Oracle, case: Case, name: str, place: tuple[int, ...], shakes: int) -> float:
    """Returns the largest error that passes in one entry of a tensor."""
    truth = oracle.truth(case, shakes)
    moved = truth.oracle[name].copy()
    moved[place] += 1
    units = truth.units(case)[name]
    return float(oracle.tolerance.budget(truth.worst(name)) / units.largest_error(moved))


class Lucky(Oracle):
    """torch in float32 rounds nothing by chance, until it is shaken."""

    def sides(self, case: Case, shakes: int = 0) -> tuple[list[Tensors], float]:
        sides, least = super().sides(case, shakes)
        sides[1] = {name: tensor.astype(np.float32) for name, tensor in sides[0].items()}
        return sides, least


def test_a_lucky_rounding_of_torch_accuses_no_other_and_excuses_no_fault(oracle: Oracle) -> None:
    model = copy.deepcopy(oracle.trained.model)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.mul_(100.0 if ".query." in name else 1.0)  # nearly a choice
    lucky = Lucky.of(model, oracle.special, oracle.tolerance).remembering()
    case = random_case(oracle.config, 12, 7, 2, seed=3)
    expected = lucky.truth(case)

    def worst(found: Tensors) -> float:
        return max(one.error for one in compare(case, expected, found, oracle.tolerance))

    found = max(lucky.shaken(partial(lucky.observe, case=case), SHAKES), key=worst)
    assert any(one.fault for one in compare(case, expected, found, oracle.tolerance))
    assert not any(one.fault for one in lucky.compared(case, found))
    wrong = {name: exact + 40 * (found[name] - exact) for name, exact in expected.oracle.items()}
    assert any(one.fault for one in lucky.compared(case, wrong))


@pytest.mark.parametrize("check", ["positions", "batch sizes", "text"])
@pytest.mark.parametrize("units", [30, 3000])
def test_a_walk_batches_and_text_are_compared_with_several_roundings(
    check: str, units: int, oracle: Oracle, bundle: Bundle
) -> None:
    class Shaken(Oracle):
        """torch whose error shows when it is shaken."""

        def sides(self, case: Case, shakes: int = 0) -> tuple[list[Tensors], float]:
            sides, least = super().sides(case, shakes)
            signs = np.resize([0, 1e-5], sides[0]["logits"].shape)
            moved = {**sides[0], "logits": sides[0]["logits"] * (1 + signs)}
            return [*sides[:2], *[moved] * len(sides[2:])], least

    shaken = as_kind(Shaken, oracle)
    # By so many float32 units, which torch by chance does not round.
    model = Changed(bundle, lambda logits, _: rounded(logits, units).astype(np.float32))
    made = {
        "positions": lambda: positions(OpenedModel(model), shaken, 8),
        "batch sizes": lambda: batch_sizes(OpenedModel(model), shaken, many_rows(oracle.config, 6)),
        "text": lambda: given_answers(
            OpenedModel(model), shaken, lambda _: [([3, 4], [1, 5, 6])] * 2, 2
        ),
    }
    found = prove([made[check]()]).comparisons
    assert {item.tensor for item in found if item.fault} == ({"logits"} if units > 30 else set())


@pytest.mark.parametrize(("units", "fails"), [(300, False), (3_000_000, True)])
def test_what_is_near_its_limit_is_compared_with_many_roundings(
    units: int, fails: bool, oracle: Oracle
) -> None:
    class Seldom(Oracle):
        """torch whose error shows in the last of many roundings."""

        def sides(self, case: Case, shakes: int = 0) -> tuple[list[Tensors], float]:
            sides, least = super().sides(case, min(shakes, SHAKES))
            moved = {**sides[0], "logits": rounded(sides[0]["logits"], units)}
            return [*sides, *[moved] * (shakes == MORE_SHAKES)], least

    seldom = as_kind(Seldom, oracle)
    case = random_case(oracle.config, 3, 5, 2, seed=7)
    found = dict(observe(oracle.reference, case))
    found["logits"] = rounded(found["logits"], units)
    assert any(item.fault for item in seldom.compared(case, found)) == fails


def rounded(logits: Any, units: int) -> Any:
    """Logits, every second one off by so many float32 epsilons."""
    return logits * (1 + np.resize([0, units * 2.0**-23], logits.shape))


def test_only_what_is_not_near_torch_is_measured_in_float64(oracle: Oracle) -> None:
    case = random_case(oracle.config, 3, 5, 2, seed=7)
    honest = observe(oracle.reference, case)
    asked: list[Case] = []

    class Watched(Oracle):
        def truth(self, case: Case, shakes: int = 0) -> Truth:
            asked.extend([case] * (shakes != SINGLE))
            return super().truth(case, shakes)

    watched = as_kind(Watched, oracle)
    assert not any(item.fault for item in watched.compared(case, honest))
    assert not asked
    # torch's own error, and so the limit, depends on the processor.
    name, place = "cross.0.keys", (1, 0, 0, 0)
    small, large = (limit_at(oracle, case, name, place, shakes) for shakes in (0, SHAKES))
    for error, fault in ((1.05 * large, True), (np.nan, True), (0.95 * small, False)):
        cross = honest[name].copy()
        cross[place] = oracle.truth(case).oracle[name][place] + error
        found = watched.compared(case, {**honest, name: cross})
        assert [item.tensor for item in found if item.fault] == [name] * fault
    # Nearly as far from torch as passes without the oracle: the share of the limit is no larger.
    moved, near = honest[name].copy(), oracle.truth(case, SINGLE).units(case)[name]
    moved[place] += 1e-3
    moved = honest[name] + (moved - honest[name]) * 5.9 * LEAST / near.largest_error(moved)
    items = watched.compared(case, {**honest, name: moved.astype(np.float32)})
    assert 5 < worst_ratio(items, oracle.tolerance) <= NEAR
    assert asked == [case] * 6  # a fault near its limit thrice, NaN twice; the last is near torch
    alone = replace(random_case(oracle.config, 1, 5, 2, seed=7), measured=True)
    watched.compared(alone, observe(oracle.reference, alone))
    assert asked[6:] == [alone]  # for torch's own error


def test_only_scores_not_near_torch_are_measured_in_float64(
    oracle: Oracle, sources: list[list[int]]
) -> None:
    options = GenerationOptions(beam=2, n_best=2, max_length=6)
    (expected,) = oracle.expected(sources[:3], options)
    near = [[row] for row in expected.hypotheses]
    scores = oracle.scored(expected, near, options).scores
    own = [[score.own == np.inf for score in row] for row in scores]
    assert own == [[False, False], [True, True], [True, True]]  # of the first, for torch's error
    wrong = replace(expected.hypotheses[1][1], score=expected.hypotheses[1][1].score * (1 + 1e-5))
    missing = replace(wrong, score=np.nan)
    for given in (wrong, missing):
        # The second time that the source was answered.
        found = [near[0], [near[1][0], [near[1][0][0], given]], near[2]]
        scores = oracle.scored(expected, found, options).scores
        measured = [score.own < 1e-5 for row in scores for score in row]
        assert measured == [True, True, False, True, False, False]
    ruled = oracle.scored(expected, near, replace(options, repetition_penalty=1.1))
    assert ruled.scores[0][0].own < 1e-5


@pytest.mark.parametrize(
    ("precision", "error", "passes"),
    [("float32", 1e-3, False), ("float16", 1e-3, True), ("float16", 1e-2, False)],
)
def test_a_batch_may_round_as_its_precision_does(
    precision: str, error: float, passes: bool
) -> None:
    class Rounding:
        """Its rows move in a batch."""

        model = property(lambda self: self)

        def read(self, rows: list[list[int]], side: str) -> list[dict[str, Any]]:
            return [{"logits": np.full((1, 9), 1 + (len(rows) > 1) * error)} for _ in rows]

    own = limited("batch 3", "logits", "first step", 1e-3 if passes else 2e-4, 0.0, 1.0)
    subject: Any = Rounding()
    (check,) = independence(subject, [[1], [2]], ["right"], tolerance_of(precision))
    (found,) = check.run(Findings(comparisons=[own]))
    assert any(item.fault for item in found.comparisons) != passes


@pytest.mark.parametrize(("away", "passes"), [(1e-3, True), (0.1, False)])
def test_rows_of_a_function_may_round_as_its_precision_does(
    away: float, passes: bool, tmp_path: Path
) -> None:
    """A graph whose rows move in a batch."""
    torch.manual_seed(0)
    inner, given = torch.nn.Linear(4, 3), torch.randn(5, 4)
    one = torch.ones(1)
    weights = {"w": inner.weight.T, "b": inner.bias, "one": one, "away": one + away}
    nodes = [
        helper.make_node("Size", ["x"], ["size"]),
        helper.make_node("Greater", ["size", "four"], ["several"]),
        helper.make_node("Where", ["several", "away", "one"], ["factor"]),
        helper.make_node("Gemm", ["x", "w", "b"], ["product"]),
        helper.make_node("Mul", ["product", "factor"], ["y"]),
    ]
    weights["four"] = torch.tensor(4)
    tensors = [numpy_helper.from_array(each.detach().numpy(), n) for n, each in weights.items()]
    value = helper.make_tensor_value_info
    inputs, outputs = ([value(name, 1, ["rows", size])] for name, size in (("x", 4), ("y", 3)))
    model = helper.make_model(
        helper.make_graph(nodes, "graph", inputs, outputs, tensors), ir_version=9
    )
    model.opset_import[0].version = 20
    onnx.save(model, tmp_path / "model.onnx")
    layout = Layout("a tool", GraphFile(tmp_path / "model.onnx", {}, {}))
    subject = FunctionGraph(layout, SessionOptions(), inner, [[given]])
    assert audit_function(tmp_path, subject, "float16").passed == passes
