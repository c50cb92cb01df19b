"""SentencePiece's model files: pieces, scores and the table of characters.

The file is a protocol buffer, sentencepiece_model.proto of google/sentencepiece. Only the few
fields that a tokenizer is made of are read, so neither protobuf nor sentencepiece is needed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from transferry.build_model.formats.tensors import DAMAGED
from transferry.runtime.errors import InputError
from transferry.runtime.files import MOST_BYTES, read_bytes

# Types of values on the wire, and of pieces.
_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5
USER_DEFINED = 4
UNIGRAM = 1


@dataclass(frozen=True)
class Pieces:
    """A SentencePiece model.

    Attributes:
        scores: Pieces with their scores, in the order of their ids.
        user_defined: Pieces that are never split.
        characters: Table that texts are normalised by; none where there is none.
        unigram: Whether it is a model of unigrams, and not BPE, words or characters.
    """

    scores: list[tuple[str, float]]
    user_defined: tuple[str, ...]
    characters: bytes | None
    unigram: bool


def read_pieces(path: Path) -> Pieces:
    """Reads a SentencePiece model.

    Raises:
        InputError: The file is missing or damaged.
    """
    content = read_bytes(path, MOST_BYTES)
    scores: list[tuple[str, float]] = []
    user_defined: list[str] = []
    characters = b""
    kind: int | bytes = UNIGRAM
    try:
        for number, value in _fields(content):
            if number == 1 and isinstance(value, bytes):
                piece = dict(_fields(value))
                score = struct.unpack("<f", _bytes(piece.get(2, bytes(4))))[0]
                text = _bytes(piece[1]).decode()
                scores.append((text, score))
                user_defined += [text] * (piece.get(3) == USER_DEFINED)
            elif number == 2 and isinstance(value, bytes):
                kind = dict(_fields(value)).get(3, UNIGRAM)
            elif number == 3 and isinstance(value, bytes):
                characters = _bytes(dict(_fields(value)).get(2, b""))
    except (ValueError, IndexError, KeyError, struct.error) as error:
        raise InputError(f"{path} is not a whole SentencePiece model; {DAMAGED}") from error
    if not scores:
        raise InputError(f"{path}: expected a SentencePiece model, found no pieces; {DAMAGED}")
    return Pieces(scores, tuple(user_defined), characters or None, kind == UNIGRAM)


def _bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a number in place of bytes")
    return value


def _fields(content: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yields number and value of each field of a message."""
    place = 0
    while place < len(content):
        key, place = _varint(content, place)
        kind = key & 7
        if kind == _VARINT:
            value, place = _varint(content, place)
            yield key >> 3, value
            continue
        if kind == _BYTES:
            size, place = _varint(content, place)
        elif kind in (_FOUR_BYTES, _EIGHT_BYTES):
            size = 4 if kind == _FOUR_BYTES else 8
        else:
            raise ValueError(f"a value of type {kind}")
        if place + size > len(content):
            raise ValueError("a value beyond the end")
        yield key >> 3, content[place : place + size]
        place += size


def _varint(content: bytes, place: int) -> tuple[int, int]:
    value = 0
    for number in range(10):
        byte = content[place]
        place += 1
        value |= (byte & 127) << 7 * number
        if byte < 128:
            return value, place
    raise ValueError("a number of more than ten bytes")
