"""The tokenizer of a module of the user's own, from a folder or a file."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from transferry.runtime.errors import InputError, from_extra
from transferry.runtime.io.folders import is_bundle, is_checkpoint
from transferry.runtime.io.whole import read_bytes
from transferry.runtime.tokenizer.byte_pair import AnyTokenizer, load_tokenizer
from transferry.runtime.tokenizer.special_tokens import SpecialTokens, panics_as_errors
from transferry.runtime.tokenizer.third_party import (
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    largest_id,
)

# Usual texts of the special tokens; the first that the vocabulary has.
USUAL = {
    "pad": ("<pad>", "[PAD]", "<|pad|>"),
    "bos": ("<s>", "<bos>", "[CLS]", "<sos>", "<|endoftext|>"),
    "eos": ("</s>", "<eos>", "[SEP]", "<|endoftext|>"),
    "mask": ("<mask>", "[MASK]"),
}
UNKNOWN = ("<unk>", "[UNK]", "<|unk|>")


def read_tokenizer(
    path: Path, architecture: str, special: Mapping[str, Any] | None
) -> AnyTokenizer:
    """Reads a tokenizer.

    Args:
        path: A checkpoint or bundle; a folder of transformers; a tokenizer.json; a SentencePiece
            model (.model, .spm); or a vocabulary, a token on each line, for text with blanks
            between the tokens.
        architecture: Architecture of the model, which decides the tokens around a source.
        special: Special tokens as texts or ids: pad, bos, eos, mask, and lists `before` and
            `after` of the tokens around a source. Default: tokens with the usual texts; a source
            of an encoder-decoder ends with eos, one of an encoder is between bos and eos.

    Raises:
        InputError: No tokenizer can be read, or it lacks a special token.
        UsageError: The library is not installed.
    """
    if path.is_dir() and (is_bundle(path) or is_checkpoint(path)):
        found = load_tokenizer(path)
        found.special = _special(found.special, special, lambda text: None, architecture)
        return found
    if path.is_dir():
        content = _of_transformers(path)
    elif path.suffix in (".model", ".spm"):
        return _pieces(path, architecture, special)
    else:
        content = read_bytes(path)
        if path.suffix != ".json":
            content = _words(content, path)
    return _fast(content, path, architecture, special)


def _fast(
    content: bytes, path: Path, architecture: str, special: Mapping[str, Any] | None
) -> AnyTokenizer:
    with from_extra("tokenizers", f"{path} needs tokenizers"):
        import tokenizers
    try:
        with panics_as_errors():
            largest_id(content)
            made = tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises no narrower one
        raise InputError(f"{path}: expected a tokenizer.json of tokenizers ({error})") from error
    size = max(made.get_vocab().values(), default=-1) + 1
    files = dict.fromkeys(HuggingFaceTokenizer.names, content)
    chosen = _special(None, special, made.token_to_id, architecture)
    return HuggingFaceTokenizer(files, chosen, size)


def open_pieces(path: Path) -> tuple[bytes, Any]:
    """Returns a SentencePiece model, as file and opened."""
    with from_extra("sentencepiece", f"{path} needs sentencepiece"):
        import sentencepiece
    content = read_bytes(path)
    try:
        return content, sentencepiece.SentencePieceProcessor(model_proto=content)
    except (RuntimeError, ValueError) as error:
        raise InputError(f"{path} is no SentencePiece model ({error}); restore the file") from error


def _pieces(path: Path, architecture: str, special: Mapping[str, Any] | None) -> AnyTokenizer:
    content, model = open_pieces(path)

    def id_of(text: str) -> int | None:
        found: int = model.piece_to_id(text)
        return None if found == model.unk_id() else found

    own = {"pad": model.pad_id(), "bos": model.bos_id(), "eos": model.eos_id()}
    given = {name: token for name, token in own.items() if token >= 0} | dict(special or {})
    files = dict.fromkeys(SentencePieceTokenizer.names, content)
    chosen = _special(None, given, id_of, architecture)
    return SentencePieceTokenizer(files, chosen, model.get_piece_size())


def _words(content: bytes, path: Path) -> bytes:
    """Returns the tokenizer.json of a list of words."""
    words = content.decode("utf-8", "replace").splitlines()
    ids = {word: number for number, word in enumerate(words)}
    unknown = next((each for each in UNKNOWN if each in ids), None)
    if unknown is None or len(ids) != len(words):
        raise InputError(
            f"{path}: expected a token on each line, all different, {' or '.join(UNKNOWN)} among "
            "them, found another list; give a tokenizer.json or a SentencePiece model else"
        )
    record = {
        "version": "1.0",
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": ids, "unk_token": unknown},
    }
    return json.dumps(record, ensure_ascii=False).encode()


def _of_transformers(folder: Path) -> bytes:
    """Returns the tokenizer.json that AutoTokenizer makes of a folder."""
    with from_extra("import", f"{folder} needs transformers"):
        from transformers import AutoTokenizer
    try:
        made: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        content: str = made.backend_tokenizer.to_str()
    except Exception as error:  # transformers raises errors of many kinds
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{folder}: expected a tokenizer of transformers ({reason})") from error
    return content.encode()


def _special(
    known: SpecialTokens | None,
    given: Mapping[str, Any] | None,
    id_of: Callable[[str], int | None],
    architecture: str,
) -> SpecialTokens:
    if known is not None and not given:
        return known
    given = dict(given or {})

    def token(value: Any) -> int:
        found = value if type(value) is int else id_of(str(value))
        if found is None or found < 0:
            raise InputError(
                f"special_tokens: expected tokens of the vocabulary, found {value!r}; name others"
            )
        return found

    def named(name: str, default: int | None) -> int | None:
        if given.get(name) is not None:
            return token(given[name])
        return next((each for text in USUAL[name] if (each := id_of(text)) is not None), default)

    eos = named("eos", None if known is None else known.eos_id)
    if eos is None:
        raise InputError(
            "special_tokens: expected the token that ends an output, found none; give the module "
            'special_tokens = {"eos": TOKEN}, and bos and pad likewise'
        )
    bos, pad = named("bos", eos), named("pad", eos)
    assert bos is not None and pad is not None
    before = {"encoder-only": [bos]}.get(architecture, [])
    after = [] if architecture == "decoder-only" else [eos]
    fresh = SpecialTokens(pad_id=pad, bos_id=bos, eos_id=eos)
    return replace(
        known or fresh,
        pad_id=pad,
        bos_id=bos,
        eos_id=eos,
        mask_id=named("mask", None),
        before=tuple(map(token, given.get("before", before))),
        after=tuple(map(token, given.get("after", after))),
    )
