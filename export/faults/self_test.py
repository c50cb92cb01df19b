"""Self-test: faults are planted in copies of a bundle, and verification must catch them.

Each copy goes through the checks of `verify`, in order, up to the first that fails. A copy that
passes all of them is compared with the honest bundle on inputs that the checks have not seen, to
tell a fault that was missed from one that changes no answer.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from transferry.build_model.checkpoint import Checkpoint
from transferry.build_model.model.config import ModelConfig
from transferry.export.checks.claims import (
    default_generation,
    manifest_claims,
    recorded_claim,
    require_exported_from,
)
from transferry.export.checks.graphs import GRAPHS, fresh_graphs, graphs_claim
from transferry.export.checks.weights import WEIGHTS, weights_claim
from transferry.export.checks.whole_search import check_one_graph
from transferry.export.faults import graph_faults, weight_faults
from transferry.export.faults.bundle_copy import BundleCopy
from transferry.export.faults.fault import Fault, rare_tokens
from transferry.export.faults.one_graph_faults import one_graph_faults
from transferry.export.faults.variant_faults import variant_faults
from transferry.export.oracle.cases import (
    largest_batches,
    lengths,
    random_case,
    random_cases,
    single_tokens,
    sizes,
    vocabulary,
)
from transferry.export.oracle.oracle import Oracle, TextParity
from transferry.export.oracle.searches import BRIEF
from transferry.export.rewrite.calibration import Calibration
from transferry.export.trace.graph import Traces
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.specs import ONE_GRAPH, PORTABLE
from transferry.runtime.decoding.search import search
from transferry.runtime.errors import InputError, ParityError, ProviderError, TransferryError
from transferry.runtime.io.folders import temporary_folder
from transferry.runtime.ort.encoder import EncoderModel
from transferry.runtime.ort.open_model import ServedModel, open_model
from transferry.runtime.ort.session import SessionOptions, open_session, require_provider
from transferry.runtime.precision import EPSILON, Precision
from transferry.runtime.proof.compare import (
    STAGES,
    Case,
    Comparison,
    Tolerance,
    Truth,
    compare,
    observe,
)
from transferry.runtime.proof.divergence import ExpectedAnswers, Explainer, Tally
from transferry.runtime.proof.one_graph import OneGraph
from transferry.runtime.proof.report import Decisions, PlantedFault
from transferry.runtime.proof.self_consistency import self_consistency

FAULTS: tuple[Fault, ...] = (*weight_faults.FAULTS, *graph_faults.FAULTS)
LONGEST_ANSWER = 32
LONGEST_SOURCE = 13  # of the cases of several rows
# Largest rounding error, in units of torch's float32 error (docs/parity.md). Not the default of
# `Tolerance`: if that became too wide, no fault would seem to change an answer any more.
ROUNDING = 8.0
FELL_BACK = "a provider that fell back"


def faults_of(copy: BundleCopy) -> list[Fault]:
    """Returns the kinds of fault that a variant can have."""
    portable = copy.variant.name == PORTABLE
    found = [
        fault for fault in FAULTS if fault.applies(copy.config) and (portable or fault.everywhere)
    ]
    return [*found, *variant_faults(copy)]


def self_test(
    checkpoint: Checkpoint,
    bundle: Bundle,
    model: ServedModel,
    sources: Sequence[Sequence[int]],
    tolerance: Tolerance,
    done: Callable[[int, int], None] = lambda done, total: None,
    traces: Traces | None = None,
) -> list[PlantedFault]:
    """Plants every kind of fault that applies, and verifies each faulty copy.

    Args:
        checkpoint: The run that the bundle was exported from.
        bundle: An honest bundle; it is copied, never changed.
        model: A variant of it, opened as it will be served.
        sources: Token ids of the sources of the searches; may be empty.
        tolerance: What passes.
        done: Called with the number of faults finished and of all faults.
        traces: Graphs traced before.

    Raises:
        ParityError: The bundle itself does not pass, so that its copies would prove nothing.
        InputError: A fault cannot be planted: the graphs are not those that this version exports.
    """
    gate = Gate(checkpoint, bundle, model, sources, tolerance, traces)
    planted = [_fallen_back(bundle.graph(next(iter(model.variant.graphs.values()))))]
    with temporary_folder() as folder:
        # Rewritten like the others, so that the rewriting itself is not what is caught.
        honest = BundleCopy(bundle, model.variant, folder / "honest")
        faults = faults_of(honest)
        copies = [(honest, False)]
        if ONE_GRAPH in model.variant.graphs:
            one = BundleCopy(bundle, model.variant, folder / "one", whole=True)
            faults = [*faults, *one_graph_faults(one)]
            copies.append((one, True))
        done(1, len(faults) + 1)
        for copy, whole in copies:
            copy.rewrite()
            copy.seal()
            if caught := gate.check(copy.folder, whole=whole):
                raise ParityError(
                    f"{bundle.folder} does not pass as it is: {caught} fails. Verify it without "
                    "the self-test, and fix what that reports: until then its copies prove nothing"
                )
        for number, fault in enumerate(faults, start=2):
            copy = BundleCopy(bundle, model.variant, folder / "planted", whole=fault.whole)
            where = fault.plant(copy)
            copy.seal()
            caught = gate.check(copy.folder, whole=fault.whole)
            # A stored weight or an attribute may differ by less than any answer shows.
            changes = caught not in ("", WEIGHTS, GRAPHS)
            changes = changes or gate.changes(copy.folder, whole=fault.whole)
            planted.append(PlantedFault(fault.kind, where, changes, caught))
            shutil.rmtree(copy.folder)
            done(number, len(faults) + 1)
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


class Gate:
    """The checks of `verify`, with torch's side of the cases computed once."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        bundle: Bundle,
        model: ServedModel,
        sources: Sequence[Sequence[int]],
        tolerance: Tolerance,
        traces: Traces | None = None,
    ) -> None:
        self._checkpoint, self._bundle = checkpoint, bundle
        self._honest = model
        precision = Precision.of(model.variant.precision)
        self._calibration = Calibration.of(bundle, model.variant) if precision.calibrated else None
        self._oracle = Oracle(
            checkpoint.model,
            checkpoint.tokenizer.special,
            tolerance,
            precision=precision,
            calibration=self._calibration,
        )
        self._config = checkpoint.model.config
        self._generation = default_generation(checkpoint)
        self._recorded = bundle.manifest.files[model.variant.reference]
        self._sources = sources
        self._fresh = fresh_graphs(
            checkpoint.model, bundle, model.variant, self._calibration, traces
        )
        cases = brief_sweep(self._config, model.batches.rows)
        cases += lengths(self._config, sources)
        if precision.integers:
            cases += single_tokens(self._config)
        self._truths = [(case, self._oracle.truth(case)) for case in cases]

    def check(self, folder: Path, *, whole: bool = False) -> str:
        """Verifies a bundle and returns the first check that fails; empty if all pass.

        With `whole` the answers of the graph `generate` are compared, and the step graphs, which
        are honest then, are not run again.
        """
        try:
            bundle = Bundle.load(folder)
        except TransferryError:
            return "loading"
        try:
            require_exported_from(self._checkpoint, bundle)
        except InputError:
            return "tokenizer"
        claims = manifest_claims(self._checkpoint, bundle)
        if bundle.manifest.files[self._honest.variant.reference] != self._recorded:
            claims.append(recorded_claim(bundle, self._honest.variant, self._oracle))
        for claim in claims:
            if claim.problem:
                return claim.name
        try:
            model = self._open(bundle)
        except TransferryError:
            return "session"
        try:
            checks = self._one_graph(bundle, model) if whole else self._checks(model)
            failed = next(filter(None, map(_failed, checks)), "")
        except InputError:
            return "running"
        # Last, to show what the answers alone tell.
        variant = bundle.variant(self._honest.variant.name)
        claims = [weights_claim(self._checkpoint.model, bundle, variant, self._calibration)]
        if self._fresh is not None:
            claims.append(graphs_claim(self._fresh, bundle, variant))
        return failed or next((claim.name for claim in claims if claim.problem), "")

    def _open(self, bundle: Bundle) -> ServedModel:
        return open_model(bundle, self._honest.variant, self._honest.options)

    def _checks(self, model: ServedModel) -> Iterator[Decisions | list[Comparison]]:
        for case, truth in self._truths:
            yield compare(case, truth, observe(model, case), self._oracle.tolerance)
            yield self_consistency(model, case)
        yield from self._text(self._sources).check(model)

    def _one_graph(self, bundle: Bundle, model: ServedModel) -> Iterator[Decisions]:
        assert not isinstance(model, EncoderModel)
        one = OneGraph(bundle, model.variant, model.options)
        yield from check_one_graph(self._oracle, one, model, self._text(self._sources))

    def _text(self, sources: Sequence[Sequence[int]]) -> TextParity:
        fed = None if self._config.encoder_layers else sources
        given = self._oracle, self._generation, sources, LONGEST_ANSWER, fed
        return TextParity(*given, standard=BRIEF)

    def changes(self, folder: Path, *, whole: bool = False) -> bool:
        """Whether a bundle gives other answers than the honest one, whatever `check` returns.

        Both run in onnxruntime on inputs that `check` does not use. A difference counts if it is
        larger than rounding in the variant's precision, or if it chooses another token where there
        is no tie.
        """
        rounding = rounding_of(self._honest.variant.precision)
        try:
            bundle = Bundle.load(folder)
            if whole:
                return self._other_answers(bundle)
            model = self._open(bundle)
            for case, truth in self._honest_answers:
                if _failed(compare(case, truth, observe(model, case), rounding)):
                    return True
            return self._other_tokens(model, rounding)
        except InputError:
            return True

    @cached_property
    def _honest_answers(self) -> list[tuple[Case, Truth]]:
        """Tensors of the honest bundle, with torch's own error as the measure of rounding."""
        most = self._config.max_positions
        cases = [
            *random_cases(
                self._config, [(5, 9, 2), (3, 16, 0), (3, 5, 7), (2, most, most)], seed=1000
            ),
            *_with_rare_tokens(self._config, seed=1000),
        ]
        return [
            (case, replace(self._oracle.truth(case), oracle=observe(self._honest, case)))
            for case in cases
        ]

    def _other_tokens(self, model: ServedModel, rounding: Tolerance) -> bool:
        honest, oracle = self._honest, self._oracle
        if isinstance(model, EncoderModel) or isinstance(honest, EncoderModel):
            # It fills in the largest score, and all scores were compared.
            return False
        sources = self._unseen()
        for name in BRIEF:
            options = self._text(sources).options(name)
            answers = search(honest, sources, options, oracle.special)
            expected = ExpectedAnswers(range(len(sources)), sources, answers)
            explain = Explainer(honest, model, oracle.exact, oracle.special, rounding, options)
            tally = Tally(name, rounding)
            tally.compare(model, [expected], options, oracle.special, explain)
            if tally.decisions().defects:
                return True
        return False

    def _unseen(self) -> list[list[int]]:
        """Sources that `check` does not use."""
        case = random_case(self._config, 6, 8, 0, seed=2000)
        tokens = zip(case.source, case.mask, strict=True)
        return [row[mask].tolist() or [self._oracle.special.bos_id] for row, mask in tokens]

    def _other_answers(self, bundle: Bundle) -> bool:
        """Whether the graph `generate` gives other answers than the honest one."""
        honest, special, sources = self._honest, self._oracle.special, self._unseen()
        both = [OneGraph(each, honest.variant, honest.options) for each in (self._bundle, bundle)]
        options = replace(self._text(sources).options("greedy"), scores=True)
        options = replace(options, beam=both[0].beam, n_best=both[0].beam)
        asked = sources, options, special, honest.batches.rows
        wanted, found = (one.answers_all_ways(*asked) for one in both)
        _, own = self._oracle.scores(sources, [ways[0] for ways in wanted], options)
        pairs = [
            pair
            for row, other in zip(wanted, found, strict=True)
            for pair in zip(row, other, strict=True)
        ]
        return any(
            [item.scored_tokens for item in left] != [item.scored_tokens for item in right]
            or any(
                not abs(one.score - other.score) <= ROUNDING * own
                for one, other in zip(left, right, strict=True)
            )
            for left, right in pairs
        )


def rounding_of(precision: str) -> Tolerance:
    """Returns what two models of a precision may be apart if both compute the same."""
    factor = ROUNDING * Precision.of(precision).epsilon / EPSILON
    # It proves nothing, so it may be as large as it gets.
    return Tolerance(factor, EPSILON, most=math.inf)


def brief_sweep(config: ModelConfig, rows: int) -> list[Case]:
    """Returns cases of `sweep` that fit into memory with their truths, the smallest first.

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


def _failed(found: Decisions | Sequence[Comparison]) -> str:
    """Returns the search, or the first stage of the model, that failed; empty if none did."""
    if isinstance(found, Decisions):
        return "" if found.passed else found.search
    return min((item.stage for item in found if item.fault), key=STAGES.index, default="")
