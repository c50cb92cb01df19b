"""How fast does a decoder-only model generate, beside CTranslate2 and transformers?

    pip install ".[export,peers]"
    python benchmarks/generators.py MODEL BUNDLE TEXT [--variants cpu-fp32,cpu-int8]
        [--prompts 15,200] [--new-tokens 32] [--rows 64] [--rounds 9] [--quick]

On the CPU, greedy. MODEL is a folder of transformers, BUNDLE the export of its import. Prompts are
token ids, cut from TEXT at one length and the same for all; every answer has the same number of
tokens. The peers: CTranslate2's Generator, converted from MODEL, with its int8 beside an integer
variant; onnxruntime-genai where it is installed and its builder takes MODEL, in float32 and in 4
bits; and `generate` of transformers in float32. Batch size and threads of each are tuned, rounds
interleaved. `same` counts rows with the engine's tokens. `ratio` is the engine's tokens per second
over a peer's, by median time. The last line is JSON. `--quick` takes about two minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ctranslate2_model import import_ctranslate2
from environment import environment, processor
from rounds import compare, fastest, interleaved
from sentences import read_sentences
from throughput import numbers
from transferry.runtime.decoding.batching import BatchOptions
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.engine.engine import Engine
from transferry.runtime.errors import InputError, TransferryError
from transferry.runtime.hardware import usable_cores
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.tables import table

Prompts = Sequence[list[int]]
# New tokens of each prompt, for prompts and rows per batch.
Generating = Callable[[Prompts, int], list[list[int]]]

ENGINE = "engine"
# Rows per batch to try.
BATCH_ROWS = (8, 16, 32, 64)


def open_engine(bundle: Path, variant: str, new: int) -> dict[str, Generating]:
    """Opens the engine with one thread a replica and with all threads for one batch."""
    cores = usable_cores()
    found: dict[str, Generating] = {}
    for replicas, threads in dict.fromkeys([(cores, 1), (1, cores)]):
        engine = Engine.load(
            bundle, SessionOptions(threads=threads), variant=variant, replicas=replicas
        )
        found[f"{replicas} x {threads}"] = partial(_engine_tokens, engine, new)
    return found


def _engine_tokens(engine: Engine, new: int, prompts: Prompts, rows: int) -> list[list[int]]:
    engine.batches = BatchOptions(rows=rows, tokens=rows << 9)
    options = GenerationOptions(max_length=new, min_length=new, scores=False)
    answers = []
    for result in engine.generate(prompts, options):
        if result.error is not None:
            raise InputError(f"a prompt has no answer: {result.error.message}; change --prompts")
        answers.append(list(result.hypotheses[0].tokens))
    return answers


def open_ctranslate2(model: Path, folder: Path, precision: str, new: int) -> dict[str, Generating]:
    """Converts the model and opens it in both layouts of threads."""
    ctranslate2 = import_ctranslate2()
    from ctranslate2.converters import TransformersConverter
    from transformers import AutoTokenizer

    out = folder / f"ctranslate2-{precision}"
    TransformersConverter(str(model)).convert(str(out), quantization=precision)
    words: Callable[..., Any] = AutoTokenizer.from_pretrained(model).convert_ids_to_tokens
    cores = usable_cores()
    found: dict[str, Generating] = {}
    for inter, intra in dict.fromkeys([(cores, 1), (1, cores)]):
        generator = ctranslate2.Generator(
            str(out), "cpu", compute_type=precision, inter_threads=inter, intra_threads=intra
        )
        found[f"{inter} x {intra}"] = partial(_ctranslate2_tokens, generator, words, new)
    return found


def _ctranslate2_tokens(
    generator: Any, words: Callable[..., Any], new: int, prompts: Prompts, rows: int
) -> list[list[int]]:
    results = generator.generate_batch(
        [words(prompt) for prompt in prompts],
        max_batch_size=rows,
        max_length=new,
        min_length=new,
        sampling_topk=1,
        include_prompt_in_result=False,
    )
    return [list(result.sequences_ids[0]) for result in results]


def open_transformers(model: Path, new: int) -> dict[str, Generating]:
    """Opens the model in float32, all threads on one batch, as by default."""
    from transformers import AutoModelForCausalLM

    opened: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    opened.eval()
    return {f"1 x {usable_cores()}": partial(_transformers_tokens, opened, new)}


@torch.inference_mode()
def _transformers_tokens(model: Any, new: int, prompts: Prompts, rows: int) -> list[list[int]]:
    answers = []
    for start in range(0, len(prompts), rows):
        ids = torch.tensor(prompts[start : start + rows])  # of one length: nothing is padded
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            num_beams=1,
            min_new_tokens=new,
            max_new_tokens=new,
            pad_token_id=0,
        )
        answers += found[:, ids.shape[1] :].tolist()
    return answers


def open_genai(model: Path, folder: Path, precision: str, new: int) -> dict[str, Generating]:
    """Builds the model with onnxruntime-genai and opens it."""
    import onnxruntime_genai as genai

    out, builder = folder / f"genai-{precision}", "onnxruntime_genai.models.builder"
    paths = ["-i", str(model), "-o", str(out), "-c", str(folder / "cache")]
    command = [sys.executable, "-m", builder, *paths, "-p", precision, "-e", "cpu"]
    subprocess.run(command, check=True, capture_output=True)
    return {"genai's own": partial(_genai_tokens, genai, genai.Model(str(out)), new)}


def _genai_tokens(genai: Any, model: Any, new: int, prompts: Prompts, rows: int) -> list[list[int]]:
    answers = []
    for start in range(0, len(prompts), rows):
        batch = prompts[start : start + rows]
        length = len(batch[0])
        parameters = genai.GeneratorParams(model)
        parameters.set_search_options(
            batch_size=len(batch), max_length=length + new, min_length=length + new, do_sample=False
        )
        generator = genai.Generator(model, parameters)
        generator.append_tokens(torch.tensor(batch, dtype=torch.int32).numpy())
        while not generator.is_done():
            generator.generate_next_token()
        answers += [generator.get_sequence(row)[length:].tolist() for row in range(len(batch))]
    return answers


def cut_prompts(lines: Sequence[str], engine: Engine, rows: int, length: int) -> list[list[int]]:
    """Cuts a text into prompts of one length, start token included."""
    ids = engine.bundle.tokenizer.encode(" ".join(lines))
    start = engine.bundle.tokenizer.special.before
    inner = length - len(start)
    if rows * inner > len(ids):
        raise InputError(
            f"expected text for {rows} prompts of {length} tokens, found {len(ids)} tokens; give "
            "more text or fewer rows"
        )
    return [[*start, *ids[row * inner : (row + 1) * inner]] for row in range(rows)]


def measure(
    sides: dict[str, dict[str, Generating]], prompts: Prompts, new: int, rounds: int
) -> dict[str, Any]:
    """Tunes and times all sides on the same prompts."""
    work, settings = {}, {}
    for name, layouts in sides.items():
        choice = {
            (layout, rows): partial(generate, prompts, rows)
            for layout, generate in layouts.items()
            for rows in BATCH_ROWS
            if rows <= len(prompts) or rows == BATCH_ROWS[0]
        }
        best = fastest(choice, 1 if rounds < 9 else 2)
        settings[name], work[name] = f"{best[0]}, {best[1]} rows", choice[best]
    answers = {name: run() for name, run in work.items()}
    tokens = {name: sum(map(len, found)) for name, found in answers.items()}
    if set(tokens.values()) != {len(prompts) * new}:
        raise InputError(f"expected {len(prompts) * new} tokens of each side, found {tokens}")
    times = interleaved(work, rounds, quiet=True)
    cells = {}
    for name in [name for name in sides if name != ENGINE]:
        found = compare({one: times[one] for one in (ENGINE, name)}, tokens, len(prompts), name)
        same = sum(map(list.__eq__, answers[name], answers[ENGINE]))
        cells[name] = {
            "tokens_per_second": found["tokens_per_second"],
            "ratio": found["ratio"][ENGINE],
            "ratio_range": found["ratio_range"][ENGINE],
            "same": f"{same}/{len(prompts)}",
        }
    return {"settings": settings, "peers": cells}


def open_sides(arguments: argparse.Namespace, variant: str, folder: Path) -> dict[str, Any]:
    """Opens the engine and the peers of its precision; says which are missing."""
    new, integers = arguments.new_tokens, variant.rpartition("-")[2] in ("int8", "int4")
    precision = "int8" if integers else "float32"
    opening: dict[str, Callable[[], dict[str, Generating]]] = {
        f"CTranslate2 {precision}": partial(
            open_ctranslate2, arguments.model, folder, precision, new
        ),
        f"genai {'int4' if integers else 'fp32'}": partial(
            open_genai, arguments.model, folder, "int4" if integers else "fp32", new
        ),
        "transformers": partial(open_transformers, arguments.model, new),
    }
    sides = {ENGINE: open_engine(arguments.bundle, variant, new)}
    for name, opened in opening.items():
        try:
            sides[name] = opened()
        except (ImportError, ValueError, subprocess.CalledProcessError, TransferryError) as error:
            print(f"left out: {name} ({type(error).__name__}: {error})", flush=True)
    return sides


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--variants", default="cpu-fp32,cpu-int8")
    parser.add_argument("--prompts", type=numbers, default=[15, 200])
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="16 rows, 3 rounds, short prompts")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rows, arguments.rounds, arguments.prompts = 16, 3, arguments.prompts[:1]
    torch.set_num_threads(usable_cores())
    cells = []
    try:
        lines = read_sentences(arguments.text)
        for variant in arguments.variants.split(","):
            with tempfile.TemporaryDirectory() as folder:
                sides = open_sides(arguments, variant, Path(folder))
                for length in arguments.prompts:
                    engine = Engine.load(arguments.bundle, variant=variant)
                    prompts = cut_prompts(lines, engine, arguments.rows, length)
                    found = measure(sides, prompts, arguments.new_tokens, arguments.rounds)
                    cells.append({"variant": variant, "prompt": length, **found})
                    print(f"{variant}, prompts of {length}: {found['settings']}", flush=True)
    except TransferryError as error:
        parser.exit(error.exit_code, f"{parser.prog}: {error}\n")
    rows = [
        (
            cell["variant"],
            cell["prompt"],
            name,
            *peer["tokens_per_second"].values(),
            f"{peer['ratio']:.2f}",
            "{:.2f} to {:.2f}".format(*peer["ratio_range"]),
            peer["same"],
            processor(),
        )
        for cell in cells
        for name, peer in cell["peers"].items()
    ]
    head = ("variant", "prompt", "peer", "engine tokens/s", "its tokens/s", "ratio", "by round")
    print(f"\n{table((*head, 'same rows', 'processor'), rows)}\n")
    peers = "ctranslate2", "transformers", "onnxruntime-genai", "torch"
    here = environment(*peers)
    print(json.dumps({"cells": cells, "rounds": arguments.rounds, **here}))


if __name__ == "__main__":
    main()
