"""The tokenizer classes of transformers 5.24 that set up a tokenizer themselves.

From tokenizer.json they take vocabulary, merges, compiled normalisation and, unless they
have one of their own, the post-processor (`TokenizersBackend.convert_to_native_format`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from transferry.build_model.importing.huggingface.folder import Checkpoint, Settings
from transferry.build_model.importing.huggingface.tokenizer.table import (
    COPY,
    TOKENIZER,
    Scores,
    Table,
)
from transferry.runtime.errors import InputError

# Token by name, such as "bos_token"; None where a folder says null.
Named = dict[str, Any]
Texts = Mapping[str, str]

# The class that uses tokenizer.json as it is, under the names that folders give it.
AS_IT_IS = "TokenizersBackend"
SYNONYMS = ("PreTrainedTokenizer", "PythonBackend", "BloomTokenizer", "MT5Tokenizer")
# TOKENIZER_MAPPING_NAMES of transformers; model types that are absent have no class of their own.
REGISTERED = {
    "gpt2": "GPT2Tokenizer",
    "opt": "GPT2Tokenizer",
    "gpt_neox": "GPTNeoXTokenizer",
    "qwen2": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    "gemma2": "GemmaTokenizer",
    "gemma3_text": "GemmaTokenizer",
    "bert": "BertTokenizer",
    "distilbert": "BertTokenizer",
    "electra": "BertTokenizer",
    "mpnet": "MPNetTokenizer",
    "roberta": "RobertaTokenizer",
    "bart": "RobertaTokenizer",
    "xlm-roberta": "XLMRobertaTokenizer",
    "mbart": "MBartTokenizer",
    "m2m_100": "M2M100Tokenizer",
    "pegasus": "PegasusTokenizer",
    "t5": "T5Tokenizer",
    "mt5": "T5Tokenizer",
    "mistral": AS_IT_IS,
    "phi3": AS_IT_IS,
    "olmo2": AS_IT_IS,
}
# Classes that make what another makes.
ALIASES = {
    "DistilBertTokenizer": "BertTokenizer",
    "ElectraTokenizer": "BertTokenizer",
    "BartTokenizer": "RobertaTokenizer",
}
# MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS: the class that the folder names is not followed.
NOT_FOLLOWED = ("phi3", "qwen2")

QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# FAIRSEQ_LANGUAGE_CODES of MBartTokenizer, and those that MBart50Tokenizer adds.
MBART_LANGUAGES = (
    *("ar_AR", "cs_CZ", "de_DE", "en_XX", "es_XX", "et_EE", "fi_FI", "fr_XX", "gu_IN", "hi_IN"),
    *("it_IT", "ja_XX", "kk_KZ", "ko_KR", "lt_LT", "lv_LV", "my_MM", "ne_NP", "nl_XX", "ro_RO"),
    *("ru_RU", "si_LK", "tr_TR", "vi_VN", "zh_CN"),
)
MBART50_LANGUAGES = (
    *MBART_LANGUAGES,
    *("af_ZA", "az_AZ", "bn_IN", "fa_IR", "he_IL", "hr_HR", "id_ID", "ka_GE", "km_KH", "mk_MK"),
    *("ml_IN", "mn_MN", "mr_IN", "pl_PL", "ps_AF", "pt_XX", "sv_SE", "sw_KE", "ta_IN", "te_IN"),
    *("th_TH", "tl_XX", "uk_UA", "ur_PK", "xh_ZA", "gl_ES", "sl_SI"),
)
MOST_EXTRA = 1 << 16
# Of which some tokenizer is made.
ANY = ("*.model", "*.spm", "vocab.*", "merges.txt")


# --- Tokenizers without added tokens --------------------------------------------------------------


def _byte_level(table: Table) -> Any:
    made = Tokenizer(models.BPE(vocab=table.ids, merges=table.merges, fuse_unk=False))
    made.decoder = decoders.ByteLevel()
    return made


def _gpt2(table: Table, settings: Settings, named: Named) -> Any:
    made = _byte_level(table)
    blank = settings.flag("add_prefix_space", False)
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=blank)
    return made


def _gpt_neox(table: Table, settings: Settings, named: Named) -> Any:
    made = _gpt2(table, settings, named)
    made.normalizer = normalizers.NFC()
    return made


def _qwen2(table: Table, settings: Settings, named: Named) -> Any:
    made = _byte_level(table)
    made.normalizer = normalizers.NFC()
    blank = settings.flag("add_prefix_space", False)
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=blank, use_regex=False),
        ]
    )
    return made


def _pieces(table: Table, **options: Any) -> Any:
    """SentencePiece's BPE with single bytes for unknown characters."""
    bpe = models.BPE(
        vocab=table.ids, merges=table.merges, fuse_unk=True, byte_fallback=True, **options
    )
    made = Tokenizer(bpe)
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return made


def _gemma(table: Table, settings: Settings, named: Named) -> Any:
    made = _pieces(table, unk_token=str(named["unk_token"]))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    return made


def _llama(table: Table, settings: Settings, named: Named) -> Any:
    made = _pieces(table)
    blank = settings.flag("add_prefix_space", True)
    # `_get_prepend_scheme`: what older versions did (legacy) puts a blank before every piece of a
    # text between special tokens.
    scheme = "never" if not blank else "always" if settings.flag("legacy", False) else "first"
    made.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
    if blank:
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        made.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)])
    return made


def _bert(table: Table, settings: Settings, named: Named) -> Any:
    made = Tokenizer(models.WordPiece(table.ids, unk_token=str(named["unk_token"])))
    made.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=settings.flag("tokenize_chinese_chars", True),
        strip_accents=settings.get("strip_accents"),
        lowercase=settings.flag("do_lower_case", True),
    )
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece("##")
    return made


def _words(made: Any, scheme: str = "always", *, split: bool = True) -> Any:
    """Sets what most SentencePiece classes share: a blank before the text, or each of its words."""
    blanks = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme)
    steps = [pre_tokenizers.WhitespaceSplit(), blanks]
    made.pre_tokenizer = pre_tokenizers.Sequence(steps) if split else blanks
    made.decoder = decoders.Metaspace("▁", prepend_scheme=scheme)
    return made


def _normalised(made: Any, table: Table, *further: Any) -> Any:
    steps = [normalizers.Precompiled(table.charsmap)] if table.charsmap else []
    if steps or further:
        steps = [*steps, *further]
        made.normalizer = normalizers.Sequence(steps) if len(steps) > 1 else steps[0]
    return made


def _single_blanks() -> Any:
    return normalizers.Replace(Regex(r" {2,}"), " ")


def _unigram(table: Table, unknown: int) -> Any:
    return Tokenizer(models.Unigram(list(table.scores), unk_id=unknown, byte_fallback=False))


def _xlm_roberta(table: Table, settings: Settings, named: Named) -> Any:
    scheme = "always" if settings.flag("add_prefix_space", True) else "never"
    return _words(_normalised(_unigram(table, 3), table), scheme)


def _t5(table: Table, settings: Settings, named: Named) -> Any:
    return _words(_normalised(_unigram(table, 2), table))


def _mbart(table: Table, settings: Settings, named: Named) -> Any:
    return _words(_unigram(table, 3))  # without the compiled normalisation


def _mbart50(table: Table, settings: Settings, named: Named) -> Any:
    return _words(_normalised(_unigram(table, 3), table, _single_blanks()), split=False)


def _pegasus(table: Table, settings: Settings, named: Named) -> Any:
    unknown = list(table.scores).index((str(named["unk_token"]), 0.0), 1)
    further = [] if table.charsmap else [normalizers.Replace(Regex(r"\n"), " ")]
    made = _normalised(_unigram(table, unknown), table, *further, _single_blanks())
    return _words(made, split=False)


def _nllb(table: Table, settings: Settings, named: Named) -> Any:
    unknown = str(named["unk_token"])
    bpe = models.BPE(vocab=table.ids, merges=table.merges, unk_token=unknown, fuse_unk=True)
    made = Tokenizer(bpe)
    if table.charsmap:
        _normalised(made, table, _single_blanks())
    return _words(made, split=False)


# --- Tokens around a text -------------------------------------------------------------------------


def template(made: Any, single: str, pair: str) -> Any:
    """Returns a post-processor; an item without "$" is a token."""
    texts = dict.fromkeys(
        item.split(":")[0] for item in f"{single} {pair}".split() if not item.startswith("$")
    )
    ids = [(text, made.token_to_id(text)) for text in texts]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)


def _around_bert(made: Any, names: Texts, settings: Settings) -> Any:
    begin, end = names["cls_token"], names["sep_token"]
    single = f"{begin}:0 $A:0 {end}:0"
    return template(made, single, f"{single} $B:1 {end}:1")


def _around_roberta(made: Any, names: Texts, settings: Settings) -> Any:
    trim = settings.flag("trim_offsets", True)
    return _roberta_processing(made, names, trim, settings.flag("add_prefix_space", False))


def _around_mpnet(made: Any, names: Texts, settings: Settings) -> Any:
    return _roberta_processing(made, names, trim=True, blank=False)


def _roberta_processing(made: Any, names: Texts, trim: bool, blank: bool) -> Any:
    begin, end = names["cls_token"], names["sep_token"]
    ends = (end, made.token_to_id(end)), (begin, made.token_to_id(begin))
    return processors.RobertaProcessing(*ends, trim, blank)


def _around_xlm_roberta(made: Any, names: Texts, settings: Settings) -> Any:
    begin, end = names["bos_token"], names["eos_token"]
    return template(made, f"{begin} $A {end}", f"{begin} $A {end} {end} $B {end}")


def _around_t5(made: Any, names: Texts, settings: Settings) -> Any:
    end = names["eos_token"]
    return template(made, f"$A {end}", f"$A {end} $B {end}")


def _around_sequence(made: Any, names: Texts, settings: Settings) -> Any:
    """The end token; that of a language is put by `vocabularies`."""
    end = names["eos_token"]
    return template(made, f"$A {end}", f"$A $B {end}")


# --- Ids of a SentencePiece model -----------------------------------------------------------------
# `convert_from_spm` of convert_slow_tokenizer.py: special tokens come first, as in fairseq.


def _fairseq(first: str, languages: tuple[str, ...] = ()) -> Callable[..., Scores]:
    def scores(table: Table, settings: Settings, named: Named) -> Scores:
        names = {"cls": "<s>", "bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>"}
        begin = [
            str(named.get(f"{name}_token", names[name])) for name in (first, "pad", "eos", "unk")
        ]
        end = [*languages, str(named.get("mask_token", "<mask>"))]
        return [*((text, 0.0) for text in begin), *table.scores[3:], *((text, 0.0) for text in end)]

    return scores


def _t5_scores(table: Table, settings: Settings, named: Named) -> Scores:
    count = settings.whole("extra_ids", 100, most=MOST_EXTRA)
    return [*table.scores, *((f"<extra_id_{n}>", 0.0) for n in reversed(range(count)))]


def _or_null(settings: Settings, name: str, default: str) -> Any:
    """Returns a setting for which null is not the default."""
    return settings.get(name) if name in settings.values else default


def _pegasus_scores(table: Table, settings: Settings, named: Named) -> Scores:
    ends = str(named.get("pad_token", "<pad>")), str(named.get("eos_token", "</s>"))
    sentence = _or_null(settings, "mask_token_sent", "<mask_2>")
    masks = str(named.get("mask_token", "<mask_1>")), str(sentence)
    special = [*ends, *(text for text in dict.fromkeys(masks) if text != "None")]
    count = settings.whole("offset", 103, most=MOST_EXTRA)
    unknown = [(f"<unk_{n}>", -100.0) for n in range(2, count)]
    return [*((text, 0.0) for text in special), *unknown, *table.scores[2:]]


# --- Further special tokens -----------------------------------------------------------------------


def _t5_extra(text: str, settings: Settings) -> bool:
    count = settings.whole("extra_ids", 100, most=MOST_EXTRA)
    found = re.fullmatch(r"<extra_id_(0|[1-9]\d*)>", text)
    return found is not None and int(found[1]) < count


def _pegasus_extra(text: str, settings: Settings) -> bool:
    count = settings.whole("offset", 103, most=MOST_EXTRA)
    found = re.fullmatch(r"<unk_([2-9]|[1-9]\d+)>", text)
    return text == _or_null(settings, "mask_token_sent", "<mask_1>") or (
        found is not None and int(found[1]) < count
    )


@dataclass(frozen=True)
class TokenizerClass:
    """A class that sets up the tokenizer itself.

    Attributes:
        make: Makes the tokenizer of a table, without added tokens.
        named: Special tokens where the folder names none.
        model: Type of the model in tokenizer.json.
        around: Makes the post-processor; None where that of tokenizer.json is taken.
        pieces: Name of a SentencePiece model that is read where there is no tokenizer.json.
        scores: Its pieces and scores in the order of the class's ids.
        extra: Whether a token is special, where the folder names no further ones.
        keeps_added: Whether the added tokens of a SentencePiece model are special then.
        segments: Whether its class tells a model the segments of a pair of texts.
    """

    make: Callable[[Table, Settings, Named], Any]
    named: Mapping[str, str | None]
    model: str = "BPE"
    around: Callable[[Any, Texts, Settings], Any] | None = None
    pieces: str = ""
    scores: Callable[[Table, Settings, Named], Scores] | None = None
    extra: Callable[[str, Settings], bool] | None = None
    keeps_added: bool = True
    segments: bool = False


END_OF_TEXT: dict[str, str | None] = dict.fromkeys(
    ("unk_token", "bos_token", "eos_token"), "<|endoftext|>"
)
ENDS: dict[str, str | None] = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
FAIRSEQ = {**ENDS, "sep_token": "</s>", "cls_token": "<s>", "mask_token": "<mask>"}
ROBERTA = {**FAIRSEQ, "bos_token": "<s>"}
T5_PIECES, FAIRSEQ_PIECES = "spiece.model", "sentencepiece.bpe.model"
CLASSES = {
    "GPT2Tokenizer": TokenizerClass(_gpt2, END_OF_TEXT),
    "GPTNeoXTokenizer": TokenizerClass(_gpt_neox, {**END_OF_TEXT, "pad_token": "<|padding|>"}),
    "Qwen2Tokenizer": TokenizerClass(
        _qwen2, {**END_OF_TEXT, "bos_token": None, "pad_token": "<|endoftext|>"}
    ),
    "GemmaTokenizer": TokenizerClass(
        _gemma, {f"{name}_token": f"<{name}>" for name in ("unk", "bos", "eos", "pad", "mask")}
    ),
    "LlamaTokenizer": TokenizerClass(
        _llama, {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    ),
    "BertTokenizer": TokenizerClass(
        _bert,
        {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "sep", "pad", "cls", "mask")},
        "WordPiece",
        _around_bert,
        segments=True,
    ),
    "MPNetTokenizer": TokenizerClass(
        _bert, {**ROBERTA, "unk_token": "[UNK]"}, "WordPiece", _around_mpnet
    ),
    "RobertaTokenizer": TokenizerClass(_gpt2, ROBERTA, around=_around_roberta),
    "XLMRobertaTokenizer": TokenizerClass(
        *(_xlm_roberta, ROBERTA, "Unigram", _around_xlm_roberta, FAIRSEQ_PIECES, _fairseq("bos"))
    ),
    "T5Tokenizer": TokenizerClass(
        *(_t5, ENDS, "Unigram", _around_t5, T5_PIECES, _t5_scores, _t5_extra)
    ),
    "PegasusTokenizer": TokenizerClass(
        *(_pegasus, {**ENDS, "mask_token": "<mask_2>"}, "Unigram", _around_sequence),
        *(T5_PIECES, _pegasus_scores, _pegasus_extra),
        keeps_added=False,
    ),
    "MBartTokenizer": TokenizerClass(
        *(_mbart, ROBERTA, "Unigram", _around_sequence, FAIRSEQ_PIECES),
        _fairseq("bos", MBART_LANGUAGES),
    ),
    "MBart50Tokenizer": TokenizerClass(
        *(_mbart50, FAIRSEQ, "Unigram", _around_sequence, FAIRSEQ_PIECES),
        _fairseq("cls", MBART50_LANGUAGES),
    ),
    # Of its SentencePiece model alone, transformers gives languages other ids than NLLB's.
    "NllbTokenizer": TokenizerClass(_nllb, ROBERTA, around=_around_sequence, pieces=FAIRSEQ_PIECES),
}


def class_of(checkpoint: Checkpoint, content: bytes | None) -> str:
    """Returns the name of the class that AutoTokenizer chooses (`AutoTokenizer.from_pretrained`).

    Args:
        checkpoint: The folder.
        content: tokenizer.json, None if absent.

    Raises:
        InputError: It is a class that is not supported, or one of the folder's own code.
    """
    settings, kind = checkpoint.tokenizer, str(checkpoint.config.get("model_type"))
    settings.only("auto_map", None)
    declared = settings.get("tokenizer_class", checkpoint.config.get("tokenizer_class"))
    registered = REGISTERED.get(kind)
    name = registered or AS_IT_IS if declared is None else str(declared).removesuffix("Fast")
    name = ALIASES.get(name, name)
    byte_level = content is not None and b'"ByteLevel"' in content
    if name == "LlamaTokenizer" and byte_level and kind not in NOT_FOLLOWED:
        return AS_IT_IS
    if registered is not None and (registered == AS_IT_IS or kind in NOT_FOLLOWED):
        return registered
    if name in (AS_IT_IS, *SYNONYMS):
        return AS_IT_IS
    if name not in CLASSES:
        settings.refuse("tokenizer_class", declared, ", ".join((AS_IT_IS, *CLASSES)))
    return name


def table_missing(checkpoint: Checkpoint, name: str) -> InputError:
    """Returns the error of a folder without any file that its class reads."""
    kind = CLASSES.get(name)
    if not any(any(checkpoint.folder.glob(each)) for each in ANY):
        remedy = COPY
    elif kind is not None and kind.pieces and kind.scores is None:
        remedy = "download it with the model"
    else:
        remedy = "make it: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
    also = f" or {kind.pieces}" if kind is not None and kind.scores is not None else ""
    return InputError(f"{checkpoint.folder}: expected {TOKENIZER}{also}, found none; {remedy}")
