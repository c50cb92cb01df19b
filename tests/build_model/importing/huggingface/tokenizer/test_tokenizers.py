"""The tokenizer of every folder gives the ids and texts of AutoTokenizer.

Folders are drawn: four of each model type in `make test`, as many as wanted with EXAMPLES=….
"""

import json
import os
import random
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from tests.build_model.importing.huggingface.drawn import tokenizers, transformers
from tests.build_model.importing.huggingface.small_models import (
    llama_pieces,
    require_saved,
    require_their_tokens,
)
from tests.runtime.tokenizer import vocabularies
from transferry.build_model.importing.huggingface import decoder_only
from transferry.build_model.importing.huggingface.folder import PretrainedFolder
from transferry.build_model.importing.huggingface.tokenizer.fast_tokenizer import (
    read_fast_tokenizer,
)
from transferry.build_model.importing.huggingface.tokenizer.vocabularies import TOKENIZERS
from transferry.build_model.model.config import ModelConfig
from transferry.runtime.errors import InputError
from transferry.runtime.tokenizer.byte_pair import Tokenizer
from transferry.runtime.tokenizer.special_tokens import AnyTokenizer

SEEDS = range(int(os.environ.get("EXAMPLES", "4")))
BYTE_LEVEL = ("gpt2", "opt", "gpt_neox", "qwen2", "qwen3")
CORPUS = [
    "Straße über Häuser läuft die Zeit",
    "hello world, this is a test of  double blanks",
    "the cat sat on the mat, didn't it? 12345 67",
    "<think> a thought </think> </s> <|im_end|>",
] * 10
TEXTS = [
    "Straße über die Häuser",
    "日本語 😀",
    "  a  b   c ",
    "</s> <s>x</s> <|im_end|><|im_start|> <pad> <unk> <|endoftext|> <bos>",
    "x<think>y </think> z<think >",
    "Ünïcode ﬁ Ａ e\u0301 didn't they're 12345",
    "",
    "\tTab\n\n line",
]
Draw = random.Random


@lru_cache
def byte_level() -> tuple[dict[str, int], list[tuple[str, str]]]:
    model = json.loads(vocabularies.byte_level(CORPUS, 300).to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


@lru_cache
def pieces() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """SentencePiece's kind: words with a mark in front, and bytes."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace("▁")
    special = ["<unk>", "<s>", "</s>", "<pad>", "<bos>", "<eos>", "<mask>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[*special, *(f"<0x{value:02X}>" for value in range(256))],
        show_progress=False,
    )
    made.train_from_iterator(CORPUS, trainer)
    model = json.loads(made.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def flags(draw: Draw, *, special: bool | None = None) -> dict[str, bool]:
    found = {name: draw.random() < 0.3 for name in ("lstrip", "rstrip", "single_word")}
    found["special"] = draw.random() < 0.5 if special is None else special
    return found | {"normalized": not found["special"] and draw.random() < 0.5}


def tokenizer_json(draw: Draw, bytewise: bool, added: list[dict[str, Any]], ends: list[str]) -> str:
    vocabulary, merges = byte_level() if bytewise else pieces()
    model = tokenizers.models.BPE(
        vocab=vocabulary, merges=merges, byte_fallback=not bytewise, fuse_unk=not bytewise
    )
    made = tokenizers.Tokenizer(model)
    if bytewise:
        blank = draw.random() < 0.2
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=blank)
        made.decoder = tokenizers.decoders.ByteLevel()
        if draw.random() < 0.3:
            made.normalizer = tokenizers.normalizers.NFC()
    else:
        parts = tokenizers.decoders
        made.decoder = parts.Sequence(
            [parts.Replace("▁", " "), parts.ByteFallback(), parts.Fuse(), parts.Strip(" ", 1, 0)]
        )
        if draw.random() < 0.5:
            steps = tokenizers.normalizers
            made.normalizer = steps.Sequence([steps.Prepend("▁"), steps.Replace(" ", "▁")])
        else:
            made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(
                "▁", prepend_scheme=draw.choice(["first", "never", "always"]), split=False
            )
    for token in added:
        made.add_tokens([tokenizers.AddedToken(**token)])
    if ends and draw.random() < 0.7:
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single=draw.choice([[ends[0], "$A"], ["$A", ends[-1]], [ends[0], "$A", ends[-1]]]),
            special_tokens=[(text, made.token_to_id(text)) for text in dict.fromkeys(ends)],
        )
    if draw.random() < 0.3:
        made.enable_truncation(1)  # left by a training; no text is cut
    content: str = made.to_str()
    return content


def write_folder(draw: Draw, kind: str, folder: Path) -> int:
    """Writes config.json and a tokenizer in one of the ways of the last years; returns its ids."""
    # Llama 3's is byte-level too, and its folder may say that it is Llama's.
    bytewise = kind in BYTE_LEVEL or (kind in ("llama", "smollm3") and draw.random() < 0.5)
    vocabulary, merges = byte_level() if bytewise else pieces()
    names = (
        ["<|endoftext|>", "<|im_end|>", "<|im_start|>"] if bytewise else ["<s>", "</s>", "<unk>"]
    )
    bos, eos = (names[0], draw.choice(names[:2])) if bytewise else ("<s>", "</s>")
    texts = [*names, *draw.sample(["<think>", "</think>", "<|tool|>", "  "], 3)]
    added = [{"content": text, **flags(draw, special=text in names or None)} for text in texts]
    classes = {"gpt2": "GPT2", "opt": "GPT2", "gpt_neox": "GPTNeoX", "qwen2": "Qwen2"}
    classes |= {"qwen3": "Qwen2", "gemma2": "Gemma", "gemma3_text": "Gemma"}
    own = classes.get(kind, "Llama")
    ids: dict[str, int] = dict(vocabulary)
    for text in texts:
        ids.setdefault(text, len(ids))
    config: dict[str, Any] = {"bos_token": bos, "eos_token": eos}
    if (declared := draw.choice([None, own, f"{own}Fast", "PreTrained", "Backend"])) is not None:
        special = {"PreTrained": "PreTrainedTokenizerFast", "Backend": "TokenizersBackend"}
        fast = "Fast" if declared.endswith("Fast") else ""
        name = special.get(declared, f"{declared.removesuffix('Fast')}Tokenizer{fast}")
        config["tokenizer_class"] = name
    for name in ("add_bos_token", "add_eos_token", "add_prefix_space"):
        if draw.random() < 0.4:
            config[name] = draw.random() < 0.5
    if draw.random() < 0.4:
        config["pad_token"] = draw.choice([eos, None, names[-1]])
    if draw.random() < 0.3:
        config["unk_token"] = draw.choice([None, names[-1] if bytewise else "<unk>"])
    if draw.random() < 0.3:
        config["legacy"] = draw.random() < 0.5
    if draw.random() < 0.3:
        config["additional_special_tokens"] = ["<|tool|>"]
    how = draw.choice(["decoder", "map", "nothing"])
    if how == "decoder":
        config["added_tokens_decoder"] = {
            str(ids[text]): each for text, each in zip(texts, added, strict=True)
        }
    elif how == "map":
        values = {"bos_token": {**added[0], "content": bos}, "eos_token": eos}
        for value in values.values():
            if isinstance(value, dict):
                del value["special"]
        (folder / "special_tokens_map.json").write_text(json.dumps(values))
    refused = declared in ("PreTrained", "Backend")
    if kind in BYTE_LEVEL and not refused and draw.random() < 0.5:
        (folder / "vocab.json").write_text(json.dumps(vocabulary))
        lines = ["#version: 0.2", *(" ".join(merge) for merge in merges)]
        (folder / "merges.txt").write_text("\n".join(lines) + "\n")
        if how == "map":
            lacking = {text: ids[text] for text in texts if text not in vocabulary}
            (folder / "added_tokens.json").write_text(json.dumps(lacking))
    else:
        (folder / "tokenizer.json").write_text(tokenizer_json(draw, bytewise, added, [bos, eos]))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(
        json.dumps({"model_type": kind, "transformers_version": "5.0.0"})
    )
    return len(ids)


def imported(folder: Path, kind: str, size: int) -> AnyTokenizer:
    shape = ModelConfig(size, 8, 2, 0, 1, 8, architecture="decoder-only")
    return TOKENIZERS[kind](PretrainedFolder(folder), shape)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", decoder_only.FAMILIES)
def test_ids_and_texts_are_those_of_auto_tokenizer(kind: str, seed: int, tmp_path: Path) -> None:
    draw = random.Random(f"{kind} {seed}")
    size = write_folder(draw, kind, tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["eos_token_id"] = theirs.eos_token_id
    (tmp_path / "config.json").write_text(json.dumps(config))
    ours = imported(tmp_path, kind, 64 * (-(-max(size, len(theirs)) // 64) + 1))
    raw = read_fast_tokenizer(PretrainedFolder(tmp_path)).tokenizer
    raw.no_truncation()
    for text in TEXTS:
        assert raw.encode(text).ids == theirs(text).input_ids, text
    require_their_tokens(ours, theirs, TEXTS)
    whole = list(range(ours.vocabulary_size))
    assert ours.decode(whole[-32:]) == ""
    require_saved(ours, tmp_path)


def gpt2_folder(folder: Path, **settings: Any) -> int:
    """vocab.json and merges.txt; returns the number of ids, <|endoftext|> included."""
    vocabulary, merges = byte_level()
    ids = {**vocabulary, "<|endoftext|>": len(vocabulary)}
    (folder / "vocab.json").write_text(json.dumps(ids))
    (folder / "merges.txt").write_text("\n".join(" ".join(merge) for merge in merges))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {"model_type": "gpt2", "eos_token_id": len(vocabulary)}
    (folder / "config.json").write_text(json.dumps(config))
    return len(ids)


@pytest.mark.parametrize("more", [0, 1, 64])
def test_a_vocabulary_may_have_more_ids_than_the_tokenizer(more: int, tmp_path: Path) -> None:
    size = gpt2_folder(tmp_path)
    ours = imported(tmp_path, "gpt2", size + more)
    assert isinstance(ours, Tokenizer)
    assert ours.vocabulary_size == size + more
    assert ours.decode([*ours.encode("ok"), *range(size - 1, size + more)]) == "ok"
    require_saved(ours, tmp_path)
    told = rf"expected ids below vocab_size, {size - 1}, found {size - 1} of .*resize_token_embed"
    with pytest.raises(InputError, match=told):
        imported(tmp_path, "gpt2", size - 1)


@pytest.mark.parametrize("special", [True, False])
def test_a_special_token_that_the_model_lacks_is_left_out(special: bool, tmp_path: Path) -> None:
    """A text never gives it, as in the many folders with one for padding."""
    size = gpt2_folder(tmp_path)
    before = imported(tmp_path, "gpt2", size)
    token = {"content": "<pad>", **flags(random.Random(0), special=special)}
    gpt2_folder(
        tmp_path, pad_token="<pad>" if special else None, added_tokens_decoder={size: token}
    )
    if not special:
        with pytest.raises(InputError, match=rf"found {size} of the token '<pad>'; give the model"):
            imported(tmp_path, "gpt2", size)
        return
    checkpoint = PretrainedFolder(tmp_path)
    shape = ModelConfig(size, 8, 2, 0, 1, 8, architecture="decoder-only")
    after = TOKENIZERS["gpt2"](checkpoint, shape)
    assert f"<pad> left out, since the model has {size} tokens" in checkpoint.notes
    for text in [*TEXTS, "<pad>"]:
        assert after.encode(text) == before.encode(text)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "phi3"])
def test_a_sentencepiece_model_alone_is_read_by_its_library(kind: str, tmp_path: Path) -> None:
    # As each of them was trained; transformers puts no blank for a class that is not Llama's.
    content = llama_pieces(add_dummy_prefix=kind == "llama")
    (tmp_path / "tokenizer.model").write_bytes(content)
    name = {"llama": "LlamaTokenizer", "gemma2": "GemmaTokenizer"}.get(kind)
    ends = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    config = {"tokenizer_class": name, "chat_template": "x", **ends}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ids = {"model_type": kind, "bos_token_id": 1, "eos_token_id": 2}
    (tmp_path / "config.json").write_text(json.dumps(ids))
    shape = ModelConfig(400, 8, 2, 0, 1, 8, architecture="decoder-only")
    checkpoint = PretrainedFolder(tmp_path)
    ours = TOKENIZERS[kind](checkpoint, shape)
    followed, *others = checkpoint.notes[::-1]
    assert followed.startswith("tokenizer.model is followed as SentencePiece reads it, not AutoTok")
    assert others == ["chat template left out: it needs a tokenizer.json"]
    assert ours.chat is None
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    require_their_tokens(ours, theirs, ("hello world", "Straße  über", "x 12345\n"))
    config["added_tokens_decoder"] = {"330": {"content": "<|user|>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"cannot hold the added token '<\|user\|>'; make a "):
        TOKENIZERS[kind](PretrainedFolder(tmp_path), shape)


OTHERWISE = "expected a tokenizer that transformers reads, found something else"
ADDED = {"content": "<|pad|>", "special": True}


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"added_tokens_decoder": {"301": ADDED}, "pad_token": "<|pad|>"}, "tiktoken"),
        ({"added_tokens_decoder": {"301": {**ADDED, "special": False}}}, "tokenizers"),
        ({"add_prefix_space": True}, "tokenizers"),
        ({"add_bos_token": True}, "tiktoken"),
        # A token of the vocabulary, which texts give and answers leave out.
        ({"additional_special_tokens": ["o"]}, "tokenizers"),
        ({"tokenizer_class": "GPT2TokenizerFast", "model_max_length": 1024}, "tiktoken"),
    ],
)
def test_gpt2_stays_tiktoken_where_it_is_equal(
    settings: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    size = gpt2_folder(tmp_path, **settings)
    assert size == 301
    ours = imported(tmp_path, "gpt2", size + 3)
    assert getattr(ours, "kind", "tiktoken") == kind
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    require_their_tokens(ours, theirs, TEXTS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"added_tokens_decoder": {"310": ADDED}}, "expected the id 310 for the added token"),
        ({"added_tokens_decoder": {"301": {"text": "x"}}}, OTHERWISE),
        ({"added_tokens_decoder": [1]}, OTHERWISE),
        ({"additional_special_tokens": 3}, OTHERWISE),
        ({"add_prefix_space": "yes"}, OTHERWISE),
        ({"tokenizer_class": 3}, "tokenizer_class is 3, which cannot be imported; supported"),
    ],
)
def test_what_a_tokenizer_cannot_follow_is_refused(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    size = gpt2_folder(tmp_path, **settings)
    with pytest.raises(InputError, match=message):
        imported(tmp_path, "gpt2", size + 20)


def template_without_its_token(record: dict[str, Any]) -> None:
    record["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A"}}],
        "pair": [],
        "special_tokens": {},
    }
    record["post_processor"]["single"][1]["Sequence"]["type_id"] = 0


def enormous_id(record: dict[str, Any]) -> None:
    record["model"]["vocab"]["a"] = 1 << 31


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (template_without_its_token, r"the library fails on it: no entry found for key"),
        (enormous_id, r"found something else \(the id 2147483648\)"),
    ],
)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral"])
def test_what_makes_the_library_fail_is_refused(
    kind: str, change: Any, message: str, tmp_path: Path
) -> None:
    vocabulary, merges = pieces() if kind == "mistral" else byte_level()
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    record = json.loads(made.to_str())
    change(record)
    (tmp_path / "tokenizer.json").write_text(json.dumps(record))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "eos_token_id": 1}))
    with pytest.raises(InputError, match=message):
        imported(tmp_path, kind, 500)


@pytest.mark.parametrize("lower", [None, False])
@pytest.mark.parametrize("name", ["BertTokenizer", "PreTrainedTokenizerFast"])
def test_berts_settings_go_before_its_normalizer(
    name: str, lower: bool | None, tmp_path: Path
) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "Straße", "straße", "über", "Uber"]
    vocabulary = {word: number for number, word in enumerate(words)}
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made.add_special_tokens(words[:5])
    made.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    made.save(str(tmp_path / "tokenizer.json"))
    settings: dict[str, Any] = {"tokenizer_class": name, "strip_accents": False}
    settings |= {} if lower is None else {"do_lower_case": lower}
    named = ("pad", "unk", "cls", "sep", "mask")
    settings |= {f"{each}_token": f"[{each.upper()}]" for each in named}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    checkpoint = PretrainedFolder(tmp_path)
    shape = ModelConfig(16, 8, 2, 1, 0, 8, architecture="encoder-only", output_transform=True)
    ours = TOKENIZERS["bert"](checkpoint, shape)
    require_their_tokens(ours, transformers.AutoTokenizer.from_pretrained(tmp_path), [words[5]])
    followed = name == "BertTokenizer"
    assert ("do_lower_case" in checkpoint.tokenizer.unread()) is (not followed and lower is False)
    assert bool(checkpoint.notes) is followed
    if followed:
        assert "as BertTokenizer of transformers sets" in checkpoint.notes[0]
        assert ("normalizer" in checkpoint.notes[0]) is (lower is None)
