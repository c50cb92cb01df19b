"""A difference at the edge of the beam is explained by the candidates that decided it."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from transferry.runtime.decoding.decoder import StepOutput
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.decoding.search import search
from transferry.runtime.proof.compare import Tolerance
from transferry.runtime.proof.divergence import Explainer
from transferry.runtime.tokenizer.byte_pair import SOURCES

Array = NDArray[Any]


class Scripted:
    """A decoder whose logits depend on the last token alone.

    Of a beam of 3, the tokens 3, 4 and 5 go on at first, and the end is about as likely as 5. After
    3 and 4 the end is likely, after 5 nothing is.
    """

    has_encoder = True
    shares_cache = False

    def __init__(self, end: float) -> None:
        self.vocabulary_size = 12
        self.table = np.full((12, 12), -9.0)
        self.table[SOURCES.bos_id, [3, 4, 5, SOURCES.eos_id]] = 0.0, -0.5, -2.0, -2.0 + end
        self.table[[3, 4], SOURCES.eos_id] = 0.0

    def start(self, source: Array, mask: Array) -> None:
        return None

    def step(self, tokens: Array, state: None, **wanted: Any) -> tuple[StepOutput, None]:
        return StepOutput(self.table[tokens]), None

    def select(self, state: None, rows: Array) -> None:
        return None


@pytest.mark.parametrize(("end", "passes"), [(1e-7, True), (0.5, False)])
def test_an_ended_candidate_at_the_edge_of_the_beam(end: float, passes: bool) -> None:
    """The same prefixes go on whether it is kept or not; hypotheses that differ are far apart."""
    options = GenerationOptions(max_length=4, beam=3, n_best=3)
    sides: list[Any] = [Scripted(-end), Scripted(end)]
    (wanted,), (found,) = (search(side, [[6]], options, SOURCES) for side in sides)
    scores = [{one.tokens: one.score for one in side} for side in (wanted, found)]
    assert () in scores[1]
    assert () not in scores[0]
    reference, other = sides
    explainer = Explainer(reference, other, reference, SOURCES, Tolerance(), options)
    for given in ((wanted, found), (found, wanted)):
        divergence = explainer.explain([6], *given)
        assert divergence.passes is passes
        assert divergence.margin == pytest.approx(end, rel=1e-3)
