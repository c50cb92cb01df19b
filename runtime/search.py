"""The search: greedy, sampling and beam over any decoder.

What scores is a `Decoder`, what filters a `LogitsProcessor`, what picks is `Picks`, what ranks
`Beams`. Sentences are answered together, each at its own length: one that has ended makes room for
the next where the decoder can take it in. A row's answer depends on nothing but the row: not on the
other rows, their number or their order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, Protocol

import numpy as np
from numpy.typing import NDArray

from transferry.runtime.beam import Beams
from transferry.runtime.decoder import (
    Decoder,
    GreedyDecoder,
    NormalisingDecoder,
    RefillingDecoder,
    State,
)
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.hypothesis import Hypothesis
from transferry.runtime.logits import normalise
from transferry.runtime.options import GenerationOptions
from transferry.runtime.outputs import Key, Outputs, Request
from transferry.runtime.processors import build_processors, forbid, restrict
from transferry.runtime.sampling import Picks
from transferry.runtime.tokenizer import SpecialTokens

__all__ = ["Hypothesis", "Request", "Supply", "search", "search_stream"]

# Ended rows leave once they are this share of all. Leaving copies the cache of all others, staying
# wastes a row of every step. A quarter bounds both: at most a third of the useful work is wasted,
# and a batch of n rows that drains copies its cache at most log(n) / log(4/3) times (64 rows: 14).
LEAVING_SHARE = 0.25
# Taking in a sentence that was read already costs little; doing it for each alone would still cost
# more than a few rows of a step.
REFILLING_SHARE = 1 / 16
# Sentences that are read at a time: few together leave the encoder's products small.
READ_TOGETHER = 32


class Supply(Protocol[Key]):
    """Where a search gets its sentences from."""

    def take(self, most: int, *, wait: bool) -> Sequence[Request[Key]]:
        """Hands out sentences, those that are encoded together.

        Args:
            most: how many are wanted.
            wait: where there are none, wait until there are; then none means that none will come.
        """
        ...

    def ready(self, most: int) -> int:
        """How many `take` would hand out now."""
        ...


class _Listed(Generic[Key]):
    """A list as a supply."""

    def __init__(self, requests: Iterable[Request[Key]]) -> None:
        self.requests = deque(requests)

    def take(self, most: int, *, wait: bool) -> list[Request[Key]]:
        return [self.requests.popleft() for _ in range(self.ready(most))]

    def ready(self, most: int) -> int:
        return min(most, len(self.requests))


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
    if row_ids is None:
        row_ids = range(len(sources))
    if prefixes is None:
        prefixes = [options.prefix] * len(sources)
    rows = zip(sources, prefixes, row_ids, strict=True)
    requests = [
        Request(place, source, options.max_length, prefix, row_id)
        for place, (source, prefix, row_id) in enumerate(rows)
    ]
    stream = search_stream(decoder, _Listed(requests), options, special, slots=len(sources))
    answers = dict(stream)
    return [answers[place] for place in range(len(sources))]


def search_stream(
    decoder: Decoder[State],
    supply: Supply[Key],
    options: GenerationOptions,
    special: SpecialTokens,
    *,
    slots: int,
) -> Iterator[tuple[Key, list[Hypothesis]]]:
    """Generates for one sentence after another, `slots` of them at a time.

    A `RefillingDecoder` takes new sentences in while it works on others; with any other each batch
    ends before the next begins.

    Args:
        decoder: the model.
        supply: gives the sentences, until none will come.
        options: how to generate; greatest length and prefix are those of each request.
        special: the ids that pad, begin and end.
        slots: most sentences at a time.

    Yields:
        The key of each request and its hypotheses, as `search` returns them, in the order in which
        the sentences end.

    Raises:
        InputError: a source has no tokens.
        UsageError: as for `search`.
    """
    if max(options.suppress, default=0) >= decoder.vocabulary_size:
        raise UsageError(
            f"suppress holds token {max(options.suppress)}, expected tokens from 0 to "
            f"{decoder.vocabulary_size - 1}: give ids of the bundle's tokenizer"
        )
    while requests := supply.take(slots, wait=True):
        batch = _Batch(decoder, requests, options, special)
        while len(batch.rows):
            batch.step()
            yield from batch.answers()
            batch.turn_over(supply, slots)


class _Batch(Generic[State, Key]):
    """Sentences that are stepped together, in as many slots as it begins with.

    Attributes:
        state: the decoder's, of `rows`.
        rows: which rows of `outputs` are stepped `[rows]`.
        tokens: what each is fed next `[rows]`.
        keys: of the request in each slot.
        prefixes: the forced prefix of each slot.
        reserve: sentences that were read and wait for a slot.
        busy: which slots hold a sentence that is not answered yet `[slots]`.
    """

    def __init__(
        self,
        decoder: Decoder[State],
        requests: Sequence[Request[Key]],
        options: GenerationOptions,
        special: SpecialTokens,
    ) -> None:
        count = len(requests)
        self.decoder, self.options, self.special = decoder, options, special
        self.refilling = decoder if isinstance(decoder, RefillingDecoder) else None
        self.greedy: GreedyDecoder[State] | None = None
        if isinstance(decoder, GreedyDecoder) and not options.scores:
            self.greedy = decoder
        kind = Beams if options.beam > 1 else Picks
        normaliser = decoder.normalise if isinstance(decoder, NormalisingDecoder) else normalise
        self.outputs: Outputs = kind(count, options, special.eos_id, normaliser)
        self.busy = np.zeros(count, np.bool_)
        self.keys = [request.key for request in requests]
        self.prefixes = [request.prefix for request in requests]
        self.reserve: _Fresh[State, Key] | None = None
        self._admit(np.arange(count), requests)

        self.state, first = begin(decoder, [request.source for request in requests], special)
        each = self.outputs.rows_at_first
        if self.refilling is not None:  # as a refill begins, so that scores are the same to the bit
            each = self.outputs.width
        self.rows = self.outputs.rows_of(np.arange(count)).reshape(count, -1)[:, :each].ravel()
        self.tokens = first.repeat(each)
        if each > 1:
            self.state = decoder.select(self.state, np.arange(count).repeat(each))

    def _admit(self, slots: NDArray[np.int64], requests: Sequence[Request[Key]]) -> None:
        _check_requests(requests, self.options, self.decoder.vocabulary_size, self.special.eos_id)
        self.outputs.admit(slots, requests)
        self.busy[slots] = True
        for slot, request in zip(slots.tolist(), requests, strict=True):
            self.keys[slot], self.prefixes[slot] = request.key, request.prefix
        self.processors = build_processors(self.options, self.prefixes, self.special.eos_id)

    def step(self) -> None:
        """Lengthens every output by one token."""
        outputs = self.outputs
        slots = self.rows // outputs.width
        lengths = outputs.lengths[slots]
        active = [processor for processor in self.processors if processor.active(lengths)]
        fed = self.tokens[:, None]
        history = outputs.tokens[self.rows, : lengths.max()] if active else outputs.tokens[:0]
        if self.greedy is not None and isinstance(outputs, Picks):
            filters = partial(forbid, active, slots, history, lengths) if active else None
            tokens, self.state = self.greedy.likeliest(fed, self.state, filters)
            self.choice = outputs.follow(self.rows, np.maximum(tokens, 0), tokens >= 0)
        else:
            logits, self.state = self.decoder.step(fed, self.state)
            last = allowed = logits[:, -1]
            if active:
                allowed = restrict(last, active, slots, history, lengths)
            self.choice = outputs.choose(last, allowed, self.rows)
        outputs.extend(self.rows, self.choice)

    def answers(self) -> Iterator[tuple[Key, list[Hypothesis]]]:
        """The sentences that ended with the last step."""
        over = self.outputs.ended.reshape(-1, self.outputs.width).all(axis=1)
        for slot in np.flatnonzero(over & self.busy).tolist():
            self.busy[slot] = False
            yield self.keys[slot], self.outputs.hypotheses(slot)

    def turn_over(self, supply: Supply[Key], slots: int) -> None:
        """Readies the rows for the next step: ended ones are refilled, or leave.

        Args:
            supply: where new sentences come from.
            slots: how many sentences a batch may begin with.
        """
        choice, width = self.choice, self.outputs.width
        free = self.outputs.ended[choice.rows]
        if self.refilling is not None:  # it takes in and drops sentences, not rows
            free = free.reshape(-1, width).all(axis=1).repeat(width)
        places = np.flatnonzero(free)
        fresh: list[_Fresh[State, Key]] = []
        if len(places) >= REFILLING_SHARE * len(free) or self._due(places):
            fresh = self._fresh(supply, len(places) // width, slots)
        left = places[sum(map(len, fresh)) * width :]
        staying = np.ones(len(free), np.bool_)
        staying[left] = not self._due(left)
        parents = choice.parents[staying]
        if len(parents) and not np.array_equal(parents, np.arange(len(self.rows))):
            self.state = self.decoder.select(self.state, parents)
        self.rows, self.tokens = choice.rows[staying], choice.tokens[staying]
        sentences = np.flatnonzero(free[staying])[::width] // width
        for some in fresh:
            self._refill(sentences[: len(some)], some)
            sentences = sentences[len(some) :]

    def _due(self, free: NDArray[np.int64]) -> bool:
        """Whether the rows at some places, which have ended, are to leave now."""
        if len(free) == 0:
            return False
        if len(free) >= LEAVING_SHARE * len(self.choice.rows):
            return True
        if self.refilling is None and isinstance(self.outputs, Beams):
            return True  # beams change places, which copies the cache anyway
        # There may be no position left for what is stepped beyond its greatest length.
        slots = self.choice.rows[free] // self.outputs.width
        return bool((self.outputs.lengths[slots] == self.outputs.limits[slots]).any())

    def _fresh(self, supply: Supply[Key], most: int, slots: int) -> list[_Fresh[State, Key]]:
        """At most `most` new sentences; none where a batch of up to `slots` had better begin."""
        if self.refilling is None:
            return []
        opened = len(self.choice.rows) // self.outputs.width
        fresh = []
        while most:
            # A batch can shrink but not grow: where it has become small, a new one is better.
            if self.reserve is None and opened > (1 - LEAVING_SHARE) * supply.ready(slots):
                requests = supply.take(max(most, READ_TOGETHER), wait=False)
                self.reserve = _Fresh.read(self.decoder, requests, self.special)
            if self.reserve is None:
                break
            some, self.reserve = self.reserve.split(most)
            fresh.append(some)
            most -= len(some)
        return fresh

    def _refill(self, sentences: NDArray[np.int64], fresh: _Fresh[State, Key]) -> None:
        """Puts new sentences in the places of some of the state, `sentences [fresh]`."""
        assert self.refilling is not None
        width = self.outputs.width
        self.state = self.refilling.refill(self.state, sentences, fresh.state, fresh.chosen)
        self.tokens.reshape(-1, width)[sentences] = fresh.first[:, None]
        self._admit(self.rows[sentences * width] // width, fresh.requests)


@dataclass(frozen=True)
class _Fresh(Generic[State, Key]):
    """Sentences that were read together and wait for room.

    Attributes:
        state: of all that were read, these and others.
        chosen: which rows of the state they are `[sentences]`.
        first: the token that each output follows `[sentences]`.
        requests: what they are.
    """

    state: State
    chosen: NDArray[np.int64]
    first: NDArray[np.int64]
    requests: Sequence[Request[Key]]

    def __len__(self) -> int:
        return len(self.requests)

    @classmethod
    def read(
        cls, decoder: Decoder[State], requests: Sequence[Request[Key]], special: SpecialTokens
    ) -> _Fresh[State, Key] | None:
        """Lets the decoder read new sentences; none where there are none."""
        if not requests:
            return None
        state, first = begin(decoder, [request.source for request in requests], special)
        return cls(state, np.arange(len(requests)), first, requests)

    def split(self, most: int) -> tuple[_Fresh[State, Key], _Fresh[State, Key] | None]:
        """The first `most` of the sentences, and the others if there are any."""
        some, others = (
            replace(
                self, chosen=self.chosen[part], first=self.first[part], requests=self.requests[part]
            )
            for part in (slice(most), slice(most, None))
        )
        return some, others if len(others) else None


def begin(
    decoder: Decoder[State], sources: Sequence[Sequence[int]], special: SpecialTokens
) -> tuple[State, NDArray[np.int64]]:
    """Lets the decoder read the sources.

    Returns:
        The state, and the token that each output follows `[sources]`.

    Raises:
        InputError: a source has no tokens.
    """
    source, mask, first = model_inputs(sources, decoder.has_encoder, special)
    return decoder.start(source, mask), first


def model_inputs(
    sources: Sequence[Sequence[int]], has_encoder: bool, special: SpecialTokens
) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.int64]]:
    """What a decoder reads before the first step, and in it.

    Returns:
        The padded sources and their mask `[sources, source]`, and the token that each output
        follows `[sources]`: the begin token, or where there is no encoder the last one of the
        source, which is not among the padded ones.

    Raises:
        InputError: a source has no tokens.
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


def pad_sources(
    sources: Sequence[Sequence[int]], pad_id: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Token ids padded on the right and their mask, True at tokens, both `[rows, source]`."""
    lengths = np.array([len(source) for source in sources])
    mask = np.arange(lengths.max()) < lengths[:, None]
    ids = np.full(mask.shape, pad_id, np.int64)
    ids[mask] = [token for source in sources for token in source]
    return ids, mask


def _check_requests(
    requests: Sequence[Request[Key]], options: GenerationOptions, vocabulary: int, eos_id: int
) -> None:
    for row, request in enumerate(requests):
        if not 1 <= request.max_length <= options.max_length:
            raise UsageError(
                f"source {row} wants {request.max_length} tokens, expected 1 to "
                f"max_length={options.max_length}: lower the first or raise the second"
            )
        if len(request.prefix) > request.max_length:
            raise UsageError(
                f"the prefix of source {row} has {len(request.prefix)} tokens, more than "
                f"max_length={request.max_length}: shorten the first or raise the second"
            )
        for token in request.prefix:
            if token == eos_id or not 0 <= token < vocabulary:
                raise UsageError(
                    f"the prefix of source {row} holds token {token}, expected tokens from 0 to "
                    f"{vocabulary - 1} other than the end token {eos_id}: "
                    "encode the prefix with the bundle's tokenizer, without special tokens"
                )
