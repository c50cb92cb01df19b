"""Answers are counted by the worst of them, and their scores by torch's own errors."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from transferry.runtime.decoding.decoder import StepOutput
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.decoding.hypothesis import Hypothesis
from transferry.runtime.decoding.search import search
from transferry.runtime.proof.compare import Tolerance
from transferry.runtime.proof.divergence import Explainer
from transferry.runtime.proof.report import Difference
from transferry.runtime.proof.tally import ExactScore, ExpectedAnswers, Tally
from transferry.runtime.tokenizer.byte_pair import SOURCES

TIE, TOLERATED, DEFECT = 5, 6, 7  # tokens of answers that differ from token 4


def ended(*tokens: int, score: float = -1.0) -> list[Hypothesis]:
    """Hypotheses of one token each."""
    return [Hypothesis((token,), score, score, "end") for token in tokens]


@pytest.mark.parametrize(
    ("times", "counted"),
    [
        ([4, 4], "identical"),
        ([4, TIE], "ties"),
        ([TIE, TOLERATED], "tolerated"),
        ([TIE, DEFECT], "defects"),
        ([4, TOLERATED, DEFECT], "defects"),
        ([DEFECT, TIE, 4], "defects"),
    ],
)
@pytest.mark.parametrize("reverse", [False, True])
def test_of_several_answers_the_worst_is_counted(
    times: list[int], counted: str, reverse: bool
) -> None:
    """A tie at one time excuses no defect at another."""
    tally = Tally("greedy", Tolerance())

    def explain(row: int, source: Any, wanted: Any, found: Any) -> tuple[Difference, bool]:
        token = found[0].tokens[0]
        margins = {TIE: 1e-9, TOLERATED: 1e-3, DEFECT: 1.0}
        return Difference(row, "", margins[token], 1e-2, 1e-6), token != DEFECT

    answers = list(map(ended, times))
    batch = ExpectedAnswers([0], [[9]], [ended(4)], [[ExactScore(-1.0, 1e-6)]])
    tally.add(batch, [answers[::-1] if reverse else answers], explain)
    found = tally.decisions()
    counts = {name: len(getattr(found, name)) for name in ("ties", "tolerated", "defects")}
    assert {**counts, "identical": found.identical} == {
        name: int(name == counted) for name in (*counts, "identical")
    }


def test_differing_rows_have_their_texts() -> None:
    """Of several hypotheses the first that differ; a wrong score has none."""
    tally = Tally("beam 2", Tolerance())
    wanted, found = [ended(4, 5), ended(4, 4)], [ended(4, 6, score=9.0), ended(4, 4, score=9.0)]
    batch = ExpectedAnswers([0, 1], [[9], [8]], wanted, [[ExactScore(-1.0, 1e-6)] * 2] * 2)
    tally.add(batch, [[row] for row in found], lambda row, *rest: (Difference(row, "other"), False))
    differs, scored = tally.decisions(lambda ids: f"text of {list(ids)}").defects
    shown = differs.source, differs.expected, differs.found
    assert shown == ("text of [9]", "text of [5]", "text of [6]")
    assert (differs.wrong_score, scored.wrong_score, scored.found) == (False, True, "")


def test_a_tie_excuses_no_wrong_score() -> None:
    tally = Tally("greedy", Tolerance())
    batch = ExpectedAnswers([0], [[9]], [ended(4)], [[ExactScore(-1.0, 1e-6)]])
    answers = [ended(5), ended(4, score=9.0)]
    tally.add(batch, [answers], lambda *row: (Difference(0, "", 0.0, 1.0, 1.0), True))
    assert len(tally.decisions().defects) == 1


def test_a_wrong_score_is_measured_with_more_roundings() -> None:
    """Before it is a defect; after one, no other is."""
    asked = []

    def wider() -> ExactScore:
        asked.append(1)
        return ExactScore(-1.0, 1e-3)

    exact, wanted = ExactScore(-1.0, 1e-6, wider=wider), ended(4)
    tally = Tally("greedy", Tolerance())
    for score, times, defects in ((-1.0, 0, 0), (-1.001, 1, 0), (-1.1, 2, 1), (-1.001, 2, 2)):
        batch = ExpectedAnswers([0], [[9]], [wanted], [[exact]])
        tally.add(batch, [[ended(4, score=score)]], tied)
        assert (len(asked), len(tally.decisions().defects)) == (times, defects)


def tied(row: int, *rest: Any) -> tuple[Difference, bool]:
    return Difference(row, "a tie", 0.0, 1.0, 1.0), True


@pytest.mark.parametrize(("score", "defects"), [(-2.0, 0), (-2.001, 1)])
def test_the_score_of_a_tied_answer_is_compared(score: float, defects: int) -> None:
    """Each time that it was given; the answers are scored at once."""
    tally = Tally("greedy", Tolerance())
    exact = [[ExactScore(-1.0, 1e-6)]]
    batch = ExpectedAnswers([3], [[9]], [ended(4)], exact)
    asked = []

    def scored(sources: Any, answers: Any) -> list[list[ExactScore]]:
        asked.append((sources, [[item.tokens for item in row] for row in answers]))
        return [[ExactScore(-2.0, 1e-6)]]

    answers = [[ended(5, score=-2.0), ended(5, score=score)]]
    tally.add(batch, answers, tied, scored)
    found = tally.decisions()
    assert asked == [([[9]], [[(5,)]])]
    assert (len(found.ties), len(found.defects)) == (1 - defects, defects)
    assert all("a tie, but a score is 1.00e-03 nats from" in item.message for item in found.defects)


def test_many_scores_beyond_rounding_are_no_values_at_borders() -> None:
    exact, wanted = ExactScore(-1.0, 1.0, 1e-5), ended(4)
    batch = ExpectedAnswers(range(40), [[9]] * 40, [wanted] * 40, [[exact]] * 40)

    def defects(shifted: int) -> int:
        tally = Tally("greedy", Tolerance())
        answers = [[ended(4, score=-1.0 - 1e-3 * (row < shifted))] for row in range(40)]
        tally.add(batch, answers, tied)
        return len(tally.decisions().defects)

    assert [defects(shifted) for shifted in (0, 16, 17, 40)] == [0, 0, 1, 1]


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
