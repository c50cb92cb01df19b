"""Greedy and beam search: rows, errors, filters, and when rows leave the batch."""

from typing import Any

import numpy as np
import pytest

from tests.runtime.decoding.fakes import (
    EOS,
    FakeDecoder,
    GreedyFake,
    Tokens,
    close,
    constant,
    plain_search,
    random_decoder,
    random_model,
    random_sources,
    run,
    tokens_given,
)
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.errors import InputError, UsageError


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


def test_a_prefix_of_the_greatest_length_is_the_whole_output() -> None:
    options = GenerationOptions(beam=2, max_length=2, prefix=(3, 4))
    (best,) = run(random_decoder(9), [(5,)], options)[0]
    assert (best.tokens, best.finish_reason) == ((3, 4), "length")


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
