"""How fast are bundles relative to each other on the same text?

    python benchmarks/bundles.py TEXT BUNDLE BUNDLE ... [--variant cpu-int8] [--beam 4]
        [--rows 500] [--batch-rows 8] [--rounds 9]

On the CPU, in interleaved rounds. An encoder-only model embeds the texts, others answer them. The
last line is JSON; `ratio_of_times` is the first bundle's median time over each bundle's, so larger
is faster, and `same` counts the rows with the first bundle's answer, bit for bit.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from environment import environment
from rounds import compare, interleaved
from sentences import engine_answers, read_sentences
from transferry.runtime.decoding.batching import BatchOptions
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.engine.engine import Engine
from transferry.runtime.engine.tasks.embed import embed

# The tokens of a row, and what must be equal to another bundle's.
Row = tuple[int, Any]


def work_of(
    engine: Engine, texts: Sequence[str], options: GenerationOptions
) -> Callable[[], list[Row]]:
    """Returns what embeds or answers all texts."""
    if engine.bundle.manifest.architecture == "encoder-only":
        return lambda: [
            (result.source_tokens, result.vector.tobytes()) for result in embed(engine, texts)
        ]
    return lambda: [
        (len(answer.tokens), answer.tokens) for answer in engine_answers(engine, texts, options)
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `opened`, and the number of rounds."""
    parser.add_argument("--variant")
    parser.add_argument("--beam", type=int, default=1)
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--batch-rows", type=int)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--max-length", type=int, default=100)


def opened(
    bundle: Path | str, texts: Sequence[str], arguments: argparse.Namespace
) -> Callable[[], list[Row]]:
    """Opens a bundle; returns what embeds or answers all texts."""
    options = GenerationOptions(beam=arguments.beam, max_length=arguments.max_length)
    batches = BatchOptions(rows=arguments.batch_rows) if arguments.batch_rows else None
    return work_of(Engine.load(bundle, variant=arguments.variant, batches=batches), texts, options)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("bundles", nargs="+", metavar="BUNDLE")
    add_options(parser)
    arguments = parser.parse_args()

    texts = read_sentences(arguments.text, arguments.rows)
    work = {name: opened(name, texts, arguments) for name in arguments.bundles}
    rows = {name: run() for name, run in work.items()}  # also warms up
    times = interleaved(work, arguments.rounds)
    first, tokens = arguments.bundles[0], {name: sum(n for n, _ in rows[name]) for name in rows}
    found = compare(times, tokens, len(texts), first)
    same = {
        name: sum(one == other for one, other in zip(rows[name], rows[first], strict=True))
        for name in arguments.bundles[1:]
    }
    settings = {name: getattr(arguments, name) for name in ("variant", "beam", "batch_rows")}
    settings["rounds"] = arguments.rounds
    print(json.dumps({**found, "same": same, "rows": len(texts), **settings, **environment()}))


if __name__ == "__main__":
    main()
