"""The rules of a search on the logits of a given answer, and how near another token was drawn."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from transferry.runtime.decoding.sampling import Sampler, typical_distances
from transferry.runtime.decoding.strategy import Request
from transferry.runtime.tokenizer.special_tokens import SpecialTokens

Floats = NDArray[np.floating[Any]]
_TIE = 1e-13  # nats between tokens of equal logits


@dataclass(frozen=True)
class Rules:
    """The logits processors of a search over one source, which an encoder reads or the decoder."""

    options: GenerationOptions
    source: Sequence[int]
    special: SpecialTokens
    has_encoder: bool

    def logits(self, logits: Floats, before: Sequence[int]) -> Floats:
        """Returns the logits of one token after the processors `[1, vocabulary]`."""
        room = self.options.room(0 if self.has_encoder else len(self.source))
        request = Request(0, self.source, room, self.options.prefix)
        processors = build_logits_processors(
            self.options, [request], self.special.ends, has_encoder=self.has_encoder
        )
        prompt = [self.special.bos_id] if self.has_encoder else self.source
        tokens = np.array(before, np.int64)[None]
        history = History(np.zeros(1, np.int64), tokens, prompts_of([prompt]))
        return restrict(logits, [each for each in processors if each.active(len(before))], history)

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
        ruled = [self.logits(row[None], answer[:place]) for place, row in enumerate(given)]
        return np.concatenate(ruled)[chosen].astype(np.float64)


def distance_of_draws(
    logits: NDArray[np.floating[Any]],
    tokens: tuple[int, int],
    uniform: float,
    options: GenerationOptions,
) -> float:
    """Returns how far the cumulative distribution must move for a draw of either token.

    Where top k or top p cuts it, tokens near the cut may come and go, with all their mass.
    """
    low, high = min(tokens), max(tokens)
    # The sampler admits all tokens that tie at a cut; rounding breaks ties, by far more than here.
    logits = logits - logits.max() - _TIE * np.arange(len(logits))
    weights = Sampler(options, np.zeros((0, 0))).weights(logits[None])[0]
    cumulative = weights.cumsum() / weights.sum()
    below = cumulative[high - 1] - uniform if high else 0.0
    outside = float(max(below, uniform - cumulative[low], 0.0))
    needed, shares = _cuts(logits, weights, options)
    least = max((float(needed[token]) for token in tokens if not weights[token]), default=0.0)
    order = np.argsort(needed, kind="stable")
    left = np.maximum(needed[order], outside - shares[order].cumsum())
    return max(least, min(outside, float(left.min())))


def _cuts(
    logits: NDArray[np.floating[Any]], weights: NDArray[np.float64], options: GenerationOptions
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns how far the distribution must move for each token to pass the cut, and its share.

    A logit has to pass that of the token at the other side of the cut, which moves the cumulative
    distribution by a quarter of their distance at most; or, of top p, the mass held has to pass it.
    The cuts of min p and typical p come after, and rank by the values that they compare.
    """

    def cut(**changes: Any) -> NDArray[np.float64]:
        found = Sampler(replace(options, **changes), np.zeros((0, 0))).weights(logits[None])
        row: NDArray[np.float64] = found[0]
        return row

    untyped: dict[str, Any] = {"typical_p": 1.0}
    whole = cut(top_k=0, top_p=1.0, min_p=0.0, **untyped)
    nucleus = cut(min_p=0.0, **untyped)
    order, count = np.argsort(-whole, kind="stable"), np.count_nonzero(nucleus)
    last, needed = order[count - 1], np.full(len(whole), np.inf)
    is_cut = count < np.count_nonzero(whole)
    with np.errstate(divide="ignore"):
        logarithms = np.log(whole)
    if is_cut:
        following = order[count]
        other = np.where(nucleus > 0, logarithms[following], logarithms[last])
        needed = np.abs(logarithms - other) / 4
    if options.top_p < 1:
        within = cut(top_p=1.0, min_p=0.0, **untyped)
        held, share = nucleus.sum() / within.sum(), nucleus[last] / within.sum()
        needed[last] = min(needed[last], options.top_p - held + share)
        if is_cut:
            needed[following] = min(needed[following], held - options.top_p)
    stages = [(logarithms, nucleus, cut(**untyped))]
    stages.append((-typical_distances(stages[0][2][None])[0], stages[0][2], weights))
    for rank, before, after in stages:
        dropped = (before > 0) & (after == 0)
        if dropped.any():
            other = np.where(after > 0, rank[dropped].max(), rank[after > 0].min())
            with np.errstate(invalid="ignore"):
                distance = np.abs(rank - other) / 4
            needed = np.where(before > 0, np.minimum(needed, distance), needed)
    return np.maximum(needed, 0.0), whole / weights.sum()
