"""CPU of this process: name, instruction sets, usable cores and pages of memory."""

import contextlib
import ctypes
import mmap
import os
import platform
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
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
    """Moves memory that the process fills meanwhile to huge pages, where Linux has them.

    The CPU finds the addresses of large pages faster, above all in a virtual machine. A thread
    moves the memory afterwards.
    """
    before = _blocks()
    yield
    if filled := _blocks() - before:
        threading.Thread(None, collapse, "huge pages", (filled,), daemon=True).start()


def collapse(blocks: Iterable[int]) -> int:
    """Makes blocks without a hole huge pages, so that no memory is added; returns their number.

    Args:
        blocks: Addresses of blocks of the size of a huge page. Those that are mapped no more, or
            for which Linux has no page, stay as they are.
    """
    count, libc = 0, ctypes.CDLL(None)
    for block in blocks:
        where = ctypes.c_void_p(block), ctypes.c_size_t(_huge_page())
        pages = (ctypes.c_ubyte * (_huge_page() // mmap.PAGESIZE))()
        if libc.mincore(*where, pages) == 0 and all(page & 1 for page in pages):
            count += libc.madvise(*where, _COLLAPSE) == 0
    return count


def _huge_page() -> int:
    """Bytes of a huge page; 0 where Linux has or may use none."""
    try:
        allowed = "[never]" not in (HUGE_PAGES / "enabled").read_text(encoding="ascii")
        return int((HUGE_PAGES / "hpage_pmd_size").read_text(encoding="ascii")) if allowed else 0
    except OSError:
        return 0


def _blocks() -> set[int]:
    """Addresses of this process's own memory in blocks of the size of a huge page."""
    found: set[int] = set()
    if size := _huge_page():
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
            place, rights, _, _, inode = line.split()[:5]
            if rights == "rw-p" and inode == "0":
                start, end = (int(address, 16) for address in place.split("-"))
                found.update(range(-(-start // size) * size, end - size + 1, size))
    return found
