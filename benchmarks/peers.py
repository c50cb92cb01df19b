"""How fast is the engine compared with other ways to generate in Python, on the same weights?

    pip install ".[export,peers]"
    python benchmarks/peers.py CHECKPOINT BUNDLE TEXT [--beams 1,4] [--rows 500] [--quick]
    python benchmarks/peers.py CHECKPOINT BUNDLE TEXT --provider cuda --variant cuda-fp16

The peers: transformers' `generate` with a MarianMTModel, the same through Optimum and ONNX Runtime
(exported with its cache), and the plain torch loop with a cache, which is greedy only. All have
the same weights, our tokenizer, length-sorted batches and the same search; text in, text out. The
batch size of each is tuned on the first sentences; torch and Optimum use all cores for one batch,
as by default. With `--provider cuda` all run on the first GPU, torch and transformers in the
variant's precision, Optimum in float32, and GPU utilisation is reported. Peers that are missing or
cannot hold the model are named and left out. `ratio` is the engine's tokens per second over a
peer's. The last line is JSON. `--quick` takes about two minutes for preset small.

Tested with optimum-onnx 0.1.0, optimum 2.1.0, transformers 4.57.6 and torch 2.13.0. optimum-onnx
needs transformers 4; the other peers also run with transformers 5.23.0:

    pip install ctranslate2==4.8.5 optimum-onnx==0.1.0 transformers==4.57.6
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from busy import Busy, gpu_share
from environment import environment, processor
from marian_model import (
    batched_answers,
    marian_model,
    optimum_model,
    torch_rows,
    transformers_rows,
)
from rounds import compare, fastest, interleaved
from sentences import Answer, read_sentences, search_options
from sides import Answering, Side
from transferry.build_model.checkpoint import Checkpoint, load_checkpoint
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.errors import TransferryError, UsageError
from transferry.runtime.hardware import usable_cores
from transferry.runtime.ort.session import Provider
from transferry.runtime.tables import table

BATCH_SENTENCES = {"cpu": (8, 16, 32, 64), "cuda": (64, 128, 256, 512, 1024)}


def numbers(text: str) -> list[int]:
    """Reads "1,4"."""
    return [int(part) for part in text.split(",")]


def open_peers(
    checkpoint: Checkpoint, folder: Path, provider: Provider, precision: str
) -> tuple[dict[str, Answering], dict[str, str]]:
    """Opens the peers that are installed and can hold the model.

    Args:
        checkpoint: The weights; the model is moved to the provider's device.
        folder: Folder for Optimum's graphs.
        provider: Provider of all peers.
        precision: dtype of torch on CUDA, such as "float16".

    Returns:
        The peers, and the reasons why others are left out.
    """

    def around(generate: Callable[..., list[list[int]]], model: object) -> Answering:
        return partial(batched_answers, partial(generate, model), checkpoint.tokenizer)

    peers, missing = {"torch loop": around(torch_rows, checkpoint)}, {}
    dtype = getattr(torch, precision) if provider == "cuda" else torch.float32
    try:
        marian = marian_model(checkpoint)
        peers["transformers"] = around(transformers_rows, marian)
        peers["optimum"] = around(transformers_rows, optimum_model(marian, folder, provider))
    except (ImportError, UsageError) as error:
        for name, package in (("transformers", "transformers"), ("optimum", "optimum-onnx")):
            if name not in peers:
                remedy = f"; pip install {package}" if isinstance(error, ImportError) else ""
                missing[name] = f"{error}{remedy}"
    # After Optimum's export.
    if "transformers" in peers:
        marian.to(provider, dtype)
    checkpoint.model.to(provider, dtype)
    return peers, missing


def run_cell(
    engine: Side,
    peers: Mapping[str, Answering],
    texts: Sequence[str],
    tune_rows: int,
    search: Mapping[str, Any],
    rounds: int,
) -> dict[str, Any]:
    """Times the engine and the peers with one beam size."""
    options = search_options(**search)
    tuned = engine.tune(texts[:tune_rows], options)
    work: dict[str, Callable[[], list[Answer]]] = {
        "engine": partial(tuned.answer, texts, options, tuned.batch_rows)
    }
    settings: dict[str, object] = {"engine": tuned.settings()}
    for name, answer in peers.items():
        if name == "torch loop" and options.beam > 1:
            continue
        sizes = BATCH_SENTENCES[engine.provider]
        rows = fastest(
            {rows: partial(answer, texts[:tune_rows], options, rows) for rows in sizes}, 2
        )
        settings[name] = {"batch_rows": rows}
        work[name] = partial(answer, texts, options, rows)
    answers = {name: run() for name, run in work.items()}  # also warms them up
    same = {
        name: sum(
            one.tokens == other.tokens for one, other in zip(found, answers["engine"], strict=True)
        )
        for name, found in answers.items()
        if name != "engine"
    }
    print(f"beam {options.beam}: rows of {len(texts)} with the engine's tokens: {same}", flush=True)
    busy: dict[str, float | None] = {}
    if engine.provider == "cuda":
        for name, run in work.items():
            with Busy(gpu_share()) as measured:
                run()
            busy[name] = measured.mean
        print(f"GPU utilisation: {busy}", flush=True)
    times = interleaved(work, rounds)
    tokens = {name: sum(len(one.tokens) for one in found) for name, found in answers.items()}
    found = {
        name: compare({n: times[n] for n in ("engine", name)}, tokens, len(texts), name)
        for name in same
    }
    return {
        **search,
        "ratio": {name: one["ratio"]["engine"] for name, one in found.items()},
        "ratio_range": {name: one["ratio_range"]["engine"] for name, one in found.items()},
        "tokens_per_second": compare(times, tokens, len(texts), "engine")["tokens_per_second"],
        "rows_with_the_same_tokens": same,
        "gpu_busy": busy,
        "settings": settings,
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--variant", help="of the bundle; the first by default")
    parser.add_argument("--provider", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--beams", type=numbers, default=[1, 4])
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tune-rows", type=int, default=128, help="sentences to tune on")
    parser.add_argument("--max-length", type=int, default=100)
    parser.add_argument("--quick", action="store_true", help="64 rows, 3 rounds")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rows, arguments.rounds = min(arguments.rows, 64), 3
        arguments.tune_rows = min(arguments.tune_rows, 32)
    torch.set_num_threads(usable_cores())
    try:
        checkpoint = load_checkpoint(arguments.run)
        texts = read_sentences(arguments.text, arguments.rows)
        variant = Bundle.load(arguments.bundle).variant(arguments.variant)
        provider: Provider = arguments.provider
        engine = Side("engine", str(arguments.bundle), variant.name, provider=provider)
        longest = min(arguments.max_length, checkpoint.model.config.max_positions)
        with tempfile.TemporaryDirectory() as folder:
            peers, missing = open_peers(checkpoint, Path(folder), provider, variant.precision)
            for name, reason in missing.items():
                print(f"left out: {name} ({reason})")
            cells = [
                run_cell(
                    engine,
                    peers,
                    texts,
                    arguments.tune_rows,
                    {"beam": beam, "max_length": longest},
                    arguments.rounds,
                )
                for beam in arguments.beams
            ]
    except TransferryError as error:
        parser.exit(error.exit_code, f"{parser.prog}: {error}\n")
    rows = [
        (
            cell["beam"],
            name,
            cell["tokens_per_second"][name],
            f"{ratio:.2f}",
            "{:.2f} to {:.2f}".format(*cell["ratio_range"][name]),
            processor(),
        )
        for cell in cells
        for name, ratio in cell["ratio"].items()
    ]
    head = ("beam", "peer", "tokens/s", "engine over it", "by round", "processor")
    for cell in cells:
        print(f"beam {cell['beam']}: engine {cell['tokens_per_second']['engine']} tokens/s")
    print(table(head, rows) + "\n")
    print(
        json.dumps(
            {
                "ratio": {f"beam {cell['beam']}": cell["ratio"] for cell in cells},
                "cells": cells,
                "missing": missing,
                "rows": len(texts),
                "rounds": arguments.rounds,
                **environment("torch", "transformers", "optimum", "optimum-onnx"),
            }
        )
    )


if __name__ == "__main__":
    main()
