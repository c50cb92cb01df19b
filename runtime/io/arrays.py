"""Archives of arrays (npz), within limits of size."""

import io
import lzma
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transferry.runtime.errors import InputError

# Errors of numpy and zipfile for a damaged archive, and of reading its values.
ARCHIVE_FAULTS = (
    *(OSError, ValueError, LookupError, EOFError, RuntimeError, TypeError, AttributeError),
    *(MemoryError, SyntaxError, struct.error, tokenize.TokenError),
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError),
)
# Largest size of an archive's arrays relative to its own; a zip bomb reaches thousands.
EXPANSION = 4
SMALL_ARCHIVE = 256 << 20


@contextmanager
def open_arrays(content: bytes, origin: str, what: str, remedy: str) -> Iterator[Any]:
    """Opens an .npz archive: arrays by name, never unpickled.

    Errors name the file `origin`, the expected kind of file `what`, and end with `remedy`.

    Raises:
        InputError: The archive is damaged, lacks an array read inside the `with`, or unpacks to far
            more than its size.
    """
    import numpy as np  # here, so that `transferry --help` does not load it

    try:
        if not zipfile.is_zipfile(io.BytesIO(content)):  # numpy would speak of pickles
            raise ValueError("no whole .npz archive")
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            size = sum(member.file_size for member in file.zip.infolist())
            if size > max(EXPANSION * len(content), SMALL_ARCHIVE):
                raise ValueError(f"{len(content):,} bytes that unpack to {size:,}")
            yield file
    except ARCHIVE_FAULTS as error:
        raise InputError(f"{origin} is not {what} ({error}); {remedy}") from error
