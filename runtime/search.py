"""The search: greedy, sampling and beam over any decoder.

What scores is a `Decoder`, what filters a `LogitsProcessor`, what picks a `Picker`, what ranks the
length-normalised log-probability. A row's answer depends on nothing but the row: not on the other
rows, their number or their order.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from transferry.runtime.beam import beam_search
from transferry.runtime.decoder import Decoder, State
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.hypothesis import (
    FAILED,
    Hypothesis,
    length_normalised,
    ranked,
)
from transferry.runtime.logits import log_sum_exp
from transferry.runtime.options import GenerationOptions
from transferry.runtime.processors import LogitsProcessor, build_processors, restrict
from transferry.runtime.sampling import Picker, Sampler, draw_uniforms, pick_likeliest
from transferry.runtime.tokenizer import SpecialTokens

__all__ = ["Hypothesis", "search"]

# Ended rows leave once they are this share of the batch. Leaving copies the cache of all others;
# staying wastes a row of every step. A quarter bounds both: at most a third of the useful work is
# wasted, and a batch of n rows copies its cache at most log(n) / log(4/3) times (64 rows: 14).
LEAVING_SHARE = 0.25


def search(
    decoder: Decoder[State],
    sources: Sequence[Sequence[int]],
    options: GenerationOptions,
    special: SpecialTokens,
    *,
    row_ids: Sequence[int] | None = None,
    prefixes: Sequence[Sequence[int]] | None = None,
) -> list[list[Hypothesis]]:
    """Generates for a batch of sources.

    Args:
        decoder: the model.
        sources: token ids of each source, at least one token each; where the decoder has no
            encoder the outputs go on with them.
        options: how to generate.
        special: the ids that pad, begin and end.
        row_ids: a number for each source that seeds its samples, such as its line in the input;
            by default its place in `sources`.
        prefixes: the forced prefix of each source; by default `options.prefix` for all.

    Returns:
        The hypotheses of each source, best first: `n_best`, or fewer where a beam search found
        fewer, and one of finish reason "error" where the model gave no usable scores.

    Raises:
        InputError: a source has no tokens.
        UsageError: a prefix is longer than `max_length` or holds a token that it cannot hold, or
            a token to suppress is none of the vocabulary.
    """
    if not sources:
        return []
    if prefixes is None:
        prefixes = [options.prefix] * len(sources)
    if row_ids is None:
        row_ids = range(len(sources))
    eos_id = special.eos_id
    _check_prefixes(prefixes, options.max_length, decoder.vocabulary_size, eos_id)
    if max(options.suppress, default=0) >= decoder.vocabulary_size:
        raise UsageError(
            f"suppress holds token {max(options.suppress)}, expected tokens from 0 to "
            f"{decoder.vocabulary_size - 1}: give ids of the bundle's tokenizer"
        )
    processors = build_processors(options, prefixes, eos_id)
    state, first = begin(decoder, sources, special)
    if options.beam > 1:
        return beam_search(decoder, state, first, options, processors, eos_id)

    owners = np.repeat(np.arange(len(sources)), options.n_best)
    pick: Picker = pick_likeliest
    if options.sample:
        pick = Sampler(
            options, draw_uniforms(options.seed, row_ids, options.n_best, options.max_length)
        )
    if len(owners) > len(sources):
        state = decoder.select(state, owners)
    outputs = pick_search(decoder, state, first, owners, options, processors, pick, eos_id)
    return [
        ranked(outputs[first : first + options.n_best])
        for first in range(0, len(outputs), options.n_best)
    ]


def pick_search(
    decoder: Decoder[State],
    state: State,
    first: NDArray[np.int64],
    owners: NDArray[np.int64],
    options: GenerationOptions,
    processors: Sequence[LogitsProcessor],
    pick: Picker,
    eos_id: int,
) -> list[Hypothesis]:
    """Generates one output a row, one picked token a step: greedy search and sampling.

    Args:
        decoder: scores the tokens.
        state: after `Decoder.start`, one row an output.
        first: the token that the outputs of each sentence follow `[sentences]`.
        owners: the sentence that each output belongs to `[outputs]`.
        options: max_length and length_penalty are used.
        processors: what filters.
        pick: what picks.
        eos_id: the token that ends an output.

    Returns:
        One hypothesis an output.
    """
    history = np.empty((len(owners), options.max_length), np.int64)
    lengths = np.zeros(len(owners), np.int64)
    log_probabilities = np.zeros(len(owners))
    ended = np.zeros(len(owners), np.bool_)
    failed = np.zeros(len(owners), np.bool_)
    # What is still in the batch: the outputs `[rows]` and the last token of each.
    live = np.arange(len(owners))
    tokens = first[owners]

    for step in range(options.max_length):
        leaving = (ended | failed)[live]
        if leaving.all():
            break
        if np.count_nonzero(leaving) >= LEAVING_SHARE * len(live):
            staying = np.flatnonzero(~leaving)
            state = decoder.select(state, staying)
            live, tokens, leaving = live[staying], tokens[staying], leaving[staying]

        logits, state = decoder.step(tokens[:, None], state)
        last = logits[:, -1]
        active = [processor for processor in processors if processor.active(step)]
        allowed = last
        if active:
            allowed = restrict(last, active, owners[live], history[live, :step])
        tokens = pick(allowed, live, step)
        picked = np.arange(len(live)), tokens
        gains = last[picked] - log_sum_exp(last)
        history[live, step] = tokens
        lengths[live] += ~leaving
        log_probabilities[live] += np.where(leaving, 0.0, gains)
        ended[live] |= ~leaving & (tokens == eos_id)
        failed[live] |= ~leaving & ~(np.isfinite(gains) & np.isfinite(allowed[picked]))

    return [
        FAILED if failed[row] else _output(history[row, : lengths[row]], end, total, options)
        for row, (end, total) in enumerate(
            zip(ended.tolist(), log_probabilities.tolist(), strict=True)
        )
    ]


def _output(
    tokens: NDArray[np.int64], ended: bool, log_probability: float, options: GenerationOptions
) -> Hypothesis:
    score = length_normalised(log_probability, len(tokens), options.length_penalty)
    if ended:
        return Hypothesis(tuple(tokens[:-1].tolist()), log_probability, score, "end")
    return Hypothesis(tuple(tokens.tolist()), log_probability, score, "length")


def begin(
    decoder: Decoder[State], sources: Sequence[Sequence[int]], special: SpecialTokens
) -> tuple[State, NDArray[np.int64]]:
    """Lets the decoder read the sources.

    Returns:
        The state, and the token that each output follows `[sources]`: the begin token, or where
        there is no encoder the last one of the source, which no step has read yet.

    Raises:
        InputError: a source has no tokens.
    """
    for row, source in enumerate(sources):
        if not source:
            raise InputError(
                f"source {row} of the batch has no tokens, expected at least 1: leave empty text "
                "out of the search, or end every source with the end token"
            )
    if decoder.has_encoder:
        return decoder.start(*pad_sources(sources, special.pad_id)), np.full(
            len(sources), special.bos_id
        )
    prompts = pad_sources([source[:-1] for source in sources], special.pad_id)
    return decoder.start(*prompts), np.array([source[-1] for source in sources])


def pad_sources(
    sources: Sequence[Sequence[int]], pad_id: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Token ids padded on the right and their mask, True at tokens, both `[rows, source]`."""
    lengths = np.array([len(source) for source in sources])
    mask = np.arange(lengths.max()) < lengths[:, None]
    ids = np.full(mask.shape, pad_id, np.int64)
    ids[mask] = [token for source in sources for token in source]
    return ids, mask


def _check_prefixes(
    prefixes: Sequence[Sequence[int]], max_length: int, vocabulary: int, eos_id: int
) -> None:
    for row, prefix in enumerate(prefixes):
        if len(prefix) > max_length:
            raise UsageError(
                f"the prefix of source {row} has {len(prefix)} tokens, more than "
                f"max_length={max_length}: shorten the first or raise the second"
            )
        for token in prefix:
            if token == eos_id or not 0 <= token < vocabulary:
                raise UsageError(
                    f"the prefix of source {row} holds token {token}, expected tokens from 0 to "
                    f"{vocabulary - 1} other than the end token {eos_id}: "
                    "encode the prefix with the bundle's tokenizer, without special tokens"
                )
