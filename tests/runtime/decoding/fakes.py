"""Models given as functions of a source and a history, and decoders that drive them."""

import functools
import itertools
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transferry.export.oracle.plain_search import Row
from transferry.runtime.decoding.decoder import StepOutput, TopK
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.decoding.hypothesis import Hypothesis
from transferry.runtime.decoding.logits import log_sum_exp
from transferry.runtime.decoding.search import search, search_batch
from transferry.runtime.decoding.strategy import Request
from transferry.runtime.tokenizer.special_tokens import SpecialTokens

PAD, BOS, EOS = 0, 1, 2
SPECIAL = SpecialTokens(PAD, BOS, EOS)
Tokens = tuple[int, ...]
Logits = NDArray[np.floating[Any]]
Model = Callable[[Tokens, Tokens], Logits]

FILTERED = GenerationOptions(max_length=12, min_length=4, no_repeat_ngram=2, prefix=(7, 3))
SEARCHES = {
    "greedy": GenerationOptions(max_length=12),
    "beam": GenerationOptions(beam=4, n_best=3, max_length=12),
    "patient beam": GenerationOptions(beam=3, n_best=3, max_length=12, early_stopping="never"),
    "sampling": GenerationOptions(sample=True, n_best=2, max_length=12, seed=3),
    "nucleus": GenerationOptions(sample=True, max_length=12, temperature=1.3, top_k=6, top_p=0.8),
    "filtered": replace(FILTERED, beam=3, n_best=2),
    "filtered greedy": FILTERED,
}


def log_of(*probabilities: float) -> Logits:
    return np.array([math.log(probability) for probability in probabilities])


def constant(*probabilities: float) -> Model:
    """A model with the same logits after every history."""
    return lambda source, history: log_of(*probabilities)


def peak(token: int, height: float) -> Logits:
    """Five logits, all 0 but one."""
    logits = np.zeros(5)
    logits[token] = height
    return logits


def random_model(vocabulary: int, *, end: float = 0.0, spread: float = 2.0) -> Model:
    """Logits drawn anew for every source and history; `end` is added to the end token's."""

    @functools.cache
    def model(source: Tokens, history: Tokens) -> Logits:
        seed = zlib.crc32(repr((source, history)).encode())
        logits = np.random.default_rng(seed).normal(size=vocabulary) * spread
        logits[EOS] += end
        return logits

    return model


@dataclass(frozen=True)
class FakeState:
    """Everything a row has seen: a wrong `select` or a wrong token shows in all later logits."""

    sources: tuple[Tokens, ...]
    histories: tuple[Tokens, ...]
    sentences: tuple[int, ...] = ()


class FakeDecoder:
    """Drives a model given as a function of source and history.

    Its logits cannot be written, and the next step spoils them.
    """

    has_encoder = True
    shares_cache = False

    def __init__(
        self, model: Model, vocabulary: int, dtype: type = np.float32, positions: int = 1 << 30
    ) -> None:
        self.model = model
        self.vocabulary_size = vocabulary
        self.positions = positions
        self.given: Logits = np.empty(0, dtype)
        self.selected: list[list[int]] = []
        self.rows_stepped: list[int] = []
        self.begun: list[int] = []
        self.picked = 0

    def start(self, source: NDArray[np.int64], mask: NDArray[np.bool_]) -> FakeState:
        self.begun.append(len(source))
        sources = tuple(tuple(row[real].tolist()) for row, real in zip(source, mask, strict=True))
        return FakeState(sources, ((),) * len(sources), tuple(range(len(source))))

    def step(
        self,
        tokens: NDArray[np.int64],
        state: FakeState,
        *,
        top: int | None = None,
        normalise: bool = False,
    ) -> tuple[StepOutput, FakeState]:
        rows = len(state.sources)
        assert tokens.shape == (rows, 1)
        assert max(map(len, state.histories)) < self.positions
        self.rows_stepped.append(rows)
        histories = tuple(
            (*history, token)
            for history, token in zip(state.histories, tokens[:, 0].tolist(), strict=True)
        )
        self.given.fill(np.nan)
        self.given = np.empty((rows, 1, self.vocabulary_size), self.given.dtype)
        pairs = zip(state.sources, histories, strict=True)
        for row, (source, (first, *history)) in enumerate(pairs):
            if self.has_encoder:
                assert first == BOS
            else:
                source = (*source, first)
            self.given[row, 0] = self.model(source, tuple(history))
        logits = self.given.view()
        logits.flags.writeable = False
        return self.output(StepOutput(logits), top, normalise), replace(state, histories=histories)

    def output(self, plain: StepOutput, top: int | None, normalise: bool) -> StepOutput:
        """Returns the output of a step in place of the plain one."""
        return plain

    def select(self, state: FakeState, rows: NDArray[np.int64]) -> FakeState:
        self.selected.append(rows.tolist())
        chosen = [getattr(state, field.name) for field in fields(state)]
        return FakeState(*(tuple(values[row] for row in rows) for values in chosen))


class SentenceFake(FakeDecoder):
    """The same model, but rows share the cache of their sentence: holds the search to its rules."""

    shares_cache = True

    def select(self, state: FakeState, rows: NDArray[np.int64]) -> FakeState:
        selected = super().select(state, rows)
        groups = [(key, len(list(group))) for key, group in itertools.groupby(selected.sentences)]
        assert len(dict(groups)) == len(groups), "the rows of a sentence lie side by side"
        assert len({length for _, length in groups}) == 1, "sentences have as many rows each"
        return selected


class GreedyFake(SentenceFake):
    """One that also finds the likeliest token alone, without scores."""

    def output(self, plain: StepOutput, top: int | None, normalise: bool) -> StepOutput:
        if top != 1 or normalise:
            return plain
        self.picked += 1
        last = plain.all_logits[:, -1]
        tokens = np.where(np.isfinite(last.max(axis=1)), last.argmax(axis=1), -1)
        return StepOutput(top_k=TopK(tokens[:, None]))


class RankingFake(SentenceFake):
    """One that also ranks, as a device does: a bad row in any order."""

    def output(self, plain: StepOutput, top: int | None, normalise: bool) -> StepOutput:
        if top is None:
            return plain
        self.picked += 1
        last = plain.all_logits[:, -1]
        order = np.argsort(-last, axis=1, kind="stable")[:, :top]
        found, sums = np.take_along_axis(last, order, axis=1), log_sum_exp(last)
        return StepOutput(top_k=TopK(order, found, sums))


class NormalisingFake(SentenceFake):
    """Takes half as much again off every token, so that its own sums can be told."""

    def output(self, plain: StepOutput, top: int | None, normalise: bool) -> StepOutput:
        assert normalise
        return plain._replace(log_sum_exp=log_sum_exp(plain.all_logits[:, -1]) + 0.5)


def random_decoder(vocabulary: int, *, end: float = 0.0, spread: float = 2.0) -> FakeDecoder:
    """A decoder of a random model."""
    return FakeDecoder(random_model(vocabulary, end=end, spread=spread), vocabulary)


def requests_for(sources: Sequence[Tokens], options: GenerationOptions) -> list[Request[int]]:
    """A request for each source, as `run` makes them."""
    return [
        Request(row, source, options.max_length, options.prefix, row)
        for row, source in enumerate(sources)
    ]


def stream(
    decoder: FakeDecoder, requests: Sequence[Request[int]], options: GenerationOptions, slots: int
) -> list[list[Hypothesis]]:
    batches = [requests[first : first + slots] for first in range(0, len(requests), slots)]
    found = [
        *itertools.chain(*(search_batch(decoder, batch, options, SPECIAL) for batch in batches))
    ]
    answers = dict(found)
    assert len(answers) == len(found), "each is answered once"
    return [answers[request.key] for request in requests]


def run(
    decoder: FakeDecoder,
    sources: Sequence[Sequence[int]],
    options: GenerationOptions,
    row_ids: Sequence[int] | None = None,
    prefixes: Sequence[Sequence[int]] | None = None,
) -> list[list[Hypothesis]]:
    return search(decoder, sources, options, SPECIAL, row_ids=row_ids, prefixes=prefixes)


def log_softmax(logits: Logits) -> NDArray[np.float64]:
    relative: NDArray[np.float64] = logits.astype(np.float64) - logits.max()
    return relative - math.log(np.exp(relative).sum())


def random_sources(count: int, seed: int = 0) -> list[Tokens]:
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(3, 50, rng.integers(1, 9)).tolist()) for _ in range(count)]


def close(first: list[Hypothesis], second: list[Hypothesis], tolerance: float = 1e-5) -> bool:
    """Same tokens and reasons in the same order, scores up to float32 rounding."""
    return [(h.tokens, h.finish_reason) for h in first] == [
        (h.tokens, h.finish_reason) for h in second
    ] and all(
        math.isclose(a.score, b.score, rel_tol=tolerance)
        and math.isclose(a.log_probability, b.log_probability, rel_tol=tolerance)
        for a, b in zip(first, second, strict=True)
    )


def tokens_given(source: Tokens, history: Tokens) -> Logits:
    """Source (n,) gives n tokens."""
    return peak(EOS if len(history) >= source[0] else 3, 20.0)


def plain_search(
    model: Model,
    source: Tokens,
    options: GenerationOptions,
    number: int = 0,
    encoder: bool = True,
    ends: Sequence[int] = (EOS,),
    text: Callable[[Sequence[int]], str] = str,
) -> list[Hypothesis]:
    """Answers by the plain rules of `verify`, which share no code with the search."""

    def logits(answers: Sequence[Tokens]) -> Logits:
        return np.stack([model(source, tokens) for tokens in answers])

    row = Row(logits, text, source, number, BOS if encoder else None, ends, 1 << 30, options)
    with np.errstate(invalid="ignore"):  # of rows that turn bad
        return row.answers()
