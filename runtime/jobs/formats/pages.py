"""Sizes of the pages of a Parquet file, which a reader unpacks whole."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from transferry.runtime.errors import InputError

# Bytes of a page, unpacked.
MOST_PAGE = 128 << 20
# Bytes of a signature behind the metadata of a file with encrypted columns, and of the footer's
# end: its length and a mark.
_SIGNATURE, _END = 28, 8


def require_small_pages(path: Path, metadata: Any) -> None:
    """Raises InputError for a page that takes more memory than a job may, or encrypted columns.

    Of these pyarrow 26 has no sizes, and ends the process. The metadata are pyarrow's.
    """
    with path.open("rb") as file:
        file.seek(-_END, os.SEEK_END)
        (length,) = struct.unpack("<I4x", file.read(_END))
        if length == metadata.serialized_size + _SIGNATURE:
            raise InputError(f"{path} has encrypted columns; write it again without encryption")
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            for chunk in map(group.column, range(group.num_columns)):
                if chunk.total_uncompressed_size <= MOST_PAGE:
                    continue
                if (largest := max(_pages(file, chunk), default=0)) > MOST_PAGE:
                    raise InputError(
                        f"{path}: expected pages of at most {MOST_PAGE >> 20} MiB, found one of "
                        f"{largest >> 20:,} MiB in the column {chunk.path_in_schema}; write it "
                        "again without such large values"
                    )


def _pages(file: BinaryIO, chunk: Any) -> Iterator[int]:
    """Yields the unpacked size of each page of a column in a row group."""
    starts = (chunk.dictionary_page_offset, chunk.data_page_offset)
    file.seek(min(start for start in starts if start))
    end = file.tell() + chunk.total_compressed_size
    while file.tell() < end:
        sizes = _header(file)
        if len(sizes) < 2:
            return
        yield sizes[0]
        file.seek(sizes[1], 1)


def _header(file: BinaryIO) -> list[int]:
    """Reads a PageHeader in Thrift's compact protocol; returns its unpacked and packed size."""
    sizes, field = [], 0
    while head := _byte(file):
        field = field + (head >> 4) if head >> 4 else _zigzag(file)
        if field in (2, 3) and head & 15 == 5:
            sizes.append(_zigzag(file))
        else:
            _skip(file, head & 15)
    return sizes


def _skip(file: BinaryIO, kind: int) -> None:
    """Skips a value; kinds are those of the protocol, 1 and 2 being true and false."""
    if kind in (4, 5, 6):
        _varint(file)
    elif kind in (3, 7):
        file.seek(1 if kind == 3 else 8, 1)
    elif kind == 8:
        file.seek(_varint(file), 1)
    elif kind in (9, 10):
        head = _byte(file)
        for _ in range(head >> 4 if head >> 4 < 15 else _varint(file)):
            _skip(file, 3 if head & 15 < 3 else head & 15)
    elif kind == 12:
        while head := _byte(file):
            if not head >> 4:
                _zigzag(file)
            _skip(file, head & 15)


def _byte(file: BinaryIO) -> int:
    return (file.read(1) or b"\0")[0]


def _varint(file: BinaryIO) -> int:
    value, shift = 0, 0
    while (byte := _byte(file)) & 128:
        value, shift = value | (byte & 127) << shift, shift + 7
    return value | byte << shift


def _zigzag(file: BinaryIO) -> int:
    value = _varint(file)
    return (value >> 1) ^ -(value & 1)
