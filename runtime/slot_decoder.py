"""A decoder whose cache lies in place: slots of sentences, each at its own length.

The graphs write new keys and values into buffers that stay where they are, and read the columns
that a bias lets them see. What a search does to the cache is thus done to the bias, a small array
on the host: beams that change places, a sentence that ends, another that begins in its slot. Only
when sentences leave altogether, or a buffer becomes too short, does a buffer move.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnxruntime import OrtValue

from transferry.runtime.batching import BatchOptions
from transferry.runtime.bundle import Bundle, Role, Variant
from transferry.runtime.decoder import Forbid
from transferry.runtime.graph_runner import BoundCall, GraphRunner, describe
from transferry.runtime.logits import SEGMENT, Normaliser, Peaks, log_sum_exp, normalise
from transferry.runtime.screen import Screen
from transferry.runtime.session import Provider, SessionOptions

# Sentences that the encoder reads at once: of similar length, so that little is padding, and few
# enough for the hidden states of all of them to stay in the processor's cache.
CHUNK = 32
# Steps that a cache may have room for beyond the next. Every step reads all of it, making it
# longer or shorter copies it.
GROWTH = 6
# How much is computed at once where nothing is said: rows that share the reading of the weights.
BATCHES: dict[Provider, BatchOptions] = {
    "cpu": BatchOptions(rows=256, tokens=1 << 15),
    "cuda": BatchOptions(rows=1024, tokens=1 << 17),
}
# Sources and caches have a multiple of so many columns: the product of one row with a matrix sums
# its last one to three terms in another order, so that else the padding would show.
UNIT = 4

# Sums of exponentials that float32 holds in full precision, their largest terms included.
SMALLEST_SUM, LARGEST_SUM = 1e-30, 1e38

Floats = NDArray[np.floating[Any]]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class _Heads:
    """What is made of the hidden states of some rows, bound to where the decoder writes these."""

    hidden: OrtValue
    head: BoundCall
    rough: BoundCall | None


@dataclass(frozen=True)
class SlotState:
    """What a step reads besides the tokens. Buffers are shared with the states before and after.

    Rows are grouped by slot, `width` neighbouring rows each.

    Attributes:
        cross: Keys and values of the sources, [slots, heads, d_head, source] and [slots, heads,
            source, d_head], on the device.
        past: Keys and values of earlier positions, [slots, heads, capacity, d_head] each, there.
        source_bias: [slots, 1, 1, source]: 0 at a token of the source, minus infinity elsewhere.
        bias: [slots, width, capacity]: 0 at the columns that a row descends from, likewise.
        positions: Of the next tokens [slots, width].
        write: The column of a slot that is written next [slots].
        prompt: Tokens of the prompt in a slot [slots].
        padding: How much shorter it is than the longest that was read with it [slots].
        heads: By the number of rows. Memory of which the system hands out page by page is dear, so
            it stays when the cache moves.
        calls: Steps bound to these buffers, by how many tokens of a slot they read.
    """

    cross: Sequence[OrtValue]
    past: Sequence[OrtValue]
    source_bias: Floats
    bias: Floats
    positions: Integers
    write: Integers
    prompt: Integers
    padding: Integers
    heads: dict[int, _Heads] = field(default_factory=dict)
    calls: dict[int, BoundCall] = field(default_factory=dict)


class SlotDecoder:
    """Runs a fused variant of a bundle; may be used by several threads at once."""

    def __init__(self, bundle: Bundle, variant: Variant, options: SessionOptions) -> None:
        """Opens the graphs.

        Raises:
            ProviderError: The provider asked for cannot run here.
            InputError: A graph cannot be opened.
        """
        self.variant, self.options = variant, options
        self.batches = BATCHES[options.provider]
        self._runners = {
            name: GraphRunner(bundle, graph, options) for name, graph in variant.graphs.items()
        }
        self._decoder = self._runners["decoder"]
        self.has_encoder = "encoder" in variant.graphs
        self._heads = int(variant.graphs["decoder"].tensor("past").shape[1])
        self.vocabulary_size = int(variant.graphs["head"].tensor("logits").shape[-1])
        self._screen = None
        if variant.screen:
            parts = {name: stored.read(bundle.folder) for name, stored in variant.screen.items()}
            self._screen = Screen(**parts)

    def describe(self) -> dict[str, Any]:
        """What decides the numbers: the settings, and where the nodes of the graphs really ran."""
        return describe(self.variant, self.options, self._runners.values())

    def start(self, source: Integers, mask: NDArray[np.bool_]) -> SlotState:
        """Reads the sources; see `Decoder.start`."""
        slots, length = source.shape
        source_bias = np.full((slots, 1, 1, _rounded(length, UNIT)), -np.inf, np.float32)
        source_bias[:, 0, 0, :length][mask] = 0
        state = SlotState(
            [],
            [],
            source_bias,
            np.full((slots, 1, 0), -np.inf, np.float32),
            np.zeros((slots, 1), np.int64),
            np.zeros(slots, np.int64),
            np.zeros(slots, np.int64),
            np.zeros(slots, np.int64),
        )
        if self.has_encoder:
            return replace(state, cross=self._encode(source, mask))
        return self._read_prompts(state, source, mask) if length else state

    def refill(
        self, state: SlotState, sentences: Integers, fresh: SlotState, chosen: Integers
    ) -> SlotState:
        """Puts new sentences into slots; see `RefillingDecoder.refill`."""
        columns = fresh.bias.shape[-1]
        bias, positions = state.bias.copy(), state.positions.copy()
        write, prompt, padding = state.write.copy(), state.prompt.copy(), state.padding.copy()
        bias[sentences], positions[sentences] = -np.inf, fresh.positions[chosen]
        write[sentences], prompt[sentences] = 0, fresh.prompt[chosen]
        padding[sentences] = fresh.padding[chosen]
        state = replace(
            state, bias=bias, positions=positions, write=write, prompt=prompt, padding=padding
        )
        if columns > bias.shape[-1]:
            new = columns - int(write.max())
            state = self._with_columns(state, np.arange(len(write)), new)
        if self.has_encoder:
            source_bias = state.source_bias.copy()
            source_bias[sentences] = -np.inf
            length = int((fresh.source_bias[chosen] == 0).sum(axis=-1).max())
            state = self._with_source(replace(state, source_bias=source_bias), length)
            state.source_bias[sentences, ..., :length] = fresh.source_bias[chosen, ..., :length]
            self._place(state.cross, sentences, fresh.cross, chosen)
        elif columns:
            self._place(state.past, sentences, fresh.past, chosen)
            state.bias[sentences, :, :columns] = fresh.bias[chosen]
            state.write[sentences] = fresh.write[chosen]
        return state

    def step(self, tokens: Integers, state: SlotState) -> tuple[Floats, SlotState]:
        """Reads target tokens; see `Decoder.step`."""
        heads, state = self._step(tokens, state)
        heads.head.run()
        return heads.head.host["logits"].reshape(*tokens.shape, -1), state

    def likeliest(
        self, tokens: Integers, state: SlotState, forbid: Forbid | None = None
    ) -> tuple[Integers, SlotState]:
        """Reads one token a row; see `GreedyDecoder.likeliest`."""
        if "best" in self._runners and forbid is None:
            heads, state = self._step(tokens, state)
            best = np.empty(tokens.size, np.int64)
            inputs = {"hidden": [heads.hidden]}
            self._runners["best"].run(inputs, host={"best": best})
            return best, state
        if self._screen is None:
            logits, state = self.step(tokens, state)
            scores = logits[:, 0]
            usable: NDArray[np.bool_] | bool = True
            if forbid is not None:  # which may hide a score that is not finite
                usable = np.isfinite(scores.max(axis=1))
                forbid(scores)
            best = scores.argmax(axis=1)
            usable &= np.isfinite(scores[np.arange(len(best)), best])
            return np.where(usable, best, -1), state
        heads, state = self._step(tokens, state)
        assert heads.rough is not None
        heads.rough.run()
        rough = heads.rough.host["rough"]
        if forbid is not None:
            forbid(rough)
        return self._screen.likeliest(heads.hidden.numpy(), rough), state

    def normalise(self, logits: Floats) -> Normaliser:
        """Normalises logits [rows, vocabulary]; see `NormalisingDecoder.normalise`."""
        runner = self._runners["sums"]
        if runner.on_device:
            return normalise(logits)
        sums = np.empty(len(logits), np.float32)
        segments = int(runner.graph.tensor("peaks").shape[-1])
        peaks = np.empty((len(logits), segments), np.float32)
        runner.run({"logits": [runner.value(logits)]}, host={"sums": sums, "peaks": peaks})
        # Exponentials of the logits as they are: where float32 could not hold them, the slow way.
        extreme = ~((sums > SMALLEST_SUM) & (sums < LARGEST_SUM))
        with np.errstate(divide="ignore", invalid="ignore"):
            result = np.log(sums, dtype=np.float64)
        if extreme.any():
            result[extreme] = log_sum_exp(logits[extreme])
        return Normaliser(result, Peaks(peaks, SEGMENT))

    def _step(self, tokens: Integers, state: SlotState) -> tuple[_Heads, SlotState]:
        slots, width = state.positions.shape
        new = tokens.shape[1]
        state = self._with_room(self._without_gaps(state), width * new)
        # Row `row` of a slot writes its `new` tokens side by side, after those of the rows before.
        columns = state.write[:, None] + np.arange(width * new)
        own = columns.reshape(slots, width, new)
        bias = np.repeat(state.bias, new, axis=1).reshape(slots, width, new, -1)
        slot, row = np.arange(slots)[:, None], np.arange(width)
        for token in range(new):
            bias[slot, row, token:, own[:, :, token]] = 0
        if tokens.size not in state.heads:
            state.heads[tokens.size] = self._bind_heads(tokens.size)
        heads = state.heads[tokens.size]
        if width * new not in state.calls:
            state.calls[width * new] = self._bind(state, width * new, heads.hidden)
        positions = state.positions[:, :, None] + np.arange(new)
        state.calls[width * new].run(
            target=tokens.reshape(slots, -1),
            positions=positions.reshape(slots, -1),
            write=state.write,
            bias=bias.reshape(slots, 1, width * new, -1),
            **({"source_bias": state.source_bias} if self.has_encoder else {}),
        )
        return heads, replace(
            state,
            bias=bias[:, :, -1],
            positions=state.positions + new,
            write=state.write + width * new,
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
        cross = state.cross
        if self.has_encoder:
            select = self._runners["select"]
            inputs = {"rows": [select.value(chosen)], "state": cross}
            cross = select.run(inputs, "selected")
        taken = SlotState(
            cross,
            state.past,
            state.source_bias[chosen],
            bias,
            positions,
            state.write[chosen],
            state.prompt[chosen],
            state.padding[chosen],
        )
        return self._with_columns(taken, chosen, shape[1])

    def tensors(self, state: SlotState) -> dict[str, Floats]:
        """Copies cross and past to the host as the portable graphs have them, a cache a row.

        The source is as long as the longest of the state.
        """
        slots, width = state.positions.shape
        seen = (state.bias == 0).reshape(slots * width, -1)
        prompt, padding = (each.repeat(width)[:, None] for each in (state.prompt, state.padding))
        # The columns seen come first, in their order; after the prompt whatever pads it.
        column = np.arange((seen.sum(axis=1, keepdims=True) + padding).max())
        column = np.where(column < prompt, column, np.maximum(prompt - 1, column - padding))
        order = np.take_along_axis(np.argsort(~seen, axis=1, kind="stable"), column, axis=1)
        order = order[:, None, :, None]
        buffers = state.past or self._buffers("past", slots, 0)
        past = (np.take_along_axis(each, order, axis=2) for each in _by_row(buffers, width))
        source = (state.source_bias == 0).sum(axis=-1).max()
        cross = (
            (each if number % 2 else each.swapaxes(2, 3))[:, :, :source]
            for number, each in enumerate(_by_row(state.cross, width))
        )
        names = [*self._names("cross"), *self._names("past")]
        return dict(zip(names, (*cross, *past), strict=True))

    def _names(self, role: Role) -> list[str]:
        return self._decoder.graph.names(role)

    def _buffers(self, role: Role, slots: int, length: int) -> list[OrtValue]:
        """Buffers of zeros, so that columns never written cannot be NaN."""
        sizes = {"batch": slots, "source": length, "capacity": length}
        return [
            self._decoder.zeros(role, [int(sizes.get(str(size), size)) for size in spec.shape])
            for spec in self._decoder.graph.inputs
            if spec.role == role
        ]

    def _bind(self, state: SlotState, new: int, hidden: OrtValue) -> BoundCall:
        """Binds a step of `new` tokens a slot to the buffers of a state."""
        slots = len(state.write)
        fixed: dict[Role, Sequence[OrtValue]] = {"past": state.past}
        changing: dict[str, NDArray[Any]] = {
            "target": np.zeros((slots, new), np.int64),
            "positions": np.zeros((slots, new), np.int64),
            "write": np.zeros(slots, np.int64),
            "bias": np.zeros((slots, 1, new, state.bias.shape[-1]), np.float32),
        }
        if self.has_encoder:
            fixed |= {"cross": state.cross}
            changing |= {"source_bias": np.zeros_like(state.source_bias)}
        in_place = {"present": state.past, "hidden": [hidden]}
        return self._decoder.bind(fixed=fixed, changing=changing, in_place=in_place)

    def _bind_heads(self, rows: int) -> _Heads:
        """Allocates the hidden states of some rows, and binds to them what reads them."""
        width = int(self._decoder.graph.tensor("hidden").shape[-1])
        hidden = self._decoder.zeros("hidden", (rows, width))
        bound = {
            name: self._runners[name].bind(
                fixed={"hidden": [hidden]},
                host={role: np.empty((rows, self.vocabulary_size), np.float32)},
            )
            for name, role in (("head", "logits"), ("rough", "rough"))
            if name in self._runners
        }
        return _Heads(hidden, bound["head"], bound.get("rough"))

    def _encode(self, source: Integers, mask: NDArray[np.bool_]) -> Sequence[OrtValue]:
        """Returns cross keys and values of sources, read a few at a time."""
        encoder = self._runners["encoder"]
        rows, longest = len(source), _rounded(source.shape[1], UNIT)
        cross = self._buffers("cross", rows, longest)
        for first in range(0, rows, CHUNK):
            part = slice(first, first + CHUNK)
            length = int(mask[part].sum(axis=1).max())
            inputs = {
                "source": [encoder.value(source[part, :length])],
                "source_mask": [encoder.value(mask[part, :length])],
            }
            encoded = encoder.run(inputs, "cross")
            slots = np.arange(rows)[part]
            self._place(cross, slots, encoded, slots - first)
        return cross

    def _read_prompts(
        self, state: SlotState, source: Integers, mask: NDArray[np.bool_]
    ) -> SlotState:
        """Returns a state whose cache holds prompts."""
        rows, length = source.shape
        lengths = mask.sum(axis=1)
        seen = np.tril(np.ones((length, length), np.bool_)) & mask[:, None, :]
        # Padding sees its own column: a softmax over nothing would be NaN.
        seen |= np.eye(length, dtype=np.bool_)
        reader = self._decoder
        inputs = {
            "target": [reader.value(source)],
            "positions": [reader.value(np.tile(np.arange(length), (rows, 1)))],
            "write": [reader.value(np.zeros(rows, np.int64))],
            "bias": [reader.value(np.where(seen, 0, -np.inf).astype(np.float32)[:, None])],
            "past": self._buffers("past", rows, length),
        }
        return replace(
            state,
            past=reader.run(inputs, "present"),
            bias=np.where(mask, 0, -np.inf).astype(np.float32)[:, None],
            positions=lengths[:, None],
            # Over its padding: a row's columns lie where they would if it had been read alone.
            write=lengths,
            prompt=lengths,
            padding=length - lengths,
        )

    def _place(
        self,
        state: Sequence[OrtValue],
        slots: Integers,
        fresh: Sequence[OrtValue],
        chosen: Integers,
    ) -> None:
        """Writes chosen rows of fresh buffers into slots of others, where they lie."""
        place = self._runners["place"]
        rows = {"rows": [place.value(slots)], "chosen": [place.value(chosen)]}
        place.run({**rows, "fresh": fresh, "state": state}, in_place={"placed": state})

    def _with_columns(self, state: SlotState, slots: Integers, new: int) -> SlotState:
        """Moves the cache of some slots into one that has room for so many more columns of each.

        Args:
            state: All but the cache is of `slots` already.
            slots: Which slots of the cache to take [slots].
            new: Columns of a slot that are written next.
        """
        capacity = _rounded(int(state.write.max()) + new, UNIT * state.positions.shape[1])
        bias = np.full((*state.positions.shape, capacity), -np.inf, np.float32)
        if not state.past:
            return replace(state, past=self._buffers("past", len(slots), capacity), bias=bias)
        old = state.bias.shape[-1]
        kept = min(old, capacity)
        bias[..., :kept] = state.bias[..., :kept]
        # What lies in columns that are not seen is of no consequence, as long as it is finite.
        columns = np.tile(np.minimum(np.arange(capacity), old - 1), (len(slots), 1))
        return replace(state, past=self._gather(state, slots, columns), bias=bias, calls={})

    def _without_gaps(self, state: SlotState) -> SlotState:
        """Moves the columns that are still seen to the front of their slot, every few steps.

        Of beams few columns stay in sight, however long they are. Sums are rounded as the columns
        lie, so each sentence moves its own after so many steps of its own, whatever others need.
        """
        steps = state.positions[:, 0] - state.prompt
        slots = np.flatnonzero(steps % GROWTH == 0)
        live = (state.bias[slots] == 0).any(axis=1)
        counts = live.sum(axis=1)
        moving = counts < state.write[slots]
        slots, live, counts = slots[moving], live[moving], counts[moving]
        if not len(slots):
            return state
        order = np.argsort(~live, axis=1, kind="stable")[:, : counts.max()]
        bias, write = state.bias.copy(), state.write.copy()
        bias[slots] = -np.inf
        bias[slots, :, : order.shape[1]] = np.take_along_axis(
            state.bias[slots], order[:, None], axis=2
        )
        write[slots] = counts
        self._place(state.past, slots, self._gather(state, slots, order), np.arange(len(slots)))
        return replace(state, bias=bias, write=write)

    def _gather(self, state: SlotState, slots: Integers, columns: Integers) -> Sequence[OrtValue]:
        """Copies columns [slots, columns] of the cache of some slots."""
        heads = np.arange(self._heads)[:, None]
        index = (slots[:, None, None] * self._heads + heads) * state.past[0].shape()[2]
        gather = self._runners["gather"]
        inputs = {"index": [gather.value(index + columns[:, None])], "state": state.past}
        return gather.run(inputs, "gathered")

    def _with_room(self, state: SlotState, new: int) -> SlotState:
        """Returns a state whose cache has room for so many more columns of every slot.

        And not for many more: each step reads all of it, and what is needed becomes less with every
        long sentence that ends.
        """
        needed, room = int(state.write.max()) + new, state.bias.shape[-1]
        if needed <= room <= needed + GROWTH * new:
            return state
        return self._with_columns(state, np.arange(len(state.write)), new)

    def _with_source(self, state: SlotState, length: int) -> SlotState:
        """Returns a state with room for sources of some length, and no more than is needed.

        Its source bias is its own.
        """
        lengths = (state.source_bias == 0).sum(axis=-1)
        needed = _rounded(max(length, int(lengths.max())), UNIT)
        room = state.source_bias.shape[-1]
        if needed == room:
            return replace(state, source_bias=state.source_bias.copy())
        bias = np.full((len(lengths), 1, 1, needed), -np.inf, np.float32)
        kept = min(needed, room)
        bias[..., :kept] = state.source_bias[..., :kept]
        slots = np.arange(len(lengths))
        cross = self._buffers("cross", len(lengths), needed)
        self._place(cross, slots, state.cross, slots)
        return replace(state, cross=cross, source_bias=bias, calls={})


def _rounded(columns: int, unit: int) -> int:
    """The next multiple of a unit."""
    return -(-columns // unit) * unit


def _by_row(buffers: Sequence[OrtValue], width: int) -> Iterator[Floats]:
    return (buffer.numpy().repeat(width, axis=0) for buffer in buffers)


def _runs(values: Integers) -> tuple[Integers, Integers]:
    """Neighbouring equal values: the value and the length of each run."""
    starts = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))
    return values[starts], np.diff(np.append(starts, len(values)))
