"""Kept files come back as they were, and unreadable ones are refused with what to do."""

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.tokenizer.vocabularies import sentencepiece_model
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.tokenizer.byte_pair import SINGLE_BYTES, Tokenizer, load_tokenizer
from transferry.runtime.tokenizer.special_tokens import SpecialTokens
from transferry.runtime.tokenizer.third_party import (
    KINDS,
    HuggingFaceTokenizer,
    SentencePiecePair,
    SentencePieceTables,
    SentencePieceTokenizer,
    ThirdPartyTokenizer,
)

tokenizers = pytest.importorskip("tokenizers", reason="an extra, which is not installed")
sentencepiece = pytest.importorskip("sentencepiece", reason="an extra, which is not installed")

SPECIAL = SpecialTokens(0, 1, 2, after=(2,))


def pieces(*texts: str) -> bytes:
    return sentencepiece_model(texts * 9, vocab_size=60)


def word_pieces() -> bytes:
    words = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "a", "##b", "[", "]", "sep"]
    made = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    made.normalizer = tokenizers.normalizers.BertNormalizer()
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made.decoder = tokenizers.decoders.WordPiece("##")
    made.add_special_tokens(words[:4])
    content: str = made.to_str()
    return content.encode()


def hugging_face(size: int = 9) -> ThirdPartyTokenizer:
    return HuggingFaceTokenizer({"huggingface.json": word_pieces()}, SPECIAL, size)


def single(size: int = 60) -> ThirdPartyTokenizer:
    content = pieces("hallo welt und alle", "noch ein satz")
    # 0 is the unknown token, as in Llama's.
    special = SpecialTokens(2, 1, 2, before=(1,), after=())
    return SentencePieceTokenizer({"sentencepiece.model": content}, special, size)


def pair(size: int = 90) -> ThirdPartyTokenizer:
    source, target = pieces("hello world and all"), pieces("hallo welt und alle")
    found = dict.fromkeys(["<pad>", ">>deu<<", "</s>", "<unk>"])
    for content in (source, target):
        model = sentencepiece.SentencePieceProcessor(model_proto=content)
        found |= dict.fromkeys(model.id_to_piece(i) for i in range(3, model.get_piece_size()))
    ids = json.dumps({piece: number for number, piece in enumerate(found)}).encode()
    files = {"source.spm": source, "target.spm": target, "vocab.json": ids}
    return SentencePiecePair(files, SPECIAL, size)


def tables(size: int = 90, special: SpecialTokens = SPECIAL) -> ThirdPartyTokenizer:
    files = dict(pair().files)
    ids = json.loads(files["vocab.json"])
    order = [*list(ids)[:4], *reversed(list(ids)[4:])]
    source = {piece: number for number, piece in enumerate(order)}
    source |= {"</s>": special.after[0], order[special.after[0]]: 2}
    files |= {"vocab.json": json.dumps(source).encode(), "target_vocab.json": files["vocab.json"]}
    return SentencePieceTables(files, special, size)


MAKE: dict[str, Callable[..., ThirdPartyTokenizer]] = {
    "tokenizers": hugging_face,
    "sentencepiece": single,
    "sentencepiece-pair": pair,
    "sentencepiece-tables": tables,
}
kinds = pytest.mark.parametrize("kind", list(KINDS))


def test_every_kind_is_tested() -> None:
    assert MAKE.keys() == KINDS.keys()


def test_an_enormous_id_is_refused_before_the_library_reads_it() -> None:
    record = json.loads(word_pieces())
    record["model"]["vocab"]["a"] = 1 << 31
    files = {"huggingface.json": json.dumps(record).encode()}
    with pytest.raises(InputError, match=r"expected ids below 9, .* found 2147483648"):
        HuggingFaceTokenizer(files, SPECIAL, 9)


def test_places_are_those_of_the_text_as_it_is_given() -> None:
    """Also where it holds halves of surrogate pairs, alone or together."""

    def formed(text: str) -> str:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    draw, tokenizer = random.Random(3), hugging_face()
    for _ in range(100):
        text = "".join(draw.choice("ab \ud83d\ude00\U0001f600\n") for _ in range(12))
        pairs = zip(tokenizer.places(text), tokenizer.places(formed(text)), strict=True)
        for one, other in pairs:
            assert formed(text[one.start : one.end]) == formed(text)[other.start : other.end], text


NORMALIZERS = {
    "none": None,
    "BERT": tokenizers.normalizers.BertNormalizer(),
    "cased BERT": tokenizers.normalizers.BertNormalizer(lowercase=False),
    "lower": tokenizers.normalizers.Lowercase(),
    "no marks": tokenizers.normalizers.Replace(tokenizers.Regex(r"\p{C}"), ""),
}


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("name", NORMALIZERS)
def test_text_is_no_mask_under_any_normalizer(name: str, normalized: bool) -> None:
    made = tokenizers.Tokenizer.from_str(word_pieces().decode())
    made.normalizer = NORMALIZERS[name]
    flags = {"special": True, "normalized": normalized}
    made.add_special_tokens([tokenizers.AddedToken("[MASK]", **flags)])
    given = {"huggingface.json": made.to_str().encode()}
    tokenizer = HuggingFaceTokenizer(given, SpecialTokens(0, 1, 2, mask_id=9), 10)
    before, after = "a [MASK] [mask] ", " a"
    ids = [*tokenizer.encode(before), 9, *tokenizer.encode(after)]
    assert tokenizer.encode_masked([before, after]) == ids
    assert ids.count(9) == 1


@pytest.mark.parametrize("ids", [[], [2], [999], [2, 999]])
def test_a_decoder_that_cuts_ends_leaves_an_empty_text_empty(ids: list[int]) -> None:
    record = json.loads(word_pieces())
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 1}
    record["decoder"] = {"type": "Sequence", "decoders": [{"type": "Fuse"}, strip]}
    files = {"huggingface.json": json.dumps(record).encode()}
    tokenizer = HuggingFaceTokenizer(files, SPECIAL, 9)
    assert tokenizer.decode(ids) == ""
    assert tokenizer.decode([*ids, *tokenizer.encode("a")]) == "a"


@pytest.mark.parametrize("merge", [["a", "b"], "a b", ["a", "日"], "a 日"])
def test_a_merge_that_the_library_cannot_cut_is_refused(merge: str | list[str]) -> None:
    vocabulary = {"a": 0, "b": 1, "日": 2, "ab": 3, "a日": 4}
    model = {"type": "BPE", "continuing_subword_prefix": "##", "vocab": vocabulary}
    files = {"huggingface.json": json.dumps({"model": {**model, "merges": [merge]}}).encode()}
    with pytest.raises(InputError, match=r"a merge with '[b日]', which does not begin with ##"):
        HuggingFaceTokenizer(files, SPECIAL, 9)


def test_each_side_has_an_end_token_of_its_own() -> None:
    # 9 ends a source, and is a token like any other in a target.
    tokenizer = tables(special=SpecialTokens(0, 1, 2, after=(9,)))
    assert isinstance(tokenizer, SentencePieceTables)
    assert tokenizer.encode("hello") != tokenizer.encode_target("hello")
    assert tokenizer.decode(tokenizer.encode_target("hallo welt")) == "hallo welt"
    assert tokenizer.decode([9]) != ""
    assert 9 not in tokenizer.encode("</s> hallo")
    assert 2 not in tokenizer.encode_target("</s> hallo")
    assert tokenizer.source_size == 1 + max(json.loads(tokenizer.files["vocab.json"]).values())


@kinds
def test_what_is_saved_comes_back(kind: str, tmp_path: Path) -> None:
    saved = MAKE[kind]()
    saved.save(tmp_path)
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert first.keys() == {"tokenizer.json", *saved.names}
    loaded = load_tokenizer(tmp_path)
    assert type(loaded) is KINDS[kind]
    assert (loaded, hash(loaded)) == (saved, hash(saved))
    assert loaded.special == saved.special
    assert loaded.encode("hallo world") == saved.encode("hallo world")
    loaded.save(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == first


@kinds
def test_others_are_not_equal(kind: str) -> None:
    other = MAKE["tokenizers" if kind != "tokenizers" else "sentencepiece"]()
    assert MAKE[kind]() != other
    assert MAKE[kind](80) != MAKE[kind](81)
    assert MAKE[kind]() != Tokenizer("x", ".", {byte: i for i, byte in enumerate(SINGLE_BYTES)})


@kinds
def test_ids_without_a_text_decode_to_nothing(kind: str) -> None:
    tokenizer = MAKE[kind](1000)
    assert tokenizer.vocabulary_size == 1000
    ids = tokenizer.encode("a")
    assert ids
    assert tokenizer.decode([1, *ids, 999, 0, 2]) == tokenizer.decode(ids)
    unknown = tokenizer.encode("字")
    assert tokenizer.decode([*ids, unknown[-1]]) == tokenizer.decode(ids)
    assert tokenizer.encode_batch(["a", ""]) == [ids, tokenizer.encode("")]


@kinds
def test_half_of_a_surrogate_pair_is_a_replacement_character(kind: str) -> None:
    made = MAKE[kind]()
    for text in ("a \ud800 b", "\udc00"):
        expected = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        assert made.encode(text) == made.encode(expected)
        assert made.encode_target(text) == made.encode_target(expected)
        assert made.encode_batch([text]) == made.encode_batch([expected])
        assert made.encode_pieces([text]) == made.encode_pieces([expected])


@kinds
@pytest.mark.parametrize("text", ["</s>", "[SEP]", "a[SEP]", "<unk>", "<s> a"])
def test_what_looks_special_is_text(kind: str, text: str) -> None:
    tokenizer = MAKE[kind]()
    for ids in (tokenizer.encode(text), tokenizer.encode_target(text)):
        assert not tokenizer.special.ids().intersection(ids)
        assert ids


@kinds
def test_fewer_ids_than_the_files_have_are_refused(kind: str) -> None:
    with pytest.raises(InputError, match=r"expected ids below 7, .* found"):
        MAKE[kind](7)


@kinds
def test_a_text_of_an_id_that_the_model_lacks_is_refused(kind: str, tmp_path: Path) -> None:
    MAKE[kind]().save(tmp_path)
    settings = json.loads((tmp_path / "tokenizer.json").read_bytes())
    settings["special"]["texts"] = {"<s>": 10**6}
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings))
    with pytest.raises(InputError, match=r"expected ids below .* found 1000000"):
        load_tokenizer(tmp_path)


@kinds
def test_a_library_that_is_missing_is_named_with_its_extra(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    MAKE[kind]().save(tmp_path)
    library = KINDS[kind].library
    monkeypatch.setitem(sys.modules, library, None)
    message = rf'{library}.*pip install .*\[{library}\]"'
    with pytest.raises(UsageError, match=message):
        load_tokenizer(tmp_path)


@kinds
@pytest.mark.parametrize("content", [b"", b"rubbish", b"\xff\x00", b"[]", b"{}"])
def test_damaged_files_are_refused(kind: str, content: bytes, tmp_path: Path) -> None:
    made = MAKE[kind]()
    for name in made.names:
        made.save(tmp_path)
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=f"{tmp_path}: the tokenizer is inconsistent"):
            load_tokenizer(tmp_path)
        (tmp_path / name).unlink()
        with pytest.raises(InputError, match=f"{name}: cannot be read"):
            load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "wordpiece"}, "expected the kind tiktoken, tokenizers, .* found 'wordpiece'"),
        ({"kind": []}, "expected the kind"),
        ({"vocabulary_size": "many"}, "inconsistent"),
    ],
)
def test_settings_that_mean_nothing_are_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    single().save(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InputError, match=message):
        load_tokenizer(tmp_path)


def test_source_and_target_are_split_by_their_own_models() -> None:
    tokenizer = pair()
    assert tokenizer.encode("hallo welt") != tokenizer.encode_target("hallo welt")
    assert tokenizer.decode(tokenizer.encode_target("hallo welt")) == "hallo welt"
    assert tokenizer.encode(">>deu<< hello") == [1, *tokenizer.encode("hello")]
    assert tokenizer.encode(">>fra<< hello")[0] != 1
