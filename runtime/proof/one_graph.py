"""The graph `generate` of a bundle: token ids in, answers out, the search inside."""

import math
from collections.abc import Sequence
from typing import Self

import numpy as np

from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.specs import ANSWERS, ONE_GRAPH, SCORES, GraphSpec, Variant
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.decoding.hypothesis import FAILED, Hypothesis, length_normalised
from transferry.runtime.decoding.search import pad_sources
from transferry.runtime.ort.graph_runner import runtime_of
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.tokenizer.special_tokens import SpecialTokens


def beams_of(graph: GraphSpec) -> int:
    """Returns the number of beams of the search in a graph, 1 for greedy search."""
    _, *beams = graph.tensor("lengths").shape
    return int(beams[0]) if beams else 1


class OneGraph:
    """Runs the whole search of a bundle as one graph.

    Attributes:
        beam: Beams of the search, 1 for greedy search.
        search: The name of the same search, step by step.
        name: The name of the search in one graph.
    """

    def __init__(self, bundle: Bundle, variant: Variant, options: SessionOptions) -> None:
        """Opens the graph.

        Raises:
            ProviderError: The provider asked for cannot run here.
            InputError: The graph cannot be opened.
        """
        graphs = {ONE_GRAPH: variant.graphs[ONE_GRAPH]}
        self.beam = beams_of(variant.graphs[ONE_GRAPH])
        self.search = "greedy" if self.beam == 1 else f"beam {self.beam}"
        self.name = f"{self.search}, in one graph"
        self._runner = runtime_of(options).open(bundle, graphs, options)[ONE_GRAPH]

    @classmethod
    def of(cls, bundle: Bundle, variant: Variant, options: SessionOptions) -> Self | None:
        """Opens the graph of a variant; None if it has none."""
        return cls(bundle, variant, options) if ONE_GRAPH in variant.graphs else None

    def answers(
        self,
        sources: Sequence[Sequence[int]],
        options: GenerationOptions,
        special: SpecialTokens,
        *,
        prefixes: Sequence[Sequence[int]] | None = None,
        padded_left: bool = False,
    ) -> list[list[Hypothesis]]:
        """Answers sources as one batch: the hypotheses of each, best first.

        Of the options `max_length`, `forced_begin`, `prefix` and `length_penalty` are read; the
        graph has its own other rules. Answers begin with `prefixes`, equally long; by default
        `options.prefix`. Raises InputError if the runtime cannot run the graph on these inputs.
        """
        runner = self._runner
        ids, mask = pad_sources(sources, special.pad_id)
        if padded_left:
            order = np.argsort(mask, axis=1, kind="stable")
            ids = np.take_along_axis(ids, order, axis=1)
            mask = np.take_along_axis(mask, order, axis=1)
        length = np.array([options.max_length])
        inputs = {"source": ids, "source_mask": mask}
        if runner.graph.names("target"):
            first = () if options.forced_begin is None else (options.forced_begin,)
            begun = [
                [special.bos_id, *first, *prefix]
                for prefix in prefixes or [options.prefix] * len(sources)
            ]
            inputs["target"] = np.array(begun, np.int64)
        inputs["max_length"] = length
        values = {role: [runner.value(array)] for role, array in inputs.items()}
        roles = (*ANSWERS, SCORES) if runner.graph.names(SCORES) else ANSWERS
        tokens, lengths, totals, *more = (value.numpy() for value in runner.run(values, *roles))
        shape = len(sources), self.beam
        rows = zip(
            tokens.reshape(*shape, tokens.shape[-1]).tolist(),
            lengths.reshape(shape).tolist(),
            totals.reshape(shape).tolist(),
            # Without rules that change values, beams are ranked by their log-probabilities.
            *(each.reshape(shape).tolist() for each in more),
            strict=True,
        )
        found = [
            [_hypothesis(options, special, *each) for each in zip(*row, strict=True)]
            for row in rows
        ]
        # Fewer hypotheses may exist than beams.
        return [[one for one in row if one is not FAILED] or [FAILED] for row in found]

    def answers_all_ways(
        self,
        sources: Sequence[Sequence[int]],
        options: GenerationOptions,
        special: SpecialTokens,
        rows: int,
    ) -> list[list[list[Hypothesis]]]:
        """Answers each source alone, in batches of so many rows, and padded on the left.

        Returns the hypotheses of each source, once for each way.
        """
        ways: list[list[list[Hypothesis]]] = []
        for size, left in ((1, False), (rows, False), (rows, True)):
            batches = [sources[first : first + size] for first in range(0, len(sources), size)]
            ways.append(
                [
                    found
                    for batch in batches
                    for found in self.answers(batch, options, special, padded_left=left)
                ]
            )
        return [list(each) for each in zip(*ways, strict=True)]


def _hypothesis(
    options: GenerationOptions,
    special: SpecialTokens,
    tokens: list[int],
    count: int,
    total: float,
    score: float | None = None,
) -> Hypothesis:
    answer = tuple(tokens[:count])
    if not math.isfinite(total) or not answer or len(answer) != count:
        return FAILED
    if score is None:
        score = length_normalised(total, count, options.length_penalty)
    if answer[-1] in special.ends:
        return Hypothesis(answer[:-1], total, score, "end", end=answer[-1])
    return Hypothesis(answer, total, score, "length")
