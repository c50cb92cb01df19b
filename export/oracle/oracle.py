"""The reference for parity: torch in float32 and in float64, and comparisons of models with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from transferry.build_model.model.transformer import Transformer
from transferry.export.oracle.cases import MOST_LOGITS, random_cases
from transferry.export.oracle.rounding import integer_sides
from transferry.export.oracle.searches import GIVEN, RECORDED, SEARCHES, WHOLE, search_settings
from transferry.export.oracle.served import Answers, serve
from transferry.export.oracle.teacher_forcing import TeacherForcing, chosen_from
from transferry.export.rewrite.calibration import Calibration
from transferry.export.torch_model import TorchDecoder, moved_heads
from transferry.runtime.bundle.head import HeadSettings
from transferry.runtime.bundle.specs import Variant
from transferry.runtime.decoding.batching import BatchOptions, length_batches
from transferry.runtime.decoding.decoder import (
    Decoder,
    ObservableDecoder,
    ObservableEncoder,
    State,
    Tensors,
)
from transferry.runtime.decoding.generation_options import GenerationOptions, generation_options
from transferry.runtime.decoding.hypothesis import Hypothesis, length_normalised
from transferry.runtime.decoding.logits import log_sum_exp
from transferry.runtime.decoding.search import pad_sources, search
from transferry.runtime.engine.tasks.fill_mask import FillMask
from transferry.runtime.errors import InputError
from transferry.runtime.ort.encoder import EncoderModel
from transferry.runtime.ort.open_model import ServedModel
from transferry.runtime.precision import FLOAT32, Precision
from transferry.runtime.proof.compare import (
    INT8_STEP,
    Case,
    Comparison,
    Tolerance,
    Truth,
    compare,
    observe,
    truth,
)
from transferry.runtime.proof.divergence import (
    Decode,
    Divergence,
    ExpectedAnswers,
    Explainer,
    Tally,
    forced,
)
from transferry.runtime.proof.recorded import RecordedSearch, Reference
from transferry.runtime.proof.report import Decisions, Difference
from transferry.runtime.proof.rules import Rules
from transferry.runtime.proof.self_consistency import self_consistency
from transferry.runtime.tokenizer.byte_pair import SpecialTokens

HIDE_EVERY = 7  # tokens of a text, for an encoder-only model to fill in
ROWS = 64  # hypotheses searched together


@dataclass(frozen=True)
class _Score:
    """The oracle's score of an answer.

    Attributes:
        total: Log-probability of all tokens, in nats.
        largest: The largest magnitude of a logit.
        spread: Change of the total by rounding values at a border the other way, in nats.
    """

    total: float
    largest: float
    spread: float


class Oracle:
    """Compares decoders and encoders with torch.

    Attributes:
        trained: torch in float32.
        reference: Gives the expected tokens: `trained`, or torch rounding as the variant does.
        exact: The same in float64, the oracle that errors are measured against.
        others: The same where it rounds inputs otherwise, if it does; see `integer_sides`.
        rounds: Whether these sides have other weights than `trained`.
        failed: The cases in which a tensor was wrong, in order.
        compared: Names of the tensors to compare; None for all.
    """

    def __init__(
        self,
        model: Transformer,
        special: SpecialTokens,
        tolerance: Tolerance,
        done: Callable[[int], None] = lambda count: None,
        *,
        precision: Precision = FLOAT32,
        calibration: Calibration | None = None,
    ) -> None:
        """Calls `done` with the rows or cases of each batch.

        All sides round as a variant of that precision does; one of int8 has a calibration.
        """
        self.config = model.config
        self.special = special
        self.tolerance = tolerance
        self.done = done
        self.trained = TorchDecoder(model)
        sides = integer_sides(model, precision, calibration)
        self.rounds = bool(sides)
        sides = sides or [self.trained, TorchDecoder.oracle(model)]
        self.reference, self.exact, *self.others = sides
        self.failed: list[Case] = []
        self.compared: frozenset[str] | None = None
        # By source, tokens and how they were ranked: searches share many answers.
        self._scored: dict[
            tuple[tuple[int, ...], tuple[int, ...], GenerationOptions | None], _Score
        ] = {}

    def observe(self, case: Case) -> list[Tensors]:
        """Runs a case: the oracle's tensors, those of the reference, those of `others`.

        The others are left out where the reference has crossed borders itself, in every kind of
        tensor: how far that moves the numbers is known then.
        """

        def run(*sides: TorchDecoder) -> list[Tensors]:
            decodes = bool(self.config.decoder_layers)
            return [observe(side if decodes else side.encoder, case) for side in sides]

        found = run(self.exact, self.reference)
        if self.others and min(truth(case, *found).errors.values()) < INT8_STEP:
            found += run(*self.others)
        return found

    def truth(self, case: Case) -> Truth:
        """Returns the expected tensors of a case."""
        sides, least = self._sides(case)
        return truth(case, *sides, least=least)

    def _sides(self, case: Case) -> tuple[list[Tensors], float]:
        """Runs a case, the head moved by rounding too; returns the tensors and the head's unit."""
        sides = self.observe(case)
        if not self.config.has_head:
            return sides, 0.0
        moved, unit = moved_heads(self.exact.encoder, case.mask, *sides)
        return [*sides, *moved], unit

    def numbers(
        self, model: ObservableDecoder[State] | ObservableEncoder, cases: Iterable[Case]
    ) -> list[Comparison]:
        """Compares every tensor of every case."""
        comparisons = []
        for case in cases:
            sides = self.truth(case), observe(model, case)
            found = compare(case, *sides, self.tolerance, self.compared)
            if any(item.fault for item in found):
                self.failed.append(case)
            comparisons += [*found, *self_consistency(model, case)]
            self.done(1)
        return comparisons

    def text(
        self,
        model: ObservableDecoder[State],
        pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
        forcing: TeacherForcing,
    ) -> list[Comparison]:
        """Feeds the target of each pair whole after its source, and compares every tensor.

        A target has at least two tokens; the last one is predicted, not fed.
        """
        comparisons = []
        lengths = [max(len(source), len(target)) for source, target in pairs]
        for batch in self._batches(lengths):
            source, mask = pad_sources([pairs[row][0] for row in batch], self.special.pad_id)
            # Padding follows the target, and is the same for both sides.
            target, _ = pad_sources([pairs[row][1][:-1] for row in batch], self.special.pad_id)
            name = f"text, rows {', '.join(map(str, batch[:3]))}{' ...' if len(batch) > 3 else ''}"
            case = Case(name, source, mask, target, 0, stage="text")
            sides, found = self.observe(case), observe(model, case)
            compared = compare(case, truth(case, *sides), found, self.tolerance, self.compared)
            if any(item.fault for item in compared):
                self.failed.append(case)
            comparisons += compared
            # What int8 loses is what it loses of the model as trained.
            trained = observe(self.trained, case) if self.rounds else sides[1]
            for number, row in enumerate(batch):
                logits = (tensors["logits"][number] for tensors in (*sides[:2], found, trained))
                forcing.add(pairs[row][1], *logits)
            self.done(len(batch))
        return comparisons

    def _batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Rows of similar length whose logits fit into memory."""
        for batch in length_batches(lengths, ROWS, 1 << 62):
            longest = max(lengths[row] for row in batch)
            most = max(1, MOST_LOGITS // (longest * self.config.vocabulary_size))
            for first in range(0, len(batch), most):
                yield batch[first : first + most]

    def search(
        self,
        decoder: Decoder[State],
        name: str,
        sources: Sequence[Sequence[int]],
        options: GenerationOptions,
        batches: BatchOptions | None = None,
        *,
        answers: Sequence[Answers] | None = None,
        prefixes: Sequence[Sequence[int]] | None = None,
    ) -> Tally:
        """Searches with the reference and a decoder, and explains each difference.

        Scores are compared if the options ask for them. With `batches`, the decoder answers as
        `serve` does. `answers` replace the decoder's. `prefixes` begin each source's answer.
        """
        special, scored = self.special, replace(options, scores=True)

        def expected() -> Iterator[ExpectedAnswers]:
            for rows in self._at_once(sources, options):
                chosen = [sources[row] for row in rows]
                begun = prefixes and [prefixes[row] for row in rows]
                asked = self.reference, chosen, scored, special
                wanted = search(*asked, row_ids=rows, prefixes=begun)
                scores, own = self.scores(chosen, wanted, options) if options.scores else ([], 1.0)
                yield ExpectedAnswers(rows, chosen, wanted, scores, own)
                self.done(len(rows))  # the batch has been compared

        explain = self.explainer(decoder, scored)
        tally = Tally(name, self.tolerance)
        if batches is None and answers is None:
            return tally.compare(decoder, expected(), options, special, explain)
        if answers is None:
            limits = batches or BatchOptions()
            answers = serve(decoder, sources, options, special, limits, range(len(sources)))
        for batch in expected():
            tally.add(batch, [answers[row] for row in batch.rows], explain)
        return tally

    def trained_answers(
        self, sources: Sequence[Sequence[int]], options: GenerationOptions
    ) -> list[list[Hypothesis]]:
        """Searches with the model as trained."""
        answers: list[list[Hypothesis]] = [[]] * len(sources)
        for rows in self._at_once(sources, options):
            chosen = [sources[row] for row in rows]
            found = search(self.trained, chosen, options, self.special, row_ids=rows)
            for row, hypotheses in zip(rows, found, strict=True):
                answers[row] = hypotheses
        return answers

    def _at_once(
        self, sources: Sequence[Sequence[int]], options: GenerationOptions
    ) -> list[list[int]]:
        """Rows that torch searches together."""
        lengths = [len(source) for source in sources]
        return length_batches(lengths, max(1, ROWS // options.beam), 4096)

    def explainer(self, decoder: Decoder[Any], options: GenerationOptions) -> Explainer:
        """Returns what explains the differences between the reference's tokens and a decoder's."""
        sides = self.reference, decoder, self.exact
        return Explainer(*sides, self.special, self.tolerance, options, self.others)

    def scores(
        self,
        sources: Sequence[Sequence[int]],
        answers: Sequence[Sequence[Hypothesis]],
        options: GenerationOptions,
    ) -> tuple[list[list[float]], float]:
        """Returns the oracle's score of each hypothesis, and the reference's own error in nats.

        The score is NaN where the search failed, so that nothing equals it.
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
            [(tuple(source), item.scored_tokens, ranked) for item in hypotheses]
            for source, hypotheses in zip(sources, answers, strict=True)
        ]
        # A search that failed has no tokens.
        new = [key for key in dict.fromkeys(chain(*keys)) if key[1] and key not in self._scored]
        for batch in self._batches([len(tokens) for _, tokens, _ in new]):
            chosen = [new[index] for index in batch]
            different = [source for source, _, _ in chosen]
            tokens = [answer for _, answer, _ in chosen]
            exactly = forced(self.exact, different, tokens, self.special, rules)
            totals = [float(given.ranks.sum()) for given in exactly]
            spreads = [0.0] * len(chosen)
            for side in self.others:
                # Of every answer: what moves one by much leaves another alone.
                moved_answers = forced(side, different, tokens, self.special, rules)
                for place, given in enumerate(moved_answers):
                    moved = abs(float(given.ranks.sum()) - totals[place])
                    spreads[place] = max(spreads[place], moved)
            for key, total, given, spread in zip(chosen, totals, exactly, spreads, strict=True):
                self._scored[key] = _Score(total, given.largest, spread)
        own, largest = 0.0, 1.0
        exact: list[list[float]] = []
        for row, hypotheses in zip(keys, answers, strict=True):
            exact.append([])
            for key, item in zip(row, hypotheses, strict=True):
                score = np.nan
                if length := len(key[1]):
                    scored = self._scored[key]
                    score, spread = (
                        length_normalised(each, length, options.length_penalty)
                        for each in (scored.total, scored.spread)
                    )
                    own = max(own, abs(item.score - score), spread)
                    largest = max(largest, scored.largest)
                exact[-1].append(score)
        return exact, max(own, self.tolerance.floor * largest)

    def readings(
        self,
        encoder: ObservableEncoder,
        sources: Sequence[Sequence[int]],
        forcing: TeacherForcing,
        head: HeadSettings | None = None,
    ) -> Iterator[Decisions | list[Comparison]]:
        """Compares what the reference and an encoder-only model give for text.

        That is every tensor, and what is chosen: tokens for some that are hidden, or the labels of
        a head.

        Raises:
            InputError: Tokens are to be filled in, and the tokenizer has no mask.
        """
        fills, mask_id = self.config.lm_head and not self.config.has_head, self.special.mask_id
        if fills and mask_id is None:
            raise InputError("expected a tokenizer with a mask, found none; verify without --text")
        comparisons: list[Comparison] = []
        tally = Tally(FillMask.name if fills or head is None else head.task, self.tolerance)
        for row, source in enumerate(sources):
            tokens = np.array([source], np.int64)
            places = np.arange(len(self.special.before), len(source), HIDE_EVERY)
            if fills and mask_id is not None:
                tokens[:, places] = mask_id
            nothing = np.zeros((1, 0), np.int64)
            mask = np.ones_like(tokens, np.bool_)
            case = Case(f"text, row {row}", tokens, mask, nothing, 0, stage="text")
            (sides, least), given = self._sides(case), observe(encoder, case)
            expected = truth(case, *sides, least=least)
            comparisons += compare(case, expected, given, self.tolerance, self.compared)
            trained = observe(self.trained.encoder, case) if self.rounds else sides[1]
            self.done(1)
            choices = [
                tensors["logits"][0, places] if fills else chosen_from(tensors, head)
                for tensors in (*sides, given, trained)
            ]
            if not choices[0].size:  # numbers and vectors, of which nothing is chosen
                continue
            exact, left, *others, right, meant = (each.astype(np.float64) for each in choices)
            wanted, found = left.argmax(axis=1), right.argmax(axis=1)
            where = places if fills else np.arange(len(wanted))
            forcing.add([0, *wanted], exact, left, right, meant)
            largest = np.abs(exact).max(initial=0.0)
            own_error = max(np.abs(side - exact).max(initial=0.0) for side in (left, *others))
            own_error /= largest
            # A log-probability is a logit less the logits' log-sum-exp: each may be off.
            own = float(2 * max(own_error, self.tolerance.floor) * largest)
            allowed = self.tolerance.factor * own
            few = 2 * self.tolerance.floor * largest
            rounding = Tolerance.factor * (few if self.others else own)
            divergences = [
                Divergence(
                    int(place), (int(one),), (int(other),), margin, allowed, min(allowed, rounding)
                )
                for place, one, other, scores in zip(where, wanted, found, exact, strict=True)
                if one != other or not np.isfinite(scores).all()
                for margin in [float(np.abs(scores[one] - scores[other]))]
            ]
            if not np.isfinite(right).all():
                tally.differ(Difference(row, "the graph gave NaN or infinity"), False)
            elif divergences:
                worst = max(divergences, key=lambda item: item.margin - item.allowed)
                tally.differ(*worst.difference(row))
            else:
                chosen = np.arange(len(wanted)), wanted
                scores = [logits[chosen] - log_sum_exp(logits) for logits in (exact, right)]
                tally.agree(row, np.abs(scores[0] - scores[1]).tolist(), own)
        yield comparisons
        if forcing.tokens:
            yield tally.decisions()

    def record(
        self,
        sources: Sequence[Sequence[int]],
        max_length: int,
        generation: Mapping[str, Any] | None = None,
    ) -> Reference:
        """Records torch's answers to the sources, of at most `max_length` tokens."""
        cases = random_cases(self.config, [(1, 1, 0), (2, 13, 1), (7, 6, 5)])
        searches = []
        for name in RECORDED if self.config.decoder_layers else ():
            settings = search_settings(name, generation or {}, self.config, sources, max_length)
            options = GenerationOptions(**settings)
            answers = search(self.reference, sources, options, self.special)
            scores, own_error = self.scores(sources, answers, options)
            tokens = [[hypothesis.tokens for hypothesis in row] for row in answers]
            ends = [[hypothesis.end for hypothesis in row] for row in answers]
            searches.append(RecordedSearch(name, settings, tokens, scores, own_error, ends))
        return Reference([(case, self.truth(case)) for case in cases], sources, searches)


@dataclass
class TextParity:
    """Checks of a model on text, in the order of `verify`.

    A decoder runs every search and is then fed given answers; of an encoder-only model see
    `Oracle.readings`.

    Attributes:
        oracle: The reference.
        generation: The bundle's defaults of generation.
        sources: Token ids of each source.
        longest: Most tokens of an answer.
        fed: Targets to feed whole, from the start token on; by default torch's greedy answers.
        sampled: Searches other than `WHOLE` run on one source in so many.
        batches: Limits on what is computed at once; those of the model if None.
        given: Fields of GenerationOptions of one search more, besides the bundle's defaults.
        head: What the head of an encoder-only model is for.
        decode: Returns the text of token ids, for the report; None leaves the texts out.
        standard: Names of the other searches.
        forcing: Errors and margins on the given answers.
        best: The best answers of torch as trained and of the model, by search; of searches other
            than `RECORDED` an int8 variant has torch's with the same rounding.
    """

    oracle: Oracle
    generation: Mapping[str, Any]
    sources: Sequence[Sequence[int]]
    longest: int
    fed: Sequence[Sequence[int]] | None = None
    sampled: int = 1
    batches: BatchOptions | None = None
    given: Mapping[str, Any] | None = None
    head: HeadSettings | None = None
    decode: Decode | None = None
    standard: Sequence[str] = tuple(SEARCHES)
    forcing: TeacherForcing = field(default_factory=TeacherForcing)
    best: dict[str, list[tuple[Hypothesis, Hypothesis]]] = field(default_factory=dict)

    def rows(self, variant: Variant) -> int:
        """Returns the number of rows that `check` compares."""
        count = len(self.sources)
        if not self.oracle.config.decoder_layers:
            return count
        searched = sum(len(self.sources[:: self._every(name)]) for name in self.searches)
        return searched + (1 + bool(variant.screen)) * count  # the last is `text`

    def check(self, model: ServedModel) -> Iterator[Decisions | list[Comparison]]:
        """Yields the result of one check after another."""
        oracle, sources = self.oracle, self.sources
        if not sources:
            return
        if isinstance(model, EncoderModel):
            yield from oracle.readings(model, sources, self.forcing, self.head)
            return
        batches = self.batches or model.batches
        for name in self.searches:
            every = self._every(name)
            called = name if every == 1 else f"{name} of every {every}th row"
            options, chosen = self.options(name), sources[::every]
            tally = oracle.search(model, called, chosen, options, batches)
            self.best[name] = [tally.best[row] for row in sorted(tally.best)]
            if oracle.rounds and name in RECORDED:
                trained = oracle.trained_answers(chosen, options)
                pairs = zip(trained, self.best[name], strict=True)
                self.best[name] = [(wanted[0], found) for wanted, (_, found) in pairs]
            yield tally.decisions(self.decode)
        if model.variant.screen:
            unscored = replace(self.options("greedy"), scores=False)
            screened = oracle.search(model, "greedy, screened", sources, unscored, batches)
            yield screened.decisions(self.decode)
        yield oracle.text(model, self._pairs(), self.forcing)

    @property
    def searches(self) -> list[str]:
        """Names of the searches: the standard ones, and the one that is given."""
        return [*self.standard, *([] if self.given is None else [GIVEN])]

    def _every(self, name: str) -> int:
        """Returns how many rows there are for each that a search runs on."""
        return 1 if name in (*WHOLE, GIVEN) else self.sampled

    def options(self, name: str) -> GenerationOptions:
        """Returns the options of a search."""
        given = (self.given or {}) if name == GIVEN else {}
        length = min(self.longest, given.get("max_length", self.longest))
        generation = vars(generation_options(given, generation_options(self.generation)))
        config = self.oracle.config
        return GenerationOptions(**search_settings(name, generation, config, self.sources, length))

    def _pairs(self) -> list[tuple[Sequence[int], Sequence[int]]]:
        """Source and target of each row to feed; without an encoder the target alone."""
        special, config = self.oracle.special, self.oracle.config
        fed = self.fed
        if fed is None:
            fed = [[special.bos_id, *wanted.scored_tokens] for wanted, _ in self.best["greedy"]]
        return [
            (source if config.encoder_layers else [], target[: config.max_positions + 1])
            for source, target in zip(self.sources, fed, strict=True)
            if len(target) > 1
        ]
