"""The folder of a job whose chunks several processes finish, in any order."""

from __future__ import annotations

import json
import os
import re
import shutil
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import overload

from transferry.runtime.io.atomic import TEMPORARY
from transferry.runtime.io.whole import read_bytes
from transferry.runtime.jobs.formats.writers import ENDINGS
from transferry.runtime.jobs.journal import CHUNKS, JOB, JOURNAL, Chunk, Fingerprint, Journal
from transferry.runtime.jobs.output_files import LINES

# Sizes and times of the files of the input.
INPUT = "input.json"


def ending_of(fingerprint: Fingerprint) -> str:
    """Returns the ending of the names of chunks, without the first dot."""
    format = str(fingerprint.get("output_format"))
    return f"{ENDINGS.get(format, format)}{fingerprint.get('compression', '')}"


class ChunkLines(Sequence[Chunk]):
    """Finished chunks in the order of their rows, read from the journal: 16 bytes of memory each.

    Attributes:
        rows: Number of their rows.
    """

    def __init__(self, path: Path) -> None:
        """Begins without chunks; `path` is the journal."""
        self._path, self.rows = path, 0
        self._firsts, self._places = array("q"), array("q")

    def __len__(self) -> int:
        return len(self._firsts)

    def __iter__(self) -> Iterator[Chunk]:
        if self._places:
            with self._path.open("rb") as file:
                for place in self._places:
                    file.seek(place)
                    yield Chunk.parse(file.readline())

    @overload
    def __getitem__(self, place: int) -> Chunk: ...
    @overload
    def __getitem__(self, place: slice) -> list[Chunk]: ...
    def __getitem__(self, place: int | slice) -> Chunk | list[Chunk]:
        if isinstance(place, slice):
            return [self[number] for number in range(*place.indices(len(self)))]
        with self._path.open("rb") as file:
            file.seek(self._places[place])
            return Chunk.parse(file.readline())

    def has(self, first: int) -> bool:
        """Whether the chunk that begins at a row is finished."""
        place = bisect_left(self._firsts, first)
        return place < len(self._firsts) and self._firsts[place] == first

    def add(self, chunk: Chunk, place: int) -> None:
        """Adds a chunk whose line begins at a byte of the journal."""
        at = bisect_left(self._firsts, chunk.first)
        self._firsts.insert(at, chunk.first)
        self._places.insert(at, place)
        self.rows += chunk.rows


class ChunkFolder(Journal):
    """The folder of a job whose chunks several processes finish, in any order.

    OUT.job/job.json                    fingerprint
    OUT.job/input.json                  sizes and times of the input's files
    OUT.job/journal.jsonl               one line per finished chunk, in the order of time
    OUT.job/chunks/000000016384.jsonl   output from that row on; the folder becomes OUT
    OUT.job/lock                        locked while a job distributes chunks

    One process writes the journal, others the chunks.
    """

    # Format 1 had another name for the folder of chunks; before the journal, each chunk had a note.
    own = re.compile(
        rf"(job|input)\.json(\.tmp)?|journal\.jsonl|beside\.tmp|(chunks|shards)(\.old)?|notes"
        rf"|\{LINES}|{TEMPORARY}"
    )

    def __init__(self, folder: Path) -> None:
        """Reads nothing yet."""
        super().__init__(folder)
        self.outputs, self.ending = folder / CHUNKS, ""

    @property
    def rows(self) -> int:
        """Number of rows in finished chunks."""
        return self.chunks.rows if isinstance(self.chunks, ChunkLines) else 0

    def path(self, first: int) -> Path:
        """Returns the file of the chunk that begins at a row."""
        return self.outputs / f"{first:012d}.{self.ending}"

    def begin(self, fingerprint: Fingerprint, *, force: bool) -> str:
        """Resumes the job if it was interrupted, or starts it."""
        self.ending = ending_of(fingerprint)
        note = super().begin(fingerprint, force=force)
        self.outputs.mkdir(exist_ok=True)
        for path in self.folder.iterdir():
            if re.fullmatch(TEMPORARY, path.name):
                path.unlink()
        return note

    def extend(self, chunks: Iterable[Chunk]) -> None:
        """Marks chunks as finished, whose files others have written."""
        with (self.folder / JOURNAL).open("ab") as file:
            for chunk in chunks:
                self.chunks.add(chunk, file.tell())
                file.write(f"{json.dumps(asdict(chunk))}\n".encode())
            file.flush()
            os.fsync(file.fileno())

    def clear(self) -> None:
        """Removes everything but the lock, the fingerprint first."""
        (self.folder / JOB).unlink(missing_ok=True)
        super().clear()
        self.chunks = ChunkLines(self.folder / JOURNAL)

    def read(self) -> str:
        """Reads the finished chunks; returns a note on those that are damaged, or ""."""
        self._take_notes()
        self.chunks, end = ChunkLines(self.folder / JOURNAL), 0
        places = dict[int, tuple[Chunk, int]]()
        with (self.folder / JOURNAL).open("r+b") as file:
            for line in file:
                try:
                    chunk = Chunk.parse(line)
                except ValueError:  # a torn line
                    break
                # Of a chunk that was computed again the last line counts.
                places[chunk.first] = chunk, end
                end += len(line)
            file.truncate(end)
        for chunk, place in places.values():
            if not chunk.sha256 or chunk.looks_intact(self.path(chunk.first)):
                self.chunks.add(chunk, place)
        if lost := len(places) - len(self.chunks):
            return f"{lost} finished chunks are damaged or gone and will be computed again"
        return ""

    def _take_notes(self) -> None:
        """Moves the notes of an earlier version, one file a chunk, into the journal."""
        if not (notes := self.folder / "notes").is_dir():
            return
        with (self.folder / JOURNAL).open("ab") as file:
            for note in sorted(notes.glob("*.json")):
                file.write(read_bytes(note))
            file.flush()
            os.fsync(file.fileno())
        shutil.rmtree(notes)
