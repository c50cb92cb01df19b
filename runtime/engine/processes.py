"""Replicas in processes of their own: those of one process wait for each other's Python.

A process opens the bundle again and computes the batches that threads of this one send it. A
worker is sent without engine, bundle and model; there it gets those that were opened there.
"""

import contextlib
import io
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any, TypeAlias

from transferry.runtime.engine.preprocess import Row, WorkItem
from transferry.runtime.engine.worker_pool import Answer, Take, Worker
from transferry.runtime.errors import InputError, TransferryError, UsageError

# Objects that workers refer to, and that each process has for itself, by name.
Parts: TypeAlias = Mapping[str, Any]

# Seconds in which a process whose connection broke is expected to end.
_ENDING_SECONDS = 5.0
# Held while a process starts.
_STARTING = threading.Lock()


class Processes:
    """Processes that compute batches of a bundle; they end when nothing refers to them any more."""

    def __init__(self, opening: Callable[[], Parts], replicas: Sequence[int]) -> None:
        """Starts processes of so many replicas each; `wait` waits until they are ready.

        Args:
            opening: Opens the bundle there; can be pickled.
            replicas: Number of each process.

        Raises:
            UsageError: This process may not start others.
        """
        if multiprocessing.current_process().daemon:
            raise UsageError(
                "a process of a multiprocessing.Pool cannot start processes; open the bundle there "
                "with processes=1"
            )
        self.count = len(replicas)
        self._replicas = [each for threads in replicas for each in _start(opening, threads)]

    def wait(self) -> None:
        """Waits until all processes have opened the bundle; raises what one of them raised."""
        for each in self._replicas:
            each.receive()

    def workers(self, worker: Worker[Row, Answer], parts: Parts) -> list[Worker[Row, Answer]]:
        """Returns workers that compute in the replicas of the processes, with their own parts."""
        file = io.BytesIO()
        _Pickler(file, parts).dump(worker)
        return [partial(_in_other, each, file.getvalue()) for each in self._replicas]


class _Pickler(pickle.Pickler):
    """Writes the names of parts in their places."""

    def __init__(self, file: io.BytesIO, parts: Parts) -> None:
        super().__init__(file)
        self._names = {id(part): name for name, part in parts.items()}

    def persistent_id(self, obj: Any) -> str | None:
        return self._names.get(id(obj))


class _Unpickler(pickle.Unpickler):
    """Reads the output of `_Pickler`, with this process's own parts."""

    def __init__(self, file: io.BytesIO, parts: Parts) -> None:
        super().__init__(file)
        self._parts = parts

    def persistent_load(self, pid: Any) -> Any:
        return self._parts[pid]


@dataclass
class _Replica:
    """A replica of another process.

    Attributes:
        process: The process.
        connection: To the replica's thread there.
        owner: Id of this process.
        lock: Held from a batch to its answers.
        worker: The worker that computed last, pickled.
    """

    process: BaseProcess
    connection: Connection
    owner: int = field(default_factory=os.getpid)
    lock: threading.Lock = field(default_factory=threading.Lock)
    worker: bytes | None = None

    def compute(self, worker: bytes, items: list[WorkItem[Any]]) -> list[tuple[int, Any]]:
        """Returns the places and answers of items, in the order in which they were computed.

        Raises:
            InputError: The process has ended.
            UsageError: This process is a fork of the one that started it.
        """
        if os.getpid() != self.owner:
            raise UsageError("the bundle was opened before this process was forked; open it here")
        with self.lock:
            new = None if worker == self.worker else worker
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `receive` tells why
                self.connection.send((new, items))
            self.worker = worker
            found: list[tuple[int, Any]] = self.receive()
        return found

    def receive(self) -> Any:
        """Returns the next object from the process; raises it, if it is an error."""
        try:
            found = self.connection.recv()
        except (EOFError, OSError) as error:
            self.process.join(_ENDING_SECONDS)
            raise InputError(
                f"a process of replicas ended (exit code {self.process.exitcode}; -9 is "
                "the system's answer to too little memory); run fewer processes, or make batches "
                "smaller"
            ) from error
        if isinstance(found, BaseException):
            raise found
        return found


def _in_other(
    replica: _Replica, worker: bytes, take: Take[Row], rows: int
) -> Iterator[tuple[WorkItem[Row], Any]]:
    """Computes as a pickled worker does, in a replica of another process."""
    while items := take(rows):
        for place, answer in replica.compute(worker, items):
            yield items[place], answer


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Starts processes without the program's own module, and without the user's Ctrl-C.

    multiprocessing would run the program's module again in each of them, which needs nothing of
    it. Ctrl-C goes to all processes of a terminal; theirs end with their connections.
    """
    with _STARTING:
        main, masked = sys.modules["__main__"], None
        sys.modules["__main__"] = ModuleType("__main__")
        if hasattr(signal, "pthread_sigmask"):
            masked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            sys.modules["__main__"] = main
            if masked is not None:
                signal.pthread_sigmask(signal.SIG_SETMASK, masked)


def _start(opening: Callable[[], Parts], replicas: int) -> list[_Replica]:
    """Starts a process of so many replicas; raises InputError if the system has no room for it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = zip(*(context.Pipe() for _ in range(replicas)), strict=True)
    process = context.Process(target=_serve, args=(opening, theirs), daemon=True)
    try:
        with _alone():
            process.start()
    except OSError as error:
        told = f"a process of replicas could not be started ({error}); run fewer processes"
        raise InputError(told) from error
    for connection in theirs:  # else the end of the process would not be noticed
        connection.close()
    return [_Replica(process, connection) for connection in ours]


def _serve(opening: Callable[[], Parts], connections: Sequence[Connection]) -> None:
    """Opens the bundle and computes what comes, until the other side closes the connections."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parts = found = None
    try:
        parts = opening()
    except Exception as error:  # noqa: BLE001 - raised where the processes are waited for
        found = _portable(error)
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.send(found)
        if parts is not None:
            threading.Thread(target=_answer, args=(connection, parts)).start()


def _portable(error: Exception) -> Exception:
    """Returns an error that another process can read."""
    if isinstance(error, MemoryError):
        return MemoryError(str(error))
    if isinstance(error, TransferryError):
        return error
    return RuntimeError("".join(traceback.format_exception(error)))


def _answer(connection: Connection, parts: Parts) -> None:
    """Computes what one connection brings; its end raises EOFError or OSError."""
    worker: Any = None
    with contextlib.suppress(EOFError, OSError):
        while True:
            pickled, items = connection.recv()
            if pickled is not None:
                worker = _Unpickler(io.BytesIO(pickled), parts).load()
            connection.send(_computed(worker, items))


def _computed(worker: Any, items: list[WorkItem[Any]]) -> list[tuple[int, Any]] | Exception:
    """Returns the place of each item with its answer, or the error."""
    places, batches = {item: place for place, item in enumerate(items)}, iter([items])
    width = sum(item.width for item in items)
    try:
        found = worker(lambda rows: next(batches, []), width)
        return [(places[item], answer) for item, answer in found]
    except Exception as error:  # noqa: BLE001 - raised on the other side
        return _portable(error)
