"""Opening, generating and refusals of an engine; test_any_batch.py has the batches."""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest

from tests.runtime.engine.searches import BEAM, GREEDY, SAMPLING, SEARCHES, Tokens
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.specs import Variant
from transferry.runtime.decoding.batching import BatchOptions
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.decoding.hypothesis import FinishReason
from transferry.runtime.decoding.search import search
from transferry.runtime.engine.engine import Engine, verify
from transferry.runtime.engine.pieces import PIECE, Whole, join
from transferry.runtime.engine.result import RowError
from transferry.runtime.engine.tasks.generate import GenerationResult, TextHypothesis
from transferry.runtime.engine.tasks.score import score
from transferry.runtime.errors import UsageError
from transferry.runtime.hardware import usable_cores
from transferry.runtime.io.lines import read_lines
from transferry.runtime.ort.portable_decoder import PortableDecoder
from transferry.runtime.ort.session import SessionOptions


def answers(results: Sequence[GenerationResult]) -> list[list[Tokens]]:
    return [[found.tokens for found in result.hypotheses] for result in results]


@SEARCHES
def test_a_result_is_what_the_search_finds(
    bundle: Bundle, engine: Engine, texts: list[str], options: GenerationOptions
) -> None:
    tokenizer, special = bundle.tokenizer, bundle.tokenizer.special
    reasons = set()
    results = list(engine.generate(texts, options, first_row=3))
    for row, (text, result) in enumerate(zip(texts, results, strict=True), start=3):
        source = [*tokenizer.encode(text), special.eos_id]
        (expected,) = search(engine.decoder, [source], options, special, row_ids=[row])
        assert (result.source, result.source_tokens, result.error) == (text, len(source), None)
        assert (result.text, result.truncated) == (result.hypotheses[0].text, False)
        for found, wanted in zip(result.hypotheses, expected, strict=True):
            assert vars(found) == {**vars(wanted), "text": tokenizer.decode(wanted.tokens)}
            assert not {special.bos_id, special.eos_id} & set(found.tokens)
            reasons.add(found.finish_reason)
    assert reasons == {"end", "length"}
    assert len(results[0].hypotheses) == options.n_best


def test_answers_without_scores_are_the_same(engine: Engine, texts: list[str]) -> None:
    scored = list(engine.generate(texts, GREEDY))
    unscored = list(engine.generate(texts, replace(GREEDY, scores=False)))
    assert answers(unscored) == answers(scored)
    found = [found for result in unscored for found in result.hypotheses]
    assert all(math.isnan(one.score) and math.isnan(one.log_probability) for one in found)
    assert unscored[0].record()["score"] is None


@pytest.mark.parametrize(
    "options",
    [
        GenerationOptions(max_length=8, min_length=5, no_repeat_ngram=1),
        GenerationOptions(max_length=8, scores=False),
        GenerationOptions(max_length=8, min_length=5, no_repeat_ngram=1, beam=4, n_best=4),
    ],
    ids=["greedy", "greedy without scores", "beam"],
)
def test_real_rows_in_place_are_the_same_bit_for_bit(
    fast_bundle_folder: Path, corpus_dir: Path, options: GenerationOptions
) -> None:
    """Scores as well, whether a row is alone or among many; tokens as the portable variant's."""
    lines = list(read_lines(corpus_dir / "multi30k" / "test_2016_flickr.en.gz"))
    assert len(lines) == 1000
    # Cut, since the small test model has few positions; a third, since this takes long.
    real_texts = [line[:40] for line in lines[::3]]
    found = []
    order = list(range(len(real_texts)))
    for number, (variant, rows) in enumerate(
        [("cpu-fp32", 64), ("cpu-fp32", 1), ("portable", 64), ("portable", 7)]
    ):
        random.Random(number).shuffle(order)
        batches = BatchOptions(rows=rows * options.beam, window=100)
        engine = Engine(fast_bundle_folder, variant=variant, replicas=2, batches=batches)
        results = list(engine.generate((real_texts[index] for index in order), options))
        assert [result.source for result in results] == [real_texts[index] for index in order]
        found.append(dict(zip(order, results, strict=True)))
    many, alone, portable, few = found
    # As text: a score that is not asked for is NaN, which equals nothing.
    assert [i for i in order if repr(many[i]) != repr(alone[i])] == []
    assert [i for i in order if repr(portable[i]) != repr(few[i])] == []
    tokens = [answers([each[i] for i in range(len(order))]) for each in (many, portable)]
    assert tokens[0] == tokens[1]
    assert len({row[0] for row in tokens[0]}) > len(order) / 10, "the answers must tell rows apart"


def test_bad_rows_are_errors_of_their_own(engine: Engine, texts: list[str]) -> None:
    mixed = ["", texts[0], " \t\u3000", texts[1], "word " * 5000]
    results = list(engine.generate(mixed, GREEDY))
    kinds = [result.error and result.error.kind for result in results]
    assert kinds == ["empty", None, "empty", None, "too-long"]
    long = results[-1]
    assert long.error is not None
    assert (long.hypotheses, long.text, long.target_tokens) == ((), "", 0)
    assert long.error.message == (
        f"at least {long.source_tokens} tokens, but the model has 64 positions; shorten or split "
        "the text"
    )
    assert long.record(n_best=2) == {
        "source": mixed[-1],
        "text": "",
        "finish_reason": "error",
        "error": long.error.record(),
        "source_tokens": long.source_tokens,
        "n_best": [],
    }


@pytest.fixture(scope="module")
def long_texts(texts: list[str]) -> list[str]:
    """Some short texts, and some of several sentences that no model position is left for."""
    generator = random.Random(5)
    long = [
        " ".join(f"{text.capitalize()}." for text in generator.sample(texts, count))
        for count in (9, 20, 5, 40)
    ]
    return [texts[3], long[0], long[1], texts[4], "", long[2], long[3], texts[5]]


def test_long_rows_are_cut_short_and_say_so(
    bundle: Bundle, engine: Engine, long_texts: list[str]
) -> None:
    plain = list(engine.generate(long_texts, BEAM))
    results = list(engine.generate(long_texts, BEAM, long_rows="truncate"))
    special, tokenizer = bundle.tokenizer.special, bundle.tokenizer
    cut = 0
    for text, one, result in zip(long_texts, plain, results, strict=True):
        if one.error is None or one.error.kind != "too-long":
            assert result == one
            continue
        source = [*tokenizer.encode(text)[:63], special.eos_id]
        (hypotheses,) = search(engine.decoder, [source], BEAM, special)
        assert answers([result]) == [[hypothesis.tokens for hypothesis in hypotheses]]
        assert (result.source, result.source_tokens, result.truncated) == (text, 64, True)
        assert (result.error, result.record()["truncated"]) == (None, True)
        cut += 1
    assert cut == 4


@pytest.mark.parametrize(
    "options", [GREEDY, replace(BEAM, n_best=1), replace(SAMPLING, n_best=1)], ids=str
)
def test_long_rows_are_answered_in_pieces(
    engine: Engine, long_texts: list[str], options: GenerationOptions
) -> None:
    texts = [*long_texts, " " * 700 + "q"]  # one piece, without white space around it
    results = list(engine.generate(texts, options, long_rows="split", first_row=7))
    reasons = set()
    for number, (text, result) in enumerate(zip(texts, results, strict=True), start=7):
        pieces = engine.preprocessor.pieces(text) or [text]
        single = [
            next(engine.generate([piece], options, first_row=number + place * PIECE))
            for place, piece in enumerate(pieces)
        ]
        assert result == join(Whole(text, len(pieces)), single, options.length_penalty)
        assert result.source == text
        reasons |= {found.finish_reason for found in result.hypotheses}
    assert sum(len(engine.preprocessor.pieces(text)) > 1 for text in long_texts) == 4
    assert "length" in reasons


def piece(text: str, reason: FinishReason, *tokens: int) -> GenerationResult:
    return GenerationResult("x", 3, (TextHypothesis(tokens, -1.5, -0.5, reason, text),))


def test_pieces_that_ended_join_to_an_answer_that_ended() -> None:
    ended, cut = piece("b", "end", 7, 8), piece("c", "length", 9)
    assert join(Whole("x y", 2), [ended, ended], 1.0) == GenerationResult(
        "x y", 6, (TextHypothesis((7, 8, 7, 8), -3.0, -3.0 / 6, "end", "b b"),)
    )
    unranked = [
        replace(each, hypotheses=(replace(each.hypotheses[0], score=-1.5),))
        for each in (cut, ended, piece("", "end"))
    ]
    assert join(Whole("x y", 3), unranked, 0.0) == GenerationResult(
        "x y", 9, (TextHypothesis((9, 7, 8), -4.5, -4.5, "length", "c b"),)
    )
    failed = GenerationResult("x", 3, error=RowError("not-finite", "NaN"))
    assert join(Whole("x y", 3), [ended, failed, failed], 1.0) == GenerationResult(
        "x y", 9, error=RowError("not-finite", "piece 2 of 3: NaN")
    )


def test_what_cannot_be_joined_is_not_split(engine: Engine, writer_bundle_folder: Path) -> None:
    with pytest.raises(UsageError, match="long_rows=split and n_best=4 exclude each other"):
        engine.generate([], BEAM, long_rows="split")
    with pytest.raises(UsageError, match="long_rows=split and a decoder-only bundle exclude"):
        Engine(writer_bundle_folder).generate([], GREEDY, long_rows="split")


def test_an_endless_stream_is_read_two_windows_ahead(bundle_folder: Path, texts: list[str]) -> None:
    window, read = 5, 0

    def endless() -> Iterator[str]:
        nonlocal read
        for text in itertools.cycle(texts):
            read += 1
            yield text

    batches = BatchOptions(rows=4, window=window)
    stream = Engine(bundle_folder, replicas=2, batches=batches).generate(endless(), GREEDY)
    assert read == 0
    for given, text in enumerate(itertools.islice(itertools.cycle(texts), 32)):
        assert next(stream).source == text
        assert read <= (given // window + 2) * window
    stream.close()


def test_every_device_is_opened(bundle_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    def open_here(bundle: Bundle, variant: Variant, options: SessionOptions) -> PortableDecoder:
        opened.append((options.provider, options.device_id))
        return PortableDecoder(bundle, variant, SessionOptions())

    monkeypatch.setattr("transferry.runtime.engine.opening.open_model", open_here)
    engine = Engine(bundle_folder, provider="cuda", device_ids=[2, 0])
    assert opened == [("cuda", 2), ("cuda", 0)]
    assert (engine.describe()["devices"], engine.replicas) == (2, 1)
    assert len(list(engine.generate(["a", "two"]))) == 2
    Engine(bundle_folder, SessionOptions("cuda", device_id=1))
    assert opened[2:] == [("cuda", 1)]


def test_load_opens_what_is_asked_for(bundle_folder: Path) -> None:
    engine = Engine(str(bundle_folder), SessionOptions(threads=2, optimisation="basic"))
    assert engine.replicas == max(1, usable_cores() // 2)
    engine = Engine(bundle_folder, engine.decoder.options, threads=1)
    assert (engine.decoder.options.threads, engine.decoder.options.optimisation) == (1, "basic")
    assert engine.replicas == usable_cores()
    assert engine.batches == BatchOptions()
    assert engine.default_options() == GenerationOptions(max_length=64)
    assert next(engine.generate(["two"])).text
    found = engine.describe()
    assert found.keys() >= {"transferry", "manifest_sha256", "replicas", "onnxruntime", "nodes"}
    assert (found["variant"], found["provider"]) == ("portable", "cpu")


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (lambda folder: Engine(folder, replicas=0), "replicas must be at least 1, found 0"),
        (lambda folder: Engine(folder, variant="int8"), "no variant 'int8'; it has portable"),
        (lambda folder: Engine(folder, variant=""), "no variant ''; it has portable"),
        (lambda folder: Engine("\ud800"), r"folder must be a path, found '\\ud800'"),
        (
            lambda folder: Engine(folder, require_signatures=1.0),  # type: ignore[arg-type]
            "require_signatures must be a whole number, found 1.0",
        ),
        (
            lambda folder: Engine(folder, require_certificate=np.array([1])),  # type: ignore[arg-type]
            "require_certificate must be str, found array",
        ),
        (
            lambda folder: Engine(folder, special_tokens=np.array([])),  # type: ignore[arg-type]
            "special_tokens must be str, found array",
        ),
        (
            lambda folder: verify(folder, options=5),  # type: ignore[arg-type]
            "options must be SessionOptions, found 5",
        ),
        (lambda folder: verify(folder, variant=["a"]), "variant must be str"),  # type: ignore[arg-type]
        (lambda _: verify(None), "folder must be a path, found None"),  # type: ignore[arg-type]
        (lambda folder: Engine(folder, threads=0), "threads must be 1 or more"),
        (lambda folder: Engine(folder, device_ids=[]), r"each of them once, found \[\]"),
        (lambda folder: Engine(folder, device_ids=[1, 1]), r"once, found \[1, 1\]"),
        (lambda folder: Engine(folder, device_ids=[0, 1]), "provider cpu is one device"),
    ],
)
def test_load_refuses(bundle_folder: Path, load: Callable[[Path], Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load(bundle_folder)


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        ("five", None, "texts must be several, such as a list, found 'five'"),
        (b"five", None, "texts must be several, such as a list, found b'five'"),
        (5, None, "texts must be several, such as a list, found 5"),
        ({"five": 5}, None, "texts must be several, such as a list, found {'five': 5}"),
        (np.array([["five"]]), None, "texts must be several, such as a list, found array"),
        (pyarrow.table({"t": ["five"]}), None, "such as a list, found a table; give one column"),
        (["five"], {"chat_template_kwargs": False}, "chat_template_kwargs must be a JSON object"),
        (["five"], {"temperature": Decimal("1.5")}, r"must be a number, found Decimal\('1.5'\)"),
        (["five"], {"stop": ["\ud800"]}, r"stop must be UTF-8, found '\\ud800'"),
        (["five"], {"first_row": -1}, "first_row must be a whole number of at least 0, found -1"),
        (["five"], {"first_row": 2**63}, "first_row must be a whole number of at most"),
    ],
)
def test_misuse_is_told_in_words(
    engine: Engine, texts: Any, options: dict[str, Any] | None, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        list(engine.generate(texts, **(options or {})))


def test_bytes_are_no_token_ids(engine: Engine) -> None:
    rows: Any = [b"five", bytearray(b"five")]
    found = [result.error and result.error.kind for result in engine.generate(rows)]
    assert found == ["no-text", "no-text"]


def test_pairs_are_several_too(engine: Engine) -> None:
    with pytest.raises(UsageError, match="pairs must be several"):
        score(engine, "five")
    (found,) = score(engine, [("five", 5)])  # type: ignore[list-item]
    assert found.error == RowError("no-text", "expected text in row 1, found 5")
    with pytest.raises(UsageError, match=r"expected pairs, .*, found 'ab'"):
        list(score(engine, ["ab"]))
