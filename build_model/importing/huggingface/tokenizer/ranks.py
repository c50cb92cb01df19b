"""Byte-level BPE of Hugging Face as ranks of tiktoken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from transferry.build_model.train.vocabulary import byte_of_character


def ranks_of(
    vocabulary: Mapping[str, int], merges: Sequence[Sequence[str]]
) -> tuple[dict[bytes, int], int] | None:
    """Converts ids and merges to tiktoken's ranks, if both split every text alike.

    tiktoken has no merges: it joins any two neighbours that form a token, lowest rank first. The
    result is the same if ids ascend in the order of the merges and every token is reached by its
    own merge; both are checked.

    Returns:
        The ranks, and the id of rank 0; None if tiktoken would split text differently.
    """
    byte_of = byte_of_character()
    order = [*byte_of, *("".join(merge) for merge in merges)]
    try:
        ids = [vocabulary[token] for token in order]
        tokens = [bytes(byte_of[character] for character in token) for token in order]
    except KeyError:  # a byte, or the token of a merge
        return None
    first = min(ids)
    # The bytes may have any order, as long as they come first.
    if sorted(ids[:256]) + ids[256:] != list(range(first, first + len(ids))):
        return None
    ranks = {token: number - first for token, number in zip(tokens, ids, strict=True)}
    for token, (left, right) in zip(tokens[256:], merges, strict=True):
        if [len(piece) for piece in _joined(token, ranks)] != [len(left), len(right)]:
            return None
    return ranks, first


def _joined(token: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    """BPE of a token by the ranks below its own."""
    pieces = [token[place : place + 1] for place in range(len(token))]
    while True:
        pairs = [ranks.get(left + right, len(ranks)) for left, right in pairwise(pieces)]
        lowest = min(pairs, default=len(ranks))
        if lowest >= ranks[token]:
            return pieces
        place = pairs.index(lowest)
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]
