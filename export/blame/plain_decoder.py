"""A plain decoder and encoder over any backend, for the cross-check.

Tensors are numpy arrays between the calls and nothing is reused, so that no IOBinding or memory is
shared with the served decoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transferry.export.blame.backends import Arrays, Backend
from transferry.runtime.bundle.specs import Variant
from transferry.runtime.decoding.decoder import StepOutput, longer


@dataclass(frozen=True)
class PlainState:
    """Inputs of a step besides the tokens; shapes as in the manifest."""

    mask: NDArray[np.bool_]
    cross: Arrays
    past: Arrays


class PlainDecoder:
    """Runs a variant's graphs as a `Decoder`."""

    shares_cache = False

    def __init__(self, variant: Variant, backend: Backend) -> None:
        self._graphs, self._backend = variant.graphs, backend
        self.has_encoder = "encoder" in self._graphs
        self.vocabulary_size = int(self._graphs["decoder"].tensor("logits").shape[-1])

    def start(self, source: NDArray[np.int64], mask: NDArray[np.bool_]) -> PlainState:
        """Encodes the source; see `Decoder.start`."""
        names = self._graphs["decoder"].names("past")
        spec = self._graphs["decoder"].tensor("past")
        shape = [0 if isinstance(size, str) else size for size in spec.shape[1:]]
        past: Arrays = [np.zeros((len(source), *shape), spec.type)] * len(names)
        if self.has_encoder:
            cross = self._run("encoder", {"source": [source], "source_mask": [mask]}, "cross")
            return PlainState(mask, cross, past)
        if source.shape[1]:
            nothing = mask[:, :0]
            inputs: dict[Any, Arrays] = {"target": [source], "past_mask": [nothing], "past": past}
            past = self._run("decoder", inputs, "present")
        return PlainState(mask, [], past)

    def step(
        self,
        tokens: NDArray[np.int64],
        state: PlainState,
        *,
        top: int | None = None,
        normalise: bool = False,
    ) -> tuple[StepOutput, PlainState]:
        """Reads target tokens and returns all logits; see `Decoder.step`."""
        inputs: dict[Any, Arrays] = {
            "target": [tokens],
            "source_mask" if self.has_encoder else "past_mask": [state.mask],
            "cross": state.cross,
            "past": state.past,
        }
        logits, *present = self._run("decoder", inputs, "logits", "present")
        mask = state.mask if self.has_encoder else longer(state.mask, tokens)
        return StepOutput(logits), PlainState(mask, state.cross, present)

    def select(self, state: PlainState, rows: NDArray[np.int64]) -> PlainState:
        """Takes rows of the state; see `Decoder.select`."""
        cross = state.cross
        if self.has_encoder:
            cross = self._run("select", {"rows": [rows], "state": cross}, "selected")
        if isinstance(self._graphs["decoder"].tensor("past").shape[2], int):  # of an SSRU
            return PlainState(state.mask[rows], cross, [each[rows] for each in state.past])
        past = self._run("select", {"rows": [rows], "state": state.past}, "selected")
        return PlainState(state.mask[rows], cross, past)

    def tensors(self, state: PlainState) -> dict[str, NDArray[Any]]:
        """Returns the cross and past of a state, by their names in the graph."""
        graph = self._graphs["decoder"]
        names = [*graph.names("cross"), *graph.names("past")]
        return dict(zip(names, [*state.cross, *state.past], strict=True))

    def _run(self, name: str, inputs: Mapping[Any, Arrays], *outputs: Any) -> Arrays:
        graph = self._graphs[name]
        feeds = {
            tensor: array
            for role, arrays in inputs.items()
            for tensor, array in zip(graph.names(role), arrays, strict=True)
        }
        wanted = [tensor for role in outputs for tensor in graph.names(role)]
        return self._backend.run(name, feeds, wanted)


class PlainEncoder:
    """Runs the graph of an encoder-only model."""

    def __init__(self, variant: Variant, backend: Backend) -> None:
        self._graph, self._backend = variant.graphs["encoder"], backend

    def encode(
        self, source: NDArray[np.int64], mask: NDArray[np.bool_]
    ) -> dict[str, NDArray[np.floating[Any]]]:
        """Returns all outputs; see `EncoderModel.encode`."""
        names = [spec.name for spec in self._graph.outputs]
        feeds = dict(zip([spec.name for spec in self._graph.inputs], (source, mask), strict=True))
        return dict(zip(names, self._backend.run("encoder", feeds, names), strict=True))


def plain_model(variant: Variant, backend: Backend) -> PlainDecoder | PlainEncoder:
    """Returns the model of a variant's graphs: a decoder, or an encoder."""
    return (PlainDecoder if "decoder" in variant.graphs else PlainEncoder)(variant, backend)
