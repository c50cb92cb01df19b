"""Graphs on disk: one ONNX file each, and in each folder one file of weights that they name.

Two graphs may name the same place of the same external file, so a weight that both use, such as
the embedding, is stored once. The file has no 2 GB limit, which an ONNX file by itself has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import onnx_ir as ir

WEIGHTS = "weights.bin"

# onnxruntime maps external data into memory only where it begins at a page.
ALIGNMENT = 4096
# Smaller tensors, mostly shapes and other constants, stay in the graph: a page each is waste.
SMALLEST = 1024


def write_graphs(graphs: Iterable[tuple[ir.Model, Path]]) -> None:
    """Writes each graph to its path, and the weights of a folder's graphs to one file there.

    onnxruntime refuses external data that lies outside the graph's folder.
    """
    folders: dict[Path, list[tuple[ir.Model, Path]]] = {}
    for model, path in graphs:
        folders.setdefault(path.parent, []).append((model, path))
    for folder, members in folders.items():
        folder.mkdir(exist_ok=True)
        places: dict[tuple[ir.DataType, bytes], tuple[int, int]] = {}
        with (folder / WEIGHTS).open("wb") as file:
            for model, _ in members:
                for value in model.graph.initializers.values():
                    tensor = value.const_value
                    if tensor is not None and tensor.nbytes >= SMALLEST:
                        value.const_value = store(tensor, file, places)
        for model, path in members:
            ir.save(model, path)


def store(
    tensor: ir.TensorProtocol,
    file: BinaryIO,
    places: dict[tuple[ir.DataType, bytes], tuple[int, int]],
) -> ir.ExternalTensor:
    """Appends a tensor unless its bytes lie there already, and returns the reference to it.

    Args:
        tensor: The tensor.
        file: Where it goes; the graphs that refer to it must lie in the same folder.
        places: What lies in the file: offset and length by type and hash.
    """
    data = tensor.tobytes()
    key = (tensor.dtype, hashlib.sha256(data).digest())
    if key not in places:
        file.write(b"\0" * (-file.tell() % ALIGNMENT))
        places[key] = (file.tell(), len(data))
        file.write(data)
    offset, length = places[key]
    return ir.ExternalTensor(
        Path(file.name).name,
        offset,
        length,
        tensor.dtype,
        shape=ir.Shape(tensor.shape.numpy()),
        name=tensor.name or "",
    )
