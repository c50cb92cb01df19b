"""Reading from the middle of a file of lines gives the rows that reading from its start gives."""

import io
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from transferry.runtime.errors import InputError
from transferry.runtime.io import line_index
from transferry.runtime.io.line_index import LineIndex
from transferry.runtime.jobs.formats.readers import open_inputs
from transferry.runtime.jobs.formats.rows import InputRow, RowReader


class Memory:
    """A file in memory, which counts the bytes that are read."""

    def __init__(self, content: bytes) -> None:
        self.content, self.read = content, 0
        self.version: tuple[Any, ...] | None = (len(content), 1)

    @contextmanager
    def opened(self) -> Iterator[io.BufferedReader]:
        memory = self

        class Raw(io.BytesIO):
            def readinto(self, buffer: Any) -> int:
                size = super().readinto(buffer)
                memory.read += size
                return size

        yield io.BufferedReader(Raw(self.content), 1)


def places(index: LineIndex, content: bytes) -> None:
    """Every known place is the beginning of the line of that number."""
    starts = [0, *(at + 1 for at, byte in enumerate(content) if byte == 10)]
    for line in range(index.lines):
        number, offset = index.before(line)
        assert number <= line
        assert starts[number] == offset


@pytest.mark.parametrize(("block", "piece"), [(1, 7), (7, 21), (16, 16)])
def test_places_are_beginnings_of_lines(
    tmp_path: Path, block: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_index, "BLOCK", block)
    monkeypatch.setattr(line_index, "PIECE", piece)
    draw = random.Random(block)
    for trial in range(4):
        lines = ["x" * draw.randrange(12) for _ in range(draw.randrange(20))]
        content = "\n".join(lines).encode() + b"\n" * draw.randrange(2)
        file, shared = Memory(content), tmp_path / str(trial)
        index = LineIndex.of(file, shared, draw.random())
        assert index.lines == len(content.splitlines())
        places(index, content)
        # Others take the pieces that are there.
        for path in [*shared.glob("*.json")][: draw.randrange(2)]:
            path.unlink()
        file.read = 0
        again = LineIndex.of(file, shared)
        assert (again.sha256, again.lines) == (index.sha256, index.lines)
        assert file.read <= piece + 3


def rows_of(form: str, draw: random.Random) -> bytes:
    count, end = draw.randrange(20), draw.choice(["\n", "\r\n"])
    if form == "txt":
        lines = ["x" * draw.randrange(9) + draw.choice(["", "\u00e9"]) for _ in range(count)]
    elif form == "jsonl":
        lines = [json.dumps({"text": "z" * draw.randrange(9)}) for _ in range(count)]
        lines += ["bad"] * draw.randrange(2)
    else:
        mark = {"tsv": "\t", "csv": ","}[form]
        ends = ["", "", f"{mark}z", "\r3"]
        lines = [f"{n}{mark}{'y' * draw.randrange(9)}{draw.choice(ends)}" for n in range(count)]
        lines += ['8,"a\nb"'] * (form == "csv" and draw.random() < 0.3)
        lines += ['7,"a'] * (draw.random() < 0.1)
        lines = ["sep=" + mark] * draw.randrange(2) + [f"id{mark}text", *lines]
    text = draw.choice(["", "\ufeff"]) + end.join(lines) + draw.choice(["", end])
    return text.encode()


@pytest.mark.parametrize("form", ["txt", "jsonl", "tsv", "csv"])
def test_rows_from_anywhere(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a header, a byte order mark, bad rows, and in a second file."""
    draw, path, indexed = random.Random(3), tmp_path / f"a.{form}", 0
    told: dict[str, Any] = {} if form == "txt" else {"column": "text"}
    if form in ("tsv", "csv"):
        told["delimiter"] = {"tsv": "\t", "csv": ","}[form]
    for _ in range(30):
        path.write_bytes(rows_of(form, draw))
        try:
            expected = list(open_inputs([path, path], **told).rows())
        except InputError:  # a file of \r alone, or without a header
            continue
        reader = open_inputs([path, path], **told)
        if draw.random() < 0.8:
            monkeypatch.setattr(line_index, "BLOCK", draw.choice([1, 7, 64]))
            reader.number()
            assert reader.count == len(expected)
            indexed += reader.place(len(expected))[2][1] > 0
        first = draw.randrange(len(expected) + 2)
        for last in (None, first, first + draw.randrange(9)):
            assert list(reader.rows(first, last)) == expected[first:last]
        pass_on(reader, open_inputs([path, path], **told), expected, first, draw.randrange(1, 9))
    assert indexed > 10


def pass_on(
    one: RowReader, two: RowReader, expected: list[InputRow], first: int, rows: int
) -> None:
    """Two readers read by turns where the other has stopped, the first time from some row."""
    place = one.place(first)
    for turn in range(99):
        reader = (one, two)[turn % 2]
        found, place = reader.keep(first, rows, place)
        place = json.loads(json.dumps(place))
        assert [*islice(reader.rows(first), found)] == expected[first : first + rows]
        assert len(expected[first : first + rows]) == found
        first += found
        if found < rows:
            return
    raise AssertionError("it did not end")
