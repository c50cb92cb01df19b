"""What does a job cost compared with the bare engine?

    python benchmarks/job_cost.py BUNDLE TEXT [--rows 8000] [--rounds 9] [--beam 1]
        [--chunk-rows 16384] [--long 1000000 [--plot memory.png]]

A job reads, hashes and writes rows, syncs chunks and joins them; the bare engine answers the same
lines from a list into a list. Rounds are interleaved; `ratio` is the job's rows per second over the
engine's. With --long, one job over so many lines of random length, made of words of TEXT, follows
in a process of its own, and its memory is sampled every second. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rounds import compare, interleaved
from sentences import read_sentences
from transferry.build_model.train.metrics import PLOT_STYLE
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.engine.engine import Engine
from transferry.runtime.errors import TransferryError
from transferry.runtime.hardware import cpu_name, usable_cores
from transferry.runtime.jobs.job import Job
from transferry.runtime.jobs.job_options import JobOptions

# Share of the memory curve before the buffers have seen their longest rows.
WARM_UP = 0.2
MOST_WORDS = 40


def cost(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Times the job and the engine in interleaved rounds."""
    texts = read_sentences(arguments.text, arguments.rows)
    source, out = folder / "source.txt", folder / "answers.jsonl"
    source.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    engine = Engine.load(arguments.bundle)
    options = JobOptions(
        force=True, chunk_rows=arguments.chunk_rows, generation={"beam": arguments.beam}
    )
    search = GenerationOptions(**{**engine.bundle.manifest.generation, "beam": arguments.beam})
    work: dict[str, Callable[[], object]] = {
        "engine": lambda: list(engine.generate(texts, search)),
        "job": lambda: Job(engine, source, out, options).run(),
    }
    tokens = {name: len(texts) for name in work}  # rows, which are the same on both sides
    for run in work.values():
        run()
    found = compare(interleaved(work, arguments.rounds), tokens, len(texts), "engine")
    return {name: found[name] for name in ("ratio", "ratio_range", "sentences_per_second")}


def memory(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Runs one long job and samples its memory."""
    words = " ".join(read_sentences(arguments.text)).split()
    source, out = folder / "long.txt", folder / "long.jsonl"
    random_ = random.Random(0)
    with source.open("w", encoding="utf-8") as file:
        for _ in range(arguments.long):
            first = random_.randrange(len(words) - MOST_WORDS)
            file.write(" ".join(words[first : first + random_.randint(1, MOST_WORDS)]) + "\n")
    command = [
        *(sys.executable, "-m", "transferry.cli", "run", str(arguments.bundle), str(source)),
        *("--out", str(out), "--beam", str(arguments.beam), "--quiet"),
        *("--chunk-rows", str(arguments.chunk_rows)),
    ]
    started = time.monotonic()
    curve: list[tuple[float, float]] = []
    with subprocess.Popen(command) as process:
        while process.poll() is None:
            if (megabytes := resident(process.pid)) is not None:
                curve.append((round(time.monotonic() - started, 1), megabytes))
            time.sleep(1)
    if process.returncode:
        raise SystemExit(f"the job failed with exit code {process.returncode}")
    seconds = time.monotonic() - started
    later = [megabytes for at, megabytes in curve if at > WARM_UP * seconds]
    if arguments.plot:
        draw(curve, arguments.plot)
    return {
        "rows": arguments.long,
        "seconds": round(seconds, 1),
        "rows_per_second": round(arguments.long / seconds, 1),
        "peak_megabytes": max(megabytes for _, megabytes in curve),
        "after_warm_up_megabytes": [min(later), max(later)],
        "curve": curve[:: max(1, len(curve) // 50)],
    }


def resident(process: int) -> float | None:
    """Memory of a process in MB; None if it has ended."""
    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return None
    found = [line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:")]
    return round(int(found[0]) / 1e3, 1) if found else None


def draw(curve: Sequence[tuple[float, float]], path: Path) -> None:
    """Plots memory over time."""
    from matplotlib import style
    from matplotlib.figure import Figure

    style.use(["default", PLOT_STYLE])
    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([at / 60 for at, _ in curve], [megabytes for _, megabytes in curve])
    axes.set(xlabel="minutes", ylabel="memory, MB", ylim=(0, None))
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--rows", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--beam", type=int, default=1)
    parser.add_argument("--chunk-rows", type=int, default=JobOptions().chunk_rows)
    parser.add_argument("--long", type=int, default=0, metavar="ROWS")
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    arguments = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as name:
            record = {
                "cost": cost(arguments, Path(name)) if arguments.rounds else None,
                "memory": memory(arguments, Path(name)) if arguments.long else None,
                "cpu": cpu_name(),
                "cores": usable_cores(),
            }
    except TransferryError as error:
        parser.exit(error.exit_code, f"{parser.prog}: {error}\n")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
