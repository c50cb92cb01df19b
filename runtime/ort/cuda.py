"""CUDA on this machine: the driver, the GPUs, and obstacles for onnxruntime."""

import contextlib
import ctypes
import io
import re
import sys
import threading
from dataclasses import dataclass

import onnxruntime

from transferry.runtime.errors import install_command

_DRIVER_LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_PRELOAD_LOCK = threading.Lock()


@dataclass(frozen=True)
class CudaObstacle:
    """Reason why CUDA cannot run here, and its remedy in one line.

    Attributes:
        missing: The missing or wrong part, as a clause.
        remedy: How to fix it.
        gpu_present: Whether a GPU goes unused because of it.
    """

    missing: str
    remedy: str
    gpu_present: bool


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
            gpu_present=True,
        )
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        return CudaObstacle(
            f"this build of onnxruntime {onnxruntime.__version__} has no CUDA in it",
            f"pip uninstall --yes onnxruntime && {install_command('cuda')}",
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
            f"CUDA's libraries are missing: {complaint}", install_command("cuda"), gpu_present=True
        )
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
    with _PRELOAD_LOCK, contextlib.redirect_stdout(io.StringIO()) as printed:
        onnxruntime.preload_dlls()
    # A library that pip installed and that does not load is no loss if the system has another.
    failed = re.findall(r"^Failed to load ([^\s/\\]+): .*", printed.getvalue(), re.MULTILINE)
    return ", ".join(failed)
