"""What may be set about a job: one frozen description, checked once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from transferry.runtime.engine.preprocess import LongRows
from transferry.runtime.errors import UsageError

Task = Literal["generate", "embed", "fill-mask", "score"]
SourceFormat = Literal["text", "tsv", "csv", "jsonl", "parquet"]
SinkFormat = Literal["text", "jsonl", "tsv", "csv", "parquet", "npy"]


@dataclass(frozen=True)
class JobOptions:
    """Settings of a job. What may change the output is part of what a job must go on with.

    Attributes:
        task: what is done with each row; embed and fill-mask are an encoder-only bundle's.
        generation: fields of GenerationOptions, over the bundle's defaults.
        prefix: text that every answer begins with.
        pooling: of embed: over all tokens, or the first one.
        normalise: of embed: vectors of length 1.
        mask: of fill-mask: what is filled in.
        top: of fill-mask: candidates for each mask.
        target: of score: the other side of the pairs, in a file of the same format.
        column: the field that holds the text; the others pass through. By default text or
            source, or the only one.
        format_in: how the input is written; by default as its name ends, else text.
        format: how the output is written; by default as its name ends, else text, or JSONL of
            scores.
        long_rows: what happens to a row that is longer than the model's positions: it is an error,
            it is cut, or it is split into sentences and their answers are joined.
        shard: I/N: only the I-th of N parts of the input, for N machines.
        shard_rows: rows that are saved together; what an interruption may cost.
        max_errors: stop when more rows than this are bad.
        canary: 1/N: answer one row in N again on the reference, and compare.
        force: replace the output if it exists, and an interrupted job that does not fit.
    """

    task: Task = "generate"
    generation: Mapping[str, Any] = field(default_factory=dict)
    prefix: str = ""
    pooling: Literal["mean", "first"] = "mean"
    normalise: bool = False
    mask: str = "[MASK]"
    top: int = 5
    target: Path | None = None
    column: str | None = None
    format_in: SourceFormat | None = None
    format: SinkFormat | None = None
    long_rows: LongRows = "error"
    shard: str | None = None
    shard_rows: int = 16384
    max_errors: int | None = None
    canary: str | None = None
    force: bool = False

    def __post_init__(self) -> None:
        """Refuses what cannot be.

        Raises:
            UsageError: A value is out of its range, or has no effect.
        """
        if self.task != "generate" and self.generation:
            name = next(iter(self.generation))
            raise UsageError(
                f"task {self.task} generates nothing, so {name} has no effect; leave it out"
            )
        if self.task == "score" and self.canary is not None:
            raise UsageError("task score has no canary; leave it out")
        if self.shard_rows < 1:
            raise UsageError(f"shard-rows must be at least 1, not {self.shard_rows}")
        if self.max_errors is not None and self.max_errors < 0:
            raise UsageError(f"max-errors must be at least 0, not {self.max_errors}")
        _ = self.share

    @property
    def share(self) -> tuple[int, int] | None:
        """I and N of `shard`."""
        if self.shard is None:
            return None
        found = re.fullmatch(r"([1-9][0-9]*)/([1-9][0-9]*)", self.shard.strip())
        if not found or int(found[1]) > int(found[2]):
            raise UsageError(f"shard must be I/N, such as 1/4 up to 4/4, found {self.shard!r}")
        return int(found[1]), int(found[2])


@dataclass(frozen=True)
class RayOptions:
    """Which processes do the work of a job.

    Attributes:
        engine: plain is this process; ray are the workers of Ray, which write shards into the
            folder --out.
        ray_address: of a Ray cluster; by default RAY_ADDRESS, or Ray on this machine alone.
        workers: of ray: how many processes open the bundle; by default as many as there are cores
            or GPUs for.
    """

    engine: Literal["plain", "ray"] = "plain"
    ray_address: str | None = None
    workers: int | None = None

    def __post_init__(self) -> None:
        """Refuses what cannot be.

        Raises:
            UsageError: A value is out of its range, or has no effect.
        """
        if self.engine == "plain":
            for name in ("ray_address", "workers"):
                if getattr(self, name) is not None:
                    option = name.replace("_", "-")
                    raise UsageError(f"{option} has no effect without Ray; add --engine ray")
        if self.workers is not None and self.workers < 1:
            raise UsageError(f"workers must be at least 1, not {self.workers}")
