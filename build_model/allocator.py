"""When memory is freed: by glibc's allocator (others are left alone), and by Python's collector.

The results are the same.
"""

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Parameters of mallopt in malloc.h, and the values that glibc comes to by itself.
TRIM_THRESHOLD, MMAP_THRESHOLD, MMAP_MAX = -1, -3, -4
USUAL = {TRIM_THRESHOLD: 64 << 20, MMAP_THRESHOLD: 32 << 20, MMAP_MAX: 65536}


@contextmanager
def large_blocks_returned() -> Iterator[None]:
    """Meanwhile every freed block of 1 MiB or more is returned to the system.

    By itself glibc soon keeps blocks of up to 32 MiB. Opening a session of 651 MiB of weights, each
    of 16 to 46 MiB, then took 870 MiB in place of 678.
    """
    with _options({MMAP_THRESHOLD: 1 << 20}):
        yield


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Meanwhile freed blocks of every size are kept for the next allocation.

    By itself glibc maps a block above 32 MiB anew each time, and the system fills each of its pages
    with zeros. A step of training allocates dozens of such blocks: logits, softmax, gradients.
    """
    try:
        with _options({MMAP_MAX: 0, TRIM_THRESHOLD: -1}):  # no mapped blocks, no trimming
            yield
    finally:
        _glibc("malloc_trim", 0)


def return_memory() -> None:
    """Frees memory after a phase of work: object cycles, and free heap between used blocks."""
    gc.collect()
    _glibc("malloc_trim", 0)


@contextmanager
def rarely_collected() -> Iterator[None]:
    """Meanwhile Python seldom looks for unused cycles of objects: an eighth of a trace's time.

    GPT-2's shape then takes 4 MB more.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(50_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


@contextmanager
def _options(values: dict[int, int]) -> Iterator[None]:
    """Sets parameters of mallopt; afterwards all have their usual values.

    All, since setting one ends glibc's own adaptation of the others.
    """
    for parameter, value in values.items():
        _glibc("mallopt", parameter, value)
    try:
        yield
    finally:
        for parameter, value in USUAL.items():
            _glibc("mallopt", parameter, value)


def _glibc(name: str, *arguments: int) -> None:
    """Calls a function of glibc's allocator; of another one, nothing."""
    if sys.platform == "linux" and (function := getattr(ctypes.CDLL(None), name, None)):
        function(*arguments)
