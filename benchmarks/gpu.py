"""What do the graphs do on a GPU? Answers, nodes left to the CPU, speed, memory, a profile.

    python benchmarks/gpu.py FOLDER --out OUT [--provider cuda] [--minutes 8] [--stages A,B]
    python benchmarks/gpu.py FOLDER --make small,llama,bert [--tiny]

One command without a network. FOLDER holds models made from seeds: a BART of the size of preset
small, a Llama of 100 million parameters and BERT-base (`shapes.py`), each as a folder of
transformers, a checkpoint, and a bundle with portable, cuda-fp16 and cuda-bf16. Models that are
missing are made first, the second and third beside the stages of the first. Every stage is a
process of its own, prints a line, and writes OUT/STAGE.json as it ends; one that fails or has no
time left stops no other. Weights are random, so all answers have `--new-tokens` tokens.
`--provider cpu --tiny` runs the same stages on the portable variant of models of one layer, in
small batches and one round. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_stages import VARIANTS, Setup, corpus, run_stage, transferry
from throughput import numbers

MODELS = ("small", "llama", "bert")
STAGES = (
    *("doctor", "small-recorded", "small-nodes", "small-speed", "small-profile", "small-alone"),
    *("llama-recorded", "llama-nodes", "llama-speed", "bert-recorded", "bert-nodes", "bert-speed"),
    *("llama-profile", "llama-alone", "small-verify", "bert-verify", "llama-verify", "tests"),
    "llama-compiled",
)
MINUTES = 8.0
# Seconds after which a stage is stopped; longer where there are more minutes.
LONGEST = {"verify": 120, "compiled": 150, "tests": 120}


def make(folder: Path, model: str, *, tiny: bool) -> None:
    """Makes a model from its seed, its checkpoint and its bundle."""
    import shapes

    (folder / model).mkdir(parents=True)
    run, theirs = folder / model / "checkpoint", folder / model / "model"
    shapes.make(model, corpus(3000), theirs, 1 if tiny else None)
    require(transferry("import", theirs, "--out", run))
    options = [f"--variant={variant}" for variant in VARIANTS[1:]]
    require(transferry("export", run, "--out", folder / model / "draft", *options))
    (folder / model / "draft").rename(folder / model / "bundle")


def require(done: subprocess.CompletedProcess[str]) -> None:
    """Raises RuntimeError with the last lines of a command that failed."""
    if done.returncode:
        raise RuntimeError(f"{done.args[3:5]}: {done.stderr[-2000:]}")


def line_of(stage: str, found: Mapping[str, Any]) -> str:
    """One line of a stage's record."""
    text = json.dumps(found)
    return f"{stage}: {text if len(text) < 400 else text[:400] + ' ...'}"


def stage_apart(
    command: Sequence[str], path: Path, limit: float, popen: Any = subprocess.Popen
) -> dict[str, Any]:
    """Runs a stage in a process of its own; returns its record, and how it ended if not well."""
    path.unlink(missing_ok=True)
    with popen(command, start_new_session=True) as stage:
        try:
            code = stage.wait(limit)
            ended: dict[str, Any] = {"exit": code} if code else {}
        except subprocess.TimeoutExpired:
            os.killpg(stage.pid, signal.SIGKILL)  # with the commands that it runs
            ended = {"stopped": f"after {limit:.0f} s"}
    return ended | (json.loads(path.read_text(encoding="utf-8")) if path.exists() else {})


def run_all(arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs the stages, each in a process of its own, while time is left."""
    began = time.monotonic()
    arguments.out.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {}
    me = [sys.executable, str(Path(__file__).resolve()), str(arguments.folder)]
    tiny = ["--tiny"] if arguments.tiny else []
    same = [
        *("--out", arguments.out, "--provider", arguments.provider),
        *("--batches", ",".join(map(str, arguments.batches))),
        *("--new-tokens", arguments.new_tokens, "--rounds", arguments.rounds),
    ]
    makers: dict[str, subprocess.Popen[str]] = {}
    for model in MODELS:
        if (arguments.folder / model / "bundle").exists():
            continue
        log = (arguments.out / f"make-{model}.log").open("w", encoding="utf-8")
        command = [*me, "--make", model, *tiny]
        makers[model] = subprocess.Popen(command, stdout=log, stderr=log, text=True)
    for stage in arguments.stages:
        model = stage.rpartition("-")[0]
        left = 60 * arguments.minutes - (time.monotonic() - began)
        longest = LONGEST.get(stage.rpartition("-")[2], 90) * max(1, arguments.minutes / MINUTES)
        limit = min(left, longest)
        try:
            if model in makers:
                code = makers[model].wait(max(left, 0))
                if code:
                    raise RuntimeError((arguments.out / f"make-{model}.log").read_text()[-500:])
                limit = min(60 * arguments.minutes - (time.monotonic() - began), limit)
            if limit < 5:
                raise RuntimeError("no time left")
            command = [*me, *map(str, same), "--stage", stage]
            found = stage_apart(command, arguments.out / f"{stage}.json", limit)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            found = {"error": str(error)[-500:]}
        record[stage] = found
        print(line_of(stage, found), flush=True)
    for maker in makers.values():
        maker.kill()
    return record


def main() -> None:
    """Makes models, runs one stage, or runs all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path("gpu"))
    parser.add_argument("--provider", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--stages", type=lambda text: text.split(","), default=STAGES)
    parser.add_argument("--batches", type=numbers, default=[1, 32, 256, 1024])
    parser.add_argument("--new-tokens", type=int, default=32, help="per answer, at most 52")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--make", type=lambda text: text.split(","), help="models; nothing else")
    parser.add_argument("--tiny", action="store_true", help="models of one layer")
    parser.add_argument("--stage", help="one stage in this process")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.batches, arguments.rounds = [1, 4, 16], 1
    for model in arguments.make or ():
        make(arguments.folder, model, tiny=arguments.tiny)
        print(f"{arguments.folder / model} is made", flush=True)
    if arguments.make:
        return
    if arguments.stage:
        setup = Setup(
            *(arguments.folder, arguments.provider, arguments.batches),
            *(arguments.new_tokens, arguments.rounds, arguments.out / f"{arguments.stage}.json"),
        )
        started = time.perf_counter()
        found = setup.record()
        found.update(run_stage(setup, arguments.stage))
        found["seconds"] = round(time.perf_counter() - started, 1)
        return
    record = run_all(arguments)
    print(json.dumps(record))


if __name__ == "__main__":
    main()
