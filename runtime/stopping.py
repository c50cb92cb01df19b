"""Ctrl-C and SIGTERM.

Python runs a signal handler between any two bytecodes of the main thread. A KeyboardInterrupt
raised there can leave a lock held for ever, is ignored in a destructor, and becomes an ImportError
in an import. So the handler of the commands raises nothing: it undoes unfinished work and ends the
process. Libraries cannot defeat it, and no `finally` runs.

A program that calls transferry keeps its own handlers, and a KeyboardInterrupt unwinds as usual.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from types import FrameType

EXIT_CODE = 130
SIGNALS = (signal.SIGINT, signal.SIGTERM)

# Undoes unfinished work and returns a note for the user, if any; may run twice.
Undo = Callable[[], str | None]
_undo: list[Undo] = []
_stopping = False
_format: Callable[[str], str] = str


def format_with(format: Callable[[str], str]) -> None:
    """Sets the format of the last message, such as a line of JSON."""
    global _format
    _format = format


def handle_signals() -> None:
    """Makes SIGINT and SIGTERM stop the process; called before a command imports anything."""
    for number in SIGNALS:
        # nohup, and a shell for its background jobs, start programs with a signal ignored.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, stop)


def ignore_signals() -> None:
    """Ends a finished command with its own exit code, even if a signal arrives at shutdown."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def stop(number: int, frame: FrameType | None) -> None:
    """Undoes unfinished work, reports it on stderr and ends the process with exit code 130."""
    global _stopping
    if _stopping:  # a second signal ends the process at once
        os._exit(EXIT_CODE)
    _stopping = True
    try:
        notes = undone()
        said = _format(f"interrupted{': ' if notes else ''}{'; '.join(notes)}")
        os.write(2, f"{said}\n".encode(errors="replace"))
    finally:
        os._exit(EXIT_CODE)


def undone() -> list[str]:
    """Undoes unfinished work before the process ends; returns the notes for the user."""
    notes = []
    for undo in reversed(_undo):
        with contextlib.suppress(OSError):
            notes.append(undo())
    return [note for note in notes if note]


@contextlib.contextmanager
def at_stop(undo: Undo) -> Iterator[None]:
    """Calls `undo` if the process is stopped within the `with`, the innermost first.

    It runs in the signal handler, so it must neither wait for a lock nor use a Python stream.
    """
    _undo.append(undo)
    try:
        yield
    finally:
        _undo.remove(undo)


@contextlib.contextmanager
def raising() -> Iterator[None]:
    """Lets a command's first signal raise KeyboardInterrupt within the `with`.

    For work that no handler can undo, such as other processes that must be asked to end.
    """
    former = [number for number in SIGNALS if signal.getsignal(number) is stop]

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in former:
            signal.signal(each, stop)
        raise KeyboardInterrupt

    try:
        for number in former:
            signal.signal(number, interrupt)
        yield
    finally:
        for number in former:
            signal.signal(number, stop)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Holds signals back until the `with` ends: for short steps that must not be interrupted.

    A second signal is not held back. Outside the main thread this does nothing.
    """
    came: list[tuple[int, FrameType | None]] = []
    former = {int(number): signal.getsignal(number) for number in SIGNALS}

    def note(number: int, frame: FrameType | None) -> None:
        came.append((number, frame))
        if len(came) > 1:
            deliver(number, frame)

    def deliver(number: int, frame: FrameType | None) -> None:
        handler = former[number]
        if callable(handler):
            handler(number, frame)

    try:
        for number, handler in former.items():
            if callable(handler):  # else it is ignored, or ends the process anyway
                signal.signal(number, note)
    except ValueError:  # not the main thread, the only one that gets signals
        former = {}
    try:
        yield
    finally:
        for number, handler in former.items():
            if callable(handler):
                signal.signal(number, handler)
        if len(came) == 1:
            deliver(*came[0])
