"""Proof that torch and a bundle answer the same inputs, up to rounding."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise
from typing import Any

import onnx
import torch

from transferry.build_model.checkpoint import Checkpoint
from transferry.export.blame.cross_check import RUNTIMES, run_cross_check
from transferry.export.blame.localise import localise
from transferry.export.checks.claims import (
    default_generation,
    manifest_claims,
    recorded_claim,
    require_exported_from,
)
from transferry.export.checks.graphs import fresh_graphs, graphs_claim
from transferry.export.checks.positions import walk
from transferry.export.checks.scores import compare_scores
from transferry.export.checks.task_metrics import token_agreement, translation
from transferry.export.checks.weights import weights_claim
from transferry.export.checks.whole_search import check_one_graph
from transferry.export.faults.self_test import self_test
from transferry.export.oracle.cases import random_sources, source_of
from transferry.export.oracle.effort import ALL, Effort
from transferry.export.oracle.oracle import Oracle, TextParity
from transferry.export.oracle.served import REPLICAS
from transferry.export.recipes import RECIPES
from transferry.export.rewrite.calibration import Calibration
from transferry.export.trace.graph import Traces
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.specs import PORTABLE
from transferry.runtime.decoding.batching import BatchOptions
from transferry.runtime.decoding.generation_options import generation_options, suppressing
from transferry.runtime.engine.engine import Engine
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.ort.encoder import EncoderModel
from transferry.runtime.ort.open_model import ServedModel
from transferry.runtime.precision import FLOAT32, TaskBudget
from transferry.runtime.proof.compare import Tolerance
from transferry.runtime.proof.one_graph import OneGraph
from transferry.runtime.proof.report import Decisions, Origin, ParityReport, TaskMetric

SAMPLED = 4  # one row in so many is sampled and scored too: little differs from greedy search
PLANTED_ROWS = 4  # of the searches of the self-test
# Told the phase, the steps finished and their total.
Done = Callable[[str, int, int], None]


def verify_against(
    checkpoint: Checkpoint,
    bundle: Bundle,
    model: ServedModel,
    texts: Sequence[str],
    targets: Sequence[str] | None = None,
    *,
    cross_check: bool = False,
    plant_faults: bool = False,
    batches: BatchOptions | None = None,
    search: Mapping[str, Any] | None = None,
    effort: Effort = ALL,
    traces: Traces | None = None,
    done: Done = lambda phase, done, total: None,
) -> ParityReport:
    """Compares a bundle with the run that it was exported from.

    In the portable variant, whose nodes are those that torch traced, a wrong tensor is traced back
    to the module in which the fault begins.

    Args:
        checkpoint: The run.
        bundle: The bundle.
        model: A variant of it, opened as it will be served.
        texts: Sentences to run every search on.
        targets: Reference answers to the texts, for BLEU and perplexity.
        cross_check: Run a few cases on other runtimes too.
        plant_faults: Plant faults in copies of the bundle, if it passes.
        batches: Limits on what is computed at once when the texts are answered. Default: those that
            the variant is served with.
        search: Fields of GenerationOptions of a search to run besides the standard ones;
            `suppress` may hold text.
        effort: How much to check; by default everything.
        traces: Graphs traced before, for the comparison with graphs exported anew.
        done: Called with the phase, the steps finished and their total.

    Raises:
        UsageError: The cross-check of another variant than the portable one.
        InputError: A text is empty or longer than the model's positions, run and bundle differ in
            tokenizer or shape, or the targets do not fit the texts.
    """
    require_exported_from(checkpoint, bundle)
    config, variant = checkpoint.model.config, model.variant
    if variant.name != PORTABLE and cross_check:
        raise UsageError(
            f"the cross-check needs variant {PORTABLE}, whose graphs any runtime can run, not "
            f"{variant.name}: add --variant {PORTABLE}"
        )
    # Not what the bundle says: a lower precision would widen the tolerance.
    recipe = RECIPES.get(variant.name)
    precision = recipe.precision if recipe else FLOAT32
    tolerance = Tolerance.of(precision.name)
    calibration = Calibration.of(bundle, variant) if precision.calibrated else None
    special = checkpoint.tokenizer.special
    traces = traces or Traces()
    # Before the oracle, which takes memory too.
    claims = [
        *manifest_claims(checkpoint, bundle),
        weights_claim(checkpoint.model, bundle, variant, calibration),
    ]
    oracle = Oracle(
        checkpoint.model, special, tolerance, precision=precision, calibration=calibration
    )
    if effort.anew:
        claims.append(recorded_claim(bundle, variant, oracle))
        fresh = fresh_graphs(checkpoint.model, bundle, variant, calibration, traces)
        claims += [graphs_claim(fresh, bundle, variant)] if fresh is not None else []
    batches = batches or model.batches
    batches = replace(batches, rows=min(batches.rows, effort.batch_rows or batches.rows))
    if search is not None:
        default = generation_options(default_generation(checkpoint))
        search = suppressing(search, default, checkpoint.tokenizer.encode_target)
    if search is None and default_generation(checkpoint).keys() & {"beam", "n_best", "sample"}:
        search = {}  # what the bundle does by default is none of the standard searches
    text = _text_parity(checkpoint, oracle, texts, targets, batches, effort.longest)
    text = replace(text, given=search)
    cases = effort.cases(config, text.sources, batches.rows, precision.integers)
    total = len(cases) + text.rows(variant) + (RUNTIMES if cross_check else 0)
    oracle.done = _counter(total, done)
    comparisons = oracle.numbers(model, cases)
    if not isinstance(model, EncoderModel):
        comparisons += walk(oracle, model, effort.positions)
    decisions: list[Decisions] = []
    for found in text.check(model):
        if isinstance(found, Decisions):
            decisions.append(found)
        else:
            comparisons += found
    if texts and not isinstance(model, EncoderModel):
        # Without targets a source is scored as its own: any text will do.
        engine = Engine(bundle, model, replicas=REPLICAS, batches=batches)
        given: Sequence[str | None] = [None] * len(texts)
        if config.encoder_layers:
            given = targets or texts
        pairs = list(zip(texts, given, strict=True))[::SAMPLED]
        comparisons += compare_scores(oracle, engine, pairs)
    if not isinstance(model, EncoderModel):
        one = OneGraph.of(bundle, variant, model.options)
        decisions += check_one_graph(oracle, one, model, text) if one is not None else []
    checked = run_cross_check(oracle, model, bundle) if cross_check else ()
    report = ParityReport(
        str(bundle.folder),
        _settings(checkpoint, model, texts, batches),
        tolerance,
        comparisons,
        decisions,
        _task_metrics(checkpoint, text, targets, precision.task),
        text.forcing.growth(),
        text.forcing.margins(),
        checked,
        claims=claims,
        searches=[asdict(text.options(name)) for name in text.searches] if decisions else [],
    )
    if plant_faults and report.passed:
        few = text.sources[:PLANTED_ROWS] or random_sources(config, PLANTED_ROWS)
        told = partial(done, "self-test")
        planted = self_test(checkpoint, bundle, model, few, tolerance, told, traces)
        return replace(report, self_test=planted)
    wrong = any(item.fault for item in comparisons) or not all(item.passed for item in decisions)
    if wrong and variant.name == PORTABLE:
        # Where only a search shows the fault, one of the cases may still do.
        shown = oracle.failed or cases
        served = variant, model.options
        origin = localise(checkpoint.model, bundle, *served, tolerance, shown)
        return replace(report, origin=origin or Origin.none_found(len(shown)))
    return report


def _counter(total: int, done: Done) -> Callable[[int], None]:
    """Adds up steps and passes on the sum, with the total."""
    finished = 0

    def advance(steps: int) -> None:
        nonlocal finished
        finished += steps
        done("verifying", finished, total)

    return advance


def _text_parity(
    checkpoint: Checkpoint,
    oracle: Oracle,
    texts: Sequence[str],
    targets: Sequence[str] | None,
    batches: BatchOptions,
    longest: int,
) -> TextParity:
    """Turns texts into sources, and targets or prompts into tokens to feed whole."""
    tokenizer, config = checkpoint.tokenizer, checkpoint.model.config
    special = tokenizer.special
    if targets is not None and (len(targets) != len(texts) or not config.encoder_layers):
        raise InputError(
            f"expected a target for each of {len(texts)} texts of an encoder-decoder, found "
            f"{len(targets)} for a model that is {config.architecture}"
        )
    sources = [
        source_of(text, tokenizer, config, number) for number, text in enumerate(texts, start=1)
    ]
    if checkpoint.head is not None and checkpoint.head.task == "classify" and special.between:
        # Pairs too: each text with the next.
        pairs = (
            special.wrap([*tokenizer.encode(one), *special.between, *tokenizer.encode(other)])
            for one, other in pairwise(texts)
        )
        sources += [pair for pair in pairs if len(pair) <= config.max_positions]
    fed = None
    if not config.encoder_layers:
        fed = [special.wrap(tokenizer.encode(text)) for text in texts]
    elif targets is not None:
        encoded = [tokenizer.encode_target(target) for target in targets]
        fed = [[special.bos_id, *tokens, special.eos_id] for tokens in encoded]
    generation = default_generation(checkpoint)
    given = (oracle, generation, sources, longest, fed, SAMPLED, batches)
    return TextParity(*given, head=checkpoint.head, decode=tokenizer.decode)


def _settings(
    checkpoint: Checkpoint, model: ServedModel, texts: Sequence[str], batches: BatchOptions
) -> dict[str, Any]:
    return {
        **model.describe(),
        "torch": torch.__version__,
        "onnx": onnx.__version__,
        "against": "the run",
        "run_sha256": checkpoint.sha256,
        **({} if checkpoint.head is None else {"task": checkpoint.head.task}),
        "rows": len(texts),
        "batch_rows": batches.rows,
        "text_sha256": hashlib.sha256("\n".join(texts).encode()).hexdigest(),
    }


def _task_metrics(
    checkpoint: Checkpoint, text: TextParity, targets: Sequence[str] | None, budget: TaskBudget
) -> list[TaskMetric]:
    """Metrics of the answers to text; none without text."""
    if not text.forcing.tokens:
        return []
    forcing = text.forcing
    metrics = [forcing.choices(budget.choices), forcing.worst_choice(budget.choice)]
    if not text.best:  # without a decoder: of the tokens that are filled in
        return metrics
    metrics.append(token_agreement(text.best["greedy"]))
    if targets is not None:
        metrics += [
            translation(checkpoint.tokenizer, name, text.best[name], targets, budget.bleu)
            for name in ("greedy", "beam 4")
        ]
    if text.fed is not None:
        metrics.append(forcing.perplexity(budget.perplexity))
    return metrics
