"""Which planted faults does `verify` catch, and do those that it misses change an answer?

    python benchmarks/faults.py CHECKPOINT BUNDLE TEXT OTHER [--rows 100] [--faults 120]

For each variant, the faults of the self-test and random ones are planted, one at a time. The copy
is judged by the self-test's gate, a part of `verify`, and if that passes by `verify` on the rows of
TEXT, both without the comparison of stored weights and graphs, which follows. A fault that passes
is consequential if any of the answers to rows of OTHER (greedy and beam 4), their scores or finish
reasons changes. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from random_faults import random_faults
from sentences import read_sentences
from transferry.build_model.checkpoint import Checkpoint, load_checkpoint
from transferry.export.checks.graphs import fresh_graphs, graphs_claim
from transferry.export.checks.weights import weights_claim
from transferry.export.faults.fault import Fault
from transferry.export.faults.self_test import BundleTest, faults_of
from transferry.export.oracle.cases import source_of
from transferry.export.oracle.effort import ALL
from transferry.export.oracle.oracle import Oracle
from transferry.export.subject.bundle import BundleSubject
from transferry.export.subject.bundle_copy import BundleCopy
from transferry.export.verify import PLANTED_ROWS, Request, verify_against
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.engine.engine import Engine
from transferry.runtime.engine.tasks.fill_mask import fill_mask
from transferry.runtime.errors import InputError, TransferryError
from transferry.runtime.ort.open_model import open_model
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.proof.compare import Tolerance
from transferry.runtime.tables import table

SCORE = 1e-3  # nats a score may move by rounding; int8 moves further
SCORE_INT8 = 0.1
MISSED = ("missed, consequential", "missed, inconsequential")
ANSWERS_ALONE = replace(ALL, files=False)


def main() -> None:
    """Plants and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("run", "bundle", "text", "other"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--others", type=int, default=1000)
    parser.add_argument("--faults", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--variants", default="portable,cpu-fp32,cpu-int8")
    arguments = parser.parse_args()
    checkpoint, bundle = load_checkpoint(arguments.run), Bundle.load(arguments.bundle)
    texts = read_sentences(arguments.text, arguments.rows)
    others = read_sentences(arguments.other, arguments.others)
    results = {}
    for name in arguments.variants.split(","):
        trial = Trial(checkpoint, bundle, name, texts, others)
        results[name] = trial.run(arguments.faults, arguments.seed)
    columns = ("caught", "caught by files alone", *MISSED, "not planted")
    rows = [(name, *(found["counts"][key] for key in columns)) for name, found in results.items()]
    print(table(("variant", *columns), rows))
    print(json.dumps(results))


class Trial:
    """The faults of one variant."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        bundle: Bundle,
        name: str,
        texts: Sequence[str],
        others: Sequence[str],
    ) -> None:
        self.checkpoint, self.bundle, self.variant = checkpoint, bundle, bundle.variant(name)
        self.texts, self.others = texts, others
        model = open_model(bundle, self.variant, SessionOptions())
        config = checkpoint.model.config
        sources = [
            source_of(text, checkpoint.tokenizer, config, number)
            for number, text in enumerate(texts[:PLANTED_ROWS], start=1)
        ]
        subject = BundleSubject.of(checkpoint, bundle, model)
        oracle = Oracle.of(
            checkpoint.model,
            checkpoint.tokenizer.special,
            Tolerance.of(self.variant.precision),
            precision=subject.precision,
            calibration=subject.calibration,
        )
        fresh = fresh_graphs(checkpoint.model, bundle, self.variant, subject.calibration)
        if fresh is None:
            raise InputError("expected a bundle exported with these versions; export it again")
        self.gate = BundleTest(subject, oracle.remembering(), sources, None, files=False).gate()
        self.fresh, self.calibration = fresh, subject.calibration
        self.honest = list(self._answers(bundle))

    def run(self, most: int, seed: int) -> dict[str, Any]:
        """Plants faults until so many were judged."""
        counts: Counter[str] = Counter()
        checks: Counter[str] = Counter()
        missed = []
        with tempfile.TemporaryDirectory(prefix="transferry-") as place:
            listed = faults_of(BundleCopy(self.bundle, self.variant, Path(place, "list")))
            for fault in chain(listed, random_faults(10 * most, seed=seed)):
                if counts.total() - counts["not planted"] == most:
                    break
                folder = Path(place, "planted")
                where, verdict = self._judge(fault, folder)
                shutil.rmtree(folder)
                known = (*MISSED, "not planted", "caught by files alone")
                found = verdict if verdict in known else "caught"
                counts[found] += 1
                checks[verdict] += found == "caught"
                if found.startswith("missed"):
                    missed.append(f"{fault.kind}: {where}")
                    print(f"{self.variant.name}: {found}: {missed[-1]}", file=sys.stderr)
        return {"counts": counts, "checks": +checks, "missed": missed}

    def _judge(self, fault: Fault, folder: Path) -> tuple[str, str]:
        copy = BundleCopy(self.bundle, self.variant, folder)
        try:
            where = fault.plant(copy)
        except InputError:
            return "", "not planted"
        copy.seal()
        assert where is not None
        if caught := self.gate.caught_by(self.gate.subject.reopened(folder)):
            return where, caught
        faulty = Bundle.load(folder)
        try:
            model = open_model(faulty, self.variant, SessionOptions())
            request = Request(self.texts, effort=ANSWERS_ALONE)
            report = verify_against(self.checkpoint, faulty, model, request)
        except TransferryError:
            return where, "verify"
        if not report.passed:
            return where, "verify"
        found = MISSED[not self._changes(faulty)]
        return where, "caught by files alone" if self._files_differ(faulty) else found

    def _files_differ(self, faulty: Bundle) -> bool:
        given = faulty, self.variant
        weights = weights_claim(self.checkpoint.model, *given, self.calibration)
        return bool(weights.problem or graphs_claim(self.fresh, *given).problem)

    def _changes(self, faulty: Bundle) -> bool:
        limit = SCORE_INT8 if self.variant.precision == "int8" else SCORE
        for wanted, found in zip(self.honest, self._answers(faulty), strict=True):
            if wanted[0] != found[0] or not abs(wanted[1] - found[1]) <= limit:
                return True
        return False

    def _answers(self, bundle: Bundle) -> Iterator[tuple[Any, float]]:
        """Yields tokens and finish reason, and the score, of each answer."""
        engine = Engine(bundle, open_model(bundle, self.variant, SessionOptions()))
        if not self.checkpoint.model.config.decoder_layers:
            hidden = [text.replace(" ", " <mask> ", 1) for text in self.others]
            for filled in fill_mask(engine, hidden):
                for candidates in filled.candidates:
                    yield candidates[0].token, candidates[0].log_probability
            return
        for beam in (1, 4):
            options = replace(engine.default_options(), beam=beam, n_best=1)
            for row in engine.generate(self.others, options):
                for one in row.hypotheses:
                    yield (one.tokens, one.finish_reason), one.score


if __name__ == "__main__":
    main()
