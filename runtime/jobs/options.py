"""Settings of a job: frozen descriptions, checked on construction."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from transferry.runtime.engine.preprocess import LongRows
from transferry.runtime.errors import UsageError, require

TaskName = Literal["generate", "embed", "fill-mask", "score"]
InputFormat = Literal["text", "tsv", "csv", "jsonl", "parquet"]
OutputFormat = Literal["text", "jsonl", "tsv", "csv", "parquet", "npy"]


@dataclass(frozen=True)
class JobOptions:
    """Settings of a job. A job is resumed only with the settings that decide its output.

    Attributes:
        task: what to do with each row; embed and fill-mask need an encoder-only bundle.
        generation: fields of GenerationOptions that replace the bundle's defaults.
        prefix: text that every output begins with.
        pooling: for embed: mean over all tokens, or the first one.
        normalise: for embed: scale vectors to length 1.
        mask: for fill-mask: the text that stands for a masked token.
        top: for fill-mask: candidates per mask.
        target: for score: file with the other side of the pairs, in the format of the input.
        column: field that holds the text; others are passed through. Default: text or source, or
            the only one.
        format_in: format of the input. Default: from its name, else text.
        format: format of the output. Default: from its name, else text, or JSONL for scores.
        long_rows: what to do with a row longer than the model's positions: report an error,
            truncate it, or split it into sentences and join their outputs.
        partition: I/N: only the I-th of N parts of the input, to use N machines.
        chunk_rows: rows saved together, and lost together by an interruption.
        max_errors: stop when more rows than this have errors.
        canary: 1/N: compute one row in N again on the reference, and compare.
        force: replace an existing output, and an interrupted job with other settings.
    """

    task: TaskName = "generate"
    generation: Mapping[str, Any] = field(default_factory=dict)
    prefix: str = ""
    pooling: Literal["mean", "first"] = "mean"
    normalise: bool = False
    mask: str = "[MASK]"
    top: int = 5
    target: Path | None = None
    column: str | None = None
    format_in: InputFormat | None = None
    format: OutputFormat | None = None
    long_rows: LongRows = "error"
    partition: str | None = None
    chunk_rows: int = 16384
    max_errors: int | None = None
    canary: str | None = None
    force: bool = False

    def __post_init__(self) -> None:
        if self.task != "generate" and self.generation:
            name = next(iter(self.generation))
            raise UsageError(
                f"task {self.task} generates nothing, so {name} has no effect; leave it out"
            )
        if self.task == "score" and self.canary is not None:
            raise UsageError("task score has no canary; leave it out")
        require(self.chunk_rows >= 1, "chunk_rows", "at least 1", self.chunk_rows)
        require((self.max_errors or 0) >= 0, "max_errors", "at least 0", self.max_errors)
        if self.partition is not None:
            number, count = fraction(self.partition)
            expected = "I/N, such as 1/4 up to 4/4"
            require(number <= count, "partition", expected, repr(self.partition))
        if self.canary is not None:
            one, every = fraction(self.canary)
            require(one == 1 <= every, "canary", "1/N, such as 1/1000", repr(self.canary))


def fraction(text: str) -> tuple[int, int]:
    """Reads "I/N"; returns 1 and 0 for other text."""
    found = re.fullmatch(r"([1-9][0-9]*)/([1-9][0-9]*)", text.strip())
    return (int(found[1]), int(found[2])) if found else (1, 0)


@dataclass(frozen=True)
class RayOptions:
    """Where the chunks of a job are computed.

    Attributes:
        engine: plain is this process, ray are workers of Ray; these write their chunks into the
            folder --out.
        ray_address: address of a Ray cluster. Default: RAY_ADDRESS, else Ray on this machine.
        workers: Ray workers, each of which opens the bundle. Default: depends on the cores or GPUs.
    """

    engine: Literal["plain", "ray"] = "plain"
    ray_address: str | None = None
    workers: int | None = None

    def __post_init__(self) -> None:
        if self.engine == "plain":
            for name in ("ray_address", "workers"):
                if getattr(self, name) is not None:
                    option = name.replace("_", "-")
                    raise UsageError(f"{option} has no effect without Ray; add --engine ray")
        require(self.workers is None or self.workers >= 1, "workers", "at least 1", self.workers)
