"""Result of a verification: a verdict, and JSON. docs/report.md describes every field."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import numpy as np

from transferry.runtime.errors import ParityError
from transferry.runtime.io.documents import json_values
from transferry.runtime.proof.certificates.strength import Strength, strength_of
from transferry.runtime.proof.compare import STAGES, Comparison, Tolerance

SCHEMA = 5
AGREEMENT, BLEU, PERPLEXITY = "token agreement", "sacreBLEU", "perplexity"
CHOICES, WORST_CHOICE = "equivalent choices", "worst choice"
COSINE, LEAST_COSINE, NEIGHBOURS = "mean cosine", "least cosine", "nearest neighbours"
RANKS, LABELS, NDCG = "rank correlation", "label agreement", "nDCG@10"
# Two tokens so close, in nats, are equally good to the trained model.
EQUIVALENT = 0.1
CHANCE = 0.05  # p-value from which a loss may be chance
FIRST_FAULTS = 5  # of an error message
FIRST_DIFFERENCES = 5  # of a report for people


@dataclass(frozen=True)
class Stage:
    """Summary of the comparisons of one of `compare.STAGES`."""

    name: str
    tensors: int
    error: float
    reference_error: float
    ratio: float
    faults: int


@dataclass(frozen=True)
class Difference:
    """A row on which two searches differ.

    Attributes:
        row: Number of the row, from 0.
        margin: Distance of the two candidates in the oracle; None where no choice was compared.
        allowed: Largest change of the margin by errors within the tolerance.
        rounding: Largest change of the margin by rounding in float32; at most `allowed`.
    """

    row: int
    message: str
    margin: float | None = None
    allowed: float | None = None
    rounding: float | None = None
    source: str = ""
    expected: str = ""
    found: str = ""
    wrong_score: bool = False

    @property
    def tie(self) -> bool:
        """Whether rounding in float32 explains the difference: either choice is right."""
        return (
            self.margin is not None and self.rounding is not None and self.margin <= self.rounding
        )

    def __str__(self) -> str:
        return f"row {self.row}: {self.message}"


@dataclass(frozen=True)
class Decisions:
    """Comparison of the tokens that two decoders choose.

    Attributes:
        identical: Number of rows that agree in every token of every hypothesis.
        score_error: Largest distance of a score of identical hypotheses from the oracle's, in nats.
        score_ratio: The same over torch's own error.
        ties: Rows whose difference is proven to be a tie.
        defects: Rows that differ beyond the tolerance, or whose scores exceed their budget.
        tolerated: Rows that differ by more than a tie, within the tolerance of the precision.
    """

    search: str
    rows: int
    identical: int
    score_error: float
    score_ratio: float = 0.0
    ties: Sequence[Difference] = ()
    defects: Sequence[Difference] = ()
    tolerated: Sequence[Difference] = ()

    @property
    def passed(self) -> bool:
        """Whether there were rows, and all of them agree, tie or are tolerated.

        A row that failed with NaN has no tokens, like an empty answer; its score differs.
        """
        accounted = self.identical + len(self.ties) + len(self.tolerated) == self.rows
        return self.rows > 0 and accounted and not self.defects


@dataclass(frozen=True)
class TaskMetric:
    """Effect of the differences on a metric of the task.

    Attributes:
        measure: "token agreement" of the greedy answers with torch's (a share); "sacreBLEU" of a
            search; on given answers "perplexity", "equivalent choices" (share of positions at which
            the preferred token is at most `EQUIVALENT` nats below torch's) and "worst choice" (the
            largest such distance, in nats). Of vectors, scores and labels those of docs/parity.md.
        reference: torch's value; 1 for shares and correlations, 0 for the worst choice.
        change: Distance of the two, relative for perplexity.
        budget: The largest change that passes; infinity for no limit.
        p_value: Probability of the change by chance; 0 where not estimated.
    """

    measure: str
    reference: float
    found: float
    change: float
    budget: float
    p_value: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether the change is within the budget, or may be chance; NaN is not."""
        return self.change <= self.budget or self.p_value >= CHANCE

    def __str__(self) -> str:
        scale = 1 if self.measure.startswith(BLEU) else 100
        unit = " points" if scale == 1 or self.measure == NDCG else " %"
        limit = f"limit {scale * self.budget:g}{unit}"
        if self.measure in (AGREEMENT, CHOICES, NEIGHBOURS, LABELS):
            found = f"{self.measure.capitalize()} {100 * self.found:.6g} %"
            limit = f"at least {100 * (1 - self.budget):g} %"
        elif self.measure in (COSINE, LEAST_COSINE, RANKS):
            found = f"{self.measure.capitalize()} {self.found:.5g}"
            limit = f"at least {1 - self.budget:g}"
        elif self.measure == WORST_CHOICE:
            found = f"Worst choice {self.found:.2g} nats below torch's"
            limit = f"limit {self.budget:g}"
        else:
            found = (
                f"{self.measure} {self.found:.5g}, torch {self.reference:.5g}, "
                f"change {scale * self.change:.2g}{unit}"
            )
        if self.p_value:
            limit += f", p {self.p_value:.2g}"
        return f"{found} ({limit})" if math.isfinite(self.budget) else found


@dataclass(frozen=True)
class Growth:
    """The largest error of the logits after `step` tokens of the given answers, and torch's own.

    Both are in the unit of `units.logit_units`.
    """

    step: int
    error: float
    reference_error: float


@dataclass(frozen=True)
class Margins:
    """Histogram of the distance between the oracle's two best tokens, in nats.

    Rounding could decide choices closer than twice `error`.
    """

    edges: Sequence[float]
    counts: Sequence[int]
    smallest: float
    error: float


@dataclass(frozen=True)
class CrossCheck:
    """Result of one runtime, on the same cases as all others."""

    runtime: str
    stages: Sequence[Stage] = ()
    absent: str = ""


@dataclass(frozen=True)
class Origin:
    """Origin of a fault: the first value of a graph that is wrong though its inputs are right.

    Attributes:
        graph: Such as "decoder"; empty, as all but the message, if no origin was found.
        module: The torch module that computes the value, such as "decoder.0.feed_forward.inner".
        source: File and line of that module's code, inside the package; `code` is its text.
    """

    graph: str
    case: str
    tensor: str
    module: str
    source: str
    operator: str
    message: str
    code: str = ""

    @classmethod
    def none_found(cls, cases: int) -> Self:
        """Returns the result where each graph alone agrees with torch."""
        message = (
            f"no origin found: on {cases:,} cases each graph agrees with torch if its inputs are "
            "right; the fault shows only where graphs, batches and the cache work together"
        )
        return cls("", "", "", "", "", "", message)

    def __str__(self) -> str:
        if not self.graph:
            return self.message
        place = f"{self.module} ({self.source})" if self.module else self.tensor
        lines = [
            f"the fault begins in {place}",
            f"  graph {self.graph}, operator {self.operator}, value {self.tensor}: {self.message}",
            f"  shown by {self.case}",
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class Claim:
    """A statement of the bundle about itself, compared with the checkpoint.

    The `verdict`, a clause whose subject is the bundle, explains all other faults.
    """

    name: str
    problem: str = ""
    verdict: str = ""
    skipped: str = ""


@dataclass(frozen=True)
class CheckTime:
    """Time that the checks of one kind took, in seconds: of the process's CPU, and that passed."""

    check: str
    runs: int
    cpu: float
    wall: float


@dataclass(frozen=True)
class PlantedFault:
    """Result of a fault that the self-test planted in a copy of the bundle.

    Attributes:
        changes_answer: Whether any output changed by more than rounding; other faults may pass.
        caught_by: The check that failed, such as "loading" or "later step"; empty if all passed.
        difference: Largest difference from the right outputs on one input on which exporters
            commonly try a tolerance; None if it was not measured.
        tolerated: Whether the user's own tolerance allows the difference; None without one.
    """

    kind: str
    planted: str
    changes_answer: bool
    caught_by: str
    difference: float | None = None
    tolerated: bool | None = None

    @property
    def passed(self) -> bool:
        """Whether the fault was caught, or changes nothing."""
        return bool(self.caught_by) or not self.changes_answer


@dataclass(frozen=True)
class ParityReport:
    """Everything that was compared, with its settings and results.

    The cross-check does not decide the verdict, and times are in no file whose bytes are promised.
    """

    bundle: str
    settings: Mapping[str, Any]
    tolerance: Tolerance
    comparisons: Sequence[Comparison]
    decisions: Sequence[Decisions] = field(default_factory=list)
    task_metrics: Sequence[TaskMetric] = ()
    growth: Sequence[Growth] = ()
    margins: Margins | None = None
    cross_check: Sequence[CrossCheck] = ()
    origin: Origin | None = None
    self_test: Sequence[PlantedFault] = ()
    claims: Sequence[Claim] = ()
    searches: Sequence[Mapping[str, Any]] = ()
    times: Sequence[CheckTime] = field(default=(), compare=False)

    @property
    def faults(self) -> list[str]:
        """A line for each failure; a report without comparisons fails too."""
        causes = sorted(self.claims, key=lambda item: not item.verdict)
        lines = [f"{item.name}: {item.problem}" for item in causes if item.problem]
        lines += [
            f"{item.case}: {item.tensor}: {item.fault}" for item in self.comparisons if item.fault
        ]
        if not self.comparisons:
            lines.append("no tensor was compared")
        for item in self.decisions:
            lines += [f"{item.search}: {line}" for line in item.defects]
            if not item.passed and not item.defects:
                lines.append(f"{item.search}: {item.identical} of {item.rows} rows agree")
        lines += [str(item) for item in self.task_metrics if not item.passed]
        lines += [
            f"self-test: not caught: {item.kind} ({item.planted})"
            for item in self.self_test
            if not item.passed
        ]
        return lines

    @property
    def passed(self) -> bool:
        """Whether everything that was compared agrees."""
        return not self.faults

    @property
    def verdict(self) -> str:
        """The verdict as a clause whose subject is the bundle."""
        lost = sum(not item.passed for item in self.task_metrics)
        if not self.faults:
            return "answers as torch does"
        if cause := next((item.verdict for item in self.claims if item.verdict), ""):
            return f"{cause}; all else passed" if len(self.faults) == 1 else cause
        if len(self.faults) == lost:
            made, remedy = self.settings.get("variant"), "round less (smaller blocks, more bits)"
            if made:
                remedy = "choose another variant, export --calibrate with text like yours"
            losses = ", ".join(item.measure for item in self.task_metrics if not item.passed)
            cause = f"as intended, but rounding costs too much ({losses})"
            return f"computes {made or 'its precision'} {cause}: {remedy}, or train longer"
        return "does not answer as torch does; do not deploy it"

    @property
    def strength(self) -> Strength | None:
        """Strength of a certificate of this report; None for an audit."""
        against, skipped = self.settings.get("against"), self.skipped
        return None if against is None else strength_of(str(against), skipped)

    @property
    def skipped(self) -> dict[str, str]:
        """By claim, what was not compared and why; empty where everything was."""
        return {item.name: item.skipped for item in self.claims}

    def stages(self) -> list[Stage]:
        """Sums up the comparisons, in the order in which a model runs."""
        return sum_up(self.comparisons, self.tolerance)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as JSON values; NaN and infinity, which JSON lacks, become None."""
        record = asdict(self)
        for name in ("decisions", "task_metrics", "self_test"):
            for item, value in zip(record[name], getattr(self, name), strict=True):
                item["passed"] = value.passed
        verdict = {"passed": self.passed, "verdict": self.verdict, "strength": self.strength}
        head = {"schema": SCHEMA, **verdict, "faults": self.faults}
        stages = [asdict(stage) for stage in self.stages()]
        whole: dict[str, Any] = json_values({**head, "stages": stages, **record})
        return whole

    def require(self) -> None:
        """Requires that the report passed.

        Raises:
            ParityError: It did not; the message lists the first faults.
        """
        if faults := self.faults:
            rest = len(faults) - FIRST_FAULTS
            more = [f"and {rest} more"] if rest > 0 else []
            raise ParityError(
                f"{self.bundle} {self.verdict}:\n  " + "\n  ".join([*faults[:FIRST_FAULTS], *more])
            )


def sum_up(comparisons: Sequence[Comparison], tolerance: Tolerance) -> list[Stage]:
    """Sums up comparisons by stage, in the order in which a model runs."""
    stages = []
    for name in STAGES:
        items = [item for item in comparisons if item.stage == name]
        if not items:
            continue
        stages.append(
            Stage(
                name,
                len(items),
                # Unlike max(), this keeps NaN.
                float(np.max([item.error for item in items])),
                float(np.max([item.reference_error for item in items])),
                worst_ratio(items, tolerance),
                sum(bool(item.fault) for item in items),
            )
        )
    return stages


def worst_ratio(comparisons: Sequence[Comparison], tolerance: Tolerance) -> float:
    """Returns the worst error in units of torch's own; NaN if one is NaN."""
    errors, budgets = (np.array([getattr(i, n) for i in comparisons]) for n in ("error", "budget"))
    with np.errstate(divide="ignore", invalid="ignore"):  # a limit of 0 is allowed
        return float(np.max(errors / budgets)) * tolerance.factor


def caught_of(faults: Sequence[PlantedFault]) -> tuple[int, int]:
    """Returns how many of the faults that change an answer were caught, and their number."""
    changing = [item for item in faults if item.changes_answer]
    return sum(bool(item.caught_by) for item in changing), len(changing)


def confidence(rows: int) -> str:
    """Returns the share of rows that may be wrong though none of this many was.

    Source: the rule of three (Hanley and Lippman-Hand 1983, If Nothing Goes Wrong, Is Everything
    All Right?): the upper end of the 95 % confidence interval is 1 - 0.05 ** (1 / rows).
    """
    most = 100 * (1 - 0.05 ** (1 / rows))
    return f"with 95 % confidence, under {most:.2g} % of rows like these are wrong"


def setting_text(value: Any) -> str:
    """Returns the value of a setting without Python's brackets and quotes."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {item}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return str(value)
