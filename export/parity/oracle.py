"""A reference model and its float64 oracle, and how everything else compares with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from transferry.build_model.config import ModelConfig
from transferry.build_model.transformer import Transformer
from transferry.export.parity.cases import MOST_LOGITS, random_case, room, text_case
from transferry.export.parity.teacher_forcing import TeacherForcing
from transferry.export.torch_model import TorchDecoder, TorchEncoder
from transferry.runtime.decoding.batching import length_batches
from transferry.runtime.decoding.decoder import (
    Decoder,
    ObservableDecoder,
    ObservableEncoder,
    State,
    Tensors,
)
from transferry.runtime.decoding.hypothesis import Hypothesis, length_normalised
from transferry.runtime.decoding.logits import log_sum_exp
from transferry.runtime.decoding.options import GenerationOptions
from transferry.runtime.decoding.search import search
from transferry.runtime.errors import InputError
from transferry.runtime.parity.compare import (
    Case,
    Comparison,
    Tolerance,
    Truth,
    compare,
    observe,
    truth,
)
from transferry.runtime.parity.divergence import Divergence, explain, forced, scored_tokens
from transferry.runtime.parity.recorded import RecordedSearch, Reference
from transferry.runtime.parity.report import Decisions, Difference, judge_scores
from transferry.runtime.tokenizer.byte_pair import SpecialTokens

# What is run on text: the n-best of the beam must agree too, not only the winner.
SEARCHES: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"beam": 1, "n_best": 1},
    "beam 4": {"beam": 4, "n_best": 4},
    "sampling": {"beam": 1, "n_best": 1, "sample": True, "seed": 1},
}
# Of them, those whose answers are recorded: a difference of samples takes an oracle to judge.
RECORDED = ("greedy", "beam 4")
HIDE_EVERY = 7  # tokens of a text that an encoder alone fills in
ROWS = 64  # searched together, a beam of 4 being 4

Done = Callable[[int], None]
Keep = Callable[[int, list[Hypothesis], list[Hypothesis]], None]


def search_settings(
    name: str,
    generation: Mapping[str, Any],
    config: ModelConfig,
    sources: Sequence[Sequence[int]],
    max_length: int,
) -> dict[str, Any]:
    """Returns the fields of GenerationOptions of one of `SEARCHES` over the sources.

    Args:
        name: Of the search.
        generation: The bundle's defaults of generation.
        config: Has the positions.
        sources: Token ids of each source.
        max_length: Of the answers, as far as there is room for them.
    """
    length = room(config, sources, max_length)
    return {**generation, **SEARCHES[name], "max_length": length}


class Oracle:
    """Compares decoders and encoders with a reference model, in float32 and as its oracle."""

    def __init__(self, model: Transformer, special: SpecialTokens, tolerance: Tolerance) -> None:
        self.config = model.config
        self.special = special
        self.tolerance = tolerance
        self.reference = TorchDecoder(model)
        self.exact = TorchDecoder.oracle(model)
        # What the oracle made of answers, by source and tokens: searches share many.
        self._scored: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[float, float]] = {}

    def observe(self, case: Case) -> tuple[Tensors, Tensors]:
        """Runs a case on the oracle and on the reference."""
        if self.config.decoder_layers:
            return observe(self.exact, case), observe(self.reference, case)
        oracle, reference = TorchEncoder(self.exact.model), TorchEncoder(self.reference.model)
        return observe(oracle, case), observe(reference, case)

    def truth(self, case: Case) -> Truth:
        """Returns what a case must give."""
        return truth(case, *self.observe(case))

    def numbers(
        self,
        model: ObservableDecoder[State] | ObservableEncoder,
        cases: Iterable[Case],
        done: Done = lambda cases: None,
    ) -> list[Comparison]:
        """Compares every tensor of every case; `done` is called with 1 after each case."""
        comparisons = []
        for case in cases:
            comparisons += compare(case, self.truth(case), observe(model, case), self.tolerance)
            done(1)
        return comparisons

    def text(
        self,
        model: ObservableDecoder[State],
        pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
        forcing: TeacherForcing,
        done: Done = lambda rows: None,
    ) -> list[Comparison]:
        """Feeds targets whole and compares every tensor.

        Args:
            model: What is judged.
            pairs: Of each row the source, and the target of at least two tokens: the last is told,
                not fed.
            forcing: Sums up what the rows say of the choice of tokens.
            done: Called with the number of rows after each batch.
        """
        comparisons = []
        lengths = [max(len(source), len(target)) for source, target in pairs]
        for batch in self._batches(lengths):
            case = text_case(
                [pairs[row][0] for row in batch],
                [pairs[row][1][:-1] for row in batch],
                self.special,
                f"rows {', '.join(map(str, batch[:3]))}{' ...' if len(batch) > 3 else ''}",
            )
            oracle, reference = self.observe(case)
            found = observe(model, case)
            comparisons += compare(case, truth(case, oracle, reference), found, self.tolerance)
            for number, row in enumerate(batch):
                forcing.add(
                    pairs[row][1],
                    *(tensors["logits"][number] for tensors in (oracle, reference, found)),
                )
            done(len(batch))
        return comparisons

    def _batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Rows of similar length whose logits fit into memory."""
        for batch in length_batches(lengths, ROWS, 1 << 62):
            longest = max(lengths[row] for row in batch)
            most = max(1, MOST_LOGITS // (longest * self.config.vocabulary_size))
            for first in range(0, len(batch), most):
                yield batch[first : first + most]

    def decisions(
        self,
        decoder: Decoder[State],
        name: str,
        sources: Sequence[Sequence[int]],
        options: GenerationOptions,
        done: Done = lambda rows: None,
        keep: Keep = lambda row, wanted, found: None,
        scores: bool = True,
    ) -> Decisions:
        """Generates with both, and proves each difference to be a tie or calls it a defect.

        Args:
            decoder: What is judged.
            name: Names the search in the report.
            sources: Token ids of each source, the end token included.
            options: How to search.
            done: Called with the number of rows after each batch.
            keep: Called with each row's number, torch's answers and the other ones.
            scores: Whether the decoder is asked for scores too, and they are judged.
        """
        identical, score_error, score_ratio = 0, 0.0, 0.0
        ties: list[Difference] = []
        defects: list[Difference] = []
        rows = max(1, ROWS // options.beam)
        for batch in length_batches([len(source) for source in sources], rows, 4096):
            chosen = [sources[index] for index in batch]
            wanted = search(self.reference, chosen, options, self.special, row_ids=batch)
            asked = replace(options, scores=scores)
            found = search(decoder, chosen, asked, self.special, row_ids=batch)
            exact, own_error = self.scores(chosen, wanted, options)
            for index, source, left, right, right_scores in zip(
                batch, chosen, wanted, found, exact, strict=True
            ):
                keep(index, left, right)
                if _tokens(left) == _tokens(right):
                    identical += 1
                    if not scores:
                        continue
                    errors = [
                        abs(hypothesis.score - score)
                        for hypothesis, score in zip(right, right_scores, strict=True)
                    ]
                    budget = self.tolerance.factor * own_error
                    score_error, defect = judge_scores(index, errors, budget, score_error)
                    score_ratio = max(score_ratio, *(error / own_error for error in errors))
                    defects += defect
                    continue
                divergence = explain(
                    source,
                    options,
                    left,
                    right,
                    self.reference,
                    decoder,
                    self.exact,
                    self.special,
                    self.tolerance,
                    index,
                )
                (ties if divergence.tie else defects).append(_difference(index, divergence))
            done(len(batch))
        ties.sort(key=lambda item: item.row)
        defects.sort(key=lambda item: item.row)
        return Decisions(name, len(sources), identical, score_error, score_ratio, ties, defects)

    def scores(
        self,
        sources: Sequence[Sequence[int]],
        answers: Sequence[Sequence[Hypothesis]],
        options: GenerationOptions,
    ) -> tuple[list[list[float]], float]:
        """Returns the oracle's score of each hypothesis, and what torch's own error counts as.

        NaN where the search failed: nothing equals it.
        """
        answered = [
            (tuple(source), scored_tokens(hypothesis, self.special.eos_id), hypothesis)
            for source, hypotheses in zip(sources, answers, strict=True)
            for hypothesis in hypotheses
            if hypothesis.finish_reason != "error"
        ]
        new = list(dict.fromkeys((source, tokens) for source, tokens, _ in answered))
        new = [key for key in new if key not in self._scored]
        for batch in self._batches([len(tokens) for _, tokens in new]):
            keys = [new[index] for index in batch]
            chosen = [source for source, _ in keys], [tokens for _, tokens in keys]
            for key, found in zip(keys, forced(self.exact, *chosen, self.special), strict=True):
                self._scored[key] = float(found.log_probabilities.sum()), found.largest
        own, largest = 0.0, 1.0
        exact = []
        for source, tokens, hypothesis in answered:
            total, most = self._scored[source, tokens]
            exact.append(length_normalised(total, len(tokens), options.length_penalty))
            own = max(own, abs(hypothesis.score - exact[-1]))
            largest = max(largest, most)
        scores = iter(exact)
        return [
            [
                np.nan if hypothesis.finish_reason == "error" else next(scores)
                for hypothesis in hypotheses
            ]
            for hypotheses in answers
        ], max(own, self.tolerance.floor * largest)

    def fillings(
        self,
        encoder: ObservableEncoder,
        sources: Sequence[Sequence[int]],
        forcing: TeacherForcing,
        done: Done = lambda rows: None,
    ) -> tuple[list[Comparison], Decisions]:
        """Hides tokens of each source, lets both fill them in, and accounts for each difference.

        Args:
            encoder: What is judged.
            sources: Token ids of each source, wrapped.
            forcing: Sums up what the rows say of the choice of tokens.
            done: Called with the number of rows after each.

        Raises:
            InputError: The tokenizer has no mask.
        """
        if self.special.mask_id is None:
            raise InputError("expected a tokenizer with a mask, found none; verify without --text")
        comparisons: list[Comparison] = []
        identical, score_error, score_ratio = 0, 0.0, 0.0
        ties: list[Difference] = []
        defects: list[Difference] = []
        for row, source in enumerate(sources):
            tokens = np.array([source], np.int64)
            places = np.arange(len(self.special.before), len(source), HIDE_EVERY)
            tokens[:, places] = self.special.mask_id
            nothing = np.zeros((1, 0), np.int64)
            case = Case(f"text, row {row}", tokens, np.ones_like(tokens, np.bool_), nothing, 0)
            observed = (*self.observe(case), observe(encoder, case))
            comparisons += compare(case, truth(case, *observed[:2]), observed[2], self.tolerance)
            exact, left, right = (
                tensors["logits"][0, places].astype(np.float64) for tensors in observed
            )
            wanted, found = left.argmax(axis=1), right.argmax(axis=1)
            forcing.add([0, *wanted], exact, left, right)
            largest = np.abs(exact).max(initial=0.0)
            own_error = np.abs(left - exact).max(initial=0.0) / largest
            budget = self.tolerance.budget(own_error)
            differences = [
                Divergence(
                    int(place),
                    (int(one),),
                    (int(other),),
                    float(np.abs(scores[one] - scores[other])),
                    float(2 * budget * largest),
                )
                for place, one, other, scores in zip(places, wanted, found, exact, strict=True)
                if one != other or not np.isfinite(scores).all()
            ]
            if not np.isfinite(right).all():
                defects.append(Difference(row, "the graph gave NaN or infinity"))
            elif not differences:
                identical += 1
                chosen = np.arange(len(places)), wanted
                scores = [logits[chosen] - log_sum_exp(logits) for logits in (exact, right)]
                errors = np.abs(scores[0] - scores[1])
                # A log-probability is a logit less the logits' log-sum-exp: each may be off.
                allowed = 2 * budget * largest
                score_error, defect = judge_scores(row, errors.tolist(), allowed, score_error)
                ratio = errors.max(initial=0.0) / allowed * self.tolerance.factor
                score_ratio = max(score_ratio, float(ratio))
                defects += defect
            else:
                worst = max(differences, key=lambda item: item.margin - item.allowed)
                (ties if worst.tie else defects).append(_difference(row, worst))
            done(1)
        return comparisons, Decisions(
            "fill-mask", len(sources), identical, score_error, score_ratio, ties, defects
        )

    def record(
        self,
        sources: Sequence[Sequence[int]],
        max_length: int,
        generation: Mapping[str, Any] | None = None,
    ) -> Reference:
        """Records what torch answers, for `runtime.reference`.

        Args:
            sources: Token ids to search over, the end token included.
            max_length: Of the searches.
            generation: The bundle's defaults of generation.
        """
        sizes = [(1, 1, 0), (2, 13, 1), (7, 6, 5)]
        cases = [
            random_case(self.config, batch, source, past, seed=number)
            for number, (batch, source, past) in enumerate(sizes)
        ]
        searches = []
        for name in RECORDED if self.config.decoder_layers else ():
            settings = search_settings(name, generation or {}, self.config, sources, max_length)
            options = GenerationOptions(**settings)
            answers = search(self.reference, sources, options, self.special)
            scores, own_error = self.scores(sources, answers, options)
            recorded = [_tokens(row) for row in answers]
            searches.append(RecordedSearch(name, settings, recorded, scores, own_error))
        return Reference([(case, self.truth(case)) for case in cases], sources, searches)


def _tokens(hypotheses: Sequence[Hypothesis]) -> list[tuple[int, ...]]:
    return [hypothesis.tokens for hypothesis in hypotheses]


def _difference(row: int, divergence: Divergence) -> Difference:
    return Difference(row, str(divergence), divergence.margin, divergence.allowed)
