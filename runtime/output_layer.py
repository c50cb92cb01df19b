"""The output layer of a decoder whose cache lies in place: tokens and scores of hidden states.

Each thread has memory of its own for it, where the decoder leaves the hidden states of a step. It
is kept from step to step and from batch to batch: memory of which the system hands out page by page
is dear.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnxruntime import OrtValue

from transferry.runtime.bundle import Bundle, Variant
from transferry.runtime.decoder import Forbid, Ranked
from transferry.runtime.graph_runner import BoundCall, GraphRunner, Rows
from transferry.runtime.logits import SEGMENT, Normaliser, Peaks, log_sum_exp, normalise
from transferry.runtime.pool import Pool
from transferry.runtime.screen import Screen

# Sums of exponentials that float32 holds in full precision, their largest terms included.
SMALLEST_SUM, LARGEST_SUM = 1e-30, 1e38
# Rows, and tokens for each thread of a session, that a product of some tokens alone has at least.
# onnxruntime sums up the product of a single row, and those of 64 columns or fewer, in another
# order; so that else the score of a row would depend on the others.
FEWEST_ROWS, FEWEST_TOKENS = 2, 128

Floats = NDArray[np.floating[Any]]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Part:
    """What the output layer has of some tokens.

    Attributes:
        values: Its tensors, on the device, of `columns` tokens.
        columns: How many tokens are scored.
        count: How many of them are wanted; the others come behind them.
    """

    values: Sequence[OrtValue]
    columns: int
    count: int


@dataclass(frozen=True)
class _Bound:
    """The graphs bound to the hidden states of so many rows."""

    hidden: Rows
    calls: Mapping[str, BoundCall]

    def run(self, name: str) -> Mapping[str, NDArray[Any]]:
        """Runs a graph and returns what it gives, by role; the next run writes over it."""
        self.calls[name].run()
        return self.calls[name].host


class _Workspace:
    """The memory of a thread.

    Attributes:
        bound: By the number of rows, all in the same memory.
        ranks: The graph that ranks tokens, bound to it, by the number of rows and of tokens.
        hidden: [rows, d_model], on the device.
        stepped: Rows that the last step left there, those of empty slots included.
        logits: [rows, vocabulary], rough ones too, since either is wanted.
        part: Those of some tokens alone [rows * tokens].
    """

    def __init__(self) -> None:
        self.bound: dict[int, _Bound] = {}
        self.ranks: dict[tuple[int, int], BoundCall] = {}
        self.hidden: OrtValue | None = None
        self.stepped = 0
        self.logits = np.empty((0, 0), np.float32)
        self.part = np.empty(0, np.float32)


class _Own(threading.local):
    """What a thread has borrowed, and gives back when it ends."""

    def __init__(self, pool: Pool[_Workspace]) -> None:
        self.lent = pool.lend(None, _Workspace)


class OutputLayer:
    """Makes tokens and scores of hidden states; may be used by several threads at once."""

    def __init__(
        self, bundle: Bundle, variant: Variant, runners: Mapping[str, GraphRunner], threads: int
    ) -> None:
        """Reads what screening needs, where the variant is screened.

        Args:
            bundle: Where the variant lies.
            variant: One whose cache lies in place.
            runners: Its graphs, by name.
            threads: Of their sessions.
        """
        self._runners = runners
        self._lent = _Own(Pool())
        self.ranks = "rank" in runners
        self._threads = threads
        self.vocabulary_size = int(variant.graphs["head"].tensor("logits").shape[-1])
        self.screen = None
        if variant.screen:
            parts = {name: stored.read(bundle.folder) for name, stored in variant.screen.items()}
            self.screen = Screen(**parts)

    @property
    def _own(self) -> _Workspace:
        return self._lent.lent.thing

    def hidden(self, rows: int) -> Rows:
        """Returns where this thread's next step, of so many rows, leaves its hidden states."""
        own, decoder = self._own, self._runners["decoder"]
        own.stepped = rows
        if own.hidden is None or rows > own.hidden.shape()[0]:
            width = int(decoder.graph.tensor("hidden").shape[-1])
            own.bound.clear()
            own.ranks.clear()
            own.hidden = decoder.zeros("hidden", (max(rows, FEWEST_ROWS), width))
        return Rows(own.hidden, 0, rows)

    def logits(self, rows: int) -> Floats:
        """Returns the logits of the last step [rows, vocabulary]; the next writes over them."""
        return self._bound(rows).run("head")["logits"]

    def part(self, tokens: Integers) -> Part:
        """Takes what scoring some tokens needs [tokens]."""
        runner = self._runners["part"]
        columns = max(len(tokens), FEWEST_TOKENS * self._threads)
        padded = np.pad(tokens, (0, columns - len(tokens)), mode="edge")
        values = runner.run({"tokens": [runner.value(padded)]}, "part")
        return Part(values, columns, len(tokens))

    def part_logits(self, rows: int, part: Part) -> Floats:
        """Returns some tokens' logits of the last step [rows, tokens], as `logits` does."""
        own, more = self._own, max(rows, FEWEST_ROWS)
        assert own.hidden is not None
        if own.part.size < more * part.columns:
            own.part = np.empty(more * part.columns, np.float32)
        logits = own.part[: more * part.columns].reshape(more, part.columns)
        inputs = {"hidden": [Rows(own.hidden, 0, more)], "part": part.values}
        self._runners["narrow"].run(inputs, host={"logits": logits})
        return logits[:rows, : part.count]

    def likeliest(self, rows: int, forbid: Forbid | None) -> Integers:
        """Returns the likeliest tokens after the last step [rows]; see `GreedyDecoder`."""
        if self.ranks and forbid is None:
            ranked = self.rank(rows, 1)
            return np.where(np.isfinite(ranked.log_sum_exp), ranked.tokens[:, 0], -1)
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

    def rank(self, rows: int, count: int) -> Ranked:
        """Returns the likeliest tokens after the last step; see `RankingDecoder.rank`."""
        own, runner = self._own, self._runners["rank"]
        bound, hidden = own.stepped, own.hidden
        assert hidden is not None
        if (bound, count) not in own.ranks:
            # How many are wanted is read on the host, whatever the device.
            wanted = OrtValue.ortvalue_from_numpy(np.array([count]))
            own.ranks[bound, count] = runner.bind(
                fixed={"hidden": [Rows(hidden, 0, bound)], "count": [wanted]},
                host={
                    "top_logits": np.empty((bound, count), np.float32),
                    "top_tokens": np.empty((bound, count), np.int64),
                    "relative_sums": np.empty(bound, np.float32),
                },
            )
        call = own.ranks[bound, count]
        call.run()
        logits, tokens, sums = (
            call.host[role][:rows] for role in ("top_logits", "top_tokens", "relative_sums")
        )
        return Ranked(logits, tokens, logits[:, 0] + np.log(sums, dtype=np.float64))

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
        hidden = self.hidden(rows)
        if rows > len(own.logits):
            own.bound.clear()
            own.logits = np.empty((hidden.buffer.shape()[0], self.vocabulary_size), np.float32)
        logits = own.logits[:rows]
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
