"""What both sides are given: sizes that find a frozen dimension, and text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from transferry.build_model.config import ModelConfig
from transferry.runtime.decoding.search import pad_sources
from transferry.runtime.errors import InputError
from transferry.runtime.parity.compare import Case
from transferry.runtime.tokenizer.byte_pair import AnyTokenizer, SpecialTokens

NEW_TOKENS = 3  # fed at once in the compared step, so that its causal mask matters
# Most logits of a case or a batch that is fed whole: 128 MB in float64.
MOST_LOGITS = 1 << 24
MOST_TOKENS = 4096  # of a source that runs through the vocabulary
LONGEST_ROW = 64


def sweep(config: ModelConfig, *, seed: int = 0) -> Iterator[Case]:
    """Yields the cases that find a size frozen while tracing, and those of `vocabulary`.

    Batch {1, 2, 7} x source {1, 2, 13, all positions} x past {0, 1, all positions but one}; the
    first row fills the source, the others end earlier. Without an encoder, source and target
    share the positions, and there may be no source: a prompt of one token.
    """
    most = config.max_positions
    alone = not config.encoder_layers
    sources = {0, 1, 2, 13, most - 1} if alone else {1, 2, 13, most}
    number = 0
    for batch in (1, 2, 7):
        for source in sorted({min(size, most - alone) for size in sources}):
            room = most - source if alone else most
            pasts = {0, min(1, room - 1), room - 1} if config.decoder_layers else {0}
            for past in sorted(pasts):
                yield random_case(config, batch, source, past, seed=seed + number)
                number += 1
    yield from vocabulary(config, seed=seed)


def vocabulary(config: ModelConfig, *, seed: int) -> Iterator[Case]:
    """Yields cases that run through the whole vocabulary.

    Of a large vocabulary the sizes of `sweep` draw a small part, and would pass a row of the
    embedding that is wrong, or a weight that few tokens use. Every token is read once as a source
    or in a prompt; of a target, which costs a row of logits each, as many as a case can hold.
    """
    size, most = config.vocabulary_size, config.max_positions
    alone = not config.encoder_layers
    generator = np.random.default_rng(seed)
    sources, targets = generator.permutation(size), generator.permutation(size)
    length = max(1, min(most - alone, LONGEST_ROW))
    piece = MOST_TOKENS if config.decoder_layers else max(length, MOST_LOGITS // size)
    for first in range(0, size, piece):
        tokens = sources[first : first + piece]
        # The last row is filled up, so that no token shares its row with padding.
        source = np.resize(tokens, (-(-len(tokens) // length), length))
        target = np.resize(targets, (len(source), 1 if config.decoder_layers else 0))
        if alone and most == 1:
            source, target = source[:, :0], source
        name = f"vocabulary {first} to {first + len(tokens) - 1}"
        yield _unpadded(name, source, target)
    if config.decoder_layers:
        length = min(most, LONGEST_ROW)
        rows = -(-min(size, MOST_LOGITS // size) // length)
        target = np.resize(targets, (max(1, rows), length))
        source = np.resize(sources, (len(target), 0 if alone else 1))
        yield _unpadded("vocabulary of the target", source, target)


def _unpadded(name: str, source: NDArray[np.int64], target: NDArray[np.int64]) -> Case:
    name += ", past 0" if target.size else ""
    return Case(name, source, np.ones(source.shape, np.bool_), target, 0)


def cross_check_cases(config: ModelConfig) -> list[Case]:
    """Returns a few small cases for runtimes too slow for the sweep: short, padded, reordered."""
    sizes = [(1, 1, 0), (2, 13, 0), (2, 16, 1), (3, 6, 5)]
    if not config.encoder_layers:
        sizes.append((2, 0, 1))  # a prompt of one token
    return [
        random_case(config, batch, source, past, seed=number)
        for number, (batch, source, past) in enumerate(sizes)
    ]


def random_case(config: ModelConfig, batch: int, source: int, past: int, *, seed: int) -> Case:
    """Makes a case of random tokens; all but the first row are of random length.

    Source and past are cut to the positions that the model has.
    """
    most = config.max_positions
    source = min(source, most if config.encoder_layers else most - 1)
    room = most if config.encoder_layers else most - source
    past = min(past, room - 1)
    generator = np.random.default_rng(seed)
    lengths = generator.integers(min(1, source), source, size=batch, endpoint=True)
    lengths[0] = source
    mask = np.arange(source) < lengths[:, None]
    tokens = generator.integers(config.vocabulary_size, size=(batch, source))
    new = min(NEW_TOKENS, room - past)
    length = past + new if config.decoder_layers else 0
    target = generator.integers(config.vocabulary_size, size=(batch, length))
    # As a search does it: beams change places, and where there are enough one ends and one splits.
    rows = generator.permutation(batch)
    rows[-1] = rows[0] if batch > 2 else rows[-1]
    if batch == 2:
        rows = np.array([1, 0])
    name = f"batch {batch}, source {source}"
    if config.decoder_layers:
        name += f", past {past}"
        return Case(name, tokens, mask, target, past, rows if batch > 1 else None)
    return Case(name, tokens, mask, target, past)


def text_case(
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    special: SpecialTokens,
    rows: str,
) -> Case:
    """Makes a case of text: each target is fed whole after its source.

    Args:
        sources: Token ids of each source, as the search takes them; all empty for texts without.
        targets: What is fed of each target.
        special: The ids that pad, begin and end.
        rows: Names the rows in the case's name.
    """
    source, mask = pad_sources(sources, special.pad_id)
    # What is padded lies behind the target, and is the same for both sides.
    target, _ = pad_sources(targets, special.pad_id)
    return Case(f"text, {rows}", source, mask, target, 0)


def random_sources(config: ModelConfig, rows: int) -> list[list[int]]:
    """Returns what searches run on where there is no text: random tokens of unequal length."""
    case = random_case(config, rows, min(12, config.max_positions // 2), 0, seed=0)
    return [row[mask].tolist() for row, mask in zip(case.source, case.mask, strict=True)]


def fitting(texts: Sequence[str], tokenizer: AnyTokenizer, config: ModelConfig) -> list[str]:
    """Returns the texts that hold something and fit into the model's positions."""
    most, special = config.max_positions, tokenizer.special
    return [
        text for text in texts if text.strip() and len(special.wrap(tokenizer.encode(text))) <= most
    ]


def source_of(text: str, tokenizer: AnyTokenizer, config: ModelConfig, number: int) -> list[int]:
    """Returns what a model reads of a line of text.

    Where there is no encoder it is the beginning of it, as a prompt: the first half, and no more
    than half of the positions, so that there is room for an answer.

    Args:
        text: The line.
        tokenizer: Turns it into ids.
        config: Has the positions.
        number: Of the line, for the error.

    Raises:
        InputError: The line is empty or longer than the model's positions.
    """
    if not text.strip():
        raise InputError(f"line {number} is empty, expected a sentence; leave the line out")
    ids = tokenizer.encode(text)
    if config.architecture == "decoder-only":
        ids = ids[: max(1, min(len(ids), config.max_positions) // 2)]
    source = tokenizer.special.wrap(ids)
    if len(source) > config.max_positions:
        raise InputError(
            f"line {number} has {len(source)} tokens, the end token included; the model takes "
            f"at most {config.max_positions}, so leave the line out"
        )
    return source


def room(config: ModelConfig, sources: Sequence[Sequence[int]], most: int) -> int:
    """Returns how many tokens all answers may have, at most `most`.

    The last one is never read, so that it needs no position.
    """
    longest = 0 if config.encoder_layers else max(map(len, sources), default=1) - 1
    return min(most, config.max_positions - longest)
