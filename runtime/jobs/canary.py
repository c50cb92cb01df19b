"""Rows of a job that are computed once more, elsewhere, so that a job gone wrong stops.

What is served may differ from what was verified: other hardware, a driver that was updated, a batch
that no test has seen. One row in so many is answered again by the same bundle, alone, on the CPU
and with onnxruntime's optimiser off, which is slow and as near to the graph as onnxruntime gets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from transferry.runtime.bundle import REFERENCE
from transferry.runtime.decoding.batching import BatchOptions
from transferry.runtime.decoding.options import GenerationOptions
from transferry.runtime.engine.embed import EmbeddingResult
from transferry.runtime.engine.engine import PIECE, Engine
from transferry.runtime.engine.fill_mask import FilledMaskResult
from transferry.runtime.engine.preprocess import LongRows
from transferry.runtime.engine.result import GenerationResult
from transferry.runtime.errors import ParityError, UsageError
from transferry.runtime.ort.open_model import open_model
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.parity.compare import Tolerance
from transferry.runtime.parity.divergence import explain
from transferry.runtime.parity.recorded import Reference

Row = GenerationResult | EmbeddingResult | FilledMaskResult


def share(text: str) -> int:
    """Reads "1/N", and returns N.

    Raises:
        UsageError: It is not of this form.
    """
    found = re.fullmatch(r"1/([1-9][0-9]*)", text.strip())
    if not found:
        raise UsageError(f"canary must be 1/N, such as 1/1000, found {text!r}")
    return int(found[1])


class Canary:
    """Answers rows again and compares."""

    def __init__(
        self,
        engine: Engine,
        every: int,
        ask: Callable[[Engine, Iterator[str], int], Iterator[Any]],
        options: GenerationOptions | None = None,
    ) -> None:
        """Opens the bundle a second time.

        Args:
            engine: What serves.
            every: One row in so many is answered again, beginning with the first.
            ask: Answers texts with an engine, given the number of the first.
            options: How the job generates, if it does.

        Raises:
            InputError: The bundle's record is damaged.
        """
        bundle, variant = engine.bundle, engine.model.variant
        model = open_model(bundle, variant, SessionOptions("cpu", 1, optimisation="disable"))
        self.served = engine
        self.reference = Engine(bundle, model, batches=BatchOptions(rows=1, window=1))
        self.every = every
        self.ask = ask
        self.options = options or engine.default_options()
        self.rows = self.identical = self.ties = 0
        # Both sides may be as far from the truth as verification allows, in units of the error
        # that torch made on the recorded cases.
        cases = Reference.load(bundle.folder / REFERENCE).cases
        own = {
            name: max(truth.errors.get(name, 0.0) for _, truth in cases)
            for name in ("logits", "hidden")
        }
        tolerance = Tolerance.of(variant.precision)
        factor = 2 * tolerance.factor
        self.tolerance = Tolerance(factor, max(own["logits"], tolerance.floor))
        self.of_vectors = factor * max(own["hidden"], tolerance.floor)
        largest = max(float(np.abs(truth.oracle["logits"]).max(initial=0.0)) for _, truth in cases)
        # A log-probability is a logit less the logits' log-sum-exp: each may be off.
        self.of_log_probabilities = 2 * self.tolerance.budget(0.0) * largest

    def check(self, number: int, row: Row) -> None:
        """Answers a row again, if it is its turn.

        Args:
            number: Of the row in the job, from 0.
            row: What the job answers.

        Raises:
            ParityError: The answers differ by more than rounding explains.
        """
        if number % self.every:
            return
        self.rows += 1
        if row.error is not None and not row.source:
            self.identical += 1  # there was no text to answer
            return
        (again,) = self.ask(self.reference, iter([row.source]), number)
        if (row.error and row.error.kind) != (again.error and again.error.kind):
            difference = f"{row.error or 'an answer'}, but {again.error or 'an answer'}"
        elif row.error is not None:
            difference = ""
        elif isinstance(row, EmbeddingResult):
            difference = self._of_vectors(row, again)
        elif isinstance(row, FilledMaskResult):
            difference = self._of_candidates(row, again)
        else:
            difference = self._of_answers(number, row, again)
        if difference:
            raise ParityError(
                f"line {number + 1} is answered differently by the reference (CPU, no "
                f"optimisation): {difference}. {self.rows - 1} lines before it agreed. Verify the "
                "bundle on this provider: transferry verify --provider"
            )
        self.identical += 1

    def tally(self) -> dict[str, int]:
        """How many rows were answered again, and how they compared."""
        return {
            "canaries": self.rows,
            "canaries_identical": self.identical - self.ties,
            "canaries_tied": self.ties,
        }

    def _of_answers(self, number: int, row: GenerationResult, again: GenerationResult) -> str:
        tokens = [one.tokens for one in row.hypotheses]
        if tokens == [one.tokens for one in again.hypotheses]:
            for one, other in zip(row.hypotheses, again.hypotheses, strict=True):
                length = len(one.tokens) + 1
                allowed = length ** (1 - self.options.length_penalty) * self.of_log_probabilities
                if self.options.scores and not abs(one.score - other.score) <= allowed:
                    return (
                        f"score {one.score:.6f}, but {other.score:.6f}, at most {allowed:.1e} apart"
                    )
            return ""
        long_rows: LongRows = "truncate" if row.truncated else "error"
        (encoded,) = self.served.encode([row.source], self.options, long_rows)
        if encoded.error is not None:
            return self._of_pieces(number, row)
        divergence = explain(
            encoded.ids,
            self.served.fitted(self.options, len(encoded.ids)),
            again.hypotheses,
            row.hypotheses,
            self.reference.decoder,
            self.served.decoder,
            self.reference.decoder,
            self.served.bundle.tokenizer.special,
            self.tolerance,
            number,
        )
        if divergence.tie:
            self.ties += 1
            return ""
        return f"{row.text!r}, but {again.text!r} ({divergence})"

    def _of_pieces(self, number: int, row: GenerationResult) -> str:
        """As `_of_answers`, of a row that was split: what is joined tells nothing of near ties."""
        ties = self.ties
        for place, piece in enumerate(self.served.preprocessor.pieces(row.source)):
            first = number + place * PIECE
            (one,), (again,) = (
                self.ask(engine, iter([piece]), first) for engine in (self.served, self.reference)
            )
            if difference := self._of_answers(first, one, again):
                return f"piece {place + 1}: {difference}"
        self.ties = min(self.ties, ties + 1)
        return ""

    def _of_vectors(self, row: EmbeddingResult, again: EmbeddingResult) -> str:
        largest = np.abs(again.vector).max(initial=0.0)
        error = float(np.abs(row.vector - again.vector).max(initial=0.0) / (largest or 1.0))
        if error <= self.of_vectors:
            return ""
        return f"a vector {error:.1e} of its largest entry away, at most {self.of_vectors:.1e}"

    def _of_candidates(self, row: FilledMaskResult, again: FilledMaskResult) -> str:
        for place, (found, wanted) in enumerate(
            zip(row.candidates, again.candidates, strict=True), start=1
        ):
            known = {candidate.token: candidate.log_probability for candidate in wanted}
            best = found[0]
            margin = wanted[0].log_probability - known.get(best.token, -np.inf)
            error = abs(best.log_probability - known.get(best.token, np.inf))
            if not max(margin, error) <= self.of_log_probabilities:
                return f"mask {place} is {best.text!r}, but {wanted[0].text!r}"
            self.ties += int(best.token != wanted[0].token)
        return ""
