"""Faults in copies of a bundle, which the checks of `verify` must catch."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from transferry.build_model.model.config import ModelConfig
from transferry.export.checks.check import Check, attempt, claim
from transferry.export.checks.claims import (
    default_generation,
    manifest_claims,
    recorded_claim,
    require_exported_from,
)
from transferry.export.checks.graphs import Fresh, graphs_claim
from transferry.export.checks.job_files import WRITTEN, rounded, written
from transferry.export.checks.numbers import numbers
from transferry.export.checks.searches import (
    Text,
    one_graph_options,
    served_searches,
    whole_searches,
)
from transferry.export.checks.tasks import ServedTasks
from transferry.export.checks.texts import feeding, given_answers
from transferry.export.checks.weights import weights_claim
from transferry.export.faults import graph_faults, weight_faults
from transferry.export.faults.gate import Fault, Gate, rare_tokens
from transferry.export.faults.one_graph_faults import one_graph_faults
from transferry.export.faults.variant_faults import variant_faults
from transferry.export.oracle.cases import (
    BRIEF,
    largest_batches,
    lengths,
    random_case,
    random_cases,
    single_tokens,
    sizes,
    vocabulary,
)
from transferry.export.oracle.oracle import Oracle
from transferry.export.oracle.plain_answers import PLAINLY, PlainAnswers
from transferry.export.subject.bundle import BundleSubject
from transferry.export.subject.bundle_copy import BundleCopy
from transferry.export.subject.subject import Observable
from transferry.runtime.bundle.specs import ONE_GRAPH, PORTABLE
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.decoding.search import search
from transferry.runtime.engine.engine import Engine
from transferry.runtime.engine.tasks.generate import GenerationResult, TextHypothesis
from transferry.runtime.errors import ParityError, ProviderError
from transferry.runtime.io.folders import temporary_folder
from transferry.runtime.ort.session import SessionOptions, open_session, require_provider
from transferry.runtime.precision import EPSILON, Precision
from transferry.runtime.proof.compare import Case, Tolerance, Truth, compare, observe
from transferry.runtime.proof.divergence import Explainer
from transferry.runtime.proof.report import PlantedFault
from transferry.runtime.proof.tally import ExpectedAnswers, Tally

FAULTS: tuple[Fault, ...] = (*weight_faults.FAULTS, *graph_faults.FAULTS)
LONGEST_ANSWER = 32
LONGEST_SOURCE = 13  # of the cases of several rows
# Largest rounding error, in units of torch's float32 error (docs/parity.md). Not the default of
# `Tolerance`: if that became too wide, no fault would seem to change an answer any more.
ROUNDING = 8.0
FELL_BACK = "a provider that fell back"
ROUNDED = "a writer that rounds"


def faults_of(copy: BundleCopy) -> list[Fault]:
    """Returns the kinds of fault that a variant can have."""
    portable = copy.variant.name == PORTABLE
    found = [
        fault for fault in FAULTS if fault.applies(copy.config) and (portable or fault.everywhere)
    ]
    return [*found, *variant_faults(copy)]


def self_test(
    subject: BundleSubject,
    oracle: Oracle,
    sources: Sequence[Sequence[int]],
    fresh: Fresh,
    done: Callable[[int, int], None] = lambda done, total: None,
) -> list[PlantedFault]:
    """Plants every kind of fault that applies, and verifies each faulty copy.

    Raises:
        ParityError: The bundle itself does not pass, so that its copies would prove nothing.
        InputError: A fault cannot be planted: the graphs are not those that this version exports.
    """
    variant = subject.variant
    planted = [_fallen_back(subject.bundle.graph(next(iter(variant.graphs.values()))))]
    engine = Engine.of(subject.bundle, subject.model)
    planted.append(_rounding_writer(engine))
    planted += _wrong_engines(subject, oracle, engine, sources) if subject.decodes else ()
    test = BundleTest(subject, oracle.remembering(), sources, fresh)
    with temporary_folder() as folder:
        parts: list[tuple[Gate[BundleSubject], list[Fault]]] = []
        for whole in (False, True) if ONE_GRAPH in variant.graphs else (False,):
            gate = test.gate(whole=whole)
            # Rewritten like the others, so that the rewriting itself is not what is caught.
            honest = gate.subject.copy(folder / "copy")
            honest.rewrite()
            honest.seal()
            if caught := gate.caught_by(gate.subject.reopened(honest.folder)):
                raise ParityError(
                    f"{subject.folder} does not pass as it is: {caught} fails. Verify it without "
                    "the self-test, and fix the faults of that report: until then its copies prove "
                    "nothing"
                )
            honest.restore()
            parts.append((gate, (one_graph_faults if whole else faults_of)(honest)))
        total = len(planted) + sum(len(faults) for _, faults in parts)
        for number in range(len(planted)):
            done(number + 1, total)
        for gate, faults in parts:
            for found in gate.plant(faults, folder / "copy"):
                planted += [] if found is None else [found]
                done(len(planted), total)
    return planted


def _fallen_back(graph: Path) -> PlantedFault:
    """Opens a graph on the CPU, as onnxruntime does if CUDA fails, and runs the guard for CUDA."""
    fallen = open_session(graph, SessionOptions())
    try:
        require_provider(fallen, "cuda")
        caught = ""
    except ProviderError:
        caught = "session"
    where = f"{graph.parent.name}/{graph.name} on the CPU, cuda requested"
    return PlantedFault(FELL_BACK, where, True, caught)


def _rounding_writer(engine: Engine) -> PlantedFault:
    """Writes the engine's results rounded to 6 decimals, and compares the files with them."""
    caught = WRITTEN if written(engine, (), rounded).problem else ""
    return PlantedFault(ROUNDED, "scores and vectors rounded to 6 decimals", True, caught)


def _searched_with(
    changed: Callable[[GenerationOptions], Mapping[str, Any]],
) -> Callable[[Engine, Sequence[str], GenerationOptions], Iterable[GenerationResult]]:
    return lambda engine, texts, options: engine.generate(
        texts, replace(options, **changed(options))
    )


def _uncut(
    engine: Engine, texts: Sequence[str], options: GenerationOptions
) -> Iterator[GenerationResult]:
    decode = engine.bundle.tokenizer.decode
    for result in engine.generate(texts, options):
        whole = (replace(one, text=decode(one.tokens)) for one in result.hypotheses)
        yield replace(result, hypotheses=tuple(whole))


def _answered_as_the_row_before(
    engine: Engine, texts: Sequence[str], options: GenerationOptions
) -> Iterator[GenerationResult]:
    before: Sequence[TextHypothesis] = ()
    for result in engine.generate(texts, options):
        yield replace(result, hypotheses=tuple(before)) if result.repeated else result
        before = result.hypotheses


WRONG_ENGINES: Mapping[str, Callable[..., Iterable[GenerationResult]]] = {
    "a repetition penalty inverted": _searched_with(
        lambda options: {"repetition_penalty": 1 / options.repetition_penalty}
    ),
    "a minimum length ignored": _searched_with(lambda options: {"min_length": 0}),
    "n-grams that may come again": _searched_with(lambda options: {"no_repeat_ngram": 0}),
    "suppressed tokens allowed": _searched_with(lambda options: {"suppress": ()}),
    "a suppressed sequence allowed": _searched_with(lambda options: {"suppress_sequences": ()}),
    "a stop string left in the text": _uncut,
    "a repeated text answered as another": _answered_as_the_row_before,
}


def _wrong_engines(
    subject: BundleSubject, oracle: Oracle, engine: Engine, sources: Sequence[Sequence[int]]
) -> Iterator[PlantedFault]:
    """Compares engines that break a rule of the search with the plain one."""
    tokenizer = subject.checkpoint.tokenizer
    texts = [tokenizer.decode(source) for source in sources]
    plain = PlainAnswers.of(oracle, subject.model, tokenizer, texts)
    for kind, wrong in WRONG_ENGINES.items():
        changed = False

        def generate(
            texts: Sequence[str],
            options: GenerationOptions,
            wrong: Callable[..., Iterable[GenerationResult]] = wrong,
        ) -> Iterable[GenerationResult]:
            nonlocal changed
            found = list(wrong(engine, texts, options))
            changed |= found != list(engine.generate(texts, options))
            return found

        caught = "" if plain.compare({}, generate).passed else PLAINLY
        yield PlantedFault(kind, "answers of the engine", changed, caught)


@dataclass(frozen=True)
class BundleTest:
    """The checks of `verify` for many copies of one bundle.

    Attributes:
        stored: Whether stored weights and graphs are compared; see `Effort`.
    """

    honest: BundleSubject
    oracle: Oracle
    sources: Sequence[Sequence[int]]
    fresh: Fresh
    stored: bool = True

    def gate(self, *, whole: bool = False) -> Gate[BundleSubject]:
        """Returns the gate of the step graphs, or with `whole` of the graph `generate`."""
        honest = self.honest
        if not whole:
            return Gate(honest, partial(self.checks, answers=self.step_checks), self.other_numbers)
        subject = BundleSubject.of(honest.checkpoint, honest.bundle, honest.model, whole=True)
        return Gate(subject, partial(self.checks, answers=self.whole_checks), self.other_answers)

    def checks(
        self, copy: BundleSubject, answers: Callable[[BundleSubject], Iterator[Check]]
    ) -> Iterator[Check]:
        """Yields the checks of a copy: claims, answers, and then what the files hold.

        The files come last, to show the faults that the answers alone reveal.
        """
        honest, checkpoint = self.honest, self.honest.checkpoint
        model, variant = checkpoint.model, honest.variant
        yield attempt("loading", lambda: copy.variant)
        yield attempt("tokenizer", lambda: require_exported_from(checkpoint, copy.bundle))
        yield claim("manifest", lambda: manifest_claims(checkpoint, copy.bundle))
        reference = copy.bundle.manifest.files[variant.reference]
        if reference != honest.bundle.manifest.files[variant.reference]:
            yield claim("recorded", lambda: [recorded_claim(copy.bundle, variant, self.oracle)])
        yield attempt("session", lambda: copy.model)
        yield from answers(copy)
        if not self.stored:
            return
        given = copy.bundle, copy.variant
        yield claim("weights", lambda: [weights_claim(model, *given, honest.calibration)])
        if self.fresh is not None:
            fresh = self.fresh
            yield claim("graphs", lambda: [graphs_claim(fresh, *given)])

    def step_checks(self, copy: BundleSubject) -> Iterator[Check]:
        """Yields the checks of the step graphs."""
        yield from numbers(copy, self.oracle, self.cases)
        text, batches = self.text(self.sources), copy.model.batches
        if not copy.decodes:
            yield self.tasks.check(copy.bundle, copy.model, batches)
        if not copy.decodes or not text.sources:
            return
        yield from served_searches(copy, self.oracle, text, copy.variant, batches)
        yield given_answers(copy, self.oracle, partial(feeding, text, self.oracle.special), 0)

    def whole_checks(self, copy: BundleSubject) -> Iterator[Check]:
        """Yields the checks of the graph `generate`; the step graphs, honest then, do not run."""
        rows = copy.model.batches.rows
        yield from whole_searches(copy, self.oracle, self.text(self.sources), rows)

    @cached_property
    def tasks(self) -> ServedTasks:
        """The tasks of an encoder-only model on the sources as text."""
        decode = self.honest.checkpoint.tokenizer.decode
        return ServedTasks(self.honest.checkpoint, self.oracle, list(map(decode, self.sources)))

    @cached_property
    def cases(self) -> list[Case]:
        """Cases of random tokens that show faults quickly."""
        config = self.oracle.config
        found = brief_sweep(config, self.honest.model.batches.rows)
        found += lengths(config, self.sources)
        return found + ([single_tokens(config)] if self._precision.integers else [])

    @property
    def _precision(self) -> Precision:
        return Precision.of(self.honest.variant.precision)

    def text(self, sources: Sequence[Sequence[int]]) -> Text:
        """Returns the text of brief searches."""
        config = self.oracle.config
        fed = None if config.encoder_layers else sources
        generation = default_generation(self.honest.checkpoint)
        return Text(config, sources, generation, LONGEST_ANSWER, fed, standard=BRIEF)

    def other_numbers(self, copy: BundleSubject) -> bool:
        """Whether a tensor or a token differs from the honest one by more than rounding.

        A token counts where there is no tie.
        """
        rounding = rounding_of(self._precision.name)
        if differs(copy.model, self.unseen, rounding):
            return True
        if not copy.decodes:  # it fills in the largest score, and all scores were compared
            return False
        honest, oracle, sources = self.honest.model, self.oracle, self._unseen_sources()
        for name in BRIEF:
            options = self.text(sources).options(name)
            answers = search(honest, sources, options, oracle.special)
            expected = ExpectedAnswers(range(len(sources)), sources, answers)
            given = honest, copy.model, oracle.exact, oracle.special, rounding, options
            tally = Tally(name, rounding)
            found = search(copy.model, sources, options, oracle.special)
            tally.add(expected, [[each] for each in found], Explainer(*given))
            if tally.decisions().defects:
                return True
        return False

    @cached_property
    def unseen(self) -> list[tuple[Case, Truth]]:
        """Tensors of the honest variant on cases that the checks do not use."""
        config = self.oracle.config
        most = config.max_positions
        drawn = [(5, 9, 2), (3, 16, 0), (3, 5, 7), (2, most, most)]
        cases = random_cases(config, drawn, seed=1000)
        cases += _with_rare_tokens(config, seed=1000)
        if not config.decoder_layers:  # else searches show the rows of large batches
            cases += random_cases(config, [(self.honest.model.batches.rows, 8, 0)], seed=1000)
        return honest_truths(self.oracle, self.honest.model, cases)

    def _unseen_sources(self) -> list[list[int]]:
        """Sources that the checks do not use."""
        case = random_case(self.oracle.config, 6, 8, 0, seed=2000)
        tokens = zip(case.source, case.mask, strict=True)
        return [row[mask].tolist() or [self.oracle.special.bos_id] for row, mask in tokens]

    def other_answers(self, copy: BundleSubject) -> bool:
        """Whether the graph `generate` gives other answers than the honest one."""
        special, sources = self.oracle.special, self._unseen_sources()
        both = self.honest.one_graph, copy.one_graph
        options = one_graph_options(self.text(sources), both[0].beam)
        asked = sources, options, special, self.honest.model.batches.rows
        wanted, found = (one.answers_all_ways(*asked) for one in both)
        exact = self.oracle.scores(sources, [ways[0] for ways in wanted], options)
        return any(
            [item.scored_tokens for item in left] != [item.scored_tokens for item in right]
            or any(
                not abs(one.score - other.score) <= ROUNDING * row.own
                for one, other, row in zip(left, right, scores, strict=True)
            )
            for row_left, row_right, scores in zip(wanted, found, exact, strict=True)
            for left, right in zip(row_left, row_right, strict=True)
        )


def honest_truths(
    oracle: Oracle, honest: Observable, cases: Sequence[Case]
) -> list[tuple[Case, Truth]]:
    """Returns the tensors of an honest model, with torch's own error as the measure of rounding."""
    return [(case, replace(oracle.truth(case), oracle=observe(honest, case))) for case in cases]


def differs(model: Observable, expected: Sequence[tuple[Case, Truth]], rounding: Tolerance) -> bool:
    """Whether a tensor of a model differs from the honest one by more than rounding."""
    return any(
        item.fault
        for case, truth in expected
        for item in compare(case, truth, observe(model, case), rounding)
    )


def rounding_of(precision: str) -> Tolerance:
    """Returns how far apart two models of a precision may be if both compute the same."""
    factor = ROUNDING * Precision.of(precision).epsilon / EPSILON
    # It proves nothing, so it may be as large as it gets.
    return Tolerance(factor, EPSILON, most=math.inf)


def brief_sweep(config: ModelConfig, rows: int) -> list[Case]:
    """Returns cases that fit into memory with their truths, the smallest first.

    Of several rows the short ones, of one row the long ones too, those of the vocabulary that
    contain the tokens in whose rows faults are planted, and one of as many rows as are served at
    once.
    """

    def brief(case: Case) -> bool:
        rows, length = case.source.shape
        if rows == 1:
            return bool(length >= min(LONGEST_SOURCE, config.max_positions // 2))
        return bool(length <= LONGEST_SOURCE and case.past <= 1)

    cases = [*filter(brief, sizes(config)), *_with_rare_tokens(config)]
    cases += largest_batches(config, rows)
    return sorted(cases, key=lambda case: case.source.size + case.target.size)


def _with_rare_tokens(config: ModelConfig, *, seed: int = 0) -> list[Case]:
    return [
        case
        for case in vocabulary(config, seed=seed)
        for tokens in [case.source if case.source.size else case.target]
        if any(token in tokens for token in rare_tokens(config))
    ]
