"""What picks: one token a row, the likeliest or a random one."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transferry.runtime.decoder import Ranked
from transferry.runtime.hypothesis import FAILED, Hypothesis, length_normalised, ranked
from transferry.runtime.options import GenerationOptions
from transferry.runtime.outputs import Choice, Normalise, Outputs, Request


class Picks(Outputs):
    """Greedy search and sampling: the outputs of a sentence grow each for itself.

    Attributes:
        counts: tokens of each output up to its end, that token included `[sentences * n_best]`.
        totals: their log-probabilities; NaN where none are wanted `[sentences * n_best]`.
        failed: where the model gave no usable scores `[sentences * n_best]`.
    """

    def __init__(
        self,
        requests: Sequence[Request[Any]],
        options: GenerationOptions,
        eos_id: int,
        normalise: Normalise,
    ) -> None:
        super().__init__(requests, options.n_best, options, eos_id, normalise)
        self.rows_at_first = self.width
        self.wanted = 1
        rows = len(self.ended)
        self.counts = np.zeros(rows, np.int64)
        self.totals = np.full(rows, 0.0 if options.scores else math.nan)
        self.failed = np.zeros(rows, np.bool_)
        self.sampler: Sampler | None = None
        if options.sample:
            row_ids = [request.row_id for request in requests]
            uniforms = draw_uniforms(options.seed, row_ids, self.width, options.max_length)
            self.sampler = Sampler(options, uniforms)

    def choose(
        self,
        logits: NDArray[np.floating[Any]],
        allowed: NDArray[np.floating[Any]],
        rows: NDArray[np.int64],
    ) -> Choice:
        """Picks a token a row; see `Outputs.choose`."""
        if self.sampler is None:
            tokens = allowed.argmax(axis=1)  # the lowest of equal tokens
        else:
            tokens = self.sampler(allowed, rows, self.lengths[rows // self.width])
        picked = np.arange(len(rows)), tokens
        if self.options.scores:
            gains = logits[picked] - self.normalise(logits).log_sum_exp
        elif allowed is logits:
            gains = logits[picked]
        else:
            # As the log-sum-exp, the largest is finite where all scores of a row are usable.
            gains = logits.max(axis=1)
        usable = np.isfinite(gains) & np.isfinite(allowed[picked])
        return self.follow(rows, tokens, usable, gains)

    def choose_ranked(self, ranked: Ranked, rows: NDArray[np.int64]) -> Choice:
        """Picks the likeliest token a row; see `Outputs.choose_ranked`."""
        gains = ranked.logits[:, 0] - ranked.log_sum_exp
        return self.follow(rows, ranked.tokens[:, 0], np.isfinite(gains), gains)

    def follow(
        self,
        rows: NDArray[np.int64],
        tokens: NDArray[np.int64],
        usable: NDArray[np.bool_],
        gains: NDArray[np.floating[Any]] | float = 0.0,
    ) -> Choice:
        """Takes the picked tokens, and marks what they end.

        Args:
            rows: which rows were stepped `[rows]`.
            tokens: what was picked for them `[rows]`.
            usable: False where the model's scores were not `[rows]`.
            gains: the tokens' log-probabilities, without effect where none are wanted `[rows]`.
        """
        sentences = rows // self.width
        growing = ~self.ended[rows]
        self.counts[rows] += growing
        self.totals[rows] += np.where(growing, gains, 0.0)
        self.failed[rows] |= growing & ~usable
        at_limit = self.lengths[sentences] + 1 == self.limits[sentences]
        self.ended[rows] |= (tokens == self.eos_id) | at_limit | ~usable
        return Choice(rows, np.arange(len(rows)), tokens)

    def hypotheses(self, sentence: int) -> list[Hypothesis]:
        """All outputs of a sentence; see `Outputs.hypotheses`."""
        first = sentence * self.width
        return ranked(self._hypothesis(row) for row in range(first, first + self.width))

    def _hypothesis(self, row: int) -> Hypothesis:
        if self.failed[row]:
            return FAILED
        tokens = tuple(self.tokens[row, : self.counts[row]].tolist())
        total = float(self.totals[row])
        score = length_normalised(total, len(tokens), self.options.length_penalty)
        if tokens[-1] == self.eos_id:
            return Hypothesis(tokens[:-1], total, score, "end")
        return Hypothesis(tokens, total, score, "length")


class Sampler:
    """Draws from softmax(logits / temperature), cut to the top k and then to the nucleus.

    A token is drawn by inverting the cumulative distribution in the order of token ids, so that
    two tokens of nearly equal probability changing places does not change the draw. Tokens that
    tie with the last one let in are let in too.

    Args:
        options: temperature, top_k and top_p.
        uniforms: the random number of every output and step, in [0, 1) `[outputs, steps]`.
    """

    def __init__(self, options: GenerationOptions, uniforms: NDArray[np.float64]) -> None:
        self.options = options
        self.uniforms = uniforms

    def __call__(
        self,
        logits: NDArray[np.floating[Any]],
        outputs: NDArray[np.int64],
        lengths: NDArray[np.int64] | int,
    ) -> NDArray[np.int64]:
        """Draws.

        Args:
            logits: of the next token `[rows, vocabulary]`, forbidden tokens at minus infinity.
            outputs: the row of `uniforms` that each row draws from `[rows]`.
            lengths: tokens that each row has so far `[rows]`, or of all.

        Returns:
            One token a row `[rows]`; a row without a distribution gets token 0.
        """
        cumulative = self.weights(logits).cumsum(axis=1)
        # Below the total, even rounded: the largest random number is 1 - 2**-53.
        target = self.uniforms[outputs, lengths] * cumulative[:, -1]
        tokens: NDArray[np.int64] = (cumulative > target[:, None]).argmax(axis=1)
        return tokens

    def weights(self, logits: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
        """Probabilities up to a factor a row, 0 where cut off `[rows, vocabulary]`."""
        vocabulary = logits.shape[1]
        # A row of NaN or of nothing but minus infinity is an error that the search reports.
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
        return weights


def draw_uniforms(
    seed: int, row_ids: Sequence[int], samples: int, steps: int
) -> NDArray[np.float64]:
    """Random numbers in [0, 1) that depend on seed, row id, sample and step alone.

    Philox (Salmon et al. 2011) is counter-based: seed and row id are the key, the sample is the
    counter's highest word and the step runs through the lowest. The raw words are used, since
    numpy promises their stability over its versions, unlike that of its distributions.

    Returns:
        `[rows * samples, steps]`, the samples of a row side by side.
    """
    words = np.empty((len(row_ids), samples, steps), np.uint64)
    for row, row_id in enumerate(row_ids):
        key = np.array([seed, row_id], np.uint64)
        for sample in range(samples):
            counter = np.array([0, 0, 0, sample], np.uint64)
            words[row, sample] = np.random.Philox(counter=counter, key=key).random_raw(steps)
    fractions = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return fractions.reshape(-1, steps)
