"""Beam search against a plain one over whole histories and the whole vocabulary."""

from typing import Literal

import numpy as np
import pytest

from tests.runtime.decoding.fakes import (
    FakeDecoder,
    Logits,
    RankingFake,
    Tokens,
    close,
    constant,
    log_of,
    peak,
    plain_search,
    random_model,
    random_sources,
    run,
    stream,
)
from transferry.runtime.decoding.beam_search import best_candidates, best_of_top_k
from transferry.runtime.decoding.decoder import TopK
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.decoding.logits import SEGMENT, SegmentMaxima, log_sum_exp
from transferry.runtime.decoding.strategy import Request


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [-1, 0.0, 0.6, 1.0, 2.0])
# The last is as wide as the tree of all outputs.
@pytest.mark.parametrize(("beam", "vocabulary"), [(2, 12), (3, 12), (5, 12), (130, 4)])
def test_beam_search_is_the_plain_one(
    beam: int, vocabulary: int, length_penalty: float, early_stopping: bool | Literal["never"]
) -> None:
    model = random_model(vocabulary, end=1.0)
    options = GenerationOptions(
        beam=beam,
        n_best=beam,
        max_length=7 if beam < 130 else 4,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
    )
    sources = random_sources(12 if beam < 130 else 1)
    results = run(FakeDecoder(model, vocabulary), sources, options)
    for source, hypotheses in zip(sources, results, strict=True):
        assert close(hypotheses, plain_search(model, source, options))
    assert beam < 130 or early_stopping != "never" or len(results[0]) == 121


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
@pytest.mark.parametrize("vocabulary", [1, 17, 1003])
@pytest.mark.parametrize(("width", "count"), [(1, 1), (1, 6), (4, 8), (3, 60)])
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
        # The added total rounds the logits away, in float32 at least.
        logits *= 1e-4
        logits += (2.0 ** rng.integers(0, 12, (rows, 1))).astype(dtype)
        totals *= 1e3
    normaliser = np.zeros(rows) if kind == "ties" else log_sum_exp(logits)
    allowed = logits.copy()
    allowed[:width, 1:] = -np.inf  # one token left
    allowed[width : 2 * width][rng.random((width, vocabulary)) < 0.7] = -np.inf
    allowed[2 * width : 3 * width] = -np.inf  # no continuation
    totals[3, 1:] = -np.inf  # a beam that does not exist may score anything
    strange = logits.reshape(sentences, width, vocabulary)[3, 1:]
    strange[...] = rng.choice([np.nan, np.inf, -np.inf, 50.0], strange.shape)
    allowed.reshape(sentences, width, vocabulary)[3, 1:] = strange
    normaliser.reshape(sentences, width)[3, 1:] = log_sum_exp(strange.reshape(-1, vocabulary))
    for usable, length in ((allowed, 1), (logits, 1), (logits, 7), (logits, SEGMENT)):
        maxima = SegmentMaxima.of(usable, length)
        values, parents, tokens = best_candidates(logits, usable, normaliser, maxima, totals, count)
        parents -= np.arange(sentences)[:, None] * width  # rows of the logits
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
    logits[0, 3] = 9.0  # unknown to the maxima
    totals = np.zeros((1, 2))
    _, parents, tokens = best_candidates(logits, logits, np.zeros(2), maxima, totals, 2)
    assert list(zip(parents[0], tokens[0], strict=True)) == [(0, 70), (1, 129)]


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
    for kind in (FakeDecoder, RankingFake):
        hypotheses = run(kind(model, 6), [(8,)], options)[0]
        assert close(hypotheses, plain_search(model, (8,), options))
        assert len(hypotheses) == 3


def test_ranked_tokens_of_a_beam_that_does_not_exist_are_none() -> None:
    logits = np.array([[2.0, 1.0], [9.0, 0.0]])
    ranked = TopK(np.array([[7, 4], [5, 6]]), logits, np.array([0.5, np.nan]))
    totals, parents, tokens = best_of_top_k(ranked, np.array([[-1.0, -np.inf]]), 5)
    assert totals.tolist() == [[0.5, -0.5, -np.inf, -np.inf, -np.inf]]
    assert parents[0, :2].tolist() == [0, 0]
    assert parents.max() <= 1
    assert tokens[0, :2].tolist() == [7, 4]


def test_patience_ends_once_nothing_can_beat_the_worst() -> None:
    decoder = FakeDecoder(constant(1e-9, 1e-9, 0.9, 0.05, 0.05), 5)
    options = GenerationOptions(beam=2, max_length=50, length_penalty=0.0, early_stopping="never")
    run(decoder, [(7,)], options)
    assert len(decoder.rows_stepped) == 2


def test_patience_knows_the_greatest_length_of_each_sentence() -> None:
    def steps(max_length: int, of_options: int) -> int:
        decoder = FakeDecoder(constant(1e-9, 1e-9, 0.7, 0.2, 0.1), 5)
        options = GenerationOptions(beam=2, max_length=of_options, early_stopping="never")
        stream(decoder, [Request(0, (5,), max_length)], options, 1)
        return len(decoder.rows_stepped)

    assert steps(5, 50) == steps(5, 5) < steps(50, 50)
    assert steps(5, 5) < 5


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
        """Two beginnings, each with one continuation."""
        if not history:
            return np.array([-50.0, -50.0, -50.0, 1.0, 0.5])
        return peak(history[0], 50.0)

    decoder = FakeDecoder(model, 5)
    results = run(decoder, [(7,)], GenerationOptions(beam=2, n_best=2, max_length=6))
    assert [h.tokens for h in results[0]] == [(3,) * 6, (4,) * 6]
    assert decoder.rows_stepped == [1, 2, 2, 2, 2, 2]
    assert decoder.selected == [[0, 0]]
