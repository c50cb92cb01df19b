"""Settings of a job: frozen descriptions, checked on construction."""

import codecs
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import msgspec

from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.engine.tasks.table import TASKS, TaskName, TaskOptions, check_options
from transferry.runtime.engine.tasks.task import OutputFormat
from transferry.runtime.errors import Option, UsageError, joined_options, require
from transferry.runtime.settings import MOST, check_fields, shown

InputFormat = Literal["text", "tsv", "csv", "jsonl", "parquet", "arrow", "xlsx", "openai"]
_Few = Annotated[int, msgspec.Meta(le=MOST)]

# Variables of schedulers: number of a task, number of tasks, and the first number. Kubernetes has
# none for the number of tasks, so the job's manifest gives it.
SCHEDULERS = (
    ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MIN"),
    ("JOB_COMPLETION_INDEX", "JOB_COMPLETIONS", ""),
    ("AWS_BATCH_JOB_ARRAY_INDEX", "AWS_BATCH_JOB_ARRAY_SIZE", ""),
    ("BATCH_TASK_INDEX", "BATCH_TASK_COUNT", ""),
    ("CLOUD_RUN_TASK_INDEX", "CLOUD_RUN_TASK_COUNT", ""),
    ("SLURM_PROCID", "SLURM_NTASKS", ""),
)


@dataclass(frozen=True)
class JobOptions(TaskOptions):
    """Settings of a job, with the options of its task.

    A job is resumed only with the settings that decide its output.

    Attributes:
        task: Task for each row. Default: by the bundle; see `default_task`.
        column: Field that holds the text; several are answered each. Default: text or source, or
            the only one.
        output_column: Name of the answer's column, given as often as --column. Default: text, or
            as the task has it.
        keep: Columns of the input that the output repeats, such as id,title. Default: all.
        drop: Columns of the input that the output leaves out.
        format_in: Format of the input; openai: OpenAI Batch API requests. Default: from its name.
        encoding: Encoding of the input, such as cp1252. Default: UTF-8, or by its byte order mark.
        delimiter: Character between columns of TSV and CSV, or tab. Default: found for CSV.
        sheet: Sheet of an .xlsx file. Default: the only one with rows.
        format: Format of the output. Default: openai for openai input, else from the file name,
            else text (scores: JSONL).
        limit: Limit on the rows read.
        partition: I/N: the I-th of N parts of the input, to use N machines; auto: by the variables
            of SLURM, Kubernetes and others.
        partition_by: Rows, counted first, or whole files. Default: rows, found by their bytes
            where that is possible.
        chunk_rows: Rows saved, and lost by an interruption, together.
        max_errors: Limit on the rows with errors.
        canary: 1/N: compute one row in N again on the reference, and compare.
        force: Replace an existing output, and an interrupted job with other settings.
    """

    task: TaskName | None = None
    column: tuple[str, ...] = ()
    output_column: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    format_in: InputFormat | None = None
    encoding: str | None = None
    delimiter: str | None = None
    sheet: str | None = None
    format: OutputFormat | None = None
    limit: _Few | None = None
    partition: str | None = None
    partition_by: Literal["rows", "file"] | None = None
    chunk_rows: _Few = 16384
    max_errors: _Few | None = None
    canary: str | None = None
    force: bool = False

    def __post_init__(self) -> None:
        for name in ("column", "output_column", "keep", "drop"):
            # One name may stand alone; a set, which has no order, is refused.
            if isinstance(value := getattr(self, name), str | set | frozenset | None):
                object.__setattr__(self, name, () if value is None else (value,))
        if isinstance(self.generation, GenerationOptions):
            object.__setattr__(self, "generation", asdict(self.generation))
        check_fields(self)
        if len(self.column) > 1 and self.target is not None:
            raise UsageError(
                *joined_options(["column", "target"]),
                " exclude each other where columns are several; name one column",
            )
        if self.task is not None:
            self._check_task(self.task)
        else:  # of the options together, those of generation alone can conflict
            TASKS["generate"].check(self)
        if self.encoding is not None:
            _require_encoding(self.encoding)
        named = self.dialect["delimiter"]
        require(
            named is None or (len(named) == 1 and named not in '"\r\n\0'),
            *("delimiter", "one character, or tab", shown(self.delimiter)),
        )
        require(self.limit is None or self.limit >= 1, "limit", "at least 1", self.limit)
        require(self.chunk_rows >= 1, "chunk_rows", "at least 1", self.chunk_rows)
        require((self.max_errors or 0) >= 0, "max_errors", "at least 0", self.max_errors)
        if self.partition == "auto":
            object.__setattr__(self, "partition", scheduled(os.environ))
        if self.partition_by is not None and self.partition is None:
            raise UsageError(Option("partition_by"), " has no effect without ", Option("partition"))
        if self.partition is not None:
            number, count = fraction(self.partition)
            expected = "I/N, such as 1/4 up to 4/4, or auto"
            require(number <= count, "partition", expected, shown(self.partition))
        if self.canary is not None:
            one, every = fraction(self.canary)
            require(one == 1 <= every, "canary", "1/N, such as 1/1000", shown(self.canary))

    def _check_task(self, task: TaskName) -> None:
        check_options(TASKS[task], self)
        if self.canary is not None and not TASKS[task].has_canary:
            raise UsageError(Option("canary"), f" has no effect on task {task}; leave it out")

    @property
    def dialect(self) -> dict[str, Any]:
        """How the input is read, where its format leaves that open; see `open_reader`."""
        named = {"tab": "\t", "\\t": "\t"}
        delimiter = self.delimiter and named.get(self.delimiter, self.delimiter)
        return {"encoding": self.encoding, "delimiter": delimiter, "sheet": self.sheet}


def _require_encoding(name: str) -> None:
    try:
        "\n".encode(name)
        # Those of idna and punycode cannot decode like that.
        codecs.getincrementaldecoder(name)("surrogatepass").decode(b"\n")
    except (LookupError, ValueError) as error:
        raise UsageError(
            Option("encoding"), f" must be one that Python has, such as cp1252, found {shown(name)}"
        ) from error


def scheduled(environment: Mapping[str, str]) -> str:
    """Returns the partition of this task of an array, as I/N.

    Raises:
        UsageError: No scheduler tells, or not all.
    """
    for place, count, first in SCHEDULERS:
        if (found := environment.get(place)) is None:
            continue
        told = environment if place == "SLURM_ARRAY_TASK_ID" else {}
        try:
            begin, total = int(environment.get(first) or 0), int(environment[count])
            step = int(told.get("SLURM_ARRAY_TASK_STEP") or 1)
            end = int(told.get("SLURM_ARRAY_TASK_MAX") or begin + (total - 1) * step)
            number, rest = divmod(int(found) - begin, step)
        except (KeyError, ValueError, ZeroDivisionError) as error:
            raise UsageError(
                f"{place} is set, and {count} is no number; set it to the number of tasks, or ",
                *("give ", Option("partition"), " I/N"),
            ) from error
        if rest or not 0 <= number < total or end != begin + (total - 1) * step:
            raise UsageError(
                f"{place} is {found}, and {count} {total}: expected an array without gaps; give ",
                *(Option("partition"), " I/N"),
            )
        return f"{number + 1}/{total}"
    known = ", ".join(place for place, _, _ in SCHEDULERS)
    raise UsageError(
        Option("partition"), f" auto needs a variable of a scheduler: {known}; ", "give I/N"
    )


def fraction(text: str) -> tuple[int, int]:
    """Reads "I/N" of nine digits at most; returns 1 and 0 for other text."""
    found = re.fullmatch(r"([1-9][0-9]{0,8})/([1-9][0-9]{0,8})", text.strip())
    return (int(found[1]), int(found[2])) if found else (1, 0)


@dataclass(frozen=True)
class RayOptions:
    """Where the chunks of a job are computed.

    Attributes:
        engine: This process (plain) or a Ray cluster (ray); its --out is a folder of chunks.
        ray_address: Ray cluster. Default: RAY_ADDRESS, else Ray on this machine.
        workers: Ray workers, each with the bundle open. Default: by cores or GPUs.
    """

    engine: Literal["plain", "ray"] = "plain"
    ray_address: str | None = None
    workers: Annotated[int, msgspec.Meta(le=10_000)] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.engine == "plain":
            for name in ("ray_address", "workers"):
                if getattr(self, name) is not None:
                    told = " has no effect without Ray; add "
                    raise UsageError(Option(name), told, Option("engine"), " ray")
        require(self.workers is None or self.workers >= 1, "workers", "at least 1", self.workers)
