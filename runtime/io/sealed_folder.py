"""A folder whose files match recorded hashes, and stay so while they are used.

A file is opened relative to its folder, without following a link, and only if it is a regular file.
A file that is read whole is hashed in memory. A file that onnxruntime maps from the disk must keep
the size and the times that it had when it was hashed; docs/security.md names the remaining gaps.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from transferry.runtime.errors import InputError
from transferry.runtime.hardware import usable_cores
from transferry.runtime.io.whole import open_regular

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


# Size in bytes, and times of the last change of content and of the file's entry, in ns. Every
# write sets both times, and no program can set the second.
Stamp = tuple[int, int, int]


class SealedFolder:
    """Files that match their records, by path in the folder."""

    def __init__(self, path: Path, records: Mapping[str, FileRecord]) -> None:
        """Opens nothing yet."""
        self.path = path
        self.records = records
        self._stamps: dict[str, Stamp] = {}
        self._watched: dict[str, Path] = {}

    def check(self) -> None:
        """Checks every file against its record.

        Raises:
            InputError: A file is missing, no regular file, or differs from its record.
        """
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
        """Returns the path of a file for a program that maps it; `require_unchanged` checks it.

        Raises:
            InputError: The file is not recorded, or differs from its record.
        """
        if name not in self._stamps:
            self._stamps[name] = self._stamp(name)
        path = self._watched[name] = self.path / name
        self._require_unchanged(name, path)
        return path

    def require_unchanged(self) -> None:
        """Checks that no watched file was written to since it was hashed.

        If only its entry changed, by `chmod` or a hard link, a file is hashed again.

        Raises:
            InputError: A file changed.
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

    @contextmanager
    def _open(self, name: str) -> Iterator[BufferedReader]:
        path = self.path / name
        if not os.path.lexists(path):
            raise InputError(f"{path} is missing; {REMEDY}")
        with open_inside(self.path, name) as file:
            yield file


@contextmanager
def open_inside(folder: Path, name: str) -> Iterator[BufferedReader]:
    """Opens a regular file inside a folder, without following a link below the folder itself.

    Raises:
        InputError: The file is missing, or a link is on the way to it.
    """
    with open_regular(folder / name, lambda _, flags: _open_inside(folder, name, flags)) as file:
        yield file


def _stamp_of(found: os.stat_result) -> Stamp:
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _open_inside(folder: Path, name: str, flags: int) -> int:
    """Opens a file inside a folder, component by component, refusing links."""
    *folders, last = name.split("/")
    if os.open not in os.supports_dir_fd:  # Windows
        places = [folder.joinpath(*folders[: n + 1]) for n in range(len(folders))]
        if any(place.is_symlink() for place in (*places, folder / name)):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        return os.open(folder / name, flags)
    where = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for each in folders:
            inner = os.open(each, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=where)
            os.close(where)
            where = inner
        return os.open(last, flags | os.O_NOFOLLOW, dir_fd=where)
    finally:
        os.close(where)
