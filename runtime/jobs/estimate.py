"""Estimated time and tokens of a job, from a sample of its rows."""

from __future__ import annotations

import random
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from transferry.runtime.jobs.formats.rows import InputRow
from transferry.runtime.jobs.job import Job
from transferry.runtime.tables import counted

SAMPLE = 256


@dataclass(frozen=True)
class Estimate:
    """Estimate of a whole job on this machine.

    Attributes:
        rows: Rows of the input.
        sampled: Rows that were computed for the estimate.
        bad_rows: Rows that will hold an error.
        source_tokens: Tokens to read.
        target_tokens: Tokens to generate, fill in or score.
        seconds: Time, with as many engines as workers.
        memory: Largest resident memory of this process so far, in bytes; None where the system
            does not say. A job of any length needs little more.
        workers: Processes that compute.
        cluster: Words on the cluster of a job on Ray.
    """

    rows: int
    sampled: int
    bad_rows: int
    source_tokens: int
    target_tokens: int
    seconds: float
    memory: int | None
    workers: int = 1
    cluster: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Returns the estimate as JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        whole, on_ray = timedelta(seconds=round(self.seconds)), bool(self.cluster)
        lasts = f"about {whole} h" if whole else "less than a second"
        lines = [
            f"{counted(self.rows, 'row')}, about {self.source_tokens:,} tokens to read and "
            f"{self.target_tokens:,} to write, {counted(self.bad_rows, 'error')}",
            f"{lasts} ({self.rows / self.seconds:,.1f} rows/s)" if self.seconds else lasts,
        ]
        if self.memory is not None:
            lines.append(f"about {self.memory / 1e9:.1f} GB of memory{' a worker' * on_ray}")
        lines += [self.cluster] * on_ray
        lines.append(f"estimated from {counted(self.sampled, 'row')}; nothing was written")
        return "\n".join(lines)


def estimate(job: Job, most: int = SAMPLE) -> Estimate:
    """Reads all rows, computes at most `most` drawn at random, and writes nothing."""
    workers, cluster = job.runner.outlook(job)
    draw, sample, rows = random.Random(0), list[InputRow](), 0
    for row in job.rows(*job.row_range):  # algorithm R: each row is drawn as likely as any other
        rows += 1
        if len(sample) < most:
            sample.append(row)
        elif (place := draw.randrange(rows)) < most:
            sample[place] = row
    sample.sort(key=lambda row: row.number)
    began = time.monotonic()
    found = [result for _, result in job.results(iter(sample), 0)]
    seconds = time.monotonic() - began
    each = rows / max(1, len(sample))
    return Estimate(
        rows,
        len(sample),
        round(each * sum(result.error is not None for result in found)),
        round(each * sum(result.source_tokens for result in found)),
        round(each * sum(result.target_tokens for result in found)),
        round(each * seconds / workers, 3),
        _peak_memory(),
        workers,
        cluster,
    )


def _peak_memory() -> int | None:
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10  # kilobytes on Linux
