"""How fast are bundles beside each other, on the same text?

    python benchmarks/bundles.py TEXT BUNDLE BUNDLE ... [--beam 4] [--rows 500] [--rounds 9]

On the CPU, rounds interleaved. The last line is JSON; `ratio` is the first bundle's median time
over each bundle's, so that more is faster.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path

from transferry.runtime.decoding.options import GenerationOptions
from transferry.runtime.engine.engine import Engine
from transferry.runtime.files import read_lines
from transferry.runtime.hardware import usable_cores


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("bundles", type=Path, nargs="+", metavar="BUNDLE")
    parser.add_argument("--beam", type=int, default=1)
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--max-length", type=int, default=100)
    arguments = parser.parse_args()

    texts = list(itertools.islice(read_lines(arguments.text), arguments.rows))
    options = GenerationOptions(beam=arguments.beam, max_length=arguments.max_length)
    engines = {str(folder): Engine.load(folder) for folder in arguments.bundles}

    def run(engine: Engine) -> int:
        return sum(result.target_tokens for result in engine.generate(texts, options))

    tokens = {name: run(engine) for name, engine in engines.items()}  # also warms them up
    times: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(arguments.rounds):
        for name, engine in engines.items():
            started = time.perf_counter()
            run(engine)
            times[name].append(time.perf_counter() - started)
        print(f"round {number + 1}: " + ", ".join(f"{n} {t[-1]:.2f} s" for n, t in times.items()))
    medians = {name: statistics.median(values) for name, values in times.items()}
    first = medians[str(arguments.bundles[0])]
    print(
        json.dumps(
            {
                "ratio": {name: round(first / median, 3) for name, median in medians.items()},
                "rows_per_second": {
                    name: round(len(texts) / median, 1) for name, median in medians.items()
                },
                "tokens_per_second": {
                    name: round(tokens[name] / median) for name, median in medians.items()
                },
                "beam": arguments.beam,
                "rows": len(texts),
                "rounds": arguments.rounds,
                "cores": usable_cores(),
            }
        )
    )


if __name__ == "__main__":
    main()
