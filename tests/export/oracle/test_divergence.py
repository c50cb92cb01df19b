"""A different token is excused only where the oracle itself cannot tell the candidates apart."""

import copy
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from transferry.build_model.checkpoint import Checkpoint
from transferry.build_model.model.transformer import Transformer
from transferry.export.oracle.oracle import Oracle
from transferry.export.torch_model import TorchDecoder, TorchState
from transferry.runtime.decoding.decoder import Decoder, StepOutput
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.decoding.search import search
from transferry.runtime.proof.compare import Tolerance
from transferry.runtime.proof.divergence import Divergence, Explainer, forced
from transferry.runtime.proof.report import Decisions
from transferry.runtime.proof.tally import Tally
from transferry.runtime.tokenizer.byte_pair import SOURCES

Array = NDArray[Any]
GREEDY = GenerationOptions(max_length=12)
BEAM = GenerationOptions(max_length=12, beam=4, n_best=4)
SAMPLE = GenerationOptions(max_length=12, sample=True, seed=4)
# Fractions of the largest logit. A twin is 2 ** -21 less likely, four times float32's epsilon: two
# equal rows of 32 weights give products that differ by less. Twice that turns the choice, and is
# half of the least excused margin, 8 epsilons for each of two candidates. No two logits are further
# apart than twice the largest.
TWIN, ROUNDING, REAL = 2.0**-21, 2.0**-20, 2.5

searches = pytest.mark.parametrize("options", [GREEDY, BEAM], ids=["greedy", "beam 4"])


class Nudged:
    """A decoder that adds something to the logit of one token.

    Args:
        inner: The decoder.
        token: Which token.
        amount: What is added, as a fraction of the largest logit of that step.
        crowd: Nothing is added where fewer sentences than this are searched at once.
    """

    has_encoder = True
    shares_cache = False

    def __init__(self, inner: TorchDecoder, token: int, amount: float, crowd: int = 1) -> None:
        self.inner, self.token, self.amount, self.crowd = inner, token, amount, crowd
        self.vocabulary_size = inner.vocabulary_size

    def start(self, source: Array, mask: Array) -> tuple[TorchState, int]:
        return self.inner.start(source, mask), len(source)

    def step(
        self, tokens: Array, state: tuple[TorchState, int], **wanted: Any
    ) -> tuple[StepOutput, tuple[TorchState, int]]:
        output, inner = self.inner.step(tokens, state[0])
        logits = output.all_logits.astype(np.float64)
        if state[1] >= self.crowd:
            logits[..., self.token] += self.amount * np.abs(logits).max(axis=-1)
        return StepOutput(logits), (inner, state[1])

    def select(self, state: tuple[TorchState, int], rows: Array) -> tuple[TorchState, int]:
        return self.inner.select(state[0], rows), state[1]


class Far(TorchDecoder):
    """A decoder whose last token but one has a bias of -1e4, as few tokens of a vocabulary do."""

    def __init__(self, inner: TorchDecoder) -> None:
        super().__init__(inner.model)
        self._arithmetic = inner._arithmetic

    def step(self, *given: Any, **wanted: Any) -> Any:
        output, state = super().step(*given, **wanted)
        logits = output.all_logits.copy()
        logits[..., -2] += np.asarray(-1e4, logits.dtype)
        return StepOutput(logits), state


def first_token(model: Transformer, source: list[int]) -> int:
    """The first token of greedy search, the end token if the answer is empty."""
    (hypotheses,) = search(TorchDecoder(model), [source], GREEDY, SOURCES)
    return (*hypotheses[0].tokens, SOURCES.eos_id)[0]


def first_logits(oracle: Oracle, source: list[int]) -> Array:
    """The oracle's logits of the first token [vocabulary]."""
    start = oracle.exact.start(np.array([source]), np.ones((1, len(source)), np.bool_))
    output, _ = oracle.exact.step(np.array([[SOURCES.bos_id]]), start)
    logits: Array = output.all_logits[0, 0]
    return logits


def with_twin(model: Transformer, token: int, distance: float = TWIN) -> Oracle:
    """Judges by a model whose last token is nearly `token` once more, so that their logits tie."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        model.embedding.weight[-1] = model.embedding.weight[token] * (1.0 - distance)
    return Oracle.of(model, SOURCES, Tolerance())


@pytest.fixture(scope="module")
def source(checkpoint: Checkpoint, sources: list[list[int]]) -> list[int]:
    """One whose answer is not empty."""
    eos_id = SOURCES.eos_id
    return next(source for source in sources if first_token(checkpoint.model, source) != eos_id)


@pytest.fixture(scope="module")
def last(checkpoint: Checkpoint) -> int:
    """The token that becomes a twin; no source and no answer of the model itself has it."""
    return int(checkpoint.model.config.vocabulary_size) - 1


def nudged(
    oracle: Oracle,
    source: list[int],
    options: GenerationOptions,
    token: int,
    amount: float,
    tolerance: Tolerance | None = None,
) -> Divergence | None:
    """Nudges a token, and explains the other answer that the search comes to, if it does."""
    decoder, special = Nudged(oracle.reference, token, amount), oracle.special
    (wanted,) = search(oracle.reference, [source], options, special)
    (found,) = search(decoder, [source], options, special)
    if [item.tokens for item in wanted] == [item.tokens for item in found]:
        return None
    limit = tolerance or oracle.tolerance
    sides = (oracle.reference, decoder, oracle.exact)
    return Explainer(*sides, special, limit, options).explain(source, wanted, found)


def explained(*arguments: Any) -> Divergence:
    divergence = nudged(*arguments)
    assert divergence is not None
    return divergence


def searched(
    oracle: Oracle, decoder: Any, sources: list[list[int]], options: GenerationOptions
) -> Tally:
    """Searches with a decoder in batches of torch's, and explains each difference."""
    tally = Tally("search", oracle.tolerance)
    explain = oracle.explainer(decoder, options)
    for batch in oracle.expected(sources, options):
        asked = decoder, batch.sources, options, oracle.special
        found = [[each] for each in search(*asked, row_ids=batch.rows)]
        tally.add(oracle.scored(batch, found, options), found, explain)
    return tally


def decided(
    oracle: Oracle, decoder: Any, sources: list[list[int]], options: GenerationOptions
) -> Decisions:
    return searched(oracle, decoder, sources, options).decisions()


def test_rounding_alone_makes_a_tie() -> None:
    for margin in (1e-7, 1e-6, 2e-6, np.inf, np.nan):
        found = Divergence(3, (5,), (6,), margin=margin, allowed=1e-6, rounding=1e-6)
        assert found.tie == (margin in (1e-7, 1e-6))


@searches
def test_equal_tokens_are_a_tie(
    checkpoint: Checkpoint, source: list[int], last: int, options: GenerationOptions
) -> None:
    token = first_token(checkpoint.model, source)
    oracle = with_twin(checkpoint.model, token)
    divergence = explained(oracle, source, options, last, ROUNDING)
    assert divergence.tie
    logits = first_logits(oracle, source)
    assert divergence.margin == pytest.approx(logits[token] - logits[last], rel=1e-6)
    assert 2 * ROUNDING * np.abs(logits).max() <= divergence.allowed * (1 + 1e-6)
    assert divergence.allowed < 1e-3 * REAL
    assert divergence.step == 0
    assert (divergence.wanted, divergence.found) == ((token,), (last,))
    assert str(divergence).startswith(f"step 0: torch prefers [{token}], the graph [{last}]; ")
    assert str(divergence).endswith("allowed: a tie")


@searches
@pytest.mark.parametrize("flipped", ["the twin", "another token"])
def test_real_difference_is_a_defect(
    checkpoint: Checkpoint, source: list[int], last: int, options: GenerationOptions, flipped: str
) -> None:
    """Though there is a tie as well, which must not excuse it."""
    twin = flipped == "the twin"
    first = first_token(checkpoint.model, source)
    oracle = with_twin(checkpoint.model, first, 0.1 if twin else TWIN)
    divergence = explained(oracle, source, options, last if twin else last - 1, REAL)
    assert not divergence.tie
    assert divergence.margin > 100 * divergence.allowed
    assert str(divergence).endswith("allowed: a defect")


def test_margin_is_the_one_of_the_oracle(
    checkpoint: Checkpoint, source: list[int], last: int, oracle: Oracle
) -> None:
    """Not of the decoder that is judged, whose logits may be wrong."""
    logits = first_logits(oracle, source)
    best, second = np.argsort(-logits)[:2].tolist()
    distance = logits[best] - logits[second]
    amount = 1.5 * distance / np.abs(logits).max()
    divergence = explained(oracle, source, GREEDY, second, amount)
    assert (divergence.step, divergence.wanted, divergence.found) == (0, (best,), (second,))
    # Of one distribution, log-probabilities are as far apart as logits.
    assert divergence.margin == pytest.approx(distance, rel=1e-9)
    assert not divergence.tie


def score(oracle: Oracle, source: list[int], tokens: tuple[int, ...], penalty: float) -> float:
    """The oracle's score of a candidate, by one call of the model and torch's own softmax."""
    target = torch.tensor([[SOURCES.bos_id, *tokens[:-1]]])
    row = torch.tensor([source])
    with torch.inference_mode():
        logits = oracle.exact.model(row, torch.ones_like(row, dtype=torch.bool), target)
    chosen = torch.log_softmax(logits[0], dim=-1)[torch.arange(len(tokens)), list(tokens)]
    return float(chosen.sum()) / float(len(tokens) ** penalty)


def test_margin_of_beams_is_that_of_whole_candidates(
    oracle: Oracle, sources: list[list[int]]
) -> None:
    """Those that have ended are ranked by their scores, others by their probability alone."""
    seen = set()
    token = first_token(oracle.reference.model, sources[3])
    for source, likelier in product(sources[:4], (SOURCES.eos_id, token)):
        divergence = nudged(oracle, source, BEAM, likelier, 0.01)
        if divergence is None:
            continue
        candidates = divergence.wanted, divergence.found
        ended = any(tokens[-1] == SOURCES.eos_id for tokens in candidates)
        penalty = BEAM.length_penalty if ended else 0.0
        left, right = (score(oracle, source, tokens, penalty) for tokens in candidates)
        assert divergence.margin == pytest.approx(abs(left - right), rel=1e-9)
        seen.add((ended, divergence.step + 1 < len(divergence.wanted)))
    assert {(True, True), (False, True)} <= seen


def test_allowance_follows_the_tolerance(
    checkpoint: Checkpoint, source: list[int], last: int
) -> None:
    token = first_token(checkpoint.model, source)
    oracle = with_twin(checkpoint.model, token, distance=1e-3)
    strict = explained(oracle, source, GREEDY, last, 3e-3)
    loose = explained(oracle, source, GREEDY, last, 3e-3, Tolerance(factor=4e5))
    assert not strict.passes
    assert loose.passes
    assert not loose.tie, "no tolerance makes a tie of what is none in float32"
    assert str(loose).endswith("allowed: tolerated")
    shown, passes = loose.difference(7)
    assert passes
    assert not shown.tie
    assert shown.rounding == pytest.approx(strict.allowed)
    assert loose.margin == strict.margin
    assert loose.allowed == pytest.approx(4e5 / Tolerance.factor * strict.allowed)


def test_one_answer_of_large_error_widens_no_other(
    oracle: Oracle, sources: list[list[int]]
) -> None:
    """torch's own errors are those of the answer, not of the batch."""
    wanted = search(oracle.reference, sources, GREEDY, SOURCES)
    alone = [
        oracle.scores([source], [row], GREEDY)[0]
        for source, row in zip(sources, wanted, strict=True)
    ]
    together = oracle.scores(sources, wanted, GREEDY)
    owns = [[row[0].own for row in each] for each in (together, alone)]
    assert owns[0] == pytest.approx(owns[1], rel=0.5)
    assert max(row[0].own for row in together) < 1e-5
    wider = [row[0].wider().own for row in together if row[0].wider is not None]
    assert all(one >= row[0].own for one, row in zip(wider, together, strict=True))
    assert max(wider) > max(owns[0]), "torch is shaken"


def test_a_logit_far_below_makes_no_ties(
    checkpoint: Checkpoint, source: list[int], last: int
) -> None:
    """Errors are measured where tokens are chosen, not at a bias of -1e4."""
    token = first_token(checkpoint.model, source)
    oracle = with_twin(checkpoint.model, token, distance=1e-2)
    exact, reference = Far(oracle.exact), Far(oracle.reference)
    decoder = Nudged(reference, last, 0.02 / 1e4)
    explainer = Explainer(reference, decoder, exact, SOURCES, Tolerance(), GREEDY)
    (wanted,), (found,) = (search(side, [source], GREEDY, SOURCES) for side in (reference, decoder))
    explained = explainer.explain(source, wanted, found)
    assert explained.allowed < 1e-4
    assert not explained.passes


def test_later_step_is_found(checkpoint: Checkpoint, source: list[int], last: int) -> None:
    """The first tokens agree; the tie lies behind them."""
    (hypotheses,) = search(TorchDecoder(checkpoint.model), [source], GREEDY, SOURCES)
    tokens = hypotheses[0].tokens
    step = next(i for i, token in enumerate(tokens) if token != tokens[0])
    divergence = explained(
        with_twin(checkpoint.model, tokens[step]), source, GREEDY, last, ROUNDING
    )
    assert divergence.tie
    assert divergence.step == step
    assert divergence.wanted == tokens[: step + 1]
    assert divergence.found == (*tokens[:step], last)


@pytest.fixture(scope="module")
def short(checkpoint: Checkpoint, sources: list[list[int]]) -> list[int]:
    """A source whose answer ends."""
    answers = search(TorchDecoder(checkpoint.model), sources, GREEDY, SOURCES)
    ends = [one.finish_reason == "end" for (one,) in answers]
    return sources[ends.index(True)]


def test_ending_or_going_on_may_be_a_tie(
    checkpoint: Checkpoint, short: list[int], last: int
) -> None:
    """The step at which one ends is compared, not the rest of the other."""
    (hypotheses,) = search(TorchDecoder(checkpoint.model), [short], GREEDY, SOURCES)
    tokens = hypotheses[0].tokens
    oracle = with_twin(checkpoint.model, SOURCES.eos_id)
    divergence = explained(oracle, short, GREEDY, last, ROUNDING)
    assert divergence.tie
    assert divergence.wanted == (*tokens, SOURCES.eos_id)
    assert divergence.found == (*tokens, last)


def test_going_on_or_ending_alone_is_a_defect(
    oracle: Oracle, short: list[int], source: list[int], last: int
) -> None:
    assert not explained(oracle, short, GREEDY, last, REAL).tie
    assert not explained(oracle, source, GREEDY, SOURCES.eos_id, REAL).tie


@searches
def test_ties_are_accounted_for(
    checkpoint: Checkpoint,
    sources: list[list[int]],
    source: list[int],
    last: int,
    options: GenerationOptions,
) -> None:
    oracle = with_twin(checkpoint.model, first_token(checkpoint.model, source))
    nudged = Nudged(oracle.reference, last, ROUNDING)
    decisions = decided(oracle, nudged, sources, options)
    assert decisions.passed
    assert not decisions.defects
    assert decisions.ties
    assert decisions.identical == len(sources) - len(decisions.ties)
    sides: tuple[Any, Any] = nudged, oracle.reference
    different = []
    for row, one in enumerate(sources):
        answers = [search(each, [one], options, SOURCES)[0] for each in sides]
        left, right = ([item.tokens for item in answer] for answer in answers)
        different += [row] * (left != right)
    assert [tie.row for tie in decisions.ties] == different
    assert all(tie.message.endswith("a tie") for tie in decisions.ties)


def test_scores_of_identical_rows_are_compared(
    oracle: Oracle, sources: list[list[int]], last: int
) -> None:
    """A token that nobody chooses has its part in the probability of the others."""
    decoder = Nudged(oracle.reference, last, -REAL)
    tally = searched(oracle, decoder, sources, GREEDY)
    decisions = tally.decisions()
    assert decisions.identical == len(sources)
    errors = [
        abs(answer.score - score(oracle, sources[row], answer.scored_tokens, GREEDY.length_penalty))
        for row, (_, answer) in tally.best.items()
    ]
    # The answers are those that were judged, and both sides are exact in float64.
    assert decisions.score_error == pytest.approx(max(errors), rel=1e-9)
    # Above any rounding: the budget is a multiple of torch's own.
    assert decisions.score_ratio > oracle.tolerance.factor
    assert not decisions.passed


def test_rows_that_fail_on_both_sides_and_no_rows_prove_nothing(
    checkpoint: Checkpoint, sources: list[list[int]]
) -> None:
    """Both give no tokens, which are the same tokens."""
    broken = copy.deepcopy(checkpoint.model)
    with torch.no_grad():
        broken.get_parameter("decoder.0.feed_forward.inner.bias").fill_(torch.nan)
    oracle = Oracle.of(broken, SOURCES, Tolerance())
    decisions = decided(oracle, TorchDecoder(broken), sources, GREEDY)
    assert decisions.identical == len(sources)
    assert np.isnan(decisions.score_error)
    assert not decisions.passed
    assert not decided(oracle, oracle.reference, [], GREEDY).passed


@searches
def test_what_happens_in_a_batch_only_is_a_defect(
    oracle: Oracle, sources: list[list[int]], last: int, options: GenerationOptions
) -> None:
    decoder = Nudged(oracle.reference, last, REAL, crowd=2)
    alone = decided(oracle, decoder, sources[:1], options)
    assert (alone.identical, alone.passed) == (1, True)
    decisions = decided(oracle, decoder, sources[:3], options)
    assert not decisions.passed
    assert len(decisions.defects) == 3
    assert all(item.message.endswith("a defect") for item in decisions.defects)


@searches
def test_a_tie_that_shows_in_a_batch_only_is_a_tie(
    checkpoint: Checkpoint, sources: list[list[int]], last: int, options: GenerationOptions
) -> None:
    """torch's sums depend on the batch; what is as close as that may fall either way there."""
    token = first_token(checkpoint.model, sources[3])
    oracle = with_twin(checkpoint.model, token)
    decoder = Nudged(oracle.reference, last, ROUNDING, crowd=2)
    assert decided(oracle, decoder, sources[3:4], options).identical == 1
    decisions = decided(oracle, decoder, sources, options)
    assert decisions.passed
    assert decisions.ties


def test_what_torch_gives_alone_is_a_tie(oracle: Oracle, source: list[int], last: int) -> None:
    """In a batch torch may leave its own way at a tie, and end far from it."""
    sides: list[Decoder[Any]] = [oracle.reference, Nudged(oracle.reference, last, REAL)]
    (alone,), (batched,) = (search(side, [source], BEAM, SOURCES) for side in sides)
    both = oracle.reference, oracle.reference, oracle.exact
    explainer = Explainer(*both, SOURCES, oracle.tolerance, BEAM)
    shared = replace(explainer, same_search=True)
    assert shared.explain(source, batched, alone).tie
    assert not shared.explain(source, alone, batched).passes
    assert not explainer.explain(source, batched, alone).passes, "another search has no excuse"
    wider = replace(explainer, wider=lambda run: [run(oracle.exact), run(sides[1])])
    assert wider.explain(source, batched, alone).passes, "more roundings are measured before"


class TestSamples:
    """Two draws differ: was the random number at the border of their tokens?"""

    def at_border(
        self, oracle: Oracle, source: list[int], token: int, monkeypatch: pytest.MonkeyPatch
    ) -> float:
        """Makes the random numbers the oracle's cumulative distribution F up to a token.

        Returns how far that token must be nudged to move the border past them. Errors of the
        logits of at most e move F by at most 2 e F (1 - F), and a nudge d of a token of
        probability p by d p (1 - F): d is twice what outweighs torch's own errors.
        """
        (exact,) = forced(oracle.exact, [source], [[token]], SOURCES)
        (rounded,) = forced(oracle.reference, [source], [[token]], SOURCES)
        weights = np.exp(exact.logits[0] - exact.logits[0].max())
        border = weights[: token + 1].sum() / weights.sum()
        error = np.abs(rounded.logits - exact.logits).max() / np.abs(exact.logits).max()

        def draw(seed: int, rows: list[int], samples: int, steps: int) -> Array:
            return np.full((len(rows) * samples, steps), border)

        monkeypatch.setattr("transferry.runtime.decoding.sampling.draw_uniforms", draw)
        monkeypatch.setattr("transferry.runtime.proof.divergence.draw_uniforms", draw)
        return float(4 * error * border * weights.sum() / weights[token])

    def test_at_the_border_it_is_a_tie(
        self, oracle: Oracle, source: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        token = first_token(oracle.reference.model, source)
        amount = self.at_border(oracle, source, token, monkeypatch)
        nudged = [Nudged(oracle.reference, token, sign * amount) for sign in (1, -1)]
        firsts = [search(decoder, [source], SAMPLE, SOURCES)[0][0].tokens for decoder in nudged]
        assert firsts[0] != firsts[1], "the border is where it should be"
        judged = [decided(oracle, one, [source], SAMPLE) for one in nudged]
        (different,) = [item for item in judged if not item.identical]
        assert different.passed
        (tie,) = different.ties
        assert tie.margin is not None
        assert tie.allowed is not None
        assert tie.margin <= tie.allowed < 1e-3

    def test_away_from_it_it_is_a_defect(
        self, oracle: Oracle, source: list[int], last: int
    ) -> None:
        decoder = Nudged(oracle.reference, last, REAL)
        decisions = decided(oracle, decoder, [source], SAMPLE)
        (defect,) = decisions.defects
        assert defect.margin is not None
        assert defect.allowed is not None
        assert defect.margin > 1e-2 > defect.allowed


def test_samples_in_another_order_differ_by_their_scores(oracle: Oracle, source: list[int]) -> None:
    options = replace(SAMPLE, n_best=2, repetition_penalty=1.3)
    (wanted,) = search(oracle.reference, [source], options, SOURCES)
    left, right = (score(oracle, source, each.scored_tokens, 1.0) for each in wanted)
    found = oracle.explainer(oracle.reference, options).explain(source, wanted, wanted[::-1])
    assert found.margin == pytest.approx(left - right)
    assert not found.passes
