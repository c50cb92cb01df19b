"""Answers from a shortlist: the lists, the search on them, and that no row sees another's list."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import make_bundle, make_run
from tests.runtime.listed import Listed
from tests.runtime.test_search import EOS, SPECIAL, FakeDecoder, Logits, SentenceFake, Tokens
from tests.runtime.test_search import random_model as unlisted_model
from transferry.runtime.bundle import SHORTLIST, Bundle
from transferry.runtime.decoder import SentenceDecoder
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.hypothesis import FAILED, Hypothesis
from transferry.runtime.logits import log_sum_exp
from transferry.runtime.model import open_model
from transferry.runtime.options import GenerationOptions
from transferry.runtime.outputs import Request
from transferry.runtime.search import search, search_stream
from transferry.runtime.session import SessionOptions
from transferry.runtime.shortlist import ListedDecoder, Shortlist, log_sum_exp_of_parts
from transferry.runtime.tokenizer import SOURCES

VOCABULARY = 40
MODEL = unlisted_model(VOCABULARY, end=1.0)
SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy without scores": {"scores": False},
    "beam 4": {"beam": 4, "n_best": 4},
    "long beams": {"beam": 3, "early_stopping": False, "length_penalty": 0.0},
    "samples": {"sample": True, "n_best": 3, "seed": 7},
    "top k": {"sample": True, "n_best": 2, "top_k": 4, "temperature": 1.5},
    "nucleus": {"sample": True, "n_best": 2, "top_p": 0.7},
    "processors": {"beam": 2, "min_length": 4, "no_repeat_ngram": 1, "suppress": (5, 30, 31)},
}


def options_of(name: str, **more: Any) -> GenerationOptions:
    return GenerationOptions(**{"max_length": 9, **SEARCHES[name], **more})


def random_shortlist(vocabulary: int, frequent: int, likeliest: int) -> Shortlist:
    rng = np.random.default_rng(4)
    return Shortlist(
        np.sort(rng.choice(np.arange(3, vocabulary), frequent, replace=False)),
        rng.integers(3, vocabulary, (vocabulary, likeliest)),
    )


SOURCE_IDS = [
    np.random.default_rng(number).integers(3, VOCABULARY, 1 + number % 4).tolist()
    for number in range(40)
]
TABLE = random_shortlist(VOCABULARY, 3, 2)


def lists(sources: Sequence[Sequence[int]], table: Shortlist = TABLE) -> list[set[int]]:
    """The list of each source, said in another way."""
    return [
        {EOS, *table.frequent.tolist(), *table.likeliest[list(source)].ravel().tolist()}
        for source in sources
    ]


def masked(source: Tokens, history: Tokens) -> Logits:
    """The model, all else than the source's list at minus infinity."""
    logits = np.full(VOCABULARY, -np.inf)
    (allowed,) = lists([source])
    logits[sorted(allowed)] = MODEL(source, history)[sorted(allowed)]
    return logits


# The lists


def test_a_list_has_what_is_frequent_and_likely_and_the_end_and_the_prefix() -> None:
    table = Shortlist(np.array([7], np.uint8), np.array([[3, 4]] * 5 + [[8, 9], [9, 5]] * 3))
    allowed = table.allowed([[5, 6], [0]], [[], [10, 1]], eos_id=2)
    assert [np.flatnonzero(row).tolist() for row in allowed] == [
        [2, 5, 7, 8, 9],
        [1, 2, 3, 4, 7, 10],
    ]


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    TABLE.save(tmp_path / "a")
    found = Shortlist.load(tmp_path / "a")
    np.testing.assert_array_equal(found.frequent, TABLE.frequent)
    np.testing.assert_array_equal(found.likeliest, TABLE.likeliest)
    TABLE.save(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"frequent": np.array([1])}, "likeliest"),
        ({"frequent": np.array([[1]]), "likeliest": np.array([[0], [1]])}, "other dimensions"),
        ({"frequent": np.array([2]), "likeliest": np.array([[0], [1]])}, "that there are not"),
        ({"frequent": np.array([1]), "likeliest": np.array([[0], [2]])}, "that there are not"),
    ],
)
def test_a_damaged_file_is_refused(
    tmp_path: Path, arrays: dict[str, np.ndarray[Any, Any]], message: str
) -> None:
    path = tmp_path / "shortlist.npz"
    np.savez(path, **arrays)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=f"is not a bundle's shortlist .*{message}.*; export"):
        Shortlist.load(path)
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(InputError, match="is not a bundle's shortlist"):
        Shortlist.load(path)


def test_a_bit_that_says_it_is_encrypted_is_refused(tmp_path: Path) -> None:
    """For which zipfile raises what it raises for nothing else."""
    path = tmp_path / "shortlist.npz"
    TABLE.save(path)
    content = bytearray(path.read_bytes())
    content[content.rindex(b"PK\x01\x02") + 8] |= 1  # the flags of a file in the directory
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"is not a bundle's shortlist .*encrypted.*; export"):
        Shortlist.load(path)


# The search


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize("kind", [FakeDecoder, SentenceFake])
def test_answers_are_those_of_a_model_that_knows_nothing_else(
    name: str, kind: type[FakeDecoder]
) -> None:
    found = search(
        kind(MODEL, VOCABULARY),
        SOURCE_IDS,
        options_of(name, shortlist=True),
        SPECIAL,
        shortlist=TABLE,
    )
    expected = search(FakeDecoder(masked, VOCABULARY), SOURCE_IDS, options_of(name), SPECIAL)
    for one, other, allowed in zip(found, expected, lists(SOURCE_IDS), strict=True):
        assert [item.tokens for item in one] == [item.tokens for item in other]
        assert [item.finish_reason for item in one] == [item.finish_reason for item in other]
        scores = [[item.score for item in row] for row in (one, other)]
        np.testing.assert_allclose(scores[0], scores[1], rtol=1e-5)
        assert {token for item in one for token in item.tokens} <= allowed
    free = search(FakeDecoder(MODEL, VOCABULARY), SOURCE_IDS, options_of(name), SPECIAL)
    assert [row[0].tokens for row in free] != [row[0].tokens for row in found]


@pytest.mark.parametrize("name", SEARCHES)
def test_a_list_of_all_tokens_changes_nothing(name: str) -> None:
    every = Shortlist(np.arange(VOCABULARY), np.zeros((VOCABULARY, 1), np.int64))
    options = options_of(name, shortlist=True)
    found = search(FakeDecoder(MODEL, VOCABULARY), SOURCE_IDS, options, SPECIAL, shortlist=every)
    expected = search(FakeDecoder(MODEL, VOCABULARY), SOURCE_IDS, options_of(name), SPECIAL)
    assert [[item.tokens for item in row] for row in found] == [
        [item.tokens for item in row] for row in expected
    ]


@pytest.mark.parametrize("name", ["greedy", "beam 4", "samples"])
def test_a_prefix_that_is_on_no_list_is_kept(name: str) -> None:
    prefix = sorted(set(range(3, VOCABULARY)) - lists(SOURCE_IDS[:1])[0])[:2]
    requests = [Request(0, SOURCE_IDS[0], 9, prefix), Request(1, SOURCE_IDS[1], 9)]
    found = dict(stream(FakeDecoder(MODEL, VOCABULARY), requests, name, 2, TABLE))
    (own, other) = lists(SOURCE_IDS[:2])
    for item in found[0]:
        assert list(item.tokens[:2]) == prefix
        assert set(item.tokens) <= own | set(prefix)
        assert np.isfinite(item.score)
    assert all(set(item.tokens) <= other for item in found[1])


def test_a_token_to_suppress_may_be_on_no_list() -> None:
    (own,) = lists(SOURCE_IDS[:1])
    absent = max(set(range(VOCABULARY)) - own)
    options = GenerationOptions(max_length=5, shortlist=True, suppress=(absent, min(own - {EOS})))
    (found,) = search(
        FakeDecoder(MODEL, VOCABULARY), SOURCE_IDS[:1], options, SPECIAL, shortlist=TABLE
    )
    assert set(found[0].tokens) <= own - set(options.suppress)


def test_without_a_table_or_a_source_a_shortlist_is_refused() -> None:
    decoder = FakeDecoder(MODEL, VOCABULARY)
    options = GenerationOptions(shortlist=True)
    with pytest.raises(UsageError, match="found no table; leave shortlist out"):
        search(decoder, [[5]], options, SPECIAL)
    decoder.has_encoder = False
    with pytest.raises(UsageError, match="found no source; leave shortlist out"):
        search(decoder, [[5]], options, SPECIAL, shortlist=TABLE)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("beam", [1, 3])
def test_a_score_that_is_no_number_counts_where_it_is_listed(value: float, beam: int) -> None:
    first, second = lists(SOURCE_IDS[:2])
    token = min(second - first)

    def broken(source: Tokens, history: Tokens) -> Logits:
        logits = MODEL(source, history).copy()
        logits[token] = value
        return logits

    options = GenerationOptions(max_length=6, beam=beam, shortlist=True)
    (found, failed), (expected, _) = (
        search(FakeDecoder(model, VOCABULARY), SOURCE_IDS[:2], options, SPECIAL, shortlist=TABLE)
        for model in (broken, MODEL)
    )
    assert found == expected
    assert failed == [FAILED]


def test_a_cache_is_shared_where_the_decoder_shares_it() -> None:
    allowed = TABLE.allowed([[5]], [[]], EOS)
    for kind in (FakeDecoder, SentenceFake):
        listed = ListedDecoder(kind(MODEL, VOCABULARY), allowed, SPECIAL.bos_id)
        assert isinstance(listed, SentenceDecoder) == (kind is SentenceFake)


# No row sees another's list


def stream(
    decoder: Any, requests: Sequence[Request[int]], name: str, slots: int, table: Shortlist
) -> list[tuple[int, list[Hypothesis]]]:
    options = options_of(name, shortlist=True)
    supply = Listed(list(requests))
    return list(search_stream(decoder, supply, options, SPECIAL, slots=slots, shortlist=table))


def test_sums_are_the_same_bit_for_bit_whatever_lies_around() -> None:
    rng = np.random.default_rng(0)
    parts = [
        (rng.normal(size=size) * 5).astype(np.float32)
        for size in (*range(1, 40), *range(120, 140), 400, 1000, 3000)
    ]
    alone = [log_sum_exp_of_parts(part, np.zeros(1, np.int64))[0] for part in parts]
    expected = [log_sum_exp(part[None].astype(np.float64))[0] for part in parts]
    np.testing.assert_allclose(alone, expected, rtol=1e-12)
    for _ in range(20):
        order = rng.permutation(len(parts))
        lengths = np.array([len(parts[place]) for place in order])
        values = np.concatenate([parts[place] for place in order])
        found = log_sum_exp_of_parts(values, np.cumsum(lengths) - lengths)
        np.testing.assert_array_equal(found, np.array(alone)[order])
    bad = np.array([0, np.nan, 1, -np.inf, 2, np.inf, 3, -np.inf, 0])
    found = log_sum_exp_of_parts(bad, np.array([0, 1, 3, 5, 7]))
    assert np.isnan(found).tolist() == [False, True, False, True, False]
    assert found[[0, 2, 4]].tolist() == [0, 2, 0]


WIDE = random_shortlist(400, 12, 6)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """As wide as a model must be for onnxruntime to sum up products of few columns otherwise."""
    folder = tmp_path_factory.mktemp("wide")
    run = make_run(folder / "run", SOURCES, d_model=256, decoder_layers=1)
    return Bundle.load(make_bundle(run, folder / "bundle", "cpu-fp32", shortlist=True))


def opened(bundle: Bundle, variant: str, threads: int = 1) -> Any:
    return open_model(bundle, bundle.variant(variant), SessionOptions(threads=threads))


def random_rows(count: int, longest: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 390, rng.integers(1, longest + 1)).tolist() for _ in range(count)]


@pytest.mark.parametrize("name", SEARCHES)
def test_the_fused_decoder_answers_as_the_portable_one(bundle: Bundle, name: str) -> None:
    rows = random_rows(40, 12, 5)  # no two scores tie where it counts
    found, expected = (
        search(
            opened(bundle, variant),
            rows,
            options_of(name, shortlist=True),
            SPECIAL,
            shortlist=WIDE,
        )
        for variant in ("cpu-fp32", "portable")
    )
    for one, other, allowed in zip(found, expected, lists(rows, WIDE), strict=True):
        assert [item.tokens for item in one] == [item.tokens for item in other]
        scores = [[item.score for item in row] for row in (one, other)]
        np.testing.assert_allclose(scores[0], scores[1], rtol=1e-4, atol=1e-5)
        assert {token for item in one for token in item.tokens} <= allowed
    assert len({row[0].tokens for row in found}) > 10, "the answers must tell rows apart"


@pytest.mark.parametrize(
    ("variant", "name", "threads"),
    [
        *(("cpu-fp32", name, 1) for name in SEARCHES),
        ("cpu-fp32", "greedy", 2),
        *(("portable", name, 1) for name in ("greedy", "beam 4", "samples")),
    ],
)
def test_a_row_is_answered_the_same_bit_for_bit_in_any_batch(
    bundle: Bundle, variant: str, name: str, threads: int
) -> None:
    decoder = opened(bundle, variant, threads)
    rng = np.random.default_rng(1)
    rows = random_rows(64, 9, 3)
    answers = []
    for slots in (64, 1, 2, 5, 20):
        requests = [Request(key, rows[key], 9, row_id=key) for key in rng.permutation(64)]
        found = stream(decoder, requests, name, slots, WIDE)
        answers.append({key: repr(hypotheses) for key, hypotheses in found})
    assert answers[1:] == answers[:1] * 4


def test_threads_share_it(bundle: Bundle) -> None:
    decoder = opened(bundle, "cpu-fp32")
    batches = [random_rows(1 + number % 7, 12, number) for number in range(16)]

    def generate(sources: Sequence[Sequence[int]]) -> list[list[Hypothesis]]:
        options = options_of("beam 4", shortlist=True)
        return search(decoder, sources, options, SPECIAL, shortlist=WIDE)

    expected = [generate(batch) for batch in batches]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(generate, batches)) == expected


def test_a_bundle_has_it_among_its_files(bundle: Bundle, bundle_folder: Path) -> None:
    assert Shortlist.of(bundle).likeliest.shape[0] == 400
    assert SHORTLIST in bundle.manifest.files
    with pytest.raises(UsageError, match="has none; export it again with --shortlist"):
        Shortlist.of(Bundle.load(bundle_folder))
