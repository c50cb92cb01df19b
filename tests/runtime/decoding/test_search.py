"""Greedy and beam search: rows, errors, filters, and when rows leave the batch."""

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.runtime.decoding.fakes import (
    EOS,
    SEARCHES,
    FakeDecoder,
    GreedyFake,
    Logits,
    Tokens,
    close,
    constant,
    log_softmax,
    plain_search,
    random_decoder,
    random_model,
    random_sources,
    run,
    tokens_given,
)
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.errors import InputError, UsageError

searches = pytest.mark.parametrize("options", SEARCHES.values(), ids=SEARCHES)


def test_greedy_search_is_the_plain_one() -> None:
    model, options = random_model(11, end=0.5), GenerationOptions(max_length=9)
    sources = random_sources(40)
    results = run(FakeDecoder(model, 11), sources, options)
    assert {hypotheses[0].finish_reason for hypotheses in results} == {"end", "length"}
    for source, hypotheses in zip(sources, results, strict=True):
        assert close(hypotheses, plain_search(model, source, options))


@pytest.mark.parametrize("beam", [1, 3])
def test_float64_logits_give_float64_scores(beam: int) -> None:
    model, options = random_model(11), GenerationOptions(beam=beam, n_best=beam, max_length=9)
    found = run(FakeDecoder(model, 11, np.float64), [(5, 6)], options)[0]
    assert close(found, plain_search(model, (5, 6), options), 1e-14)


def test_equal_logits_go_to_the_lowest_token_and_the_first_beam() -> None:
    decoder = FakeDecoder(constant(*[1e-9] * 3, *[0.5] * 6), 9)
    assert run(decoder, [(5,)], GenerationOptions(max_length=3))[0][0].tokens == (3, 3, 3)
    options = GenerationOptions(beam=3, n_best=3, max_length=2)
    assert [h.tokens for h in run(decoder, [(5,)], options)[0]] == [(3, 3), (3, 4), (3, 5)]


@searches
def test_an_answer_depends_neither_on_neighbours_nor_on_order(options: GenerationOptions) -> None:
    sources = random_sources(30)
    decoder = random_decoder(40, end=1.0)
    together = run(decoder, sources, options)
    assert {hypotheses[0].finish_reason for hypotheses in together} >= {"end"}
    backwards = run(decoder, sources[::-1], options, row_ids=range(29, -1, -1))
    assert backwards[::-1] == together
    for row, source in enumerate(sources):
        assert run(decoder, [source], options, row_ids=[row]) == [together[row]]


@searches
def test_a_bad_row_is_an_error_of_its_own(options: GenerationOptions) -> None:
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


@pytest.mark.parametrize("beam", [1, 2])
def test_nothing_left_to_choose_is_an_error(beam: int) -> None:
    # Five tokens, none twice, no end before ten.
    options = GenerationOptions(beam=beam, no_repeat_ngram=1, min_length=10, max_length=12)
    decoder = random_decoder(5)
    assert [h.finish_reason for h in run(decoder, [(7,)], options)[0]] == ["error"]
    assert len(decoder.rows_stepped) == 5


def test_ended_rows_leave_the_batch_once_they_are_a_quarter_of_a_step() -> None:
    decoder = FakeDecoder(tokens_given, 5)
    results = run(decoder, [(n,) for n in range(8)], GenerationOptions(max_length=20))
    assert [len(hypotheses[0].tokens) for hypotheses in results] == list(range(8))
    # Four of a step that costs as much as 8 + 8 rows, then three of one of 4 + 8.
    assert decoder.rows_stepped == [8, 8, 8, 8, 4, 4, 4, 1]
    assert decoder.selected == [[4, 5, 6, 7], [3]]


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


@pytest.mark.parametrize("beam", [1, 3])
def test_lengths_are_bounded_as_documented(beam: int) -> None:
    eager = random_decoder(9, end=20.0)
    options = GenerationOptions(beam=beam, min_length=3, max_length=4)
    for hypotheses in run(eager, random_sources(5), options):
        assert (len(hypotheses[0].tokens), hypotheses[0].finish_reason) == (3, "end")
    reluctant = random_decoder(9, end=-50.0)
    for hypotheses in run(reluctant, random_sources(5), options):
        assert (len(hypotheses[0].tokens), hypotheses[0].finish_reason) == (4, "length")
        assert hypotheses[0].score == pytest.approx(hypotheses[0].log_probability / 4)
    assert len(reluctant.rows_stepped) == 4


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
    (best,) = run(random_decoder(9), [(5,)], options)[0]
    assert (best.tokens, best.finish_reason) == ((3, 4), "length")


@pytest.mark.parametrize("beam", [1, 3])
def test_no_ngram_repeats(beam: int) -> None:
    decoder = FakeDecoder(constant(1e-15, 1e-15, 1e-6, 0.66, 0.24, 0.1), 6)
    free = GenerationOptions(beam=beam, max_length=6)
    assert run(decoder, [(5,)], free)[0][0].tokens == (3,) * 6
    tokens = run(decoder, [(5,)], replace(free, no_repeat_ngram=2))[0][0].tokens
    assert len(tokens) == 6
    assert len(set(itertools.pairwise(tokens))) == 5


def test_no_sources_give_no_answers_and_an_empty_one_is_refused_by_its_place() -> None:
    assert run(random_decoder(5), [], GenerationOptions()) == []
    with pytest.raises(InputError, match="source 1 of the batch has no tokens"):
        run(random_decoder(5), [(3,), ()], GenerationOptions())


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
    decoder = random_decoder(5)
    with pytest.raises(UsageError, match=message):
        run(decoder, [(3,), (4,)], GenerationOptions(max_length=2), prefixes=[(), prefix])


def test_what_is_suppressed_must_be_of_the_vocabulary() -> None:
    decoder = random_decoder(5)
    with pytest.raises(UsageError, match="suppress holds token 5, expected tokens from 0 to 4"):
        run(decoder, [(3,)], GenerationOptions(suppress=(1, 5)))


@pytest.mark.parametrize("beam", [1, 3])
def test_no_output_holds_what_is_suppressed(beam: int) -> None:
    decoder = random_decoder(5)

    def tokens(*suppress: int) -> set[int]:
        options = GenerationOptions(
            beam=beam, n_best=beam, min_length=3, max_length=6, suppress=suppress
        )
        rows = run(decoder, [(3,), (4,)], options)
        return {token for row in rows for item in row for token in item.tokens}

    chosen = min(tokens())
    assert chosen not in tokens(chosen)
    assert tokens(chosen)
