"""Training log: metrics.jsonl with one JSON object per line, and a plot of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from transferry.runtime.files import atomic_file, read_bytes, unwritable

METRICS = "metrics.jsonl"
CURVES = "curves.png"


class Metrics:
    """Appends records to RUN/metrics.jsonl.

    After a kill the file may be ahead of the saved state or end in half a line. Opening it at
    `step` drops later records and the final scores of an earlier end, so that a resumed run leaves
    the same file as an uninterrupted one.
    """

    def __init__(self, folder: Path, step: int) -> None:
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
                if record["step"] > step or "final_loss" in record:
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
        """Plots loss, and BLEU if there is any, over steps into RUN/curves.png."""
        from matplotlib.figure import Figure

        def series(name: str) -> tuple[list[float], list[float]]:
            rows = [record for record in self.records if name in record]
            return [row["step"] for row in rows], [row[name] for row in rows]

        figure = Figure(figsize=(8, 4.5), layout="constrained")
        losses = figure.subplots()
        losses.plot(*series("train_loss"), color="tab:blue", alpha=0.5, label="training, smoothed")
        losses.plot(*series("valid_loss"), color="tab:blue", marker="o", label="validation")
        losses.set_xlabel("step")
        losses.set_ylabel("loss per token (nats)")
        steps, bleu = series("valid_bleu")
        if steps:
            scores = losses.twinx()
            scores.plot(steps, bleu, color="tab:orange", marker="s", label="validation BLEU")
            scores.set_ylabel("sacreBLEU, greedy")
            scores.set_ylim(bottom=0)
        figure.legend(loc="outside upper center", ncols=3)
        with atomic_file(self.path.with_name(CURVES)) as file:
            figure.savefig(file, format="png", dpi=120)
