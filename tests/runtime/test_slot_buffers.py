"""Buffers that are kept, and calls captured with them: what a GPU runs, on the CPU."""

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import make_bundle
from tests.runtime.listed import Listed
from transferry.runtime.bundle import Bundle
from transferry.runtime.engine import Engine
from transferry.runtime.errors import AllocationError, UsageError
from transferry.runtime.graph_runner import NOT_CAPTURED, GraphRunner
from transferry.runtime.logits import log_sum_exp
from transferry.runtime.model import open_model
from transferry.runtime.options import GenerationOptions
from transferry.runtime.search import Hypothesis, Request, search, search_stream
from transferry.runtime.session import SessionOptions
from transferry.runtime.slot_buffers import POOLED_UNIT
from transferry.runtime.slot_decoder import SlotDecoder, SlotState
from transferry.runtime.tokenizer import SpecialTokens

CAPTURING = SessionOptions(cuda_graphs=True)
SEARCHES = {
    "greedy": GenerationOptions(max_length=20),
    "greedy without scores": GenerationOptions(max_length=20, scores=False),
    "beam": GenerationOptions(max_length=20, beam=4, n_best=4),
    "beam with rules": GenerationOptions(max_length=20, beam=3, min_length=4, no_repeat_ngram=2),
}


@pytest.fixture(scope="module", params=["run_folder", "writer_run_folder"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    run: Path = request.getfixturevalue(request.param)
    folder = tmp_path_factory.mktemp("device") / "bundle"
    return Bundle.load(make_bundle(run, folder, "cuda-fp16"))


def plain(bundle: Bundle) -> SlotDecoder:
    """The same graphs, with buffers of their own and logits on the host."""
    variant = bundle.manifest.variants["cuda-fp16"]
    graphs = {
        name: graph for name, graph in variant.graphs.items() if name not in ("clear", "rank")
    }
    return SlotDecoder(bundle, replace(variant, graphs=graphs), SessionOptions())


def kept(bundle: Bundle) -> SlotDecoder:
    return SlotDecoder(bundle, bundle.manifest.variants["cuda-fp16"], CAPTURING)


def random_rows(count: int, longest: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 350, n).tolist() for n in rng.integers(1, longest + 1, count)]


def answers(
    decoder: Any, sources: Sequence[Sequence[int]], options: GenerationOptions, slots: int
) -> list[list[Hypothesis]]:
    rng = np.random.default_rng(0)
    requests = [
        Request(key, source, int(rng.integers(4, 21)), row_id=key)
        for key, source in enumerate(sources)
    ]
    special = SpecialTokens(0, 1, 2)
    found = dict(search_stream(decoder, Listed(requests), options, special, slots=slots))
    return [found[key] for key in range(len(sources))]


@pytest.mark.parametrize("name", SEARCHES)
def test_kept_buffers_change_no_answer(bundle: Bundle, name: str) -> None:
    """Batch after batch, some in slots that others left, and in more columns than are wanted."""
    sources = random_rows(60, 40, 11)
    options = SEARCHES[name]
    expected = answers(plain(bundle), sources, options, 7)
    decoder = kept(bundle)
    for _ in range(2):
        found = answers(decoder, sources, options, 7)
        for one, other in zip(found, expected, strict=True):
            assert [item.tokens for item in one] == [item.tokens for item in other]
            assert [item.finish_reason for item in one] == [item.finish_reason for item in other]
            scores = [[item.score for item in row] for row in (one, other)]
            np.testing.assert_allclose(scores[0], scores[1], rtol=1e-3, atol=1e-3)
    assert len({row[0].tokens for row in expected}) > 30, "the answers must tell rows apart"


def test_what_was_in_a_buffer_before_reaches_nobody(bundle: Bundle) -> None:
    """NaN is what a column that is not seen would still spread."""
    decoder, sources = kept(bundle), random_rows(30, 40, 5)
    expected = answers(decoder, sources, SEARCHES["beam"], 7)
    spoilt = 0
    for free in decoder._buffers._pool._free.values():
        for buffer in (buffer for buffers in free for buffer in buffers):
            buffer.numpy()[:] = np.nan
            spoilt += 1
    assert spoilt
    assert answers(decoder, sources, SEARCHES["beam"], 7) == expected


def test_a_buffer_is_lent_once_at_a_time(bundle: Bundle) -> None:
    decoder = kept(bundle)
    mask = np.ones((3, 4), np.bool_)

    def begun(seed: int) -> SlotState:
        source = np.random.default_rng(seed).integers(3, 350, (3, 4))
        return decoder.step(np.full((3, 1), 7), decoder.start(source, mask))[1]

    def places(state: SlotState) -> set[int]:
        return {each.buffer.data_ptr() for each in (*state.cross, *state.past)}

    first, second = begun(0), begun(1)
    assert not places(first) & places(second)
    expected = decoder.step(np.full((3, 1), 8), first)[0].copy()
    earlier = places(first)
    del first
    third = begun(0)
    assert places(third) & earlier
    assert not places(third) & places(second)
    np.testing.assert_array_equal(decoder.step(np.full((3, 1), 8), third)[0], expected)


def test_ranks_as_the_logits_do(bundle: Bundle) -> None:
    decoder, rng = kept(bundle), np.random.default_rng(0)
    source, mask = rng.integers(3, 350, (5, 6)), np.ones((5, 6), np.bool_)
    first, second = decoder.start(source, mask), decoder.start(source, mask)
    for count in (1, 8, 3):
        tokens = rng.integers(3, 350, (5, 1))
        logits, first = decoder.step(tokens, first)
        logits = logits[:, 0].copy()
        ranked, second = decoder.rank(tokens, second, count)
        order = np.argsort(-logits, axis=1, kind="stable")[:, :count]
        np.testing.assert_array_equal(ranked.tokens, order)
        np.testing.assert_array_equal(ranked.logits, np.take_along_axis(logits, order, axis=1))
        np.testing.assert_allclose(ranked.log_sum_exp, log_sum_exp(logits), rtol=1e-6)


def test_ranks_nothing_where_nothing_is_finite(bundle: Bundle) -> None:
    decoder = kept(bundle)
    source, mask = np.full((3, 4), 9), np.ones((3, 4), np.bool_)
    _, state = decoder.step(np.full((3, 1), 7), decoder.start(source, mask))
    state.past[1].buffer.numpy()[1] = np.nan
    ranked, _ = decoder.rank(np.full((3, 1), 7), state, 2)
    assert np.isnan(ranked.log_sum_exp).tolist() == [False, True, False]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[GraphRunner, int], set[int]]:
    """Which bindings each captured call was run with."""
    found: dict[tuple[GraphRunner, int], set[int]] = defaultdict(set)
    run = GraphRunner.run_bound

    def recorded(self: GraphRunner, binding: Any, number: int = NOT_CAPTURED) -> None:
        if number != NOT_CAPTURED:
            assert self.captured
            found[self, number].add(id(binding))
        run(self, binding, number)

    monkeypatch.setattr(GraphRunner, "run_bound", recorded)
    return found


def test_what_is_captured_is_played_back_where_it_was(
    bundle: Bundle, runs: dict[tuple[GraphRunner, int], set[int]]
) -> None:
    """The same text again, in another thread: nothing is captured anew, nothing has moved."""
    decoder, sources = kept(bundle), random_rows(60, 40, 11)
    found, captured = [], []
    for _ in range(3):
        with ThreadPoolExecutor(1) as pool:
            found.append(pool.submit(answers, decoder, sources, SEARCHES["beam"], 7).result())
        captured.append(len(runs))
    # After the first time the memory of hidden states no longer grows.
    assert captured[0] <= captured[1] == captured[2] < 60
    assert found == found[:1] * 3
    assert all(len(bindings) == 1 for bindings in runs.values())


def test_no_more_is_captured_than_may_be(
    bundle: Bundle,
    runs: dict[tuple[GraphRunner, int], set[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sources = random_rows(60, 40, 11)
    expected = answers(kept(bundle), sources, SEARCHES["beam"], 7)
    runs.clear()
    monkeypatch.setattr("transferry.runtime.graph_runner.MOST_CAPTURES", 3)
    assert answers(kept(bundle), sources, SEARCHES["beam"], 7) == expected
    assert sorted(number for _, number in runs) == [1, 1, 2, 2, 3, 3]


def test_what_is_kept_is_given_up_where_memory_is_short(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = kept(bundle)
    expected = search(decoder, [[5, 6, 7, 2]], SEARCHES["greedy"], SpecialTokens(0, 1, 2))
    buffers = decoder._buffers
    assert buffers.calls and any(buffers._pool._free.values())
    zeros, asked = GraphRunner.zeros, []

    def short(self: GraphRunner, role: Any, shape: Sequence[int]) -> Any:
        asked.append(any(buffers._pool._free.values()))
        if asked[-1] and role != "hidden":
            raise AllocationError("there is not enough memory")
        return zeros(self, role, shape)

    monkeypatch.setattr(GraphRunner, "zeros", short)
    sources = [[5, 6, 7, 2]] * 5  # which wants other buffers
    assert search(decoder, sources, SEARCHES["greedy"], SpecialTokens(0, 1, 2)) == expected * 5
    assert set(asked) == {True, False}


def test_slots_and_columns_are_of_few_kinds(bundle: Bundle) -> None:
    buffers = kept(bundle)._buffers
    counts = [buffers.slots(count) for count in range(1, 1025)]
    assert sorted(set(counts)) == sorted(
        {1, *(1 << n for n in range(11)), *(3 << n for n in range(9))}
    )
    assert all(count <= slots <= count * 3 / 2 for count, slots in enumerate(counts, 1))
    assert {buffers.columns(count) for count in range(1, 65)} == {POOLED_UNIT, 2 * POOLED_UNIT}


def test_cuda_graphs_are_for_what_can_be_recorded(bundle: Bundle) -> None:
    with pytest.raises(UsageError, match=r"a variant that is made for a GPU .*, found portable"):
        open_model(bundle, bundle.variant("portable"), CAPTURING)
    with pytest.raises(UsageError, match="expected one replica on one device, found 2"):
        Engine.load(bundle.folder, variant="cuda-fp16", replicas=2, cuda_graphs=True)
    engine = Engine.load(bundle.folder, variant="cuda-fp16", replicas=1, cuda_graphs=True)
    assert engine.describe()["cuda_graphs"] is True
    other = Engine.load(bundle.folder, variant="cuda-fp16", replicas=1)
    texts = ["seven", "three hundred", "The farmer sold keys."]
    assert [one.text for one in engine.generate(texts)] == [
        one.text for one in other.generate(texts)
    ]
