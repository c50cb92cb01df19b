"""Draws follow the distribution, its cuts and the seed."""

import math
from collections import Counter

import numpy as np
import pytest

from tests.runtime.decoding.fakes import (
    EOS,
    FakeDecoder,
    Logits,
    Tokens,
    log_softmax,
    run,
)
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.decoding.sampling import Sampler, draw_uniforms


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


def test_more_samples_and_steps_leave_the_draws_as_they_were() -> None:
    few = draw_uniforms(7, [3], 2, 4)
    many = draw_uniforms(7, [9, 3], 5, 11)
    np.testing.assert_array_equal(many[5:7, :4], few)
    assert len(np.unique(many)) == many.size
    assert (many >= 0).all()
    assert (many < 1).all()


def test_a_draw_never_falls_on_a_token_that_was_cut_off() -> None:
    logits = np.full((2, 6), -np.inf, np.float32)
    logits[:, 3] = 0.1
    options = GenerationOptions(sample=True)
    for uniform in (0.0, 1 - 2**-53):
        sampler = Sampler(options, np.full((2, 1), uniform))
        assert sampler(logits, np.arange(2), 0).tolist() == [3, 3]


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
