"""A decoder whose cache lies in place: slots of sentences, each at its own length.

The graphs write new keys and values into buffers that stay where they are, and read the columns
that a bias lets them see. What a search does to the cache is thus done to the bias, a small array
on the host: beams that change places, or that are taken twice. Only when sentences leave, or a
buffer becomes too short, does a buffer move.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from transferry.runtime.batching import BatchOptions
from transferry.runtime.bundle import Bundle, Role, Variant
from transferry.runtime.decoder import Forbid, Ranked
from transferry.runtime.graph_runner import Bindable, BoundCall, Rows, describe, open_graphs
from transferry.runtime.logits import Normaliser
from transferry.runtime.output_layer import OutputLayer, Part
from transferry.runtime.session import Provider, SessionOptions
from transferry.runtime.slot_buffers import SlotBuffers

# Sentences that the encoder reads at once: of similar length, so that little is padding, and on the
# CPU few enough for the hidden states of all of them to stay in the processor's cache.
CHUNKS: dict[Provider, int] = {"cpu": 32, "cuda": 256}
# Units of columns that a cache may have beyond those in use. Every step reads all of it, making it
# shorter copies it.
SPARE = 8
# Steps that it has room for beyond the next, where one of one token reads its own columns alone:
# room costs nothing but memory.
AHEAD = 8
# Graphs that run at every step, and so are recorded where that is wanted.
CAPTURED = frozenset({"decoder", "rank"})
# How much is computed at once where nothing is said: rows that share the reading of the weights.
BATCHES: dict[Provider, BatchOptions] = {
    "cpu": BatchOptions(rows=256, tokens=1 << 15),
    "cuda": BatchOptions(rows=1024, tokens=1 << 17),
}

Floats = NDArray[np.floating[Any]]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class SlotState:
    """What a step reads besides the tokens. Buffers are shared with the states before and after.

    A step writes where no row of its state sees anything; so a state stays as it is until rows that
    were selected from it step.

    Rows are grouped by slot, `width` neighbouring rows each.

    Attributes:
        cross: Keys and values of the sources, [slots, heads, source, d_head] each, on the device.
        past: Keys and values of earlier positions, [slots, heads, capacity, d_head] each, there.
            Both may be the first rows of longer buffers.
        source_bias: [slots, 1, 1, source]: 0 at a token of the source, minus infinity elsewhere.
        bias: [slots, width, capacity]: 0 at the columns that a row descends from, likewise.
        positions: Of the next tokens [slots, width].
        held: The position of what lies in a column, where a row sees it [slots, capacity].
        prompt: Tokens of the prompt in a slot [slots].
        padding: How much shorter it is than the longest that was read with it [slots].
        calls: Steps bound to these buffers, by how many tokens of a slot they read, whether that is
            one without gaps before it, and by what holds the hidden states.
    """

    cross: Sequence[Rows]
    past: Sequence[Rows]
    source_bias: Floats
    bias: Floats
    positions: Integers
    held: Integers
    prompt: Integers
    padding: Integers
    calls: dict[tuple[int, bool, int], BoundCall] = field(default_factory=dict)


class SlotDecoder:
    """Runs a fused variant of a bundle; may be used by several threads at once."""

    shares_cache: Literal[True] = True

    def __init__(self, bundle: Bundle, variant: Variant, options: SessionOptions) -> None:
        """Opens the graphs.

        Raises:
            ProviderError: The provider asked for cannot run here.
            InputError: A graph cannot be opened.
        """
        self.variant, self.options = variant, options
        self.batches = BATCHES[options.provider]
        self._runners = open_graphs(bundle, variant.graphs, options, CAPTURED)
        self._decoder = self._runners["decoder"]
        self.has_encoder = "encoder" in variant.graphs
        self._kv_heads = int(variant.graphs["decoder"].tensor("past").shape[1])
        self._rounded = "unrounded" in variant.graphs  # the cache is in int8
        self.output = OutputLayer(bundle, variant, self._runners, options.threads)
        self.vocabulary_size = self.output.vocabulary_size
        self.ranks = self.output.ranks
        self._buffers = SlotBuffers(self._runners)

    def describe(self) -> dict[str, Any]:
        """What decides the numbers: the settings, and where the nodes of the graphs really ran."""
        return describe(self.variant, self.options, self._runners.values())

    def start(self, source: Integers, mask: NDArray[np.bool_]) -> SlotState:
        """Reads the sources; see `Decoder.start`."""
        slots, length = source.shape
        source_bias = np.full((slots, 1, 1, self._buffers.columns(length)), -np.inf, np.float32)
        source_bias[:, 0, 0, :length][mask] = 0
        state = SlotState(
            [],
            [],
            source_bias,
            np.full((slots, 1, 0), -np.inf, np.float32),
            np.zeros((slots, 1), np.int64),
            np.zeros((slots, 0), np.int64),
            np.zeros(slots, np.int64),
            np.zeros(slots, np.int64),
        )
        if self.has_encoder:
            return replace(state, cross=self._encode(source, mask))
        return self._read_prompts(state, source, mask) if length else state

    def step(self, tokens: Integers, state: SlotState) -> tuple[Floats, SlotState]:
        """Reads target tokens; see `Decoder.step`."""
        state = self._step(tokens, state)
        return self.output.logits(tokens.size).reshape(*tokens.shape, -1), state

    def likeliest(
        self, tokens: Integers, state: SlotState, forbid: Forbid | None = None
    ) -> tuple[Integers, SlotState]:
        """Reads one token a row; see `GreedyDecoder.likeliest`."""
        state = self._step(tokens, state)
        return self.output.likeliest(tokens.size, forbid), state

    def rank(self, tokens: Integers, state: SlotState, count: int) -> tuple[Ranked, SlotState]:
        """Reads one token a row; see `RankingDecoder.rank`."""
        state = self._step(tokens, state)
        return self.output.rank(tokens.size, count), state

    def part(self, tokens: Integers) -> Part:
        """Readies the output layer of some tokens; see `PartialDecoder.part`."""
        return self.output.part(tokens)

    def step_part(self, tokens: Integers, state: SlotState, part: Part) -> tuple[Floats, SlotState]:
        """Reads target tokens and scores some; see `PartialDecoder.step_part`."""
        state = self._step(tokens, state)
        return self.output.part_logits(tokens.size, part).reshape(*tokens.shape, -1), state

    def normalise(self, logits: Floats) -> Normaliser:
        """Normalises logits [rows, vocabulary]; see `NormalisingDecoder.normalise`."""
        return self.output.normalise(logits)

    def _step(self, tokens: Integers, state: SlotState) -> SlotState:
        """Reads tokens and leaves their hidden states in this thread's memory."""
        slots, width = state.positions.shape
        new = tokens.shape[1]
        columns = _unseen(state.bias, width * new)
        state = self._with_room(state, columns)
        # Row `row` of a slot writes its `new` tokens side by side, after those of the rows before.
        own = columns.reshape(slots, width, new)
        bias = np.repeat(state.bias, new, axis=1).reshape(slots, width, new, -1)
        slot, row = np.arange(slots)[:, None], np.arange(width)
        for token in range(new):
            bias[slot, row, token:, own[:, :, token]] = 0
        positions = (state.positions[:, :, None] + np.arange(new)).reshape(slots, -1)
        held = state.held.copy()
        held[slot, columns] = positions
        hidden = self.output.hidden(self._buffers.slots(slots) * width * new)
        # One token a slot, and what it sees are the first columns: only a cache in int8 asks.
        single = self._rounded and width * new == 1 and np.array_equal(columns, positions)
        # Another thread has other memory, and this one's may have grown.
        key = width * new, single, id(hidden.buffer)
        if key not in state.calls:
            state.calls[key] = self._call(state, width * new, single, hidden)
        state.calls[key].run(
            target=tokens.reshape(slots, -1),
            positions=positions,
            cells=self._cells(columns),
            bias=bias.reshape(slots, 1, width * new, -1),
        )
        return replace(state, bias=bias[:, :, -1], positions=state.positions + new, held=held)

    def _cells(self, columns: Integers) -> Integers:
        """Slot, head and column of what goes to columns [slots, new], [slots, new, heads, 3]."""
        cells = np.empty((*columns.shape, self._kv_heads, 3), np.int64)
        cells[..., 0] = np.arange(len(columns))[:, None, None]
        cells[..., 1] = np.arange(self._kv_heads)
        cells[..., 2] = columns[..., None]
        return cells

    def select(self, state: SlotState, rows: Integers) -> SlotState:
        """Takes rows of the state; see `Decoder.select`.

        Rows that stay in their slots, in whatever order and number, move nothing.
        """
        slots, width = state.positions.shape
        of_row = rows // width
        chosen, counts = _runs(of_row)
        if (counts != counts[0]).any() or np.bincount(chosen).max() > 1:
            # No common width: each row gets a slot of its own.
            chosen, counts = of_row, np.ones(len(rows), np.int64)
        shape = (len(chosen), int(counts[0]))
        bias = state.bias.reshape(slots * width, -1)[rows].reshape(*shape, -1)
        positions = state.positions.reshape(-1)[rows].reshape(shape)
        if np.array_equal(chosen, np.arange(slots)):
            return replace(state, bias=bias, positions=positions)
        taken = replace(
            state,
            source_bias=state.source_bias[chosen],
            bias=bias,
            positions=positions,
            held=state.held[chosen],
            prompt=state.prompt[chosen],
            padding=state.padding[chosen],
            calls={},
        )
        left = len(chosen)
        places = np.flatnonzero(chosen != np.arange(left))
        if state.past and (chosen[places] >= left).all():
            return self._closed_up(taken, chosen[places], places)
        if self.has_encoder:
            inputs = {"rows": [self._decoder.value(chosen)], "state": state.cross}
            shape = left, state.source_bias.shape[-1]
            cross = self._buffers.filled("select", inputs, "selected", "cross", shape)
            taken = replace(taken, cross=cross)
        return self._with_columns(taken, chosen, bias.shape[-1])

    def _closed_up(self, state: SlotState, slots: Integers, places: Integers) -> SlotState:
        """Moves some slots from behind into places among those that stay where they are.

        Args:
            state: All but cross and past is as it will be.
            slots: Which slots of cross and past to move [slots].
            places: Where to [slots].
        """
        buffers = [*state.cross, *state.past]
        if len(slots):
            move = self._runners["move"]
            inputs = {"rows": [move.value(slots)], "places": [move.value(places)], "state": buffers}
            move.run(inputs, in_place={"moved": buffers})
        left = [each.part(0, len(state.prompt)) for each in buffers]
        split = len(state.cross)
        return replace(state, cross=left[:split], past=left[split:])

    def tensors(self, state: SlotState) -> dict[str, Floats]:
        """Copies cross and past to the host as the portable graphs have them, a cache a row.

        The source is as long as the longest of the state.
        """
        slots, width = state.positions.shape
        seen = (state.bias == 0).reshape(slots * width, -1)
        prompt, padding = (each.repeat(width)[:, None] for each in (state.prompt, state.padding))
        # The columns seen come first, by position; after the prompt whatever pads it.
        column = np.arange((seen.sum(axis=1, keepdims=True) + padding).max())
        column = np.where(column < prompt, column, np.maximum(prompt - 1, column - padding))
        position = np.where(seen, state.held.repeat(width, axis=0), seen.shape[1])
        order = np.take_along_axis(np.argsort(position, axis=1, kind="stable"), column, axis=1)
        order = order[:, None, :, None]
        past, crosses = state.past or self._buffers.zeros("past", slots, 0), state.cross
        if self._rounded:
            state_read = {"state": [*crosses, *past]}
            found = self._runners["unrounded"].run(state_read, "cross", "past")
            floats = [Rows.of(each) for each in found]
            crosses, past = floats[: len(crosses)], floats[len(crosses) :]
        columns = (np.take_along_axis(each, order, axis=2) for each in _by_row(past, width))
        source = (state.source_bias == 0).sum(axis=-1).max()
        cross = (each[:, :, :source] for each in _by_row(crosses, width))
        names = [*self._names("cross"), *self._names("past")]
        return dict(zip(names, (*cross, *columns), strict=True))

    def _names(self, role: Role) -> list[str]:
        return self._decoder.graph.names(role)

    def _call(self, state: SlotState, new: int, single: bool, hidden: Rows) -> BoundCall:
        """Returns a step of `new` tokens a slot that is bound to the buffers of a state."""
        if not self._buffers.pooled:
            return self._bind(state, new, single, hidden)
        slots, calls = self._buffers.slots(len(state.prompt)), self._buffers.calls
        bound_to = [hidden, *state.cross, *state.past]
        key = slots, new, *(id(each.buffer) for each in bound_to)
        if key not in calls:
            # Of the buffers alone: nobody is to wait for them to be given back.
            wider = replace(
                state,
                cross=[Rows(each.buffer, 0, slots) for each in state.cross],
                past=[Rows(each.buffer, 0, slots) for each in state.past],
                source_bias=np.zeros((slots, *state.source_bias.shape[1:]), np.float32),
                prompt=np.zeros(slots, np.int64),
            )
            calls[key] = self._bind(wider, new, single, hidden)
        call = calls[key]
        if self.has_encoder:
            call.give(source_bias=state.source_bias)
        return call

    def _bind(self, state: SlotState, new: int, single: bool, hidden: Rows) -> BoundCall:
        """Binds a step of `new` tokens a slot to the buffers of a state."""
        slots, value = len(state.prompt), self._decoder.value
        fixed: dict[Role, Sequence[Bindable]] = {"past": state.past}
        changing: dict[str, NDArray[Any]] = {
            "target": np.zeros((slots, new), np.int64),
            "positions": np.zeros((slots, new), np.int64),
            # A slot not in use writes into its own.
            "cells": self._cells(np.zeros((slots, new), np.int64)),
            "bias": np.zeros((slots, 1, new, state.bias.shape[-1]), np.float32),
        }
        if self.has_encoder:
            fixed |= {"cross": state.cross}
            changing |= {"source_bias": state.source_bias}
        in_place: dict[Role, Sequence[Bindable]] = {"present": state.past, "hidden": [hidden]}
        if self._rounded:
            fixed |= {"single": [value(np.array(single))]}
        if self._rounded and self.has_encoder:
            lengths = (state.source_bias[:, 0, 0] == 0).sum(axis=1)
            fixed |= {"source_length": [value(lengths)]}
            in_place |= {"kept": state.cross}
        return self._decoder.bind(fixed=fixed, changing=changing, in_place=in_place)

    def _encode(self, source: Integers, mask: NDArray[np.bool_]) -> Sequence[Rows]:
        """Returns cross keys and values of sources, read a few at a time."""
        encoder, place = self._runners["encoder"], self._runners["place"]
        rows, chunk = len(source), CHUNKS[self.options.provider]
        cross = self._buffers.zeros("cross", rows, self._buffers.columns(source.shape[1]))
        for first in range(0, rows, chunk):
            part = slice(first, first + chunk)
            length = int(mask[part].sum(axis=1).max())
            inputs = {
                "source": [encoder.value(source[part, :length])],
                "source_mask": [encoder.value(mask[part, :length])],
            }
            encoded = encoder.run(inputs, "cross")
            places = [each.part(first, len(source[part])) for each in cross]
            write = place.value(np.zeros(len(source[part]), np.int64))
            inputs = {"write": [write], "fresh": encoded, "state": places}
            place.run(inputs, in_place={"placed": places})
        return cross

    def _read_prompts(
        self, state: SlotState, source: Integers, mask: NDArray[np.bool_]
    ) -> SlotState:
        """Returns a state whose cache holds prompts."""
        rows, length = source.shape
        lengths = mask.sum(axis=1)
        columns = np.tile(np.arange(length), (rows, 1))
        seen = np.zeros((rows, length, self._buffers.columns(length)), np.bool_)
        seen[:, :, :length] = np.tril(np.ones((length, length), np.bool_)) & mask[:, None, :]
        # Padding sees its own column: a softmax over nothing would be NaN.
        seen[:, :, :length] |= np.eye(length, dtype=np.bool_)
        reader, past = self._decoder, self._buffers.zeros("past", rows, seen.shape[-1])
        more = (0, seen.shape[-1] - length)
        inputs = {
            "target": [reader.value(source)],
            "positions": [reader.value(columns)],
            "cells": [reader.value(self._cells(columns))],
            "bias": [reader.value(np.where(seen, 0, -np.inf).astype(np.float32)[:, None])],
            "past": past,
            **({"single": [reader.value(np.array(False))]} if self._rounded else {}),
        }
        reader.run(inputs, in_place={"present": past})
        return replace(
            state,
            past=past,
            bias=np.where(np.pad(mask, ((0, 0), more)), 0, -np.inf).astype(np.float32)[:, None],
            positions=lengths[:, None],
            held=np.pad(columns, ((0, 0), more)),
            prompt=lengths,
            padding=length - lengths,
        )

    def _with_room(self, state: SlotState, columns: Integers) -> SlotState:
        """Returns a state whose cache has these columns, which are written next.

        And not many more than are in use: a step reads all of it, but for a single token of int8.
        """
        room = state.bias.shape[-1]
        needed = int(columns.max()) + 1
        spare = SPARE * self._buffers.unit
        if needed <= room <= needed + spare:
            return state
        seen = (state.bias == 0).any(axis=(0, 1)).nonzero()[0]
        needed = max(needed, int(seen.max(initial=-1)) + 1)
        if needed <= room <= needed + spare:
            return state
        ahead = AHEAD if self._rounded and columns.shape[1] == 1 else columns.shape[1]
        capacity = self._buffers.columns(needed + ahead)
        return self._with_columns(state, np.arange(len(columns)), capacity)

    def _with_columns(self, state: SlotState, slots: Integers, capacity: int) -> SlotState:
        """Moves the cache of some slots into one of another capacity.

        Args:
            state: All but the cache is of `slots` already.
            slots: Which slots of the cache to take [slots].
            capacity: Columns of the new one, all that are seen among them.
        """
        room = state.bias.shape[-1]
        more = (0, max(0, capacity - room))
        state = replace(
            state,
            bias=np.pad(
                state.bias[..., :capacity], ((0, 0), (0, 0), more), constant_values=-np.inf
            ),
            held=np.pad(state.held[:, :capacity], ((0, 0), more)),
            calls={},
        )
        if not room:
            return replace(state, past=self._buffers.zeros("past", len(slots), capacity))
        # What lies in columns that are not seen is of no consequence, as long as it is finite.
        columns = np.arange(capacity)
        columns[room:] = 0
        heads = np.arange(self._kv_heads)[:, None]
        index = (slots[:, None, None] * self._kv_heads + heads) * room + columns
        inputs = {"index": [self._decoder.value(index)], "state": state.past}
        shape = len(slots), capacity
        past = self._buffers.filled("gather", inputs, "gathered", "past", shape)
        return replace(state, past=past)


def _unseen(bias: Floats, count: int) -> Integers:
    """The first columns of each slot that none of its rows sees.

    So where a row's keys and values lie, and in which order sums over them are rounded, depends on
    its own sentence alone.

    Args:
        bias: [slots, width, capacity]
        count: Columns wanted of each slot; they may lie beyond the capacity.

    Returns:
        [slots, count], rising.
    """
    slots, _, capacity = bias.shape
    columns = np.tile(np.arange(capacity + count), (slots, 1))
    columns[:, :capacity][bias.max(axis=1) == 0] = capacity + count  # behind all others
    columns.sort(axis=1)
    return columns[:, :count]


def _by_row(buffers: Sequence[Rows], width: int) -> Iterator[Floats]:
    return (buffer.numpy().repeat(width, axis=0) for buffer in buffers)


def _runs(values: Integers) -> tuple[Integers, Integers]:
    """Neighbouring equal values: the value and the length of each run."""
    starts = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))
    return values[starts], np.diff(np.append(starts, len(values)))
