"""Tolerance and comparison of two computations of one model, tensor by tensor.

Errors are measured against a float64 oracle, each entry in a unit of its own: a difference of 0.01
is large for logits of 3 and small for logits of 300, and one entry of 1e4 says nothing of the
others. The limit is a multiple of the error that torch itself makes in float32 at that position.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from transferry.runtime.decoding.decoder import ObservableDecoder, ObservableEncoder, State, Tensors
from transferry.runtime.precision import EPSILON, FLOAT32, Precision
from transferry.runtime.proof.units import INT8_STEP, LEAST, Units, by_position, quantile

# Of so many positions where a value crossed the border of two integers, one more may have crossed
# unforeseen: where an error grows before it is rounded.
FORESEEN = 4

# Least errors up to which a tensor is near torch's; 7 would do but for units from float32.
NEAR = 6.0

ErrorT = TypeVar("ErrorT", float, NDArray[np.float64])
# "encoder" is `start`, or an encoder-only model; the steps are a decoder's; "text" is all of these
# on real text and the answers to it.
HEAD = "head"
OUTPUTS = ("logits", "hidden", HEAD)
STAGES = ("encoder", "first step", "later step", "text")


@dataclass(frozen=True)
class Tolerance:
    """The largest error that passes.

    Attributes:
        factor: Limit as a multiple of torch's own float32 error; docs/parity.md has the measurement
            behind the default.
        floor: Lower bound of torch's error, in units: at one position torch may happen to round
            nothing at all. 2 ** -23 is float32's epsilon.
        most: The largest budget that proves anything; where that of most positions exceeds it, the
            comparison fails.
        crossed: The largest budget of a few values that crossed the border of two integers. Where
            torch's own error is larger than half of that, so many crossed it that any two
            computations are about as far from the oracle: twice torch's error is the budget.
    """

    factor: float = 8.0
    floor: float = EPSILON
    most: float = FLOAT32.most
    crossed: float = math.inf

    @classmethod
    def of(cls, precision: str) -> Self:
        """Returns the default of a precision: the factor is proportional to its epsilon.

        Raises InputError for an unknown precision.
        """
        row = Precision.of(precision)
        crossed = 16 * INT8_STEP if row.integers else math.inf
        return cls(cls.factor * row.epsilon / EPSILON, most=row.most, crossed=crossed)

    def budget(self, reference_error: ErrorT) -> ErrorT:
        """Returns the largest error allowed where torch's own is `reference_error`."""
        budget = self.factor * np.maximum(reference_error, self.floor)
        limit: ErrorT = np.minimum(budget, np.maximum(2 * reference_error, self.crossed))
        return limit


@dataclass(frozen=True)
class Case:
    """Input of one comparison; the target is fed in two calls, cut at `past`.

    Attributes:
        name: Names the sizes, for the report.
        source: `[batch, source]` int64, the argument of `Decoder.start`; without an encoder it
            precedes the past in the cache.
        mask: `[batch, source]` bool, True at tokens.
        target: `[batch, past + new]` int64, beginning with the start token; empty for a model
            without a decoder.
        past: Length of the cache at the compared step; 0 makes it the first step.
        rows: `[rows]` int64, the rows of the batch that the compared step runs on, in this order,
            as a search drops, repeats and reorders them; None for all of them, unchanged.
        stage: One of `STAGES`, for all tensors but those of `start`; by default what `past` says.
        measured: Whether torch's own error is measured however near torch the model is.
    """

    name: str
    source: NDArray[np.int64]
    mask: NDArray[np.bool_]
    target: NDArray[np.int64]
    past: int
    rows: NDArray[np.int64] | None = None
    stage: str = ""
    measured: bool = False

    def __post_init__(self) -> None:
        if not self.stage:
            step = "later step" if self.past else "first step"
            object.__setattr__(self, "stage", step if self.target.size else "encoder")

    @property
    def kept(self) -> NDArray[np.int64]:
        """Rows of the compared step `[rows]`."""
        return np.arange(len(self.source)) if self.rows is None else self.rows


@dataclass(frozen=True)
class Truth:
    """Expected tensors of a case.

    Attributes:
        errors: torch's error in float32 for each of them, by position `[positions]`; see `truth`.
        least: Lower bound of the unit of a head's error; see `truth`.
    """

    oracle: Tensors
    errors: dict[str, NDArray[np.float64]]
    least: float = 0.0
    # Measured at the first comparison; `replace` drops them.
    _units: dict[str, Units] = field(default_factory=dict, init=False, repr=False, compare=False)

    def units(self, case: Case) -> Mapping[str, Units]:
        """Returns the units of each tensor, see `units_of`; of one case alone."""
        if not self._units:
            self._units.update(units_of(case, self.oracle, self.least))
        return self._units

    def worst(self, name: str) -> float:
        """Returns torch's largest error of a tensor, in units; 0 without the tensor."""
        return float(self.errors.get(name, np.zeros(0)).max(initial=0.0))


@dataclass(frozen=True)
class Comparison:
    """Result of comparing one tensor of one case.

    Attributes:
        stage: The computation that gives the tensor, one of `STAGES`.
        error: Distance from the oracle, in units, of the entry that is worst beside its budget.
        reference_error: torch's error in float32 at that position; see `truth`.
        fault: Empty if it passed, else a description of the fault.
    """

    case: str
    tensor: str
    stage: str
    error: float
    reference_error: float
    budget: float
    fault: str = ""
    past: int = 0


def limited(
    case: str, tensor: str, stage: str, error: float, reference_error: float, budget: float
) -> Comparison:
    """Returns the comparison of an error with its budget; NaN exceeds any."""
    fault = "" if error <= budget else f"error {error:.2e} exceeds the budget {budget:.2e}"
    return Comparison(case, tensor, stage, error, reference_error, budget, fault)


def observe(model: ObservableDecoder[State] | ObservableEncoder, case: Case) -> Tensors:
    """Runs a case: encoder, the past in one step, and the compared step."""
    if isinstance(model, ObservableEncoder):
        return model.encode(case.source, case.mask)
    decoder = model
    state = decoder.start(case.source, case.mask)
    if case.past:
        _, state = decoder.step(case.target[:, : case.past], state)
    cross: Tensors = {}
    if case.rows is not None:
        # Before the selection, so that a wrong choice of rows is not blamed on the encoder.
        tensors = decoder.tensors(state)
        cross = {name: value for name, value in tensors.items() if _from_encoder(name)}
        state = decoder.select(state, case.rows)
    output, state = decoder.step(case.target[case.kept, case.past :], state)
    # A copy: the next step may overwrite the buffer.
    return {"logits": output.all_logits.copy(), **decoder.tensors(state), **cross}


def units_of(case: Case, oracle: Tensors, head: float = 0.0) -> dict[str, Units]:
    """Returns the units of each tensor of the oracle.

    Where sums cancel to nearly zero, rounding is large beside the result, and its ratio to the
    result says nothing. So a tensor of the cache is measured in units of no less than 2 ** -10 of
    the largest typical one of its kind (the keys of all layers, or the values), and 2 ** -20 of the
    cache. Logits and hidden states have units of their own, a head at least that of its `Truth`.
    """
    units = {
        name: Units.of(
            tensor,
            _kept(case, name, tensor),
            logits=name == "logits",
            least=head if name == HEAD else 0.0,
        )
        for name, tensor in oracle.items()
    }
    sizes = {name: each.typical for name, each in units.items() if _kind(name) not in OUTPUTS}
    whole, kinds = max(sizes.values(), default=0.0), dict[str, float]()
    for name, size in sizes.items():
        kinds[_kind(name)] = max(size, kinds.get(_kind(name), 0.0))
    for name in sizes:
        least = max(kinds[_kind(name)] * 2.0**-10, whole * 2.0**-20)
        units[name] = replace(units[name], least=least)
    return units


def truth(
    case: Case,
    oracle: Tensors,
    *references: Tensors,
    least: float = 0.0,
    borders: bool = False,
) -> Truth:
    """Returns the expected tensors of a case, given those of the oracle and of torch in float32.

    torch's error at a position is the largest over all references; see `Units.own`. With `borders`
    these show how far a value at the border of two integers moves the rest.

    The scores of a head are few and may cancel to nearly zero too; `least` is a lower bound of the
    unit of their error (`export.torch_model.moved_heads`).
    """
    found = Truth(oracle, {}, least)
    for name, units in found.units(case).items():
        given = (each[name] for each in references)
        found.errors[name] = units.own(*given, borders=borders)
    return found


def nearby(case: Case, reference: Tensors) -> Truth:
    """Returns torch's tensors in float32 as expected ones, with the least error that it can have.

    An entry within `NEAR` times that error passes beside the oracle too: torch's own error is an
    eighth of the budget at most, and no budget is less than 8 times the least error.
    """
    found = Truth(reference, {})
    for name, units in found.units(case).items():
        found.errors[name] = np.full(len(units.exact), LEAST)
    return found


def are_near(items: Sequence[Comparison]) -> bool:
    """Whether the errors beside `nearby` show that all pass beside the oracle too."""
    return all(item.error * Tolerance.factor <= NEAR * item.budget for item in items)


def _kind(name: str) -> str:
    """Returns the kind of a tensor: its name without the number of the layer."""
    parts = name.split(".")
    return f"{parts[0]}.{parts[-1]}" if len(parts) > 1 else name


def _from_encoder(name: str) -> bool:
    return name.startswith("cross")


def meaningful(case: Case, name: str, tensor: NDArray[Any]) -> NDArray[np.bool_]:
    """Returns a mask of the entries to compare: all but those that the encoder gives at padding."""
    if not case.target.size:
        if tensor.ndim == 2:  # of the text as a whole
            return np.ones(tensor.shape, np.bool_)
        return np.broadcast_to(case.mask[:, :, None], tensor.shape)
    if name == "logits" or name.endswith(".cell"):
        return np.ones(tensor.shape, np.bool_)
    places = case.mask
    if not _from_encoder(name):
        # Without an encoder the cache begins with the source.
        source = case.mask[case.kept, : tensor.shape[-2] - case.target.shape[1]]
        places = np.pad(source, ((0, 0), (0, case.target.shape[1])), constant_values=True)
    return np.broadcast_to(places[:, None, :, None], tensor.shape)


def _kept(case: Case, name: str, tensor: NDArray[Any]) -> NDArray[np.bool_]:
    there = meaningful(case, name, tensor)[..., 0]
    return (there[:, 0] if there.ndim == 3 else there).ravel()


def compare(
    case: Case,
    expected: Truth,
    found: Tensors,
    tolerance: Tolerance,
    only: Collection[str] | None = None,
) -> list[Comparison]:
    """Compares every tensor of a case with its expected one, or those named in `only`.

    A missing, extra, misshapen or NaN tensor is a fault.
    """
    comparisons, units = [], expected.units(case)
    for name in [*expected.oracle, *(found.keys() - expected.oracle.keys())]:
        if only is not None and name not in only:
            continue
        own = expected.errors.get(name, np.zeros(0))
        judged = (np.inf, expected.worst(name), tolerance.budget(expected.worst(name)))
        if name not in expected.oracle:
            fault = "torch gives no such tensor"
        elif name not in found:
            fault = "expected, but the graph does not give it"
        elif (shape := found[name].shape) != (wanted := expected.oracle[name].shape):
            fault = f"expected shape {list(wanted)}, found {list(shape)}"
        else:
            judged = judge(units[name], found[name], own, tolerance)
            given = by_position(found[name], units[name].kept)
            fault = _fault(given, own, judged, tolerance)
        encoder = _from_encoder(name) and case.stage != "text"
        stage = "encoder" if encoder else case.stage
        comparisons.append(Comparison(case.name, name, stage, *judged, fault, case.past))
    return comparisons


def judge(
    units: Units, found: NDArray[Any], own: NDArray[np.float64], tolerance: Tolerance
) -> tuple[float, float, float]:
    """Returns error, torch's error and budget of the entry that is worst beside its budget.

    `units` are of the oracle's tensor, `found` is the model's, and `own` is torch's error by
    position `[positions]`.
    """
    budgets = np.minimum(tolerance.budget(own), tolerance.most)
    errors = [np.zeros(0), *(each.max(axis=1) for each in units.errors(found))]
    error = np.concatenate(errors)
    if not error.size:
        return 0.0, 0.0, tolerance.budget(0.0)
    crossed = own >= INT8_STEP
    unforeseen = (error > budgets) & (error <= tolerance.crossed) & ~crossed
    if unforeseen.sum() <= -(-crossed.sum() // FORESEEN) and tolerance.crossed < math.inf:
        budgets[unforeseen] = tolerance.crossed
    worst = int((error / np.maximum(budgets, np.finfo(np.float64).tiny)).argmax())
    return float(error[worst]), float(own[worst]), float(budgets[worst])


def _fault(
    found: NDArray[Any],
    own: NDArray[np.float64],
    judged: tuple[float, float, float],
    tolerance: Tolerance,
) -> str:
    """Describes the fault of a tensor of the right shape; empty if it passes."""
    error, reference_error, budget = judged
    if not np.isfinite(found).all():
        return "holds NaN or infinity"
    if not np.isfinite(own).all():
        return "torch's own answer holds NaN or infinity, so it proves nothing"
    doubtful = float(quantile(own, 0.5)) if own.size else 0.0
    if tolerance.budget(doubtful) <= tolerance.most:
        if error <= budget:
            return ""
        # Within that many times torch's own error, only the largest budget is exceeded.
        if error > tolerance.budget(reference_error):
            return (
                f"error {error:.2e} of the entry's unit exceeds the budget {budget:.2e} "
                f"({tolerance.factor:g} x torch's own {reference_error:.2e})"
            )
        doubtful = reference_error
    return (
        f"torch's own error is {doubtful:.1e} of the unit of an entry: a budget of "
        f"{tolerance.budget(doubtful):.1e} proves nothing (at most {tolerance.most:.1e}); find "
        "out where the model's activations grow or cancel"
    )
