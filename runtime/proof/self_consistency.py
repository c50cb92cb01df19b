"""A model compared with itself, where torch has no counterpart or only a wide budget.

Searches read log-sum-exp, segment maxima, the likeliest tokens and approximate logits in place of
all logits, and sentences that leave move the cache. A fault there changes few answers, and would
escape a comparison of answers.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transferry.runtime.decoding.decoder import (
    ObservableDecoder,
    ObservableEncoder,
    State,
    StepOutput,
    Tensors,
)
from transferry.runtime.decoding.logits import SEGMENT, SegmentMaxima, log_sum_exp
from transferry.runtime.ort.fused_decoder import SlotDecoder
from transferry.runtime.ort.lm_head import LMHead
from transferry.runtime.proof.compare import Case, Comparison, Tolerance, Truth, limited, observe
from transferry.runtime.proof.units import logit_units

TOP = 4
SHORT = 8  # tokens of a short row: 64 of them are computed at once on a CPU

Floats = NDArray[np.floating[Any]]
Found = tuple[str, float]  # name and error of a comparison


def observed(
    model: ObservableDecoder[State] | ObservableEncoder, case: Case
) -> tuple[Tensors, list[Comparison]]:
    """Runs a case as `observe`, and compares the model with itself on the way.

    The LM head's other outputs are compared with its logits, and selected rows with the rows
    before. Errors are in `logit_units` or the logit's own size and limited by rounding in float32;
    those of approximate logits in units that make their bound the limit. Rows of a cache are equal
    bit for bit.

    Returns:
        The tensors; and the comparisons, the LM head's of a fused variant at a first step, the
        cache's at a later one.
    """
    if isinstance(model, ObservableEncoder):
        return observe(model, case), []
    watched: Any = _Watched(model, case)
    rounding = Tolerance().budget(0.0)
    tensors, found = observe(watched, case), list[Found]()
    if not case.past and isinstance(model, SlotDecoder):
        # Selecting rows moves them in the first state too.
        state = watched.first if case.rows is None else model.start(case.source, case.mask)
        found += _lm_head(model, model.lm_head, state, case, rounding)
    if case.past and case.rows is not None:
        found.append(("selected rows", 0.0 if watched.only_move() else np.inf))
    own = [limited(case.name, name, case.stage, error, 0.0, rounding) for name, error in found]
    return tensors, own


class _Watched:
    """A decoder whose entries may only move where rows of a later step are selected.

    Attributes:
        first: The state of the source.
    """

    def __init__(self, model: ObservableDecoder[Any], case: Case) -> None:
        self._model, self._case, self._same = model, case, True
        self._rows = np.arange(len(case.source))

    def start(self, source: NDArray[np.int64], mask: NDArray[np.bool_]) -> Any:
        self.first = self._model.start(source, mask)
        return self.first

    def step(self, tokens: NDArray[np.int64], state: Any) -> tuple[StepOutput, Any]:
        output, self._last = self._model.step(tokens, state)
        return output, self._last

    def tensors(self, state: Any) -> Tensors:
        self._found = self._model.tensors(state)
        return self._found

    def select(self, state: Any, rows: NDArray[np.int64]) -> Any:
        """Selects rows of the state whose tensors were read last."""
        state, self._rows = self._model.select(state, rows), self._rows[rows]
        if self._case.past:
            before, masks = self._found, self._case.mask[self._rows]
            for name, found in self.tensors(state).items():
                wanted = before[name][rows, :, : found.shape[2]]
                mask = np.ones(wanted.shape, np.bool_)
                if name.startswith("cross"):
                    mask &= masks[:, None, : found.shape[2], None]
                self._same &= bool((found == wanted).all(where=mask))
        return state

    def only_move(self) -> bool:
        """Whether entries only moved, also where each row is taken twice and sentences leave."""
        twice = np.repeat(np.arange(len(self._rows)), 2)
        self.select(self.select(self._last, twice), np.r_[0, 1, len(twice) - 2, len(twice) - 1])
        return self._same


def batches_of_rows(
    model: ObservableEncoder,
    cases: Sequence[tuple[Case, Truth]],
    rows: int,
    tolerance: Tolerance,
) -> list[Comparison]:
    """Compares the rows of recorded cases in full batches with the same rows in their own cases.

    They are repeated to as many as are served at once: all of them, and the short ones, with which
    a batch has the most rows. Either side may be off by the tolerance, in units of the row's
    largest entry.
    """
    alone: list[tuple[Truth, NDArray[np.int64], Mapping[str, Floats]]] = []
    for case, truth in cases:
        found = model.encode(case.source, case.mask)
        for place, mask in enumerate(case.mask):
            tensors = {name: _row(each, place, int(mask.sum())) for name, each in found.items()}
            alone.append((truth, case.source[place][mask], tensors))
    short = [row for row in alone if len(row[1]) <= SHORT]
    return [
        each
        for name, chosen in (("recorded rows", alone), ("short recorded rows", short))
        for each in _batch(model, f"{name}, batch of {rows}", chosen, rows, tolerance)
    ]


def _row(tensor: Floats, place: int, length: int) -> Floats:
    return tensor[place, :length] if tensor.ndim > 2 else tensor[place]


def _batch(
    model: ObservableEncoder,
    name: str,
    alone: Sequence[tuple[Truth, NDArray[np.int64], Mapping[str, Floats]]],
    rows: int,
    tolerance: Tolerance,
) -> Iterator[Comparison]:
    batch = list(islice(cycle(alone), rows if alone else 0))
    if not batch:
        return
    mask = np.arange(max(len(ids) for _, ids, _ in batch)) < [[len(ids)] for _, ids, _ in batch]
    source = np.zeros(mask.shape, np.int64)
    source[mask] = np.concatenate([ids for _, ids, _ in batch])
    found = model.encode(source, mask)
    for role, values in found.items():
        worst = 0.0
        for place, (truth, ids, tensors) in enumerate(batch):
            wanted, given = tensors[role], _row(values, place, len(ids))
            unit = max(float(np.abs(wanted).max(initial=0.0)), truth.least) or 1.0
            worst = float(np.maximum(worst, np.abs(given - wanted).max(initial=0.0) / unit))
        own = float(max(truth.worst(role) for truth, _, _ in batch))
        yield limited(name, role, "encoder", worst, own, 2 * tolerance.budget(own))


def _lm_head(
    model: ObservableDecoder[Any], lm_head: LMHead, state: Any, case: Case, rounding: float
) -> Iterator[Found]:
    tokens = case.target[:, :1]
    single = model.step(tokens, state)[0].all_logits[:, 0].copy()  # its buffer is used again
    logits = single.astype(np.float64)
    units = logit_units(logits)

    def error(found: Floats, wanted: Floats) -> float:
        """Returns the largest error of numbers `[rows, ...]`."""
        sizes = units.reshape(-1, *[1] * (wanted.ndim - 1))
        return float((np.abs(found - wanted) / np.maximum(sizes, np.abs(wanted))).max(initial=0.0))

    for top in (TOP, None):  # a decoder that ranks has sums beside all logits too
        output, _ = model.step(tokens, state, top=top, normalise=True)
        if output.log_sum_exp is not None:
            yield "log_sum_exp", error(output.log_sum_exp, log_sum_exp(logits))
        if output.maxima is not None:
            wanted = SegmentMaxima.of(logits, SEGMENT).maxima
            yield "segment_maxima", error(output.maxima.maxima, wanted)
        if (best := output.top_k) is None:
            break
        if best.logits is not None and best.log_sum_exp is not None:
            yield "top_logits", error(best.logits, -np.sort(-logits)[:, :TOP])
            if ((best.tokens < 0) | (best.tokens >= logits.shape[1])).any():
                yield "top_tokens", math.inf
            else:
                found = np.take_along_axis(logits, best.tokens, axis=1)
                yield "top_tokens", error(best.logits, found)
            yield "log_sum_exp", error(best.log_sum_exp, log_sum_exp(logits))
    if lm_head.screened is not None:
        hidden, approximate, maxima = lm_head.approximate(len(tokens))
        bound = lm_head.screened.bound(hidden)
        share = float((np.abs(approximate - logits) / bound).max())
        yield "approximate_logits", share * rounding
        exact = SegmentMaxima.of(approximate, SEGMENT).maxima
        yield "approximate_maxima", error(maxima.maxima, exact)
