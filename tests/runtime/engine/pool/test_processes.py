"""Replicas in processes of their own: the same answers, and every end that they can come to."""

import os
import pickle
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.commands import PATIENCE
from transferry.runtime.decoding.batching import BatchOptions
from transferry.runtime.engine.engine import Engine
from transferry.runtime.engine.opening import open_again, shares_of, weights_of
from transferry.runtime.engine.preprocess import WorkItem
from transferry.runtime.engine.processes import Processes, _computed
from transferry.runtime.errors import AllocationError, InputError, Option, UsageError
from transferry.runtime.ort.session import SessionOptions


@pytest.fixture(scope="module")
def shared(bundle_folder: Path) -> Engine:
    batches = BatchOptions(rows=4, window=30)
    return Engine(bundle_folder, replicas=3, processes=2, batches=batches)


def elsewhere(engine: Engine) -> Engine:
    """The engine without the replicas of this process."""
    others = engine._processes
    assert others is not None
    replicas = len(others._replicas)
    alone = Engine.of(engine.bundle, engine.model, replicas=replicas, batches=engine.batches)
    alone._processes = others
    return alone


def test_the_replicas_are_shared_out(shared: Engine) -> None:
    assert (shared.replicas, shared.describe()["processes"]) == (3, 2)
    assert elsewhere(shared).replicas == 2


def test_streams_that_run_at_once_and_one_that_ends_early(
    shared: Engine, engine: Engine, texts: list[str]
) -> None:
    greedy, beams = (list(engine.generate(texts, max_length=6, beam=beam)) for beam in (1, 2))
    others = elsewhere(shared)
    first = others.generate(texts, max_length=6)
    assert next(first) == greedy[0]
    assert list(others.generate(texts, max_length=6, beam=2)) == beams
    first.close()
    assert list(others.generate(texts, max_length=6)) == greedy
    assert list(shared.generate(texts, max_length=6)) == greedy


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ({"processes": 0}, "processes must be 1 to 2, the replicas, found 0"),
        ({"processes": 3}, "processes must be 1 to 2, the replicas, found 3"),
        ({"processes": 2, "device": "cuda"}, "processes is for provider cpu, found cuda"),
    ],
)
def test_processes_have_replicas_on_the_cpu(
    bundle_folder: Path, named: dict[str, Any], expected: str
) -> None:
    with pytest.raises(UsageError, match=expected):
        Engine(bundle_folder, replicas=2, **named)


@pytest.mark.parametrize(
    ("replicas", "processes", "expected"),
    [
        (7, None, [7]),
        (17, None, [4, 4, 4, 5]),
        (64, None, [4] * 16),
        (7, 1, [7]),
        (8, 3, [2, 3, 3]),
    ],
)
def test_replicas_by_process(replicas: int, processes: int | None, expected: list[int]) -> None:
    assert shares_of(replicas, processes, SessionOptions(), 1 << 20) == expected
    assert shares_of(replicas, None, SessionOptions(provider="cuda"), 1 << 20) == [replicas]


def test_copies_of_large_weights_are_few(engine: Engine) -> None:
    found = [len(shares_of(64, None, SessionOptions(), size << 20)) for size in (64, 200, 1500)]
    assert found == [16, 5, 1]
    assert len(shares_of(64, 9, SessionOptions(), 1500 << 20)) == 9
    files = [*engine.bundle.folder.joinpath("portable").iterdir()]
    expected = sum(file.stat().st_size for file in files)
    assert weights_of(engine.bundle, engine.model.variant) == expected


def test_a_process_that_ends_is_an_error(bundle_folder: Path, texts: list[str]) -> None:
    engine = Engine(bundle_folder, replicas=2, processes=2)
    assert engine._processes is not None
    os.kill(engine._processes._replicas[0].process.pid or 0, signal.SIGKILL)
    with pytest.raises(InputError, match=r"exit code -9.*run fewer processes, or make"):
        list(elsewhere(engine).generate(texts))


def test_a_bundle_that_is_replaced_while_it_is_opened_is_refused(engine: Engine) -> None:
    folder, options = engine.bundle.folder, SessionOptions()
    around = (folder, "another", engine.model.variant.name, options, False)
    with pytest.raises(InputError, match="another bundle came into this folder"):
        Processes(partial(open_again, Engine.of, *around), [1]).wait()


def test_a_fork_does_not_share_the_processes(shared: Engine, texts: list[str]) -> None:
    others = elsewhere(shared)
    if (child := os.fork()) == 0:
        try:
            list(others.generate(texts))
        except UsageError as error:
            os._exit(40 + ("before this process was forked" in str(error)))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 41
    assert len(list(others.generate(texts, max_length=2))) == len(texts)


ERRORS = [
    (UsageError(Option("max_length"), " is 0"), UsageError),
    (InputError("no"), InputError),
    (AllocationError("no room for [1, 2]"), MemoryError),
    (MemoryError(), MemoryError),
    (ZeroDivisionError("by zero"), RuntimeError),
]


@pytest.mark.parametrize(("error", "expected"), ERRORS)
def test_an_error_comes_back(error: Exception, expected: type[Exception]) -> None:
    def worker(take: Any, rows: int) -> NoReturn:
        raise error

    found = pickle.loads(pickle.dumps(_computed(worker, [WorkItem("row", 1)])))
    assert type(found) is expected
    assert str(error) in str(found)
    if isinstance(error, UsageError):
        assert vars(found) == vars(error)


# As in a terminal, where Ctrl-C goes to all processes, and a shell pipes the program in.
PROGRAM = """
import itertools, sys
from transferry.runtime.engine.engine import Engine

engine = Engine(sys.argv[1], replicas=2, processes=2)
print(*(each.process.pid for each in engine._processes._replicas), flush=True)
for result in engine.generate(itertools.repeat("seven", int(sys.argv[2])), max_length=2):
    pass
"""


@pytest.mark.parametrize("number", [None, signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_processes_end_with_their_program(
    bundle_folder: Path, number: signal.Signals | None
) -> None:
    arguments = [sys.executable, "-", str(bundle_folder), "1000000" if number else "40"]
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(arguments, text=True, start_new_session=True, **pipes) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        program.stdin.write(PROGRAM)
        program.stdin.close()
        program.stdin = None
        (other,) = map(int, program.stdout.readline().split())
        if number == signal.SIGINT:
            os.killpg(program.pid, number)
        elif number is not None:
            program.send_signal(number)
        _, stderr = program.communicate(timeout=PATIENCE)
    assert program.returncode == -(number or 0)
    assert stderr.count("Traceback") == (number == signal.SIGINT), stderr
    end = time.monotonic() + PATIENCE
    while Path(f"/proc/{other}").exists():
        assert time.monotonic() < end
        time.sleep(0.05)
