"""The number of torch's threads, which belongs to a whole worker of pytest."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def torch_threads(count: int | None = None) -> Iterator[None]:
    """Sets the number of threads, if one is given, and restores the number before at the end."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
