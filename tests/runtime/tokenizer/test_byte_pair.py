"""Any text survives, special tokens never come from data, and broken files are refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from transferry.runtime.errors import InputError
from transferry.runtime.tokenizer.byte_pair import (
    CL100K_PATTERN,
    GPT2_PATTERN,
    O200K_PATTERN,
    SINGLE_BYTES,
    SOURCES,
    WORD_PATTERN,
    Tokenizer,
)

# The blanks as in o200k_base, where a long run of them overflows tiktoken's regex engine.
PATTERN = r" ?\p{L}+|[^\s\p{L}]+|\s+(?!\S)|\s+"
MERGES = [b"an", b"na", b"anna", b" a", b"bc", b"abc", b"<|", b"|>"]
RANKS = {token: rank for rank, token in enumerate([*SINGLE_BYTES, *MERGES])}
ANNA, BC, ABC = (RANKS[token] for token in (b"anna", b"bc", b"abc"))
KEPT = [*range(256), ANNA, ABC]

TEXTS = [
    *("", "anna", " anna  abc bc ", "<|endoftext|> <s> </s> <pad> [BOS]"),
    "Zoë, 日本語, עברית, हिन्दी, 👩‍👩‍👧‍👦, 𝔘𝔫𝔦",
    "e\u0301 \u00e9 \ufeff \u2028 \x00 \x1f \r\n\t \U0010ffff \uffff",
]


@pytest.fixture(params=[None, KEPT], ids=["whole", "cut"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer("test", PATTERN, RANKS, request.param)


def test_ids_by_hand() -> None:
    """A cut renumbers what is kept, and spells the rest by bytes."""
    whole = Tokenizer("test", PATTERN, RANKS)
    assert whole.vocabulary_size == 3 + 256 + len(MERGES)
    assert whole.encode("anna") == [3 + ANNA]
    assert whole.encode("abcbc") == [3 + ABC, 3 + BC]
    cut = Tokenizer("test", PATTERN, RANKS, KEPT)
    assert cut.vocabulary_size == 3 + 256 + 2
    # The words fall apart as in the whole encoding, "abc" and "bc": only "bc" has no id.
    assert cut.encode("abcbc") == [3 + 257, 3 + ord("b"), 3 + ord("c")]
    assert cut.encode("anna") == [3 + 256]


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(3 <= token_id < tokenizer.vocabulary_size for token_id in ids)


def test_no_token_is_longer_than_the_longest(tokenizer: Tokenizer) -> None:
    assert tokenizer.longest_token == 4
    assert len(tokenizer.encode("anna" * 100)) == 100
    for text in TEXTS:
        assert len(text) <= len(tokenizer.encode(text)) * tokenizer.longest_token


@pytest.mark.parametrize("pattern", [WORD_PATTERN, GPT2_PATTERN, CL100K_PATTERN, O200K_PATTERN])
def test_no_pattern_drops_a_character(pattern: str) -> None:
    """Each alone, where no neighbour can help it into a word."""
    made = Tokenizer("test", pattern, RANKS)
    for code in [*range(0xD800), *range(0xE000, 0x110000, 97)]:
        assert made.decode(made.encode(chr(code))) == chr(code)


def test_every_character_survives(tokenizer: Tokenizer) -> None:
    everything = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000)]))
    assert tokenizer.decode(tokenizer.encode(everything)) == everything


@pytest.mark.parametrize("run", [" ", "\u3000", "a"])
def test_a_long_run_does_not_abort(tokenizer: Tokenizer, run: str) -> None:
    text = run * 1_200_000
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_batch_is_one_by_one(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]


def test_special_ids_decode_to_nothing_and_half_a_character_to_the_replacement(
    tokenizer: Tokenizer,
) -> None:
    special = tokenizer.special
    ids = [special.bos_id, *tokenizer.encode("anna"), special.eos_id, special.pad_id]
    assert tokenizer.decode(ids) == "anna"
    assert tokenizer.decode(tokenizer.encode("é")[:1]) == "\ufffd"


def test_save_and_load(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    loaded = Tokenizer.load(tmp_path)
    assert loaded.encode_batch(TEXTS) == tokenizer.encode_batch(TEXTS)
    assert loaded.vocabulary_size == tokenizer.vocabulary_size
    loaded.save(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == first
    assert first.keys() == {"tokenizer.json", "ranks.tiktoken"}


def test_settings_of_before_there_were_several_end_tokens_load(tmp_path: Path) -> None:
    several = replace(SOURCES, more_ends=(7, 5))
    for ends in ((7, 5), ()):
        Tokenizer("test", PATTERN, RANKS, special=replace(several, more_ends=ends)).save(tmp_path)
        path = tmp_path / "tokenizer.json"
        if not ends:
            settings = json.loads(path.read_text())
            del settings["special"]["more_ends"]
            path.write_text(json.dumps(settings))
        assert Tokenizer.load(tmp_path).special.ends == (2, *ends)


def test_saving_again_to_the_same_folder_is_not_cached(tmp_path: Path) -> None:
    Tokenizer("old", PATTERN, RANKS).save(tmp_path)
    Tokenizer.load(tmp_path)
    bytes_only = Tokenizer("new", PATTERN, {token: RANKS[token] for token in SINGLE_BYTES})
    bytes_only.save(tmp_path)
    assert Tokenizer.load(tmp_path).vocabulary_size == 3 + 256


def test_saving_where_there_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"missing/ranks\.tiktoken"):
        Tokenizer("test", PATTERN, RANKS).save(tmp_path / "missing")


def require_refusal(folder: Path, name: str, edit: Callable[[bytes], bytes], message: str) -> None:
    """Requires that a saved tokenizer whose file `name` was edited is refused."""
    Tokenizer("test", PATTERN, RANKS, KEPT).save(folder)
    (folder / name).write_bytes(edit((folder / name).read_bytes()))
    with pytest.raises(InputError, match=message):
        Tokenizer.load(folder)


def change(**values: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda settings: {**settings, **values}


def special(**values: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda settings: {**settings, "special": settings["special"] | values}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (change(format_version=2), r"tokenizer\.json: expected format version 1, found 2"),
        (change(format_version=True), r"tokenizer\.json: expected format version 1, found True"),
        (special(eos_id=3), "outside of the ordinary ones, 3 to 260, found 3"),
        (special(more_ends=(-1,)), r"Expected `int` >= 0 - at `\$.more_ends"),
        (special(eos_id=-1), r"Expected `int` >= 0 - at `\$.eos_id"),
        (special(longest=-1), r"Expected `int` >= 0 - at `\$.longest"),
        (special(texts={"<s>": -1}), r"Expected `int` >= 0 - at `\$.texts"),
        (special(pad_id="0"), r"Expected `int`, got `str` - at `\$.pad_id`"),
        (special(bos_id=None), r"Expected `int`, got `null` - at `\$.bos_id`"),
        (special(texts=None), r"Expected `object`, got `null` - at `\$.texts`"),
        (special(languages={"eng_Latn": "4"}), r"Expected `int`, got `str` - at `\$.languages"),
        (special(other=3), "inconsistent"),
        (change(special={"pad_id": 0}), "the special tokens' after, found none"),
        (change(first_ordinary_id=2), "outside of the ordinary ones, 2 to 259, found 2"),
        (change(first_ordinary_id="3"), "a first id of at least 0, found '3'"),
        (change(first_ordinary_id=-300), "a first id of at least 0, found -300"),
        (change(special=[0, 1, 2]), "inconsistent"),
        (change(pattern="(unclosed"), r"expected a regular expression .* found '\(unclosed'"),
        (change(pattern=""), r"expected a regular expression .* found ''"),
        (change(pattern=7), "inconsistent"),
        (change(kept_ranks=[*KEPT, 999]), "from 0 to 263, found 0 to 999"),
        (change(kept_ranks=[-1, *KEPT]), "from 0 to 263, found -1 to"),
        (change(kept_ranks=[*KEPT, ANNA]), "out of order"),
        (change(kept_ranks=[*range(1, 256), ANNA]), "single bytes to be kept, found rank 0"),
        (change(kept_ranks=[]), "single bytes to be kept, found rank 0"),
        (change(kept_ranks=["a", "b"]), "inconsistent"),
        (change(kept_ranks=3), "inconsistent"),
        (lambda _: {"format_version": 1}, "expected the key 'special'"),
        (lambda _: [1, 2], "Expected `object`, got `array`"),
    ],
)
def test_broken_settings_are_refused(
    tmp_path: Path, edit: Callable[[dict[str, Any]], Any], message: str
) -> None:
    def edited(content: bytes) -> bytes:
        return json.dumps(edit(json.loads(content))).encode()

    require_refusal(tmp_path, "tokenizer.json", edited, message)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda lines: [*lines[:-1], b"!!!! 263"], "line 264: expected a base64 token"),
        (lambda lines: [*lines[:-1], b"fD4="], "line 264: .*found b'fD4='"),
        (lambda lines: [*lines[:-1], b"fD4= x"], "line 264: expected a base64 token"),
        (lambda lines: [*lines[:-1], b"fD4= 300"], "expected the 264 ranks 0 to 263, found gaps"),
        (lambda lines: [*lines, lines[-1]], "line 265: .*has rank 263 already"),
        (lambda lines: [b"enp6 0", *lines[1:]], "256 single bytes, found none for b'.x00'"),
        (lambda lines: [], "256 single bytes"),
        (lambda lines: lines[:258], "kept ranks from 0 to 257"),
    ],
)
def test_broken_ranks_are_refused(
    tmp_path: Path, edit: Callable[[list[bytes]], list[bytes]], message: str
) -> None:
    def edited(content: bytes) -> bytes:
        return b"".join(line + b"\n" for line in edit(content.splitlines()))

    require_refusal(tmp_path, "ranks.tiktoken", edited, message)


def test_cut_short_settings_are_refused(tmp_path: Path) -> None:
    message = r"tokenizer\.json is not JSON"
    require_refusal(tmp_path, "tokenizer.json", lambda content: content[:40], message)
