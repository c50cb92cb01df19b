"""How many answers of float32 does int8 keep, in the engine and in CTranslate2?

    pip install ".[export,peers]"
    python benchmarks/kept_answers.py CHECKPOINT BUNDLE TEXT [--variant cpu-int8] [--rows 300]

BUNDLE is the export of CHECKPOINT with `cpu-fp32` and the variant. Greedy search and beam 4.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ctranslate2_model import CTranslate2Model, write_ctranslate2
from sentences import read_sentences
from transferry.build_model.checkpoint import load_checkpoint
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.engine.engine import Engine

LONGEST = 60  # tokens of an answer


def of_engine(bundle: Path, variant: str, lines: Sequence[str], beam: int) -> list[str]:
    """Returns the answers of a variant."""
    with Engine.load(bundle, variant=variant) as engine:
        rows = engine.generate(lines, beam=beam, max_length=LONGEST)
        return [row.hypotheses[0].text for row in rows]


def of_ctranslate2(
    checkpoint: Path, bundle: Path, precision: str, lines: Sequence[str], beam: int
) -> list[str]:
    """Returns the answers of CTranslate2 with the same weights."""
    options = GenerationOptions(beam=beam, max_length=LONGEST)
    with tempfile.TemporaryDirectory() as folder:
        write_ctranslate2(load_checkpoint(checkpoint), Path(folder) / "model", precision)
        model = CTranslate2Model(Path(folder) / "model", bundle, precision, 1, 1)
        return [answer.text for answer in model.answer(lines, options, 32)]


def main() -> None:
    """Prints a line for each beam size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("checkpoint", "bundle", "text"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--variant", default="cpu-int8")
    parser.add_argument("--rows", type=int, default=300)
    given = parser.parse_args()
    lines = read_sentences(given.text, given.rows)
    for beam in (1, 4):
        ours = [of_engine(given.bundle, name, lines, beam) for name in ("cpu-fp32", given.variant)]
        theirs = [
            of_ctranslate2(given.checkpoint, given.bundle, name, lines, beam)
            for name in ("float32", "int8")
        ]
        kept = [sum(map(str.__eq__, *side)) for side in (ours, theirs)]
        print(f"beam {beam}: engine {kept[0]}, CTranslate2 {kept[1]} of {len(lines)}")


if __name__ == "__main__":
    main()
