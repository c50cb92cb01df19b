"""Checks of this machine, each with a one-line remedy for a problem.

A provider that onnxruntime lists may still fail, so each multiplies two matrices, and the product
is compared with numpy's. A warning is a missing part, a fault a part that does not work;
`transferry doctor` exits with 5 on a fault.
"""

import importlib.util
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from transferry.runtime.errors import ProviderError, install_command
from transferry.runtime.hardware import instruction_sets, usable_cores
from transferry.runtime.installation import (
    CPU,
    GPU,
    installed_version,
    installed_versions,
    onnxruntime_fault,
)
from transferry.runtime.io.folders import temporary_folder
from transferry.runtime.tables import wrapped, wrapped_table

# y = a b, float32 [n, n], opset 17, IR version 8. Serialised, because the runtime does not need the
# onnx package; a test builds the same bytes with onnx.
PRODUCT_GRAPH = (
    b'\x08\x08:a\n\x11\n\x01a\n\x01b\x12\x01y"\x06MatMul\x12\x07product'
    b"Z\x15\n\x01a\x12\x10\n\x0e\x08\x01\x12\n\n\x03\x12\x01n\n\x03\x12\x01n"
    b"Z\x15\n\x01b\x12\x10\n\x0e\x08\x01\x12\n\n\x03\x12\x01n\n\x03\x12\x01n"
    b"b\x15\n\x01y\x12\x10\n\x0e\x08\x01\x12\n\n\x03\x12\x01n\n\x03\x12\x01n"
    b"B\x04\n\x00\x10\x11"
)
PRODUCT_SIZE = 256
# Relative to the largest entry: float32 stays near 1e-7 and TF32 near 1e-4, so this detects TF32.
PRODUCT_TOLERANCE = 1e-5
Matrix: TypeAlias = NDArray[Any]
Multiply: TypeAlias = Callable[[Path, Matrix, Matrix], Matrix]


@dataclass(frozen=True)
class Check:
    """Result of one check: one line, and one with the remedy unless it is ok.

    A part is "ok", absent and not required ("warning"), or present and not working ("fault").
    """

    name: str
    status: Literal["ok", "warning", "fault"]
    found: str
    remedy: str = ""


def diagnose() -> list[Check]:
    """Checks everything that the runtime needs. Raises nothing: a failure is a result."""
    checks = [
        Check("python", "ok", f"{platform.python_version()} at {sys.executable}"),
        _check_onnxruntime(),
        check_cpu(),
    ]
    if sys.platform != "darwin":  # has no CUDA
        checks.append(check_cuda())
    if checks[-1].name == "cuda" and checks[-1].status == "ok":
        checks.append(check_tensorrt())
    if installed_version("openvino"):  # a rare extra
        checks.append(check_openvino())
    checks.append(check_kernels())
    return [*checks, _check_hardware(), _check_tiktoken(), _check_torch()]


def to_text(checks: Sequence[Check]) -> str:
    """Returns the checks as a table, and the remedies below it."""
    rows = [(check.name, check.status, check.found) for check in checks]
    remedies = [f"to fix {check.name}: {check.remedy}" for check in checks if check.remedy]
    remedies = [each if "pip install" in each else wrapped(each) for each in remedies]
    if any("pip install" in remedy for remedy in remedies):
        remedies.append(
            "without a package index: add --no-index --find-links and a folder of wheels"
        )
    return "\n".join([wrapped_table(("check", "status", "found"), rows), *remedies])


def check_cpu() -> Check:
    """Multiplies two matrices on the CPU provider."""
    return _check_provider("cpu", "fix onnxruntime first, see above; else report this processor")


def check_cuda() -> Check:
    """Multiplies two matrices on the CUDA provider if there is a GPU."""
    try:
        from transferry.runtime.ort.cuda import cuda_obstacle
    except (ImportError, OSError, ProviderError) as reason:
        return Check("cuda", "warning", _one_line(reason), "fix onnxruntime first")
    obstacle = cuda_obstacle()
    if obstacle is None:
        return _check_provider("cuda", install_command("cuda", "--force-reinstall"))
    status: Literal["warning", "fault"] = "fault" if obstacle.gpu_present else "warning"
    return Check("cuda", status, obstacle.missing, obstacle.remedy)


def check_tensorrt() -> Check:
    """Multiplies two matrices on the TensorRT provider if its libraries are there; many lack it."""
    from transferry.runtime.ort.cuda import tensorrt_obstacle

    if (obstacle := tensorrt_obstacle()) is not None:
        return Check("tensorrt", "warning", obstacle.missing, obstacle.remedy)
    return _check_provider("tensorrt", "use --provider cuda")


def check_openvino() -> Check:
    """Multiplies two matrices in OpenVINO, set to compute in float32."""

    def multiply(graph: Path, a: Matrix, b: Matrix) -> Matrix:
        from transferry.runtime.ort.openvino_runner import compiled_in_float32

        product: Matrix = compiled_in_float32(graph)({"a": a, "b": b})["y"]
        return product

    return _check_product("openvino", multiply, install_command("openvino", "--force-reinstall"))


def check_kernels() -> Check:
    """Loads the operators of transferry-kernels, a package for one variant."""
    if importlib.util.find_spec("transferry_kernels") is None:
        return Check("kernels", "ok", "not installed; only variant cpu-int8-kernels needs them")
    try:
        from transferry.runtime.ort.session import kernels
    except ProviderError as reason:
        return Check("kernels", "warning", _one_line(reason), "fix onnxruntime first")
    package = kernels()
    fault: Literal["warning", "fault"] = "warning" if package.version else "fault"
    status = fault if package.remedy else "ok"
    return Check("kernels", status, f"transferry-kernels {package.found}", package.remedy)


def _check_provider(provider: Literal["cpu", "cuda", "tensorrt"], remedy: str) -> Check:
    def multiply(graph: Path, a: Matrix, b: Matrix) -> Matrix:
        # Imported here: a broken onnxruntime must be a result, too.
        from transferry.runtime.ort.session import SessionOptions, open_session

        session = open_session(graph, SessionOptions(provider=provider))
        (product,) = session.run(None, {"a": a, "b": b})
        return np.asarray(product)

    return _check_product(provider, multiply, remedy)


def _check_product(name: str, multiply: Multiply, remedy: str) -> Check:
    try:
        error = _product_error(multiply)
    except Exception as reason:  # noqa: BLE001 - any failure is a result
        return Check(name, "fault", _one_line(reason), remedy)
    found = f"product of {PRODUCT_SIZE} x {PRODUCT_SIZE}: error {error:.1e} of the largest entry"
    found += ", TF32 off" if name in ("cuda", "tensorrt") else ""
    if name == "openvino":
        found = f"{installed_version(name)}, {found}, in float32"
    if error <= PRODUCT_TOLERANCE:  # false for NaN
        return Check(name, "ok", found)
    return Check(name, "fault", f"{found}, more than {PRODUCT_TOLERANCE:.0e}", remedy)


def _product_error(multiply: Multiply) -> float:
    """Largest error against numpy's float64 product, relative to the largest entry."""
    generator = np.random.default_rng(0)
    a, b = generator.standard_normal((2, PRODUCT_SIZE, PRODUCT_SIZE), dtype=np.float32)
    expected = a.astype(np.float64) @ b.astype(np.float64)
    with temporary_folder() as folder:
        graph = folder / "product.onnx"
        graph.write_bytes(PRODUCT_GRAPH)
        found = multiply(graph, a, b)
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def _check_onnxruntime() -> Check:
    installed, failure = installed_versions(CPU, GPU), ""
    try:
        from transferry.runtime.ort.session import onnxruntime_build
    except ProviderError as reason:
        failure = _one_line(reason.__cause__ or reason)
    if fault := onnxruntime_fault(installed, failure):
        return Check("onnxruntime", "fault", *fault)
    version, providers = onnxruntime_build()
    found = "".join(installed) or "onnxruntime, of another distribution"
    return Check("onnxruntime", "ok", f"{found} {version}, built with {', '.join(providers)}")


def _check_hardware() -> Check:
    sets = ", ".join(instruction_sets()) or "instruction sets unknown"
    return Check("hardware", "ok", f"{platform.machine()}, {usable_cores()} usable cores, {sets}")


def _check_tiktoken() -> Check:
    remedy = "pip install --force-reinstall tiktoken"
    try:
        from tiktoken import Encoding

        encoding = Encoding(
            "doctor",
            pat_str=r"\S+|\s+",
            mergeable_ranks={bytes([byte]): byte for byte in range(256)},
            special_tokens={},
        )
        text = "größer, 大きい"
        intact = encoding.decode(encoding.encode_ordinary(text)) == text
    except Exception as reason:  # noqa: BLE001 - any failure is a result
        return Check("tiktoken", "fault", _one_line(reason), remedy)
    found = f"{installed_version('tiktoken')}, text round trip {'ok' if intact else 'differs'}"
    return Check("tiktoken", "ok" if intact else "fault", found, "" if intact else remedy)


def _check_torch() -> Check:
    # From metadata: importing torch takes seconds.
    absent = "not installed; only train, export and verify --checkpoint need it"
    return Check("torch", "ok", installed_version("torch") or absent)


def _one_line(reason: BaseException) -> str:
    return " ".join(str(reason).split())
