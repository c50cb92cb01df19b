"""Tokenizers in js/: the ids, the texts and the places of Python, for every kind of bundle."""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from tests.js.cases import hard_strings, ids_case, npm_test, seal, write_cases
from transferry.runtime.tokenizer.byte_pair import OURS, SINGLE_BYTES, SOURCES, Tokenizer
from transferry.runtime.tokenizer.special_tokens import SpecialTokens
from transferry.runtime.tokenizer.third_party import (
    HuggingFaceTokenizer,
    SentencePiecePair,
    SentencePieceTables,
    SentencePieceTokenizer,
    ThirdPartyTokenizer,
)

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace("{1,3}", "")
BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"
CORPUS = [
    *("Straße über die Häuser, don't!", "日本語 漢字かな 한국어 1234567 ½", "anna and the cat 's"),
    *("the end .\nA new line\n\n  blanks", "क्षि ไทย עברית العربية e\u0301 ﬁ", "👍🏽 ❤️ <s> [MASK]"),
] * 4
SPECIAL = SpecialTokens(0, 1, 2, after=(2,))


@pytest.mark.optional("node")
@pytest.mark.parametrize("pattern", OURS)
def test_ids_of_byte_level_bpe_by_ranks(tmp_path: Path, pattern: str) -> None:
    made = (
        " 's|er|ie|an|in|nn|ann|anna| a| an|  |\n\n|\xc3\xa9|\xe6\x97\xa5|\xf0\x9f"
        "|12|123|...|aa|aaaa"
    )
    tokens = [*SINGLE_BYTES, *dict.fromkeys(each.encode("latin-1") for each in made.split("|"))]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    kept = [rank for rank in range(len(tokens)) if rank % 7 or rank < 256]
    ids = []
    for name, chosen in (("whole", None), ("cut", kept)):
        tokenizer = Tokenizer("test", pattern, ranks, chosen, SOURCES)
        ids.append(ids_case(tmp_path / name, tokenizer, hard_strings()))
    assert "ok 1 - 1000 texts" in npm_test(write_cases(tmp_path / "cases.json", [], ids))


# --- tokenizer.json -------------------------------------------------------------------------------


@lru_cache
def bytes_of(pattern: str | None = None, **model: Any) -> Any:
    """Byte-level BPE; without a pattern splits as GPT-2 does."""
    t = pytest.importorskip("tokenizers", reason="an extra, which is not installed")
    made = t.Tokenizer(t.models.BPE(**model))
    own = t.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    made.pre_tokenizer = own
    if pattern is not None:
        split = t.pre_tokenizers.Split(t.Regex(pattern), "isolated")
        made.pre_tokenizer = t.pre_tokenizers.Sequence([split, own])
    made.decoder = t.decoders.ByteLevel()
    trainer = t.trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<pad>", "<s>", "</s>", "<|endoftext|>"],
        initial_alphabet=t.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(CORPUS, trainer)
    return made


def gpt2(t: Any) -> Any:
    return t.Tokenizer.from_str(bytes_of().to_str())


def gpt2_with_blank_and_added_tokens(t: Any) -> Any:
    made = gpt2(t)
    made.pre_tokenizer = t.pre_tokenizers.ByteLevel(add_prefix_space=True)
    made.normalizer = t.normalizers.NFC()
    made.post_processor = t.processors.RobertaProcessing(("</s>", 2), ("<s>", 1))
    add = t.AddedToken
    made.add_tokens(
        [
            *(add("anna", single_word=True), add("[MASK]", lstrip=True), add("漢字", rstrip=True)),
            *(add("e\u0301", normalized=True), add("  ", normalized=False), add("ann")),
        ]
    )
    made.add_special_tokens([add("<mask>", lstrip=True), add("e\u0301\u0301", normalized=True)])
    return made


def llama3(t: Any) -> Any:
    record = json.loads(bytes_of(LLAMA3).to_str())
    record["model"]["ignore_merges"] = True
    # A token that no merge leads to.
    record["model"]["vocab"]["Ġthe"] = len(record["model"]["vocab"])
    record["post_processor"] = {
        "type": "ByteLevel",
        "add_prefix_space": True,
        "trim_offsets": False,
        "use_regex": True,
    }
    return t.Tokenizer.from_str(json.dumps(record))


def qwen(t: Any) -> Any:
    made = t.Tokenizer.from_str(bytes_of(QWEN).to_str())
    made.normalizer = t.normalizers.NFC()
    return made


def bloom(t: Any) -> Any:
    return t.Tokenizer.from_str(bytes_of(BLOOM).to_str())


def clip(t: Any) -> Any:
    """BPE of characters with a mark at the end of words."""
    made = t.Tokenizer(t.models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    made.normalizer = t.normalizers.Sequence(
        [
            t.normalizers.NFC(),
            t.normalizers.Replace(t.Regex(r"\s+"), " "),
            t.normalizers.Lowercase(),
        ]
    )
    made.pre_tokenizer = t.pre_tokenizers.Split(
        t.Regex(r"'s|'t|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"), "removed", invert=True
    )
    made.decoder = t.decoders.BPEDecoder("</w>")
    trainer = t.trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    return made


def word_piece(t: Any, *, cased: bool) -> Any:
    made = t.Tokenizer(t.models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=20))
    made.normalizer = t.normalizers.BertNormalizer(lowercase=not cased)
    made.pre_tokenizer = t.pre_tokenizers.BertPreTokenizer()
    made.decoder = t.decoders.WordPiece("##", cleanup=not cased)
    special = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]
    trainer = t.trainers.WordPieceTrainer(
        vocab_size=250, special_tokens=special, show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    return made


def bert(t: Any) -> Any:
    return word_piece(t, cased=False)


def bert_cased(t: Any) -> Any:
    return word_piece(t, cased=True)


@lru_cache
def spm(**options: Any) -> bytes:
    library = pytest.importorskip("sentencepiece", reason="an extra, which is not installed")
    written = io.BytesIO()
    settings = {"vocab_size": 200, "hard_vocab_limit": False, "minloglevel": 2, **options}
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=written, **settings
    )
    return written.getvalue()


def charsmap_of(model: bytes) -> str:
    """Returns the compiled normalisation of a SentencePiece model, in base64."""
    proto = pytest.importorskip("sentencepiece.sentencepiece_model_pb2").ModelProto()
    proto.ParseFromString(model)
    return base64.b64encode(proto.normalizer_spec.precompiled_charsmap).decode()


def unigram(t: Any, *, scheme: str = "always", words: bool = False, **model: Any) -> Any:
    """Unigram with SentencePiece's compiled normalisation."""
    proto = pytest.importorskip("sentencepiece.sentencepiece_model_pb2").ModelProto()
    proto.ParseFromString(spm())
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    made = t.Tokenizer(t.models.Unigram(pieces, unk_id=0, **model))
    record = json.loads(made.to_str())
    record["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": charsmap_of(spm())}
    made = t.Tokenizer.from_str(json.dumps(record))
    blanks = t.pre_tokenizers.Metaspace("▁", prepend_scheme=scheme)
    split = t.pre_tokenizers.WhitespaceSplit()
    made.pre_tokenizer = t.pre_tokenizers.Sequence([split, blanks]) if words else blanks
    made.decoder = t.decoders.Metaspace("▁", prepend_scheme=scheme)
    made.add_special_tokens(["<s>", "</s>", "<fim-prefix>", t.AddedToken("<mask>", lstrip=True)])
    return made


def t5(t: Any) -> Any:
    return unigram(t, words=True)


def mbart50(t: Any) -> Any:
    made = unigram(t, scheme="first")
    made.normalizer = t.normalizers.Sequence(
        [made.normalizer, t.normalizers.Replace(t.Regex(" {2,}"), " "), t.normalizers.Strip()]
    )
    return made


def albert(t: Any) -> Any:
    made = unigram(t, scheme="never")
    n = t.normalizers
    made.normalizer = n.Sequence(
        [n.Replace("``", '"'), n.NFKD(), n.StripAccents(), n.Lowercase(), made.normalizer]
    )
    return made


def pieces(t: Any, *, byte_fallback: bool = True, **model: Any) -> Any:
    """SentencePiece's BPE, with bytes for unknown characters."""
    made = t.Tokenizer(t.models.BPE(unk_token="<unk>", fuse_unk=True, **model))
    made.pre_tokenizer = t.pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    d = t.decoders
    steps = [d.Replace("▁", " "), d.ByteFallback(), d.Fuse(), d.Strip(" ", 1, 0)]
    made.decoder = d.Sequence(steps)
    spelled = [f"<0x{value:02X}>" for value in range(256)] if byte_fallback else []
    trainer = t.trainers.BpeTrainer(
        vocab_size=520, special_tokens=["<unk>", "<s>", "</s>", *spelled], show_progress=False
    )
    made.train_from_iterator([text.replace("日", "") for text in CORPUS], trainer)
    record = json.loads(made.to_str())
    record["model"]["byte_fallback"] = byte_fallback
    record["added_tokens"] = record["added_tokens"][:3]
    return t.Tokenizer.from_str(json.dumps(record))


def llama2(t: Any) -> Any:
    made = pieces(t)
    made.pre_tokenizer = None
    n = t.normalizers
    made.normalizer = n.Sequence([n.Prepend("▁"), n.Replace(" ", "▁")])
    made.add_tokens([t.AddedToken("<think>", normalized=True), t.AddedToken("   ")])
    return made


def gemma(t: Any) -> Any:
    made = pieces(t)
    made.normalizer = t.normalizers.Replace(" ", "▁")
    made.pre_tokenizer = t.pre_tokenizers.Split(" ", "merged_with_previous")
    made.decoder = t.decoders.Sequence(
        [t.decoders.Replace("▁", " "), t.decoders.ByteFallback(), t.decoders.Fuse()]
    )
    return made


def nllb(t: Any) -> Any:
    made = pieces(t, byte_fallback=False)
    made.pre_tokenizer = t.pre_tokenizers.Metaspace("▁")
    made.decoder = t.decoders.Metaspace("▁")
    made.add_special_tokens(["eng_Latn", "deu_Latn"])
    return made


def words_apart(t: Any) -> Any:
    """Words of a table, split in several steps; texts are joined without a decoder."""
    made = t.Tokenizer(t.models.WordLevel(unk_token="<unk>"))
    p = t.pre_tokenizers
    made.pre_tokenizer = p.Sequence(
        [
            *(p.Whitespace(), p.Digits(individual_digits=True)),
            *(p.Punctuation("merged_with_next"), p.Split("a", "contiguous")),
        ]
    )
    made.normalizer = t.normalizers.Nmt()
    made.train_from_iterator(
        CORPUS, t.trainers.WordLevelTrainer(special_tokens=["<unk>"], show_progress=False)
    )
    return made


FAMILIES: tuple[Callable[[Any], Any], ...] = (
    *(gpt2, gpt2_with_blank_and_added_tokens, llama3, qwen, bloom, clip, bert, bert_cased),
    *(t5, mbart50, albert, llama2, gemma, nllb, words_apart),
)


def bundled(made: Any) -> ThirdPartyTokenizer:
    content = made.to_str().encode()
    size = 1 + max(made.get_vocab().values())
    return HuggingFaceTokenizer({"huggingface.json": content}, SPECIAL, size)


@pytest.mark.optional("node")
def test_ids_of_a_tokenizer_json(tmp_path: Path) -> None:
    t = pytest.importorskip("tokenizers", reason="an extra, which is not installed")
    texts = hard_strings(surrogates=False)
    ids = [ids_case(tmp_path / f.__name__, bundled(f(t)), texts, places=True) for f in FAMILIES]
    printed = npm_test(write_cases(tmp_path / "cases.json", [], ids))
    assert printed.count("- 1000 texts") == len(FAMILIES)


# --- SentencePiece --------------------------------------------------------------------------------

DRAWN_LETTERS = "ab0-▁é"


def single(**options: Any) -> ThirdPartyTokenizer:
    special = SpecialTokens(2, 1, 2, before=(1,), after=())
    files = {"sentencepiece.model": spm(**options)}
    return SentencePieceTokenizer(files, special, 700)


def pair(kind: type[SentencePiecePair]) -> ThirdPartyTokenizer:
    library = pytest.importorskip("sentencepiece", reason="an extra, which is not installed")
    source, target = spm(), spm(model_type="bpe", normalization_rule_name="nmt_nfkc_cf")
    tables = []
    for contents in ((source, target), (target,)):
        table = dict.fromkeys(["<pad>", ">>deu<<", "</s>", "<unk>"])
        for content in contents:
            model = library.SentencePieceProcessor(model_proto=content)
            table |= dict.fromkeys(model.id_to_piece(i) for i in range(5, model.get_piece_size()))
        ids = {piece: number for number, piece in enumerate(table)}
        tables.append(json.dumps(ids, ensure_ascii=False).encode())
    files = {"source.spm": source, "target.spm": target, "vocab.json": tables[0]}
    made = kind({**files, "target_vocab.json": tables[1]}, SPECIAL, 700)
    made.cleans = kind is SentencePieceTables
    return made


def drawn(seed: int, **options: Any) -> ThirdPartyTokenizer:
    """Pieces with few different scores; some are unused, some user-defined."""
    proto = pytest.importorskip("sentencepiece.sentencepiece_model_pb2").ModelProto()
    proto.ParseFromString(spm(**options))
    rng = random.Random(seed)
    kinds = type(proto.pieces[0])
    del proto.pieces[3:]  # of the unknown, begin and end token
    texts = dict.fromkeys(DRAWN_LETTERS)
    texts |= dict.fromkeys(
        "".join(rng.choices(DRAWN_LETTERS, k=rng.randint(2, 4))) for _ in range(40)
    )
    for text in texts:
        kind = rng.choices([kinds.NORMAL, kinds.UNUSED, kinds.USER_DEFINED], [8, 1, 1])[0]
        proto.pieces.add(piece=text, score=rng.choice([-2.1, -1.3, -0.7, -0.3, 0.1]), type=kind)
    files = {"sentencepiece.model": proto.SerializeToString()}
    return SentencePieceTokenizer(files, SpecialTokens(2, 1, 2, before=(1,), after=()), 700)


@pytest.mark.optional("node")
def test_ids_of_drawn_sentencepiece_models(tmp_path: Path) -> None:
    """Where sums are equal, their rounding decides, and the order in which they are compared."""
    made = {f"unigram {seed}": drawn(seed) for seed in range(12)}
    made |= {f"bpe {seed}": drawn(seed, model_type="bpe") for seed in range(12)}
    rng = random.Random(0)
    texts = ["".join(rng.choices([*DRAWN_LETTERS, " "], k=rng.randint(1, 24))) for _ in range(300)]
    ids = [ids_case(tmp_path / name, each, texts) for name, each in made.items()]
    printed = npm_test(write_cases(tmp_path / "cases.json", [], ids))
    assert printed.count("- 300 texts") == len(made)


@pytest.mark.optional("node")
def test_ids_of_sentencepiece(tmp_path: Path) -> None:
    symbols = {"user_defined_symbols": "the,[MASK],漢字", "control_symbols": "<ctrl>"}
    plain = {"add_dummy_prefix": False, "remove_extra_whitespaces": False}
    made = {
        "unigram": single(),
        "unigram symbols": single(**symbols, byte_fallback=True, vocab_size=450),
        "unigram plain": single(**plain, normalization_rule_name="identity"),
        "bpe": single(model_type="bpe", normalization_rule_name="nfkc_cf"),
        "bpe symbols": single(model_type="bpe", **symbols, byte_fallback=True, vocab_size=450),
        "bpe plain": single(model_type="bpe", **plain, byte_fallback=True, vocab_size=450),
        "pair": pair(SentencePiecePair),
        "tables": pair(SentencePieceTables),
    }
    texts = [">>deu<< Straße", ">>fra<< the cat", *hard_strings(998, surrogates=False)]
    ids = [ids_case(tmp_path / name, each, texts) for name, each in made.items()]
    printed = npm_test(write_cases(tmp_path / "cases.json", [], ids))
    assert printed.count("- 1000 texts") == len(made)


# --- What is refused ------------------------------------------------------------------------------


@pytest.mark.optional("node")
@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("pre_tokenizer", {"type": "UnicodeScripts"}, "has pre-tokenizer UnicodeScripts which"),
        ("normalizer", {"type": "Normal"}, "has normalizer Normal which"),
        ("decoder", {"type": "CTC"}, "has decoder CTC which"),
        ("model", {"type": "Tree"}, "has a model of type Tree which"),
        (
            "pre_tokenizer",
            {"type": "Split", "pattern": {"Regex": r"(?<n>a)\k<n>"}, "behavior": "Isolated"},
            "pattern cannot be translated to JavaScript from",
        ),
    ],
)
def test_what_cannot_be_read_is_refused(
    tmp_path: Path, part: str, value: dict[str, Any], message: str
) -> None:
    t = pytest.importorskip("tokenizers", reason="an extra, which is not installed")
    record = json.loads(bytes_of().to_str()) | {part: value}
    tokenizer = bundled(gpt2(t))
    case = ids_case(tmp_path / "bundle", tokenizer, ["a"])
    (tmp_path / "bundle" / "huggingface.json").write_text(json.dumps(record))
    (tmp_path / "bundle" / "manifest.json").unlink()
    seal(tmp_path / "bundle", tokenizer.vocabulary_size)
    refused = {"bundle": case["bundle"], "message": message}
    npm_test(write_cases(tmp_path / "cases.json", [], [], [refused]))
