"""The arrays of an .npz archive, read one at a time and never unpickled."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import IO

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from transferry.build_model.importing.formats.tensors import DAMAGED, Tensors, meta
from transferry.runtime.errors import InputError
from transferry.runtime.io.arrays import ARCHIVE_FAULTS
from transferry.runtime.io.whole import open_regular

_ENDING = ".npy"


class ArrayFile(Tensors):
    """The arrays of an archive whose names do not begin with "special:", Marian's mark."""

    def __init__(self, path: Path) -> None:
        """Opens nothing yet."""
        self.origin, self._path = str(path), path

    @cached_property
    def shapes(self) -> Mapping[str, Tensor]:
        """See Tensors."""
        found: dict[str, Tensor] = {}
        with self._opened() as archive:
            for member in archive.namelist():
                if not member.startswith("special:"):
                    with archive.open(member) as file:
                        name = member.removesuffix(_ENDING)
                        found[name] = self._shape(name, file)
        return found

    def _shape(self, name: str, file: IO[bytes]) -> Tensor:
        version = npy.read_magic(file)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, _, dtype = read(file)
        if dtype.hasobject or dtype.kind not in "fiub":
            raise InputError(f"{self._path}: expected numbers in {name}, found {dtype}; {DAMAGED}")
        return meta(shape, torch.from_numpy(np.empty(0, dtype.newbyteorder("="))).dtype)

    def read(self, name: str) -> Tensor:
        """See Tensors."""
        with self._opened() as archive, archive.open(name + _ENDING) as file:
            array = npy.read_array(file, allow_pickle=False)
        return torch.from_numpy(np.ascontiguousarray(array, array.dtype.newbyteorder("=")))

    def text(self, name: str, most: int) -> str:
        """Returns a text that is stored as an array of its bytes, ended by a zero.

        Raises:
            InputError: The archive is damaged or has no such text, or it has more bytes.
        """
        with self._opened() as archive:
            size = archive.getinfo(name + _ENDING).file_size
            if size > most:
                raise ValueError(f"{name} of {size:,} bytes")
            with archive.open(name + _ENDING) as file:
                content = npy.read_array(file, allow_pickle=False).tobytes()
        return content.rstrip(b"\0").decode(errors="replace")

    @contextmanager
    def _opened(self) -> Iterator[zipfile.ZipFile]:
        with open_regular(self._path):
            pass
        try:
            with zipfile.ZipFile(self._path) as archive:
                yield archive
        except ARCHIVE_FAULTS as error:
            raise InputError(
                f"{self._path} is no whole .npz archive ({error}); {DAMAGED}"
            ) from error
