"""Batches of any size, and decoders that rank or normalise themselves."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.runtime.decoding.fakes import (
    EOS,
    SEARCHES,
    SPECIAL,
    FakeDecoder,
    GreedyFake,
    Logits,
    Model,
    NormalisingFake,
    RankingFake,
    SentenceFake,
    Tokens,
    close,
    log_softmax,
    peak,
    plain_search,
    random_model,
    random_sources,
    requests_for,
    run,
    stream,
    tokens_given,
)
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.decoding.hypothesis import FAILED, Hypothesis
from transferry.runtime.decoding.search import search_batch
from transferry.runtime.decoding.strategy import Request
from transferry.runtime.errors import UsageError


def requests_of(count: int, longest: int, seed: int = 0) -> list[Request[int]]:
    """Every third with a prefix, all with a greatest length of their own."""
    rng = np.random.default_rng(seed)
    return [
        Request(
            key=key,
            source=source,
            max_length=int(rng.choice([5, 6, 8, longest])),
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
    "min length": GenerationOptions(beam=2, max_length=12, min_length=5, suppress=(5, 9)),
}
streams = pytest.mark.parametrize("options", STREAMS.values(), ids=STREAMS)


BAD = (
    np.full(40, np.nan),
    np.where(np.arange(40) == 39, np.nan, 0.0),
    np.where(np.arange(40) == 5, np.inf, 0.0),
    np.full(40, -np.inf),
)


def plainly(
    model: Model, request: Request[int], options: GenerationOptions, encoder: bool = True
) -> list[Hypothesis]:
    own = replace(options, prefix=tuple(request.prefix), max_length=request.max_length)
    return plain_search(model, tuple(request.source), own, request.row_id, encoder)


@streams
def test_a_stream_answers_as_each_sentence_is_answered_plainly(options: GenerationOptions) -> None:
    """And alone, to the bit; some sentences turn bad, and after an end all is."""
    good = random_model(40, end=2.0)
    requests = requests_of(80, options.max_length)
    bad = {requests[key].source: (key // 5 % 3, BAD[key // 5 % 4]) for key in range(0, 80, 5)}

    def model(source: Tokens, history: Tokens) -> Logits:
        if EOS in history:
            return BAD[0]
        length, values = bad.get(source, (99, BAD[0]))
        # The end stays out of reach of the rows that turn bad later.
        beyond = 100 * (np.arange(40) == EOS) if source in bad else 0
        return values if len(history) == length else good(source, history) - beyond

    alone = [stream(FakeDecoder(model, 40), [request], options, 1)[0] for request in requests]
    for request, hypotheses in zip(requests, alone, strict=True):
        assert close(hypotheses, plainly(model, request, options))
        assert (hypotheses[0] == FAILED) is (request.source in bad)
    reasons = Counter(hypotheses[0].finish_reason for hypotheses in alone)
    assert min(reasons["end"], reasons["length"]) > 8
    for slots in (1, 3, 8, 64):
        decoder = SentenceFake(model, 40, positions=options.max_length)
        assert stream(decoder, requests, options, slots) == alone, slots
        assert set(decoder.begun[:-1]) == {slots}
        assert sum(decoder.begun) == 80, "none is read twice"
    static = FakeDecoder(model, 40)
    assert stream(static, requests, options, 8) == alone


@streams
def test_a_batch_is_a_stream_of_equal_lengths(options: GenerationOptions) -> None:
    model = random_model(40, end=2.0)
    sources = random_sources(100)
    expected = stream(SentenceFake(model, 40), requests_for(sources, options), options, 8)
    assert run(FakeDecoder(model, 40), sources, options) == expected
    backwards = run(SentenceFake(model, 40), sources[::-1], options, row_ids=range(99, -1, -1))
    assert backwards[::-1] == expected
    prefixes = [(7, 3)[: row % 3] for row in range(100)]
    for (one, *_), prefix in zip(
        run(FakeDecoder(model, 40), sources, options, prefixes=prefixes), prefixes, strict=True
    ):
        assert one.tokens[: len(prefix)] == prefix


RULES: dict[str, dict[str, Any]] = {
    **{f"{size}-grams": {"no_repeat_ngram": size} for size in range(1, 4)},
    **{f"{n}-grams of all": {"no_repeat_ngram": n, "prompt_ngrams": True} for n in range(1, 4)},
    "n-grams of tokens that are forced": {"no_repeat_ngram": 1, "min_length": 3},
    "suppressed": {"suppress": (7, 3)},
    "sequences": {"suppress_sequences": ((3, 4), (5, 3, 4), (6, 6, 7), (1, 3))},
    "penalty": {"repetition_penalty": 2.0},
    "reward": {"repetition_penalty": 0.7},
    "first tokens": {"suppress_begin": (3, 5, 7)},
    "least length": {"min_length": 5},
}


@pytest.mark.parametrize("has_encoder", [True, False])
@pytest.mark.parametrize("beam", [1, 3])
@pytest.mark.parametrize("rule", RULES)
def test_rules_are_those_of_each_row_alone(rule: str, beam: int, has_encoder: bool) -> None:
    """Prefixes overrule them; prompts, outputs and prefixes side by side have unequal lengths."""
    model = random_model(8, spread=1.0)
    free = GenerationOptions(beam=beam, n_best=beam, max_length=12)
    options = replace(free, **RULES[rule])
    draws = random_sources(60)
    requests = [
        replace(request, source=tuple(token % 5 + 3 for token in draw))
        for request, draw in zip(requests_of(60, 12), draws, strict=True)
    ]
    decoder = SentenceFake(model, 8)
    decoder.has_encoder = has_encoder
    found = stream(decoder, requests, options, 8)
    for request, hypotheses in zip(requests, found, strict=True):
        assert close(hypotheses, plainly(model, request, options, has_encoder))
    decoder = SentenceFake(model, 8)
    decoder.has_encoder = has_encoder
    assert found != stream(decoder, requests, free, 8), "the rule has no effect here"


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


def test_an_answer_is_handed_out_when_it_ends() -> None:
    decoder, options = SentenceFake(tokens_given, 5), GenerationOptions(max_length=9)
    found = search_batch(decoder, counted([3, 1, 4]), options, SPECIAL)
    for key, steps in ((1, 2), (0, 4), (2, 5)):
        assert next(found)[0] == key
        assert len(decoder.rows_stepped) == steps


def test_a_request_for_more_than_the_options_allow_is_refused() -> None:
    with pytest.raises(UsageError, match="source 0 wants 10 tokens, expected 1 to max_length=9"):
        stream(FakeDecoder(tokens_given, 5), counted([1], 10), GenerationOptions(max_length=9), 1)


@pytest.mark.parametrize("name", ["greedy", "beam", "patient beam", "sampling", "filtered"])
def test_a_decoder_normalises_itself(name: str) -> None:
    options = replace(SEARCHES[name], length_penalty=1.0)
    model = random_model(40, end=2.0)
    sources = random_sources(40)
    found = stream(
        NormalisingFake(model, 40),
        [Request(row, source, 12) for row, source in enumerate(sources)],
        options,
        8,
    )
    for source, hypotheses in zip(sources, found, strict=True):
        for one in hypotheses:
            path = (*one.tokens, EOS) if one.finish_reason == "end" else one.tokens
            total = sum(log_softmax(model(source, path[:n]))[token] for n, token in enumerate(path))
            assert one.log_probability == pytest.approx(total - 0.5 * len(path), abs=1e-4)


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

    requests = requests_for(sources, options)
    expected = stream(SentenceFake(model, vocabulary), requests, options, 7)
    decoder = RankingFake(model, vocabulary)
    assert stream(decoder, requests, options, 7) == expected
    assert sum(hypotheses == [FAILED] for hypotheses in expected) >= 1 or options.sample
    steps = len(decoder.rows_stepped)
    if options.sample:
        assert decoder.picked == 0
    elif options.min_length:
        assert 0 <= decoder.picked < steps
    else:
        assert decoder.picked == steps


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
    requests = requests_for(sources, options)
    expected = stream(FakeDecoder(model, 40), requests, options, 60)
    assert expected[7] == [FAILED]
    found = stream(kind(model, 40), requests, replace(options, scores=False), 8)
    for (one,), (other,) in zip(found, expected, strict=True):
        assert (one.tokens, one.finish_reason) == (other.tokens, other.finish_reason)
        if one.finish_reason != "error":
            assert math.isnan(one.score)
            assert math.isnan(one.log_probability)
    assert found[7] == [FAILED]
