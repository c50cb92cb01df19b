"""The shortlist: which target tokens an answer to a sentence may hold.

Sentences that are answered together have each a list of its own. A decoder then scores what is on
any of their lists, a few hundred tokens in place of all, and each sentence keeps what is on its
own: so that an answer still depends on its sentence alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Literal

import numpy as np
from numpy.typing import NDArray

from transferry.runtime.arrays import open_arrays
from transferry.runtime.bundle import SHORTLIST, Bundle
from transferry.runtime.decoder import Decoder, PartialDecoder, SentenceDecoder, State
from transferry.runtime.errors import UsageError
from transferry.runtime.files import atomic_file
from transferry.runtime.logits import Normaliser

Integers = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Shortlist:
    """What lists are put together from.

    Attributes:
        frequent: Tokens of every list [frequent].
        likeliest: Of each source token the target tokens that it is likeliest to become, filled up
            with any of those [vocabulary, likeliest].
    """

    frequent: Integers
    likeliest: Integers

    def allowed(
        self, sources: Sequence[Sequence[int]], prefixes: Sequence[Sequence[int]], eos_id: int
    ) -> NDArray[np.bool_]:
        """Returns which tokens are on the list of each sentence [sentences, vocabulary].

        Args:
            sources: Token ids of each.
            prefixes: The forced prefix of each, whose tokens are on its list.
            eos_id: The end token, which is on every list.
        """
        allowed = np.zeros((len(sources), len(self.likeliest)), np.bool_)
        allowed[:, self.frequent] = True
        allowed[:, eos_id] = True
        rows, tokens = _side_by_side(sources)
        allowed[rows[:, None], self.likeliest[tokens]] = True
        allowed[_side_by_side(prefixes)] = True
        return allowed

    def save(self, path: Path) -> None:
        """Writes the file; the same shortlist gives the same bytes."""
        with atomic_file(path) as file:
            np.savez(file, frequent=self.frequent, likeliest=self.likeliest)

    @classmethod
    def of(cls, bundle: Bundle) -> Shortlist:
        """Returns the shortlist of a bundle.

        Raises:
            InputError: The file is damaged.
            UsageError: There is none.
        """
        architecture = bundle.manifest.architecture
        if architecture != "encoder-decoder":
            raise UsageError(
                "shortlist is for the answers of an encoder-decoder to a source, and "
                f"{bundle.folder} is {architecture}; leave it out"
            )
        if SHORTLIST not in bundle.manifest.files:
            raise UsageError(
                f"shortlist needs a bundle that has one, and {bundle.folder} has none; export it "
                "again with --shortlist SOURCE TARGET, or leave shortlist out"
            )
        return cls.load(bundle.folder / SHORTLIST)

    @classmethod
    def load(cls, path: Path) -> Shortlist:
        """Reads what `save` wrote.

        Raises:
            InputError: The file is missing or damaged.
        """
        with open_arrays(path, "a bundle's shortlist", "export the bundle again") as file:
            found = cls(file["frequent"], file["likeliest"])
            if (found.frequent.ndim, found.likeliest.ndim) != (1, 2):
                raise ValueError("its tables have other dimensions")
            if max(found.frequent.max(), found.likeliest.max()) >= len(found.likeliest):
                raise ValueError("it names tokens that there are not")
            return found


@dataclass(frozen=True)
class ListedState(Generic[State]):
    """A decoder's state, and what each row may be given.

    Attributes:
        inner: The decoder's.
        sentences: The sentence that each row belongs to [rows].
        own: Where in logits [rows, vocabulary], counted through, what is on the lists of the rows
            lies, row by row [own].
        firsts: Where in `own` each row begins [rows].
    """

    inner: State
    sentences: Integers
    own: Integers
    firsts: Integers


class ListedDecoder(Generic[State]):
    """A decoder of one batch that knows the tokens on any of its lists, and no others.

    They are numbered from 0 in the order of their ids, so that of equal scores the lowest id still
    comes first.

    Attributes:
        tokens: Their ids [vocabulary].
    """

    has_encoder = True
    shares_cache: Literal[True]  # only where the other decoder does

    def __init__(self, decoder: Decoder[State], allowed: NDArray[np.bool_], bos_id: int) -> None:
        """Takes what is on the lists.

        Args:
            decoder: Computes.
            allowed: What is on the list of each sentence [sentences, tokens of the decoder].
            bos_id: What every output is begun with, and no list need have.
        """
        if isinstance(decoder, SentenceDecoder):
            self.shares_cache = True
        self._decoder = decoder
        listed: NDArray[np.bool_] = np.logical_or.reduce(allowed)
        listed[bos_id] = True
        self.tokens = np.flatnonzero(listed)
        self.vocabulary_size = len(self.tokens)
        self._columns = allowed[:, self.tokens].nonzero()[1]
        self._counts = allowed.sum(axis=1)
        # Of what each row of the last step has on its list, side by side, and where each begins.
        self._scores: NDArray[np.floating[Any]] = np.empty(0)
        self._firsts: Integers = np.empty(0, np.int64)
        self._part = decoder.part(self.tokens) if isinstance(decoder, PartialDecoder) else None

    def numbers(self, ids: Sequence[int]) -> list[int]:
        """Returns the numbers of tokens, of which those on no list are left out."""
        found = np.array(ids, np.int64)
        numbers: list[int] = np.searchsorted(
            self.tokens, found[np.isin(found, self.tokens)]
        ).tolist()
        return numbers

    def ids(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """Undoes `numbers`."""
        return tuple(self.tokens[np.array(numbers, np.int64)].tolist())

    def start(self, source: NDArray[np.int64], mask: NDArray[np.bool_]) -> ListedState[State]:
        """See `Decoder.start`."""
        return self._listed(self._decoder.start(source, mask), np.arange(len(source)))

    def _listed(self, inner: State, sentences: Integers) -> ListedState[State]:
        counts = self._counts[sentences]
        firsts = np.cumsum(counts) - counts
        stored = (np.cumsum(self._counts) - self._counts)[sentences]
        own = self._columns[np.arange(counts.sum()) + (stored - firsts).repeat(counts)]
        own += (np.arange(len(sentences)) * self.vocabulary_size).repeat(counts)
        return ListedState(inner, sentences, own, firsts)

    def step(
        self, tokens: NDArray[np.int64], state: ListedState[State]
    ) -> tuple[NDArray[np.floating[Any]], ListedState[State]]:
        """Reads a token a row, and scores what is on its list, all else minus infinity."""
        given = self.tokens[tokens]
        if isinstance(self._decoder, PartialDecoder):
            logits, inner = self._decoder.step_part(given, state.inner, self._part)
        else:
            logits, inner = self._decoder.step(given, state.inner)
            logits = logits[..., self.tokens]
        listed = np.ascontiguousarray(logits[:, -1])
        entries = listed.reshape(-1)
        self._scores, self._firsts = entries[state.own], state.firsts
        entries.fill(-np.inf)
        entries[state.own] = self._scores
        return listed[:, None], replace(state, inner=inner)

    def select(self, state: ListedState[State], rows: NDArray[np.int64]) -> ListedState[State]:
        """See `Decoder.select`."""
        inner, sentences = self._decoder.select(state.inner, rows), state.sentences[rows]
        if np.array_equal(sentences, state.sentences):
            return replace(state, inner=inner)
        return self._listed(inner, sentences)

    def normalise(self, logits: NDArray[np.floating[Any]]) -> Normaliser:
        """Normalises the logits of the last step over the list of each row."""
        return Normaliser(log_sum_exp_of_parts(self._scores, self._firsts))


def log_sum_exp_of_parts(
    values: NDArray[np.floating[Any]], firsts: Integers
) -> NDArray[np.float64]:
    """The log of the sum of exponentials of each part of an array.

    A sum is rounded by the order in which it is taken. What a part gives depends on nothing but
    what is in it, in which order: not on where it lies, or on what lies around it.

    Args:
        values: All parts one behind the other.
        firsts: Where each begins; none is empty [parts].

    Returns:
        As `logits.log_sum_exp` of each [parts].
    """
    counts = np.diff(firsts, append=len(values))
    with np.errstate(invalid="ignore"):
        largest = np.maximum.reduceat(values.astype(np.float64), firsts)
        powers = np.exp(values - largest.repeat(counts))
        sums: NDArray[np.float64] = largest + np.log(np.add.reduceat(powers, firsts))
    return sums


def _side_by_side(sentences: Sequence[Sequence[int]]) -> tuple[Integers, Integers]:
    """The sentence of each token, and the tokens of all sentences one behind the other."""
    lengths = [len(sentence) for sentence in sentences]
    tokens = np.array([token for sentence in sentences for token in sentence], np.int64)
    return np.arange(len(lengths)).repeat(lengths), tokens
