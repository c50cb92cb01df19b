"""How fast are the variants of a bundle, with few rows at once and with many?

    python benchmarks/variants.py BUNDLE TEXT [--rows 1,8,64] [--new-tokens 32] [--rounds 9]

Greedy search on one thread, without scores, in interleaved rounds; every answer has the same number
of tokens. The last line is JSON: for each number of rows the tokens per second of a variant, and
their ratio to the first variant's; and the bytes of each variant's weights.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

from rounds import compare, interleaved
from sentences import read_sentences
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.decoding.batching import BatchOptions
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.engine.engine import Engine
from transferry.runtime.ort.open_model import open_model
from transferry.runtime.ort.session import SessionOptions


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--variants", default="cpu-fp32,cpu-int8,cpu-int4")
    parser.add_argument("--rows", default="1,8,64")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()

    bundle = Bundle.load(arguments.bundle)
    names = arguments.variants.split(",")
    models = {
        name: open_model(bundle, bundle.variant(name), SessionOptions(threads=1)) for name in names
    }
    new = arguments.new_tokens
    options = GenerationOptions(max_length=new, min_length=new, scores=False)
    result: dict[str, Any] = {"weights": {name: _weights(bundle, name) for name in names}}
    for rows in map(int, arguments.rows.split(",")):
        texts = read_sentences(arguments.text, rows)
        work = {
            name: partial(
                _answer, Engine(bundle, model, batches=BatchOptions(rows)), texts, options
            )
            for name, model in models.items()
        }
        tokens = {name: answer() for name, answer in work.items()}  # warms up too
        times = interleaved(work, arguments.rounds, quiet=True)
        found = compare(times, tokens, rows, names[0])
        print(f"{rows} rows: {found['tokens_per_second']}", flush=True)
        result[f"{rows} rows"] = {key: found[key] for key in ("tokens_per_second", "ratio")}
    print(json.dumps(result))


def _answer(engine: Engine, texts: list[str], options: GenerationOptions) -> int:
    answers = engine.generate(texts, options)
    return sum(len(answer.hypotheses[0].tokens) for answer in answers)


def _weights(bundle: Bundle, name: str) -> int:
    """Returns the bytes of the folder's weights; cpu-fp32 shares the portable ones."""
    folder = next(iter(bundle.variant(name).graphs.values())).file.rpartition("/")[0]
    return bundle.manifest.files[f"{folder}/weights.bin"].size


if __name__ == "__main__":
    main()
