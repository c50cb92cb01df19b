"""Peak memory of `transferry export`, phase by phase, of a random Llama or of a run.

python benchmarks/export_memory.py --layers 18 --variants cpu-fp32
python benchmarks/export_memory.py --width 2048 --inner 5632 --layers 19 --variants cpu-int8
python benchmarks/export_memory.py --run runs/ende --variants cpu-fp32,cpu-int8

The memory of a phase is the kernel's high-water mark of resident memory (VmHWM), reset before it;
pages of mapped files count, shared or not. Linux only.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import import_memory
from transferry.build_model.importing.huggingface.importer import import_checkpoint

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
PEAK = "5"  # what, written to clear_refs, resets VmHWM (man 5 proc)
SAMPLED = 0.02  # seconds between two looks at how much of the memory is mapped files
LINES = 12  # of text to calibrate on, 8 tokens each


@dataclass(frozen=True)
class Phase:
    """Resident memory of a phase, in bytes.

    Attributes:
        name: The phase.
        peak: Most of it.
        mapped: Pages of mapped files, when all was most.
        seconds: Processor time of the phase.
    """

    name: str
    peak: int
    mapped: int
    seconds: float


class Phases:
    """Measures the phases of this process, one after another."""

    def __init__(self) -> None:
        self.found: list[Phase] = []
        self._name, self._begun, self._most = "imports", 0.0, (0, 0)
        threading.Thread(target=self._watch, daemon=True).start()

    def begin(self, name: str) -> None:
        """Ends the current phase and begins one."""
        now = time.process_time()
        seconds = round(now - self._begun, 1)
        self.found.append(Phase(self._name, status("VmHWM"), self._most[1], seconds))
        # A large model takes an hour: whoever stops it keeps the phases that ended.
        print(f"{self._name}: {self.found[-1].peak >> 20} MiB, {seconds} s", file=sys.stderr)
        self._name, self._begun, self._most = name, now, (0, 0)
        CLEAR.write_text(PEAK)

    def _watch(self) -> None:
        while True:
            self._most = max(self._most, (status("VmRSS"), status("RssFile")))
            time.sleep(SAMPLED)


def status(name: str) -> int:
    """Returns an entry of /proc/self/status in bytes."""
    found = re.search(rf"{name}:\s*(\d+) kB", STATUS.read_text())
    assert found is not None
    return int(found[1]) * 1024


def export(run: Path, out: Path, variants: Sequence[str]) -> dict[str, Any]:
    """Exports a run in this process; returns the memory of each phase."""
    phases = Phases()
    from transferry.build_model.checkpoint import load_checkpoint, load_samples
    from transferry.export import bundle

    base = status("VmRSS")
    verify = bundle.verify_variant

    def verified(checkpoint: Any, made: Any, variant: Any, *others: Any) -> None:
        phases.begin(f"verifying {variant.name}")
        verify(checkpoint, made, variant, *others)

    bundle.verify_variant = verified  # type: ignore[assignment]
    phases.begin("loading")
    checkpoint = load_checkpoint(run)
    texts = load_samples(run) or [
        " ".join(f"t{line * place + 2}" for place in range(8)) for line in range(LINES)
    ]
    bundle.export_bundle(
        checkpoint,
        out,
        texts=texts,
        variants=variants,
        calibrate=texts if "cpu-int8" in variants else (),
        force=True,
        say=phases.begin,
    )
    phases.begin("")
    weights = sum(4 * each.numel() for each in checkpoint.model.parameters())
    return {
        "variants": list(variants),
        "weights_bytes": weights,
        "imports_bytes": base,
        "peak_bytes": max(each.peak for each in phases.found),
        "seconds": round(time.process_time(), 1),
        "phases": [asdict(each) for each in phases.found],
    }


def make_run(run: Path, args: argparse.Namespace) -> None:
    """Imports a random Llama whose weights are in bfloat16."""
    import_memory.WIDTH, import_memory.INNER = args.width, args.inner
    import_memory.VOCABULARY = args.vocabulary
    with tempfile.TemporaryDirectory(dir=args.place) as theirs:
        import_memory.make(Path(theirs), args.layers, torch.bfloat16, pickled=False, std=0.02)
        import_checkpoint(Path(theirs), run, force=True)


def main() -> None:
    """Prints a line per phase, and JSON last."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--inner", type=int, default=2816)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--variants", default="cpu-fp32", help="separated by commas")
    parser.add_argument("--run", type=Path, help="a run, in place of the Llama")
    parser.add_argument("--place", help="folder for temporary files")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)  # the measured process itself
    args = parser.parse_args()
    variants = args.variants.split(",")
    if args.out is not None:
        print(json.dumps(export(args.run, args.out, variants)))
        return
    with tempfile.TemporaryDirectory(dir=args.place) as place:
        run = args.run or Path(place, "run")
        if args.run is None:
            make_run(run, args)
        command = [sys.executable, __file__, "--run", str(run), "--out", str(Path(place, "bundle"))]
        command += ["--variants", args.variants]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    weights = found["weights_bytes"]
    print(
        f"weights in float32: {weights >> 20} MiB; Python and its packages: "
        f"{found['imports_bytes'] >> 20} MiB"
    )
    for phase in [
        *found["phases"],
        {"name": "all", "peak": found["peak_bytes"], "mapped": 0, "seconds": found["seconds"]},
    ]:
        print(
            f"{phase['name']:32} {phase['peak'] >> 20:6} MiB  {phase['peak'] / weights:5.2f} "
            f"weights  mapped {phase['mapped'] >> 20:6} MiB  {phase['seconds']:6} s"
        )
    print(json.dumps({"export_memory": found}))


if __name__ == "__main__":
    main()
