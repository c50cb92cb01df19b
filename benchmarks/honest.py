"""Does `verify` accuse a correct bundle?

    PYTHONPATH=. python benchmarks/honest.py FOLDER [--draws 0:49] [--kinds own,llama]

Each draw is a random model: an architecture of our own, or an imported type with one of its tasks;
of odd sizes and positions; with up to three distortions, such as an embedding 1,000 times as large,
a norm of zeros, a bias of -1e4 or equal rows. Every second group is exported by a process in which
torch computes without vector instructions (ATEN_CPU_CAPABILITY=default). `portable` and two other
variants are verified on words, long and repeated rows. Rounding may cost too much, or inputs lie
outside the calibrated range. A bundle is WRONG, rightly refused, if it gives NaN or infinity where
torch gives neither; any other failure accuses a correct bundle. Draws of both are kept.
FOLDER/draws.jsonl has each draw, and the checks that passed near their limit. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from tests.build_model.importing.huggingface.drawn import TYPES, transformers
from tests.build_model.importing.huggingface.encoder_types import ENCODERS
from tests.build_model.importing.huggingface.heads import Theirs
from tests.build_model.importing.toolkits.test_late_interaction import pylate_folder
from tests.build_model.importing.toolkits.test_sentence_transformers import (
    ALL_POOLINGS,
    sentence_folder,
)
from tests.build_model.importing.toolkits.test_sparse_encoders import sparse_folder
from tests.end_to_end.types.test_imported_types import write
from transferry.build_model import checkpoint as saved
from transferry.build_model.checkpoint import load_checkpoint
from transferry.build_model.importing.huggingface.importer import import_pretrained
from transferry.build_model.model.config import ModelConfig
from transferry.build_model.model.transformer import Transformer
from transferry.build_model.train.corpus import builtin_pairs
from transferry.build_model.train.vocabulary import train_bpe
from transferry.export.bundle import Contents, export_bundle
from transferry.export.checks.texts import CALIBRATED
from transferry.export.oracle.cases import fitting
from transferry.export.recipes import RECIPES
from transferry.export.trace.graph import Traces
from transferry.export.verify import Request, verify_against
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.errors import ProviderError, TransferryError
from transferry.runtime.ort.open_model import open_model
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.proof.report import ParityReport
from transferry.runtime.tables import table
from transferry.runtime.tokenizer.special_tokens import PASSAGES, PROMPTS, SOURCES

VARIANTS = (
    *("portable-int8", "cpu-fp32", "cpu-int8", "cpu-int8-blocks", "cpu-int4"),
    "cpu-int8-kernels",
)
KINDS = ("own", *TYPES)
GROUP = 8  # draws that a process exports
TRIES = 6  # of sizes that may not fit each other
CRASHES = (
    *(ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError),
    StrictDataclassError,
)
NEAR = 0.7  # of a limit
WIDTHS = ("hidden_size", "d_model", "n_embd", "dim")
HEADS = re.compile(r"num_attention_heads|(encoder|decoder)_attention_heads|n_heads?|num_heads")
INNER = ("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "hidden_dim")
SPECIAL = {"encoder-decoder": SOURCES, "decoder-only": PROMPTS, "encoder-only": PASSAGES}
LABELS: Mapping[str, dict[str, Any]] = {
    "Model": {},
    "ForSequenceClassification": {"num_labels": 3},
    "ForTokenClassification": {"num_labels": 4},
    "ForQuestionAnswering": {},
    "Rank": {"num_labels": 1},
    **{task: {} for task in ("Embed", "Sparse", "Vectors")},
}
SUFFIXES = {
    "Rank": "ForSequenceClassification",
    "Embed": "Model",
    "Sparse": "ForMaskedLM",
    "Vectors": "Model",
}
Weights = dict[str, Tensor]
Draw = random.Random


def scale(draw: Draw, weights: Weights) -> str:
    """Scales all matrices, or all of one name."""
    stems = sorted({re.sub(r"\d+", "N", name) for name in weights})
    chosen = draw.choice([None, *stems])
    factor = draw.choice([1e-4, 0.01, 0.1, 3.0, 10.0, 100.0, 1e3])
    for name, weight in weights.items():
        if weight.dim() > 1 if chosen is None else re.sub(r"\d+", "N", name) == chosen:
            weight.mul_(factor)
    return f"{chosen or 'matrices'} x {factor:g}"


def scale_embedding(draw: Draw, weights: Weights) -> str:
    """Scales the embedding, which logits of a tied model grow with."""
    factor = draw.choice([1e-3, 0.03, 0.3, 4.0, 30.0, 1e3])
    for name in weights:
        if "embedding.weight" in name:
            weights[name].mul_(factor)
    return f"embedding x {factor:g}"


def far(draw: Draw, weights: Weights) -> str:
    """Moves one entry of a vector far away."""
    name = draw.choice(sorted(name for name, each in weights.items() if each.dim() == 1))
    value = draw.choice([-1e4, 1e4, -50.0, 50.0, 1000.0])
    weights[name].view(-1)[draw.randrange(weights[name].numel())] = value
    return f"{name}[one] = {value:g}"


def zero(draw: Draw, weights: Weights) -> str:
    """Makes a tensor zeros, so that everything after it is equal."""
    name = draw.choice(sorted(weights))
    weights[name].zero_()
    return f"{name} = 0"


def equal_rows(draw: Draw, weights: Weights) -> str:
    """Makes rows of a matrix equal: tokens, labels or channels that tie."""
    name = draw.choice(sorted(name for name, each in weights.items() if each.dim() > 1))
    step = draw.choice([1, 2, 3])
    for first in range(0, len(weights[name]), step):
        weights[name][first:] = weights[name][first] if step == 1 else weights[name][first:]
        weights[name][first : first + step] = weights[name][first].clone()
    return f"{name}: rows equal by {step}"


def channel(draw: Draw, weights: Weights) -> str:
    """Makes one channel of every norm large."""
    factor, place = draw.choice([100.0, 1e3, 1e4]), draw.randrange(8)
    for name, weight in weights.items():
        if "norm" in name and weight.dim() == 1 and len(weight) > place:
            weight[place] *= factor
    return f"channel {place} of norms x {factor:g}"


def choosing(draw: Draw, weights: Weights) -> str:
    """Makes attention a choice."""
    factor = draw.choice([5.0, 30.0])
    for name, weight in weights.items():
        if "query" in name or "key" in name:
            weight.mul_(factor)
    return f"queries and keys x {factor:g}"


def coarse(draw: Draw, weights: Weights) -> str:
    """Rounds weights to few bits, so that sums are exact and tie."""
    kind = draw.choice(["bfloat16", "eighths"])
    for weight in weights.values():
        weight.copy_(weight.bfloat16() if kind == "bfloat16" else (weight * 8).round() / 8)
    return kind


DISTORTIONS: tuple[Callable[[Draw, Weights], str], ...] = (
    *(scale, scale, scale_embedding, scale_embedding, far, zero, equal_rows, channel, choosing),
    coarse,
)


def sizes(draw: Draw, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns changes of the sizes of a configuration of transformers."""
    found: dict[str, Any] = {}
    heads, of_head = draw.choice([1, 1, 2, 3, 4]), draw.choice([8, 8, 12, 16, 24])
    for key in given:
        if key in WIDTHS:
            found[key] = heads * of_head
        elif HEADS.fullmatch(key):
            found[key] = heads
        elif key == "num_key_value_heads":
            found[key] = draw.choice([1, heads])
        elif key in INNER:
            found[key] = draw.choice([8, 24, 40, 130])
    return found


def own(draw: Draw, place: Path) -> str:
    """Saves an architecture of our own with a tokenizer of its own."""
    kind, pairs = draw.choice(sorted(SPECIAL)), builtin_pairs(300, seed=draw.randrange(9))
    size = draw.choice([262, 300, 900, 3000])
    tokenizer = train_bpe([each.source for each in pairs], size, SPECIAL[kind])
    heads, of_head = draw.choice([1, 2, 3, 4]), draw.choice([2, 4, 8, 16, 24])
    layers = {side: draw.choice([1, 1, 2, 3]) for side in ("encoder", "decoder")}
    booleans = ("tied", "bias", "scale_embedding", "embedding_norm", "output_transform")
    fields: dict[str, Any] = {
        **dict(vocabulary_size=tokenizer.vocabulary_size, architecture=kind, heads=heads),
        "d_model": max(8, heads * of_head),
        "encoder_layers": 0 if kind == "decoder-only" else layers["encoder"],
        "decoder_layers": 0 if kind == "encoder-only" else layers["decoder"],
        "d_ff": draw.choice([1, 8, 40, 200]),
        "max_positions": draw.choice([8, 17, 64, 64, 130, 400]),
        "norm_epsilon": draw.choice([1e-12, 1e-5, 1e-3]),
        "norm": draw.choice(["layer", "rms"]),
        "norm_order": draw.choice(["post", "pre", "sandwich", "res-post"]),
        "positions": draw.choice(["sinusoidal", "learned", "rotary", "none"]),
        "activation": draw.choice(["relu", "gelu", "gelu-tanh", "gelu-quick", "swish", "swiglu"]),
        "key_value_heads": draw.choice([0, 1]),
        "decoder_cell": draw.choice(["attention", "attention", "ssru"]),
        **{name: draw.choice([True, False]) for name in (*booleans, "output_bias")},
    }
    config = ModelConfig.from_dict(fields)
    torch.manual_seed(draw.randrange(1000))
    place.mkdir(parents=True)
    saved.save_config(place, config, None)
    tokenizer.save(place)
    saved.save_tensors(place / saved.WEIGHTS, Transformer(config).state_dict())
    return f"{kind} {config.positions} {config.norm_order} {config.max_positions}"


def imported(draw: Draw, kind: str, folder: Path, place: Path) -> str:
    """Imports a type of transformers, with the head of one of its tasks or its own."""
    name, settings = TYPES[kind]
    seed, task = draw.randrange(1000), draw.choice(["", "", *LABELS])
    suffix = SUFFIXES.get(task, task)
    stem = re.sub("(For(MaskedLM|CausalLM|ConditionalGeneration)|LMHeadModel)$", "", name)
    has_heads = kind in ENCODERS or "CausalLM" in name
    if not has_heads or not hasattr(transformers, f"{stem}{suffix}"):
        task = ""
    changes = sizes(draw, settings(Draw(f"{kind} 0"))) if draw.random() < 0.7 else {}
    where = "n_positions" if kind in ("gpt2", "t5", "mt5", "umt5") else "max_position_embeddings"
    changes[where] = draw.choice([16, 64, 64, 64, 130, 300])
    if task:
        theirs = Theirs(kind, seed, folder, suffix, **{**changes, **LABELS[task]})
        finish(draw, task, folder, theirs.model.config.hidden_size)
    else:
        write(kind, folder, seed, draw.choice([1, 1, 2, 3]), **changes)
    import_pretrained(folder, place)
    return f"{task or 'own task'} {changes}"


def finish(draw: Draw, task: str, folder: Path, width: int) -> None:
    """Adds modules of sentence-transformers or PyLate to a folder, where its task has them."""
    if task == "Embed":
        poolings = draw.sample(ALL_POOLINGS, draw.choice([1, 1, 2, 6]))
        dense = [torch.nn.Linear(width * len(poolings), 5)] * draw.choice([0, 1])
        sentence_folder(folder, *poolings, dense=dense, normalise=draw.choice([True, False]))
    elif task == "Sparse":
        kinds = {"pooling_strategy": draw.choice(["max", "sum"])}
        kinds["activation_function"] = draw.choice(["relu", "log1p_relu"])
        sparse_folder(folder, kinds)
    elif task == "Vectors":
        pylate_folder(folder, width)


def make(number: int, kind: str, folder: Path) -> dict[str, Any]:
    """Makes a draw and its bundles; returns its description."""
    draw, run = Draw(f"{kind} {number}"), folder / "run"
    for _ in range(TRIES):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            theirs = folder / "theirs"
            shape = own(draw, run) if kind == "own" else imported(draw, kind, theirs, run)
            break
        except (TransferryError, *CRASHES) as error:
            shape = f"{type(error).__name__}: {error}"[:300]
    else:
        return {"unmade": shape}
    checkpoint, said = load_checkpoint(run), list[str]()
    weights: Weights = {**dict(checkpoint.model.named_parameters())}
    with torch.no_grad():
        for _ in range(draw.choice([0, 1, 1, 2, 3])):
            said.append(draw.choice(DISTORTIONS)(draw, weights))
    saved.save_tensors(run / saved.WEIGHTS, checkpoint.model.state_dict())
    checkpoint, traces, refused = load_checkpoint(run), Traces(), dict[str, str]()
    lines = [each.source for each in builtin_pairs(60, seed=number)]
    fit = fitting(lines, checkpoint.tokenizer, checkpoint.model.config)
    for name in ("portable", *draw.sample(VARIANTS, 2)):
        contents = Contents(fit[:8], (name,), fit if RECIPES[name].precision.calibrated else ())
        try:
            export_bundle(checkpoint, folder / name, contents, traces=traces, prove=lambda *_: None)
        except (TransferryError, ArithmeticError) as error:
            refused[name] = str(error)[:300]
    return {"shape": shape, "distorted": said, "refused": refused}


def texts_of(number: int, run: Path) -> list[str]:
    """Returns rows of text: sentences, words, a repeated row, random words, long rows."""
    draw, checkpoint = Draw(f"texts {number}"), load_checkpoint(run)
    lines = [each.source for each in builtin_pairs(8, seed=1000 + number)]
    words = " ".join(lines).split()
    lines += [words[0], lines[0], lines[0], "a", "1."]
    lines += [" ".join(draw.sample(words, count)) for count in (2, 5, 9)]
    lines += [" ".join(words[:end]) for end in (20, 40)]
    return fitting(lines, checkpoint.tokenizer, checkpoint.model.config)


def judge(folder: Path, texts: list[str], refused: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Verifies every variant of a draw; returns verdict, faults and near checks by variant."""
    checkpoint, found = load_checkpoint(folder / "run"), dict[str, dict[str, Any]]()
    for place in sorted(each.parent for each in folder.glob("*/manifest.json")):
        bundle, started = Bundle.load(place), time.process_time()
        try:
            model = open_model(bundle, bundle.variant(place.name), SessionOptions())
            report = verify_against(checkpoint, bundle, model, Request(texts))
            told = dict(
                verdict=verdict(place.name, report), faults=report.faults[:6], near=near(report)
            )
        except (TransferryError, *CRASHES) as error:
            faults = [f"{type(error).__name__}: {error}"[:300]]
            absent = isinstance(error, ProviderError)  # of the kernels' package
            told = {"verdict": "not run" if absent else "ACCUSED", "faults": faults, "near": []}
        found[place.name] = {**told, "cpu": round(time.process_time() - started, 1)}
    for name, message in refused.items():
        found[name] = {"verdict": "not exported", "faults": [message], "near": []}
    return found


def verdict(variant: str, report: ParityReport) -> str:
    """Returns a word of the table; a variant in float32 loses nothing."""
    rounds = variant not in ("portable", "cpu-fp32")
    lost = [str(item) for item in report.task_metrics if rounds and not item.passed]
    exact = [each for each in report.faults if each not in lost]
    if not report.faults:
        return "passed"
    if not exact:
        return "costs too much"
    lacking = [each for each in report.comparisons if each.fault == "holds NaN or infinity"]
    if any(math.isfinite(each.reference_error) for each in lacking):
        return "WRONG"
    if lacking:  # in torch too
        return "proves nothing"
    if all(each.startswith(CALIBRATED) for each in exact):
        return "calibrated on other text"
    return "proves nothing" if all("proves nothing" in each for each in exact) else "ACCUSED"


def near(report: ParityReport) -> list[tuple[float, str]]:
    """Returns shares of limits above `NEAR`, largest first, and their checks."""
    factor = report.tolerance.factor
    shares = [
        (item.error / item.budget, f"{item.case}: {item.tensor} ({item.reference_error:.1e})")
        for item in report.comparisons
        if item.budget
    ]
    shares += [(item.score_ratio / factor, f"{item.search}: score") for item in report.decisions]
    found = [(round(share, 3), name) for share, name in shares if share > NEAR]
    return sorted(found, reverse=True)[:5]


def main() -> None:
    """Draws, verifies and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--draws", default="0:49", metavar="FIRST:END")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--make", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    folder, kinds = arguments.folder, arguments.kinds.split(",")
    first, end = map(int, arguments.draws.split(":"))
    if arguments.make:
        for number in range(first, end):
            made = make(number, kinds[number % len(kinds)], folder / str(number))
            (folder / f"{number}.json").write_text(json.dumps(made))
        return
    folder.mkdir(parents=True, exist_ok=True)
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for start in range(first, end, GROUP):
        part = range(start, min(start + GROUP, end))
        plain = {"ATEN_CPU_CAPABILITY": "default"} if start // GROUP % 2 else {}
        command = [sys.executable, __file__, *sys.argv[1:], "--make"]
        command += ["--draws", f"{part.start}:{part.stop}"]
        subprocess.run(command, env={**os.environ, **plain}, check=True)
        for number in part:
            place, kind = folder / str(number), kinds[number % len(kinds)]
            made = json.loads((folder / f"{number}.json").read_text())
            found: dict[str, Any] = {}
            if "unmade" not in made:
                found = judge(place, texts_of(number, place / "run"), made["refused"])
            with (folder / "draws.jsonl").open("a") as file:
                record = {"draw": number, "kind": kind, **made, "found": found}
                file.write(json.dumps(record) + "\n")
            for name, each in found.items():
                counts[name][each["verdict"]] += 1
                print(number, kind, name, each["verdict"], *each["faults"][:1], file=sys.stderr)
            if not any(each["verdict"] in ("ACCUSED", "WRONG") for each in found.values()):
                shutil.rmtree(place, ignore_errors=True)
    verdicts = sorted({each for found in counts.values() for each in found})
    rows = [(name, *(str(found[each]) for each in verdicts)) for name, found in counts.items()]
    print(table(("variant", *verdicts), rows))
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
