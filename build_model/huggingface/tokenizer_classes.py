"""Tokenizer classes of transformers 5 that set up the tokenizer themselves.

They take only the vocabulary, the merges and SentencePiece's table of characters from a folder, and
set normalizer, pre-tokenizer and decoder (`TokenizersBackend.convert_to_native_format`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from msgspec import Meta
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from transferry.build_model.huggingface.folder import Settings

# The class that uses tokenizer.json as it is, under the names that folders give it.
AS_IT_IS = "TokenizersBackend"
SYNONYMS = ("PreTrainedTokenizer", "PythonBackend", "BloomTokenizer")
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
    "t5": "T5Tokenizer",
    "mt5": "T5Tokenizer",
    "pegasus": "PegasusTokenizer",
    "mbart": "MBartTokenizer",
    "mistral": AS_IT_IS,
    "phi3": AS_IT_IS,
    "olmo2": AS_IT_IS,
    "modernbert": AS_IT_IS,
}
# Classes that make what another makes.
ALIASES = {
    "DistilBertTokenizer": "BertTokenizer",
    "ElectraTokenizer": "BertTokenizer",
    "BartTokenizer": "RobertaTokenizer",
    "MT5Tokenizer": "T5Tokenizer",
}
# MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS: the class that the folder names is not followed.
NOT_FOLLOWED = ("phi3", "qwen2")

QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
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

# The library makes a list of so many numbers; sixty times the largest vocabularies.
MOST_ID = 1 << 24
Vocabulary = dict[str, Annotated[int, Meta(ge=0, le=MOST_ID)]]
Merges = Sequence[tuple[str, str]]
Scores = list[tuple[str, float]]
# Token by name, such as "bos_token"; None where a folder says null.
Named = dict[str, Any]


@dataclass(frozen=True)
class Parts:
    """What a class takes from a folder.

    Attributes:
        vocabulary: Ids by token, of BPE and WordPiece.
        merges: Pairs of tokens, of BPE.
        scores: Tokens with their scores in the order of their ids, of SentencePiece's unigrams.
        characters: SentencePiece's table of characters; none where the folder has none.
    """

    vocabulary: Vocabulary = field(default_factory=dict)
    merges: Merges = ()
    scores: Scores = field(default_factory=list)
    characters: bytes | None = None


def _byte_level(parts: Parts) -> Any:
    made = Tokenizer(models.BPE(vocab=parts.vocabulary, merges=parts.merges, fuse_unk=False))
    made.decoder = decoders.ByteLevel()
    return made


def _gpt2(parts: Parts, settings: Settings, named: Named) -> Any:
    made = _byte_level(parts)
    blank = settings.flag("add_prefix_space", False)
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=blank)
    return made


def _roberta(parts: Parts, settings: Settings, named: Named) -> Any:
    made = _gpt2(parts, settings, named)
    model = {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
    made.model = models.BPE(vocab=parts.vocabulary, merges=parts.merges, fuse_unk=False, **model)
    return made


def _gpt_neox(parts: Parts, settings: Settings, named: Named) -> Any:
    made = _gpt2(parts, settings, named)
    made.normalizer = normalizers.NFC()
    return made


def _qwen2(parts: Parts, settings: Settings, named: Named) -> Any:
    made = _byte_level(parts)
    made.normalizer = normalizers.NFC()
    blank = settings.flag("add_prefix_space", False)
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=blank, use_regex=False),
        ]
    )
    return made


def _pieces(parts: Parts, **options: Any) -> Any:
    """SentencePiece's BPE with single bytes for unknown characters."""
    options |= {"fuse_unk": True, "byte_fallback": True}
    made = Tokenizer(models.BPE(vocab=parts.vocabulary, merges=parts.merges, **options))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return made


def _gemma(parts: Parts, settings: Settings, named: Named) -> Any:
    made = _pieces(parts, unk_token=str(named["unk_token"]))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    return made


def _llama(parts: Parts, settings: Settings, named: Named) -> Any:
    made = _pieces(parts)
    blank = settings.flag("add_prefix_space", True)
    # `_get_prepend_scheme`: what older versions did (legacy) puts a blank before every piece of a
    # text between special tokens.
    scheme = "never" if not blank else "always" if settings.flag("legacy", False) else "first"
    made.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
    if blank:
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        made.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)])
    return made


def _bert(parts: Parts, settings: Settings, named: Named) -> Any:
    unknown = str(named["unk_token"])
    made = Tokenizer(models.WordPiece(parts.vocabulary, unk_token=unknown))
    made.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=settings.flag("tokenize_chinese_chars", True),
        strip_accents=settings.get("strip_accents"),
        lowercase=settings.flag("do_lower_case", True),
    )
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece("##")
    return made


def _text_of(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)


def _unigram(
    parts: Parts, unknown: int, *, words: bool = True, scheme: str = "always", old: bool = False
) -> Any:
    """SentencePiece's unigrams.

    Args:
        parts: Of the folder.
        unknown: Id of the unknown token.
        words: Whether blanks part words, and several are as good as one.
        scheme: Where a blank is put before a text.
        old: Whether the table of characters is left out, as in MBartTokenizer.
    """
    made = Tokenizer(models.Unigram(parts.scores, unk_id=unknown, byte_fallback=False))
    if parts.characters is not None and not old:
        made.normalizer = normalizers.Precompiled(parts.characters)
    marked = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=True)
    split = [pre_tokenizers.WhitespaceSplit(), marked]
    made.pre_tokenizer = pre_tokenizers.Sequence(split) if words else marked
    made.decoder = decoders.Metaspace("▁", prepend_scheme=scheme, split=True)
    return made


def _several_blanks(made: Any, characters: bytes | None, *without: Any) -> Any:
    """Makes several blanks one, after the table of characters if there is one."""
    first = [*without] if characters is None else [normalizers.Precompiled(characters)]
    made.normalizer = normalizers.Sequence([*first, normalizers.Replace(Regex(" {2,}"), " ")])
    return made


def _t5(parts: Parts, settings: Settings, named: Named) -> Any:
    return _unigram(parts, 2)


def _xlm_roberta(parts: Parts, settings: Settings, named: Named) -> Any:
    blank = settings.flag("add_prefix_space", True)
    return _unigram(parts, 3, scheme="always" if blank else "never")


def _mbart(parts: Parts, settings: Settings, named: Named) -> Any:
    return _unigram(parts, 3, old=True)


def _mbart50(parts: Parts, settings: Settings, named: Named) -> Any:
    return _several_blanks(_unigram(parts, 3, words=False), parts.characters)


def _pegasus(parts: Parts, settings: Settings, named: Named) -> Any:
    unknown = parts.scores.index((str(named["unk_token"]), 0.0))
    made = _unigram(parts, unknown, words=False)
    return _several_blanks(made, parts.characters, normalizers.Replace(Regex(r"\n"), " "))


def _nllb(parts: Parts, settings: Settings, named: Named) -> Any:
    options = {"unk_token": str(named["unk_token"]), "fuse_unk": True, "byte_fallback": False}
    made = Tokenizer(models.BPE(vocab=parts.vocabulary, merges=parts.merges, **options))
    if parts.characters is not None:
        _several_blanks(made, parts.characters)
    made.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="always", split=True)
    made.decoder = decoders.Metaspace("▁", prepend_scheme="always", split=True)
    return made


# --- Tokens around a text -------------------------------------------------------------------------


def around(made: Any, before: list[str], after: list[str], pair: Sequence[str] = ()) -> Any:
    """Puts tokens around a text, and those of `pair` around two."""
    ids = [(text, made.token_to_id(text)) for text in dict.fromkeys([*before, *after])]
    given = {"pair": [*pair]} if pair else {}
    single = [*before, "$A", *after]
    return processors.TemplateProcessing(single=single, special_tokens=ids, **given)


def _around_bert(made: Any, names: Mapping[str, str], settings: Settings) -> Any:
    begin, end = names["cls_token"], names["sep_token"]
    return around(made, [begin], [end], [begin, "$A", end, "$B:1", f"{end}:1"])


def _around_roberta(made: Any, names: Mapping[str, str], settings: Settings) -> Any:
    begin, end = names["cls_token"], names["sep_token"]
    return processors.RobertaProcessing(
        (end, made.token_to_id(end)),
        (begin, made.token_to_id(begin)),
        # Both change offsets of the text alone.
        settings.flag("trim_offsets", True),
        settings.flag("add_prefix_space", False),
    )


def _around_xlm_roberta(made: Any, names: Mapping[str, str], settings: Settings) -> Any:
    begin, end = names["bos_token"], names["eos_token"]
    return around(made, [begin], [end], [begin, "$A", end, end, "$B", end])


def _around_t5(made: Any, names: Mapping[str, str], settings: Settings) -> Any:
    return around(made, [], ["</s>"], ["$A", "</s>", "$B", "</s>"])


def _around_pegasus(made: Any, names: Mapping[str, str], settings: Settings) -> Any:
    end = names["eos_token"]
    return around(made, [], [end], ["$A", "$B", end])


# --- SentencePiece's own files --------------------------------------------------------------------


def _of_t5(pieces: Scores, settings: Settings) -> Scores:
    """`T5Converter.convert_from_spm`: tokens for gaps follow the pieces, the first one last."""
    count = settings.whole("extra_ids", 100)
    return [*pieces, *((f"<extra_id_{number}>", 0.0) for number in reversed(range(count)))]


def _of_pegasus(pieces: Scores, settings: Settings) -> Scores:
    """`PegasusConverter.convert_from_spm`, with the names that PegasusTokenizer gives its masks."""
    names = [settings.get("mask_token_sent", "<mask_1>"), settings.get("mask_token", "<mask_2>")]
    offset = settings.whole("offset", 103)
    lead = ["<pad>", "</s>", *map(_text_of, names)]
    unknown = ((f"<unk_{number}>", -100.0) for number in range(2, offset))
    return [*((name, 0.0) for name in lead), *unknown, *pieces[2:]]


def _of_fairseq(*languages: str) -> Callable[[Scores, Settings], Scores]:
    """Fairseq's order: its own special tokens, the pieces, languages, and the mask."""

    def order(pieces: Scores, settings: Settings) -> Scores:
        lead, tail = ("<s>", "<pad>", "</s>", "<unk>"), (*languages, "<mask>")
        return [*((name, 0.0) for name in lead), *pieces[3:], *((name, 0.0) for name in tail)]

    return order


@dataclass(frozen=True)
class TokenizerClass:
    """A class that sets up the tokenizer itself.

    Attributes:
        make: Makes the tokenizer of the parts, without added tokens.
        named: Special tokens where the folder names none.
        model: Type of the model in tokenizer.json.
        around: Puts tokens around texts; none where tokenizer.json says which.
        order: Ids of the pieces of a SentencePiece model; none where it is not read.
    """

    make: Callable[[Parts, Settings, Named], Any]
    named: Mapping[str, str | None]
    model: str = "BPE"
    around: Callable[[Any, Mapping[str, str], Settings], Any] | None = None
    order: Callable[[Scores, Settings], Scores] | None = None


END_OF_TEXT: dict[str, str | None] = dict.fromkeys(
    ("unk_token", "bos_token", "eos_token"), "<|endoftext|>"
)
FAIRSEQ: dict[str, str | None] = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "sep_token": "</s>",
    "cls_token": "<s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
    "mask_token": "<mask>",
}
T5: dict[str, str | None] = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
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
    ),
    "MPNetTokenizer": TokenizerClass(
        _bert, FAIRSEQ | {"unk_token": "[UNK]"}, "WordPiece", _around_roberta
    ),
    "RobertaTokenizer": TokenizerClass(_roberta, FAIRSEQ, "BPE", _around_roberta),
    "XLMRobertaTokenizer": TokenizerClass(
        _xlm_roberta, FAIRSEQ, "Unigram", _around_xlm_roberta, _of_fairseq()
    ),
    "T5Tokenizer": TokenizerClass(_t5, T5, "Unigram", _around_t5, _of_t5),
    "PegasusTokenizer": TokenizerClass(
        _pegasus, T5 | {"mask_token": "<mask_2>"}, "Unigram", _around_pegasus, _of_pegasus
    ),
    # What is around a text depends on its language; see `vocabularies`.
    "MBartTokenizer": TokenizerClass(
        _mbart, FAIRSEQ, "Unigram", order=_of_fairseq(*MBART_LANGUAGES)
    ),
    "MBart50Tokenizer": TokenizerClass(
        _mbart50, FAIRSEQ, "Unigram", order=_of_fairseq(*MBART50_LANGUAGES)
    ),
    "NllbTokenizer": TokenizerClass(_nllb, FAIRSEQ),
}
