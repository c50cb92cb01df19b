"""How fast does an encoder-only model embed texts, beside other engines?

    pip install ".[export,peers]"
    python benchmarks/encoders.py MODEL BUNDLE TEXT [--variants cpu-fp32,cpu-int8] [--tokens 0,200]
        [--rows 512] [--rounds 9] [--quick]

On the CPU: texts in, means of the last hidden states out, unnormalised. MODEL is a folder of
transformers, BUNDLE the export of its import. For each number of `--tokens` the text is cut into
paragraphs of about so many tokens; with 0 each line is a text. The peers: CTranslate2's Encoder,
converted from MODEL, with its int8 beside an int8 variant, and transformers in float32. Both read
ids of the bundle's tokenizer, in batches of similar length. Batch size and threads of each are
tuned, rounds interleaved. `distance` is the largest difference of a vector's number from torch's,
over the largest number. `ratio` is the engine's texts per second over a peer's, by median time. The
last line is JSON. `--quick` takes about two minutes for a variant.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ctranslate2_model import import_ctranslate2
from rounds import compare, environment, fastest, interleaved, processor
from sentences import read_sentences
from throughput import numbers
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.decoding.batching import BatchOptions
from transferry.runtime.engine.engine import Engine
from transferry.runtime.engine.tasks.embed import embed
from transferry.runtime.errors import InputError, TransferryError
from transferry.runtime.hardware import usable_cores
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.tables import table

# Vectors of each text, for texts and rows per batch.
Embedding = Callable[[Sequence[str], int], NDArray[np.float32]]
# Means `[rows, width]` of the hidden states of ids `[rows, length]` with a mask.
Means = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.float32]]

ENGINE, TORCH = "engine", "transformers"
PACKAGES = "ctranslate2", "transformers", "torch"
# Rows per batch to try.
BATCH_ROWS = (2, 4, 8, 16, 32, 64)


def layouts() -> list[tuple[int, int]]:
    """Returns concurrent batches and threads of each."""
    cores = usable_cores()
    return list(dict.fromkeys([(cores, 1), (1, cores)]))


def open_engine(bundle: Path, variant: str) -> dict[str, Embedding]:
    """Opens the engine in each layout."""
    found: dict[str, Embedding] = {}
    for replicas, threads in layouts():
        options = SessionOptions(threads=threads)
        engine = Engine(bundle, options, variant=variant, replicas=replicas)
        found[f"{replicas} x {threads}"] = partial(_engine_vectors, engine)
    return found


def _engine_vectors(engine: Engine, texts: Sequence[str], rows: int) -> NDArray[np.float32]:
    engine.batches = BatchOptions(rows=rows, tokens=rows << 9)
    vectors = []
    for result in embed(engine, texts, pooling="mean"):
        if result.error is not None or result.vector is None:
            raise InputError(f"a text has no vector: {result.error}; leave it out")
        vectors.append(result.vector)
    return np.stack(vectors)


class Batched:
    """A peer that computes padded batches, one after another."""

    def __init__(self, bundle: Bundle, means: Means) -> None:
        self.tokenizer, self.means = bundle.tokenizer, means

    def __call__(self, texts: Sequence[str], rows: int) -> NDArray[np.float32]:
        """Embeds texts in batches of similar length."""
        wrap = self.tokenizer.special.wrap
        ids = [wrap(each) for each in self.tokenizer.encode_batch(texts)]
        order = sorted(range(len(ids)), key=lambda row: len(ids[row]))
        vectors: list[NDArray[np.float32]] = [np.empty(0, np.float32)] * len(ids)
        for start in range(0, len(order), rows):
            batch = order[start : start + rows]
            length = len(ids[batch[-1]])
            padded = np.full((len(batch), length), self.tokenizer.special.pad_id, np.int64)
            mask = np.zeros((len(batch), length), np.int64)
            for place, row in enumerate(batch):
                padded[place, : len(ids[row])] = ids[row]
                mask[place, : len(ids[row])] = 1
            for row, vector in zip(batch, self.means(padded, mask), strict=True):
                vectors[row] = vector
        return np.stack(vectors)


def mean(hidden: NDArray[np.float32], mask: NDArray[np.int64]) -> NDArray[np.float32]:
    """Returns means `[rows, width]` of hidden states `[rows, length, width]` where mask is 1."""
    weights = mask[..., None].astype(np.float32)
    found: NDArray[np.float32] = (hidden * weights).sum(axis=1) / weights.sum(axis=1)
    return found


def open_transformers(model: Path, bundle: Bundle) -> dict[str, Embedding]:
    """Opens the model in float32, all threads on one batch."""
    from transformers import AutoModel

    opened: Any = AutoModel.from_pretrained(model, dtype=torch.float32)
    opened.eval()

    @torch.inference_mode()
    def means(ids: NDArray[np.int64], mask: NDArray[np.int64]) -> NDArray[np.float32]:
        tensors = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
        return mean(opened(**tensors).last_hidden_state.numpy(), mask)

    return {f"1 x {usable_cores()}": Batched(bundle, means)}


def open_ctranslate2(
    model: Path, bundle: Bundle, folder: Path, precision: str
) -> dict[str, Embedding]:
    """Converts the model and opens it in each layout."""
    ctranslate2 = import_ctranslate2()
    from ctranslate2.converters import TransformersConverter

    out = folder / f"ctranslate2-{precision}"
    TransformersConverter(str(model)).convert(str(out), quantization=precision)
    found: dict[str, Embedding] = {}
    for inter, intra in layouts():
        encoder = ctranslate2.Encoder(
            str(out), "cpu", compute_type=precision, inter_threads=inter, intra_threads=intra
        )
        found[f"{inter} x {intra}"] = partial(_ctranslate2_vectors, encoder, bundle, inter)
    return found


def _ctranslate2_vectors(
    encoder: Any, bundle: Bundle, inter: int, texts: Sequence[str], rows: int
) -> NDArray[np.float32]:
    from concurrent.futures import ThreadPoolExecutor

    def means(ids: NDArray[np.int64], mask: NDArray[np.int64]) -> NDArray[np.float32]:
        lengths = mask.sum(axis=1)
        rows = [row[:length].tolist() for row, length in zip(ids, lengths, strict=True)]
        return mean(np.asarray(encoder.forward_batch(rows).last_hidden_state), mask)

    # forward_batch computes one batch a call: as many calls at once as it has workers.
    shares = [texts[number::inter] for number in range(inter)]
    batched = Batched(bundle, means)
    found = np.empty((len(texts), bundle.manifest.model["d_model"]), np.float32)
    with ThreadPoolExecutor(inter) as pool:
        for number, vectors in enumerate(pool.map(lambda share: batched(share, rows), shares)):
            found[number::inter] = vectors
    return found


def cut_texts(lines: Sequence[str], bundle: Bundle, rows: int, tokens: int) -> list[str]:
    """Returns the first lines, or paragraphs of about `tokens` tokens cut from the whole text."""
    if not tokens:
        return list(lines[:rows])
    encode, decode = bundle.tokenizer.encode, bundle.tokenizer.decode
    ids = encode(" ".join(lines))
    if rows * tokens > len(ids):
        raise InputError(
            f"expected {rows} times {tokens} tokens of text, found {len(ids)}; give more text or "
            "fewer rows"
        )
    return [decode(ids[row * tokens : (row + 1) * tokens]) for row in range(rows)]


def measure(
    sides: dict[str, dict[str, Embedding]], texts: Sequence[str], rounds: int
) -> dict[str, Any]:
    """Tunes and times all sides on the same texts."""
    work, settings = {}, {}
    for name, opened in sides.items():
        choice = {
            (layout, rows): partial(embedding, texts, rows)
            for layout, embedding in opened.items()
            for rows in BATCH_ROWS
        }
        best = fastest(choice, 1 if rounds < 9 else 2)
        settings[name], work[name] = f"{best[0]}, {best[1]} rows", choice[best]
    vectors = {name: run() for name, run in work.items()}
    exact = vectors[TORCH]
    times = interleaved(work, rounds, quiet=True)
    same, cells = dict.fromkeys(work, len(texts)), {}
    for name in work:
        distance = float(np.abs(vectors[name] - exact).max() / np.abs(exact).max())
        cells[name] = {"distance": distance, "texts_per_second": len(texts) / min(times[name])}
        if name != ENGINE:
            found = compare({one: times[one] for one in (ENGINE, name)}, same, len(texts), name)
            cells[name] |= {key: found[key][ENGINE] for key in ("ratio", "ratio_range")}
            cells[name]["texts_per_second"] = found["sentences_per_second"][name]
            cells[ENGINE]["texts_per_second"] = found["sentences_per_second"][ENGINE]
    return {"settings": settings, "sides": cells}


def open_sides(arguments: argparse.Namespace, variant: str, folder: Path) -> dict[str, Any]:
    """Opens the engine and the peers; says which are missing."""
    bundle, model = Bundle.load(arguments.bundle), arguments.model
    precision = "float32" if bundle.variant(variant).precision == "float32" else "int8"
    sides = {ENGINE: open_engine(arguments.bundle, variant)}
    sides[TORCH] = open_transformers(model, bundle)
    name = f"CTranslate2 {precision}"
    try:
        sides[name] = open_ctranslate2(model, bundle, folder, precision)
    except (ValueError, TransferryError) as error:
        print(f"left out: {name} ({error})", flush=True)
    return sides


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--variants", default="cpu-fp32,cpu-int8")
    parser.add_argument(
        "--tokens", type=numbers, default=[0], help="of a paragraph; 0 for whole lines"
    )
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="64 rows, 3 rounds")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rows, arguments.rounds = 64, 3
    torch.set_num_threads(usable_cores())
    cells = []
    try:
        bundle = Bundle.load(arguments.bundle)
        lines = read_sentences(arguments.text)
        cut = {
            tokens: cut_texts(lines, bundle, arguments.rows, tokens) for tokens in arguments.tokens
        }
        for variant in arguments.variants.split(","):
            with tempfile.TemporaryDirectory() as folder:
                sides = open_sides(arguments, variant, Path(folder))
                for tokens, texts in cut.items():
                    found = measure(sides, texts, arguments.rounds)
                    cells.append({"variant": variant, "tokens": tokens, **found})
                    print(f"{variant}, {tokens or 'own'} tokens: {found['settings']}", flush=True)
    except TransferryError as error:
        parser.exit(error.exit_code, f"{parser.prog}: {error}\n")
    rows = [
        (
            cell["variant"],
            cell["tokens"] or "lines",
            name,
            f"{side['texts_per_second']:.0f}",
            f"{side['ratio']:.2f}" if "ratio" in side else "",
            "{:.2f} to {:.2f}".format(*side["ratio_range"]) if "ratio" in side else "",
            f"{side['distance']:.1e}",
            processor(),
        )
        for cell in cells
        for name, side in cell["sides"].items()
    ]
    head = ("variant", "tokens", "side", "texts/s", "engine over it", "by round")
    print(f"\n{table((*head, 'distance', 'processor'), rows)}\n")
    here = environment(*PACKAGES)
    print(json.dumps({"cells": cells, "rounds": arguments.rounds, **here}))


if __name__ == "__main__":
    main()
