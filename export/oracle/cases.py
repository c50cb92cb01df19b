"""Inputs of the comparisons: sizes that reveal a frozen dimension, the whole vocabulary, text."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transferry.build_model.model.config import ModelConfig
from transferry.runtime.decoding.generation_options import GenerationOptions, generation_options
from transferry.runtime.decoding.search import pad_sources
from transferry.runtime.errors import InputError
from transferry.runtime.proof.compare import Case
from transferry.runtime.tokenizer.byte_pair import AnyTokenizer

NEW_TOKENS = 3  # fed at once in the compared step, so that its causal mask matters
# Most logits of a case, or of a batch that is fed whole: 128 MB in float64.
MOST_LOGITS = 1 << 24
LARGEST_LOGITS = 1 << 26  # of the largest batch: 512 MB in float64
MOST_TOKENS = 4096  # of a source that runs through the vocabulary
LONGEST_ROW = 64
SINGLE_TOKENS = 64
LINES, LINE_TOKENS = 32, 24  # of a case of text, and tokens of its targets
# Searches over text: of the beam the whole n-best must agree, not only the best.
SEARCHES: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"beam": 1, "n_best": 1},
    "beam 4": {"beam": 4, "n_best": 4},
    "sampling": {"beam": 1, "n_best": 1, "sample": True, "seed": 1},
    "top-k and top-p sampling": {
        "beam": 1,
        "n_best": 2,
        "sample": True,
        "seed": 2,
        "temperature": 0.7,
        "top_k": 8,
        "top_p": 0.9,
    },
    "constrained beam 2": {
        "beam": 2,
        "n_best": 1,
        "min_length": 8,
        "no_repeat_ngram": 3,
        "early_stopping": False,
        "repetition_penalty": 1.1,
        "renormalise": True,
    },
}
CONSTRAINED = "constrained beam 2"  # with a forced prefix too
WHOLE = ("greedy", "beam 4")  # run on every row, the others on some
BRIEF = ("greedy", "beam 4", "sampling")
# Searches with recorded answers; only an oracle can explain a difference between samples.
RECORDED = ("greedy", "beam 4")
GIVEN = "as given"  # a search with options of the user's


def sizes(config: ModelConfig, *, seed: int = 0) -> Iterator[Case]:
    """Yields cases that reveal a size frozen while tracing.

    Batch {1, 2, 7} x source {1, 2, 13, all positions} x past {0, 1, all positions but one}; the
    first row fills the source, the others end earlier. Without an encoder, source and target share
    the positions, and the source may be empty: a prompt of one token. Of the batches of 7, only the
    source of 13 has the longest past: the others would be half of the time of all cases.
    """
    most = config.max_positions
    alone = not config.encoder_layers
    sources = {0, 1, 2, 13, most - 1} if alone else {1, 2, 13, most}
    number = 0
    for batch in (1, 2, 7):
        for source in sorted({min(size, most - alone) for size in sources}):
            number += 1  # the same source for each past: torch encodes it once
            room = most - source if alone else most
            pasts = {0, min(1, room - 1), room - 1} if config.decoder_layers else {0}
            for past in sorted(pasts):
                if batch < 7 or past < 2 or source == 13:
                    case = random_case(config, batch, source, past, seed=seed + number)
                    case = replace(case, measured=batch == 1)
                    if source > 1:  # special ids are tokens like others: the mask tells padding
                        case.source[0, [0, -1]] = 0, config.source_vocabulary - 1
                    if batch > 2:  # as of texts that differ in spaces or case alone
                        for rows in (case.source, case.mask, case.target):
                            rows[2] = rows[1]
                    yield case


def lengths(
    config: ModelConfig, sources: Sequence[Sequence[int]], *, seed: int = 0
) -> Iterator[Case]:
    """Yields a case of each length up to 64 or the longest source, and of all positions.

    Source and target are of that length, and the target is fed whole, as `score` does.
    """
    most = config.max_positions
    longest = max([LONGEST_ROW, *map(len, sources)])
    for length in dict.fromkeys([*range(1, min(longest, most) + 1), most]):
        case = random_case(config, 1, length, 0, seed=seed + 2000 + length)
        room = most if config.encoder_layers else most - case.source.shape[1]
        fed = min(length, room, MOST_LOGITS // config.vocabulary_size)
        generator = np.random.default_rng(seed + 2000 + length)
        target = generator.integers(
            config.vocabulary_size, size=(1, fed if config.decoder_layers else 0)
        )
        yield replace(case, name=f"source and target {length}", target=target)


def vocabulary(config: ModelConfig, *, seed: int = 0) -> Iterator[Case]:
    """Yields cases that run through the whole vocabulary.

    `sizes` draws few of the tokens of a large vocabulary, and would miss a wrong row of the
    embedding, or a weight that few tokens use. Every token occurs once in a source or prompt; a
    target, which costs a row of logits for each token, holds as many as fit.
    """
    size, most = max(config.vocabulary_size, config.source_vocabulary), config.max_positions
    alone = not config.encoder_layers
    generator = np.random.default_rng(seed)
    sources, targets = (
        np.resize(generator.permutation(each), size)
        for each in (config.source_vocabulary, config.vocabulary_size)
    )
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


def lines(config: ModelConfig, sources: Sequence[Sequence[int]], pad_id: int) -> Iterator[Case]:
    """Yields cases of the text, a few lines each; each line is the target of the line before."""
    columns = LINE_TOKENS if config.decoder_layers else 1
    rows = max(1, min(LINES, MOST_LOGITS // (columns * config.vocabulary_size)))
    for first in range(0, len(sources), rows):
        source, mask = pad_sources(sources[first : first + rows], pad_id)
        room = config.max_positions - (0 if config.encoder_layers else source.shape[1])
        target = np.roll(source, 1, axis=0)[:, : min(LINE_TOKENS, room)] % config.vocabulary_size
        target = target if config.decoder_layers else target[:, :0]
        yield Case(f"lines {first + 1} to {first + len(source)}", source, mask, target, 0)


def _unpadded(name: str, source: NDArray[np.int64], target: NDArray[np.int64]) -> Case:
    return Case(name, source, np.ones(source.shape, np.bool_), target, 0)


def single_tokens(config: ModelConfig) -> Case:
    """Returns a case of rows of one token and one step, so short that some cross no border.

    There an int8 variant must be as exact as float32; see `integer_sides`.
    """
    case = random_case(config, SINGLE_TOKENS, 1, 0, seed=1000)
    return replace(case, name="single tokens")


def largest_batches(config: ModelConfig, rows: int) -> Iterator[Case]:
    """Yields short cases of as many rows as are served at once, or as fit into memory.

    In the second one every fourth sentence has ended, and the last ones take their slots.
    """
    columns = NEW_TOKENS if config.decoder_layers else 2
    most = max(1, LARGEST_LOGITS // (columns * config.vocabulary_size))
    case = random_case(config, min(rows, most), 2, 1, seed=0)
    yield case
    if config.decoder_layers and len(case.source) > 1 and case.past:
        places = np.arange(len(case.source))
        ended = places % 4 == 1
        left = int((~ended).sum())
        kept, last = places[:left], places[left:]
        kept[ended[:left]] = last[~ended[left:]]
        yield replace(case, name=f"{case.name}, rows leave", rows=kept)


def many_rows(config: ModelConfig, rows: int, past: int = 1) -> Case:
    """Returns a case of short rows; one token of each is fed, and all keep their order."""
    case = random_case(config, rows, 2, past, seed=0)
    return replace(case, target=case.target[:, : case.past + 1], rows=None)


def cross_check_cases(config: ModelConfig) -> list[Case]:
    """Returns a few small cases for runtimes too slow for the sweep: short, padded, reordered."""
    sizes = [(1, 1, 0), (2, 13, 0), (2, 16, 1), (3, 6, 5)]
    if not config.encoder_layers:
        sizes.append((2, 0, 1))  # a prompt of one token
    return random_cases(config, sizes)


def random_cases(
    config: ModelConfig, sizes: Sequence[tuple[int, int, int]], *, seed: int = 0
) -> list[Case]:
    """Returns a random case for each batch, source and past."""
    return [random_case(config, *size, seed=seed + number) for number, size in enumerate(sizes)]


def recorded_cases(config: ModelConfig) -> list[Case]:
    """Returns the cases that a bundle records."""
    return random_cases(config, [(1, 1, 0), (2, 13, 1), (7, 6, 5)])


def random_case(config: ModelConfig, batch: int, source: int, past: int, *, seed: int) -> Case:
    """Returns a case of random tokens; all rows but the first are of random length.

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
    tokens = generator.integers(config.source_vocabulary, size=(batch, source))
    new = min(NEW_TOKENS, room - past)
    length = past + new if config.decoder_layers else 0
    target = generator.integers(config.vocabulary_size, size=(batch, length))
    # As in a search: beams change places; with more than two, one ends and another one splits.
    rows = generator.permutation(batch)
    rows[-1] = rows[0] if batch > 2 else rows[-1]
    if batch == 2:
        rows = np.array([1, 0])
    name = f"batch {batch}, source {source}"
    if not config.decoder_layers:
        return Case(name, tokens, mask, target, past)
    return Case(f"{name}, past {past}", tokens, mask, target, past, rows if batch > 1 else None)


def random_sources(config: ModelConfig, rows: int) -> list[list[int]]:
    """Returns sources of random tokens and unequal length, for searches where there is no text."""
    case = random_case(config, rows, min(12, config.max_positions // 2), 0, seed=0)
    return [row[mask].tolist() for row, mask in zip(case.source, case.mask, strict=True)]


def fitting(texts: Sequence[str], tokenizer: AnyTokenizer, config: ModelConfig) -> list[str]:
    """Returns the texts that are not empty and fit into the model's positions."""
    most, special = config.max_positions, tokenizer.special
    return [
        text for text in texts if text.strip() and len(special.wrap(tokenizer.encode(text))) <= most
    ]


def source_of(text: str, tokenizer: AnyTokenizer, config: ModelConfig, number: int) -> list[int]:
    """Returns the source of a line of text; the number of the line is for the error.

    Without an encoder it is a prompt: the first half of the line, and no more than half of the
    positions, to leave room for an answer.

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
    """Returns the largest number of tokens, up to `most`, that all answers may have.

    The last token is never read, so that it needs no position.
    """
    longest = 0 if config.encoder_layers else max(map(len, sources), default=1) - 1
    return min(most, config.max_positions - longest)


def search_settings(
    name: str,
    generation: Mapping[str, Any],
    config: ModelConfig,
    sources: Sequence[Sequence[int]],
    max_length: int,
) -> dict[str, Any]:
    """Returns the fields of GenerationOptions for one of `SEARCHES`, or those of `generation`.

    An answer has at most `max_length` tokens, fewer where the positions do not suffice. Stop
    strings and total lengths, which end a search and choose no token, are left out.
    """
    length = room(config, sources, max_length)
    base = generation_options({**generation, "max_total_length": 0, "stop": ()})
    chosen = {"sample": False, **SEARCHES[name]} if name in SEARCHES else {}
    changed = vars(generation_options({**chosen, "max_length": length}, base))
    plain = vars(GenerationOptions())
    settings = {
        field: value
        for field, value in changed.items()
        if value != plain[field] or field in (*chosen, "max_length")
    }
    if name == CONSTRAINED:
        # Any token will do: both sides must continue it.
        prefix = (*settings.get("prefix", ()), config.vocabulary_size // 2)
        room_left = length - (settings.get("forced_begin") is not None)
        settings["prefix"] = prefix[:room_left]
    return settings
