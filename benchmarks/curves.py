"""Throughput by batch size and cost by length, measured and plotted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rounds import compare, interleaved
from sentences import search_options
from sides import Tuned
from transferry.build_model.train.metrics import PLOT_STYLE
from transferry.runtime.decoding.generation_options import GenerationOptions

BATCHES = (1, 4, 16, 64, 128, 256)
LENGTHS = (8, 16, 32, 64, 128)
ROUNDS = 3


def measure_curves(
    tuned: Mapping[str, Tuned],
    texts: Sequence[str],
    options: GenerationOptions,
    fixed: Callable[[int], Sequence[str]],
    longest: int,
) -> dict[str, dict[str, dict[int, float]]]:
    """Measures both curves, in interleaved rounds at each point.

    Args:
        tuned: The sides.
        texts: Sentences for the curve by batch size.
        options: Options of their search.
        fixed: Returns sentences of a length, for the curve by length; answers are as long.
        longest: Positions of the model.

    Returns:
        By curve and side: tokens per second by batch size, milliseconds per sentence by length.
    """
    by_batch: dict[str, dict[int, float]] = {name: {} for name in tuned}
    by_length: dict[str, dict[int, float]] = {name: {} for name in tuned}

    def point(
        texts: Sequence[str], options: GenerationOptions, rows: Mapping[str, int]
    ) -> dict[str, Any]:
        work = {
            name: partial(one.answer, texts, options, rows[name]) for name, one in tuned.items()
        }
        tokens = {name: sum(len(one.tokens) for one in run()) for name, run in work.items()}
        times = interleaved(work, ROUNDS, quiet=True)
        return compare(times, tokens, len(texts), next(iter(tuned)))

    for batch in BATCHES:
        rows = {"engine": batch * options.beam, "ctranslate2": batch}
        for name, value in point(texts, options, rows)["tokens_per_second"].items():
            by_batch[name][batch] = value
    rows = {name: one.batch_rows for name, one in tuned.items()}
    for length in (length for length in LENGTHS if length <= longest):
        search = search_options(options.beam, length, length)
        for name, value in point(fixed(length), search, rows)["sentences_per_second"].items():
            by_length[name][length] = round(1000 / value, 3)
    return {"tokens_per_second_by_batch": by_batch, "milliseconds_by_length": by_length}


def plot_curves(cells: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Plots the curves of all cells that have some."""
    from matplotlib import style
    from matplotlib.figure import Figure

    style.use(["default", PLOT_STYLE])
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    panels = figure.subplots(1, 2)
    for color, cell in enumerate(cell for cell in cells if "curves" in cell):
        for axes, curves in zip(panels, cell["curves"].values(), strict=True):
            for name, line in (("engine", "-"), ("ctranslate2", "--")):
                points = curves[name]
                label = f"{name}, {cell['kinds'][name]}"
                axes.plot(
                    list(points), list(points.values()), f"{line}o", color=f"C{color}", label=label
                )
    left, right = panels
    left.set_xscale("log", base=2)
    left.set(xlabel="sentences per batch", ylabel="tokens per second", title=title)
    right.set(xlabel="tokens of source and answer", ylabel="milliseconds per sentence")
    for axes in panels:
        axes.set_ylim(0)
        axes.legend()
    figure.savefig(path, dpi=120)
