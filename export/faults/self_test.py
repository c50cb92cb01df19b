"""The proof of the proof: faults are planted in copies of a bundle, and verification must fail.

Each copy goes through what `verify` does, in its order, up to the first check that fails. What no
check objects to is held against the honest bundle on inputs that the checks have not seen, so that
a fault that was missed is told from one that changes no answer.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from transferry.build_model.checkpoint import Checkpoint
from transferry.build_model.config import ModelConfig
from transferry.export.bundle import require_exported_from
from transferry.export.faults.bundle_copy import BundleCopy
from transferry.export.faults.fault import rare_tokens
from transferry.export.faults.faults import faults_of
from transferry.export.parity.cases import random_case, sweep
from transferry.export.parity.oracle import SEARCHES, Oracle, search_settings
from transferry.export.parity.teacher_forcing import TeacherForcing
from transferry.runtime.bundle import Bundle, Variant
from transferry.runtime.decoding.hypothesis import Hypothesis
from transferry.runtime.decoding.options import GenerationOptions
from transferry.runtime.decoding.search import search
from transferry.runtime.errors import InputError, ParityError, ProviderError, TransferryError
from transferry.runtime.ort.encoder import EncoderModel
from transferry.runtime.ort.open_model import Model, open_model
from transferry.runtime.ort.session import SessionOptions, open_session, require_provider
from transferry.runtime.parity.compare import (
    EPSILONS,
    STAGES,
    Case,
    Comparison,
    Tolerance,
    Truth,
    compare,
    observe,
)
from transferry.runtime.parity.divergence import explain, scored_tokens
from transferry.runtime.parity.report import PlantedFault

LONGEST_ANSWER = 32
LONGEST_SOURCE = 13  # of the cases of several rows
# What rounding can move, in units of torch's float32 error (docs/parity.md). Not `Tolerance`'s
# default: were that made dull, no fault would seem to change an answer any more.
ROUNDING = 8.0
FELL_BACK = "a provider that fell back"


def self_test(
    checkpoint: Checkpoint,
    bundle: Bundle,
    variant: Variant,
    session: SessionOptions,
    sources: Sequence[Sequence[int]],
    tolerance: Tolerance,
    done: Callable[[int, int], None] = lambda done, total: None,
) -> list[PlantedFault]:
    """Plants every kind of fault that applies, and tells what verification says of each.

    Args:
        checkpoint: The run that the bundle was exported from.
        bundle: An honest bundle; it is copied, never changed.
        variant: Which variant.
        session: How to open it.
        sources: Token ids to run the searches on, or to fill in; none leaves that out.
        tolerance: What passes.
        done: Called with how many of how many faults are done.

    Raises:
        ParityError: The bundle does not pass as it is, so that its copies would prove nothing.
        InputError: A fault cannot be planted, since the graphs are not what this version exports.
    """
    gate = Gate(checkpoint, bundle, variant, session, sources, tolerance)
    faults = faults_of(checkpoint.model.config)
    planted = [_fallen_back(bundle, variant)]
    done(1, len(faults) + 1)
    with tempfile.TemporaryDirectory(prefix="transferry-") as name:
        # Written anew like the others, so that it is not the writing that is caught.
        honest = BundleCopy(bundle, variant, Path(name, "honest"))
        honest.rewrite()
        honest.seal()
        if caught := gate.check(honest.folder):
            raise ParityError(
                f"{bundle.folder} does not pass as it is: {caught} fails. Verify it without the "
                "self-test, and mend what that tells: until then its copies prove nothing"
            )
        for number, fault in enumerate(faults, start=2):
            copy = BundleCopy(bundle, variant, Path(name, "planted"))
            where = fault.plant(copy)
            copy.seal()
            caught = gate.check(copy.folder)
            changes = bool(caught) or gate.changes(copy.folder)
            planted.append(PlantedFault(fault.kind, where, changes, caught))
            shutil.rmtree(copy.folder)
            done(number, len(faults) + 1)
    return planted


def _fallen_back(bundle: Bundle, variant: Variant) -> PlantedFault:
    """Opens a graph on the CPU and asks the guard whether that is CUDA, as onnxruntime would."""
    graph = next(iter(variant.graphs.values()))
    fallen = open_session(bundle.graph(graph), SessionOptions())
    try:
        require_provider(fallen, "cuda")
        caught = ""
    except ProviderError:
        caught = "session"
    return PlantedFault(FELL_BACK, f"{graph.file} on the CPU, cuda asked for", True, caught)


class Gate:
    """What `verify` checks, with torch's side computed once."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        bundle: Bundle,
        variant: Variant,
        session: SessionOptions,
        sources: Sequence[Sequence[int]],
        tolerance: Tolerance,
    ) -> None:
        self._checkpoint = checkpoint
        self._bundle, self._variant, self._session = bundle, variant, session
        self._sources = sources
        self._oracle = Oracle(checkpoint.model, checkpoint.tokenizer.special, tolerance)
        self._config = checkpoint.model.config
        self._truths = self._true(brief_sweep(self._config))

    def _true(self, cases: Iterable[Case]) -> list[tuple[Case, Truth]]:
        return [(case, self._oracle.truth(case)) for case in cases]

    def check(self, folder: Path) -> str:
        """Verifies a bundle and returns the first check that fails; empty where none does."""
        try:
            bundle = Bundle.load(folder)
        except TransferryError:
            return "loading"
        try:
            require_exported_from(self._checkpoint, bundle)
        except InputError:
            return "tokenizer"
        try:
            model = open_model(bundle, self._variant, self._session)
        except TransferryError:
            return "session"
        try:
            return self._compare(model)
        except InputError:
            return "running"

    def _compare(self, model: Model) -> str:
        for case, truth in self._truths:
            found = compare(case, truth, observe(model, case), self._oracle.tolerance)
            if failed := _failed(found):
                return failed
        return self._compare_text(model) if self._sources else ""

    def _compare_text(self, model: Model) -> str:
        forcing = TeacherForcing()
        if isinstance(model, EncoderModel):
            compared, filled = self._oracle.fillings(model, self._sources, forcing)
            return _failed(compared) or ("" if filled.passed else filled.search)
        answers: dict[int, Hypothesis] = {}
        for name, options in self._searches(self._sources).items():

            def keep(row: int, wanted: list[Hypothesis], found: list[Hypothesis]) -> None:
                answers.setdefault(row, wanted[0])  # the first search is the greedy one

            decided = self._oracle.decisions(model, name, self._sources, options, keep=keep)
            if not decided.passed:
                return name
        special = self._oracle.special
        pairs = [
            (source, [special.bos_id, *scored_tokens(answers[row], special.eos_id)])
            if self._config.encoder_layers
            else ([], source)
            for row, source in enumerate(self._sources)
        ]
        pairs = [pair for pair in pairs if len(pair[1]) > 1]
        return _failed(self._oracle.text(model, pairs, forcing)) if pairs else ""

    def _searches(self, sources: Sequence[Sequence[int]]) -> Mapping[str, GenerationOptions]:
        generation = self._bundle.manifest.generation
        return {
            name: GenerationOptions(
                **search_settings(name, generation, self._config, sources, LONGEST_ANSWER)
            )
            for name in SEARCHES
        }

    def changes(self, folder: Path) -> bool:
        """Whether a bundle gives anything else than the honest one, whatever the gate says of it.

        Both are run by onnxruntime on inputs that `check` does not use. A difference counts if it
        is larger than what the variant's precision allows for rounding, or chooses another token
        where there is no tie.
        """
        model = open_model(Bundle.load(folder), self._variant, self._session)
        precision = EPSILONS[self._variant.precision] / EPSILONS["float32"]
        usual = Tolerance(ROUNDING * precision, EPSILONS["float32"])
        try:
            for case, truth in self._honest_answers:
                if _failed(compare(case, truth, observe(model, case), usual)):
                    return True
            return self._chooses_otherwise(model, usual)
        except InputError:
            return True

    @cached_property
    def _honest(self) -> Model:
        return open_model(self._bundle, self._variant, self._session)

    @cached_property
    def _honest_answers(self) -> list[tuple[Case, Truth]]:
        """What the honest bundle gives, with torch's own error as the measure of rounding."""
        most = self._config.max_positions
        sizes = [(5, 9, 2), (3, 16, 0), (3, 5, 7), (2, most, most)]
        cases = [
            random_case(self._config, batch, source, past, seed=1000 + number)
            for number, (batch, source, past) in enumerate(sizes)
        ]
        cases += [
            case for case in sweep(self._config, seed=1000) if _holds_rare(case, self._config)
        ]
        return [
            (case, Truth(observe(self._honest, case), self._oracle.truth(case).errors))
            for case in cases
        ]

    def _chooses_otherwise(self, model: Model, usual: Tolerance) -> bool:
        honest = self._honest
        if isinstance(model, EncoderModel) or isinstance(honest, EncoderModel):
            # What fills a mask in is the largest score, and all scores were compared.
            return False
        oracle = self._oracle
        case = random_case(self._config, 6, 8, 0, seed=2000)
        rows = zip(case.source, case.mask, strict=True)
        sources = [row[mask].tolist() or [oracle.special.bos_id] for row, mask in rows]
        for options in self._searches(sources).values():
            wanted, found = (
                search(either, sources, options, oracle.special) for either in (honest, model)
            )
            for row, (left, right) in enumerate(zip(wanted, found, strict=True)):
                if [item.tokens for item in left] == [item.tokens for item in right]:
                    continue
                source = sources[row]
                parting = explain(
                    source,
                    options,
                    left,
                    right,
                    honest,
                    model,
                    oracle.exact,
                    oracle.special,
                    usual,
                    row,
                )
                if not parting.tie:
                    return True
        return False


def brief_sweep(config: ModelConfig) -> list[Case]:
    """Returns the cases of `sweep` that fit into memory with their truths, the smallest first.

    Of several rows the short ones, of one row the long ones too, and of those that run through the
    vocabulary the ones with the tokens in whose rows faults are planted.
    """

    def chosen(case: Case) -> bool:
        if case.name.startswith("vocabulary"):
            return _holds_rare(case, config)
        rows, length = case.source.shape
        if rows == 1:
            return bool(length >= min(LONGEST_SOURCE, config.max_positions // 2))
        return bool(length <= LONGEST_SOURCE and case.past <= 1)

    cases = [case for case in sweep(config) if chosen(case)]
    return sorted(cases, key=lambda case: case.source.size + case.target.size)


def _holds_rare(case: Case, config: ModelConfig) -> bool:
    tokens = case.source if case.source.size else case.target
    return case.name.startswith("vocabulary") and any(
        token in tokens for token in rare_tokens(config)
    )


def _failed(comparisons: Sequence[Comparison]) -> str:
    """The first stage, in the order in which a model runs, that has a fault."""
    return min((item.stage for item in comparisons if item.fault), key=STAGES.index, default="")
