"""Files elsewhere, by URL: s3://, gs://, https://, hf:// and the others of fsspec."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias, cast

from transferry.runtime.errors import InputError, UsageError, from_extra, install_command

# Bytes that are read ahead.
_BLOCK = 1 << 22
# Packages whose exceptions are not faults of a connection: readers of the bytes, and ours.
_READERS = ("builtins", "gzip", "zlib", "zstandard", "pyarrow", "transferry")


def is_url(text: str) -> bool:
    """Whether a text names a file elsewhere: a path with a scheme, such as s3://bucket/a.jsonl."""
    scheme, mark, _ = text.partition("://")
    return bool(mark) and scheme.replace("+", "").replace("-", "").isalnum()


# Facts of a file in a store that change with its content.
_VERSION = ("size", "ETag", "etag", "md5", "md5Hash", "LastModified", "last_modified", "mtime")
# Schemes in whose addresses a container stands before the @.
_CONTAINERS = ("abfs", "abfss", "wasb", "wasbs")
HIDDEN = "***"


def shown_url(url: str) -> str:
    """Returns a URL without user, password and values of its query: each may be a secret."""
    scheme, mark, rest = url.partition("://")
    place, rest = re.fullmatch(r"([^/?#]*)(.*)", rest, re.S).groups()  # type: ignore[union-attr]
    if "@" in place and scheme not in _CONTAINERS:
        place = f"{HIDDEN}@{place.rpartition('@')[2]}"
    path, *parts = re.split(r"([?&;#])", rest)
    hidden = (re.sub(r"(?s)^([^=]*=)?.+", rf"\1{HIDDEN}", part) for part in parts[1::2])
    return "".join((scheme, mark, place, path, *chain(*zip(parts[::2], hidden, strict=True))))


def without_secrets(text: str) -> str:
    """Returns a text with every URL in it as `shown_url` shows it."""
    return re.sub(r"\w[\w+.-]*://[^\s'\"<>]+", lambda found: shown_url(found[0]), text)


@dataclass(frozen=True)
class RemoteFile:
    """A file elsewhere, by URL, which is read as it streams in and never stored."""

    url: str = field(repr=False)

    def __str__(self) -> str:
        return shown_url(self.url)

    @property
    def suffix(self) -> str:
        """The ending of its name."""
        return PurePosixPath(self.url.split("?")[0]).suffix

    def with_suffix(self, suffix: str) -> RemoteFile:
        """Returns the URL with another ending of the name."""
        path = self.url.split("?")[0]
        return RemoteFile(path.removesuffix(self.suffix) + suffix)

    @contextmanager
    def opened(self) -> Iterator[io.BufferedReader]:
        """Opens it; an OSError inside the `with` counts as one of reading.

        Raises:
            InputError: There is no such file, or it cannot be read.
            UsageError: The package for such URLs is not installed.
        """
        if self._is_http:
            from transferry.runtime.io.http_file import HttpFile

            with _told(self.url):
                yield io.BufferedReader(HttpFile(self.url, str(self)), 1 << 18)
            return
        # Not fsspec.open, whose block size s3fs takes for an option of its session.
        with _store(self.url) as (system, path), system.open(path, "rb", block_size=_BLOCK) as file:
            yield io.BufferedReader(cast(io.RawIOBase, file), 1 << 18)

    @property
    def _is_http(self) -> bool:
        return self.url.partition("://")[0].lower() in ("http", "https")

    def version(self) -> tuple[Any, ...]:
        """Returns facts that change with the file; raises as `opened`."""
        if self._is_http:
            with self.opened() as file:
                return cast(Any, file.raw).version  # type: ignore[no-any-return]
        with _store(self.url) as (system, path):
            system.invalidate_cache()
            known = system.info(path)
            return tuple(str(known[name]) for name in _VERSION if known.get(name) is not None)

    def matches(self) -> list[RemoteFile]:
        """Returns the files that a pattern with *, ? or [] names, in order; else itself."""
        if not set("*[") & set(self.url):
            return [self]
        with _store(self.url) as (system, path):
            found = sorted(system.unstrip_protocol(name) for name in system.glob(path))
        if not found:
            raise InputError(f"{self}: expected files of this pattern, found no file")
        return [RemoteFile(url) for url in found]

    @property
    def folder(self) -> RemoteFolder:
        """The folder of its table: folders NAME=VALUE, as Hive writes them, lie in it."""
        url = self.url.rpartition("/")[0]
        while "=" in url.rpartition("/")[2]:
            url = url.rpartition("/")[0]
        return RemoteFolder(url)


# A file of rows, here or elsewhere.
Source: TypeAlias = Path | RemoteFile


@dataclass(frozen=True)
class RemoteFolder:
    """A folder elsewhere, by URL, to which files are written; every method raises as `opened`."""

    url: str = field(repr=False)

    def __str__(self) -> str:
        return shown_url(self.url)

    @property
    def name(self) -> str:
        """The last name of its path."""
        return PurePosixPath(self.url.split("?")[0]).name

    @contextmanager
    def _place(self) -> Iterator[tuple[Any, str]]:
        """Gives fsspec's file system and the path there."""
        # A file in memory is lost when the process ends.
        if self.url.partition("://")[0].lower() in ("http", "https", "memory"):
            raise UsageError(f"{self}: cannot be written: name a store, such as s3:// or gs://")
        with _store(self.url, "written") as (system, path):
            yield system, path.rstrip("/")

    def sizes(self) -> dict[str, int]:
        """Returns the sizes of the files in it, by name; a folder in it has -1."""
        with self._place() as (system, path):
            system.invalidate_cache()
            try:
                found = system.ls(path, detail=True)
            except FileNotFoundError:  # object stores have no empty folders
                return {}
            # Where a file has the folder's name, it is the one that is found.
            named = ((each["name"].removeprefix(f"{path}/"), each) for each in found)
            return {
                name: each["size"] if each["type"] == "file" and name != each["name"] else -1
                for name, each in named
                if name
            }

    def glob(self, pattern: str) -> list[str]:
        """Returns the files of a pattern in it; none over http, where no table is written."""
        if self.url.startswith("http"):
            return []
        with _store(self.url) as (system, path), suppress(FileNotFoundError):
            return list(system.glob(f"{path.rstrip('/')}/{pattern}"))
        return []

    def read(self, name: str) -> bytes:
        """Returns the content of a file."""
        with self._place() as (system, path):
            return bytes(system.cat_file(f"{path}/{name}"))

    def write(self, name: str, content: bytes) -> None:
        """Writes a file that appears whole, also where a store shows files that are not."""
        with self._place() as (system, path):
            temporary = f"{path}/{name}.{os.urandom(8).hex()}.tmp"
            self._make(system, path)
            system.pipe_file(temporary, content)
            system.mv(temporary, f"{path}/{name}")

    def upload(self, files: Sequence[tuple[Path, str]]) -> None:
        """Copies files of this machine into it, under names."""
        with self._place() as (system, path):
            self._make(system, path)
            here, there = zip(*((str(file), f"{path}/{name}") for file, name in files), strict=True)
            system.put([*here], [*there])

    def remove(self, names: Sequence[str]) -> None:
        """Removes files; another process may have done so."""
        with self._place() as (system, path):
            for name in names:
                with suppress(FileNotFoundError):
                    system.rm_file(f"{path}/{name}")

    @staticmethod
    def _make(system: Any, path: str) -> None:
        """Makes the folder, where a file system needs that; s3fs would make a bucket too."""
        parent = path.rpartition("/")[0]
        if parent and system.isdir(parent) and not system.isdir(path):
            system.makedirs(path, exist_ok=True)


@contextmanager
def _store(url: str, done: str = "read") -> Iterator[tuple[Any, str]]:
    """Gives fsspec's file system of a URL, and the path there; converts exceptions as `_told`."""
    with _told(url, done):
        with from_extra("remote", f"{shown_url(url)} needs fsspec"):
            import fsspec
        yield fsspec.core.url_to_fs(url)


@contextmanager
def _told(url: str, done: str = "read") -> Iterator[None]:
    """Converts exceptions of fsspec and its back ends to our errors."""
    shown = shown_url(url)
    try:
        yield
    except ImportError as error:  # fsspec names the package that opens the scheme
        reason = f"{shown} cannot be opened ({_brief(error)}); {install_command('remote')}"
        raise UsageError(reason) from error
    except (ValueError, NotImplementedError) as error:  # an unknown scheme, one without writing
        raise UsageError(f"{shown} cannot be opened: {_brief(error)}") from error
    except FileNotFoundError as error:
        # Over http this may also be a server that does not answer, so without a response.
        cause = error.__cause__
        if isinstance(cause, OSError) and getattr(cause, "response", None) is None:
            raise _unreachable(shown, cause, done) from error
        if done == "written":
            lacking = f"{shown}: cannot be written: there is no such bucket or folder"
            raise InputError(f"{lacking}; create it, then run the command again") from error
        reason = f": {_brief(cause)}" if cause is not None else ""
        raise InputError(f"{shown}: there is no such file{reason}") from error
    except Exception as error:
        # Each back end has exceptions of its own, whose packages need not be installed.
        if not _of_a_back_end(error):
            raise
        raise _unreachable(shown, error, done) from error


def _unreachable(shown: str, error: BaseException, done: str) -> InputError:
    return InputError(
        f"{shown}: cannot be {done}: {_brief(error)}. Check the connection and the credentials, "
        "then run the command again"
    )


def _brief(error: BaseException) -> str:
    """Returns the first line of an error's message, without the full stop; some have pages."""
    told = str(getattr(error, "reason", None) or error)  # of urllib's errors
    lines = [line.strip() for line in without_secrets(told).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__


def _of_a_back_end(error: Exception) -> bool:
    """Whether an exception is one of reading, by fsspec or a package that it uses."""
    package = type(error).__module__.partition(".")[0]
    return package not in _READERS or (package == "builtins" and isinstance(error, OSError))
