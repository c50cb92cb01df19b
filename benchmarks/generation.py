"""How much faster is the engine than the plain torch loop with a cache, on the same weights?

    python benchmarks/generation.py RUN BUNDLE TEXT [--rows 500] [--rounds 9]

Greedy search on the CPU, the same length-sorted batches for both, rounds interleaved; torch uses
all cores on one batch, the engine one core on each of as many batches. Both must give the same
tokens. The last line is JSON; `ratio` is torch's median time over the engine's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from transferry.build_model.checkpoint import Checkpoint, load_checkpoint
from transferry.build_model.model.transformer import greedy
from transferry.runtime.decoding.batching import BatchOptions, length_batches
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.decoding.search import pad_sources
from transferry.runtime.engine.engine import Engine
from transferry.runtime.hardware import usable_cores
from transferry.runtime.io.lines import read_lines


def torch_loop(
    checkpoint: Checkpoint, texts: list[str], batch_rows: int, max_length: int
) -> list[list[int]]:
    """Returns the tokens of each text, in order."""
    tokenizer = checkpoint.tokenizer
    sources = [tokenizer.special.wrap(ids) for ids in tokenizer.encode_batch(texts)]
    answers: list[list[int]] = [[]] * len(sources)
    for batch in length_batches([len(source) for source in sources], batch_rows, 4096):
        ids, mask = pad_sources([sources[index] for index in batch], tokenizer.special.pad_id)
        rows = greedy(
            checkpoint.model,
            torch.from_numpy(ids),
            torch.from_numpy(mask),
            bos_id=tokenizer.special.bos_id,
            eos_id=tokenizer.special.eos_id,
            max_length=max_length,
        )
        for index, row in zip(batch, rows, strict=True):
            answers[index] = row
    return answers


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batch-rows", type=int, default=64)
    parser.add_argument("--max-length", type=int, default=100)
    arguments = parser.parse_args()

    texts = list(itertools.islice(read_lines(arguments.text), arguments.rows))
    checkpoint = load_checkpoint(arguments.run)
    engine = Engine.load(
        arguments.bundle, variant="portable", batches=BatchOptions(rows=arguments.batch_rows)
    )
    options = GenerationOptions(max_length=arguments.max_length)

    def run_torch() -> list[list[int]]:
        return torch_loop(checkpoint, texts, arguments.batch_rows, arguments.max_length)

    def run_engine() -> list[list[int]]:
        return [list(result.hypotheses[0].tokens) for result in engine.generate(texts, options)]

    wanted, found = run_torch(), run_engine()  # also warms both up
    different = sum(one != other for one, other in zip(wanted, found, strict=True))
    times: dict[str, list[float]] = {"torch": [], "engine": []}
    for number in range(arguments.rounds):
        for name, function in (("torch", run_torch), ("engine", run_engine)):
            started = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - started)
        print(f"round {number + 1}: " + ", ".join(f"{n} {t[-1]:.2f} s" for n, t in times.items()))
    tokens = sum(len(row) for row in found)
    ratios = np.array(times["torch"]) / np.array(times["engine"])
    print(
        json.dumps(
            {
                "ratio": round(
                    statistics.median(times["torch"]) / statistics.median(times["engine"]), 3
                ),
                "ratio_range": [round(float(ratios.min()), 3), round(float(ratios.max()), 3)],
                "rows": len(texts),
                "rows_that_differ": different,
                "tokens_per_second": {
                    name: round(tokens / statistics.median(values))
                    for name, values in times.items()
                },
                "cores": usable_cores(),
                "replicas": engine.replicas,
                "torch_threads": torch.get_num_threads(),
                "batch_rows": arguments.batch_rows,
                "rounds": arguments.rounds,
            }
        )
    )


if __name__ == "__main__":
    main()
