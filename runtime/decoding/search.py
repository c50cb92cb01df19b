"""Greedy search, sampling and beam search over any decoder.

A `Decoder` scores, a `LogitsProcessor` forbids, a `SamplingStrategy` or `BeamStrategy` chooses.
The sentences of a batch are answered together; those that have ended leave it.
A row's answer depends on that row alone: not on the other rows, their number or their order.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeAlias

import numpy as np
from numpy.typing import NDArray

from transferry.runtime.decoding.beam_search import BeamStrategy
from transferry.runtime.decoding.decoder import Decoder, State
from transferry.runtime.decoding.generation_options import TOKEN_IDS, GenerationOptions
from transferry.runtime.decoding.hypothesis import Hypothesis
from transferry.runtime.decoding.logits import Bools, Integers, log_sum_exp
from transferry.runtime.decoding.logits_processors import (
    History,
    beginning,
    build_logits_processors,
    prompts_of,
    restrict,
)
from transferry.runtime.decoding.sampling import SamplingStrategy
from transferry.runtime.decoding.stop_strings import StopStrings
from transferry.runtime.decoding.strategy import Key, Request, Strategy
from transferry.runtime.errors import InputError, Option, UsageError
from transferry.runtime.tokenizer.special_tokens import SpecialTokens

Decode: TypeAlias = Callable[[Iterable[int]], str]

# Share of ended rows in a step at which they leave. Leaving copies the cache of all others (or
# moves as many rows as leave, where rows share a cache), staying wastes a row of every step. A
# quarter bounds both: at most a third of the useful work is wasted, and a batch of n rows that
# drains copies its cache at most log(n) / log(4/3) times (64 rows: 14).
LEAVING_SHARE = 0.25
# Cost of a step besides its rows, in rows. The rows of a small batch thus stay longer: they cost
# little, and a new number of rows costs as much as a step.
STEP_ROWS = 8


def search(
    decoder: Decoder[State],
    sources: Sequence[Sequence[int]],
    options: GenerationOptions,
    special: SpecialTokens,
    *,
    row_ids: Sequence[int] | None = None,
    prefixes: Sequence[Sequence[int]] | None = None,
    decode: Decode | None = None,
) -> list[list[Hypothesis]]:
    """Generates for a batch of sources.

    Args:
        decoder: The model.
        sources: Token ids of each source, at least one each; a decoder-only model continues them.
        options: How to generate.
        special: The ids that pad, begin and end.
        row_ids: A number for each source that seeds its samples, such as its line in the input.
            Default: its place in `sources`.
        prefixes: The forced prefix of each source. Default: `options.prefix` for all.
        decode: Text of token ids, to look for stop strings.

    Returns:
        The hypotheses of each source, best first: `n_best`, or fewer where a beam search found
        fewer, and one of finish reason "error" where the model gave unusable scores.

    Raises:
        InputError: A source has no tokens.
        UsageError: A prefix is longer than `max_length` or holds an invalid token, a token of the
            options is not in the vocabulary, or there are stop strings without `decode`.
    """
    if row_ids is None:
        row_ids = range(len(sources))
    if prefixes is None:
        prefixes = [options.prefix] * len(sources)
    rows = zip(sources, prefixes, row_ids, strict=True)

    def room(source: Sequence[int]) -> int:
        return options.room(0 if decoder.has_encoder else len(source))

    requests = [
        Request(place, source, room(source), prefix, row_id)
        for place, (source, prefix, row_id) in enumerate(rows)
    ]
    answers = dict(search_batch(decoder, requests, options, special, decode=decode))
    return [answers[place] for place in range(len(sources))]


def search_batch(
    decoder: Decoder[State],
    requests: Sequence[Request[Key]],
    options: GenerationOptions,
    special: SpecialTokens,
    *,
    decode: Decode | None = None,
) -> Iterator[tuple[Key, list[Hypothesis]]]:
    """Generates for requests that are answered together.

    Args:
        decoder: The model.
        requests: The requests.
        options: How to generate; maximal length and prefix are each request's own.
        special: The ids that pad, begin and end.
        decode: Text of token ids, to look for stop strings.

    Yields:
        The key of each request and its hypotheses, as `search` returns them, in the order in which
        the sentences end.

    Raises:
        InputError: As `search`.
        UsageError: As `search`.
    """
    check_tokens(options, decoder.vocabulary_size)
    stops = StopStrings(options.stop, decode)
    if not requests:
        return
    _check_requests(requests, options, decoder.vocabulary_size, special.ends)
    batch = _Batch(decoder, requests, options, special, stops)
    while len(batch.rows):
        batch.step()
        yield from batch.answers()
        batch.drop_ended()


class _Batch(Generic[State, Key]):
    """Sentences that are stepped together.

    Attributes:
        state: The decoder's state of `rows`.
        rows: Rows of `strategy` that are stepped, grouped by sentence `[rows]`.
        tokens: The next input token of each `[rows]`.
        keys: Keys of the requests.
        waiting: Whether a sentence is still to be answered `[requests]`.
        ended: Outputs that had ended when `answers` last looked.
    """

    def __init__(
        self,
        decoder: Decoder[State],
        requests: Sequence[Request[Key]],
        options: GenerationOptions,
        special: SpecialTokens,
        stops: StopStrings,
    ) -> None:
        self.decoder = decoder
        self.normalise = options.scores
        kind = BeamStrategy if options.beam > 1 else SamplingStrategy
        self.strategy: Strategy = kind(requests, options, special.ends, stops)
        self.keys = [request.key for request in requests]
        self.waiting = np.ones(len(requests), np.bool_)
        self.ended = 0
        has_encoder, sources = decoder.has_encoder, [request.source for request in requests]
        self.processors = build_logits_processors(
            options, requests, special.ends, has_encoder=has_encoder
        )
        self.state, first = begin(decoder, sources, special)
        if has_encoder:
            for place, request in enumerate(requests):
                first[place] = special.bos_id if request.bos_id is None else request.bos_id
        self.prompts = prompts_of(first[:, None].tolist() if has_encoder else sources)
        width, each = self.strategy.width, self.strategy.rows_at_first
        self.rows = np.arange(len(requests) * width).reshape(-1, width)[:, :each].ravel()
        self.tokens = first.repeat(each)
        if each > 1:
            self.state = decoder.select(self.state, np.arange(len(requests)).repeat(each))

    def step(self) -> None:
        """Lengthens every output by one token."""
        strategy = self.strategy
        active, top = [each for each in self.processors if each.active(strategy.length)], None
        if strategy.top is not None and not active:
            top = min(strategy.top, self.decoder.vocabulary_size)
        output, self.state = self.decoder.step(
            self.tokens[:, None], self.state, top=top, normalise=self.normalise
        )
        if output.top_k is not None:
            self.choice = strategy.choose_top_k(output.top_k, self.rows)
        else:
            allowed = own = None
            if active:
                outputs = strategy.tokens[self.rows, : strategy.length]
                history = History(self.rows // strategy.width, outputs, self.prompts)
                logits = output.all_logits[:, -1]
                if strategy.ranks and any(processor.changes for processor in active):
                    normaliser = output.log_sum_exp
                    if normaliser is None:
                        normaliser = log_sum_exp(logits)
                        output = output._replace(log_sum_exp=normaliser)
                    logits = own = logits - normaliser[:, None]
                allowed = restrict(logits, active, history)
            self.choice = strategy.choose(output, allowed, self.rows, own)
        strategy.extend(self.rows, self.choice)

    def answers(self) -> Iterator[tuple[Key, list[Hypothesis]]]:
        """Yields the sentences that ended with the last step."""
        ended = int(np.count_nonzero(self.strategy.ended))
        if ended == self.ended:
            return
        self.ended = ended
        over = self.strategy.ended.reshape(-1, self.strategy.width).all(axis=1)
        for sentence in np.flatnonzero(over & self.waiting).tolist():
            self.waiting[sentence] = False
            yield self.keys[sentence], self.strategy.hypotheses(sentence)

    def drop_ended(self) -> None:
        """Prepares the rows of the next step; ended rows may leave before it."""
        choice, width, stepped = self.choice, self.strategy.width, len(self.rows)
        self.rows, parents, self.tokens = choice.rows, choice.parents, choice.tokens
        ended = self.strategy.ended[choice.rows]
        if np.count_nonzero(ended) and self.decoder.shares_cache and width > 1:
            ended = ended.reshape(-1, width).all(axis=1).repeat(width)
        if self._due(ended):
            staying = _closed_up(ended) if self.decoder.shares_cache else np.flatnonzero(~ended)
            self.rows, self.tokens = choice.rows[staying], choice.tokens[staying]
            parents = staying if parents is None else parents[staying]
        if parents is None or not len(parents):
            return
        if len(parents) != stepped or np.count_nonzero(parents != np.arange(stepped)):
            self.state = self.decoder.select(self.state, parents)

    def _due(self, ended: Bools) -> bool:
        """Whether ended rows have to leave now."""
        count, rows = int(np.count_nonzero(ended)), len(ended)
        if count in (0, rows):
            return count > 0
        if count >= LEAVING_SHARE * (rows + STEP_ROWS):
            return True
        if not self.decoder.shares_cache and isinstance(self.strategy, BeamStrategy):
            return True  # beams change places, which copies the cache anyway
        # The cache may have no position left for steps beyond an output's maximal length.
        sentences = self.choice.rows[ended] // self.strategy.width
        at_limit = self.strategy.limits[sentences] == self.strategy.length
        return bool(at_limit.any())


def _closed_up(ended: Bools) -> NDArray[np.intp]:
    """Rows that have not ended, the last of them in the places of ended rows."""
    left = np.flatnonzero(~ended)
    order = np.arange(len(left))
    order[ended[: len(left)]] = left[left >= len(left)]
    return order


def begin(
    decoder: Decoder[State], sources: Sequence[Sequence[int]], special: SpecialTokens
) -> tuple[State, Integers]:
    """Starts the decoder; returns the state and the first input token of each output `[sources]`.

    Raises:
        InputError: A source has no tokens.
    """
    source, mask, first = model_inputs(sources, decoder.has_encoder, special)
    return decoder.start(source, mask), first


def model_inputs(
    sources: Sequence[Sequence[int]], has_encoder: bool, special: SpecialTokens
) -> tuple[Integers, Bools, Integers]:
    """Returns the inputs of `Decoder.start` and of the first step.

    Returns:
        The padded sources and their mask `[sources, source]`, and the first input token of each
        output `[sources]`: the begin token, or without an encoder the last token of the source,
        left out of the padded sources.

    Raises:
        InputError: A source has no tokens.
    """
    for row, source in enumerate(sources):
        if not source:
            raise InputError(
                f"source {row} of the batch has no tokens, expected at least 1: leave empty text "
                "out of the search, or end every source with the end token"
            )
    if has_encoder:
        return *pad_sources(sources, special.pad_id), np.full(len(sources), special.bos_id)
    prompts = pad_sources([source[:-1] for source in sources], special.pad_id)
    return *prompts, np.array([source[-1] for source in sources])


def pad_sources(sources: Sequence[Sequence[int]], pad_id: int) -> tuple[Integers, Bools]:
    """Pads token ids on the right; returns them and their mask, True at tokens `[rows, source]`."""
    lengths = np.array([len(source) for source in sources])
    mask = np.arange(lengths.max()) < lengths[:, None]
    ids = np.full(mask.shape, pad_id, np.int64)
    ids[mask] = [token for source in sources for token in source]
    return ids, mask


def check_tokens(options: GenerationOptions, vocabulary: int) -> None:
    """Raises UsageError for a token id of the options that the vocabulary lacks."""
    tokens = {name: getattr(options, name) for name in TOKEN_IDS}
    tokens["suppress_sequences"] = [token for item in options.suppress_sequences for token in item]
    tokens["forced_begin"] = () if options.forced_begin is None else (options.forced_begin,)
    for name, values in tokens.items():
        largest = max(values, default=0)
        if largest >= vocabulary:
            raise UsageError(
                Option(name),
                f" holds token {largest}, expected tokens from 0 to {vocabulary - 1}: give "
                "ids of the bundle's tokenizer",
            )


def _check_requests(
    requests: Sequence[Request[Key]],
    options: GenerationOptions,
    vocabulary: int,
    ends: Sequence[int],
) -> None:
    for row, request in enumerate(requests):
        if not 1 <= request.max_length <= options.max_length:
            raise UsageError(
                f"source {row} wants {request.max_length} tokens, expected 1 to "
                f"max_length={options.max_length}: lower the first or raise the second"
            )
        forced = beginning(options, request)
        if len(forced) > request.max_length:
            raise UsageError(
                f"the prefix of source {row} has {len(forced)} tokens, more than "
                f"max_length={request.max_length}: shorten the first or raise the second"
            )
        for token in forced:
            if token in ends or not 0 <= token < vocabulary:
                raise UsageError(
                    f"the prefix of source {row} holds token {token}, expected tokens from 0 to "
                    f"{vocabulary - 1} other than the end token {', '.join(map(str, ends))}: "
                    "encode the prefix with the bundle's tokenizer, without special tokens"
                )
