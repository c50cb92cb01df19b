"""Numbers in files of a job beside the engine's.

The writers of a job write the engine's results, and json, csv, numpy and pyarrow read the files.
"""

import base64
import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from transferry.runtime.engine.engine import Engine
from transferry.runtime.engine.result import RowResult
from transferry.runtime.engine.tasks.table import TASKS
from transferry.runtime.engine.tasks.task import Layout, OutputFormat, Task
from transferry.runtime.errors import UsageError
from transferry.runtime.io.folders import temporary_folder
from transferry.runtime.jobs.formats.columnar import import_pyarrow
from transferry.runtime.jobs.formats.openai_batch import Request
from transferry.runtime.jobs.formats.rows import InputRow
from transferry.runtime.jobs.formats.writers import open_writer
from transferry.runtime.jobs.job_options import JobOptions
from transferry.runtime.proof.report import Claim

WRITTEN = "numbers in files"  # name of the claim
WRITTEN_ROWS = 4
FEW_TEXTS = ("a", "the cat sat", "one two", "in the house")
# Several answers, so that every column has numbers.
_BRIEF = {"beam": 2, "n_best": 2, "scores": True}
Change = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def written(engine: Engine, texts: Sequence[str], change: Change = lambda record: record) -> Claim:
    """Compares the numbers in files of every task and format with the engine's results.

    The first texts are answered, or a few words. `change` is applied to each record before it is
    written, to plant a fault.

    A format whose package is missing, and a task that the bundle cannot do, are skipped.
    """
    texts, skipped = (*texts, *FEW_TEXTS)[:WRITTEN_ROWS], dict[str, str]()
    for name in engine.tasks:
        pairs = name in ("rank", "answer") or (name == "score" and engine.decoder.has_encoder)
        rows = [
            InputRow(n, n, text, {"second": text} if pairs else {}, target=text if pairs else None)
            for n, text in enumerate(texts)
        ]
        try:
            task = _task(engine, name, pairs=pairs)
            results = list(task.answers(engine, map(task.given, rows), 0))
        except UsageError as error:  # such as pairs, which this tokenizer does not join
            skipped[name] = str(error)
            continue
        for format in task.formats:
            if format not in _READERS:  # text has no numbers
                continue
            try:
                problem = _problem(task, rows, results, format, change)
            except UsageError as error:  # pyarrow is not installed
                # Without the command that installs it, which is of this machine alone.
                skipped[format] = str(error).partition(";")[0]
                continue
            if problem:
                return Claim(WRITTEN, f"{name}, {format}: {problem}")
    return Claim(WRITTEN, skipped="; ".join(f"{name}: {why}" for name, why in skipped.items()))


def _task(engine: Engine, name: Any, *, pairs: bool) -> Task:
    options: dict[str, Any] = {"task": name}
    if name == "generate":
        options["generation"] = {**_BRIEF, "max_length": min(8, engine.max_positions)}
    elif pairs:
        options |= {"target": Path("targets")} if name == "score" else {"pair": "second"}
        options |= {"top": 2} if name == "answer" else {}
    layout = Layout("rows", "jsonl", (), has_id=False, column="text")
    return TASKS[name](engine, JobOptions(**options), layout)


def _problem(
    task: Task,
    rows: Sequence[InputRow],
    results: Sequence[RowResult],
    format: OutputFormat,
    change: Change,
) -> str:
    """Writes results and reads them back; names the first number that the engine did not give."""
    if format == "openai":
        endpoint: Any = "embeddings" if task.name == "embed" else "completions"
        rows = [
            replace(row, request=Request("row", endpoint, "", (str(row.text),), packed=n % 2 == 1))
            for n, row in enumerate(rows)
        ]
    layout = Layout("rows", "openai" if format == "openai" else "jsonl", (), has_id=False)
    with temporary_folder() as folder:
        path = folder / f"out.{format}"
        shape: Any = {"kinds": task.columns, "n_best": task.n_best, "width": task.width}
        writer = open_writer(path, format=format, rows=layout, task=task.name, **shape)
        both = zip(rows, results, strict=True)
        with path.open("wb") as file:
            writer.write((change(writer.record(*pair, task.n_best)) for pair in both), file)
        others = ("text", "integer", "boolean")
        numbers = {name for name, kind in task.columns.items() if kind not in others}
        found = [list(_floats(record)) for record in _READERS[format](path, numbers)]
    # Responses hold vectors, but no scores.
    needed = format != "openai" or bool(task.width)
    for number, (result, values) in enumerate(zip(results, found, strict=True), start=1):
        given = {*_floats(result)}
        # A float32 is written as the shortest text that gives it back.
        single = {value for value in given if float(np.float32(value)) == value}
        for value in values:
            if value not in given and float(np.float32(value)) not in single:
                return f"row {number} holds {value!r}, which the engine did not give"
        if needed and result.error is None and given and not values:
            return f"row {number} holds no number"
    return ""


def _floats(value: Any) -> Iterator[float]:
    """Yields the floats of a record or result, at any depth, without NaN."""
    if isinstance(value, float):
        yield from () if math.isnan(value) else (value,)
    elif isinstance(value, np.ndarray):
        yield from _floats(value.tolist())
    elif isinstance(value, Mapping):
        yield from _floats(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _floats(item)
    elif is_dataclass(value):
        yield from _floats([getattr(value, field.name) for field in fields(value)])
        yield from _floats(getattr(value, "total", None))


def _read_lines(path: Path, numbers: set[str]) -> Iterator[Any]:
    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
        record = json.loads(line)
        for each in (record.get("response") or {}).get("body", {}).get("data", ()):
            if isinstance(packed := each["embedding"], str):
                each["embedding"] = np.frombuffer(base64.b64decode(packed), "<f4")
        yield record


def _read_cells(path: Path, numbers: set[str], delimiter: str = ",") -> Iterator[Any]:
    quoting: Any = csv.QUOTE_MINIMAL if delimiter == "," else csv.QUOTE_NONE
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file, delimiter=delimiter, quoting=quoting):
            yield [json.loads(row[name]) for name in sorted(numbers) if row.get(name)]


def _read_table(path: Path, numbers: set[str]) -> Iterator[Any]:
    for row in import_pyarrow().parquet.read_table(path).to_pylist():
        cells = [row[name] for name in sorted(numbers) if row.get(name) is not None]
        yield [json.loads(cell) if isinstance(cell, str) else cell for cell in cells]


_READERS: dict[OutputFormat, Callable[[Path, set[str]], Iterable[Any]]] = {
    "jsonl": _read_lines,
    "openai": _read_lines,
    "csv": _read_cells,
    "tsv": partial(_read_cells, delimiter="\t"),
    "parquet": _read_table,
    "npy": lambda path, numbers: np.load(path),
}


def rounded(record: Any) -> Any:
    """Rounds the numbers of a record to 6 decimals, as a faulty writer may."""
    if isinstance(record, Mapping):
        return {name: rounded(value) for name, value in record.items()}
    if isinstance(record, list | tuple):
        return [rounded(value) for value in record]
    if isinstance(record, float | np.floating | np.ndarray):
        return np.round(record, 6)
    return record
