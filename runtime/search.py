"""The search: greedy, sampling and beam over any decoder.

What scores is a `Decoder`, what filters a `LogitsProcessor`, what picks is `Picks`, what ranks
`Beams`. Sentences are answered together, a batch after another; those that have ended leave theirs.
A row's answer depends on nothing but the row: not on the other rows, their number or their order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Generic, Protocol

import numpy as np
from numpy.typing import NDArray

from transferry.runtime.beam import Beams
from transferry.runtime.decoder import (
    Decoder,
    GreedyDecoder,
    NormalisingDecoder,
    RankingDecoder,
    SentenceDecoder,
    State,
)
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.hypothesis import Hypothesis
from transferry.runtime.logits import normalise
from transferry.runtime.options import GenerationOptions
from transferry.runtime.outputs import Key, Outputs, Request
from transferry.runtime.processors import build_processors, forbid, restrict
from transferry.runtime.sampling import Picks
from transferry.runtime.shortlist import ListedDecoder, Shortlist
from transferry.runtime.tokenizer import SpecialTokens

__all__ = ["Hypothesis", "Request", "Supply", "search", "search_stream"]

# Ended rows leave once they are this share of all. Leaving copies the cache of all others, staying
# wastes a row of every step. A quarter bounds both: at most a third of the useful work is wasted,
# and a batch of n rows that drains copies its cache at most log(n) / log(4/3) times (64 rows: 14).
LEAVING_SHARE = 0.25
# The same where only as many rows move as leave.
CLOSING_SHARE = 0.25


class Supply(Protocol[Key]):
    """Where a search gets its sentences from."""

    def take(self, most: int) -> Sequence[Request[Key]]:
        """Hands out sentences that are to be answered together; none means that none will come."""
        ...


class _Listed(Generic[Key]):
    """A list as a supply."""

    def __init__(self, requests: Iterable[Request[Key]]) -> None:
        self.requests = deque(requests)

    def take(self, most: int) -> list[Request[Key]]:
        return [self.requests.popleft() for _ in range(min(most, len(self.requests)))]


def search(
    decoder: Decoder[State],
    sources: Sequence[Sequence[int]],
    options: GenerationOptions,
    special: SpecialTokens,
    *,
    row_ids: Sequence[int] | None = None,
    prefixes: Sequence[Sequence[int]] | None = None,
    shortlist: Shortlist | None = None,
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
        shortlist: what `options.shortlist` restricts the answers to.

    Returns:
        The hypotheses of each source, best first: `n_best`, or fewer where a beam search found
        fewer, and one of finish reason "error" where the model gave no usable scores.

    Raises:
        InputError: a source has no tokens.
        UsageError: a prefix is longer than `max_length` or holds a token that it cannot hold, or
            a token to suppress is none of the vocabulary; or a shortlist is wanted and not given,
            or the decoder has no encoder, and so no sources to list tokens for.
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
    stream = search_stream(
        decoder, _Listed(requests), options, special, slots=len(sources), shortlist=shortlist
    )
    answers = dict(stream)
    return [answers[place] for place in range(len(sources))]


def search_stream(
    decoder: Decoder[State],
    supply: Supply[Key],
    options: GenerationOptions,
    special: SpecialTokens,
    *,
    slots: int,
    shortlist: Shortlist | None = None,
) -> Iterator[tuple[Key, list[Hypothesis]]]:
    """Generates for one batch of sentences after another, `slots` of them at most.

    Args:
        decoder: the model.
        supply: gives the sentences, until none will come.
        options: how to generate; greatest length and prefix are those of each request.
        special: the ids that pad, begin and end.
        slots: most sentences at a time.
        shortlist: as for `search`.

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
    if options.shortlist and (shortlist is None or not decoder.has_encoder):
        raise UsageError(
            "shortlist restricts answers to what a table lists for their source, found no "
            f"{'source' if shortlist else 'table'}; leave shortlist out"
        )
    while requests := supply.take(slots):
        _check_requests(requests, options, decoder.vocabulary_size, special.eos_id)
        if options.shortlist and shortlist is not None:
            batch = _listed(decoder, requests, options, special, shortlist)
        else:
            batch = _Batch(decoder, requests, options, special)
        while len(batch.rows):
            batch.step()
            yield from batch.answers()
            batch.drop_ended()


def _listed(
    decoder: Decoder[Any],
    requests: Sequence[Request[Key]],
    options: GenerationOptions,
    special: SpecialTokens,
    shortlist: Shortlist,
) -> _Batch[Any, Key]:
    """A batch whose answers hold what is on the lists of their sources.

    It goes by the numbers of a `ListedDecoder`, from its requests to its answers.
    """
    prefixes = [request.prefix for request in requests]
    allowed = shortlist.allowed([request.source for request in requests], prefixes, special.eos_id)
    listed = ListedDecoder(decoder, allowed, special.bos_id)
    bos_id, eos_id = listed.numbers([special.bos_id]) + listed.numbers([special.eos_id])
    return _Batch(
        listed,
        [replace(request, prefix=listed.numbers(request.prefix)) for request in requests],
        replace(options, suppress=tuple(listed.numbers(options.suppress))),
        replace(special, bos_id=bos_id, eos_id=eos_id),
        lambda found: replace(found, tokens=listed.ids(found.tokens)),
    )


class _Batch(Generic[State, Key]):
    """Sentences that are stepped together.

    Attributes:
        state: the decoder's, of `rows`.
        rows: which rows of `outputs` are stepped, those of a sentence side by side `[rows]`.
        tokens: what each is fed next `[rows]`.
        keys: of the requests.
        waiting: which sentences are not answered yet `[requests]`.
        restored: gives a hypothesis the ids of its tokens, where the decoder numbers them anew.
    """

    def __init__(
        self,
        decoder: Decoder[State],
        requests: Sequence[Request[Key]],
        options: GenerationOptions,
        special: SpecialTokens,
        restored: Callable[[Hypothesis], Hypothesis] = lambda found: found,
    ) -> None:
        self.decoder = decoder
        self.restored = restored
        self.by_sentence = isinstance(decoder, SentenceDecoder)
        self.ranking: RankingDecoder[State] | None = None
        if isinstance(decoder, RankingDecoder) and decoder.ranks and not options.sample:
            self.ranking = decoder
        self.greedy: GreedyDecoder[State] | None = None
        if isinstance(decoder, GreedyDecoder) and not options.scores:
            self.greedy = decoder
        kind = Beams if options.beam > 1 else Picks
        normaliser = decoder.normalise if isinstance(decoder, NormalisingDecoder) else normalise
        self.outputs: Outputs = kind(requests, options, special.eos_id, normaliser)
        self.keys = [request.key for request in requests]
        self.waiting = np.ones(len(requests), np.bool_)
        prefixes = [request.prefix for request in requests]
        self.processors = build_processors(options, prefixes, special.eos_id)

        self.state, first = begin(decoder, [request.source for request in requests], special)
        width, each = self.outputs.width, self.outputs.rows_at_first
        self.rows = np.arange(len(requests) * width).reshape(-1, width)[:, :each].ravel()
        self.tokens = first.repeat(each)
        if each > 1:
            self.state = decoder.select(self.state, np.arange(len(requests)).repeat(each))

    def step(self) -> None:
        """Lengthens every output by one token."""
        outputs = self.outputs
        sentences = self.rows // outputs.width
        lengths = outputs.lengths[sentences]
        active = [processor for processor in self.processors if processor.active(lengths)]
        fed = self.tokens[:, None]
        history = outputs.tokens[self.rows, : lengths.max()] if active else outputs.tokens[:0]
        if self.greedy is not None and isinstance(outputs, Picks):
            filters = partial(forbid, active, sentences, history, lengths) if active else None
            tokens, self.state = self.greedy.likeliest(fed, self.state, filters)
            self.choice = outputs.follow(self.rows, np.maximum(tokens, 0), tokens >= 0)
        elif self.ranking is not None and not active:
            count = min(outputs.wanted, self.decoder.vocabulary_size)
            ranked, self.state = self.ranking.rank(fed, self.state, count)
            self.choice = outputs.choose_ranked(ranked, self.rows)
        else:
            logits, self.state = self.decoder.step(fed, self.state)
            last = allowed = logits[:, -1]
            if active:
                allowed = restrict(last, active, sentences, history, lengths)
            self.choice = outputs.choose(last, allowed, self.rows)
        outputs.extend(self.rows, self.choice)

    def answers(self) -> Iterator[tuple[Key, list[Hypothesis]]]:
        """The sentences that ended with the last step."""
        over = self.outputs.ended.reshape(-1, self.outputs.width).all(axis=1)
        for sentence in np.flatnonzero(over & self.waiting).tolist():
            self.waiting[sentence] = False
            found = self.outputs.hypotheses(sentence)
            yield self.keys[sentence], [self.restored(hypothesis) for hypothesis in found]

    def drop_ended(self) -> None:
        """Readies the rows for the next step, which ended ones may leave before."""
        choice, width = self.choice, self.outputs.width
        ended = self.outputs.ended[choice.rows]
        if self.by_sentence:
            ended = ended.reshape(-1, width).all(axis=1).repeat(width)
        staying = np.arange(len(ended))
        if self._due(ended):
            staying = _closed_up(ended) if self.by_sentence else np.flatnonzero(~ended)
        parents = choice.parents[staying]
        if len(parents) and not np.array_equal(parents, np.arange(len(self.rows))):
            self.state = self.decoder.select(self.state, parents)
        self.rows, self.tokens = choice.rows[staying], choice.tokens[staying]

    def _due(self, ended: NDArray[np.bool_]) -> bool:
        """Whether those of the rows that have ended are to leave now."""
        if not ended.any():
            return False
        if ended.mean() >= (CLOSING_SHARE if self.by_sentence else LEAVING_SHARE):
            return True
        if not self.by_sentence and isinstance(self.outputs, Beams):
            return True  # beams change places, which copies the cache anyway
        # There may be no position left for what is stepped beyond its greatest length.
        sentences = self.choice.rows[ended] // self.outputs.width
        at_limit = self.outputs.lengths[sentences] == self.outputs.limits[sentences]
        return bool(at_limit.any())


def _closed_up(ended: NDArray[np.bool_]) -> NDArray[np.intp]:
    """The rows that have not ended, the last of them in the places of those that have."""
    left = np.flatnonzero(~ended)
    order = np.arange(len(left))
    order[ended[: len(left)]] = left[left >= len(left)]
    return order


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
