"""What is read of a toolkit's folder, and the tokenizers that both toolkits have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transferry.build_model.importing.formats.tensors import Tensors
from transferry.build_model.importing.huggingface.tables import Family
from transferry.build_model.model.config import ModelConfig
from transferry.runtime.errors import InputError, UsageError, install_command
from transferry.runtime.io.whole import read_bytes
from transferry.runtime.tokenizer.special_tokens import AnyTokenizer, SpecialTokens
from transferry.runtime.tokenizer.third_party import HuggingFaceTokenizer, SentencePiecePair

UNKNOWN = "<unk>"


@dataclass(frozen=True)
class Source:
    """A model in a toolkit's own format, but for the numbers of its tensors.

    Attributes:
        kind: The toolkit.
        family: Table of the conversion.
        config: Shape of our model.
        tensors: Its tensors.
        tokenizer: Its tokenizer.
        generation: Fields of GenerationOptions that become the bundle's defaults.
        ignored: Settings of the toolkit's search that do not.
        note: What the user has to know of the tokenizer; may be empty.
    """

    kind: str
    family: Family
    config: ModelConfig
    tensors: Tensors
    tokenizer: AnyTokenizer
    generation: Mapping[str, Any]
    ignored: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


def split_at_blanks(
    ids: Mapping[str, int], special: SpecialTokens, size: int, origin: str
) -> AnyTokenizer:
    """Returns a tokenizer of text that is split into tokens already, as the toolkits read it.

    Args:
        ids: Ids by token, those of special tokens left out; with that of <unk>.
        special: Special ids.
        size: Number of ids.
        origin: Name of the vocabulary for errors.

    Raises:
        UsageError: tokenizers is not installed.
        InputError: There is no <unk>, or an id is not below `size`.
    """
    try:
        import tokenizers
    except ModuleNotFoundError as error:
        raise UsageError(
            "the tokenizer needs tokenizers, which is not installed; "
            f"{install_command('tokenizers')}"
        ) from error
    require_unknown(ids, origin)
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(dict(ids), unk_token=UNKNOWN))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    files = dict.fromkeys(HuggingFaceTokenizer.names, made.to_str().encode())
    return HuggingFaceTokenizer(files, special, size)


def pair(
    source: Path, target: Path, ids: Mapping[str, int], special: SpecialTokens, size: int
) -> AnyTokenizer:
    """Returns a tokenizer of one SentencePiece model per side and a table of ids.

    Raises:
        UsageError: sentencepiece is not installed.
        InputError: A file cannot be read, there is no <unk>, or an id is not below `size`.
    """
    require_unknown(ids, str(source.parent))
    contents = (
        read_bytes(source),
        read_bytes(target),
        json.dumps(dict(ids), ensure_ascii=False).encode(),
    )
    files = dict(zip(SentencePiecePair.names, contents, strict=True))
    try:
        return SentencePiecePair(files, special, size)
    except InputError as error:
        raise InputError(f"{source.parent}: {error}") from error


def require_unknown(ids: Mapping[str, int], origin: str) -> None:
    """Raises an InputError for a vocabulary without the unknown token."""
    if UNKNOWN not in ids:
        raise InputError(f"{origin}: expected the token {UNKNOWN} in the vocabulary, found none")
