"""Files elsewhere, by URL: s3://, gs://, https://, hf:// and the others of fsspec."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias, cast

from transferry.runtime.errors import InputError, UsageError, install_command

# Bytes that are read ahead.
_BLOCK = 1 << 22
# Packages whose exceptions are not faults of a connection: readers of the bytes, and ours.
_READERS = ("builtins", "gzip", "zlib", "zstandard", "pyarrow", "transferry")


def is_url(text: str) -> bool:
    """Whether a text names a file elsewhere: a path with a scheme, such as s3://bucket/a.jsonl."""
    scheme, mark, _ = text.partition("://")
    return bool(mark) and scheme.replace("+", "").replace("-", "").isalnum()


@dataclass(frozen=True)
class RemoteFile:
    """A file elsewhere, by URL, which is read as it streams in and never stored."""

    url: str

    def __str__(self) -> str:
        return self.url

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
        with _told(self.url):
            system, path = import_fsspec(self.url).core.url_to_fs(self.url)
            # Not fsspec.open, whose block size s3fs takes for an option of its session.
            with system.open(path, "rb", block_size=_BLOCK) as file:
                yield io.BufferedReader(cast(io.RawIOBase, file), 1 << 18)

    def matches(self) -> list[RemoteFile]:
        """Returns the files that a pattern with *, ? or [] names, in order; else itself."""
        if not set("*[") & set(self.url):
            return [self]
        with _told(self.url):
            system, path = import_fsspec(self.url).core.url_to_fs(self.url)
            found = sorted(system.unstrip_protocol(name) for name in system.glob(path))
        if not found:
            raise InputError(f"{self.url}: expected files of this pattern, found no file")
        return [RemoteFile(url) for url in found]


# A file of rows, here or elsewhere.
Source: TypeAlias = Path | RemoteFile


@contextmanager
def _told(url: str) -> Iterator[None]:
    """Converts exceptions of fsspec and its back ends to our errors."""
    try:
        yield
    except ImportError as error:  # fsspec names the package that opens the scheme
        reason = f"{url} cannot be opened ({_brief(error)}); {install_command('remote')}"
        raise UsageError(reason) from error
    except ValueError as error:  # an unknown scheme
        raise UsageError(f"{url} cannot be opened: {error}") from error
    except FileNotFoundError as error:
        # Over http this may also be a server that does not answer, so without a response.
        cause = error.__cause__
        if isinstance(cause, OSError) and getattr(cause, "response", None) is None:
            raise _unreachable(url, cause) from error
        reason = f": {_brief(cause)}" if cause is not None else ""
        raise InputError(f"{url}: there is no such file{reason}") from error
    except Exception as error:
        # Each back end has exceptions of its own, whose packages need not be installed.
        if not _of_a_back_end(error):
            raise
        raise _unreachable(url, error) from error


def _unreachable(url: str, error: BaseException) -> InputError:
    return InputError(
        f"{url}: cannot be read: {_brief(error)}. Check the connection and the credentials, "
        "then run the command again"
    )


def _brief(error: BaseException) -> str:
    """Returns the first line of an error's message, without the full stop; some have pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__


def _of_a_back_end(error: Exception) -> bool:
    """Whether an exception is one of reading, by fsspec or a package that it uses."""
    package = type(error).__module__.partition(".")[0]
    return package not in _READERS or (package == "builtins" and isinstance(error, OSError))


def import_fsspec(url: str) -> Any:
    """Returns fsspec; raises UsageError where it is not installed."""
    try:
        import fsspec
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{url} is read by fsspec, which is not installed; {install_command('remote')}"
        ) from error
    return fsspec
