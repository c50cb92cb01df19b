"""Rows of a job that are computed again on the reference, so that a job gone wrong stops.

The served graph may differ from the verified one: other hardware, an updated driver, a batch that
no test has seen. One row in N is computed again by the same bundle, alone, on the CPU and with
onnxruntime's optimiser off, which is slow and as near to the graph as onnxruntime gets. Operators
of transferry-kernels are compared with themselves.
"""

from itertools import count
from typing import Any

import numpy as np

from transferry.runtime.decoding.batching import BatchOptions
from transferry.runtime.engine.engine import Engine
from transferry.runtime.engine.result import Blank, PartsResult, RowResult
from transferry.runtime.engine.tasks.task import Bounds, Difference, Task
from transferry.runtime.errors import ParityError
from transferry.runtime.ort.open_model import open_model
from transferry.runtime.ort.session import Optimisation, SessionOptions
from transferry.runtime.precision import Precision
from transferry.runtime.proof.compare import HEAD, Tolerance, Truth
from transferry.runtime.proof.recorded import Reference, check_reference
from transferry.runtime.proof.units import ENTRIES, INT8_STEP, logit_units
from transferry.runtime.tables import counted


class Canary:
    """Computes rows again and compares."""

    def __init__(self, engine: Engine, every: int, task: Task) -> None:
        """Opens the bundle a second time; `every` is the interval of the rows computed again.

        Raises:
            InputError: The bundle's record is damaged.
            ParityError: The bundle does not give the recorded answers here.
        """
        bundle, variant = engine.bundle, engine.model.variant
        # Kernels read constants that optimisation basic computes.
        level: Optimisation = "basic" if Precision.of(variant.precision).kernels else "disable"
        model = open_model(bundle, variant, SessionOptions("cpu", 1, optimisation=level))
        self.reference = Engine.of(bundle, model, batches=BatchOptions(rows=1, window=1))
        self.every, self.task = every, task
        self.rows = self.identical = self.ties = 0
        recorded = Reference.of(bundle, variant)
        self._require_recorded(recorded)
        self.bounds = _bounds(engine, self.reference, recorded)

    def _require_recorded(self, reference: Reference) -> None:
        """Compares the canary's own model with torch's recorded answers.

        It reads the same weights as the job: where these are damaged, both agree.
        """
        model = self.reference.model
        comparisons, decisions = check_reference(
            reference,
            model,
            self.reference.bundle.tokenizer.special,
            Tolerance.of(model.variant.precision),
            exact=model.variant.exact,
        )
        faults = [f"{item.case}: {item.tensor}: {item.fault}" for item in comparisons if item.fault]
        faults += [str(defect) for item in decisions for defect in item.defects]
        if faults:
            raise ParityError(
                f"{self.reference.bundle.folder} does not give the answers that were recorded of "
                f"torch: {faults[0]}. Copy the bundle again, or export it again"
            )

    def check(self, number: int, row: RowResult, given: Any, place: int | None = None) -> None:
        """Computes a row again, if it is its turn.

        `given` is the row as the engine took it, `place` its number among the engine's inputs, by
        default that of the row.

        Raises:
            ParityError: The results differ by more than rounding explains.
        """
        if number % self.every:
            return
        self.rows += 1
        if row.error is not None and not row.source:
            self.identical += 1  # there was no text to answer
            return
        place = number if place is None else place
        (again,) = self.task.answers(self.reference, iter([given]), place)
        difference, ties = self._difference(row, again, given, place)
        if difference:
            raise ParityError(
                f"line {number + 1} is answered differently by the reference (CPU, no "
                f"optimisation): {difference}. {counted(self.rows - 1, 'line')} before it agreed. "
                "Verify the bundle on this provider: transferry verify --provider"
            )
        self.identical += 1
        self.ties += ties

    def _difference(self, row: RowResult, again: RowResult, given: Any, place: int) -> Difference:
        """Compares two results, part by part."""
        if isinstance(row, PartsResult) and isinstance(again, PartsResult):
            parts = zip(row.parts, again.parts, given.inputs, count(place), strict=False)
            found = [self._difference(*part) for part in parts]
            difference = next((each for each, _ in found if each), "")
            return difference, max(ties for _, ties in found)
        if (row.error and row.error.kind) != (again.error and again.error.kind):
            return f"{row.error or 'an answer'}, but {again.error or 'an answer'}", 0
        if row.error is not None or isinstance(row, Blank):
            return "", 0
        return self.task.same_row(row, again, self.bounds, given, place)

    def tally(self) -> dict[str, int]:
        """Returns the number of rows computed again, and how they compared."""
        return {
            "canaries": self.rows,
            "canaries_identical": self.identical - self.ties,
            "canaries_tied": self.ties,
        }


def _bounds(served: Engine, reference: Engine, recorded: Reference) -> Bounds:
    """Returns twice the distance from float64 that verification allows each side.

    That is a multiple of the error that torch made on the recorded cases.
    """
    cases, precision = recorded.cases, served.model.variant.precision
    tolerance = Tolerance.of(precision)
    factor = 2 * tolerance.factor
    # The record may happen to hold no value at the border of two integers; the text does.
    floor = INT8_STEP if Precision.of(precision).integers else tolerance.floor
    logits, hidden = (
        max(floor, *(truth.worst(name) for _, truth in cases)) for name in ("logits", "hidden")
    )
    heads = [_head_errors(truth, floor) for _, truth in cases]
    units = [logit_units(truth.oracle["logits"]) for _, truth in cases if "logits" in truth.oracle]
    return Bounds(
        served,
        reference,
        Tolerance(factor, logits),
        vector=factor * max(hidden, *(error for error, _ in heads)),
        # No slope of softmax or of the logistic function exceeds 1.
        score=factor * max(absolute for _, absolute in heads),
        # A log-probability is a logit minus the log-sum-exp of the logits: either may be off.
        log_probability=2 * factor * logits * max((float(each.max()) for each in units), default=0),
    )


def _head_errors(truth: Truth, floor: float) -> tuple[float, float]:
    """Returns torch's error of a head, in units of its largest number and absolute."""
    largest = float(np.abs(truth.oracle.get(HEAD, np.zeros(0))).max(initial=0.0))
    # Units of entries exceed the largest number only where `least` does, or by the scale of 3/4.
    absolute = max(truth.worst(HEAD), floor) * max(ENTRIES * largest, truth.least)
    return (absolute / largest if largest else 0.0), absolute
