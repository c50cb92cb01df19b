"""Numbers in files of a job: those that were computed, for every task and format."""

from __future__ import annotations

import pytest

from tests.end_to_end.ways import WAYS, Ways
from transferry import Engine
from transferry.export.checks.scores import rounded, written


@pytest.mark.parametrize("task", WAYS)
def test_numbers_of_files_are_the_engines(ways: Ways, task: str) -> None:
    """The check of `verify`; a writer that rounds does not pass."""
    _, bundle = ways(task)
    with Engine.load(bundle) as engine:
        assert written(engine, ["a cat", "the dog ran"]).problem == ""
        problem = written(engine, (), rounded).problem
        assert problem.endswith("which the engine did not give")
