"""CUDA and TensorRT on this machine: obstacles for onnxruntime, and the stream of its graphs."""

import contextlib
import ctypes
import functools
import importlib
import io
import re
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from transferry.runtime.errors import install_command

_WINDOWS = sys.platform == "win32"
_DRIVER_LIBRARY = "nvcuda.dll" if _WINDOWS else "libcuda.so.1"
_TENSORRT = 10  # the major version that onnxruntime's provider is linked with
_TENSORRT_LIBRARIES = (
    (f"nvinfer_{_TENSORRT}.dll", f"nvonnxparser_{_TENSORRT}.dll", "cudnn64_9.dll")
    if _WINDOWS
    else (f"libnvinfer.so.{_TENSORRT}", f"libnvonnxparser.so.{_TENSORRT}", "libcudnn.so.9")
)
_LOCK = threading.Lock()
_TO_DEVICE, _TO_HOST = 1, 2  # cudaMemcpyKind of driver_types.h
_ALIGNMENT = 256  # bytes, as cudaMalloc aligns


@dataclass(frozen=True)
class CudaObstacle:
    """Reason why CUDA or TensorRT cannot run here, and its remedy in one line.

    Attributes:
        missing: The missing or wrong part, as a clause.
        remedy: How to fix it.
        gpu_present: Whether a GPU goes unused because of it.
    """

    missing: str
    remedy: str
    gpu_present: bool = True


def cuda_obstacle(device_id: int = 0) -> CudaObstacle | None:
    """First reason why CUDA cannot run on a GPU, from the driver upwards; None without one.

    onnxruntime reports a missing library on stderr only, and opens a CPU session; so everything
    that it needs is checked first.
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
        )
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        return CudaObstacle(
            f"this build of onnxruntime {onnxruntime.__version__} has no CUDA in it",
            f"pip uninstall --yes onnxruntime && {install_command('cuda')}",
        )
    built_for = int(onnxruntime.cuda_version.split(".")[0])
    if driver.cuda_major < built_for:
        return CudaObstacle(
            f"the NVIDIA driver supports CUDA {driver.cuda_major}, and onnxruntime "
            f"{onnxruntime.__version__} needs CUDA {built_for}",
            "update the NVIDIA driver",
        )
    if complaint := _preload_cuda_libraries():
        return CudaObstacle(f"CUDA's libraries are missing: {complaint}", install_command("cuda"))
    return None


def tensorrt_obstacle(device_id: int = 0) -> CudaObstacle | None:
    """First reason why TensorRT cannot run on a GPU, those of CUDA first; None without one.

    onnxruntime's own library is not tried: loaded before its host exists, it never finds that.
    """
    if obstacle := cuda_obstacle(device_id):
        return obstacle
    if "TensorrtExecutionProvider" not in onnxruntime.get_available_providers():
        return CudaObstacle(
            f"this build of onnxruntime {onnxruntime.__version__} has no TensorRT in it",
            "install onnxruntime-gpu from PyPI, or use --provider cuda",
        )
    missing = [name for name in _TENSORRT_LIBRARIES if _tensorrt_library(name) is None]
    if not missing:
        return None
    package = f"tensorrt-cu{onnxruntime.cuda_version.split('.')[0]}-libs=={_TENSORRT}.*"
    return CudaObstacle(
        f"TensorRT's libraries are missing: {', '.join(missing)}",
        f'pip install "{package}" and {install_command("cuda")}, or use --provider cuda',
    )


def tensorrt_version() -> str:
    """Returns the version of TensorRT, such as "101303" for 10.13.3; "unknown" without it."""
    library = _tensorrt_library(_TENSORRT_LIBRARIES[0])
    return "unknown" if library is None else str(library.getInferLibVersion())


def _tensorrt_library(name: str) -> ctypes.CDLL | None:
    with contextlib.suppress(ImportError, OSError):
        importlib.import_module("tensorrt_libs")  # loads the libraries that pip installed
    with contextlib.suppress(OSError):
        return ctypes.CDLL(name)
    return None


@dataclass(frozen=True)
class _Driver:
    """The NVIDIA driver: status of cuInit, number of GPUs, newest supported major CUDA version."""

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


def _preload_cuda_libraries() -> str:
    """Loads the CUDA libraries of pip or the system, and returns those that are missing.

    `preload_dlls` prints failures to stdout, where results may go. Redirecting stdout is global,
    hence the lock for replicas that open sessions at the same time.
    """
    with _LOCK, contextlib.redirect_stdout(io.StringIO()) as printed:
        onnxruntime.preload_dlls()
    # A library that pip installed and that does not load is no loss if the system has another.
    failed = re.findall(r"^Failed to load ([^\s/\\]+): .*", printed.getvalue(), re.MULTILINE)
    return ", ".join(failed)


class CudaStream:
    """A stream of a GPU: what is queued on it runs in order, without a wait in between.

    It is a blocking stream, so that copies on CUDA's default stream, as onnxruntime makes of and
    to `OrtValue`s, come after all that was queued before, and before all that is queued later (CUDA
    Runtime API, "Stream synchronization behavior").

    Attributes:
        device_id: The GPU.
        handle: Address of the stream, as CUDA's functions take it.
        lock: Held while work is queued: the graphs of a stream share one handle of cuBLAS.
    """

    def __init__(self, device_id: int) -> None:
        """Creates a stream; raises RuntimeError if CUDA cannot."""
        major = onnxruntime.cuda_version.split(".")[0]
        name = f"cudart64_{major}.dll" if _WINDOWS else f"libcudart.so.{major}"
        self._runtime = ctypes.CDLL(name)  # which `_preload_cuda_libraries` loaded
        self._runtime.cudaGetErrorString.restype = ctypes.c_char_p
        self.device_id, self.lock = device_id, threading.Lock()
        self._unused = defaultdict[int, list[int]](list)
        stream = ctypes.c_void_p()
        self._call("cudaStreamCreate", ctypes.byref(stream))
        self.handle = stream.value or 0

    def pinned(self, size: int) -> NDArray[np.uint8]:
        """Page-locked memory of at least `size` bytes, which copies read and write by themselves.

        Locking pages is slow, so memory that is no longer used is taken again.
        """
        self.wait()  # for copies of a call that failed
        size = 1 << (size - 1).bit_length()
        try:
            place = self._unused[size].pop()
        except IndexError:
            address = ctypes.c_void_p()
            self._call("cudaMallocHost", ctypes.byref(address), ctypes.c_size_t(size))
            place = address.value or 0
        memory = (ctypes.c_uint8 * size).from_address(place)
        found: NDArray[np.uint8] = np.frombuffer(memoryview(memory), np.uint8)
        weakref.finalize(found, self._unused[size].append, place).atexit = False
        return found

    def copy(self, to: int, source: int, size: int, kind: int) -> None:
        """Queues a copy between addresses of page-locked memory and the GPU."""
        addresses = ctypes.c_void_p(to), ctypes.c_void_p(source)
        stream = ctypes.c_void_p(self.handle)
        self._call("cudaMemcpyAsync", *addresses, ctypes.c_size_t(size), kind, stream)

    def wait(self) -> None:
        """Waits for all that was queued; raises RuntimeError if some of it failed."""
        self._call("cudaStreamSynchronize", ctypes.c_void_p(self.handle))

    def _call(self, name: str, *arguments: Any) -> None:
        # The device of a thread is the first one until it chooses another.
        for function, given in (("cudaSetDevice", (self.device_id,)), (name, arguments)):
            if status := getattr(self._runtime, function)(*given):
                reason = self._runtime.cudaGetErrorString(status).decode()
                raise RuntimeError(f"CUDA failure {status}: {reason}; {function}")


def cuda_stream(device_id: int) -> CudaStream:
    """Returns the stream of a GPU, on which all graphs of the process run."""
    with _LOCK:  # a cache alone might make two
        return _stream(device_id)


_stream = functools.cache(CudaStream)


class StagingBuffer:
    """Arrays side by side in page-locked memory, and room for them on a GPU: one copy moves all.

    Attributes:
        stream: The stream of the copies.
        arrays: The arrays on the host, by name.
        addresses: Their addresses on the GPU, by name.
    """

    def __init__(self, stream: CudaStream, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Takes the values of arrays; raises an error of onnxruntime or CUDA without memory."""
        sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays.values()]
        size = sum(sizes) or _ALIGNMENT
        self.stream, host = stream, stream.pinned(size)
        self._device = onnxruntime.OrtValue.ortvalue_from_shape_and_type(
            [size], np.uint8, "cuda", stream.device_id
        )
        self._copied = self._device.data_ptr(), host.ctypes.data, size
        self.arrays, self.addresses = dict[str, NDArray[Any]](), dict[str, int]()
        begins = np.cumsum([0, *sizes]).tolist()
        for (name, array), begin in zip(arrays.items(), begins, strict=False):
            place = host[begin : begin + array.nbytes].view(array.dtype)
            self.arrays[name] = place.reshape(array.shape)
            self.arrays[name][...] = array
            self.addresses[name] = self._copied[0] + begin

    def upload(self) -> None:
        """Queues the copy to the GPU; the arrays may change after the next wait."""
        device, host, size = self._copied
        self.stream.copy(device, host, size, _TO_DEVICE)

    def download(self) -> None:
        """Queues the copy to the host; the arrays are there after the next wait."""
        device, host, size = self._copied
        self.stream.copy(host, device, size, _TO_HOST)
