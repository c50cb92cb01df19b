"""Signals: what is half done is undone, and nothing is raised where it could do harm."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import transferry
from tests.commands import PATIENCE, python
from transferry.runtime import stopping


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in stopping.SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def run(script: str) -> tuple[int, str, str]:
    begin = "import os, signal, sys\nfrom transferry.runtime.stopping import *\nhandle_signals()\n"
    done = subprocess.run(
        [sys.executable, "-c", begin + script],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize(
    "where",
    [
        "try:\n    {}\nexcept BaseException:\n    print('swallowed')",
        "class Broken:\n    def __del__(self):\n        {}\nBroken()\nprint('ignored')",
        "import threading\nlock = threading.Lock()\nwith lock:\n    {}\n    print('held')",
        "try:\n    {}\nfinally:\n    print('unwound')",
    ],
    ids=["swallowed", "destructor", "lock", "finally"],
)
def test_nothing_keeps_a_command_from_stopping(where: str, number: str) -> None:
    raised = where.format(f"signal.raise_signal(signal.{number})")
    assert run(raised) == (130, "", "interrupted\n")


def test_what_is_half_done_is_undone_the_innermost_first() -> None:
    script = """
def full():
    raise OSError("the disk is full")
with at_stop(lambda: "the outer"), at_stop(full), at_stop(lambda: None), at_stop(lambda: "inner"):
    with at_stop(lambda: "no more"):
        pass
    signal.raise_signal(signal.SIGINT)
"""
    assert run(script) == (130, "", "interrupted: inner; the outer\n")


def test_a_second_signal_does_not_wait() -> None:
    script = """
import time
def slow():
    signal.raise_signal(signal.SIGTERM)
    time.sleep(1000)
with at_stop(slow):
    signal.raise_signal(signal.SIGINT)
"""
    assert run(script) == (130, "", "")


def test_an_ignored_signal_stays_ignored() -> None:
    script = """
signal.signal(signal.SIGINT, signal.SIG_IGN)
handle_signals()
signal.raise_signal(signal.SIGINT)
print("goes on")
"""
    assert run(script) == (0, "goes on\n", "")


def test_a_finished_command_keeps_its_exit_code() -> None:
    assert run("ignore_signals()\nsignal.raise_signal(signal.SIGTERM)\nsys.exit(6)")[0] == 6


def test_other_processes_can_be_ended_first() -> None:
    script = """
try:
    with raising():
        signal.raise_signal(signal.SIGTERM)
except KeyboardInterrupt:
    print("ended", flush=True)
signal.raise_signal(signal.SIGTERM)
"""
    assert run(script) == (130, "ended\n", "interrupted\n")


def test_a_signal_is_held_back_until_the_end() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), stopping.held():
        signal.raise_signal(signal.SIGINT)
        done.append(True)
    assert done
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_second_signal_is_not_held_back() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), stopping.held():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        done.append(True)
    assert not done


def test_other_threads_hold_nothing_back() -> None:
    done = []

    def work() -> None:
        with stopping.held():
            done.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(PATIENCE)
    assert done == [signal.default_int_handler]


def test_nothing_is_imported_before_signals_are_handled(tmp_path: Path) -> None:
    """Python's own start cannot be helped; the rest should take no longer than that."""
    # -S keeps away what other packages import at the start, and with it the editable install.
    (tmp_path / "transferry").symlink_to(Path(transferry.__file__).parent)
    script = """
import sys
before = set(sys.modules)
import transferry.runtime.stopping
print(*(set(sys.modules) - before))
"""
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    loaded = python("-S", "-c", script, env=environment).stdout.split()
    assert not set(loaded) & {"click", "typing", "pathlib", "re", "threading", "dataclasses"}
