"""Folders as the authors of models published them: the tokenizer is that of AutoTokenizer.

Of each class that sets up its tokenizer itself, files and settings are drawn: tokenizer.json or the
older files alone, a full or a bare tokenizer_config.json, options that contradict tokenizer.json.
"""

from __future__ import annotations

import io
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from transferry.build_model.formats.sentencepiece_model import read_pieces
from transferry.build_model.huggingface.fast_tokenizer import read_fast_tokenizer
from transferry.build_model.huggingface.folder import Checkpoint
from transferry.build_model.huggingface.tokenizer_classes import (
    CLASSES,
    MBART50_LANGUAGES,
    MBART_LANGUAGES,
)
from transferry.runtime.errors import InputError

REASON = "a test dependency, which is not installed: it is what the import is held against"
transformers = pytest.importorskip("transformers", reason=REASON)
tokenizers = pytest.importorskip("tokenizers", reason=REASON)
spm = pytest.importorskip("sentencepiece", reason=REASON)

SEEDS = range(4 * int(os.environ.get("EXAMPLES", "2")))
CORPUS = ["the cat sat on the mat", "Straße über Häuser", "naïve café", "don't stop 1234"] * 9
TEXTS = [
    *("the cat sat", "Straße über Häuser", "日本 😀", "  two  blanks ", "don't\nstop\tit", "", "a"),
    *("CAFÉ 1234567", "ｆｕｌｌ ﬁ ½ e\u0301", "x\u00a0y"),
]
Draw = random.Random
FAIRSEQ = ["<s>", "<pad>", "</s>", "<unk>"]
Names = dict[str, Any]


def write(path: Path, record: Any) -> None:
    path.write_text(json.dumps(record, ensure_ascii=False), encoding="utf-8")


def names(mask: str = "<mask>") -> Names:
    found = {"bos": "<s>", "eos": "</s>", "sep": "</s>", "cls": "<s>", "unk": "<unk>"}
    return {f"{key}_token": text for key, text in {**found, "pad": "<pad>", "mask": mask}.items()}


def special(*texts: str) -> list[Any]:
    return [
        tokenizers.AddedToken(text, special=True, normalized=False, lstrip=text == "<mask>")
        for text in texts
    ]


def around(made: Any, single: str, pair: str, *texts: str) -> Any:
    ids = [(text, made.token_to_id(text)) for text in texts]
    return tokenizers.processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)


def byte_level(folder: Path, draw: Draw) -> Names:
    """RoBERTa and BART."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=310,
        special_tokens=FAIRSEQ,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(CORPUS, trainer)
    made.add_special_tokens(special("<mask>"))
    made.post_processor = tokenizers.processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    if draw.choice([True, False]):
        made.save(str(folder / "tokenizer.json"))
    model = json.loads(made.to_str())["model"]
    write(folder / "vocab.json", {**model["vocab"], "<mask>": len(model["vocab"])})
    lines = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"])]
    (folder / "merges.txt").write_text("\n".join(lines), encoding="utf-8")
    return names() | {"add_prefix_space": draw.choice([True, False]), "trim_offsets": True}


def word_pieces(folder: Path, draw: Draw) -> Names:
    """MPNet."""
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    made.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=draw.choice([True, False]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made.decoder = tokenizers.decoders.WordPiece()
    listed = [*FAIRSEQ, "[UNK]", "<mask>"]
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=120, special_tokens=listed, show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    made.post_processor = tokenizers.processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    if draw.choice([True, False]):
        made.save(str(folder / "tokenizer.json"))
    ids = made.get_vocab()
    (folder / "vocab.txt").write_text("\n".join(sorted(ids, key=ids.get)) + "\n", encoding="utf-8")
    return {
        **names(),
        "unk_token": "[UNK]",
        "do_lower_case": draw.choice([True, False]),
        "strip_accents": draw.choice([None, True, False]),
        "tokenize_chinese_chars": draw.choice([True, False]),
    }


def pieces(path: Path, kind: str = "unigram", **options: Any) -> list[tuple[str, float]]:
    out = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=out,
        model_type=kind,
        vocab_size=90,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    path.write_bytes(out.getvalue())
    model = spm.SentencePieceProcessor(model_proto=out.getvalue())
    return [(model.id_to_piece(each), model.get_score(each)) for each in range(len(model))]


def unigrams(
    folder: Path, draw: Draw, scores: list[tuple[str, float]], unknown: int, added: list[str]
) -> Any:
    """A tokenizer.json as versions before 5 converted SentencePiece's models."""
    made = tokenizers.Tokenizer(tokenizers.models.Unigram(scores, unk_id=unknown))
    steps = tokenizers.normalizers
    table = steps.Precompiled(read_pieces(next(folder.glob("*.model"))).characters)
    made.normalizer = draw.choice([table, steps.Sequence([table, steps.Strip(left=False)])])
    marked = tokenizers.pre_tokenizers.Metaspace()
    words = tokenizers.pre_tokenizers.WhitespaceSplit()
    whole = tokenizers.pre_tokenizers.Sequence([words, marked])
    made.pre_tokenizer = draw.choice([marked, whole])
    made.decoder = tokenizers.decoders.Metaspace()
    made.add_special_tokens(special(*added))
    return made


def of_fairseq(*languages: str) -> Callable[[Path, Draw], Names]:
    def make(folder: Path, draw: Draw) -> Names:
        """XLM-RoBERTa, mBART and mBART-50."""
        found = pieces(folder / "sentencepiece.bpe.model")[3:]
        tail = [(text, 0.0) for text in (*languages, "<mask>")]
        scores = [*((text, 0.0) for text in FAIRSEQ), *found, *tail]
        if draw.choice([True, False]):
            made = unigrams(folder, draw, scores, 3, [*FAIRSEQ, *languages, "<mask>"])
            pair = "<s> $A </s> </s> $B </s>"
            made.post_processor = around(made, "<s> $A </s>", pair, "<s>", "</s>")
            made.save(str(folder / "tokenizer.json"))
        return names() if languages else names() | {"add_prefix_space": draw.choice([True, False])}

    return make


def t5(folder: Path, draw: Draw) -> Names:
    ids: Names = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    scores, count = pieces(folder / "spiece.model", **ids), draw.choice([0, 4])
    gaps = [f"<extra_id_{number}>" for number in range(count)]
    scores = [*scores, *((text, 0.0) for text in reversed(gaps))]
    if draw.choice([True, False]):
        made = unigrams(folder, draw, scores, 2, ["<pad>", "</s>", "<unk>", *gaps])
        made.post_processor = around(made, "$A </s>", "$A </s> $B </s>", "</s>")
        made.save(str(folder / "tokenizer.json"))
    return {
        "extra_ids": count,
        "additional_special_tokens": gaps or None,
        **{
            f"{name}_token": text
            for name, text in zip(("pad", "eos", "unk"), ("<pad>", "</s>", "<unk>"), strict=True)
        },
    }


def pegasus(folder: Path, draw: Draw) -> Names:
    ids: Names = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    found = pieces(folder / "spiece.model", **ids)
    unknown = [f"<unk_{number}>" for number in range(2, 6)]
    lead = ["<pad>", "</s>", "<mask_1>", "<mask_2>"]
    scores = [*((text, 0.0) for text in lead), *((text, -100.0) for text in unknown), *found[2:]]
    if draw.choice([True, False]):
        made = unigrams(folder, draw, scores, 8, [*lead, *unknown, "<unk>"])
        made.post_processor = around(made, "$A </s>", "$A $B </s>", "</s>")
        made.save(str(folder / "tokenizer.json"))
    masks = {"mask_token": "<mask_2>", "mask_token_sent": "<mask_1>", "offset": 6}
    return {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", **masks}


# Files of each class, and the model types that use it.
PUBLISHED: dict[str, tuple[Callable[[Path, Draw], Names], tuple[str, ...]]] = {
    "RobertaTokenizer": (byte_level, ("roberta", "bart")),
    "MPNetTokenizer": (word_pieces, ("mpnet",)),
    "XLMRobertaTokenizer": (of_fairseq(), ("xlm-roberta", "bert")),
    "MBartTokenizer": (of_fairseq(*MBART_LANGUAGES), ("mbart",)),
    "MBart50Tokenizer": (of_fairseq(*MBART50_LANGUAGES), ("mbart",)),
    "T5Tokenizer": (t5, ("t5", "mt5")),
    "PegasusTokenizer": (pegasus, ("pegasus",)),
}
# Their own tests are in test_tokenizers, and in test_languages.
ELSEWHERE = {
    *("GPT2Tokenizer", "GPTNeoXTokenizer", "Qwen2Tokenizer", "GemmaTokenizer", "LlamaTokenizer"),
    *("BertTokenizer", "NllbTokenizer"),
}


def test_every_class_has_a_case() -> None:
    assert set(PUBLISHED) | ELSEWHERE == set(CLASSES)


def draw_folder(name: str, seed: int, folder: Path) -> str:
    draw = Draw(f"{name} {seed}")
    make, kinds = PUBLISHED[name]
    kind = draw.choice(kinds)
    settings = make(folder, draw) | {"tokenizer_class": draw.choice([name, f"{name}Fast"])}
    write(folder / "config.json", {"model_type": kind, "vocab_size": 400})
    registered = name != "MBart50Tokenizer" and kind != "bert"
    # As roberta-base and xlm-roberta-base; what settings say must then be what the class does.
    bare = (
        registered
        and draw.choice([True, False])
        and name not in ("T5Tokenizer", "PegasusTokenizer")
    )
    write(folder / "tokenizer_config.json", {"model_max_length": 64} | ({} if bare else settings))
    return "bare" if bare else "full"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", PUBLISHED)
def test_ids_and_texts_are_those_of_auto_tokenizer(name: str, seed: int, tmp_path: Path) -> None:
    draw_folder(name, seed, tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    found = read_fast_tokenizer(Checkpoint(tmp_path))
    languages = name.startswith("MBart")  # put around texts by `sequence_tokenizer`
    for text in TEXTS:
        wanted = theirs(text, add_special_tokens=not languages)["input_ids"]
        ids = found.tokenizer.encode(text, add_special_tokens=not languages).ids
        assert ids == wanted, text
        assert found.tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        if not languages:
            assert found.tokenizer.encode(text, "a").ids == theirs(text, "a")["input_ids"]
    for key in ("pad_token", "eos_token", "unk_token"):
        assert found.id_of(key) == theirs.convert_tokens_to_ids(getattr(theirs, key))


@pytest.mark.parametrize("cut", [0, 1, 7, 100, -1])
def test_a_damaged_sentencepiece_model_is_named(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "spiece.model"
    pieces(path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(InputError, match=r"spiece\.model"):
        read_pieces(path)


def test_pieces_are_those_of_the_library(tmp_path: Path) -> None:
    path = tmp_path / "spiece.model"
    wanted = pieces(path, user_defined_symbols=["[X]"], normalization_rule_name="nmt_nfkc_cf")
    found = read_pieces(path)
    assert found.scores == wanted
    assert found.user_defined == ("[X]",)
    assert found.characters
    assert found.unigram
    pieces(path, kind="bpe")
    assert not read_pieces(path).unigram
