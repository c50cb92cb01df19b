"""A job whose chunks are computed by workers of Ray, on one machine or several.

Each worker is an actor that opens the bundle once. Given the first row of a chunk, it reads that
chunk from the input itself, computes and writes it as any other job does, and returns its counts.
Rows never pass through Ray.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from transferry.runtime.engine.engine import Engine
from transferry.runtime.errors import LOG, InputError, Option, UsageError, from_extra
from transferry.runtime.hardware import usable_cores
from transferry.runtime.jobs.distribution import LOST, Call, ChunkRunner, Worker
from transferry.runtime.jobs.formats.remote_file import RemoteFile
from transferry.runtime.jobs.formats.sources import Inputs, open_sources, reads_once
from transferry.runtime.jobs.job import Job
from transferry.runtime.jobs.job_options import JobOptions, RayOptions
from transferry.runtime.jobs.output_files import remote_output
from transferry.runtime.settings import path_of, require_type
from transferry.runtime.stopping import undone
from transferry.runtime.tables import counted

# Defaults: nothing leaves the machine; and Ray does not take this process for a worker, which it
# ends without a word, once its parent and the machine's raylet are gone (raylet_ipc_client.cc).
ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_RAYLET_PID": str(os.getpid())}
# Ray's own lines, in the folder of the job.
RAY_LOG = "ray.log"
# HTTP/2 with empty settings. gRPC, which Ray speaks, answers with a frame of type 4: its settings.
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
# Seconds between two looks at the cluster, and without its head until the job stops: after 60, Ray
# ends this process without a word.
_LOOK_EVERY, _PATIENCE = 5.0, 30.0
# Seconds of a start until the warning, and until the command ends.
_SLOW, _HUNG = 30.0, 180.0


def ray_job(
    load: Callable[[], Engine],
    inputs: Inputs,
    output: Path | str | RemoteFile,
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
    require_type("options", options, JobOptions | None)
    require_type("ray_options", ray_options, RayOptions | None)
    sources, options = open_sources(inputs), options or JobOptions()
    if str(output) == "-" or any(map(reads_once, (*sources, options.target))):
        raise UsageError(
            "workers of Ray share files, not standard input, output or pipes; name a file, and a "
            "folder with ",
            Option("output"),
        )
    if remote_output(output) is None:
        output = path_of("output", output).absolute()
    if options.canary is not None:
        raise UsageError("workers of Ray have no canary; leave it out")
    if options.target is not None:
        options = replace(options, target=options.target.absolute())
    runner = RayRunner(load, ray_options or RayOptions("ray"))
    shared = [each.absolute() if isinstance(each, Path) else each for each in sources]
    return Job(load(), shared, output, options, runner)


class RayRunner(ChunkRunner):
    """Computes the chunks of a job with workers of Ray; see `ray_job`."""

    def __init__(self, load: Callable[[], Engine], options: RayOptions) -> None:
        super().__init__(load)
        self.options, self._ray = options, import_ray()
        self.address = options.ray_address or os.environ.get("RAY_ADDRESS") or "local"

    @contextlib.contextmanager
    def crew(self, job: Job, session: int) -> Iterator[RayCrew]:
        """Connects to Ray and asks for the workers."""
        with self._connected(job):
            yield RayCrew(self._ray, self._maker(job, session), self.workers)

    def outlook(self, job: Job) -> tuple[int, str]:
        """Returns the number of workers and words on the cluster; starts no Ray of its own."""
        cores, gpus = _needs(job)
        each = f"of {counted(cores, 'CPU')}{' and a GPU' if gpus else ''}"
        if self.address == "local" and not self._ray.is_initialized():
            workers, cpus = self._local(cores), counted(usable_cores(), "CPU")
            return workers, f"Ray on this machine with {cpus}: {counted(workers, 'worker')} {each}"
        with self._connected(job):
            machines = counted(sum(node["Alive"] for node in self._ray.nodes()), "machine")
            return self.workers, (
                f"Ray at {self.address} on {machines}: {counted(self.workers, 'worker')} {each}; "
                f"{resources(self._ray)}"
            )

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
        begun = not self._ray.is_initialized()
        cores, gpus = _needs(job)
        path = job.folder / RAY_LOG if job.folder.exists() else Path(os.devnull)
        with (
            path.open("a") as log,
            contextlib.redirect_stdout(_Apart(log)),
            _logged(log),
        ):
            try:
                if begun:
                    self._connect(cores)
                self.workers = self._room(cores, gpus)
                self.about = {"engine": "ray", "workers": self.workers}
                yield
            finally:
                if begun:
                    with _apart(log):
                        self._ray.shutdown()

    def _connect(self, cores: int) -> None:
        address, own = self.address, dict[str, Any]()
        if address == "local":
            own = {"num_cpus": self._local(cores) * cores, "include_dashboard": False}
        require_cluster(address)
        terminated = signal.getsignal(signal.SIGTERM)
        try:
            # Where Ray hangs on this machine, its C++ code writes to stderr and ends the process.
            with watched_start(address):
                self._ray.init(address, log_to_driver=False, **own)
        except (ConnectionError, ImportError, ValueError, self._ray.exceptions.RayError) as error:
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

    def _local(self, cores: int) -> int:
        """Returns the number of workers where Ray is started on this machine."""
        return self.options.workers or max(1, usable_cores() // cores)

    def _room(self, cores: int, gpus: int) -> int:
        """Returns the number of workers; raises UsageError where there is no room for them."""
        room, wanted = room_for(self._ray.nodes(), cores, gpus), self.options.workers
        if room < (wanted or 1):
            needed = f"{counted(cores, 'CPU')}{' and a GPU' if gpus else ''}"
            raise UsageError(
                f"the Ray cluster has room for {counted(room, 'worker')} of {needed}, not for "
                f"{wanted or 1}; lower ",
                *(Option("workers"), ", ", Option("replicas"), " or ", Option("threads")),
                ", or add machines",
            )
        return wanted or room


@contextlib.contextmanager
def watched_start(
    address: str, slow: float = _SLOW, hung: float = _HUNG, end: Callable[[int], Any] = os._exit
) -> Iterator[None]:
    """Tells of a start of Ray that lasts, and ends this process where it never returns.

    It can hang in C++ code, which neither signals nor exceptions of Python stop.
    """

    def give_up() -> None:
        try:
            LOG.error(
                "Ray (%s) did not start within %.0f s: see /tmp/ray/session_latest/logs, end other "
                "programs or name a cluster with --ray-address, then run the command again%s",
                *(address, hung, "".join(f"; {note}" for note in undone())),
            )
        finally:
            end(3)

    told = f"Ray ({address}) has not started for {slow:.0f} s; waiting {hung - slow:.0f} s more"
    timers = threading.Timer(slow, LOG.warning, [told]), threading.Timer(hung, give_up)
    for timer in timers:
        timer.daemon = True
        timer.start()
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()


def require_cluster(address: str, seconds: float = 10.0) -> None:
    """Checks that a Ray cluster answers at `HOST:PORT`: Ray itself asks again for minutes.

    Raises:
        InputError: None does.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():  # "auto" and "local" are Ray's to find
        return
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=seconds) as server:
            if os.environ.get("RAY_USE_TLS", "0") == "0":
                server.sendall(_HELLO)
                if server.recv(9, socket.MSG_WAITALL)[3:4] != b"\x04":
                    raise ConnectionError("the server there is not Ray's")
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


def resources(ray: Any) -> str:
    """Returns a sentence on the free CPUs and GPUs of a cluster, and on lost machines."""
    free, whole = ray.available_resources(), ray.cluster_resources()
    names = [name for name in ("CPU", "GPU") if name in whole]
    told = " and ".join(f"{free.get(name, 0):g} of {whole[name]:g} {name}s" for name in names)
    lost = [node["NodeManagerHostname"] for node in ray.nodes() if not node["Alive"]]
    gone = f"; lost: {', '.join(sorted(set(lost)))}" if lost else ""
    return f"Ray has {told or 'no CPUs'} free{gone}"


class _Apart(io.TextIOBase):
    """Standard output, but what Ray's threads print goes to a log."""

    def __init__(self, log: IO[str]) -> None:
        self._log, self._out = log, sys.stdout

    def write(self, text: str) -> int:
        of_ray = threading.current_thread().name.startswith("ray_")
        return (self._log if of_ray else self._out).write(text)

    def flush(self) -> None:
        self._out.flush()


@contextlib.contextmanager
def _logged(log: IO[str]) -> Iterator[None]:
    """Has Ray's loggers write to a log."""
    logger, handler = logging.getLogger("ray"), logging.StreamHandler(log)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    kept, logger.handlers = logger.handlers, [handler]
    try:
        yield
    finally:
        logger.handlers = kept


@contextlib.contextmanager
def _apart(log: IO[str]) -> Iterator[None]:
    """Has all output go to a log, on stderr that of C++ code too."""
    kept = os.dup(2)
    try:
        os.dup2(log.fileno(), 2)
        with contextlib.redirect_stdout(log):
            yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _needs(job: Job) -> tuple[int, int]:
    """Returns the CPU cores and GPUs of a worker."""
    engine = job.engine.describe()
    cores = int(engine.get("replicas", 1)) * int(engine.get("threads", 1))
    return cores, int(engine.get("provider", "cpu") != "cpu")


class RayCrew:
    """Workers of Ray and their open calls."""

    def __init__(self, ray: Any, make: Callable[[], Any], workers: int) -> None:
        self._ray, self._make, self._calls = ray, make, dict[Any, Call]()
        self._workers = [make() for _ in range(workers)]
        errors, own = ray.exceptions, ray.get_runtime_context()
        self._head, self._node, self._looked = own.gcs_address, own.get_node_id(), time.monotonic()
        self._seen = math.inf  # a client of Ray may never reach the head
        self._lost = (errors.RayActorError, errors.OutOfMemoryError, errors.NodeDiedError)

    def __len__(self) -> int:
        return len(self._workers)

    def call(self, worker: int, method: str, *arguments: Any) -> None:
        ref = getattr(self._workers[worker], method).remote(*arguments)
        self._calls[ref] = Call(worker, method, *arguments)

    def resources(self) -> str:
        return resources(self._ray)

    def require_alive(self, now: float) -> None:
        """Raises InputError where Ray has gone away, and would tell nothing or wait for ever."""
        try:
            require_cluster(self._head, _LOOK_EVERY)
        except InputError as error:
            if now - self._seen >= _PATIENCE:
                raise InputError(
                    f"the head of the Ray cluster at {self._head} has gone away: "
                    f"{error.__cause__}; run the command again once it is back"
                ) from error
            return
        self._seen = now
        if not any(node["NodeID"] == self._node and node["Alive"] for node in self._ray.nodes()):
            raise InputError(
                "Ray has ended on the machine of this command, and its workers with it; start Ray "
                "again with `ray start`, then run the command again"
            )

    def returned(self, seconds: float) -> Iterator[Call]:
        if (now := time.monotonic()) - self._looked >= _LOOK_EVERY:
            self._looked = now
            self.require_alive(now)
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
    with from_extra("ray", Option("engine"), " ray needs Ray"):
        import ray
    return ray
