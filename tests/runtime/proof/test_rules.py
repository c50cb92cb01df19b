"""The oracle ranks an answer as the search that gave it."""

from dataclasses import replace

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
from transferry.runtime.decoding.search import search
from transferry.runtime.proof.rules import Rules

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
