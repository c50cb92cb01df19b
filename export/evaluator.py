"""A bundle's graphs run by onnx's own ReferenceEvaluator: a second opinion on the graph itself.

It is numpy, written for clarity by those who define the operators, and far too slow for work: where
onnxruntime is wrong and this is right, the runtime is at fault; where both are wrong, the graph is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from transferry.runtime.bundle import Bundle, GraphSpec, Variant
from transferry.runtime.decoder import longer

Arrays = Sequence[NDArray[Any]]


@dataclass(frozen=True)
class EvaluatorState:
    """What a step reads besides the tokens; shapes as in the manifest."""

    mask: NDArray[np.bool_]
    cross: Arrays
    past: Arrays


class EvaluatorDecoder:
    """Runs a variant's graphs as a `Decoder`."""

    def __init__(self, bundle: Bundle, variant: Variant) -> None:
        self._graphs = dict(variant.graphs)
        self._evaluators = {
            name: ReferenceEvaluator(str(bundle.graph(graph)))
            for name, graph in variant.graphs.items()
        }
        self.has_encoder = "encoder" in self._graphs
        self.vocabulary_size = int(self._graphs["decoder"].tensor("logits").shape[-1])

    def start(self, source: NDArray[np.int64], mask: NDArray[np.bool_]) -> EvaluatorState:
        """Encodes the source; see `Decoder.start`."""
        names = self._graphs["decoder"].names("past")
        spec = self._graphs["decoder"].tensor("past")
        _, heads, _, d_head = spec.shape
        past: Arrays = [np.zeros((len(source), int(heads), 0, int(d_head)), spec.type)] * len(names)
        if self.has_encoder:
            cross = self._run("encoder", {"source": [source], "source_mask": [mask]}, "cross")
            return EvaluatorState(mask, cross, past)
        if source.shape[1]:
            nothing = mask[:, :0]
            inputs: dict[Any, Arrays] = {"target": [source], "past_mask": [nothing], "past": past}
            past = self._run("decoder", inputs, "present")
        return EvaluatorState(mask, [], past)

    def step(
        self, tokens: NDArray[np.int64], state: EvaluatorState
    ) -> tuple[NDArray[np.floating[Any]], EvaluatorState]:
        """Reads target tokens; see `Decoder.step`."""
        inputs: dict[Any, Arrays] = {
            "target": [tokens],
            "source_mask" if self.has_encoder else "past_mask": [state.mask],
            "cross": state.cross,
            "past": state.past,
        }
        logits, *present = self._run("decoder", inputs, "logits", "present")
        mask = state.mask if self.has_encoder else longer(state.mask, tokens)
        return logits, EvaluatorState(mask, state.cross, present)

    def select(self, state: EvaluatorState, rows: NDArray[np.int64]) -> EvaluatorState:
        """Takes rows of the state; see `Decoder.select`."""
        cross = state.cross
        if self.has_encoder:
            cross = self._run("select", {"rows": [rows], "state": cross}, "selected")
        past = self._run("select", {"rows": [rows], "state": state.past}, "selected")
        return EvaluatorState(state.mask[rows], cross, past)

    def tensors(self, state: EvaluatorState) -> dict[str, NDArray[Any]]:
        """Returns the cross and past of a state, by their names in the graph."""
        graph = self._graphs["decoder"]
        names = [*graph.names("cross"), *graph.names("past")]
        return dict(zip(names, [*state.cross, *state.past], strict=True))

    def _run(self, name: str, inputs: dict[Any, Arrays], *outputs: Any) -> list[NDArray[Any]]:
        graph: GraphSpec = self._graphs[name]
        feeds = {
            tensor: array
            for role, arrays in inputs.items()
            for tensor, array in zip(graph.names(role), arrays, strict=True)
        }
        wanted = [tensor for role in outputs for tensor in graph.names(role)]
        return list(self._evaluators[name].run(wanted, feeds))


class EvaluatorEncoder:
    """Runs the graph of an encoder alone."""

    def __init__(self, bundle: Bundle, variant: Variant) -> None:
        self._graph = variant.graphs["encoder"]
        self._evaluator = ReferenceEvaluator(str(bundle.graph(self._graph)))

    def encode(
        self, source: NDArray[np.int64], mask: NDArray[np.bool_]
    ) -> dict[str, NDArray[np.floating[Any]]]:
        """Returns "hidden" and "logits"; see `OnnxEncoder.encode`."""
        names = [spec.name for spec in self._graph.outputs]
        feeds = dict(zip([spec.name for spec in self._graph.inputs], (source, mask), strict=True))
        return dict(zip(names, self._evaluator.run(names, feeds), strict=True))
