"""How fast are bundles, variants or runtimes relative to each other on the same text?

    python benchmarks/bundles.py TEXT SIDE SIDE ... [--variant cpu-int8] [--beam 4] [--rows 500]
        [--batch-rows 8] [--new-tokens 32] [--threads 1] [--rounds 9]

A side is BUNDLE, BUNDLE:VARIANT or BUNDLE:VARIANT:openvino. On the CPU, in interleaved rounds. An
encoder-only model embeds the texts, others answer them. The last line is JSON; `ratio_of_times` is
the first side's median time over each side's, so larger is faster, and `same` counts the rows with
the first side's answer, bit for bit.
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
from transferry.runtime.ort.session import SessionOptions

# Number of tokens of a row, and the value compared with another side's.
Row = tuple[int, Any]
SETTINGS = ("variant", "beam", "batch_rows", "new_tokens", "threads")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `opened`, and the number of rounds."""
    parser.add_argument("--variant", help="of sides that name no variant")
    parser.add_argument("--beam", type=int, default=1)
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--batch-rows", type=int)
    parser.add_argument("--threads", type=int, help="of the only replica; by default one a core")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--max-length", type=int, default=100)
    parser.add_argument("--new-tokens", type=int, help="tokens of every answer, without scores")


def opened(
    side: str, texts: Sequence[str], arguments: argparse.Namespace
) -> Callable[[], list[Row]]:
    """Opens a side; returns a function that embeds or answers all texts."""
    bundle, _, kind = side.partition(":")
    variant, _, runtime = kind.partition(":")
    settings: dict[str, Any] = {"runtime": runtime} if runtime else {}
    engine = Engine.load(
        bundle,
        SessionOptions(threads=arguments.threads or 1, **settings),
        variant=variant or arguments.variant,
        replicas=1 if arguments.threads else None,
        batches=BatchOptions(rows=arguments.batch_rows) if arguments.batch_rows else None,
    )
    if engine.bundle.manifest.architecture == "encoder-only":
        return lambda: [
            (result.source_tokens, result.vector.tobytes()) for result in embed(engine, texts)
        ]
    new = arguments.new_tokens
    options = GenerationOptions(
        beam=arguments.beam,
        max_length=new or arguments.max_length,
        min_length=new or 0,
        scores=not new,
    )
    return lambda: [
        (len(answer.tokens), answer.tokens) for answer in engine_answers(engine, texts, options)
    ]


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("sides", nargs="+", metavar="SIDE")
    add_options(parser)
    arguments = parser.parse_args()

    texts = read_sentences(arguments.text, arguments.rows)
    work = {name: opened(name, texts, arguments) for name in arguments.sides}
    rows = {name: run() for name, run in work.items()}  # also warms up
    times = interleaved(work, arguments.rounds)
    first, tokens = arguments.sides[0], {name: sum(n for n, _ in rows[name]) for name in rows}
    found = compare(times, tokens, len(texts), first)
    same = {
        name: sum(one == other for one, other in zip(rows[name], rows[first], strict=True))
        for name in arguments.sides[1:]
    }
    settings = {name: getattr(arguments, name) for name in (*SETTINGS, "rounds")}
    print(json.dumps({**found, "same": same, "rows": len(texts), **settings, **environment()}))


if __name__ == "__main__":
    main()
