"""Two searches over one source came to different tokens: a tie, or a defect?

Where the two best candidates are closer in the float64 oracle than rounding errors within the
tolerance can move them, either choice is right, and the difference is a tie. Where they are
further apart, one of the two computations is wrong. Any two decoders can be compared, and whatever
is the most exact of those at hand serves as the oracle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Generic

import numpy as np
from numpy.typing import NDArray

from transferry.runtime.decoding.decoder import Decoder, State, StepOutput
from transferry.runtime.decoding.hypothesis import Hypothesis
from transferry.runtime.decoding.logits import log_sum_exp
from transferry.runtime.decoding.logits_processors import (
    History,
    build_logits_processors,
    restrict,
)
from transferry.runtime.decoding.options import GenerationOptions
from transferry.runtime.decoding.sampling import Sampler, draw_uniforms
from transferry.runtime.decoding.search import begin, pad_sources, search
from transferry.runtime.parity.compare import Tolerance
from transferry.runtime.tokenizer.byte_pair import SpecialTokens


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
    wanted: Sequence[Hypothesis],
    found: Sequence[Hypothesis],
    reference: Decoder[Any],
    decoder: Decoder[Any],
    oracle: Decoder[Any],
    special: SpecialTokens,
    tolerance: Tolerance,
    row_id: int = 0,
) -> Divergence:
    """Finds where two searches over one source part, and measures the margin there.

    Greedy answers and single samples tell it themselves. Of a beam the searches are run again for
    this source alone, watched step by step; where they agree when run alone, the difference came
    from the batch, and the answers given there are compared as a whole.

    Args:
        source: Token ids, as the search takes them.
        options: How both searched.
        wanted: What the reference answered, best first.
        found: What the decoder answered.
        reference: What gave the wanted answer.
        decoder: What gave the other.
        oracle: What both are measured by.
        special: The ids that pad, begin and end.
        tolerance: How far rounding may reach.
        row_id: What seeded the row's samples.
    """
    answers = [_finished(wanted, special.eos_id)], [_finished(found, special.eos_id)]
    penalty = 0.0
    if options.beam == options.n_best == 1:
        left, right = _first_difference(*answers)
    else:
        left, right = _first_difference(
            *(_watch(side, source, options, special, row_id) for side in (reference, decoder))
        )
    if not left:
        # The same candidates lived; they ended or were ranked differently.
        left, right = _first_difference(*answers)
        penalty = options.length_penalty
    if not left or not right:
        return Divergence(0, left, right, np.inf, 0.0)
    step = next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b),
        min(len(left), len(right)),
    )
    if options.beam == 1:
        # The search chose here, blind to what follows and to the score of the whole.
        left, right, penalty = left[: step + 1], right[: step + 1], 0.0
    exact = forced(oracle, [source] * 2, [left, right], special)
    rounded = forced(reference, [source] * 2, [left, right], special)
    # Relative to the largest logit, as everywhere else.
    errors = [
        np.array([tolerance.budget(value / one.largest) * one.largest for value in error])
        for one, other in zip(exact, rounded, strict=True)
        for error in [np.abs(other.log_probabilities - one.log_probabilities)]
    ]
    if options.sample:
        # Which of several samples it is, their ranking does not tell: one must explain it.
        uniforms = draw_uniforms(options.seed, [row_id], options.n_best, options.max_length)
        logits = exact[0].logits[step : step + 1].copy()
        history, lengths = np.array([left[:step]], np.int64), np.array([step])
        processors = build_logits_processors(options, [options.prefix], special.eos_id)
        if active := [processor for processor in processors if processor.active(lengths)]:
            logits = restrict(logits, active, History(np.zeros(1, np.int64), lengths, history))
        margin = min(
            _distance_of_draws(logits[0], (left[step], right[step]), uniform, options)
            for uniform in uniforms[:, step].tolist()
        )
        # The cumulative distribution F moves by at most F (1 - F) times the spread of the logits'
        # errors over the temperature.
        allowed = float(0.5 * max(one[step] for one in errors) / options.temperature)
        return Divergence(step, left, right, margin, allowed)
    margin, allowed = 0.0, 0.0
    for sign, one, error in zip((1, -1), exact, errors, strict=True):
        scale = len(error) ** -penalty
        margin += sign * scale * float(one.log_probabilities.sum())
        allowed += scale * float(error.sum())
    return Divergence(step, left, right, abs(margin), allowed)


def _distance_of_draws(
    logits: NDArray[np.floating[Any]],
    tokens: tuple[int, int],
    uniform: float,
    options: GenerationOptions,
) -> float:
    """How far the cumulative distribution must move for the draw to fall on either token."""
    low, high = min(tokens), max(tokens)
    weights = Sampler(options, np.zeros((0, 0))).weights(logits[None])[0]
    cumulative = weights.cumsum() / weights.sum()
    return float(max(cumulative[high - 1] - uniform, uniform - cumulative[low], 0.0))


@dataclass(frozen=True)
class Forced:
    """What a decoder makes of an answer that it is given.

    Attributes:
        log_probabilities: Of each token after those before it, in nats [tokens].
        logits: [tokens, vocabulary]
        largest: The largest of all their magnitudes.
    """

    log_probabilities: NDArray[np.float64]
    logits: NDArray[np.floating[Any]]
    largest: float


def forced(
    decoder: Decoder[Any],
    sources: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    special: SpecialTokens,
) -> list[Forced]:
    """Scores given answers in one pass, as one batch; none may be empty."""
    different = list(dict.fromkeys(map(tuple, sources)))
    owners = np.array([different.index(tuple(source)) for source in sources])
    state, first = begin(decoder, different, special)
    if len(different) < len(sources):  # the hypotheses of a beam share their source
        state, first = decoder.select(state, owners), first[owners]
    given = [[token, *answer[:-1]] for token, answer in zip(first.tolist(), answers, strict=True)]
    # What is padded lies behind what is scored, and the state is not used again.
    output, _ = decoder.step(pad_sources(given, special.pad_id)[0], state)
    scores = []
    for answer, row in zip(answers, output.all_logits, strict=True):
        kept = row[: len(answer)]
        log_probabilities = kept[np.arange(len(answer)), list(answer)] - log_sum_exp(kept)
        largest = float(np.abs(kept).max())
        scores.append(Forced(log_probabilities.astype(np.float64), kept, largest))
    return scores


Prefixes = list[tuple[int, ...]]


@dataclass(frozen=True)
class _WatchedState(Generic[State]):
    inner: State
    prefixes: Prefixes


class _Watcher(Generic[State]):
    """A decoder that writes down which prefixes it is asked to continue."""

    shares_cache = False

    def __init__(self, decoder: Decoder[State]) -> None:
        self.decoder = decoder
        self.vocabulary_size = decoder.vocabulary_size
        self.has_encoder = decoder.has_encoder
        self.steps: list[Prefixes] = []

    def start(self, source: NDArray[np.int64], mask: NDArray[np.bool_]) -> _WatchedState[State]:
        return _WatchedState(self.decoder.start(source, mask), [()] * len(source))

    def step(
        self,
        tokens: NDArray[np.int64],
        state: _WatchedState[State],
        *,
        top: int | None = None,
        normalise: bool = False,
    ) -> tuple[StepOutput, _WatchedState[State]]:
        output, inner = self.decoder.step(tokens, state.inner)
        prefixes = [
            (*prefix, *row) for prefix, row in zip(state.prefixes, tokens.tolist(), strict=True)
        ]
        self.steps.append([prefix[1:] for prefix in prefixes])  # without the start token
        return output, _WatchedState(inner, prefixes)

    def select(self, state: _WatchedState[State], rows: NDArray[np.int64]) -> _WatchedState[State]:
        inner = self.decoder.select(state.inner, rows)
        return _WatchedState(inner, [state.prefixes[row] for row in rows.tolist()])


def _watch(
    decoder: Decoder[Any],
    source: Sequence[int],
    options: GenerationOptions,
    special: SpecialTokens,
    row_id: int,
) -> list[Prefixes]:
    watcher = _Watcher(decoder)
    search(watcher, [source], options, special, row_ids=[row_id])
    return watcher.steps


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
    return [scored_tokens(item, eos_id) for item in hypotheses]


def scored_tokens(hypothesis: Hypothesis, eos_id: int) -> tuple[int, ...]:
    """Returns the tokens that count in a hypothesis' score: the end token too, if it ended."""
    ended = hypothesis.finish_reason == "end"
    return (*hypothesis.tokens, eos_id) if ended else hypothesis.tokens
