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
from transferry.export.audit.decoder import ForeignDecoder, Padding
from transferry.export.audit.encoder import ForeignEncoder
from transferry.export.audit.layout import Layout
from transferry.export.audit.planted import Answers, Checks, self_test
from transferry.export.audit.session import ForeignGraph
from transferry.export.parity.cases import random_case, source_of
from transferry.export.parity.effort import Effort
from transferry.export.parity.oracle import Oracle
from transferry.export.parity.searches import RECORDED, search_settings
from transferry.export.parity.task_metrics import BUDGETS, token_agreement
from transferry.export.parity.teacher_forcing import TeacherForcing
from transferry.runtime.decoding.batching import BatchOptions, length_batches
from transferry.runtime.decoding.hypothesis import Hypothesis
from transferry.runtime.decoding.options import GenerationOptions, generation_options
from transferry.runtime.decoding.search import pad_sources, search
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.parity.compare import (
    EPSILONS,
    INT8_STEP,
    MOST,
    Case,
    Comparison,
    Tolerance,
    limited,
    observe,
    relative_error,
)
from transferry.runtime.parity.divergence import ExpectedAnswers, Tally
from transferry.runtime.parity.report import Claim, Decisions, ParityReport, TaskMetric

# Rounding of a graph of integers beside the largest number: half a step of a weight and of an
# input in int8, of a weight in int4. Which numbers it rounds to only its writer knows, so that
# torch cannot round likewise, as it does beside a bundle.
STEPS = {"int8": 2 * INT8_STEP, "int4": 2.0**-4}
BATCH = 8  # rows of a batch that is compared with the same rows alone
REPEATS = 3
ALONE = "each row alone"
# Rows and columns of the unpadded input that exporters try a tolerance on (optimum's
# `validate_model_outputs` has its defaults).
TRIED = (2, 16)
BRIEF_CASES = 16  # of random tokens, for each planted fault

Model = ForeignDecoder | ForeignEncoder
Found = Iterator[Claim | Decisions | list[Comparison]]
Done = Callable[[str, int, int], None]


def tolerance_of(precision: str) -> Tolerance:
    """Returns what a foreign graph of a precision may be off: in proportion to its rounding."""
    if precision not in STEPS:
        return Tolerance.of(precision)
    factor = Tolerance.factor * STEPS[precision] / EPSILONS["float32"]
    return Tolerance(factor, most=MOST[precision], crossed=min(1.0, 32 * STEPS[precision]))


def open_foreign(layout: Layout, checkpoint: Checkpoint, options: SessionOptions) -> Model:
    """Opens the graphs as the architecture of the reference wants it.

    Raises:
        InputError: They are of another architecture, or cannot be opened.
        ProviderError: The provider asked for cannot run here.
    """
    config, special = checkpoint.model.config, checkpoint.tokenizer.special
    both = config.architecture == "encoder-decoder"
    if both != (layout.encoder is not None):
        found = "an encoder and a decoder" if layout.encoder else "one graph without an encoder"
        raise InputError(
            f"the reference is {config.architecture}, the folder holds {found}; name the reference "
            "that the graphs were made from"
        )
    if config.decoder_layers:
        return ForeignDecoder(layout, options, config, special.pad_id)
    return ForeignEncoder(layout, options, config)


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
        """Returns the cases of random tokens."""
        config = self.checkpoint.model.config
        return self.effort.cases(config, self.texts, BATCH, False)

    def checks(self, model: Model) -> Found:
        """Yields the result of one check after another."""
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
        yield from self.independence(model)
        yield declared(model.graphs)

    def numbers(self, model: Model, case: Case) -> list[Comparison]:
        """Compares a case; one that does not run is a fault."""
        try:
            return self.oracle.numbers(model, [case])
        except InputError as error:
            self.oracle.done(1)
            return [failed(case.name, case.stage, error)]

    def repeats(self, model: Model) -> Claim:
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
        try:
            yield self.oracle.text(model, fed, self.forcing)
        except InputError as error:
            self.forcing = TeacherForcing()
            yield [failed("given answers", "text", error)]

    def _search(self, model: ForeignDecoder, name: str) -> Iterator[Decisions | list[Comparison]]:
        oracle, options = self.oracle, self.options(name)
        expected = []
        for rows in length_batches([len(text) for text in self.texts], BATCH, 4096):
            chosen = [self.texts[row] for row in rows]
            wanted = search(oracle.reference, chosen, options, oracle.special, row_ids=rows)
            scores, own = oracle.scores(chosen, wanted, options)
            expected.append(ExpectedAnswers(rows, chosen, wanted, scores, own))
            oracle.done(len(rows))
        ways: dict[str, tuple[ForeignDecoder, int]] = {ALONE: (model, 1)}
        ways |= {f"batches padded {side}": (model.padded(side), BATCH) for side in self.paddings}
        for way, (decoder, size) in ways.items():
            explain = oracle.explainer(decoder, options)
            tally = Tally(f"{name}, {way}", oracle.tolerance)
            try:
                for batch in expected:
                    sources = batch.sources
                    parts = [sources[at : at + size] for at in range(0, len(sources), size)]
                    given = [search(decoder, part, options, oracle.special) for part in parts]
                    answers = [[found] for part in given for found in part]
                    tally.add(batch, answers, explain)
            except InputError as error:
                yield [failed(f"{name}, {way}", "text", error)]
                continue
            if way == ALONE and name == RECORDED[0]:
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

    def independence(self, model: Model) -> Iterator[list[Comparison]]:
        """Compares rows of text in padded batches with the same rows alone.

        A row's answer may not depend on its neighbours, whatever its precision: the limit is that
        of float32.
        """
        rows = self.texts[: 4 * BATCH]
        for side in self.paddings if rows else ():
            worst: dict[str, tuple[float, int]] = {}
            for first in range(0, len(rows), BATCH):
                batch = rows[first : first + BATCH]
                try:
                    together = _read(model, batch, self.oracle.special.pad_id, side)
                    alone = [
                        _read(model, [row], self.oracle.special.pad_id, side)[0] for row in batch
                    ]
                except InputError as error:
                    shown = f"rows {first} to {first + len(batch) - 1}, batches padded {side}"
                    yield [failed(shown, "text", error)]
                    continue
                for number, (one, other) in enumerate(zip(alone, together, strict=True)):
                    for name, wanted in one.items():
                        everywhere = np.ones(wanted.shape, np.bool_)
                        distance = relative_error(other[name], wanted, everywhere)
                        if not distance <= worst.get(name, (-1.0, 0))[0]:
                            worst[name] = (distance, first + number)
            budget = Tolerance().budget(self.own)
            yield [
                limited(
                    f"row {row} alone and in batches padded {side}",
                    *(name, "text", distance, self.own, budget),
                )
                for name, (distance, row) in worst.items()
            ]


def failed(case: str, stage: str, error: InputError) -> Comparison:
    """Returns the comparison of a case that does not run."""
    return Comparison(case, "outputs", stage, np.inf, 0.0, Tolerance().budget(0.0), str(error))


def _read(
    model: Model, rows: Sequence[Sequence[int]], pad_id: int, side: Padding
) -> list[dict[str, NDArray[Any]]]:
    """Returns what a batch of texts gives, without padding, a row each."""
    if isinstance(model, ForeignDecoder):
        decoder = model.padded(side)
        if decoder.has_encoder:
            state = decoder.start(*pad_sources(rows, pad_id))
            first = np.zeros((len(rows), 1), np.int64)
            logits = decoder.step(first, state)[0].all_logits
        else:
            source, mask = pad_sources([row[:-1] for row in rows], pad_id)
            state = decoder.start(source, mask)
            tokens = np.array([[row[-1]] for row in rows])
            output, state = decoder.step(tokens, state)
            later = decoder.step(tokens, state)[0].all_logits
            logits = np.concatenate([output.all_logits, later], axis=1)
        return [{"logits": row} for row in logits]
    ids, mask = pad_sources(rows, pad_id)
    if side == "left":
        ids, mask = pad_sources([row[::-1] for row in rows], pad_id)
        ids, mask = ids[:, ::-1], mask[:, ::-1]
    found = model.encode(ids, mask)
    return [
        {
            name: value[row][mask[row]] if value.ndim > 2 else value[row]
            for name, value in found.items()
        }
        for row in range(len(rows))
    ]


def declared(graphs: Sequence[ForeignGraph]) -> Claim:
    """Returns what the graphs declare of their outputs that no run has shown."""
    found = [
        f"{graph.graph.path.name}: {name} {problem}"
        for graph in graphs
        for name, problem in graph.lies.items()
    ]
    return Claim("declared types and shapes", "; ".join(found))


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
    precision = precision or layout.precision()
    if precision not in BUDGETS:
        raise UsageError(f"precision must be one of {', '.join(BUDGETS)}, found {precision}")
    open_foreign(layout, checkpoint, session)  # before the long work
    work = made(checkpoint, texts, precision, list(paddings))
    total = len(work.cases()) + 3 * len(work.texts)
    finished = 0

    def advance(steps: int) -> None:
        nonlocal finished
        finished += steps
        done("auditing", min(finished, total), total)

    work.oracle.done = advance
    claims, comparisons, decisions = collected(
        work.checks(open_foreign(layout, checkpoint, session))
    )
    forcing, budget = work.forcing, BUDGETS[precision]
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
    if not plant or not report.passed:
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
        return list(observe(open_foreign(copied, checkpoint, session), tried).values())

    return with_faults(report, layout, checks, answers, atol, partial(done, "planting"))


def with_faults(
    report: ParityReport,
    layout: Layout,
    checks: Checks,
    answers: Answers,
    atol: float | None,
    done: Callable[[int, int], None],
) -> ParityReport:
    """Returns the report with the results of planted faults."""
    planted = self_test(layout, checks, answers, atol, done)
    told: dict[str, Any] = {}
    if atol is not None:
        wrong = [item for item in planted if item.changes_answer]
        missed = sum(f"passes atol {atol:g}" in item.planted for item in wrong)
        told["atol"] = f"{atol:g} would have missed {missed} of {len(wrong)} planted faults"
    return replace(report, settings={**report.settings, **told}, self_test=planted)


def settings(layout: Layout, session: SessionOptions, precision: str) -> dict[str, Any]:
    """Returns what decides the numbers."""
    return {
        "written by": layout.writer,
        "graphs": ", ".join(graph.path.name for graph in layout.graphs),
        "precision": precision,
        "provider": session.provider,
        "optimisation": session.optimisation,
        "threads": session.threads,
        "onnxruntime": onnxruntime.__version__,
        "torch": torch.__version__,
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
            f"expected text of at most {config.max_positions} tokens a line, found none of "
            f"{len(texts)} lines that fits; shorten them"
        )
    sources = [source_of(text, tokenizer, config, row) for row, text in enumerate(kept, start=1)]
    return Audit(checkpoint, oracle, sources, effort, paddings or default_paddings(checkpoint))
