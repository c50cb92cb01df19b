"""Foreign graphs as a decoder for the project's search, fed as their own libraries feed them.

The prompt is read whole, padded on the left or on the right, and later tokens one at a time. A
graph without a cache reads everything again at each step.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from transferry.build_model.model.config import ModelConfig
from transferry.export.subject.layout import Layout
from transferry.export.subject.session import Arrays, ForeignGraph, require_shape
from transferry.runtime.decoding.decoder import StepOutput, Tensors
from transferry.runtime.decoding.search import pad_sources
from transferry.runtime.errors import InputError
from transferry.runtime.ort.session import SessionOptions

Padding = Literal["left", "right"]
Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class ForeignState:
    """Inputs of a step besides the tokens.

    Attributes:
        rows: The tokens of each row so far, without padding; of an encoder-decoder the target's.
        mask: True at a token of the cache, or of the source `[rows, columns]`.
        states: Hidden states of the source; None without an encoder.
        past: The cache by the names of its inputs; None before the first step.
    """

    rows: Sequence[tuple[int, ...]]
    mask: Mask
    states: NDArray[Any] | None = None
    past: Arrays | None = field(default=None)


def _longer(state: ForeignState, tokens: Ids) -> ForeignState:
    """Adds tokens `[rows, new]` to each row."""
    rows = [(*row, *new) for row, new in zip(state.rows, tokens.tolist(), strict=True)]
    return replace(state, rows=rows)


def padded(rows: Sequence[Sequence[int]], pad_id: int, padding: Padding) -> tuple[Ids, Mask]:
    """Pads rows on a side; returns token ids and mask `[rows, columns]`."""
    if padding == "right":
        return pad_sources(rows, pad_id)
    ids, mask = pad_sources([row[::-1] for row in rows], pad_id)
    return ids[:, ::-1], mask[:, ::-1]


class ForeignDecoder:
    """Runs foreign graphs that generate."""

    shares_cache = False
    gives = frozenset(["logits"])

    def __init__(
        self,
        layout: Layout,
        options: SessionOptions,
        config: ModelConfig,
        pad_id: int,
        padding: Padding = "right",
    ) -> None:
        """Opens the graphs; raises as `ForeignGraph` and `require` do."""
        self.vocabulary_size, self.padding, self._pad_id = config.vocabulary_size, padding, pad_id
        self._sizes = config.kv_heads or config.heads, config.d_head
        self._d_model = config.d_model
        self.has_encoder = layout.encoder is not None
        opened = [ForeignGraph(graph, options) for graph in layout.graphs]
        self.graphs = opened
        self._encoder = opened[0] if layout.encoder else None
        self._first = opened[1 if layout.encoder else 0]
        self._later = opened[-1] if layout.step else self._first
        if self._encoder is not None:
            self._encoder.require(("tokens", "mask"), ("hidden",))
            steps = ["tokens", "states", "states_mask", "use_cache"]
        else:
            steps = ["tokens", "mask", "positions", "use_cache"]
        for graph in dict.fromkeys([self._first, self._later]):
            graph.require(steps, ("logits",), cache=self._first.graph.past)

    def padded(self, padding: Padding) -> ForeignDecoder:
        """Returns the same decoder with padding on a side; the sessions are shared."""
        other = copy.copy(self)
        other.padding = padding
        return other

    def read(
        self, rows: Sequence[Sequence[int]], padding: Padding
    ) -> list[dict[str, NDArray[Any]]]:
        """Returns the logits after each text, and without an encoder those of a later step too."""
        decoder = self.padded(padding)
        if decoder.has_encoder:
            state = decoder.start(*pad_sources(rows, self._pad_id))
            output, _ = decoder.step(np.zeros((len(rows), 1), np.int64), state)
            return [{"logits": row} for row in output.all_logits]
        state = decoder.start(*pad_sources([row[:-1] for row in rows], self._pad_id))
        tokens = np.array([[row[-1]] for row in rows])
        output, state = decoder.step(tokens, state)
        later, _ = decoder.step(tokens, state)
        logits = np.concatenate([output.all_logits, later.all_logits], axis=1)
        return [{"logits": row} for row in logits]

    def start(self, source: Ids, mask: Mask) -> ForeignState:
        """Encodes the source; a prompt is read by the first step. See `Decoder.start`."""
        rows = [tuple(row[there].tolist()) for row, there in zip(source, mask, strict=True)]
        if self._encoder is None:
            return ForeignState(rows, mask[:, :0])
        ids, mask = padded(rows, self._pad_id, self.padding)
        found, _ = self._encoder.run({"tokens": ids, "mask": mask}, {})
        states = found["hidden"]
        require_shape("hidden", states, (*ids.shape, self._d_model))
        return ForeignState([()] * len(rows), mask, states)

    def step(
        self, tokens: Ids, state: ForeignState, *, top: int | None = None, normalise: bool = False
    ) -> tuple[StepOutput, ForeignState]:
        """Reads target tokens and returns all logits; see `Decoder.step`."""
        if state.past is None:
            logits, state = self._begin(tokens, state)
            return StepOutput(logits), state
        pieces = []
        for column in tokens.T[..., None]:
            logits, state = self._continue(column, state)
            pieces.append(logits)
        return StepOutput(np.concatenate(pieces, axis=1)), state

    def _begin(self, tokens: Ids, state: ForeignState) -> tuple[NDArray[Any], ForeignState]:
        """Reads all tokens so far, with an empty cache."""
        state = _longer(state, tokens)
        # A target has no mask: its padding, which a graph without a cache meets, is on the right.
        padding: Padding = "right" if self.has_encoder else self.padding
        ids, mask = padded(state.rows, self._pad_id, padding)
        nothing = self._first.empty(len(ids), *self._sizes)
        logits, past = self._run(self._first, ids, mask, state, nothing)
        ends = mask.shape[1] - np.argmax(mask[:, ::-1], axis=1)  # of each row, padding excluded
        places = ends[:, None] - tokens.shape[1] + np.arange(tokens.shape[1])
        logits = np.take_along_axis(logits, places[..., None], axis=1)
        mask = state.mask if self.has_encoder else mask
        return logits, replace(state, mask=mask, past=past or None)

    def _continue(self, tokens: Ids, state: ForeignState) -> tuple[NDArray[Any], ForeignState]:
        """Reads one token a row, after those of the cache."""
        assert state.past is not None
        mask = state.mask
        if not self.has_encoder:
            mask = np.pad(mask, ((0, 0), (0, 1)), constant_values=True)
        known = {*self._later.past, *self._later.graph.past}
        past = {name: value for name, value in state.past.items() if name in known}
        logits, grown = self._run(self._later, tokens, mask, state, past)
        return logits, replace(_longer(state, tokens), mask=mask, past={**state.past, **grown})

    def _run(
        self, graph: ForeignGraph, ids: Ids, mask: Mask, state: ForeignState, past: Arrays
    ) -> tuple[NDArray[Any], Arrays]:
        """Runs a graph on target tokens; returns the logits and the cache after them."""
        inputs = {"tokens": ids, "use_cache": np.array([state.past is not None])}
        if state.states is not None:
            inputs |= {"states": state.states, "states_mask": state.mask}
        else:
            positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)[:, -ids.shape[1] :]
            inputs |= {"mask": mask, "positions": positions}
        found, grown = graph.run(inputs, past)
        if state.past is not None and self._first is self._later and self.has_encoder:
            # A merged decoder gives an empty or repeated cache of the source.
            grown = {
                name: state.past[name] if ".encoder." in name else value
                for name, value in grown.items()
            }
        require_shape("logits", found["logits"], (*ids.shape, self.vocabulary_size))
        for name, value in grown.items():
            if value.ndim != 4 or len(value) != len(ids):
                raise InputError(
                    f"expected what continues {name} of shape [{len(ids)}, heads, past, width], "
                    f"found {list(value.shape)}"
                )
        return found["logits"], grown

    def select(self, state: ForeignState, rows: Ids) -> ForeignState:
        """Takes rows of the state; see `Decoder.select`."""
        past = state.past and {name: value[rows] for name, value in state.past.items()}
        states = None if state.states is None else state.states[rows]
        return ForeignState([state.rows[row] for row in rows], state.mask[rows], states, past)

    def tensors(self, state: ForeignState) -> Tensors:
        """Returns nothing: a cache is a graph's own affair, and shows in the logits after it."""
        return {}
