"""How much of the time a GPU is at work, as its driver tells."""

from __future__ import annotations

import importlib
import statistics
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self


def gpu_share(device: int = 0) -> Callable[[], float]:
    """Returns what asks NVML for the share of the last moments in which a kernel ran, 0 to 1.

    Raises:
        ImportError: nvidia-ml-py is missing.
    """
    pynvml: Any = importlib.import_module("pynvml")
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(device)
    return lambda: float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100


class Busy:
    """Asks again and again while it is entered, in a thread of its own."""

    def __init__(self, share: Callable[[], float], every: float = 0.05) -> None:
        """Takes what is asked, and how often, in seconds."""
        self._share, self._every = share, every
        self._shares: list[float] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)

    def _ask(self) -> None:
        while not self._over.wait(self._every):
            self._shares.append(self._share())

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()

    @property
    def mean(self) -> float | None:
        """The mean of all answers; None where nothing was asked in so short a time."""
        return round(statistics.fmean(self._shares), 3) if self._shares else None
