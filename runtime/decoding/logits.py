"""Arithmetic on logits `[rows, vocabulary]` that all searches share; rows are independent."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

# Entries processed at once: 512 kB of float32 stay in the CPU's cache over the three passes below,
# measured 15 to 30 % faster than passes over a whole batch.
BLOCK_ENTRIES = 1 << 17
# Neighbouring tokens whose largest logit a graph returns: few enough that a candidate's segment is
# quickly searched, many enough that the maxima are few.
SEGMENT = 64

Floats = NDArray[np.floating[Any]]
Doubles = NDArray[np.float64]
Integers = NDArray[np.int64]
Bools = NDArray[np.bool_]


class SegmentMaxima(NamedTuple):
    """Largest logits of segments of the vocabulary.

    Attributes:
        maxima: One for each `length` neighbouring tokens, from token 0 on; then each remaining
            token by itself `[rows, segments]`.
        length: Tokens of a segment.
    """

    maxima: Floats
    length: int

    @classmethod
    def of(cls, logits: Floats, length: int) -> "SegmentMaxima":
        """Computes the maxima of logits `[rows, vocabulary]`."""
        rows, vocabulary = logits.shape
        whole = vocabulary - vocabulary % length
        maxima = logits[:, :whole].reshape(rows, whole // length, length).max(axis=2)
        return cls(np.concatenate([maxima, logits[:, whole:]], axis=1), length)

    def reaching(self, logits: Floats, least: Floats) -> tuple[Integers, Integers]:
        """Finds the logits of at least a row's threshold, only in segments that hold any.

        Args:
            logits: The logits that the maxima belong to `[rows, vocabulary]`.
            least: Thresholds in the logits' precision `[rows]`; NaN finds nothing.

        Returns:
            Rows and tokens, sorted by row and then token.
        """
        segments = np.flatnonzero(self.maxima >= least[:, None])
        return self.within(logits, segments, lambda found, row: found >= least[row])

    def within(
        self, logits: Floats, segments: Integers, reached: Callable[[Floats, Integers], Bools]
    ) -> tuple[Integers, Integers]:
        """Finds logits in segments whose maxima suffice; returns as `reaching`.

        Args:
            logits: As for `reaching`.
            segments: Places in the flattened maxima, ascending.
            reached: Whether each logit `[segments, length]` suffices, given its row
                `[segments, 1]`.
        """
        rows, vocabulary = logits.shape
        row, segment = np.divmod(segments, self.maxima.shape[1])
        # The segments after the whole ones are single tokens.
        whole, length = vocabulary // self.length, self.length
        single_row = single_token = row[:0]
        if self.maxima.shape[1] > whole:
            single = segment >= whole
            single_row, single_token = row[single], segment[single] + whole * (length - 1)
            row, segment = row[~single], segment[~single]
        found = logits[:, : whole * length].reshape(rows, whole, length)[row, segment]
        place, offset = np.divmod(np.flatnonzero(reached(found, row[:, None])), length)
        row, token = row[place], segment[place] * length + offset
        if not len(single_row):
            return row, token
        row, token = np.concatenate([row, single_row]), np.concatenate([token, single_token])
        order = np.argsort(row, kind="stable")
        return row[order], token[order]


def log_sum_exp(logits: Floats) -> Doubles:
    """Log-sum-exp of each row `[rows]`, so that log p = logit - log_sum_exp.

    The largest logit is subtracted first, against overflow. The exponentials are computed in the
    logits' precision, at least float32. NaN for a row that holds NaN or plus infinity, or only
    minus infinity.
    """
    rows, vocabulary = logits.shape
    block = max(1, BLOCK_ENTRIES // vocabulary)
    work = np.empty((min(block, rows), vocabulary), np.promote_types(logits.dtype, np.float32))
    result = np.empty(rows)
    with np.errstate(invalid="ignore"):
        for first in range(0, rows, block):
            rows_now = logits[first : first + block]
            largest = rows_now.max(axis=1)
            powers = work[: len(rows_now)]
            np.subtract(rows_now, largest[:, None], out=powers, dtype=work.dtype)
            np.exp(powers, out=powers)
            result[first : first + block] = largest + np.log(powers.sum(axis=1), dtype=np.float64)
    return result


def top_k(logits: Floats, k: int) -> tuple[Floats, Integers]:
    """The `k` largest logits of each row and their tokens `[rows, k]`, equal ones by token id.

    A partial sort would not define the order of equal logits. A row with fewer than `k` logits
    above minus infinity is padded with minus infinity and token 0.
    """
    rows, vocabulary = logits.shape
    # Most of a row falls into groups, at least 4 k of them. The k largest group maxima are k
    # logits of the row, so that the k largest logits all reach the smallest of these maxima: one
    # comparison leaves a handful to sort.
    group = max(1, min(32, vocabulary // (4 * k)))
    grouped = vocabulary - vocabulary % group
    maxima = logits[:, :grouped].reshape(rows, group, grouped // group).max(axis=1)
    threshold = np.partition(maxima, -min(k, vocabulary), axis=1)[:, -min(k, vocabulary)]
    # Minus infinity never counts: a forced prefix leaves one logit a row, not a vocabulary to sort.
    threshold = np.maximum(threshold, np.finfo(logits.dtype).min)

    row, token = np.divmod(np.flatnonzero(logits >= threshold[:, None]), vocabulary)
    value = logits[row, token]
    order = np.lexsort((-value, row))
    row, token, value = row[order], token[order], value[order]
    rank = np.arange(len(row)) - np.searchsorted(row, row)
    best = rank < k

    values = np.full((rows, k), -np.inf, logits.dtype)
    tokens = np.zeros((rows, k), np.int64)
    values[row[best], rank[best]] = value[best]
    tokens[row[best], rank[best]] = token[best]
    return values, tokens
