"""Graphs on disk: one ONNX file each, and one file of weights per folder.

Graphs of a folder share a weight, such as the embedding, by naming the same place in that file. It
has no limit of 2 GB, unlike an ONNX file.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import onnx_ir as ir

WEIGHTS = "weights.bin"

# onnxruntime maps external data into memory only if it begins at a page.
ALIGNMENT = 4096
# Smaller tensors, mostly shapes and other constants, stay in the graph: they do not merit a page.
SMALLEST = 1024

# Offset and length of stored tensors by type and hash.
Places = dict[tuple[ir.DataType, bytes], tuple[int, int]]


def write_graphs(
    graphs: Iterable[tuple[ir.Model, Path]], written: dict[Path, Places] | None = None
) -> None:
    """Writes each graph to its path, and the weights of each folder's graphs to one file there.

    onnxruntime refuses external data outside the graph's folder.

    Args:
        graphs: The graphs; afterwards they refer to the stored weights.
        written: Tensors of earlier calls, by folder; receives the new ones. Graphs of several
            calls then share weights, too.
    """
    written = {} if written is None else written
    folders: dict[Path, list[tuple[ir.Model, Path]]] = {}
    for model, path in graphs:
        folders.setdefault(path.parent, []).append((model, path))
    for folder, members in folders.items():
        folder.mkdir(exist_ok=True)
        begun = folder in written
        places = written.setdefault(folder, {})
        with (folder / WEIGHTS).open("ab" if begun else "wb") as file:
            for model, _ in members:
                for value in model.graph.initializers.values():
                    tensor = value.const_value
                    if tensor is not None and tensor.nbytes >= SMALLEST:
                        value.const_value = store(tensor, file, places)
        for model, path in members:
            ir.save(model, path)


def store(tensor: ir.TensorProtocol, file: BinaryIO, places: Places) -> ir.ExternalTensor:
    """Appends a tensor unless its bytes are stored already; returns the reference to it.

    The file is in the folder of the graphs that will refer to it; `places` receives the tensor.
    """
    data = tensor.tobytes()
    key = (tensor.dtype, hashlib.sha256(data).digest())
    if key not in places:
        file.write(b"\0" * (-file.tell() % ALIGNMENT))
        places[key] = (file.tell(), len(data))
        file.write(data)
    name, shape = Path(file.name).name, ir.Shape(tensor.shape.numpy())
    return ir.ExternalTensor(name, *places[key], tensor.dtype, shape=shape, name=tensor.name or "")
