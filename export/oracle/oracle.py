"""torch in float32 and in float64: the expected tensors, answers and scores of a proof."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, Self, TypeVar

import numpy as np

from transferry.build_model.model.config import ModelConfig
from transferry.build_model.model.transformer import Transformer
from transferry.export.oracle.cases import MOST_LOGITS, RECORDED, recorded_cases, search_settings
from transferry.export.oracle.rounding import Borders, integer_sides
from transferry.export.rewrite.calibration import Calibration
from transferry.export.torch_model import TorchDecoder, moved_heads
from transferry.runtime.decoding.batching import length_batches
from transferry.runtime.decoding.decoder import Decoder, Tensors
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.decoding.hypothesis import Hypothesis, length_normalised
from transferry.runtime.decoding.search import search
from transferry.runtime.precision import FLOAT32, Precision
from transferry.runtime.proof.compare import (
    NEAR,
    Case,
    Comparison,
    Tolerance,
    Truth,
    are_near,
    compare,
    nearby,
    observe,
    truth,
)
from transferry.runtime.proof.divergence import Explainer, Forced, RankErrors, forced
from transferry.runtime.proof.recorded import RecordedSearch, Reference
from transferry.runtime.proof.rules import Rules
from transferry.runtime.proof.tally import ExactScore, ExpectedAnswers
from transferry.runtime.proof.units import logit_units
from transferry.runtime.tokenizer.byte_pair import SpecialTokens

ROWS = 64  # hypotheses searched together, or more of a small model
# A step of a small model costs as much for many rows as for few.
MOST_ROWS, SMALL_LOGITS = 512, 1 << 21
SCORED_TOKENS = 8192  # in a batch of answers
SHAKES = 4  # of torch in float32, where an error exceeds its limit
# Where it is so many times its limit at most: one rounding in 10 of a near tie in a softmax may be
# 100 times the usual one. They count where they widen a limit so many times; otherwise their
# largest would only let larger faults pass.
MORE_SHAKES, NARROWLY, WIDER = 32, 16.0, 4.0
BORDER_SHAKES = 8  # of values at borders: where few lie at one, each combination gives other bits
SINGLE = -1  # torch in float32 alone, as `nearby`
Found = TypeVar("Found")


@dataclass(frozen=True, eq=False)
class Oracle:
    """torch's side of a comparison.

    Attributes:
        trained: torch in float32.
        reference: `trained`, or torch with the rounding of a variant of integers: the expected
            tokens are its answers.
        exact: `reference` in float64, against which errors are measured.
        others: `exact` with the values at a border rounded to the other integer, if it rounds
            values; see `integer_sides`.
        rounds: Whether these sides have other weights than `trained`.
        remembers: Whether the truth of each case is kept, as expected answers are.
    """

    config: ModelConfig
    special: SpecialTokens
    tolerance: Tolerance
    trained: TorchDecoder
    reference: TorchDecoder
    exact: TorchDecoder
    others: Sequence[TorchDecoder] = ()
    rounds: bool = False
    remembers: bool = False
    # By source, tokens, shakes and how they were ranked: searches share many answers.
    _scored: dict[Any, ExactScore] = field(default_factory=dict, repr=False)
    _truths: dict[tuple[int, int], tuple[Case, Truth]] = field(default_factory=dict, repr=False)
    _expected: dict[Any, list[ExpectedAnswers]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls,
        model: Transformer,
        special: SpecialTokens,
        tolerance: Tolerance,
        *,
        precision: Precision = FLOAT32,
        calibration: Calibration | None = None,
    ) -> Self:
        """Returns the oracle of a model, with the rounding of a variant of the precision.

        An int8 variant has a calibration.
        """
        trained = TorchDecoder(model)
        sides = integer_sides(model, precision, calibration)
        reference, exact, *others = sides or [trained, TorchDecoder.oracle(model)]
        given = model.config, special, tolerance, trained, reference, exact
        return cls(*given, others, rounds=bool(sides))

    def remembering(self) -> Self:
        """Returns the same oracle, which computes the truth of each case once."""
        return replace(self, remembers=True, _truths={})

    def observe(self, side: TorchDecoder, case: Case) -> Tensors:
        """Runs a case on a side."""
        return observe(side if self.config.decoder_layers else side.encoder, case)

    def truth(self, case: Case, shakes: int = 0) -> Truth:
        """Returns the expected tensors of a case; for `shakes` see `sides`, or `SINGLE`."""
        key = id(case), shakes
        if key in self._truths:
            return self._truths[key][1]
        if shakes == SINGLE:
            found = nearby(case, self.observe(self.reference, case))
        else:
            sides, least = self.sides(case, shakes)
            found = self.judged(case, sides, least)
        if self.remembers:
            self._truths[key] = case, found
        return found

    def compared(
        self,
        case: Case,
        found: Tensors,
        only: Collection[str] | None = None,
        expected: Truth | None = None,
    ) -> list[Comparison]:
        """Compares every tensor of a case, or only some, with expected ones if these are known.

        With torch in float32 first; float64 takes twice its time, and measures what is not near.

        Where a position hangs on one number, as where a softmax is nearly a choice, torch may by
        chance round that to much less than its usual error. So an error beyond its limit is
        compared with the largest error of several roundings.
        """
        plain = not self.rounds and self.tolerance.factor == Tolerance.factor
        if expected is None and plain and not (case.measured or self.config.has_head):
            items = compare(case, self.truth(case, SINGLE), found, self.tolerance, only)
            if are_near(items):
                return items
        items = compare(case, expected or self.truth(case), found, self.tolerance, only)
        if any(item.fault for item in items):
            items = compare(case, self.truth(case, SHAKES), found, self.tolerance, only)
        limit = self.tolerance.budget
        beyond = [each for each in items if each.fault and each.error > limit(each.reference_error)]
        if beyond and all(each.error <= NARROWLY * each.budget for each in beyond):
            more = compare(case, self.truth(case, MORE_SHAKES), found, self.tolerance, only)
            pairs = zip(items, more, strict=True)
            items = [new if new.budget > WIDER * old.budget else old for old, new in pairs]
        return items

    def judged(self, case: Case, sides: Sequence[Tensors], least: float = 0.0) -> Truth:
        """Returns the expected tensors of a case, given those of `sides`."""
        return truth(case, *sides, least=least, borders=bool(self.others))

    def shaken(self, run: Callable[[TorchDecoder], Found], times: int) -> Iterator[Found]:
        """Computes in float32 several times, each rounded in another way."""
        for number in range(times):
            with self.reference.shaken(number):
                yield run(self.reference)

    def runs(self, run: Callable[[TorchDecoder], Found], shakes: int = 0) -> list[Found]:
        """Computes on `exact`, `reference` and `others`, and on `reference` shaken some times.

        If it rounds values, `exact` also computes several times with those at a border rounded
        either way, the border being as wide as float32 makes it there; see `Borders`.
        """
        found = [run(side) for side in (self.exact, self.reference, *self.others)]
        found += self.shaken(run, shakes)
        if not (shakes and self.rounds and self.others):
            return found
        borders = Borders()
        with self.exact.rounding(borders):
            run(self.exact)
        with self.reference.rounding(borders):
            for _ in self.shaken(lambda side: run(borders.again(side)), shakes):
                pass
        for seed in range(BORDER_SHAKES):
            with self.exact.rounding(borders):
                found.append(run(borders.again(self.exact, seed)))
        return found

    def sides(self, case: Case, shakes: int = 0) -> tuple[list[Tensors], float]:
        """Returns the tensors of `runs`, of a head moved by rounding too; and the head's unit."""
        sides = self.runs(partial(self.observe, case=case), shakes)
        if not self.config.has_head:
            return sides, 0.0
        moved, unit = moved_heads(self.exact.encoder, case.mask, *sides)
        return [*sides, *moved], unit

    @property
    def rows(self) -> int:
        """Number of hypotheses searched together."""
        return max(ROWS, min(MOST_ROWS, SMALL_LOGITS // self.config.vocabulary_size))

    def batches(
        self, lengths: Sequence[int], rows: int = ROWS, tokens: int = 1 << 62
    ) -> Iterator[list[int]]:
        """Yields rows of similar length whose logits fit into memory."""
        for batch in length_batches(lengths, rows, tokens):
            longest = max(lengths[row] for row in batch)
            most = max(1, MOST_LOGITS // (longest * self.config.vocabulary_size))
            for first in range(0, len(batch), most):
                yield batch[first : first + most]

    def expected(
        self,
        sources: Sequence[Sequence[int]],
        options: GenerationOptions,
        *,
        prefixes: Sequence[Sequence[int]] | None = None,
        rows: int | None = None,
    ) -> Iterator[ExpectedAnswers]:
        """Yields the reference's answers without the oracle's scores, a batch at a time.

        Answers begin with `prefixes`; a batch has at most `rows` rows, by default `Oracle.rows`
        hypotheses.
        """
        given = (tuple(map(tuple, each)) for each in (sources, prefixes or ()))
        key = (*given, options, rows)
        if key in self._expected:
            yield from self._expected[key]
            return
        kept = []
        lengths = [len(source) for source in sources]
        for batch in length_batches(lengths, rows or max(1, self.rows // options.beam), 4096):
            chosen = [sources[row] for row in batch]
            begun = prefixes and [prefixes[row] for row in batch]
            asked = self.reference, chosen, replace(options, scores=True), self.special
            wanted = search(*asked, row_ids=batch, prefixes=begun)
            answers = ExpectedAnswers(batch, chosen, wanted)
            kept.append(answers)
            yield answers
        self._expected[key] = kept

    def trained_answers(
        self, sources: Sequence[Sequence[int]], options: GenerationOptions
    ) -> list[Sequence[Hypothesis]]:
        """Searches with the model as trained."""
        trained = replace(self, reference=self.trained, _expected={})
        found = {
            row: hypotheses
            for batch in trained.expected(sources, options)
            for row, hypotheses in zip(batch.rows, batch.hypotheses, strict=True)
        }
        return [found[row] for row in range(len(sources))]

    def explainer(self, decoder: Decoder[Any], options: GenerationOptions) -> Explainer:
        """Returns a judge of differences between the reference's tokens and a decoder's."""
        sides = self.reference, decoder, self.exact
        wider = partial(self.runs, shakes=SHAKES)
        return Explainer(*sides, self.special, self.tolerance, options, self.others, wider=wider)

    def errors(
        self,
        sources: Sequence[Sequence[int]],
        answers: Sequence[Sequence[int]],
        rules: Callable[[Sequence[int]], Rules] | None = None,
        shakes: int = 0,
    ) -> list[tuple[Forced, RankErrors]]:
        """Returns the oracle's scores of the tokens of answers, with torch's own errors.

        For `rules` see `forced`, for `shakes` see `runs`.
        """
        given = sources, answers, self.special, rules
        runs = self.runs(lambda side: forced(side, *given), shakes)
        floor, borders = self.tolerance.floor, bool(self.others)
        return [
            (one, RankErrors.of(one, moved, floor, borders=borders))
            for one, *moved in zip(*runs, strict=True)
        ]

    def scores(
        self,
        sources: Sequence[Sequence[int]],
        answers: Sequence[Sequence[Hypothesis]],
        options: GenerationOptions,
        shakes: int = 0,
    ) -> list[list[ExactScore]]:
        """Returns the oracle's score of each hypothesis, normalised by its length.

        The score is NaN where the search failed, so that nothing equals it. For `shakes` see
        `runs`; without them a score has its `wider` form.
        """
        # Only beam search has scores that rules changed.
        ranked = options if options.reranks and options.beam > 1 else None
        rules = None
        if ranked is not None:
            rules = partial(
                Rules,
                options,
                special=self.special,
                has_encoder=bool(self.config.encoder_layers),
            )
        keys = [
            [(tuple(source), item.scored_tokens, ranked, shakes) for item in hypotheses]
            for source, hypotheses in zip(sources, answers, strict=True)
        ]
        # A search that failed has no tokens.
        new = [key for key in dict.fromkeys(chain(*keys)) if key[1] and key not in self._scored]
        measure = partial(self.errors, rules=rules, shakes=shakes)
        for key, (one, errors) in self._batched(new, measure):
            own = errors.allowed(self.tolerance) / self.tolerance.factor
            rounding = errors.rounding if self.others else np.inf
            self._scored[key] = ExactScore(float(one.ranks.sum()), own, rounding)

        def wider(source: Sequence[int], item: Hypothesis) -> ExactScore:
            return self.scores([source], [[item]], options, SHAKES)[0][0]

        def score(key: Any, source: Sequence[int], item: Hypothesis) -> ExactScore:
            whole = self._scored.get(key, ExactScore(np.nan, self.tolerance.floor))
            length, penalty = max(1, len(key[1])), options.length_penalty
            one, own, rounding = (length_normalised(each, length, penalty) for each in whole[:3])
            return ExactScore(one, own, rounding, None if shakes else partial(wider, source, item))

        return [
            [score(key, source, item) for key, item in zip(row, hypotheses, strict=True)]
            for row, source, hypotheses in zip(keys, sources, answers, strict=True)
        ]

    def _batched(
        self, keys: Sequence[Any], measure: Callable[[Any, Any], Iterable[Found]]
    ) -> Iterator[tuple[Any, Found]]:
        """Measures sources and answers in batches; yields each with its measurement."""
        for batch in self.batches([len(key[1]) for key in keys], self.rows, SCORED_TOKENS):
            chosen = [keys[index] for index in batch]
            given = [key[0] for key in chosen], [key[1] for key in chosen]
            yield from zip(chosen, measure(*given), strict=True)

    def scored(
        self,
        expected: ExpectedAnswers,
        found: Sequence[Sequence[Sequence[Hypothesis]]],
        options: GenerationOptions,
    ) -> ExpectedAnswers:
        """Returns expected answers with the oracle's scores, or torch's near those that are found.

        `found` are the hypotheses of each source, once for each time that it was answered.

        A score near torch's in float32 is within its limit, which is at least 8 times the least
        error of all its tokens, and torch's own error. Those of the first source are measured in
        any case, for torch's own error.
        """
        near = set[Any]() if options.reranks else self._near(expected, found, options)
        placed = [
            [((row, place), item) for place, item in enumerate(items)]
            for row, items in enumerate(expected.hypotheses)
        ]
        doubted = [[item for at, item in row if at not in near] for row in placed]
        exact = map(iter, self.scores(expected.sources, doubted, options))
        scores = [
            [ExactScore(item.score, np.inf) if at in near else next(rest) for at, item in row]
            for row, rest in zip(placed, exact, strict=True)
        ]
        return replace(expected, scores=scores)

    def _near(
        self,
        expected: ExpectedAnswers,
        found: Sequence[Sequence[Sequence[Hypothesis]]],
        options: GenerationOptions,
    ) -> set[tuple[int, int]]:
        """Returns row and place of each hypothesis whose scores are near torch's; see `scored`.

        Rules change scores, and not the units.
        """
        apart, keys = dict[tuple[int, int], float](), dict[tuple[int, int], Any]()
        least, near = NEAR * self.tolerance.floor, set[tuple[int, int]]()
        for row, items in enumerate(expected.hypotheses):
            for place, item in enumerate(items if row else ()):
                each = [one.score for time in found[row] for one in time[place : place + 1]]
                with np.errstate(invalid="ignore"):  # of searches that failed
                    far = float(np.abs(np.array(each) - item.score).max(initial=0.0))
                if far <= least * abs(item.score):  # a token's unit is larger than its own part
                    near.add((row, place))
                elif item.scored_tokens:
                    apart[row, place] = far
                    keys[row, place] = tuple(expected.sources[row]), item.scored_tokens
        measure, units = partial(forced, self.reference, special=self.special), dict[Any, float]()
        for key, one in self._batched([*dict.fromkeys(keys.values())], measure):
            size = np.maximum(logit_units(one.logits), -one.log_probabilities).sum()
            units[key] = length_normalised(size, len(key[1]), options.length_penalty)
        return near | {at for at, far in apart.items() if far <= least * units[keys[at]]}

    def record(
        self,
        sources: Sequence[Sequence[int]],
        max_length: int,
        generation: Mapping[str, Any] | None = None,
    ) -> Reference:
        """Records torch's answers to the sources, of at most `max_length` tokens.

        A host cannot measure again, so that errors of scores of integers are of all roundings.
        """
        cases, shakes = recorded_cases(self.config), SHAKES if self.others else 0
        searches = []
        for name in RECORDED if self.config.decoder_layers else ():
            settings = search_settings(name, generation or {}, self.config, sources, max_length)
            options = GenerationOptions(**settings)
            answers = search(self.reference, sources, options, self.special)
            exact = self.scores(sources, answers, options, shakes)
            scores = [[one.score for one in row] for row in exact]
            owns = [[one.own for one in row] for row in exact]
            tokens = [[hypothesis.tokens for hypothesis in row] for row in answers]
            ends = [[hypothesis.end for hypothesis in row] for row in answers]
            searches.append(RecordedSearch(name, settings, tokens, scores, owns, ends))
        return Reference([(case, self.truth(case)) for case in cases], sources, searches)
