"""What a job has finished so far, in a folder beside its output that outlives any interruption.

    OUT.job/job.json        what the job goes by; a job is continued only by what is the same
    OUT.job/journal.jsonl   a line for each finished shard
    OUT.job/00000000.part   its answers, in the format of the output
    OUT.job/lock            locked while a job runs; a process that is killed locks nothing

A shard is finished when its line is on the disk, and its part is there before. So whenever a
process or a machine stops, what the journal names is whole, and everything else is thrown away.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.files import durable_file, sha256, sync_folder

JOB, JOURNAL, LOCK = "job.json", "journal.jsonl", "lock"
# Where the output and what lies beside it are written, before they get their names.
OUTPUT, BESIDE = "output.tmp", "beside.tmp"
OWN = re.compile(r"job\.json(\.tmp)?|journal\.jsonl|(output|beside)\.tmp|\d{8}\.(part|tmp)")

Fingerprint = Mapping[str, Any]


@dataclass
class Tally:
    """Rows that were answered, counted.

    Attributes:
        rows: Answered, errors included.
        errors: Of them, those that have an error instead of an answer, by its kind.
        truncated: Of them, those of which an answer read the beginning alone.
        source_tokens: Tokens read, end tokens included.
        target_tokens: Tokens of the best answers, end tokens left out; or tokens scored.
        log_probability: Of all tokens scored, in nats.
        seconds: That it took.
        first_error: Where and what the first error is.
    """

    rows: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    truncated: int = 0
    source_tokens: int = 0
    target_tokens: int = 0
    log_probability: float = 0.0
    seconds: float = 0.0
    first_error: str = ""

    @property
    def bad_rows(self) -> int:
        """How many rows have an error instead of an answer."""
        return sum(self.errors.values())

    def add(self, other: Tally) -> None:
        """Counts what another has counted."""
        self.rows += other.rows
        for kind, count in other.errors.items():
            self.errors[kind] = self.errors.get(kind, 0) + count
        self.truncated += other.truncated
        self.source_tokens += other.source_tokens
        self.target_tokens += other.target_tokens
        self.log_probability += other.log_probability
        self.seconds += other.seconds
        self.first_error = self.first_error or other.first_error


@dataclass
class Shard(Tally):
    """Consecutive rows that were finished as a whole: a line of the journal.

    Attributes:
        first: Number of the first row, in the whole input.
        source_sha256: Of what the rows were read from.
        sha256: Of the part.
        size: Of the part, in bytes.
        session: How many runs of the job had finished shards before this one's did.
    """

    first: int = 0
    source_sha256: str = ""
    sha256: str = ""
    size: int = 0
    session: int = 0


class Journal:
    """The folder of a job, and what it says is finished.

    Attributes:
        own: What the names of its files match.
    """

    own = OWN

    def __init__(self, folder: Path) -> None:
        """Looks at nothing yet; see `locked`."""
        self.folder = folder
        self.shards: list[Shard] = []
        self.session = 0
        self._is_new = False

    @classmethod
    @contextmanager
    def locked(cls, folder: Path) -> Iterator[Journal]:
        """The folder for this process alone; one in which nothing is finished is removed again.

        Raises:
            OSError: The folder cannot be made or locked.
            UsageError: Another job is at work there.
        """
        journal, lock = cls(folder), None
        try:
            lock = _lock(folder)
            yield journal
        except KeyboardInterrupt:
            if lock is None:  # the folder was just made, or is another's
                with contextlib.suppress(OSError, UsageError):
                    lock = _lock(folder)
            raise
        finally:
            if lock is not None:
                journal._leave(lock)

    def _leave(self, lock: BinaryIO) -> None:
        # Where the disk is full or the folder read-only, there is something else to be told.
        with lock, contextlib.suppress(OSError):
            if self._is_new and not self.shards:
                self.clear()
            if not (self.folder / JOB).exists():
                (self.folder / LOCK).unlink(missing_ok=True)
                self.folder.rmdir()

    @property
    def rows(self) -> int:
        """How many rows are finished."""
        return sum(shard.rows for shard in self.shards)

    @property
    def parts(self) -> list[Path]:
        """The answers of the finished shards, in order."""
        return [self._part(number) for number in range(len(self.shards))]

    def begin(self, fingerprint: Fingerprint, *, force: bool) -> str:
        """Goes on where the same job was interrupted, or begins.

        Args:
            fingerprint: What the job goes by, as JSON values.
            force: Throw away what another job has finished.

        Returns:
            What a person should know of it, or nothing.

        Raises:
            InputError: The shards that are finished are another job's.
            UsageError: The folder is none of a job.
        """
        self._require_own()
        former, note = self.former(), ""
        if former is not None:
            note = self.read()
            changes = differences(former, fingerprint)
            if not changes and self.shards:
                self.session = 1 + max(shard.session for shard in self.shards)
                return note
            if self.shards and not force:
                raise InputError(
                    f"{self.folder} holds {self.rows} rows of a job that went by something else: "
                    f"{'; '.join(changes)}. Run it as it was begun, or add --force to throw them "
                    "away"
                )
        self.clear()
        self._is_new = True
        with (self.folder / JOURNAL).open("wb") as file:
            os.fsync(file.fileno())
        # Before there is a job.json: or a power cut might bring back another job's journal.
        sync_folder(self.folder)
        with durable_file(self.folder / JOB, self.folder / f"{JOB}.tmp") as file:
            file.write(f"{json.dumps(fingerprint, indent=1)}\n".encode())
        sync_folder(self.folder.parent)
        return note

    @contextmanager
    def part(self) -> Iterator[BinaryIO]:
        """A file for the answers of the next shard."""
        path = self._part(len(self.shards))
        with durable_file(path, path.with_suffix(".tmp")) as file:
            yield file

    def append(self, shard: Shard) -> None:
        """Writes down that the shard is finished whose part was written last."""
        part = self._part(len(self.shards))
        shard.sha256, shard.size = sha256(part), part.stat().st_size
        shard.session = self.session
        with (self.folder / JOURNAL).open("ab") as file:
            file.write(f"{json.dumps(asdict(shard))}\n".encode())
            file.flush()
            os.fsync(file.fileno())
        self.shards.append(shard)

    def clear(self) -> None:
        """Throws away all that is finished; the lock stays."""
        self.shards = []
        for path in self.folder.iterdir():
            if self.own.fullmatch(path.name):
                path.unlink()

    def _part(self, number: int) -> Path:
        return self.folder / f"{number:08d}.part"

    def _require_own(self) -> None:
        """Refuses a folder in which something of somebody else would be thrown away."""
        for path in self.folder.iterdir():
            if path.name != LOCK and not self.own.fullmatch(path.name):
                raise UsageError(
                    f"{self.folder} holds {path.name}, so it is not the folder of a job; remove "
                    "it, or name another output"
                )

    def former(self) -> Fingerprint | None:
        """What the job went by that was interrupted, if one was."""
        try:
            former = json.loads((self.folder / JOB).read_bytes())
        except FileNotFoundError:
            return None
        except ValueError:
            return {}
        return former if isinstance(former, dict) else {}

    def read(self) -> str:
        """Reads the finished shards, and cuts off what is torn or damaged.

        Returns:
            What a person should know of it, or nothing.
        """
        path = self.folder / JOURNAL
        content = path.read_bytes() if path.exists() else b""
        lines, end = content.split(b"\n")[:-1], 0
        first = None
        for line in lines:
            try:
                shard = Shard(**json.loads(line))
            except (ValueError, TypeError):
                break
            part = self._part(len(self.shards))
            if first not in (None, shard.first) or not is_intact(part, shard):
                break
            self.shards.append(shard)
            first = shard.first + shard.rows
            end += len(line) + 1
        if end < len(content):
            with path.open("r+b") as file:
                file.truncate(end)
                os.fsync(file.fileno())
        if lost := len(lines) - len(self.shards):
            return f"{lost} finished shards are damaged or gone, and are computed again"
        return ""


def differences(former: Fingerprint, now: Fingerprint) -> list[str]:
    """What two jobs do not have in common, each as "NAME was …, is …"."""
    missing = "not set"
    return [
        f"{name} was {former.get(name, missing)}, is {now.get(name, missing)}"
        for name in {**former, **now}
        if former.get(name, missing) != now.get(name, missing)
    ]


def hash_of_hashes(hashes: Iterable[str]) -> str:
    """Returns what stands for several hashes, in order."""
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def hash_output(path: Path) -> str:
    """Returns the hash of a file, or that of a folder's files in the order of their names."""
    if path.is_dir():
        return hash_of_hashes(sha256(part) for part in sorted(path.iterdir()))
    return sha256(path)


def is_intact(part: Path, shard: Shard) -> bool:
    """Whether a part is as it was finished."""
    return part.is_file() and part.stat().st_size == shard.size and sha256(part) == shard.sha256


def _lock(folder: Path) -> BinaryIO:
    while True:
        folder.mkdir(exist_ok=True)
        try:
            file = (folder / LOCK).open("ab")
        except FileNotFoundError:
            continue  # whoever had it removes the folder just now
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # What was opened may have been removed before it was locked.
            if os.path.samestat(os.fstat(file.fileno()), (folder / LOCK).stat()):
                return file
        except FileNotFoundError:
            pass
        except BlockingIOError as error:
            file.close()
            raise UsageError(
                f"{folder} is in use: another job writes the same output; wait for it, or name "
                "another output"
            ) from error
        except KeyboardInterrupt:
            file.close()  # or whoever cleans up would wait for this lock
            raise
        file.close()
