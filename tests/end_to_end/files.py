"""Rows in files of each format, written and read without a line of the product."""

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

# Texts that a line, a cell and a JSON string can hold.
HARD_TEXTS = [
    "the cat sat on the mat",
    "Straße über die Häuser",
    'a "quoted" word, and a comma',
    '"',
    "semi;colons; and|bars",
    "  two blanks, and two behind  ",
    "",
    " ",
    "007",
    "1e5",
    "NaN",
    "null",
    "=1+1",
    "-0.0",
    "a\u2028b\u2029c\x85d",
    "\u00a0nbsp\u00a0",
    "\ufeffa mark in front",
    "日本語 のテキスト 東京",
    "😀 👩‍👩‍👧‍👦 🇩🇪",
    "Ünïcode ﬁ Ａ e\u0301",
    "שלום عليكم \u202eright to left\u202c",
    "back\\slash \\n \\u0041",
    "&amp; <b>bold</b> &#65;",
    "\x01 a control\x7f",
    "\U0001f9ff\U000f0000\U0010fffd",
    "didn't they're 123",
    "soft\u00adhyphen zero\u200bwidth",
    "</s> [SEP] <|endoftext|> <pad> <unk>",
    "the mat " * 40,
    "'single' `ticks` ''",
]

INPUTS = ("txt", "txt.gz", "tsv", "csv", "jsonl", "parquet", "arrow")
TABLES = ("jsonl", "tsv", "csv", "parquet")


def write_rows(path: Path, columns: dict[str, list[str]]) -> Path:
    """Writes columns of texts in the format that the name of the file says."""
    names, rows = list(columns), list(zip(*columns.values(), strict=True))
    text = ""
    match path.name.partition(".")[2]:
        case "txt" | "txt.gz":
            (lines,) = columns.values()
            text = "".join(f"{line}\n" for line in lines)
        case "tsv":
            text = "".join("\t".join(cells) + "\n" for cells in (names, *rows))
        case "jsonl":
            text = "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows)
        case "csv":
            with path.open("w", encoding="utf-8", newline="") as file:
                csv.writer(file).writerows([names, *rows])
            return path
        case "parquet":
            pyarrow.parquet.write_table(pyarrow.table(columns), path)
            return path
        case "arrow":
            with pyarrow.ipc.new_file(path, pyarrow.table(columns).schema) as file:
                file.write_table(pyarrow.table(columns))
            return path
    content = text.encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Reads the output of a job: records by name, a row of vectors as `vector`, a line as `text`.

    Cells of CSV and TSV are texts; a list in such a cell is JSON.
    """
    match path.suffix:
        case ".jsonl":
            with path.open(encoding="utf-8", newline="\n") as file:
                return [json.loads(line) for line in file]
        case ".csv":
            with path.open(encoding="utf-8", newline="") as file:
                return list(csv.DictReader(file))
        case ".tsv":
            lines = path.read_text(encoding="utf-8").split("\n")
            header, *rows = (line.split("\t") for line in lines[:-1])
            return [dict(zip(header, row, strict=True)) for row in rows]
        case ".parquet":
            return list(pyarrow.parquet.read_table(path).to_pylist())
        case ".npy":
            return [{"vector": row} for row in np.load(path)]
    lines = path.read_text(encoding="utf-8").split("\n")
    return [{"text": line} for line in lines[:-1]]


def number(value: Any) -> float:
    """A cell as a number."""
    return float(value) if value not in (None, "") else float("nan")


def listed(value: Any) -> list[Any]:
    """A cell that holds a list, which CSV and TSV have as JSON."""
    found = json.loads(value) if isinstance(value, str) and value else value
    return list(found) if found is not None else []
