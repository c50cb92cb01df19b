"""A model compared with itself, where torch has no counterpart or only a wide budget.

Searches read log-sum-exp, segment maxima, the likeliest tokens and approximate logits in place of
all logits, and sentences that leave move the cache. A fault there changes few answers, and would
escape a comparison of answers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transferry.runtime.decoding.decoder import ObservableDecoder, ObservableEncoder, State
from transferry.runtime.decoding.logits import SEGMENT, SegmentMaxima, log_sum_exp
from transferry.runtime.ort.fused_decoder import SlotDecoder
from transferry.runtime.ort.lm_head import LMHead
from transferry.runtime.proof.compare import Case, Comparison, Tolerance, Truth, limited
from transferry.runtime.proof.units import logit_units

TOP = 4
SHORT = 8  # tokens of a short row: 64 of them are computed at once on a CPU

Floats = NDArray[np.floating[Any]]
Found = tuple[str, float]  # name and error of a comparison


def self_consistency(
    model: ObservableDecoder[State] | ObservableEncoder, case: Case
) -> list[Comparison]:
    """Compares the LM head's other outputs with its logits, and selected rows with the rows before.

    Errors are in `logit_units` or the logit's own size and limited by rounding in float32; those of
    approximate logits in units that make their bound the limit. Rows of a cache are equal bit for
    bit.

    Returns:
        The LM head's of a fused variant at a first step, the cache's at a later one.
    """
    if isinstance(model, ObservableEncoder):
        return []
    rounding = Tolerance().budget(0.0)
    found: list[Found] = []
    if not case.past and isinstance(model, SlotDecoder):
        found += _lm_head(model, model.lm_head, case, rounding)
    if case.past and case.rows is not None:
        found.append(("selected rows", 0.0 if _selects(model, case) else np.inf))
    return [limited(case.name, name, case.stage, error, 0.0, rounding) for name, error in found]


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
    model: ObservableDecoder[State], lm_head: LMHead, case: Case, rounding: float
) -> Iterator[Found]:
    state, tokens = model.start(case.source, case.mask), case.target[:, :1]
    single = model.step(tokens, state)[0].all_logits[:, 0].copy()  # its buffer is used again
    logits = single.astype(np.float64)
    units = logit_units(logits)

    def error(found: Floats, wanted: Floats) -> float:
        """Returns the largest error of numbers `[rows, ...]`."""
        sizes = units.reshape(-1, *[1] * (wanted.ndim - 1))
        return float((np.abs(found - wanted) / np.maximum(sizes, np.abs(wanted))).max(initial=0.0))

    output, _ = model.step(tokens, state, top=TOP, normalise=True)
    if output.log_sum_exp is not None:
        yield "log_sum_exp", error(output.log_sum_exp, log_sum_exp(logits))
    if output.maxima is not None:
        wanted = SegmentMaxima.of(logits, SEGMENT).maxima
        yield "segment_maxima", error(output.maxima.maxima, wanted)
    if (top := output.top_k) is not None and top.logits is not None and top.log_sum_exp is not None:
        yield "top_logits", error(top.logits, -np.sort(-logits)[:, :TOP])
        if ((top.tokens < 0) | (top.tokens >= logits.shape[1])).any():
            yield "top_tokens", math.inf
        else:
            yield "top_tokens", error(top.logits, np.take_along_axis(logits, top.tokens, axis=1))
        yield "log_sum_exp", error(top.log_sum_exp, log_sum_exp(logits))
    if (screen := lm_head.screen(len(tokens))) is not None:
        hidden, approximate, maxima = screen
        assert lm_head.screened is not None
        bound = lm_head.screened.bound(hidden)
        share = float((np.abs(approximate - logits) / bound).max())
        yield "approximate_logits", share * rounding
        exact = SegmentMaxima.of(approximate, SEGMENT).maxima
        yield "approximate_maxima", error(maxima.maxima, exact)


def _selects(model: ObservableDecoder[State], case: Case) -> bool:
    """Selects rows, takes each twice, and lets sentences leave: entries may only move."""
    _, state = model.step(case.target[:, : case.past], model.start(case.source, case.mask))
    before, rows, same = model.tensors(state), np.arange(len(case.source)), True
    twice = np.repeat(np.arange(len(case.kept)), 2)
    for chosen in (case.kept, twice, np.r_[0, 1, twice.size - 2, twice.size - 1]):
        state, rows = model.select(state, chosen), rows[chosen]
        for name, found in model.tensors(state).items():
            wanted = before[name][rows, :, : found.shape[2]]
            mask = np.ones(wanted.shape, np.bool_)
            if name.startswith("cross"):
                mask &= case.mask[rows, None, : found.shape[2], None]
            same &= bool((found == wanted).all(where=mask))
    return same
