"""Every position of a decoder, one token a step, as a search reaches it."""

from __future__ import annotations

from typing import Any

import numpy as np

from transferry.export.oracle.cases import MOST_LOGITS, NEW_TOKENS, random_case
from transferry.export.oracle.oracle import Oracle
from transferry.runtime.decoding.decoder import ObservableDecoder, State
from transferry.runtime.proof.compare import Case, Comparison, compare, truth

BLOCK = 64  # positions that torch computes at once


def walk(
    oracle: Oracle,
    model: ObservableDecoder[State],
    positions: int | None = None,
    *,
    seed: int = 0,
) -> list[Comparison]:
    """Compares the logits at every position up to the model's last, or so many.

    Two rows change places after each block, so that the cache moves as it grows.

    Returns:
        A comparison for each block of positions. The case of one that fails ends at its worst
        position, and is added to `Oracle.failed`.
    """
    config = oracle.config
    case = random_case(config, 2, NEW_TOKENS, 0, seed=seed)
    source, mask, swapped = case.source, case.mask, np.array([1, 0])
    longest = config.max_positions if positions is None else positions
    longest -= 0 if config.encoder_layers else source.shape[1]
    generator = np.random.default_rng(seed)
    target = generator.integers(config.vocabulary_size, size=(2, longest))
    sides: list[ObservableDecoder[Any]] = [oracle.exact, oracle.reference, *oracle.others]
    states = [side.start(source, mask) for side in sides]
    state = model.start(source, mask)
    comparisons: list[Comparison] = []
    block = max(1, min(BLOCK, MOST_LOGITS // config.vocabulary_size))
    for first in range(0, longest, block):
        tokens, expected, logits = target[:, first : first + block], [], []
        for number, side in enumerate(sides):
            output, states[number] = side.step(tokens, states[number])
            expected.append({"logits": output.all_logits})
        for token in tokens.T:
            output, state = model.step(token[:, None], state)
            logits.append(output.all_logits.copy())
        found = np.concatenate(logits, axis=1)
        last = first + len(tokens.T) - 1
        name = f"positions {first} to {last}"
        fed = Case(name, source, mask, target[:, : last + 1], first, stage="later step")
        given = compare(fed, truth(fed, *expected), {"logits": found}, oracle.tolerance)
        if given[0].fault:
            distance = np.abs(found - expected[0]["logits"]).max(axis=(0, 2))
            worst = first + int(distance.argmax())
            shown = Case(f"position {worst}", source, mask, target[:, : worst + 1], worst)
            oracle.failed.append(shown)
        comparisons += given
        states = [side.select(each, swapped) for side, each in zip(sides, states, strict=True)]
        state = model.select(state, swapped)
        source, mask, target = source[swapped], mask[swapped], target[swapped]
    return comparisons
