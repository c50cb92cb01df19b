"""The folder of a job whose chunks several processes finish, in any order."""

import re
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

from transferry.runtime.errors import InputError
from transferry.runtime.io.atomic import TEMPORARY, durable_file
from transferry.runtime.jobs.formats.writers import ENDINGS
from transferry.runtime.jobs.journal import (
    CHUNKS,
    JOB,
    Chunks,
    Fingerprint,
    Journal,
    told_lost,
)

# Sizes and times of the files of the input.
INPUT = "input.json"


def ending_of(fingerprint: Fingerprint) -> str:
    """Returns the ending of the names of chunks, without the first dot."""
    format = str(fingerprint.get("output_format"))
    return f"{ENDINGS.get(format, format)}{fingerprint.get('compression', '')}"


class ChunkFolder(Journal):
    """The folder of a job whose chunks several processes finish, in any order.

    OUT.job/job.json                           fingerprint
    OUT.job/input.json                         sizes and times of the input's files
    OUT.job/journal.jsonl                      one line per finished chunk, in the order of time
    OUT.job/chunks/000000/000000016384.jsonl   output from that row on
    OUT.job/ray.log                            Ray's own lines
    OUT.job/lock                               locked while a job distributes chunks

    One process writes the journal, others the chunks. The folder of the chunks becomes OUT.
    """

    # Format 1 had another name for the folder of chunks; before the journal, each chunk had a note,
    # and workers shared the numbers of lines.
    own = re.compile(
        rf"(job|input)\.json(\.tmp)?|journal\.jsonl|beside\.tmp|(chunks|shards)(\.old)?|notes"
        rf"|ray\.log|\.transferry-lines|{TEMPORARY}"
    )

    def __init__(self, folder: Path, fingerprint: Fingerprint = MappingProxyType({})) -> None:
        """Reads nothing yet; a begun job has a fingerprint."""
        super().__init__(folder)
        self.outputs = folder / CHUNKS
        self._name(fingerprint)

    def _name(self, fingerprint: Fingerprint) -> None:
        """Takes what decides the names of files from a fingerprint."""
        self._ending, (self._start, _) = ending_of(fingerprint), fingerprint.get("rows", (0, 0))
        self._block_rows = self.block * fingerprint.get("chunk_rows", 1)

    def path(self, first: int) -> Path:
        """Returns the file of the chunk that begins at a row."""
        block = (first - self._start) // self._block_rows
        return self.outputs / f"{block:06d}" / f"{first:012d}.{self._ending}"

    def opened(self, first: int) -> AbstractContextManager[BinaryIO]:
        """Opens the file of a chunk, which is on the disk when the `with` ends.

        A worker that was given up may still be writing, so each has a file of its own.
        """
        path = self.path(first)
        path.parent.mkdir(exist_ok=True)
        return durable_file(path, self.folder)

    @property
    def files(self) -> Iterator[Path]:
        return (self.path(chunk.first) for chunk in self.chunks)

    @property
    def blocks(self) -> list[Path]:
        """The folders of files, in order."""
        return sorted(path for path in self.outputs.iterdir() if path.suffix != ".old")

    def require_all(self) -> None:
        """Raises InputError unless the files are those of the chunks; removes others."""
        blocks = set(self.blocks)
        for folder, paths in groupby(self.files, lambda path: path.parent):
            expected = {path.name for path in paths}
            found = {path.name for path in folder.iterdir()} if folder in blocks else set()
            if expected - found:
                raise InputError(f"{folder} has fewer files than were written. Run the job again")
            for name in found - expected:  # of a run whose chunks were fewer
                (folder / name).unlink()
            blocks.remove(folder)
        for folder in blocks:
            shutil.rmtree(folder)

    def begin(self, fingerprint: Fingerprint, *, force: bool) -> str:
        self._name(fingerprint)
        note = super().begin(fingerprint, force=force)
        self.outputs.mkdir(exist_ok=True)
        for path in self.folder.iterdir():
            if re.fullmatch(TEMPORARY, path.name):
                path.unlink()
        return note

    def clear(self) -> None:
        """Removes everything but the lock, the fingerprint first."""
        (self.folder / JOB).unlink(missing_ok=True)
        super().clear()

    def read(self) -> str:
        """Reads the finished chunks; returns a note on those that are damaged, or ""."""
        found = Chunks(self.journal)
        found.load()
        self.chunks = found.keep(lambda chunk: chunk.looks_intact(self.path(chunk.first)))
        return told_lost(len(found) - len(self.chunks))
