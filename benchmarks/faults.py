"""Which planted faults does `verify` catch, and do those that it misses change an answer?

    python benchmarks/faults.py CHECKPOINT BUNDLE TEXT OTHER --out FAULTS.jsonl [--faults 150]
    python benchmarks/faults.py --report FAULTS.jsonl ...

In each variant random faults are planted, one at a time, and with `--listed` those of the
self-test. Each copy is judged by the self-test's gate, a part of `verify`, and if that passes by
`verify` on the rows of TEXT: first without the comparison of stored weights and graphs, so that the
answers alone must show the fault, then by these comparisons. A fault that the answers do not show
is consequential if any answer, score or record of rows of OTHER changes (`consequences.py`).

A line of FAULTS.jsonl is one fault; those that it has already are not planted again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import hand_faults
import rare_faults
from consequences import Answers
from random_faults import random_faults
from sentences import read_sentences
from transferry.build_model.checkpoint import Checkpoint, load_checkpoint
from transferry.export.checks.check import Findings, found_by
from transferry.export.checks.graphs import fresh_graphs, graphs_claim
from transferry.export.checks.weights import weights_claim
from transferry.export.faults.fault import Fault
from transferry.export.faults.gate import Gate
from transferry.export.faults.self_test import BundleTest, faults_of
from transferry.export.oracle.cases import fitting
from transferry.export.oracle.effort import ALL
from transferry.export.subject.bundle import BundleSubject
from transferry.export.subject.bundle_copy import BundleCopy
from transferry.export.trace.graph import Graph, Traces
from transferry.export.verify import PLANTED_ROWS, Request, Verification
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.specs import Variant
from transferry.runtime.errors import InputError, TransferryError
from transferry.runtime.ort.open_model import open_model
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.tables import table

ANSWERS_ALONE = replace(ALL, files=False)
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
    parser.add_argument("--rare", action="store_true", help="those of rare_faults.py instead")
    parser.add_argument("--hand", action="store_true", help="those of hand_faults.py instead")
    parser.add_argument("--kind", default="", help="random faults whose kind begins so; a,b")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--variants", default="portable,cpu-fp32,cpu-int8")
    arguments = parser.parse_args()
    if arguments.report:
        print(report(arguments.report))
        return
    run, folder, text, other = arguments.given
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
        plants = rare_faults.PLANTS if arguments.rare else ()
        plants = hand_faults.PLANTS if arguments.hand else plants
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
        return BundleTest(work.subject, work.oracle, few, None, files=False).gate()

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
            found["answers"] = self._verify(self.work.subject.reopened(folder))
        if not found["answers"]:
            found["files"] = self._compare_files(Bundle.load(folder))
            found["changes"] = self._changes(Bundle.load(folder))
        return found

    def _verify(self, copy: BundleSubject) -> str:
        """Returns the first check of `verify` that a copy fails."""
        work, found = replace(self.work, subject=copy, files=Findings()), Findings()
        try:
            for part in found_by(work.checks(), found, faults=False):
                if part.failure:
                    return f"verify: {part.failure}"
        except TransferryError:
            return "verify: running"
        return "" if work.report(found).passed else "verify: report"

    def _changes(self, faulty: Bundle) -> str:
        name = self.variant.reference
        if faulty.manifest.files[name] != self.bundle.manifest.files[name]:
            return "the recorded answers"  # the only check on other hardware
        return self.honest.difference(faulty)

    def _compare_files(self, faulty: Bundle) -> str:
        given = faulty, faulty.variant(self.name)
        weights = weights_claim(self.checkpoint.model, *given, self.work.subject.calibration)
        return weights.problem or graphs_claim(self.fresh, *given).problem


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
