"""Vectors on disk: what numpy and pyarrow read is what was written, errors in their places."""

import io
from pathlib import Path

import numpy as np
import pytest

from transferry.runtime import writers
from transferry.runtime.embedding import Embedding
from transferry.runtime.errors import UsageError
from transferry.runtime.rows import RowError
from transferry.runtime.writers import Lines, NpyVectors, ParquetVectors

WIDTH = 3
NAN = np.full(WIDTH, np.nan, np.float32)


def rows(count: int) -> list[Embedding]:
    """Every third is an error."""
    error = RowError("empty", "there is no text to work on")
    return [
        Embedding("", 0, NAN, error)
        if number % 3 == 2
        else Embedding("text", 2, np.array([number, 0.5, -number], np.float32))
        for number in range(count)
    ]


def vectors(count: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    return np.array([row.vector for row in rows(count)], np.float32).reshape(count, WIDTH)


@pytest.mark.parametrize("count", [0, 1, 9, 12_345])
def test_npy(tmp_path: Path, count: int) -> None:
    path = tmp_path / "vectors.npy"
    with path.open("wb") as file:
        writer = NpyVectors(file, WIDTH)
        for number, row in enumerate(rows(count)):
            writer.write(number, row)
        writer.close()
    found = np.load(path)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, vectors(count))


@pytest.mark.parametrize("count", [0, 1, writers.ROW_GROUP, writers.ROW_GROUP + 5])
def test_parquet(tmp_path: Path, count: int) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is an optional extra")
    path = tmp_path / "vectors.parquet"
    with path.open("wb") as file:
        writer = ParquetVectors(file, WIDTH)
        for number, row in enumerate(rows(count)):
            writer.write(number, row)
        writer.close()
    table = parquet.read_table(path).to_pydict()
    assert table["id"] == list(range(count))
    for row, vector, error in zip(rows(count), table["vector"], table["error"], strict=True):
        assert error == (row.error and row.error.message)
        assert vector == (None if row.error else row.vector.tolist())


def test_parquet_without_pyarrow_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(UsageError, match=r'pip install "transferry\[parquet\]", or write .npy'):
        ParquetVectors(io.BytesIO(), WIDTH)


def test_lines() -> None:
    file = io.BytesIO()
    writer: Lines[str] = Lines(file, lambda number, row: f"{number}: {row}")
    for number, row in enumerate(("ä", "b")):
        writer.write(number, row)
    writer.close()
    assert file.getvalue().decode() == "0: ä\n1: b\n"
