"""Opens an onnxruntime session that really runs on the provider asked for, or fails.

onnxruntime by itself answers a request for CUDA with a CPU session wherever a library, the driver
or the GPU is missing (microsoft/onnxruntime#17801, #23372). Here that is a `ProviderError` that
names what is missing and what mends it.
"""

import contextlib
import ctypes
import functools
import io
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as native

from transferry.runtime.errors import InputError, ProviderError, UsageError

Provider = Literal["cpu", "cuda"]
Optimisation = Literal["disable", "basic", "extended", "all"]

_PROVIDER_NAMES: dict[Provider, str] = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
}
_OPTIMISATION_LEVELS: dict[Optimisation, onnxruntime.GraphOptimizationLevel] = {
    "disable": onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
}
# onnxruntime's own errors share no base class below Exception.
_OPENING_ERRORS = (
    native.EPFail,
    native.Fail,
    native.InvalidArgument,
    native.InvalidGraph,
    native.InvalidProtobuf,
    native.NoSuchFile,
    native.NotImplemented,
    native.RuntimeException,
    RuntimeError,
    ValueError,
)
_LOG_FATAL_ONLY = 4  # errors are raised, with the same words
_DRIVER_LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


@dataclass(frozen=True)
class SessionOptions:
    """How a graph is to be run.

    Attributes:
        provider: Where it runs: `cpu` or `cuda`. There is no fallback from one to the other.
        threads: Threads that share one operator. Replicas of one thread beat one session of many.
        device_id: Which GPU, counted as CUDA counts them; read by `cuda` only.
        optimisation: How far onnxruntime may rewrite the graph. Part of what is verified.
        provider_options: Passed to the provider as they are, over the defaults set here.
        cuda_graphs: Record what a step does on the GPU, and play it back while shapes and places
            stay the same. On a provider that cannot, steps are prepared alike and merely run.
        profile: A folder for onnxruntime's traces of where its time goes, one file a graph, whole
            once the session is gone; None traces nothing.
    """

    provider: Provider = "cpu"
    threads: int = 1
    device_id: int = 0
    optimisation: Optimisation = "all"
    provider_options: Mapping[str, str] = field(default_factory=dict)
    cuda_graphs: bool = False
    profile: Path | None = None

    def __post_init__(self) -> None:
        """Refuses values that onnxruntime would ignore or reinterpret.

        Raises:
            UsageError: A value lies outside its range.
        """
        if self.provider not in _PROVIDER_NAMES:
            raise UsageError(f"the provider must be cpu or cuda, but is {self.provider!r}")
        if self.optimisation not in _OPTIMISATION_LEVELS:
            raise UsageError(
                f"the optimisation must be one of {', '.join(_OPTIMISATION_LEVELS)}, "
                f"but is {self.optimisation!r}"
            )
        if self.threads < 1:
            raise UsageError(f"threads must be 1 or more, but is {self.threads}")
        if self.device_id < 0:
            raise UsageError(f"the device id must be 0 or more, but is {self.device_id}")


def open_session(
    model: Path, options: SessionOptions, graph: bytes | None = None
) -> onnxruntime.InferenceSession:
    """Opens a graph on the provider asked for, and on no other.

    Args:
        model: The graph's file; external weights lie beside it.
        options: How to run it.
        graph: What to open instead of the file's content, with the same external weights.

    Returns:
        A session of which `get_providers()[0]` is the provider asked for.

    Raises:
        InputError: The file is missing, damaged, or no graph that onnxruntime can read.
        ProviderError: The provider cannot run here, or cannot run this graph.
    """
    if not model.is_file():
        raise InputError(
            f"expected an ONNX graph at {model}, found no file. Export the bundle again."
        )
    if options.provider == "cuda" and (obstacle := cuda_obstacle(options.device_id)):
        raise ProviderError(
            f"provider cuda was asked for, but {obstacle.missing}. To mend it: {obstacle.remedy}"
        )
    try:
        session = _create(model, options, graph)
    except native.NotImplemented as error:
        raise ProviderError(
            f"provider {options.provider} cannot run {model}: {_reason(error)}. "
            "Choose another provider or another variant of the bundle."
        ) from error
    except _OPENING_ERRORS as error:
        if options.provider == "cpu":
            raise _unreadable(model, error) from error
        if (fault := _fault_of_file(model, graph)) is not None:
            raise _unreadable(model, fault) from fault
        raise ProviderError(
            f"provider {options.provider} was asked for, but onnxruntime cannot start it: "
            f"{_reason(error)}. `transferry doctor` tells what works here."
        ) from error
    require_provider(session, options.provider)
    return session


def provider_settings(options: SessionOptions) -> dict[str, str]:
    """Returns what the provider is told: our defaults, and the options' own above them."""
    defaults: dict[str, str] = {}
    if options.provider == "cuda":
        # TF32 rounds the factors of a product to 10 bits of mantissa: off, so that CPU, CUDA and
        # torch agree.
        defaults = {"device_id": str(options.device_id), "use_tf32": "0"}
        if options.cuda_graphs:
            defaults["enable_cuda_graph"] = "1"
    return {**defaults, **options.provider_options}


def tf32(options: SessionOptions) -> str:
    """Returns whether products may be rounded to TF32: "on", "off", or "none" on the CPU."""
    if options.provider == "cpu":
        return "none"
    return "off" if provider_settings(options)["use_tf32"] == "0" else "on"


def assigned_nodes(session: onnxruntime.InferenceSession) -> dict[str, int]:
    """Counts the graph's nodes by the provider that runs them.

    Args:
        session: A session from `open_session`, which has onnxruntime record this.

    Returns:
        For example `{"CUDAExecutionProvider": 210, "CPUExecutionProvider": 12}`.
    """
    counts: Counter[str] = Counter()
    for subgraph in session.get_provider_graph_assignment_info():
        counts[subgraph.ep_name] += len(subgraph.get_nodes())
    return dict(counts)


@dataclass(frozen=True)
class CudaObstacle:
    """What keeps CUDA from running here.

    Attributes:
        missing: What is missing or wrong, as the rest of a sentence.
        remedy: One line that mends it.
        gpu_present: Whether there is a GPU that goes unused because of it.
    """

    missing: str
    remedy: str
    gpu_present: bool


def cuda_obstacle(device_id: int = 0) -> CudaObstacle | None:
    """Looks for what keeps CUDA from running, from the driver upwards.

    Where onnxruntime itself fails for want of a library, it says so on stderr only and opens a CPU
    session; so each thing that it needs is looked at before it is asked.

    Args:
        device_id: The GPU that is to be used.

    Returns:
        The first obstacle, or None where nothing is known to be missing.
    """
    driver = _query_driver()
    if driver is None:
        return CudaObstacle(
            f"there is no NVIDIA driver ({_DRIVER_LIBRARY} cannot be loaded)",
            "install the NVIDIA driver; in a container, start it with `--gpus all`",
            gpu_present=False,
        )
    if driver.devices == 0:
        return CudaObstacle(
            f"the NVIDIA driver offers no GPU (cuInit answered {driver.status})",
            "look at `nvidia-smi` and at the variable CUDA_VISIBLE_DEVICES",
            gpu_present=False,
        )
    if device_id >= driver.devices:
        return CudaObstacle(
            f"device {device_id} does not exist: the driver offers {driver.devices}, "
            "counted from 0",
            f"choose a device id from 0 to {driver.devices - 1}",
            gpu_present=True,
        )
    if _PROVIDER_NAMES["cuda"] not in onnxruntime.get_available_providers():
        return CudaObstacle(
            f"this build of onnxruntime {onnxruntime.__version__} has no CUDA in it",
            'pip uninstall --yes onnxruntime && pip install "transferry[cuda]"',
            gpu_present=True,
        )
    built_for = int(onnxruntime.cuda_version.split(".")[0])
    if driver.cuda_major < built_for:
        return CudaObstacle(
            f"the NVIDIA driver supports CUDA {driver.cuda_major}, and onnxruntime "
            f"{onnxruntime.__version__} needs CUDA {built_for}",
            "update the NVIDIA driver",
            gpu_present=True,
        )
    if complaint := _preload_cuda_libraries():
        return CudaObstacle(
            f"CUDA's libraries are missing ({complaint})",
            'pip install "transferry[cuda]"',
            gpu_present=True,
        )
    return None


def _create(
    model: Path, options: SessionOptions, graph: bytes | None
) -> onnxruntime.InferenceSession:
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = options.threads
    settings.inter_op_num_threads = 1
    settings.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    settings.graph_optimization_level = _OPTIMISATION_LEVELS[options.optimisation]
    settings.log_severity_level = _LOG_FATAL_ONLY
    # Idle threads spin between the operators of a run, where waking them would cost more than the
    # operator, but not between runs: there the search needs the core.
    settings.add_session_config_entry("session.force_spinning_stop", "1")
    settings.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    _share_arena()
    settings.add_session_config_entry("session.use_env_allocators", "1")
    if options.profile is not None:
        settings.enable_profiling = True
        settings.profile_file_prefix = str(options.profile / model.stem)
    if graph is not None:
        settings.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(model.parent)
        )

    provider = (_PROVIDER_NAMES[options.provider], provider_settings(options))
    return onnxruntime.InferenceSession(
        str(model) if graph is None else graph,
        settings,
        providers=[provider],
        enable_fallback=0,
    )


@functools.cache
def _share_arena() -> None:
    """Lets all sessions of the process take their memory on the host from one arena.

    An arena keeps what it once needed. One for each of the graphs, which never run at the same
    moment of a replica, took 40 % more memory in all (docs/performance.md).
    """
    kind = onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR
    memory = onnxruntime.OrtMemoryInfo("Cpu", kind, 0, onnxruntime.OrtMemType.DEFAULT)
    onnxruntime.create_and_register_allocator(memory, onnxruntime.OrtArenaCfg({}))


def require_provider(session: onnxruntime.InferenceSession, provider: Provider) -> None:
    """Does nothing if a session runs on the provider asked for.

    Raises:
        ProviderError: It runs on another.
    """
    name = _PROVIDER_NAMES[provider]
    first = session.get_providers()[0]
    nodes = assigned_nodes(session)
    # A session can name CUDA first and still leave every node to the CPU. A graph may fold into
    # no node at all, so only nodes that went elsewhere count against the provider.
    if first != name or (nodes and name not in nodes):
        raise ProviderError(
            f"provider {provider} was asked for, but onnxruntime opened the session on {first} "
            f"(nodes by provider: {nodes}). `transferry doctor` tells what works here."
        )


def _fault_of_file(model: Path, graph: bytes | None) -> Exception | None:
    """What the CPU provider, which runs everywhere, has against the graph itself."""
    try:
        _create(model, SessionOptions(optimisation="disable"), graph)
    except native.NotImplemented:
        return None  # a sound graph of a type for which the CPU has no kernel
    except _OPENING_ERRORS as error:
        return error
    return None


def _unreadable(model: Path, error: Exception) -> InputError:
    return InputError(
        f"expected a graph that onnxruntime {onnxruntime.__version__} can read at {model}, "
        f"found: {_reason(error)}. Export the bundle again, or copy it again if it was copied."
    )


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")


@dataclass(frozen=True)
class _Driver:
    """What the NVIDIA driver tells: cuInit's status, GPUs, and the newest CUDA it supports."""

    status: int
    devices: int
    cuda_major: int


def _query_driver() -> _Driver | None:
    try:
        library = ctypes.CDLL(_DRIVER_LIBRARY)
    except OSError:
        return None
    devices, version = ctypes.c_int(0), ctypes.c_int(0)
    library.cuDriverGetVersion(ctypes.byref(version))  # 1000 * major + 10 * minor
    status: int = library.cuInit(0)
    if status == 0:
        library.cuDeviceGetCount(ctypes.byref(devices))
    return _Driver(status, devices.value, version.value // 1000)


def cuda_compute_capability(device_id: int) -> str:
    """Returns a GPU's compute capability, such as "90" for 9.0; "unknown" without a driver."""
    try:
        library = ctypes.CDLL(_DRIVER_LIBRARY)
    except OSError:
        return "unknown"
    library.cuInit(0)
    numbers = []
    # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR of cuda.h.
    for attribute in (75, 76):
        number = ctypes.c_int(0)
        if library.cuDeviceGetAttribute(ctypes.byref(number), attribute, device_id) != 0:
            return "unknown"
        numbers.append(str(number.value))
    return "".join(numbers)


_PRELOAD_LOCK = threading.Lock()


def _preload_cuda_libraries() -> str:
    """Loads the CUDA libraries that pip installed, and returns what could not be loaded.

    `preload_dlls` prints its complaints to stdout, which may be where the answers go. Redirecting
    stdout is global, hence the lock for replicas that open their sessions at once.
    """
    with _PRELOAD_LOCK, contextlib.redirect_stdout(io.StringIO()) as printed:
        onnxruntime.preload_dlls()
    failures = [line for line in printed.getvalue().splitlines() if "Failed to load" in line]
    return "; ".join(failures)
