"""What does a job cost compared with the bare engine?

    python benchmarks/job_cost.py BUNDLE TEXT [--rows 8000] [--rounds 9] [--beam 1]

A job reads, hashes and writes rows, syncs chunks and joins them; the bare engine answers the same
lines from a list into a list. Rounds are interleaved; `ratio` is the job's rows per second over the
engine's. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rounds import compare, environment, interleaved
from sentences import read_sentences
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.engine.engine import Engine
from transferry.runtime.errors import TransferryError
from transferry.runtime.jobs.job import Job
from transferry.runtime.jobs.job_options import JobOptions


def cost(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Times the job and the engine in interleaved rounds."""
    texts = read_sentences(arguments.text, arguments.rows)
    source, out = folder / "source.txt", folder / "answers.jsonl"
    source.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    engine = Engine(arguments.bundle)
    options = JobOptions(force=True, generation={"beam": arguments.beam})
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


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--rows", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--beam", type=int, default=1)
    arguments = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as name:
            found = cost(arguments, Path(name))
    except TransferryError as error:
        parser.exit(error.exit_code, f"{parser.prog}: {error}\n")
    print(json.dumps({**found, **environment()}))


if __name__ == "__main__":
    main()
