"""Kills a job at every step that changes a file, goes on with it, and says what came of it.

A program of its own: it forks for each kill, which a process with threads had better not.
Usage: killed_job.py FOLDER NAME EVERY; FOLDER holds the input, NAME is that of the output, and one
step in so many is tried. The last line that it prints is JSON.
"""

import functools
import io
import json
import os
import random
import runpy
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transferry.runtime.jobs.job import Job
from transferry.runtime.jobs.options import JobOptions

Echo: Any = runpy.run_path(str(Path(__file__).with_name("echo.py")))["Echo"]
SHARD_ROWS = 3
# What changes names and sizes; writing is counted apart, in its middle.
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
            if mode in ("wb", "ab"):
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
    engine = Echo(computed=folder / "computed", seconds=seconds)
    options = JobOptions(shard_rows=SHARD_ROWS)
    Job(engine, folder / "input.txt", folder / name, options).run(settings={"a": 1})
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


def computed(folder: Path) -> list[int]:
    path = folder / "computed"
    numbers = [int(line) for line in path.read_text().split()] if path.exists() else []
    path.unlink(missing_ok=True)
    return numbers


def finished(out: Path) -> int:
    """Rows that the journal names, or all of them where the output is there."""
    if out.exists():
        return 1 << 30
    try:
        lines = (out.parent / f"{out.name}.job" / "journal.jsonl").read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return 0
    return sum(json.loads(line)["rows"] for line in lines)


def whole(folder: Path, name: str) -> bool:
    """Goes on after a kill; whether all is as it should be, and nothing was done twice."""
    saved = finished(folder / name)
    computed(folder)
    assert forked(lambda: run(folder, name)) == 0
    first = [*range(ROWS)][saved:]
    assert computed(folder) == first, f"{saved} rows were saved"
    found = {path.name for path in folder.iterdir()}
    expected = {"input.txt", name, f"{name}.summary.json", f"{name}.settings.toml"}
    assert found == expected, found
    return (folder / name).read_bytes() == EXPECTED


def clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != "input.txt":
            path.unlink()


if __name__ == "__main__":
    folder, name, every = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    ROWS = len((folder / "input.txt").read_bytes().splitlines())
    counted = folder.parent / "steps"
    assert forked(lambda: counted.write_text(str(run(folder, name)))) == 0
    steps = int(counted.read_text())
    EXPECTED = (folder / name).read_bytes()
    tried = range(0, steps, every)
    same = killed = 0
    for fatal in tried:
        clear(folder)
        killed += forked(functools.partial(run, folder, name, fatal)) == signal.SIGKILL
        same += whole(folder, name)
    # Killed again and again, at whatever step the attempt before has left to do.
    draw = random.Random(0)
    chains = 0
    for _ in range(20):
        clear(folder)
        for _ in range(draw.randint(2, 5)):
            forked(functools.partial(run, folder, name, draw.randrange(steps)))
        chains += whole(folder, name)
    # At any time at all.
    times = 0
    for _ in range(10):
        clear(folder)
        slow = functools.partial(run, folder, name, None, 0.005)
        times += forked(slow, draw.uniform(0, 0.006 * ROWS)) in (0, signal.SIGKILL)
        times -= not whole(folder, name)
    report = {"killed": killed, "same": same, "chains": chains, "times": times}
    report |= {"steps": steps, "tried": len(tried)}
    print(json.dumps(report))
