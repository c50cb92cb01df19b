"""Tolerance and comparison of two computations of one model, tensor by tensor.

Errors are measured against a float64 oracle, in units of the oracle's largest entry: a difference
of 0.01 is large for logits of 3 and small for logits of 300. The limit is a multiple of the error
that torch itself makes in float32 on the same input.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transferry.runtime.decoding.decoder import ObservableDecoder, ObservableEncoder, State, Tensors
from transferry.runtime.decoding.logits import log_sum_exp
from transferry.runtime.precision import EPSILON, FLOAT32, Precision

INT8_STEP = 2.0**-8  # half of one of a scale's 127 steps, which inputs are rounded to
# Rank of a logit near the best, and how many times its distance a unit has at most; `logit_units`.
NEAR, NEAR_TIMES = 16, 4.0
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
        floor: Lower bound of torch's error, relative to the oracle's largest entry: on a small
            tensor torch may happen to round nothing at all. 2 ** -23 is float32's epsilon.
        most: The largest budget that proves anything; where it exceeds that, the comparison fails.
        crossed: The largest budget of a few values that crossed the border of two integers. Where
            torch's own error is larger than half of that, so many crossed it that any two
            computations are about as far from the oracle: twice torch's error is the budget.
    """

    factor: float = 8.0
    floor: float = EPSILON
    most: float = FLOAT32.most
    crossed: float = math.inf

    @classmethod
    def of(cls, precision: str) -> Tolerance:
        """Returns the default of a precision: the factor grows in proportion to the epsilon.

        Raises:
            InputError: The precision is unknown.
        """
        row = Precision.of(precision)
        crossed = 16 * INT8_STEP if row.integers else math.inf
        return cls(cls.factor * row.epsilon / EPSILON, most=row.most, crossed=crossed)

    def budget(self, reference_error: float) -> float:
        """Returns the largest error allowed where torch's own is `reference_error`."""
        budget = self.factor * max(reference_error, self.floor)
        return min(budget, max(2 * reference_error, self.crossed))


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
    """

    name: str
    source: NDArray[np.int64]
    mask: NDArray[np.bool_]
    target: NDArray[np.int64]
    past: int
    rows: NDArray[np.int64] | None = None
    stage: str = ""

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
        oracle: Tensors of the float64 oracle.
        errors: torch's relative error in float32 for each of them; see `truth`.
        least: Lower bound of the unit of a head's error; see `truth`.
    """

    oracle: Tensors
    errors: Mapping[str, float]
    least: float = 0.0


@dataclass(frozen=True)
class Comparison:
    """Result of comparing one tensor of one case.

    Attributes:
        case: Name of the case.
        tensor: "logits", or the name of a tensor of the cache.
        stage: The computation that gives the tensor, one of `STAGES`.
        error: Largest distance from the oracle, over the oracle's largest entry.
        reference_error: torch's error in float32; see `truth`.
        budget: The largest error that passes.
        fault: Empty if it passed, else a description of the fault.
        past: Length of the cache at the compared step, `Case.past`.
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


def relative_error(
    found: NDArray[Any], oracle: NDArray[Any], mask: NDArray[np.bool_], least: float = 0.0
) -> float:
    """Returns the largest |found - oracle| over the largest |oracle|, both where mask is True.

    It is given in units of `least` where the largest |oracle| is less.
    """
    distance, largest = (_largest(x, mask) for x in (found - oracle, oracle))
    unit = max(largest, least)
    return distance / unit if unit else distance


def logit_units(logits: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    """Returns the unit of the errors of logits by position, in nats.

    It is the distance from the best logit to the median, at most 4 times that to the 16th best: one
    bias of -1e4, or one on most of the vocabulary, does not change it. 1 where all logits are
    equal.

    Args:
        logits: `[..., vocabulary]`.

    Returns:
        `[...]`
    """
    vocabulary = logits.shape[-1]
    middle = (vocabulary - 1) // 2
    near = max(vocabulary - 1 - NEAR, middle)
    best, close, median = (
        np.partition(logits, (middle, near, vocabulary - 1), axis=-1)[..., place]
        for place in (-1, near, middle)
    )
    units: NDArray[np.float64] = np.minimum(best - median, NEAR_TIMES * (best - close))
    return np.where(units > 0, units, 1.0).astype(np.float64)


def logit_errors(
    found: NDArray[np.floating[Any]], oracle: NDArray[np.floating[Any]]
) -> NDArray[np.float64]:
    """Returns the largest error of a log-probability by position, in `logit_units`.

    A token far below the best is measured in units of its own distance from it, which rounding of
    its logit grows with.

    Args:
        found: Logits `[positions, vocabulary]`.
        oracle: Those of the oracle, likewise.

    Returns:
        `[positions]`
    """
    exact = oracle.astype(np.float64)
    moved = found - log_sum_exp(found)[:, None] - (exact - log_sum_exp(exact)[:, None])
    scale = np.maximum(logit_units(exact)[:, None], exact.max(axis=-1, keepdims=True) - exact)
    errors: NDArray[np.float64] = (np.abs(moved) / scale).max(axis=-1)
    return errors


def value_error(
    found: NDArray[Any], oracle: NDArray[Any], mask: NDArray[np.bool_] | None = None
) -> float:
    """Returns the error of a value: `relative_error` where both are finite.

    Equal infinities, as in masks, count as equal, and so do two NaN. Another shape, or infinity on
    one side only, is an infinite error, and so is any difference of integers or booleans.
    """
    if found.shape != oracle.shape:
        return np.inf
    mask = np.ones(oracle.shape, np.bool_) if mask is None else mask
    if oracle.dtype.kind != "f":
        return 0.0 if (found == oracle).all(where=mask) else np.inf
    finite = np.isfinite(found) & np.isfinite(oracle)
    same = (found == oracle) | (np.isnan(found) & np.isnan(oracle))
    if not (finite | same).all(where=mask):
        return np.inf
    zero = np.zeros((), np.float64)
    return relative_error(
        np.where(finite, found, zero), np.where(finite, oracle, zero), finite & mask
    )


def _largest(tensor: NDArray[Any], mask: NDArray[np.bool_]) -> float:
    if mask.all():  # the selection costs more than the rest
        return float(np.abs(tensor).max(initial=0.0))
    return float(np.abs(tensor).max(initial=0.0, where=mask))


def least_units(case: Case, oracle: Tensors, head: float = 0.0) -> dict[str, float]:
    """Returns a lower bound of the unit of each tensor's error.

    Where sums cancel to nearly zero, rounding is large beside the result, and its ratio to the
    result says nothing. So a tensor of the cache is measured in units of no less than 2 ** -10 of
    the largest entry of its kind (the keys of all layers, or the values), and 2 ** -20 of the
    largest of the cache. Logits and hidden states have units of their own, a head that of its
    `Truth`.
    """
    sizes = {
        name: _largest(tensor, meaningful(case, name, tensor))
        for name, tensor in oracle.items()
        if _kind(name) not in OUTPUTS
    }
    whole = max(sizes.values(), default=0.0)
    kinds: dict[str, float] = {}
    for name, size in sizes.items():
        kinds[_kind(name)] = max(size, kinds.get(_kind(name), 0.0))
    least = {name: max(kinds[_kind(name)] * 2.0**-10, whole * 2.0**-20) for name in sizes}
    return {**least, HEAD: head}


def truth(case: Case, oracle: Tensors, *references: Tensors, least: float = 0.0) -> Truth:
    """Returns the expected tensors of a case, given those of the oracle and of torch in float32.

    torch's error is the largest over all references, and over all tensors of one kind, such as the
    keys of all layers: a single small tensor, of one row and one position, has too few entries to
    estimate the rounding error.

    The scores of a head are few and may cancel to nearly zero too; `least` is a lower bound of the
    unit of their error (`export.torch_model.moved_heads`).
    """
    units = least_units(case, oracle, least)
    pooled: dict[str, float] = {}
    for name, tensor in oracle.items():
        mask, kind = meaningful(case, name, tensor), _kind(name)
        for reference in references:
            error = relative_error(reference[name], tensor, mask, units.get(name, 0.0))
            # Unlike max(), this keeps NaN.
            pooled[kind] = float(np.maximum(error, pooled.get(kind, 0.0)))
    return Truth(oracle, {name: pooled[_kind(name)] for name in oracle}, least)


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


def compare(
    case: Case,
    expected: Truth,
    found: Tensors,
    tolerance: Tolerance,
    only: Collection[str] | None = None,
) -> list[Comparison]:
    """Compares every tensor of a case, or only some.

    A missing, extra, misshapen or NaN tensor is a fault.

    Args:
        case: The input.
        expected: Its expected tensors.
        found: Its tensors from the model.
        tolerance: Limit of errors.
        only: Names of the tensors to compare.
    """
    comparisons, least = [], least_units(case, expected.oracle, expected.least)
    for name in [*expected.oracle, *(found.keys() - expected.oracle.keys())]:
        if only is not None and name not in only:
            continue
        error, reference_error = np.inf, expected.errors.get(name, 0.0)
        budget, fault = tolerance.budget(reference_error), ""
        if name not in expected.oracle:
            fault = "torch gives no such tensor"
        elif name not in found:
            fault = "expected, but the graph does not give it"
        elif (shape := found[name].shape) != (wanted := expected.oracle[name].shape):
            fault = f"expected shape {list(wanted)}, found {list(shape)}"
        else:
            oracle = expected.oracle[name]
            mask = meaningful(case, name, oracle)
            error = relative_error(found[name], oracle, mask, least.get(name, 0.0))
            if not np.isfinite(found[name]).all(where=mask):
                fault = "holds NaN or infinity"
            elif not np.isfinite(budget):
                fault = "torch's own answer holds NaN or infinity, so it proves nothing"
            elif budget > tolerance.most:
                fault = (
                    f"torch's own error is {reference_error:.1e} of the largest entry: a budget of "
                    f"{budget:.1e} proves nothing (at most {tolerance.most:.1e}); find out where "
                    "the model's activations grow or cancel"
                )
            elif not error <= budget:
                fault = (
                    f"error {error:.2e} of the largest entry exceeds the budget {budget:.2e} "
                    f"({tolerance.factor:g} x torch's own {reference_error:.2e})"
                )
        encoder = _from_encoder(name) and case.stage != "text"
        stage = "encoder" if encoder else case.stage
        comparisons.append(
            Comparison(case.name, name, stage, error, reference_error, budget, fault, case.past)
        )
    return comparisons
