"""How fast does OpenVINO serve a bundle beside onnxruntime, with the same search?

    pip install ".[openvino]"
    python benchmarks/runtimes.py BUNDLE TEXT [--beams 1,4] [--rows 500] [--rounds 9]

On the CPU in float32, text in and text out. The sides are `cpu-fp32` in onnxruntime, if the bundle
has it, and the portable graphs in onnxruntime and in OpenVINO. For each beam size: the answers are
compared; replicas, threads and batch size of each side are tuned; rounds are interleaved. `ratio`
is a side's tokens per second over those of the first side, by median time. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from environment import environment
from rounds import compare, interleaved
from sentences import read_sentences, search_options
from sides import Side
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.specs import PORTABLE
from transferry.runtime.errors import TransferryError
from transferry.runtime.ort.openvino_runner import openvino_version
from transferry.runtime.tables import table

FUSED = "cpu-fp32"


def sides_of(bundle: Bundle) -> dict[str, Side]:
    """Returns the sides by name, the base first."""
    folder = str(bundle.folder)
    sides = {
        f"onnxruntime {name}": Side("engine", folder, name)
        for name in (FUSED, PORTABLE)
        if name in bundle.manifest.variants
    }
    return {**sides, f"OpenVINO {PORTABLE}": Side("engine", folder, PORTABLE, runtime="openvino")}


def measure(
    sides: Mapping[str, Side], texts: Sequence[str], search: Mapping[str, Any], rounds: int
) -> dict[str, Any]:
    """Tunes the sides, compares their answers, and times them in interleaved rounds.

    Args:
        sides: The sides; the first is the base.
        texts: Sentences.
        search: Arguments of `search_options`.
        rounds: Number of rounds.
    """
    options = search_options(**search)
    tuned = {name: side.tune(texts, options) for name, side in sides.items()}
    settings = {name: one.settings() for name, one in tuned.items()}
    print(f"beam {options.beam}: fastest with {settings}", flush=True)
    work = {
        name: partial(one.answer, texts, options, one.batch_rows) for name, one in tuned.items()
    }
    answers = {name: [one.tokens for one in run()] for name, run in work.items()}
    base = next(iter(sides))
    same = {
        name: sum(one == other for one, other in zip(found, answers[base], strict=True))
        for name, found in answers.items()
    }
    tokens = {name: sum(map(len, found)) for name, found in answers.items()}
    found = compare(interleaved(work, rounds), tokens, len(texts), base)
    return {**search, "same_tokens": same, "settings": settings, **found}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--beams", default="1,4", help="such as 1,4")
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--max-length", type=int, default=100)
    arguments = parser.parse_args()
    try:
        openvino_version()
        sides = sides_of(Bundle.load(arguments.bundle))
        texts = read_sentences(arguments.text, arguments.rows)
        cells = [
            measure(
                sides,
                texts,
                {"beam": int(beam), "max_length": arguments.max_length},
                arguments.rounds,
            )
            for beam in arguments.beams.split(",")
        ]
    except TransferryError as error:
        parser.exit(error.exit_code, f"{parser.prog}: {error}\n")
    rows = [
        (
            name,
            cell["beam"],
            f"{cell['same_tokens'][name]} of {len(texts)}",
            cell["tokens_per_second"][name],
            f"{cell['ratio'].get(name, 1.0):.3f}",
        )
        for cell in cells
        for name in sides
    ]
    print(f"\n{table(('side', 'beam', 'same rows', 'tokens/s', 'ratio'), rows)}\n")
    here = environment("openvino")
    print(json.dumps({"cells": cells, "rows": len(texts), "rounds": arguments.rounds, **here}))


if __name__ == "__main__":
    main()
