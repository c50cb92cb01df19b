"""Writers of a job that reads CSV, and the records that they write."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from transferry.runtime.engine.result import RowError
from transferry.runtime.jobs.formats.readers import open_reader
from transferry.runtime.jobs.formats.records import Record, RowWriter
from transferry.runtime.jobs.formats.rows import RowReader
from transferry.runtime.jobs.formats.writers import open_writer

WIDTH = 3
LINES = ("text", "jsonl", "tsv", "csv")
# Hard values for csv and tsv, and characters that must not end a line.
TEXTS = ["a", 'b "c", d', " e ", "\u2028f\x85", "", "'", '"', "g\\n"]


def reader_of(
    folder: Path, name: str = "in.csv", content: bytes = b"id,text,note\n", **options: Any
) -> RowReader:
    path = folder / name
    path.write_bytes(content)
    return open_reader(path, **options)


def writer_of(out: Path, content: bytes = b"id,text,note\n", **options: Any) -> RowWriter:
    """A writer of a job that reads CSV; vectors for npy."""
    if out.suffix == ".npy":
        options = {"task": "embed", "width": WIDTH, **options}
    return open_writer(out, rows=reader_of(out.parent, content=content).layout, **options)


def records(count: int, texts: Sequence[str] = TEXTS) -> list[Record]:
    """Records of rows with the field `note`; every fifth is an error."""
    found: list[Record] = []
    for number in range(count):
        text = texts[number % len(texts)]
        record: dict[str, Any] = {"id": f"n{number}", "note": text, "source": f"<{text}>"}
        if number % 5 == 4:
            error = RowError("too-long", f"90 tokens, {text}").record()
            record |= {"text": "", "finish_reason": "error", "error": error, "source_tokens": 90}
        else:
            record |= {
                "text": text[::-1],
                "score": -number / 7,
                "finish_reason": "end",
                "target_tokens": number,
                "source_tokens": 3,
                "n_best": [{"text": text[::-1], "score": -number / 7}],
            }
        if number % 3 == 0:
            record["truncated"] = True
        found.append(record)
    return found


def vectors(count: int) -> list[Record]:
    """Records of a job of embed; every third is an error."""
    error = {"error": RowError("empty", "there is no text to work on").record()}
    return [
        {"id": number, "source": "a"}
        | (error if number % 3 == 2 else {"vector": np.array([number, 0.5, -number], np.float32)})
        for number in range(count)
    ]


def placed(writer: RowWriter, record: Record) -> Record:
    """A record under the names of the output, with the text in the user's own column."""
    columns = writer.columns
    if columns is None or not columns.is_table:
        return record
    error = record.get("error", {})
    flat = {"truncated": False, **record, **{f"error_{name}": error[name] for name in error}}
    if not columns.identified:
        flat = {"text": flat.pop("source", None)} | {f".{name}": flat[name] for name in flat}
        return {columns.own[0].get(name[1:], name.strip(".")): flat[name] for name in flat}
    return {columns.own[0].get(name, name): flat[name] for name in flat}


def write(writer: RowWriter, path: Path, content: Sequence[Record] | Sequence[Path]) -> Path:
    """Writes records, or joins files."""
    with path.open("wb") as file:
        joins = content and isinstance(content[0], Path)
        if joins:
            writer.join(cast("Sequence[Path]", content), file)
        else:
            writer.write((placed(writer, cast(Record, each)) for each in content), file)
        assert not file.closed
    return path


def in_parts(writer: RowWriter, out: Path, rows: Sequence[Record], cuts: Sequence[int]) -> Path:
    """Writes rows as parts that begin at `cuts`, and joins them."""
    ends = zip([0, *cuts], [*cuts, len(rows)], strict=True)
    parts = [
        write(writer, out.with_name(f"{number:08}.part"), rows[first:last])
        for number, (first, last) in enumerate(ends)
    ]
    return write(writer, out, parts)
