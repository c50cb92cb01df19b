"""Files that appear whole or not at all."""

import errno
import io
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from transferry.runtime.errors import InputError
from transferry.runtime.stopping import at_stop

_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "Free some space"),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR), "Create the folder"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "Make it writable"),
    errno.ENAMETOOLONG: "Shorten the name",
    errno.EISDIR: "Remove the folder",
    errno.EMFILE: "Raise the limit on open files (ulimit -n)",
    errno.EBADF: "Open it",
}


def unwritable(
    place: Path | str,
    error: OSError,
    kept: str = "; nothing was written",
    otherwise: str = " or choose another place",
) -> InputError:
    """Error for an output that cannot be written, with the remedy for `error`.

    `kept` tells the output's state, `otherwise` the alternative to the remedy.
    """
    reason = "it is closed" if error.errno == errno.EBADF else error.strerror or error
    remedy = _REMEDIES.get(error.errno or 0, "Fix this")
    return InputError(f"{place}: cannot be written: {reason}{kept}. {remedy}{otherwise}.")


# Names of temporary files and folders: unguessable, so that nobody can put a link in their place,
# and short, however long the name of the output is.
TEMPORARY = r"\..{0,20}\.[0-9a-f]{16}\.part"


def temporary_name(path: Path, folder: Path) -> Path:
    """Returns an unused path in a folder for an output that is not finished yet."""
    return folder / f".{path.name[:20]}.{os.urandom(8).hex()}.part"


def remove_rests(out: Path) -> None:
    """Removes temporary files and folders that killed processes left for an output."""
    for rest in out.absolute().parent.glob(".*.*.part"):
        own = re.fullmatch(TEMPORARY, rest.name) and rest.stem.rpartition(".")[0] == (
            f".{out.name[:20]}"
        )
        with suppress(OSError):  # of another user, or removed meanwhile
            # One without content may be too new to be locked.
            if own and (any(rest.iterdir()) if rest.is_dir() else rest.stat().st_size):
                with locked(partial(os.open, rest, os.O_RDONLY)) as free:
                    if free and rest.is_dir():
                        shutil.rmtree(rest, ignore_errors=True)
                    elif free:
                        rest.unlink()


@contextmanager
def locked(opened: Callable[[], int]) -> Iterator[bool]:
    """Locks a file or folder while this process lives, where the system can; tells whether it did.

    `opened` returns a descriptor, which is closed.
    """
    if sys.platform == "win32":
        yield False
        return
    import fcntl

    descriptor = opened()
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # another process has it, or the file system has no locks
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


@contextmanager
def durable_file(path: Path, folder: Path | None = None) -> Iterator[BinaryIO]:
    """Writes a temporary file and renames it to `path` once all of it is on the disk.

    After a power cut the file is complete. After `kill -9` the temporary file stays: in `folder`,
    which must be on the same file system, by default beside `path`; see `remove_rests`.
    """
    temporary = temporary_name(path, folder or path.parent)
    with at_stop(partial(temporary.unlink, missing_ok=True)), ExitStack() as held:
        try:
            with temporary.open("xb") as file:
                held.enter_context(locked(partial(os.dup, file.fileno())))
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes renames in a folder survive a power cut, where the file system supports it."""
    if os.name == "nt":  # cannot open a folder
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # unsupported by the file system
            raise
    finally:
        os.close(descriptor)


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Writes a file that appears whole or not at all, even if the process is interrupted.

    Raises InputError for a full disk, a folder that is read-only or missing, or a device at `path`.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise InputError(f"{path} is not a file, so it is not replaced; name another")
    try:
        remove_rests(path)
        with durable_file(path) as file:
            yield file
    except OSError as error:
        raise unwritable(path, error) from error


def require_writable(path: Path, endings: Iterable[str] = ()) -> None:
    """Raises InputError for an output that cannot be written, before the work of making it.

    Its folder is missing or read-only, or its name is too long, also with the `endings` of the
    names of files beside it.
    """
    try:
        for ending in ("", *endings):
            with suppress(FileNotFoundError):
                path.with_name(path.name + ending).lstat()
        folder = path.absolute().parent
        folder.stat()
        # A trial file would survive `kill -9`.
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise unwritable(path, error) from error


@contextmanager
def standard_output() -> Iterator[BinaryIO]:
    """Standard output, for bytes; raises InputError for a full disk, OSError for a closed pipe."""
    try:
        with suppress(io.UnsupportedOperation):  # not a file, in a test
            os.write(sys.stdout.fileno(), b"")  # refused at once if it is closed
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise
        # Python flushes once more at exit, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise unwritable("standard output", error, kept="") from error
