"""Numbers in files of a job: those that were computed, for every task and format."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest

from tests.commands import done
from tests.end_to_end.ways import WAYS, Ways
from transferry import Engine
from transferry.export.checks.job_files import rounded, written
from transferry.runtime.engine.result import RowResult
from transferry.runtime.engine.tasks.embed import EmbeddingResult
from transferry.runtime.engine.tasks.generate import GenerationResult, TextHypothesis
from transferry.runtime.engine.tasks.rank import RankedResult
from transferry.runtime.engine.tasks.task import Layout
from transferry.runtime.jobs.formats.rows import InputRow
from transferry.runtime.jobs.formats.writers import open_writer

LAYOUT = Layout("rows", "jsonl", (), has_id=False, column="text")
DOUBLES = [
    *(0.0, -0.0, 5e-324, -2.2250738585072014e-308, 1.7976931348623157e308, 0.1 + 0.2),
    *(1e-07, 3.6e-09, 9.6e-13, -11.123456789012345, 1e16, 123456789.0, 1.0, 2 / 3, 1e22),
]
SINGLES = np.array(
    [
        *(0.0, -0.0, 1e-45, 1.1754944e-38, 3.4028235e38, -4.4697e-07, 0.1, 1 / 3, 16777216.0),
        *(2.0**-96, 2.0**87, 1e-07, 1.0, 123456.79),
    ],
    np.float32,
)


def same(one: float, other: float) -> bool:
    return one == other and math.copysign(1, one) == math.copysign(1, other)


def file_of(path: Path, task: str, results: list[RowResult], **shape: Any) -> Path:
    writer = open_writer(path, rows=LAYOUT, task=task, **shape)
    rows = [InputRow(number, number, "x") for number in range(len(results))]
    n_best = 2 if shape.get("n_best") else 1
    with path.open("wb") as file:
        records = (writer.record(*pair, n_best) for pair in zip(rows, results, strict=True))
        writer.write(records, file)
    return path


def scores_of(path: Path) -> list[tuple[str, float]]:
    """Returns the text of each score, and its value."""
    match path.suffix:
        case ".jsonl":
            lines = path.read_text().splitlines()
            texts = [line.partition('"score": ')[2].partition("}")[0] for line in lines]
            values = [json.loads(line)["score"] for line in lines]
            return list(zip(texts, values, strict=True))
        case ".parquet":
            column = pyarrow.parquet.read_table(path)["score"].to_pylist()
            return [(repr(value), value) for value in column]
    with path.open(newline="") as file:
        cells = [
            row["score"] for row in csv.DictReader(file, delimiter=",\t"[path.suffix == ".tsv"])
        ]
    return [(cell, float(cell)) for cell in cells]


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "tsv", "parquet"])
def test_hard_numbers_come_back(tmp_path: Path, suffix: str) -> None:
    doubles: list[RowResult] = [RankedResult("x", 1, "y", score) for score in DOUBLES]
    read = scores_of(file_of(tmp_path / f"doubles.{suffix}", "rank", doubles))
    assert [text for text, _ in read] == list(map(repr, DOUBLES))
    assert all(same(value, score) for (_, value), score in zip(read, DOUBLES, strict=True))
    singles: list[RowResult] = [
        RankedResult("x", 1, "y", float(score), single=True) for score in SINGLES
    ]
    read = scores_of(file_of(tmp_path / f"singles.{suffix}", "rank", singles))
    assert [text for text, _ in read] == [repr(float(str(score))) for score in SINGLES]
    assert all(
        same(float(np.float32(value)), float(score))
        for (_, value), score in zip(read, SINGLES, strict=True)
    )


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "npy"])
def test_hard_vectors_come_back(tmp_path: Path, suffix: str) -> None:
    results: list[RowResult] = [EmbeddingResult("x", 1, SINGLES), EmbeddingResult("y", 1, -SINGLES)]
    path = file_of(tmp_path / f"out.{suffix}", "embed", results, width=len(SINGLES))
    match suffix:
        case "jsonl":
            read = [json.loads(line)["vector"] for line in path.read_text().splitlines()]
        case "parquet":
            read = pyarrow.parquet.read_table(path)["vector"].to_pylist()
        case _:
            read = np.load(path)
    found = np.array(read).astype(np.float32)
    assert found.tobytes() == np.stack([SINGLES, -SINGLES]).tobytes()


@pytest.mark.parametrize("score", [math.nan, -math.inf])
def test_no_number_is_null(tmp_path: Path, score: float) -> None:
    found = tuple(TextHypothesis((5,), score, one, "end", "x") for one in (score, -0.5))
    results: list[RowResult] = [GenerationResult("x", 1, found)]
    paths = {
        suffix: file_of(tmp_path / f"out.{suffix}", "generate", results, n_best=True)
        for suffix in ("jsonl", "csv", "parquet")
    }
    record = json.loads(paths["jsonl"].read_text())
    assert [record["score"], *(each["score"] for each in record["n_best"])] == [None, None, -0.5]
    with paths["csv"].open(newline="") as file:
        assert next(csv.DictReader(file))["score"] == ""
    assert pyarrow.parquet.read_table(paths["parquet"])["score"].to_pylist() == [None]


@pytest.mark.parametrize("task", WAYS)
def test_numbers_of_files_are_the_engines(ways: Ways, task: str) -> None:
    """The check of `verify`; a writer that rounds does not pass."""
    _, bundle = ways(task)
    with Engine(bundle) as engine:
        assert written(engine, ["a cat", "the dog ran"]).problem == ""
        problem = written(engine, (), rounded).problem
        assert problem.endswith("which the engine did not give")


def test_the_summary_has_the_sum_of_scores(ways: Ways, tmp_path: Path) -> None:
    _, bundle = ways("score")
    (tmp_path / "in.txt").write_text("the cat sat\nthe dog ran home\n")
    out = tmp_path / "out.jsonl"
    done("score", bundle, tmp_path / "in.txt", "-o", out)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    summary = json.loads((tmp_path / "out.jsonl.summary.json").read_text())
    total = records[0]["total"] + records[1]["total"]
    assert summary["log_probability"] == total
    tokens = sum(len(record["tokens"]) for record in records)
    assert summary["perplexity"] == math.exp(-total / tokens)
