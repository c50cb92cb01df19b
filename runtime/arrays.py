"""Archives of arrays: what numpy writes with `savez`."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from transferry.runtime.errors import InputError

# What numpy, zipfile and the reading of what they gave raise where a file is damaged.
FAULTS = (
    *(OSError, ValueError, LookupError, EOFError, RuntimeError, TypeError, AttributeError),
    zipfile.BadZipFile,
)


@contextmanager
def open_arrays(path: Path, what: str, remedy: str) -> Iterator[Any]:
    """Opens an archive, and answers for all that is read of it inside the `with`.

    Args:
        path: The file.
        what: What it should be, such as "a bundle's reference".
        remedy: What to do where it is not.

    Yields:
        The arrays by name; none of them is unpickled.

    Raises:
        InputError: The file is missing or damaged, or does not hold what is looked for.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            yield file
    except FAULTS as error:
        raise InputError(f"{path} is not {what} ({error}); {remedy}") from error
