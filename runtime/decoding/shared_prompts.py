"""Prompts of a batch that begin alike, such as with a system prompt: read once, then copied.

Keys and values of a token depend only on the tokens before it, and a kernel computes each row of a
product by itself. So the cache of a beginning has the same bytes whether it is read alone or as
part of a prompt, and no answer depends on the beginnings of its neighbours.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from transferry.runtime.decoding.batching import LANES
from transferry.runtime.decoding.logits import Bools, Integers

# Least share of a batch's prompt tokens that sharing must save: it costs one more run of the graph
# and a copy of the cache.
LEAST_SAVING = 1 / 8


@dataclass(frozen=True)
class SharedPrompts:
    """Beginnings of one length, each distinct one once.

    Attributes:
        length: Tokens of each beginning, a multiple of `LANES`.
        first: The first row with each distinct beginning `[distinct]`.
        of_row: Index into `first` of the beginning of each row `[rows]`.
    """

    length: int
    first: Integers
    of_row: Integers

    def copied(self, mask: Bools) -> Integers:
        """Number of tokens of each row that are copied from another row `[rows]`.

        `mask` is True at tokens `[rows, prompt]`.
        """
        copied: Integers = mask[:, : self.length].sum(axis=1)
        copied[self.first] = 0
        return copied


def shared_prompts(prompts: Integers, mask: Bools) -> SharedPrompts | None:
    """Finds the beginnings that save most tokens; None where they save too little.

    With beginnings of n tokens, u of them distinct, a batch of r rows reads (r - u) n tokens less.
    n is chosen among the multiples of `LANES` (the portable graphs need such a length, and each
    comparison covers as many tokens). A row with another beginning costs only its own tokens.

    Args:
        prompts: Padded token ids `[rows, prompt]`.
        mask: True at tokens, False at padding `[rows, prompt]`.
    """
    rows, columns = prompts.shape
    ids = np.where(mask, prompts, -1)
    best, saved = None, rows * columns * LEAST_SAVING
    of_row = np.zeros(rows, np.int64)
    for end in range(LANES, columns + 1, LANES):
        # Two rows share a beginning if they share the previous one and the next tokens are equal.
        block = np.column_stack([of_row, ids[:, end - LANES : end]])
        _, first, of_row = np.unique(block, axis=0, return_index=True, return_inverse=True)
        of_row = of_row.reshape(rows)  # numpy 2.0 gave it another shape
        if len(first) == rows:
            break
        # A single remaining token would be computed by a kernel of its own.
        if (rows - len(first)) * end >= saved and columns - end != 1:
            best, saved = SharedPrompts(end, first, of_row), (rows - len(first)) * end
    return best


def copied_tokens(sources: Sequence[Sequence[int]]) -> list[int]:
    """Number of tokens of each prompt that a batch copies from another instead of reading."""
    # The first step reads the last token.
    lengths = np.array([len(source) - 1 for source in sources])
    mask = np.arange(lengths.max()) < lengths[:, None]
    prompts = np.zeros(mask.shape, np.int64)
    prompts[mask] = [token for source in sources for token in source[:-1]]
    shared = shared_prompts(prompts, mask)
    return [0] * len(sources) if shared is None else shared.copied(mask).tolist()
