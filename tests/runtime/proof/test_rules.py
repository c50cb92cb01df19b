"""The oracle ranks an answer as the search that gave it, and measures how far a draw could move."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.runtime.decoding.fakes import (
    SPECIAL,
    FakeDecoder,
    log_softmax,
    random_model,
    random_sources,
)
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.decoding.sampling import Sampler
from transferry.runtime.decoding.search import search
from transferry.runtime.proof.rules import Rules, _cuts, distance_of_draws

BEAM = GenerationOptions(beam=3, n_best=3, max_length=9, length_penalty=0.7)
RULES = {
    "plain": BEAM,
    "forbidding": replace(BEAM, min_length=3, no_repeat_ngram=1),
    "penalty": replace(BEAM, repetition_penalty=1.6),
    "forced": replace(BEAM, forced_begin=7, forced_end=(2, 5), prefix=(4, 9)),
    "renormalised": replace(BEAM, suppress=(4, 5, 6, 7), renormalise=True),
    "all": replace(
        BEAM,
        repetition_penalty=1.6,
        forced_begin=7,
        forced_end=(2,),
        renormalise=True,
        suppress_sequences=((3, 4), (8, 1)),
        prefix=(4,),
    ),
}


@pytest.mark.parametrize("has_encoder", [True, False])
@pytest.mark.parametrize("name", RULES)
def test_scores_are_sums_of_what_the_rules_rank(name: str, has_encoder: bool) -> None:
    options, model = RULES[name], random_model(11, end=0.5)
    decoder = FakeDecoder(model, 11, np.float64)
    decoder.has_encoder = has_encoder
    differ = 0
    sources = [tuple(token % 11 for token in source) for source in random_sources(12)]
    answers = search(decoder, sources, options, SPECIAL)
    for source, found in zip(sources, answers, strict=True):
        for item in found:
            answer = item.scored_tokens
            logits = np.array([model(source, answer[:count]) for count in range(len(answer))])
            ranks = Rules(options, source, SPECIAL, has_encoder).ranks(logits, answer)
            assert item.score * len(answer) ** 0.7 == pytest.approx(ranks.sum())
            own = [log_softmax(row)[token] for row, token in zip(logits, answer, strict=True)]
            assert item.log_probability == pytest.approx(sum(own))
            differ += abs(ranks.sum() - sum(own)) > 1e-6
    assert bool(differ) == options.reranks


@pytest.mark.parametrize(
    ("options", "logits", "needed"),
    [
        # Two tokens compete for the last place of two.
        ({"top_k": 2}, [5.0, 1.0, 0.9], 0.1 / 4),
        # The two likeliest hold 0.8 of the mass.
        ({"top_p": 0.79}, np.log([0.5, 0.3, 0.2]), 0.01),
        ({"top_p": 0.81}, np.log([0.5, 0.3, 0.2]), 0.01),
    ],
)
def test_a_token_at_the_cut_may_go_either_way(
    options: dict[str, Any], logits: list[float], needed: float
) -> None:
    given, sampling = np.array(logits), GenerationOptions(sample=True, **options)
    weights = Sampler(sampling, np.zeros((0, 0))).weights(given[None])[0]
    found, shares = _cuts(given, weights, sampling)
    assert found.min() == pytest.approx(needed)
    assert shares[weights > 0].sum() == pytest.approx(1.0)


def test_many_tokens_at_the_cut_may_all_change_places() -> None:
    """Of equal tokens any eight may be drawn from, whatever the random number."""
    logits = np.random.default_rng(0).normal(0, 1e-6, 600)
    options = GenerationOptions(sample=True, top_k=8, top_p=0.9)
    assert distance_of_draws(logits, (3, 590), 0.5, options) < 1e-5
    apart = np.linspace(0, 60, 600)
    assert distance_of_draws(apart, (3, 590), 0.5, options) > 1


@pytest.mark.parametrize("seed", range(40))
def test_rounding_of_tied_logits_explains_any_draw(seed: int) -> None:
    """Exact logits tie, and those of two computations differ by 1e-6 nats."""
    random = np.random.default_rng(seed)
    logits = np.round(random.normal(0, random.choice([0.0, 0.3, 2.0]), 60), 1)
    cuts = {"top_p": random.choice([1.0, 0.9, 0.5]), "typical_p": random.choice([1.0, 0.95, 0.5])}
    cuts |= {"top_k": random.choice([0, 7, 30]), "min_p": random.choice([0.0, 0.2])}
    chosen: dict[str, Any] = {name: cut.item() for name, cut in cuts.items()}
    options = GenerationOptions(sample=True, **chosen)
    for uniform in random.random(20):
        sampler = Sampler(options, np.array([[uniform]]))
        one, other = (
            int(sampler((logits + random.uniform(-1e-6, 1e-6, 60))[None], np.zeros(1, int), 0)[0])
            for _ in range(2)
        )
        assert one == other or distance_of_draws(logits, (one, other), uniform, options) < 1e-5
