"""The graph `generate` of a bundle: token ids in, answers out, greedy search inside."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from transferry.runtime.bundle import ANSWERS, ONE_GRAPH, Bundle, Variant
from transferry.runtime.decoding.hypothesis import FAILED, Hypothesis, length_normalised
from transferry.runtime.decoding.options import GenerationOptions
from transferry.runtime.decoding.search import pad_sources
from transferry.runtime.ort.graph_runner import open_portable
from transferry.runtime.ort.session import SessionOptions
from transferry.runtime.tokenizer.special_tokens import SpecialTokens


class OneGraph:
    """Runs the whole greedy search of a bundle as one graph."""

    def __init__(self, bundle: Bundle, variant: Variant, options: SessionOptions) -> None:
        """Opens the graph.

        Raises:
            ProviderError: The provider asked for cannot run here.
            InputError: The graph cannot be opened.
        """
        graphs = {ONE_GRAPH: variant.graphs[ONE_GRAPH]}
        self._runner = open_portable(bundle, graphs, options)[ONE_GRAPH]

    @classmethod
    def of(cls, bundle: Bundle, variant: Variant, options: SessionOptions) -> OneGraph | None:
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
    ) -> list[Hypothesis]:
        """Answers sources as one batch.

        Args:
            sources: Token ids of each source, at least one each.
            options: `max_length`, `forced_begin`, `prefix` and `length_penalty` are read; the graph
                has its own other rules.
            special: The ids that pad, begin and end.
            prefixes: What each answer begins with, equally long; by default `options.prefix`.
            padded_left: Pad the sources on the left instead of the right.

        Raises:
            InputError: the runtime cannot run the graph on these inputs.
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
        tokens, lengths, totals = (value.numpy() for value in runner.run(values, *ANSWERS))
        found = []
        for row, count, total in zip(tokens.tolist(), lengths.tolist(), totals, strict=True):
            answer, total = tuple(row[:count]), float(total)
            if not np.isfinite(total) or not answer or len(answer) != count:
                found.append(FAILED)
                continue
            score = length_normalised(total, len(answer), options.length_penalty)
            if answer[-1] in special.ends:
                found.append(Hypothesis(answer[:-1], total, score, "end", end=answer[-1]))
            else:
                found.append(Hypothesis(answer, total, score, "length"))
        return found

    def answers_all_ways(
        self,
        sources: Sequence[Sequence[int]],
        options: GenerationOptions,
        special: SpecialTokens,
        rows: int,
    ) -> list[list[list[Hypothesis]]]:
        """Answers each source alone, in batches of so many rows, and padded on the left.

        Returns:
            The answers of each source, one hypothesis each.
        """
        ways: list[list[Hypothesis]] = []
        for size, left in ((1, False), (rows, False), (rows, True)):
            batches = [sources[first : first + size] for first in range(0, len(sources), size)]
            ways.append(
                [
                    found
                    for batch in batches
                    for found in self.answers(batch, options, special, padded_left=left)
                ]
            )
        return [[[found] for found in each] for each in zip(*ways, strict=True)]
