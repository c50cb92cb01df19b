"""The weight files of a folder that `save_pretrained` of transformers wrote."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

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
ADAPTER_CONFIG = "adapter_config.json"
# In the order of transformers.
_KINDS: dict[str, Callable[[Path], Tensors]] = {
    WEIGHTS: SafetensorsFile,
    "pytorch_model.bin": PickledFile,
}
_SAVED = "load it with transformers and write it anew with save_pretrained"
# Files that a folder may hold instead of weights, by pattern, and the remedy.
_INSTEAD = {
    ADAPTER_CONFIG: (
        "an adapter without its model; import the folder of the model that the adapter was made "
        "for, with --adapter {folder}"
    ),
    "dict.*txt": (
        "a dictionary of fairseq; convert the model with the script of its model type in "
        "transformers, and import the folder that save_pretrained writes"
    ),
    "*.gguf": (
        "weights of llama.cpp (GGUF); import the folder that they were made from, or "
        "load them with gguf_file of transformers' from_pretrained and use save_pretrained"
    ),
    "tf_model*": (
        "TensorFlow's weights alone; write PyTorch's with transformers 4: "
        "from_pretrained(FOLDER, from_tf=True) and save_pretrained"
    ),
    "flax_model*": (
        "Flax's weights alone; write PyTorch's with transformers 4: "
        "from_pretrained(FOLDER, from_flax=True) and save_pretrained"
    ),
    "consolidated*": (
        "weights in their authors' own format; import the folder with model.safetensors that was "
        "published beside them"
    ),
    "*-of-*": (
        "one file of several; copy or download the index too, model.safetensors.index.json or "
        "pytorch_model.bin.index.json"
    ),
    "model.*.safetensors": (
        "weights of a variant; rename the file that you want to model.safetensors"
    ),
    "*.onnx": "ONNX graphs alone; import the PyTorch checkpoint that they were exported from",
    "onnx/*.onnx": "ONNX graphs alone; import the PyTorch checkpoint that they were exported from",
    "*.safetensors": f"safetensors under another name; {_SAVED}",
    "*.bin": f"weights under another name; {_SAVED}",
    "*.pt": f"a PyTorch file; {_SAVED}",
    "*.pth": f"a PyTorch file; {_SAVED}",
}


def instead(folder: Path) -> str:
    """Describes what a folder without the usual files holds, and what to do; "" if unknown."""
    for pattern, remedy in _INSTEAD.items():
        if found := sorted(folder.glob(pattern)):
            name = found[0].relative_to(folder)
            return f"found {name}, {remedy.format(folder=folder)}"
    return ""


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
