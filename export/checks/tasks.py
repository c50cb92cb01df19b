"""Tasks of an encoder-only model as the engine serves them, beside torch on each row alone.

A result is proven in two steps. The tensors of each row of each batch that the engine computes are
compared with torch's, of that row alone and without padding. The result must equal that of a plain
second implementation on these tensors, which shares no code with the runtime's tasks.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain, cycle, islice, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transferry.build_model.checkpoint import Checkpoint
from transferry.export.checks.check import Check, Findings
from transferry.export.checks.texts import TEXT, Choices, passage
from transferry.export.oracle.cases import MOST_LOGITS
from transferry.export.oracle.oracle import SHAKES, Oracle
from transferry.export.oracle.results import EXACT, PROBABILITIES, RESULTS, Inputs, Row
from transferry.export.oracle.served import REPLICAS, Watched
from transferry.export.oracle.teacher_forcing import TeacherForcing, chosen_from
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.decoding.batching import BatchOptions
from transferry.runtime.decoding.decoder import Tensors
from transferry.runtime.engine.engine import Engine
from transferry.runtime.ort.encoder import EncoderModel
from transferry.runtime.proof.compare import (
    Case,
    Comparison,
    Tolerance,
    Truth,
    compare,
    limited,
    observe,
)
from transferry.runtime.proof.tally import Tally
from transferry.runtime.proof.units import LEAST

Floats = NDArray[np.float64]

MIXED = range(2, 9)  # rows of the calls whose rows differ much in length
SAMPLED = 8  # one row in so many is embedded too, or measured in float64
ALIKE_ROWS = 32  # rows of one length that torch computes at once
FEW = 2  # texts that the other tasks read


@dataclass(frozen=True, eq=False)
class Expected:
    """torch's tensors of a row.

    Attributes:
        case: It alone, without padding.
        truth: torch's tensors, in float64, and its errors.
        values: Numbers of results, in float64, and torch's own error, by name.
        choices: Scores to choose from, of each side of torch, as trained last.
        meant: The vector or scores of torch as trained that reduced precision is judged by.
        measured: Returns the same in float64, or with torch's error of more roundings; None
            after both.
    """

    row: Row
    case: Case
    truth: Truth
    values: Mapping[str, tuple[Floats, float]]
    choices: Sequence[Floats]
    meant: Floats
    tolerance: Tolerance
    measured: Callable[[], Expected] | None = None


# Further settings of a task, tried on a few rows.
OTHERWISE: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "embed": [{"pooling": "mean", "normalise": True}, {"pooling": "first"}, {"pooling": "last"}],
    "tag": [{"aggregation": each} for each in ("simple", "first", "average", "max")],
    "answer": [{"top": 3, "handle_impossible_answer": True}, {"top": 2, "max_answer_len": 2}],
    "fill-mask": [{"top": 1}],
    "sparse": [{"top": 3, "normalise": True}, {"pooling": "mean"}],
    "tokens": [{"prompt": "document"}],
}
SPECIAL = "special"  # rows of the main task that are no line of the text
WINDOW = "window"  # further windows of rows
QUERY = "query"  # of the other side of a search


@dataclass(frozen=True)
class _Typical:
    """Medians of torch's errors over the rows that float64 measured."""

    errors: Mapping[str, float]
    values: Mapping[str, float]
    least: float

    @classmethod
    def of(cls, rows: Sequence[Expected]) -> _Typical:
        truths = [row.truth for row in rows]
        return cls(
            {
                name: float(np.median([one.worst(name) for one in truths]))
                for name in truths[0].oracle
            },
            {
                name: float(np.median([row.values[name][1] for row in rows]))
                for name in rows[0].values
            },
            min(one.least for one in truths),
        )


@dataclass(eq=False)
class _Serving:
    """Calls of an engine whose batches are watched.

    Attributes:
        rows: Expected tensors, by the tokens of a row.
        served: The different tensors that batches gave for a row, by its tokens.
        problems: Results that differ from those of their tensors, by task.
    """

    rows: dict[tuple[int, ...], Expected]
    oracle: Oracle
    inputs: Inputs
    served: dict[tuple[int, ...], list[Tensors]] = field(default_factory=dict)
    worst: dict[tuple[str, str], Comparison] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    failing: list[Case] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def shown(self, source: Any, mask: Any, found: Tensors) -> None:
        """Compares the tensors of a batch with torch's of each row alone."""
        for place, length in enumerate(mask.sum(axis=1).tolist()):
            ids = tuple(source[place, :length].tolist())
            tensors = {
                name: (each[place, :length] if each.ndim > 2 else each[place])[None]
                for name, each in found.items()
            }
            with self.lock:
                if not self._compared(ids, tensors) and not self.failing:
                    nothing = np.zeros((len(source), 0), np.int64)
                    name = f"{TEXT}, {len(source)} rows of {source.shape[1]}"
                    self.failing.append(Case(name, source, mask, nothing, 0, stage=TEXT))

    def _compared(self, ids: tuple[int, ...], tensors: Tensors) -> bool:
        """Compares the tensors of a row, unless they are those of a batch before."""
        if (row := self.rows.get(ids)) is None:
            fault = f"the engine reads {list(ids)}, expected one of the rows"
            self._keep(Comparison(TEXT, "source", TEXT, np.inf, 0.0, 0.0, fault))
            return False
        for one in self.served.setdefault(ids, []):
            if all(np.array_equal(one[name], each) for name, each in tensors.items()):
                return True
        self.served[ids].append({name: each.copy() for name, each in tensors.items()})
        compared = self._beside(row, tensors)
        while any(each.fault for each in compared) and row.measured is not None:
            row = self.rows[ids] = row.measured()
            compared = self._beside(row, tensors)
        for each in compared:
            self._keep(each)
        return not any(each.fault for each in compared)

    def _beside(self, row: Expected, tensors: Tensors) -> list[Comparison]:
        """Compares the tensors of a row with torch's, and the values of its results."""
        compared = compare(row.case, row.truth, tensors, row.tolerance)
        units = self.inputs.units(row.truth.oracle, row.truth.least)
        for name, value in self.inputs.values(tensors).items():
            exact, own = row.values[name]
            error = float(np.abs(value - exact).max(initial=0.0)) / units[name]
            budget = row.tolerance.budget(own)
            compared.append(limited(row.case.name, name, TEXT, error, own, budget))
        return compared

    def _keep(self, found: Comparison) -> None:
        key = found.case, found.tensor
        known = self.worst.get(key)
        if known is None or (bool(found.fault), found.error) > (bool(known.fault), known.error):
            self.worst[key] = found

    def answer(
        self, engine: Engine, task: str, rows: Sequence[Row], *, ids: bool = False, **settings: Any
    ) -> None:
        """Answers rows in one call, and compares each result with a second implementation's.

        With `ids` the engine is given their tokens.
        """
        method = getattr(engine, task.replace("-", "_"))
        given = [row.as_ids() if ids else row.given() for row in rows]
        # Contexts of answers are read in windows.
        cut = {} if task == "answer" else {"long_rows": "truncate"}
        for row, result in zip(rows, method(given, **cut, **settings), strict=True):
            told = "" if result.error is None else f"is an error: {result.error.message}"
            windows = (row.ids, *(row.more if task == "answer" else ()))
            served = product(*(self.served.get(ids, ()) for ids in windows))
            if not told and not any(
                RESULTS[task](self.inputs, row, result, *tensors, **settings) for tensors in served
            ):
                told = "does not follow from its tensors"
            if told and not self.problems.get(task):  # a call before may have been right
                named = " with ".join([task, *(f"{k} {v}" for k, v in settings.items())])
                self.problems[task] = f"{named}: the result of {row.texts} {told}"
        self.problems.setdefault(task, "")

    def comparisons(self) -> list[Comparison]:
        """Returns the worst comparison of each tensor of each row, and one of each task."""
        results = [
            Comparison(TEXT, task, TEXT, np.inf if problem else 0.0, 0.0, EXACT, problem)
            for task, problem in self.problems.items()
        ]
        return [*(self.worst[key] for key in sorted(self.worst)), *results]


def _most(model: EncoderModel, batches: BatchOptions) -> int:
    """Returns the most tokens of a row with which a batch can have its most rows."""
    return max(1, min(batches.tokens, model.batches.tokens) // batches.rows)


def encoder_tasks(checkpoint: Checkpoint) -> list[str]:
    """Returns the tasks of an encoder-only model, the one that reads every text first."""
    head, mask_id = checkpoint.head, checkpoint.tokenizer.special.mask_id
    tasks = ["embed"]
    if checkpoint.model.config.lm_head and mask_id is not None:
        tasks = ["fill-mask", "embed"]
        if head is not None and head.vectors != "dense":
            tasks = tasks[::-1]
    if head is not None and head.task != "embed":
        tasks = [head.task, *tasks]
    if head is not None and head.task == "classify" and len(head.labels) == 1:
        tasks.append("rank")
    return tasks


class ServedTasks:
    """The check of every task of an encoder-only model.

    Attributes:
        main: The task that reads every text: the head's, else filling of masks, else embedding.
        runs: The task whose batches are compared: `main`, or "embed" where that cannot run.
    """

    def __init__(self, checkpoint: Checkpoint, oracle: Oracle, texts: Sequence[str]) -> None:
        """Takes torch's side and texts; without texts, words of random tokens are read."""
        self.inputs = Inputs(checkpoint, texts)
        self.oracle, self.judges = oracle, bool(texts)
        self.head, self.tasks = checkpoint.head, encoder_tasks(checkpoint)
        self.main = self.runs = self.tasks[0]
        if self.main in ("tag", "answer") and not self.inputs.has_places:
            # No host can serve the task then: the head is judged in the batches of `embed`.
            self.runs, self.tasks = "embed", self.tasks[1:]
        self._kept: dict[int, list[list[tuple[str, Expected]]]] = {}

    def check(self, bundle: Bundle, model: EncoderModel, batches: BatchOptions) -> Check:
        """Returns the check of a variant, in batches of at most this size."""
        steps = len(self.inputs.rows(self.main))
        return Check(TEXT, partial(self._run, bundle, model, batches), steps)

    def _run(
        self, bundle: Bundle, model: EncoderModel, batches: BatchOptions, so_far: Findings
    ) -> Iterator[Findings]:
        forcing, tally = TeacherForcing(), Tally(self.main, self.oracle.tolerance)
        number = 0
        for place, chunk in enumerate(self._chunks(_most(model, batches))):
            serving = _Serving({each.row.ids: each for _, each in chunk}, self.oracle, self.inputs)
            watched = Watched(model, serving.shown)
            engine = Engine.of(bundle, watched, replicas=REPLICAS, batches=batches)
            self._serve(engine, serving, chunk, whole=not place)
            yield Findings(comparisons=serving.comparisons(), failing=serving.failing)
            for task, each in chunk:
                if task == self.main:
                    row, found = serving.rows[each.row.ids], serving.served.get(each.row.ids, ())
                    self._choose(number, row, found, forcing, tally)
                    number += 1
                    yield Findings(steps=1, **self._results(each, serving))
        if self.judges and forcing.tokens:
            yield Findings(forcing=forcing)
            yield Findings(decisions=[tally.decisions()])

    def _serve(
        self,
        engine: Engine,
        serving: _Serving,
        chunk: Sequence[tuple[str, Expected]],
        *,
        whole: bool,
    ) -> None:
        """Answers the rows of a chunk; of the first one in every way."""
        rows: dict[str, list[Row]] = {}
        for task, each in chunk:
            rows.setdefault(task, []).append(each.row)
        mains = [*rows.get(SPECIAL, ()), *rows.get(self.main, ())]
        for task in {*self.tasks, *engine.tasks} - ({self.main} - {self.runs}):
            if task not in self.tasks or task not in engine.tasks:
                told = "the bundle does not offer it" if task in self.tasks else "it has no check"
                serving.problems[task] = f"{task} is not verified: {told}"
        for task in [task for task in self.tasks if task in engine.tasks]:
            own = mains if task == self.runs else rows.get(task, ())
            serving.answer(engine, task, own)
            kind = self.inputs.head.vectors
            named = kind if task == "embed" and kind != "dense" else task
            for settings in OTHERWISE.get(named, ()) if whole else ():
                serving.answer(engine, task, own[: max(MIXED)], **settings)
        if queries := rows.get(QUERY):
            slots = engine.batches.rows if whole else 0
            count = max(len(queries), REPLICAS * slots + slots // 2)
            serving.answer(engine, "embed", list(islice(cycle(queries), count)), prompt=QUERY)
        if self.main != "embed":
            serving.answer(engine, "embed", mains[::SAMPLED], ids=True)
        if whole and self.runs in engine.tasks:
            self._fill(engine, serving, mains)

    def _fill(self, engine: Engine, serving: _Serving, rows: Sequence[Row]) -> None:
        """Answers rows in full batches of the most rows, and in small ones of unequal lengths."""
        slots = engine.batches.rows
        short = [row for row in rows if len(row.ids) <= _most(engine.encoder, engine.batches)]
        # Sorted by length, a row whose length no other has would fill several places in turn.
        lengths = Counter(len(row.ids) for row in set(short))
        alike = [row for row in short if lengths[len(row.ids)] > 1]
        count = REPLICAS * slots + slots // 2
        serving.answer(engine, self.runs, list(islice(cycle(alike or short or rows), count)))
        long = rows[:: max(1, len(rows) // sum(MIXED))]
        mixed = cycle(chain(*zip(long, cycle(short or rows), strict=False)))
        for count in MIXED:
            serving.answer(engine, self.runs, list(islice(mixed, count)))

    def _chunks(self, most: int) -> Iterator[list[tuple[str, Expected]]]:
        """Yields rows with their tasks and torch's tensors, as many at once as fit into memory.

        Short rows have at most so many tokens.
        """
        if most in self._kept:
            yield from self._kept[most]
            return
        config, inputs = self.oracle.config, self.inputs
        rows = [(SPECIAL, row) for row in inputs.special_rows(self.main, most)]
        for task in self.tasks[1:]:
            rows += [(task, row) for row in inputs.rows(task)[:FEW]]
        rows += [(QUERY, row) for row in inputs.queries()]
        rows += [(self.main, row) for row in inputs.rows(self.main)]
        width = config.vocabulary_size if config.lm_head else config.d_model
        chunk: list[tuple[str, Row]] = []
        different: dict[tuple[int, ...], tuple[int, str, Row]] = {}
        kept, tokens = [], 0
        for number, (task, row) in enumerate(rows):
            for kind, one in ((task, row), *((WINDOW, Row(row.texts, ids)) for ids in row.more)):
                if one.ids not in different:
                    different[one.ids] = number, kind, one
                    tokens += len(one.ids)
                chunk.append((kind, one))
            if tokens * width >= MOST_LOGITS // 2 or number == len(rows) - 1:
                known = self._expected([*different.values()])
                found = [(kind, replace(known[one.ids], row=one)) for kind, one in chunk]
                yield found
                if self.oracle.remembers:
                    kept.append(found)
                chunk, different, tokens = [], {}, 0
        if self.oracle.remembers:
            self._kept[most] = kept

    @property
    def _samples(self) -> bool:
        """Whether float64 measures a sample: values are rounded, and nothing is chosen by them."""
        chooses = self.head is not None and self.head.probabilities != "none"
        return bool(self.oracle.others) and (self.main == "embed" or not chooses)

    def _expected(self, rows: Sequence[tuple[int, str, Row]]) -> dict[tuple[int, ...], Expected]:
        """Returns torch's tensors of different rows, by their tokens; numbers are for reports."""
        mains = [row for _, kind, row in rows if kind == self.main and self._samples]
        sampled = mains[::SAMPLED]
        near = {row.ids for row in mains} - {row.ids for row in sampled}
        found = {row.ids: self._of_torch(n, row) for n, _, row in rows if row.ids not in near}
        if near:
            typical = _Typical.of([found[row.ids] for row in sampled])
            alike: dict[int, list[tuple[int, Row]]] = {}
            for number, _, row in rows:
                if row.ids in near:
                    alike.setdefault(len(row.ids), []).append((number, row))
            for each in alike.values():
                for first in range(0, len(each), ALIKE_ROWS):
                    alone = self._near(each[first : first + ALIKE_ROWS], typical)
                    found |= {one.row.ids: one for one in alone}
        return found

    def _near(self, rows: Sequence[tuple[int, Row]], typical: _Typical) -> Iterator[Expected]:
        """Yields tensors of rows of one length, of torch in float32 with typical errors."""
        source = np.array([row.ids for _, row in rows], np.int64)
        sides = (self.oracle.reference.encoder, self.oracle.trained.encoder)
        given = [side.encode(source, np.ones_like(source, np.bool_)) for side in sides]
        for place, (number, row) in enumerate(rows):
            one, meant = ({name: each[[place]] for name, each in side.items()} for side in given)
            case, expected = passage(number, row.ids), Truth(one, {}, typical.least)
            for name, units in expected.units(case).items():
                expected.errors[name] = np.full(len(units.exact), typical.errors[name])
            read = self.inputs.values(one)
            values = {name: (value, typical.values[name]) for name, value in read.items()}
            measured = cache(partial(self._of_torch, number, row))
            nothing, judged = [np.zeros((0, 0))] * 3, self._judged(meant)
            # A typical error from torch in float32 is at most two of them from float64, which pass.
            tolerance = replace(self.oracle.tolerance, factor=1.0, crossed=np.inf)
            yield Expected(row, case, expected, values, nothing, judged, tolerance, measured)

    def _of_torch(self, number: int, row: Row, shakes: int = 0) -> Expected:
        case = passage(number, row.ids)
        sides, least = self.oracle.sides(case, shakes)
        exact, *others = [self.inputs.values(side) for side in sides]
        values, units = {}, self.inputs.units(sides[0], least)
        for name, value in exact.items():
            own = max(float(np.abs(side[name] - value).max(initial=0.0)) for side in others)
            # A vector is a single position; see `Units.own`.
            values[name] = value, max(own / units[name], 0 if name == PROBABILITIES else 2 * LEAST)
        trained = sides[1]
        if self.oracle.rounds:
            trained = observe(self.oracle.trained.encoder, case)
        choices = [self._scores(row, tensors) for tensors in (*sides, trained)]
        # See `Oracle.compared`.
        shaken = None if shakes else cache(partial(self._of_torch, number, row, SHAKES))
        expected, tolerance = self.oracle.judged(case, sides, least), self.oracle.tolerance
        given = row, case, expected, values, choices, self._judged(trained)
        return Expected(*given, tolerance, shaken)

    def _judged(self, tensors: Tensors) -> Floats:
        if self.main == "embed":
            vector: Floats = self.inputs.values(tensors)["vector"]
            return vector
        head = self.head
        if head is None or (head.probabilities != "none" and len(head.labels) > 1):
            return np.zeros(0)
        scores: Floats = tensors["head"][0].astype(np.float64).ravel()
        return scores

    def _results(self, row: Expected, serving: _Serving) -> dict[str, Any]:
        """Returns the judged numbers of a row beside those of its worst repetition."""
        meant, served = row.meant, serving.served.get(row.row.ids)
        if not (self.judges and meant.size and served):
            return {}
        found = [self._judged(tensors) for tensors in served]
        errors = [float(np.abs(one - meant).max()) for one in found]
        worst = found[int(np.argmax(errors))]  # unlike max(), argmax finds NaN
        return {"vectors" if self.main == "embed" else "scores": [(meant, worst)]}

    def _scores(self, row: Row, tensors: Tensors) -> Floats:
        if self.main == "fill-mask":
            mask_id = self.inputs.special.mask_id
            scores = tensors["logits"][0, np.array(row.ids) == mask_id]
        else:
            scores = chosen_from(tensors, self.head if self.main != "embed" else None)
        found: Floats = scores.astype(np.float64)
        return found

    def _choose(
        self,
        number: int,
        row: Expected,
        served: Sequence[Tensors],
        forcing: TeacherForcing,
        tally: Tally,
    ) -> None:
        """Counts the choices of a row, those of its worst repetition."""
        if not row.choices[0].size or not served:
            return
        found = [self._scores(row.row, tensors) for tensors in served]
        trial = Tally(self.main, self.oracle.tolerance)
        self._judge(number, row, found, trial)
        if trial.decisions().defects and row.measured is not None:
            row = row.measured()  # as for tensors
        right = self._judge(number, row, found, tally)
        exact, left, *_, meant = row.choices
        forcing.add([0, *left.argmax(axis=1)], exact, left, right, meant)

    def _judge(self, number: int, row: Expected, found: Sequence[Floats], tally: Tally) -> Floats:
        """Counts the choices of the worst repetition of a row; returns their scores."""
        exact, left, *others, _ = row.choices
        wanted = left.argmax(axis=1)
        right = max(
            found,
            key=lambda one: (
                int((one.argmax(axis=1) != wanted).sum()),
                float(np.nan_to_num(np.abs(one - exact).max(), nan=np.inf)),
            ),
        )
        given = exact, left, others, right, row.truth.least, np.arange(len(exact)), self.oracle
        Choices(*given).count(number, tally)
        return right
