"""How the rows of a job are written: lines of text, or vectors as npy or Parquet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, BinaryIO, Protocol, TypeVar

import numpy as np

from transferry.runtime.embedding import Embedding
from transferry.runtime.errors import UsageError

Row = TypeVar("Row", contravariant=True)
AnyRow = TypeVar("AnyRow")
ROW_GROUP = 4096


class Writer(Protocol[Row]):
    """Takes rows in order."""

    def write(self, number: int, row: Row) -> None:
        """Writes a row, given its number."""
        ...

    def close(self) -> None:
        """Writes what is left; not called where a job failed."""
        ...


class Lines(Writer[AnyRow]):
    """A line a row."""

    def __init__(self, file: BinaryIO, to_line: Callable[[int, AnyRow], str]) -> None:
        self.file, self.to_line = file, to_line

    def write(self, number: int, row: AnyRow) -> None:
        """Writes a line."""
        self.file.write(f"{self.to_line(number, row)}\n".encode())

    def close(self) -> None:
        """Nothing is left."""


def lines_of(to_line: Callable[[int, AnyRow], str]) -> Callable[[BinaryIO], Writer[AnyRow]]:
    """Returns what opens `Lines`."""
    return lambda file: Lines(file, to_line)


class NpyVectors:
    """numpy's own format: one array [rows, width] float32, for `numpy.load(path, mmap_mode="r")`.

    A row that has an error is NaN.
    """

    def __init__(self, file: BinaryIO, width: int) -> None:
        self.file, self.width, self.rows = file, width, 0
        self._header()

    def _header(self) -> None:
        # numpy pads the header so that it keeps its length when the array grows in rows.
        shape = (self.rows, self.width)
        header = {"descr": "<f4", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self.file, header)

    def write(self, number: int, row: Embedding) -> None:
        """Appends a vector."""
        self.file.write(row.vector.astype("<f4").tobytes())
        self.rows += 1

    def close(self) -> None:
        """Writes the number of rows into the header."""
        self.file.seek(0)
        self._header()


class ParquetVectors:
    """Parquet with the columns id, vector (a list of `width` floats) and error."""

    def __init__(self, file: BinaryIO, width: int) -> None:
        """Begins the file.

        Raises:
            UsageError: pyarrow is not installed.
        """
        try:
            import pyarrow
            import pyarrow.parquet
        except ModuleNotFoundError as error:
            raise UsageError(
                'Parquet needs pyarrow, which is not installed; pip install "transferry[parquet]", '
                "or write .npy"
            ) from error
        self._table = pyarrow.table
        self._schema = pyarrow.schema(
            [
                ("id", pyarrow.int64()),
                ("vector", pyarrow.list_(pyarrow.float32(), width)),
                ("error", pyarrow.string()),
            ]
        )
        self._writer: Any = pyarrow.parquet.ParquetWriter(file, self._schema)
        self._rows: list[tuple[int, Any, str | None]] = []

    def write(self, number: int, row: Embedding) -> None:
        """Appends a vector, or an error in its place."""
        error = None if row.error is None else row.error.message
        self._rows.append((number, None if error else row.vector.tolist(), error))
        if len(self._rows) == ROW_GROUP:
            self._flush()

    def _flush(self) -> None:
        columns = list(zip(*self._rows, strict=True)) or [(), (), ()]
        names = self._schema.names
        data = {name: list(column) for name, column in zip(names, columns, strict=True)}
        self._writer.write_table(self._table(data, schema=self._schema))
        self._rows = []

    def close(self) -> None:
        """Writes the last rows and the footer."""
        self._flush()
        self._writer.close()
