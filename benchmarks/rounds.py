"""Timing of sides in interleaved rounds, medians and ratios, and the machine of a measurement."""

from __future__ import annotations

import importlib.metadata
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from transferry.runtime.hardware import cpu_name, instruction_sets, usable_cores

Setting = TypeVar("Setting")


def interleaved(
    work: Mapping[Setting, Callable[[], object]], rounds: int, *, quiet: bool = False
) -> dict[Setting, list[float]]:
    """Times each side once per round, every other round in reverse order; warmed up before.

    Returns:
        Seconds of each round, by side.
    """
    times: dict[Setting, list[float]] = {name: [] for name in work}
    for number in range(rounds):
        for name in list(work)[:: -1 if number % 2 else 1]:
            started = time.perf_counter()
            work[name]()
            times[name].append(time.perf_counter() - started)
        if not quiet:
            now = ", ".join(f"{name} {values[-1]:.2f} s" for name, values in times.items())
            print(f"round {number + 1}: {now}", flush=True)
    return times


def fastest(
    work: Mapping[Setting, Callable[[], object]],
    repeats: int = 3,
    slack: float = 0.0,
    seconds: float = math.inf,
) -> Setting:
    """Warms up and times all settings; returns the fastest.

    The first setting that takes at most `slack`, a share, longer than the fastest. After so many
    seconds none is repeated, but each is timed once at least.
    """
    for function in work.values():
        function()
    times, started = dict.fromkeys(work, math.inf), time.perf_counter()
    for _ in range(repeats):
        for setting, (took,) in interleaved(work, 1, quiet=True).items():
            times[setting] = min(times[setting], took)
        if time.perf_counter() - started > seconds:
            break
    longest = (1 + slack) * min(times.values())
    return next(setting for setting, seconds in times.items() if seconds <= longest)


def compare(
    times: Mapping[str, list[float]], tokens: Mapping[str, int], rows: int, base: str
) -> dict[str, Any]:
    """Summarises the rounds.

    Returns:
        `ratio` is each side's tokens per second over the base's, by median time; `ratio_range` the
        smallest and largest ratio of a single round.
    """
    medians = {name: statistics.median(values) for name, values in times.items()}

    def ratio(name: str, seconds: Mapping[str, float]) -> float:
        return (tokens[name] / seconds[name]) / (tokens[base] / seconds[base])

    others = [name for name in times if name != base]
    each = {
        name: [
            ratio(name, {name: mine, base: theirs})
            for mine, theirs in zip(times[name], times[base], strict=True)
        ]
        for name in others
    }
    return {
        "ratio": {name: round(ratio(name, medians), 3) for name in others},
        "ratio_range": {
            name: [round(min(values), 3), round(max(values), 3)] for name, values in each.items()
        },
        "tokens_per_second": {name: round(tokens[name] / medians[name]) for name in times},
        "sentences_per_second": {name: round(rows / medians[name], 1) for name in times},
        "tokens": dict(tokens),
    }


def processor() -> str:
    """Returns the processor and its instruction sets, for a line of results."""
    return " ".join([cpu_name(), *instruction_sets()])


def environment(*packages: str) -> dict[str, Any]:
    """Returns the processor, its instruction sets, the cores, and versions of packages."""
    from transferry.runtime.ort.graph_runner import RUNTIMES

    # Its distribution is onnxruntime-gpu on some systems.
    versions = {"onnxruntime": RUNTIMES["onnxruntime"].version()}
    for name in ("transferry", "numpy", *packages):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "missing"
    return {
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "instruction_sets": instruction_sets(),
        "versions": versions,
    }
