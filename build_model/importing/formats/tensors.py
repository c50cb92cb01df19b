"""Named tensors on disk: all shapes at once, the numbers one tensor at a time, read or written.

A reader opens its file anew for each read, so that the pages of one tensor, and not those of
the whole file, are in memory. Pickles are read by torch's weights_only unpickler (torch.load),
which builds tensors, numbers, texts and containers of these, and stops at anything else before it
runs. The writer's layout follows https://github.com/huggingface/safetensors, "Format": the length
of a JSON header in 8 bytes, the header, and the numbers. It is known from the shapes alone, so
each tensor has its place before any is read.
"""

import json
import pickle
import re
import struct
import warnings
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from transferry.build_model.checkpoint import STORED, open_tensors
from transferry.build_model.importing.formats.foreign import instead
from transferry.runtime.errors import InputError
from transferry.runtime.io.atomic import atomic_file
from transferry.runtime.io.documents import read_document
from transferry.runtime.io.whole import open_regular

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
        """Tensors of these shapes and types on the meta device, in a fixed order."""

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """Returns a tensor as stored."""


class SafetensorsFile(Tensors):
    """A safetensors file."""

    def __init__(self, path: Path) -> None:
        """Opens nothing yet."""
        self.origin, self._path = str(path), path

    @cached_property
    def shapes(self) -> Mapping[str, Tensor]:
        with open_tensors(self._path, DAMAGED, DAMAGED) as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {
                name: meta(each.get_shape(), _TYPES.get(each.get_dtype(), torch.uint8))
                for name, each in slices.items()
            }

    def read(self, name: str) -> Tensor:
        with open_tensors(self._path, DAMAGED, DAMAGED) as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor


class NamedTensors(Tensors):
    """Tensors of other files: for each name its file, and its name there."""

    def __init__(self, origin: str, places: Mapping[str, tuple[Tensors, str]]) -> None:
        self.origin, self._places = origin, places

    @cached_property
    def shapes(self) -> Mapping[str, Tensor]:
        return {name: file.shapes[theirs] for name, (file, theirs) in self._places.items()}

    def read(self, name: str) -> Tensor:
        file, theirs = self._places[name]
        return file.read(theirs)


def meta(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns a tensor without numbers."""
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


# How many bytes are read before a file is opened anew, which lets go of their pages.
_KEPT_BYTES = 64 << 20
_FAULTS = (
    *(RuntimeError, OSError, EOFError, ValueError, LookupError, TypeError, AttributeError),
    *(MemoryError, OverflowError, AssertionError, struct.error, zipfile.BadZipFile),
)


def _load(path: Path) -> Any:
    """Reads a file of torch.save; tensors of the newer format stay on the disk until their use."""
    mapped = _is_archive(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old protocols, which are read all the same
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        raise InputError(
            f"{path}: expected tensors alone, found {named[1] if named else 'other objects'}, "
            "which could run code, so the file was not read. If you trust who made it, load it "
            "with its own library and save the weights with save_pretrained or as safetensors"
        ) from error
    except _FAULTS as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"{path} is not a whole file of torch.save ({reason}); {DAMAGED}"
        ) from error


def _is_archive(path: Path) -> bool:
    """Whether a file can be mapped; those of torch before 1.6 are read whole."""
    with open_regular(path) as file:
        return file.read(4) == b"PK\x03\x04"


class PickledFile(Tensors):
    """A state dict of torch.save."""

    def __init__(self, path: Path) -> None:
        """Opens nothing yet."""
        self.origin, self._path = str(path), path
        self._state: Mapping[str, Tensor] | None = None
        self._unread = 0

    @cached_property
    def shapes(self) -> Mapping[str, Tensor]:
        return {name: meta(tensor.shape, tensor.dtype) for name, tensor in self._open().items()}

    def read(self, name: str) -> Tensor:
        if self._unread <= 0:
            self._state = None
        state = self._state = self._state or self._open()
        if self._mapped:
            self._unread -= state[name].nbytes
        return state[name].detach()

    def _open(self) -> Mapping[str, Tensor]:
        self._unread, self._mapped = _KEPT_BYTES, _is_archive(self._path)
        state = _load(self._path)
        if not isinstance(state, dict) or not state:
            raise InputError(
                f"{self._path}: expected tensors by name, found {type(state).__name__}; save the "
                "model's state_dict"
            )
        for name, tensor in state.items():
            if not isinstance(name, str) or not isinstance(tensor, Tensor):
                raise InputError(
                    f"{self._path}: expected tensors by name, found {type(tensor).__name__} at "
                    f"{name!r}; save the model's state_dict"
                )
            if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
                raise InputError(
                    f"{self._path}: expected plain numbers in the tensor {name}, found "
                    f"{tensor.dtype} of layout {tensor.layout}; save the model before it is "
                    "quantised or pruned"
                )
        return state


WEIGHTS = "model.safetensors"
# In the order of transformers.
_KINDS: dict[str, Callable[[Path], Tensors]] = {
    WEIGHTS: SafetensorsFile,
    "pytorch_model.bin": PickledFile,
}


def without_weights(folder: Path) -> str:
    """Describes what a folder holds instead of weights; "" if it has them, or is unknown."""
    usual = (folder / f"{name}{suffix}" for name in _KINDS for suffix in ("", ".index.json"))
    return "" if any(each.exists() for each in usual) else instead(folder)


def open_weights(folder: Path) -> Tensors:
    """Opens model.safetensors or pytorch_model.bin, or the several files of their index."""
    for name, kind in _KINDS.items():
        if (folder / name).exists():
            return kind(folder / name)
        if (index := folder / f"{name}.index.json").exists():
            return _joined(index, kind)
    raise InputError(
        f"{folder / WEIGHTS} is missing; "
        + (instead(folder) or f"expected it or {' or '.join(list(_KINDS)[1:])}, found neither")
    )


def _joined(index: Path, kind: Callable[[Path], Tensors]) -> Tensors:
    places: Any = read_document(index, dict[str, Any], DAMAGED).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise InputError(f"{index}: expected a weight_map that names files, found {places!r}")
    names = sorted(set(map(str, places.values())))
    if outside := [name for name in names if Path(name).name != name]:
        raise InputError(f"{index}: expected files of its own folder, found {outside[0]!r}")
    if missing := [name for name in names if not (index.parent / name).exists()]:
        raise InputError(
            f"{index.parent / missing[0]} is missing, which {index.name} names; {DAMAGED}"
        )
    held: dict[str, str] = {}
    found: dict[str, tuple[Tensors, str]] = {}
    together = "take all files from one checkpoint"
    for file in names:
        tensors = kind(index.parent / file)
        for name in tensors.shapes:
            if name in held:
                raise InputError(
                    f"{index}: the tensor {name} is in {held[name]} and in {file}; {together}"
                )
            held[name], found[name] = file, (tensors, name)
    for name, file in places.items():
        if (place := held.get(name, "none of the files")) != file:
            raise InputError(
                f"{index}: expected the tensor {name} in {file}, found it in {place}; {together}"
            )
    return NamedTensors(str(index.parent), found)


_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class TensorWriter:
    """The tensors of a file that is being written; one that is there can be read."""

    def __init__(self, file: BinaryIO, shapes: Mapping[str, Tensor]) -> None:
        """Writes the header, for shapes of float32, bfloat16 or float16 on any device."""
        self._file, self._shapes = file, shapes
        self._starts: dict[str, int] = {}
        header, end = {}, 0
        # The order of the library: wide types first, so that each number lies at a multiple of its
        # size.
        for name in sorted(shapes, key=lambda name: (-shapes[name].itemsize, name)):
            tensor, start = shapes[name], end
            end += prod(tensor.shape) * tensor.itemsize
            header[name] = {
                "dtype": _NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [start, end],
            }
            self._starts[name] = start
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        file.write(len(text).to_bytes(8, "little") + text)
        self._begin = 8 + len(text)

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        """Writes a tensor of the declared shape and type."""
        self._file.seek(self._begin + self._starts[name])
        self._file.write(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def __getitem__(self, name: str) -> Tensor:
        """Reads a tensor that was written."""
        self._file.flush()
        expected = self._shapes[name]
        content = bytearray(prod(expected.shape) * expected.itemsize)
        with Path(self._file.name).open("rb") as file:
            file.seek(self._begin + self._starts[name])
            file.readinto(content)
        return torch.frombuffer(content, dtype=expected.dtype).reshape(expected.shape)


@contextmanager
def tensor_writer(path: Path, shapes: Mapping[str, Tensor]) -> Iterator[TensorWriter]:
    """Opens a safetensors file for writing, as `TensorWriter`; it appears whole or not at all.

    Raises:
        InputError: The disk is full, or the folder cannot be written to.
    """
    with atomic_file(path) as file:
        yield TensorWriter(file, shapes)
