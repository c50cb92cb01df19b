"""The tokenizer that AutoTokenizer of transformers 5.23 makes of a folder, as a tokenizer.json.

transformers does not always use tokenizer.json as it is. The classes of `tokenizer_classes` take
only some parts of it; then the tokens of tokenizer_config.json,
special_tokens_map.json and added_tokens.json are added (`TokenizersBackend.__init__`).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta
from tokenizers import AddedToken, Tokenizer

from transferry.build_model.formats.sentencepiece_model import read_pieces
from transferry.build_model.huggingface.folder import REMEDY, Checkpoint
from transferry.build_model.huggingface.tokenizer_classes import (
    ALIASES,
    AS_IT_IS,
    CLASSES,
    MOST_ID,
    NOT_FOLLOWED,
    REGISTERED,
    SYNONYMS,
    Merges,
    Named,
    Parts,
    TokenizerClass,
    Vocabulary,
    around,
)
from transferry.runtime.documents import checked, read_document
from transferry.runtime.errors import InputError
from transferry.runtime.files import MOST_BYTES, read_bytes
from transferry.runtime.tokenizer.third_party import largest_id, panics_as_errors

TOKENIZER = "tokenizer.json"
ADDED_TOKENS = "added_tokens.json"

NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
# Files of SentencePiece, under the names that the classes give them.
PIECES = ("sentencepiece.bpe.model", "spiece.model")


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


# --- The files ------------------------------------------------------------------------------------


def _class_of(checkpoint: Checkpoint, content: bytes | None) -> str:
    """Returns the name of the class that AutoTokenizer chooses (`AutoTokenizer.from_pretrained`).

    Raises:
        InputError: It is a class that is not supported, or one of the folder's own code.
    """
    settings, kind = checkpoint.tokenizer, str(checkpoint.config.get("model_type"))
    settings.only("auto_map", None)
    declared = settings.get("tokenizer_class", checkpoint.config.get("tokenizer_class"))
    registered = REGISTERED.get(kind)
    if declared is None:
        return registered or AS_IT_IS
    name = str(declared).removesuffix("Fast")
    name = ALIASES.get(name, name)
    if name == "M2M100Tokenizer" and kind == "m2m_100":
        return AS_IT_IS  # without its own files
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
        parts = parts_of(checkpoint, rebuilt, record, extra)
        made = rebuilt.make(parts, settings, {**rebuilt.named, **named})
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
    if rebuilt is not None and rebuilt.around is not None:
        made.post_processor = rebuilt.around(made, names, settings)
    elif file is None or made.post_processor is None or name == "GPTNeoXTokenizer":
        # transformers drops both settings where there is a tokenizer.json.
        before, after = (
            [names[f"{end}_token"]]
            if file is None and settings.flag(f"add_{end}_token", False) and f"{end}_token" in names
            else []
            for end in ("bos", "eos")
        )
        made.post_processor = around(made, before, after)
    inputs = settings.get("model_input_names", ["token_type_ids"] * (name == "BertTokenizer"))
    segments = "token_type_ids" in inputs
    if file is not None and content is not None and made.to_str() == file.to_str():
        return FastTokenizer(made, content, names, segments=segments)
    notes = [] if file is None else _differences(made, file, name)
    return FastTokenizer(made, made.to_str().encode(), names, notes, segments)


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


def parts_of(
    checkpoint: Checkpoint, kind: TokenizerClass, record: dict[str, Any], extra: list[Any]
) -> Parts:
    """Returns what a class takes from a folder.

    Args:
        checkpoint: The folder.
        kind: The class.
        record: tokenizer.json; empty if absent.
        extra: Takes the tokens of SentencePiece's file that are never split.

    Raises:
        InputError: A file is missing or malformed.
    """
    folder = checkpoint.folder
    if record:
        return _parts_of_record(folder, kind.model, record)
    if kind.order is not None:
        paths = [path for name in PIECES if (path := folder / name).exists()]
        if not paths:
            raise InputError(
                f"{folder / TOKENIZER} is missing, and so is {' or '.join(PIECES)}; {REMEDY}"
            )
        pieces = read_pieces(paths[0])
        if not pieces.unigram:
            raise InputError(
                f"{paths[0]}: expected a model of unigrams, found another; make a {TOKENIZER}: "
                "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            )
        extra += [AddedToken(each, normalized=False) for each in pieces.user_defined]
        scores = kind.order(pieces.scores, checkpoint.tokenizer)
        return Parts(scores=scores, characters=pieces.characters)
    if kind.model == "WordPiece":
        try:
            lines = read_bytes(folder / "vocab.txt").decode().split("\n")
        except UnicodeDecodeError as error:
            raise InputError(
                f"{folder / 'vocab.txt'} is not UTF-8 ({error}); restore the file"
            ) from error
        ids = {line.removesuffix("\r"): number for number, line in enumerate(lines) if line}
        return Parts(ids)
    if not (folder / "vocab.json").exists():
        raise InputError(
            f"{folder / TOKENIZER} is missing, and so is vocab.json; make the former: "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    lines = read_bytes(folder / "merges.txt").decode(errors="replace").splitlines()
    merges = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    return Parts(*_typed(_object(checkpoint, "vocab.json"), merges, str(folder)))


def _parts_of_record(folder: Path, model: str, record: dict[str, Any]) -> Parts:
    found = record.get("model") or {}
    # Older files of unigrams and WordPiece do not name their type.
    if found.get("type", model) != model:
        raise InputError(
            f"{folder / TOKENIZER}: expected a model of type {model}, found "
            f"{found.get('type')!r}; {REMEDY}"
        )
    steps = record.get("normalizer") or {}
    steps = steps.get("normalizers", [steps]) if isinstance(steps, dict) else []
    tables = [step["precompiled_charsmap"] for step in steps if step.get("type") == "Precompiled"]
    characters = base64.b64decode(tables[0]) if tables and tables[0] else None
    if model == "Unigram":
        origin = f"{folder / TOKENIZER}: vocabulary"
        scores = checked(found.get("vocab"), list[tuple[str, float]], origin, REMEDY)
        return Parts(scores=scores, characters=characters)
    merges = [
        each.split(" ") if isinstance(each, str) else each for each in found.get("merges", [])
    ]
    vocabulary, pairs = _typed(found.get("vocab", {}), merges, str(folder / TOKENIZER))
    return Parts(vocabulary, pairs, characters=characters)


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
