"""The shards of a job, computed on several machines, joined into one output."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.files import atomic_file, sha256
from transferry.runtime.jobs.job import Summary, read_summary
from transferry.runtime.jobs.journal import differences, hash_output
from transferry.runtime.jobs.readers import Source, named_format, opened_parquet
from transferry.runtime.jobs.writers import Sink, open_sink


@dataclass(frozen=True)
class _Part:
    """The output of one job: of a shard, or all of them where workers of Ray wrote it.

    Attributes:
        path: Of the output, a file or a folder of files.
        number: Of the shard, from 1.
        shards: How many there are.
        fingerprint: What it went by, without the number.
        record: Its whole summary.
    """

    path: Path
    number: int
    shards: int
    fingerprint: dict[str, Any]
    record: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> _Part:
        record = read_summary(path)
        if record is None:
            raise InputError(
                f"{path} has no {path.name}.summary.json beside it that tells how it was made; "
                "give what `transferry run` wrote, with its summary"
            )
        fingerprint = dict(record["fingerprint"])
        shard = fingerprint.pop("shard", None)
        if shard is None and path.is_dir():
            return cls(path, 1, 1, fingerprint, record)
        if shard is None:
            raise InputError(f"{path} is no shard: its job ran without --shard")
        number, shards = map(int, shard.split("/"))
        return cls(path, number, shards, fingerprint | {"shards": shards}, record)

    def check(self) -> None:
        """Refuses an output that is not as its job left it."""
        rows = self.fingerprint.get("input_rows", self.record["rows"])
        first, last = (rows * number // self.shards for number in (self.number - 1, self.number))
        if hash_output(self.path) != self.record["sha256"] or self.record["rows"] != last - first:
            raise InputError(
                f"{self.path} has changed since its job wrote it; copy it again, or run "
                f"--shard {self.number}/{self.shards} again"
            )

    @property
    def files(self) -> list[Path]:
        """The output, in the order of the rows."""
        return sorted(self.path.iterdir()) if self.path.is_dir() else [self.path]


def merge(paths: Sequence[Path], out: Path, *, force: bool = False) -> Summary:
    """Joins the outputs of all shards of a job.

    Args:
        paths: The outputs, in any order, each with its summary beside it.
        out: Where all answers go, in the same format.
        force: Replace `out` if it exists.

    Returns:
        What the shards did together; it lies beside `out` too.

    Raises:
        InputError: A shard is missing, there twice, of another job, or not as its job left it; or
            `out` cannot be written.
        UsageError: `out` exists, is one of the shards, or is of another format.
    """
    parts = _complete([_Part.read(path) for path in paths])
    for part in parts:
        part.check()
    hashes = [part.record["sha256"] for part in parts]
    if out.exists() and any(out.samefile(part.path) for part in parts):
        raise UsageError(f"{out} is one of the shards; name another file for the output")
    if out.exists() and not force:
        former = read_summary(out) or {}
        if former.get("merged") != hashes or former["sha256"] != sha256(out):
            raise UsageError(f"{out} exists already; add --force to replace it")
        return replace(Summary.from_dict(former), finished_before=True)
    sink = _sink(parts[0], out)
    summary = Summary()
    for part in parts:
        shard = Summary.from_dict(part.record)
        summary.add(shard)
        summary.resumed += shard.resumed
    with atomic_file(out) as file:
        sink.join([path for part in parts for path in part.files], file)
        file.flush()
        summary.made = {
            "fingerprint": parts[0].fingerprint,
            "certificates": sorted({str(part.record.get("certificate")) for part in parts}),
            "merged": hashes,
            "sha256": sha256(Path(file.name)),
        }
        with atomic_file(out.with_name(f"{out.name}.summary.json")) as beside:
            beside.write(f"{json.dumps(summary.to_dict(), indent=1)}\n".encode())
    return summary


def _complete(parts: Sequence[_Part]) -> list[_Part]:
    """Puts the shards in order, and refuses them where they are not one job."""
    first, *others = parts
    for part in others:
        if changes := differences(first.fingerprint, part.fingerprint):
            raise InputError(
                f"{first.path} and {part.path} are not of the same job: {'; '.join(changes)}"
            )
    by_number: dict[int, _Part] = {}
    for part in parts:
        if part.number in by_number:
            raise InputError(
                f"{by_number[part.number].path} and {part.path} are both shard "
                f"{part.number}/{part.shards}; give each shard once"
            )
        by_number[part.number] = part
    if missing := [n for n in range(1, first.shards + 1) if n not in by_number]:
        names = ", ".join(f"{number}/{first.shards}" for number in missing)
        raise InputError(f"shard {names} is missing; give the outputs of all {first.shards}")
    return [by_number[number] for number in sorted(by_number)]


def _sink(part: _Part, out: Path) -> Sink:
    """What joins the parts, as the job of one of them would."""
    fingerprint = part.fingerprint
    format, compression = fingerprint["output_format"], fingerprint["compression"]
    types, columns = None, tuple(fingerprint["columns"])
    if format == "parquet":
        with opened_parquet(part.files[0]) as file:
            schema = file.schema_arrow
            types = {name: schema.field(name).type for name in ("id", *columns)}
    if named_format(out)[1] != compression:
        raise UsageError(
            f"{out} must be compressed as {part.path} is; let its name end in "
            f"{compression or 'no .gz or .zst'}"
        )
    source = SimpleNamespace(
        path=part.path,
        format=fingerprint["input_format"],
        columns=columns,
        has_id=fingerprint["has_id"],
        types=types,
    )
    return open_sink(
        out,
        format=format,
        source=cast(Source, source),
        task=fingerprint["task"],
        n_best=fingerprint.get("n_best", 1) > 1,
        width=fingerprint["width"],
    )
