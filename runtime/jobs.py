"""A job: every line of a file answered, in order, in another file, with a record of how."""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, BinaryIO, Generic, Literal, Protocol, TypeVar, cast

from transferry.runtime.canary import Canary, share
from transferry.runtime.embedding import embed
from transferry.runtime.engine import Engine, Output, Result
from transferry.runtime.errors import InputError, ParityError, UsageError
from transferry.runtime.files import atomic_file, read_lines
from transferry.runtime.fill_mask import fill_masks
from transferry.runtime.options import GenerationOptions
from transferry.runtime.rows import RowError
from transferry.runtime.scoring import Score, score
from transferry.runtime.writers import NpyVectors, ParquetVectors, Writer, lines_of

Format = Literal["jsonl", "text", "npy", "parquet"]
# What each task can write.
FORMATS: dict[str, tuple[Format, ...]] = {
    "generate": ("jsonl", "text"),
    "fill-mask": ("jsonl", "text"),
    "embed": ("npy", "parquet", "jsonl"),
}
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


class Row(Protocol):
    """What became of a line, whatever the task."""

    @property
    def error(self) -> RowError | None:
        """None where there is an answer."""
        ...

    @property
    def source_tokens(self) -> int:
        """Tokens read."""
        ...

    @property
    def target_tokens(self) -> int:
        """Tokens given or scored."""
        ...


AnyRow = TypeVar("AnyRow", bound=Row)


@dataclass(frozen=True)
class Job(Generic[AnyRow]):
    """One run over a file.

    Attributes:
        answer: Turns lines into as many rows, in order.
        source: Plain or gzip lines; "-" is stdin.
        sink: Where the answers go, gzip if its name ends in .gz; "-" is stdout. A file appears
            only when the last answer is in it.
        writer: Writes rows to the opened sink.
        force: Replace a sink that exists.
        canary: Answers some of the rows again.
    """

    answer: Callable[[Iterator[str]], Iterator[AnyRow]]
    source: Path
    sink: Path
    writer: Callable[[BinaryIO], Writer[AnyRow]]
    force: bool = False
    canary: Canary | None = None

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
            ParityError: The canary found a defect. What was answered before is kept, in a file
                whose name ends in .partial.
        """
        summary = Summary()
        started = time.monotonic()
        with _opened(self.sink) as file:
            writer = self.writer(file)
            for number, row in enumerate(self.answer(read_lines(self.source))):
                self._check(number, row, writer)
                writer.write(number, row)
                summary.rows += 1
                if row.error is not None:
                    summary.errors += 1
                    where = f"line {number + 1}: {row.error.message}"
                    summary.first_error = summary.first_error or where
                summary.source_tokens += row.source_tokens
                summary.target_tokens += row.target_tokens
                summary.seconds = time.monotonic() - started
                watch(summary)
            writer.close()
        return summary

    def _check(self, number: int, row: Any, writer: Writer[AnyRow]) -> None:
        if self.canary is None:
            return
        try:
            self.canary.check(number, row)
        except ParityError as error:
            writer.close()
            if self.sink == STANDARD_STREAM:
                raise
            raise ParityError(
                f"{error}; the {number} rows before it are kept in {_partial(self.sink)}"
            ) from error


def generation(
    engine: Engine,
    source: Path,
    sink: Path,
    options: GenerationOptions,
    format: Format = "jsonl",
    force: bool = False,
) -> Job[Result]:
    """Returns the job that answers each line by generation, an object or a text a line."""
    to_line = partial(to_json, n_best=options.n_best) if format == "jsonl" else to_text
    return Job(
        lambda lines: engine.generate(lines, options), source, sink, lines_of(to_line), force
    )


def job_of(
    engine: Engine,
    source: Path,
    sink: Path,
    options: Mapping[str, Any],
    generation_options: Mapping[str, Any],
) -> Job[Any]:
    """Returns the job that the options of `transferry run` describe.

    Args:
        engine: What answers.
        source: The lines.
        sink: Where the answers go.
        options: format, task, prefix, pooling, normalise, mask, top, canary and force.
        generation_options: Fields of GenerationOptions that were given.

    Raises:
        UsageError: The task is not the bundle's, the format is not the task's, or the sink would
            be lost.
    """
    task = options["task"]
    format = options["format"] or guess_format(sink)
    if format not in FORMATS[task]:
        raise UsageError(
            f"task {task} writes {' or '.join(FORMATS[task])}, not {format}; name another --out or "
            "--format"
        )
    if task != "generate" and generation_options:
        name = next(iter(generation_options))
        raise UsageError(f"task {task} generates nothing, so {name} has no effect; leave it out")
    chosen, force = engine.default_options(), options["force"]
    ask: Callable[[Engine, Iterator[str], int], Iterator[Any]]
    job: Job[Any]
    if task == "generate":
        prefix = tuple(engine.bundle.tokenizer.encode_target(options["prefix"]))
        chosen = replace(chosen, **generation_options, prefix=prefix)
        job = generation(engine, source, sink, chosen, format, force)

        def ask(engine: Engine, lines: Iterator[str], first: int) -> Iterator[Any]:
            return engine.generate(lines, chosen, first_row=first)

    else:
        _ = engine.encoder  # refuses another architecture before anything is opened
        if task == "fill-mask":
            answer: Callable[..., Iterator[Any]] = partial(
                fill_masks, mask=options["mask"], top=options["top"]
            )
            writer = lines_of(to_record if format == "jsonl" else to_text)
        else:
            answer = partial(embed, pooling=options["pooling"], normalise=options["normalise"])
            writer = _vectors(engine, sink, format)
        job = Job(partial(answer, engine), source, sink, writer, force)

        def ask(engine: Engine, lines: Iterator[str], first: int) -> Iterator[Any]:
            return answer(engine, lines)

    if options["canary"]:
        job = replace(job, canary=Canary(engine, share(options["canary"]), ask, chosen))
    return job


def _vectors(engine: Engine, sink: Path, format: Format) -> Callable[[BinaryIO], Writer[Any]]:
    if format == "jsonl":
        return lines_of(to_record)
    if sink == STANDARD_STREAM:
        raise UsageError(f"{format} cannot go to standard output; name a file with --out")
    width = int(engine.bundle.manifest.model["d_model"])
    vectors = NpyVectors if format == "npy" else ParquetVectors
    return lambda file: vectors(file, width)


@dataclass(frozen=True)
class Scoring(Job[Score]):
    """The job that scores each line."""

    counts: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def marks(self) -> dict[str, float]:
        """Tokens scored, their log-probability in nats, and the perplexity of all together."""
        total, tokens = self.counts
        perplexity = math.exp(-total / tokens) if tokens else math.nan
        return {
            "scored_tokens": int(tokens),
            "log_probability": round(total, 6),
            "perplexity": round(perplexity, 6),
        }


def scoring(
    engine: Engine, source: Path, target: Path | None, sink: Path, *, force: bool
) -> Scoring:
    """Returns the job that scores texts, or pairs where the bundle has an encoder.

    Raises:
        UsageError: A target is missing or too much, or the sink would be lost.
    """
    if engine.decoder.has_encoder is (target is None):
        need = "needs --target" if target is None else "takes no --target"
        architecture = engine.bundle.manifest.architecture
        raise UsageError(f"{engine.bundle.folder} is {architecture} and {need}")
    counts = [0.0, 0.0]

    def answer(lines: Iterator[str]) -> Iterator[Score]:
        targets: Iterator[str | None] = repeat(None) if target is None else read_lines(target)
        for row in score(engine, _pairs(lines, targets, source, target)):
            counts[0] += row.total
            counts[1] += row.target_tokens
            yield row

    return Scoring(answer, source, sink, lines_of(to_record), force, counts=counts)


def _pairs(
    lines: Iterator[str], targets: Iterator[str | None], source: Path, target: Path | None
) -> Iterator[tuple[str, str | None]]:
    missing = object()
    for number, line in enumerate(lines, start=1):
        other = next(targets, missing)
        if other is missing:
            raise InputError(
                f"{target} ends before line {number} of {source}; give files of equal length"
            )
        yield line, cast("str | None", other)
    if target is not None and next(targets, missing) is not missing:
        raise InputError(f"{source} ends before {target}; give files of equal length")


def guess_format(sink: Path) -> Format:
    """Returns the format that a file's name tells, and "text" where it tells none."""
    suffix = Path(sink.name.removesuffix(".gz")).suffix.removeprefix(".")
    return cast(Format, suffix) if suffix in ("jsonl", "npy", "parquet") else "text"


def to_json(number: int, result: Result, n_best: int) -> str:
    """Returns a result as one line of JSON; `n_best` is there only if more than one was asked."""
    record: dict[str, Any] = {"id": number, "source": result.source, "text": result.text}
    if result.outputs:
        best = result.outputs[0]
        record["score"] = _score(best)
        record["finish_reason"] = best.finish_reason
        record["target_tokens"] = len(best.tokens)
    else:
        record["finish_reason"] = "error"
    if result.error is not None:
        record["error"] = result.error.record()
    record["source_tokens"] = result.source_tokens
    if n_best > 1:
        record["n_best"] = [
            {
                "text": output.text,
                "score": _score(output),
                "finish_reason": output.finish_reason,
            }
            for output in result.outputs
        ]
    return json.dumps(record, ensure_ascii=False)


def _score(output: Output) -> float | None:
    """Returns the score; None where there is none, since JSON has no NaN."""
    return None if math.isnan(output.score) else round(output.score, 6)


def to_text(number: int, row: HasText) -> str:
    """Returns the best answer as one line: a line break inside it becomes a space."""
    return " ".join(row.text.splitlines())


def to_record(number: int, row: HasRecord) -> str:
    """Returns a row as one line of JSON."""
    return json.dumps({"id": number, **row.record()}, ensure_ascii=False)


class HasText(Row, Protocol):
    """A row whose answer is a text."""

    @property
    def text(self) -> str:
        """The answer, or nothing on an error."""
        ...


class HasRecord(Row, Protocol):
    """A row that can be written as JSON."""

    def record(self) -> dict[str, Any]:
        """Returns the row as JSON values."""
        ...


def _partial(sink: Path) -> Path:
    return sink.with_name(sink.name + ".partial")


@contextlib.contextmanager
def _opened(sink: Path) -> Iterator[BinaryIO]:
    if sink == STANDARD_STREAM:
        with _standard_output() as file:
            yield file
        return
    with atomic_file(sink, kept=(ParityError, _partial(sink))) as file:
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
