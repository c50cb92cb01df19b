"""Any tokenizer.json that the library can write: ids and texts of AutoTokenizer, or a refusal."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.build_model.importing.huggingface.drawn import tokenizers as t
from tests.build_model.importing.huggingface.drawn import transformers
from tests.js import test_tokenizers as made_by
from tests.js.cases import hard_strings
from transferry.build_model.importing.huggingface.folder import PretrainedFolder
from transferry.build_model.importing.huggingface.tokenizer.vocabularies import TOKENIZERS
from transferry.build_model.model.config import ModelConfig
from transferry.runtime.errors import TransferryError

Draw = random.Random
SEEDS = range(settings().max_examples // 10 + 1)
ADDED = ("<think>", "the", " cat", "e\u0301", "ÉÉ", "\n", "日本", "[X]", "'s", "▁the", "ß")
TEXTS = [text for text in hard_strings(120, surrogates=False) if len(text) < 300]
TEXTS += ["\r\n a", "  lead", "trail  ", "a\u2028b", "[X]the <think> the", "ééÉÉ É", "w" * 3000]
SCHEMES, BEHAVIORS = ("first", "never", "always"), ("removed", "isolated", "contiguous")


def normalizer(draw: Draw) -> Any:
    n = t.normalizers
    each = [
        *(n.NFC(), n.NFD(), n.NFKC(), n.NFKD(), n.Lowercase(), n.StripAccents(), n.Nmt()),
        *(n.Strip(), n.Prepend("▁"), n.Replace(" ", "▁"), n.Replace(t.Regex(r"\s+"), " ")),
        *(n.Replace(t.Regex("[aeiou]{2,}"), ""), n.BertNormalizer(strip_accents=None)),
    ]
    return n.Sequence(draw.sample(each, draw.randint(1, 3)))


def pre_tokenizer(draw: Draw) -> Any:
    p, kind = t.pre_tokenizers, draw.choice(BEHAVIORS)
    each = [
        *(p.Whitespace(), p.WhitespaceSplit(), p.BertPreTokenizer(), p.Punctuation(kind)),
        *(p.Digits(True), p.Split(" ", kind), p.Split(t.Regex(r"\d{1,3}|\p{Lu}"), kind)),
        p.Metaspace("▁", prepend_scheme=draw.choice(SCHEMES), split=draw.random() < 0.5),
    ]
    return p.Sequence(draw.sample(each, draw.randint(1, 3)))


def tokenizer(draw: Draw) -> Any:
    """A tokenizer of one of the models, with parts of others, and added tokens."""
    scheme, d = draw.choice(SCHEMES), t.decoders
    models: list[Callable[[], Any]] = [
        lambda: made_by.gpt2(t),
        lambda: made_by.word_piece(t, cased=draw.random() < 0.5),
        lambda: made_by.unigram(t, scheme=scheme, words=draw.random() < 0.5),
        lambda: made_by.pieces(t, byte_fallback=draw.random() < 0.5),
        lambda: made_by.clip(t),
        lambda: made_by.words_apart(t),
    ]
    made = draw.choice(models)()
    if draw.random() < 0.5:
        made.normalizer = normalizer(draw)
    if draw.random() < 0.4:
        made.pre_tokenizer = pre_tokenizer(draw)
    if draw.random() < 0.3:
        blanks = d.Sequence([d.Replace("▁", " "), d.ByteFallback(), d.Fuse(), d.Strip(" ", 1, 0)])
        made.decoder = draw.choice([None, d.WordPiece(), d.Metaspace(), d.Fuse(), blanks])
    for text in draw.sample(ADDED, draw.randint(0, 4)):
        sides = {name: draw.random() < 0.3 for name in ("lstrip", "rstrip", "single_word")}
        token = t.AddedToken(text, normalized=draw.random() < 0.4, **sides)
        draw.choice([made.add_tokens, made.add_special_tokens])([token])
    made.add_special_tokens(["<B>", "<E>"])
    ends = [(text, made.token_to_id(text)) for text in ("<B>", "<E>")]
    single = draw.choice(["<B> $A", "$A <E>", "<B> <B> $A <E>", "$A"])
    made.post_processor = t.processors.TemplateProcessing(single=single, special_tokens=ends)
    return made


def write(folder: Path, draw: Draw, kind: str) -> int:
    """Writes a folder of a model type; returns the number of ids."""
    made = tokenizer(draw)
    made.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<B>", "eos_token": "<E>", "cls_token": "<B>", "sep_token": "<E>"}
    config: dict[str, Any] = {**named, "pad_token": "<E>", "mask_token": "<B>"}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    config |= {"clean_up_tokenization_spaces": draw.random() < 0.5}
    if draw.random() < 0.3:  # with other flags than tokenizer.json
        listed = json.loads(made.to_str())["added_tokens"]
        config["added_tokens_decoder"] = {
            str(each.pop("id")): {**each, flag: draw.choice([each[flag], not each[flag]])}
            for each in listed
            for flag in [draw.choice(["special", "lstrip", "single_word"])]
        }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    begin, end = made.token_to_id("<B>"), made.token_to_id("<E>")
    ids = {"bos_token_id": begin, "eos_token_id": end, "pad_token_id": end}
    ids |= {"decoder_start_token_id": begin}
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **ids}))
    return 1 + int(max(made.get_vocab().values()))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.filterwarnings("ignore")
def test_ids_and_texts_are_those_of_auto_tokenizer(seed: int, tmp_path: Path) -> None:
    draw = Draw(seed)
    kind, encoders, decoders = draw.choice([("llama", 0, 1), ("bert", 1, 0), ("bart", 1, 1)])
    names = {(0, 1): "decoder-only", (1, 0): "encoder-only", (1, 1): "encoder-decoder"}
    size = write(tmp_path, draw, kind)
    architecture: Any = names[encoders, decoders]
    shape = ModelConfig(size, 8, 2, encoders, decoders, 8, architecture=architecture)
    try:
        ours = TOKENIZERS[kind](PretrainedFolder(tmp_path), shape)
    except TransferryError:
        return
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    reads = type(ours)._restore(ours._settings(), ours.special, ours._contents())
    reads.read_special_tokens()
    for text in TEXTS:
        for each, split in ((ours, True), (reads, False)):
            try:
                wanted = theirs(text, split_special_tokens=split).input_ids
            except BaseException as error:  # a panic of the library
                if isinstance(error, KeyboardInterrupt):
                    raise
                continue
            assert each.special.wrap(each.encode(text)) == wanted, text
    for _ in range(150):
        ids = draw.choices(range(size), k=draw.randint(1, 9))
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), ids
