"""Training log: metrics.jsonl with one JSON object per line, and a plot of it."""

import json
from collections.abc import Container
from pathlib import Path
from typing import Any

import msgspec

from transferry.runtime.io.atomic import atomic_file, unwritable
from transferry.runtime.io.whole import read_bytes

METRICS = "metrics.jsonl"
CURVES = "curves.png"
# Of every figure of the project, with matplotlib's defaults beneath, so that a user's own style
# has no effect.
PLOT_STYLE = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.titlesize": "medium",
    "font.size": 9.5,
    "grid.color": "#dcdcd6",
    "grid.linewidth": 0.7,
    "legend.fontsize": 9.5,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
}
_LOSS, _BLEU, _RATE = "#2563a8", "#b4690e", "#8a5a9e"


class Metrics:
    """Appends records to CHECKPOINT/metrics.jsonl.

    After a kill the file may be ahead of the saved state or end in half a line. Opening it at
    `step` drops later records, validations that the state lacks and earlier final scores, so that a
    resumed training leaves the same file as an uninterrupted one.
    """

    def __init__(self, folder: Path, step: int, validated: Container[int] = ()) -> None:
        self.path = folder / METRICS
        self.records: list[dict[str, Any]] = []
        if step and self.path.exists():
            for line in read_bytes(self.path).splitlines():
                try:
                    record = msgspec.convert(json.loads(line), dict[str, int | float])
                except (ValueError, RecursionError):
                    break
                if "step" not in record:
                    break
                unsaved = "valid_loss" in record and record["step"] not in validated
                if record["step"] > step or unsaved or "final_loss" in record:
                    break
                self.records.append(record)
        with atomic_file(self.path) as file:
            for record in self.records:
                file.write(json.dumps(record).encode() + b"\n")

    def add(self, **record: float) -> None:
        """Appends one record, which must have a "step".

        Raises:
            InputError: The disk is full.
        """
        self.records.append(record)
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise unwritable(self.path, error, kept="", otherwise=" and resume") from error

    def draw(self) -> None:
        """Plots loss, BLEU if any, and learning rate over steps into curves.png."""
        from matplotlib import style
        from matplotlib.figure import Figure

        def series(name: str) -> tuple[list[float], list[float]]:
            rows = [record for record in self.records if name in record]
            return [row["step"] for row in rows], [row[name] for row in rows]

        with style.context(["default", PLOT_STYLE]):
            figure = Figure(figsize=(8, 5.2), layout="constrained")
            losses, rates = figure.subplots(2, sharex=True, height_ratios=[4, 1])
            losses.plot(*series("train_loss"), color=_LOSS, alpha=0.5, label="training loss")
            losses.plot(*series("valid_loss"), color=_LOSS, marker="o", label="validation loss")
            losses.set_ylabel("loss, nats per token")
            losses.set_ylim(bottom=0)
            steps, bleu = series("valid_bleu")
            if steps:
                scores = losses.twinx()
                scores.plot(steps, bleu, color=_BLEU, marker="s", label="validation BLEU")
                scores.set_ylabel("sacreBLEU, greedy")
                scores.set_ylim(bottom=0)
                scores.grid(visible=False)
            rates.plot(*series("learning_rate"), color=_RATE)
            rates.set_ylabel("learning rate")
            rates.set_ylim(bottom=0)
            rates.set_xlabel("step")
            rates.set_xlim(left=0)
            figure.suptitle(f"Training of {self.path.parent.absolute().name}", x=0.01, ha="left")
            figure.legend(loc="outside upper right", ncols=3)
            with atomic_file(self.path.with_name(CURVES)) as file:
                figure.savefig(file, format="png", dpi=120)
