"""The tokenizer that AutoTokenizer of transformers 5.23 makes of a folder, as a tokenizer.json.

transformers does not always use tokenizer.json as it is. The classes in `CLASSES` take only the
vocabulary, the merges and the post-processor from it, and set normalizer, pre-tokenizer and decoder
themselves (`TokenizersBackend.convert_to_native_format`); then the tokens of tokenizer_config.json,
special_tokens_map.json and added_tokens.json are added (`TokenizersBackend.__init__`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from msgspec import Meta
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from transferry.build_model.huggingface.folder import REMEDY, Checkpoint, Settings
from transferry.runtime.documents import checked, read_document
from transferry.runtime.errors import InputError
from transferry.runtime.files import MOST_BYTES, read_bytes
from transferry.runtime.tokenizer.third_party import largest_id, panics_as_errors

TOKENIZER = "tokenizer.json"
ADDED_TOKENS = "added_tokens.json"

NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
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
    "mistral": AS_IT_IS,
    "phi3": AS_IT_IS,
    "olmo2": AS_IT_IS,
}
# Classes that make what another makes.
ALIASES = {"DistilBertTokenizer": "BertTokenizer", "ElectraTokenizer": "BertTokenizer"}
# Model types whose tokenizer.json is taken as it stands; older files are not converted.
AS_THEY_STAND = (
    *("roberta", "xlm-roberta", "mpnet", "modernbert"),
    *("bart", "mbart", "pegasus", "m2m_100", "t5", "mt5"),
)
# MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS: the class that the folder names is not followed.
NOT_FOLLOWED = ("phi3", "qwen2")

QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# The library makes a list of so many numbers; sixty times the largest vocabularies.
MOST_ID = 1 << 24
Vocabulary = dict[str, Annotated[int, Meta(ge=0, le=MOST_ID)]]
Merges = Sequence[tuple[str, str]]
# Token by name, such as "bos_token"; None where a folder says null.
Named = dict[str, Any]


@dataclass
class FastTokenizer:
    """A tokenizer of the library `tokenizers`.

    Attributes:
        tokenizer: The tokenizer.
        content: Its tokenizer.json; that of the folder, byte for byte, where it is used as it is.
        named: Named special tokens, such as bos_token.
        notes: What is done otherwise than tokenizer.json says.
        segments: Whether its class tells a model the segments of a pair of texts.
    """

    tokenizer: Any
    content: bytes
    named: dict[str, str]
    notes: list[str] = field(default_factory=list)
    segments: bool = False

    def id_of(self, name: str) -> int | None:
        """Returns the id of a named special token; None if there is none."""
        found: int | None = self.tokenizer.token_to_id(self.named.get(name, ""))
        return found

    def special(self) -> set[int]:
        """Returns the ids of all special tokens."""
        added = self.tokenizer.get_added_tokens_decoder()
        return {token for token, each in added.items() if each.special}


# --- The classes of transformers ------------------------------------------------------------------


def _byte_level(vocabulary: Vocabulary, merges: Merges) -> Any:
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False))
    made.decoder = decoders.ByteLevel()
    return made


def _gpt2(vocabulary: Vocabulary, merges: Merges, settings: Settings, named: Named) -> Any:
    made = _byte_level(vocabulary, merges)
    blank = settings.flag("add_prefix_space", False)
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=blank)
    return made


def _gpt_neox(vocabulary: Vocabulary, merges: Merges, settings: Settings, named: Named) -> Any:
    made = _gpt2(vocabulary, merges, settings, named)
    made.normalizer = normalizers.NFC()
    return made


def _qwen2(vocabulary: Vocabulary, merges: Merges, settings: Settings, named: Named) -> Any:
    made = _byte_level(vocabulary, merges)
    made.normalizer = normalizers.NFC()
    blank = settings.flag("add_prefix_space", False)
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=blank, use_regex=False),
        ]
    )
    return made


def _pieces(vocabulary: Vocabulary, merges: Merges, **options: Any) -> Any:
    """SentencePiece's BPE with single bytes for unknown characters."""
    bpe = models.BPE(vocab=vocabulary, merges=merges, fuse_unk=True, byte_fallback=True, **options)
    made = Tokenizer(bpe)
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return made


def _gemma(vocabulary: Vocabulary, merges: Merges, settings: Settings, named: Named) -> Any:
    made = _pieces(vocabulary, merges, unk_token=str(named["unk_token"]))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    return made


def _llama(vocabulary: Vocabulary, merges: Merges, settings: Settings, named: Named) -> Any:
    made = _pieces(vocabulary, merges)
    blank = settings.flag("add_prefix_space", True)
    # `_get_prepend_scheme`: what older versions did (legacy) puts a blank before every piece of a
    # text between special tokens.
    scheme = "never" if not blank else "always" if settings.flag("legacy", False) else "first"
    made.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
    if blank:
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        made.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)])
    return made


def _bert(vocabulary: Vocabulary, merges: Merges, settings: Settings, named: Named) -> Any:
    made = Tokenizer(models.WordPiece(vocabulary, unk_token=str(named["unk_token"])))
    made.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=settings.flag("tokenize_chinese_chars", True),
        strip_accents=settings.get("strip_accents"),
        lowercase=settings.flag("do_lower_case", True),
    )
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece("##")
    return made


@dataclass(frozen=True)
class _Class:
    """A class that sets up the tokenizer itself.

    Attributes:
        make: Makes the tokenizer of the vocabulary, without added tokens.
        named: Special tokens where the folder names none.
        model: Type of the model in tokenizer.json.
    """

    make: Callable[[Vocabulary, Merges, Settings, Named], Any]
    named: Mapping[str, str | None]
    model: str = "BPE"


END_OF_TEXT: dict[str, str | None] = dict.fromkeys(
    ("unk_token", "bos_token", "eos_token"), "<|endoftext|>"
)
CLASSES = {
    "GPT2Tokenizer": _Class(_gpt2, END_OF_TEXT),
    "GPTNeoXTokenizer": _Class(_gpt_neox, {**END_OF_TEXT, "pad_token": "<|padding|>"}),
    "Qwen2Tokenizer": _Class(
        _qwen2, {**END_OF_TEXT, "bos_token": None, "pad_token": "<|endoftext|>"}
    ),
    "GemmaTokenizer": _Class(
        _gemma, {f"{name}_token": f"<{name}>" for name in ("unk", "bos", "eos", "pad", "mask")}
    ),
    "LlamaTokenizer": _Class(
        _llama, {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    ),
    "BertTokenizer": _Class(
        _bert,
        {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "sep", "pad", "cls", "mask")},
        "WordPiece",
    ),
}


def _class_of(checkpoint: Checkpoint, content: bytes | None) -> str:
    """Returns the name of the class that AutoTokenizer chooses (`AutoTokenizer.from_pretrained`).

    Raises:
        InputError: It is a class that is not supported, or one of the folder's own code.
    """
    settings, kind = checkpoint.tokenizer, str(checkpoint.config.get("model_type"))
    settings.only("auto_map", None)
    if kind in AS_THEY_STAND:
        settings.get("tokenizer_class")
        if content is None:
            raise InputError(
                f"{checkpoint.folder / TOKENIZER} is missing, and of a {kind} nothing else is "
                "read; make it: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            )
        return AS_IT_IS
    declared = settings.get("tokenizer_class", checkpoint.config.get("tokenizer_class"))
    registered = REGISTERED.get(kind)
    if declared is None:
        return registered or AS_IT_IS
    name = str(declared).removesuffix("Fast")
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


# --- The files ------------------------------------------------------------------------------------


def read_fast_tokenizer(checkpoint: Checkpoint) -> FastTokenizer:
    """Makes the tokenizer of tokenizer.json, or of vocab.json and merges.txt, or of vocab.txt.

    Raises:
        InputError: A file is missing or malformed, or names a class that is not supported.
    """
    path = checkpoint.folder / TOKENIZER
    content = read_bytes(path, MOST_BYTES) if path.exists() else None
    settings, name = checkpoint.tokenizer, _class_of(checkpoint, content)
    settings.only("fix_mistral_regex", False)
    settings.get("split_special_tokens")  # text is always split
    record = {} if content is None else _object(checkpoint, TOKENIZER)
    origin = str(checkpoint.folder if content is None else path)
    try:
        if content is not None and (largest := largest_id(content)) > MOST_ID:
            raise ValueError(f"the id {largest}")
        with panics_as_errors():
            return _made(checkpoint, name, content, record, origin)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise InputError(
            f"{origin}: expected a tokenizer as {name} of transformers reads it, found something "
            f"else ({error}); {REMEDY}"
        ) from error
    except Exception as error:  # the library's own error has no type
        if type(error) is not Exception:
            raise
        raise InputError(f"{origin} is not a tokenizer ({error}); {REMEDY}") from error


def _object(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    return read_document(checkpoint.folder / name, dict[str, Any], REMEDY, most=MOST_BYTES)


def _made(
    checkpoint: Checkpoint, name: str, content: bytes | None, record: dict[str, Any], origin: str
) -> FastTokenizer:
    settings = checkpoint.tokenizer
    file = None if content is None else Tokenizer.from_buffer(content)
    if record.get("model", {}).get("dropout"):
        raise InputError(f"{origin}: dropout of merges gives random tokens; set it to null")
    named, extra, added = _tokens(checkpoint, record.get("added_tokens", []))
    rebuilt = CLASSES.get(name)
    if rebuilt is None:
        if file is None:
            raise InputError(f"{checkpoint.folder / TOKENIZER} is missing; {REMEDY}")
        made = Tokenizer.from_str(file.to_str())
    else:
        vocabulary, merges = vocabulary_of(checkpoint, rebuilt.model, record)
        made = rebuilt.make(vocabulary, merges, settings, {**rebuilt.named, **named})
        if file is not None and file.post_processor is not None:
            made.post_processor = file.post_processor
        # transformers adds its own names too, with ids that the model may lack. No text gives them.
        texts = {*made.get_vocab(), *(each.content for each in added.values())}
        named = {key: text for key, text in rebuilt.named.items() if text in texts} | named
    # The order in which tokens without an id get one.
    named = {key: named[key] for key in NAMED if key in named} | named
    _add(made, named, extra, added)
    if name == "Qwen2Tokenizer":
        special = map(_text, [*filter(None, named.values()), *extra])
        made.add_tokens([AddedToken(text, special=True) for text in dict.fromkeys(special)])
    for token, each in added.items():
        if (found := made.token_to_id(each.content)) != token:
            raise InputError(
                f"{origin}: expected the id {token} for the added token {each.content!r}, but "
                f"{name} of transformers gives it {found}; save the tokenizer with transformers"
            )
    given = {**(rebuilt.named if rebuilt else {}), **named}
    names = {key: _text(value) for key, value in given.items() if value is not None}
    if name == "BertTokenizer":
        begin, end = names["cls_token"], names["sep_token"]
        made.post_processor = _around(made, [begin], [end], ["$B:1", f"{end}:1"])
    elif file is None or made.post_processor is None or name == "GPTNeoXTokenizer":
        # transformers drops both settings where there is a tokenizer.json.
        before, after = (
            [names[f"{end}_token"]]
            if file is None and settings.flag(f"add_{end}_token", False) and f"{end}_token" in names
            else []
            for end in ("bos", "eos")
        )
        made.post_processor = _around(made, before, after)
    inputs = settings.get("model_input_names", ["token_type_ids"] * (name == "BertTokenizer"))
    segments = "token_type_ids" in inputs
    if file is not None and content is not None and made.to_str() == file.to_str():
        return FastTokenizer(made, content, names, segments=segments)
    notes = [] if file is None else _differences(made, file, name)
    return FastTokenizer(made, made.to_str().encode(), names, notes, segments)


def _around(made: Any, before: list[str], after: list[str], second: Sequence[str] = ()) -> Any:
    ids = [(text, made.token_to_id(text)) for text in dict.fromkeys([*before, *after])]
    single = [*before, "$A", *after]
    pair = {"pair": [*single, *second]} if second else {}
    return processors.TemplateProcessing(single=single, special_tokens=ids, **pair)


def _differences(made: Any, file: Any, name: str) -> list[str]:
    """Describes which parts are set by the class and not by tokenizer.json."""
    ours, theirs = json.loads(made.to_str()), json.loads(file.to_str())
    parts = ("normalizer", "pre_tokenizer", "decoder")
    differing = [part for part in parts if ours[part] != theirs[part]]
    if made.encode("").ids != file.encode("").ids:  # there are several forms of the same
        differing.append("post_processor")
    if not differing:
        return []
    return [f"{' and '.join(differing)} as {name} of transformers sets them, not tokenizer.json"]


def vocabulary_of(
    checkpoint: Checkpoint, model: str, record: dict[str, Any]
) -> tuple[Vocabulary, Merges]:
    """Returns ids by token, and merges as pairs of tokens.

    Args:
        checkpoint: The folder.
        model: Type of the model: BPE or WordPiece.
        record: tokenizer.json; empty if absent.

    Raises:
        InputError: A file is missing or malformed.
    """
    folder = checkpoint.folder
    if record:
        found = record.get("model") or {}
        if found.get("type", model) != model:
            raise InputError(
                f"{folder / TOKENIZER}: expected a model of type {model}, found "
                f"{found.get('type')!r}; {REMEDY}"
            )
        merges = [
            each.split(" ") if isinstance(each, str) else each for each in found.get("merges", [])
        ]
        return _typed(found.get("vocab", {}), merges, str(folder / TOKENIZER))
    if model == "WordPiece":
        try:
            lines = read_bytes(folder / "vocab.txt").decode().split("\n")
        except UnicodeDecodeError as error:
            raise InputError(
                f"{folder / 'vocab.txt'} is not UTF-8 ({error}); restore the file"
            ) from error
        return {line.removesuffix("\r"): number for number, line in enumerate(lines) if line}, []
    lines = read_bytes(folder / "merges.txt").decode(errors="replace").splitlines()
    merges = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    return _typed(_object(checkpoint, "vocab.json"), merges, str(folder))


def _typed(vocabulary: Any, merges: Any, origin: str) -> tuple[Vocabulary, Merges]:
    pair = Annotated[list[str], Meta(min_length=2, max_length=2)]
    found = checked(merges, list[pair], f"{origin}: merges", REMEDY)
    return (
        checked(vocabulary, Vocabulary, f"{origin}: vocabulary", REMEDY),
        [(left, right) for left, right in found],
    )


# --- Added tokens ---------------------------------------------------------------------------------


def _tokens(
    checkpoint: Checkpoint, in_file: Iterable[dict[str, Any]]
) -> tuple[Named, list[Any], dict[int, Any]]:
    """Returns named tokens, further special ones, and those with an id (`_from_pretrained`)."""
    settings = checkpoint.tokenizer
    named: Named = {}
    for name in settings.values:
        value = settings.values[name]
        if name in NAMED or (name.endswith("_token") and isinstance(value, str)):
            named[name] = settings.get(name)
    extra: Any = settings.get("extra_special_tokens") or settings.get("additional_special_tokens")
    added: dict[int, Any] = {}
    others = checkpoint.special_tokens
    if (decoder := settings.get("added_tokens_decoder")) is not None:
        added = {int(token): _token(value) for token, value in decoder.items()}
        # special_tokens_map.json is not read then, which matters only where it says something else.
        said = {name: _texts(value) for name, value in settings.values.items()}
        for name, value in others.values.items():
            if said.get(name) == _texts(value):
                others.get(name)
    else:
        for name in others.values:
            value = others.get(name)
            if name == "additional_special_tokens":
                extra = extra or value
            elif name == "extra_special_tokens" and isinstance(value, list):
                extra = [*(extra or []), *(each for each in value if each not in (extra or []))]
            elif name == "extra_special_tokens":
                extra = value
            else:
                named[name] = _token({**value, "special": True}) if _is_token(value) else value
        known = {_text(value) for value in (*named.values(), *(extra or [])) if value is not None}
        path = checkpoint.folder / ADDED_TOKENS
        for text, token in (_object(checkpoint, ADDED_TOKENS) if path.exists() else {}).items():
            special = text in known
            added[token] = AddedToken(text, normalized=not special, special=special)
        for each in in_file:
            added[each["id"]] = _token({key: each[key] for key in each if key != "id"})
    if isinstance(extra, dict):
        named, extra = {**named, **extra}, []
    by_text = {each.content: each for each in added.values()}
    named = {
        name: value if value is None else by_text.get(_text(value), _converted(value))
        for name, value in named.items()
    }
    return named, [_converted(each) for each in extra or []], added


def added_tokens(checkpoint: Checkpoint) -> list[tuple[str, int]]:
    """Returns text and id of the tokens that are added to the vocabulary."""
    _, _, added = _tokens(checkpoint, [])
    return [(each.content, token) for token, each in added.items()]


def _add(made: Any, named: Named, extra: list[Any], added: dict[int, Any]) -> None:
    """Adds the tokens that a tokenizer lacks, in the order of `TokenizersBackend.__init__`."""
    there = made.get_added_tokens_decoder().values()
    known = {repr(each) for each in there}
    adding = [added[token] for token in sorted(added) if repr(added[token]) not in known]
    texts = {each.content for each in (*there, *adding)}
    special = [value for value in named.values() if value is not None]
    for value in (*special, *extra):
        if _text(value) not in texts:
            whole = isinstance(value, AddedToken)
            adding.append(value if whole else AddedToken(value, special=True))
            texts.add(_text(value))
    for each in adding:
        each.special = each.special or each.content in map(_text, special)
    made.add_tokens(adding)


def _is_token(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("content"), str)


def _token(value: Any) -> Any:
    if not _is_token(value):
        raise TypeError(f"expected a token with its content, found {json.dumps(value)}")
    known = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    return AddedToken(**{key: value[key] for key in known if key in value})


def _converted(value: Any) -> Any:
    return _token(value) if _is_token(value) else value


def _texts(value: Any) -> Any:
    return [*map(_text, value)] if isinstance(value, list) else _text(value)


def _text(value: Any) -> str:
    return str(value["content"] if _is_token(value) else value)
