"""Decoders of the fused variants: each sentence has a slot that its beams share.

With a KV cache, the graphs write new keys and values into fixed buffers, and attend to the columns
that a bias admits. A search's changes to the cache (beams change places, or one is taken twice) are
thus made to the bias, a small array on the host. A buffer moves only if sentences leave or it is
too short. A recurrent decoder has a state for each beam instead, and a search's changes are made to
the array of the states that the beams continue.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.specs import Role, Variant
from transferry.runtime.decoding.batching import UNIT, blocks, padded
from transferry.runtime.decoding.decoder import StepOutput
from transferry.runtime.decoding.logits import Bools, Floats, Integers
from transferry.runtime.decoding.shared_prompts import shared_prompts
from transferry.runtime.ort.cache_buffers import (
    BoundStep,
    BoundSteps,
    CacheBuffers,
    FusedState,
    closes_up,
    default_batches,
    grouped,
    unused_columns,
)
from transferry.runtime.ort.encoder import PASS_TOKENS
from transferry.runtime.ort.graph_runner import (
    Bindable,
    BoundCall,
    BufferView,
    GraphRunner,
    Opened,
    describe,
    open_graphs,
)
from transferry.runtime.ort.lm_head import LMHead
from transferry.runtime.ort.session import SessionOptions

# Columns that a cache may have beyond the columns in use: every step reads all, but shortening the
# cache copies it.
SPARE_COLUMNS = 8 * UNIT
# Further steps that a new cache has room for where a step reads only its own columns, so that room
# costs nothing but memory.
AHEAD = 8
# The same for all rows of a step together: with few rows, reading unused columns costs less than
# making the cache longer and binding it again.
AHEAD_CELLS = 64


@dataclass(frozen=True)
class RecurrentState:
    """Inputs of a step of a recurrent decoder besides the tokens.

    A step reads one set of buffers and writes the other, so a state stays valid until the one after
    it, or rows that were selected from that, step. Rows are grouped by slot, as in `FusedState`.

    Attributes:
        cross: As in `FusedState`.
        source_bias: Likewise.
        past: States of the decoder's layers on the device `[past, d_model]`.
        spare: Buffers that the next step writes; none before the first.
        rows: The row of past that each row continues `[slots, width]`.
        calls: Steps bound to these buffers, by the buffers of past and of the hidden states.
    """

    cross: Sequence[BufferView]
    source_bias: Floats
    past: Sequence[BufferView]
    spare: Sequence[BufferView]
    rows: Integers
    calls: dict[tuple[int, int], BoundCall] = field(default_factory=dict)


class SlotDecoder:
    """Common part of the decoders of fused variants; several threads may use one at once."""

    shares_cache = True

    def __init__(
        self,
        bundle: Bundle,
        variant: Variant,
        options: SessionOptions,
        opened: Opened = GraphRunner,
    ) -> None:
        """Opens the graphs, each by `opened`; raises as `open_model`."""
        self.variant, self.options = variant, options
        self._runners = open_graphs(bundle, variant.graphs, options, opened)
        self._decoder = self._runners["decoder"]
        self.batches = default_batches(self._decoder.graph, options.device)
        self._buffers = CacheBuffers(self._runners, int(bundle.manifest.model["max_positions"]))
        self.has_encoder = "encoder" in variant.graphs
        self._int8 = variant.cache is not None and variant.cache.type == "int8"
        self._windows = bool(self._decoder.graph.names("columns"))
        self.lm_head = LMHead(bundle, variant, self._runners)
        self.vocabulary_size = self.lm_head.vocabulary_size
        self.shares_prompts = not self.has_encoder and options.rows_are_independent

    def describe(self) -> dict[str, Any]:
        """Returns everything that determines the numbers; see `graph_runner.describe`."""
        return describe(self.variant, self.options, self._runners.values())

    def _encoded(
        self, source: Integers, mask: Bools, cross: Sequence[BufferView] = ()
    ) -> Sequence[BufferView]:
        """Cross of the sources, in given buffers; empty without an encoder."""
        tokens = PASS_TOKENS[self.options.device]
        return self._buffers.encode(source, mask, tokens, cross) if self.has_encoder else []

    def _sources(self, source_bias: Floats) -> Mapping[Role, NDArray[Any]]:
        """Inputs of a step that depend on the sources alone."""
        if not self.has_encoder:
            return {}
        found: dict[Role, NDArray[Any]] = {"source_bias": source_bias}
        if self._int8:
            found["source_length"] = (source_bias[:, 0, 0] == 0).sum(axis=1)
        return found

    def _bound(
        self,
        state: FusedState | RecurrentState,
        hidden: BufferView,
        present: Sequence[BufferView],
        changing: dict[str, NDArray[Any]],
        sources: Mapping[Role, NDArray[Any]],
        *,
        single: bool,
    ) -> BoundCall:
        """Binds a step to the cross and past of a state.

        Args:
            state: The state.
            hidden: Buffer for the hidden states.
            present: Buffers for the present.
            changing: The inputs of every step.
            sources: From `_sources`.
            single: Whether the step is one token a slot without a gap before it.
        """
        value = self._decoder.value
        fixed: dict[Role, Sequence[Bindable]] = {"past": state.past}
        in_place: dict[Role, Sequence[Bindable]] = {"present": present, "hidden": [hidden]}
        if self.has_encoder:
            fixed |= {"cross": state.cross}
            fixed |= {role: [value(array)] for role, array in sources.items()}
        if self._int8:
            fixed |= {"single": [value(np.array(single))]}
            in_place |= {"kept": state.cross} if self.has_encoder else {}
        return self._decoder.bind(fixed=fixed, changing=changing, in_place=in_place)

    def _named(
        self, cross: Sequence[BufferView], source_bias: Floats, width: int, past: Iterable[Floats]
    ) -> dict[str, Floats]:
        """Cross of each row, as long as the longest source, and past, by their names."""
        source = (source_bias == 0).sum(axis=-1).max()
        sources = (each[:, :, :source] for each in _by_row(cross, width))
        graph = self._decoder.graph
        names = [*graph.names("cross"), *graph.names("past")]
        return dict(zip(names, (*sources, *past), strict=True))


class FusedDecoder(SlotDecoder):
    """Runs a fused variant with a KV cache."""

    def start(self, source: Integers, mask: Bools) -> FusedState:
        """Encodes the sources or reads the prompts; see `Decoder.start`."""
        slots, length = source.shape
        lease = self._buffers.lease(slots, length) if self.has_encoder else None
        state = FusedState(
            cross=self._encoded(source, mask, lease.cross if lease else ()),
            past=[],
            source_bias=_source_bias(mask),
            capacity=0,
            bias=None,
            positions=np.zeros((slots, 1), np.int64),
            held=None,
            prompt=np.zeros(slots, np.int64),
            padding=np.zeros(slots, np.int64),
            calls={},
            lease=lease,
        )
        if self.has_encoder or not length:
            return state
        return self._read_prompts(state, source, mask)

    def step(
        self,
        tokens: Integers,
        state: FusedState,
        *,
        top: int | None = None,
        normalise: bool = False,
    ) -> tuple[StepOutput, FusedState]:
        """Reads target tokens and scores those that may follow; see `Decoder.step`."""
        if state.bias is None and tokens.shape[1] == 1:
            after = self._step_once(tokens, state)
        else:
            after = self._step(tokens, state)
        return self.lm_head.scores(tokens.shape, top=top, normalise=normalise), after

    def _step_once(self, tokens: Integers, state: FusedState) -> FusedState:
        """Runs a step of one token a slot without a gap before it; returns the state after it."""
        positions = state.positions
        state = self._with_room(state, positions)
        step = self._bound_step(state, 1, single=True)
        after = state._replace(positions=positions + 1)
        changed = {"target": tokens, "positions": positions}
        if not self._int8:  # whose kernel reads the positions alone
            bias = step.call.changing["bias"]
            if step.reached is positions:
                bias[np.arange(len(positions)), 0, 0, positions[:, 0]] = 0
            else:
                bias[...] = after.seen()[0][:, None]
            cells = self._buffers.cells(positions, step.call.changing["cells"])
            changed |= {"cells": cells, "bias": bias}
            step.reached = after.positions
        step.call.run(**changed)
        return after

    def _step(self, tokens: Integers, state: FusedState) -> FusedState:
        """Runs any step; returns the state after it."""
        slots, width = state.positions.shape
        new, positions = tokens.shape[1], state.positions
        if new > 1:
            positions = (positions[:, :, None] + np.arange(new)).reshape(slots, -1)
        # The unused columns of a cache without gaps are the positions.
        columns = positions
        if state.bias is not None:
            columns = unused_columns(state.bias, width * new)
        state = self._with_room(state, columns)
        # Row `row` of a slot writes its `new` tokens side by side, after those of the rows before.
        own = columns.reshape(slots, width, new)
        seen, held = state.seen()
        # A copy, whose last token's row the next state views.
        bias = seen[:, :, None].repeat(new, axis=2)
        slot, row = np.arange(slots)[:, None], np.arange(width)
        for token in range(new):
            bias[slot, row, token:, own[:, :, token]] = 0
        step = self._bound_step(state, width * new, single=False)
        if state.bias is not None or self._windows:
            held[slot, columns] = positions  # like the buffers, where no row of this state attends
        step.call.run(
            target=tokens.reshape(slots, -1),
            positions=positions,
            cells=self._buffers.cells(columns, step.call.changing["cells"]),
            bias=bias.reshape(slots, 1, width * new, -1),
            **({"columns": held} if self._windows else {}),
        )
        after = state._replace(positions=state.positions + new)
        return after if state.bias is None else after._replace(bias=bias[:, :, -1], held=held)

    def _bound_step(self, state: FusedState, new: int, *, single: bool) -> BoundStep:
        """Returns a step of `new` tokens a slot, bound to the buffers of a state."""
        hidden = self.lm_head.hidden(len(state.positions) * new)
        # Another thread has other memory, and this one's may have grown.
        key = new, single, id(hidden)
        step = state.calls.get(key)
        if step is None:
            step = state.calls[key] = self._bind(state, new, single, hidden)
        elif step.source_bias is not state.source_bias:
            for role, array in self._sources(state.source_bias).items():
                step.sources[role][...] = array
            step.source_bias, step.reached = state.source_bias, None
        return step

    def select(self, state: FusedState, rows: Integers) -> FusedState:
        """Takes rows of the state; see `Decoder.select`.

        Rows that stay in their slots, in any order and number, move nothing.
        """
        slots, width = state.positions.shape
        chosen, shape = grouped(rows, slots, width)
        bias = held = None
        if state.bias is not None or shape[1] > 1:
            bias, held = state.seen()
            bias = bias.reshape(slots * width, -1)[rows].reshape(*shape, -1)
        positions = state.positions.reshape(-1)[rows].reshape(shape)
        taken = state._replace(bias=bias, positions=positions, held=held)
        if chosen is None:
            return taken
        taken = taken._replace(
            source_bias=state.source_bias[chosen],
            held=None if held is None else held[chosen],
            prompt=state.prompt[chosen],
            padding=state.padding[chosen],
        )
        if state.past and closes_up(chosen):
            # Slots from the end take the places of those that leave.
            moved = self._buffers.move([*state.cross, *state.past], chosen)
            split = len(state.cross)
            return taken._replace(cross=moved[:split], past=moved[split:])
        if self.has_encoder:
            taken = taken._replace(cross=self._buffers.select(state.cross, chosen), lease=None)
        return self._with_columns(taken, chosen, state.capacity)

    def tensors(self, state: FusedState) -> dict[str, Floats]:
        """Copies cross and past to the host, one cache a row, as the portable graphs have them."""
        slots, width = state.positions.shape
        bias, held = state.seen()
        seen = (bias == 0).reshape(slots * width, -1)
        prompt, padding = (each.repeat(width)[:, None] for each in (state.prompt, state.padding))
        # The columns of the history come first, by position; after the prompt its padding.
        column = np.arange((seen.sum(axis=1, keepdims=True) + padding).max())
        column = np.where(column < prompt, column, np.maximum(prompt - 1, column - padding))
        position = np.where(seen, held.repeat(width, axis=0), seen.shape[1])
        order = np.take_along_axis(np.argsort(position, axis=1, kind="stable"), column, axis=1)
        order = order[:, None, :, None]
        past, cross = state.past or self._buffers.zeros("past", slots, 0), state.cross
        if self._int8:
            cross, past = self._buffers.dequantised(cross, past)
        columns = (np.take_along_axis(each, order, axis=2) for each in _by_row(past, width))
        return self._named(cross, state.source_bias, width, columns)

    def _bind(self, state: FusedState, new: int, single: bool, hidden: BufferView) -> BoundStep:
        """Binds a step of `new` tokens a slot to the buffers of a state."""
        slots = len(state.prompt)
        changing: dict[str, NDArray[Any]] = {
            "target": np.zeros((slots, new), np.int64),
            "positions": np.zeros((slots, new), np.int64),
            "cells": self._buffers.cells(np.zeros((slots, new), np.int64)),
            "bias": np.zeros((slots, 1, new, state.capacity), np.float32),
            **({"columns": state.seen()[1].copy()} if self._windows else {}),
        }
        found = self._sources(state.source_bias)
        sources = {role: array.copy() for role, array in found.items()}
        call = self._bound(state, hidden, state.past, changing, sources, single=single)
        return BoundStep(call, sources, state.source_bias)

    def _read_prompts(self, state: FusedState, source: Integers, mask: Bools) -> FusedState:
        """Returns a state whose cache holds the prompts."""
        rows, length = source.shape
        lengths = mask.sum(axis=1)
        capacity, begin = padded(length), 0
        shared = shared_prompts(source, mask) if self.shares_prompts else None
        if shared is None:
            past = self._buffers.zeros("past", rows, capacity)
        else:
            first, begin = shared.first, shared.length
            past = self._buffers.zeros("past", len(first), begin)
            self._read(past, source[first, :begin], mask[first, :begin])
            past = self._buffers.gather(past, shared.of_row, begin, capacity)
        if begin < length:
            self._read(past, source, mask, begin)
        return state._replace(
            past=past,
            capacity=capacity,
            positions=lengths[:, None],
            prompt=lengths,
            padding=length - lengths,
        )

    def _read(
        self, past: Sequence[BufferView], source: Integers, mask: Bools, begin: int = 0
    ) -> None:
        """Reads prompts into buffers that hold the columns before `begin`."""
        length = source.shape[1]
        capacity, decoder = padded(length), self._decoder
        # Padding attends to its own column: a softmax over no column would be NaN.
        own = np.eye(length, dtype=np.bool_)[begin:]
        causal = np.tril(np.ones_like(own), begin)
        for rows, _ in blocks(mask[:, begin:], PASS_TOKENS[self.options.device]):
            count = rows.stop - rows.start
            views = [each.view(rows.start, count) for each in past]
            columns = np.tile(np.arange(length), (count, 1))
            seen = np.zeros((count, length - begin, capacity), np.bool_)
            seen[:, :, :length] = causal & mask[rows, None, :] | own
            new, held = columns[:, begin:], np.pad(columns, ((0, 0), (0, capacity - length)))
            inputs = {
                "target": [decoder.value(source[rows, begin:])],
                "positions": [decoder.value(new)],
                "cells": [decoder.value(self._buffers.cells(new))],
                "bias": [decoder.value(np.where(seen, 0, -np.inf).astype(np.float32)[:, None])],
                "past": views,
                **({"single": [decoder.value(np.array(False))]} if self._int8 else {}),
                **({"columns": [decoder.value(held)]} if self._windows else {}),
            }
            decoder.run(inputs, in_place={"present": views})

    def _with_room(self, state: FusedState, columns: Integers) -> FusedState:
        """Returns a state whose cache has the columns of the next step, and few unused ones."""
        room, needed = state.capacity, int(columns.max()) + 1
        if needed <= room <= needed + SPARE_COLUMNS:
            return state
        if state.bias is not None:
            seen = (state.bias == 0).any(axis=(0, 1)).nonzero()[0]
            needed = max(needed, int(seen.max(initial=-1)) + 1)
        if needed <= room <= needed + SPARE_COLUMNS:
            return state
        ahead = AHEAD if self._int8 and columns.shape[1] == 1 else columns.shape[1]
        # With more, the cache would be too long at once.
        ahead = max(ahead, min(AHEAD_CELLS // columns.size, SPARE_COLUMNS - UNIT))
        return self._with_columns(state, np.arange(len(columns)), padded(needed + ahead))

    def _with_columns(self, state: FusedState, slots: Integers, capacity: int) -> FusedState:
        """Copies slots of the cache into one of another capacity.

        Args:
            state: A state already reduced to `slots`, except its past.
            slots: Slots of the past to take `[slots]`.
            capacity: Columns of the new cache, enough for all that rows attend to.
        """
        room, bias, held, lease = state.capacity, state.bias, state.held, state.lease
        past, calls = list[BufferView](), BoundSteps()
        if not room and lease and lease.take(capacity, SPARE_COLUMNS):
            past, capacity, calls = lease.past, lease.capacity, lease.calls
        if bias is not None and held is not None:
            kept, more = min(room, capacity), ((0, 0), (0, max(0, capacity - room)))
            bias = np.pad(bias[..., :kept], ((0, 0), *more), constant_values=-np.inf)
            held = np.pad(held[:, :kept], more)
        if room:
            past = self._buffers.gather(state.past, slots, room, capacity)
        past = past or self._buffers.zeros("past", len(slots), capacity)
        if lease and lease.shape[0] == len(slots):
            lease.past, lease.capacity, lease.calls = past, capacity, calls
        return state._replace(past=past, capacity=capacity, bias=bias, held=held, calls=calls)


class RecurrentDecoder(SlotDecoder):
    """Runs a fused variant with a state for each row instead of a cache of keys and values."""

    def start(self, source: Integers, mask: Bools) -> RecurrentState:
        """Encodes the sources; see `Decoder.start`."""
        past = self._buffers.zeros("past", len(source), 0)
        rows = np.arange(len(source))[:, None]
        return RecurrentState(self._encoded(source, mask), _source_bias(mask), past, [], rows)

    def step(
        self,
        tokens: Integers,
        state: RecurrentState,
        *,
        top: int | None = None,
        normalise: bool = False,
    ) -> tuple[StepOutput, RecurrentState]:
        """Reads target tokens and scores those that may follow; see `Decoder.step`.

        Several tokens of a row are read one after the other.
        """
        if tokens.shape[1] > 1:
            logits = []
            for token in tokens.T:
                # Into new buffers: the given state stays as it is.
                output, state = self.step(token[:, None], replace(state, spare=[]))
                logits.append(output.all_logits.copy())  # the next step uses its buffer
            return StepOutput(np.concatenate(logits, axis=1)), state
        slots, width = state.rows.shape
        if not state.spare or state.spare[0].count < tokens.size:
            state = replace(state, spare=self._buffers.zeros("past", tokens.size, 0), calls={})
        hidden = self.lm_head.hidden(tokens.size)
        # Another thread has other memory, and this one's may have grown.
        key = id(state.past[0].buffer), id(hidden.buffer)
        if key not in state.calls:
            present = [buffer.view(0, tokens.size) for buffer in state.spare]
            changing = {"target": tokens.reshape(slots, width).copy(), "rows": state.rows.copy()}
            sources, single = self._sources(state.source_bias), width == 1
            state.calls[key] = self._bound(state, hidden, present, changing, sources, single=single)
        state.calls[key].run(target=tokens.reshape(slots, width), rows=state.rows)
        output = self.lm_head.scores(tokens.shape, top=top, normalise=normalise)
        rows = np.arange(tokens.size).reshape(slots, width)
        return output, replace(state, past=state.spare, spare=state.past, rows=rows)

    def select(self, state: RecurrentState, rows: Integers) -> RecurrentState:
        """Takes rows of the state; see `Decoder.select`. No row moves."""
        slots, width = state.rows.shape
        chosen, shape = grouped(rows, slots, width)
        taken = state.rows.reshape(-1)[rows].reshape(shape)
        if chosen is None:
            calls = state.calls if shape == state.rows.shape else {}
            return replace(state, rows=taken, calls=calls)
        move = self._buffers.move if closes_up(chosen) else self._buffers.select
        cross, source_bias = move(state.cross, chosen), state.source_bias[chosen]
        return replace(state, cross=cross, source_bias=source_bias, rows=taken, calls={})

    def tensors(self, state: RecurrentState) -> dict[str, Floats]:
        """Copies cross and past to the host, one state a row, as the portable graphs have them."""
        cross = self._buffers.dequantised(state.cross, [])[0] if self._int8 else state.cross
        rows, width = state.rows.reshape(-1), state.rows.shape[1]
        cells = (each.numpy()[rows, None, None] for each in state.past)
        return self._named(cross, state.source_bias, width, cells)


def _source_bias(mask: Bools) -> Floats:
    """0 at a token, else minus infinity, with padded columns `[slots, 1, 1, source]`."""
    slots, length = mask.shape
    bias = np.full((slots, 1, 1, padded(length)), -np.inf, np.float32)
    bias[:, 0, 0, :length][mask] = 0
    return bias


def _by_row(buffers: Sequence[BufferView], width: int) -> Iterator[Floats]:
    return (buffer.numpy().repeat(width, axis=0) for buffer in buffers)
