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
from transferry.build_model.checkpoint import Checkpoint, load_checkpoint
from transferry.build_model.model.transformer import Transformer
from transferry.export.bundle import export_bundle
from transferry.export.oracle.cases import fitting
from transferry.export.verify import verify_against
from transferry.runtime.errors import TransferryError
from transferry.runtime.ort.open_model import open_model
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.tables import table

JUDGED = (("portable", "cpu-fp32"), ("cpu-int8",))  # in one bundle: int8 may be refused at export
VARIANTS = [name for names in JUDGED for name in names]
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
            for names in JUDGED:
                found |= judge(other, texts, names, lines[arguments.rows :])
            for name, verdict in found.items():
                print(run.name, kind, name, verdict, flush=True)
    rows = [
        (name, *("passed" if found[key] == "passed" else "ACCUSED" for key in VARIANTS))
        for name, found in results.items()
    ]
    print(table(("bundle", *VARIANTS), rows))
    print(json.dumps(results))


def judge(
    checkpoint: Checkpoint, texts: list[str], names: tuple[str, ...], calibrate: list[str]
) -> dict[str, str]:
    """Exports and verifies variants; returns what `export` or `verify` says of each."""
    with tempfile.TemporaryDirectory(prefix="transferry-") as place:
        try:
            bundle = export_bundle(
                checkpoint,
                Path(place, "bundle"),
                texts=texts,
                variants=names[-1:],
                calibrate=calibrate if "cpu-int8" in names else (),
            )
        except TransferryError as error:
            return dict.fromkeys(names, f"not exported: {error}")
        found = {}
        for name in names:
            model = open_model(bundle, bundle.variant(name), SessionOptions())
            report = verify_against(checkpoint, bundle, model, texts)
            found[name] = "; ".join(report.faults[:2]) or "passed"
        return found


if __name__ == "__main__":
    main()
