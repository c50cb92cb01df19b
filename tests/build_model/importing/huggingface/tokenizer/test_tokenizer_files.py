"""Text becomes the ids of transformers' own classes, and they become its text."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.build_model.importing.huggingface.drawn import transformers
from tests.build_model.importing.huggingface.small_models import (
    LEADING_BLANKS,
    TEXTS,
    bert_vocabulary,
    change,
    gpt2_vocabulary,
    llama_vocabulary,
    marian_vocabulary,
    require_saved,
    require_their_tokens,
)
from transferry.build_model.importing.huggingface.folder import PretrainedFolder
from transferry.build_model.importing.huggingface.tokenizer.byte_tokenizer import ranks_of
from transferry.build_model.importing.huggingface.tokenizer.vocabularies import TOKENIZERS
from transferry.build_model.model.config import ModelConfig
from transferry.build_model.train.vocabulary import byte_of_character
from transferry.runtime.errors import InputError
from transferry.runtime.tokenizer.byte_pair import AnyTokenizer


def bert_cased(folder: Path) -> int:
    size = bert_vocabulary(folder)
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    return size


def llama_sentencepiece(folder: Path) -> int:
    size = llama_vocabulary(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text('{"add_bos_token": true}')
    return size


TOKENIZER_FILES: dict[str, tuple[str, str, Callable[[Path], int]]] = {
    "marian": ("marian", "MarianTokenizer", marian_vocabulary),
    "gpt2, vocab.json": ("gpt2", "GPT2Tokenizer", gpt2_vocabulary),
    "llama, tokenizer.json": ("llama", "LlamaTokenizer", llama_vocabulary),
    "llama, tokenizer.model": ("llama", "LlamaTokenizer", llama_sentencepiece),
    "bert, vocab.txt": ("bert", "BertTokenizer", bert_vocabulary),
    "bert, vocab.txt, cased": ("bert", "BertTokenizer", bert_cased),
}
# Ids in config.json; the last of the vocabulary is negative.
IDS: dict[str, dict[str, Any]] = {
    "marian": {"pad_token_id": -1, "decoder_start_token_id": -1, "eos_token_id": 0},
    "gpt2": {"eos_token_id": -1},
    "llama": {"bos_token_id": 1, "eos_token_id": [2]},
    "bert": {},
}


def imported_tokenizer(kind: str, make: Callable[[Path], int], folder: Path) -> AnyTokenizer:
    size = make(folder)
    ids = {name: size - 1 if value == -1 else value for name, value in IDS[kind].items()}
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **ids}))
    shape = ModelConfig(size, 8, 2, 1, 0, 8, architecture="encoder-only", output_transform=True)
    return TOKENIZERS[kind](PretrainedFolder(folder), shape)


@pytest.mark.parametrize("name", TOKENIZER_FILES)
def test_ids_and_texts_are_theirs_and_no_text_is_a_special_token(name: str, tmp_path: Path) -> None:
    kind, class_name, make = TOKENIZER_FILES[name]
    ours = imported_tokenizer(kind, make, tmp_path)
    theirs = getattr(transformers, class_name).from_pretrained(tmp_path)
    # SentencePiece puts a blank before a text that begins with one, as before any other; the
    # LlamaTokenizer of transformers 5 does not. The library that the model came with is followed.
    texts = TEXTS if name == "llama, tokenizer.model" else [*TEXTS, LEADING_BLANKS]
    require_their_tokens(ours, theirs, texts)
    for text in texts:
        target = theirs(text_target=text, split_special_tokens=True).input_ids
        assert ours.special.wrap(ours.encode_target(text)) == target, text
    assert ours.encode_batch(texts) == [ours.encode(text) for text in texts]
    if name == "llama, tokenizer.model":
        assert ours.decode(ours.encode(LEADING_BLANKS)) == LEADING_BLANKS
    # Ids that stand for no text of the model.
    assert ours.decode([*ours.special.ids()]) == ""
    require_saved(ours, tmp_path)
    assert ours.vocabulary_size == len(theirs)
    special = {str(token) for token in theirs.all_special_tokens}
    assert special & {"</s>", "[MASK]", "<|endoftext|>"}
    # Unknown to SentencePiece, it would come out whole, and transformers takes that for the token.
    for token in [*special, "</s>"]:
        for text in (token, f"a{token}b", f"x {token} y"):
            assert not ours.special.ids().intersection(ours.encode(text)), text


def test_a_source_may_begin_with_its_language(tmp_path: Path) -> None:
    ours = imported_tokenizer("marian", marian_vocabulary, tmp_path)
    theirs = transformers.MarianTokenizer.from_pretrained(tmp_path)
    language = theirs.convert_tokens_to_ids(">>fra<<")
    assert ours.encode(">>fra<< hello") == theirs(">>fra<< hello").input_ids[:-1]
    assert ours.encode(">>fra<< hello")[0] == language
    assert language not in ours.encode_target(">>fra<< hello")
    # Another name than a language is text, and transformers makes one unknown token of it.
    assert len(ours.encode(">>xyz<< hello")) > len(theirs(">>xyz<< hello").input_ids)


@pytest.mark.parametrize(
    ("said", "around"),
    [
        ({"add_bos_token": True}, ((1,), ())),
        ({"add_bos_token": False, "add_eos_token": True}, ((), (2,))),
        ({"add_bos_token": True, "add_eos_token": True}, ((1,), (2,))),
        # The tokenizer's own tokens, whatever the model begins and ends answers with.
        ({"add_bos_token": True, "bos_token": "</s>"}, ((2,), ())),
        ({"add_bos_token": True, "bos_token": None}, ((), ())),
        (
            {"add_eos_token": True, "eos_token": {"__type": "AddedToken", "content": "<s>"}},
            ((), (1,)),
        ),
    ],
)
def test_llama_begins_and_ends_as_its_folder_says(
    said: dict[str, Any], around: tuple[tuple[int, ...], ...], tmp_path: Path
) -> None:
    def write(folder: Path) -> int:
        size = llama_sentencepiece(folder)
        (folder / "tokenizer_config.json").write_text(json.dumps(said))
        (folder / "generation_config.json").write_text('{"bos_token_id": 2, "eos_token_id": [1]}')
        return size

    special = imported_tokenizer("llama", write, tmp_path).special
    assert (special.before, special.after, special.bos_id, special.eos_id) == (*around, 2, 1)
    theirs = transformers.LlamaTokenizer.from_pretrained(tmp_path)
    assert special.wrap(theirs("ok", add_special_tokens=False).input_ids) == theirs("ok").input_ids
    change(tmp_path / "tokenizer_config.json", add_bos_token=True, bos_token="<begin>")
    with pytest.raises(InputError, match=r'bos_token is "<begin>", .*supported: <unk>, <s>, </s>'):
        imported_tokenizer("llama", lambda folder: 330, tmp_path)


BYTES = list(byte_of_character())


def vocabulary(*tokens: str, first: int = 0) -> dict[str, int]:
    return {token: number for number, token in enumerate([*BYTES, *tokens], start=first)}


def test_ids_in_the_order_of_merges_are_ranks() -> None:
    merges = [("b", "c"), ("a", "bc"), ("abc", "bc")]
    tokens = ["bc", "abc", "abcbc"]
    for first in (0, 7):
        found = ranks_of(vocabulary(*tokens, first=first), merges)
        assert found is not None
        ranks, begin = found
        assert begin == first
        assert [ranks[token.encode()] for token in tokens] == [256, 257, 258]
        assert ranks[b" "] == BYTES.index("Ġ")


@pytest.mark.parametrize(
    ("ids", "merges"),
    [
        # Ids in another order than the merges.
        (vocabulary("bc", "ab"), [("a", "b"), ("b", "c")]),
        (vocabulary("ab", "x", "bc"), [("a", "b"), ("b", "c")]),
        # One token, two ways.
        (vocabulary("ab", "bc", "abc"), [("a", "b"), ("b", "c"), ("ab", "c"), ("a", "bc")]),
        # By ranks, "abc" would be reached through "bc", which is joined first, and is not.
        (vocabulary("bc", "ab", "abc"), [("b", "c"), ("a", "b"), ("ab", "c")]),
        # No "bc", and not all bytes.
        (vocabulary("ab"), [("a", "b"), ("b", "c")]),
        ({"a": 0, "b": 1, "ab": 2}, [("a", "b")]),
    ],
)
def test_what_tiktoken_would_split_differently_has_no_ranks(
    ids: dict[str, int], merges: list[tuple[str, str]]
) -> None:
    assert ranks_of(ids, merges) is None
