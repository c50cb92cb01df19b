"""Proof that the graphs of another tool answer as torch does, up to rounding."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray

from transferry.build_model.checkpoint import Checkpoint
from transferry.export.checks.independence import BATCH, batch_independence, declared, failed
from transferry.export.checks.task_metrics import token_agreement
from transferry.export.faults.foreign_faults import Answers, Checks, answers_otherwise, self_test
from transferry.export.oracle.cases import random_case, random_cases, source_of, vocabulary
from transferry.export.oracle.effort import Effort
from transferry.export.oracle.oracle import Oracle
from transferry.export.oracle.searches import RECORDED, search_settings
from transferry.export.oracle.teacher_forcing import TeacherForcing
from transferry.export.subject.decoder import ForeignDecoder, Padding
from transferry.export.subject.encoder import ForeignEncoder
from transferry.export.subject.layout import Layout
from transferry.export.subject.model import Model, Observable, open_foreign
from transferry.runtime.decoding.batching import BatchOptions, length_batches
from transferry.runtime.decoding.decoder import ObservableDecoder
from transferry.runtime.decoding.generation_options import GenerationOptions, generation_options
from transferry.runtime.decoding.hypothesis import Hypothesis
from transferry.runtime.decoding.search import search
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.precision import PRECISIONS, Precision
from transferry.runtime.proof.compare import Case, Comparison, Tolerance, observe
from transferry.runtime.proof.divergence import ExpectedAnswers, Tally
from transferry.runtime.proof.report import Claim, Decisions, ParityReport, TaskMetric

REPEATS = 3
MOST_ALONE = 32  # rows that are compared with themselves in batches
ALONE = "each row alone"
# Rows and columns of the unpadded input that exporters try a tolerance on (optimum's
# `validate_model_outputs` has its defaults).
TRIED = (2, 16)
BRIEF_CASES = 16  # of random tokens, for each planted fault

Found = Iterator[Claim | Decisions | list[Comparison]]
Done = Callable[[str, int, int], None]
Answering = Callable[[Sequence[Sequence[int]]], list[list[Hypothesis]]]


def tolerance_of(precision: str) -> Tolerance:
    """Returns the tolerance of a foreign graph of a precision."""
    row = Precision.of(precision)
    if row.foreign is None:
        return Tolerance.of(precision)
    # The same for every case: torch's error in float32 does not tell that of integers.
    return Tolerance(row.foreign / Tolerance.floor, most=row.most, crossed=row.foreign)


@dataclass(frozen=True)
class Way:
    """One way to answer text.

    Attributes:
        name: For the report.
        decoder: Steps as this way does; explains differing tokens.
        rows: Rows of a batch.
        answer: Answers a batch.
    """

    name: str
    decoder: ForeignDecoder
    rows: int
    answer: Answering


@dataclass
class Audit:
    """The checks of foreign graphs beside a reference.

    Attributes:
        checkpoint: The reference.
        oracle: The reference in float32 and float64.
        texts: Token ids of each text.
        effort: How much is checked.
        paddings: Sides on which batches are padded.
        forcing: Errors and margins on given answers.
        best: The best answers of greedy search, of torch and of the graphs.
    """

    checkpoint: Checkpoint
    oracle: Oracle
    texts: Sequence[Sequence[int]]
    effort: Effort
    paddings: Sequence[Padding]

    def __post_init__(self) -> None:
        self.forcing = TeacherForcing()
        self.best: list[tuple[Hypothesis, Hypothesis]] = []
        self.own = 0.0  # torch's worst error in float32

    def cases(self) -> list[Case]:
        """Returns the cases of random tokens, without the token that pads.

        No text holds it, and RoBERTa's kin and M2M-100 count no position for it.
        """
        config = self.checkpoint.model.config
        return self._unpadded(self.effort.cases(config, self.texts, BATCH, False))

    def unseen(self) -> list[Case]:
        """Returns cases that the checks do not use."""
        config = self.checkpoint.model.config
        drawn = random_cases(config, [(3, 9, 2), (2, 16, 0)], seed=1000)
        return self._unpadded([*drawn, *vocabulary(config, seed=1000)])

    def _unpadded(self, cases: list[Case]) -> list[Case]:
        config, special = self.checkpoint.model.config, self.oracle.special
        if not config.encoder_layers:
            return cases

        def unpadded(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
            return np.where(tokens == special.pad_id, special.eos_id, tokens)

        starts = special.pad_id == special.bos_id  # then every answer holds it
        return [
            replace(
                case,
                source=unpadded(case.source),
                target=case.target if starts else unpadded(case.target),
            )
            for case in cases
        ]

    def checks(self, model: Model) -> Found:
        """Yields the result of one check after another."""
        if isinstance(model, ForeignDecoder) and "right" not in self.paddings:
            model = model.padded("left")
        if isinstance(model, ForeignEncoder):
            self.oracle.compared = frozenset(model.gives)
        else:
            self.oracle.compared = frozenset(["logits"])
        for case in self.cases():
            found = self.numbers(model, case)
            self.own = max(self.own, *(item.reference_error for item in found))
            yield found
        yield self.repeats(model)
        if isinstance(model, ForeignDecoder):
            yield from self.searches(model)
        elif self.texts:
            yield from self.readings(model)
        pad_id = self.oracle.special.pad_id
        rows = self.texts[:MOST_ALONE]
        yield from batch_independence(model, rows, pad_id, self.paddings, self.own)
        yield declared(model.graphs)

    def numbers(self, model: Observable, case: Case) -> list[Comparison]:
        """Compares a case; one that does not run is a fault."""
        try:
            return self.oracle.numbers(model, [case])
        except InputError as error:
            self.oracle.done(1)
            return [failed(case.name, case.stage, error)]

    def repeats(self, model: Observable) -> Claim:
        """Runs one case several times: the same input must give the same bits."""
        case = random_case(self.checkpoint.model.config, 3, 9, 2, seed=7)
        try:
            runs = [observe(model, case) for _ in range(REPEATS)]
        except InputError as error:
            return Claim("repeated runs", str(error))
        for name, wanted in runs[0].items():
            worst = max(float(np.abs(run[name] - wanted).max(initial=0.0)) for run in runs[1:])
            if worst:
                return Claim(
                    "repeated runs",
                    f"{name} differs by {worst:.1e} between {REPEATS} runs on the same input",
                )
        return Claim("repeated runs")

    def options(self, name: str) -> GenerationOptions:
        """Returns the options of a search."""
        config, generation = self.checkpoint.model.config, dict(self.checkpoint.generation)
        settings = vars(generation_options(generation))
        longest = min(self.effort.longest, settings["max_length"])
        return GenerationOptions(**search_settings(name, settings, config, self.texts, longest))

    def searches(self, model: ForeignDecoder) -> Iterator[Decisions | list[Comparison]]:
        """Compares the tokens of greedy and beam search, alone and in padded batches."""
        if not self.texts:
            return
        for name in RECORDED:
            yield from self._search(model, name)
        if not self.best:
            return
        special, encodes = self.oracle.special, self.checkpoint.model.config.encoder_layers
        pairs = [
            (text, [special.bos_id, *wanted.scored_tokens])
            if encodes
            else (text[:1], [*text[1:], *wanted.scored_tokens])
            for text, (wanted, _) in zip(self.texts, self.best, strict=True)
        ]
        fed = [pair for pair in pairs if len(pair[1]) > 1]
        decoder: ObservableDecoder[Any] = model
        try:
            yield self.oracle.text(decoder, fed, self.forcing)
        except InputError as error:
            self.forcing = TeacherForcing()
            yield [failed("given answers", "text", error)]

    def _ways(self, model: ForeignDecoder, options: GenerationOptions) -> Iterator[Way]:
        """Yields the ways to answer text, each row alone first."""
        special = self.oracle.special

        def searched(decoder: ForeignDecoder) -> Answering:
            return lambda part: search(decoder, part, options, special)

        yield Way(ALONE, model, 1, searched(model))
        for side in self.paddings:
            decoder = model.padded(side)
            yield Way(f"batches padded {side}", decoder, BATCH, searched(decoder))

    def _search(self, model: ForeignDecoder, name: str) -> Iterator[Decisions | list[Comparison]]:
        oracle, options = self.oracle, self.options(name)
        expected = []
        for rows in length_batches([len(text) for text in self.texts], BATCH, 4096):
            chosen = [self.texts[row] for row in rows]
            wanted = search(oracle.reference, chosen, options, oracle.special, row_ids=rows)
            scores, own = oracle.scores(chosen, wanted, options)
            expected.append(ExpectedAnswers(rows, chosen, wanted, scores, own))
            oracle.done(len(rows))
        for way in self._ways(model, options):
            explain = oracle.explainer(way.decoder, options)
            tally = Tally(f"{name}, {way.name}", oracle.tolerance)
            try:
                # In the order of the text, so that a batch holds rows of unequal length.
                given = [
                    found
                    for at in range(0, len(self.texts), way.rows)
                    for found in way.answer(self.texts[at : at + way.rows])
                ]
                for batch in expected:
                    tally.add(batch, [[given[row]] for row in batch.rows], explain)
            except InputError as error:
                yield [failed(f"{name}, {way.name}", "text", error)]
                continue
            if way.name == ALONE and name == RECORDED[0]:
                self.best = [tally.best[row] for row in sorted(tally.best)]
            yield tally.decisions()

    def readings(self, model: ForeignEncoder) -> Iterator[Decisions | list[Comparison]]:
        """Compares what an encoder-only graph gives for text, and what is chosen by it."""
        if model.gives & {"logits", "head"}:
            head = self.checkpoint.head if "head" in model.gives else None
            try:
                yield from self.oracle.readings(model, self.texts, self.forcing, head)
            except InputError as error:
                self.forcing = TeacherForcing()
                yield [failed("text", "text", error)]
            return
        for row, text in enumerate(self.texts):
            tokens = np.array([text], np.int64)
            nothing = np.zeros((1, 0), np.int64)
            there = np.ones_like(tokens, np.bool_)
            case = Case(f"text, row {row}", tokens, there, nothing, 0, stage="text")
            yield self.numbers(model, case)


def configured(layout: Layout, checkpoint: Checkpoint) -> list[Claim]:
    """Compares genai_config.json with the reference."""
    given = layout.config.get("model", {})
    if not given:
        return []
    config, special = checkpoint.model.config, checkpoint.tokenizer.special
    ends = given.get("eos_token_id", [])
    decoder = given.get("decoder", {})
    pairs = {
        "vocab_size": (given.get("vocab_size"), config.vocabulary_size),
        "num_hidden_layers": (decoder.get("num_hidden_layers"), config.decoder_layers),
        "context_length": (given.get("context_length"), config.max_positions),
        "eos_token_id": (
            sorted(ends if isinstance(ends, list) else [ends]),
            sorted(special.ends),
        ),
    }
    return [
        Claim(f"genai_config.json: {name}", "" if a == b else f"says {a}, the reference has {b}")
        for name, (a, b) in pairs.items()
    ]


def default_paddings(checkpoint: Checkpoint) -> list[Padding]:
    """Returns the sides on which batches are padded.

    Positions that are added to embeddings count from the left edge in an encoder, so that torch
    itself answers otherwise where they are padded there.
    """
    config = checkpoint.model.config
    if config.encoder_layers and config.positions in ("sinusoidal", "learned"):
        return ["right"]
    return ["left", "right"]


def audit(
    folder: Path,
    layout: Layout,
    checkpoint: Checkpoint,
    texts: Sequence[str],
    *,
    session: SessionOptions | None = None,
    precision: str | None = None,
    paddings: Sequence[Padding] = (),
    plant: bool = False,
    atol: float | None = None,
    done: Done = lambda phase, done, total: None,
) -> ParityReport:
    """Compares the graphs of another tool with their reference.

    Args:
        folder: Where they lie, for the report.
        layout: The graphs.
        checkpoint: The reference.
        texts: Texts to run through both.
        session: How to run the graphs.
        precision: Precision that the graphs are judged by; by default what their operators say.
        paddings: Sides on which batches are padded; by default those that the reference can have.
        plant: Plant faults in copies of the graphs, if they pass.
        atol: The user's own tolerance: which of these faults would it have missed?
        done: Called with the phase, the steps finished and their total.

    Raises:
        InputError: A text does not fit the model, or the graphs are of another architecture.
        UsageError: The precision is unknown.
        ProviderError: The provider asked for cannot run here.
    """
    session = session or SessionOptions()
    model = open_foreign(layout, checkpoint, session)  # before the long work
    precision = precision or layout.precision()
    if precision not in PRECISIONS:
        raise UsageError(f"precision must be one of {', '.join(PRECISIONS)}, found {precision}")
    work = made(checkpoint, texts, precision, list(paddings))
    total = len(work.cases()) + 3 * len(work.texts)
    finished = 0

    def advance(steps: int) -> None:
        nonlocal finished
        finished += steps
        done("auditing", min(finished, total), total)

    work.oracle.done = advance
    claims, comparisons, decisions = collected(work.checks(model))
    forcing, budget = work.forcing, PRECISIONS[precision].task
    metrics: list[TaskMetric] = []
    if forcing.tokens:
        metrics = [forcing.choices(budget.choices), forcing.worst_choice(budget.choice)]
    if work.best:
        metrics.append(token_agreement(work.best))
    report = ParityReport(
        str(folder),
        settings(layout, session, precision)
        | {
            "rows": len(work.texts),
            "batch_rows": BATCH,
            "padding": ", ".join(work.paddings),
            "text_sha256": hashlib.sha256("\n".join(texts).encode()).hexdigest(),
        },
        work.oracle.tolerance,
        comparisons,
        decisions,
        metrics,
        forcing.growth(),
        forcing.margins(),
        claims=[*configured(layout, checkpoint), *claims],
        searches=[asdict(work.options(name)) for name in RECORDED] if work.best else [],
    )
    if not plant:
        return report

    def checks(copied: Layout) -> Found:
        brief = replace(work.effort, vocabulary=True, most_cases=BRIEF_CASES)
        few = Audit(checkpoint, work.oracle, work.texts[:BATCH], brief, work.paddings)
        return few.checks(open_foreign(copied, checkpoint, session))

    def answers(copied: Layout) -> list[NDArray[Any]]:
        case = random_case(checkpoint.model.config, *TRIED, 0, seed=0)
        whole = np.ones_like(case.mask)
        target = case.target[:, :1]
        tried = replace(case, mask=whole, target=target, rows=None)
        model: Observable = open_foreign(copied, checkpoint, session)
        return list(observe(model, tried).values())

    def changes(copied: Layout) -> bool:
        opened = partial(open_foreign, copied, checkpoint, session)
        return answers_otherwise(work.oracle, model, opened, work.unseen(), precision)

    given = layout, checks, answers, changes, atol
    return with_faults(report, *given, partial(done, "planting"))


def with_faults(
    report: ParityReport,
    layout: Layout,
    checks: Checks,
    answers: Answers,
    changes: Callable[[Layout], bool],
    atol: float | None,
    done: Callable[[int, int], None],
) -> ParityReport:
    """Returns the report with the results of planted faults, if it passed."""
    if not report.passed:
        untried = {"planted faults": "none, since the graphs fail as they are"}
        return replace(report, settings={**report.settings, **untried})
    planted = self_test(layout, checks, answers, changes, atol, done)
    told: dict[str, Any] = {}
    if atol is not None:
        wrong = [item for item in planted if item.changes_answer]
        missed = sum(bool(item.tolerated) for item in wrong)
        told["atol"] = f"{atol:g} would have missed {missed} of {len(wrong)} planted faults"
    return replace(report, settings={**report.settings, **told}, self_test=planted)


def settings(layout: Layout, session: SessionOptions, precision: str) -> dict[str, Any]:
    """Returns what decides the numbers."""
    share = layout.in_integers()
    return {
        "written by": layout.writer,
        "precision": precision,
        "provider": session.provider,
        "threads": session.threads,
        "torch": torch.__version__,
        "graphs": ", ".join(graph.path.name for graph in layout.graphs),
        "optimisation": session.optimisation,
        "onnxruntime": onnxruntime.__version__,
        **({"weights in integers": f"{share:.0%}"} if share else {}),
    }


def collected(found: Found) -> tuple[list[Claim], list[Comparison], list[Decisions]]:
    """Returns the results of checks by kind."""
    claims: list[Claim] = []
    comparisons: list[Comparison] = []
    decisions: list[Decisions] = []
    for item in found:
        if isinstance(item, Claim):
            claims.append(item)
        elif isinstance(item, Decisions):
            decisions.append(item)
        else:
            comparisons += item
    return claims, comparisons, decisions


def made(
    checkpoint: Checkpoint, texts: Sequence[str], precision: str, paddings: Sequence[Padding]
) -> Audit:
    """Returns the checks of graphs beside a reference."""
    tokenizer, config = checkpoint.tokenizer, checkpoint.model.config
    tolerance = tolerance_of(precision)
    oracle = Oracle(checkpoint.model, tokenizer.special, tolerance)
    effort = replace(Effort.at_export(checkpoint.model, BatchOptions()), batch_rows=BATCH)
    kept = effort.texts(checkpoint, texts)
    if texts and not kept:
        raise InputError(
            f"expected lines of 1 to {config.max_positions} tokens, found none among "
            f"{len(texts)}; give other text"
        )
    sources = [source_of(text, tokenizer, config, row) for row, text in enumerate(kept, start=1)]
    return Audit(checkpoint, oracle, sources, effort, paddings or default_paddings(checkpoint))
