"""A search as one graph beside torch's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from transferry.export.checks.check import Check
from transferry.export.checks.searches import Search, Text
from transferry.export.oracle.cases import random_sources
from transferry.export.oracle.oracle import Oracle
from transferry.export.oracle.served import Answers
from transferry.export.subject.bundle import BundleSubject
from transferry.runtime.decoding.generation_options import GenerationOptions

GIVEN_BEGINNINGS = "given beginnings, in one graph"
ROWS = 7  # of the given beginnings


def whole_searches(subject: BundleSubject, oracle: Oracle, text: Text, rows: int) -> list[Check]:
    """Returns checks of tokens and log-probabilities of the graph `generate`.

    Every source is answered alone, in a batch and padded on the left. Beginnings of random tokens,
    which a search seldom chooses, go through the decoder of a model with an encoder. The step
    graphs search again where tokens differ.

    Args:
        subject: A variant with that graph.
        oracle: torch's side.
        text: Sources and options; random sources without text.
        rows: Rows of a batch.
    """
    sources = text.sources or random_sources(oracle.config, ROWS)
    options = one_graph_options(text, subject.one_graph.beam)

    def answers() -> Sequence[Answers]:
        return subject.one_graph.answers_all_ways(sources, options, oracle.special, rows)

    found = [Search(subject.one_graph.name, subject.model, sources, options, answers)]
    if oracle.config.encoder_layers:
        found.append(_given_beginnings(subject, oracle, sources[:ROWS]))
    return [search.check(oracle) for search in found]


def _given_beginnings(
    subject: BundleSubject, oracle: Oracle, sources: Sequence[Sequence[int]]
) -> Search:
    """Feeds random beginnings as long as the positions allow, up to the whole vocabulary."""
    config, special = oracle.config, oracle.special
    length = max(0, min(config.max_positions - 1, config.vocabulary_size - len(special.ends)))
    generator = np.random.default_rng(0)
    allowed = np.setdiff1d(np.arange(config.vocabulary_size), special.ends)
    prefixes = [generator.permutation(allowed)[:length].tolist() for _ in sources]
    options = one_graph_options(Text(config, sources, {}, length + 1), subject.one_graph.beam)

    def answers() -> Sequence[Answers]:
        found = subject.one_graph.answers(sources, options, special, prefixes=prefixes)
        return [[each] for each in found]

    return Search(GIVEN_BEGINNINGS, subject.model, sources, options, answers, prefixes)


def one_graph_options(text: Text, beam: int) -> GenerationOptions:
    """Returns the options of the search in the graph `generate`."""
    return replace(text.options("greedy"), beam=beam, n_best=beam, scores=True)
