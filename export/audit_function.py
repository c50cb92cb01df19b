"""Proof that one graph computes what a torch module of any kind does."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from transferry.export.audit import UNLIMITED, Done, tolerance_of, with_faults
from transferry.export.checks.check import INDEPENDENCE, Check, Findings, claim, prove
from transferry.export.checks.foreign_weights import foreign_weights
from transferry.export.checks.numbers import REPEATED, REPEATS, batched, declared
from transferry.export.checks.unrounded import told, tolerance_of_floats, without_rounding
from transferry.export.faults.gate import Gate
from transferry.export.subject.function import Arrays, FunctionGraph, Inputs, rows_alone, run_module
from transferry.runtime.errors import InputError
from transferry.runtime.proof.compare import Comparison, Tolerance, limited
from transferry.runtime.proof.report import Claim, ParityReport
from transferry.runtime.proof.units import Units


def audit_function(
    folder: Path,
    subject: FunctionGraph,
    precision: str,
    *,
    plant: bool = False,
    atol: float | None = None,
    done: Done = lambda phase, done, total: None,
) -> ParityReport:
    """Compares a graph with a torch module; see `audit`.

    Raises:
        UsageError: The module fails, or gives another number of outputs.
        InputError: There are no numbers to compare.
    """
    tolerance = tolerance_of(precision)
    work = FunctionAudit(subject.module, copy.deepcopy(subject.module).double(), tolerance)
    found = prove(work.checks(subject))
    settings = {**subject.describe(precision), "inputs": len(subject.inputs)}
    given = str(folder), settings, tolerance, found.comparisons
    report = ParityReport(*given, claims=found.claims, times=[*found.times.values()])

    def changed(copied: FunctionGraph) -> bool:
        return not all(map(np.array_equal, subject.tried(), copied.tried()))

    gate = Gate(subject, work.checks, changed, atol=atol)
    return with_faults(report, gate, done) if plant else report


@dataclass(frozen=True)
class FunctionAudit:
    """The checks of one graph beside a torch module.

    Attributes:
        module: The reference in float32.
        exact: The reference in float64.
        tolerance: The largest error that passes.
    """

    module: nn.Module
    exact: nn.Module
    tolerance: Tolerance

    def checks(self, subject: FunctionGraph) -> Iterator[Check]:
        """Yields the checks of a graph, in order."""
        exact, left = without_rounding(subject, self.module)
        yield from left
        rounded = self
        if exact is not None:
            tolerance = tolerance_of_floats(subject.layout)
            yield from map(told, replace(self, tolerance=tolerance)._inputs(exact))
            rounded = replace(self, tolerance=UNLIMITED)
        yield from rounded._inputs(subject)
        yield claim(REPEATED, lambda: [_repeats(subject)])
        yield claim("declared", lambda: [declared([subject.model])])
        yield claim("weights", lambda: [foreign_weights(self.module, subject.layout)])

    def _inputs(self, subject: FunctionGraph) -> Iterator[Check]:
        """Yields the check of each input."""
        for number, inputs in enumerate(subject.inputs):
            yield Check(f"input {number}", partial(self._input, subject, f"input {number}", inputs))

    def _input(
        self, subject: FunctionGraph, name: str, inputs: Inputs, so_far: Findings
    ) -> Iterator[Findings]:
        """Compares a batch, and each of its rows alone."""
        cases: list[tuple[str, Inputs]] = [(name, inputs)]
        cases += [(f"{name}, row {row}", each) for row, each in enumerate(rows_alone(inputs))]
        whole: Arrays = {}
        errors: dict[str, float] = {}  # the largest of each output
        for row, (case, given) in enumerate(cases, start=-1):
            try:
                found = subject.answers(given)
            except InputError as error:
                budget = self.tolerance.budget(0.0)
                broken = Comparison(case, "output", "text", np.inf, 0.0, budget, fault=str(error))
                yield Findings(comparisons=[broken])
                continue
            oracle = run_module(self.exact, given, list(found), torch.float64)
            if not any(each.size for each in oracle.values()):
                shapes = ", ".join(str(list(each.shape)) for each in oracle.values())
                raise InputError(
                    f"{case}: expected outputs with numbers to compare, found shapes {shapes}; "
                    "return inputs of at least one row"
                )
            reference = run_module(self.module, given, list(found), torch.float32)
            rounding = {each: _error(reference[each], oracle[each]) for each in found}
            compared = [
                self._compare(case, each, found[each], oracle[each], own)
                for each, own in rounding.items()
            ]
            yield Findings(comparisons=compared)
            whole = whole or found
            errors |= {
                item.tensor: max(item.error, errors.get(item.tensor, 0.0)) for item in compared
            }
            for each, own in rounding.items() if row >= 0 else ():
                # The row alone, and in its batch; see `batched`.
                alone, batch = found[each], whole[each]
                if batch.shape[1:] == alone.shape[1:] and len(batch) > row:
                    apart = _error(batch[row : row + 1], alone)
                    budget = batched(self.tolerance, own, errors[each])
                    shown = f"{case}{INDEPENDENCE}its batch", each, "text"
                    yield Findings(comparisons=[limited(*shown, apart, own, budget)])

    def _compare(
        self, case: str, name: str, found: NDArray[Any], oracle: NDArray[Any], own: float
    ) -> Comparison:
        if found.shape != oracle.shape:
            fault = f"expected shape {list(oracle.shape)}, found {list(found.shape)}"
            return Comparison(case, name, "text", np.inf, 0.0, 0.0, fault)
        error = _error(found, oracle)
        return limited(case, name, "text", error, own, self.tolerance.budget(own))


def _repeats(subject: FunctionGraph) -> Claim:
    """Runs the first input several times: the same input must give the same bits."""
    runs = [subject.answers(subject.inputs[0]) for _ in range(REPEATS)]
    changed = [
        name
        for name in runs[0]
        if any(run[name].tobytes() != runs[0][name].tobytes() for run in runs)
    ]
    problem = f"{', '.join(changed)} differ between {REPEATS} runs on the same input"
    return Claim(REPEATED, problem if changed else "")


def _error(found: NDArray[Any], wanted: NDArray[Any]) -> float:
    """Returns the largest error in units; of outputs that are no floats too."""
    exact, other = (np.atleast_1d(each).astype(np.float64) for each in (wanted, found))
    return Units.of(exact).largest_error(other)
