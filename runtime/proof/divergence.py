"""The first place at which two searches differ: a tie, or a defect?

A difference is a tie if the float64 oracle scores the two candidates closer together than rounding
within the tolerance can move them: either choice is right. In all other cases one of the two
computations is wrong. Any two decoders can be compared; the most exact one serves as the oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Generic, TypeAlias

import numpy as np
from numpy.typing import NDArray

from transferry.runtime.decoding.decoder import Decoder, State, StepOutput
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.decoding.hypothesis import Hypothesis
from transferry.runtime.decoding.logits import log_sum_exp
from transferry.runtime.decoding.sampling import draw_uniforms
from transferry.runtime.decoding.search import begin, pad_sources, search
from transferry.runtime.proof.compare import Tolerance
from transferry.runtime.proof.report import Difference
from transferry.runtime.proof.rules import Rules, distance_of_draws
from transferry.runtime.proof.units import logit_errors
from transferry.runtime.tokenizer.byte_pair import SpecialTokens

# Limit of an answer in units of its change by other roundings at borders, as in
# `Tolerance.budget`. Errors of all tokens of a vocabulary are about 3 times those of one, so that
# chance reaches it at 6 standard deviations.
CROSSED_TIMES = 2.0
# Up to so many times its floor, an error of torch is rounding in float32, and no crossed border:
# these move logits by a thousand times the floor and more.
ROUNDING_TIMES = 16.0


# Returns the scores of answers that each side gives.
Runs: TypeAlias = Callable[
    [Callable[[Decoder[Any]], Sequence["Forced"]]], Sequence[Sequence["Forced"]]
]


@dataclass(frozen=True)
class Divergence:
    """The first place at which two searches differ.

    Attributes:
        step: Number of tokens before the last one of the candidates.
        wanted: The candidate that torch ranked higher: tokens, the end token included.
        found: The candidate that the other decoder ranked higher.
        margin: Distance of their scores in the oracle.
        allowed: How far errors within the tolerance can move it.
        rounding: How far rounding in float32 can move it.
    """

    step: int
    wanted: tuple[int, ...]
    found: tuple[int, ...]
    margin: float
    allowed: float
    rounding: float

    @property
    def tie(self) -> bool:
        """Whether rounding in float32 explains the difference: no other precision makes a tie."""
        return self.margin <= self.rounding

    @property
    def passes(self) -> bool:
        """Whether errors within the tolerance explain the difference."""
        return self.margin <= self.allowed

    def difference(self, row: int) -> tuple[Difference, bool]:
        """Returns the divergence of a row as the report shows it, and whether it passes."""
        shown = Difference(row, str(self), self.margin, self.allowed, self.rounding)
        return shown, self.passes

    def __str__(self) -> str:
        verdict = "a tie" if self.tie else "tolerated" if self.passes else "a defect"
        return (
            f"step {self.step}: torch prefers {list(self.wanted)}, the graph {list(self.found)}; "
            f"the oracle's margin {self.margin:.2e} against {self.allowed:.2e} allowed: "
            f"{verdict}"
        )


@dataclass(frozen=True)
class Explainer:
    """Explains why two decoders gave different tokens.

    Attributes:
        reference: Gave the expected answers.
        decoder: Gave the other ones.
        oracle: Measures both.
        tolerance: Limits what counts as rounding.
        others: More measures of rounding, besides the reference.
        same_search: Whether `search` found the expected answers too, in a batch: those that it
            finds for a source alone are then as good.
        wider: Runs on these decoders, and with more roundings; asked before a difference is a
            defect.
    """

    reference: Decoder[Any]
    decoder: Decoder[Any]
    oracle: Decoder[Any]
    special: SpecialTokens
    tolerance: Tolerance
    options: GenerationOptions
    others: Sequence[Decoder[Any]] = ()
    same_search: bool = False
    wider: Runs | None = None

    def __call__(
        self,
        row: int,
        source: Sequence[int],
        wanted: Sequence[Hypothesis],
        found: Sequence[Hypothesis],
    ) -> tuple[Difference, bool]:
        """Explains a row; see `Explain`."""
        return self.explain(source, wanted, found, row).difference(row)

    def explain(
        self,
        source: Sequence[int],
        wanted: Sequence[Hypothesis],
        found: Sequence[Hypothesis],
        row_id: int = 0,
    ) -> Divergence:
        """Finds the place at which two searches over one source differ, and its margin.

        Greedy answers and single samples show the place themselves. Beam searches run again for
        this source alone, watched step by step; if they then agree, the difference came from the
        batch: a tie if the decoder's answers there are the reference's alone and `same_search`,
        else the answers given there are compared as a whole.

        The reference's hypotheses `wanted` and the decoder's `found` are best first; `row_id`
        seeded the row's samples.
        """
        pairs = self._candidates(source, wanted, found, row_id)
        if not pairs:
            both = _first_difference([_finished(wanted)], [_finished(found)])
            return Divergence(0, *both, 0.0, 0.0, 0.0)
        for runs in (self._runs, self.wider or self._runs):
            compared = (self._compared(source, *pair, row_id, runs) for pair in pairs)
            nearest = min(compared, key=lambda one: one.margin - one.allowed)
            if nearest.passes or self.wider is None:
                break
        return nearest

    def _runs(self, run: Callable[[Decoder[Any]], Sequence[Forced]]) -> list[Sequence[Forced]]:
        return [run(side) for side in (self.oracle, self.reference, *self.others)]

    def _compared(
        self,
        source: Sequence[int],
        left: tuple[int, ...],
        right: tuple[int, ...],
        penalty: float | None,
        row_id: int,
        runs: Runs,
    ) -> Divergence:
        """Measures the margin of two candidates; see `explain` and `_candidates`."""
        if not left or not right:
            return Divergence(0, left, right, np.inf, 0.0, 0.0)
        step = next(
            (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b),
            min(len(left), len(right)),
        )
        chosen = penalty is None
        if chosen:
            left, right = left[: step + 1], right[: step + 1]
        # Samples are ranked by the model's own scores.
        rules = self._rules if chosen or self.options.beam > 1 else None
        given = [source] * 2, [left, right], self.special, rules
        exact, *rounded = runs(lambda side: forced(side, *given))
        floor, borders = self.tolerance.floor, bool(self.others)
        errors = [
            RankErrors.of(one, moved, floor, borders=borders)
            for one, *moved in zip(exact, *rounded, strict=True)
        ]
        if chosen and self.options.sample:
            logits = self._rules(source).logits(exact[0].logits[step : step + 1], left[:step])[0]
            margin = self._draws(logits, (left[step], right[step]), row_id, step)
            # The cumulative distribution F moves by at most F (1 - F) times the spread of the
            # logits' errors over the temperature.
            pair = [self._moved(one, slice(step, step + 1)) for one in errors]
            moved = 0.5 * np.maximum(*pair) / self.options.temperature
            return Divergence(step, left, right, margin, *moved.tolist())
        margin, moved = 0.0, np.zeros(2)
        # Tokens that both begin with were scored once, and their errors are the same.
        shared = 0 if penalty else step
        for sign, one, error in zip((1, -1), exact, errors, strict=True):
            scale = one.ranks.size ** -(penalty or 0.0)
            margin += sign * scale * float(one.ranks[shared:].sum())
            moved += scale * self._moved(error, slice(shared, None))
        return Divergence(step, left, right, abs(margin), *moved.tolist())

    def _moved(self, errors: RankErrors, part: slice) -> NDArray[np.float64]:
        """Returns how far errors within the tolerance, and in float32, move a part of an answer."""
        allowed = errors.allowed(self.tolerance, part)
        rounding = errors if not self.others else replace(errors, each=errors.floor)
        float32 = replace(rounding, borders=False).allowed(Tolerance(), part)
        return np.array([allowed, min(allowed, float32)])

    def _candidates(
        self,
        source: Sequence[int],
        wanted: Sequence[Hypothesis],
        found: Sequence[Hypothesis],
        row_id: int,
    ) -> list[tuple[tuple[int, ...], tuple[int, ...], float | None]]:
        """Returns the first candidates that differ, and the length penalty of their scores.

        There are several pairs where each alone may be the cause; none where the reference gives
        the found hypotheses too. The penalty is None where the search chose or drew one token,
        without knowing the rest or the score of the whole.
        """
        answers, steps = ([_finished(wanted)], [_finished(found)]), list[list[Prefixes]]()
        penalty = None if self.options.beam == 1 else 0.0
        if self.options.sample and sorted(*answers[0]) == sorted(*answers[1]):
            # The same samples, ranked differently.
            return [(*_first_difference(*answers), self.options.length_penalty)]
        if self.options.beam == self.options.n_best == 1:
            left, right = _first_difference(*answers)
        else:
            watched = self._watch(self.reference, source, row_id)
            steps = [watched[0], self._watch(self.decoder, source, row_id)[0]]
            left, right = _first_difference(*steps)
            if self.same_search and not left and _ends(watched[1]) == _ends(found):
                return []
        if left:
            return [(left, right, penalty)]
        # The candidates were the same; they ended or were ranked differently.
        whole = _first_difference(*answers)
        beam = self.options.beam
        if beam == 1:
            return [(*whole, penalty)]
        edge = _displaced(wanted, found, steps[0], beam)
        return [*((*pair, penalty) for pair in edge), (*whole, self.options.length_penalty)]

    def _watch(
        self, decoder: Decoder[Any], source: Sequence[int], row_id: int
    ) -> tuple[list[Prefixes], list[Hypothesis]]:
        """Searches over one source; returns the prefixes that each step continued, and the end."""
        watcher = _Watcher(decoder)
        # Stop strings end a search and choose no token.
        options = replace(self.options, stop=())
        (answers,) = search(watcher, [source], options, self.special, row_ids=[row_id])
        return watcher.steps, answers

    def _draws(
        self, logits: NDArray[np.floating[Any]], tokens: tuple[int, int], row_id: int, step: int
    ) -> float:
        """Returns the least change of a distribution that lets a sample draw the other token.

        The ranking does not tell apart the samples of a row: any one may explain the difference.
        """
        options = self.options
        uniforms = draw_uniforms(options.seed, [row_id], options.n_best, options.max_length)
        return min(
            distance_of_draws(logits, tokens, uniform, options)
            for uniform in uniforms[:, step].tolist()
        )

    def _rules(self, source: Sequence[int]) -> Rules:
        return Rules(self.options, source, self.special, self.decoder.has_encoder)


@dataclass(frozen=True)
class Forced:
    """A decoder's scores of a given answer.

    Attributes:
        log_probabilities: `[tokens]` float64, of each token given those before it, in nats.
        ranks: What a search compared in their place `[tokens]` float64: the same, unless its rules
            change logits.
        logits: `[tokens, vocabulary]`.
    """

    log_probabilities: NDArray[np.float64]
    ranks: NDArray[np.float64]
    logits: NDArray[np.floating[Any]]


@dataclass(frozen=True)
class RankErrors:
    """torch's own errors of an answer, by token, in nats.

    Attributes:
        each: The largest error of a log-probability of the vocabulary at each token, or of the
            token's rank: one token may by chance be exact `[tokens]`.
        floor: Lower bound of the error at each token `[tokens]`.
        borders: Whether values may have crossed the border of two integers.
    """

    each: NDArray[np.float64]
    floor: NDArray[np.float64]
    borders: bool

    @classmethod
    def of(
        cls, exact: Forced, sides: Sequence[Forced], floor: float, *, borders: bool
    ) -> RankErrors:
        """Returns the errors of torch in float32, and of torch with other roundings if it rounds.

        `exact` are the oracle's scores of an answer, `sides` torch's; `floor` is the lower bound of
        an error, in `logit_units`.
        """
        units, errors = logit_errors(exact.logits, *(side.logits for side in sides))
        units = np.maximum(units, -exact.log_probabilities)
        errors = [units * each for each in errors]
        with np.errstate(invalid="ignore"):  # of a forbidden token both are minus infinity
            errors += [
                np.where(side.ranks == exact.ranks, 0.0, np.abs(side.ranks - exact.ranks))
                for side in sides
            ]
        return cls(np.max(errors, axis=0), floor * units, borders)

    @property
    def rounding(self) -> float:
        """How far rounding in float32 alone moves the sum of all ranks, in nats."""
        return Tolerance.factor * float(self.floor.sum())

    def allowed(self, tolerance: Tolerance, part: slice = slice(None)) -> float:
        """Returns how far the sum of the ranks of some tokens may be off, in nats.

        Errors of float32 may add up. A value that crosses a border moves all that follows, one
        token up and another down, so the squares of the tokens' errors add up.
        """
        each, floor = self.each[part], self.floor[part]
        own, crossed = np.maximum(each, floor), 0.0
        if self.borders:
            own = np.minimum(own, ROUNDING_TIMES * floor)
            crossed = CROSSED_TIMES * float(np.sqrt(np.square(each).sum()))
        return float(np.maximum(crossed, tolerance.factor * own.sum()))


def forced(
    decoder: Decoder[Any],
    sources: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    special: SpecialTokens,
    rules: Callable[[Sequence[int]], Rules] | None = None,
) -> list[Forced]:
    """Scores given answers in one pass, as one batch; none may be empty.

    `rules` returns the rules of a search over a source; None for none.
    """
    different = list(dict.fromkeys(map(tuple, sources)))
    owners = np.array([different.index(tuple(source)) for source in sources])
    state, first = begin(decoder, different, special)
    if len(different) < len(sources):  # the hypotheses of a beam share their source
        state, first = decoder.select(state, owners), first[owners]
    given = [[token, *answer[:-1]] for token, answer in zip(first.tolist(), answers, strict=True)]
    # Padding follows the scored tokens, and the state is not used again.
    output, _ = decoder.step(pad_sources(given, special.pad_id)[0], state)
    scores = []
    for source, answer, row in zip(sources, answers, output.all_logits, strict=True):
        kept, chosen = row[: len(answer)], (np.arange(len(answer)), list(answer))
        own = (kept[chosen] - log_sum_exp(kept)).astype(np.float64)
        ranks = own if rules is None else rules(source).ranks(kept, answer)
        scores.append(Forced(own, ranks, kept))
    return scores


Prefixes = list[tuple[int, ...]]


class _Watcher(Generic[State]):
    """A decoder that records the prefixes that the search continues."""

    shares_cache = False

    def __init__(self, decoder: Decoder[State]) -> None:
        self.decoder = decoder
        self.vocabulary_size = decoder.vocabulary_size
        self.has_encoder = decoder.has_encoder
        self.steps: list[Prefixes] = []

    def start(self, source: NDArray[np.int64], mask: NDArray[np.bool_]) -> tuple[State, Prefixes]:
        return self.decoder.start(source, mask), [()] * len(source)

    def step(
        self,
        tokens: NDArray[np.int64],
        state: tuple[State, Prefixes],
        *,
        top: int | None = None,
        normalise: bool = False,
    ) -> tuple[StepOutput, tuple[State, Prefixes]]:
        inner, prefixes = state
        output, inner = self.decoder.step(tokens, inner)
        prefixes = [(*prefix, *row) for prefix, row in zip(prefixes, tokens.tolist(), strict=True)]
        self.steps.append([prefix[1:] for prefix in prefixes])  # without the start token
        return output, (inner, prefixes)

    def select(
        self, state: tuple[State, Prefixes], rows: NDArray[np.int64]
    ) -> tuple[State, Prefixes]:
        inner, prefixes = state
        return self.decoder.select(inner, rows), [prefixes[row] for row in rows.tolist()]


def _first_difference(
    wanted: Sequence[Prefixes], found: Sequence[Prefixes]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the first two candidates that take each other's place, or empty ones."""
    for left, right in zip(wanted, found, strict=False):
        lost = [prefix for prefix in left if prefix not in right]
        won = [prefix for prefix in right if prefix not in left]
        if lost and won:
            return lost[0], won[0]
        for one, other in zip_longest(left, right, fillvalue=()):
            if one != other:
                return one, other
    return (), ()


def _displaced(
    wanted: Sequence[Hypothesis], found: Sequence[Hypothesis], steps: Sequence[Prefixes], beam: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yields the candidates that decide whether an ended one is kept.

    A beam keeps those that end among its best candidates, and continues the best of the others: an
    ended one may be kept or not where the same prefixes go on. Of each hypothesis that one side
    lacks, these are it and the prefix of its length that would take its place.
    """
    sides = _finished(wanted), _finished(found)
    for ended in {*sides[0]} ^ {*sides[1]}:
        side = sides[ended in sides[1]]
        before = sum(len(each) == len(ended) for each in side[: side.index(ended)])
        rivals = steps[len(ended)] if len(ended) < len(steps) else []
        if 0 <= beam - 1 - before < len(rivals):
            rival = rivals[beam - 1 - before]
            yield (rival, ended) if ended in sides[1] else (ended, rival)


def _ends(hypotheses: Sequence[Hypothesis]) -> list[tuple[Any, ...]]:
    return [(each.tokens, each.end, each.finish_reason) for each in hypotheses]


def _finished(hypotheses: Sequence[Hypothesis]) -> Prefixes:
    return [hypothesis.scored_tokens for hypothesis in hypotheses]
