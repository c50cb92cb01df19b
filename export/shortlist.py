"""Learns a shortlist from parallel text: which target tokens a source token may become.

IBM model 1 (Brown et al. 1993, The Mathematics of Statistical Machine Translation, section 4.1)
over token ids: each token of a target comes from one token of its source, or from none of them,
all of them alike probable. So of t(e | f), the probability that f becomes e, EM finds the maximum
of the likelihood, from any beginning.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from transferry.runtime.errors import InputError
from transferry.runtime.shortlist import Integers, Shortlist

# Target tokens that every list has, and that it has for each token of the source.
FREQUENT, LIKELIEST = 200, 40
# Improbable ones are left out: they are there because two tokens met once.
LEAST = 1e-4
ITERATIONS = 5
# How often a source and a target token may meet in one sentence, in all; with more text, sentences
# are taken at equal distances. Each takes some 40 bytes.
MEETINGS = 1 << 26

Ids = Sequence[Sequence[int]]


class LexicalTable:
    """t(e | f), for the tokens that meet in any sentence.

    Attributes:
        source: f; the vocabulary's size where e comes from no token of the source [pairs].
        target: e [pairs], rising within a source token.
        probability: t(e | f) [pairs].
    """

    def __init__(self, sources: Ids, targets: Ids, vocabulary: int) -> None:
        """Begins with e alike probable for all f.

        Args:
            sources: Token ids of each sentence.
            targets: Those of its translation.
            vocabulary: How many tokens there are.
        """
        met = np.concatenate(
            [
                np.add.outer(target, np.array([*source, vocabulary]) * vocabulary).ravel()
                for source, target in zip(sources, targets, strict=True)
                if target
            ]
        )
        pairs, self._pair = np.unique(met, return_inverse=True)
        self.source, self.target = np.divmod(pairs, vocabulary)
        self.probability = np.full(len(pairs), 1 / vocabulary)
        # Of each token of all targets from how many it may come, and whose each meeting is.
        choices = [len(source) + 1 for source in sources]
        self._choices = np.repeat(choices, [len(target) for target in targets])
        self._place = np.arange(len(self._choices)).repeat(self._choices)

    def improve(self) -> float:
        """Does one iteration of EM.

        Returns:
            The log-likelihood of the targets before it, in nats, but for the lengths' part.
        """
        weight = self.probability[self._pair]
        total = np.bincount(self._place, weight)
        expected = np.bincount(self._pair, weight / total[self._place])
        self.probability = expected / np.bincount(self.source, expected)[self.source]
        return float(np.log(total / self._choices).sum())

    def likeliest(self, source_tokens: int, count: int, filling: int) -> Integers:
        """Returns the likeliest e of each f, the lowest of equals [source_tokens, count]."""
        order = np.lexsort((self.target, -self.probability, self.source))
        order = order[self.probability[order] >= LEAST]
        source = self.source[order]
        rank = np.arange(len(order)) - np.searchsorted(source, source)
        wanted = (rank < count) & (source < source_tokens)
        table = np.full((source_tokens, count), filling)
        table[source[wanted], rank[wanted]] = self.target[order[wanted]]
        return table


def learn_shortlist(
    sources: Ids,
    targets: Ids,
    vocabulary: int,
    *,
    frequent: int = FREQUENT,
    likeliest: int = LIKELIEST,
) -> Shortlist:
    """Learns a shortlist.

    Args:
        sources: Token ids of each sentence, without special ones.
        targets: Those of its translation.
        vocabulary: How many tokens there are.
        frequent: How many tokens are on every list.
        likeliest: How many each token of a source puts on it, at most.

    Raises:
        InputError: There is nothing to learn from.
    """
    pairs = zip(sources, targets, strict=True)
    meetings = sum((len(source) + 1) * len(target) for source, target in pairs)
    if not meetings:
        raise InputError(
            "a shortlist is learned from pairs of text, found none whose target has tokens; give "
            "text like that to come"
        )
    step = -(-meetings // MEETINGS)
    sources, targets = sources[::step], targets[::step]
    counts = np.bincount([token for target in targets for token in target], minlength=vocabulary)
    common = np.argsort(-counts, kind="stable")[:frequent]
    table = LexicalTable(sources, targets, vocabulary)
    for _ in range(ITERATIONS):
        table.improve()
    kind = np.min_scalar_type(vocabulary - 1)
    rows = table.likeliest(vocabulary, likeliest, int(common[0]))
    return Shortlist(np.sort(common).astype(kind), rows.astype(kind))
