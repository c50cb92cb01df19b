"""Beam search: what ranks. Numpy over all sentences at once, Python only where an output ends."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transferry.runtime.hypothesis import FAILED, Hypothesis, length_normalised, ranked
from transferry.runtime.logits import Normaliser, Peaks
from transferry.runtime.options import GenerationOptions
from transferry.runtime.outputs import Choice, Normalise, Outputs, Request

# Segments of the vocabulary whose maxima a threshold is taken from, where numpy finds them: short
# ones cost it more, few leave more candidates above it.
SEGMENTS = 16


class Beams(Outputs):
    """Keeps the `beam` likeliest beginnings of each sentence, step by step.

    Of the `2 * beam` best candidates of a step, in the order of their log-probability and then of
    beam and token, those that end among the first `beam` are outputs; the first `beam` that do
    not end go on. There are always enough of those, since each beam has one way to end. This is
    CTranslate2's rule.

    A beam that does not exist (a sentence begins with one, a forced prefix leaves one) has the
    log-probability minus infinity, and so has everything that follows from it. So have the beams
    of a sentence that has ended, which therefore ends nothing twice.

    Attributes:
        totals: log-probabilities of the beams `[slots, beam]`.
        best: the best `beam` hypotheses of each slot that have ended, best first.
        worst_score: of them; minus infinity until there are `beam` `[slots]`.
        reach: what divides the log-probability of an output of the greatest length `[slots]`.
        failed: where the model gave no usable scores `[slots]`.
    """

    rows_at_first = 1

    def __init__(
        self, slots: int, options: GenerationOptions, eos_id: int, normalise: Normalise
    ) -> None:
        super().__init__(slots, options.beam, options, eos_id, normalise)
        self.totals = np.zeros((slots, self.width))
        self.best: list[list[Hypothesis]] = [[] for _ in range(slots)]
        self.worst_score = np.zeros(slots)
        self.reach = np.ones(slots)
        self.failed = np.zeros(slots, np.bool_)

    def admit(self, slots: NDArray[np.int64], requests: Sequence[Request[Any]]) -> None:
        """Begins sentences with one beam each; see `Outputs.admit`."""
        super().admit(slots, requests)
        self.totals[slots] = -np.inf
        self.totals[slots, 0] = 0.0
        self.worst_score[slots] = -np.inf
        self.failed[slots] = False
        for slot, request in zip(slots.tolist(), requests, strict=True):
            self.best[slot] = []
            self.reach[slot] = request.max_length**self.options.length_penalty

    def choose(
        self,
        logits: NDArray[np.floating[Any]],
        allowed: NDArray[np.floating[Any]],
        rows: NDArray[np.int64],
    ) -> Choice:
        """Ranks what may follow the beams; see `Outputs.choose`."""
        beam = self.width
        slots = rows[rows % beam == 0] // beam
        width = len(rows) // len(slots)
        totals = self.totals[slots, :width]
        normaliser = self.normalise(logits)
        normalised = ~np.isnan(normaliser.log_sum_exp).reshape(-1, width)
        failed = (~normalised & (totals > -np.inf)).any(axis=1)
        totals, parents, tokens = best_candidates(logits, allowed, normaliser, totals, 2 * beam)
        parents += np.arange(len(slots))[:, None] * width

        exists = totals > -np.inf
        ends = exists & (tokens == self.eos_id)
        at_limit = self.lengths[slots] + 1 == self.limits[slots]
        complete = np.where(at_limit[:, None], exists, ends)[:, :beam]
        for sentence, rank in np.argwhere(complete):
            place = sentence, rank
            self._add(slots[sentence], rows[parents[place]], int(tokens[place]), totals[place])

        going_on = np.argsort(ends, axis=1, kind="stable")[:, :beam]
        totals = np.take_along_axis(totals, going_on, axis=1)
        done = failed | at_limit | self._settled(slots, totals.max(axis=1))
        totals[done] = -np.inf
        self.totals[slots] = totals
        self.failed[slots] |= failed
        rows = self.rows_of(slots)
        self.ended[rows] |= done.repeat(beam)
        return Choice(
            rows,
            np.take_along_axis(parents, going_on, axis=1).ravel(),
            np.take_along_axis(tokens, going_on, axis=1).ravel(),
        )

    def _add(self, slot: int, row: int, token: int, log_probability: float) -> None:
        """Adds a hypothesis: the output in `row` and one token more."""
        length = int(self.lengths[slot])
        score = length_normalised(log_probability, length + 1, self.options.length_penalty)
        tokens = tuple(self.tokens[row, :length].tolist())
        log_probability = float(log_probability)
        if token == self.eos_id:
            hypothesis = Hypothesis(tokens, log_probability, score, "end")
        else:
            hypothesis = Hypothesis((*tokens, token), log_probability, score, "length")
        best = self.best[slot] = ranked([*self.best[slot], hypothesis])[: self.width]
        if len(best) == self.width:
            self.worst_score[slot] = best[-1].score

    def _settled(
        self, slots: NDArray[np.int64], log_probability: NDArray[np.float64]
    ) -> NDArray[np.bool_]:
        """Whether nothing more is to come that would be wanted.

        Args:
            slots: the slots asked about `[slots]`.
            log_probability: of the best live beam of each `[slots]`.
        """
        worst = self.worst_score[slots]
        settled: NDArray[np.bool_]
        if self.options.early_stopping:
            settled = (log_probability == -np.inf) | (worst > -np.inf)
            return settled
        # A log-probability is negative and only falls, and division by a power of the length
        # raises it: no continuation scores above what the beam would at the greatest length.
        settled = log_probability / self.reach[slots] <= worst
        return settled

    def hypotheses(self, slot: int) -> list[Hypothesis]:
        """The best `n_best`; see `Outputs.hypotheses`."""
        if self.failed[slot] or not self.best[slot]:
            return [FAILED]
        return self.best[slot][: self.options.n_best]


def best_candidates(
    logits: NDArray[np.floating[Any]],
    allowed: NDArray[np.floating[Any]],
    normaliser: Normaliser,
    totals: NDArray[np.float64],
    count: int,
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """The best ways to lengthen the beams of each sentence by one token.

    Only those among which they must be are normalised and compared, in float64.

    Args:
        logits: of the next token, as the model gave them `[sentences * width, vocabulary]`.
        allowed: the same after the processors; the same array where there were none.
        normaliser: of the logits.
        totals: log-probabilities of the beams `[sentences, width]`.
        count: candidates wanted of each sentence.

    Returns:
        Log-probabilities, parent beams and tokens `[sentences, count]`, the likeliest first, then
        the lower beam, then the lower token; minus infinity where there are fewer candidates.
    """
    sentences, width = totals.shape
    vocabulary = logits.shape[1]
    offsets = totals.reshape(-1) - normaliser.log_sum_exp
    peaks = normaliser.peaks
    if peaks is None or allowed is not logits:
        peaks = Peaks.of(allowed, max(1, vocabulary // max(2 * count, SEGMENTS)))
    row, token = _contenders(allowed, peaks, offsets, width, count)
    value = logits[row, token] + offsets[row]

    # Side by side in the order of beam and token, which a stable sort keeps among equals.
    sentence = row // width
    column = np.arange(len(row)) - np.searchsorted(sentence, sentence)
    columns = max(count, int(column.max(initial=0)) + 1)
    values = np.full((sentences, columns), -np.inf)
    candidates = np.zeros((sentences, columns), np.int64)
    values[sentence, column] = value
    candidates[sentence, column] = row % width * vocabulary + token
    order = np.argsort(-values, axis=1, kind="stable")[:, :count]
    parents, tokens = np.divmod(np.take_along_axis(candidates, order, axis=1), vocabulary)
    return np.take_along_axis(values, order, axis=1), parents, tokens


def _contenders(
    allowed: NDArray[np.floating[Any]],
    peaks: Peaks,
    offsets: NDArray[np.float64],
    width: int,
    count: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The candidates of each sentence that reach the `count`-th largest of its peaks.

    `count` candidates at least reach it, and few more; and only segments whose peak does hold any.

    Args:
        allowed: `[sentences * width, vocabulary]`
        peaks: of the same.
        offsets: what makes logits comparable within a sentence; not finite where a beam does not
            exist or failed, whatever its logits `[sentences * width]`.
        width: beams of a sentence.
        count: candidates wanted of a sentence.

    Returns:
        Rows and tokens, in rising order of row and then token; none with a logit of minus infinity.
    """
    lowest = np.finfo(allowed.dtype).min
    with np.errstate(invalid="ignore", over="ignore"):
        reach = peaks.maxima + offsets[:, None]
        reach[~np.isfinite(offsets)] = -np.inf
        reach = reach.reshape(len(allowed) // width, -1)
        kth = reach.shape[1] - count
        threshold = np.full(len(allowed), -np.inf)  # where all are needed
        if kth >= 0:
            threshold = np.partition(reach, kth, axis=1)[:, kth].repeat(width)
        # Lowered by what the sums may be rounded, so that none is left out.
        rounding = 2 * np.finfo(np.float64).eps * (np.abs(threshold) + np.abs(offsets))
        enough = np.maximum(threshold - offsets - rounding, lowest)
    # Nothing reaches NaN, infinity neither.
    enough[~np.isfinite(offsets)] = np.nan
    # In the logits' own precision: the nearest number there has none between it and the exact one.
    enough = enough.astype(allowed.dtype)
    row, segment = np.divmod(np.flatnonzero(peaks.maxima >= enough[:, None]), peaks.maxima.shape[1])
    # Behind the whole segments each token is one by itself.
    whole, length = allowed.shape[1] // peaks.length, peaks.length
    single = segment >= whole
    single_row, single_token = row[single], segment[single] + whole * (length - 1)
    row, segment = row[~single], segment[~single]
    segments = allowed[:, : whole * length].reshape(len(allowed), whole, length)
    place, offset = np.divmod(np.flatnonzero(segments[row, segment] >= enough[row, None]), length)
    row = np.concatenate([row[place], single_row])
    token = np.concatenate([segment[place] * length + offset, single_token])
    order = np.argsort(row, kind="stable")
    return row[order], token[order]
