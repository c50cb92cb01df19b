"""Text to token ids and back: what a tokenizer offers, and byte-level BPE held as tiktoken ranks.

Tokenizers that tiktoken cannot hold lie in modules of their own, whose libraries are extras;
`load_tokenizer` opens whatever a folder holds. None of them needs a network.
"""

import base64
import binascii
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import tiktoken

from transferry.runtime.errors import InputError
from transferry.runtime.files import atomic_file
from transferry.runtime.tokenizer.special_tokens import (
    FORMAT_VERSION,
    PASSAGES,
    PROMPTS,
    SETTINGS_FILE,
    SOURCES,
    SpecialTokens,
    read_bytes,
    read_settings,
    special_of,
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

# tiktoken aborts on a run of a million blanks (its regex engine's stack); half of that is safe.
_MAX_CHARACTERS_AT_ONCE = 500_000


class AnyTokenizer(Protocol):
    """What a tokenizer must offer; two are equal if every text has the same ids in both."""

    @property
    def special(self) -> SpecialTokens:
        """The ids that stand for no text."""
        ...

    @property
    def vocabulary_size(self) -> int:
        """How many ids there are, the special ones included."""
        ...

    @property
    def longest_token(self) -> int | None:
        """Most characters that one id stands for; None where an id may stand for any number."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a text that the model reads, without those around it."""
        ...

    def encode_target(self, text: str) -> list[int]:
        """Token ids of a text that the model could have written.

        They are those of `encode`, but where source and target are split by different rules.
        """
        ...

    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        """Token ids of each text that the model reads."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids; ids that stand for no text are left out."""
        ...

    def save(self, folder: Path) -> None:
        """Write all that `load_tokenizer` needs; the same tokenizer gives the same bytes."""
        ...


def load_tokenizer(folder: Path) -> AnyTokenizer:
    """Read what `save` of any kind of tokenizer wrote.

    Raises:
        InputError: a file is missing, malformed, or of a kind that this version does not know.
        UsageError: the library that the kind needs is not installed.
    """
    kind = read_settings(folder).get("kind", "tiktoken")
    if kind == "tiktoken":
        return Tokenizer.load(folder)
    if not isinstance(kind, str) or kind not in KINDS:
        raise InputError(
            f"{folder / SETTINGS_FILE}: expected the kind tiktoken, {', '.join(KINDS)}, found "
            f"{kind!r}. Install the version of transferry that wrote it."
        )
    return KINDS[kind].load(folder)


class Tokenizer:
    """Text to token ids and back, the same text for every Unicode string.

    Special ids never come out of `encode`: text that looks like a special token ("<|endoftext|>")
    is text. Ordinary tokens have the ids from `first_ordinary_id` on, in the order of their ranks.

    An encoding made for the whole web may be cut down to the ranks that a corpus uses. Text is
    then still split as by the whole encoding, and a token that was not kept is spelled by the
    tokens of its single bytes, which are always kept.
    """

    def __init__(
        self,
        name: str,
        pattern: str,
        ranks: Mapping[bytes, int],
        kept_ranks: Sequence[int] | None = None,
        special: SpecialTokens = SOURCES,
        first_ordinary_id: int | None = None,
    ) -> None:
        """Check the ranks and prepare the tables.

        Args:
            name: what to call it, "cl100k_base" for example.
            pattern: the regular expression that splits text into words before BPE.
            ranks: every token's bytes and rank; ranks are 0 to n - 1, single bytes included.
            kept_ranks: the ranks that have an id, ascending; None keeps all.
            special: the special ids, all of them outside of the ordinary ones.
            first_ordinary_id: the id of the first kept rank; by default they follow the special
                ids.

        Raises:
            InputError: the ranks, the kept ranks or the pattern cannot make a tokenizer.
        """
        kept = range(len(ranks)) if kept_ranks is None else kept_ranks
        _check_ranks(ranks, kept)
        try:
            self._encoding = tiktoken.Encoding(
                name, pat_str=pattern, mergeable_ranks=dict(ranks), special_tokens={}
            )
        except ValueError as error:
            raise InputError(
                f"expected a regular expression, found {pattern!r}: {error}"
            ) from error
        self.name = name
        self.pattern = pattern
        self.special = special
        if first_ordinary_id is None:
            first_ordinary_id = max(special.ids()) + 1
        self.first_ordinary_id = first_ordinary_id
        self.kept_ranks = None if kept_ranks is None else tuple(kept_ranks)

        self._tokens = sorted(ranks, key=ranks.__getitem__)
        self._pieces = [self._tokens[rank] for rank in kept]
        if type(first_ordinary_id) is not int or first_ordinary_id < 0:
            raise InputError(f"expected a first id of at least 0, found {first_ordinary_id!r}")
        ids = range(first_ordinary_id, first_ordinary_id + len(self._pieces))
        if taken := sorted(special.ids().intersection(ids)):
            raise InputError(
                f"expected special ids outside of the ordinary ones, {ids.start} to "
                f"{ids.stop - 1}, found {taken[0]}"
            )
        self._ids = dict(zip(kept, ids, strict=True))
        self._byte_ids = [self._ids[ranks[byte]] for byte in SINGLE_BYTES]

    def __eq__(self, other: object) -> bool:
        """Whether every text has the same ids in both."""
        if not isinstance(other, Tokenizer):
            return NotImplemented
        mine = (self.pattern, self.special, self._ids, self._tokens)
        return mine == (other.pattern, other.special, other._ids, other._tokens)

    def __hash__(self) -> int:
        return hash((self.pattern, self.kept_ranks, len(self._tokens)))

    @property
    def vocabulary_size(self) -> int:
        """How many ids there are, the special ones included."""
        return max(self.first_ordinary_id + len(self._pieces), *(i + 1 for i in self.special.ids()))

    @property
    def longest_token(self) -> int:
        """Most bytes of one id, and so characters: no byte of a text is dropped."""
        return max(map(len, self._pieces))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without begin and end of sentence."""
        ids: list[int] = []
        for start in range(0, len(text), _MAX_CHARACTERS_AT_ONCE):
            part = text[start : start + _MAX_CHARACTERS_AT_ONCE]
            for rank in self._encoding.encode_ordinary(part):
                token_id = self._ids.get(rank)
                if token_id is None:
                    ids.extend(self._byte_ids[byte] for byte in self._tokens[rank])
                else:
                    ids.append(token_id)
        return ids

    def encode_target(self, text: str) -> list[int]:
        """Token ids of a text on the other side of a pair: those of `encode`."""
        return self.encode(text)

    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        """Token ids of each text."""
        return [self.encode(text) for text in texts]

    def describe(self, ids: Sequence[int]) -> str:
        """What a text of these ids takes of the vocabulary, in words."""
        ranks = range(len(self._tokens)) if self.kept_ranks is None else self.kept_ranks
        used = {ranks[token_id - self.first_ordinary_id] for token_id in ids}
        return (
            f"{len(ids):,} tokens of {self.name}, {len(used):,} distinct, the largest rank "
            f"{max(used, default=0)}; {len(ranks):,} of {len(self._tokens):,} ranks are kept"
        )

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids; special ids are left out, bytes that are no UTF-8 become U+FFFD."""
        places = (token_id - self.first_ordinary_id for token_id in ids)
        pieces = (self._pieces[place] for place in places if 0 <= place < len(self._pieces))
        return b"".join(pieces).decode(errors="replace")

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json` and `ranks.tiktoken`; the same tokenizer gives the same bytes.

        Raises:
            InputError: the folder cannot be written to.
        """
        settings = {
            "format_version": FORMAT_VERSION,
            "name": self.name,
            "pattern": self.pattern,
            "special": asdict(self.special),
            "first_ordinary_id": self.first_ordinary_id,
            "kept_ranks": self.kept_ranks,
        }
        with atomic_file(folder / _RANKS_FILE) as file:
            for rank, token in enumerate(self._tokens):
                file.write(base64.b64encode(token) + b" %d\n" % rank)
        with atomic_file(folder / SETTINGS_FILE) as file:
            file.write(json.dumps(settings, ensure_ascii=False).encode() + b"\n")

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read what `save` wrote.

        Raises:
            InputError: a file is missing, malformed, or does not fit the other.
        """
        settings = read_settings(folder)
        ranks = _read_ranks(folder / _RANKS_FILE)
        try:
            special = special_of(settings)
            return cls(
                settings["name"],
                settings["pattern"],
                ranks,
                settings["kept_ranks"],
                special,
                settings["first_ordinary_id"],
            )
        except (InputError, TypeError, AttributeError) as error:
            raise InputError(
                f"{folder}: the tokenizer is inconsistent: {error}. Take both files, "
                f"{SETTINGS_FILE} and {_RANKS_FILE}, from the same export."
            ) from error
        except KeyError as error:
            raise InputError(f"{folder / SETTINGS_FILE}: expected the key {error}.") from error


def _check_ranks(ranks: Mapping[bytes, int], kept: Sequence[int]) -> None:
    """Refuse what tiktoken would accept silently and get wrong later."""
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


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Parse lines of base64, blank, rank.

    Not with `tiktoken.load`, which caches by path: after retraining into the same folder the old
    ranks would come back.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(read_bytes(path).splitlines(), start=1):
        try:
            encoded, rank = line.split()
            token = base64.b64decode(encoded, validate=True)
            if token in ranks:
                raise ValueError(f"{token!r} has rank {ranks[token]} already")
            ranks[token] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise InputError(
                f"{path}, line {number}: expected a base64 token and its rank, "
                f"found {line[:80]!r} ({error})."
            ) from error
    return ranks
