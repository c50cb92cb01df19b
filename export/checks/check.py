"""The one loop of every proof: checks run in order, and their findings are collected.

`verify`, `audit` and the self-test are lists of checks. A check compares one property of a subject
with its oracle and yields findings; the loop counts progress and turns a check that does not run
into a fault.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from transferry.export.oracle.teacher_forcing import TeacherForcing
from transferry.runtime.decoding.hypothesis import Hypothesis
from transferry.runtime.errors import InputError, TransferryError
from transferry.runtime.proof.compare import STAGES, Case, Comparison, Tolerance
from transferry.runtime.proof.report import CheckTime, Claim, CrossCheck, Decisions

Pairs = list[tuple[Hypothesis, Hypothesis]]
Results = list[tuple[NDArray[np.float64], NDArray[np.float64]]]
# Told the steps finished and their total.
Progress = Callable[[int, int], None]
INDEPENDENCE = " alone and in "  # in the name of a case that is compared with its batch


@dataclass
class Findings:
    """Findings of a check, or of all checks so far.

    Attributes:
        failing: Cases in which a tensor is wrong.
        best: The best answers of torch as trained and of the subject, by search.
        vectors: Of torch as trained and of the subject, a pair for each row.
        scores: Likewise, scores that choose no label.
        forcing: Errors and margins on given answers; empty without any.
        times: Time of the checks so far, by kind.
    """

    claims: list[Claim] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    decisions: list[Decisions] = field(default_factory=list)
    runtimes: list[CrossCheck] = field(default_factory=list)
    failing: list[Case] = field(default_factory=list)
    best: dict[str, Pairs] = field(default_factory=dict)
    vectors: Results = field(default_factory=list)
    scores: Results = field(default_factory=list)
    forcing: TeacherForcing = field(default_factory=TeacherForcing)
    steps: int = 0
    times: dict[str, CheckTime] = field(default_factory=dict)

    def add(self, found: Self) -> None:
        """Adds the findings of one more check."""
        for each in fields(self):
            if isinstance(listed := getattr(self, each.name), list):
                listed += getattr(found, each.name)
        self.best |= found.best
        self.forcing = found.forcing if found.forcing.tokens else self.forcing
        self.steps += found.steps
        for time_ in found.times.values():
            self._spend(time_)

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the time of a block to the total of a check or kind."""
        began = time.process_time(), time.perf_counter()
        try:
            yield
        finally:
            ended = time.process_time(), time.perf_counter()
            self._spend(CheckTime(name, 1, ended[0] - began[0], ended[1] - began[1]))

    def _spend(self, more: CheckTime) -> None:
        old = self.times.get(more.check, CheckTime(more.check, 0, 0.0, 0.0))
        spent = old.runs + more.runs, old.cpu + more.cpu, old.wall + more.wall
        self.times[more.check] = CheckTime(more.check, *spent)

    @property
    def failure(self) -> str:
        """The failed claim or search, or the first failed stage; empty if all passed."""
        for claim in self.claims:
            if claim.problem:
                return claim.name
        for decided in self.decisions:
            if not decided.passed:
                return decided.search
        faults = [item for item in self.comparisons if item.fault]
        if not faults:
            return ""
        first = min(faults, key=lambda item: STAGES.index(item.stage))
        return "batch independence" if INDEPENDENCE in first.case else first.stage


@dataclass(frozen=True)
class Check:
    """One check of a subject beside its oracle.

    Attributes:
        name: Case or search, for the fault of a check that does not run.
        run: Yields findings, given those of the checks before.
        steps: Cases and rows that it compares.
        stage: Stage of the model, for the same fault.
        kind: Checks whose time is added up. Default: the name.
    """

    name: str
    run: Callable[[Findings], Iterator[Findings]]
    steps: int = 0
    stage: str = "text"
    kind: str = ""


def found_by(checks: Iterable[Check], so_far: Findings, *, faults: bool) -> Iterator[Findings]:
    """Runs checks and yields their findings, which `so_far` takes, one after another.

    Raises:
        InputError: A check does not run, and `faults` is off.
    """
    for check in checks:
        try:
            with so_far.timed(check.kind or check.name):
                for found in check.run(so_far):
                    so_far.add(found)
                    yield found
        except InputError as error:
            if not faults:
                raise
            broken = Findings(comparisons=[failed(check.name, check.stage, error)])
            so_far.add(broken)
            yield broken


def prove(
    checks: Iterable[Check], *, faults: bool = False, done: Progress = lambda steps, total: None
) -> Findings:
    """Runs checks and collects their findings; see `found_by`."""
    checks = list(checks)
    total, whole = sum(check.steps for check in checks), Findings()
    for found in found_by(checks, whole, faults=faults):
        if found.steps:
            done(min(whole.steps, total), total)
    return whole


def first_failure(checks: Iterable[Check], *, faults: bool) -> str:
    """Runs checks up to the first that fails and names it; empty if all pass."""
    try:
        found = found_by(checks, Findings(), faults=faults)
        return next((name for each in found if (name := each.failure)), "")
    except InputError:
        return "running"


def attempt(name: str, action: Callable[[], Any]) -> Check:
    """Returns the check that an action raises none of the project's errors."""

    def run(found: Findings) -> Iterator[Findings]:
        try:
            action()
        except TransferryError as error:
            yield Findings(claims=[Claim(name, str(error))])

    return Check(name, run)


def claim(name: str, made: Callable[[], Sequence[Claim]]) -> Check:
    """Returns the check of some claims."""
    return Check(name, lambda found: iter([Findings(claims=[*made()])]))


def failed(case: str, stage: str, error: InputError) -> Comparison:
    """Returns the comparison of a case that does not run."""
    return Comparison(case, "outputs", stage, np.inf, 0.0, Tolerance().budget(0.0), str(error))
