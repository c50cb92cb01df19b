"""The LM head: logits, top k and log-sum-exp of the same hidden states agree with numpy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.conftest import make_bundle
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.specs import GraphSpec
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.decoding.logits import SegmentMaxima, log_sum_exp
from transferry.runtime.decoding.search import search
from transferry.runtime.ort.fused_decoder import FusedDecoder
from transferry.runtime.ort.graph_runner import open_graphs
from transferry.runtime.ort.lm_head import LMHead
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.tokenizer.special_tokens import SpecialTokens

Logits = NDArray[np.floating[Any]]

SEARCHES = {
    "greedy": GenerationOptions(max_length=20),
    "greedy without scores": GenerationOptions(max_length=20, scores=False),
    "beam": GenerationOptions(max_length=20, beam=4, n_best=4),
    "beam with rules": GenerationOptions(max_length=20, beam=3, min_length=4, no_repeat_ngram=2),
}


@pytest.fixture(scope="module")
def device_bundle(device_bundle_folder: Path) -> Bundle:
    return Bundle.load(device_bundle_folder)


@pytest.fixture(scope="module")
def ranking(device_bundle: Bundle) -> FusedDecoder:
    return FusedDecoder(device_bundle, device_bundle.variant("cuda-fp16"), SessionOptions())


@pytest.fixture(scope="module")
def plain(device_bundle: Bundle) -> FusedDecoder:
    """The same graphs but for the one that ranks."""
    variant = replace(device_bundle.variant("cuda-fp16"), top_k=False)
    return FusedDecoder(device_bundle, variant, SessionOptions())


# Top k


def test_ranks_nothing_where_nothing_is_finite(ranking: FusedDecoder) -> None:
    source, mask = np.full((3, 4), 9), np.ones((3, 4), np.bool_)
    _, state = ranking.step(np.full((3, 1), 7), ranking.start(source, mask))
    state.past[1].buffer.numpy()[1] = np.nan
    found = ranking.step(np.full((3, 1), 7), state, top=2)[0].top_k
    assert found is not None and found.log_sum_exp is not None
    assert np.isnan(found.log_sum_exp).tolist() == [False, True, False]


@pytest.mark.parametrize("name", SEARCHES)
def test_the_top_k_changes_no_answer(ranking: FusedDecoder, plain: FusedDecoder, name: str) -> None:
    rng = np.random.default_rng(11)
    sources = [rng.integers(3, 350, length).tolist() for length in rng.integers(1, 41, 60)]
    answers, expected = (
        search(decoder, sources, SEARCHES[name], SpecialTokens(0, 1, 2))
        for decoder in (ranking, plain)
    )
    for one, other in zip(answers, expected, strict=True):
        assert [item.tokens for item in one] == [item.tokens for item in other]
        assert [item.finish_reason for item in one] == [item.finish_reason for item in other]
        scores = [[item.score for item in row] for row in (one, other)]
        np.testing.assert_allclose(scores[0], scores[1], rtol=1e-3, atol=1e-3)
    assert len({row[0].tokens for row in expected}) > 25, "the answers must tell rows apart"


# The likeliest token alone


@pytest.fixture(scope="module")
def screening(run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> FusedDecoder:
    folder = tmp_path_factory.mktemp("screened") / "bundle"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transferry.export.rewrite.lm_head.SMALLEST_VOCABULARY", 1)
        bundle = Bundle.load(make_bundle(run_folder, folder, "cpu-fp32"))
    return FusedDecoder(bundle, bundle.variant("cpu-fp32"), SessionOptions())


def test_the_screened_argmax_is_that_of_the_logits(screening: FusedDecoder) -> None:
    """In the memory of those logits; where log-sum-exp is needed too, it is not asked."""
    rng = np.random.default_rng(9)
    source = rng.integers(3, 350, (40, 12))
    state, seen = screening.start(source, np.ones(source.shape, np.bool_)), set[int]()
    for step in range(12):
        tokens = rng.integers(3, 350, (40, 1))
        expected = screening.step(tokens, state)[0].all_logits[:, 0].argmax(axis=1)
        assert screening.step(tokens, state, top=1, normalise=True)[0].top_k is None
        output, state = screening.step(tokens, state, top=1)
        assert output.top_k is not None and output.top_k.logits is None
        np.testing.assert_array_equal(output.top_k.tokens[:, 0], expected)
        seen |= set(expected.tolist())
        assert screening.lm_head.screened is not None
        assert screening.lm_head.screened.counts.rows == 40 * (step + 1)
    assert len(seen) > 10


def test_the_screened_argmax_of_a_row_of_nan_is_unusable(screening: FusedDecoder) -> None:
    """The scale of a row of NaN says nothing of the others, which get their tokens."""
    source, mask = np.random.default_rng(0).integers(3, 350, (4, 5)), np.ones((4, 5), np.bool_)
    first = np.full((4, 1), 7)
    expected = screening.step(first, screening.start(source, mask), top=1)[0].top_k
    state = screening.start(source, mask)
    state.cross[1].buffer.numpy()[2] = np.nan
    found = screening.step(first, state, top=1)[0].top_k
    assert expected is not None and found is not None
    assert (found.tokens[:, 0] < 0).tolist() == [False, False, True, False]
    others = [0, 1, 3]
    np.testing.assert_array_equal(found.tokens[others], expected.tokens[others])


# Log-sum-exp


@dataclass(frozen=True)
class ChosenLogits:
    """A runner of graph "lm_head" that gives chosen logits, whatever the hidden states are."""

    graph: GraphSpec
    logits: Logits

    def bind(self, *, fixed: Mapping[str, Sequence[Any]], host: Mapping[str, Logits]) -> Any:
        host["logits"][...] = self.logits[: len(host["logits"])]
        return self

    def run(self) -> dict[str, Logits]:
        return {"logits": self.logits}


def test_sums_and_segment_maxima_are_those_of_numpy(fast_bundle_folder: Path) -> None:
    bundle = Bundle.load(fast_bundle_folder)
    variant = bundle.variant("cpu-fp32")
    runners: dict[str, Any] = {**open_graphs(bundle, variant.graphs, SessionOptions())}
    vocabulary = int(variant.graphs["lm_head"].tensor("logits").shape[-1])

    def scored(logits: Logits) -> tuple[NDArray[np.float64], SegmentMaxima]:
        runners["lm_head"] = ChosenLogits(variant.graphs["lm_head"], logits)
        output = LMHead(bundle, variant, runners).scores((1, len(logits)), normalise=True)
        assert output.log_sum_exp is not None and output.maxima is not None
        return output.log_sum_exp, output.maxima

    logits = np.random.default_rng(0).normal(size=(30, vocabulary)).astype(np.float32) * 8
    logits[3] += 200
    logits[11] -= 200
    logits[12] = -np.inf
    logits[12, 5] = -300
    logits[14, 7] = 88.9  # float32 holds its exponential, but not the sum
    logits[14, 8:11] = 88.0
    found, maxima = scored(logits)
    np.testing.assert_allclose(found, log_sum_exp(logits), rtol=1e-6, atol=2e-6)
    expected = SegmentMaxima.of(logits, maxima.length)
    np.testing.assert_array_equal(maxima.maxima, expected.maxima)
    for one in (logits[3:4], logits[:1]):
        np.testing.assert_allclose(scored(one)[0], log_sum_exp(one), rtol=1e-6)
    logits[5, 3] = np.nan
    logits[6, 3] = np.inf
    logits[7] = -np.inf
    assert np.flatnonzero(np.isnan(scored(logits)[0])).tolist() == [5, 6, 7]
