"""A text that is too long is refused uncounted, cut short, or cut into pieces that fit."""

import itertools
import random
import re
import sys
from dataclasses import replace

import pytest

from transferry.build_model.train.corpus import builtin_pairs
from transferry.build_model.train.vocabulary import train_bpe
from transferry.runtime.engine.preprocess import (
    Preprocessor,
    check_long_rows,
    checked_texts,
    sentences,
)
from transferry.runtime.engine.prompts import checked_prompts
from transferry.runtime.engine.result import RowError
from transferry.runtime.errors import UsageError
from transferry.runtime.tokenizer.byte_pair import Tokenizer
from transferry.runtime.tokenizer.special_tokens import PASSAGES, PROMPTS, SOURCES, SpecialTokens

LINES = [text for pair in builtin_pairs(200, seed=3) for text in pair]
POSITIONS = 24


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe(LINES, 400, SOURCES)


@pytest.fixture
def given() -> list[str]:
    """Texts given to the tokenizer."""
    return []


@pytest.fixture
def preprocessor(tokenizer: Tokenizer, given: list[str]) -> Preprocessor:
    def encode_batch(texts: list[str]) -> list[list[int]]:
        given.extend(texts)
        return tokenizer.encode_batch(texts)

    return Preprocessor(encode_batch, SOURCES, POSITIONS, tokenizer.longest_token)


def prose(seed: int, count: int) -> str:
    """Sentences of the corpus, with the white space that real text has between them."""
    generator = random.Random(seed)
    written = []
    for _ in range(count):
        sentence = generator.choice(LINES).capitalize() + generator.choice(".?!")
        written.append(sentence + generator.choice([" ", "  ", "\n", " \t "]))
    return "".join(written)


@pytest.mark.parametrize("special", [SOURCES, PROMPTS, PASSAGES])
def test_what_is_cut_short_begins_as_the_text_and_ends_as_any(
    preprocessor: Preprocessor, tokenizer: Tokenizer, special: SpecialTokens
) -> None:
    preprocessor = replace(preprocessor, special=special)
    for seed in range(50):
        text = prose(seed, 1 + seed)
        ids = tokenizer.encode(text)
        (row,) = preprocessor.encode([text], "truncate")
        room = POSITIONS - len(special.before) - len(special.after)
        assert row.ids == [*special.before, *ids[:room], *special.after]
        assert row.error is None
        assert row.truncated is (len(ids) > room)


def test_what_is_cut_short_leaves_room(preprocessor: Preprocessor, tokenizer: Tokenizer) -> None:
    text = prose(0, 20)
    (row,) = preprocessor.encode([text], "truncate", reserve=5)
    assert row.ids == [*tokenizer.encode(text)[: POSITIONS - 6], SOURCES.eos_id]
    for reserve in (POSITIONS - 1, POSITIONS, POSITIONS + 1):
        (row,) = preprocessor.encode([text], "truncate", reserve)
        assert row.error is not None, "nothing of the text would be left"
        assert (row.error.kind, row.ids, row.truncated) == ("too-long", (), False)


@pytest.mark.parametrize("unit", ["word ", "x", " ", "\N{GRINNING FACE}", "東京"])
def test_a_megabyte_is_not_tokenised(
    preprocessor: Preprocessor, tokenizer: Tokenizer, given: list[str], unit: str
) -> None:
    text = unit * (1_000_000 // len(unit)) + "."
    error, short = preprocessor.encode([text])[0], preprocessor.encode([text], "truncate")[0]
    assert error.error is not None
    assert error.error.kind == "too-long"
    assert error.error.message == (
        f"at least {error.tokens} tokens, but the model has 24 positions; shorten or split the text"
    )
    assert POSITIONS < error.tokens <= len(tokenizer.encode(text)) + 1
    assert short.error is None
    assert short.truncated
    assert short.ids == [*tokenizer.encode(text)[: POSITIONS - 1], SOURCES.eos_id]
    assert sum(map(len, given)) <= POSITIONS * tokenizer.longest_token


def test_what_is_counted_and_what_is_not_meet(
    preprocessor: Preprocessor, tokenizer: Tokenizer
) -> None:
    """Around the length from which on a text must be too long, one is refused either way."""
    limit = POSITIONS * tokenizer.longest_token
    counted, uncounted = preprocessor.encode(["x" * limit, "x" * (limit + 1)])
    assert counted.error is not None
    assert uncounted.error is not None
    assert counted.error.message.startswith(f"{counted.tokens} tokens, ")
    assert uncounted.error.message.startswith(f"at least {uncounted.tokens} tokens, ")


def test_a_tokenizer_that_drops_text_is_always_asked(given: list[str]) -> None:
    def encode_batch(texts: list[str]) -> list[list[int]]:
        given.extend(texts)
        return [[7] * len(text.split()) for text in texts]

    text = "a" + " " * 1_000_000 + "b"
    (row,) = Preprocessor(encode_batch, SOURCES, POSITIONS).encode([text])
    assert (row.ids, row.error, given) == ([7, 7, SOURCES.eos_id], None, [text])


def test_blank_rows_and_errors_stay_what_they_are(preprocessor: Preprocessor) -> None:
    broken = RowError("undecodable", "byte 3")
    for long_rows in ("error", "truncate", "split"):
        blank, error, good = preprocessor.encode([" " * 1_000_000, broken, "a"], long_rows)
        assert blank.error is not None
        assert (blank.error.kind, error.error, good.error) == ("empty", broken, None)


def fits(preprocessor: Preprocessor, text: str) -> bool:
    return preprocessor.encode([text])[0].error is None


def spoken(text: str) -> str:
    return re.sub(r"\s+", "", text)


@pytest.mark.parametrize("seed", range(20))
def test_pieces_are_sentences_as_far_as_they_fit(preprocessor: Preprocessor, seed: int) -> None:
    text = prose(seed, 30)
    pieces = preprocessor.pieces(text)
    assert all(fits(preprocessor, piece) for piece in pieces)
    assert spoken("".join(pieces)) == spoken(text)
    whole = [sentence.strip() for sentence in sentences(text)]
    longest = [sentence for sentence in whole if not fits(preprocessor, sentence)]
    if not longest:
        assert all(piece.endswith((".", "?", "!")) for piece in pieces)
        for piece, after in itertools.pairwise(pieces):
            following = next(sentence for sentence in whole if after.startswith(sentence))
            assert not fits(preprocessor, f"{piece} {following}"), "it would have fitted in"
    assert any(len(sentences(piece)) > 1 for piece in pieces)


def test_a_sentence_that_does_not_fit_is_cut_at_white_space(preprocessor: Preprocessor) -> None:
    words = [word for line in LINES[:40] for word in line.split()]
    pieces = preprocessor.pieces(f"Short. {' '.join(words)}. Short.")
    assert all(fits(preprocessor, piece) for piece in pieces)
    assert [word for piece in pieces for word in piece.split()] == [
        "Short.",
        *words[:-1],
        f"{words[-1]}.",
        "Short.",
    ]
    assert len(pieces) > 3


@pytest.mark.parametrize("unit", ["x", "qz7", "東京", "\N{GRINNING FACE}"])
def test_a_word_that_does_not_fit_is_cut_at_characters(
    preprocessor: Preprocessor, unit: str
) -> None:
    text = f"Short. {unit * 500} and so on."
    pieces = preprocessor.pieces(text)
    assert all(fits(preprocessor, piece) for piece in pieces)
    assert spoken("".join(pieces)) == spoken(text)


def test_what_fits_is_one_piece(preprocessor: Preprocessor) -> None:
    assert preprocessor.pieces(" a. b. ") == ["a. b."]
    alone = (f"{line.capitalize()}." for line in LINES)
    sentence = next(
        each
        for each in alone
        if fits(preprocessor, each) and not fits(preprocessor, f"{each} {each}")
    )
    assert preprocessor.pieces(f"{sentence} " * 3) == [sentence] * 3


def test_parts_that_have_more_tokens_together_are_cut_again() -> None:
    """No tokenizer promises that a text has no more tokens than its parts."""

    def encode_batch(texts: list[str]) -> list[list[int]]:
        return [[7] * (len(text.split()) ** 2) for text in texts]

    preprocessor = Preprocessor(encode_batch, SOURCES, POSITIONS)
    words = [f"w{number}" for number in range(60)]
    pieces = preprocessor.pieces(" ".join(words))
    assert all(fits(preprocessor, piece) for piece in pieces)
    assert " ".join(pieces).split() == words


def test_a_separator_is_an_error_only_where_the_model_reads_it() -> None:
    def encode_batch(texts: list[str]) -> list[list[int]]:
        return [list(map(int, text.split())) for text in texts]

    special = SpecialTokens(pad_id=0, bos_id=1, eos_id=2, after=(2,))
    texts, expected = ["5 6", "5 2 6", "5 6 7 8 2", "2 5 6 7 8"], [None, "tokenizer"] * 2
    rows = Preprocessor(encode_batch, special, 5, separator=2).encode(texts, "truncate")
    assert [row.error and row.error.kind for row in rows] == expected
    assert [row.ids for row in rows] == [[5, 6, 2], (), [5, 6, 7, 8, 2], ()]
    rows = Preprocessor(encode_batch, special, 5).encode(texts, "truncate")
    assert not any(row.error for row in rows)


@pytest.mark.parametrize("text", ["x", "", "  ", "a. \udead b."])
def test_sentences_lose_nothing(text: str) -> None:
    assert "".join(sentences(text)) == text.replace("\udead", "\ufffd")


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    check_long_rows("split")
    with pytest.raises(UsageError, match="must be one of error, truncate, split, found 'shorten'"):
        check_long_rows("shorten")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="long_rows=split and n_best=2 exclude each other"):
        check_long_rows("split", "n_best=2")
    for long_rows in ("error", "truncate"):
        check_long_rows(long_rows, "n_best=2")
    monkeypatch.setitem(sys.modules, "sentencex", None)
    with pytest.raises(UsageError, match=r'needs sentencex.*pip install .*\[sentences\]"'):
        check_long_rows("split")


def test_a_row_that_is_no_text_is_an_error() -> None:
    """A pair passes only where a task reads pairs; a list without entries is no chat."""
    error = RowError("no-text", "expected text in row 1, found ('a', 'b')")
    assert [*checked_texts([("a", "b"), "c"])] == [error, "c"]
    assert [*checked_texts([("a", "b")], pairs=True)] == [("a", "b")]
    error = RowError("prompt", "expected messages or token ids in row 1, found none")
    assert [*checked_prompts([[]])] == [error]
