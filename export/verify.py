"""Proof that torch and a bundle answer the same inputs, up to rounding."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Self

from transferry.build_model.allocator import freed_memory_kept, rarely_collected
from transferry.build_model.checkpoint import Checkpoint
from transferry.build_model.own.model import OwnModel
from transferry.export.blame.cross_check import cross_checks
from transferry.export.blame.localise import localise
from transferry.export.checks.check import Check, Findings, claim, prove
from transferry.export.checks.claims import (
    default_generation,
    manifest_claims,
    recorded_claim,
    require_exported_from,
)
from transferry.export.checks.graphs import (
    LEFT_OUT,
    TOKENS,
    Fresh,
    fresh_graphs,
    graphs_claim,
    tokens_claim,
)
from transferry.export.checks.job_files import WRITTEN, written
from transferry.export.checks.numbers import batch_sizes, numbers, positions
from transferry.export.checks.searches import (
    Text,
    plain_searches,
    served_searches,
    whole_searches,
)
from transferry.export.checks.task_metrics import task_metrics
from transferry.export.checks.tasks import ServedTasks, encoder_tasks
from transferry.export.checks.texts import calibrated, feeding, given_answers, scores
from transferry.export.checks.weights import WEIGHTS, weights_claim
from transferry.export.faults.self_test import self_test
from transferry.export.oracle.cases import lines, many_rows, random_sources, source_of
from transferry.export.oracle.effort import ALL, Effort, parameters
from transferry.export.oracle.oracle import Oracle
from transferry.export.oracle.served import REPLICAS
from transferry.export.subject.bundle import BundleSubject
from transferry.export.trace.graph import Traces
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.specs import ONE_GRAPH, PORTABLE
from transferry.runtime.decoding.batching import BatchOptions
from transferry.runtime.decoding.generation_options import generation_options, suppressing
from transferry.runtime.decoding.search import check_tokens
from transferry.runtime.engine.engine import Engine
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.ort.open_model import ServedModel
from transferry.runtime.proof.certificates.stored import distinct_rows
from transferry.runtime.proof.certificates.strength import GRAPHS
from transferry.runtime.proof.compare import Case, Tolerance
from transferry.runtime.proof.recorded import RECORDED
from transferry.runtime.proof.report import Claim, Origin, ParityReport

SAMPLED = 4  # one row in so many is sampled and scored too: little differs from greedy search
PLANTED_ROWS = 4  # of the searches of the self-test
SMALL = 1 << 24  # parameters up to which freed memory is kept: 64 MiB in float32
# Told the phase, the steps finished and their total.
Done = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Request:
    """Settings of a verification.

    Attributes:
        texts: Sentences to run every search on.
        targets: Reference answers to the texts, for BLEU and perplexity.
        batches: Limits on the rows computed at once when the texts are answered. Default: those
            that the variant is served with.
        search: Fields of GenerationOptions of a search to run besides the standard ones;
            `suppress` may hold text.
    """

    texts: Sequence[str] = ()
    targets: Sequence[str] | None = None
    cross_check: bool = False
    plant_faults: bool = False
    batches: BatchOptions | None = None
    search: Mapping[str, Any] | None = None
    effort: Effort = ALL


def verify_against(
    checkpoint: Checkpoint,
    bundle: Bundle,
    model: ServedModel,
    request: Request,
    *,
    traces: Traces | None = None,
    done: Done = lambda phase, done, total: None,
) -> ParityReport:
    """Compares a bundle with the checkpoint that it was exported from.

    `traces` are graphs traced before, for the comparison with graphs exported anew.

    In the portable variant, whose nodes are those that torch traced, a wrong tensor is traced back
    to the module in which the fault begins.

    Raises:
        UsageError: The cross-check of another variant than the portable one.
        InputError: A text is empty or longer than the model's positions, checkpoint and bundle
            differ in tokenizer or shape, or the targets do not fit the texts.
    """
    require_exported_from(checkpoint, bundle)
    if model.variant.name != PORTABLE and request.cross_check:
        raise UsageError(
            f"the cross-check needs variant {PORTABLE}, whose graphs any runtime can run, not "
            f"{model.variant.name}: add --variant {PORTABLE}"
        )
    # The oracles' float64 is mapped and zeroed page by page, a third of the time of long cases.
    small = parameters(checkpoint.model) < SMALL
    with rarely_collected(), freed_memory_kept() if small else nullcontext():
        work = Verification.of(checkpoint, bundle, model, request, traces or Traces())
        found = work.stored
        found.add(prove(work.checks(), done=partial(done, "verifying")))
        report = work.report(found)
        if not (request.plant_faults and report.passed):
            return replace(report, origin=work.origin(found))
        few = work.text.sources[:PLANTED_ROWS]
        few = few or random_sources(checkpoint.model.config, PLANTED_ROWS)
        with found.timed("self-test"):
            planted = self_test(
                work.subject, work.oracle, few, work.fresh, partial(done, "self-test")
            )
        return replace(report, self_test=planted, times=[*found.times.values()])


@dataclass(frozen=True)
class Verification:
    """The checks of a variant beside its checkpoint.

    Attributes:
        text: The texts as token ids, and their searches.
        fresh: The graphs that export makes now; None if they are not compared.
        stored: Findings on the manifest and the stored weights.
    """

    subject: BundleSubject
    oracle: Oracle
    request: Request
    text: Text
    batches: BatchOptions
    cases: Sequence[Case]
    fresh: Fresh
    stored: Findings

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        bundle: Bundle,
        model: ServedModel,
        request: Request,
        traces: Traces,
    ) -> Self:
        """Checks the stored weights, and prepares the other checks."""
        subject, effort = BundleSubject.of(checkpoint, bundle, model), request.effort
        # Before the oracle, which takes memory too.
        given = bundle, subject.variant, subject.calibration
        claims = [claim("manifest", lambda: manifest_claims(checkpoint, bundle))]
        if effort.stored:
            claims.append(claim("weights", lambda: [weights_claim(checkpoint.model, *given)]))
        stored = prove(claims)
        special, precision = checkpoint.tokenizer.special, subject.precision
        with stored.timed("torch's sides"):
            oracle = Oracle.of(
                checkpoint.model,
                special,
                Tolerance.of(precision.name),
                precision=precision,
                calibration=subject.calibration,
            )
        batches = request.batches or model.batches
        batches = replace(batches, rows=min(batches.rows, effort.batch_rows or batches.rows))
        text = text_of(checkpoint, request)
        cases = effort.cases(oracle.config, text.sources, batches.rows, precision.integers)
        if subject.shown is not None:
            cases += lines(oracle.config, text.sources, special.pad_id)
        compared = effort.anew and effort.stored
        with stored.timed(GRAPHS):
            fresh = fresh_graphs(checkpoint.model, *given, traces) if compared else None
        return cls(subject, oracle, request, text, batches, cases, fresh, stored)

    def checks(self) -> list[Check]:
        """Returns the checks, in order."""
        subject, oracle = self.subject, self.oracle
        bundle, variant, fresh = subject.bundle, subject.variant, self.fresh
        found: list[Check] = []
        if self.request.effort.anew:
            found.append(claim(RECORDED, lambda: [recorded_claim(bundle, variant, oracle)]))
        found.append(claim(GRAPHS, lambda: [graphs_claim(fresh, bundle, variant)]))
        if not isinstance(subject.checkpoint.model, OwnModel):
            found.append(claim(TOKENS, lambda: [tokens_claim(oracle.config, bundle, variant)]))
        found.append(claim("left out", self._left_out))
        found += numbers(subject, oracle, self.cases)
        if self.request.effort.anew:
            found.append(batch_sizes(subject, oracle, many_rows(oracle.config, self.batches.rows)))
        if subject.decodes:
            found += self._searches()
        else:
            texts = [*self.request.texts, *(self.request.targets or ())]
            tasks = ServedTasks(subject.checkpoint, oracle, texts)
            found.append(tasks.check(bundle, subject.model, self.batches))
        if subject.calibration is not None:
            fed = partial(feeding, self.text, oracle.special)
            found.append(calibrated(subject, oracle, fed, self.text.sources))
        engine = Engine.of(bundle, subject.model)
        found.append(claim(WRITTEN, lambda: [written(engine, self.request.texts)]))
        if self.request.cross_check:
            found += cross_checks(oracle, subject.model, bundle)
        return found

    def _left_out(self) -> list[Claim]:
        effort, none = self.request.effort, "no text was given, and the checkpoint kept no samples"
        made = {WEIGHTS: effort.stored, RECORDED: effort.anew}
        found = [Claim(name, skipped=LEFT_OUT) for name, compared in made.items() if not compared]
        return [*found, *([] if self.text.sources else [Claim("answers to text", skipped=none)])]

    @property
    def tasks(self) -> Sequence[str]:
        """Names of the tasks whose results are compared; of a decoder none without text."""
        compared = self.text.sources or not self.subject.decodes
        return Engine.of(self.subject.bundle, self.subject.model).tasks if compared else ()

    def _searches(self) -> list[Check]:
        """Returns the checks of a decoder: its positions, and its answers to text."""
        subject, oracle, text = self.subject, self.oracle, self.text
        rows, batches, texts = len(text.sources), self.batches, self.request.texts
        served = Engine.of(subject.bundle, subject.model, replicas=REPLICAS, batches=batches)
        found = [positions(subject, oracle, self.request.effort.positions)]
        found += served_searches(subject, oracle, text, subject.variant, batches)
        if rows:
            fed = partial(feeding, text, oracle.special)
            found.append(given_answers(subject, oracle, fed, rows))
            # Without targets a source is scored as its own: any text will do.
            given: Sequence[str | None] = [None] * len(texts)
            if oracle.config.encoder_layers:
                given = self.request.targets or texts
            pairs = list(zip(texts, given, strict=True))[::SAMPLED]
            found.append(scores(oracle, served, pairs))
            answers = oracle, subject.model, subject.checkpoint.tokenizer, texts, text
            found.append(plain_searches(*answers, served.generate))
        if ONE_GRAPH in subject.variant.graphs:
            found += whole_searches(subject, oracle, text, batches.rows)
        return found

    def report(self, found: Findings) -> ParityReport:
        """Returns the report of the findings, without origin and self-test."""
        subject, text, request = self.subject, self.text, self.request
        budget = subject.precision.task
        settings = {
            **subject.describe(),
            **subject.bundle.manifest.card.cited(),
            "rows": len(request.texts),
            "distinct_rows": distinct_rows(request.texts),
            "batch_rows": self.batches.rows,
            "text_sha256": hashlib.sha256("\n".join(request.texts).encode()).hexdigest(),
            "tasks": list(self.tasks),
        }
        with found.timed("task metrics"):
            tokenizer = subject.checkpoint.tokenizer
            metrics = task_metrics(found, budget, tokenizer, text.fed, request.targets)
        return ParityReport(
            str(subject.folder),
            settings,
            self.oracle.tolerance,
            found.comparisons,
            found.decisions,
            metrics,
            found.forcing.growth(),
            found.forcing.margins(),
            found.runtimes,
            claims=found.claims,
            searches=[asdict(text.options(each)) for each in text.searches]
            if text.sources and subject.decodes
            else [],
            times=[*found.times.values()],
        )

    def origin(self, found: Findings) -> Origin | None:
        """Traces a wrong tensor of the portable variant back; None if no answer is wrong."""
        subject = self.subject
        wrong = any(item.fault for item in found.comparisons)
        wrong = wrong or not all(item.passed for item in found.decisions)
        # Wrong weights explain every wrong number: neither a module nor an operator is at fault.
        explained = any(claim.name == WEIGHTS and claim.verdict for claim in found.claims)
        if not wrong or explained or subject.variant.name != PORTABLE:
            return None
        # Where only a search shows the fault, one of the cases may still do.
        shown = found.failing or self.cases
        served = subject.variant, subject.options
        model, tolerance = subject.checkpoint.model, self.oracle.tolerance
        origin = localise(model, subject.bundle, *served, tolerance, shown)
        return origin or Origin.none_found(len(shown))


def text_of(checkpoint: Checkpoint, request: Request) -> Text:
    """Turns texts into sources, and targets or prompts into tokens to feed whole.

    Raises:
        InputError: A text is empty or too long, or the targets do not fit the texts.
        UsageError: A search names a token that the vocabulary lacks.
    """
    tokenizer, config, texts = checkpoint.tokenizer, checkpoint.model.config, request.texts
    special, targets = tokenizer.special, request.targets
    embeds = not config.decoder_layers and encoder_tasks(checkpoint)[0] == "embed"
    lines = [*texts, *(targets or () if embeds else ())]
    if targets is not None and (
        len(targets) != len(texts) or not (embeds or config.architecture == "encoder-decoder")
    ):
        raise InputError(
            f"expected a target for each of {len(texts)} texts of an encoder-decoder or of a model "
            f"that embeds, found {len(targets)} for a model that is {config.architecture}"
        )
    sources = [
        source_of(text, tokenizer, config, number) for number, text in enumerate(lines, start=1)
    ]
    if checkpoint.head is not None and checkpoint.head.task == "classify" and special.joins_pairs:
        # Pairs too: each text with the next.
        pairs = (
            special.wrap([*tokenizer.encode(one), *special.between, *tokenizer.encode(other)])
            for one, other in pairwise(texts)
        )
        sources += [pair for pair in pairs if len(pair) <= config.max_positions]
    fed = None
    if not config.encoder_layers:
        fed = [special.wrap(tokenizer.encode(text)) for text in texts]
    elif targets is not None and not embeds:
        encoded = [tokenizer.encode_target(target) for target in targets]
        fed = [[special.bos_id, *tokens, special.eos_id] for tokens in encoded]
    generation, search = default_generation(checkpoint), request.search
    if search is not None:
        search = suppressing(search, generation_options(generation), tokenizer.encode_target)
    elif generation.keys() & {"beam", "n_best", "sample"}:
        search = {}  # the bundle's default search is not among the standard ones
    given = config, sources, generation, request.effort.longest, fed, SAMPLED, search
    text = Text(*given, tokenizer.decode)
    for each in text.searches:  # before minutes of other checks
        check_tokens(text.options(each), config.vocabulary_size)
    return text
