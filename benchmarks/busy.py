"""GPU utilisation, as reported by NVML."""

from __future__ import annotations

import importlib
import statistics
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self


def gpu_share(device: int = 0) -> Callable[[], float]:
    """Returns a function that asks NVML for the recent share of time with a kernel running, 0 to 1.

    Raises:
        ImportError: nvidia-ml-py is missing.
    """
    pynvml: Any = importlib.import_module("pynvml")
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(device)
    return lambda: float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100


class Busy:
    """Samples a share in a background thread while the context is active."""

    def __init__(self, share: Callable[[], float], every: float = 0.05) -> None:
        """Takes the function to sample and the interval in seconds."""
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
        """Mean of all samples; None without samples."""
        return round(statistics.fmean(self._shares), 3) if self._shares else None
