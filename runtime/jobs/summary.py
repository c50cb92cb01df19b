"""Summary of a job: counts of rows, tokens and errors, versions and hashes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from transferry.runtime.engine.result import PartsResult, RowResult
from transferry.runtime.errors import InputError
from transferry.runtime.io.documents import checked, read_document
from transferry.runtime.tables import counted

SUMMARY = ".summary.json"
# A larger mean has a perplexity above the largest float64.
MOST_NATS = 709.0


@dataclass
class Tally:
    """Counts over rows.

    Attributes:
        rows: Rows computed, errors included.
        errors: Errors by kind; a row with several texts may have several.
        truncated: Rows whose text was cut short.
        source_tokens: Tokens read, end tokens included.
        target_tokens: Tokens of the best outputs, end tokens excluded; or tokens scored.
        log_probability: Sum over all tokens scored, in nats.
        seconds: Time taken.
        first_error: Position and message of the first error.
        repeated: Rows equal to an earlier row of their chunk, errors and samples aside.
        shared_prompt_tokens: Tokens of prompts that were copied from a row of the same batch that
            begins alike. Depends on the batches, as the speed does.
        special_texts: Rows with text that looks like a special token of the model's tokenizer.
        bad_rows: Rows with an error.
        repeated_ids: Requests with the custom_id of an earlier one of their chunk.
        first_repeated_id: The first such id.
    """

    rows: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    truncated: int = 0
    source_tokens: int = 0
    target_tokens: int = 0
    log_probability: float = 0.0
    seconds: float = 0.0
    first_error: str = ""
    repeated: int = 0
    shared_prompt_tokens: int = 0
    special_texts: int = 0
    bad_rows: int = 0
    repeated_ids: int = 0
    first_repeated_id: str = ""

    @classmethod
    def of(
        cls, number: int, result: RowResult, seconds: float, columns: Sequence[str] = ()
    ) -> Tally:
        """Counts the row of a number, perhaps with a result for each of several columns."""
        parts = result.parts if len(columns) > 1 and isinstance(result, PartsResult) else (result,)
        failed = [(place, each.error) for place, each in enumerate(parts) if each.error is not None]
        kinds, first_error = [error.kind for _, error in failed], ""
        if failed:
            place, error = failed[0]
            where = f", column {columns[place]}" if len(parts) > 1 else ""
            first_error = f"row {number + 1}{where}: {error.message}"
        return Tally(
            rows=1,
            bad_rows=int(bool(kinds)),
            errors={kind: kinds.count(kind) for kind in kinds},
            truncated=int(result.truncated),
            shared_prompt_tokens=result.shared_prompt_tokens,
            source_tokens=result.source_tokens,
            target_tokens=result.target_tokens,
            log_probability=result.total,
            seconds=seconds,
            first_error=first_error,
        )

    def add(self, other: Tally) -> None:
        """Adds other counts to these."""
        for kind, count in other.errors.items():
            self.errors[kind] = self.errors.get(kind, 0) + count
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in _FIRSTS:
            setattr(self, name, getattr(self, name) or getattr(other, name))


# Fields of a tally that keep their first value, and fields that add up.
_FIRSTS = ("first_error", "first_repeated_id")
_SUMS = [field.name for field in fields(Tally) if field.name not in ("errors", *_FIRSTS)]
# Counts in the order of OUT.summary.json.
_RECORDED = (
    *("rows", "bad_rows", "errors", "first_error", "truncated", "repeated"),
    *("shared_prompt_tokens", "special_texts", "source_tokens", "target_tokens"),
)


@dataclass
class Summary(Tally):
    """Counts of a whole job, finished or in progress.

    Attributes:
        saved: Rows of finished chunks, which an interruption cannot lose.
        resumed: Number of runs that continued the work of an earlier run.
        finished_before: Whether the output was complete before this run.
        made: Fingerprint, versions and hashes of the output, as JSON values.
        ahead: Rows of a job in progress that were computed, but not written yet; not stored.
        note: Activity of a job before its first row; not stored.
        total: Rows of the job as far as they are known, or estimated; not stored.
    """

    saved: int = 0
    resumed: int = 0
    finished_before: bool = False
    made: dict[str, Any] = field(default_factory=dict)
    ahead: int = 0
    note: str = ""
    total: int | None = None

    def recount(self, tallies: Iterable[Tally]) -> None:
        """Replaces the counts by sums over tallies, in order."""
        for name, value in asdict(Tally()).items():
            setattr(self, name, value)
        for tally in tallies:
            self.add(tally)

    def to_dict(self) -> dict[str, Any]:
        """Returns the record of OUT.summary.json: counts, rates per second, `marks` and `made`."""
        seconds, ids = max(self.seconds, 1e-9), ("repeated_ids", "first_repeated_id")
        return {
            **{name: getattr(self, name) for name in _RECORDED},
            "seconds": round(self.seconds, 3),
            "rows_per_second": round(self.rows / seconds, 1),
            "target_tokens_per_second": round(self.target_tokens / seconds, 1),
            "resumed": self.resumed,
            **{name: getattr(self, name) for name in ids if self.repeated_ids},
            **self.marks(),
            **self.made,
        }

    def document(self) -> str:
        """Returns the content of OUT.summary.json."""
        return f"{json.dumps(self.to_dict(), indent=1)}\n"

    def marks(self) -> dict[str, float | None]:
        """Returns the key figures of scores and of the canary; None where float64 has none."""
        marks = {name: self.made[name] for name in self.made if name.startswith("canaries")}
        fingerprint = self.made.get("fingerprint", {})
        if fingerprint.get("task") == "score":
            marks["scored_tokens"] = self.target_tokens
            marks["log_probability"] = self.log_probability
            if self.target_tokens:
                mean = -self.log_probability / self.target_tokens
                marks["perplexity"] = math.exp(mean) if mean < MOST_NATS else None
        return marks

    def __str__(self) -> str:
        """Returns the progress as one line."""
        seconds = max(self.seconds, 1e-9)
        repeated = f"{self.repeated:,} repeated, " if self.repeated else ""
        # Vectors and labels have no tokens.
        rate = f", {self.target_tokens / seconds:,.0f} tokens/s" if self.target_tokens else ""
        return (
            f"{counted(self.rows, 'row')} in {self.seconds:,.1f} s, {repeated}"
            f"{counted(self.bad_rows, 'error')}, {self.rows / seconds:,.0f} rows/s{rate}"
        )

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Summary:
        """Inverse of `to_dict`."""
        known = {field.name for field in fields(cls)}
        made = {name: value for name, value in record.items() if name not in known}
        return cls(**{name: record[name] for name in known & record.keys()}, made=made)

    def plain(self) -> dict[str, Any]:
        """Returns the values of `to_dict` that a flat file can hold."""
        return {
            name: value
            for name, value in self.to_dict().items()
            if value is not None and not isinstance(value, dict)
        }


class _Fingerprint(Struct):
    job_format: int = 1
    partition: str | None = None
    input_rows: Annotated[int, Meta(ge=0)] = 0


class _Needed(Struct):
    """Fields of every summary of a job."""

    fingerprint: _Fingerprint
    sha256: str
    rows: Annotated[int, Meta(ge=0)]


def beside(output: Path, suffix: str = SUMMARY) -> Path:
    """Returns the path of a file that belongs to an output."""
    return output.with_name(output.name + suffix)


def read_summary(output: Path) -> dict[str, Any] | None:
    """Reads the summary beside an output; None unless a job wrote one."""
    path, remedy = beside(output), "run the job again"
    try:
        record = read_document(path, dict[str, Any], remedy)
        checked(record, Summary, str(path), remedy)
        checked(record, _Needed, str(path), remedy)
    except InputError:
        return None
    return record
