"""The folder of a job whose chunks several processes finish, in any order."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transferry.runtime.errors import InputError
from transferry.runtime.io.atomic import TEMPORARY, durable_file
from transferry.runtime.io.whole import read_bytes
from transferry.runtime.jobs.journal import CHUNKS, JOB, Chunk, Fingerprint, Journal
from transferry.runtime.jobs.summary import Summary

# Seconds between two looks at how far the workers are, and between two notes of a worker on that.
LOOK_EVERY = 1.0
# Of the note that counts the rows of an unfinished chunk.
ROWS = ".rows"


class ChunkFolder(Journal):
    """The folder of a job whose chunks several processes finish, in any order.

    OUT.job/job.json                    fingerprint
    OUT.job/chunks/000000016384.jsonl   output from that row on; the folder becomes OUT
    OUT.job/notes/000000016384.jsonl.json   marks the chunk as finished, with its hash
    OUT.job/lock                        locked while a job distributes chunks
    """

    # Format 1 had another name for the folder of chunks; --force removes it.
    own = re.compile(
        rf"job\.json(\.tmp)?|journal\.jsonl|beside\.tmp|(chunks|shards)(\.old)?|notes|{TEMPORARY}"
    )

    def __init__(self, folder: Path, look_every: float = LOOK_EVERY) -> None:
        """Reads nothing yet."""
        super().__init__(folder)
        self.look_every = look_every
        self.outputs, self.notes = folder / CHUNKS, folder / "notes"

    def begin(self, fingerprint: Fingerprint, *, force: bool) -> str:
        """Resumes the job if it was interrupted, or starts it."""
        note = super().begin(fingerprint, force=force)
        for folder in (self.outputs, self.notes):
            folder.mkdir(exist_ok=True)
        for path in self.notes.iterdir():
            if path.suffix in (".tries", ".tmp", ROWS) or re.fullmatch(TEMPORARY, path.name):
                path.unlink()
        return note

    def find(self, name: str) -> Chunk | None:
        """Returns the chunk of this name if it is finished and intact."""
        chunk = self._noted(self.notes / f"{name}.json")
        return chunk if chunk and chunk.is_intact(self.outputs / name) else None

    def tries(self, name: str) -> int:
        """Returns how often this chunk was begun, this time included."""
        with (self.notes / f"{name}.tries").open("ab") as file:
            file.write(b".")
            return file.tell()

    @contextlib.contextmanager
    def counting(self, name: str) -> Iterator[Callable[[Summary], None]]:
        """Yields a function of the counts of a chunk, so that `unfinished` counts its rows.

        The size of a file counts them, one byte a row: a reader never sees half a number.
        """
        with (self.notes / f"{name}{ROWS}").open("wb", buffering=0) as file:
            rows, noted = 0, time.monotonic()

            def note(summary: Summary) -> None:
                nonlocal rows, noted
                more = summary.rows + summary.ahead - rows
                if more > 0 and (now := time.monotonic()) - noted >= self.look_every:
                    file.write(b"." * more)
                    rows, noted = rows + more, now

            yield note

    def unfinished(self) -> int:
        """Returns the rows computed in chunks for which `received` was not called."""
        rows = 0
        # A file may go while the folder is read.
        with suppress(FileNotFoundError), os.scandir(self.notes) as entries:
            for entry in entries:
                if entry.name.endswith(ROWS):
                    with suppress(FileNotFoundError):
                        rows += entry.stat().st_size
        return rows

    def received(self, name: str) -> None:
        """Removes the count of a chunk's rows; the chunk is finished."""
        (self.notes / f"{name}{ROWS}").unlink(missing_ok=True)

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[Any]:
        """Opens the file of a chunk."""
        # A worker that Ray has given up may still be writing, so each has a name of its own.
        with durable_file(self.outputs / name, self.notes) as file:
            yield file

    def finish(self, name: str, chunk: Chunk) -> None:
        """Marks the chunk as finished that was written under this name."""
        chunk.seal(self.outputs / name)
        with durable_file(self.notes / f"{name}.json") as file:
            file.write(f"{json.dumps(asdict(chunk))}\n".encode())

    def clear(self) -> None:
        """Removes everything but the lock, the fingerprint first."""
        (self.folder / JOB).unlink(missing_ok=True)
        super().clear()

    def read(self) -> str:
        """Reads the notes; each worker checks the file of a chunk when it comes to it."""
        found = map(self._noted, sorted(self.notes.glob("*.json")))
        self.chunks = [chunk for chunk in found if chunk is not None]
        return ""

    def _noted(self, note: Path) -> Chunk | None:
        try:
            return Chunk.parse(read_bytes(note))
        except (InputError, ValueError):
            return None
