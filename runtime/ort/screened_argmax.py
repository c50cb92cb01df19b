"""Exact argmax over the vocabulary from approximate int8 logits and a bound on their error.

A greedy step needs only the largest of V products h · w_j. onnxruntime computes approximate
logits q_j = ĥ · ŵ_j + b_j, with ĥ and ŵ_j quantised to 8 bits. By Cauchy-Schwarz

    |h · w_j + b_j - q_j| = |(h - ĥ) · ŵ_j + h · (w_j - ŵ_j)| <= |h - ĥ| |ŵ_j| + |h| |w_j - ŵ_j|

so a token whose approximate logit lies further below another's than both radii allow is not the
argmax. Most rows keep one token and need no product at all; the others get exact logits of their
few tokens.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from transferry.runtime.decoding.logits import Bools, Doubles, Integers, SegmentMaxima
from transferry.runtime.errors import InputError

Floats = NDArray[np.float32]

# A row with more tokens in reach than this is scored in full: gathering would cost more.
MOST = 1024
# Tokens whose float32 weights are widened to float64 at once, to bound the memory.
CHUNK = 2048

# Relative error of the approximate product besides quantisation. The integers are summed exactly;
# converting the sum, multiplying it by two scales and adding the bias round four times by 2^-24 at
# most, the scale found here and the kernel's differ by two roundings, comparing takes four: at most
# 2^-20.6.
ROUNDING = 2.0**-19
# The same where a product underflows: 2^8 2^7 d times the smallest normal number is below this,
# whether or not subnormal numbers are flushed to zero.
UNDERFLOW = 2.0**-80
# Below this the scale of the hidden states itself is no normal number.
SMALLEST_STEP = 2.0**-100


@dataclass
class ScreeningCounts:
    """Counts of screening so far.

    Attributes:
        rows: Rows screened.
        certified: Rows decided by the bound alone.
        full: Rows whose tokens were all scored in float32.
        candidates: Tokens scored in float64.
    """

    rows: int = 0
    certified: int = 0
    full: int = 0
    candidates: int = 0


class ScreenedArgmax:
    """Finds the exact argmax of h · w_j + b_j from approximate logits and a bound on their error.

    The result is float64's and depends on a row's hidden state alone: the approximate logits
    decide only how much work it takes, and other rows do not matter.
    """

    def __init__(
        self,
        weight: Floats,
        quantised: NDArray[np.int8],
        scales: Floats,
        bias: Floats | None = None,
    ) -> None:
        """Measures how far each token's quantised weights lie from its own.

        Args:
            weight: Weights of the LM head `[vocabulary, d_model]`; read in place, not copied.
            quantised: Int8 weights of the approximate product `[vocabulary, d_model]`, perhaps a
                transposed view. On CPUs without VNNI, sums of neighbours must not saturate: see
                export/rewrite/rounded_weights.py.
            scales: ŵ_j is `scales[j] * quantised[j]` `[vocabulary]`.
            bias: Bias of the LM head, which the approximate logits include `[vocabulary]`.

        Raises:
            InputError: Shapes disagree, or a number is not finite.
        """
        vocabulary, d_model = weight.shape
        shapes = [quantised.shape, scales.shape, scales.shape if bias is None else bias.shape]
        if shapes != [(vocabulary, d_model), (vocabulary,), (vocabulary,)]:
            raise InputError(
                f"expected quantised weights like the weights {weight.shape} and one scale and "
                f"bias a token, found {shapes}: export the bundle again"
            )
        self.counts = ScreeningCounts()
        self._weight, self._bias = weight, bias
        # Covers the rounding of float32 computations here: sums of d squares, the bound
        # itself, and a value of h on the verge of two integers (255 units of 2^-24, twice).
        self._slack = 1 + (d_model + 1024) * 2.0**-23
        radii = np.empty((3, vocabulary))
        for first in range(0, vocabulary, CHUNK):
            block = slice(first, first + CHUNK)
            rounded = quantised[block] * scales[block, None].astype(np.float64)
            radii[0, block] = np.linalg.norm(rounded, axis=1)
            radii[1, block] = np.linalg.norm(weight[block] - rounded, axis=1)
        radii[2] = UNDERFLOW + (0 if bias is None else ROUNDING * np.abs(bias))
        if not np.isfinite(radii).all():
            raise InputError(
                "expected finite weights, scales and biases of the vocabulary projection, found "
                "NaN or infinity: export the bundle again, from a checkpoint that passes verify"
            )
        # |ŵ_j|, |w_j - ŵ_j| and the part that depends on no hidden state, by token; their maxima.
        self._radii = (radii * self._slack).astype(np.float32)
        self._largest_radii = self._radii.max(axis=1)

    def argmax(self, hidden: Floats, approximate: Floats, maxima: SegmentMaxima) -> Integers:
        """Token of each row's largest exact logit, the lowest id among equals `[rows]`.

        The token is -1 where the hidden state is not finite.

        Args:
            hidden: Inputs of the projection `[rows, d_model]`: the whole tensor that the graph
                quantised by DynamicQuantizeLinear, whose range spans all rows.
            approximate: Logits of the int8 product, bias included `[rows, vocabulary]`.
            maxima: Their segment maxima.
        """
        rows = len(hidden)
        tokens = np.full(rows, -1)
        step, norms, factors = self._factors(hidden)
        row = token = np.empty(0, np.int64)
        if SMALLEST_STEP < step < np.inf:
            row, token, full = self._contenders(approximate, maxima, factors)
        else:
            # A row that is not finite spoils the scale of all.
            full = np.asarray(np.isfinite(hidden).all(axis=1))

        count = np.bincount(row, minlength=rows)
        single = count[row] == 1
        tokens[row[single]] = token[single]
        row, token = row[~single], token[~single]
        if full.any():
            others = self._score_in_full(hidden, np.flatnonzero(full), norms)
            row, token = np.concatenate([row, others[0]]), np.concatenate([token, others[1]])
        if len(row):
            exact = self._exact(hidden, row, token)
            order = np.lexsort((token, -exact, row))
            best = order[np.flatnonzero(np.diff(row[order], prepend=-1))]
            tokens[row[best]] = token[best]
        self.counts.rows += rows
        self.counts.certified += int(np.count_nonzero(single))
        self.counts.full += int(np.count_nonzero(full))
        self.counts.candidates += len(row)
        return tokens

    def bound(self, hidden: Floats) -> Floats:
        """Largest distance of approximate from exact logits `[rows, vocabulary]`."""
        radii: Floats = self._factors(hidden)[2] @ self._radii
        return radii

    def _factors(self, hidden: Floats) -> tuple[np.float32, Doubles, Floats]:
        """Quantisation step, norms of the rows, and factors of the radii.

        The range always contains 0, and its ends are at most half a step from an integer, so that
        clipping never exceeds rounding.
        """
        step = (hidden.max(initial=0) - hidden.min(initial=0)) / np.float32(255)
        norms = np.sqrt(np.einsum("rd,rd->r", hidden, hidden)) * self._slack + 2.0**-60
        distance = float(step) / 2 * hidden.shape[1] ** 0.5 * self._slack
        factors = np.ones((len(hidden), 3), np.float32)
        factors[:, 0] = distance + ROUNDING * (norms + distance)
        factors[:, 1] = norms
        return step, norms, factors

    def _contenders(
        self, approximate: Floats, maxima: SegmentMaxima, factors: Floats
    ) -> tuple[Integers, Integers, Bools]:
        """Row and token of the possible argmaxes, and whether a row has too many."""
        largest = factors @ self._largest_radii
        reach = maxima.maxima.max(axis=1) - largest
        # First by the largest radius of all tokens, which costs one comparison a segment.
        least = np.where(np.isfinite(reach), reach - largest, np.float32(np.nan))
        row, token = maxima.reaching(approximate, least)
        full = (np.bincount(row, minlength=len(approximate)) > MOST) | np.isnan(least)
        if full.any():
            kept = ~full[row]
            row, token = row[kept], token[kept]
        score = approximate[row, token]
        radius = np.einsum("nk,kn->n", factors[row], self._radii[:, token])
        np.maximum.at(reach, row, score - radius)
        kept = score + radius >= reach[row]
        return row[kept], token[kept], full

    def _score_in_full(
        self, hidden: Floats, rows: Integers, norms: Doubles
    ) -> tuple[Integers, Integers]:
        """Scores all tokens in float32; returns rows and tokens that may be the best.

        A float32 product is off by gamma_d |h| |w_j| at most, gamma_d = d u / (1 - d u), u = 2^-24,
        in whatever order it is summed (Higham 2002, Accuracy and Stability, eq. 3.5).
        """
        scores = hidden[rows] @ self._weight.T
        size = self._radii[0] + self._radii[1]
        # Eight more roundings: of the bias, of the bound and of its comparison.
        rounding = np.float32((hidden.shape[1] + 8) * 2.0**-24 * self._slack)
        radius = norms[rows, None].astype(np.float32) * size * rounding + self._radii[2]
        if self._bias is not None:
            scores += self._bias
            radius += rounding * np.abs(self._bias)
        reach: Floats = (scores - radius).max(axis=1)
        index, token = np.nonzero(~(scores + radius < reach[:, None]))  # true where NaN
        return rows[index], token

    def _exact(self, hidden: Floats, row: Integers, token: Integers) -> Doubles:
        """Scores of tokens in float64, where products of float32 are exact `[candidates]`."""
        scores = np.empty(len(row))
        for first in range(0, len(row), CHUNK):
            block = slice(first, first + CHUNK)
            weights = self._weight[token[block]].astype(np.float64)
            weights *= hidden[row[block]]
            scores[block] = weights.sum(axis=1)
        if self._bias is not None:
            scores += self._bias[token]
        return scores
