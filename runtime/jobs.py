"""A job: every line of a file answered, in order, in another file, with a record of how."""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from transferry.runtime.engine import Engine, Result
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.files import atomic_file, read_lines
from transferry.runtime.options import GenerationOptions

Format = Literal["jsonl", "text"]
STANDARD_STREAM = Path("-")


@dataclass
class Summary:
    """What a job has done so far.

    Attributes:
        rows: Lines answered, errors included.
        errors: Of them, those that have an error instead of an answer.
        source_tokens: Tokens read, end tokens included.
        target_tokens: Tokens of the best answers, end tokens left out.
        seconds: Since the first line was asked for.
        first_error: Where and what the first error is.
    """

    rows: int = 0
    errors: int = 0
    source_tokens: int = 0
    target_tokens: int = 0
    seconds: float = 0.0
    first_error: str = ""

    def to_dict(self) -> dict[str, float]:
        """Returns the counts, with rates a second."""
        seconds = max(self.seconds, 1e-9)
        return {
            "rows": self.rows,
            "errors": self.errors,
            "source_tokens": self.source_tokens,
            "target_tokens": self.target_tokens,
            "seconds": round(self.seconds, 3),
            "rows_per_second": round(self.rows / seconds, 1),
            "target_tokens_per_second": round(self.target_tokens / seconds, 1),
        }


@dataclass(frozen=True)
class Job:
    """One run of an engine over a file.

    Attributes:
        engine: What answers.
        source: Plain or gzip lines; "-" is stdin.
        sink: Where the answers go, gzip if its name ends in .gz; "-" is stdout. A file appears
            only when the last answer is in it.
        options: How to search.
        format: "jsonl", one object a line, or "text", the best answer a line.
        force: Replace a sink that exists.
    """

    engine: Engine
    source: Path
    sink: Path
    options: GenerationOptions
    format: Format = "jsonl"
    force: bool = False

    def __post_init__(self) -> None:
        """Refuses to lose a file.

        Raises:
            UsageError: The sink exists and `force` is off, or it is the source, or it is a folder
                or a device.
        """
        if self.sink == STANDARD_STREAM:
            return
        if not self.sink.exists():
            return
        if self.source.exists() and self.sink.samefile(self.source):
            raise UsageError(f"{self.sink} is the input; name another file for the output")
        if not self.sink.is_file():
            raise UsageError(f"{self.sink} is no file, so it is not replaced; name another")
        if not self.force:
            raise UsageError(f"{self.sink} exists already; add --force to replace it")

    def run(self, watch: Callable[[Summary], None] = lambda summary: None) -> Summary:
        """Answers every line.

        Args:
            watch: Called with the counts so far after each answer.

        Raises:
            InputError: The source cannot be read or the sink cannot be written; no sink appears.
        """
        summary = Summary()
        started = time.monotonic()
        write = to_json if self.format == "jsonl" else to_text
        with _opened(self.sink) as file:
            results = self.engine.generate(read_lines(self.source), self.options)
            for number, result in enumerate(results):
                file.write(write(number, result, self.options.n_best).encode())
                summary.rows += 1
                if result.error is not None:
                    summary.errors += 1
                    where = f"line {number + 1}: {result.error.message}"
                    summary.first_error = summary.first_error or where
                summary.source_tokens += result.source_tokens
                if result.outputs:
                    summary.target_tokens += len(result.outputs[0].tokens)
                summary.seconds = time.monotonic() - started
                watch(summary)
        return summary


def guess_format(sink: Path) -> Format:
    """Returns "jsonl" for names ending in .jsonl or .jsonl.gz, and "text" for all others."""
    return "jsonl" if sink.name.removesuffix(".gz").endswith(".jsonl") else "text"


def to_json(number: int, result: Result, n_best: int) -> str:
    """Returns a result as one line of JSON; `n_best` is there only if more than one was asked."""
    record: dict[str, Any] = {"id": number, "source": result.source, "text": result.text}
    if result.outputs:
        best = result.outputs[0]
        record["score"] = round(best.score, 6)
        record["finish_reason"] = best.finish_reason
        record["target_tokens"] = len(best.tokens)
    else:
        record["finish_reason"] = "error"
    if result.error is not None:
        record["error"] = {"kind": result.error.kind, "message": result.error.message}
    record["source_tokens"] = result.source_tokens
    if n_best > 1:
        record["n_best"] = [
            {
                "text": output.text,
                "score": round(output.score, 6),
                "finish_reason": output.finish_reason,
            }
            for output in result.outputs
        ]
    return json.dumps(record, ensure_ascii=False) + "\n"


def to_text(number: int, result: Result, n_best: int) -> str:
    """Returns the best answer as one line: a line break inside it becomes a space."""
    return " ".join(result.text.splitlines()) + "\n"


@contextlib.contextmanager
def _opened(sink: Path) -> Iterator[BinaryIO]:
    if sink == STANDARD_STREAM:
        with _standard_output() as file:
            yield file
        return
    with atomic_file(sink) as file:
        if sink.suffix != ".gz":
            yield file
            return
        # No name and no time inside, so that the same answers are the same bytes.
        with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as packed:
            yield cast(BinaryIO, packed)


@contextlib.contextmanager
def _standard_output() -> Iterator[BinaryIO]:
    try:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
    except OSError as error:
        if error.errno == errno.EPIPE:  # whoever reads has had enough
            raise
        # Python writes what is left once more when it ends, and must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise InputError(
            f"standard output: cannot be written: {error.strerror}. Free some space or choose "
            "another place."
        ) from error
