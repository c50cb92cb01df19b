"""What picks: one token a row, the likeliest or a random one."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from transferry.runtime.options import GenerationOptions


class Picker(Protocol):
    """Chooses the next token of every row."""

    def __call__(
        self, logits: NDArray[np.floating[Any]], outputs: NDArray[np.int64], step: int
    ) -> NDArray[np.int64]:
        """Picks.

        Args:
            logits: of the next token `[rows, vocabulary]`, forbidden tokens at minus infinity.
            outputs: the output that each row is part of, whatever the batch has lost `[rows]`.
            step: tokens that each output has so far.

        Returns:
            The tokens `[rows]`.
        """
        ...


def pick_likeliest(
    logits: NDArray[np.floating[Any]], outputs: NDArray[np.int64], step: int
) -> NDArray[np.int64]:
    """Greedy search: the largest logit, the lowest of equal tokens."""
    tokens: NDArray[np.int64] = logits.argmax(axis=1)
    return tokens


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
        self, logits: NDArray[np.floating[Any]], outputs: NDArray[np.int64], step: int
    ) -> NDArray[np.int64]:
        """Draws one token a row `[rows]`; a row without a distribution gets token 0."""
        cumulative = self.weights(logits).cumsum(axis=1)
        # Below the total, even rounded: the largest random number is 1 - 2**-53.
        target = self.uniforms[outputs, step] * cumulative[:, -1]
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
