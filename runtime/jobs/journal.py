"""Finished chunks of a job, in a folder beside its output that survives any interruption.

    OUT.job/job.json               fingerprint: everything that decides the output
    OUT.job/journal.jsonl          one line per finished chunk
    OUT.job/000000/00000000.part   output rows of the first chunk, a whole file of the format
    OUT.job/lock                   locked while a job runs; a killed process releases it

A chunk is finished once its line is on the disk, which happens after its file is. So whenever a
process or a machine stops, everything the journal names is whole; the rest is discarded. A folder
has at most 1,000 files: listing 100,000 takes minutes on Lustre.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import msgspec
from filelock import FileLock, Timeout

from transferry.runtime.errors import InputError, Option, UsageError
from transferry.runtime.io.atomic import TEMPORARY, durable_file, sync_folder
from transferry.runtime.io.documents import decode, read_document
from transferry.runtime.io.whole import open_regular, sha256
from transferry.runtime.jobs.summary import Tally
from transferry.runtime.stopping import at_stop, held

# Version of job folders, fingerprints and written bytes; format 1 had no such key.
JOB_FORMAT = 5
JOB, JOURNAL, LOCK = "job.json", "journal.jsonl", "lock"
# Seconds to wait for a lock whose owner is just removing the folder.
LOCK_SECONDS = 0.2
_LINE, _LONGEST_LINE = 1 << 10, 1 << 20
# The folder that becomes the output of a job with Ray.
CHUNKS = "chunks"

Fingerprint = Mapping[str, Any]


@dataclass
class Chunk(Tally):
    """Consecutive rows that are finished as a whole: one line of the journal.

    Attributes:
        first: Number of the first row in the whole input.
        source_sha256: Hash of the input rows; the others are of the chunk's file.
        modified: Time of its last change, in nanoseconds.
        end: Places in the input behind its rows, see `RowReader.place`; empty where none is known.
        session: Number of earlier runs of the job that finished chunks.
    """

    first: int = 0
    source_sha256: str = ""
    sha256: str = ""
    size: int = 0
    session: int = 0
    modified: int = 0
    end: list[Any] = field(default_factory=list)

    @classmethod
    def parse(cls, line: bytes) -> Chunk:
        """Parses a line of the journal; raises ValueError for anything else."""
        return msgspec.convert(decode(line), cls)

    def seal(self, file: Path) -> None:
        """Records the file of the chunk as it is now."""
        found = file.stat()
        self.sha256, self.size, self.modified = sha256(file), found.st_size, found.st_mtime_ns

    def is_intact(self, file: Path) -> bool:
        """Whether a file is the one that was sealed."""
        return file.is_file() and file.stat().st_size == self.size and sha256(file) == self.sha256

    def looks_intact(self, file: Path) -> bool:
        """As `is_intact`, but reads the file only if its size or time have changed."""
        try:
            found = file.stat()
        except FileNotFoundError:
            return False
        same = (found.st_size, found.st_mtime_ns) == (self.size, self.modified)
        return same or self.is_intact(file)


class Part(NamedTuple):
    """A file of an output that is a folder: number of its first row, and of rows and bytes."""

    first: int
    rows: int
    size: int
    sha256: str
    path: Path


class Chunks:
    """Finished chunks in the order of their rows, read from the journal: 16 bytes of memory each.

    Attributes:
        rows: Number of their rows.
    """

    def __init__(self, path: Path) -> None:
        self._path, self.rows = path, 0
        self._firsts, self._places = array("q"), array("q")

    def __len__(self) -> int:
        return len(self._firsts)

    def __iter__(self) -> Iterator[Chunk]:
        if self._places:
            with self._path.open("rb", buffering=_LINE) as file:  # it may jump from line to line
                for place in self._places:
                    file.seek(place)
                    yield Chunk.parse(file.readline())

    def __getitem__(self, place: int) -> Chunk:
        with self._path.open("rb") as file:
            file.seek(self._places[place])
            return Chunk.parse(file.readline())

    def has(self, first: int) -> bool:
        """Whether the chunk that begins at a row is finished."""
        place = bisect_left(self._firsts, first)
        return place < len(self._firsts) and self._firsts[place] == first

    def add(self, chunk: Chunk, place: int) -> None:
        """Adds a chunk whose line begins at a byte of the journal, in place of an earlier line."""
        at = bisect_left(self._firsts, chunk.first)
        if self.has(chunk.first):
            self.rows -= self[at].rows
            self._places[at] = place
        else:
            self._firsts.insert(at, chunk.first)
            self._places.insert(at, place)
        self.rows += chunk.rows

    def load(self, takes: Callable[[Chunk], bool] = lambda chunk: True) -> int:
        """Reads the journal up to a chunk that is not taken, and truncates it there.

        Returns the number of the lines behind it.
        """
        if not self._path.exists():
            return 0
        end, taken = 0, True
        with open_regular(self._path) as file:
            lines = iter(partial(file.readline, _LONGEST_LINE), b"")
            whole = takewhile(lambda line: line.endswith(b"\n"), lines)
            for line in whole:
                try:
                    if taken := takes(chunk := Chunk.parse(line)):
                        self.add(chunk, end)
                except (ValueError, OverflowError):
                    taken = False
                if not taken:
                    break
                end += len(line)
            lost = sum(1 for _ in whole) + (not taken)
            size = os.fstat(file.fileno()).st_size
        if size > end:
            os.truncate(self._path, end)
        return lost

    def keep(self, holds: Callable[[Chunk], bool]) -> Chunks:
        """Returns the chunks for which something holds."""
        kept = Chunks(self._path)
        for chunk, place in zip(self, self._places, strict=True):
            if holds(chunk):
                kept.add(chunk, place)
        return kept


class Journal:
    """The folder of a job and its finished chunks, which form a beginning of the input.

    Attributes:
        own: Pattern of the names in the folder, those of earlier formats included.
        block: Chunks whose files share a folder.
    """

    block = 1000

    # Formats 1 to 3 had the parts in one folder, format 1 other temporary files; see `clear`.
    own = re.compile(
        r"job\.json(\.tmp)?|journal\.jsonl|(output|beside)\.tmp|\d{6}|\d{8}\.(part|tmp)"
        rf"|{TEMPORARY}"
    )

    def __init__(self, folder: Path) -> None:
        self.folder, self.journal = folder, folder / JOURNAL
        self.chunks = Chunks(self.journal)
        self.session = 0
        self._is_new = False

    @classmethod
    @contextmanager
    def locked(cls, folder: Path) -> Iterator[Self]:
        """Locks the folder for this process; removes it again if it holds no finished chunk.

        Raises:
            OSError: The folder cannot be made or locked.
            UsageError: Another job is running there.
        """
        journal = cls(folder)
        with contextlib.ExitStack() as stack:
            with held():
                lock = _lock(folder)
                stack.callback(lock.release, force=True)
                stack.enter_context(at_stop(partial(journal._leave, lock)))
                stack.callback(journal._leave, lock)
            yield journal

    def _leave(self, lock: FileLock) -> None:
        # An OSError here (full disk, read-only folder) must not hide the error before it.
        with contextlib.suppress(OSError):
            if self._is_new and not len(self.chunks):
                self.clear()
            if not (self.folder / JOB).exists():
                if os.name == "nt":  # where nobody can remove a file that is open
                    lock.release(force=True)
                (self.folder / LOCK).unlink(missing_ok=True)
                self.folder.rmdir()

    @property
    def rows(self) -> int:
        """Number of rows in finished chunks."""
        return self.chunks.rows

    @property
    def files(self) -> Iterator[Path]:
        """The files of the finished chunks, in order."""
        return map(self._path, range(len(self.chunks)))

    def is_complete(self, size: Callable[[int], int]) -> bool:
        """Whether the last chunk is finished: the only one shorter than `size` of its first row."""
        return len(self.chunks) > 0 and (last := self.chunks[-1]).rows < size(last.first)

    def begin(self, fingerprint: Fingerprint, *, force: bool) -> str:
        """Resumes the job if it was interrupted, or starts it; returns a note for the user, or "".

        `force` discards the finished chunks of another job.

        Raises:
            InputError: The finished chunks belong to another job, or to another format of folder.
        """
        former, note = self.former(), ""
        # Reading would truncate a journal whose lines have another form.
        if former and (found := former.get("job_format")) != fingerprint.get("job_format"):
            if not force:
                raise InputError(
                    f"{self.folder} was begun by another version of transferry: expected job "
                    f"format {fingerprint.get('job_format')}, found {found or 1}. Finish it with "
                    "that version, or add ",
                    *(Option("force"), " to start anew"),
                )
        elif former is not None:
            note = self.read()
            changes = differences(former, fingerprint)
            if not changes and len(self.chunks):
                self.session = 1 + max(chunk.session for chunk in self.chunks)
                return note
            if len(self.chunks) and not force:
                raise InputError(
                    f"{self.folder} holds {self.rows} rows of a job with other settings: ",
                    *(*changes, ". Finish it with those, or add ", Option("force")),
                    " to start anew",
                )
        self.clear()
        with self.journal.open("xb") as file:
            os.fsync(file.fileno())
        # Before job.json exists: else a power cut might bring back another job's journal.
        sync_folder(self.folder)
        with durable_file(self.folder / JOB) as file:
            file.write(f"{json.dumps(fingerprint, indent=1)}\n".encode())
        sync_folder(self.folder.parent)
        return note

    @property
    def parts(self) -> Iterator[Part]:
        """The finished chunks as files of an output, without empty ones behind the first."""
        for number, (chunk, path) in enumerate(zip(self.chunks, self.files, strict=True)):
            if chunk.rows or not number:
                yield Part(chunk.first, chunk.rows, chunk.size, chunk.sha256, path)

    @contextmanager
    def next_file(self) -> Iterator[BinaryIO]:
        """Opens the file of the next chunk; it is on the disk when the `with` ends."""
        path = self._path(len(self.chunks))
        if not path.parent.exists():
            path.parent.mkdir()
            sync_folder(self.folder)
        with durable_file(path) as file:
            yield file

    def append(self, chunk: Chunk) -> None:
        """Marks the chunk as finished whose file was written last."""
        chunk.seal(self._path(len(self.chunks)))
        chunk.session = self.session
        self.extend([chunk])

    def extend(self, chunks: Iterable[Chunk]) -> None:
        """Marks chunks as finished, whose files are on the disk."""
        noted = []
        with self.journal.open("ab") as file:
            for chunk in chunks:
                noted.append((chunk, file.tell()))
                file.write(f"{json.dumps(asdict(chunk))}\n".encode())
            file.flush()
            os.fsync(file.fileno())
        for chunk, place in noted:
            self.chunks.add(chunk, place)

    def clear(self) -> None:
        """Removes everything but the lock."""
        # Also for `_leave`, where this is interrupted: there is nothing to keep.
        self.chunks, self._is_new = Chunks(self.journal), True
        for path in self.folder.iterdir():
            if self.own.fullmatch(path.name):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _path(self, number: int) -> Path:
        return self.folder / f"{number // self.block:06d}" / f"{number:08d}.part"

    @classmethod
    def foreign(cls, folder: Path) -> str:
        """Returns what is wrong with the folder of another program or person; "" if nothing is."""
        if not folder.is_dir():
            return "is not a folder"
        for path in folder.iterdir():
            if path.name != LOCK and not cls.own.fullmatch(path.name):
                return f"holds {path.name}, so it is not the folder of a job"
        return ""

    def former(self) -> Fingerprint | None:
        """Returns the fingerprint of the interrupted job, if there is one."""
        path = self.folder / JOB
        try:
            return read_document(path, dict[str, Any], "begin again") if path.exists() else None
        except InputError:
            return {}

    def read(self) -> str:
        """Reads the finished chunks and truncates the journal where one is torn or damaged.

        Returns a note for the user, or "".
        """
        self.chunks = Chunks(self.journal)
        return told_lost(self.chunks.load(self._follows))

    def _follows(self, chunk: Chunk) -> bool:
        """Whether a chunk begins where the last one ends, and has its file."""
        number = len(self.chunks)
        if number and (last := self.chunks[-1]).first + last.rows != chunk.first:
            return False
        return chunk.is_intact(self._path(number))


def told_lost(chunks: int) -> str:
    """Returns a note on finished chunks without their files; "" for none."""
    told = f"{chunks} finished chunks are damaged or gone and will be computed again"
    return told if chunks else ""


def differences(former: Fingerprint, now: Fingerprint) -> list[str]:
    """Returns parts of a message on the settings in which two jobs differ; [] if in none."""

    def of(job: Fingerprint, name: str) -> Any:
        value = job.get(name)
        return "not set" if value is None else value

    if former.get("job_format") != (expected := now.get("job_format")):
        found = former.get("job_format", 1)
        return [f"job format was {found}, is {expected} in this version of transferry"]
    changed = [name for name in {**former, **now} if of(former, name) != of(now, name)]
    found = ((Option(name), f" was {of(former, name)}, is {of(now, name)}") for name in changed)
    return [part for each in found for part in ("; ", *each)][1:]


def hash_of_hashes(hashes: Iterable[str]) -> str:
    """Returns one hash for several, in order."""
    digest = hashlib.sha256()
    for each in hashes:
        digest.update(each.encode())
    return digest.hexdigest()


def hash_output(path: Path) -> str:
    """Returns the hash of a file, or of a folder's files in the order of their names."""
    return hash_of_hashes(map(sha256, parts_of(path))) if path.is_dir() else sha256(path)


def parts_of(folder: Path) -> list[Path]:
    """Returns the files in a folder of chunks and below it, in order, without its manifest."""
    found = folder.rglob("[!_]*")
    return sorted(path for path in found if path.is_file() and ".old" not in path.parent.suffix)


def _lock(folder: Path) -> FileLock:
    while True:
        folder.mkdir(exist_ok=True)
        lock = FileLock(folder / LOCK)
        try:
            lock.acquire(timeout=LOCK_SECONDS)
            return lock
        except FileNotFoundError:
            continue  # its last owner has just removed the folder
        except Timeout as error:
            raise UsageError(
                f"{folder} is in use: another job writes the same output; wait for it, or name "
                "another output"
            ) from error
