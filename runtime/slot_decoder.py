"""A decoder whose cache lies in place: slots of sentences, each at its own length.

The graphs write new keys and values into buffers that stay where they are, and read the columns
that a bias lets them see. What a search does to the cache is thus done to the bias, a small array
on the host: beams that change places, a sentence that ends, another that begins in its slot. Only
when sentences leave altogether, or a buffer becomes too short, does a buffer move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnxruntime import OrtValue

from transferry.runtime.bundle import Bundle, Variant
from transferry.runtime.graph_runner import BoundCall, GraphRunner, describe
from transferry.runtime.session import SessionOptions

# Sentences that the encoder reads at once: of similar length, so that little is padding, and few
# enough for the hidden states of all of them to stay in the processor's cache.
CHUNK = 16
# Steps by which a cache grows. Every step reads all of it, and growing copies it.
GROWTH = 16

Floats = NDArray[np.floating[Any]]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class SlotState:
    """What a step reads besides the tokens. Buffers are shared with the states before and after.

    Rows are grouped by slot, `width` neighbouring rows each.

    Attributes:
        cross: Keys and values of the sources, [slots, heads, source, d_head] each, on the device.
        past: Keys and values of earlier positions, [slots, heads, capacity, d_head] each, there.
        source_bias: [slots, 1, 1, source]: 0 at a token of the source, minus infinity elsewhere.
        bias: [slots, width, capacity]: 0 at the columns that a row descends from, likewise.
        positions: Of the next tokens [slots, width].
        write: The column of a slot that is written next [slots].
        prompt: Columns of a slot that hold a prompt, its padding included [slots].
        call: A step of these shapes, bound to these buffers.
    """

    cross: Sequence[OrtValue]
    past: Sequence[OrtValue]
    source_bias: Floats
    bias: Floats
    positions: Integers
    write: Integers
    prompt: Integers
    call: BoundCall | None = None


class SlotDecoder:
    """Runs a fused variant of a bundle; may be used by several threads at once."""

    def __init__(self, bundle: Bundle, variant: Variant, options: SessionOptions) -> None:
        """Opens the graphs.

        Raises:
            ProviderError: The provider asked for cannot run here.
            InputError: A graph cannot be opened.
        """
        self.variant, self.options = variant, options
        self._runners = {
            name: GraphRunner(bundle, graph, options) for name, graph in variant.graphs.items()
        }
        self._decoder = self._runners["decoder"]
        self.has_encoder = "encoder" in variant.graphs
        graph = variant.graphs["decoder"]
        self.vocabulary_size = int(graph.tensor("logits").shape[-1])
        past = graph.tensor("past")
        self._type = np.dtype(past.type)
        self._heads, self._d_head = int(past.shape[1]), int(past.shape[3])
        self._tensors = len(graph.names("past"))

    def describe(self) -> dict[str, Any]:
        """What decides the numbers: the settings, and where the nodes of the graphs really ran."""
        return describe(self.variant, self.options, self._runners.values())

    def start(self, source: Integers, mask: NDArray[np.bool_]) -> SlotState:
        """Reads the sources; see `Decoder.start`."""
        slots, length = source.shape
        empty = SlotState(
            self._buffers(slots, length) if self.has_encoder else [],
            self._buffers(slots, GROWTH),
            np.full((slots, 1, 1, length), -np.inf, self._type),
            np.full((slots, 1, GROWTH), -np.inf, self._type),
            np.zeros((slots, 1), np.int64),
            np.zeros(slots, np.int64),
            np.zeros(slots, np.int64),
        )
        return self.refill(empty, np.arange(slots), source, mask)

    def refill(
        self, state: SlotState, sentences: Integers, source: Integers, mask: NDArray[np.bool_]
    ) -> SlotState:
        """Puts sources into slots; see `RefillingDecoder.refill`."""
        length = source.shape[1]
        bias, positions = state.bias.copy(), state.positions.copy()
        write, prompt = state.write.copy(), state.prompt.copy()
        bias[sentences], positions[sentences] = -np.inf, 0
        write[sentences] = prompt[sentences] = 0
        if self.has_encoder:
            state = self._with_source_room(state, length)
            source_bias = state.source_bias.copy()
            source_bias[sentences] = -np.inf
            source_bias[sentences, 0, 0, :length] = np.where(mask, 0, -np.inf)
            self._encode(state.cross, sentences, source, mask)
            state = replace(state, source_bias=source_bias, call=None)
        elif length:
            state = self._with_room(replace(state, write=write), length, sentences)
            bias = _wider(bias, state.bias.shape[-1])
            self._read_prompts(state.past, sentences, source, mask)
            bias[sentences, :, :length] = np.where(mask, 0, -np.inf)[:, None]
            positions[sentences] = mask.sum(axis=1, keepdims=True)
            write[sentences] = prompt[sentences] = length
        return replace(state, bias=bias, positions=positions, write=write, prompt=prompt)

    def step(self, tokens: Integers, state: SlotState) -> tuple[Floats, SlotState]:
        """Reads target tokens; see `Decoder.step`."""
        slots, width = state.positions.shape
        new = tokens.shape[1]
        state = self._with_room(state, width * new)
        # Row `row` of a slot writes its `new` tokens side by side, after those of the rows before.
        columns = state.write[:, None] + np.arange(width * new)
        own = columns.reshape(slots, width, new)
        bias = np.repeat(state.bias, new, axis=1).reshape(slots, width, new, -1)
        slot, row = np.arange(slots)[:, None], np.arange(width)
        for token in range(new):
            bias[slot, row, token:, own[:, :, token]] = 0
        call = state.call
        if call is None or call.shape != (slots, width * new):
            call = self._bind(state, width * new)
        positions = state.positions[:, :, None] + np.arange(new)
        call.run(
            target=tokens.reshape(slots, -1),
            positions=positions.reshape(slots, -1),
            write=state.write,
            bias=bias.reshape(slots, 1, width * new, -1),
        )
        logits = call.host["logits"].reshape(slots * width, new, -1)
        return logits, replace(
            state,
            bias=bias[:, :, -1],
            positions=state.positions + new,
            write=state.write + width * new,
            call=call,
        )

    def select(self, state: SlotState, rows: Integers) -> SlotState:
        """Takes rows of the state; see `Decoder.select`.

        Rows that stay in their slots, in whatever order and number, move nothing.
        """
        slots, width = state.positions.shape
        of_row = rows // width
        chosen, counts = _runs(of_row)
        if len(set(counts)) != 1 or len(np.unique(chosen)) != len(chosen):
            # No common width: each row gets a slot of its own.
            chosen, counts = of_row, np.ones(len(rows), np.int64)
        shape = (len(chosen), int(counts[0]))
        bias = state.bias.reshape(slots * width, -1)[rows].reshape(*shape, -1)
        positions = state.positions.reshape(-1)[rows].reshape(shape)
        if np.array_equal(chosen, np.arange(slots)):
            return replace(state, bias=bias, positions=positions)
        return SlotState(
            self._take(state.cross, chosen),
            self._take(state.past, chosen),
            state.source_bias[chosen],
            bias,
            positions,
            state.write[chosen],
            state.prompt[chosen],
        )

    def tensors(self, state: SlotState) -> dict[str, Floats]:
        """Copies cross and past to the host as the portable graphs have them, a cache a row."""
        slots, width = state.positions.shape
        names = [*self._names("cross"), *self._names("past")]
        values = [value.numpy() for value in (*state.cross, *state.past)]
        cross = [value.repeat(width, axis=0) for value in values[: len(state.cross)]]
        seen = state.bias == 0
        for slot in range(slots):
            seen[slot, :, : state.prompt[slot]] = True
        rows = seen.reshape(slots * width, -1)
        longest = int(rows.sum(axis=1).max(initial=0))
        # The columns seen come first, in their order.
        order = np.argsort(~rows, axis=1, kind="stable")[:, None, :longest, None]
        past = [
            np.take_along_axis(value.repeat(width, axis=0), order, axis=2)
            for value in values[len(state.cross) :]
        ]
        return dict(zip(names, cross + past, strict=True))

    def _names(self, role: Any) -> list[str]:
        return self._decoder.graph.names(role)

    def _buffers(self, slots: int, length: int) -> list[OrtValue]:
        shape = (slots, self._heads, length, self._d_head)
        return [self._decoder.value(np.zeros(shape, self._type)) for _ in range(self._tensors)]

    def _bind(self, state: SlotState, new: int) -> BoundCall:
        slots = len(state.write)
        return self._decoder.bind(
            (slots, new),
            fixed={
                "past": state.past,
                **({"cross": state.cross} if self.has_encoder else {}),
                **(
                    {"source_bias": [self._decoder.value(state.source_bias)]}
                    if self.has_encoder
                    else {}
                ),
            },
            changing={
                "target": np.zeros((slots, new), np.int64),
                "positions": np.zeros((slots, new), np.int64),
                "write": np.zeros(slots, np.int64),
                "bias": np.zeros((slots, 1, new, state.bias.shape[-1]), self._type),
            },
            in_place={"present": state.past},
            host={"logits": np.empty((slots * new, self.vocabulary_size), self._type)},
        )

    def _encode(
        self,
        cross: Sequence[OrtValue],
        slots: Integers,
        source: Integers,
        mask: NDArray[np.bool_],
    ) -> None:
        encoder = self._runners["encoder"]
        for first in range(0, len(slots), CHUNK):
            part = slice(first, first + CHUNK)
            length = int(mask[part].sum(axis=1).max())
            inputs = {
                "source": [encoder.value(source[part, :length])],
                "source_mask": [encoder.value(mask[part, :length])],
            }
            self._place(cross, slots[part], encoder.run(inputs, "cross"))

    def _read_prompts(
        self,
        past: Sequence[OrtValue],
        slots: Integers,
        source: Integers,
        mask: NDArray[np.bool_],
    ) -> None:
        rows, length = source.shape
        seen = np.tril(np.ones((length, length), np.bool_)) & mask[:, None, :]
        # Padding sees its own column: a softmax over nothing would be NaN.
        seen |= np.eye(length, dtype=np.bool_)
        fresh = self._buffers(rows, length)
        inputs = {
            "target": [self._decoder.value(source)],
            "positions": [self._decoder.value(np.tile(np.arange(length), (rows, 1)))],
            "write": [self._decoder.value(np.zeros(rows, np.int64))],
            "bias": [self._decoder.value(np.where(seen, 0, -np.inf).astype(self._type)[:, None])],
            "past": fresh,
        }
        self._place(past, slots, self._decoder.run(inputs, "present"))

    def _place(self, state: Sequence[OrtValue], slots: Integers, fresh: Sequence[OrtValue]) -> None:
        """Writes fresh rows into buffers, where they lie."""
        place = self._runners["place"]
        inputs = {"rows": [place.value(slots)], "fresh": fresh, "state": state}
        place.run(inputs, in_place={"placed": state})

    def _take(self, buffers: Sequence[OrtValue], slots: Integers) -> Sequence[OrtValue]:
        if not buffers:
            return []
        select = self._runners["select"]
        return select.run({"rows": [select.value(slots)], "state": buffers}, "selected")

    def _longer(self, buffers: Sequence[OrtValue], length: int) -> Sequence[OrtValue]:
        slots = buffers[0].shape()[0]
        longer = self._buffers(slots, length)
        self._place(longer, np.arange(slots), buffers)
        return longer

    def _with_room(self, state: SlotState, new: int, slots: Integers | None = None) -> SlotState:
        """Returns a state whose cache has room for new columns in some slots, or in all."""
        capacity = state.bias.shape[-1]
        needed = int((state.write if slots is None else state.write[slots]).max()) + new
        if needed <= capacity:
            return state
        growth = GROWTH * state.positions.shape[1]
        capacity = -(-needed // growth) * growth
        return replace(
            state,
            past=self._longer(state.past, capacity),
            bias=_wider(state.bias, capacity),
            call=None,
        )

    def _with_source_room(self, state: SlotState, length: int) -> SlotState:
        if length <= state.source_bias.shape[-1]:
            return state
        return replace(
            state,
            cross=self._longer(state.cross, length),
            source_bias=_wider(state.source_bias, length),
            call=None,
        )


def _wider(bias: Floats, length: int) -> Floats:
    """A bias with more columns, none of which is seen."""
    missing = length - bias.shape[-1]
    widths = [(0, 0)] * (bias.ndim - 1) + [(0, missing)]
    return np.pad(bias, widths, constant_values=-np.inf)


def _runs(values: Integers) -> tuple[Integers, Integers]:
    """Neighbouring equal values: the value and the length of each run."""
    starts = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))
    return values[starts], np.diff(np.append(starts, len(values)))
