"""Beam search: what ranks. Numpy over all sentences at once, Python only where an output ends."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from transferry.runtime.decoder import Ranked
from transferry.runtime.hypothesis import FAILED, Hypothesis, length_normalised, ranked
from transferry.runtime.logits import Normaliser, Peaks
from transferry.runtime.options import GenerationOptions
from transferry.runtime.outputs import Choice, Normalise, Outputs, Request

# Segments of the vocabulary whose maxima a threshold is taken from, where numpy finds them: short
# ones cost it more, few leave more candidates above it.
SEGMENTS = 16
# Log-probabilities, parent beams and tokens, as `best_candidates` returns them.
Candidates: TypeAlias = tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]


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
        totals: log-probabilities of the beams `[sentences, beam]`.
        best: the best `beam` hypotheses of each sentence that have ended, best first.
        worst_score: of them; minus infinity until there are `beam` `[sentences]`.
        reach: what divides the log-probability of an output of the greatest length `[sentences]`.
        failed: where the model gave no usable scores `[sentences]`.
    """

    rows_at_first = 1

    def __init__(
        self,
        requests: Sequence[Request[Any]],
        options: GenerationOptions,
        eos_id: int,
        normalise: Normalise,
    ) -> None:
        super().__init__(requests, options.beam, options, eos_id, normalise)
        self.wanted = 2 * options.beam
        self.totals = np.full((len(requests), self.width), -np.inf)
        self.totals[:, 0] = 0.0  # each begins with one beam
        self.best: list[list[Hypothesis]] = [[] for _ in requests]
        self.worst_score = np.full(len(requests), -np.inf)
        self.reach = self.limits**options.length_penalty
        self.failed = np.zeros(len(requests), np.bool_)

    def choose(
        self,
        logits: NDArray[np.floating[Any]],
        allowed: NDArray[np.floating[Any]],
        rows: NDArray[np.int64],
    ) -> Choice:
        """Ranks what may follow the beams; see `Outputs.choose`."""
        normaliser = self.normalise(logits)
        candidates = partial(best_candidates, logits, allowed, normaliser)
        return self._follow(rows, normaliser.log_sum_exp, candidates)

    def choose_ranked(self, ranked: Ranked, rows: NDArray[np.int64]) -> Choice:
        """Ranks what may follow the beams; see `Outputs.choose_ranked`."""
        return self._follow(rows, ranked.log_sum_exp, partial(best_of_ranked, ranked))

    def _follow(
        self,
        rows: NDArray[np.int64],
        log_sum_exp: NDArray[np.float64],
        candidates: Callable[[NDArray[np.float64], int], Candidates],
    ) -> Choice:
        """Takes the best candidates, and marks what they end.

        Args:
            rows: which rows were stepped `[rows]`.
            log_sum_exp: of their logits `[rows]`.
            candidates: `best_candidates`, given the rest.
        """
        beam = self.width
        width = beam if rows[-1] % beam else 1  # at first each sentence has one
        sentences = rows[::width] // beam
        totals = self.totals[sentences, :width]
        normalised = ~np.isnan(log_sum_exp).reshape(-1, width)
        failed = (~normalised & (totals > -np.inf)).any(axis=1)
        totals, parents, tokens = candidates(totals, self.wanted)
        parents += np.arange(len(sentences))[:, None] * width

        exists = totals > -np.inf
        ends = exists & (tokens == self.eos_id)
        at_limit = self.lengths[sentences] + 1 == self.limits[sentences]
        complete = np.where(at_limit[:, None], exists, ends)[:, :beam]
        place = complete.nonzero()
        found = sentences[place[0]], rows[parents[place]], tokens[place], totals[place]
        for one in zip(*(each.tolist() for each in found), strict=True):
            self._add(*one)

        order = np.argsort(ends, axis=1, kind="stable")[:, :beam]
        going_on = np.arange(len(sentences))[:, None], order
        totals = totals[going_on]
        done = failed | at_limit | self._settled(sentences, totals.max(axis=1))
        totals[done] = -np.inf
        self.totals[sentences] = totals
        self.failed[sentences] |= failed
        rows = self.rows_of(sentences)
        self.ended[rows] |= done.repeat(beam)
        return Choice(rows, parents[going_on].ravel(), tokens[going_on].ravel())

    def _add(self, sentence: int, row: int, token: int, log_probability: float) -> None:
        """Adds a hypothesis: the output in `row` and one token more."""
        length = int(self.lengths[sentence])
        score = length_normalised(log_probability, length + 1, self.options.length_penalty)
        if score <= self.worst_score[sentence]:
            return  # behind as many as are kept
        tokens = tuple(self.tokens[row, :length].tolist())
        if token == self.eos_id:
            hypothesis = Hypothesis(tokens, log_probability, score, "end")
        else:
            hypothesis = Hypothesis((*tokens, token), log_probability, score, "length")
        best = self.best[sentence] = ranked([*self.best[sentence], hypothesis])[: self.width]
        if len(best) == self.width:
            self.worst_score[sentence] = best[-1].score

    def _settled(
        self, sentences: NDArray[np.int64], log_probability: NDArray[np.float64]
    ) -> NDArray[np.bool_]:
        """Whether nothing more is to come that would be wanted.

        Args:
            sentences: the sentences asked about `[sentences]`.
            log_probability: of the best live beam of each `[sentences]`.
        """
        worst = self.worst_score[sentences]
        settled: NDArray[np.bool_]
        if self.options.early_stopping:
            settled = (log_probability == -np.inf) | (worst > -np.inf)
            return settled
        # A log-probability is negative and only falls, and division by a power of the length
        # raises it: no continuation scores above what the beam would at the greatest length.
        settled = log_probability / self.reach[sentences] <= worst
        return settled

    def hypotheses(self, sentence: int) -> list[Hypothesis]:
        """The best `n_best`; see `Outputs.hypotheses`."""
        if self.failed[sentence] or not self.best[sentence]:
            return [FAILED]
        return self.best[sentence][: self.options.n_best]


def best_candidates(
    logits: NDArray[np.floating[Any]],
    allowed: NDArray[np.floating[Any]],
    normaliser: Normaliser,
    totals: NDArray[np.float64],
    count: int,
) -> Candidates:
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
    candidates = np.zeros((2, sentences, columns), np.int64)
    values[sentence, column] = value
    candidates[:, sentence, column] = row - sentence * width, token
    best = np.arange(sentences)[:, None], np.argsort(-values, axis=1, kind="stable")[:, :count]
    return values[best], candidates[0][best], candidates[1][best]


def best_of_ranked(ranked: Ranked, totals: NDArray[np.float64], count: int) -> Candidates:
    """As `best_candidates`, where the likeliest tokens of each row are known.

    Args:
        ranked: `count` of each row, or all that there are.
        totals: log-probabilities of the beams `[sentences, width]`.
        count: candidates wanted of each sentence.
    """
    sentences = len(totals)
    offsets = totals.reshape(-1) - ranked.log_sum_exp
    with np.errstate(invalid="ignore"):
        values = ranked.logits + offsets[:, None]
    values[~np.isfinite(offsets)] = -np.inf
    each = values.shape[1]
    values = values.reshape(sentences, -1)
    tokens = ranked.tokens.reshape(sentences, -1)
    if (lacking := count - values.shape[1]) > 0:
        values = np.pad(values, ((0, 0), (0, lacking)), constant_values=-np.inf)
        tokens = np.pad(tokens, ((0, 0), (0, lacking)))
    # In the order of beam, and in each of logit and then token, which a stable sort keeps.
    order = np.argsort(-values, axis=1, kind="stable")[:, :count]
    best = np.arange(sentences)[:, None], order
    # Behind all tokens of all beams there is nothing, which no beam is the parent of.
    return values[best], np.minimum(order // each, totals.shape[1] - 1), tokens[best]


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
    return peaks.reaching(allowed, enough.astype(allowed.dtype))
