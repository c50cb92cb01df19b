"""A folder whose files match recorded hashes, and stay so while they are used.

A link is followed once, when its file is first opened: the same target is hashed, watched and used,
wherever the link leads later. Only regular files are opened. A file that is read whole is hashed in
memory. A file that onnxruntime maps from the disk must keep the size and the times that it had when
it was hashed; docs/security.md names the remaining gaps.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from transferry.runtime.errors import InputError
from transferry.runtime.hardware import usable_cores
from transferry.runtime.io.whole import open_regular, sha256

# One plain component of a path: no separator, no "..", no hidden file, nothing for a shell or a
# terminal to interpret. \Z, since $ also matches before a newline at the end.
PLAIN = r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,127}"
Name = Annotated[str, Meta(pattern=rf"^{PLAIN}\Z")]
RelativePath = Annotated[str, Meta(pattern=rf"^{PLAIN}(/{PLAIN}){{0,3}}\Z")]

REMEDY = "copy the bundle again, or export it again"


@dataclass(frozen=True)
class FileRecord:
    """Hash and size of a file."""

    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    size: Annotated[int, Meta(ge=0)]

    @classmethod
    def of(cls, path: Path) -> Self:
        """Returns the record of a file."""
        return cls(sha256(path), path.stat().st_size)


def records(folder: Path) -> dict[str, FileRecord]:
    """Returns the record of each file of a folder, by path in it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): FileRecord.of(path) for path in files}


# Size in bytes, and times of the last change of content and of the file's entry, in ns. Every
# write sets both times, and no program can set the second.
Stamp = tuple[int, int, int]


class SealedFolder:
    """Files that match their records, by path in the folder."""

    def __init__(self, path: Path, records: Mapping[str, FileRecord]) -> None:
        self.path = path
        self.records = records
        self._stamps: dict[str, Stamp] = {}
        self._watched: dict[str, Path] = {}
        self._targets: dict[str, Path] = {}

    def check(self) -> None:
        """Raises InputError for a file that is missing, not regular, or not as recorded."""
        with ThreadPoolExecutor(usable_cores()) as pool:  # hashing leaves Python alone
            self._stamps = dict(zip(self.records, pool.map(self._stamp, self.records), strict=True))

    def read(self, name: str) -> bytes:
        """Returns the content of a file whose hash matches; raises InputError otherwise."""
        record = self._record(name)
        with self._open(name) as file:
            content = file.read(record.size + 1)
        self._require_recorded(name, len(content), hashlib.sha256(content).hexdigest())
        return content

    def array(self, name: str, kind: str, offset: int, shape: tuple[int, ...]) -> NDArray[Any]:
        """Returns a read-only copy of an array that is stored in a file; raises as `watch`."""
        self.watch(name)
        with self._open(name) as file:
            file.seek(offset)
            values = np.empty(shape, kind)
            file.readinto(values.reshape(-1).view(np.uint8).data)
        self.require_unchanged()
        values.setflags(write=False)
        return values

    def watch(self, name: str) -> Path:
        """Returns the path, without links, of a file for a program that maps it.

        `require_unchanged` checks it from then on. Raises InputError for a file that is not
        recorded, or differs from its record.
        """
        if name not in self._stamps:
            self._stamps[name] = self._stamp(name)
        path = self._watched[name] = self._target(name)
        self._require_unchanged(name, path)
        return path

    def require_plain(self) -> None:
        """Raises InputError for links, hard ones too, which onnx refuses; others `watch`."""
        whole = Path(os.path.realpath(self.path))
        for name in self.records:
            target = self._target(name)
            if target != whole / name or target.stat().st_nlink > 1:
                raise InputError(
                    f"{self.path / name} is a link, which only `run`, `score` and `verify` without "
                    f"--checkpoint follow; copy the folder and its targets: cp -rL {self.path} COPY"
                )

    def require_unchanged(self) -> None:
        """Raises InputError if a watched file was written to since it was hashed.

        If only its entry changed, by `chmod` or a hard link, a file is hashed again.
        """
        for name, path in self._watched.copy().items():  # other threads may be opening graphs
            self._require_unchanged(name, path)

    def _require_unchanged(self, name: str, path: Path) -> None:
        stamp = self._stamps[name]
        try:
            found = _stamp_of(path.lstat())
        except OSError as error:
            raise self._changed(name) from error
        if found != stamp:
            if found[:2] != stamp[:2]:
                raise self._changed(name)
            self._stamps[name] = self._stamp(name)

    def _stamp(self, name: str) -> Stamp:
        """Hashes a file and returns its stamp from before the hashing."""
        record = self._record(name)
        with self._open(name) as file:
            stamp = _stamp_of(os.fstat(file.fileno()))
            # The size first: a file that grew to terabytes is not read.
            digest = ""
            if stamp[0] == record.size:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        self._require_recorded(name, stamp[0], digest)
        return stamp

    def _record(self, name: str) -> FileRecord:
        if name not in self.records:
            raise InputError(
                f"{self.path / name} is used, but not listed among the files; {REMEDY}"
            )
        return self.records[name]

    def _require_recorded(self, name: str, size: int, digest: str) -> None:
        record, path = self.records[name], self.path / name
        if size != record.size:
            raise InputError(f"{path} must have {record.size} bytes, but has {size}; {REMEDY}")
        if digest != record.sha256:
            raise InputError(
                f"{path} has changed: its sha256 must be {record.sha256[:12]}…, but is "
                f"{digest[:12]}…; {REMEDY}"
            )

    def _changed(self, name: str) -> InputError:
        return InputError(
            f"{self.path / name} was changed while it was in use, so no answer is given any more; "
            f"{REMEDY}, and repeat the command: a job continues where it was"
        )

    def _target(self, name: str) -> Path:
        """Returns the path of a file without links; a link that changes later has no effect."""
        return self._targets.setdefault(name, Path(os.path.realpath(self.path / name)))

    @contextmanager
    def _open(self, name: str) -> Iterator[BufferedReader]:
        path, target = self.path / name, self._target(name)
        if not os.path.lexists(target):
            if os.path.lexists(path):
                raise InputError(
                    f"{path} is a link to {target}, which is missing; copy the bundle again, with "
                    "the targets of its links (cp -rL)"
                )
            raise InputError(f"{path} is missing; {REMEDY}")
        with open_regular(path, lambda _, flags: os.open(target, flags)) as file:
            yield file


def _stamp_of(found: os.stat_result) -> Stamp:
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns
