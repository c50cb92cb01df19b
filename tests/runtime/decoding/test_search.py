"""The search against a fake decoder and against slower, simpler searches."""

import functools
import itertools
import math
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from transferry.runtime.decoding.beam_search import BeamStrategy, best_candidates, best_of_top_k
from transferry.runtime.decoding.decoder import StepOutput, TopK
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.decoding.hypothesis import FAILED, Hypothesis
from transferry.runtime.decoding.logits import SEGMENT, SegmentMaxima, log_sum_exp, top_k
from transferry.runtime.decoding.sampling import Sampler, draw_uniforms
from transferry.runtime.decoding.search import search, search_stream
from transferry.runtime.decoding.strategy import Request
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.tokenizer.special_tokens import SpecialTokens

PAD, BOS, EOS = 0, 1, 2
SPECIAL = SpecialTokens(PAD, BOS, EOS)
Tokens = tuple[int, ...]
Logits = NDArray[np.floating[Any]]
Model = Callable[[Tokens, Tokens], Logits]


def log_of(*probabilities: float) -> Logits:
    return np.array([math.log(probability) for probability in probabilities])


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

    def __init__(self, model: Model, vocabulary: int, dtype: type = np.float32) -> None:
        self.model = model
        self.vocabulary_size = vocabulary
        self.given: Logits = np.empty(0, dtype)
        self.selected: list[list[int]] = []
        self.rows_stepped: list[int] = []

    def start(self, source: NDArray[np.int64], mask: NDArray[np.bool_]) -> FakeState:
        sources = tuple(tuple(row[real].tolist()) for row, real in zip(source, mask, strict=True))
        return FakeState(sources, ((),) * len(sources), (0,) * len(sources))

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
        self.rows_stepped.append(rows)
        histories = tuple(
            (*history, token)
            for history, token in zip(state.histories, tokens[:, 0].tolist(), strict=True)
        )
        self.given.fill(np.nan)
        self.given = np.empty((rows, 1, self.vocabulary_size), self.given.dtype)
        for row, (source, (first, *history)) in enumerate(
            zip(state.sources, histories, strict=True)
        ):
            if self.has_encoder:
                assert first == BOS
            else:
                source = (*source, first)
            self.given[row, 0] = self.model(source, tuple(history))
        logits = self.given.view()
        logits.flags.writeable = False
        return StepOutput(logits), replace(state, histories=histories)

    def select(self, state: FakeState, rows: NDArray[np.int64]) -> FakeState:
        self.selected.append(rows.tolist())
        chosen = [getattr(state, field.name) for field in fields(state)]
        return FakeState(*(tuple(values[row] for row in rows) for values in chosen))


class SentenceFake(FakeDecoder):
    """The same model, but rows share what their sentence has.

    It holds the search to the rules for rows and sentences, and counts the sentences that it reads
    at a time.
    """

    shares_cache = True

    def __init__(self, model: Model, vocabulary: int, positions: int = 1 << 30) -> None:
        super().__init__(model, vocabulary)
        self.positions = positions
        self.begun: list[int] = []

    def start(self, source: NDArray[np.int64], mask: NDArray[np.bool_]) -> FakeState:
        self.begun.append(len(source))
        return replace(super().start(source, mask), sentences=tuple(range(len(source))))

    def step(
        self,
        tokens: NDArray[np.int64],
        state: FakeState,
        *,
        top: int | None = None,
        normalise: bool = False,
    ) -> tuple[StepOutput, FakeState]:
        assert max(map(len, state.histories)) < self.positions
        return super().step(tokens, state, top=top, normalise=normalise)

    def select(self, state: FakeState, rows: NDArray[np.int64]) -> FakeState:
        selected = super().select(state, rows)
        groups = [(key, len(list(group))) for key, group in itertools.groupby(selected.sentences)]
        assert len(dict(groups)) == len(groups), "the rows of a sentence lie side by side"
        assert len({length for _, length in groups}) == 1, "sentences have as many rows each"
        return selected


class GreedyFake(SentenceFake):
    """One that also finds the likeliest token alone, without scores."""

    picked = 0

    def step(
        self,
        tokens: NDArray[np.int64],
        state: FakeState,
        *,
        top: int | None = None,
        normalise: bool = False,
    ) -> tuple[StepOutput, FakeState]:
        output, state = super().step(tokens, state)
        if top != 1 or normalise:
            return output, state
        self.picked += 1
        last = output.all_logits[:, -1]
        usable = np.isfinite(last.max(axis=1))
        return StepOutput(top_k=TopK(last.argmax(axis=1)[:, None], usable)), state


class RankingFake(SentenceFake):
    """One that also ranks, as a device does: with a row that is bad, it ranks as it likes."""

    ranked = 0

    def step(
        self,
        tokens: NDArray[np.int64],
        state: FakeState,
        *,
        top: int | None = None,
        normalise: bool = False,
    ) -> tuple[StepOutput, FakeState]:
        output, state = super().step(tokens, state)
        if top is None:
            return output, state
        self.ranked += 1
        last = output.all_logits[:, -1]
        order = np.argsort(-last, axis=1, kind="stable")[:, :top]
        found, sums = np.take_along_axis(last, order, axis=1), log_sum_exp(last)
        return StepOutput(top_k=TopK(order, np.isfinite(sums), found, sums)), state


class Requests:
    """A supply of a list, of which `visible` may be taken: all, or more with every wait."""

    def __init__(self, requests: Sequence[Request[int]], *visible: int) -> None:
        self.requests = list(requests)
        self.visible = list(visible) or [len(self.requests)]
        self.waiting_at: list[int] = []

    def take(self, most: int) -> list[Request[int]]:
        assert most > 0
        if self.visible[0] == 0 and len(self.visible) > 1:
            del self.visible[0]
        taken = self.requests[: min(most, self.visible[0])]
        del self.requests[: len(taken)]
        self.visible[0] -= len(taken)
        return taken


def stream(
    decoder: FakeDecoder,
    requests: Sequence[Request[int]],
    options: GenerationOptions,
    slots: int,
) -> list[list[Hypothesis]]:
    found = list(search_stream(decoder, Requests(requests).take, options, SPECIAL, slots=slots))
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


def naive_greedy(model: Model, source: Tokens, max_length: int) -> Hypothesis:
    tokens: list[int] = []
    total = 0.0
    while len(tokens) < max_length:
        log_p = log_softmax(model(source, tuple(tokens)))
        token = int(np.argmax(log_p))
        total += log_p[token]
        if token == EOS:
            return Hypothesis(tuple(tokens), total, total / (len(tokens) + 1), "end")
        tokens.append(token)
    return Hypothesis(tuple(tokens), total, total / len(tokens), "length")


def naive_beam(
    model: Model,
    source: Tokens,
    options: GenerationOptions,
    permits: Callable[[Tokens], bool] = lambda tokens: True,
) -> list[Hypothesis]:
    """Beam search over whole histories and the whole vocabulary, one sentence, plain lists."""
    live: list[tuple[float, Tokens]] = [(0.0, ())]
    ended: list[Hypothesis] = []
    for length in range(1, options.max_length + 1):
        candidates = [
            (total + log_p, (*tokens, token))
            for total, tokens in live
            for token, log_p in enumerate(log_softmax(model(source, tokens)).tolist())
            if permits((*tokens, token))
        ]
        candidates.sort(key=lambda candidate: -candidate[0])
        for total, tokens in candidates[: options.beam]:
            score = total / length**options.length_penalty
            if tokens[-1] == EOS:
                ended.append(Hypothesis(tokens[:-1], total, score, "end"))
            elif length == options.max_length:
                ended.append(Hypothesis(tokens, total, score, "length"))
        ended.sort(key=lambda hypothesis: -hypothesis.score)
        live = [c for c in candidates if c[1][-1] != EOS][: options.beam]
        if len(ended) >= options.beam:
            present = options.max_length if options.early_stopping == "never" else length
            best = live[0][0] / present**options.length_penalty
            if options.early_stopping is True or best <= ended[options.beam - 1].score:
                break
    return ended[: options.n_best]


SEARCHES = {
    "greedy": GenerationOptions(max_length=12),
    "beam": GenerationOptions(beam=4, n_best=3, max_length=12),
    "patient beam": GenerationOptions(beam=3, n_best=3, max_length=12, early_stopping="never"),
    "sampling": GenerationOptions(sample=True, n_best=2, max_length=12, seed=3),
    "nucleus": GenerationOptions(sample=True, max_length=12, temperature=1.3, top_k=6, top_p=0.8),
    "filtered": GenerationOptions(
        beam=3, n_best=2, max_length=12, min_length=4, no_repeat_ngram=2, prefix=(7, 3)
    ),
    "filtered greedy": GenerationOptions(
        max_length=12, min_length=4, no_repeat_ngram=2, prefix=(7, 3)
    ),
}


# Greedy and beam search against the naive ones


def test_greedy_is_the_naive_loop() -> None:
    model = random_model(11, end=0.5)
    sources = random_sources(40)
    results = run(FakeDecoder(model, 11), sources, GenerationOptions(max_length=9))
    assert {hypotheses[0].finish_reason for hypotheses in results} == {"end", "length"}
    for source, hypotheses in zip(sources, results, strict=True):
        assert close(hypotheses, [naive_greedy(model, source, 9)])


def test_float64_logits_give_float64_scores() -> None:
    model = random_model(11)
    decoder = FakeDecoder(model, 11, np.float64)
    expected = naive_greedy(model, (5, 6), 9)
    assert close(run(decoder, [(5, 6)], GenerationOptions(max_length=9))[0], [expected], 1e-14)
    options = GenerationOptions(beam=3, n_best=3, max_length=9)
    assert close(run(decoder, [(5, 6)], options)[0], naive_beam(model, (5, 6), options), 1e-14)


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("beam", [2, 3, 5])
def test_beam_search_is_the_naive_one(
    beam: int, length_penalty: float, early_stopping: bool | Literal["never"]
) -> None:
    model = random_model(12, end=1.0)
    options = GenerationOptions(
        beam=beam,
        n_best=beam,
        max_length=7,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
    )
    sources = random_sources(12)
    results = run(FakeDecoder(model, 12), sources, options)
    for source, hypotheses in zip(sources, results, strict=True):
        assert close(hypotheses, naive_beam(model, source, options))


@pytest.mark.parametrize("length_penalty", [0.0, 0.7, 1.0])
def test_a_beam_as_wide_as_the_tree_finds_the_best_of_all_outputs(length_penalty: float) -> None:
    vocabulary, max_length = 4, 4
    model = random_model(vocabulary)
    every: list[Hypothesis] = []
    for length in range(max_length + 1):
        for tokens in itertools.product([PAD, BOS, 3], repeat=length):
            path = tokens if length == max_length else (*tokens, EOS)
            total = sum(
                log_softmax(model((9,), path[:place]))[token] for place, token in enumerate(path)
            )
            reason = "length" if length == max_length else "end"
            every.append(
                Hypothesis(tokens, total, total / len(path) ** length_penalty, reason)  # type: ignore[arg-type]
            )
    every.sort(key=lambda hypothesis: -hypothesis.score)
    assert len(every) == 121
    options = GenerationOptions(
        beam=130,
        n_best=130,
        max_length=max_length,
        length_penalty=length_penalty,
        early_stopping="never",
    )
    assert close(run(FakeDecoder(model, vocabulary), [(9,)], options)[0], every)


def test_a_beam_of_one_is_greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = FakeDecoder(random_model(11, end=0.5), 11)
    sources = random_sources(20)
    options = GenerationOptions(max_length=9)
    greedy = run(decoder, sources, options)
    monkeypatch.setattr("transferry.runtime.decoding.search.SamplingStrategy", BeamStrategy)
    for first, second in zip(run(decoder, sources, options), greedy, strict=True):
        assert close(first, second)


def test_equal_logits_go_to_the_lowest_token_and_the_first_beam() -> None:
    def flat(source: Tokens, history: Tokens) -> Logits:
        return np.array([-9.0, -9.0, -9.0, *[1.0] * 6])

    decoder = FakeDecoder(flat, 9)
    assert run(decoder, [(5,)], GenerationOptions(max_length=3))[0][0].tokens == (3, 3, 3)
    options = GenerationOptions(beam=3, n_best=3, max_length=2)
    assert [h.tokens for h in run(decoder, [(5,)], options)[0]] == [(3, 3), (3, 4), (3, 5)]


# A row's answer depends on nothing but the row


@pytest.mark.parametrize("name", SEARCHES)
def test_an_answer_depends_neither_on_neighbours_nor_on_order(name: str) -> None:
    options = SEARCHES[name]
    sources = random_sources(30)
    decoder = FakeDecoder(random_model(40, end=1.0), 40)
    together = run(decoder, sources, options)
    assert {hypotheses[0].finish_reason for hypotheses in together} >= {"end"}
    backwards = run(decoder, sources[::-1], options, row_ids=range(29, -1, -1))
    assert backwards[::-1] == together
    for row, source in enumerate(sources):
        assert run(decoder, [source], options, row_ids=[row]) == [together[row]]


@pytest.mark.parametrize("name", SEARCHES)
def test_a_bad_row_is_an_error_of_its_own(name: str) -> None:
    options = SEARCHES[name]
    good = random_model(40, end=1.0)
    sources = random_sources(12)
    bad: dict[Tokens, tuple[int, NDArray[np.float64]]] = {
        sources[1]: (0, np.full(40, np.nan)),
        sources[4]: (1, np.where(np.arange(40) == 39, np.nan, 0.0)),
        sources[6]: (0, np.where(np.arange(40) == 5, np.inf, 0.0)),
        sources[9]: (1, np.full(40, -np.inf)),
    }

    def model(source: Tokens, history: Tokens) -> Logits:
        length, logits = bad.get(source, (99, np.empty(0)))
        if len(history) == length:
            return logits
        # The end stays out of reach of the rows that turn bad later.
        return good(source, history) - (100 * (np.arange(40) == EOS) if source in bad else 0)

    expected = run(FakeDecoder(good, 40), sources, options)
    results = run(FakeDecoder(model, 40), sources, options)
    for source, found, hypotheses in zip(sources, results, expected, strict=True):
        if source not in bad:
            assert found == hypotheses
            continue
        for hypothesis in found:
            assert (hypothesis.tokens, hypothesis.finish_reason) == ((), "error")
            assert hypothesis.score == hypothesis.log_probability == -math.inf


def test_one_sample_may_fail_and_the_other_not() -> None:
    def model(source: Tokens, history: Tokens) -> Logits:
        if history == (3,):
            return np.full(5, np.nan)
        return np.array([-99.0, -99.0, 5.0 if history else -99.0, 0.0, 0.0])

    options = GenerationOptions(sample=True, n_best=8, max_length=3)
    hypotheses = run(FakeDecoder(model, 5), [(7,)], options)[0]
    reasons = [hypothesis.finish_reason for hypothesis in hypotheses]
    assert {"end", "error"} == set(reasons)
    assert reasons == sorted(reasons)


@pytest.mark.parametrize("beam", [1, 2])
def test_nothing_left_to_choose_is_an_error(beam: int) -> None:
    # Five tokens, none twice, no end before ten.
    options = GenerationOptions(beam=beam, no_repeat_ngram=1, min_length=10, max_length=12)
    decoder = FakeDecoder(random_model(5), 5)
    assert [h.finish_reason for h in run(decoder, [(7,)], options)[0]] == ["error"]
    assert len(decoder.rows_stepped) == 5


def test_one_bad_beam_makes_its_sentence_an_error_at_once() -> None:
    def model(source: Tokens, history: Tokens) -> Logits:
        """Ends with p 0.4 at first; the beam of token 4 is bad where the source is 9."""
        if history == (4,) and source == (9,):
            return np.full(5, np.nan)
        return log_of(1e-9, 1e-9, 0.4, 0.35, 0.25)

    decoder = FakeDecoder(model, 5)
    options = GenerationOptions(beam=3, n_best=3, max_length=6, early_stopping="never")
    good, bad, also_good = run(decoder, [(8,), (9,), (8,)], options)
    assert [hypothesis.finish_reason for hypothesis in bad] == ["error"]
    assert [h.finish_reason for h in good] == ["end"] * 3
    assert good == also_good
    assert decoder.rows_stepped[:3] == [3, 9, 6]


def test_a_beam_that_does_not_exist_may_score_anything() -> None:
    def model(source: Tokens, history: Tokens) -> Logits:
        """Bad after token 0, which no hypothesis holds, yet beams that do not exist are fed."""
        return np.full(6, np.nan) if 0 in history else log_of(1e-9, 1e-9, 0.1, 0.4, 0.3, 0.2)

    options = GenerationOptions(beam=3, n_best=3, max_length=6, prefix=(3, 4))
    hypotheses = run(FakeDecoder(model, 6), [(8,)], options)[0]
    assert len(hypotheses) == 3
    assert all(hypothesis.tokens[:2] == (3, 4) for hypothesis in hypotheses)

    logits = np.stack([log_of(0.5, 0.3, 0.2), np.array([9.0, 0.0, np.nan])])
    totals, parents, tokens = best_candidates(
        logits,
        logits,
        np.array([0.0, np.nan]),
        SegmentMaxima.of(logits, 1),
        np.array([[-1.0, -np.inf]]),
        4,
    )
    np.testing.assert_allclose(totals, [[*(np.log([0.5, 0.3, 0.2]) - 1), -np.inf]])
    assert parents[0, :3].tolist() == [0, 0, 0]
    assert tokens[0, :3].tolist() == [0, 1, 2]


def plain_candidates(
    logits: Logits, allowed: Logits, normaliser: Logits, totals: Logits, count: int
) -> list[list[tuple[float, int, int]]]:
    """Every candidate of each sentence, sorted by falling value, then by beam and token."""
    sentences, width = totals.shape
    best = []
    for sentence in range(sentences):
        every = []
        for beam in range(width):
            row = sentence * width + beam
            if not np.isfinite(totals[sentence, beam] - normaliser[row]):
                continue
            for token in np.flatnonzero(allowed[row] > -np.inf).tolist():
                value = logits[row, token] + (totals[sentence, beam] - normaliser[row])
                every.append((float(value), beam, token))
        every.sort(key=lambda candidate: (-candidate[0], *candidate[1:]))
        best.append(every[:count])
    return best


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("vocabulary", [1, 5, 17, 1003, 2003])
@pytest.mark.parametrize(("width", "count"), [(1, 1), (1, 6), (2, 4), (4, 8), (8, 16), (3, 60)])
@pytest.mark.parametrize("kind", ["random", "ties", "far apart"])
def test_the_best_candidates_are_those_of_a_plain_sort(
    kind: str, width: int, count: int, vocabulary: int, dtype: type
) -> None:
    rng = np.random.default_rng([width, count, vocabulary, len(kind)])
    sentences = 6
    rows = sentences * width
    logits: Logits = rng.normal(size=(rows, vocabulary)).astype(dtype)
    totals = -rng.random((sentences, width))
    if kind == "ties":
        # Whole numbers everywhere, and beams that have the same logits and the same total.
        logits = rng.integers(-3, 3, (rows, vocabulary)).astype(dtype)
        logits[1::2] = logits[: len(logits[1::2]) * 2 : 2]
        totals = np.floor(totals)
    elif kind == "far apart":
        # What is added rounds the logits away, in float32 at least.
        logits *= 1e-4
        logits += (2.0 ** rng.integers(0, 12, (rows, 1))).astype(dtype)
        totals *= 1e3
    normaliser = np.zeros(rows) if kind == "ties" else log_sum_exp(logits)
    allowed = logits.copy()
    allowed[:width, 1:] = -np.inf  # one token left
    allowed[width : 2 * width][rng.random((width, vocabulary)) < 0.7] = -np.inf
    allowed[2 * width : 3 * width] = -np.inf  # and none
    totals[3, 1:] = -np.inf  # a beam that does not exist may score anything
    strange = logits.reshape(sentences, width, vocabulary)[3, 1:]
    strange[...] = rng.choice([np.nan, np.inf, -np.inf, 50.0], strange.shape)
    allowed.reshape(sentences, width, vocabulary)[3, 1:] = strange
    normaliser.reshape(sentences, width)[3, 1:] = log_sum_exp(strange.reshape(-1, vocabulary))
    for usable, length in ((allowed, 1), (logits, 1), (logits, 7), (logits, SEGMENT)):
        maxima = SegmentMaxima.of(usable, length)
        values, parents, tokens = best_candidates(logits, usable, normaliser, maxima, totals, count)
        assert values.shape == parents.shape == tokens.shape == (sentences, count)
        expected = plain_candidates(logits, usable, normaliser, totals, count)
        for sentence, best in enumerate(expected):
            found = zip(values[sentence], parents[sentence], tokens[sentence], strict=True)
            assert list(found)[: len(best)] == best
            assert np.isneginf(values[sentence, len(best) :]).all()


def test_only_segments_whose_maximum_is_among_the_best_are_looked_at() -> None:
    logits = np.zeros((2, 130), np.float32)
    logits[0, 70], logits[1, 129] = 5.0, 4.0
    maxima = SegmentMaxima.of(logits, 64)
    assert maxima.maxima.tolist() == [[0, 5, 0, 0], [0, 0, 0, 4]]
    logits[0, 3] = 9.0  # of which the maxima do not know
    totals = np.zeros((1, 2))
    _, parents, tokens = best_candidates(logits, logits, np.zeros(2), maxima, totals, 2)
    assert list(zip(parents[0], tokens[0], strict=True)) == [(0, 70), (1, 129)]


class Normalising(SentenceFake):
    """Takes half as much again off every token, so that its own sums can be told."""

    def step(
        self,
        tokens: NDArray[np.int64],
        state: FakeState,
        *,
        top: int | None = None,
        normalise: bool = False,
    ) -> tuple[StepOutput, FakeState]:
        output, state = super().step(tokens, state)
        assert normalise
        return replace(output, log_sum_exp=log_sum_exp(output.all_logits[:, -1]) + 0.5), state


@pytest.mark.parametrize("name", ["greedy", "beam", "patient beam", "sampling", "filtered"])
def test_a_decoder_normalises_itself(name: str) -> None:
    options = replace(SEARCHES[name], length_penalty=1.0)
    model = random_model(40, end=2.0)
    sources = random_sources(40)
    requests = [Request(row, source, 12) for row, source in enumerate(sources)]
    found = stream(Normalising(model, 40), requests, options, 8)
    for source, hypotheses in zip(sources, found, strict=True):
        for one in hypotheses:
            path = (*one.tokens, EOS) if one.finish_reason == "end" else one.tokens
            total = sum(log_softmax(model(source, path[:n]))[token] for n, token in enumerate(path))
            assert one.log_probability == pytest.approx(total - 0.5 * len(path), abs=1e-4)


# A decoder that ranks


@pytest.mark.parametrize("vocabulary", [5, 40])
@pytest.mark.parametrize("name", SEARCHES)
def test_ranked_tokens_are_all_that_a_search_needs(name: str, vocabulary: int) -> None:
    """Of 5 tokens no beam has as many as are wanted; some logits tie, some are bad."""
    options = SEARCHES[name]
    if vocabulary == 5:
        options = replace(options, prefix=())
    good = random_model(vocabulary, end=1.0)
    sources = random_sources(60)

    def model(source: Tokens, history: Tokens) -> Logits:
        logits = np.round(good(source, history), 1)
        if source == sources[3] and len(history) == 2:
            logits[4] = np.nan
        if source == sources[5] and len(history) == 1:
            logits[:] = -np.inf
        return logits

    requests = [Request(row, source, 12, options.prefix, row) for row, source in enumerate(sources)]
    expected = stream(SentenceFake(model, vocabulary), requests, options, 7)
    decoder = RankingFake(model, vocabulary)
    assert stream(decoder, requests, options, 7) == expected
    assert sum(hypotheses == [FAILED] for hypotheses in expected) >= 1 or options.sample
    steps = len(decoder.rows_stepped)
    if options.sample:
        assert decoder.ranked == 0
    elif options.min_length:
        assert 0 <= decoder.ranked < steps
    else:
        assert decoder.ranked == steps


def test_ranked_tokens_of_a_beam_that_does_not_exist_are_none() -> None:
    logits = np.array([[2.0, 1.0], [9.0, 0.0]])
    sums = np.array([0.5, np.nan])
    ranked = TopK(np.array([[7, 4], [5, 6]]), np.isfinite(sums), logits, sums)
    totals, parents, tokens = best_of_top_k(ranked, np.array([[-1.0, -np.inf]]), 5)
    assert totals.tolist() == [[0.5, -0.5, -np.inf, -np.inf, -np.inf]]
    assert parents[0, :2].tolist() == [0, 0]
    assert parents.max() <= 1
    assert tokens[0, :2].tolist() == [7, 4]


# Leaving the batch


def test_ended_rows_leave_the_batch_once_they_are_a_quarter_of_a_step() -> None:
    def model(source: Tokens, history: Tokens) -> Logits:
        """Source (n,) gives n tokens."""
        return peak(EOS if len(history) == source[0] else 3, 20.0)

    decoder = FakeDecoder(model, 5)
    results = run(decoder, [(n,) for n in range(8)], GenerationOptions(max_length=20))
    assert [len(hypotheses[0].tokens) for hypotheses in results] == list(range(8))
    # Four of a step that costs as much as 8 + 8 rows, then three of one of 4 + 8.
    assert decoder.rows_stepped == [8, 8, 8, 8, 4, 4, 4, 1]
    assert decoder.selected == [[4, 5, 6, 7], [3]]


def test_ended_sentences_leave_a_beam_search_at_once() -> None:
    def model(source: Tokens, history: Tokens) -> Logits:
        end = 20.0 if len(history) >= source[0] else -20.0
        return np.array([0.0, 0.0, end, 1.0, 0.5])

    decoder = FakeDecoder(model, 5)
    run(decoder, [(n,) for n in range(4)], GenerationOptions(beam=2, max_length=20))
    # The first step scores no second beam; the one after it ends two sentences.
    assert decoder.rows_stepped == [4, 8, 4, 2]
    assert decoder.selected == [[0, 0, 1, 1, 2, 2, 3, 3], [4, 4, 6, 6], [2, 2]]


def test_beams_that_keep_their_places_are_not_selected() -> None:
    def model(source: Tokens, history: Tokens) -> Logits:
        """Two beginnings, each of which has one continuation."""
        if not history:
            return np.array([-50.0, -50.0, -50.0, 1.0, 0.5])
        return peak(history[0], 50.0)

    decoder = FakeDecoder(model, 5)
    results = run(decoder, [(7,)], GenerationOptions(beam=2, n_best=2, max_length=6))
    assert [h.tokens for h in results[0]] == [(3,) * 6, (4,) * 6]
    assert decoder.rows_stepped == [1, 2, 2, 2, 2, 2]
    assert decoder.selected == [[0, 0]]


def test_a_step_selects_at_most_once() -> None:
    decoder = FakeDecoder(random_model(12, end=1.0), 12)
    run(decoder, random_sources(10), GenerationOptions(beam=3, max_length=10))
    assert len(decoder.selected) < len(decoder.rows_stepped)


# A stream of sentences, one batch after another


def requests_of(count: int, longest: int, seed: int = 0) -> list[Request[int]]:
    """Every third with a prefix, all with a greatest length of their own."""
    rng = np.random.default_rng(seed)
    return [
        Request(
            key=key,
            source=source,
            max_length=int(rng.integers(3, longest + 1)),
            prefix=(7, 3)[: key % 3],
            row_id=1000 + key,
        )
        for key, source in enumerate(random_sources(count, seed))
    ]


STREAMS = {
    **SEARCHES,
    **{f"beam {n}": GenerationOptions(beam=n, n_best=n, max_length=12) for n in range(2, 6)},
    "penalty": GenerationOptions(
        beam=3, n_best=3, max_length=12, early_stopping="never", length_penalty=0.3
    ),
    "suppressing": GenerationOptions(max_length=12, suppress=(5, 9), no_repeat_ngram=1),
    "min length": GenerationOptions(beam=2, max_length=12, min_length=5),
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_answers_as_each_sentence_is_answered_alone(name: str) -> None:
    options = STREAMS[name]
    model = random_model(40, end=2.0)
    requests = requests_of(200, options.max_length)
    alone = [stream(FakeDecoder(model, 40), [request], options, 1)[0] for request in requests]
    reasons = Counter(hypotheses[0].finish_reason for hypotheses in alone)
    assert min(reasons["end"], reasons["length"]) > 20
    for slots in (1, 3, 8, 64):
        decoder = SentenceFake(model, 40, positions=options.max_length)
        assert stream(decoder, requests, options, slots) == alone, slots
        assert set(decoder.begun[:-1]) == {slots}
        assert sum(decoder.begun) == 200, "none is read twice"
    static = FakeDecoder(model, 40)
    assert stream(static, requests, options, 8) == alone


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_of_equal_lengths_is_the_batch(name: str) -> None:
    options = STREAMS[name]
    model = random_model(40, end=2.0)
    sources = random_sources(100)
    requests = [
        Request(row, source, options.max_length, options.prefix, row)
        for row, source in enumerate(sources)
    ]
    expected = run(FakeDecoder(model, 40), sources, options)
    assert stream(SentenceFake(model, 40), requests, options, 8) == expected
    assert run(SentenceFake(model, 40), sources, options) == expected


@pytest.mark.parametrize("name", ["greedy", "beam", "sampling"])
def test_a_stream_goes_on_with_each_prompt(name: str) -> None:
    options = STREAMS[name]
    model = random_model(40, end=2.0)
    requests = requests_of(60, options.max_length)
    assert min(len(request.source) for request in requests) == 1
    expected = stream(FakeDecoder(model, 40), requests, options, 60)
    decoder = SentenceFake(model, 40)
    decoder.has_encoder = False
    assert stream(decoder, requests, options, 8) == expected


@pytest.mark.parametrize("name", STREAMS)
def test_bad_sentences_leave_those_beside_and_after_them_alone(name: str) -> None:
    options = STREAMS[name]
    good = random_model(40, end=2.0)
    requests = requests_of(60, options.max_length)
    bad = {requests[key].source: key % 3 for key in range(0, 60, 5)}
    values = (np.nan, np.inf, -np.inf)

    def model(source: Tokens, history: Tokens) -> Logits:
        if source not in bad:
            return good(source, history)
        return np.full(40, values[bad[source]] if len(history) >= bad[source] else 0.0)

    expected = stream(FakeDecoder(good, 40), requests, options, 60)
    found = stream(SentenceFake(model, 40), requests, options, 8)
    for request, answer, wanted in zip(requests, found, expected, strict=True):
        if request.source in bad:
            assert {hypothesis.finish_reason for hypothesis in answer} == {"error"}
        else:
            assert answer == wanted


@pytest.mark.parametrize("name", STREAMS)
def test_what_an_ended_output_is_stepped_on_with_is_nothing_to_it(name: str) -> None:
    good = random_model(40, end=2.0)

    def model(source: Tokens, history: Tokens) -> Logits:
        return np.full(40, np.nan) if EOS in history else good(source, history)

    options = STREAMS[name]
    requests = requests_of(60, options.max_length)
    expected = stream(FakeDecoder(good, 40), requests, options, 60)
    for kind in (FakeDecoder, SentenceFake):
        assert stream(kind(model, 40), requests, options, 8) == expected


def tokens_given(source: Tokens, history: Tokens) -> Logits:
    """Source (n,) gives n tokens."""
    return peak(EOS if len(history) >= source[0] else 3, 20.0)


def counted(lengths: Sequence[int], max_length: int = 9) -> list[Request[int]]:
    return [Request(key, (length,), max_length) for key, length in enumerate(lengths)]


def test_whole_sentences_leave_where_rows_share_a_cache() -> None:
    decoder = SentenceFake(tokens_given, 5)
    stream(decoder, counted(range(8)), GenerationOptions(max_length=9), 8)
    assert decoder.rows_stepped == [8, 8, 8, 8, 4, 4, 4, 1]

    decoder = SentenceFake(tokens_given, 5)
    stream(decoder, counted(range(7)), GenerationOptions(beam=2, max_length=9), 7)
    # Source (n,) ends for the second time in step n + 2.
    assert decoder.rows_stepped == [7, 14, 14, 14, 8, 8, 4, 4]

    # Of three samples of each some end before the others, and are stepped on.
    decoder = SentenceFake(random_model(12, end=1.0), 12)
    options = GenerationOptions(max_length=9, sample=True, n_best=3)
    stream(decoder, requests_of(9, 9), options, 9)
    assert all(rows % 3 == 0 for rows in decoder.rows_stepped)


def test_what_ends_at_its_greatest_length_is_stepped_no_further() -> None:
    def model(source: Tokens, history: Tokens) -> Logits:
        return peak(3, 20.0)

    requests = [Request(key, (5,), 4 if key == 2 else 9) for key in range(20)]
    for kind in (FakeDecoder, SentenceFake):
        static = kind(model, 5)
        answers = stream(static, requests[:8], GenerationOptions(max_length=9), 8)
        assert [len(row[0].tokens) for row in answers] == [9, 9, 4, 9, 9, 9, 9, 9]
        assert static.rows_stepped == [8] * 4 + [7] * 5


@pytest.mark.parametrize("kind", [FakeDecoder, SentenceFake])
def test_a_batch_ends_before_the_next_begins(kind: type[FakeDecoder]) -> None:
    decoder = kind(tokens_given, 5)
    stream(decoder, counted([1, 1, 2, 1]), GenerationOptions(max_length=9), 2)
    assert decoder.rows_stepped == [2, 2, 2, 2, 2]


def test_no_sentence_waits_for_one_that_is_not_there_yet() -> None:
    """An answer is handed out when it ends, before more is asked for."""
    supply = Requests(counted([3, 1, 4]), 1, 1, 1)
    found = search_stream(
        SentenceFake(tokens_given, 5),
        supply.take,
        GenerationOptions(max_length=9),
        SPECIAL,
        slots=4,
    )
    for key in range(3):
        assert next(found)[0] == key
        assert len(supply.requests) == 2 - key


def test_a_request_for_more_than_the_options_allow_is_refused() -> None:
    with pytest.raises(UsageError, match="source 0 wants 10 tokens, expected 1 to max_length=9"):
        stream(FakeDecoder(tokens_given, 5), counted([1], 10), GenerationOptions(max_length=9), 1)


# Without scores


@pytest.mark.parametrize("kind", [FakeDecoder, SentenceFake, GreedyFake])
@pytest.mark.parametrize(
    "settings", [{}, {"min_length": 4}, {"no_repeat_ngram": 2}, {"suppress": (5, 3)}]
)
def test_greedy_search_without_scores_finds_the_same(
    kind: type[FakeDecoder], settings: dict[str, Any]
) -> None:
    good = random_model(40, end=2.0)
    sources = random_sources(60)

    def model(source: Tokens, history: Tokens) -> Logits:
        logits = good(source, history)
        if source == sources[7] and history:
            logits = logits.copy()
            logits[3] = np.nan  # which is suppressed above
        return logits

    options = GenerationOptions(max_length=12, **settings)
    requests = [Request(row, source, 12) for row, source in enumerate(sources)]
    expected = stream(FakeDecoder(model, 40), requests, options, 60)
    assert expected[7] == [FAILED]
    found = stream(kind(model, 40), requests, replace(options, scores=False), 8)
    for (one,), (other,) in zip(found, expected, strict=True):
        assert (one.tokens, one.finish_reason) == (other.tokens, other.finish_reason)
        if one.finish_reason != "error":
            assert math.isnan(one.score)
            assert math.isnan(one.log_probability)
    assert found[7] == [FAILED]


def test_the_decoder_picks_where_nothing_else_must_be_known() -> None:
    def steps(**settings: Any) -> tuple[int, int]:
        decoder = GreedyFake(random_model(40, end=-50.0), 40)
        run(decoder, random_sources(5), GenerationOptions(max_length=9, **settings))
        return decoder.picked, len(decoder.rows_stepped)

    assert steps() == (0, 9)
    assert steps(scores=False) == (9, 9)
    assert steps(scores=False, min_length=4) == (5, 9)
    assert steps(scores=False, prefix=(5, 6)) == (7, 9)
    assert steps(scores=False, suppress=(5,)) == (0, 9)


# Ranking, length and stopping


def test_n_best_is_ranked_and_distinct_and_begins_with_the_best() -> None:
    decoder = FakeDecoder(random_model(12, end=1.0), 12)
    sources = random_sources(15)
    many = run(decoder, sources, GenerationOptions(beam=4, n_best=4, max_length=8))
    one = run(decoder, sources, GenerationOptions(beam=4, max_length=8))
    for hypotheses, best in zip(many, one, strict=True):
        scores = [hypothesis.score for hypothesis in hypotheses]
        assert len(scores) == 4
        assert scores == sorted(scores, reverse=True)
        assert len({(h.tokens, h.finish_reason) for h in hypotheses}) == 4
        assert hypotheses[:1] == best


def ending_early_or_late(source: Tokens, history: Tokens) -> Logits:
    """Ends at once with p 0.3, or after four more tokens with p 0.8 ** 5 * 0.7 altogether."""
    if not history:
        return log_of(1e-9, 1e-9, 0.3, 0.7, 1e-9)
    if len(history) < 5:
        return log_of(1e-9, 1e-9, 1e-9, 0.8, 0.2)
    return log_of(1e-9, 1e-9, 0.8, 0.1, 0.1)


def test_the_length_penalty_decides_between_short_and_long() -> None:
    decoder = FakeDecoder(ending_early_or_late, 5)
    best = {}
    for penalty in (0.0, 1.0):
        options = GenerationOptions(
            beam=3, max_length=8, length_penalty=penalty, early_stopping="never"
        )
        best[penalty] = run(decoder, [(7,)], options)[0][0]
    assert best[0.0].tokens == ()
    assert best[0.0].log_probability == pytest.approx(math.log(0.3), abs=1e-5)
    assert best[0.0].score == best[0.0].log_probability
    assert best[1.0].tokens == (3,) * 5
    assert best[1.0].log_probability == pytest.approx(math.log(0.7 * 0.8**5), abs=1e-5)
    assert best[1.0].score == pytest.approx(best[1.0].log_probability / 6)


def test_early_stopping_takes_the_first_and_patience_the_best() -> None:
    def model(source: Tokens, history: Tokens) -> Logits:
        """Two poor short outputs against a good long one."""
        if not history:
            return log_of(1e-9, 1e-9, 0.4, 0.6, 1e-9)
        if len(history) == 1:
            return log_of(1e-9, 1e-9, 0.4, 0.6, 1e-9)
        if len(history) < 6:
            return log_of(1e-9, 1e-9, 1e-9, 1.0, 1e-9)
        return log_of(1e-9, 1e-9, 1.0, 1e-9, 1e-9)

    decoder = FakeDecoder(model, 5)
    first = run(decoder, [(7,)], GenerationOptions(beam=2, max_length=9))[0][0]
    steps = len(decoder.rows_stepped)
    patient = GenerationOptions(beam=2, max_length=9, early_stopping="never")
    best = run(decoder, [(7,)], patient)[0][0]
    assert (first.tokens, steps) == ((3,), 2)
    assert best.tokens == (3,) * 6
    assert best.score > first.score


def test_patience_ends_once_nothing_can_beat_the_worst() -> None:
    def model(source: Tokens, history: Tokens) -> Logits:
        return log_of(1e-9, 1e-9, 0.9, 0.05, 0.05)

    decoder = FakeDecoder(model, 5)
    options = GenerationOptions(beam=2, max_length=50, length_penalty=0.0, early_stopping="never")
    run(decoder, [(7,)], options)
    assert len(decoder.rows_stepped) == 2


def test_patience_knows_the_greatest_length_of_each_sentence() -> None:
    def model(source: Tokens, history: Tokens) -> Logits:
        return log_of(1e-9, 1e-9, 0.7, 0.2, 0.1)

    def steps(max_length: int, of_options: int) -> int:
        decoder = FakeDecoder(model, 5)
        options = GenerationOptions(beam=2, max_length=of_options, early_stopping="never")
        stream(decoder, [Request(0, (5,), max_length)], options, 1)
        return len(decoder.rows_stepped)

    assert steps(5, 50) == steps(5, 5) < steps(50, 50)
    assert steps(5, 5) < 5


@pytest.mark.parametrize("beam", [1, 3])
def test_lengths_are_bounded_as_documented(beam: int) -> None:
    eager = FakeDecoder(random_model(9, end=20.0), 9)
    options = GenerationOptions(beam=beam, min_length=3, max_length=4)
    for hypotheses in run(eager, random_sources(5), options):
        assert (len(hypotheses[0].tokens), hypotheses[0].finish_reason) == (3, "end")
    reluctant = FakeDecoder(random_model(9, end=-50.0), 9)
    for hypotheses in run(reluctant, random_sources(5), options):
        assert (len(hypotheses[0].tokens), hypotheses[0].finish_reason) == (4, "length")
        assert hypotheses[0].score == pytest.approx(hypotheses[0].log_probability / 4)
    assert len(reluctant.rows_stepped) == 4


# Filters


@pytest.mark.parametrize(
    "options",
    [
        GenerationOptions(max_length=6),
        GenerationOptions(max_length=6, beam=3),
        GenerationOptions(max_length=6, sample=True, temperature=2.0, top_k=3),
    ],
)
def test_each_row_begins_with_its_prefix_at_the_models_own_price(
    options: GenerationOptions,
) -> None:
    model = random_model(9)
    sources = random_sources(4)
    prefixes = [(3, 3, 8), (), (7,), (5, 4)]
    results = run(FakeDecoder(model, 9), sources, options, prefixes=prefixes)
    for source, prefix, (best,) in zip(sources, prefixes, results, strict=True):
        assert best.tokens[: len(prefix)] == prefix
        path = (*best.tokens, EOS) if best.finish_reason == "end" else best.tokens
        total = sum(log_softmax(model(source, path[:n]))[path[n]] for n in range(len(path)))
        assert best.log_probability == pytest.approx(total, abs=1e-4)


def test_a_prefix_of_the_greatest_length_is_the_whole_output() -> None:
    options = GenerationOptions(beam=2, max_length=2, prefix=(3, 4))
    (best,) = run(FakeDecoder(random_model(9), 9), [(5,)], options)[0]
    assert (best.tokens, best.finish_reason) == ((3, 4), "length")


@pytest.mark.parametrize("beam", [1, 3])
def test_no_ngram_repeats(beam: int) -> None:
    def model(source: Tokens, history: Tokens) -> Logits:
        return np.array([-30.0, -30.0, -9.0, 3.0, 2.0, 1.0])

    free = GenerationOptions(beam=beam, max_length=6)
    assert run(FakeDecoder(model, 6), [(5,)], free)[0][0].tokens == (3,) * 6
    limited = GenerationOptions(beam=beam, max_length=6, no_repeat_ngram=2)
    tokens = run(FakeDecoder(model, 6), [(5,)], limited)[0][0].tokens
    assert len(tokens) == 6
    assert len(set(itertools.pairwise(tokens))) == 5


def test_filters_see_the_history_of_their_beam() -> None:
    model = random_model(9, end=-1.0, spread=1.0)
    options = GenerationOptions(beam=3, n_best=3, max_length=6, no_repeat_ngram=2)

    def no_bigram_repeats(tokens: Tokens) -> bool:
        return len(set(itertools.pairwise(tokens))) == max(0, len(tokens) - 1)

    sources = random_sources(20)
    results = run(FakeDecoder(model, 9), sources, options)
    for source, hypotheses in zip(sources, results, strict=True):
        assert close(hypotheses, naive_beam(model, source, options, no_bigram_repeats))


# Sampling


def test_draws_follow_the_models_distribution() -> None:
    logits = np.array([-1.0, -2.0, 0.5, 1.0, 0.0, -0.5])
    options = GenerationOptions(sample=True, n_best=3000, max_length=1, temperature=1.5)
    hypotheses = run(FakeDecoder(lambda *_: logits, 6), [(5,)], options)[0]
    counts = Counter(h.tokens[0] if h.tokens else EOS for h in hypotheses)
    expected = np.exp(log_softmax(logits / 1.5))
    for token in range(6):
        deviation = math.sqrt(expected[token] * (1 - expected[token]) / 3000)
        assert abs(counts[token] / 3000 - expected[token]) < 4 * deviation
    for hypothesis in hypotheses:
        token = hypothesis.tokens[0] if hypothesis.tokens else EOS
        assert hypothesis.log_probability == pytest.approx(log_softmax(logits)[token], abs=1e-5)


def test_samples_are_ranked_and_repeat_with_the_seed_only() -> None:
    decoder = FakeDecoder(random_model(30), 30)
    options = GenerationOptions(sample=True, n_best=4, max_length=8, seed=5)
    first = run(decoder, [(5,), (5,)], options, row_ids=[10, 11])
    assert first == run(decoder, [(5,), (5,)], options, row_ids=[10, 11])
    assert first[0] != first[1]
    scores = [hypothesis.score for hypothesis in first[0]]
    assert scores == sorted(scores, reverse=True)
    assert len(set(scores)) == 4
    other = GenerationOptions(sample=True, n_best=4, max_length=8, seed=6)
    assert first != run(decoder, [(5,), (5,)], other, row_ids=[10, 11])


def test_more_samples_and_steps_leave_the_draws_as_they_were() -> None:
    few = draw_uniforms(7, [3], 2, 4)
    many = draw_uniforms(7, [9, 3], 5, 11)
    np.testing.assert_array_equal(many[5:7, :4], few)
    assert len(np.unique(many)) == many.size
    assert (many >= 0).all()
    assert (many < 1).all()


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 9}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.39}, [1]),
        ({"top_p": 0.41}, [1, 3]),
        ({"top_p": 0.71}, [0, 1, 3]),
        # Of the top two, which hold 0.7, token 1 alone holds 0.57.
        ({"top_k": 2, "top_p": 0.5}, [1]),
        ({"top_k": 3, "top_p": 0.79}, [0, 1, 3]),
        # A temperature of 0.5 squares: 1 and 3 hold 0.16 and 0.09 of 0.30.
        ({"temperature": 0.5, "top_p": 0.8}, [1, 3]),
    ],
)
def test_top_k_and_top_p_keep_the_likeliest(settings: dict[str, Any], kept: list[int]) -> None:
    logits = np.log(np.array([[0.2, 0.4, 0.06, 0.3, 0.04]])) + 3
    sampler = Sampler(GenerationOptions(sample=True, **settings), np.empty((1, 1)))
    weights = sampler.weights(logits)[0]
    assert np.flatnonzero(weights).tolist() == kept
    original = np.exp(logits[0, kept] / sampler.options.temperature)
    np.testing.assert_allclose(weights[kept] / weights.max(), original / original.max())


def test_a_draw_never_falls_on_a_token_that_was_cut_off() -> None:
    logits = np.full((2, 6), -np.inf, np.float32)
    logits[:, 3] = 0.1
    options = GenerationOptions(sample=True)
    for uniform in (0.0, 1 - 2**-53):
        sampler = Sampler(options, np.full((2, 1), uniform))
        assert sampler(logits, np.arange(2), 0).tolist() == [3, 3]


# Arithmetic


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_log_sum_exp_survives_large_logits_and_many_rows(dtype: type) -> None:
    rng = np.random.default_rng(0)
    logits: Logits = (
        rng.normal(size=(70, 5000)) * 10 + 900 * (-1) ** np.arange(70)[:, None]
    ).astype(dtype)
    wide = logits.astype(np.float64)
    largest = wide.max(axis=1)
    expected = largest + np.log(np.exp(wide - largest[:, None]).sum(axis=1))
    tolerance = 1e-12 if dtype is np.float64 else 1e-6
    np.testing.assert_allclose(log_sum_exp(logits), expected, rtol=0, atol=tolerance)
    np.testing.assert_array_equal(log_sum_exp(logits[33:34]), log_sum_exp(logits)[33:34])


@pytest.mark.parametrize("vocabulary", [1, 5, 31, 200, 1003])
@pytest.mark.parametrize("k", [1, 4, 10])
def test_top_k_is_the_stable_sort(vocabulary: int, k: int) -> None:
    rng = np.random.default_rng(vocabulary)
    # Whole numbers tie often, also across the k-th place.
    logits = rng.integers(-6, 6, (20, vocabulary)).astype(np.float32)
    logits[3] = -np.inf
    logits[4, 1:] = -np.inf
    values, tokens = top_k(logits, k)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    expected = np.take_along_axis(logits, order, axis=1)
    width = order.shape[1]
    np.testing.assert_array_equal(values[:, :width], expected)
    np.testing.assert_array_equal(tokens[:, :width], np.where(expected > -np.inf, order, 0))
    assert np.isneginf(values[:, width:]).all()
    assert values.dtype == logits.dtype


# What the caller may get wrong


def test_no_sources_give_no_answers() -> None:
    assert run(FakeDecoder(random_model(5), 5), [], GenerationOptions()) == []


def test_an_empty_source_is_refused_by_its_place() -> None:
    with pytest.raises(InputError, match="source 1 of the batch has no tokens"):
        run(FakeDecoder(random_model(5), 5), [(3,), ()], GenerationOptions())


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        ((3, EOS), "source 1 holds token 2"),
        ((5,), "source 1 holds token 5, expected tokens from 0 to 4"),
        ((-1,), "source 1 holds token -1"),
        ((3, 3, 3), "source 1 has 3 tokens, more than max_length=2"),
    ],
)
def test_a_prefix_that_cannot_be_is_refused(prefix: Tokens, message: str) -> None:
    decoder = FakeDecoder(random_model(5), 5)
    with pytest.raises(UsageError, match=message):
        run(decoder, [(3,), (4,)], GenerationOptions(max_length=2), prefixes=[(), prefix])


def test_what_is_suppressed_must_be_of_the_vocabulary() -> None:
    decoder = FakeDecoder(random_model(5), 5)
    with pytest.raises(UsageError, match="suppress holds token 5, expected tokens from 0 to 4"):
        run(decoder, [(3,)], GenerationOptions(suppress=(1, 5)))


@pytest.mark.parametrize("beam", [1, 3])
def test_no_output_holds_what_is_suppressed(beam: int) -> None:
    decoder = FakeDecoder(random_model(5), 5)

    def tokens(*suppress: int) -> set[int]:
        options = GenerationOptions(
            beam=beam, n_best=beam, min_length=3, max_length=6, suppress=suppress
        )
        rows = run(decoder, [(3,), (4,)], options)
        return {token for row in rows for item in row for token in item.tokens}

    chosen = min(tokens())
    assert chosen not in tokens(chosen)
    assert tokens(chosen)
