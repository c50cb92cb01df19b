"""Pickled tensors of torch.save, read without running code.

torch's weights_only unpickler (torch.load) builds tensors, numbers, texts and containers of these,
and stops at anything else before it runs.
"""

from __future__ import annotations

import pickle
import re
import struct
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transferry.build_model.importing.formats.tensors import DAMAGED, Tensors, meta
from transferry.runtime.errors import InputError
from transferry.runtime.io.whole import open_regular

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
        self._shapes: Mapping[str, Tensor] | None = None
        self._unread = 0

    @property
    def shapes(self) -> Mapping[str, Tensor]:
        """See Tensors.

        Raises:
            InputError: The file is damaged, would run code, or holds something else than tensors.
        """
        if self._shapes is None:
            self._shapes = {
                name: meta(tensor.shape, tensor.dtype) for name, tensor in self._open().items()
            }
        return self._shapes

    def read(self, name: str) -> Tensor:
        """See Tensors."""
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
