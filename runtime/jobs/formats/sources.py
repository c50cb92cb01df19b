"""The files of an input, and several of them as one."""

from __future__ import annotations

import glob
import io
import os
import stat
from array import array
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Required, TypeAlias, TypedDict, cast

from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.io.documents import read_document
from transferry.runtime.io.lines import open_stream
from transferry.runtime.io.outputs import STANDARD_STREAM
from transferry.runtime.io.whole import unreadable
from transferry.runtime.jobs.formats.detection import named_format
from transferry.runtime.jobs.formats.remote_file import RemoteFile, RemoteFolder, Source, is_url
from transferry.runtime.jobs.formats.rows import FIRST_ROWS, InputRow, RowReader
from transferry.runtime.settings import path_of

# In the folder that `save_to_disk` of Hugging Face datasets writes: its files, or its splits.
STATE, SPLITS = "state.json", "dataset_dict.json"
# Files of programs, above those of a table, that tell which of these count.
_LOGS = {
    "_delta_log/*": "Delta Lake",
    ".hoodie/*": "Hudi",
    "_spark_metadata/*": "Spark streaming",
    "metadata/v[0-9]*.metadata.json": "Iceberg",
    f"metadata/{'[0-9]' * 5}-*.metadata.json": "Iceberg",
}
# Bytes of a file that are kept; rows beyond are read twice.
_MOST_KEPT = 1 << 26
# A file of rows or several.
Inputs: TypeAlias = Source | str | Sequence[Source | str]


class _State(TypedDict, total=False):
    """STATE: the files, each with its name, and files with the numbers of the chosen rows."""

    _data_files: Required[list[dict[str, Any]]]
    _indices_data_files: Any


def open_sources(inputs: Inputs) -> list[Source]:
    """Returns the files of an input; see `expand`."""
    one = not isinstance(inputs, Iterable) or isinstance(inputs, str | bytes)
    return expand([inputs] if one else inputs)  # type: ignore[list-item, arg-type]


def expand(names: Sequence[Source | str]) -> list[Source]:
    """Returns the files that paths, patterns, URLs and dataset folders stand for, in order.

    Raises:
        InputError: A pattern names no file, a folder is no dataset, or a file is one of a table
            that a log describes.
        UsageError: Standard input is one of several, or the list is empty.
    """
    found = [source for name in names for source in _expanded(name)]
    if not found:
        raise UsageError("expected an input, found none; name a file")
    if len(found) > 1 and STANDARD_STREAM in found:
        raise UsageError("standard input cannot be one of several inputs; name files")
    local = [each.absolute() for each in found if isinstance(each, Path)]
    parents = {each.parent for each in local if found != [STANDARD_STREAM]}
    _require_no_log(place for each in parents for place in (each, *each.parents))
    return found


def _expanded(name: Source | str) -> Sequence[Source]:
    if isinstance(name, str) and is_url(name):
        name = RemoteFile(name)
    if isinstance(name, RemoteFile):
        found = name.matches()
        if found != [name]:
            _require_no_log(each.folder for each in found)
        return found
    if name == "":  # to pathlib, the working folder
        raise UsageError("expected a path, found nothing; name a file")
    path = path_of("inputs", name)
    if path.is_dir():
        whole = path.absolute()
        _require_no_log([whole, *whole.parents])
        return _dataset(path)
    if path == STANDARD_STREAM or path.exists() or not glob.has_magic(str(path)):
        return [path]
    files = sorted(map(Path, glob.glob(str(path), recursive=True)))  # noqa: PTH207  # any root
    if not files:
        raise InputError(f"{path}: expected files of this pattern, found no file")
    return [each for file in files for each in ([file] if not file.is_dir() else _dataset(file))]


def reads_once(source: Source | None) -> bool:
    """Whether a file can be read only once: standard input, a pipe or a device."""
    if not isinstance(source, Path):
        return False
    return source == STANDARD_STREAM or (source.exists() and not source.is_file())


def sampled(reader: RowReader) -> Collection[str]:
    """Returns the fields of the first rows, in order; none of a pipe, whose rows may take time."""
    once = any(reads_once(file.source) for file in reader.steady)
    rows = () if once else reader.rows(0, FIRST_ROWS)
    usable = (row for row in rows if row.fields or isinstance(row.text, str))
    return dict.fromkeys(name for row in usable for name in (*row.fields, reader.layout.column))


def _dataset(folder: Path) -> list[Path]:
    """Returns the files of a folder of rows, such as a dataset of Hugging Face."""
    if (folder / SPLITS).is_file():
        splits = read_document(folder / SPLITS, dict[str, list[str]], "save the dataset again")
        named = ", ".join(str(folder / split) for split in splits.get("splits", ()))
        raise InputError(f"{folder} is a dataset of several splits; name one of them: {named}")
    if not (folder / STATE).is_file():
        return _table(folder)
    state = read_document(folder / STATE, _State, "save the dataset again")
    files = state["_data_files"]
    names: list[Any] = [file.get("filename") for file in files]
    # Earlier versions save all rows of a table that was filtered, shuffled or split.
    if state.get("_indices_data_files") or any({"skip", "take"} & {*file} for file in files):
        raise InputError(
            f"{folder}: expected a dataset with rows of its own, found a choice of the rows in "
            f"{names}; load it with the version of datasets that saved it, and save it again "
            "after flatten_indices()"
        )
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise InputError(f"{folder / STATE}: expected the files of a dataset, found {names}")
    return [folder / name for name in names]


def _require_no_log(folders: Iterable[Path | RemoteFolder]) -> None:
    """Raises InputError for the folder of a table whose log tells which of its files count."""
    for folder in dict.fromkeys(folders):
        for log, kind in _LOGS.items():
            if any(True for _ in folder.glob(log)):
                raise InputError(
                    f"{folder}: expected files, found a table of {kind}, whose files hold rows of "
                    "former versions too; write its rows to Parquet and name that"
                )


def _table(folder: Path) -> list[Path]:
    """Returns the files of one format in a folder and below it, as Spark and Ray write a table."""
    files = sorted(_below(folder))
    found = {named_format(path)[0] for path in files}
    if len(found) != 1:
        said = ", ".join(sorted(f".{name}" if name else "none" for name in found))
        raise InputError(
            f"{folder}: expected a folder with files of one format, found "
            f"{f'the endings {said}' if said else 'no file'}; name its files, such as "
            f"'{folder}/*.jsonl'"
        )
    return files


def _below(folder: Path) -> Iterator[Path]:
    """Yields the files in and below a folder, but for those of programs, such as _SUCCESS."""

    def refuse(error: OSError) -> None:
        raise unreadable(error.filename, error)

    for place, folders, names in os.walk(folder, onerror=refuse):
        for name in (*folders, *names):
            path, own = Path(place, name), name.startswith((".", "_"))
            if own and name in folders:
                folders.remove(name)
            elif not own and path.is_file():
                yield path
            elif not own and path.is_symlink():
                raise InputError(
                    f"{path}: expected a file, found a link to a folder or to nothing; name the "
                    "folders that count as inputs, or remove the link"
                )


class Steady:
    """A file of rows that must stay as it is from the first time that it is opened.

    Attributes:
        version: Facts that change with the file; None before it is opened.
        kept: Bytes that need not be read again.
    """

    def __init__(self, source: Source) -> None:
        self.source, self.version = source, cast("tuple[Any, ...] | None", None)
        self.kept: Kept | None = None
        self._file: io.BufferedReader | None = None
        self._at = 0

    @property
    def at(self) -> int:
        """Bytes read since it was opened last, of those in the file."""
        file = self._file
        known = file is not None and not file.closed and file.seekable()
        return file.tell() if file is not None and known else self._at

    @property
    def size(self) -> int:
        """Bytes of the file; 0 where they are not known."""
        if self.version is None and isinstance(self.source, Path):
            self.require_same()
        known = str((self.version or (0,))[0])
        return int(known) if known.isdecimal() else 0

    def __str__(self) -> str:
        return str(self.source)

    @contextmanager
    def opened(self) -> Iterator[io.BufferedReader]:
        """Opens the file; raises InputError if it has changed, now or at its end."""
        with open_stream(self.source) as file:
            self.require_same(getattr(file.raw, "version", None))
            self._file = file
            try:
                yield io.BufferedReader(_Keeping(file, self.kept)) if self.kept else file
            finally:
                self._at, self._file = self.at, None
            self.require_same()

    @contextmanager
    def watched(self) -> Iterator[Source]:
        """Gives the file to a library that opens it itself; raises as `opened`."""
        self.require_same()
        yield self.source
        self.require_same()

    def require_same(self, known: object = None) -> None:
        """Raises InputError if the file has changed; `known` are its facts, if they are known."""
        version = known if isinstance(known, tuple) else self._found()
        self.version = self.version or version
        if version != self.version:
            found = f"found {version[0]}" if version[:1] != self.version[:1] else "changed later"
            raise InputError(
                f"{self} has changed since it was first read: expected {self.version[0]} bytes, "
                f"{found}. Run the command again once the file stays as it is"
            )

    def _found(self) -> tuple[Any, ...]:
        if isinstance(self.source, RemoteFile):
            return self.source.version()
        if self.source == STANDARD_STREAM:
            return ()
        try:
            found = self.source.stat()
        except (OSError, ValueError):  # opening it tells
            return ()
        return (found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else ()


@dataclass
class Kept:
    """Bytes of a file from a place on, kept as they are first read."""

    start: int
    content: bytearray = field(default_factory=bytearray)


class _Keeping(io.RawIOBase):
    """A file whose bytes are read once where they are kept."""

    def __init__(self, file: io.BufferedReader, kept: Kept) -> None:
        self._file, self._kept, self._at = file, kept, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (self._at if whence == io.SEEK_CUR else 0)
        if whence == io.SEEK_END:
            self._at = self._file.seek(offset, whence)
        return self._at

    def readinto(self, buffer: Any) -> int:
        content, at = self._kept.content, self._at - self._kept.start
        if 0 <= at < len(content):
            found = bytes(content[at : at + len(buffer)])
        else:
            self._file.seek(self._at)
            found = self._file.read1(len(buffer))
            if at == len(content) < _MOST_KEPT:
                content += found
        self._at += len(found)
        buffer[: len(found)] = found
        return len(found)


class Series(RowReader):
    """Several files, one after another; rows are numbered throughout."""

    def __init__(self, readers: Sequence[RowReader]) -> None:
        """Joins readers.

        Raises:
            InputError: Their columns differ.
        """
        first = next((each for each in readers if each.tells), readers[0]).layout
        for reader in readers:
            other = reader.layout
            same = first.format == "jsonl" or sorted(first.names) == sorted(other.names)
            same &= not reader.tells or first.texts == other.texts
            if first.format != other.format or not same:
                raise InputError(
                    f"{other.path}: expected {first}, as in {first.path}, found {other}; run a job "
                    "for each"
                )
            reader.layout = replace(first, path=other.path, schema=other.schema)
        schema = first.schema
        for place, column in enumerate(schema or ()):  # nulls of any file need a place
            given = [reader.layout.schema.field(column.name).nullable for reader in readers]
            schema = schema.set(place, column.with_nullable(any(given)))
        path = f"{readers[0].layout.path} (first of {len(readers)})"
        self.layout = replace(first, path=path, schema=schema)
        self._readers, self._counts, self._reading = readers, dict[int, int](), 0

    @property
    def steady(self) -> Sequence[Steady]:
        return [file for reader in self._readers for file in reader.steady]

    def files(self, first: int, end: int | None = None) -> list[Any]:
        found, start = list[Any](), 0
        for reader, count in zip(self._readers, self.counts, strict=True):
            if count is None or start + count >= first:
                found += reader.files(first, end)
            if end is not None and (count is None or start + count > end):
                break
            start += count or 0
        return found

    @property
    def counts(self) -> list[int | None]:
        return [self._counts.get(place, reader.count) for place, reader in enumerate(self._readers)]

    @property
    def count(self) -> int | None:  # type: ignore[override]
        counts = self.counts
        return None if None in counts else sum(cast("list[int]", counts))

    @property
    def seeks(self) -> bool:  # type: ignore[override]
        return all(reader.seeks for reader in self._readers)

    def number(self, folder: Path | None = None, share: float = 0.0) -> None:
        begin = int(share * len(self._readers))
        for reader in (*self._readers[begin:], *self._readers[:begin]):
            reader.number(folder, share)

    def outline(self) -> list[Any]:
        return [reader.outline() for reader in self._readers]

    def start(self, at: int) -> int:
        place = bisect_right(self.starts, at) - 1
        if place == len(self._readers) or at == (begin := self.starts[place]):
            return at
        return begin + self._readers[place].start(at - begin)

    def cut(self, begin: int, end: int) -> None:
        kept = []
        for reader, low, high in zip(self._readers, self.starts, self.starts[1:], strict=False):
            if max(begin, low) < min(end, high):
                kept.append(reader)
                if begin > low or end < high:
                    reader.cut(max(begin, low) - low, min(end, high) - low)
        self._readers = kept
        del self.starts

    @cached_property
    def boundaries(self) -> Sequence[int]:  # type: ignore[override]
        found = array("q")
        for reader in self._readers:
            start = found[-1] if found else 0
            found.extend(start + row for row in reader.boundaries[bool(found) :])
        return found

    @cached_property
    def starts(self) -> list[int]:
        """Bytes of the files before each one, and of all."""
        return [0, *accumulate(reader.size for reader in self._readers)]

    @property
    def size(self) -> int:
        return self.starts[-1]

    def share(self, place: Any = None) -> float:
        number = self._reading if place is None else place[0]
        inner = self._readers[number].share(None if place is None else place[2])
        before, after = self.starts[number : number + 2]
        return (before + inner * (after - before)) / max(1, self.starts[-1])

    @property
    def keeps(self) -> bool:  # type: ignore[override]
        return all(reader.keeps for reader in self._readers)

    def place(self, first: int) -> Any:
        """Returns the number of a file, that of its first row, and a place in it."""
        number, start, counts = 0, 0, self.counts
        while (count := counts[number]) is not None and start + count <= first:
            if number + 1 == len(counts):
                break
            number, start = number + 1, start + count
        return [number, start, self._readers[number].place(first - start)]

    def keep(self, first: int, rows: int, place: Any) -> tuple[int, Any]:
        begun, start, inner = place
        for file in self.steady:
            file.kept = None
        # Files before the first row are skipped, whichever of them has the rows.
        self._counts = dict.fromkeys(range(begun), 0) | ({begun - 1: start} if begun else {})
        found = 0
        for number in range(begun, len(self._readers)):
            inner = [0, 0] if number > begun else inner
            reader = self._readers[number]
            here = first + found - start
            more, inner = reader.keep(here, rows - found, inner)
            found += more
            if found == rows:
                break
            self._counts[number] = here + more
            start += here + more
        return found, [number, start, inner]

    def rows(self, first: int = 0, last: int | None = None) -> Iterator[InputRow]:
        """Streams rows first to last - 1; files before the first row are read only once."""
        start = 0
        for place, reader in enumerate(self._readers):
            count = self._counts.get(place, reader.count)
            if count is None or start + count > first:
                if last is not None and start >= last:
                    return
                # Of a file whose rows are not counted, none is skipped unseen.
                begin, count = (0 if count is None else max(0, first - start)), count or 0
                reader.offset, self._reading = start, place
                for row in reader.rows(begin):
                    count = max(count, row.number - start + 1)
                    if last is not None and row.number >= last:
                        return
                    if row.number >= first:
                        yield row
                self._counts[place] = count
            start += count
