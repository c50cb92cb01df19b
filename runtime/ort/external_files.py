"""The files that an ONNX graph reads beside itself, found without the onnx package.

A graph names the files of its large tensors, and onnxruntime opens every one. This reads the names
from protobuf's wire format (https://protobuf.dev/programming-guides/encoding/), with the field
numbers of onnx.proto.
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.manifest import REMEDY
from transferry.runtime.bundle.specs import GraphSpec
from transferry.runtime.errors import InputError

# Fields to descend into: number and message.
Fields: TypeAlias = dict[int, str]
MESSAGES: dict[str, Fields] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {13: "entry"},
}
KEY, VALUE = 1, 2  # fields of an entry of external_data
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


def external_files(model: bytes) -> list[str]:
    """Paths of the files that a graph reads, relative to its own, each once.

    Raises:
        ValueError: The bytes are no protobuf message.
    """
    names: dict[str, None] = {}
    waiting = [("model", memoryview(model))]
    while waiting:
        kind, content = waiting.pop()
        inner = MESSAGES[kind]
        for number, value in _fields(content):
            if (found := inner.get(number)) == "entry":
                entry = {key: bytes(text) for key, text in _fields(value)}
                if entry.get(KEY) == b"location":
                    names[entry.get(VALUE, b"").decode()] = None
            elif found is not None:
                waiting.append((found, value))
    return list(names)


def watched_graph(bundle: Bundle, graph: GraphSpec) -> tuple[bytes, dict[str, Path]]:
    """Returns the bytes of a graph, and the files that it reads, which the bundle watches.

    The files are named as in the graph; their paths have no links.

    Raises:
        InputError: The file is no graph, or reads a file that the manifest does not list.
    """
    content = bundle.files.read(graph.file)
    try:
        names = external_files(content)
    except ValueError as error:
        path = bundle.graph(graph)
        raise InputError(f"{path} is no ONNX graph: {error}; {REMEDY}") from error
    places = {name: PurePosixPath(graph.file).with_name(name).as_posix() for name in names}
    return content, {name: bundle.files.watch(place) for name, place in places.items()}


def _fields(content: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yields number and bytes of the fields of a message that are strings, bytes or messages."""
    place = 0
    while place < len(content):
        key, place = _varint(content, place)
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            _, place = _varint(content, place)
        elif kind in (FIXED64, FIXED32):
            place += 8 if kind == FIXED64 else 4
        elif kind == BYTES:
            size, place = _varint(content, place)
            if size > len(content) - place:
                raise ValueError("a field is longer than its message")
            yield number, content[place : place + size]
            place += size
        else:
            raise ValueError(f"the wire type {kind} is unknown")


def _varint(content: memoryview, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(content):
            break
        byte = content[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
    raise ValueError("a number does not end")
