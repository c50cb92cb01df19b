"""Kills a job at every step that changes a file, resumes it, and reports what came of it.

A program of its own, since it forks for each kill, which a process with threads must not.
Usage: python -m tests.runtime.jobs.killed_job FOLDER NAME EVERY; FOLDER holds the input, NAME is
the output's, and one step in EVERY is tried. The last line that it prints is the number of steps.
"""

import contextlib
import functools
import io
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.runtime.jobs.helpers import Echo, computed_rows, make_job, names

# Calls that change names and sizes; a write is killed in its middle.
CALLS = ("mkdir", "rmdir", "unlink", "replace", "fsync", "truncate", "ftruncate")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Steps:
    """Counts the steps of this process, and kills it at one of them."""

    def __init__(self, fatal: int | None) -> None:
        self.done, self.fatal = 0, fatal
        for name in CALLS:
            setattr(os, name, functools.partial(self.call, getattr(os, name)))
        steps, path_open = self, Path.open

        class File(io.FileIO):
            def write(self, data: Any) -> int:
                # Half of it is on the disk: a torn line, or a part cut short.
                if steps.step():
                    super().write(bytes(data)[: len(bytes(data)) // 2])
                    die()
                return super().write(data)

            def truncate(self, size: int | None = None) -> int:
                if steps.step():
                    die()
                return super().truncate(size)

        def opened(path: Path, mode: str = "r", *more: Any, **named: Any) -> Any:
            if mode in ("xb", "ab"):
                if steps.step():
                    die()
                return io.BufferedWriter(File(path, mode))
            return path_open(path, mode, *more, **named)

        Path.open = opened  # type: ignore[assignment]

    def step(self) -> bool:
        self.done += 1
        return self.done - 1 == self.fatal

    def call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if self.step():
            die()
        return function(*arguments, **named)


def run(folder: Path, name: str, fatal: int | None = None, seconds: float = 0.0) -> int:
    """Runs the job in this process, and returns how many steps it took."""
    steps = Steps(fatal)
    engine = Echo(computed=folder.parent / "computed", seconds=seconds)
    make_job(folder / "input.txt", name, engine).run(settings={"a": 1})
    return steps.done


def forked(work: Callable[[], Any], after: float | None = None) -> int:
    """Does it in a process of its own, perhaps killed after some seconds; returns the status."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:  # noqa: BLE001 - the parent looks at the status
            print(repr(error), flush=True)
            os._exit(1)
    if after is not None:
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def finished(out: Path) -> int:
    """Rows that the journal names, or all of them where the output is there."""
    if out.exists():
        return 1 << 30
    try:
        lines = (out.parent / f"{out.name}.job" / "journal.jsonl").read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return 0
    return sum(json.loads(line)["rows"] for line in lines)


def resume(folder: Path, name: str) -> None:
    """Resumes after a kill; the output must be right, and no row be computed twice."""
    saved, computed = finished(folder / name), folder.parent / "computed"
    computed_rows(computed)
    assert forked(lambda: run(folder, name)) == 0
    assert computed_rows(computed) == [*range(ROWS)][saved:], f"{saved} rows were saved"
    expected = {"input.txt", name, f"{name}.summary.json", f"{name}.settings.toml"}
    assert names(folder) == expected, names(folder)
    assert (folder / name).read_bytes() == EXPECTED


def clear(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "input.txt").write_bytes(INPUT)


if __name__ == "__main__":
    folder, name, every = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    if name.endswith(".parquet"):  # once, and not in each child
        import pyarrow.parquet  # noqa: F401

        with contextlib.suppress(ImportError):
            import pandas  # noqa: F401 - which pyarrow loads where it is installed
    INPUT = (folder / "input.txt").read_bytes()
    ROWS = len(INPUT.splitlines())
    counted = folder.parent / "steps"
    assert forked(lambda: counted.write_text(str(run(folder, name)))) == 0
    steps = int(counted.read_text())
    EXPECTED = (folder / name).read_bytes()
    for fatal in range(0, steps, every):
        clear(folder)
        assert forked(functools.partial(run, folder, name, fatal)) == signal.SIGKILL
        resume(folder, name)
    # Killed again and again, at whatever step the attempt before has left to do.
    draw = random.Random(0)
    for _ in range(20):
        clear(folder)
        for _ in range(draw.randint(2, 5)):
            forked(functools.partial(run, folder, name, draw.randrange(steps)))
        resume(folder, name)
    # At any time at all.
    for _ in range(10):
        clear(folder)
        slow = functools.partial(run, folder, name, None, 0.005)
        assert forked(slow, draw.uniform(0, 0.006 * ROWS)) in (0, signal.SIGKILL)
        resume(folder, name)
    print(steps)
