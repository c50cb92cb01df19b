"""The output layer of a decoder whose cache lies in place: tokens and scores of hidden states.

Each thread has memory of its own for it, where the decoder leaves the hidden states of a step. It
is kept from step to step and from batch to batch: memory of which the system hands out page by page
is dear.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnxruntime import OrtValue

from transferry.runtime.bundle import Bundle, Variant
from transferry.runtime.decoder import Forbid
from transferry.runtime.graph_runner import BoundCall, GraphRunner, Rows
from transferry.runtime.logits import SEGMENT, Normaliser, Peaks, log_sum_exp, normalise
from transferry.runtime.screen import Screen

# Sums of exponentials that float32 holds in full precision, their largest terms included.
SMALLEST_SUM, LARGEST_SUM = 1e-30, 1e38

Floats = NDArray[np.floating[Any]]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class _Bound:
    """The graphs bound to the hidden states of so many rows."""

    hidden: Rows
    calls: Mapping[str, BoundCall]

    def run(self, name: str) -> Mapping[str, NDArray[Any]]:
        """Runs a graph and returns what it gives, by role; the next run writes over it."""
        self.calls[name].run()
        return self.calls[name].host


class _Workspace(threading.local):
    """The memory of a thread.

    Attributes:
        bound: By the number of rows, all in the same memory.
        hidden: [rows, d_model], on the device.
        logits: [rows, vocabulary], rough ones too, since either is wanted.
    """

    def __init__(self) -> None:
        self.bound: dict[int, _Bound] = {}
        self.hidden: OrtValue | None = None
        self.logits = np.empty((0, 0), np.float32)


class OutputLayer:
    """Makes tokens and scores of hidden states; may be used by several threads at once."""

    def __init__(
        self, bundle: Bundle, variant: Variant, runners: Mapping[str, GraphRunner]
    ) -> None:
        """Reads what screening needs, where the variant is screened.

        Args:
            bundle: Where the variant lies.
            variant: One whose cache lies in place.
            runners: Its graphs, by name.
        """
        self._runners = runners
        self._own = _Workspace()
        self.vocabulary_size = int(variant.graphs["head"].tensor("logits").shape[-1])
        self.screen = None
        if variant.screen:
            parts = {name: stored.read(bundle.folder) for name, stored in variant.screen.items()}
            self.screen = Screen(**parts)

    def hidden(self, rows: int) -> Rows:
        """Returns where this thread's steps of so many rows leave their hidden states."""
        own, decoder = self._own, self._runners["decoder"]
        if rows > len(own.logits):
            width = int(decoder.graph.tensor("hidden").shape[-1])
            own.bound.clear()
            own.hidden = decoder.zeros("hidden", (rows, width))
            own.logits = np.empty((rows, self.vocabulary_size), np.float32)
        assert own.hidden is not None
        return Rows(own.hidden, 0, rows)

    def logits(self, rows: int) -> Floats:
        """Returns the logits of the last step [rows, vocabulary]; the next writes over them."""
        return self._bound(rows).run("head")["logits"]

    def likeliest(self, rows: int, forbid: Forbid | None) -> Integers:
        """Returns the likeliest tokens after the last step [rows]; see `GreedyDecoder`."""
        if "best" in self._runners and forbid is None:
            best = np.empty(rows, np.int64)
            self._runners["best"].run({"hidden": [self.hidden(rows)]}, host={"best": best})
            return best
        bound = self._bound(rows)
        if self.screen is None:
            logits = bound.run("head")["logits"]
            usable: NDArray[np.bool_] | bool = True
            if forbid is not None:  # which may hide a score that is not finite
                usable = np.isfinite(logits.max(axis=1))
                forbid(logits)
            best = logits.argmax(axis=1)
            usable &= np.isfinite(logits[np.arange(len(best)), best])
            return np.where(usable, best, -1)
        rough, peaks = bound.run("rough")["rough"], None
        if forbid is not None:
            forbid(rough)
        else:
            peaks = Peaks(bound.run("peaks")["peaks"], SEGMENT)
        return self.screen.likeliest(bound.hidden.numpy(), rough, peaks)

    def normalise(self, logits: Floats) -> Normaliser:
        """Normalises logits [rows, vocabulary]; see `NormalisingDecoder.normalise`."""
        if self._runners["decoder"].on_device:
            return normalise(logits)
        bound = self._bound(len(logits))
        if _address(logits) != _address(self._own.logits):  # not those of the last step
            self._own.logits[: len(logits)] = logits
        found = bound.run("sums")
        sums, peaks = found["sums"], Peaks(found["peaks"], SEGMENT)
        if sums.min() > SMALLEST_SUM and sums.max() < LARGEST_SUM:
            return Normaliser(np.log(sums, dtype=np.float64), peaks)
        # Exponentials of the logits as they are: where float32 could not hold them, the slow way.
        extreme = ~((sums > SMALLEST_SUM) & (sums < LARGEST_SUM))
        result = np.empty(len(sums))
        result[extreme] = log_sum_exp(logits[extreme])
        result[~extreme] = np.log(sums[~extreme], dtype=np.float64)
        return Normaliser(result, peaks)

    def _bound(self, rows: int) -> _Bound:
        """Returns what is bound to the hidden states of so many rows in this thread's memory."""
        own, sums = self._own, self._runners["sums"]
        hidden, logits = self.hidden(rows), own.logits[:rows]
        if rows not in own.bound:
            segments = int(sums.graph.tensor("peaks").shape[-1])
            read = {"hidden": hidden, "logits": sums.value(logits)}
            written = {
                "logits": logits,
                "rough": logits,
                "sums": np.empty(rows, np.float32),
                "peaks": np.empty((rows, segments), np.float32),
            }
            calls = {}
            # Where logits are made on a device the host sums them up.
            on_host = () if sums.on_device else ("rough", "sums", "peaks")
            for name in {"head", *on_host} & self._runners.keys():
                runner = self._runners[name]
                calls[name] = runner.bind(
                    fixed={one.role: [read[one.role]] for one in runner.graph.inputs},
                    host={one.role: written[one.role] for one in runner.graph.outputs},
                )
            own.bound[rows] = _Bound(hidden, calls)
        return own.bound[rows]


def _address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
