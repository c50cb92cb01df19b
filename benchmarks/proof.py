"""How long does `verify` take compared with answering the same text once on both sides?

    python benchmarks/proof.py CHECKPOINT BUNDLE TEXT [--rows 1000] [--rounds 1]

torch and the bundle answer with greedy search and with a beam of 4, in the batches of `verify`;
then `verify` itself runs. One thread, interleaved rounds. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

from rounds import interleaved
from sentences import read_sentences
from transferry.build_model.checkpoint import load_checkpoint
from transferry.export.oracle.cases import source_of
from transferry.export.oracle.effort import LONGEST_ANSWER
from transferry.export.oracle.oracle import ROWS
from transferry.export.oracle.searches import search_settings
from transferry.export.torch_model import TorchDecoder
from transferry.export.verify import Request, verify_against
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.decoding.batching import length_batches
from transferry.runtime.decoding.decoder import Decoder
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.decoding.search import search
from transferry.runtime.ort.encoder import EncoderModel
from transferry.runtime.ort.open_model import open_model
from transferry.runtime.ort.session import SessionOptions


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    checkpoint, bundle = load_checkpoint(arguments.run), Bundle.load(arguments.bundle)
    tokenizer, config = checkpoint.tokenizer, checkpoint.model.config
    texts = read_sentences(arguments.text, arguments.rows)
    sources = [
        source_of(text, tokenizer, config, number) for number, text in enumerate(texts, start=1)
    ]
    variant = bundle.variant()
    served = open_model(bundle, variant, SessionOptions())
    if isinstance(served, EncoderModel):
        parser.error(f"{arguments.bundle} has no decoder")
    sides: tuple[Decoder[Any], ...] = (TorchDecoder(checkpoint.model), served)

    def answer() -> None:
        for name in ("greedy", "beam 4"):
            generation = bundle.manifest.generation
            settings = search_settings(name, generation, config, sources, LONGEST_ANSWER)
            options = GenerationOptions(**settings)
            lengths = [len(source) for source in sources]
            for batch in length_batches(lengths, ROWS // options.beam, 4096):
                for side in sides:
                    search(side, [sources[row] for row in batch], options, tokenizer.special)

    def verify() -> None:
        opened = open_model(bundle, variant, SessionOptions())
        verify_against(checkpoint, bundle, opened, Request(texts)).require()

    times = interleaved({"answer": answer, "verify": verify}, arguments.rounds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(
        json.dumps(
            {
                "ratio": round(medians["verify"] / medians["answer"], 2),
                "seconds": {name: round(value, 1) for name, value in medians.items()},
                "rows": len(texts),
            }
        )
    )


if __name__ == "__main__":
    main()
