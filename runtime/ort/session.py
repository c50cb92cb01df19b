"""Opens onnxruntime sessions that run on the requested provider, or fails.

onnxruntime itself answers a request for CUDA with a CPU session if a library, the driver or the GPU
is missing (microsoft/onnxruntime#17801, #23372). Here it is a `ProviderError` that names the
missing part and its remedy.
"""

import functools
import importlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal, get_args

import msgspec
import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnxruntime.capi import onnxruntime_pybind11_state as native

from transferry.runtime.errors import AllocationError, InputError, ProviderError, UsageError
from transferry.runtime.io.whole import sha256
from transferry.runtime.ort.cuda import cuda_obstacle, cuda_stream, tensorrt_obstacle
from transferry.runtime.settings import check_value, field_types

# More threads than cores are useless, and thousands end the process.
Few = Annotated[int, msgspec.Meta(le=1024)]
Provider = Literal["cpu", "cuda", "tensorrt"]
Device = Literal["cpu", "cuda"]
Runtime = Literal["onnxruntime", "openvino"]
Optimisation = Literal["disable", "basic", "extended", "all"]

_PROVIDER_NAMES: dict[Provider, str] = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
}
_OPTIMISATION_LEVELS: dict[Optimisation, onnxruntime.GraphOptimizationLevel] = {
    "disable": onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
}
# onnxruntime's own errors share no base class below Exception.
ONNXRUNTIME_ERRORS = (
    *(native.EPFail, native.Fail, native.InvalidArgument, native.InvalidGraph),
    *(native.InvalidProtobuf, native.NoSuchFile, native.NotImplemented, native.RuntimeException),
    *(RuntimeError, ValueError),
)
# Messages of short memory: of onnxruntime's arena, exhausted or not allowed to grow, of C++ by
# either compiler, of CUDA, of CUDA's libraries.
_SHORTAGES = (
    *("Failed to allocate memory", "is smaller than requested bytes"),
    *("bad_alloc", "bad allocation", "out of memory", "ALLOC_FAILED"),
)
# Messages of the device: of CUDA, cuBLAS, cuDNN and TensorRT, and of onnxruntime without cuDNN.
_DEVICE_FAULTS = (
    *("CUDA failure", "CUBLAS failure", "CUDNN failure", "cuDNN is unavailable", "TensorRT EP"),
)
# BiasSoftmax, which onnxruntime fuses, needs cuDNN, the addition and Softmax do not: the other
# kernels of our graphs run without it, since onnxruntime 1.28.
_NOT_ON_CUDA = ["BiasSoftmaxFusion"]
_LOG_FATAL_ONLY = 4  # errors are raised, with the same words
KERNELS = "transferry.kernels"  # domain of the operators of the package transferry-kernels
# Beginning of the domain's entry in a graph's opset_import (onnx.proto): field 1 is its name, field
# 2 the version, a number below 128. Other messages have the domain in other fields.
_OPSET = b"\n%c%s\x10" % (len(KERNELS), KERNELS.encode())


@dataclass(frozen=True)
class SessionOptions:
    """How to run a graph.

    Attributes:
        provider: `cpu`, `cuda`, or `tensorrt`, which leaves to CUDA the operators that it lacks;
            never a fallback to another.
        threads: Threads that share one operator. Replicas of one thread beat one session of many.
        device_id: Which GPU, counted as CUDA counts them; the CPU has none.
        optimisation: Graph optimisation level of onnxruntime; a certificate is for one level.
        provider_options: Options passed on to the provider, overriding the defaults set here;
            those of TensorRT begin with `trt_`.
        profile: Folder for onnxruntime's time traces, one file per graph, complete once the session
            is deleted; None for no traces.
        runtime: `onnxruntime`, or `openvino` for the portable variant on the CPU.
    """

    provider: Provider = "cpu"
    threads: Few = 1
    device_id: Few = 0
    optimisation: Optimisation = "all"
    provider_options: Mapping[str, str] = field(default_factory=dict)
    profile: Path | None = None
    runtime: Runtime = "onnxruntime"

    @property
    def device(self) -> Device:
        """Where tensors lie, as onnxruntime names it."""
        return "cpu" if self.provider == "cpu" else "cuda"

    @property
    def rows_are_independent(self) -> bool:
        """Whether a row of a product has the same bits whichever rows are computed beside it.

        onnxruntime on the CPU is tested for it; other kernels may be chosen by the number of rows.
        """
        return self.provider == "cpu" and self.runtime == "onnxruntime"

    def __post_init__(self) -> None:
        """Refuses values that onnxruntime would ignore or reinterpret, with UsageError."""
        for name in ("threads", "device_id", "provider_options", "profile"):
            check_value(name, getattr(self, name), field_types(type(self))[name])
        if str(self.provider) not in _PROVIDER_NAMES:
            raise UsageError(
                f"the provider must be cpu, cuda or tensorrt, but is {self.provider!r}"
            )
        if str(self.optimisation) not in _OPTIMISATION_LEVELS:
            raise UsageError(
                f"the optimisation must be one of {', '.join(_OPTIMISATION_LEVELS)}, "
                f"but is {self.optimisation!r}"
            )
        if str(self.runtime) not in get_args(Runtime):
            raise UsageError(
                f"the runtime must be onnxruntime or openvino, but is {self.runtime!r}"
            )
        if self.runtime == "openvino":
            self._check_openvino()
        if self.threads < 1:
            raise UsageError(f"threads must be 1 or more, but is {self.threads}")
        if self.device_id < 0:
            raise UsageError(f"the device id must be 0 or more, but is {self.device_id}")
        if self.profile is not None and not self.profile.is_dir():
            raise UsageError(f"profile must be an existing folder, found {self.profile}")

    def _check_openvino(self) -> None:
        """Raises UsageError for options that only onnxruntime has."""
        plain = SessionOptions(threads=self.threads)
        for name in ("provider", "optimisation", "provider_options", "profile"):
            if getattr(self, name) != getattr(plain, name):
                raise UsageError(
                    f"runtime openvino runs on the CPU with its own optimisation, but {name} is "
                    f"{getattr(self, name)}; leave it out, or choose runtime onnxruntime"
                )


@dataclass(frozen=True)
class Kernels:
    """The package transferry-kernels, whose operators some graphs use.

    Attributes:
        found: Its version and instruction set, or why it cannot run here.
        remedy: How to fix that; "" if it can run.
        library: File of the operators, which every session registers: once loaded, 1 microsecond.
        version: The package's version and the library's sha256, which decide the numbers.
        operators: Version of the operators.
    """

    found: str
    remedy: str = ""
    library: str = ""
    version: str = ""
    operators: int = 0


@functools.cache
def kernels() -> Kernels:
    """Returns the package, ready to run or with what is wrong: other graphs do without it."""
    try:
        package = importlib.import_module("transferry_kernels")
        version, library = package.__version__, Path(package.LIBRARY)
        if obstacle := package.obstacle():
            return Kernels(f"cannot run here: {obstacle}", "Choose variant cpu-int8", "", version)
        onnxruntime.SessionOptions().register_custom_ops_library(str(library))
        found, told = f"{version}, {package.instruction_set()}", f"sha256 {sha256(library)}"
        return Kernels(found, "", str(library), f"{version}, {told}", package.OPERATORS)
    except ModuleNotFoundError:
        how = "`pip install ./kernels` in a checkout of transferry, or its wheel"
        return Kernels("is not installed", f"Install it ({how}), or choose variant cpu-int8")
    except (ImportError, OSError, AttributeError, *ONNXRUNTIME_ERRORS) as error:
        remedy = "Install it again, or choose variant cpu-int8"
        return Kernels(f"cannot be loaded: {_reason(error)}", remedy)


def open_session(
    model: Path,
    options: SessionOptions,
    graph: bytes | None = None,
    files: Mapping[str, Path] = MappingProxyType({}),
) -> onnxruntime.InferenceSession:
    """Opens a graph on the requested provider, and on no other.

    Args:
        model: The graph's file; external weights lie beside it.
        options: How to run it.
        graph: Graph to open instead of the file's content, with the same external weights.
        files: Files of `graph`'s external weights, by the names in it, as paths without links.
            Default: those beside `model`.

    Returns:
        A session whose `get_providers()[0]` is the requested provider.

    Raises:
        AllocationError: There is not enough memory.
        InputError: The file is missing, damaged, or not a graph that onnxruntime can read.
        ProviderError: The provider cannot run here, or cannot run this graph.
    """
    if not model.is_file():
        raise InputError(
            f"expected an ONNX graph at {model}, found no file. Export the bundle again."
        )
    _require_libraries(options)
    _require_operators(model, graph or b"")
    try:
        session = _create(model, options, graph, files)
    except native.NotImplemented as error:
        raise ProviderError(
            f"provider {options.provider} cannot run {model}: {_reason(error)}. "
            "Choose another provider or another variant of the bundle."
        ) from error
    except (*ONNXRUNTIME_ERRORS, MemoryError) as error:
        if is_shortage(error):
            cpu = options.provider == "cpu"
            where, limit = ("", ", or raise the limit (ulimit -v)") if cpu else (" on the GPU", "")
            raise AllocationError(
                f"there is not enough memory{where} to open {model} ({_reason(error)}); end other "
                f"programs{limit}"
            ) from error
        if options.provider == "cpu":
            raise _unreadable(model, error) from error
        if (fault := _fault_of_file(model, graph, files)) is not None:
            raise _unreadable(model, fault) from fault
        raise ProviderError(
            f"provider {options.provider} was requested, but onnxruntime cannot start it: "
            f"{_reason(error)}. `transferry doctor` tells what works here."
        ) from error
    require_provider(session, options.provider)
    return session


def is_shortage(error: Exception) -> bool:
    """Whether onnxruntime failed because memory is short."""
    found = " ".join(str(error).split())
    return isinstance(error, MemoryError) or any(shortage in found for shortage in _SHORTAGES)


def is_device_fault(error: Exception) -> bool:
    """Whether CUDA or one of its libraries failed, rather than the graph or its inputs."""
    return any(fault in str(error) for fault in _DEVICE_FAULTS)


def provider_settings(options: SessionOptions) -> dict[str, str]:
    """Provider's options: the defaults here, overridden by `provider_options`.

    Another runtime than onnxruntime is one of them, so that a certificate is for one runtime.
    """
    defaults: dict[str, str] = {}
    if options.runtime != SessionOptions.runtime:
        defaults = {"runtime": options.runtime}
    if options.device == "cuda":
        # TF32 rounds the factors of a product to 10 bits of mantissa; off, so that CPU, CUDA and
        # torch agree.
        defaults = {"device_id": str(options.device_id), "use_tf32": "0"}
    return {**defaults, **options.provider_options}


def tf32(options: SessionOptions) -> str:
    """Whether CUDA may round products to TF32: "on", "off", or "none" on the CPU."""
    if options.provider == "cpu":
        return "none"
    return "off" if provider_settings(options)["use_tf32"] == "0" else "on"


def onnxruntime_build() -> tuple[str, list[str]]:
    """Returns the version of onnxruntime, and the providers that it was built with."""
    return onnxruntime.__version__, onnxruntime.get_available_providers()


def assigned_nodes(session: onnxruntime.InferenceSession) -> dict[str, int]:
    """Counts the graph's nodes by provider, such as `{"CUDAExecutionProvider": 210}`.

    The session comes from `open_session`, which makes onnxruntime record the assignment.
    """
    counts: Counter[str] = Counter()
    for subgraph in session.get_provider_graph_assignment_info():
        counts[subgraph.ep_name] += len(subgraph.get_nodes())
    return dict(counts)


def _require_libraries(options: SessionOptions) -> None:
    """Raises ProviderError if the GPU, its driver or a library is missing."""
    if options.provider == "cpu":
        return
    find = cuda_obstacle
    if options.provider == "tensorrt":
        find = tensorrt_obstacle
        if tf32(options) == "off":
            # onnxruntime has no option for it; NVIDIA's libraries read the variable.
            os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
    if obstacle := find(options.device_id):
        raise ProviderError(
            f"provider {options.provider} was requested, but {obstacle.missing}. "
            f"To fix it: {obstacle.remedy}"
        )


def _require_operators(model: Path, graph: bytes) -> None:
    """Raises ProviderError for later operators than transferry-kernels has.

    onnxruntime would run operators of an earlier version in their place.
    """
    _, _, rest = graph.partition(_OPSET)
    if rest and rest[0] > kernels().operators:
        raise ProviderError(
            f"{model} needs version {rest[0]} of the operators of transferry-kernels, but found "
            f"version {kernels().operators} (transferry-kernels {kernels().found}); install "
            "the version that the bundle was exported with"
        )


def _create(
    model: Path, options: SessionOptions, graph: bytes | None, files: Mapping[str, Path]
) -> onnxruntime.InferenceSession:
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = options.threads
    settings.inter_op_num_threads = 1
    settings.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    settings.graph_optimization_level = _OPTIMISATION_LEVELS[options.optimisation]
    settings.log_severity_level = _LOG_FATAL_ONLY
    # Idle threads spin between the operators of a run, where waking them would cost more than the
    # operator, but not between runs, where the search needs the core.
    settings.add_session_config_entry("session.force_spinning_stop", "1")
    # Weights stored in int8 for products in float32 are converted once, when a graph is opened. No
    # graph has pairs of QuantizeLinear and DequantizeLinear that onnxruntime could make one.
    settings.add_session_config_entry("session.disable_quant_qdq", "1")
    settings.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    if library := kernels().library:
        settings.register_custom_ops_library(library)
    _share_arena()
    settings.add_session_config_entry("session.use_env_allocators", "1")
    if options.profile is not None:
        settings.enable_profiling = True
        settings.profile_file_prefix = str(options.profile / model.stem)
    mapped = [] if graph is None else _named_files(settings, model, files)
    given = provider_settings(options)
    more: dict[str, list[str]] = {}
    if options.device == "cuda":
        # Another stream of the user's would run the graphs of a model in no order.
        given["user_compute_stream"] = str(cuda_stream(options.device_id).handle)
        more = {"disabled_optimizers": _NOT_ON_CUDA}
        # Its CUDA code warns on stderr, outside of any session, of each ScatterND and device.
        onnxruntime.set_default_logger_severity(_LOG_FATAL_ONLY)
    session = onnxruntime.InferenceSession(
        str(model) if graph is None else graph,
        settings,
        providers=_requested(options.provider, given),
        enable_fallback=0,
        **more,
    )
    del mapped  # onnxruntime read them until here
    return session


def _requested(provider: Provider, given: Mapping[str, str]) -> list[tuple[str, dict[str, str]]]:
    """Returns the providers of a session with their options: TensorRT's are followed by CUDA's."""
    if provider != "tensorrt":
        return [(_PROVIDER_NAMES[provider], dict(given))]
    shared = {"device_id", "user_compute_stream"}
    own = {name: given[name] for name in given if name in shared or name.startswith("trt_")}
    rest = {name: given[name] for name in given if name in shared or name not in own}
    return [(_PROVIDER_NAMES[provider], own), (_PROVIDER_NAMES["cuda"], rest)]


def _named_files(
    settings: onnxruntime.SessionOptions, model: Path, files: Mapping[str, Path]
) -> Sequence[NDArray[np.uint8]]:
    """Names the files of a graph's external weights: their folder, or their contents.

    onnxruntime maps files of one folder. It refuses a link out of it, so that the target is mapped
    here; the returned arrays must live until the session is created.
    """
    folder = next((path.parent for path in files.values()), model.parent)
    if all(path == folder / name for name, path in files.items()):
        entry = "session.model_external_initializers_file_folder_path"
        settings.add_session_config_entry(entry, str(folder))
        return []
    mapped = [np.memmap(path, np.uint8, "r") for path in files.values()]
    sizes = [len(each) for each in mapped]
    settings.add_external_initializers_from_files_in_memory(list(files), mapped, sizes)
    return mapped


@functools.cache
def _share_arena() -> None:
    """Makes all sessions of the process allocate host memory from one arena.

    An arena keeps its largest size. One arena per graph took 40 % more memory, although a replica
    runs one graph at a time (docs/performance.md). On a GPU an arena of all sessions took a third
    less, but kept memory of a run that failed for the stream of its session.
    """
    kind = onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR
    memory = onnxruntime.OrtMemoryInfo("Cpu", kind, 0, onnxruntime.OrtMemType.DEFAULT)
    onnxruntime.create_and_register_allocator(memory, onnxruntime.OrtArenaCfg({}))


def require_provider(session: onnxruntime.InferenceSession, provider: Provider) -> None:
    """Raises ProviderError for a session that runs on another provider than the requested one."""
    name = _PROVIDER_NAMES[provider]
    first = session.get_providers()[0]
    nodes = assigned_nodes(session)
    # A session can name CUDA first and still leave every node to the CPU. A graph may fold into
    # no node at all, so only nodes on another provider count.
    if first != name or (nodes and name not in nodes):
        raise ProviderError(
            f"provider {provider} was requested, but onnxruntime opened the session on {first} "
            f"(nodes by provider: {nodes}). `transferry doctor` tells what works here."
        )


def _fault_of_file(model: Path, graph: bytes | None, files: Mapping[str, Path]) -> Exception | None:
    """Error of the CPU provider, which runs everywhere, if the graph is at fault."""
    try:
        _create(model, SessionOptions(optimisation="disable"), graph, files)
    except native.NotImplemented:
        return None  # a sound graph of a type for which the CPU has no kernel
    except ONNXRUNTIME_ERRORS as error:
        return error
    return None


def _unreadable(model: Path, error: Exception) -> InputError:
    return InputError(
        f"expected a graph that onnxruntime {onnxruntime.__version__} can read at {model}, "
        f"found: {_reason(error)}. Export the bundle again, or copy it again if it was copied."
    )


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")
