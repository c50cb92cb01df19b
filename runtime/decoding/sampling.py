"""Greedy search and sampling: one token a row, the likeliest or a random one."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from transferry.runtime.decoding.decoder import StepOutput, TopK
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.decoding.hypothesis import FAILED, Hypothesis, length_normalised, ranked
from transferry.runtime.decoding.logits import Bools, Doubles, Floats, Integers, log_sum_exp
from transferry.runtime.decoding.stop_strings import StopStrings
from transferry.runtime.decoding.strategy import Choice, Request, Strategy


class SamplingStrategy(Strategy):
    """Greedy search and sampling: each output of a sentence grows independently.

    Attributes:
        counts: Tokens of each output, the end token included `[sentences * n_best]`.
        totals: Their log-probabilities; NaN without `options.scores` `[sentences * n_best]`.
        failed: Whether the model gave unusable scores `[sentences * n_best]`.
        at_stop: Whether it holds a stop string `[sentences * n_best]`.
    """

    def __init__(
        self,
        requests: Sequence[Request[Any]],
        options: GenerationOptions,
        ends: Sequence[int],
        stops: StopStrings,
    ) -> None:
        super().__init__(requests, options.n_best, options, ends, stops)
        self.rows_at_first = self.width
        self.top = None if options.sample else 1
        rows = len(self.ended)
        self.counts = np.zeros(rows, np.int64)
        self.totals = np.full(rows, 0.0 if options.scores else math.nan)
        self.failed = np.zeros(rows, np.bool_)
        self.at_stop = np.zeros(rows, np.bool_)
        self.sampler: Sampler | None = None
        if options.sample:
            seeds = [options.seed if each.seed is None else each.seed for each in requests]
            uniforms = [
                draw_uniforms(seed, [each.row_id], self.width, options.max_length)
                for seed, each in zip(seeds, requests, strict=True)
            ]
            self.sampler = Sampler(options, np.concatenate(uniforms))

    def choose(
        self, output: StepOutput, allowed: Floats | None, rows: Integers, own: Doubles | None = None
    ) -> Choice:
        logits = output.all_logits[:, -1]
        restricted = allowed is not None
        allowed = logits if allowed is None else allowed
        if self.sampler is None:
            tokens = allowed.argmax(axis=1)  # the lowest of equally likely tokens
        else:
            tokens = self.sampler(allowed, rows, self.length)
        chosen = np.arange(len(rows)), tokens
        if self.options.scores:
            normaliser = output.log_sum_exp
            gains: Floats = logits[chosen] - (
                log_sum_exp(logits) if normaliser is None else normaliser
            )
        elif not restricted:
            gains = logits[chosen]
        else:
            # The maximum is finite if all scores of a row are usable, like the log-sum-exp.
            gains = logits.max(axis=1)
        usable = np.isfinite(gains)
        if restricted:
            usable &= np.isfinite(allowed[chosen])
        return self._follow(rows, tokens, usable, gains)

    def choose_top_k(self, top_k: TopK, rows: Integers) -> Choice:
        tokens = top_k.tokens[:, 0]
        if top_k.logits is None or top_k.log_sum_exp is None:
            return self._follow(rows, np.maximum(tokens, 0), tokens >= 0, math.nan)
        gains = top_k.logits[:, 0] - top_k.log_sum_exp
        return self._follow(rows, tokens, np.isfinite(gains), gains)

    def _follow(
        self, rows: Integers, tokens: Integers, usable: Bools, gains: Floats | float
    ) -> Choice:
        """Takes the chosen tokens, and marks the outputs that they end.

        Args:
            rows: Rows of `tokens` that were stepped `[rows]`.
            tokens: The chosen tokens `[rows]`.
            usable: False where the model's scores were not usable `[rows]`.
            gains: The tokens' log-probabilities `[rows]`; ignored without `options.scores`.
        """
        if self.options.scores:
            self.totals[rows] += np.where(self.ended[rows], 0.0, gains)
        ends = self.is_end(tokens)
        if self.stops:
            for place in np.flatnonzero(usable & ~(ends | self.ended[rows])).tolist():
                row = int(rows[place])
                self.at_stop[row] = ends[place] = self.stopped(row, int(tokens[place]))
        if self.length + 1 >= self.least_limit:
            ends |= self.limits[rows // self.width] == self.length + 1
        if np.count_nonzero(usable) < len(rows):
            self.failed[rows] |= ~(usable | self.ended[rows])
            ends |= ~usable
        if np.count_nonzero(ends):
            new = rows[ends & ~self.ended[rows]]
            self.counts[new], self.ended[new] = self.length + 1, True
        return Choice(rows, None, tokens)

    def hypotheses(self, sentence: int) -> list[Hypothesis]:
        first = sentence * self.width
        return ranked(self._hypothesis(row) for row in range(first, first + self.width))

    def _hypothesis(self, row: int) -> Hypothesis:
        if self.failed[row]:
            return FAILED
        tokens = tuple(self.tokens[row, : self.counts[row]].tolist())
        total = float(self.totals[row])
        score = length_normalised(total, len(tokens), self.options.length_penalty)
        if tokens[-1] in self.ends:
            return Hypothesis(tokens[:-1], total, score, "end", end=tokens[-1])
        return Hypothesis(tokens, total, score, "stop" if self.at_stop[row] else "length")


class Sampler:
    """Draws from softmax(logits / temperature), cut by top k, top p, min p and typical p in turn.

    A token is drawn by inverting the cumulative distribution in the order of token ids: if two
    tokens of nearly equal probability change places, the draw stays the same. A token that ties
    with the last admitted token is admitted too.

    Args:
        options: `temperature`, `top_k`, `top_p`, `min_p` and `typical_p`.
        uniforms: A random number in [0, 1) for every output and step `[outputs, steps]`.
    """

    def __init__(self, options: GenerationOptions, uniforms: Doubles) -> None:
        self.options = options
        self.uniforms = uniforms

    def __call__(self, logits: Floats, outputs: Integers, length: int) -> Integers:
        """Draws one token a row `[rows]`; 0 for a row without a distribution.

        Args:
            logits: Of the next token, minus infinity where forbidden `[rows, vocabulary]`.
            outputs: The row of `uniforms` for each row `[rows]`.
            length: Tokens of each row so far.
        """
        cumulative = self.weights(logits).cumsum(axis=1)
        # Below the total even after rounding: the largest random number is 1 - 2**-53.
        target = self.uniforms[outputs, length] * cumulative[:, -1]
        tokens: Integers = (cumulative > target[:, None]).argmax(axis=1)
        return tokens

    def weights(self, logits: Floats) -> Doubles:
        """Returns probabilities up to a factor per row, 0 where cut off `[rows, vocabulary]`."""
        vocabulary = logits.shape[1]
        # The search reports a row of NaN or of minus infinity alone as an error.
        with np.errstate(invalid="ignore", over="ignore"):
            relative = logits.astype(np.float64)
            relative -= relative.max(axis=1, keepdims=True)
            weights = np.exp(relative / self.options.temperature)
        if 0 < self.options.top_k < vocabulary:
            last = vocabulary - self.options.top_k
            weights[weights < np.partition(weights, last, axis=1)[:, last, None]] = 0.0
        if self.options.top_p < 1:
            descending = np.sort(weights, axis=1)[:, ::-1]
            cumulative = descending.cumsum(axis=1)
            # Holtzman et al. (2020), equation 2: the smallest set that holds at least top_p.
            before = (cumulative < self.options.top_p * cumulative[:, -1:]).sum(axis=1)
            weights[weights < np.take_along_axis(descending, before[:, None], axis=1)] = 0.0
        if self.options.min_p > 0:
            weights[weights < self.options.min_p * weights.max(axis=1, keepdims=True)] = 0.0
        if self.options.typical_p < 1:
            distances = typical_distances(weights)
            order = np.argsort(distances, axis=1, kind="stable")
            cumulative = np.take_along_axis(weights, order, axis=1).cumsum(axis=1)
            before = (cumulative < self.options.typical_p * cumulative[:, -1:]).sum(axis=1)
            last = np.take_along_axis(order, before[:, None], axis=1)
            weights[distances > np.take_along_axis(distances, last, axis=1)] = 0.0
        return weights


def typical_distances(weights: Doubles) -> Doubles:
    """Distance of each token's information from the entropy (Meister et al. 2023, eq. 10).

    `weights` are probabilities up to a factor per row `[rows, vocabulary]`; the result is in nats,
    infinity where the probability is 0 `[rows, vocabulary]`.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        probabilities = weights / weights.sum(axis=1, keepdims=True)
        information = -np.log(probabilities)
        entropy = np.nansum(probabilities * information, axis=1, keepdims=True)
        distances: Doubles = np.abs(information - entropy)
    return distances


def draw_uniforms(seed: int, row_ids: Sequence[int], samples: int, steps: int) -> Doubles:
    """Random numbers in [0, 1) from seed, row id, sample and step alone `[rows * samples, steps]`.

    Philox (Salmon et al. 2011) is counter-based: seed and row id are the key, the sample is the
    counter's highest word, and the step counts through the lowest. The raw words are used because
    numpy promises their stability across versions, unlike its distributions.
    """
    words = np.empty((len(row_ids), samples, steps), np.uint64)
    for row, row_id in enumerate(row_ids):
        key = np.array([seed, row_id], np.uint64)
        for sample in range(samples):
            counter = np.array([0, 0, 0, sample], np.uint64)
            words[row, sample] = np.random.Philox(counter=counter, key=key).random_raw(steps)
    fractions = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return fractions.reshape(-1, steps)
