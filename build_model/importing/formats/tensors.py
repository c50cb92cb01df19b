"""Named tensors on disk: all shapes at once, the numbers one tensor at a time.

A reader opens its file anew for each read, so that the pages of one tensor, and not those of
the whole file, are in memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from transferry.build_model.checkpoint import STORED, open_tensors
from transferry.runtime.errors import InputError

FLOATING = (*STORED, torch.float64)

# Types of safetensors; others have no type of torch's, and count as bytes.
_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
DAMAGED = "copy or download it again"


class Tensors(ABC):
    """Tensors by name.

    Attributes:
        origin: Name of the file or folder for errors.
    """

    origin: str

    @property
    @abstractmethod
    def shapes(self) -> Mapping[str, Tensor]:
        """Tensors of these shapes and types on the meta device, in a fixed order.

        Raises:
            InputError: A file is missing or damaged.
        """

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """Returns a tensor as stored.

        Raises:
            InputError: A file is missing or damaged.
        """


class SafetensorsFile(Tensors):
    """A safetensors file."""

    def __init__(self, path: Path, if_missing: str = DAMAGED, if_damaged: str = DAMAGED) -> None:
        """Opens nothing yet; the remedies are for errors."""
        self.origin, self._path = str(path), path
        self._remedies = if_missing, if_damaged

    @cached_property
    def shapes(self) -> Mapping[str, Tensor]:
        """See Tensors."""
        with open_tensors(self._path, *self._remedies) as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {
                name: meta(each.get_shape(), _TYPES.get(each.get_dtype(), torch.uint8))
                for name, each in slices.items()
            }

    def read(self, name: str) -> Tensor:
        """See Tensors."""
        with open_tensors(self._path, *self._remedies) as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor


class JoinedTensors(Tensors):
    """The tensors of several files, by an index."""

    def __init__(self, index: Path, places: Mapping[str, str], files: Mapping[str, Tensors]):
        """Opens nothing yet; the index tells in which file each tensor is."""
        self.origin, self._places, self._files = str(index.parent), places, files
        self._index = index

    @cached_property
    def shapes(self) -> Mapping[str, Tensor]:
        """Those of all files.

        Raises:
            InputError: A file is missing or damaged, or lacks a tensor that the index places in
                it; or two files hold one.
        """
        found: dict[str, tuple[str, Tensor]] = {}
        for file, tensors in self._files.items():
            for name, tensor in tensors.shapes.items():
                if name in found:
                    raise InputError(
                        f"{self._index}: the tensor {name} is in {found[name][0]} and in {file}; "
                        "take all files from one checkpoint"
                    )
                found[name] = file, tensor
        for name, file in self._places.items():
            place = found[name][0] if name in found else "none of the files"
            if place != file:
                raise InputError(
                    f"{self._index}: expected the tensor {name} in {file}, found it in {place}; "
                    "take all files from one checkpoint"
                )
        return {name: tensor for name, (_, tensor) in found.items()}

    def read(self, name: str) -> Tensor:
        """See Tensors."""
        holders = [file for file in self._files.values() if name in file.shapes]
        return holders[0].read(name)


def meta(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns a tensor without numbers."""
    return torch.empty(tuple(shape), dtype=dtype, device="meta")
