"""Does `verify` accuse an honest bundle?

    python benchmarks/honest.py RUN TEXT [RUN TEXT ...] [--rows 100]

Each run is exported as it is, with new random weights, with an embedding so small or so large that
logits are tiny or huge, and with weights rounded to bfloat16; portable, cpu-fp32 and cpu-int8,
calibrated on the lines after the first of TEXT. All must pass. The last line is JSON.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from sentences import read_sentences
from transferry.build_model.checkpoint import load_checkpoint
from transferry.build_model.transformer import Transformer
from transferry.export.bundle import export_bundle
from transferry.export.parity.cases import fitting
from transferry.export.verify import verify_against
from transferry.runtime.errors import TransferryError
from transferry.runtime.ort.open_model import open_model
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.tables import table

VARIANTS = ("portable", "cpu-fp32", "cpu-int8")
CALIBRATED = 200


def scaled(factor: float) -> Callable[[Transformer], Transformer]:
    """Returns what makes the embedding larger."""

    def change(model: Transformer) -> Transformer:
        model.embedding.weight.mul_(factor)
        return model

    return change


def untrained(model: Transformer) -> Transformer:
    """Returns a model with new random weights."""
    torch.manual_seed(0)
    return Transformer(model.config).eval()


KINDS: dict[str, Callable[[Transformer], Transformer]] = {
    "as trained": lambda model: model,
    "near-random": untrained,
    "tiny logits": scaled(0.01),
    "huge logits": scaled(30.0),
    "bfloat16 weights": lambda model: model.bfloat16().float(),
}


def main() -> None:
    """Exports, verifies and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", type=Path, nargs="+", metavar="RUN TEXT")
    parser.add_argument("--rows", type=int, default=100)
    arguments = parser.parse_args()
    results: dict[str, dict[str, str]] = {}
    for run, text in zip(arguments.folders[::2], arguments.folders[1::2], strict=True):
        checkpoint = load_checkpoint(run)
        lines = read_sentences(text, arguments.rows + CALIBRATED)
        texts = fitting(lines[: arguments.rows], checkpoint.tokenizer, checkpoint.model.config)
        for kind, change in KINDS.items():
            with torch.no_grad():
                other = replace(checkpoint, model=change(copy.deepcopy(checkpoint.model)))
            found = results[f"{run.name}, {kind}"] = {}
            with tempfile.TemporaryDirectory(prefix="transferry-") as place:
                try:
                    bundle = export_bundle(
                        other,
                        Path(place, "bundle"),
                        texts=texts,
                        variants=VARIANTS[1:],
                        calibrate=lines[arguments.rows :],
                    )
                except TransferryError as error:
                    found["export"] = str(error)
                    print(run.name, kind, error, flush=True)
                    continue
                for name in VARIANTS:
                    model = open_model(bundle, bundle.variant(name), SessionOptions())
                    report = verify_against(other, bundle, model, texts)
                    found[name] = "; ".join(report.faults[:2]) or "passed"
                    print(run.name, kind, name, found[name], flush=True)
    rows = [
        (name, *("passed" if found.get(key) == "passed" else "ACCUSED" for key in VARIANTS))
        for name, found in results.items()
    ]
    print(table(("bundle", *VARIANTS), rows))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
