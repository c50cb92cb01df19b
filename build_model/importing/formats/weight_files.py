"""The weight files of a folder that `save_pretrained` of transformers wrote."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transferry.build_model.importing.formats.foreign import instead
from transferry.build_model.importing.formats.pickled import PickledFile
from transferry.build_model.importing.formats.tensors import (
    DAMAGED,
    JoinedTensors,
    SafetensorsFile,
    Tensors,
)
from transferry.runtime.errors import InputError
from transferry.runtime.io.documents import read_document

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
    """Opens model.safetensors or pytorch_model.bin, or the several files of their index.

    Raises:
        InputError: They are missing, or an index is malformed or points outside of the folder.
    """
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
    return JoinedTensors(index, places, {name: kind(index.parent / name) for name in names})
