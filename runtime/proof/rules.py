"""The rules of a search, applied to the logits of a given answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.decoding.logits import log_sum_exp
from transferry.runtime.decoding.logits_processors import (
    History,
    build_logits_processors,
    prompts_of,
    restrict,
)
from transferry.runtime.decoding.strategy import Request
from transferry.runtime.tokenizer.special_tokens import SpecialTokens

Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Rules:
    """The logits processors of a search over one source, which an encoder reads or the decoder."""

    options: GenerationOptions
    source: Sequence[int]
    special: SpecialTokens
    has_encoder: bool

    def logits(self, logits: Floats, before: Sequence[int]) -> Floats:
        """Returns the logits of one token after the processors `[1, vocabulary]`."""
        return self._processed(logits, [before])

    def ranks(self, logits: Floats, answer: Sequence[int]) -> NDArray[np.float64]:
        """Returns the values that a search compares for each token `[tokens]`, in nats.

        Beam search compares log-probabilities. So does greedy search, up to a constant, unless a
        processor changes logits.
        """
        chosen = np.arange(len(answer)), list(answer)
        own = logits - log_sum_exp(logits)[:, None]
        if not self.options.reranks:
            return own[chosen].astype(np.float64)
        given = own if self.options.beam > 1 else logits
        histories = [answer[:count] for count in range(len(answer))]
        return self._processed(given, histories)[chosen].astype(np.float64)

    def _processed(self, logits: Floats, histories: Sequence[Sequence[int]]) -> Floats:
        lengths = np.array([len(history) for history in histories])
        tokens = np.zeros((len(histories), int(lengths.max())), np.int64)
        for row, history in zip(tokens, histories, strict=True):
            row[: len(history)] = history
        room = self.options.room(0 if self.has_encoder else len(self.source))
        request = Request(0, self.source, room, self.options.prefix)
        processors = build_logits_processors(
            self.options, [request], self.special.ends, has_encoder=self.has_encoder
        )
        prompt = [self.special.bos_id] if self.has_encoder else self.source
        sentences = np.zeros(len(histories), np.int64)
        return restrict(
            logits,
            [each for each in processors if each.active(lengths)],
            History(sentences, lengths, tokens, prompts_of([prompt])),
        )
