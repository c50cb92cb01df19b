"""Plain text: a file to token ids, and token ids to windows for training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import overload

import numpy as np
from numpy.typing import NDArray

from transferry.build_model.train.data import Example
from transferry.runtime.errors import InputError
from transferry.runtime.io.lines import read_lines
from transferry.runtime.tokenizer.byte_pair import SpecialTokens

# Devlin et al. (2019), section 3.1: share of the tokens that are labels, and the shares of these
# that are masked and replaced by another token; the rest stays.
CHOSEN, HIDDEN, REPLACED = 0.15, 0.8, 0.1


def read_text(path: Path) -> str:
    """Reads a UTF-8 file, plain or gzip, as one text.

    Raises:
        InputError: The file is unreadable, binary, not UTF-8 or blank.
    """
    text = "\n".join(read_lines(path))
    if not text.strip():
        raise InputError(f"{path}: expected text, found nothing; choose another file")
    return text


class Windows(Sequence[Example]):
    """A text in windows of `context` tokens, to predict each token from those before it.

    Windows are adjacent; each epoch starts at another offset.
    """

    def __init__(
        self,
        tokens: Sequence[int] | NDArray[np.int64],
        context: int,
        pass_key: tuple[int, int] | None = None,
    ) -> None:
        """Cuts the text.

        Args:
            tokens: Ids of the whole text `[tokens]`.
            context: Number of tokens that the model reads at once.
            pass_key: Seed and number of a pass over the text, which determine the offset. Default:
                start at the first token.

        Raises:
            InputError: The text has fewer than two tokens.
        """
        self.text = self.tokens = np.asarray(tokens, np.int64)
        self.context = context
        self.key = pass_key or (0, 0)
        if len(self.tokens) < 2:
            raise InputError(
                f"expected a text of at least 2 tokens, found {len(self.tokens)}; give more text"
            )
        if pass_key is not None:
            offset = np.random.default_rng(pass_key).integers(min(context, len(self.text)))
            self.tokens = np.roll(self.text, -int(offset))

    def epoch(self, seed: int, number: int) -> Windows:
        """Returns the windows of one pass over the text, at an offset of its own."""
        return Windows(self.text, self.context, (seed, number))

    def __len__(self) -> int:
        return -(-(len(self.tokens) - 1) // self.context)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | Sequence[Example]:
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        return self._example(range(len(self))[index])

    def _example(self, index: int) -> Example:
        first = index * self.context
        window = self.tokens[first : first + self.context + 1].tolist()
        return Example([], window[1:], window[:-1])


class MaskedWindows(Windows):
    """A text in windows, to predict some of their tokens, mostly masked."""

    def __init__(
        self,
        tokens: Sequence[int] | NDArray[np.int64],
        context: int,
        special: SpecialTokens,
        ordinary: range,
        pass_key: tuple[int, int] | None = None,
    ) -> None:
        """Cuts the text.

        Args:
            tokens: Ids of the whole text `[tokens]`.
            context: Number of tokens that the model reads at once, special tokens included.
            special: Special tokens with a mask.
            ordinary: Ids that may replace a token.
            pass_key: See Windows.

        Raises:
            InputError: The text has fewer than two tokens, or there is no mask.
        """
        super().__init__(tokens, context - len(special.wrap([])), pass_key)
        if special.mask_id is None:
            raise InputError(
                "expected a tokenizer with a mask, found none; train one for this architecture"
            )
        self.special = special
        self.mask_id = special.mask_id
        self.ordinary = ordinary

    def epoch(self, seed: int, number: int) -> MaskedWindows:
        """See Windows."""
        context = self.context + len(self.special.wrap([]))
        return MaskedWindows(self.text, context, self.special, self.ordinary, (seed, number))

    def __len__(self) -> int:
        return -(-len(self.tokens) // self.context)

    def _example(self, index: int) -> Example:
        first = index * self.context
        window = self.tokens[first : first + self.context]
        generator = np.random.default_rng((*self.key, index))
        chosen = generator.random(len(window)) < CHOSEN
        chosen[generator.integers(len(window))] = True  # at least one label per window
        fate = generator.random(len(window))
        others = generator.integers(self.ordinary.start, self.ordinary.stop, size=len(window))
        read = np.where(chosen & (fate < HIDDEN), self.mask_id, window)
        read = np.where(chosen & (fate >= HIDDEN) & (fate < HIDDEN + REPLACED), others, read)
        special, pad = self.special, self.special.pad_id
        labels = np.where(chosen, window, pad).tolist()
        target = [pad] * len(special.before) + labels + [pad] * len(special.after)
        return Example(special.wrap(read.tolist()), target, [])
