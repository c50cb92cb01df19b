"""Greedy search as one graph; see `search_graph`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from transferry.export.trace.search_graph import SearchGraph
from transferry.export.trace.tape import END
from transferry.runtime.bundle.specs import ANSWERS


class GreedyGraph(SearchGraph):
    """Composes the graph with greedy search; the rows of the Loop are the sentences."""

    carried: ClassVar[Mapping[str, tuple[str, int]]] = {
        "target": ("int64", 2),
        "ended": ("bool", 1),
        "past_mask": ("bool", 2),
        "tokens": ("int64", 2),
        "lengths": ("int64", 1),
        "log_probabilities": ("float32", 1),
    }

    def _each_answer(self) -> tuple[str | int, ...]:
        """Returns the axes along which the answers lie."""
        return ("batch",)

    def _begun(self, target: ir.Value, begun: ir.Value, batch: ir.Value) -> dict[str, ir.Value]:
        """Returns the values that the Loop carries, besides target, past and `ended`."""
        main = self.main
        return {
            "tokens": main.columns(target, 1, END),
            "lengths": main.op("Expand", [begun, batch]),
            "log_probabilities": main.filled(np.float32(0), batch),
        }

    def _answers(self, results: Mapping[str, ir.Value], batch: ir.Value) -> list[ir.Value]:
        """Returns tokens, lengths and log-probabilities, given the last carried values."""
        return [results[role] for role in ANSWERS]

    def _choose(
        self,
        given: Mapping[str, ir.Value],
        logits: ir.Value,
        limit: ir.Value,
        present: Sequence[ir.Value],
    ) -> tuple[dict[str, ir.Value], Sequence[ir.Value]]:
        """Takes the likeliest token of each row, the lowest of equally likely ones.

        Returns:
            The carried values, and the cache.
        """
        step, ended = self.step, given["ended"]
        last = step.op("Gather", [logits, step.of(-1, flat=False)], {"axis": 1})
        last = self._allowed(last, given["tokens"])
        # Not ArgMax, which OpenVINO does not run in a Loop.
        _, likeliest = step.op_multi_out("TopK", [last, step.of(1)], {"axis": 1}, num_outputs=2)
        column = step.unsqueezed(ended, 1)
        chosen = step.op("Where", [column, step.of(self.special.pad_id), likeliest])
        begun = step.columns(given["target"], 1, END)
        scored = step.unsqueezed(step.joined(begun, chosen), 2)
        every = step.op("LogSoftmax", [logits], {"axis": -1})
        each = step.op("GatherElements", [every, scored], {"axis": 2})
        gain = step.op("ReduceSum", [each, step.of(1, 2)], {"keepdims": 0})
        zero = step.constant(np.float32(0))
        gain = step.op("Where", [ended, zero, gain])
        longer = step.op("Sub", [step.of(1), step.integers(ended)])
        lengths = step.op("Add", [given["lengths"], longer])
        ends = step.any(step.op("Equal", [chosen, step.of(*self.special.ends)]), 1)
        full = step.op("GreaterOrEqual", [lengths, limit])
        over = step.op("Or", [ended, step.op("Or", [ends, full])])
        after = {
            "target": chosen,
            "ended": over,
            "tokens": step.joined(given["tokens"], chosen),
            "lengths": lengths,
            "log_probabilities": step.op("Add", [given["log_probabilities"], gain]),
        }
        if not self.has_encoder:
            after["past_mask"] = self._longer_mask(given, over)
        return after, present
