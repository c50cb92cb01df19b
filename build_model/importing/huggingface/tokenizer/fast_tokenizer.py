"""The tokenizer that AutoTokenizer of transformers 5.23 makes of a folder, as a tokenizer.json.

transformers does not always use tokenizer.json as it is. The classes in `CLASSES` take only the
vocabulary, the merges and the post-processor from it, and set normalizer, pre-tokenizer and decoder
themselves (`TokenizersBackend.convert_to_native_format`); then the tokens of tokenizer_config.json,
special_tokens_map.json and added_tokens.json are added (`TokenizersBackend.__init__`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders

from transferry.build_model.importing.huggingface.folder import REMEDY, Checkpoint
from transferry.build_model.importing.huggingface.tokenizer.classes import (
    CLASSES,
    Named,
    TokenizerClass,
    class_of,
    table_missing,
    template,
)
from transferry.build_model.importing.huggingface.tokenizer.table import (
    MOST_ID,
    TOKENIZER,
    Table,
    table_of_file,
    table_of_pieces,
    table_of_vocabulary,
)
from transferry.runtime.errors import InputError
from transferry.runtime.io.documents import read_document
from transferry.runtime.io.whole import MOST_BYTES, read_bytes
from transferry.runtime.tokenizer.third_party import CLEANED, largest_id, panics_as_errors

ADDED_TOKENS = "added_tokens.json"
CLEAN_UP = "clean_up_tokenization_spaces"
NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


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

    def below(self, size: int) -> FastTokenizer:
        """Returns the tokenizer without the special tokens from an id on, which no text gives.

        Raises:
            InputError: Other tokens have such ids.
        """
        ids = self.tokenizer.get_vocab()
        beyond = [text for text in sorted(ids, key=ids.get) if ids[text] >= size]
        if not beyond:
            return self
        record = json.loads(self.tokenizer.to_str())
        kept = [each for each in record["added_tokens"] if each["id"] < size]
        made = None
        # Those that the vocabulary holds as well stay, and are refused.
        if {ids[text] for text in beyond} <= self.special():
            made = Tokenizer.from_str(json.dumps({**record, "added_tokens": kept}))
        if made is None or max((*made.get_vocab().values(), *made.encode("a").ids)) >= size:
            raise InputError(
                f"expected ids below vocab_size, {size}, found {ids[beyond[0]]} of the token "
                f"{beyond[0]!r}; give the model a row for it (resize_token_embeddings of "
                "transformers), or take both from one checkpoint"
            )
        note = f"{', '.join(beyond)} left out, since the model has {size} tokens"
        notes = [*self.notes, note]
        return dataclasses.replace(
            self, tokenizer=made, content=made.to_str().encode(), notes=notes
        )


# --- The files ------------------------------------------------------------------------------------


def read_fast_tokenizer(checkpoint: Checkpoint) -> FastTokenizer:
    """Makes the tokenizer of tokenizer.json, or of vocab.json and merges.txt, or of vocab.txt.

    Raises:
        InputError: A file is missing or malformed, or names a class that is not supported.
    """
    path = checkpoint.folder / TOKENIZER
    content = read_bytes(path, MOST_BYTES) if path.exists() else None
    settings, name = checkpoint.tokenizer, class_of(checkpoint, content)
    settings.only("fix_mistral_regex", False)
    if settings.get("split_special_tokens"):
        checkpoint.notes.append(
            "special tokens in a text are always split, those of a chat template never, whatever "
            "split_special_tokens says"
        )
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
    settings, rebuilt = checkpoint.tokenizer, CLASSES.get(name)
    file = None if content is None else Tokenizer.from_buffer(content)
    if record.get("model", {}).get("dropout"):
        raise InputError(f"{origin}: dropout of merges gives random tokens; set it to null")
    named, extra, added = _tokens(checkpoint, record.get("added_tokens", []))
    if rebuilt is None:
        if file is None:
            raise table_missing(checkpoint, name)
        made = Tokenizer.from_str(file.to_str())
    else:
        table = _table(checkpoint, name, rebuilt, record, named)
        made = rebuilt.make(table, settings, {**rebuilt.named, **named})
        if file is not None and file.post_processor is not None:
            made.post_processor = file.post_processor
        # transformers adds its own names too, with ids that the model may lack. No text gives them.
        texts = {*made.get_vocab(), *(each.content for each in added.values())}
        named = {key: text for key, text in rebuilt.named.items() if text in texts} | named
        if not _names_extra(checkpoint):
            kept = table.added if rebuilt.keeps_added else ()
            # They replace those of special_tokens_map.json.
            extra = [] if table.added else extra
            extra += [AddedToken(text, normalized=False, special=each) for text, each in kept]
            own = rebuilt.extra or (lambda text, settings: False)
            extra += [text for text in sorted(texts) if own(text, settings)]
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
            names[f"{end}_token"]
            if file is None and settings.flag(f"add_{end}_token", False) and f"{end}_token" in names
            else ""
            for end in ("bos", "eos")
        )
        single = f"{before and before + ':0 '}$A:0{after and ' ' + after + ':0'}"
        second = f"{before and before + ':1 '}$B:1{after and ' ' + after + ':1'}"
        made.post_processor = template(made, single, f"{single} {second}")
    segments = rebuilt is not None and rebuilt.segments
    segments = "token_type_ids" in settings.get("model_input_names", ["token_type_ids"] * segments)
    notes = [] if file is None else _differences(made, file, name)
    if (record.get("truncation") or {}).get("direction") == "Left":
        notes.append(f"rows are cut at their end, not at their beginning as {TOKENIZER} says")
    _clean_up(checkpoint, made)
    if file is not None and content is not None and made.to_str() == file.to_str():
        return FastTokenizer(made, content, names, segments=segments)
    return FastTokenizer(made, made.to_str().encode(), names, notes, segments)


def _table(
    checkpoint: Checkpoint, name: str, kind: TokenizerClass, record: dict[str, Any], named: Named
) -> Table:
    """Returns the vocabulary of a class, from the first of its files that there is."""
    folder = checkpoint.folder
    if record:
        return table_of_file(folder, kind.model, record)
    if not kind.pieces:
        return table_of_vocabulary(folder, kind.model)
    if kind.scores is None or not (folder / kind.pieces).exists():
        raise table_missing(checkpoint, name)
    table = table_of_pieces(folder / kind.pieces)
    texts = {key: _text(value) for key, value in named.items()}
    scores = kind.scores(table, checkpoint.tokenizer, texts)
    return dataclasses.replace(table, scores=scores)


def _names_extra(checkpoint: Checkpoint) -> bool:
    """Returns whether a folder says what further special tokens there are, were it none."""
    in_config, in_map = checkpoint.tokenizer.values, checkpoint.special_tokens.values
    name = "extra_special_tokens"
    return name in in_config or "additional_special_tokens" in in_config or name in in_map


def _clean_up(checkpoint: Checkpoint, made: Any) -> None:
    """Removes blanks before punctuation from the text of ids (`clean_up_tokenization`)."""
    settings, merged = checkpoint.tokenizer, type(made.model).__name__ == "BPE"
    forced = settings.flag(f"{CLEAN_UP}_for_bpe_even_though_it_will_corrupt_output", False)
    # Without a decoder pieces are joined by blanks, which no decoder does.
    if made.decoder is None or not settings.flag(CLEAN_UP, False) or (merged and not forced):
        return
    replaced = [decoders.Replace(found, content) for found, content in CLEANED]
    made.decoder = decoders.Sequence([made.decoder, decoders.Fuse(), *replaced])


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


# --- Added tokens ---------------------------------------------------------------------------------


def _tokens(
    checkpoint: Checkpoint, in_file: Iterable[dict[str, Any]]
) -> tuple[Named, list[Any], dict[int, Any]]:
    """Returns named tokens, further special ones, and those with an id (`_from_pretrained`)."""
    settings = checkpoint.tokenizer
    named: Named = {}
    for name in settings.values:
        value = settings.values[name]
        if name in ("add_bos_token", "add_eos_token"):
            continue  # flags
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
        listed = extra
        for name in others.values:
            value = others.get(name)
            if name == "additional_special_tokens":
                extra = extra or value
            elif name == "extra_special_tokens" and isinstance(value, list):
                value = [_special(each) for each in value]
                extra = [*(extra or []), *(each for each in value if each not in (extra or []))]
                listed = extra
            elif name == "extra_special_tokens":
                extra = value
            else:
                named[name] = _special(value)
        # Objects of tokenizer_config.json and additional_special_tokens of the map do not count.
        counted = (*map(named.get, NAMED), *(listed or []))
        known = {str(value) for value in counted if isinstance(value, (str, AddedToken))}
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


def _special(value: Any) -> Any:
    return _token({**value, "special": True}) if _is_token(value) else value


def _converted(value: Any) -> Any:
    return _token(value) if _is_token(value) else value


def _texts(value: Any) -> Any:
    return [*map(_text, value)] if isinstance(value, list) else _text(value)


def _text(value: Any) -> str:
    return str(value["content"] if _is_token(value) else value)
