"""Comparison of a search as one graph with torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from transferry.export.oracle.cases import random_sources
from transferry.export.oracle.oracle import Oracle, TextParity
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.ort.open_model import ServedDecoder
from transferry.runtime.proof.one_graph import OneGraph
from transferry.runtime.proof.report import Decisions

GIVEN_BEGINNINGS = "given beginnings, in one graph"
ROWS = 7  # of the given beginnings


def check_one_graph(
    oracle: Oracle, one: OneGraph, model: ServedDecoder, text: TextParity
) -> list[Decisions]:
    """Compares tokens and log-probabilities with torch's.

    Every source is answered alone, in a batch and padded on the left. Beginnings of random tokens,
    which a search seldom chooses, go through the decoder of a model with an encoder.

    Args:
        oracle: The reference.
        one: The graph, opened.
        model: The portable graphs, opened; they search again where tokens differ.
        text: Sources and options.
    """
    config, special = oracle.config, oracle.special
    sources = text.sources or random_sources(config, ROWS)
    options = _options(text, one)
    rows = (text.batches or model.batches).rows
    # The oracle counts what it compares; the total was made without these rows.
    silent, oracle.done = oracle.done, lambda count: None
    try:
        answers = one.answers_all_ways(sources, options, special, rows)
        searched = oracle.search(model, one.name, sources, options, answers=answers)
        found = [searched.decisions()]
        if config.encoder_layers:
            found.append(_given_beginnings(oracle, one, model, sources[:ROWS]))
    finally:
        oracle.done = silent
    return found


def _given_beginnings(
    oracle: Oracle, one: OneGraph, model: ServedDecoder, sources: Sequence[Sequence[int]]
) -> Decisions:
    """Feeds random beginnings as long as the positions allow, up to the whole vocabulary."""
    config, special = oracle.config, oracle.special
    length = max(0, min(config.max_positions - 1, config.vocabulary_size - len(special.ends)))
    generator = np.random.default_rng(0)
    allowed = np.setdiff1d(np.arange(config.vocabulary_size), special.ends)
    prefixes = [generator.permutation(allowed)[:length].tolist() for _ in sources]
    options = _options(TextParity(oracle, {}, sources, length + 1), one)
    found = one.answers(sources, options, special, prefixes=prefixes)
    answers = [[each] for each in found]
    name = GIVEN_BEGINNINGS
    tally = oracle.search(model, name, sources, options, answers=answers, prefixes=prefixes)
    return tally.decisions()


def _options(text: TextParity, one: OneGraph) -> GenerationOptions:
    options = text.options("greedy")
    return replace(options, beam=one.beam, n_best=one.beam, scores=True)
