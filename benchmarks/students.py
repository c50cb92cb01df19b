"""How fast and how good is a student beside its teacher, and beside CTranslate2 with the teacher?

    pip install ".[export,peers]"
    python benchmarks/students.py RUN TEACHER STUDENT SOURCE REFERENCE
        [--variants cpu-fp32,cpu-int8] [--beam 1] [--rows 1000] [--rounds 9]

On the CPU, text in and text out. RUN is the teacher's, TEACHER and STUDENT are bundles; CTranslate2
holds the teacher's weights. Each side is tuned, rounds are interleaved. `ratio_of_times` is the
teacher's median time over each side's for the same sentences, so larger is faster; `bleu` is cased
sacreBLEU. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import sacrebleu

from ctranslate2_model import write_ctranslate2
from environment import environment, processor
from footprint import bundle_bytes
from rounds import compare, interleaved
from sentences import read_sentences, search_options
from sides import Side
from throughput import compute_type
from transferry.build_model.checkpoint import load_checkpoint
from transferry.runtime.bundle.bundle import Bundle

BASE = "teacher"


def cell(arguments: argparse.Namespace, variant: str, models: Path) -> dict[str, Any]:
    """Measures one variant."""
    texts = read_sentences(arguments.source, arguments.rows)
    references = read_sentences(arguments.reference, arguments.rows)
    bundles = {name: Bundle.load(getattr(arguments, name)) for name in (BASE, "student")}
    precision = compute_type(bundles[BASE].variant(variant).precision)
    write_ctranslate2(load_checkpoint(arguments.run), models / precision, precision)
    sides = {
        BASE: Side("engine", str(arguments.teacher), variant),
        "student": Side("engine", str(arguments.student), variant),
        "CTranslate2": Side(
            "ctranslate2", str(models / precision), precision, str(arguments.teacher)
        ),
    }
    options = search_options(beam=arguments.beam, max_length=100, min_length=0)
    tuned = {name: side.tune(texts, options, repeats=1) for name, side in sides.items()}
    work = {
        name: partial(one.answer, texts, options, one.batch_rows) for name, one in tuned.items()
    }
    answers = {name: run() for name, run in work.items()}  # also warms up
    times = interleaved(work, arguments.rounds)
    tokens = {name: sum(len(one.tokens) for one in found) for name, found in answers.items()}
    return {
        "variant": variant,
        "beam": arguments.beam,
        **compare(times, tokens, len(texts), BASE),
        "bleu": {
            name: round(sacrebleu.corpus_bleu([one.text for one in found], [references]).score, 2)
            for name, found in answers.items()
        },
        "settings": {name: one.settings() for name, one in tuned.items()},
        "bytes": {
            name: bundle_bytes(bundle, bundle.variant(variant)) for name, bundle in bundles.items()
        },
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("run", "teacher", "student", "source", "reference"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--variants", default="cpu-fp32,cpu-int8")
    parser.add_argument("--beam", type=int, default=1)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for variant in arguments.variants.split(","):
            found.append(cell(arguments, variant, Path(folder)))
            shown = {name: found[-1][name] for name in ("ratio_of_times", "ratio_range", "bleu")}
            print(f"{processor()}: {variant}, beam {arguments.beam}: {shown}", flush=True)
    print(json.dumps({"cells": found, **environment("ctranslate2")}))


if __name__ == "__main__":
    main()
