"""ByT5's tokenizer, whose tokens are bytes."""

from __future__ import annotations

import dataclasses

from transferry.build_model.importing.huggingface.folder import REMEDY, PretrainedFolder
from transferry.build_model.importing.huggingface.tokenizer.fast_tokenizer import added_tokens
from transferry.build_model.model.config import ModelConfig
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
