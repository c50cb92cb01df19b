"""What does screened argmax gain in greedy search without scores?

    python benchmarks/screening.py BUNDLE TEXT [--variant cpu-fp32] [--rows 1000] [--rounds 9]

The same variant with and without it, in interleaved rounds. The last line is JSON; `ratio` is the
median time without over the median time with it, `full` and `candidates` count rows with all logits
and tokens with exact logits.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from pathlib import Path

from rounds import interleaved
from sentences import read_sentences
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.engine.engine import Engine
from transferry.runtime.hardware import usable_cores
from transferry.runtime.ort.fused_decoder import FusedDecoder
from transferry.runtime.ort.session import SessionOptions


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--variant", default="cpu-fp32")
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--max-length", type=int, default=100)
    arguments = parser.parse_args()

    texts = read_sentences(arguments.text, arguments.rows)
    options = GenerationOptions(max_length=arguments.max_length, scores=False)
    bundle = Bundle.load(arguments.bundle)
    variant = bundle.variant(arguments.variant)
    screened = FusedDecoder(bundle, variant, SessionOptions())
    if screened.lm_head.screened is None:
        parser.error(f"variant {variant.name} of {arguments.bundle} is not screened")
    plain = FusedDecoder(bundle, dataclasses.replace(variant, screen={}), SessionOptions())
    engines = {
        name: Engine(bundle, decoder, replicas=usable_cores())
        for name, decoder in (("screened", screened), ("plain", plain))
    }

    def answer(engine: Engine) -> list[tuple[int, ...]]:
        return [result.hypotheses[0].tokens for result in engine.generate(texts, options)]

    answers = {name: answer(engine) for name, engine in engines.items()}  # also warms both up
    work = {name: lambda engine=engine: answer(engine) for name, engine in engines.items()}
    times = interleaved(work, arguments.rounds)
    ratios = [one / other for one, other in zip(times["plain"], times["screened"], strict=True)]
    medians = {name: statistics.median(values) for name, values in times.items()}
    pairs = zip(answers["screened"], answers["plain"], strict=True)
    print(
        json.dumps(
            {
                "ratio": round(medians["plain"] / medians["screened"], 3),
                "ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
                "seconds": {name: round(median, 3) for name, median in medians.items()},
                "rows": len(texts),
                "rows_that_differ": sum(one != other for one, other in pairs),
                "vocabulary": screened.vocabulary_size,
                "cores": usable_cores(),
                **dataclasses.asdict(screened.lm_head.screened.counts),
            }
        )
    )


if __name__ == "__main__":
    main()
