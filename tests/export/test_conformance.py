"""The contract of `Decoder`, held against every decoder: torch's and those of all variants."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.conftest import THOROUGH
from tests.export.conftest import opened
from tests.traced import unverified
from transferry.build_model.checkpoint import Checkpoint
from transferry.build_model.train.corpus import builtin_pairs
from transferry.export.blame.cross_check import PlainDecoder, ReferenceBackend
from transferry.export.blame.traced_program import relative_error
from transferry.export.bundle import Contents
from transferry.export.torch_model import TorchDecoder
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.decoding.decoder import ObservableDecoder, StepOutput
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.decoding.hypothesis import Hypothesis
from transferry.runtime.decoding.logits import SegmentMaxima, log_sum_exp
from transferry.runtime.decoding.search import pad_sources, search, search_batch
from transferry.runtime.decoding.shared_prompts import shared_prompts
from transferry.runtime.decoding.strategy import Request
from transferry.runtime.ort.encoder import EncoderModel
from transferry.runtime.tokenizer.special_tokens import SpecialTokens

SPECIAL = SpecialTokens(0, 1, 2)
Integers = NDArray[np.int64]
Logits = NDArray[np.floating[Any]]


# Error of each decoder's numbers, of the largest entry, against the same model in float64.
ERRORS = {
    "torch": 1e-5,
    "plain": 1e-5,
    "portable": 1e-5,
    "cpu-fp32": 1e-5,
    "cpu-int8": 0.3,
    "cpu-int4": 0.5,
    "cuda-fp16": 0.02,
}
SERVED = [name for name in ERRORS if name not in ("torch", "plain")]
# Those that give a row the same to the bit in any batch.
EXACT = ["portable", "cpu-fp32", "cpu-int8", "cpu-int4"]


@dataclass(frozen=True)
class Subject:
    """A decoder, the same model in float64, and the largest error between them."""

    decoder: ObservableDecoder[Any]
    oracle: TorchDecoder
    error: float


@pytest.fixture(scope="module")
def writer_variants(calm_writer: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A decoder-only bundle with a variant of each kind; greedy search is screened."""
    folder = tmp_path_factory.mktemp("bundles") / "writer-variants"
    names = "cpu-fp32", "cpu-int8", "cpu-int4", "cuda-fp16"
    lines = [pair.source for pair in builtin_pairs(300, seed=1)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transferry.export.rewrite.lm_head.SMALLEST_VOCABULARY", 1)
        return unverified(calm_writer, folder, Contents(lines[:8], names, lines))


@pytest.fixture(scope="module", params=["encoder-decoder", "decoder-only", "recurrent"])
def architecture(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=ERRORS)
def subject(architecture: str, request: pytest.FixtureRequest) -> Subject:
    """Each decoder of a random model; in integers of one that few bits suffice."""
    name: str = request.param
    if architecture == "decoder-only":
        bundle: Bundle
        bundle, checkpoint = map(request.getfixturevalue, ("writer_variants", "calm_writer"))
    elif architecture == "recurrent":
        calm = "calm_" if name in ("cpu-int8", "cpu-int4") else ""
        named = f"{calm}recurrent_variants", f"{calm}recurrent"
        bundle, checkpoint = map(request.getfixturevalue, named)
        if name == "cuda-fp16" and not THOROUGH:
            pytest.skip("its ten graphs are traced for this alone: `make test-all` does")
    elif name in ("cpu-int8", "cpu-int4"):
        bundle, checkpoint = map(request.getfixturevalue, ("all_variants", "calm"))
    else:
        folder = {"cpu-fp32": "fast_bundle_folder", "cuda-fp16": "device_bundle_folder"}
        bundle = Bundle.load(request.getfixturevalue(folder.get(name, "bundle_folder")))
        checkpoint = request.getfixturevalue("checkpoint")
    decoder: ObservableDecoder[Any]
    if name == "torch":
        decoder = TorchDecoder(checkpoint.model)
    elif name == "plain":
        decoder = PlainDecoder(bundle.variant(), ReferenceBackend(bundle, bundle.variant()))
    else:
        served = opened(bundle, name)
        assert not isinstance(served, EncoderModel)
        decoder = served
    return Subject(decoder, TorchDecoder.oracle(checkpoint.model), ERRORS[name])


def tokens_of(seed: int, rows: int, columns: int = 1) -> Integers:
    return np.random.default_rng([seed, rows]).integers(3, 350, (rows, columns))


def random_rows(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 350, length).tolist() for length in lengths]


def started(decoder: ObservableDecoder[Any], sources: Sequence[Sequence[int]]) -> Any:
    return decoder.start(*pad_sources(sources, SPECIAL.pad_id))


def next_logits(decoder: ObservableDecoder[Any], tokens: Integers, state: Any) -> Logits:
    """A copy, which the next step does not overwrite."""
    return decoder.step(tokens, state)[0].all_logits.copy()


# Steps and selections


class Walk:
    """A state that is stepped and selected, and the tokens read by each row."""

    def __init__(self, subject: Subject, sources: Sequence[Sequence[int]]) -> None:
        self.subject, self.sources = subject, list(sources)
        self.targets: list[list[int]] = [[] for _ in sources]
        self.state = started(subject.decoder, sources)
        self.truth = started(subject.oracle, sources)
        self.steps = 0

    def step(self, new: int) -> None:
        """Feeds `new` tokens to each row, and compares the logits."""
        self.steps += 1
        tokens = tokens_of(self.steps, len(self.sources), new)
        for target, row in zip(self.targets, tokens.tolist(), strict=True):
            target += row
        output, self.state = self.subject.decoder.step(tokens, self.state)
        _, self.truth = self.subject.oracle.step(tokens, self.truth)
        found, expected = output.all_logits, self.logits_of_model()[:, -new:]
        assert found.shape == expected.shape
        assert np.issubdtype(found.dtype, np.floating)
        error = relative_error(found, expected, np.ones(found.shape, np.bool_))
        assert error < self.subject.error, error

    def select(self, rows: Sequence[int]) -> None:
        chosen = np.array(rows)
        self.state = self.subject.decoder.select(self.state, chosen)
        self.truth = self.subject.oracle.select(self.truth, chosen)
        self.sources = [self.sources[row] for row in rows]
        self.targets = [list(self.targets[row]) for row in rows]

    def logits_of_model(self) -> NDArray[np.float64]:
        """Scores of all targets at once, without a cache, in float64."""
        model, encoder = self.subject.oracle.model, self.subject.oracle.has_encoder
        texts = self.targets
        if not encoder:
            texts = [[*map(int, s), *t] for s, t in zip(self.sources, self.targets, strict=True)]
        source, mask = pad_sources([list(row) for row in self.sources], SPECIAL.pad_id)
        if not encoder:
            source, mask = source[:, :0], mask[:, :0]
        target, _ = pad_sources(texts, SPECIAL.pad_id)
        with torch.inference_mode():
            logits = model(*map(torch.from_numpy, (source, mask, target))).numpy()
        length = len(self.targets[0])
        ends = [len(text) for text in texts]
        return np.stack([row[end - length : end] for row, end in zip(logits, ends, strict=True)])

    def compare_tensors(self) -> None:
        """Names, shapes, and numbers wherever there is a token."""
        found = self.subject.decoder.tensors(self.state)
        expected = self.subject.oracle.tensors(self.truth)
        assert list(found) == list(expected)
        mask = self.truth.mask.numpy()[:, None, :, None]
        for name, tensor in expected.items():
            known = np.ones(tensor.shape, np.bool_)
            if self.subject.oracle.has_encoder == name.startswith("cross"):
                known &= mask
            columns = found[name].shape[2]
            if name.startswith("cross"):  # may have no more columns than the longest row needs
                assert not known[:, :, columns:].any()
                tensor, known = tensor[:, :, :columns], known[:, :, :columns]
            assert found[name].shape == tensor.shape
            error = relative_error(found[name], tensor, known)
            assert error < self.subject.error, (name, error)


SOURCES = random_rows([5, 3, 0, 4])
# Numbers are steps over so many tokens a row, lists are selections.
WALKS: dict[str, list[int | list[int]]] = {
    "one by one": [1] * 12,
    "several at once": [3, 1, 1, 7, 1, 2],
    "all rows, reordered": [2, [2, 0, 3, 1], 1, 1, 2],
    "fewer rows": [2, [3, 1], 1, [1], 3, 1],
    "the first row alone": [[0], 1, 2, 1],
    "rows in place": [1, [0, 1, 2, 3], 1, [0, 1, 2], 1, 1],
    "the last rows in the places of others": [9, [3, 1], 1, 1],
    "repeated": [[0, 0, 1, 1, 2, 2, 3, 3], 1, 1, [2, 3, 6, 7], 1, 2],
    "repeated later": [9, [1, 1, 3, 3], 1, [1, 0, 3, 3], 1, 1],
    "unequal groups": [2, [1, 3, 1, 1], 1, [0, 2, 3, 1], 1, 2],
    "selections alone": [
        2,
        *([3, 2, 1, 0], 1, [0, 0, 0, 2, 2, 2], 1, [1, 0, 0, 5, 3, 4], 1, [0, 1, 3, 4], 1),
        *([3, 1], [1, 0, 0], 1),
    ],
}


@pytest.mark.parametrize("name", WALKS)
def test_a_walk_gives_what_the_model_gives_at_once(subject: Subject, name: str) -> None:
    """Without a cache, without padding, each row from the tokens that it has read."""
    sources = SOURCES
    if subject.oracle.has_encoder:
        sources = [[*source, 2] for source in SOURCES]
    walk = Walk(subject, sources)
    for move in WALKS[name]:
        if isinstance(move, int):
            walk.step(move)
        else:
            walk.select(move)
        walk.compare_tensors()


@pytest.mark.parametrize("width", [1, 3])
def test_sentences_leave_a_search(subject: Subject, width: int) -> None:
    """The longest leaves first; beams have random parents."""
    rng = np.random.default_rng(0)
    walk = Walk(subject, [list(range(5, 25)), *random_rows([6, 1, 4, 2], seed=1)])
    walk.select(np.arange(5).repeat(width).tolist())
    for staying in ([0, 1, 2, 3, 4], [1, 2, 3, 4], [0, 2, 3], [1]):
        for _ in range(3):
            walk.step(1)
            sentences = len(walk.sources) // width
            parents = rng.integers(0, width, (sentences, width))
            walk.select((np.arange(sentences)[:, None] * width + parents).ravel().tolist())
        walk.select((np.array(staying)[:, None] * width + np.arange(width)).ravel().tolist())
        walk.compare_tensors()


@pytest.mark.parametrize("architecture", ["decoder-only"], indirect=True)
def test_prompts_of_one_token_leave_no_source(subject: Subject) -> None:
    walk = Walk(subject, [[], [], []])
    for new in (1, 2):
        walk.step(new)
        walk.compare_tensors()


@pytest.mark.parametrize("architecture", ["decoder-only"], indirect=True)
@pytest.mark.parametrize("subject", EXACT, indirect=True)
def test_prompts_that_begin_alike_have_the_bits_of_prompts_read_whole(subject: Subject) -> None:
    """Beside others, as beginnings of each other, twice, and alone."""
    decoder: Any = subject.decoder
    (begin,), texts = random_rows([37]), random_rows([5, 1, 11, 2, 8, 3], seed=1)
    prompts = [[*begin, *text] for text in texts]
    prompts += [begin[:20], begin, *random_rows([40, 1, 33], seed=2), prompts[2]]
    assert decoder.shares_prompts
    found = shared_prompts(*pad_sources(prompts, 0))
    assert found is not None
    assert (found.length, len(found.first)) == (32, 5)
    shared = started(decoder, prompts)
    decoder.shares_prompts = False
    try:
        whole = started(decoder, prompts)
    finally:
        decoder.shares_prompts = True
    tensors = decoder.tensors(whole)
    for one, tensor in decoder.tensors(shared).items():
        np.testing.assert_array_equal(tensor, tensors[one])
    alone = [started(decoder, [prompt]) for prompt in prompts]
    for position in range(3):
        tokens = tokens_of(position, len(prompts))
        output, shared = decoder.step(tokens, shared)
        logits = output.all_logits.copy()
        output, whole = decoder.step(tokens, whole)
        np.testing.assert_array_equal(logits, output.all_logits)
        for row, state in enumerate(alone):
            output, alone[row] = decoder.step(tokens[row : row + 1], state)
            np.testing.assert_array_equal(logits[row], output.all_logits[0])


def test_a_step_leaves_its_state_as_it_was(subject: Subject) -> None:
    decoder = subject.decoder
    state = started(decoder, random_rows([5, 2, 4]))
    for position in range(5):
        state = decoder.step(tokens_of(position, 3), state)[1]
    before = {name: tensor.copy() for name, tensor in decoder.tensors(state).items()}
    first = next_logits(decoder, tokens_of(8, 3), state)
    assert (next_logits(decoder, tokens_of(9, 3), state) != first).any(axis=(1, 2)).all()
    next_logits(decoder, tokens_of(9, 3, 4), state)
    np.testing.assert_array_equal(next_logits(decoder, tokens_of(8, 3), state), first)
    for name, tensor in decoder.tensors(state).items():
        np.testing.assert_array_equal(tensor, before[name])


def test_a_selection_leaves_its_state_as_it_was(subject: Subject) -> None:
    """Where rows share a cache, only one that drops none: others take the places of those."""
    decoder = subject.decoder
    _, state = decoder.step(tokens_of(0, 3, 2), started(decoder, random_rows([5, 2, 4])))
    before = {name: tensor.copy() for name, tensor in decoder.tensors(state).items()}
    expected = next_logits(decoder, tokens_of(1, 3), state)
    for rows in ([0, 0, 1, 1, 2, 2], [0, 1, 2], [2, 0])[: 2 if decoder.shares_cache else 3]:
        next_logits(decoder, tokens_of(2, len(rows)), decoder.select(state, np.array(rows)))
        for name, tensor in decoder.tensors(state).items():
            np.testing.assert_array_equal(tensor, before[name])
        np.testing.assert_array_equal(next_logits(decoder, tokens_of(1, 3), state), expected)


# Scores


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("top", [None, 1, 8, 3, "all"])
def test_all_ways_to_score_agree(subject: Subject, top: int | str | None, normalise: bool) -> None:
    decoder = subject.decoder
    k = decoder.vocabulary_size if top == "all" else top
    assert k is None or isinstance(k, int)
    state = started(decoder, random_rows([6, 1, 9, 4, 5]))
    for position in range(4):
        tokens = tokens_of(position, 5)
        expected = next_logits(decoder, tokens, state)[:, -1]
        output, state = decoder.step(tokens, state, top=k, normalise=normalise)
        assert (output.logits is None) != (output.top_k is None)
        sums = output.log_sum_exp
        if output.logits is not None:
            np.testing.assert_array_equal(output.logits[:, -1], expected)
            if output.maxima is not None:
                maxima = SegmentMaxima.of(expected, output.maxima.length).maxima
                np.testing.assert_array_equal(output.maxima.maxima, maxima)
        if (best := output.top_k) is not None:
            assert k is not None
            order = np.argsort(-expected, axis=1, kind="stable")[:, :k]
            np.testing.assert_array_equal(best.tokens, order)
            assert best.tokens.dtype == np.int64
            assert best.logits is not None or not normalise
            if best.logits is not None:
                likeliest = np.take_along_axis(expected, order, axis=1)
                np.testing.assert_array_equal(best.logits, likeliest)
            assert (best.logits is None) == (best.log_sum_exp is None)
            sums = best.log_sum_exp
        if sums is not None:
            np.testing.assert_allclose(sums, log_sum_exp(expected), rtol=2e-6)


# A row by itself


def scored(output: StepOutput) -> list[NDArray[Any]]:
    """All results of a step, copied."""
    found: list[NDArray[Any] | None] = [output.log_sum_exp]
    if output.logits is not None:
        found.append(output.logits[:, -1])
    if output.maxima is not None:
        found.append(output.maxima.maxima)
    if output.top_k is not None:
        found += [output.top_k.tokens, output.top_k.logits, output.top_k.log_sum_exp]
    return [each.copy() for each in found if each is not None]


WANTED: dict[str, dict[str, Any]] = {
    "logits": {},
    "logits and sums": {"normalise": True},
    "the likeliest": {"top": 1},
    "top 4 and sums": {"top": 4, "normalise": True},
}


@pytest.mark.parametrize("name", WANTED)
@pytest.mark.parametrize("subject", EXACT, indirect=True)
def test_a_row_is_the_same_to_the_bit_in_any_batch(subject: Subject, name: str) -> None:
    """Alone, beside others as long and longer, first and last, and after others have left."""
    decoder = subject.decoder

    def steps(rows: list[list[int]]) -> list[NDArray[Any]]:
        state, found, count = started(decoder, rows), [], len(rows)
        for position in range(5):
            if position == 3:
                left = np.unique([0, max(0, count - 2), count - 1])
                state, count = decoder.select(state, left), len(left)
            tokens = np.full((count, 1), 7 + position)
            output, state = decoder.step(tokens, state, **WANTED[name])
            found += scored(output)
        return found

    for length in (1, 2, 3, 5, 7, 8, 9, 16, 17):
        (row,) = random_rows([length], seed=length)
        alone = steps([row])
        for more, count in product((0, 1, 3, 17), (1, 5)):
            others = random_rows([length + more] * count, seed=more)
            for one, other in zip(steps([row, *others, row]), alone, strict=True):
                for place in (0, -1):
                    found = f"length {length}, {more} more"
                    np.testing.assert_array_equal(one[place], other[0], found)


# Searches

SEARCHES = {
    "greedy": GenerationOptions(max_length=20),
    "greedy without scores": GenerationOptions(max_length=20, scores=False),
    "beam": GenerationOptions(max_length=20, beam=4, n_best=4),
    "sampling": GenerationOptions(max_length=20, sample=True, n_best=2, seed=3),
}


# Answers of the oracle, by architecture and search.
TRUTH: dict[tuple[str, str], list[list[Hypothesis]]] = {}


def answers(decoder: ObservableDecoder[Any], name: str, slots: int) -> list[list[Hypothesis]]:
    """Answers requests of many lengths, in an order of their own for each number of slots."""
    rng, count = np.random.default_rng(1), 20
    sources = random_rows(rng.integers(1, 20, count).tolist(), seed=13)
    lengths = rng.integers(4, 21, count).tolist()
    order = np.random.default_rng(slots).permutation(count).tolist()
    left = iter([Request(key, sources[key], lengths[key], row_id=key) for key in order])
    found: dict[int, list[Hypothesis]] = {}
    while batch := list(islice(left, slots)):
        found |= search_batch(decoder, batch, SEARCHES[name], SPECIAL)
    return [found[key] for key in range(count)]


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize("subject", EXACT, indirect=True)
def test_a_search_finds_the_same_to_the_bit_in_any_batch(subject: Subject, name: str) -> None:
    # As text: a score that was not computed is NaN, which equals nothing.
    found = {repr(answers(subject.decoder, name, slots)) for slots in (20, 1, 7)}
    assert len(found) == 1


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize("subject", ["torch", "portable", "cpu-fp32"], indirect=True)
def test_a_search_finds_what_it_finds_in_float64(
    subject: Subject, architecture: str, name: str
) -> None:
    found = answers(subject.decoder, name, 9)
    if (architecture, name) not in TRUTH:  # the same for every decoder of the model
        TRUTH[architecture, name] = answers(subject.oracle, name, 9)
    truth = TRUTH[architecture, name]
    for one, other in zip(found, truth, strict=True):
        assert [item.tokens for item in one] == [item.tokens for item in other]
        assert [item.finish_reason for item in one] == [item.finish_reason for item in other]
        scores = [[item.score for item in row] for row in (one, other)]
        np.testing.assert_allclose(scores[0], scores[1], rtol=1e-4, atol=1e-5)
    assert {row[0].finish_reason for row in truth} == {"end", "length"}
    assert len({row[0].tokens for row in truth}) > 12, "the answers must tell rows apart"


@pytest.mark.parametrize("beam", [1, 3])
@pytest.mark.parametrize("subject", SERVED, indirect=True)
def test_threads_share_it(subject: Subject, beam: int) -> None:
    """Threads at work at once answer as one does."""
    batches = [random_rows([5 + number % 3, 2, 9, 1 + number], number) for number in range(8)]

    def generate(sources: Sequence[Sequence[int]]) -> list[list[Hypothesis]]:
        options = GenerationOptions(max_length=8, beam=beam, n_best=beam)
        return search(subject.decoder, sources, options, SPECIAL)

    expected = [generate(batch) for batch in batches]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(generate, batches)) == expected
