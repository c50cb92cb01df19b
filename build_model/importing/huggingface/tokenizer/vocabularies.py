"""Tokenizers of checkpoints: GPT-2's as tiktoken ranks, others as the files of their library."""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transferry.build_model.importing.huggingface import decoder_only, encoder_decoder, encoder_only
from transferry.build_model.importing.huggingface.folder import REMEDY, PretrainedFolder
from transferry.build_model.importing.huggingface.heads import task_of
from transferry.build_model.importing.huggingface.tokenizer.byte_tokenizer import (
    byte_tokenizer,
    ranks_of,
)
from transferry.build_model.importing.huggingface.tokenizer.chat_template import (
    chat_template,
    chat_templates,
)
from transferry.build_model.importing.huggingface.tokenizer.fast_tokenizer import (
    TOKENIZER,
    FastTokenizer,
    added_tokens,
    read_fast_tokenizer,
    require_files,
)
from transferry.build_model.model.config import ModelConfig
from transferry.runtime.errors import InputError
from transferry.runtime.io.documents import read_document
from transferry.runtime.io.whole import MOST_BYTES, read_bytes
from transferry.runtime.tokenizer.byte_pair import GPT2_PATTERN, AnyTokenizer, Tokenizer
from transferry.runtime.tokenizer.special_tokens import (
    SpecialTokens,
    TextError,
    panics_as_errors,
)
from transferry.runtime.tokenizer.third_party import (
    UNKNOWN,
    HuggingFaceTokenizer,
    SentencePiecePair,
    SentencePieceTables,
    SentencePieceTokenizer,
    ThirdPartyTokenizer,
)

PIECES = "tokenizer.model"
M2M_PIECES = "sentencepiece.bpe.model"
# Languages of M2M100Tokenizer, whose ids follow those of vocab.json.
M2M_LANGUAGES = {
    "m2m100": "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga "
    "gd gl gu ha he hi hr ht hu hy id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml "
    "mn mr ms my ne nl no ns oc or pa pl ps pt ro ru sd si sk sl so sq sr ss su sv sw ta th tl tn "
    "tr uk ur uz vi wo xh yi yo zh zu",
    "wmt21": "en ha is ja cs ru zh de",
}


@dataclass(frozen=True)
class LanguageClass:
    """A tokenizer class of transformers that marks a source with a token of its language.

    Attributes:
        pattern: Regular expression of the names of languages.
        default: The source's language where the folder names no other.
        after: Whether the token comes after the end token, and not before the text.
        begins: Whether an answer's language is its begin token (Liu et al. 2020, section 2.2).
        legacy: Whether `legacy_behaviour` puts the token after the end token.
    """

    pattern: str
    default: str
    after: bool = False
    begins: bool = False
    legacy: bool = False


LANGUAGE_CLASSES = {
    "NllbTokenizer": LanguageClass(r"[a-z]{3}_[A-Z][a-z]{3}", "eng_Latn", legacy=True),
    "MBartTokenizer": LanguageClass(r"[a-z]{2}_[A-Z]{2}", "en_XX", after=True, begins=True),
    "MBart50Tokenizer": LanguageClass(r"[a-z]{2}_[A-Z]{2}", "en_XX"),
    "M2M100Tokenizer": LanguageClass(r"[a-z]{2,3}", "en"),
}
# Classes of folders that name no class.
OF_LANGUAGES = {"m2m_100": "M2M100Tokenizer", "mbart": "MBartTokenizer"}


def marian_tokenizer(pretrained: PretrainedFolder, config: ModelConfig) -> AnyTokenizer:
    """Two SentencePiece models and a table of ids, or one of each side."""
    settings, folder = pretrained.tokenizer, pretrained.folder
    eos, pad = pretrained.token("eos_token_id"), pretrained.token("pad_token_id")
    separate = settings.flag("separate_vocabs", False)
    kind: type[SentencePiecePair] = SentencePieceTables if separate else SentencePiecePair
    require_files(folder, *kind.names)
    path = folder / "vocab.json"
    table = read_document(path, dict[str, int], REMEDY, most=MOST_BYTES)
    end = _end_of_sources(pretrained, path, table, None if separate else eos)
    if separate and (largest := max(pad, *table.values())) >= config.source_vocabulary:
        raise InputError(
            f"{path}: expected ids below {config.source_vocabulary}, as many as the encoder "
            f"embeds, found {largest}; {REMEDY}"
        )
    special = SpecialTokens(pad_id=pad, bos_id=pretrained.begin(), eos_id=eos, after=(end,))
    files = {name: read_bytes(folder / name) for name in kind.names}
    return _pair(pretrained, config, "MarianTokenizer", table, files, special, kind)


def _token_texts(pretrained: PretrainedFolder) -> Mapping[str, Any]:
    """Returns the settings of a class that reads vocab.json, among them its special tokens."""
    settings = pretrained.tokenizer.values
    return settings if added_tokens(pretrained) else pretrained.special_tokens.values | settings


def _text_of(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def _end_of_sources(
    pretrained: PretrainedFolder, path: Path, table: Mapping[str, int], eos: int | None
) -> int:
    """Returns the id of the tokenizer's end token in vocab.json.

    It must be `eos`, unless that is an id of another table: else `eos` would have a text.
    """
    named = _text_of(_token_texts(pretrained).get("eos_token", "</s>"))
    if not isinstance(named, str) or named not in table:
        raise InputError(f"{path}: expected an id of eos_token {named}, found none; {REMEDY}")
    if eos not in (None, table[named]):
        raise InputError(
            f"{pretrained.folder}: expected eos_token_id {table[named]}, the tokenizer's {named}, "
            f"found {eos}, which is text to the tokenizer; correct one of them"
        )
    return table[named]


def _special_texts(
    pretrained: PretrainedFolder, name: str, table: Mapping[str, int], size: int
) -> dict[str, int]:
    """Returns the special tokens of tokenizer_config.json by their texts, with their ids.

    Those are tokens of their own in a text for transformers, and text for SentencePiece.

    Tokens beyond the `size` of the model stay text, and tokens of `single_word`, which transformers
    finds between blanks alone.
    """
    settings = pretrained.tokenizer
    names = (name, f"{name}Fast", "PythonBackend", "PythonBackendFast")
    settings.choice("tokenizer_class", dict.fromkeys(names), name)
    ids, listed = dict(table), dict(added_tokens(pretrained))
    values = _token_texts(pretrained)
    unknown = values.get("unk_token", UNKNOWN)
    if _text_of(unknown) != UNKNOWN:
        settings.refuse("unk_token", unknown, f"{UNKNOWN}, whose id unknown pieces get")
    usual = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": UNKNOWN, "pad_token": "<pad>"}
    named = [text for text in usual.values() if text in ids]
    for name in sorted(values, key=lambda name: "special_tokens" in name):  # as transformers
        if "special_tokens" in name or name.endswith("_token"):
            settings.get(name)
            pretrained.special_tokens.get(name)
            value = values[name]
            if isinstance(value, dict) and "special_tokens" in name:  # by names of their own
                value = [*value.values()]
            named += value if isinstance(value, list) else [value]
    texts = [*listed, *(text for text in map(_text_of, named) if isinstance(text, str))]
    for text in texts:  # transformers numbers new ones from the size of the table on
        ids.setdefault(text, listed.get(text, len(ids)))
    if beyond := [text for text in dict.fromkeys(texts) if ids[text] >= size]:
        pretrained.notes.append(f"{', '.join(beyond)} left out, since the model has {size} tokens")
    decoder = settings.values.get("added_tokens_decoder")
    flagged = [*(decoder.values() if isinstance(decoder, dict) else ()), *named]
    flagged = [each for each in flagged if isinstance(each, dict) and each.get("single_word")]
    if words := dict.fromkeys(each["content"] for each in flagged):
        note = "left out of the tokens that texts may name, being tokens of single_word"
        pretrained.notes.append(f"{', '.join(words)} {note}")
    return {text: ids[text] for text in texts if ids[text] < size and text not in words}


def _pair(
    pretrained: PretrainedFolder,
    config: ModelConfig,
    name: str,
    table: Mapping[str, int],
    files: Mapping[str, bytes],
    special: SpecialTokens,
    kind: type[SentencePiecePair] = SentencePiecePair,
) -> AnyTokenizer:
    settings = pretrained.tokenizer
    texts = _special_texts(pretrained, name, table, config.source_vocabulary)
    special = dataclasses.replace(special, texts=texts)
    made = _third_party(kind, files, special, config, str(pretrained.folder))
    assert isinstance(made, SentencePiecePair)
    settings.only("sp_model_kwargs", {})
    made.cleans = settings.flag("clean_up_tokenization_spaces", False)
    return made


def sequence_tokenizer(pretrained: PretrainedFolder, config: ModelConfig) -> AnyTokenizer:
    """tokenizer.json of an encoder-decoder; it puts the source's language where there is one."""
    eos = pretrained.token("eos_token_id")
    begin = pretrained.begin(pretrained.token("bos_token_id", eos))
    special = SpecialTokens(pretrained.token("pad_token_id", eos), begin, eos, after=())
    declared = pretrained.tokenizer.values.get("tokenizer_class")
    if (declared or pretrained.config.values.get("tokenizer_class")) == "ByT5Tokenizer":
        return byte_tokenizer(pretrained, special, config)
    name = OF_LANGUAGES.get(str(pretrained.config.get("model_type")))
    if name is not None:
        declared = pretrained.config.get("tokenizer_class", name)
        name = str(pretrained.tokenizer.get("tokenizer_class", declared)).removesuffix("Fast")
    if name == "M2M100Tokenizer" and not (pretrained.folder / TOKENIZER).exists():
        require_files(pretrained.folder, M2M_PIECES)
    if name == "M2M100Tokenizer" and (pretrained.folder / M2M_PIECES).exists():
        return _m2m_tokenizer(pretrained, special, config)
    found = _read(pretrained, config)
    tokenizer = _unchanged(found, special, config, str(pretrained.folder))
    if not config.decoder_layers:
        _join_pairs(tokenizer, found)
    if name in LANGUAGE_CLASSES and name != "M2M100Tokenizer":
        kind, ids = LANGUAGE_CLASSES[name], found.tokenizer.get_vocab()
        named = [text for text in sorted(ids, key=ids.get) if re.fullmatch(kind.pattern, text)]
        languages = {text: ids[text] for text in named}
        end = found.id_of("eos_token")
        tokenizer.special = _with_languages(pretrained, tokenizer.special, kind, languages, end)
    if config.rereading_layers and tokenizer.special.after[-1:] != (eos,):
        raise InputError(
            f"{pretrained.folder}: expected a tokenizer that ends texts with eos_token_id {eos}, "
            f"which the head reads, found {list(tokenizer.special.after)} after a text; save a "
            "tokenizer of another class there, such as MBart50Tokenizer in place of MBartTokenizer"
        )
    return tokenizer


def _with_languages(
    pretrained: PretrainedFolder,
    special: SpecialTokens,
    kind: LanguageClass,
    ids: Mapping[str, int],
    end: int | None = None,
) -> SpecialTokens:
    """Adds a table of languages, and the tokens around a source in its own language.

    `end` ends a source, by default as an output.
    """
    settings, eos = pretrained.tokenizer, special.eos_id if end is None else end
    source = settings.get("src_lang", kind.default)
    if not isinstance(source, str) or source not in ids:
        settings.refuse("src_lang", source, ", ".join(ids))
    after = kind.after or (kind.legacy and settings.flag("legacy_behaviour", False))
    pretrained.notes.append(
        f"{len(ids)} languages, sources in {source}; others with --source-language and "
        "--target-language"
    )
    return dataclasses.replace(
        special,
        before=() if after else (ids[source],),
        after=(eos, ids[source]) if after else (eos,),
        languages=ids,
        begins_with_language=kind.begins,
    )


def _m2m_tokenizer(
    pretrained: PretrainedFolder, special: SpecialTokens, config: ModelConfig
) -> AnyTokenizer:
    """A SentencePiece model and a table of ids, whose last are those of languages."""
    folder = pretrained.folder
    path = folder / "vocab.json"
    table = read_document(path, dict[str, int], REMEDY, most=MOST_BYTES)
    names = pretrained.tokenizer.choice("language_codes", M2M_LANGUAGES, "m2m100")
    languages = {name: len(table) + number for number, name in enumerate(names.split())}
    _end_of_sources(pretrained, path, table, special.eos_id)
    special = _with_languages(pretrained, special, LANGUAGE_CLASSES["M2M100Tokenizer"], languages)
    pretrained.tokenizer.get("num_madeup_words")  # ids without text
    named = {f"__{name}__": number for name, number in languages.items()}
    pieces = read_bytes(folder / M2M_PIECES, MOST_BYTES)
    files = {"source.spm": pieces, "target.spm": pieces}
    files["vocab.json"] = json.dumps(table | named, ensure_ascii=False).encode()
    return _pair(pretrained, config, "M2M100Tokenizer", table, files, special)


def decoder_tokenizer(pretrained: PretrainedFolder, config: ModelConfig) -> AnyTokenizer:
    """The tokenizer of a decoder-only model: of GPT-2 as tiktoken ranks where they are equal."""
    folder = pretrained.folder
    if not (folder / TOKENIZER).exists() and (folder / PIECES).exists():
        return _sentencepiece(pretrained, config)
    found = _read(pretrained, config)
    special = found.special()
    eos = pretrained.token("eos_token_id", found.id_of("eos_token"))

    def other(name: str) -> int:
        # Ids that are text to the tokenizer stay text: nobody reads padding.
        token = pretrained.token(f"{name}_token_id", eos)
        return token if token in special else eos

    tokens = SpecialTokens(pad_id=other("pad"), bos_id=other("bos"), eos_id=eos, after=())
    tokenizer = _unchanged(found, tokens, config, str(folder))
    if config.encoder_layers:
        _join_pairs(tokenizer, found)
        _cut_padding(tokenizer, pretrained, config)
    # Labels of tokens need their places in the text, which tiktoken does not tell.
    if not config.head_widths or config.pooling:
        tokenizer = _as_ranks(found, tokenizer) or tokenizer
    if config.decoder_layers or pretrained.pairs:
        tokenizer.chat = chat_template(pretrained, found)
    if config.decoder_layers and tokenizer.chat is not None:
        pretrained.notes.append("chat template kept for --chat and --messages")
    return tokenizer


def _read(pretrained: PretrainedFolder, config: ModelConfig) -> FastTokenizer:
    """A tokenizer whose ids the model has; the model may have more."""
    found = read_fast_tokenizer(pretrained)
    try:
        found = found.below(config.vocabulary_size)
    except InputError as error:
        numbered = pretrained.config.get("model_type") == "pegasus"
        also = ", or lower offset in tokenizer_config.json, as in training"
        raise InputError(f"{pretrained.folder}: {error}{also if numbered else ''}") from error
    pretrained.notes += found.notes
    return found


def _as_ranks(found: FastTokenizer, tokenizer: AnyTokenizer) -> AnyTokenizer | None:
    """Returns a byte-level BPE that splits text as GPT-2 does as tiktoken ranks, if it can be."""
    record = json.loads(found.tokenizer.to_str())
    model, splitting = record["model"], record["pre_tokenizer"] or {}
    expected = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    if (
        model["type"] != "BPE"
        or expected != {name: splitting.get(name) for name in expected}
        or record["normalizer"]
        or not all(token["special"] for token in record["added_tokens"])
        # In a chat, such tokens take blanks away beside them.
        or any(
            token[side]
            for token in record["added_tokens"]
            for side in ("lstrip", "rstrip", "single_word")
        )
    ):
        return None
    if (converted := ranks_of(model["vocab"], model["merges"])) is None:
        return None
    ranks, first = converted
    if set(model["vocab"].values()) - found.special() != {*range(first, first + len(ranks))}:
        return None  # a token that no text gives but has text, or a special one that text gives
    try:
        return Tokenizer(
            "gpt2",
            GPT2_PATTERN,
            ranks,
            special=dataclasses.replace(tokenizer.special, texts=tokenizer.special_texts()),
            first_ordinary_id=first,
            vocabulary_size=tokenizer.vocabulary_size,
        )
    except InputError:
        return None


def _sentencepiece(pretrained: PretrainedFolder, config: ModelConfig) -> AnyTokenizer:
    """tokenizer.model, as SentencePiece reads it, which no other token can be added to."""
    settings, path = pretrained.tokenizer, pretrained.folder / PIECES
    eos = pretrained.token("eos_token_id")
    bos = pretrained.token("bos_token_id", eos)
    special = SpecialTokens(pretrained.token("pad_token_id", eos), bos, eos)
    files = dict.fromkeys(SentencePieceTokenizer.names, read_bytes(path, MOST_BYTES))
    tokenizer = _third_party(SentencePieceTokenizer, files, special, config, str(path))
    assert isinstance(tokenizer, SentencePieceTokenizer)
    before, after = _added(pretrained, tokenizer, bos), _added(pretrained, tokenizer, eos, "eos")
    tokenizer.special = dataclasses.replace(special, before=before, after=after)
    _cut_padding(tokenizer, pretrained, config)
    for name in settings.values:
        if name == "tokenizer_class" or name.endswith("_token"):  # as the model names them itself
            settings.get(name)
    if others := [text for text, token in added_tokens(pretrained) if token >= tokenizer.pieces]:
        raise InputError(
            f"{path} cannot hold the added token {others[0]!r}; make a tokenizer.json: "
            f"AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    if chat_templates(pretrained):
        pretrained.notes.append(f"chat template left out: it needs a {TOKENIZER}")
    pretrained.notes.append(
        f"{PIECES} is followed as SentencePiece reads it, not AutoTokenizer of transformers 5, "
        f"which splits some texts with several blanks or line breaks otherwise; with a {TOKENIZER} "
        "transformers is followed"
    )
    return tokenizer


def _added(
    pretrained: PretrainedFolder, tokenizer: AnyTokenizer, default: int, name: str = "bos"
) -> tuple[int, ...]:
    """The token that the tokenizer adds to a text, which config.json may name otherwise."""
    settings, key = pretrained.tokenizer, f"{name}_token"
    listed = settings.get("added_tokens_decoder") is not None
    others = {} if listed else pretrained.special_tokens.values
    text = {"bos_token": "<s>", "eos_token": "</s>", **settings.values, **others}[key]
    text = text.get("content") if isinstance(text, dict) else text
    if text is None or not settings.flag(f"add_{key}", False):
        return ()
    found = {**tokenizer.special_texts(), "": default}
    if text not in found:
        settings.refuse(key, text, ", ".join(filter(None, found)))
    return (found[text],)


def bert_tokenizer(pretrained: PretrainedFolder, config: ModelConfig) -> AnyTokenizer:
    """tokenizer.json, or one made from vocab.txt."""
    found = _read(pretrained, config)

    def token(name: str) -> int:
        if (token := found.id_of(f"{name}_token")) is None:
            text = found.named.get(f"{name}_token", "none")
            pretrained.tokenizer.refuse(f"{name}_token", text, "a token of the vocabulary")
        return token

    special = SpecialTokens(
        pad_id=token("pad"),
        bos_id=token("cls"),
        eos_id=token("sep"),
        mask_id=token("mask") if config.lm_head else None,
        after=(),
    )
    tokenizer = _unchanged(found, special, config, str(pretrained.folder))
    segments = _join_pairs(tokenizer, found)
    pretrained.segments = segments if found.segments else []
    return tokenizer


def _join_pairs(tokenizer: AnyTokenizer, found: FastTokenizer) -> list[int]:
    """Adds how two texts are joined, where it is text by text; returns the tokens' segments."""
    plain, special = tokenizer.encode("a"), tokenizer.special
    pair = found.tokenizer.encode("a", "a")
    first, second = [*special.before, *plain], [*plain, *special.after]
    between = pair.ids[len(first) : len(pair.ids) - len(second)]
    if pair.ids != [*first, *between, *second]:
        return []
    tokenizer.special = dataclasses.replace(special, between=tuple(between), joins=not between)
    return list(pair.type_ids)


def _cut_padding(
    tokenizer: AnyTokenizer, pretrained: PretrainedFolder, config: ModelConfig
) -> None:
    """Leaves out padding after a text, since classifiers of transformers read the token before."""
    special, padding = tokenizer.special, pretrained.config.get("pad_token_id")
    if task_of(pretrained.config) != "classify" or padding not in range(config.vocabulary_size):
        return
    after = special.after
    while after[-1:] == (padding,):
        after = after[:-1]
    pretrained.padded += len(special.after) - len(after)
    tokenizer.special = dataclasses.replace(special, after=after, pad_id=padding)


def _unchanged(
    found: FastTokenizer, special: SpecialTokens, config: ModelConfig, origin: str
) -> AnyTokenizer:
    """A tokenizer.json; the tokens that it puts around a text are found by encoding one."""
    files = dict.fromkeys(HuggingFaceTokenizer.names, found.content)
    made = _third_party(HuggingFaceTokenizer, files, special, config, origin)
    found.tokenizer.no_truncation()
    found.tokenizer.no_padding()
    try:
        with panics_as_errors():
            plain, whole = made.encode("a"), found.tokenizer.encode("a").ids
    except (ValueError, TextError) as error:
        raise InputError(
            f"{origin}: expected a tokenizer that encodes texts ({TOKENIZER}, "
            f"tokenizer_config.json), found another: {error}; {REMEDY}"
        ) from error
    for start in range(len(whole) - len(plain) + 1):
        end = start + len(plain)
        if plain and whole[start:end] == plain:
            before, after = tuple(whole[:start]), tuple(whole[end:])
            made.special = dataclasses.replace(special, before=before, after=after)
            return made
    raise InputError(
        f"{origin}: expected the tokens {plain} of 'a' within special tokens, found {whole}"
    )


def _third_party(
    kind: type[ThirdPartyTokenizer],
    files: Mapping[str, bytes],
    special: SpecialTokens,
    config: ModelConfig,
    origin: str,
) -> AnyTokenizer:
    try:
        return kind(files, special, config.vocabulary_size)
    except InputError as error:
        raise InputError(f"{origin}: {error}") from error


TOKENIZERS: Mapping[str, Callable[[PretrainedFolder, ModelConfig], AnyTokenizer]] = {
    **dict.fromkeys(encoder_decoder.FAMILIES, sequence_tokenizer),
    "marian": marian_tokenizer,
    **dict.fromkeys(encoder_only.FAMILIES, bert_tokenizer),
    **dict.fromkeys(decoder_only.FAMILIES, decoder_tokenizer),
}
