"""Memory that glibc keeps for the next allocation, or returns to the system."""

import sys

import pytest

from tests.commands import python

# A process of its own: pytest's has freed blocks of its own, and parameters set by other tests.
PROGRAM = """
import resource
import sys
from pathlib import Path
import torch
from transferry.build_model import allocator

def mebibytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20

def kept(size):
    "Resident memory that a freed tensor of float32 leaves, in MiB."
    before = mebibytes()
    torch.ones(size << 18)
    return mebibytes() - before

kept(20)  # once glibc has seen such a block freed, it keeps the next
with getattr(allocator, sys.argv[1])():
    print(kept(int(sys.argv[2])))
print(kept(64))
before = mebibytes()
blocks = [torch.ones(1 << 18) for _ in range(32)]  # in the heap, less than is trimmed
del blocks
print(mebibytes() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the allocator of glibc is Linux's")
@pytest.mark.parametrize(
    ("name", "size", "keeps"),
    [("freed_memory_kept", 64, True), ("large_blocks_returned", 16, False)],
)
def test_freed_memory_is_kept_or_returned(name: str, size: int, keeps: bool) -> None:
    ran = python("-c", PROGRAM, name, size)
    meanwhile, after, small = map(float, ran.stdout.split())
    if keeps:
        assert meanwhile >= size - 2
    else:
        assert meanwhile < 2
    assert after < 2  # a large block is returned at once, as without
    assert small > 16  # and small ones are kept, as without
