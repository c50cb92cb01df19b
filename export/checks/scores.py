"""Scores of given texts, as `score` serves them, beside the oracle's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from transferry.export.checks.check import Check, Findings
from transferry.export.oracle.oracle import Oracle
from transferry.runtime.engine.engine import Engine
from transferry.runtime.engine.tasks.score import TOO_SHORT, Pair, score
from transferry.runtime.proof.compare import Comparison, limited
from transferry.runtime.proof.divergence import RankErrors, forced

ROWS = 64  # scored by the oracle at once


def scores(oracle: Oracle, engine: Engine, pairs: Sequence[Pair]) -> Check:
    """Returns the check of the log-probability of each token; see `compare_scores`."""

    def run(so_far: Findings) -> Iterator[Findings]:
        yield Findings(comparisons=compare_scores(oracle, engine, pairs))

    return Check("scores", run)


def compare_scores(oracle: Oracle, engine: Engine, pairs: Sequence[Pair]) -> list[Comparison]:
    """Compares the log-probability of each token, in units of the logits there.

    Args:
        oracle: The reference.
        engine: The bundle as it is served.
        pairs: As for `score`.

    Returns:
        The token nearest to its limit, or beyond it, of each batch of the oracle's.
    """
    comparisons = []
    rows = list(enumerate(score(engine, pairs, long_rows="truncate")))
    found = [(number, row) for number, row in rows if row.error is None]
    for first in range(0, len(found), ROWS):
        batch = found[first : first + ROWS]
        name = f"text, scores of rows {batch[0][0]} to {batch[-1][0]}"
        encoded = engine.preprocessor.encode([row.source for _, row in batch], "truncate")
        # Of a text all tokens but the first are scored.
        read = None if oracle.config.encoder_layers else 1
        sources, answers = [row.ids[:read] for row in encoded], [row.tokens for _, row in batch]
        exact, *sides = (
            forced(side, sources, answers, oracle.special)
            for side in (oracle.exact, oracle.reference, *oracle.others)
        )
        worst: list[tuple[float, float]] = []
        for one, (_, row), *moved in zip(exact, batch, *sides, strict=True):
            own = RankErrors.of(one, moved, oracle.tolerance.floor)
            errors = np.abs(row.log_probabilities - one.log_probabilities)
            units = own.floor / oracle.tolerance.floor
            allowed = [own.allowed(oracle.tolerance, slice(n, n + 1)) for n in range(len(errors))]
            worst += zip((errors / units).tolist(), (allowed / units).tolist(), strict=True)
        # Unlike max(), argmax finds NaN.
        error, budget = worst[int(np.argmax([error / allowed for error, allowed in worst]))]
        own_error = budget / oracle.tolerance.factor
        comparisons.append(limited(name, "scores", "text", error, own_error, budget))
    failed = [(number, row.error) for number, row in rows if row.error not in (None, TOO_SHORT)]
    if failed:
        fault = f"row {failed[0][0]} and {len(failed) - 1} more were not scored: {failed[0][1]}"
        comparisons.append(Comparison("text", "scores", "text", np.inf, 0.0, 0.0, fault))
    return comparisons
