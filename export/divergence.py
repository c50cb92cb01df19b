"""Two searches over one source came to different tokens: a tie, or a defect?

Where the two best candidates are closer in the float64 oracle than rounding errors within the
tolerance can move them, either choice is right, and the difference is a tie. Where they are
further apart, one of the two computations is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Generic

import numpy as np
from numpy.typing import NDArray

from transferry.export.torch_decoder import TorchDecoder
from transferry.runtime.compare import Tolerance
from transferry.runtime.decoder import Decoder, State
from transferry.runtime.hypothesis import Hypothesis
from transferry.runtime.logits import log_sum_exp
from transferry.runtime.options import GenerationOptions
from transferry.runtime.search import begin, search
from transferry.runtime.tokenizer import SpecialTokens


@dataclass(frozen=True)
class Divergence:
    """The first place where two searches part.

    Attributes:
        step: Number of tokens before the candidates' last one.
        wanted: The candidate that torch ranked higher: tokens, the end token included.
        found: The candidate that the other ranked higher.
        margin: Distance of their scores in the oracle.
        allowed: How far errors within the tolerance can move it.
    """

    step: int
    wanted: tuple[int, ...]
    found: tuple[int, ...]
    margin: float
    allowed: float

    @property
    def tie(self) -> bool:
        """Whether rounding alone explains the difference."""
        return self.margin <= self.allowed

    def __str__(self) -> str:
        verdict = "a tie" if self.tie else "a defect"
        return (
            f"step {self.step}: torch prefers {list(self.wanted)}, the graph {list(self.found)}; "
            f"the oracle's margin {self.margin:.2e} against {self.allowed:.2e} of rounding: "
            f"{verdict}"
        )


def explain(
    source: Sequence[int],
    options: GenerationOptions,
    reference: TorchDecoder,
    decoder: Decoder[Any],
    oracle: TorchDecoder,
    special: SpecialTokens,
    tolerance: Tolerance,
) -> Divergence:
    """Finds where two searches over one source part, and measures the margin there.

    The searches are run again for this source alone, watched step by step. Where they agree when
    run alone, the difference came from the batch, which is a defect by itself: its margin is
    infinite.
    """
    wanted, wanted_steps = _watch(reference, source, options, special)
    found, found_steps = _watch(decoder, source, options, special)
    left, right = _first_difference(wanted_steps, found_steps)
    penalty = 0.0
    if not left:
        # The same candidates lived; they ended or were ranked differently.
        left, right = _first_difference(
            [_finished(wanted, special.eos_id)], [_finished(found, special.eos_id)]
        )
        penalty = options.length_penalty
    if not left or not right:
        return Divergence(0, left, right, np.inf, 0.0)
    step = next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b),
        min(len(left), len(right)),
    )
    if options.beam == 1:
        # Greedy search chose here, blind to what follows and to the score of the whole.
        left, right, penalty = left[: step + 1], right[: step + 1], 0.0
    margin, allowed = 0.0, 0.0
    for sign, tokens in ((1, left), (-1, right)):
        exact, largest = _log_probabilities(oracle, source, tokens, special)
        rounded, _ = _log_probabilities(reference, source, tokens, special)
        scale = len(tokens) ** -penalty
        # Relative to the largest logit, as everywhere else.
        errors = [tolerance.budget(error / largest) * largest for error in np.abs(rounded - exact)]
        margin += sign * scale * float(exact.sum())
        allowed += scale * float(np.sum(errors))
    return Divergence(step, left, right, abs(margin), allowed)


Prefixes = list[tuple[int, ...]]


@dataclass(frozen=True)
class _WatchedState(Generic[State]):
    inner: State
    prefixes: Prefixes


class _Watcher(Generic[State]):
    """A decoder that writes down which prefixes it is asked to continue."""

    def __init__(self, decoder: Decoder[State]) -> None:
        self.decoder = decoder
        self.vocabulary_size = decoder.vocabulary_size
        self.has_encoder = decoder.has_encoder
        self.steps: list[Prefixes] = []

    def start(self, source: NDArray[np.int64], mask: NDArray[np.bool_]) -> _WatchedState[State]:
        return _WatchedState(self.decoder.start(source, mask), [()] * len(source))

    def step(
        self, tokens: NDArray[np.int64], state: _WatchedState[State]
    ) -> tuple[NDArray[np.floating[Any]], _WatchedState[State]]:
        logits, inner = self.decoder.step(tokens, state.inner)
        prefixes = [
            (*prefix, *row) for prefix, row in zip(state.prefixes, tokens.tolist(), strict=True)
        ]
        self.steps.append([prefix[1:] for prefix in prefixes])  # without the start token
        return logits, _WatchedState(inner, prefixes)

    def select(self, state: _WatchedState[State], rows: NDArray[np.int64]) -> _WatchedState[State]:
        inner = self.decoder.select(state.inner, rows)
        return _WatchedState(inner, [state.prefixes[row] for row in rows.tolist()])


def _watch(
    decoder: Decoder[Any],
    source: Sequence[int],
    options: GenerationOptions,
    special: SpecialTokens,
) -> tuple[list[Hypothesis], list[Prefixes]]:
    watcher = _Watcher(decoder)
    (hypotheses,) = search(watcher, [source], options, special)
    return hypotheses, watcher.steps


def _first_difference(
    wanted: Sequence[Prefixes], found: Sequence[Prefixes]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The two candidates that first take each other's place; empty where there are none."""
    for left, right in zip(wanted, found, strict=False):
        lost = [prefix for prefix in left if prefix not in right]
        won = [prefix for prefix in right if prefix not in left]
        if lost and won:
            return lost[0], won[0]
        for one, other in zip_longest(left, right, fillvalue=()):
            if one != other:
                return one, other
    return (), ()


def _finished(hypotheses: Sequence[Hypothesis], eos_id: int) -> Prefixes:
    return [
        (*item.tokens, eos_id) if item.finish_reason == "end" else item.tokens
        for item in hypotheses
    ]


def _log_probabilities(
    decoder: TorchDecoder, source: Sequence[int], tokens: Sequence[int], special: SpecialTokens
) -> tuple[NDArray[np.floating[Any]], float]:
    """The log-probability of each token [tokens] after those before it, and the largest logit."""
    state, first = begin(decoder, [source], special)
    logits, _ = decoder.step(np.array([[*first, *tokens[:-1]]]), state)
    scores = logits[0].astype(np.float64)
    normalised = scores - log_sum_exp(scores)[:, None]
    return normalised[np.arange(len(tokens)), list(tokens)], float(np.abs(scores).max())
