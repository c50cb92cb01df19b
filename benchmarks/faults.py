"""Which planted faults does `verify` catch, and do those that it misses change an answer?

    python benchmarks/faults.py CHECKPOINT BUNDLE TEXT OTHER --out FAULTS.jsonl [--faults 150]
    python benchmarks/faults.py --report FAULTS.jsonl ...

In each variant random faults are planted, one at a time, and with `--listed` those of the
self-test. Each copy is judged by the self-test's gate, a part of `verify`, and if that passes by
`verify` on the rows of TEXT: first without the comparison of stored weights and graphs, so that the
answers alone must show the fault, then by these comparisons. A fault that the answers do not show
is consequential if any answer, score or record of rows of OTHER changes.

A line of FAULTS.jsonl is one fault; those that it has already are not planted again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import rare_faults
from random_faults import random_faults
from sentences import read_sentences
from transferry.build_model.checkpoint import Checkpoint, load_checkpoint
from transferry.export.checks.check import Findings, found_by
from transferry.export.checks.graphs import fresh_graphs, graphs_claim
from transferry.export.checks.weights import weights_claim
from transferry.export.faults.gate import Fault, Gate
from transferry.export.faults.self_test import BundleTest, faults_of
from transferry.export.oracle.cases import fitting
from transferry.export.oracle.effort import ALL
from transferry.export.subject.bundle import BundleSubject
from transferry.export.subject.bundle_copy import BundleCopy
from transferry.export.trace.graph import Graph, Traces
from transferry.export.verify import PLANTED_ROWS, Request, Verification
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.specs import Variant
from transferry.runtime.engine.engine import Engine
from transferry.runtime.errors import InputError, TransferryError
from transferry.runtime.ort.open_model import open_model
from transferry.runtime.ort.session import Optimisation, SessionOptions
from transferry.runtime.precision import Precision
from transferry.runtime.tables import table

SCORE = 1e-3  # nats that a score, and share of its largest entry that a vector may move
ROWS = 250  # answered before they are compared


class Answers:
    """Answers of a bundle to texts, and whether other bundles give the same.

    Where a variant rounds values to integers, any change of a float moves some across the border
    of two integers. There, honest copies tell how many rows that changes, and by how much: weights
    in float32 off by one unit in the last place, and another optimisation level of onnxruntime. A
    bundle is different if it changes twice as many rows as the worst of these and three more, or a
    number by twice as much.

    Attributes:
        most: Rows that may change.
        largest: The largest change of a number in them, in nats or of a vector's largest entry.
    """

    def __init__(self, bundle: Bundle, variant: Variant, texts: Sequence[str]) -> None:
        """Answers all texts with the honest bundle."""
        self.variant, self.texts = variant, texts
        self.wanted = [*self._records(bundle, SessionOptions())]
        self.most, self.largest = 1 << 60, math.inf
        changed: list[dict[str, float]] = [{}]
        if Precision.of(variant.precision).integers:
            changed.append(self._changed(bundle, "basic"))
            for seed in (0, 1):
                with tempfile.TemporaryDirectory(prefix="transferry-") as place:
                    copied = _one_ulp(bundle, variant, Path(place, "copy"), seed)
                    changed.append(self._changed(copied))
            words = ", ".join(
                f"{len(each)} by {max(each.values(), default=0.0):.2g}" for each in changed
            )
            print(f"{variant.name}: rounding changes rows: {words}", file=sys.stderr)
            self.most = 2 * max(map(len, changed)) + 3
            self.largest = 2 * max(size for each in changed for size in (0.0, *each.values()))
            limits = f"{self.most} of {len(self.wanted)} rows, by {self.largest:.2g}"
            print(f"{variant.name}: rounding may change {limits}", file=sys.stderr)
        else:
            self.most, self.largest = 0, 0.0

    def difference(self, faulty: Bundle) -> str:
        """Returns how many rows differ by more than rounding, and the worst; or nothing."""
        try:
            found = self._changed(faulty)
        except TransferryError as error:
            return f"no answer: {error}"
        worst = max(found, key=lambda row: found[row], default="")
        if len(found) > self.most or (found and found[worst] > self.largest):
            return f"{len(found)} rows, {worst} by {found[worst]:.2g}"
        return ""

    def _changed(self, bundle: Bundle, optimisation: Optimisation = "all") -> dict[str, float]:
        """Returns the change of each row that differs, until there are too many."""
        changed: dict[str, float] = {}
        options = SessionOptions(optimisation=optimisation)
        both = zip(self.wanted, self._records(bundle, options), strict=True)
        for (name, wanted), (_, other) in both:
            if (size := _difference(wanted, other)) is not None:
                changed[name] = size
                if len(changed) > self.most or size > self.largest:
                    break
        return changed

    def _records(self, bundle: Bundle, options: SessionOptions) -> Iterator[tuple[str, Any]]:
        """Yields the result of each row of each task."""
        variant = bundle.variant(self.variant.name)
        engine = Engine.of(bundle, open_model(bundle, variant, options))
        for first in range(0, len(self.texts), ROWS):
            for task, results in self._tasks(engine, self.texts[first : first + ROWS]):
                yield from ((f"{task}, row {row}", each) for row, each in enumerate(results))

    def _tasks(self, engine: Engine, texts: Sequence[str]) -> Iterator[tuple[str, Iterator[Any]]]:
        methods: dict[str, Callable[[Sequence[str]], Any]] = {
            "embed": engine.embed,
            "classify": engine.classify,
            "tag": engine.tag,
            "rank": lambda texts: engine.rank(pairwise(texts)),
            "answer": lambda texts: engine.answer(pairwise(texts)),
            "fill-mask": lambda texts: engine.fill_mask(_masked(text) for text in texts),
            "score": lambda texts: engine.score(_pairs(engine, texts)),
        }
        for name in engine.tasks:
            if name == "generate":
                for beam in (1, 4):
                    options = replace(engine.default_options(), beam=beam, n_best=1, sample=False)
                    results = engine.generate(texts, options)
                    yield f"beam {beam}", (_hypotheses(each) for each in results)
                if engine.default_options().sample:
                    yield "sample", (_hypotheses(each) for each in engine.generate(texts))
            else:
                yield name, (_record(each) for each in methods[name](texts))


def _one_ulp(bundle: Bundle, variant: Variant, folder: Path, seed: int) -> Bundle:
    """Copies a bundle, each weight in float32 off by one unit in the last place at random."""
    generator = np.random.default_rng(seed)

    def change(array: NDArray[Any]) -> NDArray[Any]:
        towards = np.where(generator.integers(2, size=array.shape), np.inf, -np.inf)
        moved: NDArray[Any] = np.nextafter(array, towards.astype(np.float32))
        return moved

    copy = BundleCopy(bundle, variant, folder)
    for name in copy.names():
        if copy.array(name).dtype == np.float32:
            copy.edit(name, change)
    copy.seal()
    return Bundle.load(folder)


def _hypotheses(result: Any) -> Any:
    return [(one.tokens, one.finish_reason, one.text, one.score) for one in result.hypotheses]


def _record(result: Any) -> dict[str, Any]:
    left = ("repeated", "shared_prompt_tokens")  # by which rows were computed together
    return {name: value for name, value in vars(result).items() if name not in left}


def _masked(text: str) -> str:
    """Hides every seventh word."""
    words = text.split(" ")
    words[1::7] = ["[MASK]"] * len(words[1::7])
    return " ".join(words)


def _pairs(engine: Engine, texts: Sequence[str]) -> Any:
    if engine.bundle.manifest.architecture == "decoder-only":
        return ((text, None) for text in texts)
    return zip(texts, reversed(texts), strict=True)


def _difference(wanted: Any, found: Any) -> float | None:
    """Returns the largest change of a number in two results; None if they are the same.

    Numbers may differ by `SCORE`; a change without any, as of a text, is 0.
    """
    numbers: list[float] = []
    same = _same(wanted, found, numbers)
    worst = max(numbers, default=0.0)
    return None if same and worst <= SCORE else worst


def _same(wanted: Any, found: Any, numbers: list[float]) -> bool:
    """Whether all but numbers are equal; adds the differences of these."""
    if isinstance(wanted, np.ndarray):
        if wanted.shape != found.shape:
            return False
        largest = float(np.abs(wanted).max(initial=0.0)) or 1.0
        numbers.append(float(np.abs(wanted - found).max(initial=0.0)) / largest)
        return bool(np.isfinite(found).all())
    if isinstance(wanted, float) and isinstance(found, float):
        if wanted != found:
            numbers.append(abs(wanted - found))
        return math.isfinite(found) or str(wanted) == str(found)
    if isinstance(wanted, dict):
        wanted, found = list(wanted.items()), list(found.items())
    if isinstance(wanted, (list, tuple)) and not all(isinstance(each, int) for each in wanted):
        # All of them, so that the numbers beside another token count.
        pairs = zip(wanted, found, strict=False)
        same = [_same(*pair, numbers) for pair in pairs]
        return all(same) and len(wanted) == len(found)
    if hasattr(wanted, "__dict__") and type(wanted) is type(found):
        return _same(vars(wanted), vars(found), numbers)
    return bool(wanted == found)


ANSWERS_ALONE = replace(ALL, stored=False)
COLUMNS = ("planted", "caught", "missed, consequential", "missed, inconsequential", "not planted")


def main() -> None:
    """Plants and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("given", type=Path, nargs="*", metavar="CHECKPOINT BUNDLE TEXT OTHER")
    parser.add_argument("--report", type=Path, nargs="+", default=[])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--others", type=int, default=1000)
    parser.add_argument("--faults", type=int, default=150, help="planted in each variant")
    parser.add_argument("--listed", action="store_true", help="those of the self-test too")
    parser.add_argument("--rare", action="store_true", help="those that seldom hold instead")
    parser.add_argument("--hand", action="store_true", help="those by hand instead")
    parser.add_argument("--kind", default="", help="random faults whose kind begins so; a,b")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--variants", default="portable,cpu-fp32,cpu-int8")
    arguments = parser.parse_args()
    if arguments.report:
        print(report(arguments.report))
        return
    run, folder, text, other = arguments.given
    torch.set_num_threads(1)  # those of OpenMP are not in a fork, which would wait for them
    checkpoint, bundle = load_checkpoint(run), Bundle.load(folder)
    texts, others = (
        fitting(read_sentences(path, rows), checkpoint.tokenizer, checkpoint.model.config)
        for path, rows in ((text, arguments.rows), (other, arguments.others))
    )
    for name in arguments.variants.split(","):
        # In a process of its own: onnxruntime ends it at some faulty graphs.
        while child := os.fork():
            if os.waitpid(child, 0)[1] == 0:
                break
            if not _marker(arguments.out).exists():
                sys.exit(1)
        if not child:
            Trial(checkpoint, bundle, name, texts, others).run(arguments)
            os._exit(0)
    print(report([arguments.out]))


def _marker(out: Path) -> Path:
    """Returns the file that names the fault which is being judged."""
    return out.with_suffix(".running")


@dataclass(frozen=True)
class Trial:
    """The faults of one variant."""

    checkpoint: Checkpoint
    bundle: Bundle
    name: str
    texts: Sequence[str]
    others: Sequence[str]

    def run(self, arguments: argparse.Namespace) -> None:
        """Plants faults until so many were judged, and appends a line for each to a file."""
        marker = _marker(arguments.out)
        if marker.exists():
            found = {**json.loads(marker.read_text()), "answers": "the process ended", "seconds": 0}
            self._write(arguments.out, found | {"planted": True, "files": "", "changes": ""})
            marker.unlink()
        known = _lines(arguments.out) if arguments.out.exists() else []
        known = [each for each in known if each["variant"] == self.name]
        done = {each["kind"] for each in known}
        left = arguments.faults - sum(each["planted"] for each in known)
        with tempfile.TemporaryDirectory(prefix="transferry-") as place:
            for fault in self._faults(arguments, Path(place, "list")):
                if left <= 0:
                    break
                if fault.kind in done:
                    continue
                started = time.perf_counter()
                found = {"bundle": self.bundle.folder.name, "variant": self.name}
                found["kind"] = fault.kind
                marker.write_text(json.dumps(found))
                found |= self._judge(fault, Path(place, "planted"))
                found["seconds"] = round(time.perf_counter() - started, 1)
                left -= found["planted"]
                self._write(arguments.out, found)
                marker.unlink()

    def _write(self, out: Path, found: Mapping[str, Any]) -> None:
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
        if found["planted"] and not found["answers"]:
            print(json.dumps(found), file=sys.stderr)

    def _faults(self, arguments: argparse.Namespace, place: Path) -> Iterator[Fault]:
        tokenizer = self.checkpoint.tokenizer
        tokens = [each for text in self.others if len(each := tokenizer.encode(text)) > 1]
        listed: list[Fault] = []
        if arguments.listed:
            listed = faults_of(BundleCopy(self.bundle, self.variant, place))
        plants = rare_faults.RARE if arguments.rare else ()
        plants = rare_faults.HAND if arguments.hand else plants
        count = 20 * arguments.faults
        drawn = random_faults(count, tokens, seed=arguments.seed, plants=plants)
        for fault in chain(listed, drawn):
            if fault.kind.startswith(tuple(arguments.kind.split(","))):
                yield fault

    @cached_property
    def variant(self) -> Variant:
        """The variant, as the honest bundle describes it."""
        return self.bundle.variant(self.name)

    @cached_property
    def work(self) -> Verification:
        """The verification of the honest bundle, whose oracle remembers."""
        model = open_model(self.bundle, self.variant, SessionOptions())
        request = Request(self.texts, effort=ANSWERS_ALONE)
        work = Verification.of(self.checkpoint, self.bundle, model, request, Traces())
        return replace(work, oracle=work.oracle.remembering())

    @cached_property
    def gate(self) -> Gate[BundleSubject]:
        """The gate of the self-test, without stored weights and graphs."""
        work = self.work
        few = work.text.sources[:PLANTED_ROWS]
        return BundleTest(work.subject, work.oracle, few, None, stored=False).gate()

    @cached_property
    def fresh(self) -> Mapping[str, Graph]:
        """The graphs that export makes now."""
        calibration = self.work.subject.calibration
        found = fresh_graphs(self.checkpoint.model, self.bundle, self.variant, calibration)
        if found is None:
            raise InputError("expected a bundle exported with these versions; export it again")
        return found

    @cached_property
    def honest(self) -> Answers:
        """Answers of the honest bundle to the other rows."""
        return Answers(self.bundle, self.variant, self.others)

    def _judge(self, fault: Fault, folder: Path) -> dict[str, Any]:
        """Plants a fault; returns the check that catches it, or else the first changed answer."""
        shutil.rmtree(folder, ignore_errors=True)
        copy = BundleCopy(self.bundle, self.variant, folder)
        try:
            where = fault.plant(copy)
        except InputError as error:
            return {"planted": False, "where": str(error)}
        if where is None:
            return {"planted": False, "where": "no place"}
        copy.seal()
        found: dict[str, Any] = {"planted": True, "where": where, "files": "", "changes": ""}
        found["answers"] = self.gate.caught_by(self.gate.subject.reopened(folder))
        if not found["answers"]:
            found["answers"] = verified(self.work, self.work.subject.reopened(folder))
        if not found["answers"]:
            found["files"] = self._compare_files(Bundle.load(folder))
            found["changes"] = self._changes(Bundle.load(folder))
        return found

    def _changes(self, faulty: Bundle) -> str:
        name = self.variant.reference
        if faulty.manifest.files[name] != self.bundle.manifest.files[name]:
            return "the recorded answers"  # the only check on other hardware
        return self.honest.difference(faulty)

    def _compare_files(self, faulty: Bundle) -> str:
        given = faulty, faulty.variant(self.name)
        weights = weights_claim(self.checkpoint.model, *given, self.work.subject.calibration)
        return weights.problem or graphs_claim(self.fresh, *given).problem


def verified(work: Verification, copy: BundleSubject) -> str:
    """Returns the first check of `verify` that a copy of its subject fails; "" for none."""
    work, found = replace(work, subject=copy, stored=Findings()), Findings()
    try:
        for part in found_by(work.checks(), found, faults=False):
            if part.failure:
                return f"verify: {part.failure}"
    except TransferryError:
        return "verify: running"
    return "" if work.report(found).passed else "verify: report"


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def report(paths: Sequence[Path]) -> str:
    """Returns a table of both runs, with every check and with the answers alone."""
    counts: dict[tuple[str, str, str], Counter[str]] = {}
    for found in chain(*map(_lines, paths)):
        for run in ("every check", "answers alone"):
            count = counts.setdefault((found["bundle"], found["variant"], run), Counter())
            if not found["planted"]:
                count["not planted"] += 1
                continue
            caught = found["answers"] or (found["files"] if run == "every check" else "")
            missed = f"missed, {'' if found['changes'] else 'in'}consequential"
            count.update(("planted", "caught" if caught else missed))
    rows = [(*key, *(count[name] for name in COLUMNS)) for key, count in sorted(counts.items())]
    return table(("bundle", "variant", "run", *COLUMNS), rows)


if __name__ == "__main__":
    main()
