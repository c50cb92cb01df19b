"""reference.npz: what torch answered, recorded so that a host without torch can verify a bundle."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transferry.runtime.bundle import REFERENCE, Bundle
from transferry.runtime.decoding.decoder import ObservableDecoder, ObservableEncoder, State
from transferry.runtime.decoding.options import GenerationOptions, options_of_json
from transferry.runtime.decoding.search import search
from transferry.runtime.files import atomic_file, open_arrays
from transferry.runtime.ort.open_model import Model
from transferry.runtime.parity.compare import Case, Comparison, Tolerance, Truth, compare, observe
from transferry.runtime.parity.report import Decisions, Difference, ParityReport, judge_scores
from transferry.runtime.tokenizer.byte_pair import SpecialTokens


@dataclass(frozen=True)
class RecordedSearch:
    """A search over all recorded sources, and what torch in float32 found.

    Attributes:
        name: Such as "beam 4".
        options: Fields of GenerationOptions.
        answers: Token ids of each source's hypotheses, best first.
        scores: What the float64 oracle scores them.
        score_error: What torch's own error of a score counts as, in nats.
    """

    name: str
    options: Mapping[str, Any]
    answers: Sequence[Sequence[Sequence[int]]]
    scores: Sequence[Sequence[float]]
    score_error: float


@dataclass(frozen=True)
class Reference:
    """All that is recorded.

    Attributes:
        cases: Inputs with what must come out.
        sources: Token ids that the searches ran over.
        searches: What they found; none for an encoder alone.
    """

    cases: Sequence[tuple[Case, Truth]]
    sources: Sequence[Sequence[int]]
    searches: Sequence[RecordedSearch]

    def save(self, path: Path) -> None:
        """Writes the file; the same reference gives the same bytes."""
        arrays: dict[str, NDArray[Any]] = {}
        index = []
        for number, (case, truth) in enumerate(self.cases):
            for part in ("source", "mask", "target"):
                arrays[f"{number}/{part}"] = getattr(case, part)
            for name, tensor in truth.oracle.items():
                arrays[f"{number}/oracle/{name}"] = tensor
            if case.rows is not None:
                arrays[f"{number}/rows"] = case.rows
            index.append({"name": case.name, "past": case.past, "errors": dict(truth.errors)})
        record = {
            "cases": index,
            "sources": [list(source) for source in self.sources],
            "searches": [asdict(item) for item in self.searches],
        }
        arrays["index"] = np.frombuffer(json.dumps(record).encode(), np.uint8)
        with atomic_file(path) as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: Path) -> Reference:
        """Reads what `save` wrote.

        Raises:
            InputError: The file is missing or damaged.
        """
        with open_arrays(path, "a bundle's reference", "export the bundle again") as file:
            record = json.loads(file["index"].tobytes())
            cases = []
            for number, entry in enumerate(record["cases"]):
                case = Case(
                    entry["name"],
                    file[f"{number}/source"],
                    file[f"{number}/mask"],
                    file[f"{number}/target"],
                    entry["past"],
                    file.get(f"{number}/rows"),
                )
                oracle = {name: file[f"{number}/oracle/{name}"] for name in entry["errors"]}
                cases.append((case, Truth(oracle, entry["errors"])))
            searches = [RecordedSearch(**item) for item in record["searches"]]
            return cls(cases, record["sources"], searches)


def check_reference(
    reference: Reference,
    model: ObservableDecoder[State] | ObservableEncoder,
    special: SpecialTokens,
    tolerance: Tolerance,
    *,
    exact: bool = True,
) -> tuple[list[Comparison], list[Decisions]]:
    """Lets a model answer what is recorded.

    Args:
        reference: What is recorded.
        model: What is judged.
        special: The ids that pad, begin and end.
        tolerance: What passes.
        exact: Whether the tokens must agree; those that a reduced precision chose differently are
            told and not judged, since the budget of its numbers is the judge.
    """
    comparisons = [
        comparison
        for case, truth in reference.cases
        for comparison in compare(case, truth, observe(model, case), tolerance)
    ]
    decisions: list[Decisions] = []
    if isinstance(model, ObservableEncoder):
        return comparisons, decisions
    for item in reference.searches:
        options = GenerationOptions(**options_of_json(item.options))
        found = search(model, reference.sources, options, special)
        ties, defects = [], []
        identical, score_error = 0, 0.0
        for row, (wanted, hypotheses) in enumerate(zip(item.answers, found, strict=True)):
            tokens = [list(hypothesis.tokens) for hypothesis in hypotheses]
            if tokens != [list(answer) for answer in wanted]:
                message = f"torch chose {wanted}, the graph chose {tokens}"
                if exact:
                    only = "only `verify --checkpoint` can tell whether this is a tie"
                    defects.append(Difference(row, f"{message}; {only}"))
                else:
                    ties.append(Difference(row, f"{message}, in reduced precision"))
                continue
            identical += 1
            errors = [
                abs(hypothesis.score - score)
                for score, hypothesis in zip(item.scores[row], hypotheses, strict=True)
            ]
            score_error, defect = judge_scores(
                row, errors, tolerance.factor * item.score_error, score_error
            )
            defects += defect
        decisions.append(
            Decisions(
                item.name,
                len(item.answers),
                identical,
                score_error,
                score_error / item.score_error,
                ties,
                defects,
            )
        )
    return comparisons, decisions


def verify_recorded(
    bundle: Bundle, model: Model, tolerance: Tolerance | None = None
) -> ParityReport:
    """Holds a bundle, opened as it will be served, against its own record; needs no torch."""
    tolerance = tolerance or Tolerance.of(model.variant.precision)
    reference = Reference.load(bundle.folder / REFERENCE)
    special, exact = bundle.tokenizer.special, model.variant.exact
    comparisons, decisions = check_reference(reference, model, special, tolerance, exact=exact)
    settings = {**model.describe(), "against": "the recorded answers"}
    return ParityReport(str(bundle.folder), settings, tolerance, comparisons, decisions)
