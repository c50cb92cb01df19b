"""Replicas as in other processes, without them: workers, rows and answers are pickled."""

import pickle
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import pytest

from transferry.runtime.engine import processes
from transferry.runtime.engine.open_bundle import OpenBundle
from transferry.runtime.engine.processes import Processes


class _Pickled:
    def __init__(self, engine: OpenBundle) -> None:
        self.engine = engine

    def compute(self, worker: bytes, items: list[Any]) -> Any:
        sent = pickle.loads(pickle.dumps(items))
        read = processes._Unpickler(BytesIO(worker), self.engine.parts()).load()
        found = pickle.loads(pickle.dumps(processes._computed(read, sent)))
        if isinstance(found, Exception):
            raise found
        return found


class Loopback(Processes):
    def __init__(self, engine: OpenBundle) -> None:
        self.count, replica = 0, _Pickled(engine)
        self._replicas = [replica] * engine.replicas  # type: ignore[list-item]


@pytest.fixture(autouse=True)
def pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has every engine compute through pickles."""
    answers = OpenBundle.answers

    def through_pickles(engine: OpenBundle, *arguments: Any, **named: Any) -> Iterator[Any]:
        if len(engine.models) == 1 and engine._processes is None:
            engine._processes = Loopback(engine)
        yield from answers(engine, *arguments, **named)

    monkeypatch.setattr(OpenBundle, "answers", through_pickles)
