"""How far two computations of one model may differ, and a report of how far they do.

A difference by itself says little: the logits of one model have entries of 3, of another of 300.
So an error is measured against a float64 oracle and divided by the oracle's largest entry, and it
is judged by the error that torch itself makes in float32 on the same input: whatever runs the
graph may be at most `factor` times as far from the truth as torch is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transferry.runtime.decoding.decoder import ObservableDecoder, ObservableEncoder, State, Tensors
from transferry.runtime.errors import InputError

# The distance of 1 to the next number; of int8 half of a scale's 127 steps.
EPSILONS = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7, "int8": 2.0**-8}
STAGES = ("encoder", "first step", "later step", "text")


@dataclass(frozen=True)
class Tolerance:
    """The largest error that passes.

    Attributes:
        factor: How many times torch's own float32 error is allowed; docs/parity.md has the
            measurement behind the default.
        floor: torch's error counts as at least this much, in units of the oracle's largest entry:
            on a small tensor torch may happen to round nothing at all. 2 ** -23 is float32's eps.
    """

    factor: float = 8.0
    floor: float = 2.0**-23

    @classmethod
    def of(cls, precision: str) -> Tolerance:
        """Returns the default of a variant's precision, in units of torch's float32 error.

        A type with fewer bits of mantissa is allowed as much more as its epsilon is larger.

        Raises:
            InputError: The precision is unknown.
        """
        if precision not in EPSILONS:
            raise InputError(
                f"expected a variant of precision {', '.join(EPSILONS)}, found {precision!r}; "
                "install the version of transferry that wrote the bundle"
            )
        return cls(cls.factor * EPSILONS[precision] / EPSILONS["float32"])

    def budget(self, reference_error: float) -> float:
        """Returns the largest error allowed where torch's own is `reference_error`."""
        return self.factor * max(reference_error, self.floor)


@dataclass(frozen=True)
class Case:
    """Input of one comparison; the target is fed in two calls, cut at `past`.

    An encoder alone has no target.

    Attributes:
        name: Tells the sizes.
        source: [batch, source] int64, what `Decoder.start` reads; where there is no encoder it lies
            in the cache before the past.
        mask: [batch, source] bool, True at a token.
        target: [batch, past + new] int64, beginning with the start token.
        past: Length of the cache when the compared step runs; 0 makes it the first step.
        rows: [rows] int64, the rows of the batch that the compared step runs on, in this order, as
            a search drops, repeats and reorders them; None for all as they are.
    """

    name: str
    source: NDArray[np.int64]
    mask: NDArray[np.bool_]
    target: NDArray[np.int64]
    past: int
    rows: NDArray[np.int64] | None = None

    @property
    def kept(self) -> NDArray[np.int64]:
        """The rows of the compared step [rows]."""
        return np.arange(len(self.source)) if self.rows is None else self.rows


@dataclass(frozen=True)
class Truth:
    """What a case must give.

    Attributes:
        oracle: Tensors of the float64 oracle.
        errors: By the same names, what torch's relative error in float32 counts as.
    """

    oracle: Tensors
    errors: Mapping[str, float]


@dataclass(frozen=True)
class Comparison:
    """One tensor of one case.

    Attributes:
        case: The case's name.
        tensor: "logits", or the name of a tensor of the cache.
        error: Largest distance from the oracle, over the oracle's largest entry.
        reference_error: What torch's error in float32 counts as here; see `truth`.
        budget: The largest error that passes.
        fault: Empty where it passed, else what is wrong.
    """

    case: str
    tensor: str
    error: float
    reference_error: float
    budget: float
    fault: str = ""

    @property
    def stage(self) -> str:
        """What gave the tensor: "encoder" is `start`, then "first step" and "later step".

        "text" is all of them, on real text and the answers to it.
        """
        encoder, first, later, text = STAGES
        if self.case.startswith(text):
            return text
        if _from_encoder(self.tensor) or "past" not in self.case:
            return encoder
        return first if self.case.endswith("past 0") else later


def observe(model: ObservableDecoder[State] | ObservableEncoder, case: Case) -> Tensors:
    """Runs a case: encoder, as many target tokens as make the past, and the compared step."""
    if isinstance(model, ObservableEncoder):
        return model.encode(case.source, case.mask)
    decoder = model
    state = decoder.start(case.source, case.mask)
    if case.past:
        _, state = decoder.step(case.target[:, : case.past], state)
    if case.rows is None:
        output, state = decoder.step(case.target[:, case.past :], state)
        return {"logits": output.all_logits, **decoder.tensors(state)}
    # As the encoder gave them, so that a wrong choice of rows is not laid at its door.
    cross = {name: value for name, value in decoder.tensors(state).items() if _from_encoder(name)}
    state = decoder.select(state, case.rows)
    output, state = decoder.step(case.target[case.rows, case.past :], state)
    return {"logits": output.all_logits, **decoder.tensors(state), **cross}


def relative_error(found: NDArray[Any], oracle: NDArray[Any], mask: NDArray[np.bool_]) -> float:
    """Largest |found - oracle| over the largest |oracle|, both where the mask is True."""
    if mask.all():  # the selection costs more than the rest
        distance, largest = (np.abs(x).max(initial=0.0) for x in (found - oracle, oracle))
    else:
        distance = np.abs(found - oracle).max(initial=0.0, where=mask)
        largest = np.abs(oracle).max(initial=0.0, where=mask)
    return float(distance / largest) if largest else float(distance)


def truth(case: Case, oracle: Tensors, reference: Tensors) -> Truth:
    """Returns what a case must give, from what the oracle and torch in float32 gave.

    torch's error counts as the largest of all tensors that one call gives: a single small tensor,
    of one row and one position, is too few numbers to tell how far rounding reaches.
    """
    errors = {
        name: relative_error(reference[name], tensor, meaningful(case, name, tensor))
        for name, tensor in oracle.items()
    }
    pooled = {
        encoder: max(e for name, e in errors.items() if _from_encoder(name) is encoder)
        for encoder in {_from_encoder(name) for name in errors}
    }
    return Truth(oracle, {name: pooled[_from_encoder(name)] for name in errors})


def _from_encoder(name: str) -> bool:
    return name.startswith("cross")


def meaningful(case: Case, name: str, tensor: NDArray[Any]) -> NDArray[np.bool_]:
    """Where a tensor means something: what the encoder makes of padding does not."""
    if not case.target.size:
        return np.broadcast_to(case.mask[:, :, None], tensor.shape)
    if name == "logits":
        return np.ones(tensor.shape, np.bool_)
    places = case.mask
    if not _from_encoder(name):
        # Without an encoder the cache begins with the source.
        source = case.mask[case.kept, : tensor.shape[-2] - case.target.shape[1]]
        places = np.pad(source, ((0, 0), (0, case.target.shape[1])), constant_values=True)
    return np.broadcast_to(places[:, None, :, None], tensor.shape)


def compare(case: Case, expected: Truth, found: Tensors, tolerance: Tolerance) -> list[Comparison]:
    """Judges every tensor of a case; missing, extra, misshapen and NaN are faults."""
    comparisons = []
    for name in [*expected.oracle, *(found.keys() - expected.oracle.keys())]:
        error, reference_error = np.inf, expected.errors.get(name, 0.0)
        budget = tolerance.budget(reference_error)
        if name not in expected.oracle:
            fault = "torch gives no such tensor"
        elif name not in found:
            fault = "expected, but the graph does not give it"
        elif (shape := found[name].shape) != (wanted := expected.oracle[name].shape):
            fault = f"expected shape {list(wanted)}, found {list(shape)}"
        else:
            oracle = expected.oracle[name]
            mask = meaningful(case, name, oracle)
            error = relative_error(found[name], oracle, mask)
            if not np.isfinite(found[name]).all(where=mask):
                fault = "holds NaN or infinity"
            elif not np.isfinite(budget):
                fault = "torch's own answer holds NaN or infinity, so it proves nothing"
            elif not error <= budget:
                fault = (
                    f"error {error:.2e} of the largest entry exceeds the budget {budget:.2e} "
                    f"({tolerance.factor:g} x torch's own {reference_error:.2e})"
                )
            else:
                fault = ""
        comparisons.append(Comparison(case.name, name, error, reference_error, budget, fault))
    return comparisons
