"""The pieces of a tokenizer: ids, merges and scores, from whichever file a folder holds them in."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from transferry.build_model.importing.huggingface.folder import REMEDY
from transferry.runtime.errors import InputError, UsageError, install_command
from transferry.runtime.io.documents import checked, read_document
from transferry.runtime.io.whole import MOST_BYTES, read_bytes

TOKENIZER = "tokenizer.json"
COPY = "copy it from the model that this one was trained from, or download it again"
# The library makes a list of so many numbers; sixty times the largest vocabularies.
MOST_ID = 1 << 24
Vocabulary = dict[str, Annotated[int, Meta(ge=0, le=MOST_ID)]]
Merges = Sequence[tuple[str, str]]
Scores = list[tuple[str, float]]
Pair = Annotated[list[str], Meta(min_length=2, max_length=2)]
# Types of a piece in sentencepiece_model.proto.
CONTROL, USER_DEFINED = 3, 4


@dataclass(frozen=True)
class Table:
    """Pieces of a tokenizer.

    Attributes:
        ids: Ids by piece, of BPE and WordPiece.
        merges: Of BPE, pairs of pieces in order.
        scores: Of Unigram, pieces in the order of their ids.
        charsmap: Normalisation compiled by SentencePiece; empty without one.
        added: Of a SentencePiece model, the pieces that are added tokens, and whether each is
            special.
    """

    ids: Vocabulary
    merges: Merges = ()
    scores: Sequence[tuple[str, float]] = ()
    charsmap: bytes = b""
    added: Sequence[tuple[str, bool]] = ()


def table_of_file(folder: Path, model: str, record: Mapping[str, Any]) -> Table:
    """Returns the table in tokenizer.json.

    Args:
        folder: The folder.
        model: Type of the model: BPE, WordPiece or Unigram.
        record: The file's content.

    Raises:
        InputError: It is malformed, or holds another type.
    """
    found, origin = record.get("model") or {}, str(folder / TOKENIZER)
    if found.get("type", model) != model:
        raise InputError(
            f"{origin}: expected a model of type {model}, found {found.get('type')!r}; {REMEDY}"
        )
    charsmap = _charsmap(record.get("normalizer"))
    if model == "Unigram":
        table = list[tuple[str, float]]
        scores = checked(found.get("vocab", []), table, f"{origin}: vocabulary", REMEDY)
        return Table({}, scores=scores, charsmap=charsmap)
    merges = [
        each.split(" ") if isinstance(each, str) else each for each in found.get("merges", [])
    ]
    ids, pairs = _typed(found.get("vocab", {}), merges, origin)
    return Table(ids, pairs, charsmap=charsmap)


def table_of_vocabulary(folder: Path, model: str) -> Table:
    """Returns the table in vocab.txt of WordPiece, or vocab.json and merges.txt of BPE.

    Raises:
        InputError: A file is missing or malformed.
    """
    if model == "WordPiece":
        require_files(folder, "vocab.txt", instead=f"{TOKENIZER} or ")
        try:
            lines = read_bytes(folder / "vocab.txt").decode().split("\n")
        except UnicodeDecodeError as error:
            raise InputError(
                f"{folder / 'vocab.txt'} is not UTF-8 ({error}); restore the file"
            ) from error
        return Table({line.removesuffix("\r"): number for number, line in enumerate(lines) if line})
    require_files(folder, "vocab.json", "merges.txt", instead=f"{TOKENIZER} or ")
    lines = read_bytes(folder / "merges.txt").decode(errors="replace").splitlines()
    merges = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    vocabulary = read_document(folder / "vocab.json", dict[str, Any], REMEDY, most=MOST_BYTES)
    return Table(*_typed(vocabulary, merges, str(folder)))


def require_files(folder: Path, *names: str, instead: str = "") -> None:
    """Raises InputError if a tokenizer's files are not all there; `instead` names another."""
    if missing := [name for name in names if not (folder / name).exists()]:
        raise InputError(
            f"{folder}: expected the tokenizer in {instead}{' and '.join(names)}, found no "
            f"{missing[0]}; {COPY}"
        )


def table_of_pieces(path: Path) -> Table:
    """Returns the table of a SentencePiece model with scores (`SentencePieceExtractor`).

    Raises:
        InputError: It is no such model.
        UsageError: sentencepiece or protobuf is not installed.
    """
    content = read_bytes(path, MOST_BYTES)
    try:
        proto: Any = import_module("sentencepiece.sentencepiece_model_pb2")
        from sentencepiece import SentencePieceProcessor

        SentencePieceProcessor(model_proto=content)  # it checks what protobuf would let pass
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{path} is a SentencePiece model, and {error.name} is not installed; "
            f"{install_command('sentencepiece')} protobuf"
        ) from error
    except RuntimeError as error:
        raise InputError(f"{path} is not a SentencePiece model ({error}); {REMEDY}") from error
    model = proto.ModelProto.FromString(content)
    if not model.pieces or model.trainer_spec.model_type != model.trainer_spec.UNIGRAM:
        raise InputError(
            f"{path}: expected a SentencePiece model of type unigram, found another; make a "
            f"{TOKENIZER}: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    scores = [(str(piece.piece), float(piece.score)) for piece in model.pieces]
    added = [
        (str(piece.piece), piece.type == CONTROL)
        for piece in model.pieces
        if piece.type in (CONTROL, USER_DEFINED)
    ]
    return Table({}, (), scores, bytes(model.normalizer_spec.precompiled_charsmap), added)


def _charsmap(normalizer: Any) -> bytes:
    """Returns the first compiled normalisation of tokenizer.json."""
    steps = normalizer if isinstance(normalizer, list) else [normalizer]
    if isinstance(normalizer, dict) and normalizer.get("type") == "Sequence":
        steps = normalizer["normalizers"]
    for step in steps:
        if isinstance(step, dict) and step.get("type") == "Precompiled":
            return base64.b64decode(step.get("precompiled_charsmap") or "")
    return b""


def _typed(vocabulary: Any, merges: Any, origin: str) -> tuple[Vocabulary, Merges]:
    found = checked(merges, list[Pair], f"{origin}: merges", REMEDY)
    return (
        checked(vocabulary, Vocabulary, f"{origin}: vocabulary", REMEDY),
        [(left, right) for left, right in found],
    )
