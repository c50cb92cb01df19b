"""What does it gain that prompts which begin alike share the work of their beginning?

    python benchmarks/shared_prompts.py BUNDLE TEXT [--variants cpu-fp32,cpu-int8] [--shared 200]
        [--own 15] [--new-tokens 32] [--rows 256] [--rounds 9] [--quick]

On the CPU, greedy, without scores, one thread a replica and one replica a core. BUNDLE is
decoder-only. All prompts begin with the same `--shared` tokens of TEXT and go on with `--own`
tokens of their own; every answer has the same number of tokens. Both sides are one engine, with
sharing on and off, in interleaved rounds; that they give the same answers is checked first. `ratio`
is the prompts per second with sharing over those without, by median time. The last line is JSON.
`--quick` takes about two minutes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from environment import environment, processor
from rounds import compare, interleaved
from sentences import read_sentences
from transferry.runtime.decoding.batching import BatchOptions
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.engine.engine import Engine
from transferry.runtime.errors import InputError, ParityError, TransferryError
from transferry.runtime.tables import table

SHARED, WHOLE = "shared", "whole"


def prompts_of(
    lines: Sequence[str], engine: Engine, rows: int, shared: int, own: int
) -> list[list[int]]:
    """Cuts a text into prompts with a common beginning, start token included."""
    tokenizer = engine.bundle.tokenizer
    ids = tokenizer.encode(" ".join(lines))
    start = tokenizer.special.before
    common = shared - len(start)
    if common + rows * own > len(ids):
        raise InputError(
            f"expected {shared} tokens of text and {own} for each of {rows} prompts, found "
            f"{len(ids)}; give more text or fewer rows"
        )
    begin, rest = [*start, *ids[:common]], ids[common:]
    return [[*begin, *rest[row * own : (row + 1) * own]] for row in range(rows)]


def answer(
    engine: Engine, options: GenerationOptions, prompts: list[list[int]], sharing: bool
) -> tuple[list[tuple[int, ...]], int]:
    """Returns the tokens of all answers, and how many prompt tokens were copied."""
    engine.decoder.shares_prompts = sharing
    answers, copied = [], 0
    for result in engine.generate(prompts, options):
        if result.error is not None:
            raise InputError(f"a prompt has no answer: {result.error.message}; change --shared")
        answers.append(result.hypotheses[0].tokens)
        copied += result.shared_prompt_tokens
    return answers, copied


def measure(engine: Engine, prompts: list[list[int]], new: int, rounds: int) -> dict[str, Any]:
    """Compares and times both sides."""
    options = GenerationOptions(max_length=new, min_length=new, scores=False)
    work = {
        name: partial(answer, engine, options, prompts, name == SHARED) for name in (SHARED, WHOLE)
    }
    found = {name: run() for name, run in work.items()}  # warms up too
    if found[SHARED][0] != found[WHOLE][0]:
        raise ParityError("answers differ with and without sharing; verify the bundle here")
    times = interleaved(work, rounds, quiet=True)
    tokens = dict.fromkeys(work, sum(map(len, found[SHARED][0])))
    compared = compare(times, tokens, len(prompts), WHOLE)
    return {
        "prompts_per_second": compared["sentences_per_second"],
        "ratio": compared["ratio"][SHARED],
        "ratio_range": compared["ratio_range"][SHARED],
        "prompt_tokens": sum(map(len, prompts)),
        "shared_prompt_tokens": found[SHARED][1],
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--variants", default="cpu-fp32,cpu-int8")
    parser.add_argument("--shared", type=int, default=200, help="tokens that prompts share")
    parser.add_argument("--own", type=int, default=15, help="tokens of each prompt after them")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--batch-rows", type=int, help="rows of a batch; by default the variant's")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="32 rows, 3 rounds")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rows, arguments.rounds = 32, 3
    cells = []
    try:
        lines = read_sentences(arguments.text)
        for variant in arguments.variants.split(","):
            rows = arguments.batch_rows
            batches = BatchOptions(rows=rows, tokens=rows << 9) if rows else None
            engine = Engine.load(arguments.bundle, variant=variant, batches=batches)
            cut = (arguments.rows, arguments.shared, arguments.own)
            prompts = prompts_of(lines, engine, *cut)
            found = measure(engine, prompts, arguments.new_tokens, arguments.rounds)
            cells.append({"variant": variant, **found})
    except TransferryError as error:
        parser.exit(error.exit_code, f"{parser.prog}: {error}\n")
    rows_of_table = [
        (
            cell["variant"],
            *(cell["prompts_per_second"][name] for name in (SHARED, WHOLE)),
            f"{cell['ratio']:.2f}",
            "{:.2f} to {:.2f}".format(*cell["ratio_range"]),
            f"{cell['shared_prompt_tokens']:,} of {cell['prompt_tokens']:,}",
            processor(),
        )
        for cell in cells
    ]
    head = ("variant", "shared, prompts/s", "whole, prompts/s", "ratio", "by round")
    print(f"{table((*head, 'prompt tokens copied', 'processor'), rows_of_table)}\n")
    print(json.dumps({"cells": cells, "rounds": arguments.rounds, **environment()}))


if __name__ == "__main__":
    main()
