"""CPU of this process: name, instruction sets, usable cores and pages of memory."""

import contextlib
import ctypes
import mmap
import os
import platform
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
FIRST_BATCHES = 10  # seconds
_COLLAPSE = 25  # MADV_COLLAPSE, of Linux 6.1
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


@contextlib.contextmanager
def huge_pages() -> Iterator[None]:
    """Moves memory that a model fills meanwhile, and soon after, to huge pages, if Linux has them.

    The CPU finds the addresses of large pages faster, above all in a virtual machine. A thread
    moves the memory once the model is open, and again when its first batches have made buffers.
    """
    size = _huge_page()
    before = _blocks(size)
    yield
    if size:
        threading.Thread(None, _move, "huge pages", (before, size), daemon=True).start()


def _move(before: set[int], size: int) -> None:
    """Makes later blocks without a hole huge pages, so that no memory is added.

    Those that are mapped no more, or for which Linux has no page, stay as they are.
    """
    libc, pages = ctypes.CDLL(None), (ctypes.c_ubyte * (size // mmap.PAGESIZE))()
    for seconds in 0, FIRST_BATCHES:
        time.sleep(seconds)
        for block in _blocks(size) - before:
            where = ctypes.c_void_p(block), ctypes.c_size_t(size)
            if libc.mincore(*where, pages) == 0 and all(page & 1 for page in pages):
                libc.madvise(*where, _COLLAPSE)


def _huge_page() -> int:
    """Bytes of a huge page; 0 where Linux has or may use none."""
    try:
        allowed = "[never]" not in (HUGE_PAGES / "enabled").read_text(encoding="ascii")
        return int((HUGE_PAGES / "hpage_pmd_size").read_text(encoding="ascii")) if allowed else 0
    except OSError:
        return 0


def _blocks(size: int) -> set[int]:
    """Addresses of this process's own memory in blocks of a size; none of size 0."""
    found: set[int] = set()
    for line in Path("/proc/self/maps").read_bytes().splitlines() if size else ():
        place, rights, _, _, inode = line.split()[:5]
        if rights == b"rw-p" and inode == b"0":
            start, end = (int(address, 16) for address in place.split(b"-"))
            found.update(range(-(-start // size) * size, end - size + 1, size))
    return found
