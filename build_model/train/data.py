"""Training text: files to pairs or windows of token ids, and batches of these."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from transferry.runtime.errors import InputError, Option, UsageError
from transferry.runtime.io.lines import decode_line, read_lines, read_raw_lines
from transferry.runtime.io.whole import reason
from transferry.runtime.tokenizer.byte_pair import SpecialTokens, Tokenizer

MAX_CHARACTERS = 10_000
# Devlin et al. (2019), section 3.1: share of the tokens that are labels, and the shares of these
# that are masked and replaced by another token; the rest stays.
CHOSEN, HIDDEN, REPLACED = 0.15, 0.8, 0.1


class SentencePair(NamedTuple):
    """A text and its translation."""

    source: str
    target: str


class Example(NamedTuple):
    """Token ids of one training example; a side that the architecture lacks is empty.

    Attributes:
        source: Input of the encoder.
        target: Label of each position; the padding id where a position has no label.
        target_input: Input of the decoder at each position.
    """

    source: list[int]
    target: list[int]
    target_input: list[int]

    def target_tokens(self, pad_id: int) -> int:
        """Number of target tokens, padding excluded."""
        return len(self.target) - self.target.count(pad_id)


class Batch(NamedTuple):
    """Examples as tensors, padded with `pad_id` to the longest.

    Attributes:
        source: `[batch, source]` int64
        source_mask: `[batch, source]` bool, True for tokens.
        target_input: `[batch, target]` int64, input of the decoder.
        target_output: `[batch, target]` int64, labels.
    """

    source: Tensor
    source_mask: Tensor
    target_input: Tensor
    target_output: Tensor


@dataclass(frozen=True)
class ReadReport:
    """Numbers of pairs that were read, kept, and dropped by reason."""

    read: int
    kept: int
    dropped: Mapping[str, int]

    def __str__(self) -> str:
        dropped = "".join(f", {count} {reason}" for reason, count in self.dropped.items())
        return f"{self.kept:,} of {self.read:,} kept{dropped}"


class BadPair(InputError):
    """An unusable pair; skipped pairs are counted by `reason`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


Raw = TypeVar("Raw")
Made = TypeVar("Made")


def read_pairs(
    source: Path, target: Path, *, skip_bad: bool = False
) -> tuple[list[SentencePair], ReadReport]:
    """Reads two files of lines, plain or gzip, each line the translation of the other file's.

    Raises:
        InputError: The files have different numbers of lines, or no pair remains.
        BadPair: A line is empty, too long or not UTF-8, and `skip_bad` is off.
    """

    def pair(number: int, lines: tuple[bytes, bytes]) -> SentencePair:
        sides = zip(lines, (source, target), strict=True)
        return SentencePair(*(_check(_decode(*side, number), side[1], number) for side in sides))

    return _sift(_lines_of_both(source, target), pair, skip_bad, f"{source} and {target}")


def read_pair_file(path: Path, *, skip_bad: bool = False) -> tuple[list[SentencePair], ReadReport]:
    """Reads one file of pairs, TSV or JSON lines by its suffix, plain or gzip.

    `.tsv`: source, tab, target. `.jsonl`: `{"source": "...", "target": "..."}`.

    Raises:
        InputError: The suffix is another, or no pair remains.
        BadPair: A line is malformed, or a side is empty, too long or not UTF-8, and `skip_bad`
            is off.
    """
    suffix = Path(path.name.removesuffix(".gz")).suffix
    if suffix not in _PARSERS:
        raise InputError(
            f"{path}: expected a name ending in .tsv, .jsonl, .tsv.gz or .jsonl.gz. For two files "
            "of lines, give one as the source and one as the target."
        )
    parse = _PARSERS[suffix]

    def pair(number: int, line: bytes) -> SentencePair:
        try:
            sides = parse(_decode(line, path, number))
        except ValueError as error:
            told = f"{path}, line {number}: {reason(error)}."
            raise BadPair("malformed", told) from error
        return SentencePair(*(_check(side, path, number) for side in sides))

    return _sift(read_raw_lines(path), pair, skip_bad, str(path))


def encode_pairs(
    pairs: Iterable[SentencePair], tokenizer: Tokenizer, max_tokens: int, *, skip_bad: bool = False
) -> tuple[list[Example], ReadReport]:
    """Encodes pairs as at most `max_tokens` ids a side, the end token included.

    Raises:
        InputError: No pair remains.
        BadPair: A side is too long, and `skip_bad` is off.
    """
    special = tokenizer.special

    def example(number: int, pair: SentencePair) -> Example:
        source = special.wrap(tokenizer.encode(pair.source))
        target = [*tokenizer.encode(pair.target), special.eos_id]
        for text, ids in zip(pair, (source, target), strict=True):
            if len(ids) > max_tokens:
                raise BadPair(
                    "too many tokens",
                    f"pair {number}: expected at most {max_tokens} tokens, found {len(ids)} in "
                    f"{text[:60]!r}. Shorten it, or skip bad pairs.",
                )
        return Example(source, target, [special.bos_id, *target[:-1]])

    return _sift(pairs, example, skip_bad, "the pairs")


def token_batches(
    examples: Sequence[Example], max_tokens: int, *, seed: int, epoch: int
) -> list[list[int]]:
    """Groups indices of examples of similar length, in an order that seed and epoch determine.

    Rows times longest side, padding included, are at most `max_tokens`.

    Raises:
        UsageError: A single example exceeds `max_tokens`.
    """
    lengths = np.array([max(len(example.source), len(example.target)) for example in examples])
    if lengths.max() > max_tokens:
        raise UsageError(
            *(Option("batch_tokens"), f" must be at least {lengths.max()}, the length of the "),
            f"longest example, found {max_tokens}; raise it or drop long pairs",
        )
    generator = np.random.Generator(np.random.PCG64([seed, epoch]))
    order = np.lexsort((generator.random(len(lengths)), lengths))
    batches: list[list[int]] = [[]]
    for index in order.tolist():
        # Lengths ascend, so the new example is the longest of its batch.
        if (len(batches[-1]) + 1) * lengths[index] > max_tokens:
            batches.append([])
        batches[-1].append(index)
    return [batches[number] for number in generator.permutation(len(batches))]


def collate(examples: Sequence[Example], pad_id: int, device: torch.device | str) -> Batch:
    """Pads examples and stacks them into tensors."""

    def pad(rows: Iterable[list[int]]) -> Tensor:
        tensors = [torch.tensor(row, dtype=torch.int64) for row in rows]
        return pad_sequence(tensors, batch_first=True, padding_value=pad_id).to(device)

    source = pad(example.source for example in examples)
    return Batch(
        source=source,
        source_mask=source != pad_id,
        target_input=pad(example.target_input for example in examples),
        target_output=pad(example.target for example in examples),
    )


def fingerprint(examples: Iterable[Example]) -> str:
    """SHA-256 of all token ids; a saved state fits batches of the same text only."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(json.dumps(example).encode())
    return digest.hexdigest()


def _lines_of_both(source: Path, target: Path) -> Iterator[tuple[bytes, bytes]]:
    """Lines of two files in parallel."""
    counts = [0, 0]
    for lines in zip_longest(read_raw_lines(source), read_raw_lines(target)):
        counts = [count + (line is not None) for count, line in zip(counts, lines, strict=True)]
        if counts[0] == counts[1]:
            yield lines
    if counts[0] != counts[1]:
        raise InputError(
            f"expected as many lines in the source as in the target, found {counts[0]} in "
            f"{source} and {counts[1]} in {target}. Each line must translate the other file's."
        )


def _sift(
    pairs: Iterable[Raw], make: Callable[[int, Raw], Made], skip_bad: bool, origin: str
) -> tuple[list[Made], ReadReport]:
    """Converts every pair; bad ones raise, or are dropped and counted."""
    made: list[Made] = []
    dropped: Counter[str] = Counter()
    number = 0
    for number, pair in enumerate(pairs, start=1):
        try:
            made.append(make(number, pair))
        except BadPair as error:
            if not skip_bad:
                raise
            dropped[error.reason] += 1
    if not made:
        raise InputError(f"{origin}: expected at least one usable pair, found none in {number}.")
    return made, ReadReport(number, len(made), dict(dropped))


def _decode(line: bytes, path: Path, number: int) -> str:
    try:
        return decode_line(line, path, number)
    except InputError as error:
        raise BadPair("invalid UTF-8", str(error)) from error


def _check(text: str, path: Path, number: int) -> str:
    if not text.strip():
        raise BadPair(
            "empty",
            f"{path}, line {number}: expected text, found nothing. Fill or remove the pair.",
        )
    if len(text) > MAX_CHARACTERS:
        raise BadPair(
            "too many characters",
            f"{path}, line {number}: expected at most {MAX_CHARACTERS} characters, "
            f"found {len(text)}. Shorten it, or skip bad pairs.",
        )
    return text


def _parse_tsv(line: str) -> tuple[str, str]:
    columns = line.split("\t")
    if len(columns) != 2:
        raise ValueError(f"expected source, tab, target, found {len(columns)} columns")
    return columns[0], columns[1]


def _parse_json(line: str) -> tuple[str, str]:
    try:
        value = json.loads(line)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    match value:
        case {"source": str(source), "target": str(target)}:
            # A JSON escape can be half a surrogate pair, which cannot be encoded.
            (source + target).encode()
            return source, target
    raise ValueError(f'expected {{"source": "...", "target": "..."}}, found {line[:80]!r}')


_PARSERS = {".tsv": _parse_tsv, ".jsonl": _parse_json}


def read_text(path: Path) -> str:
    """Reads a UTF-8 file, plain or gzip, as one text.

    Raises:
        InputError: The file is unreadable, binary, not UTF-8 or blank.
    """
    text = "\n".join(read_lines(path))
    if not text.strip():
        raise InputError(f"{path}: expected text, found nothing; choose another file")
    return text


class Windows(Sequence[Example]):
    """A text in adjacent windows of `context` tokens, to predict each from those before it."""

    def __init__(self, tokens: Sequence[int] | NDArray[np.int64], context: int) -> None:
        """Takes the ids of the whole text `[tokens]`; raises InputError for fewer than two."""
        self.text = self.tokens = np.asarray(tokens, np.int64)
        self.context = context
        self.key = (0, 0)
        if len(self.tokens) < 2:
            raise InputError(
                f"expected a text of at least 2 tokens, found {len(self.tokens)}; give more text"
            )

    def epoch(self, seed: int, number: int) -> Windows:
        """Returns the windows of one pass over the text, at an offset of its own."""
        windows = copy(self)
        windows.key = (seed, number)
        offset = np.random.default_rng(windows.key).integers(min(self.context, len(self.text)))
        windows.tokens = np.roll(self.text, -int(offset))
        return windows

    def __len__(self) -> int:
        return -(-(len(self.tokens) - 1) // self.context)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        return self._example(range(len(self))[index])

    def _example(self, index: int) -> Example:
        first = index * self.context
        window = self.tokens[first : first + self.context + 1].tolist()
        return Example([], window[1:], window[:-1])


class MaskedWindows(Windows):
    """A text in windows, to predict some of their tokens, mostly masked."""

    def __init__(
        self,
        tokens: Sequence[int] | NDArray[np.int64],
        context: int,
        special: SpecialTokens,
        ordinary: range,
    ) -> None:
        """Takes `ordinary` ids, which may replace a token; `context` counts special tokens.

        Raises:
            InputError: The text has fewer than two tokens, or there is no mask.
        """
        super().__init__(tokens, context - len(special.wrap([])))
        if special.mask_id is None:
            raise InputError(
                "expected a tokenizer with a mask, found none; train one for this architecture"
            )
        self.special = special
        self.mask_id = special.mask_id
        self.ordinary = ordinary

    def __len__(self) -> int:
        return -(-len(self.tokens) // self.context)

    def _example(self, index: int) -> Example:
        first = index * self.context
        window = self.tokens[first : first + self.context]
        generator = np.random.default_rng((*self.key, index))
        chosen = generator.random(len(window)) < CHOSEN
        chosen[generator.integers(len(window))] = True  # at least one label per window
        fate = generator.random(len(window))
        others = generator.integers(self.ordinary.start, self.ordinary.stop, size=len(window))
        read = np.where(chosen & (fate < HIDDEN), self.mask_id, window)
        read = np.where(chosen & (fate >= HIDDEN) & (fate < HIDDEN + REPLACED), others, read)
        special, pad = self.special, self.special.pad_id
        labels = np.where(chosen, window, pad).tolist()
        target = [pad] * len(special.before) + labels + [pad] * len(special.after)
        return Example(special.wrap(read.tolist()), target, [])
