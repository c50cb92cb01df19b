"""The cache in place: every row sees its own columns and no others, whatever moved before."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.conftest import make_bundle, make_run
from transferry.runtime.bundle import Bundle
from transferry.runtime.decoding.hypothesis import Hypothesis
from transferry.runtime.decoding.options import GenerationOptions
from transferry.runtime.decoding.search import search, search_stream
from transferry.runtime.decoding.strategy import Request
from transferry.runtime.ort.cache_buffers import UNIT
from transferry.runtime.ort.fused_decoder import ENCODER_SENTENCES, FusedDecoder, FusedState
from transferry.runtime.ort.portable_decoder import PortableDecoder
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.tokenizer.byte_pair import SOURCES
from transferry.runtime.tokenizer.special_tokens import SpecialTokens

Logits = NDArray[np.floating[Any]]
Integers = NDArray[np.int64]

SOURCE = np.array([[9, 40, 77, 12, 2], [30, 8, 2, 0, 0], [5, 2, 0, 0, 0], [61, 62, 63, 2, 0]])
MASK = SOURCE != 0
TARGET = np.random.default_rng(0).integers(3, 350, (4, 40))


class Both:
    """The fused decoder and the portable one side by side; each step compares them."""

    def __init__(self, folder: Path) -> None:
        bundle = Bundle.load(folder)
        variants = bundle.manifest.variants
        self.fast = FusedDecoder(bundle, variants["cpu-fp32"], SessionOptions())
        self.plain = PortableDecoder(bundle, variants["portable"], SessionOptions())

    def start(self, source: Integers = SOURCE, mask: NDArray[np.bool_] = MASK) -> tuple[Any, Any]:
        return self.fast.start(source, mask), self.plain.start(source, mask)

    def step(self, tokens: Integers, states: tuple[Any, Any]) -> tuple[Any, Any]:
        found, fast = self.fast.step(tokens, states[0])
        expected, plain = self.plain.step(tokens, states[1])
        assert found.all_logits.dtype == np.float32
        assert_close(found.all_logits, expected.all_logits)
        return fast, plain

    def select(self, states: tuple[Any, Any], rows: Sequence[int]) -> tuple[Any, Any]:
        chosen = np.array(rows)
        return self.fast.select(states[0], chosen), self.plain.select(states[1], chosen)

    def fed(self, target: Integers, states: tuple[Any, Any]) -> tuple[Any, Any]:
        for position in range(target.shape[1]):
            states = self.step(target[:, position : position + 1], states)
        return states

    def compare_tensors(self, states: tuple[Any, Any]) -> None:
        found, expected = self.fast.tensors(states[0]), self.plain.tensors(states[1])
        assert list(found) == list(expected)
        for name, tensor in expected.items():
            if name.startswith("cross"):  # there may be padding that no row needs
                tensor = tensor[:, :, : found[name].shape[2]]
            assert_close(found[name], tensor)


def assert_close(found: Logits, expected: Logits) -> None:
    """Equal up to the rounding of float32, in units of the largest entry."""
    assert found.shape == expected.shape
    if expected.size:
        np.testing.assert_allclose(found, expected, rtol=0, atol=4e-6 * np.abs(expected).max())


@pytest.fixture(scope="module")
def both(fast_bundle_folder: Path) -> Both:
    return Both(fast_bundle_folder)


@pytest.fixture(scope="module")
def writers(fast_writer_bundle_folder: Path) -> Both:
    return Both(fast_writer_bundle_folder)


def capacity(state: FusedState) -> int:
    return int(state.past[0].buffer.shape()[2])


# What a step gives


@pytest.mark.parametrize("tokens", [1, 3, 7])
def test_several_tokens_at_once_and_then_one_by_one(both: Both, tokens: int) -> None:
    states = both.step(TARGET[:, :tokens], both.start())
    states = both.fed(TARGET[:, tokens : tokens + 4], states)
    states = both.step(TARGET[:, tokens + 4 : tokens + 6], states)
    both.compare_tensors(states)


def test_the_tensors_are_those_of_the_portable_decoder(both: Both) -> None:
    states = both.start()
    both.fast.step(TARGET[:, :1], states[0])
    states = both.fed(TARGET[:, :3], both.start())
    both.compare_tensors(states)
    assert both.fast.tensors(states[0])["cross.0.keys"].shape == (4, 2, 5, 16)
    both.compare_tensors(both.select(states, [0, 0, 1, 1, 2, 2, 3, 3]))
    both.compare_tensors(both.select(states, [3, 1]))


def test_a_cache_grows_as_long_as_it_must(both: Both) -> None:
    states = both.step(TARGET[:, :1], both.start())
    first = capacity(states[0])
    assert first == UNIT
    states = both.fed(TARGET[:, 1:], states)
    assert capacity(states[0]) == TARGET.shape[1]
    both.compare_tensors(states)


def test_a_step_taken_again_is_the_same(both: Both) -> None:
    """The columns of the step that was dropped are written over."""
    states = both.fed(TARGET[:, :3], both.start())
    bias, held = states[0].bias.copy(), states[0].held.copy()
    first = both.fast.step(TARGET[:, 3:4], states[0])[0].all_logits.copy()
    other = both.fast.step(TARGET[:, 4:5], states[0])[0].all_logits
    assert (other != first).any()
    again = both.fast.step(TARGET[:, 3:4], states[0])[0].all_logits
    np.testing.assert_array_equal(again, first)
    np.testing.assert_array_equal(states[0].bias, bias)
    np.testing.assert_array_equal(states[0].held, held)
    both.fed(TARGET[:, 3:6], states)


# Rows that are selected


@pytest.mark.parametrize("past", [0, 2, 9])
@pytest.mark.parametrize(
    "rows",
    [[0, 1, 2, 3], [2], [3, 1], [2, 0, 3, 1], [0, 0, 1, 1, 2, 2, 3, 3], [1, 1, 3, 3], [1, 3, 1, 1]],
    ids=["all", "one", "fewer", "reordered", "repeated", "some repeated", "unequal groups"],
)
def test_select_takes_rows(both: Both, rows: list[int], past: int) -> None:
    states = both.select(both.fed(TARGET[:, :past], both.start()), rows)
    chosen = np.array(rows)
    states = both.fed(TARGET[chosen, past : past + 3], states)
    # Rows of the same sentence part from each other.
    states = both.fed(np.arange(9, 9 + 2 * len(rows)).reshape(-1, 2), states)
    both.compare_tensors(states)


def test_select_follows_select(both: Both) -> None:
    states = both.fed(TARGET[:, :2], both.start())
    for rows in (
        [3, 2, 1, 0],
        [0, 0, 0, 2, 2, 2],
        [1, 0, 0, 5, 3, 4],
        [0, 1, 3, 4],
        [3, 1],
        [1, 0, 0],
    ):
        states = both.step(numbered(rows), both.select(states, rows))
        both.compare_tensors(states)


def numbered(rows: Sequence[Any]) -> Integers:
    """A token for each row, no two the same."""
    return np.arange(20, 20 + len(rows))[:, None]


def test_beams_that_change_places_move_nothing(both: Both) -> None:
    states = both.select(both.start(), [0, 0, 1, 1, 2, 2, 3, 3])
    fast = both.fed(np.arange(3, 27).reshape(8, 3), states)[0]
    swapped = both.fast.select(fast, np.array([1, 0, 2, 2, 5, 4, 7, 7]))
    assert swapped.past is fast.past
    assert swapped.cross is fast.cross


@pytest.mark.parametrize("width", [2, 4])
def test_columns_that_nobody_sees_are_written_again(both: Both, width: int) -> None:
    """Forty steps of random parents; few columns stay in sight, and the cache stays small."""
    rng = np.random.default_rng(width)
    states = both.select(both.start(), np.arange(4).repeat(width).tolist())
    greatest = 0
    for _ in range(40):
        states = both.step(rng.integers(3, 350, (4 * width, 1)), states)
        parents = np.arange(4)[:, None] * width + rng.integers(0, width, (4, width))
        states = both.select(states, parents.ravel().tolist())
        greatest = max(greatest, capacity(states[0]))
    both.compare_tensors(states)
    # Beams of random parents soon share all but their last few tokens.
    assert greatest < 40 + 8 * width


def test_sentences_leave_a_beam_search(both: Both) -> None:
    rng = np.random.default_rng(1)
    states = both.select(both.start(), np.arange(4).repeat(3).tolist())
    for left in (4, 3, 2):
        for _ in range(4):
            states = both.step(rng.integers(3, 350, (3 * left, 1)), states)
        stay = np.sort(rng.permutation(left)[: left - 1])
        rows = stay[:, None] * 3 + np.array([2, 0, 0])
        states = both.select(states, rows.ravel().tolist())
        both.compare_tensors(states)
    both.step(rng.integers(3, 350, (3, 1)), states)


# Sentences that take the place of others


def padded(sources: Sequence[Sequence[int]]) -> tuple[Integers, NDArray[np.bool_]]:
    longest = max(map(len, sources))
    source = np.array([[*ids, *[0] * (longest - len(ids))] for ids in sources])
    return source, np.arange(longest) < np.array([len(ids) for ids in sources])[:, None]


def random_rows(count: int, longest: int, seed: int, shortest: int = 1) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(shortest, longest + 1, count)
    return [rng.integers(3, 350, length).tolist() for length in lengths]


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("model", ["both", "writers"])
def test_sentences_leave_as_if_they_had_been_alone(
    model: str, width: int, request: pytest.FixtureRequest
) -> None:
    """The longest leaves first, and what it needed is given back; the others see no difference."""
    pair: Both = request.getfixturevalue(model)
    rng = np.random.default_rng(0)
    rows = [list(range(5, 35)), *random_rows(4, 6, 1)]
    states = pair.select(pair.start(*padded(rows)), np.arange(5).repeat(width).tolist())
    for staying in ([0, 1, 2, 3, 4], [1, 2, 3, 4], [0, 2, 3], [1]):
        sentences = len(states[0].prompt)
        for _ in range(8):
            states = pair.step(rng.integers(3, 350, (sentences * width, 1)), states)
            parents = rng.integers(0, width, (sentences, width))
            starts = np.arange(sentences)[:, None] * width
            states = pair.select(states, (starts + parents).ravel().tolist())
        chosen = np.array(staying)[:, None] * width + np.arange(width)
        before = capacity(states[0])
        states = pair.select(states, chosen.ravel().tolist())
        assert capacity(states[0]) <= before + UNIT * width
        if pair.fast.has_encoder:  # what pads a prompt is nobody's
            pair.compare_tensors(states)


def test_memory_that_grew_is_where_an_older_state_goes_on(both: Both) -> None:
    """A thread keeps where it computes logits: a larger batch makes it anew."""
    decoder, rows = both.fast, random_rows(70, 5, 3)
    states = both.fed(TARGET[:, :2], both.start())
    larger = decoder.start(*padded(rows))
    for _ in range(2):
        _, larger = decoder.step(numbered(rows), larger)
        states = both.fed(TARGET[:, 2:4], states)
    with ThreadPoolExecutor(1) as pool:  # a thread with memory of its own
        found, _ = pool.submit(decoder.step, TARGET[:, 4:5], states[0]).result()
    expected, _ = both.plain.step(TARGET[:, 4:5], states[1])
    assert_close(found.all_logits, expected.all_logits)


@pytest.mark.parametrize("length", range(1, 21))
@pytest.mark.parametrize("model", ["both", "writers"])
def test_a_sentence_scores_the_same_bit_for_bit_however_wide_the_batch(
    model: str, length: int, request: pytest.FixtureRequest
) -> None:
    """Alone, in a batch just as wide, and in wider ones."""
    decoder = request.getfixturevalue(model).fast
    rng = np.random.default_rng(length)
    source = rng.integers(3, 350, length).tolist()

    def scores(*others: Sequence[int]) -> Logits:
        state = decoder.start(*padded([source, *others]))
        logits = []
        for step in range(6):
            tokens = np.full((1 + len(others), 1), TARGET[0, step])
            found, state = decoder.step(tokens, state)
            logits.append(found.all_logits[0].copy())
        return np.array(logits)

    alone = scores()
    for more in (0, 1, 2, 3, 5, 17, 30):
        for neighbours in (1, 5):
            others = [rng.integers(3, 350, length + more).tolist()] * neighbours
            np.testing.assert_array_equal(scores(*others), alone)


def test_prompts_of_any_length_are_begun_with(writers: Both) -> None:
    for rows in (random_rows(6, 9, 7), [[4], [5], [6]], [[4, 5, 6]]):
        states = writers.start(*padded(rows))
        states = writers.fed(numbered(rows), states)
    source = np.zeros((3, 0), np.int64)
    states = writers.start(source, source != 0)
    writers.fed(TARGET[:3, :5], states)


def test_more_sources_than_are_encoded_at_once(both: Both) -> None:
    rows = random_rows(2 * ENCODER_SENTENCES["cpu"] + 3, 14, 8)
    states = both.start(*padded(rows))
    both.step(numbered(rows), states)


# The likeliest token, and sums


@pytest.fixture(scope="module")
def screened(tmp_path_factory: pytest.TempPathFactory) -> FusedDecoder:
    """A decoder of a model with many tokens."""
    folder = tmp_path_factory.mktemp("screened")
    run = make_run(folder / "run", SOURCES, vocabulary=2304)
    bundle = Bundle.load(make_bundle(run, folder / "bundle", "cpu-fp32"))
    return FusedDecoder(bundle, bundle.manifest.variants["cpu-fp32"], SessionOptions())


@pytest.fixture(params=["without a screen", "with a screen"])
def picking(request: pytest.FixtureRequest) -> FusedDecoder:
    if request.param == "with a screen":
        decoder: FusedDecoder = request.getfixturevalue("screened")
        assert decoder.lm_head.screened is not None
        return decoder
    plain: FusedDecoder = request.getfixturevalue("both").fast
    assert plain.lm_head.screened is None
    return plain


def likeliest(
    decoder: FusedDecoder, tokens: Integers, state: FusedState
) -> tuple[Integers, FusedState]:
    """The likeliest token of each row, -1 where there is none; `top` is a wish, not an order."""
    output, state = decoder.step(tokens, state, top=1)
    if output.top_k is not None:
        return np.where(output.top_k.usable, output.top_k.tokens[:, 0], -1), state
    last = output.all_logits[:, -1]
    return np.where(np.isfinite(last.max(axis=1)), last.argmax(axis=1), -1), state


def test_the_likeliest_is_the_argmax(picking: FusedDecoder) -> None:
    rows = random_rows(40, 12, 9)
    first, second = picking.start(*padded(rows)), picking.start(*padded(rows))
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(12):
        tokens = rng.integers(3, picking.vocabulary_size, (40, 1))
        output, first = picking.step(tokens, first)
        expected = output.all_logits[:, 0].argmax(axis=1)
        found, second = likeliest(picking, tokens, second)  # in the memory of those logits
        np.testing.assert_array_equal(found, expected)
        seen |= set(found.tolist())
    assert len(seen) > 10
    if picking.lm_head.screened is not None:
        assert picking.lm_head.screened.counts.rows == 480


def test_no_token_is_likeliest_where_nothing_is_finite(picking: FusedDecoder) -> None:
    """The scale of a row of NaN says nothing of the others, which get their tokens."""
    state = picking.start(SOURCE, MASK)
    expected, _ = likeliest(picking, TARGET[:, :1], state)
    state = picking.start(SOURCE, MASK)
    state.cross[1].buffer.numpy()[2] = np.nan
    found, _ = likeliest(picking, TARGET[:, :1], state)
    assert found.tolist() == [*expected[:2].tolist(), -1, int(expected[3])]


# Together


SEARCHES = {
    "greedy": GenerationOptions(max_length=20),
    "greedy without scores": GenerationOptions(max_length=20, scores=False),
    "beam": GenerationOptions(max_length=20, beam=4, n_best=4),
    "sampling": GenerationOptions(max_length=20, sample=True, n_best=2, seed=3),
}


def taken(requests: Sequence[Request[int]]) -> Callable[[int], list[Request[int]]]:
    """A request source of a list, in its order."""
    left = iter(requests)
    return lambda most: list(islice(left, most))


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize("model", ["both", "writers"])
def test_a_stream_is_answered_as_by_the_portable_decoder(
    model: str, name: str, request: pytest.FixtureRequest
) -> None:
    pair: Both = request.getfixturevalue(model)
    options = SEARCHES[name]
    special = SpecialTokens(0, 1, 2)
    rng = np.random.default_rng(0)
    sources = random_rows(100, 15, 11)
    requests = [
        Request(key, source, int(rng.integers(4, 21)), row_id=key)
        for key, source in enumerate(sources)
    ]

    def answers(decoder: Any) -> list[list[Hypothesis]]:
        found = dict(search_stream(decoder, taken(requests), options, special, slots=6))
        return [found[key] for key in range(100)]

    found, expected = answers(pair.fast), answers(pair.plain)
    for one, other in zip(found, expected, strict=True):
        assert [item.tokens for item in one] == [item.tokens for item in other]
        assert [item.finish_reason for item in one] == [item.finish_reason for item in other]
        scores = [[item.score for item in row] for row in (one, other)]
        np.testing.assert_allclose(scores[0], scores[1], rtol=1e-4, atol=1e-5)
    reasons = {row[0].finish_reason for row in expected}
    assert reasons == {"end", "length"}
    assert len({row[0].tokens for row in expected}) > 50, "the answers must tell rows apart"


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize("model", ["both", "writers"])
def test_a_stream_answers_the_same_bit_for_bit_in_any_number_of_slots(
    model: str, name: str, request: pytest.FixtureRequest
) -> None:
    """Whatever sentences they are answered with, and whether they are padded or not."""
    decoder = request.getfixturevalue(model).fast
    rng = np.random.default_rng(1)
    sources = random_rows(80, 19, 13)
    lengths = rng.integers(4, 21, 80).tolist()
    answers = []
    for slots in (80, 1, 5, 20):
        requests = [
            Request(key, sources[key], lengths[key], row_id=key) for key in rng.permutation(80)
        ]
        found = search_stream(
            decoder, taken(requests), SEARCHES[name], SpecialTokens(0, 1, 2), slots=slots
        )
        # As text: a score that is not asked for is NaN, which equals nothing.
        answers.append({key: repr(hypotheses) for key, hypotheses in found})
    assert answers[1:] == answers[:1] * 3


@pytest.mark.parametrize("beam", [1, 3])
def test_threads_share_it(both: Both, beam: int) -> None:
    """Two threads at work at once answer as one does."""
    batches = [random_rows(5 + number % 3, 12, number) for number in range(16)]

    def generate(sources: Sequence[Sequence[int]]) -> list[list[Hypothesis]]:
        options = GenerationOptions(max_length=12, beam=beam, n_best=beam)
        return search(both.fast, sources, options, SOURCES)

    expected = [generate(batch) for batch in batches]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(generate, batches)) == expected


def test_describes_what_decides_the_numbers(both: Both) -> None:
    found = both.fast.describe()
    assert found["variant"] == "cpu-fp32"
    (nodes,) = found["nodes"]
    name, count = nodes.split()
    assert name == "CPUExecutionProvider"
    assert int(count) > 20
