"""Every tensor of a model over cases of random tokens, and the same input run again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np

from transferry.export.checks.check import Check, Findings, prove
from transferry.export.oracle.oracle import Oracle
from transferry.export.subject.subject import Observable, OpenedModel, Subject
from transferry.runtime.errors import InputError
from transferry.runtime.proof.compare import Case, Comparison, compare, observe
from transferry.runtime.proof.report import Claim
from transferry.runtime.proof.self_consistency import self_consistency

REPEATS = 3
REPEATED = "repeated runs"


def numbers(subject: Subject[Any], oracle: Oracle, cases: Iterable[Case]) -> list[Check]:
    """Returns a check of every tensor for each case."""
    return [
        Check(case.name, partial(_compared, subject, oracle, case), 1, case.stage) for case in cases
    ]


def _compared(
    subject: Subject[Any], oracle: Oracle, case: Case, so_far: Findings
) -> Iterator[Findings]:
    sides = oracle.truth(case), observe(subject.model, case)
    found = compare(case, *sides, oracle.tolerance, subject.tensors)
    failing = [case] if any(item.fault for item in found) else []
    found += self_consistency(subject.model, case)
    yield Findings(comparisons=found, failing=failing, steps=1)


def compare_cases(oracle: Oracle, model: Observable, cases: Iterable[Case]) -> list[Comparison]:
    """Compares every tensor of every case of an opened model."""
    return prove(numbers(OpenedModel(model), oracle, cases)).comparisons


def repeats(subject: Subject[Any], case: Case) -> Check:
    """Returns the check that the same input gives the same bits several times."""

    def run(so_far: Findings) -> Iterator[Findings]:
        yield Findings(claims=[Claim(REPEATED, _change(subject.model, case))])

    return Check(REPEATED, run)


def _change(model: Observable, case: Case) -> str:
    try:
        runs = [observe(model, case) for _ in range(REPEATS)]
    except InputError as error:
        return str(error)
    for name, wanted in runs[0].items():
        worst = max(float(np.abs(run[name] - wanted).max(initial=0.0)) for run in runs[1:])
        if worst:
            return f"{name} differs by {worst:.1e} between {REPEATS} runs on the same input"
    return ""
