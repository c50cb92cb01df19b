"""Rows in padded batches beside the same rows alone: no answer may depend on its neighbours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from transferry.export.checks.check import INDEPENDENCE, Check, Findings, failed
from transferry.export.subject.decoder import Padding
from transferry.export.subject.session import ForeignGraph
from transferry.export.subject.subject import Subject
from transferry.runtime.errors import InputError
from transferry.runtime.proof.compare import Tolerance, limited
from transferry.runtime.proof.report import Claim
from transferry.runtime.proof.units import Units

BATCH = 8  # rows of a batch that is compared with the same rows alone
DECLARED = "declared types and shapes"


def independence(
    subject: Subject[Any],
    rows: Sequence[Sequence[int]],
    sides: Sequence[Padding],
    tolerance: Tolerance,
) -> list[Check]:
    """Returns checks of rows of text in padded batches beside the same rows alone.

    The limit is float32's, times torch's worst error on cases of random tokens. Graphs of a
    coarser precision round a row otherwise in a batch, and dynamic int8 by the batch's scale: twice
    their own error is the limit, which two runs within that error of torch cannot exceed.

    Args:
        subject: Foreign graphs.
        rows: Token ids of each text.
        sides: Sides on which batches are padded.
        tolerance: The largest limit.
    """
    return [
        Check(f"batches padded {side}", partial(_padded, subject, rows, side, tolerance))
        for side in (sides if rows else ())
    ]


def _padded(
    subject: Subject[Any],
    rows: Sequence[Sequence[int]],
    side: Padding,
    tolerance: Tolerance,
    so_far: Findings,
) -> Iterator[Findings]:
    compared = [item for item in so_far.comparisons if INDEPENDENCE not in item.case]
    own = [item.reference_error for item in compared if item.stage != "text"]
    worst: dict[str, tuple[float, int]] = {}
    for first in range(0, len(rows), BATCH):
        batch = rows[first : first + BATCH]
        try:
            together = subject.model.read(batch, side)
            alone = [subject.model.read([row], side)[0] for row in batch]
        except InputError as error:
            shown = f"rows {first} to {first + len(batch) - 1}, batches padded {side}"
            yield Findings(comparisons=[failed(shown, "text", error)])
            continue
        for number, (one, other) in enumerate(zip(alone, together, strict=True)):
            for name, wanted in one.items():
                units = Units.of(wanted, logits=name == "logits")
                distance = units.largest_error(other[name])
                if not distance <= worst.get(name, (-1.0, 0))[0]:
                    worst[name] = (distance, first + number)
    largest = max(own, default=0.0)
    least, most = Tolerance().budget(largest), tolerance.budget(largest)
    found = []
    for name, (distance, row) in worst.items():
        twice = 2 * max((item.error for item in compared if item.tensor == name), default=0.0)
        shown = f"row {row}{INDEPENDENCE}batches padded {side}"
        budget = max(least, min(twice, most))
        found.append(limited(shown, name, "text", distance, largest, budget))
    yield Findings(comparisons=found)


def declared(graphs: Sequence[ForeignGraph]) -> Claim:
    """Returns the outputs whose declared type or shape differs from the observed one."""
    found = [
        f"{graph.graph.path.name}: {name} {problem}"
        for graph in graphs
        for name, problem in graph.lies.items()
    ]
    return Claim(DECLARED, "; ".join(found))
