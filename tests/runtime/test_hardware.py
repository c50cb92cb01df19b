import mmap
import platform
import re
import threading
from pathlib import Path

import numpy as np
import pytest

from transferry.runtime import hardware
from transferry.runtime.hardware import (
    HUGE_PAGES,
    cpu_name,
    huge_pages,
    instruction_sets,
    usable_cores,
)


def huge_page() -> int:
    """Bytes of a huge page; skips the test where Linux makes none of memory in use."""
    if not (HUGE_PAGES / "enabled").exists():
        pytest.skip("this system has no transparent huge pages")
    size = int((HUGE_PAGES / "hpage_pmd_size").read_text())
    with some_memory(2 * size) as memory:
        memory[:: mmap.PAGESIZE] = bytes(2 * size // mmap.PAGESIZE)
        found = np.frombuffer(memory, np.uint8)
        start = -found.ctypes.data % size
        del found
        try:
            memory.madvise(25, start, size)
        except OSError as error:
            pytest.skip(f"Linux makes no huge page of memory in use: {error}")
    return size


def some_memory(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def in_use(name: str) -> int:
    """Bytes of this process's memory of a kind."""
    found = re.search(rf"{name}: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
    assert found
    return int(found[1]) * 1024


def test_filled_memory_becomes_huge_pages_and_no_memory_is_added(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hardware, "FIRST_BATCHES", 0.5)
    size = huge_page()
    huge, others = in_use("AnonHugePages"), threading.enumerate()
    with huge_pages():
        memory = some_memory(8 * size)
        touched = [*range(0, 4 * size, mmap.PAGESIZE), *range(4 * size, 8 * size, size)]
        for place in touched:
            memory[place] = 1
        used = in_use("Anonymous")
    (thread,) = set(threading.enumerate()) - set(others)
    while in_use("AnonHugePages") - huge < 3 * size:
        assert thread.is_alive()
    buffers = some_memory(4 * size)
    buffers[:: mmap.PAGESIZE] = bytes(4 * size // mmap.PAGESIZE)
    thread.join()
    assert in_use("AnonHugePages") - huge >= 6 * size
    assert in_use("Anonymous") - used < 5 * size
    assert memory[:].count(1) == len(touched)


def test_forbidden_huge_pages_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    (tmp_path / "hpage_pmd_size").write_text("2097152\n")
    monkeypatch.setattr(hardware, "HUGE_PAGES", tmp_path)
    monkeypatch.setattr(threading, "Thread", None)
    with huge_pages():
        memory = some_memory(1 << 23)
        memory[::4096] = bytes(1 << 11)
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "processor : 0\nflags\t\t: fpu avx2 fma avx512_vnni\n\nflags : avx2\n",
            ("avx2", "fma", "avx512_vnni"),
        ),
        ("Features\t: fp asimd asimddp i8mm\n", ("asimddp", "i8mm")),
        (None, ()),
    ],
)
def test_reads_the_instruction_sets_of_x86_and_arm(
    text: str | None, found: tuple[str, ...], tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    assert instruction_sets(tmp_path / "cpuinfo") == found


def test_counts_at_least_one_core() -> None:
    assert usable_cores() >= 1


def test_names_the_cpu_or_the_machine_type(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nmodel name\t: Xeon(R) @ 2.0: GHz\nmodel name : other\n")
    assert cpu_name(cpuinfo) == "Xeon(R) @ 2.0: GHz"
    cpuinfo.write_text("Features\t: fp\n")
    assert cpu_name(cpuinfo) == platform.machine()
    cpuinfo.unlink()
    assert cpu_name(cpuinfo) == platform.machine()
