"""Tokenizers from a corpus: trained BPE, or a tiktoken encoding cut down to the corpus."""

import random
from collections.abc import Iterable
from itertools import pairwise

import tiktoken
from tokenizers import Regex, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as HuggingFaceTokenizer

from transferry.runtime.errors import InputError, require
from transferry.runtime.tokenizer.byte_pair import (
    SINGLE_BYTES,
    SOURCES,
    WORD_PATTERN,
    SpecialTokens,
    Tokenizer,
)

ENCODINGS = ("cl100k_base", "o200k_base")


def require_vocabulary(size: int, special: SpecialTokens) -> int:
    """Returns the number of special tokens.

    Raises:
        UsageError: The size is too small for them and the 256 single bytes.
    """
    reserved = max(special.ids()) + 1
    smallest = reserved + len(SINGLE_BYTES)
    expected = f"at least {smallest} ({reserved} special tokens and 256 single bytes)"
    require(size >= smallest, "vocabulary_size", expected, size)
    return reserved


def train_bpe(
    lines: Iterable[str], vocabulary_size: int, special: SpecialTokens = SOURCES
) -> Tokenizer:
    """Trains byte-level BPE (Sennrich et al. 2016, over bytes as in GPT-2).

    A small corpus gives fewer ids, as merges need a pair of tokens that occurs twice.

    Raises:
        UsageError: The size is too small for the special ids and the 256 single bytes.
    """
    reserved = require_vocabulary(vocabulary_size, special)
    trained = HuggingFaceTokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size - reserved,
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(lines, trainer)

    byte_of = byte_of_character()
    vocabulary = trained.get_vocab()
    in_order = sorted(vocabulary, key=vocabulary.__getitem__)
    tokens = [bytes(byte_of[character] for character in word) for word in in_order]
    merged = [token for token in tokens if len(token) > 1]
    ranks = {token: rank for rank, token in enumerate([*SINGLE_BYTES, *merged])}
    return Tokenizer("trained", WORD_PATTERN, ranks, special=special)


class MergeDropout:
    """BPE dropout (Provilkov et al. 2020, algorithm 1): encodes text and leaves out random merges.

    Each time that the next merge of a word is chosen, every possible merge is left out with the
    given probability; the word is done when none remains. Decoding returns the text all the same.
    """

    def __init__(self, tokenizer: Tokenizer, probability: float) -> None:
        """Takes the tokenizer, and the probability: 0 encodes as it does, 1 into single bytes."""
        self._ids, self._byte_ids = tokenizer._ids, tokenizer._byte_ids
        self._ranks = {token: rank for rank, token in enumerate(tokenizer._tokens)}
        self._words = pre_tokenizers.Split(Regex(tokenizer.pattern), behavior="isolated")
        self._probability = probability

    def encode(self, text: str, draw: random.Random) -> list[int]:
        """Token ids of a text, without special tokens; `draw` decides which merges are left out."""
        ids: list[int] = []
        for word, _ in self._words.pre_tokenize_str(text):
            for token in self._merged(word.encode(), draw):
                known = self._ids.get(self._ranks[token])
                ids += [self._byte_ids[byte] for byte in token] if known is None else [known]
        return ids

    def _merged(self, word: bytes, draw: random.Random) -> list[bytes]:
        parts = [SINGLE_BYTES[byte] for byte in word]
        while True:
            possible = [
                (rank, place)
                for place, both in enumerate(pairwise(parts))
                if (rank := self._ranks.get(both[0] + both[1])) is not None
                and draw.random() >= self._probability
            ]
            if not possible:
                return parts
            _, place = min(possible)
            parts[place : place + 2] = [parts[place] + parts[place + 1]]


def byte_of_character() -> dict[str, int]:
    """Byte of each character in GPT-2's vocabularies, where every byte is a printable character.

    Printable Latin-1 stands for itself; the other bytes, in ascending order, are the characters
    from U+0100 on (`bytes_to_unicode` of openai/gpt-2, src/encoder.py).
    """
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in own]
    return {chr(value): value for value in own} | {
        chr(0x100 + position): value for position, value in enumerate(others)
    }


def require_encoding(name: str) -> None:
    """Raises UsageError for the name of no encoding."""
    require(name in ENCODINGS, "encoding", f"one of {', '.join(ENCODINGS)}", repr(name))


def cut_encoding(name: str, lines: Iterable[str], special: SpecialTokens = SOURCES) -> Tokenizer:
    """Cuts a tiktoken encoding down to the tokens that the corpus uses.

    Raises:
        UsageError: The encoding is unknown.
        InputError: tiktoken has the ranks neither in its cache nor from the network.
    """
    require_encoding(name)
    try:
        encoding = tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:
        raise InputError(
            f"{name}: tiktoken cannot get the ranks ({error}). Without a network, set "
            "TIKTOKEN_CACHE_DIR to a folder where tiktoken has cached them."
        ) from error
    pattern, ranks = encoding._pat_str, encoding._mergeable_ranks
    whole = Tokenizer(name, pattern, ranks)
    used = {ranks[byte] for byte in SINGLE_BYTES}
    for line in lines:
        used.update(token - whole.first_ordinary_id for token in whole.encode(line))
    return Tokenizer(name, pattern, ranks, sorted(used), special)
