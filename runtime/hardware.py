"""CPU of this process: name, instruction sets and usable cores."""

import os
import platform
import sys
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
_INSTRUCTION_SETS = (
    *("avx2", "fma", "avx512f", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_int8"),
    *("asimddp", "i8mm", "sve", "bf16"),
)


def _value(cpuinfo: Path, *keys: str) -> str:
    """First value of one of the keys; "" without one."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(keys)), "")


def instruction_sets(cpuinfo: Path = CPUINFO) -> tuple[str, ...]:
    """Vector instruction sets that decide between kernels; empty if the system hides them.

    int8 kernels differ by instruction set (microsoft/onnxruntime#6004), so certificates name them.
    """
    # "flags" on x86, "Features" on ARM.
    words = _value(cpuinfo, "flags", "Features").split()
    return tuple(name for name in _INSTRUCTION_SETS if name in words)


def cpu_name(cpuinfo: Path = CPUINFO) -> str:
    """Model name of the CPU, or the machine type, such as "x86_64"."""
    return _value(cpuinfo, "model name") or platform.machine()


def usable_cores() -> int:
    """Number of cores that this process may use, perhaps fewer than the machine has."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
