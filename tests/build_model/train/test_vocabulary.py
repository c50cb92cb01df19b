"""Training gives the size asked for and the same bytes each time; cutting loses no text."""

import hashlib
import os
from pathlib import Path

import pytest
import tiktoken
from tiktoken.registry import ENCODINGS

from tests.commands import python
from transferry.build_model.train.vocabulary import cut_encoding, train_bpe
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.tokenizer.byte_pair import Tokenizer

SENTENCES = [
    "A dog is running in the snow, and the dog's tail wags.",
    "Ein Hund rennt im Schnee, und der Schwanz des Hundes wedelt.",
    "Zwei Hunde rennen über die verschneite Straße; 1234 Schneeflocken fallen.",
    "Two dogs are running across the snowy street; 1234 snowflakes are falling.",
]
CORPUS = SENTENCES * 3

# Program of a second process, to see whether anything hangs on the order of a set.
SAVE_IN_ANOTHER_PROCESS = """
import sys
from pathlib import Path
from transferry.build_model.train.vocabulary import train_bpe
train_bpe(Path(sys.argv[1]).read_text().splitlines(), 340).save(Path(sys.argv[2]))
"""


@pytest.mark.parametrize("size", [259, 260, 300, 340])
def test_the_size_is_what_was_asked_for(size: int) -> None:
    tokenizer = train_bpe(CORPUS, size)
    assert tokenizer.vocabulary_size == size
    assert all(tokenizer.decode(tokenizer.encode(text)) == text for text in SENTENCES)


def test_more_tokens_mean_shorter_texts() -> None:
    lengths = [
        sum(map(len, train_bpe(CORPUS, size).encode_batch(CORPUS))) for size in (259, 300, 340)
    ]
    assert lengths[0] == sum(len(text.encode()) for text in CORPUS)
    assert lengths[0] > lengths[1] > lengths[2]


def test_the_first_merges_by_hand() -> None:
    # "ab" occurs 7 times, "abc" 4 times, " ab" 3 times; nothing else occurs twice.
    tokenizer = train_bpe(["abc", "abc ab", "abc ab", "abc ab"], 1000)
    assert [tokenizer.decode([token]) for token in range(259, tokenizer.vocabulary_size)] == [
        "ab",
        "abc",
        " ab",
    ]


def test_a_small_corpus_gives_fewer_tokens() -> None:
    assert train_bpe(["abc def ghi"], 5000).vocabulary_size == 259


def test_no_token_spans_two_words_or_more_than_three_digits() -> None:
    tokenizer = train_bpe(["in the snow 123456, in the snow 123456"] * 50, 5000)
    tokens = [tokenizer.decode([token]) for token in range(259, tokenizer.vocabulary_size)]
    assert " snow" in tokens
    assert "456" in tokens
    assert not [token for token in tokens if " " in token[1:] or "3456" in token]


def test_a_vocabulary_without_room_is_refused() -> None:
    with pytest.raises(UsageError, match=r"at least 259 .*found 258"):
        train_bpe(CORPUS, 258)


def test_the_same_lines_give_the_same_bytes_in_every_process(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.write_text("\n".join(CORPUS))
    digests = set()
    for seed in ("1", "2"):
        folder = tmp_path / seed
        folder.mkdir()
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        python("-c", SAVE_IN_ANOTHER_PROCESS, corpus, folder, env=environment)
        files = sorted(folder.iterdir())
        digests.add(hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest())
    assert len(digests) == 1


def small_encoding(name: str) -> tiktoken.Encoding:
    """Stands in for an encoding whose ranks would have to be downloaded."""
    trained = train_bpe(CORPUS, 340)
    ranks = {piece: rank for rank, piece in enumerate(trained._tokens)}
    return tiktoken.Encoding(
        name, pat_str=trained.pattern, mergeable_ranks=ranks, special_tokens={"<|end|>": 999}
    )


def test_a_cut_keeps_what_the_corpus_uses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(ENCODINGS, "o200k_base", small_encoding("o200k_base"))
    cut = cut_encoding("o200k_base", SENTENCES[:1])
    assert cut.kept_ranks is not None
    assert 259 < cut.vocabulary_size == 3 + len(cut.kept_ranks) < 340

    whole = Tokenizer("whole", cut.pattern, small_encoding("x")._mergeable_ranks)
    assert len(cut.encode(SENTENCES[0])) == len(whole.encode(SENTENCES[0]))
    assert len(cut.encode(SENTENCES[1])) > len(whole.encode(SENTENCES[1]))

    cut.save(tmp_path)
    for text in [*SENTENCES, "<|end|> 日本語"]:
        assert cut.decode(Tokenizer.load(tmp_path).encode(text)) == text


def test_an_unknown_encoding_is_refused() -> None:
    with pytest.raises(UsageError, match="cl100k_base, o200k_base, found 'gpt5'"):
        cut_encoding("gpt5", CORPUS)


def test_without_ranks_the_cache_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(url: str) -> bytes:
        raise ConnectionError(f"no route to {url}")

    monkeypatch.delitem(ENCODINGS, "o200k_base", raising=False)
    monkeypatch.setattr("tiktoken.load.read_file_cached", lambda url, hash: no_network(url))
    with pytest.raises(InputError, match=r"o200k_base: .*no route.*TIKTOKEN_CACHE_DIR"):
        cut_encoding("o200k_base", CORPUS)


def test_cl100k_cut_to_a_textbook(corpus_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts published for this text, and two of its sentences as cl100k_base spells them."""
    textbook = corpus_dir / "sales_textbook.txt"
    if not textbook.exists():
        pytest.skip(f"the textbook is absent: no {textbook}")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(corpus_dir / "tiktoken_cache"))
    text = textbook.read_text()
    cut = cut_encoding("cl100k_base", [text])
    ids = cut.encode(text)
    assert cut.kept_ranks is not None
    ranks = [cut.kept_ranks[token - cut.first_ordinary_id] for token in ids]
    assert (len(ranks), len(set(ranks)), max(ranks)) == (77_919, 3_771, 100_069)
    assert cut.decode(ids) == text
    assert ranks[:9] == [26072, 220, 16, 25, 17283, 23097, 403, 323, 17013]
