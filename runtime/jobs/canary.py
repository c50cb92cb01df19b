"""Rows of a job that are computed again on the reference, so that a job gone wrong stops.

The served graph may differ from the verified one: other hardware, an updated driver, a batch that
no test has seen. One row in N is computed again by the same bundle, alone, on the CPU and with
onnxruntime's optimiser off, which is slow and as near to the graph as onnxruntime gets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from transferry.runtime.decoding.batching import BatchOptions
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.engine.engine import Engine
from transferry.runtime.engine.preprocess import InLanguages, LongRows
from transferry.runtime.engine.result import GenerationResult, RowResult
from transferry.runtime.engine.tasks.classify import ClassifiedResult, RankedResult, TaggedResult
from transferry.runtime.engine.tasks.embed import EmbeddingResult
from transferry.runtime.engine.tasks.fill_mask import FilledMaskResult
from transferry.runtime.engine.tasks.generate import PIECE
from transferry.runtime.errors import ParityError
from transferry.runtime.ort.open_model import open_model
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.precision import Precision
from transferry.runtime.proof.compare import INT8_STEP, Tolerance, Truth
from transferry.runtime.proof.divergence import Explainer
from transferry.runtime.proof.recorded import Reference, check_reference


class Canary:
    """Computes rows again and compares."""

    def __init__(
        self,
        engine: Engine,
        every: int,
        run: Callable[[Engine, Iterator[Any], int], Iterator[Any]],
        options: GenerationOptions | None = None,
    ) -> None:
        """Opens the bundle a second time.

        Args:
            engine: The engine of the job.
            every: One row in so many is computed again, beginning with the first.
            run: Runs the task on inputs; see `Task.run`.
            options: How the job generates, if it does.

        Raises:
            InputError: The bundle's record is damaged.
            ParityError: The bundle does not give the recorded answers here.
        """
        bundle, variant = engine.bundle, engine.model.variant
        model = open_model(bundle, variant, SessionOptions("cpu", 1, optimisation="disable"))
        self.served = engine
        self.reference = Engine(bundle, model, batches=BatchOptions(rows=1, window=1))
        self.every = every
        self.run = run
        self.options = options or engine.default_options()
        self.rows = self.identical = self.ties = 0
        # Both sides may be as far from float64 as verification allows: a multiple of the error
        # that torch made on the recorded cases.
        reference = Reference.of(bundle, variant)
        self._require_recorded(reference)
        cases = reference.cases
        torch = {
            name: max(truth.errors.get(name, 0.0) for _, truth in cases)
            for name in ("logits", "hidden")
        }
        tolerance = Tolerance.of(variant.precision)
        factor = 2 * tolerance.factor
        # The record may happen to hold no value at the border of two integers; the text does.
        floor = INT8_STEP if Precision.of(variant.precision).integers else tolerance.floor
        self.tolerance = Tolerance(factor, max(torch["logits"], floor))
        heads = [_head_errors(truth, floor) for _, truth in cases]
        self.vector_limit = factor * max(torch["hidden"], floor, *(error for error, _ in heads))
        # No slope of softmax or of the logistic function exceeds 1.
        self.score_limit = factor * max(absolute for _, absolute in heads)
        logits = (truth.oracle.get("logits", np.zeros(0)) for _, truth in cases)
        largest = max(float(np.abs(each).max(initial=0.0)) for each in logits)
        # A log-probability is a logit minus the log-sum-exp of the logits: either may be off.
        self.log_probability_limit = 2 * self.tolerance.budget(0.0) * largest

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

    def check(self, number: int, row: RowResult, given: Any = None) -> None:
        """Computes a row again, if it is its turn.

        Args:
            number: Number of the row in the input, from 0.
            row: The job's result.
            given: What the engine was given; by default the text that the result cites.

        Raises:
            ParityError: The results differ by more than rounding explains.
        """
        if number % self.every:
            return
        self.rows += 1
        if row.error is not None and not row.source:
            self.identical += 1  # there was no text to answer
            return
        if given is None:
            pair = getattr(row, "pair", None)
            given = row.source if pair is None else (row.source, pair)
        (again,) = self.run(self.reference, iter([given]), number)
        if (row.error and row.error.kind) != (again.error and again.error.kind):
            difference = f"{row.error or 'an answer'}, but {again.error or 'an answer'}"
        elif row.error is not None:
            difference = ""
        elif isinstance(row, EmbeddingResult):
            difference = self._compare_vectors(row, again)
        elif isinstance(row, FilledMaskResult):
            difference = self._compare_candidates(row, again)
        elif isinstance(row, ClassifiedResult | RankedResult | TaggedResult):
            difference = self._compare_scores(row, again)
        else:
            assert isinstance(row, GenerationResult)
            difference = self._compare_outputs(number, row, again, given)
        if difference:
            raise ParityError(
                f"line {number + 1} is answered differently by the reference (CPU, no "
                f"optimisation): {difference}. {self.rows - 1} lines before it agreed. Verify the "
                "bundle on this provider: transferry verify --provider"
            )
        self.identical += 1

    def tally(self) -> dict[str, int]:
        """Returns the number of rows computed again, and how they compared."""
        return {
            "canaries": self.rows,
            "canaries_identical": self.identical - self.ties,
            "canaries_tied": self.ties,
        }

    def _compare_outputs(
        self, number: int, row: GenerationResult, again: GenerationResult, given: Any
    ) -> str:
        tokens = [hypothesis.tokens for hypothesis in row.hypotheses]
        if tokens == [hypothesis.tokens for hypothesis in again.hypotheses]:
            for one, other in zip(row.hypotheses, again.hypotheses, strict=True):
                length = len(one.tokens) + 1
                allowed = length ** (1 - self.options.length_penalty) * self.log_probability_limit
                if self.options.scores and not abs(one.score - other.score) <= allowed:
                    return (
                        f"score {one.score:.6f}, but {other.score:.6f}, at most {allowed:.1e} apart"
                    )
            return ""
        long_rows: LongRows = "truncate" if row.truncated else "error"
        (encoded,) = self.served.encode([given], self.options, long_rows)
        if encoded.error is not None:
            return self._compare_pieces(number, row, given)
        options, special = self.served.settings_of(encoded, self.options)
        explainer = Explainer(
            self.reference.decoder,
            self.served.decoder,
            self.reference.decoder,
            special,
            self.tolerance,
            self.served.fitted(options, len(encoded.ids)),
        )
        answers = again.hypotheses, row.hypotheses
        divergence = explainer.explain(encoded.ids, *answers, number)
        if divergence.passes:
            self.ties += 1
            return ""
        return f"{row.text!r}, but {again.text!r} ({divergence})"

    def _compare_pieces(self, number: int, row: GenerationResult, given: Any) -> str:
        """Compares a row that was split piece by piece: joined, near ties cannot be seen."""
        ties = self.ties
        for place, text in enumerate(self.served.preprocessor.pieces(row.source)):
            first = number + place * PIECE
            piece = replace(given, text=text) if isinstance(given, InLanguages) else text
            (one,), (again,) = (
                self.run(engine, iter([piece]), first) for engine in (self.served, self.reference)
            )
            if difference := self._compare_outputs(first, one, again, piece):
                return f"piece {place + 1}: {difference}"
        self.ties = min(self.ties, ties + 1)
        return ""

    def _compare_vectors(self, row: EmbeddingResult, again: EmbeddingResult) -> str:
        largest = np.abs(again.vector).max(initial=0.0)
        error = float(np.abs(row.vector - again.vector).max(initial=0.0) / (largest or 1.0))
        if error <= self.vector_limit:
            return ""
        return f"a vector {error:.1e} of its largest entry away, at most {self.vector_limit:.1e}"

    def _compare_scores(self, row: RowResult, again: RowResult) -> str:
        found, wanted = (np.array(_scores_of(each)) for each in (row, again))
        error = float(np.abs(found - wanted).max(initial=0.0)) if len(found) == len(wanted) else 1
        if error <= self.score_limit:
            return ""
        return f"a score {error:.1e} away, at most {self.score_limit:.1e}"

    def _compare_candidates(self, row: FilledMaskResult, again: FilledMaskResult) -> str:
        for place, (found, wanted) in enumerate(
            zip(row.candidates, again.candidates, strict=True), start=1
        ):
            known = {candidate.token: candidate.log_probability for candidate in wanted}
            best = found[0]
            margin = wanted[0].log_probability - known.get(best.token, -np.inf)
            error = abs(best.log_probability - known.get(best.token, np.inf))
            if not max(margin, error) <= self.log_probability_limit:
                return f"mask {place} is {best.text!r}, but {wanted[0].text!r}"
            self.ties += int(best.token != wanted[0].token)
        return ""


def _head_errors(truth: Truth, floor: float) -> tuple[float, float]:
    """Returns torch's error of a head, in units of its largest number and absolute."""
    largest = float(np.abs(truth.oracle.get("head", np.zeros(0))).max(initial=0.0))
    absolute = max(truth.errors.get("head", 0.0), floor) * max(largest, truth.least)
    return (absolute / largest if largest else 0.0), absolute


def _scores_of(row: RowResult) -> list[float]:
    """Returns the numbers of a head; of tokens those of the likeliest labels."""
    if isinstance(row, ClassifiedResult):
        return [each.score for each in row.scores]
    if isinstance(row, TaggedResult):
        return list(row.best)
    return [row.score] if isinstance(row, RankedResult) else []
