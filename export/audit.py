"""Proof that the graphs of another tool answer as torch does, up to rounding."""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from transferry.build_model.checkpoint import Checkpoint
from transferry.export.checks.check import Check, Findings, claim, prove
from transferry.export.checks.foreign_weights import foreign_weights
from transferry.export.checks.numbers import (
    BATCH,
    batch_sizes,
    declared,
    independence,
    numbers,
    repeats,
)
from transferry.export.checks.searches import Search, Text
from transferry.export.checks.task_metrics import task_metrics, token_agreement
from transferry.export.checks.texts import feeding, given_answers, passage, readings
from transferry.export.checks.unrounded import told, tolerance_of_floats, without_rounding
from transferry.export.faults.foreign_faults import foreign_faults
from transferry.export.faults.gate import Gate
from transferry.export.faults.self_test import differs, honest_truths, rounding_of
from transferry.export.oracle.cases import (
    RECORDED,
    many_rows,
    random_case,
    random_cases,
    random_sources,
    source_of,
    vocabulary,
)
from transferry.export.oracle.effort import Effort
from transferry.export.oracle.oracle import Oracle
from transferry.export.oracle.served import Answers
from transferry.export.subject.foreign import ForeignFolder
from transferry.export.subject.foreign_model import ForeignDecoder
from transferry.export.subject.layout import COUNTING
from transferry.runtime.decoding.batching import BatchOptions
from transferry.runtime.decoding.generation_options import generation_options
from transferry.runtime.decoding.search import search
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.io.folders import temporary_folder
from transferry.runtime.precision import INT4, PRECISIONS, Precision
from transferry.runtime.proof.compare import Case, Tolerance, observe
from transferry.runtime.proof.report import ParityReport

MOST_ALONE = 32  # rows that are compared with themselves in batches
FEWEST = 16  # lines of text; rows of random tokens are batched in the place of fewer
# Rows of the largest batch, and of the largest in which every smaller size is tried.
LARGEST_BATCH, EVERY_BATCH = 128, 20
ALONE = "each row alone"
BRIEF_CASES = 16  # of random tokens, for each planted fault

Done = Callable[[str, int, int], None]


# Of rounded activations, whose effect grows from layer to layer; only finite numbers pass.
UNLIMITED = Tolerance(2.0**60, most=math.inf)


def tolerance_of(precision: str) -> Tolerance:
    """Returns the tolerance of a foreign graph of a precision."""
    row = Precision.of(precision)
    if row.foreign is None:
        return Tolerance.of(precision)
    # The same for every case: torch's error in float32 does not tell that of integers.
    return Tolerance(row.foreign / Tolerance.floor, most=row.most, crossed=row.foreign)


def audit(
    folder: Path,
    subject: ForeignFolder,
    texts: Sequence[str],
    *,
    precision: str | None = None,
    plant: bool = False,
    atol: float | None = None,
    done: Done = lambda phase, done, total: None,
) -> ParityReport:
    """Compares the graphs of another tool with their reference.

    The graphs are judged by `precision`, by default that of their operators. With `plant`, faults
    are planted in copies of graphs that pass; `atol` is tried on these.

    Raises:
        InputError: A text does not fit the model, or the graphs are of another architecture.
        UsageError: The precision is unknown.
        ProviderError: The provider asked for cannot run here.
    """
    _ = subject.model  # opened before the long work
    precision = precision or subject.layout.precision()
    if precision not in PRECISIONS:
        raise UsageError(f"precision must be one of {', '.join(PRECISIONS)}, found {precision}")
    work = Audit.of(subject.checkpoint, texts, precision, pairs=subject.reads_pairs)
    found = prove(work.checks(subject), faults=True, done=partial(done, "auditing"))
    settings = {
        **subject.describe(precision),
        "rows": len(work.text.sources),
        "batch_rows": BATCH,
        "padding": ", ".join(subject.paddings),
        "compared": "; ".join(work.coverage(subject)),
        "text_sha256": hashlib.sha256("\n".join(texts).encode()).hexdigest(),
    }
    # Vectors of integers are those of the coarsest, whose neighbours few lines do not tell.
    vectors = {"cosine": INT4.task.cosine, "neighbours": math.inf, "ranks": math.inf}
    tokenizer, budget = subject.checkpoint.tokenizer, replace(PRECISIONS[precision].task, **vectors)
    metrics = task_metrics(found, budget, tokenizer)
    if found.best and not metrics:  # the given answers did not run
        metrics = [token_agreement(found.best["greedy"])]
    report = ParityReport(
        str(folder),
        settings,
        work.oracle.tolerance,
        found.comparisons,
        found.decisions,
        metrics,
        found.forcing.growth(),
        found.forcing.margins(),
        claims=[*subject.claims(), *found.claims],
        searches=[asdict(work.text.options(name)) for name in RECORDED] if found.best else [],
        times=[*found.times.values()],
    )
    return with_faults(report, work.gate(subject, precision, atol), done) if plant else report


@dataclass(frozen=True)
class Audit:
    """The checks of foreign graphs beside a reference.

    Attributes:
        text: Token ids of each text, and how they are searched.
        pairs: Whether the graphs read which of two texts a token belongs to.
    """

    oracle: Oracle
    checkpoint: Checkpoint
    text: Text
    effort: Effort
    pairs: bool = True

    @classmethod
    def of(
        cls, checkpoint: Checkpoint, texts: Sequence[str], precision: str, *, pairs: bool = True
    ) -> Self:
        """Prepares the checks; raises InputError if no text fits the model."""
        tokenizer, config = checkpoint.tokenizer, checkpoint.model.config
        oracle = Oracle.of(checkpoint.model, tokenizer.special, tolerance_of(precision))
        effort = Effort.at_export(checkpoint.model, BatchOptions(rows=LARGEST_BATCH))
        kept = effort.texts(checkpoint, texts)
        if texts and not kept:
            raise InputError(
                f"expected lines of 1 to {config.max_positions} tokens, found none among "
                f"{len(texts)}; give other text"
            )
        sources = [source_of(text, tokenizer, config, row) for row, text in enumerate(kept, 1)]
        generation = dict(checkpoint.generation)
        longest = min(effort.longest, generation_options(generation).max_length)
        text = Text(config, sources, generation, longest, standard=RECORDED)
        return cls(oracle, checkpoint, text, effort, pairs)

    def coverage(self, subject: ForeignFolder) -> list[str]:
        """Returns in words how much was compared."""
        told = ["graphs" if subject.beside is None else subject.beside.examined[1]]
        if (lines := len(self.text.sources)) < FEWEST:
            what = "tokens of searches" if subject.decodes else "choices"
            missing = f"{what} on {f'more than {lines} lines of text' if lines else 'text'}"
            told.append(f"not covered: {missing} (give {FEWEST} lines or more with --text)")
        if not self.pairs:
            told.append("not covered: pairs of texts (the graph reads no token_type_ids)")
        if not self.oracle.config.encoder_layers and "left" not in subject.paddings:
            why = f" ({COUNTING} reads rows from the left)" if subject.layout.from_left else ""
            told.append(f"not covered: padding on the left{why}")
        return told

    @cached_property
    def cases(self) -> list[Case]:
        """Cases of random tokens, without the token that pads.

        No text holds it, and RoBERTa's kin and M2M-100 count no position for it.
        """
        config = self.oracle.config
        return self._unpadded(self.effort.cases(config, self.text.sources, BATCH, False))

    @cached_property
    def unseen(self) -> list[Case]:
        """Cases that the checks do not use."""
        config = self.oracle.config
        drawn = random_cases(config, [(3, 9, 2), (2, 16, 0), (20, 3, 0)], seed=1000)
        return self._unpadded([*drawn, *vocabulary(config, seed=1000)])

    def _unpadded(self, cases: list[Case]) -> list[Case]:
        special = self.oracle.special
        if not self.oracle.config.encoder_layers:
            return cases
        unpadded = self._without
        starts = special.pad_id == special.bos_id  # then every answer holds it
        return [
            replace(
                case,
                source=unpadded(case.source),
                target=case.target if starts else unpadded(case.target),
            )
            for case in cases
        ]

    def _without(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Replaces the token that pads.

        A graph without segments takes all tokens as those of the first text, so that for it the end
        of a text goes too.
        """
        special, config = self.oracle.special, self.oracle.config
        left_out = [special.pad_id, *([] if self.pairs else [config.segment_end])]
        kept = (token for token in (special.eos_id, 0, 1, 2) if token not in left_out)
        return np.where(np.isin(tokens, left_out), next(kept), tokens)

    def checks(self, subject: ForeignFolder) -> Iterator[Check]:
        """Yields the checks of graphs, in order; opens them first."""
        _ = subject.model
        exact, left = without_rounding(subject, self.checkpoint.model)
        yield from left
        if exact is None:
            yield from self._rounded(subject)
            return
        floats = self._of(tolerance_of_floats(subject.layout))
        yield from map(told, floats._tensors(exact))
        # The rounding of activations is left to the answers to text.
        yield from self._of(UNLIMITED)._rounded(subject)

    def _of(self, tolerance: Tolerance) -> Self:
        return replace(self, oracle=replace(self.oracle, tolerance=tolerance))

    def _tensors(self, subject: ForeignFolder) -> Iterator[Check]:
        yield from numbers(subject, self.oracle, self.cases)
        yield from self.batches(subject)
        if not subject.decodes:
            yield from numbers(subject, self.oracle, self._passages())
        yield from self._independence(subject)

    def _passages(self) -> list[Case]:
        return [passage(row, text) for row, text in enumerate(self.text.sources)]

    def _independence(self, subject: ForeignFolder) -> list[Check]:
        rows = [*self.text.sources[:MOST_ALONE], *self._random_rows()]
        return independence(subject, rows, subject.paddings, self.oracle.tolerance)

    def _vectors(self, subject: ForeignFolder, so_far: Findings) -> Iterator[Findings]:
        """Yields the mean vector of each text, of torch and of the graphs."""
        if PRECISIONS[subject.layout.precision()].foreign is None:
            return
        for case in self._passages():
            sides = self.oracle.observe(self.oracle.exact, case), observe(subject.model, case)
            meant, found = (side["hidden"][0].mean(axis=0).astype(np.float64) for side in sides)
            yield Findings(vectors=[(meant, found)])

    def _rounded(self, subject: ForeignFolder) -> Iterator[Check]:
        yield from numbers(subject, self.oracle, self.cases)
        yield from self.batches(subject)
        again = random_case(self.oracle.config, 3, 9, 2, seed=7)
        yield repeats(lambda: observe(subject.model, again))
        texts = self.text.sources
        if subject.decodes and texts:
            yield from self.searches(subject)
            fed = partial(feeding, self.text, self.oracle.special)
            yield given_answers(subject, self.oracle, fed, len(texts), "given answers")
        elif subject.tensors & {"logits", "head"} and texts:
            head = self.checkpoint.head if "head" in subject.tensors else None
            yield readings(subject, self.oracle, texts, head)
        else:
            yield from numbers(subject, self.oracle, self._passages())
        if "hidden" in subject.tensors and not subject.decodes:
            yield Check("vectors", partial(self._vectors, subject))
        yield from self._independence(subject)
        yield claim("declared", lambda: [declared(subject.model.graphs)])
        model, layout = self.checkpoint.model, subject.layout
        yield claim("weights", lambda: [foreign_weights(model, layout)])
        if (beside := subject.beside) is not None:
            yield claim("files beside the graphs", lambda: beside.examined[0])

    def batches(self, subject: ForeignFolder) -> Iterator[Check]:
        """Yields checks of batches of every size, in the first step and in a later one."""
        rows = self.effort.batch_rows or LARGEST_BATCH
        for past in (0, 1) if subject.decodes else (0,):
            (case,) = self._unpadded([many_rows(self.oracle.config, rows, past)])
            yield batch_sizes(subject, self.oracle, case, min(EVERY_BATCH, rows // 2))

    def _random_rows(self) -> list[list[int]]:
        """Rows of random tokens in the place of the text that lacks."""
        config, most = self.oracle.config, max(0, FEWEST - len(self.text.sources))
        rows = map(np.array, random_sources(config, FEWEST)[:most])
        return [(self._without(row) if config.encoder_layers else row).tolist() for row in rows]

    def searches(self, subject: ForeignFolder) -> list[Check]:
        """Returns checks of greedy and beam search, alone and in padded batches."""
        sources, special = self.text.sources, self.oracle.special
        ways = [(ALONE, subject.model, 1)]
        ways += [(f"batches padded {s}", subject.model.padded(s), BATCH) for s in subject.paddings]

        def check(name: str, way: str, decoder: ForeignDecoder, rows: int) -> Check:
            options = self.text.options(name)

            def answers() -> Sequence[Answers]:
                # In the order of the text, so that a batch holds rows of unequal length.
                parts = (sources[at : at + rows] for at in range(0, len(sources), rows))
                found = (each for part in parts for each in search(decoder, part, options, special))
                return [[each] for each in found]

            made = Search(f"{name}, {way}", decoder, sources, options, answers, rows=BATCH)
            return made.check(self.oracle, best=name if (name, way) == (RECORDED[0], ALONE) else "")

        return [check(name, *way) for name in self.text.searches for way in ways]

    def gate(
        self, subject: ForeignFolder, precision: str, atol: float | None = None
    ) -> Gate[ForeignFolder]:
        """Returns the gate of the self-test: fewer cases and texts, on the same oracle."""
        brief = replace(
            self,
            oracle=self.oracle.remembering(),
            text=replace(self.text, sources=self.text.sources[:BATCH]),
            effort=replace(self.effort, vocabulary=True, most_cases=BRIEF_CASES),
        )

        truths = cache(lambda: honest_truths(brief.oracle, subject.model, brief.unseen))

        def changed(copy: ForeignFolder) -> bool:
            files = [each.beside and each.beside.contents() for each in (copy, subject)]
            return files[0] != files[1] or differs(copy.model, truths(), rounding_of(precision))

        return Gate(subject, brief.checks, changed, faults=True, atol=atol)


def with_faults(report: ParityReport, gate: Gate[Any], done: Done) -> ParityReport:
    """Returns the report with the results of planted faults, if it passed.

    Raises:
        InputError: The graphs take no fault.
    """
    if not report.passed:
        untried = {"planted faults": "none, since the graphs fail as they are"}
        return replace(report, settings={**report.settings, **untried})
    beside = gate.subject.beside
    faults, planted = foreign_faults(beside is not None and beside.reference is not None), []
    with temporary_folder() as folder:
        for number, found in enumerate(gate.plant(faults, folder / "copy"), start=1):
            planted += [] if found is None else [found]
            done("planting", number, len(faults))
    if not planted:
        path = gate.subject.layout.decoder.path
        raise InputError(f"{path}: no fault can be planted in these graphs")
    told: dict[str, Any] = {}
    if gate.atol is not None:
        wrong = [item for item in planted if item.changes_answer]
        missed = sum(bool(item.tolerated) for item in wrong)
        share = f"{missed} of {len(wrong)} planted faults"
        told["atol"] = f"{gate.atol:g} would have missed {share}"
    return replace(report, settings={**report.settings, **told}, self_test=planted)
