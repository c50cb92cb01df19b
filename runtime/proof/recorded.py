"""Answers of torch recorded in a bundle (reference.npz), and verification against them.

Needs no torch.
"""

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.manifest import REMEDY
from transferry.runtime.bundle.specs import PORTABLE, Variant
from transferry.runtime.decoding.decoder import ObservableDecoder, ObservableEncoder, State
from transferry.runtime.decoding.generation_options import (
    GenerationOptions,
    generation_options,
)
from transferry.runtime.decoding.hypothesis import Hypothesis
from transferry.runtime.decoding.search import search
from transferry.runtime.io.arrays import open_arrays
from transferry.runtime.io.atomic import atomic_file
from transferry.runtime.io.documents import parse_document
from transferry.runtime.io.whole import read_bytes
from transferry.runtime.ort.open_model import ServedModel, open_model
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.proof.compare import (
    OUTPUTS,
    Case,
    Comparison,
    Tolerance,
    Truth,
    compare,
    observe,
    units_of,
)
from transferry.runtime.proof.one_graph import OneGraph
from transferry.runtime.proof.report import CheckTime, Claim, Decisions, Difference, ParityReport
from transferry.runtime.proof.self_consistency import batches_of_rows, observed
from transferry.runtime.proof.tally import Decode, ExactScore, ExpectedAnswers, Explain, Tally
from transferry.runtime.tokenizer.byte_pair import SpecialTokens
from transferry.runtime.tokenizer.special_tokens import TextError

RECORDED = "recorded answers"  # name of the claim
# Composed and decomposed letters, a contraction, digits, blanks in a row, an emoji.
ODD_TEXT = "Ünïcode e\u0301, isn't 12345\u00a0in  two \U0001f600 words"


@dataclass(frozen=True)
class RecordedSearch:
    """A search of torch in float32 over all recorded sources.

    Attributes:
        answers: Token ids of each source's hypotheses, best first.
        scores: The float64 oracle's score of each hypothesis.
        score_error: torch's own error of each score, in nats; in a bundle written before it was
            measured by answer one for all.
    """

    name: str
    options: Mapping[str, Any]
    answers: Sequence[Sequence[Sequence[int]]]
    scores: Sequence[Sequence[float]]
    score_error: float | Sequence[Sequence[float]]
    ends: Sequence[Sequence[int | None]]

    @property
    def exact(self) -> list[list[ExactScore]]:
        """The scores with torch's own errors."""
        owns = self.score_error
        if isinstance(owns, int | float):
            owns = [[float(owns)] * len(row) for row in self.scores]
        pairs = zip(self.scores, owns, strict=True)
        return [[ExactScore(*each) for each in zip(*row, strict=True)] for row in pairs]

    @property
    def hypotheses(self) -> list[list[Hypothesis]]:
        """The recorded answers with the oracle's scores, best first."""
        return [
            [
                Hypothesis(tuple(tokens), score, score, "length" if end is None else "end", end=end)
                for tokens, score, end in zip(*row, strict=True)
            ]
            for row in zip(self.answers, self.scores, self.ends, strict=True)
        ]


@dataclass(frozen=True)
class Reference:
    """Recorded cases with the expected tensors, and searches over sources of token ids.

    An encoder-only model has no searches.
    """

    cases: Sequence[tuple[Case, Truth]]
    sources: Sequence[Sequence[int]]
    searches: Sequence[RecordedSearch]

    @property
    def coverage(self) -> dict[str, int]:
        """How much is recorded: cases, rows of the searches, and tokens of their answers."""
        answers = [answer for item in self.searches for row in item.answers for answer in row]
        rows = sum(len(item.answers) for item in self.searches)
        return {"cases": len(self.cases), "rows": rows, "tokens": sum(map(len, answers))}

    def save(self, path: Path) -> None:
        """Writes the file; the same reference gives the same bytes."""
        arrays: dict[str, NDArray[Any]] = {}
        index = []
        for number, (case, truth) in enumerate(self.cases):
            for part in ("source", "mask", "target"):
                arrays[f"{number}/{part}"] = getattr(case, part)
            for name, tensor in truth.oracle.items():
                arrays[f"{number}/oracle/{name}"] = tensor
                arrays[f"{number}/error/{name}"] = truth.errors[name]
            if case.rows is not None:
                arrays[f"{number}/rows"] = case.rows
            entry = {"name": case.name, "past": case.past, "tensors": list(truth.oracle)}
            index.append(entry | ({"least": truth.least} if truth.least else {}))
        record = {
            "cases": index,
            "sources": [list(source) for source in self.sources],
            "searches": [asdict(item) for item in self.searches],
        }
        arrays["index"] = np.frombuffer(json.dumps(record).encode(), np.uint8)
        with atomic_file(path) as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]

    @classmethod
    def of(cls, bundle: Bundle, variant: Variant) -> Self:
        """Reads the reference of a variant; raises InputError if it is missing or damaged."""
        name = variant.reference
        return cls.parse(bundle.files.read(name), str(bundle.folder / name))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads a file of `save`; raises InputError if it is missing or damaged."""
        return cls.parse(read_bytes(path), str(path))

    @classmethod
    def parse(cls, content: bytes, origin: str) -> Self:
        """Parses a file of `save`; raises InputError if it is damaged."""
        with open_arrays(content, origin, "a bundle's reference", REMEDY) as file:
            index = parse_document(file["index"].tobytes(), _Index, origin, REMEDY)
            cases = []
            for number, entry in enumerate(index.cases):
                rows = file.get(f"{number}/rows")
                case = Case(
                    entry.name,
                    _matrix(file[f"{number}/source"], np.int64),
                    _matrix(file[f"{number}/mask"], np.bool_),
                    _matrix(file[f"{number}/target"], np.int64),
                    entry.past,
                    None if rows is None else rows.astype(np.int64, casting="safe"),
                )
                cases.append((case, _truth(case, file, number, entry)))
            if any(len(each.exact) != len(each.answers) for each in index.searches):
                raise ValueError("expected a score of each answer")
            return cls(cases, index.sources, index.searches)


class _Entry(Struct):
    name: str
    past: Annotated[int, Meta(ge=0)]
    tensors: list[str] = []
    errors: dict[str, float] = {}  # of a bundle written before errors were by position
    least: Annotated[float, Meta(ge=0)] = 0.0


class _Index(Struct):
    cases: list[_Entry]
    sources: list[list[Annotated[int, Meta(ge=0)]]]
    searches: list[RecordedSearch]


def _matrix(values: NDArray[Any], kind: type[Any]) -> NDArray[Any]:
    if values.ndim != 2:
        raise ValueError(f"expected a matrix, found the shape {values.shape}")
    return values.astype(kind, casting="safe", copy=False)


def _truth(case: Case, file: Mapping[str, NDArray[Any]], number: int, entry: _Entry) -> Truth:
    """Returns the recorded tensors of a case and torch's errors.

    A bundle written before errors were by position has one for all tensors of a kind, over the
    largest entry: its budgets stay as wide as they were.
    """
    oracle = {name: file[f"{number}/oracle/{name}"] for name in entry.tensors or entry.errors}
    errors = {}
    for name, units in units_of(case, oracle, entry.least).items():
        if entry.tensors:
            errors[name] = own = file[f"{number}/error/{name}"].astype(np.float64, casting="safe")
            if own.shape != (len(units.exact),):
                raise ValueError(f"expected {len(units.exact)} errors, found the shape {own.shape}")
            continue
        unit, largest = max(units.typical, units.least), float(np.abs(units.exact).max(initial=0.0))
        times = max(1.0, largest / unit) if unit else 1.0
        errors[name] = np.full(len(units.exact), entry.errors[name] * times)
    return Truth(oracle, errors, entry.least)


def check_reference(
    reference: Reference,
    model: ObservableDecoder[State] | ObservableEncoder,
    special: SpecialTokens,
    tolerance: Tolerance,
    *,
    exact: bool = True,
    batch_rows: int = 1,
    decode: Decode | None = None,
    one: OneGraph | None = None,
) -> tuple[list[Comparison], list[Decisions]]:
    """Compares a model with the recorded answers; `decode` gives differing rows their texts.

    Unless `exact`, as in reduced precision, other tokens are tolerated: the budget of the numbers
    decides. The sources are repeated until they fill a batch of `batch_rows`. `one` answers its
    search too, which is compared with the same search step by step if it is not recorded.
    """
    comparisons = [
        comparison
        for case, truth in reference.cases
        for tensors, own in [observed(model, case)]
        for comparison in (*compare(case, truth, tensors, tolerance), *own)
    ]
    if isinstance(model, ObservableEncoder):
        return comparisons + batches_of_rows(model, reference.cases, batch_rows, tolerance), []
    replay = _Replay(reference, model, special, tolerance, exact, batch_rows)
    return comparisons, [tally.decisions(decode) for tally in replay.tallies(one)]


@dataclass(frozen=True)
class _Replay:
    """The recorded searches, run again; fields as the parameters of `check_reference`."""

    reference: Reference
    model: ObservableDecoder[Any]
    special: SpecialTokens
    tolerance: Tolerance
    exact: bool
    batch_rows: int

    def tallies(self, one: OneGraph | None) -> Iterator[Tally]:
        """Yields the comparison of each search, and of the search in one graph."""
        sources, searches = self.reference.sources, self.reference.searches
        for item in searches:
            expected = ExpectedAnswers(
                range(len(item.answers)),
                sources,
                [
                    [Hypothesis(tuple(tokens), math.nan, math.nan, "end") for tokens in answers]
                    for answers in item.answers
                ],
                item.exact,
                reasons=False,  # not recorded
            )
            options = generation_options(item.options)
            times = -(-self.batch_rows // (max(1, len(sources)) * options.beam))
            rows = [*range(len(sources))] * max(1, times)
            found = self._search(rows, options)
            tally = Tally(item.name, self.tolerance)
            ways = [found[row :: len(expected.rows)] for row in expected.rows]
            tally.add(expected, ways, self._explain)
            yield tally
            if one is not None and item.name == one.search:
                yield self._in_one_graph(one, expected, options, self._explain)
        if one is not None and one.search not in [item.name for item in searches] and searches:
            options = generation_options(searches[0].options)
            options = replace(options, beam=one.beam, n_best=one.beam)
            wanted = self._search(range(len(sources)), options)
            expected = ExpectedAnswers(range(len(wanted)), sources, wanted)
            explain = partial(self._explain, by="the search step by step")
            yield self._in_one_graph(one, expected, options, explain)

    def _search(self, rows: Sequence[int], options: GenerationOptions) -> list[list[Hypothesis]]:
        chosen = [self.reference.sources[row] for row in rows]
        return search(self.model, chosen, options, self.special)

    def _in_one_graph(
        self, one: OneGraph, expected: ExpectedAnswers, options: GenerationOptions, explain: Explain
    ) -> Tally:
        tally = Tally(one.name, self.tolerance)
        sources = self.reference.sources
        ways = one.answers_all_ways(sources, options, self.special, self.batch_rows)
        tally.add(expected, ways, explain)
        return tally

    def _explain(
        self,
        row: int,
        source: Sequence[int],
        wanted: Sequence[Hypothesis],
        found: Sequence[Hypothesis],
        by: str = "torch",
    ) -> tuple[Difference, bool]:
        left, right = ([list(item.tokens) for item in side] for side in (wanted, found))
        only = "; only `verify --checkpoint` can tell whether this is a tie"
        reason = only if self.exact else ", in reduced precision"
        told = f"{by} chose {left}, the graph chose {right}{reason}"
        return Difference(row, told), not self.exact


def verify_recorded(bundle: Bundle, model: ServedModel) -> ParityReport:
    """Compares a bundle, opened as it will be served, with its own recorded answers."""
    tolerance = Tolerance.of(model.variant.precision)
    reference = Reference.of(bundle, model.variant)
    special, exact = bundle.tokenizer.special, model.variant.exact
    batch_rows = model.batches.rows
    began = time.process_time(), time.perf_counter()
    comparisons, decisions = check_reference(
        reference,
        model,
        special,
        tolerance,
        exact=exact,
        batch_rows=batch_rows,
        decode=bundle.tokenizer.decode,
        one=OneGraph.of(bundle, model.variant, model.options),
    )
    spent = time.process_time() - began[0], time.perf_counter() - began[1]
    decodes = model.variant.cache is not None
    hollow = "hold no search" if decodes and not reference.searches else ""
    settings = {
        **model.describe(),
        **bundle.manifest.card.cited(),
        "against": "the recorded answers",
        **({} if bundle.manifest.head is None else {"task": bundle.manifest.head.task}),
        "batch_rows": batch_rows,
        "recorded": reference.coverage,
        "tasks": bundle.tasks,  # the compared outputs decide all of them
    }
    return ParityReport(
        str(bundle.folder),
        settings,
        tolerance,
        comparisons,
        decisions,
        # A search that nobody recorded would pass unseen.
        claims=[Claim(RECORDED, hollow)],
        searches=[item.options for item in reference.searches],
        times=[CheckTime(RECORDED, 1, *spent)],
    )


def vectors(bundle: Bundle) -> Iterator[dict[str, Any]]:
    """Yields test vectors: `ODD_TEXT` and recorded texts with the results of variant portable.

    Yields:
        `text`; `ids`; the first 8 numbers of each output of the first step, or of an encoder-only
        model; with a decoder also `answer_ids` and `answer` of the first recorded search, and its
        `options`.
    """
    variant, tokenizer = bundle.variant(PORTABLE), bundle.tokenizer
    reference, special = Reference.of(bundle, variant), tokenizer.special
    model = open_model(bundle, variant, SessionOptions())
    for text in (ODD_TEXT, *map(tokenizer.decode, reference.sources)):
        try:
            ids = special.wrap(tokenizer.encode(text))
        except TextError:  # recorded ids without text
            continue
        room = bundle.manifest.model["max_positions"] - len(ids) + 1
        if room < 1:
            continue
        source, target = ids, [special.bos_id]
        if isinstance(model, ObservableEncoder):
            target = []
        elif not model.has_encoder:
            source, target = ids[:-1], ids[-1:]
        rows = np.array([source], np.int64), np.ones((1, len(source)), np.bool_)
        found = observe(model, Case("", *rows, np.array([target], np.int64), 0))
        vector: dict[str, Any] = {"text": text, "ids": ids}
        for name in sorted(found.keys() & {*OUTPUTS}):
            vector[name] = [float(f"{value:.7g}") for value in found[name].ravel()[:8]]
        if not isinstance(model, ObservableEncoder):
            for item in reference.searches[:1]:
                options = generation_options(item.options)
                if not model.has_encoder:
                    options = replace(options, max_length=min(options.max_length, room))
                tokens = search(model, [ids], options, special)[0][0].tokens
                answer = {"answer_ids": tokens, "answer": tokenizer.decode(tokens)}
                vector |= {**answer, "options": item.options}
        yield vector
