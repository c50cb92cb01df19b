"""Byte-level BPE, held as tiktoken ranks; `third_party` has the kinds that tiktoken cannot hold.

`load_tokenizer` opens a tokenizer of any kind, without a network.
"""

import base64
import binascii
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Self

import tiktoken

from transferry.runtime.errors import InputError
from transferry.runtime.tokenizer.special_tokens import (
    PASSAGES,
    PROMPTS,
    SETTINGS_FILE,
    SOURCES,
    AnyTokenizer,
    SpecialTokens,
    read_settings,
    text_errors,
)
from transferry.runtime.tokenizer.third_party import KINDS

__all__ = [
    "PASSAGES",
    "PROMPTS",
    "SINGLE_BYTES",
    "SOURCES",
    "AnyTokenizer",
    "SpecialTokens",
    "Tokenizer",
    "load_tokenizer",
]

_RANKS_FILE = "ranks.tiktoken"

SINGLE_BYTES = tuple(bytes([value]) for value in range(256))

# The stack of tiktoken's regex engine overflows on a run of a million blanks; half that is safe.
_MAX_CHARACTERS_AT_ONCE = 500_000

# The regular expressions that split text into words before BPE. A pattern comes with the tokenizer,
# perhaps from a stranger, and tiktoken's regex engine can panic or run for ever on a bad one: an
# unknown pattern is first tried in a process of its own.

# cl100k_base (GPT-4) in tiktoken 0.14's form: the possessive quantifiers keep a run of a million
# blanks from overflowing the stack of its regex engine. "{1,3}" has none: "{1,3}+" has another
# meaning in the engine of `tokenizers`.
WORD_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
# Copied from tiktoken's openai_public.py, since loading these encodings needs a network.
CL100K_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
O200K_PATTERN = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
OURS = (WORD_PATTERN, GPT2_PATTERN, CL100K_PATTERN, O200K_PATTERN)
SECONDS = 10.0
# Long runs of one kind of character and of mixtures: a bad pattern goes back and forth in them.
_TRIAL = """
import sys, tiktoken
ranks = {bytes([value]): value for value in range(256)}
encoding = tiktoken.Encoding(
    "trial", pat_str=sys.stdin.buffer.read().decode(), mergeable_ranks=ranks, special_tokens={}
)
for kind in (*"aZé日7 '!", "", "\\n", "\\u0301", "aB", "a ", "1a", "'s!"):
    encoding.encode_ordinary(kind * 5000)
"""


def load_tokenizer(folder: Path, read: Callable[[str], bytes] | None = None) -> AnyTokenizer:
    """Loads a tokenizer of any kind from the folder that `save` wrote.

    `read` returns the content of a file of the folder by name. Default: any regular file.

    Raises:
        InputError: A file is missing, malformed, or of a kind that this version does not know.
        UsageError: The library that the kind needs is not installed.
    """
    kind = read_settings(folder, read).get("kind", "tiktoken")
    kinds: Mapping[str, type[AnyTokenizer]] = {"tiktoken": Tokenizer, **KINDS}
    if not isinstance(kind, str) or kind not in kinds:
        raise InputError(
            f"{folder / SETTINGS_FILE}: expected the kind {', '.join(kinds)}, found {kind!r}. "
            "Install the version of transferry that wrote it."
        )
    return kinds[kind].load(folder, read)


class Tokenizer(AnyTokenizer):
    """Byte-level BPE: decoding returns the encoded text for every Unicode string.

    Ordinary tokens have the ids from `first_ordinary_id` on, in the order of their ranks.

    An encoding made for the whole web may be cut down to the ranks that a corpus uses. Text is
    still split by the whole encoding; a token that was not kept is spelled by the tokens of its
    bytes, which are always kept.
    """

    names: ClassVar = (_RANKS_FILE,)

    def __init__(
        self,
        name: str,
        pattern: str,
        ranks: Mapping[bytes, int],
        kept_ranks: Sequence[int] | None = None,
        special: SpecialTokens = SOURCES,
        first_ordinary_id: int | None = None,
        vocabulary_size: int | None = None,
    ) -> None:
        """Checks the ranks and prepares the tables.

        Args:
            name: Name of the encoding, such as "cl100k_base".
            pattern: Regular expression that splits text into words before BPE.
            ranks: Rank of each token's bytes, from 0 to n - 1; includes all single bytes.
            kept_ranks: Ranks that have an id, ascending; None keeps all.
            special: Special ids, distinct from the ordinary ones.
            first_ordinary_id: Id of the first kept rank. Default: after the special ids.
            vocabulary_size: Number of ids of the model, perhaps more than have a text.

        Raises:
            InputError: The ranks, the kept ranks or the pattern are invalid, or there are more ids
                than the model has.
        """
        kept = range(len(ranks)) if kept_ranks is None else kept_ranks
        _check_ranks(ranks, kept)
        try:
            self._encoding = tiktoken.Encoding(
                name, pat_str=pattern, mergeable_ranks=dict(ranks), special_tokens={}
            )
        except ValueError as error:
            told = f"expected a regular expression, found {pattern!r}: {error}"
            raise InputError(told) from error
        self.name, self.pattern, self.special = name, pattern, special
        if first_ordinary_id is None:
            first_ordinary_id = max(special.ids()) + 1
        self.first_ordinary_id = first_ordinary_id
        self.kept_ranks = None if kept_ranks is None else tuple(kept_ranks)
        self._tokens = sorted(ranks, key=ranks.__getitem__)
        self._kept_tokens = [self._tokens[rank] for rank in kept]
        if type(first_ordinary_id) is not int or first_ordinary_id < 0:
            raise InputError(f"expected a first id of at least 0, found {first_ordinary_id!r}")
        ids = range(first_ordinary_id, first_ordinary_id + len(self._kept_tokens))
        if taken := sorted(special.ids().intersection(ids)):
            raise InputError(
                f"expected special ids outside of the ordinary ones, {ids.start} to "
                f"{ids.stop - 1}, found {taken[0]}"
            )
        self._ids = dict(zip(kept, ids, strict=True))
        self._byte_ids = [self._ids[ranks[byte]] for byte in SINGLE_BYTES]
        least = max(ids.stop, special.largest + 1)
        self.vocabulary_size = least if vocabulary_size is None else vocabulary_size
        if type(self.vocabulary_size) is not int or self.vocabulary_size < least:
            raise InputError(
                f"expected a vocabulary of at least {least} ids, found {vocabulary_size!r}"
            )
        # In bytes, which bounds the characters: no byte of a text is dropped.
        self.longest_token: int = max(map(len, self._kept_tokens))

    def _identity(self) -> tuple[object, ...]:
        size, chat = self.vocabulary_size, self.chat
        return self.pattern, self.special, self._ids, self._tokens, size, chat

    @text_errors()
    def _encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for start in range(0, len(text), _MAX_CHARACTERS_AT_ONCE):
            piece = text[start : start + _MAX_CHARACTERS_AT_ONCE]
            for rank in self._encoding.encode_ordinary(piece):
                token_id = self._ids.get(rank)
                if token_id is None:
                    ids.extend(self._byte_ids[byte] for byte in self._tokens[rank])
                else:
                    ids.append(token_id)
        return ids

    def vocabulary(self) -> Mapping[bytes, int]:
        return dict(zip(self._kept_tokens, self._ids.values(), strict=True))

    def describe(self, ids: Sequence[int]) -> str:
        """Describes the tokens of the vocabulary that a text uses, for people."""
        ranks = range(len(self._tokens)) if self.kept_ranks is None else self.kept_ranks
        used = {ranks[token_id - self.first_ordinary_id] for token_id in ids}
        return (
            f"{len(ids):,} tokens of {self.name}, {len(used):,} distinct, the largest rank "
            f"{max(used, default=0)}; {len(ranks):,} of {len(self._tokens):,} ranks are kept"
        )

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids; skips special ids, and turns bytes that are not UTF-8 into U+FFFD."""
        places = (token_id - self.first_ordinary_id for token_id in ids)
        size = len(self._kept_tokens)
        tokens = (self._kept_tokens[place] for place in places if 0 <= place < size)
        return b"".join(tokens).decode(errors="replace")

    def _settings(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "pattern": self.pattern,
            "special": asdict(self.special),
            "first_ordinary_id": self.first_ordinary_id,
            "kept_ranks": self.kept_ranks,
            "vocabulary_size": self.vocabulary_size,
        }

    def _contents(self) -> Mapping[str, bytes]:
        ranked = enumerate(self._tokens)
        lines = (base64.b64encode(token) + b" %d\n" % rank for rank, token in ranked)
        return {_RANKS_FILE: b"".join(lines)}

    @classmethod
    def _restore(
        cls, settings: Mapping[str, Any], special: SpecialTokens, contents: Mapping[str, bytes]
    ) -> Self:
        if isinstance(pattern := settings["pattern"], str):
            check_pattern(pattern)
        return cls(
            settings["name"],
            pattern,
            _parse_ranks(contents[_RANKS_FILE]),
            settings["kept_ranks"],
            special,
            settings["first_ordinary_id"],
            settings.get("vocabulary_size"),  # absent in folders of earlier versions
        )


def _check_ranks(ranks: Mapping[bytes, int], kept: Sequence[int]) -> None:
    """Refuses ranks that tiktoken accepts silently and gets wrong later."""
    size = len(ranks)
    if sorted(ranks.values()) != list(range(size)):
        raise InputError(f"expected the {size} ranks 0 to {size - 1}, found gaps or repetitions")
    missing = [byte for byte in SINGLE_BYTES if byte not in ranks]
    if missing:
        raise InputError(
            f"expected a rank for each of the 256 single bytes, found none for {missing[0]!r}"
        )
    if any(later <= earlier for earlier, later in pairwise(kept)):
        raise InputError("expected the kept ranks in ascending order, found them out of order")
    if kept[:1] and not 0 <= kept[0] <= kept[-1] < size:
        raise InputError(f"expected kept ranks from 0 to {size - 1}, found {kept[0]} to {kept[-1]}")
    lost = {ranks[byte] for byte in SINGLE_BYTES}.difference(kept)
    if lost:
        raise InputError(f"expected all single bytes to be kept, found rank {min(lost)} left out")


def _parse_ranks(content: bytes) -> dict[bytes, int]:
    """Parses lines of base64, blank, rank.

    `tiktoken.load` caches by path: after retraining into the same folder it returns the old ranks.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            encoded, rank = line.split()
            token = binascii.a2b_base64(encoded, strict_mode=True)
            if token in ranks:
                raise ValueError(f"{token!r} has rank {ranks[token]} already")
            ranks[token] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise InputError(
                f"{_RANKS_FILE}, line {number}: expected a base64 token and its rank, "
                f"found {line[:80]!r} ({error})"
            ) from error
    return ranks


def check_pattern(pattern: str) -> None:
    """Tries an unknown pattern; raises InputError if it is slow or makes tiktoken panic."""
    if pattern in OURS:
        return
    try:
        command = [sys.executable, "-I", "-c", _TRIAL]
        subprocess.run(
            command, input=pattern.encode(), check=True, timeout=SECONDS, capture_output=True
        )
    except (subprocess.SubprocessError, UnicodeEncodeError) as error:
        raise InputError(
            f"expected a regular expression that splits any text into words, found {pattern[:80]!r}"
        ) from error
