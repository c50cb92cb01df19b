"""Tokenizer classes of encoders and encoder-decoders, by drawn and by odd settings.

As in test_tokenizers.py, whatever AutoTokenizer makes of a folder is the reference. A folder holds
the tokenizer.json that its class wrote, altered, or a SentencePiece model alone.
"""

import json
import random
import sys
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from tests.build_model.importing.huggingface.drawn import tokenizers, transformers
from tests.build_model.importing.huggingface.small_models import (
    change,
    marian_vocabulary,
    require_saved,
    require_their_tokens,
    require_uncut,
    sentencepiece_model,
)
from tests.build_model.importing.huggingface.tokenizer.test_tokenizers import SEEDS, byte_level
from transferry.build_model.importing.huggingface.folder import TOKENIZER_CONFIG, PretrainedFolder
from transferry.build_model.importing.huggingface.settings_table import judge
from transferry.build_model.importing.huggingface.tokenizer.vocabularies import TOKENIZERS
from transferry.build_model.model.config import ModelConfig
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.tokenizer.special_tokens import AnyTokenizer

Draw = random.Random
DEBERTA_AND_ALBERT = ("deberta-v2", "deberta", "albert")
ENCODERS = ("bert", "mpnet", "roberta", "xlm-roberta", "camembert", *DEBERTA_AND_ALBERT)
TEXTS = [
    "Straße über die Häuser",
    "日本語 😀",
    "  a  b   c ",
    "</s> <s>x</s> [MASK] <mask> [SEP] <extra_id_0> <unk_2>",
    "Ünïcode ﬁ Ａ e\u0301 didn't they're 12345 . ?",
    "",
    "\tTab\n\n line\u2028x\u00a0y\n",
    "Hello World , THE cat ! it 's",
]
CORPUS = ["Straße über Häuser", "hello world, the cat's", "didn't it? 12345", "Uber strasse"] * 9
# Model type, class and SentencePiece model of each kind of folder.
FAIRSEQ_PIECES = "sentencepiece.bpe.model"
KINDS = {
    "BERT": ("bert", "BertTokenizer", ""),
    "BERT, pieces": ("bert", "XLMRobertaTokenizer", FAIRSEQ_PIECES),
    "MPNet": ("mpnet", "MPNetTokenizer", ""),
    "RoBERTa": ("roberta", "RobertaTokenizer", ""),
    "XLM-R": ("xlm-roberta", "XLMRobertaTokenizer", FAIRSEQ_PIECES),
    "CamemBERT": ("camembert", "CamembertTokenizer", FAIRSEQ_PIECES),
    "DeBERTa-v2": ("deberta-v2", "DebertaV2Tokenizer", "spm.model"),
    "DeBERTa": ("deberta", "DebertaTokenizer", ""),
    "ALBERT": ("albert", "AlbertTokenizer", "spiece.model"),
    "BART": ("bart", "BartTokenizer", ""),
    "T5": ("t5", "T5Tokenizer", "spiece.model"),
    "PEGASUS": ("pegasus", "PegasusTokenizer", "spiece.model"),
    "mBART": ("mbart", "MBartTokenizer", FAIRSEQ_PIECES),
    "mBART-50": ("mbart", "MBart50Tokenizer", FAIRSEQ_PIECES),
    "NLLB": ("m2m_100", "NllbTokenizer", ""),
}
OF_PIECES = [kind for kind, (_, _, pieces) in KINDS.items() if pieces]
WORD_PIECES = {
    "BertTokenizer": ("[UNK]", "[SEP]", "[PAD]", "[CLS]", "[MASK]"),
    "MPNetTokenizer": ("</s>", "[UNK]", "<pad>", "<s>", "<mask>"),
}


@lru_cache
def word_pieces(special: tuple[str, ...]) -> dict[str, int]:
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=120, special_tokens=list(special), show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    found: dict[str, int] = made.get_vocab()
    return found


@lru_cache
def spm(kind: str, **options: Any) -> bytes:
    ids = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    own: dict[str, Any] = ids if kind in ("T5", "PEGASUS") else {}
    if kind == "ALBERT":
        own = {"pad_id": 0, "unk_id": 1, "bos_id": -1, "eos_id": -1}
        named = ("[CLS]", "[SEP]", "[MASK]", options.get("control_symbols", ""))
        options["control_symbols"] = ",".join(filter(None, named))
    return sentencepiece_model(**{"vocab_size": 90, "model_type": "unigram", **own, **options})


def write_settings(folder: Path, kind: str, settings: dict[str, Any]) -> None:
    model_type = KINDS[kind][0]
    start, end = (0, 1) if kind in ("T5", "PEGASUS") else (0, 2)
    ids = {"bos_token_id": 0, "decoder_start_token_id": start, "eos_token_id": end}
    config = {"model_type": model_type, "transformers_version": "5.0.0", **ids}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_pieces(folder: Path, kind: str, **options: Any) -> None:
    """A SentencePiece model with the least that names its class."""
    _, name, pieces = KINDS[kind]
    (folder / pieces).write_bytes(spm(kind, **options))
    counts = {"T5": {"extra_ids": 3}, "PEGASUS": {"offset": 9}}
    write_settings(folder, kind, {"tokenizer_class": name, **counts.get(kind, {})})


def write_folder(folder: Path, kind: str) -> None:
    """Writes a folder with `save_pretrained` of the class."""
    _, name, pieces = KINDS[kind]
    if kind in OF_PIECES:
        write_pieces(folder, kind)
        made = transformers.AutoTokenizer.from_pretrained(folder)
        (folder / pieces).unlink()
    elif name in WORD_PIECES:
        made = getattr(transformers, name)(vocab=dict(word_pieces(WORD_PIECES[name])))
    else:
        vocabulary, merges = byte_level()
        special = dict.fromkeys(["<s>", "<pad>", "</s>", "<unk>", "<mask>", *vocabulary])
        ids = {text: number for number, text in enumerate(special)}
        codes = {"extra_special_tokens": ["eng_Latn", "deu_Latn"]} if kind == "NLLB" else {}
        made = getattr(transformers, name)(vocab=ids, merges=merges, **codes)
    made.save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    write_settings(folder, kind, settings)


def imported(folder: Path, kind: str) -> tuple[AnyTokenizer, PretrainedFolder]:
    model_type = KINDS[kind][0]
    shape = ModelConfig(1024, 8, 2, 1, 1, 8, architecture="encoder-decoder")
    if model_type in ENCODERS:
        shape = ModelConfig(1024, 8, 2, 1, 0, 8, architecture="encoder-only")
    checkpoint = PretrainedFolder(folder)
    return TOKENIZERS[model_type](checkpoint, shape), checkpoint


CHANGES: dict[str, tuple[Any, ...]] = {
    "do_lower_case": (True, False),
    "strip_accents": (True, False, None),
    "tokenize_chinese_chars": (False,),
    "add_prefix_space": (True, False),
    "trim_offsets": (False,),
    "clean_up_tokenization_spaces": (True,),
    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": (True,),
    "add_bos_token": (True,),
    "legacy": (True,),
    "legacy_behaviour": (True,),
    "src_lang": ("de_DE", "deu_Latn"),
    "extra_ids": (2, 100),
    "offset": (5,),
    "mask_token_sent": (None, "<mask_1>"),
    "split_special_tokens": (True,),
    "truncation_side": ("left",),
    "model_max_length": (5,),
    "extra_special_tokens": (["the"], ["<new>"]),
    "additional_special_tokens": (None, ["<new>"]),
}


def alter(draw: Draw, record: dict[str, Any]) -> None:
    """Settings of a class itself, with other values in tokenizer.json."""
    values: dict[str, Any] = {
        "normalizer": {"type": "Lowercase"},
        "pre_tokenizer": {"type": "Whitespace"},
        "decoder": {"type": "Fuse"},
        "post_processor": None,
        "truncation": dict(direction="Left", max_length=4, strategy="LongestFirst", stride=0),
        "padding": {
            "strategy": {"Fixed": 20},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "a",
        },
    }
    part = draw.choice([*values])
    record[part] = values[part]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_texts_are_those_of_the_class(kind: str, seed: int, tmp_path: Path) -> None:
    draw = random.Random(f"{kind} {seed}")
    write_folder(tmp_path, kind)
    path = tmp_path / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    for name in draw.sample(sorted(CHANGES), 4):
        settings[name] = draw.choice(CHANGES[name])
    if settings.get("src_lang") not in (None, "de_DE" if "mBART" in kind else "deu_Latn"):
        del settings["src_lang"]
    if draw.random() < 0.3:
        settings["tokenizer_class"] = draw.choice([f"{KINDS[kind][1]}Fast", AS_IT_IS])
    path.write_text(json.dumps(settings))
    if draw.random() < 0.7:
        file = tmp_path / "tokenizer.json"
        record = json.loads(file.read_text())
        alter(draw, record)
        file.write_text(json.dumps(record))
    try:
        ours, checkpoint = imported(tmp_path, kind)
    except InputError as error:  # where nothing but its own text is left of "a"
        assert "expected the tokens [" in str(error), settings
        return
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    require_their_tokens(ours, theirs, TEXTS)
    if settings["tokenizer_class"] != AS_IT_IS:
        require_uncut(ours)
    assert checkpoint.in_force["truncation_side"] == theirs.truncation_side


AS_IT_IS = "PreTrainedTokenizerFast"


@pytest.mark.parametrize("flag", ["special", "lstrip", "single_word"])
@pytest.mark.parametrize("kind", ["BERT", "RoBERTa", "XLM-R"])
def test_special_tokens_of_the_file_have_other_flags_in_the_settings(
    kind: str, flag: str, tmp_path: Path
) -> None:
    write_folder(tmp_path, kind)
    made = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    made.add_special_tokens(["the", "Häuser"])
    made.save(str(tmp_path / "tokenizer.json"))
    listed = json.loads(made.to_str())["added_tokens"]
    flags = {str(each.pop("id")): {**each, flag: not each[flag]} for each in listed}
    change(tmp_path / TOKENIZER_CONFIG, tokenizer_class=AS_IT_IS, added_tokens_decoder=flags)
    ours, _ = imported(tmp_path, kind)
    require_their_tokens(ours, transformers.AutoTokenizer.from_pretrained(tmp_path), TEXTS)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", OF_PIECES)
def test_a_sentencepiece_model_alone_gives_the_ids_of_its_class(
    kind: str, seed: int, tmp_path: Path
) -> None:
    draw = random.Random(f"pieces {kind} {seed}")
    options: dict[str, Any] = {
        name: draw.choice(values)
        for name, values in {
            "user_defined_symbols": ("the,<sep>",),
            "control_symbols": ("<ctrl>",),
            "normalization_rule_name": ("identity", "nmt_nfkc_cf"),
            "remove_extra_whitespaces": (False,),
            "add_dummy_prefix": (False,),
        }.items()
        if draw.random() < 0.4
    }
    write_pieces(tmp_path, kind, **options)
    path = tmp_path / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    names = ("clean_up_tokenization_spaces", "extra_special_tokens", "additional_special_tokens")
    for name in (*names, "add_prefix_space", "extra_ids", "offset", "mask_token_sent"):
        if draw.random() < 0.3:
            settings[name] = draw.choice(CHANGES[name])
    path.write_text(json.dumps(settings))
    if draw.random() < 0.2:
        named = {"eos_token": "</s>", "additional_special_tokens": ["<a>"]}
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(named))
    ours, _ = imported(tmp_path, kind)
    require_their_tokens(ours, transformers.AutoTokenizer.from_pretrained(tmp_path), TEXTS)


@pytest.mark.parametrize(
    ("kind", "files", "message"),
    [
        ("T5", {}, r"in tokenizer\.json or spiece\.model, found no spiece\.model; copy it"),
        ("NLLB", {}, r"in tokenizer\.json, found no tokenizer\.json; copy it"),
        ("NLLB", {FAIRSEQ_PIECES: b""}, r"in tokenizer\.json, found no tokenizer\.json; copy it"),
        ("T5", {"spiece.model": b"\x0a\xff"}, "expected a tokenizer that transformers reads"),
    ],
)
def test_a_folder_without_a_tokenizer_is_refused(
    kind: str, files: dict[str, bytes], message: str, tmp_path: Path
) -> None:
    write_settings(tmp_path, kind, {"tokenizer_class": KINDS[kind][1]})
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        imported(tmp_path, kind)


def test_without_transformers_the_command_that_installs_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path, "BERT")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match=r"needs transformers 5, .* pip install .*\[import\]"):
        imported(tmp_path, "BERT")


@pytest.mark.parametrize("cleans", [False, True])
def test_marian_cleans_up_as_its_class_does(cleans: bool, tmp_path: Path) -> None:
    size = marian_vocabulary(tmp_path)
    settings: dict[str, Any] = {"clean_up_tokenization_spaces": cleans}
    settings["tokenizer_class"] = "MarianTokenizer"
    tokens = ["<new>", "▁the", "<beyond>"]
    named = dict(zip("abc", tokens, strict=True))
    key, value = ("additional", tokens) if cleans else ("extra", named)
    settings[f"{key}_special_tokens"] = value
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ids = {"eos_token_id": 0, "pad_token_id": size - 1, "decoder_start_token_id": size - 1}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "marian", **ids}))
    shape = ModelConfig(size + 1, 8, 2, 1, 1, 8, architecture="encoder-decoder")
    folder = PretrainedFolder(tmp_path)
    ours = TOKENIZERS["marian"](folder, shape)
    assert folder.notes == [f"<beyond> left out, since the model has {size + 1} tokens"]
    saved = require_saved(ours, tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    require_their_tokens(saved, theirs, ["x <new> the", "on ▁the <new></s>"])
    vocabulary = json.loads((tmp_path / "vocab.json").read_text())
    pieces = ["▁", "h", "e", "▁", ",", "▁", "'", "s", "▁", "."]
    written = [vocabulary[piece] for piece in pieces if piece in vocabulary]
    text = saved.decode(written)
    assert text == theirs.decode(written, skip_special_tokens=True)
    assert (" ," in text) is not cleans
    settings["sp_model_kwargs"] = {"enable_sampling": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(InputError, match="sp_model_kwargs is "):
        TOKENIZERS["marian"](PretrainedFolder(tmp_path), shape)


@pytest.mark.parametrize("listed", [False, True])
def test_marian_reads_words_of_single_word_as_text(listed: bool, tmp_path: Path) -> None:
    size = marian_vocabulary(tmp_path)
    word = {"content": "<new>", "single_word": True}
    own = {"added_tokens_decoder": {size: word}} if listed else {"cls_token": word}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own))
    ids = {"eos_token_id": 0, "pad_token_id": size - 1, "decoder_start_token_id": size - 1}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "marian", **ids}))
    shape = ModelConfig(size + 1, 8, 2, 1, 1, 8, architecture="encoder-decoder")
    folder = PretrainedFolder(tmp_path)
    assert "<new>" not in TOKENIZERS["marian"](folder, shape).special_texts()
    (note,) = folder.notes
    assert note.startswith("<new> left out of the tokens that texts may name")


@pytest.mark.parametrize("form", [str, lambda text: {"content": text}])
def test_marian_with_another_unknown_token_is_refused(form: Any, tmp_path: Path) -> None:
    size = marian_vocabulary(tmp_path)
    ids = {"eos_token_id": 0, "pad_token_id": size - 1, "decoder_start_token_id": size - 1}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "marian", **ids}))
    shape = ModelConfig(size + 1, 8, 2, 1, 1, 8, architecture="encoder-decoder")
    for text in ("<unk>", "</s>"):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"unk_token": form(text)}))
        refused = pytest.raises(InputError, match=r"unk_token is .*supported: <unk>")
        with nullcontext() if text == "<unk>" else refused:
            TOKENIZERS["marian"](PretrainedFolder(tmp_path), shape)


@pytest.mark.parametrize(
    ("end", "eos", "message"),
    [
        ("</s>", 0, ""),
        ("</s>", 2, r"expected eos_token_id 0, the tokenizer's </s>, found 2, which is text"),
        ("▁the", 0, r"expected eos_token_id \d+, the tokenizer's ▁the, found 0"),
        ({"content": "nowhere"}, 0, r"vocab.json: expected an id .* nowhere, found none"),
        (None, 0, r"vocab.json: expected an id .* None, found none"),
    ],
)
def test_marian_ends_sources_and_answers_alike(
    end: Any, eos: int, message: str, tmp_path: Path
) -> None:
    size = marian_vocabulary(tmp_path)
    ids = {"eos_token_id": eos, "pad_token_id": size - 1, "decoder_start_token_id": size - 1}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "marian", **ids}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    shape = ModelConfig(size + 1, 8, 2, 1, 1, 8, architecture="encoder-decoder")
    with pytest.raises(InputError, match=message) if message else nullcontext():
        TOKENIZERS["marian"](PretrainedFolder(tmp_path), shape)


def test_bytes_of_byt5_are_theirs(tmp_path: Path) -> None:
    theirs = transformers.ByT5Tokenizer()
    theirs.save_pretrained(tmp_path)
    ids = {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5", **ids}))
    shape = ModelConfig(384, 8, 2, 1, 1, 8, architecture="encoder-decoder")
    checkpoint = PretrainedFolder(tmp_path)
    ours = require_saved(TOKENIZERS["t5"](checkpoint, shape), tmp_path)
    checkpoint.tokenizer.get("model_max_length")  # as the importer does
    judge(TOKENIZER_CONFIG, checkpoint.tokenizer)
    for text in [*TEXTS, "\x00\x7f", "<extra_id_0> </s>"]:
        wanted = theirs(text, split_special_tokens=True).input_ids
        assert ours.special.wrap(ours.encode(text)) == wanted, text
        assert ours.decode([*wanted, 0, 259, 383]) == theirs.decode(
            [*wanted, 0, 259, 383], skip_special_tokens=True
        )
    assert "texts such as </s> are always read as bytes" in checkpoint.notes[1]
    with pytest.raises(UsageError, match="special tokens, as ByT5's does"):
        ours.read_special_tokens()
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["added_tokens_decoder"]["7"] = settings["added_tokens_decoder"].pop("260")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(InputError, match="expected the special tokens of ByT5 below 3"):
        TOKENIZERS["t5"](PretrainedFolder(tmp_path), shape)
