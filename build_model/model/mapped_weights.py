"""Weights in a file that is mapped into memory, so that reading them does not keep them there."""

import mmap
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Self

import torch
from torch import nn

PAGE = mmap.PAGESIZE  # weights begin on a page, since whole pages are released


class MappedWeights:
    """Parameters that were moved into a file without a name.

    A page that was read counts as memory of the process until `release`. It can be read again, from
    the system's cache of the file or, where other programs needed that memory, from the disk. What
    is written to a parameter goes to the file and so survives `release`. The file ends with the
    last tensor that lies in it.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], folder: Path) -> None:
        """Moves parameters, one at a time, and frees the memory that they were in.

        Their values and addresses as Python objects stay the same; what is smaller than a page
        stays where it is.

        Raises:
            OSError: There is no room.
        """
        moved = [each for each in parameters if each.nbytes >= PAGE]
        places, size = [], 0
        for parameter in moved:
            places.append(size)
            size += -(-parameter.nbytes // PAGE) * PAGE
        with tempfile.TemporaryFile(dir=folder) as file:
            file.truncate(max(size, PAGE))
            self._map = mmap.mmap(file.fileno(), 0)
            for parameter, place in zip(moved, places, strict=True):
                file.seek(place)
                # Not through the map, whose pages would count until the disk has them.
                file.write(parameter.detach().reshape(-1).view(torch.uint8).numpy().data)
                file.flush()
                flat = torch.frombuffer(
                    self._map, dtype=parameter.dtype, count=parameter.numel(), offset=place
                )
                parameter.data = flat.view(parameter.shape)

    def __deepcopy__(self, memo: object) -> Self:
        """Copies of a model share the weights that they do not copy."""
        return self

    def release(self) -> None:
        """Takes all pages out of the process's memory; a no-op on Windows."""
        if sys.platform != "win32":
            self._map.madvise(mmap.MADV_DONTNEED)
