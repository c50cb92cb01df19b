"""Standard streams that are closed, full, or a pipe whose reader has left."""

import errno
import io
import os
import sys
from typing import Any, TextIO

# Exit code of a program that SIGPIPE ended.
READER_LEFT = 141


def guard_streams() -> None:
    """Replaces stdout and stderr by streams that end a command in a documented way.

    A closed descriptor is taken as well, or the next file that a library opens would get its
    number, and then what is written to the stream.
    """
    for descriptor, flags in ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            # Opened the wrong way round, the null device refuses to be read or written; messages
            # alone are dropped.
            os.open(os.devnull, flags)
    sys.stdout = _guarded(sys.stdout, _Stream(1, "w", closefd=False))
    sys.stderr = _guarded(sys.stderr, _Stream(2, "w", closefd=False))


def _guarded(stream: TextIO | None, raw: io.FileIO) -> Any:
    if stream is None:
        return io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", errors="replace")
    if stream.isatty():  # never full; a console of Windows is more than a file
        return stream
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=raw.fileno() == 2,
    )


class _Stream(io.FileIO):
    """Stdout, which ends the command where it cannot be written, or stderr, which is dropped."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            # Discards everything buffered, and the output of native code.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            if self.fileno() == 2:  # the exit code tells how the command ended
                return len(data)
            raise _end(error) from error


def _end(error: OSError) -> Exception:
    from click.exceptions import Exit

    from transferry.runtime.console.group import Failure
    from transferry.runtime.errors import InputError
    from transferry.runtime.io.atomic import unwritable

    if error.errno == errno.EPIPE:  # as `head` does, which wanted no more
        return Exit(READER_LEFT)
    return Failure(str(unwritable("standard output", error, kept="")), InputError.exit_code)
