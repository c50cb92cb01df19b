"""A safetensors file that is written one tensor at a time, in any order.

The layout follows https://github.com/huggingface/safetensors, "Format": the length of a JSON
header in 8 bytes, the header, and the numbers. It is known from the shapes alone, so each tensor
has its place before any is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from transferry.runtime.io.atomic import atomic_file

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class TensorWriter:
    """The tensors of a file that is being written; one that is there can be read."""

    def __init__(self, file: BinaryIO, shapes: Mapping[str, Tensor]) -> None:
        """Writes the header.

        Args:
            file: An empty file open for writing.
            shapes: Tensors of these shapes and types (float32, bfloat16 or float16), on any device.
        """
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
        self.missing = set(shapes)

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        """Writes a tensor of the declared shape and type."""
        expected = self._shapes[name]
        if (tensor.shape, tensor.dtype) != (expected.shape, expected.dtype):
            raise ValueError(f"{name}: {tensor.dtype} {list(tensor.shape)} was not declared")
        self._file.seek(self._begin + self._starts[name])
        self._file.write(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        self.missing.discard(name)

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
        ValueError: Not every tensor was written.
    """
    with atomic_file(path) as file:
        writer = TensorWriter(file, shapes)
        yield writer
        if writer.missing:
            raise ValueError(f"{path}: {sorted(writer.missing)} were not written")
