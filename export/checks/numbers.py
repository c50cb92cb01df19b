"""Every tensor over cases of random tokens, the same input again, and rows in padded batches."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transferry.export.checks.check import INDEPENDENCE, Check, Findings, claim, failed, prove
from transferry.export.oracle.cases import MOST_LOGITS, NEW_TOKENS, random_case
from transferry.export.oracle.followed import followed
from transferry.export.oracle.oracle import SHAKES, Oracle
from transferry.export.subject.foreign_model import ForeignGraph, Padding
from transferry.export.subject.subject import Observable, OpenedModel, Subject
from transferry.runtime.decoding.decoder import ObservableDecoder, Tensors
from transferry.runtime.errors import InputError
from transferry.runtime.proof.compare import Case, Comparison, Tolerance, compare, limited, observe
from transferry.runtime.proof.report import Claim
from transferry.runtime.proof.self_consistency import observed
from transferry.runtime.proof.units import Units

BLOCK = 64  # positions that torch computes at once
# Of batches: every size up to this one, and so many larger ones.
EVERY_SIZE, LARGER_SIZES = 64, 8
REPEATS = 3
REPEATED = "repeated runs"
BATCH = 8  # rows of a batch that is compared with the same rows alone
DECLARED = "declared types and shapes"


def numbers(subject: Subject[Any], oracle: Oracle, cases: Iterable[Case]) -> list[Check]:
    """Returns a check of every tensor for each case."""
    return [
        Check(
            case.name,
            partial(_compared, subject, oracle, case),
            1,
            case.stage,
            kind=re.sub(r"\d+", "N", case.name),
        )
        for case in cases
    ]


def _compared(
    subject: Subject[Any], oracle: Oracle, case: Case, so_far: Findings
) -> Iterator[Findings]:
    (tensors, own), found, same = observed(subject.model, case), list[Comparison](), False
    if subject.shown is not None:
        shown, found = followed(oracle, subject.shown, case)
        same = all(np.array_equal(each, shown.get(name, 0)) for name, each in tensors.items())
    if not same:  # as served it gives other bits than where it shows its integers
        found += oracle.compared(case, tensors, subject.tensors)
    failing = [case] if any(item.fault for item in found) else []
    yield Findings(comparisons=[*found, *own], failing=failing, steps=1)


def compare_cases(oracle: Oracle, model: Observable, cases: Iterable[Case]) -> list[Comparison]:
    """Compares every tensor of every case of an opened model."""
    return prove(numbers(OpenedModel(model), oracle, cases)).comparisons


def batch_sizes(
    subject: Subject[Any], oracle: Oracle, case: Case, every: int = EVERY_SIZE
) -> Check:
    """Returns the check of the first rows of one short case in batches of 1, 2, 3 ... rows.

    A search goes through every size as sentences end. The rows of a decoder are reversed before the
    compared step. Sizes up to `every` are all tried, and compared together; the failing case has
    the worst one.
    """
    most = len(case.source)
    larger = np.linspace(min(most, every), most, LARGER_SIZES).astype(int)
    sizes = sorted({*range(1, min(most, every) + 1), *larger.tolist()})

    def run(so_far: Findings) -> Iterator[Findings]:
        sides = cache(partial(oracle.sides, case))
        logits = oracle.config.vocabulary_size * 2
        together: list[int] = []
        for size in sizes:
            together.append(size)
            if size == sizes[-1] or (sum(together) + size) * logits > MOST_LOGITS:
                yield _of_sizes(subject, case, together, sides, oracle)
                together = []

    return Check("batch sizes", run, stage=case.stage)


def _of_sizes(
    subject: Subject[Any],
    case: Case,
    sizes: list[int],
    sides: Callable[[int], tuple[list[Tensors], float]],
    oracle: Oracle,
) -> Findings:
    """Compares the first rows of a case, in batches of some sizes; see `batch_sizes`.

    `sides` returns those of torch with so many shakes.
    """
    found: list[Tensors] = []
    for size in sizes:
        order = np.arange(size)[::-1] if size > 1 and case.target.size else None
        tensors = observe(subject.model, replace(_rows(case, np.arange(size)), rows=order))
        found.append(
            {
                name: tensor if order is None or name.startswith("cross") else tensor[order]
                for name, tensor in tensors.items()
            }
        )
    rows = np.concatenate([np.arange(size) for size in sizes])
    whole = replace(_rows(case, rows), name=f"batches of {sizes[0]} to {sizes[-1]}")
    joined = {name: np.concatenate([each[name] for each in found]) for name in found[0]}
    for shakes in (0, SHAKES):
        expected, least = sides(shakes)
        chosen = [{name: tensor[rows] for name, tensor in side.items()} for side in expected]
        judged = oracle.judged(whole, chosen, least)
        compared = compare(whole, judged, joined, oracle.tolerance, subject.tensors)
        if not any(item.fault for item in compared):
            break
    failing = []
    if wrong := next((item.tensor for item in compared if item.fault), ""):
        distance = np.abs(joined[wrong] - chosen[0][wrong]).reshape(len(rows), -1).max(axis=1)
        size = int(np.repeat(sizes, sizes)[distance.argmax()])
        failing = [replace(_rows(case, np.arange(size)), name=f"batch of {size}")]
    return Findings(comparisons=compared, failing=failing)


def _rows(case: Case, rows: NDArray[np.int64]) -> Case:
    return replace(case, source=case.source[rows], mask=case.mask[rows], target=case.target[rows])


def repeats(run: Callable[[], Mapping[str, NDArray[Any]]]) -> Check:
    """Returns the check that the same input gives the same bits several times."""

    def change() -> str:
        try:
            runs = [run() for _ in range(REPEATS)]
        except InputError as error:
            return str(error)
        for name, wanted in runs[0].items():
            if any(each[name].tobytes() != wanted.tobytes() for each in runs):
                apart = [np.subtract(each[name], wanted, dtype=np.float64) for each in runs]
                worst = max(float(np.abs(each).max()) for each in apart)
                return f"{name} differs by {worst:.1e} between {REPEATS} runs on the same input"
        return ""

    return claim(REPEATED, lambda: [Claim(REPEATED, change())])


def positions(subject: Subject[Any], oracle: Oracle, most: int | None = None) -> Check:
    """Returns the check of the logits at every position up to the model's last, or so many.

    Two rows change places after each block, so that the cache moves as it grows. It finds a
    comparison for each block; the failing case of a wrong one ends at its worst position.
    """
    longest = oracle.config.max_positions if most is None else most
    return Check("positions", partial(_walk, subject, oracle, longest), stage="later step")


def _walk(
    subject: Subject[Any], oracle: Oracle, longest: int, so_far: Findings
) -> Iterator[Findings]:
    model, config = subject.model, oracle.config
    case = random_case(config, 2, NEW_TOKENS, 0, seed=0)
    source, mask, swapped = case.source, case.mask, np.array([1, 0])
    longest -= 0 if config.encoder_layers else source.shape[1]
    target = np.random.default_rng(0).integers(config.vocabulary_size, size=(2, longest))
    sides: list[ObservableDecoder[Any]] = [oracle.exact, oracle.reference, *oracle.others]
    states = [side.start(source, mask) for side in sides]
    state = model.start(source, mask)
    block = max(1, min(BLOCK, MOST_LOGITS // config.vocabulary_size))
    for first in range(0, longest, block):
        tokens, expected, logits = target[:, first : first + block], [], []
        for number, side in enumerate(sides):
            output, states[number] = side.step(tokens, states[number])
            expected.append({"logits": output.all_logits})
        for token in tokens.T:
            output, state = model.step(token[:, None], state)
            logits.append(output.all_logits.copy())
        found = np.concatenate(logits, axis=1)
        last = first + len(tokens.T) - 1
        name = f"positions {first} to {last}"
        fed = Case(name, source, mask, target[:, : last + 1], first, stage="later step")
        given = compare(fed, oracle.judged(fed, expected), {"logits": found}, oracle.tolerance)
        if given[0].fault:
            given = oracle.compared(fed, {"logits": found}, ["logits"])
        failing = []
        if given[0].fault:
            distance = np.abs(found - expected[0]["logits"]).max(axis=(0, 2))
            worst = first + int(distance.argmax())
            failing = [Case(f"position {worst}", source, mask, target[:, : worst + 1], worst)]
        yield Findings(comparisons=given, failing=failing)
        states = [side.select(each, swapped) for side, each in zip(sides, states, strict=True)]
        state = model.select(state, swapped)
        source, mask, target = source[swapped], mask[swapped], target[swapped]


def independence(
    subject: Subject[Any],
    rows: Sequence[Sequence[int]],
    sides: Sequence[Padding],
    tolerance: Tolerance,
) -> list[Check]:
    """Returns checks of rows of text in padded batches beside the same rows alone.

    `batched` gives the limit, from torch's worst error on cases of random tokens.
    """
    return [
        Check(f"batches padded {side}", partial(_padded, subject, rows, side, tolerance))
        for side in (sides if rows else ())
    ]


def _padded(
    subject: Subject[Any],
    rows: Sequence[Sequence[int]],
    side: Padding,
    tolerance: Tolerance,
    so_far: Findings,
) -> Iterator[Findings]:
    compared = [item for item in so_far.comparisons if INDEPENDENCE not in item.case]
    own = [item.reference_error for item in compared if item.stage != "text"]
    worst: dict[str, tuple[float, int]] = {}
    for first in range(0, len(rows), BATCH):
        batch = rows[first : first + BATCH]
        try:
            together = subject.model.read(batch, side)
            alone = [subject.model.read([row], side)[0] for row in batch]
        except InputError as error:
            shown = f"rows {first} to {first + len(batch) - 1}, batches padded {side}"
            yield Findings(comparisons=[failed(shown, "text", error)])
            continue
        for number, (one, other) in enumerate(zip(alone, together, strict=True)):
            for name, wanted in one.items():
                units = Units.of(wanted, logits=name == "logits")
                distance = units.largest_error(other[name])
                if not distance <= worst.get(name, (-1.0, 0))[0]:
                    worst[name] = (distance, first + number)
    largest, found = max(own, default=0.0), []
    for name, (distance, row) in worst.items():
        furthest = max((item.error for item in compared if item.tensor == name), default=0.0)
        shown = f"row {row}{INDEPENDENCE}batches padded {side}"
        budget = batched(tolerance, largest, furthest)
        found.append(limited(shown, name, "text", distance, largest, budget))
    yield Findings(comparisons=found)


def batched(tolerance: Tolerance, own: float, error: float) -> float:
    """Returns how far a row in a batch may be from the row alone: as far as float32 allows.

    Graphs of a coarser precision round a row otherwise in a batch, and dynamic int8 by the batch's
    scale: twice their own error is the limit, which two runs within that error of torch cannot
    exceed.
    """
    return max(Tolerance().budget(own), min(2 * error, tolerance.budget(own)))


def declared(graphs: Sequence[ForeignGraph]) -> Claim:
    """Returns the outputs whose declared type or shape differs from the observed one."""
    found = [
        f"{graph.graph.path.name}: {name} {problem}"
        for graph in graphs
        for name, problem in graph.lies.items()
    ]
    return Claim(DECLARED, "; ".join(found))
