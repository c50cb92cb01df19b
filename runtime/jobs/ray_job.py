"""A job whose chunks are computed by workers of Ray, on one machine or several.

Each worker is an actor that opens the bundle once. Given the first row of a chunk, it reads that
chunk from the input itself, computes and writes it as any other job does, and returns its counts.
Rows never pass through Ray.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from transferry.runtime.engine.engine import Engine
from transferry.runtime.errors import InputError, UsageError, install_command
from transferry.runtime.hardware import usable_cores
from transferry.runtime.io.outputs import STANDARD_STREAM
from transferry.runtime.jobs.distribution import LOST, Call, ChunkRunner, Worker
from transferry.runtime.jobs.formats.sources import Inputs, open_sources
from transferry.runtime.jobs.job import Job
from transferry.runtime.jobs.job_options import JobOptions, RayOptions
from transferry.runtime.tables import counted

# Defaults: nothing leaves the machine, and stderr is for the job.
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",
}


def ray_job(
    load: Callable[[], Engine],
    inputs: Inputs,
    output: Path | str,
    options: JobOptions | None = None,
    ray_options: RayOptions | None = None,
) -> Job:
    """Returns a job for workers of Ray, which open the bundle once each.

    The output is a folder of chunks, each named by the number of its first row and itself a whole
    file of the format: in the order of their names they have the bytes of a plain job, whatever
    stops the job or kills a worker. All workers must see the folders of input and output. `load`
    opens the engine, here and on each worker.

    Raises:
        InputError: The bundle or the input cannot be used.
        UsageError: The options do not fit each other, the bundle or the files, or Ray is not
            installed.
    """
    sources, output, options = open_sources(inputs), Path(output), options or JobOptions()
    if STANDARD_STREAM in (*sources, output):
        raise UsageError(
            "workers of Ray share files, not standard input and output; name a file, and a "
            "folder with --out"
        )
    if options.canary is not None:
        raise UsageError("workers of Ray have no canary; leave it out")
    if options.target is not None:
        options = replace(options, target=options.target.absolute())
    runner = RayRunner(load, ray_options or RayOptions("ray"))
    shared = [each.absolute() if isinstance(each, Path) else each for each in sources]
    return Job(load(), shared, output.absolute(), options, runner)


class RayRunner(ChunkRunner):
    """Computes the chunks of a job with workers of Ray; see `ray_job`."""

    def __init__(self, load: Callable[[], Engine], options: RayOptions) -> None:
        """Imports Ray; connects to it when the job runs."""
        super().__init__(load)
        self.options, self._ray = options, import_ray()

    @contextlib.contextmanager
    def crew(self, job: Job, session: int) -> Iterator[RayCrew]:
        """Connects to Ray and asks for the workers."""
        with self._connected(job):
            yield RayCrew(self._ray, self._maker(job, session), self.workers)

    def _maker(self, job: Job, session: int) -> Callable[[], Any]:
        """Returns a function that asks Ray for a worker."""
        cores, gpus = _needs(job)
        actor = self._ray.remote(Worker).options(
            num_cpus=cores,
            num_gpus=gpus,
            max_concurrency=2,  # one chunk, and the question how far it is
            scheduling_strategy="SPREAD",
        )
        return partial(actor.remote, *self.told(job, session))

    @contextlib.contextmanager
    def _connected(self, job: Job) -> Iterator[None]:
        """Connects to Ray and sets the number of workers; keeps a connection that exists."""
        wanted, begun = self.options.workers, not self._ray.is_initialized()
        cores, gpus = _needs(job)
        if begun:
            address = self.options.ray_address or os.environ.get("RAY_ADDRESS") or "local"
            own: dict[str, Any] = {}
            if address == "local":
                workers = wanted or max(1, usable_cores() // cores)
                own = {"num_cpus": workers * cores, "include_dashboard": False}
            require_listening(address)
            terminated = signal.getsignal(signal.SIGTERM)
            try:
                with _hushed():
                    self._ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **own)
            except (ConnectionError, self._ray.exceptions.RayError) as error:
                if "authentication" in f"{error} {error.__cause__}":
                    raise InputError(
                        f"the Ray cluster at {address} asks for a token: set RAY_AUTH_MODE=token, "
                        "and RAY_AUTH_TOKEN or ~/.ray/auth_token to the cluster's"
                    ) from error
                raise InputError(f"there is no Ray cluster at {address}: {error}") from error
            except Exception as error:
                if type(error) is not Exception:  # Ray's, of a start of more than 30 s, is plain
                    raise
                reason = str(error).partition(". ")[0].rstrip(".")
                raise InputError(
                    f"Ray did not start: {reason}. The machine may be too busy: end other programs "
                    "and run the command again"
                ) from error
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, terminated)  # Ray has set its own
        try:
            room = room_for(self._ray.nodes(), cores, gpus)
            if room < (wanted or 1):
                needed = f"{counted(cores, 'CPU')}{' and a GPU' if gpus else ''}"
                raise UsageError(
                    f"the Ray cluster has room for {counted(room, 'worker')} of {needed}, not for "
                    f"{wanted or 1}; lower --workers, --replicas or --threads, or add machines"
                )
            self.workers = wanted or room
            self.about = {"engine": "ray", "workers": self.workers}
            with contextlib.redirect_stdout(sys.stderr):  # Ray prints which workers died
                yield
        finally:
            if begun:
                with _hushed():
                    self._ray.shutdown()


def require_listening(address: str) -> None:
    """Checks that something listens at `HOST:PORT`: Ray itself asks again for minutes.

    Raises:
        InputError: Nothing does.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():  # "auto" and "local" are Ray's to find
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, OverflowError) as error:
        raise InputError(
            f"there is no Ray cluster at {address}: {error}; `ray start --head` tells the address"
        ) from error


def room_for(nodes: Sequence[Mapping[str, Any]], cores: int, gpus: int) -> int:
    """Returns how many workers of so many CPU cores and GPUs the machines of a cluster hold."""
    found = [node["Resources"] for node in nodes if node["Alive"]]
    return sum(
        min([int(each.get("CPU", 0)) // cores, *([int(each.get("GPU", 0))] if gpus else [])])
        for each in found
    )


@contextlib.contextmanager
def _hushed() -> Iterator[None]:
    """Drops the output of C++ code on stderr, where Ray prints its log level."""
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


def _needs(job: Job) -> tuple[int, int]:
    """Returns the CPU cores and GPUs of a worker."""
    engine = job.engine.describe()
    cores = int(engine.get("replicas", 1)) * int(engine.get("threads", 1))
    return cores, int(engine.get("provider") == "cuda")


class RayCrew:
    """Workers of Ray and their open calls."""

    def __init__(self, ray: Any, make: Callable[[], Any], workers: int) -> None:
        """Asks Ray for workers."""
        self._ray, self._make, self._calls = ray, make, dict[Any, Call]()
        self._workers = [make() for _ in range(workers)]
        errors = ray.exceptions
        self._lost = (errors.RayActorError, errors.OutOfMemoryError, errors.NodeDiedError)

    def __len__(self) -> int:
        return len(self._workers)

    def call(self, worker: int, method: str, *arguments: int) -> None:
        """Calls a method of a worker."""
        ref = getattr(self._workers[worker], method).remote(*arguments)
        self._calls[ref] = Call(worker, method, *arguments)

    def resources(self) -> str:
        """Returns a sentence on the free CPUs and GPUs of the cluster, and on lost machines."""
        free, whole = self._ray.available_resources(), self._ray.cluster_resources()
        names = [name for name in ("CPU", "GPU") if name in whole]
        told = " and ".join(f"{free.get(name, 0):g} of {whole[name]:g} {name}s" for name in names)
        lost = [node["NodeManagerHostname"] for node in self._ray.nodes() if not node["Alive"]]
        gone = f"; lost: {', '.join(sorted(set(lost)))}" if lost else ""
        return f"Ray has {told or 'no CPUs'} free{gone}"

    def returned(self, seconds: float) -> Iterator[Call]:
        """Yields the calls that have returned, after so many seconds at most."""
        ready, _ = self._ray.wait([*self._calls], num_returns=1, timeout=seconds)
        if ready:
            ready, _ = self._ray.wait([*self._calls], num_returns=len(self._calls), timeout=0)
        for ref in ready:
            call = self._calls.pop(ref)
            try:
                call.result = self._ray.get(ref)
            except self._lost as error:
                if "No module named" in str(error):  # Ray shows an import that failed as a death
                    call.result = InputError(
                        "a machine of the Ray cluster cannot import transferry; install this "
                        f"version there, with the extra ray: {_last_line(error)}"
                    )
                    yield call
                    continue
                call.result = LOST
                if call.method != "progress":  # else another call is lost too
                    self._workers[call.worker] = self._make()
            yield call


def _last_line(error: Exception) -> str:
    """Returns the line of an error that names a module and, before it, the machine."""
    text = str(error)
    host = re.search(r"ip=([0-9a-f.:]+)", text)
    line = next(line for line in text.splitlines() if "No module named" in line)
    return f"{line.strip()}{f' on {host[1]}' if host else ''}"


def import_ray() -> Any:
    """Returns ray, raises UsageError where it is not installed."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ModuleNotFoundError as error:
        raise UsageError(
            f"--engine ray needs Ray, which is not installed; {install_command('ray')}"
        ) from error
    return ray
