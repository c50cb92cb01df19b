"""Random tokenizers, texts and options of generation, for the comparison of js/ with Python."""

from __future__ import annotations

import json
import random
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.js.cases import PIECES
from tests.js.test_tokenizers import CORPUS, LLAMA3, charsmap_of, spm

Draw = random.Random
# Oniguruma reads `\pL`, `{2}?`, and `\w` outside of a set, in another way than Rust and JavaScript.
PATTERNS = (
    *(LLAMA3, r"\s+", r"\w+", r"[\w]+", r"[^\w\s]+", r"\W", r"\pL+", r"n{2}?", r"an{1,2}?", "a*"),
    *("^", "$", "(?=[A-Z])", r"\p{N}{1,3}", r"(?i:the|and)", r"[\p{L}\p{M}]+", r"(?<=a)n", ""),
)
ADDED = ("anna", "  ", "e\u0301", "漢字", "<|im_end|>", "\n", "a", " the", "😀", "ÉÉ", "</s>", "12")
BEHAVIORS = ("Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")
WORDS = ("the ", "a ", "cat ", "anna ", "Haus ", "two ", ", ", "! ")


def old_character(draw: Draw) -> str:
    """Returns a character that every version of Unicode in use has."""
    while True:
        found = chr(draw.randrange(draw.choice([0x300, 0x3000, 0x110000])))
        if unicodedata.ucd_3_2_0.category(found) not in ("Cn", "Cs"):
            return found


def text(draw: Draw, own: Sequence[str] = WORDS) -> str:
    """Returns a text of words, of `own`, and of hard pieces and characters."""
    parts = []
    for _ in range(draw.choice([1, 2, 4, 9])):
        kinds: list[Callable[[], str]] = [
            *(lambda: draw.choice(WORDS), lambda: draw.choice(own)),
            *(lambda: draw.choice(PIECES[:-8]), lambda: old_character(draw)),
        ]
        parts.append(draw.choices(kinds, [4, 2, 2, 1])[0]())
    return "".join(parts)


def _pattern(draw: Draw) -> dict[str, str]:
    if draw.random() < 0.7:
        return {"Regex": draw.choice(PATTERNS)}
    return {"String": draw.choice([" ", "a", "an", "▁", "日", ""])}


def _flag(draw: Draw, *names: str) -> dict[str, bool]:
    return {name: draw.random() < 0.5 for name in names}


def _normalizer(draw: Draw, depth: int = 0) -> dict[str, Any] | None:
    form = draw.choice(["NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt"])
    bert = _flag(draw, "clean_text", "handle_chinese_chars", "lowercase")
    kinds: list[dict[str, Any] | None] = [
        {"type": form},
        {
            "type": "Replace",
            "pattern": _pattern(draw),
            "content": draw.choice(["", " ", "xy", "😀"]),
        },
        {"type": "Strip", **_flag(draw, "strip_left", "strip_right")},
        {"type": "Prepend", "prepend": draw.choice(["▁", "ab"])},
        {"type": "BertNormalizer", **bert, "strip_accents": draw.choice([None, True, False])},
        {"type": "Precompiled", "precompiled_charsmap": charsmap_of(spm())},
    ]
    if depth == 0:
        several = [_normalizer(draw, 1) for _ in range(draw.randint(0, 3))]
        kinds += [None, {"type": "ByteLevel"}, {"type": "Sequence", "normalizers": several}]
    return draw.choice(kinds)


def _pre_tokenizer(draw: Draw, depth: int = 0) -> dict[str, Any] | None:
    split, scheme = _flag(draw, "split"), draw.choice(["always", "first", "never"])
    kinds: list[dict[str, Any] | None] = [
        {"type": "ByteLevel", **_flag(draw, "add_prefix_space", "trim_offsets", "use_regex")},
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, **split},
        {"type": draw.choice(["Whitespace", "WhitespaceSplit", "BertPreTokenizer"])},
        {"type": "CharDelimiterSplit", "delimiter": draw.choice(" a▁.")},
        {"type": "Punctuation", "behavior": draw.choice(BEHAVIORS)},
        {"type": "Digits", **_flag(draw, "individual_digits")},
        *2
        * [
            {"type": "Split", "pattern": _pattern(draw)}
            | {"behavior": draw.choice(BEHAVIORS), **_flag(draw, "invert")}
        ],
    ]
    if depth == 0:
        several = [_pre_tokenizer(draw, 1) for _ in range(draw.randint(0, 3))]
        kinds += [None, {"type": "Sequence", "pretokenizers": several}]
    return draw.choice(kinds)


def _decoder(draw: Draw, depth: int = 0) -> dict[str, Any] | None:
    scheme, end = draw.choice(["always", "never"]), draw.choice(["start", "stop"])
    kinds: list[dict[str, Any] | None] = [
        {"type": "ByteLevel", **_flag(draw, "add_prefix_space", "trim_offsets", "use_regex")},
        {"type": "WordPiece", "prefix": draw.choice(["##", "@@"]), **_flag(draw, "cleanup")},
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": True},
        {"type": draw.choice(["ByteFallback", "Fuse"])},
        {"type": "Strip", "content": " ", "start": 0, "stop": 0, end: draw.randint(0, 2)},
        {"type": "Replace", "pattern": _pattern(draw), "content": draw.choice(["", " ", "b"])},
        {"type": "BPEDecoder", "suffix": draw.choice(["</w>", "@@"])},
    ]
    if depth == 0:
        several = [_decoder(draw, 1) for _ in range(draw.randint(0, 3))]
        kinds += [None, {"type": "Sequence", "decoders": several}]
    return draw.choice(kinds)


def _trained(draw: Draw, t: Any, parts: dict[str, Any]) -> Any:
    """Returns a tokenizer with these parts, its model trained on the pieces that they make."""
    special = ["<unk>", "<s>", "</s>", "[MASK]"]
    spelled = [f"<0x{value:02X}>" for value in range(256)] if draw.random() < 0.5 else []
    options: dict[str, Any] = {"special_tokens": special, "show_progress": False}
    kind = draw.choice(["BPE", "BPE", "WordPiece", "WordLevel"])
    knows = kind != "BPE" or draw.random() < 0.5
    settings: dict[str, Any] = {"unk_token": "<unk>"} if knows else {}
    if kind == "BPE":
        settings |= _flag(draw, "fuse_unk", "byte_fallback", "ignore_merges")
        marks = ("end_of_word_suffix", "</w>"), ("continuing_subword_prefix", "##")
        # The library loses the places of bytes that spell a marked character.
        marked = (
            {} if settings["byte_fallback"] else dict([draw.choice(marks)] * (draw.random() < 0.5))
        )
        settings |= marked
        options |= {"special_tokens": special + spelled, "vocab_size": 500, **marked}
    elif kind == "WordPiece":
        settings["max_input_chars_per_word"] = draw.choice([3, 20])
        options["vocab_size"] = 250
    made = t.Tokenizer(getattr(t.models, kind)(**settings))
    made = t.Tokenizer.from_str(json.dumps(json.loads(made.to_str()) | parts))
    trainer = getattr(t.trainers, f"{kind.replace('BPE', 'Bpe')}Trainer")
    made.train_from_iterator(CORPUS, trainer(**options))
    return made


def tokenizer(seed: int) -> Any:
    """Returns a tokenizer of drawn parts."""
    t = pytest.importorskip("tokenizers", reason="an extra, which is not installed")
    draw = Draw(seed)
    parts = {"normalizer": _normalizer(draw), "pre_tokenizer": _pre_tokenizer(draw)}
    made = _trained(draw, t, parts)
    flags = _flag(draw, "trim_offsets", "add_prefix_space")
    processor = draw.choice([None, {"type": "ByteLevel", "use_regex": True, **flags}])
    parts = {"decoder": _decoder(draw), "post_processor": processor}
    made = t.Tokenizer.from_str(json.dumps(json.loads(made.to_str()) | parts))
    for content in draw.sample(ADDED, draw.randint(0, 5)):
        token = t.AddedToken(
            content, **_flag(draw, "single_word", "lstrip", "rstrip", "normalized")
        )
        (made.add_special_tokens if draw.random() < 0.3 else made.add_tokens)([token])
    return made


def _common(draw: Draw, vocabulary: int, most: int) -> dict[str, Any]:
    """Returns options of every search, some of them at a limit or beyond."""

    def tokens(count: int) -> list[int]:
        return [draw.randrange(vocabulary + (draw.random() < 0.01)) for _ in range(count)]

    drawn: dict[str, Callable[[], Any]] = {
        "length_penalty": lambda: draw.choice([0, -10, -0.5, 0.6, 2, 10]),
        "min_length": lambda: draw.randint(0, most),
        "max_total_length": lambda: draw.choice([1, 9, 30, 70]),
        "min_total_length": lambda: draw.choice([1, 8]),
        "repetition_penalty": lambda: draw.choice([0.001, 0.5, 1.3, 1000]),
        "no_repeat_ngram": lambda: draw.choice([1, 2, 3]),
        "prompt_ngrams": lambda: True,
        "suppress": lambda: [*tokens(draw.randint(0, 2)), draw.choice(["e", " the", "cat"])],
        "suppress_sequences": lambda: [tokens(draw.randint(1, 2)), tokens(2)],
        "suppress_begin": lambda: tokens(2),
        "forced_begin": lambda: draw.choice([None, *tokens(1)]),
        "forced_end": lambda: draw.choice([[2], tokens(2)]),
        "prefix": lambda: tokens(draw.randint(0, 2)),
        "stop": lambda: [draw.choice(["e", " ", "n", "the", "\ufffd"])],
        "split_lines": lambda: draw.choice([None, True, False]),
    }
    return {name: made() for name, made in drawn.items() if draw.random() < 0.15}


def options(draw: Draw, vocabulary: int) -> dict[str, Any]:
    """Returns options of generation, which may contradict each other."""
    most, few = draw.choice([1, 2, 5, 9, 16]), draw.choice([1, 2, 3, 5, 8, 16])
    found = {"max_length": most, **_common(draw, vocabulary, most)}
    kind = draw.choice(["greedy", "beam", "sample"])
    if kind == "beam":
        early = draw.choice([True, False, "never"])
        best = {"n_best": draw.randint(1, few)}
        found |= {"beam": few, **best, "early_stopping": early, **_flag(draw, "renormalise")}
    elif kind == "sample":
        drawn: dict[str, Sequence[Any]] = {
            "n_best": [2, 5],
            "seed": [1, 2**53 - 1],
            "temperature": [1e-6, 0.5, 10, 1e6],
            "top_k": [0, 1, 5, vocabulary, 2**31 - 1, 2**31],
            "top_p": [1e-9, 0.5, 0.999999],
            "min_p": [0, 0.1, 1],
            "typical_p": [0.2, 0.9],
        }
        chosen = [name for name in drawn if draw.random() < 0.4]
        found |= {"sample": True, **{name: draw.choice(drawn[name]) for name in chosen}}
    return found
