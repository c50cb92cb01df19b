"""Jobs of every task and format give the answers of transformers.

The texts go into a file of each input format, the answers come out of a file of each output
format, and neither is written or read by the product. With FUZZ=long every input format meets every
output format.
"""

import math
import os
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.commands import call
from tests.end_to_end.files import HARD_TEXTS, INPUTS, TABLES, read_rows, write_rows
from tests.end_to_end.ways import WAYS, Answer, Rank, Refused, Way, Ways

OUTPUTS = {
    "generate": ("txt", *TABLES),
    "embed": ("jsonl", "npy", "parquet"),
    "fill-mask": ("txt", *TABLES),
}


def cases() -> Iterator[tuple[str, str, str]]:
    for task in WAYS:
        inputs = [name for name in INPUTS if task != "rank" or "txt" not in name]
        outputs = OUTPUTS.get(task, TABLES)
        if os.environ.get("FUZZ") == "long":
            yield from ((task, *pair) for pair in product(inputs, outputs))
        else:
            count = max(len(inputs), len(outputs))
            for place in range(count):
                yield task, inputs[place % len(inputs)], outputs[place % len(outputs)]


EXPECTED: dict[str, list[Answer | None]] = {}


def expected(task: str, way: Way) -> list[Answer | None]:
    """The answers to `HARD_TEXTS`, None for an error."""
    if task not in EXPECTED:
        answers: list[Answer | None] = []
        for text in HARD_TEXTS:
            try:
                # A blank text is an error by a rule of ours.
                answers.append(way.answer(text) if way.text(text).strip() else None)
            except Refused:
                answers.append(None)
        EXPECTED[task] = answers
    return EXPECTED[task]


def close(found: Any, wanted: Any, unit: float = 0.0) -> bool:
    """Whether numbers are those of float64 within float32's rounding, and all else is equal.

    Args:
        found: What a job wrote.
        wanted: The independent answer.
        unit: Size of the numbers that a number belongs to; 0 for one that stands alone.
    """
    if isinstance(wanted, float):
        return math.isclose(found, wanted, rel_tol=1e-4, abs_tol=1e-5 * unit)
    if isinstance(wanted, list | tuple):
        return len(found) == len(wanted) and all(map(partial(close, unit=unit), found, wanted))
    return bool(found == wanted)


@pytest.mark.parametrize(("task", "given", "written"), list(cases()))
def test_answers_are_theirs(
    task: str, given: str, written: str, ways: Ways, tmp_path: Path
) -> None:
    way, bundle = ways(task)
    columns = {"text": [way.text(text) for text in HARD_TEXTS]}
    if task == "rank":
        columns["other"] = [Rank.SECOND] * len(HARD_TEXTS)
    rows = write_rows(tmp_path / f"rows.{given}", columns)
    out = tmp_path / f"answers.{written}"
    command = ["score"] if task == "score" else ["run"]
    options = [] if task == "score" else way.options
    result = call(*command, bundle, rows, "--out", out, *options, "--quiet")
    wanted = expected(task, way)
    assert result.exit_code == (6 if None in wanted else 0), result.stderr
    found = read_rows(out)
    assert len(found) == len(wanted)
    for text, record, answer in zip(HARD_TEXTS, found, wanted, strict=True):
        error = record.get("error") or record.get("error_kind")
        if answer is None:
            told = written in ("txt", "npy") or error
            assert told, (text, record)
            continue
        assert not error, (text, record)
        if "transferry_text" in record:  # beside the user's own column
            record = {**record, "text": record["transferry_text"]}
        read = way.read(record)
        units = {"vector": 1.0}
        same = all(close(value, answer[name], units.get(name, 0.0)) for name, value in read.items())
        assert same, (text, read, answer)
