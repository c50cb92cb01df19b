"""Tokenizers of bytes: ByT5's, and byte-level BPE as ranks of tiktoken."""

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import pairwise

from transferry.build_model.importing.huggingface.folder import REMEDY, PretrainedFolder
from transferry.build_model.importing.huggingface.tokenizer.fast_tokenizer import added_tokens
from transferry.build_model.model.config import ModelConfig
from transferry.build_model.train.vocabulary import byte_of_character
from transferry.runtime.errors import InputError
from transferry.runtime.tokenizer.byte_pair import GPT2_PATTERN, AnyTokenizer, Tokenizer
from transferry.runtime.tokenizer.special_tokens import SpecialTokens

# Ids of ByT5Tokenizer before the bytes, and its settings without an effect on the ids of a text.
BYT5_SPECIAL = {"<pad>": 0, "</s>": 1, "<unk>": 2}
BYT5_SETTINGS = (
    *("tokenizer_class", "extra_ids", "additional_special_tokens", "extra_special_tokens"),
    *("added_tokens_decoder", "clean_up_tokenization_spaces"),
)


def byte_tokenizer(
    pretrained: PretrainedFolder, special: SpecialTokens, config: ModelConfig
) -> AnyTokenizer:
    """Bytes of UTF-8 after the three special tokens (Xue et al. 2022, ByT5)."""
    settings, first = pretrained.tokenizer, len(BYT5_SPECIAL)
    for name in settings.values:
        if name in BYT5_SETTINGS or name.endswith("_token"):
            settings.get(name)
    for text, token in added_tokens(pretrained):
        if first <= token < first + 256 or BYT5_SPECIAL.get(text, token) != token:
            raise InputError(
                f"{pretrained.folder}: expected the special tokens of ByT5 below {first} and from "
                f"{first + 256} on, found {text!r} with the id {token}; {REMEDY}"
            )
    pretrained.notes += [
        "bytes that are no UTF-8 become U+FFFD in answers, where transformers drops them",
        "texts such as </s> are always read as bytes, where transformers reads special tokens",
    ]
    special = dataclasses.replace(special, after=(special.eos_id,))
    ranks = {bytes([byte]): byte for byte in range(256)}
    try:
        return Tokenizer(
            *("byt5", GPT2_PATTERN, ranks),
            special=special,
            first_ordinary_id=first,
            vocabulary_size=config.vocabulary_size,
        )
    except InputError as error:
        raise InputError(f"{pretrained.folder}: {error}") from error


def ranks_of(
    vocabulary: Mapping[str, int], merges: Sequence[Sequence[str]]
) -> tuple[dict[bytes, int], int] | None:
    """Converts ids and merges to tiktoken's ranks, if both split every text alike.

    tiktoken has no merges: it joins any two neighbours that form a token, lowest rank first. The
    result is the same if ids ascend in the order of the merges and every token is reached by its
    own merge; both are checked.

    Returns:
        The ranks, and the id of rank 0; None if tiktoken would split text differently.
    """
    byte_of = byte_of_character()
    order = [*byte_of, *("".join(merge) for merge in merges)]
    try:
        ids = [vocabulary[token] for token in order]
        tokens = [bytes(byte_of[character] for character in token) for token in order]
    except KeyError:  # a byte, or the token of a merge
        return None
    first = min(ids)
    # The bytes may have any order, as long as they come first.
    if sorted(ids[:256]) + ids[256:] != list(range(first, first + len(ids))):
        return None
    ranks = {token: number - first for token, number in zip(tokens, ids, strict=True)}
    for token, (left, right) in zip(tokens[256:], merges, strict=True):
        if [len(piece) for piece in _joined(token, ranks)] != [len(left), len(right)]:
            return None
    return ranks, first


def _joined(token: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    """BPE of a token by the ranks below its own."""
    pieces = [token[place : place + 1] for place in range(len(token))]
    while True:
        pairs = [ranks.get(left + right, len(ranks)) for left, right in pairwise(pieces)]
        lowest = min(pairs, default=len(ranks))
        if lowest >= ranks[token]:
            return pieces
        place = pairs.index(lowest)
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]
