"""How fast are bundles relative to each other on the same text?

    python benchmarks/bundles.py TEXT BUNDLE BUNDLE ... [--beam 4] [--rows 500] [--rounds 9]

On the CPU, in interleaved rounds. The last line is JSON; `ratio_of_times` is the first bundle's
median time over each bundle's, so larger is faster.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

from rounds import compare, interleaved
from sentences import engine_answers, read_sentences
from transferry.runtime.decoding.options import GenerationOptions
from transferry.runtime.engine.engine import Engine
from transferry.runtime.hardware import usable_cores


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("bundles", nargs="+", metavar="BUNDLE")
    parser.add_argument("--beam", type=int, default=1)
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--max-length", type=int, default=100)
    arguments = parser.parse_args()

    texts = read_sentences(arguments.text, arguments.rows)
    options = GenerationOptions(beam=arguments.beam, max_length=arguments.max_length)
    work = {
        name: partial(engine_answers, Engine.load(name), texts, options)
        for name in arguments.bundles
    }
    # Also warms up.
    tokens = {name: sum(len(one.tokens) for one in run()) for name, run in work.items()}
    times = interleaved(work, arguments.rounds)
    found = compare(times, tokens, len(texts), arguments.bundles[0])
    settings = {name: getattr(arguments, name) for name in ("beam", "rounds")}
    print(json.dumps({**found, "rows": len(texts), **settings, "cores": usable_cores()}))


if __name__ == "__main__":
    main()
