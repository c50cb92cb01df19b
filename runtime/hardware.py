"""The processor that this process runs on."""

import os
import platform
import sys
from pathlib import Path

_INSTRUCTION_SETS = (
    *("avx2", "fma", "avx512f", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_int8"),
    *("asimddp", "i8mm", "sve", "bf16"),
)


def instruction_sets() -> tuple[str, ...]:
    """The vector instructions that decide which kernels run; empty where the system hides them.

    int8 kernels differ by instruction set (microsoft/onnxruntime#6004), so this is part of what was
    verified.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ()
    # x86 calls them flags, ARM calls them Features.
    words = next((line.split() for line in lines if line.startswith(("flags", "Features"))), [])
    return tuple(name for name in _INSTRUCTION_SETS if name in words)


def cpu_name() -> str:
    """The processor as the system names it, else the machine's kind, such as "x86_64"."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def usable_cores() -> int:
    """How many cores this process may use, which can be fewer than the machine has."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
