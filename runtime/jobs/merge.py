"""Joins the outputs of a job's partitions, computed on several machines."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.io.atomic import atomic_file, require_writable, standard_output
from transferry.runtime.io.outputs import STANDARD_STREAM, require_own
from transferry.runtime.io.whole import sha256
from transferry.runtime.jobs.formats.columnar import opened_parquet
from transferry.runtime.jobs.formats.detection import named_format
from transferry.runtime.jobs.formats.records import RowWriter
from transferry.runtime.jobs.formats.writers import join_writer
from transferry.runtime.jobs.job_options import fraction
from transferry.runtime.jobs.journal import JOB_FORMAT, differences, hash_output, parts_of
from transferry.runtime.jobs.output_files import LINES, check_output, foreign_output
from transferry.runtime.jobs.summary import Summary, read_summary, summary_path


@dataclass(frozen=True)
class _Partition:
    """The output of one partition; or of a whole job, where workers of Ray wrote a folder.

    Attributes:
        path: The output, a file or a folder of files.
        number: Number of the partition, from 1.
        count: Number of partitions.
        fingerprint: Fingerprint of its job, without `number`.
        record: Its whole summary.
        rows: Its first row, and the row after its last; None in earlier versions.
    """

    path: Path
    number: int
    count: int
    fingerprint: dict[str, Any]
    record: dict[str, Any]
    rows: list[int] | None = None

    @classmethod
    def read(cls, path: Path) -> _Partition:
        record = read_summary(path)
        if record is None:
            raise InputError(
                f"{path} has no {summary_path(path).name} beside it that tells how it was made; "
                "give what `transferry run` wrote, with its summary"
            )
        fingerprint = dict(record["fingerprint"])
        if (found := fingerprint.get("job_format", 1)) != JOB_FORMAT:
            raise InputError(
                f"{path} was written by another version of transferry: expected job format "
                f"{JOB_FORMAT}, found {found}. Merge with that version, or run the partition again"
            )
        partition = fingerprint.pop("partition", None)
        if partition is None and path.is_dir():
            return cls(path, 1, 1, fingerprint, record)
        if partition is None:
            raise InputError(f"{path} is not a partition: its job ran without --partition")
        number, count = fraction(partition)
        rows = fingerprint.pop("rows", None)
        return cls(path, number, count, fingerprint | {"partitions": count}, record, rows)

    def check(self) -> None:
        """Refuses an output that has changed since its job wrote it."""
        rows = self.fingerprint.get("input_rows", self.record["rows"])
        # Earlier versions told the rows by the number alone.
        first, last = self.rows or [rows * n // self.count for n in (self.number - 1, self.number)]
        if hash_output(self.path) != self.record["sha256"] or self.record["rows"] != last - first:
            raise InputError(
                f"{self.path} has changed since its job wrote it; copy it again, or run "
                f"--partition {self.number}/{self.count} again"
            )

    @property
    def files(self) -> list[Path]:
        """The files of the output, in the order of the rows."""
        return parts_of(self.path) if self.path.is_dir() else [self.path]


def merge(paths: Sequence[Path], out: Path, *, force: bool = False) -> Summary:
    """Joins the outputs of all partitions of a job; returns the summary of all together.

    Args:
        paths: The outputs, in any order, each with its summary beside it.
        out: The joined output, in the same format, with a summary; "-" is standard output.
        force: Replace `out` if it exists.

    Raises:
        InputError: A partition is missing, given twice, of another job or changed; or `out` cannot
            be written.
        UsageError: `out` exists, is one of the partitions, or has another format.
    """
    what, read = "one of the partitions", [*paths, *map(summary_path, paths)]
    check_output(out, read, "merge", force=force, what=what)
    if out != STANDARD_STREAM:
        require_writable(out, [summary_path(out).name.removeprefix(out.name)])
    partitions = _complete([_Partition.read(path) for path in paths])
    for partition in partitions:
        partition.check()
    hashes = [partition.record["sha256"] for partition in partitions]
    if out.exists() and not force:
        require_own(out, lambda path: foreign_output(path, "merge"))
        former = read_summary(out) or {}
        if former.get("merged") != hashes:
            raise UsageError(f"{out} exists already; add --force to replace it")
        return replace(Summary.from_dict(former), finished_before=True)
    writer = _writer(partitions[0], out)
    summary = Summary()
    for partition in partitions:
        done = Summary.from_dict(partition.record)
        summary.add(done)
        summary.resumed += done.resumed
    files = [path for partition in partitions for path in partition.files]
    if out == STANDARD_STREAM:
        with standard_output() as file:
            writer.join(files, file)
        return summary
    with atomic_file(out) as file:
        writer.join(files, file)
        file.flush()
        certificates = {str(partition.record.get("certificate")) for partition in partitions}
        summary.made = {
            "fingerprint": partitions[0].fingerprint,
            "certificates": sorted(certificates),
            "merged": hashes,
            "sha256": sha256(Path(file.name)),
        }
        # Killed after this, the same command goes on; beside another summary it would be refused.
        out.unlink(missing_ok=True)
        with atomic_file(summary_path(out)) as beside:
            beside.write(f"{json.dumps(summary.to_dict(), indent=1)}\n".encode())
    for folder in {partition.path.parent / LINES for partition in partitions}:
        shutil.rmtree(folder, ignore_errors=True)
    return summary


def _complete(partitions: Sequence[_Partition]) -> list[_Partition]:
    """Returns the partitions in order; refuses them where they are not one whole job."""
    first, *others = partitions
    for other in others:
        if changes := differences(first.fingerprint, other.fingerprint):
            raise InputError(
                f"{first.path} and {other.path} are not of the same job: {'; '.join(changes)}"
            )
    by_number: dict[int, _Partition] = {}
    for partition in partitions:
        if (twin := by_number.setdefault(partition.number, partition)) is not partition:
            raise InputError(
                f"{twin.path} and {partition.path} are both partition "
                f"{partition.number}/{partition.count}; give each partition once"
            )
    if missing := [n for n in range(1, first.count + 1) if n not in by_number]:
        names = ", ".join(f"{number}/{first.count}" for number in missing)
        raise InputError(f"partition {names} is missing; give the outputs of all {first.count}")
    found, end = [by_number[number] for number in sorted(by_number)], 0
    for partition in found:
        if partition.rows is not None and partition.rows[0] != end:
            raise InputError(
                f"{partition.path} begins at row {partition.rows[0] + 1}, expected row {end + 1}; "
                "run all partitions with the same --partition-by"
            )
        end = partition.rows[1] if partition.rows is not None else end
    return found


def _writer(partition: _Partition, out: Path) -> RowWriter:
    """Returns a writer that joins files as the job of one partition would."""
    fingerprint = partition.fingerprint
    format, compression = fingerprint["output_format"], fingerprint["compression"]
    schema = None
    if format == "parquet":
        with opened_parquet(partition.files[0]) as file:
            schema = file.schema_arrow
    if out != STANDARD_STREAM and named_format(out)[1] != compression:
        raise UsageError(
            f"{out} must be compressed as {partition.path} is; let its name end in "
            f"{compression or 'no .gz or .zst'}"
        )
    return join_writer(
        format,
        named_format(out)[1],
        names=fingerprint["output_columns"],
        schema=schema,
        width=fingerprint["width"],
        delimiter=fingerprint["output_delimiter"],
    )
