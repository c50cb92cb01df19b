"""A model compared with itself, where torch has no counterpart or only a wide budget.

Searches read log-sum-exp, segment maxima, the likeliest tokens and approximate logits in place of
all logits, and sentences that leave move the cache. A fault there changes few answers, and would
escape a comparison of answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transferry.runtime.decoding.decoder import ObservableDecoder, ObservableEncoder, State
from transferry.runtime.decoding.logits import SEGMENT, SegmentMaxima, log_sum_exp
from transferry.runtime.ort.fused_decoder import SlotDecoder
from transferry.runtime.ort.lm_head import LMHead
from transferry.runtime.proof.compare import Case, Comparison, Tolerance, limited
from transferry.runtime.proof.units import logit_units

TOP = 4

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
        chosen = np.take_along_axis(logits, top.tokens, axis=1)
        yield "top_tokens", error(top.logits, chosen)
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
