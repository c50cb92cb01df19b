"""How fast is the engine with the kernels of this folder, and are its answers the same?

    PYTHONPATH=benchmarks python benchmarks/kernels/compare.py CHECKPOINT bundles/small \
        bundles/kernels test_2016_flickr.en.gz --rows 1,8,32 --beams 1,4 --rounds 8

The engine with standard graphs and with those of rewrite.py, beside CTranslate2: variant cpu-int8,
one thread each, CPU time, rounds interleaved. `ratio` is tokens per second over CTranslate2's, by
median time. Then the kernels answer in batches of 1 to 128 sentences, which must not change a
token or score. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from ctranslate2_model import CTranslate2Model, write_ctranslate2
from rounds import compare, environment, interleaved
from sentences import Answer, engine_answers, read_sentences, search_options
from transferry.build_model.checkpoint import load_checkpoint
from transferry.runtime.decoding.batching import BatchOptions
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.engine.engine import Engine
from transferry.runtime.errors import InputError, TransferryError
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.tables import table

LIBRARY = Path(__file__).with_name("libkernels.so")
BATCHES = (1, 3, 8, 32, 128)
MAX_LENGTH = 100


def registered(library: Path) -> AbstractContextManager[object]:
    """Registers the custom operators with all sessions that open in this context."""
    import onnxruntime  # after transferry, which disables its telemetry

    create = onnxruntime.SessionOptions

    def options() -> Any:
        made = create()
        made.register_custom_ops_library(str(library))
        return made

    return patch.object(onnxruntime, "SessionOptions", options)


def open_engine(bundle: Path) -> Engine:
    """Opens the int8 variant with one thread."""
    return Engine.load(str(bundle), SessionOptions(threads=1), variant="cpu-int8", replicas=1)


def set_batch(engine: Engine, sentences: int, beam: int) -> None:
    """Sets the engine's rows per batch: one per sentence and beam."""
    rows = sentences * beam
    engine.batches = BatchOptions(rows=rows, tokens=rows << 7)


def answers(
    engine: Engine, texts: Sequence[str], options: GenerationOptions, sentences: int
) -> list[Answer]:
    """Answers in batches of so many sentences."""
    set_batch(engine, sentences, options.beam)
    return engine_answers(engine, texts, options)


def measure(
    engines: dict[str, Engine],
    peer: CTranslate2Model,
    texts: Sequence[str],
    cell: tuple[int, int],
    rounds: int,
) -> dict[str, Any]:
    """Times all sides at one number of rows and beams."""
    rows, beam = cell
    options = search_options(beam, MAX_LENGTH)
    work: dict[str, Callable[[], list[Answer]]] = {
        "ctranslate2": partial(peer.answer, texts, options, rows),
        **{name: partial(answers, one, texts, options, rows) for name, one in engines.items()},
    }
    found = {name: run() for name, run in work.items()}  # warms up, too
    tokens = {name: sum(len(one.tokens) for one in each) for name, each in found.items()}
    times = interleaved(work, rounds, quiet=True, cpu_time=True)
    pairs = zip(found["kernels"], found["standard"], strict=True)
    same = sum(mine.tokens == theirs.tokens for mine, theirs in pairs)
    return {
        "rows": rows,
        "beam": beam,
        "same_tokens": f"{same}/{len(texts)}",
        **compare(times, tokens, len(texts), "ctranslate2"),
    }


def differing(engine: Engine, texts: Sequence[str], beam: int) -> int:
    """Counts the answers that change with the size of the batch, in a token or a score's bits."""
    seen: list[set[Any]] = [set() for _ in texts]
    for sentences in BATCHES:
        set_batch(engine, sentences, beam)
        for found, result in zip(seen, engine.generate(texts, beam=beam, n_best=beam), strict=True):
            if result.error is not None:
                raise InputError(f"a sentence has no answer: {result.error.message}")
            found.add(
                tuple((one.tokens, one.log_probability, one.score) for one in result.hypotheses)
            )
    return sum(len(found) > 1 for found in seen)


def numbers(text: str) -> list[int]:
    """Reads "1,4"."""
    return [int(part) for part in text.split(",")]


def report(cells: Sequence[dict[str, Any]]) -> str:
    """Formats the table."""
    lines = [
        (
            *(cell["rows"], cell["beam"], cell["same_tokens"]),
            *(f"{cell['ratio'][name]:.2f}" for name in ("standard", "kernels")),
        )
        for cell in cells
    ]
    return table(("rows", "beam", "same tokens", "ratio standard", "ratio kernels"), lines)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures all cells and compares the answers of all batches."""
    if not arguments.library.is_file():
        raise InputError(f"expected the kernels at {arguments.library}; build them with make")
    engines = {"standard": open_engine(arguments.bundle), "kernels": open_engine(arguments.kernels)}
    texts = read_sentences(arguments.text, arguments.sentences)
    with tempfile.TemporaryDirectory() as folder:
        write_ctranslate2(load_checkpoint(arguments.checkpoint), Path(folder) / "int8", "int8")
        peer = CTranslate2Model(Path(folder) / "int8", arguments.bundle, "int8", 1, 1)
        cells = [
            measure(engines, peer, texts, (rows, beam), arguments.rounds)
            for beam in arguments.beams
            for rows in arguments.rows
        ]
    changed = {beam: differing(engines["kernels"], texts, beam) for beam in arguments.beams}
    print(report(cells))
    for beam, count in changed.items():
        print(f"beam {beam}: {count} of {len(texts)} answers change with the size of the batch")
    return {"cells": cells, "changed_by_batch": changed, **environment("ctranslate2")}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog="example: compare.py runs/small bundles/small bundles/kernels test.en --rows 1,8",
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT")
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="export of CHECKPOINT")
    parser.add_argument("kernels", type=Path, metavar="KERNELS", help="BUNDLE after rewrite.py")
    parser.add_argument("text", type=Path, metavar="TEXT")
    parser.add_argument(
        "--library", type=Path, default=LIBRARY, help="default: that of this folder"
    )
    parser.add_argument("--rows", type=numbers, default=[1, 8, 32], help="default: 1,8,32")
    parser.add_argument("--beams", type=numbers, default=[1, 4], help="default: 1,4")
    parser.add_argument("--rounds", type=int, default=8, help="default: 8")
    parser.add_argument("--sentences", type=int, default=128, help="default: 128")
    arguments = parser.parse_args()
    try:
        with registered(arguments.library):
            record = run(arguments)
    except TransferryError as error:
        parser.exit(error.exit_code, f"{parser.prog}: {error}\n")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
