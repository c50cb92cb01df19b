"""Timing of sides in interleaved rounds; medians and ratios."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Setting = TypeVar("Setting")


def interleaved(
    work: Mapping[Setting, Callable[[], object]], rounds: int, *, quiet: bool = False
) -> dict[Setting, list[float]]:
    """Times each side once per round, every other round in reverse order.

    Args:
        work: Work of each side, warmed up before.
        rounds: Number of rounds.
        quiet: Do not print a line per round.

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

    Args:
        work: Work of each setting.
        repeats: Timed runs of each.
        slack: Return the first setting that takes at most this share longer than the fastest.
        seconds: Repeat no more after so long; each setting is timed once at least.
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

    Args:
        times: Seconds of each round, by side.
        tokens: Finished tokens per round, by side.
        rows: Sentences per round.
        base: Side that the others are compared with.

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
