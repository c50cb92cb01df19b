"""The proof: torch and a bundle answer the same inputs, and every difference is accounted for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import onnx
import torch

from transferry.build_model.checkpoint import Checkpoint
from transferry.export.backends.cross_check import RUNTIMES, cross_check
from transferry.export.bundle import require_exported_from
from transferry.export.debug.localise import localise
from transferry.export.faults.self_test import self_test
from transferry.export.parity.cases import cross_check_cases, random_sources, source_of, sweep
from transferry.export.parity.oracle import SEARCHES, Oracle, search_settings
from transferry.export.parity.task_metrics import Answers, TaskBudget, token_agreement, translation
from transferry.export.parity.teacher_forcing import TeacherForcing
from transferry.export.variants import PORTABLE
from transferry.runtime.bundle import Bundle, Variant
from transferry.runtime.decoding.hypothesis import Hypothesis
from transferry.runtime.decoding.options import GenerationOptions
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.ort.encoder import EncoderModel
from transferry.runtime.ort.open_model import open_model
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.parity.compare import Tolerance
from transferry.runtime.parity.divergence import scored_tokens
from transferry.runtime.parity.report import Decisions, ParityReport, TaskMetric

LONGEST_ANSWER = 256
SAMPLED = 4  # one row in so many is sampled too: the search differs little from greedy's
PLANTED_ROWS = 4  # that the searches of the self-test run on


def verify_against(
    checkpoint: Checkpoint,
    bundle: Bundle,
    variant: Variant,
    session: SessionOptions,
    texts: Sequence[str],
    done: Callable[[int, int], None] = lambda done, total: None,
    tolerance: Tolerance | None = None,
    targets: Sequence[str] | None = None,
    *,
    opinions: bool = False,
    plant_faults: bool = False,
    replay: Path | None = None,
) -> ParityReport:
    """Compares a bundle, opened as it will be served, with the run that it came from.

    Where a fault begins is looked for in the portable variant only: its nodes are those that torch
    traced.

    Args:
        checkpoint: The run.
        bundle: The bundle.
        variant: Which variant.
        session: How to open it.
        texts: Sentences to run every search on.
        done: Called with how many of how many pieces of work are done.
        tolerance: What passes; by default what the variant's precision allows.
        targets: The right answers to the texts, for BLEU and perplexity.
        opinions: Ask other runtimes too.
        plant_faults: Plant faults in copies of the bundle, if it passes.
        replay: Where to write the input that shows a fault, if a tensor is wrong.

    Raises:
        UsageError: Opinions or the self-test are asked for of another variant than the portable.
        InputError: A text is empty or longer than the model's positions, run and bundle do not
            have the same tokenizer or shape, or targets do not go with the texts.
    """
    tolerance = tolerance or Tolerance.of(variant.precision)
    tokenizer, config = checkpoint.tokenizer, checkpoint.model.config
    require_exported_from(checkpoint, bundle)
    if targets is not None and (len(targets) != len(texts) or not config.encoder_layers):
        raise InputError(
            f"expected a target for each of {len(texts)} texts of an encoder-decoder, found "
            f"{len(targets)} for a model that is {config.architecture}"
        )
    sources = [
        source_of(text, tokenizer, config, number) for number, text in enumerate(texts, start=1)
    ]
    if variant.name != PORTABLE and (opinions or plant_faults):
        raise UsageError(
            f"other opinions and the self-test are of the graphs of variant {PORTABLE}, which any "
            f"runtime can run, not of {variant.name}: add --variant {PORTABLE}"
        )
    model = open_model(bundle, variant, session)
    oracle = Oracle(checkpoint.model, tokenizer.special, tolerance)
    cases = list(sweep(config))
    sampled = sources[::SAMPLED]
    # Of a decoder the searches, and then all answers fed whole; of an encoder the filling in.
    rows = 3 * len(sources) + len(sampled) if config.decoder_layers else len(sources)
    rows += len(sources) if variant.screen else 0
    total = len(cases) + rows + (RUNTIMES if opinions else 0)
    finished = 0

    def advance(count: int = 1) -> None:
        nonlocal finished
        finished += count
        done(finished, total)

    comparisons = oracle.numbers(model, cases, advance)
    decisions: list[Decisions] = []
    tasks: list[TaskMetric] = []
    forcing = TeacherForcing()
    budget = TaskBudget.of(variant.precision)
    if sources and isinstance(model, EncoderModel):
        compared, filled = oracle.fillings(model, sources, forcing, advance)
        comparisons += compared
        decisions.append(filled)
    elif sources and not isinstance(model, EncoderModel):
        generation = bundle.manifest.generation
        answers = {name: Answers(len(sources)) for name in SEARCHES}
        for name, fields in SEARCHES.items():
            searched, called = sources, name
            if "sample" in fields:
                searched, called = sampled, f"{name} of every {SAMPLED}th row"
            settings = search_settings(name, generation, config, sources, LONGEST_ANSWER)
            options = GenerationOptions(**settings)
            decisions.append(
                oracle.decisions(model, called, searched, options, advance, answers[name].keep)
            )
        if variant.screen:
            settings = search_settings("greedy", generation, config, sources, LONGEST_ANSWER)
            options = GenerationOptions(**settings)
            name = "greedy, screened"
            decisions.append(oracle.decisions(model, name, sources, options, advance, scores=False))
        pairs = _fed_whole(checkpoint, texts, sources, targets, answers["greedy"].wanted)
        comparisons += oracle.text(model, pairs, forcing, advance)
        tasks.append(token_agreement(answers["greedy"], budget.agreement))
        if targets is not None:
            for name in ("greedy", "beam 4"):
                tasks.append(translation(tokenizer, name, answers[name], targets, budget.bleu))
        if forcing.tokens and (targets is not None or not config.encoder_layers):
            tasks.append(forcing.perplexity(budget.perplexity))
    how = {
        **model.describe(),
        "torch": torch.__version__,
        "onnx": onnx.__version__,
        "against": "the run",
        "run_sha256": checkpoint.sha256,
        "rows": len(texts),
        "text_sha256": hashlib.sha256("\n".join(texts).encode()).hexdigest(),
    }
    asked = cross_check_cases(config) if opinions else []
    report = ParityReport(
        str(bundle.folder),
        how,
        tolerance,
        comparisons,
        decisions,
        tasks,
        forcing.growth(),
        forcing.margins(),
        cross_check(oracle, model, bundle, variant, asked, advance) if opinions else (),
    )
    if plant_faults and report.passed:
        few = sources[:PLANTED_ROWS] or random_sources(config, PLANTED_ROWS)
        planted = self_test(checkpoint, bundle, variant, session, few, tolerance, done)
        report = replace(report, self_test=planted)
    if not report.passed and variant.name == PORTABLE:
        failed = {item.case for item in comparisons if item.fault}
        # Where text alone shows it, a shorter case may yet.
        shown = [case for case in cases if case.name in failed] or cases
        origin = localise(checkpoint.model, bundle, variant, session, tolerance, shown, replay)
        report = replace(report, origin=origin)
    return report


def _fed_whole(
    checkpoint: Checkpoint,
    texts: Sequence[str],
    sources: Sequence[Sequence[int]],
    targets: Sequence[str] | None,
    answers: Sequence[Hypothesis],
) -> list[tuple[list[int], list[int]]]:
    """Of each row what is read and what is then fed: the target, or else what torch answered.

    A decoder alone is fed the text itself.
    """
    tokenizer, config = checkpoint.tokenizer, checkpoint.model.config
    special, most = tokenizer.special, config.max_positions
    if not config.encoder_layers:
        fed = [special.wrap(tokenizer.encode(text))[: most + 1] for text in texts]
        return [([], tokens) for tokens in fed if len(tokens) > 1]
    if targets is None:
        given = [scored_tokens(answer, special.eos_id) for answer in answers]
    else:
        given = [(*tokenizer.encode_target(text), special.eos_id) for text in targets]
    return [
        (list(source), [special.bos_id, *tokens][: most + 1])
        for source, tokens in zip(sources, given, strict=True)
    ]
