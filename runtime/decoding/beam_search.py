"""Beam search: numpy over all sentences at once, Python only where an output ends."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from transferry.runtime.decoding.decoder import StepOutput, TopK
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.decoding.hypothesis import (
    FAILED,
    FinishReason,
    Hypothesis,
    length_normalised,
    ranked,
)
from transferry.runtime.decoding.logits import (
    Bools,
    Doubles,
    Floats,
    Integers,
    SegmentMaxima,
    log_sum_exp,
)
from transferry.runtime.decoding.stop_strings import StopStrings
from transferry.runtime.decoding.strategy import Choice, Request, Strategy

# Segments of the vocabulary where numpy computes their maxima for a threshold: short segments cost
# numpy more time, few segments leave more candidates above the threshold.
SEGMENTS = 16
LOWEST = float(np.finfo(np.float64).min)
# Log-probabilities, stepped rows and tokens, as `best_candidates` returns them.
Candidates: TypeAlias = tuple[Doubles, Integers, Integers]


class BeamStrategy(Strategy):
    """Keeps the `beam` likeliest beginnings of each sentence, step by step.

    Candidates of a step are ranked by log-probability, then by beam and token. With n end tokens,
    the best `(1 + n) * beam` are considered: those that end among the first `beam` are outputs, and
    the first `beam` that do not end go on. There are always enough, since each beam has n ways to
    end. This is the rule of CTranslate2 and transformers.

    A beam that does not exist (a sentence begins with one beam, a forced prefix leaves one) has
    log-probability minus infinity, and so have its continuations. The same holds for the beams of
    a sentence that has ended, which therefore ends nothing twice.

    Attributes:
        totals: Log-probabilities of the beams after the processors `[sentences, beam]`.
        excess: The model's own log-probabilities minus `totals` `[sentences, beam]`.
        best: The best `beam` ended hypotheses of each sentence, best first.
        worst_score: Their lowest score; minus infinity until there are `beam` `[sentences]`.
        failed: Whether the model gave unusable scores `[sentences]`.
    """

    rows_at_first = 1
    ranks = True

    def __init__(
        self,
        requests: Sequence[Request[Any]],
        options: GenerationOptions,
        ends: Sequence[int],
        stops: StopStrings,
    ) -> None:
        super().__init__(requests, options.beam, options, ends, stops)
        self.count = self.top = (1 + len(ends)) * options.beam
        self.totals = np.full((len(requests), self.width), -np.inf)
        self.totals[:, 0] = 0.0  # each begins with one beam
        self.excess = np.zeros_like(self.totals)
        self.best: list[list[Hypothesis]] = [[] for _ in requests]
        self.worst_score = np.full(len(requests), -np.inf)
        self.failed = np.zeros(len(requests), np.bool_)

    def choose(
        self, output: StepOutput, allowed: Floats | None, rows: Integers, own: Doubles | None = None
    ) -> Choice:
        logits = output.all_logits[:, -1]
        normaliser = output.log_sum_exp
        if normaliser is None:
            normaliser = log_sum_exp(logits)
        maxima = output.maxima if allowed is None else None
        allowed = logits if allowed is None else allowed
        if maxima is None:
            segment = max(1, logits.shape[1] // max(2 * self.count, SEGMENTS))
            maxima = SegmentMaxima.of(allowed, segment)
        if own is None:
            candidates = partial(best_candidates, logits, allowed, normaliser, maxima)
            return self._follow(rows, normaliser, candidates)
        normalised = np.where(np.isnan(normaliser), np.nan, 0.0)
        candidates = partial(best_candidates, allowed, allowed, normalised, maxima)
        return self._follow(rows, normaliser, candidates, (own, allowed))

    def choose_top_k(self, top_k: TopK, rows: Integers) -> Choice:
        assert top_k.log_sum_exp is not None
        return self._follow(rows, top_k.log_sum_exp, partial(best_of_top_k, top_k))

    def _follow(
        self,
        rows: Integers,
        normaliser: Doubles,
        candidates: Callable[[Doubles, int], Candidates],
        changed: tuple[Doubles, Floats] | None = None,
    ) -> Choice:
        """Takes the best candidates, and marks the outputs that they end.

        Args:
            rows: Rows of `tokens` that were stepped `[rows]`.
            normaliser: Log-sum-exp of their logits `[rows]`.
            candidates: `best_candidates` or `best_of_top_k`, lacking totals and count.
            changed: The model's own log-probabilities and the ranked ones, where they differ
                `[rows, vocabulary]`.
        """
        beam = self.width
        width = beam if rows[-1] % beam else 1  # at first each sentence has one
        sentences = rows[::width] // beam
        former = self.totals[sentences, :width]
        totals, parents, tokens = candidates(former, self.count)
        outputs = rows[parents]
        excess = self.excess.ravel()[outputs]

        exists = totals > -np.inf
        if changed is not None:
            own, ranked_by = (each[parents, tokens] for each in changed)
            excess += np.subtract(own, ranked_by, out=np.zeros_like(excess), where=exists)
        ends = exists & self.is_end(tokens)
        if self.stops:
            for place in zip(*(exists & ~ends).nonzero(), strict=True):
                ends[place] = self.stopped(int(outputs[place]), int(tokens[place]))
        going_on: Any = slice(None), slice(beam)
        complete, at_limit = ends, np.zeros(1, np.bool_)
        if self.length + 1 >= self.least_limit:
            at_limit = self.limits[sentences] == self.length + 1
            complete = ends | exists & at_limit[:, None]
        if np.count_nonzero(complete):  # several times as fast as any()
            for place in zip(*complete[:, :beam].nonzero(), strict=True):
                where = int(sentences[place[0]]), int(outputs[place]), int(tokens[place])
                self._add(*where, float(totals[place]), float(excess[place]), bool(ends[place]))
        if np.count_nonzero(ends):
            order = np.argsort(ends, axis=1, kind="stable")[:, :beam]
            going_on = np.arange(len(sentences))[:, None], order
            # Stop strings can end more candidates than end tokens can, and leave too few others.
            totals[ends] = -np.inf
        totals = totals[going_on]
        done = at_limit | self._settled(sentences, totals[:, 0])
        if np.count_nonzero(lost := np.isnan(normaliser)):
            failed = (lost.reshape(-1, width) & (former > -np.inf)).any(axis=1)
            self.failed[sentences] |= failed
            done |= failed
        if np.count_nonzero(done):
            totals[done] = -np.inf
            self.ended.reshape(-1, beam)[sentences] |= done[:, None]
        rows = rows if width == beam else self.rows_of(sentences)
        self.totals[sentences] = totals
        self.excess[sentences] = excess[going_on]
        return Choice(rows, parents[going_on].ravel(), tokens[going_on].ravel())

    def _add(
        self, sentence: int, row: int, token: int, total: float, excess: float, ended: bool
    ) -> None:
        """Adds a hypothesis: the output in `row` and one more token."""
        score = length_normalised(total, self.length + 1, self.options.length_penalty)
        if score <= self.worst_score[sentence]:
            return  # enough better ones are kept
        tokens = tuple(self.tokens[row, : self.length].tolist())
        if token in self.ends:
            hypothesis = Hypothesis(tokens, total + excess, score, "end", end=token)
        else:
            reason: FinishReason = "stop" if ended else "length"
            hypothesis = Hypothesis((*tokens, token), total + excess, score, reason)
        best = self.best[sentence] = ranked([*self.best[sentence], hypothesis])[: self.width]
        if len(best) == self.width:
            self.worst_score[sentence] = best[-1].score

    def _settled(self, sentences: Integers, log_probability: Doubles) -> Bools:
        """Whether no further hypothesis of a sentence can matter `[sentences]`.

        `log_probability` is the best live beam's of each sentence `[sentences]`.
        """
        worst = self.worst_score[sentences]
        settled: Bools
        if self.options.early_stopping is True:
            settled = (log_probability == -np.inf) | (worst > -np.inf)
            return settled
        # A log-probability is negative and only falls, and division by a power of the length
        # raises it: no continuation scores above the beam itself at the maximal length. By the
        # heuristic of transformers it is compared at its present length. A negative penalty lowers
        # the score of longer ones.
        penalty = float(self.options.length_penalty)  # numpy raises no integer to the power of -1
        never = self.options.early_stopping == "never" and penalty > 0
        length = self.limits[sentences] if never else self.length + 1
        settled = log_probability / length**penalty <= worst
        return settled

    def hypotheses(self, sentence: int) -> list[Hypothesis]:
        if self.failed[sentence] or not self.best[sentence]:
            return [FAILED]
        return self.best[sentence][: self.options.n_best]


def best_candidates(
    logits: Floats,
    allowed: Floats,
    normaliser: Doubles,
    maxima: SegmentMaxima,
    totals: Doubles,
    count: int,
) -> Candidates:
    """Finds the best ways to lengthen the beams of each sentence by one token.

    Only candidates that can be among the best are normalised and compared, in float64.

    Args:
        logits: The model's logits of the next token `[sentences * width, vocabulary]`.
        allowed: The same after the logits processors.
        normaliser: Log-sum-exp of the logits `[sentences * width]`.
        maxima: Segment maxima of the allowed logits.
        totals: Log-probabilities of the beams `[sentences, width]`.
        count: Candidates wanted for each sentence.

    Returns:
        Log-probabilities, rows of the logits and tokens `[sentences, count]`, the likeliest first,
        then the lower row, then the lower token; minus infinity where there are fewer candidates.
    """
    sentences, width = totals.shape
    offsets = totals.reshape(-1) - normaliser
    row, token = _contenders(allowed, maxima, offsets, width, count)
    value, sentence = logits[row, token] + offsets[row], row // width
    starts = sentence.searchsorted(np.arange(sentences + 1))
    if np.count_nonzero(starts[1:] - starts[:-1] < count):
        lacking = np.arange(sentences).repeat(count)
        row, token = np.append(row, lacking * width), np.append(token, 0 * lacking)
        value, sentence = np.append(value, lacking - np.inf), np.append(sentence, lacking)
        starts += np.arange(sentences + 1) * count
    # Stable: sorted by beam and token, equal ones keep this order.
    order = np.lexsort((-value, sentence))
    best = order[starts[:-1, None] + np.arange(count)]
    return value[best], row[best], token[best]


def best_of_top_k(top_k: TopK, totals: Doubles, count: int) -> Candidates:
    """`best_candidates` from at least `count` likeliest tokens of each row, or all, with logits."""
    assert top_k.logits is not None and top_k.log_sum_exp is not None
    (sentences, width), tokens = totals.shape, top_k.tokens
    offsets = totals.reshape(-1) - top_k.log_sum_exp
    # A beam that does not exist or failed has offsets of minus infinity or NaN.
    values = np.fmax(top_k.logits + offsets[:, None], -np.inf)
    if (lacking := -(-count // width) - values.shape[1]) > 0:
        values = np.pad(values, ((0, 0), (0, lacking)), constant_values=-np.inf)
        tokens = np.pad(tokens, ((0, 0), (0, lacking)))
    each = values.shape[1]
    # Sorted by beam, and within a beam by logit and token: a stable sort keeps this among equals.
    order = np.argsort(-values.reshape(sentences, -1), axis=1, kind="stable")[:, :count]
    best = order + np.arange(0, values.size, width * each)[:, None]
    return values.ravel()[best], best // each, tokens.ravel()[best]


def _contenders(
    allowed: Floats, maxima: SegmentMaxima, offsets: Doubles, width: int, count: int
) -> tuple[Integers, Integers]:
    """Finds the candidates of each sentence that reach the `count`-th largest segment maximum.

    At least `count` candidates reach it, and few more; only segments whose maximum does hold any.

    Args:
        allowed: Logits `[sentences * width, vocabulary]`.
        maxima: Their segment maxima.
        offsets: Added to the logits of a beam to make them comparable within a sentence; not finite
            where a beam does not exist or failed `[sentences * width]`.
        width: Beams of a sentence.
        count: Candidates wanted for each sentence.

    Returns:
        Rows and tokens, sorted by row and then token, without logits of minus infinity.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        # A beam that does not exist or failed reaches minus infinity or NaN.
        reach = np.fmax(maxima.maxima + offsets[:, None], -np.inf)
    reach = reach.reshape(len(allowed) // width, -1)
    least, kth = np.full(len(reach), LOWEST), reach.shape[1] - count
    if kth >= 0:  # else all are needed
        np.maximum(np.partition(reach, kth, axis=1)[:, kth], LOWEST, out=least)
    segments, least = np.flatnonzero(reach >= least[:, None]), least.repeat(width)
    return maxima.within(allowed, segments, lambda found, row: found + offsets[row] >= least[row])
