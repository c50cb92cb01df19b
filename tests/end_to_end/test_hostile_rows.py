"""A text that a tokenizer cannot take is an error of its row; every job ends with all rows."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.commands import call
from tests.conftest import Once, make_bundle, make_run
from tests.runtime.tokenizer.vocabularies import sentencepiece_model
from transferry.build_model.checkpoint import save_samples
from transferry.runtime.engine.preprocess import Preprocessor
from transferry.runtime.engine.prompts import Prompt, encode_prompt
from transferry.runtime.engine.tasks.heads import encode_pairs
from transferry.runtime.tokenizer.byte_pair import (
    O200K_PATTERN,
    PASSAGES,
    SINGLE_BYTES,
    AnyTokenizer,
    Tokenizer,
)
from transferry.runtime.tokenizer.chat import ChatTemplate
from transferry.runtime.tokenizer.third_party import (
    HuggingFaceTokenizer,
    SentencePiecePair,
    SentencePieceTokenizer,
)

tokenizers = pytest.importorskip("tokenizers", reason="an extra, which is not installed")
pytest.importorskip("sentencepiece", reason="an extra, which is not installed")

# Backtracks without end on a run of x without y.
CATASTROPHIC = r"(x+x+)+y|\S+"
SENTENCES = ["the cat sat on the mat", "a dog ran over the hill"]


def word_level(pattern: str = CATASTROPHIC) -> HuggingFaceTokenizer:
    """Words of a closed list, without an unknown token."""
    words = {name: number for number, name in enumerate(("<pad>", "<s>", "</s>", "<mask>"))}
    words |= {word: len(words) + place for place, word in enumerate(("a", "b", "x", "\x00"))}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.WhitespaceSplit(),
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
        ]
    )
    return HuggingFaceTokenizer({"huggingface.json": made.to_str().encode()}, PASSAGES, 260)


def hugging_face(model: Any, trainer: Any, splitter: Any) -> HuggingFaceTokenizer:
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = splitter
    made.train_from_iterator(SENTENCES, trainer)
    return HuggingFaceTokenizer({"huggingface.json": made.to_str().encode()}, PASSAGES, 400)


def pieces(kind: str) -> bytes:
    return sentencepiece_model(SENTENCES * 20, vocab_size=60, model_type=kind)


def marian() -> SentencePiecePair:
    table = {"<pad>": 0, "<s>": 1, "</s>": 2, "<mask>": 3, "<unk>": 4, "\u2581the": 5}
    files = {"source.spm": pieces("unigram"), "target.spm": pieces("unigram")}
    return SentencePiecePair(files | {"vocab.json": json.dumps(table).encode()}, PASSAGES, 6)


def tiktoken_of(pattern: str) -> Tokenizer:
    return Tokenizer(
        "bytes", pattern, {byte: rank for rank, byte in enumerate(SINGLE_BYTES)}, special=PASSAGES
    )


KINDS: dict[str, Callable[[], AnyTokenizer]] = {
    "tiktoken": lambda: tiktoken_of(O200K_PATTERN),
    "tiktoken, backtracking": lambda: tiktoken_of(r"(?:x+x+)+y(?!z)|\S+|\s+"),
    "WordLevel": word_level,
    "BPE": lambda: hugging_face(
        tokenizers.models.BPE(),
        tokenizers.trainers.BpeTrainer(vocab_size=90, show_progress=False),
        tokenizers.pre_tokenizers.ByteLevel(),
    ),
    "WordPiece": lambda: hugging_face(
        tokenizers.models.WordPiece(unk_token="absent"),
        tokenizers.trainers.WordPieceTrainer(vocab_size=60, show_progress=False),
        tokenizers.pre_tokenizers.BertPreTokenizer(),
    ),
    "Unigram": lambda: hugging_face(
        tokenizers.models.Unigram(),
        tokenizers.trainers.UnigramTrainer(vocab_size=40, show_progress=False),
        tokenizers.pre_tokenizers.Metaspace(),
    ),
    "sentencepiece": lambda: SentencePieceTokenizer(
        {"sentencepiece.model": pieces("bpe")}, PASSAGES, 400
    ),
    "Marian": marian,
}
# Any code point, halves of surrogate pairs included, and long runs of one.
TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=())),
    st.builds(
        lambda one, times: one * times, st.characters(exclude_categories=()), st.just(100_000)
    ),
    st.just("x" * 44),
)


@pytest.mark.parametrize("kind", KINDS)
def test_every_text_has_ids_or_an_error(kind: str) -> None:
    tokenizer = KINDS[kind]()
    preprocessor = Preprocessor(tokenizer.encode_batch, tokenizer.special, 64)

    @given(st.lists(TEXTS, min_size=1, max_size=4))
    def check(texts: list[str]) -> None:
        rows = preprocessor.encode([*texts, "a b"], "truncate")
        assert len(rows) == len(texts) + 1
        assert all((row.error is None) == bool(row.ids) for row in rows)
        # No other row suffers.
        (alone,) = preprocessor.encode(["a b"], "truncate")
        assert rows[-1] == alone

    check()


LINES: dict[str, str | None] = {
    "a b": None,
    "a unknown": "tokenizer",
    "x" * 44: "tokenizer",
    "b a": None,
    "\U000f0000": "tokenizer",
    "\x00": "malformed",
    "": "empty",
    "a " * 5000: "too-long",
    "a" * 1_000_000: "tokenizer",
    "a a": None,
}


def words_run(folder: Path) -> Path:
    """A run of an encoder alone, of a closed list of words."""
    options: dict[str, Any] = dict(
        architecture="encoder-only",
        decoder_layers=0,
        d_model=16,
        positions="learned",
        tokenizer=word_level(),
    )
    make_run(folder, PASSAGES, **options)
    save_samples(folder, ["a b", "b a x", "x", "a"])
    return folder


def test_a_job_ends_with_all_rows(once: Once, traces: None, tmp_path: Path) -> None:
    run = once("word-level-run", words_run)
    bundle = once("word-level-bundle", lambda folder: make_bundle(run, folder))
    rows, answers = tmp_path / "rows.jsonl", tmp_path / "answers.jsonl"
    rows.write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES))
    result = call("run", bundle, rows, "--column", "text", "--task", "embed", "-o", answers)
    assert "Traceback" not in result.stderr
    found = [json.loads(line) for line in answers.read_text().splitlines()]
    kinds = [record["error"]["kind"] if "error" in record else None for record in found]
    assert kinds == list(LINES.values())
    assert "Missing [UNK] token" in found[1]["error"]["message"]
    assert "retry-limit" in found[2]["error"]["message"]


def test_each_side_of_a_pair_may_fail() -> None:
    tokenizer = word_level()
    special = replace(tokenizer.special, between=(2,))
    preprocessor = Preprocessor(tokenizer.encode_batch, special, 64)
    pairs = [("a", "x" * 44), ("x" * 44, "a"), ("a", "b")]
    left, right, fine = encode_pairs(preprocessor, pairs, "error")
    assert left.error is not None
    assert left.error == right.error
    assert (fine.error, fine.ids) == (None, [1, 4, 2, 5, 2])


def test_a_chat_has_errors_of_its_own() -> None:
    tokenizer = word_level()
    source = (
        "{% for a in range(messages[0].content | length) %}{{ messages[0].content }} {% endfor %}"
    )
    tokenizer.chat = ChatTemplate(source, {}, {})

    def kind(messages: list[dict[str, str]]) -> str | None:
        prompt = Prompt(json.dumps(messages), "messages")
        error = encode_prompt(prompt, tokenizer, 64, "error", 0).error
        return None if error is None else error.kind

    assert kind([{"role": "user", "content": "a"}]) is None
    assert kind([{"role": "user", "content": "\U000f0000"}]) == "tokenizer"
    assert kind([{"role": "user", "content": "a" * 10_000}]) == "prompt"  # too much text
    assert kind([{"role": "user", "content": "b"}]) is None
