"""How large is onnxruntime's error relative to torch's own float32 error?

    python benchmarks/tolerance.py RUN BUNDLE [RUN BUNDLE ...] [--seeds 5] [--longest 64]

The measurement behind the default of `runtime.proof.compare.Tolerance.factor`: the ratios of each
tensor's error to torch's error, over seeds of the sweep. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from transferry.build_model.checkpoint import load_checkpoint
from transferry.export.oracle.cases import sweep
from transferry.export.oracle.oracle import Oracle
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.ort.open_model import open_model
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.proof.compare import Tolerance


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", type=Path, nargs="+", metavar="RUN BUNDLE")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--longest", type=int, default=64, help="leave out larger sizes")
    arguments = parser.parse_args()
    results = {}
    tolerance = Tolerance()
    for run, folder in zip(arguments.folders[::2], arguments.folders[1::2], strict=True):
        checkpoint = load_checkpoint(run)
        bundle = Bundle.load(folder)
        oracle = Oracle(checkpoint.model, checkpoint.tokenizer.special, tolerance)
        model = open_model(bundle, bundle.variant(), SessionOptions())
        ratios = [
            comparison.error / comparison.budget * tolerance.factor
            for seed in range(arguments.seeds)
            for comparison in oracle.numbers(
                model,
                (
                    case
                    for case in sweep(checkpoint.model.config, seed=1000 * seed)
                    if max(case.source.shape[1], case.past) <= arguments.longest
                ),
            )
            if comparison.reference_error  # else the model was compared with itself
        ]
        results[str(folder)] = {
            "tensors": len(ratios),
            "median": round(float(np.median(ratios)), 2),
            "p99": round(float(np.quantile(ratios, 0.99)), 2),
            "largest": round(max(ratios), 2),
        }
        print(folder, results[str(folder)])
    print(json.dumps(results))


if __name__ == "__main__":
    main()
