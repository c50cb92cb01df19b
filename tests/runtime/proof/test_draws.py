"""Distance to which a distribution must move for another token to be drawn."""

from typing import Any

import numpy as np
import pytest

from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.decoding.sampling import Sampler
from transferry.runtime.proof.draws import _cuts, distance_of_draws


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
