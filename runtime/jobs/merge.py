"""Joins the outputs of a job's partitions, computed on several machines."""

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self, get_args

from transferry.runtime.engine.preprocess import require_several
from transferry.runtime.engine.tasks.task import OutputFormat
from transferry.runtime.errors import InputError, Option, UsageError
from transferry.runtime.io.atomic import atomic_file, require_writable, standard_output
from transferry.runtime.io.documents import read_document
from transferry.runtime.io.folders import staged_folder
from transferry.runtime.io.outputs import STANDARD_STREAM, require_own
from transferry.runtime.io.whole import sha256
from transferry.runtime.jobs.chunk_folder import ending_of
from transferry.runtime.jobs.formats.columnar import opened_parquet
from transferry.runtime.jobs.formats.detection import named_format
from transferry.runtime.jobs.formats.records import RowWriter
from transferry.runtime.jobs.formats.remote_file import RemoteFile, RemoteFolder
from transferry.runtime.jobs.formats.writers import ENDINGS, join_writer
from transferry.runtime.jobs.job_options import fraction
from transferry.runtime.jobs.journal import (
    JOB_FORMAT,
    Part,
    differences,
    hash_of_hashes,
    hash_output,
    parts_of,
)
from transferry.runtime.jobs.output_files import (
    LINES,
    MANIFEST,
    RemoteOutput,
    check_output,
    foreign_output,
    write_manifest,
)
from transferry.runtime.jobs.summary import SUMMARY, Summary, beside, read_summary
from transferry.runtime.settings import path_of


@dataclass(frozen=True)
class _Partition:
    """The output of one partition; or of a whole job, where workers of Ray wrote a folder.

    Attributes:
        path: The output, a file or a folder of files; elsewhere its summary.
        fingerprint: Fingerprint of its job, without `number`.
        rows: Its first row, and the row after its last; None for a whole job.
        bytes: Where these begin and end in the input, if `rows` is not known before all are there.
    """

    path: Any
    number: int
    count: int
    fingerprint: dict[str, Any]
    record: dict[str, Any]
    rows: list[int] | None = None
    bytes: list[int] | None = None

    @classmethod
    def of(cls, path: Any, record: dict[str, Any]) -> Self:
        fingerprint = dict(record["fingerprint"])
        if (found := fingerprint.get("job_format", 1)) != JOB_FORMAT:
            raise InputError(
                f"{path} was written by another version of transferry: expected job format "
                f"{JOB_FORMAT}, found {found}. Merge with that version, or run the partition again"
            )
        partition = fingerprint.pop("partition", None)
        if partition is None and isinstance(path, Path) and path.is_dir():
            return cls(path, 1, 1, fingerprint, record)
        if partition is None:
            told = f"{path} is not a partition: its job ran without "
            raise InputError(told, Option("partition"))
        number, count = fraction(partition)
        rows, place = fingerprint.pop("rows", None), fingerprint.pop("bytes", None)
        rows = rows if place is None else None
        return cls(path, number, count, fingerprint | {"partitions": count}, record, rows, place)

    @property
    def first(self) -> int | None:
        """Number of the first row, where rows without an id still lack their numbers."""
        return self.rows[0] if self.rows and self.fingerprint.get("lacks_ids") else None

    def check(self) -> None:
        """Refuses an output that has changed since its job wrote it."""
        first, last = self.rows or (0, self.record["rows"])
        if hash_output(self.path) != self.record["sha256"] or self.record["rows"] != last - first:
            raise InputError(
                f"{self.path} has changed since its job wrote it; copy it again, or run ",
                *(Option("partition"), f" {self.number}/{self.count} again"),
            )

    @property
    def files(self) -> list[Path]:
        """The files of the output, in the order of the rows."""
        return parts_of(self.path) if self.path.is_dir() else [self.path]

    def parts(self) -> Iterator[Part]:
        """Yields the files with rows, in order."""
        if not self.path.is_dir():
            first, rows = (self.rows or [0])[0], self.record["rows"]
            yield Part(first, rows, self.path.stat().st_size, self.record["sha256"], self.path)
            return
        listed = read_document(self.path / MANIFEST, dict[str, Any], "run the job again")["parts"]
        for part in listed:
            path = self.path / part["name"]
            first = int(path.name.partition(".")[0])
            yield Part(first, part["rows"], part["bytes"], part["sha256"], path)


def _read(path: Path) -> _Partition:
    if (record := read_summary(path)) is None:
        raise InputError(
            f"{path} has no {beside(path).name} beside it that tells how it was made; "
            "give what `transferry run` wrote, with its summary"
        )
    return _Partition.of(path, record)


def merge(
    paths: Sequence[Path], out: Path | RemoteFile, *, force: bool = False, keep_parts: bool = False
) -> Summary:
    """Joins the outputs of all partitions of a job; returns the summary of all together.

    Args:
        paths: The outputs, in any order, each with its summary beside it.
        out: The joined output, in the same format, with a summary; "-" is standard output. A URL
            is a folder of parts.
        force: Replace `out` if it exists.
        keep_parts: Make `out` a folder with the outputs as they are, and a manifest.

    Raises:
        InputError: A partition is missing, given twice, of another job or changed; or `out` cannot
            be written.
        UsageError: `out` exists, is one of the partitions, or has another format.
    """
    paths = [path_of("inputs", each) for each in require_several(paths, "inputs")]
    if not paths:
        raise UsageError("expected the outputs of partitions, found none; name them")
    if isinstance(out, RemoteFile):
        return _upload([*map(_read, paths)], RemoteOutput(RemoteFolder(out.url)), force=force)
    out = path_of("output", out)
    if keep_parts and out == STANDARD_STREAM:
        told = " leaves a folder, and - is standard output; name the folder"
        raise UsageError(Option("keep_parts"), told)
    what, read = "one of the partitions", [*paths, *map(beside, paths)]
    check_output(out, read, "merge", force=force, what=what)
    if out != STANDARD_STREAM:
        require_writable(out, [SUMMARY])
    partitions = _complete([*map(_read, paths)], check=True)
    hashes = [partition.record["sha256"] for partition in partitions]
    if out.exists() and not force:
        require_own(out, lambda path: foreign_output(path, "merge"))
        former = read_summary(out) or {}
        if former.get("merged") != hashes:
            raise UsageError(f"{out} exists already; add ", Option("force"), " to replace it")
        return replace(Summary.from_dict(former), finished_before=True)
    if out != STANDARD_STREAM:
        _require_fitting(out, partitions[0], keep_parts=keep_parts)
    summary = _joined(partitions)
    if keep_parts:
        _keep(partitions, out, summary)
        return summary
    packing = "" if out == STANDARD_STREAM else partitions[0].fingerprint["compression"]
    writer, first = _writer(partitions[0], packing), partitions[0].first
    files = [path for partition in partitions for path in partition.files]
    if out == STANDARD_STREAM:
        with standard_output() as file:
            writer.join(files, file, first)
        return summary
    with atomic_file(out) as file:
        writer.join(files, file, first)
        file.flush()
        _describe(summary, out, sha256(Path(file.name)))
    _forget_lines(partitions)
    return summary


def _require_fitting(out: Path, partition: _Partition, *, keep_parts: bool) -> None:
    """Raises UsageError for a name of another format or compression than the partitions have."""
    format, compression = (partition.fingerprint[f] for f in ("output_format", "compression"))
    ending, packed = named_format(out)
    usual = (ENDINGS.get(format, format), named_format(partition.path)[0])
    if ending in {ENDINGS.get(each, each) for each in get_args(OutputFormat)} - {*usual}:
        told = f"must have the format of {partition.path}; let its name end in .{usual[0]}"
        raise UsageError(f"{out} {told}")
    if packed != compression and not keep_parts:
        raise UsageError(
            f"{out} must be compressed as {partition.path} is; let its name end in "
            f"{compression or 'no .gz or .zst'}"
        )


def _joined(partitions: Sequence[_Partition]) -> Summary:
    """Returns the summary of partitions together."""
    summary = Summary()
    for partition in partitions:
        done = Summary.from_dict(partition.record)
        if partition.bytes is not None and partition.rows:
            row, first = re.compile(r"(?<=^row )\d+"), partition.rows[0]
            done.first_error = row.sub(lambda it: str(int(it[0]) + first), done.first_error)  # noqa: B023
        summary.add(done)
        summary.resumed += done.resumed
    summary.made = {
        "fingerprint": partitions[0].fingerprint,
        "certificates": sorted({str(each.record.get("certificate")) for each in partitions}),
        "merged": [partition.record["sha256"] for partition in partitions],
    }
    return summary


def _describe(summary: Summary, out: Path, digest: str) -> None:
    """Writes the summary beside an output that is about to appear."""
    summary.made["sha256"] = digest
    # Killed after this, the same command goes on; beside another summary it would be refused.
    shutil.rmtree(out) if out.is_dir() else out.unlink(missing_ok=True)
    with atomic_file(beside(out)) as file:
        file.write(summary.document().encode())


def _parts(partitions: Sequence[_Partition], folder: Path) -> list[Part]:
    """Returns the parts of partitions, in order, without those of no row.

    Those whose rows lack numbers are written anew to a folder.
    """
    found = [part for partition in partitions for part in partition.parts()]
    found, whole = [part for part in found if part.rows] or found[:1], partitions[0]
    if whole.first is None:
        return found
    ending, writer = ending_of(whole.fingerprint), _writer(whole, whole.fingerprint["compression"])
    parts = []
    for part in found:
        path = folder / f"{part.first:012d}.{ending}"
        with path.open("wb") as file:
            writer.join([part.path], file, part.first)
        parts.append(Part(part.first, part.rows, path.stat().st_size, sha256(path), path))
    return parts


def _keep(partitions: Sequence[_Partition], out: Path, summary: Summary) -> None:
    """Makes a folder of the partitions' files; they are links where the file system has them."""
    ending = ending_of(partitions[0].fingerprint)
    with staged_folder(out) as folder:
        parts = _parts(partitions, folder)
        placed = [part._replace(path=folder / f"{part.first:012d}.{ending}") for part in parts]
        for part, new in zip(parts, placed, strict=True):
            if part == new:
                continue
            try:
                os.link(part.path, new.path)
            except OSError:  # another file system, or one without links
                shutil.copyfile(part.path, new.path)
        write_manifest(folder, placed)
        _describe(summary, out, hash_of_hashes(part.sha256 for part in parts))
        folder.rename(out)
    _forget_lines(partitions)


def _forget_lines(partitions: Sequence[_Partition]) -> None:
    for folder in {partition.path.parent / LINES for partition in partitions}:
        shutil.rmtree(folder, ignore_errors=True)


def _upload(partitions: Sequence[_Partition], output: RemoteOutput, *, force: bool) -> Summary:
    """Writes the partitions' files to a folder elsewhere."""
    partitions = _complete(partitions, check=True)
    summary = _joined(partitions)
    former = output.begin(summary.made["fingerprint"], force=force)
    if former is not None and former.get("merged") == summary.made["merged"]:
        return replace(Summary.from_dict(former), finished_before=True)
    if former is not None:
        told = f"{output.folder} exists already; add "
        raise UsageError(told, Option("force"), " to replace it")

    def texts(digest: str) -> dict[str, str]:
        summary.made["sha256"] = digest
        return {SUMMARY: summary.document()}

    with TemporaryDirectory() as folder:
        parts = _parts(partitions, Path(folder))
        output.publish(parts, ending_of(partitions[0].fingerprint), texts)
    _forget_lines(partitions)
    return summary


def join_remote(output: RemoteOutput, count: int) -> str:
    """Completes the output of partitions elsewhere, if all are there.

    The last one that ends completes it; several at once write the same bytes.

    Returns the lack, "" for none.
    """
    names = output.folder.sizes()
    marks = [f".{number}-of-{count}" for number in range(1, count + 1)]
    if missing := [mark for mark in marks if f"_manifest{mark}.json" not in names]:
        return f"{len(missing)} of {count} partitions are still missing in {output.folder}"
    records = {f"{output.folder}/_summary{mark}.json": f"_summary{mark}.json" for mark in marks}
    try:
        found = [_Partition.of(place, output.record(name)) for place, name in records.items()]
        partitions = _complete(found)
    except InputError as error:
        return f"{output.folder} is not complete: {error}"
    listed = [output.record(f"_manifest{mark}.json")["parts"] for mark in marks]
    parts = [part for each in listed for part in each]
    summary = _joined(partitions)
    output.finish([part for part in parts if part["rows"]] or parts[:1], summary)
    return ""


def _complete(partitions: Sequence[_Partition], *, check: bool = False) -> list[_Partition]:
    """Returns the partitions in order; refuses them where they are not one whole job.

    `check` also reads them, and refuses those that have changed.
    """
    first, *others = partitions
    for other in others:
        if (first.bytes is None) != (other.bytes is None):
            raise InputError(
                f"{first.path} and {other.path} are not partitions of the same kind; run all of "
                "them with the same ",
                Option("partition_by"),
            )
        if changes := differences(first.fingerprint, other.fingerprint):
            raise InputError(f"{first.path} and {other.path} are not of the same job: ", *changes)
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
    found, row, byte = [by_number[number] for number in sorted(by_number)], 0, 0
    for place, partition in enumerate(found):
        where = ("byte", byte) if partition.bytes else ("row", row + 1)
        begin = (partition.bytes or [(partition.rows or [row])[0] + 1])[0]
        if begin != where[1]:
            raise InputError(
                f"{partition.path} begins at {where[0]} {begin}, expected {where[0]} {where[1]}; "
                "run all partitions of one input, with the same ",
                Option("partition_by"),
            )
        if partition.bytes:
            byte, rows = partition.bytes[1], [row, row + partition.record["rows"]]
            found[place] = replace(partition, rows=rows)
        row = (found[place].rows or [0, row])[1]
    for partition in found if check else ():
        partition.check()
    return found


def _writer(partition: _Partition, compression: Any) -> RowWriter:
    """Returns a writer that joins files as the job of one partition would."""
    fingerprint, schema = partition.fingerprint, None
    format = fingerprint["output_format"]
    if format == "parquet":
        with opened_parquet(partition.files[0]) as file:
            schema = file.schema_arrow
    return join_writer(
        format,
        compression,
        names=fingerprint["output_columns"],
        schema=schema,
        width=fingerprint["width"],
        delimiter=fingerprint["output_delimiter"],
        mark=fingerprint.get("output_mark", ""),
    )
