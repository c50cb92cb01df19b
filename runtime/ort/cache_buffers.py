"""Device buffers of a KV cache that is updated in place, and the graphs that move their content."""

import math
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from transferry.runtime.bundle.specs import GraphSpec, Role
from transferry.runtime.decoding.batching import UNIT, BatchOptions, blocks, padded, widened
from transferry.runtime.decoding.logits import Bools, Floats, Integers
from transferry.runtime.ort.graph_runner import BoundCall, BufferView, GraphRunner
from transferry.runtime.ort.session import Device

# Default batch sizes: as many rows as gain from sharing the reading of the weights.
BATCHES: dict[Device, BatchOptions] = {
    "cpu": BatchOptions(rows=256, tokens=1 << 15),
    "cuda": BatchOptions(rows=1024, tokens=1 << 17),
}
# Bytes of one column for all these rows, above which half of them are as fast on a CPU.
LARGE_COLUMN = 1 << 21
# Bytes of buffers that a thread keeps between batches of few rows, and a batch's share of them.
KEPT_BYTES, LARGEST_KEPT = 1 << 23, 1 << 21


def column_bytes(decoder: GraphSpec) -> int:
    """Returns the bytes of a row's cross and past in one column."""
    return sum(
        math.prod(n for n in spec.shape if isinstance(n, int)) * np.dtype(spec.type).itemsize
        for spec in decoder.inputs
        if spec.role in ("cross", "past")
    )


def default_batches(decoder: GraphSpec, device: Device) -> BatchOptions:
    """Returns a decoder's default batch size: on a CPU half the rows where its cache is large."""
    batches = BATCHES[device]
    if device != "cpu":
        return batches
    large = column_bytes(decoder) * batches.rows > LARGE_COLUMN
    return BatchOptions(batches.rows // 2, batches.tokens // 2) if large else batches


@dataclass
class BoundStep:
    """A step bound to the buffers of a state.

    Attributes:
        call: The call.
        sources: Its inputs that depend on the sources alone, by role.
        source_bias: That of the state for which they were set.
        reached: Positions of the state after the last run, if that was of one token without gaps:
            its bias needs a single column more than the bound one has.
    """

    call: BoundCall
    sources: Mapping[Role, NDArray[Any]]
    source_bias: Floats
    reached: Integers | None = None


# By tokens of a slot, whether the step is a single token without a gap before it, and the buffer of
# the hidden states.
BoundSteps: TypeAlias = dict[tuple[int, bool, int], BoundStep]


@dataclass(eq=False)
class Lease:
    """Buffers of a batch, which serve the next batch of its shape with the steps bound to them.

    Every state that reads them holds the lease; when none is left, they return to `kept`.

    Attributes:
        kept: Bytes and buffers by shape, those that returned last at the end.
        shape: Slots and columns of cross.
        cross: As in `FusedState`; likewise `past`, `capacity` and `calls`.
        free: Whether past and calls are those of a batch before.
    """

    kept: OrderedDict[tuple[int, int], tuple[Any, ...]]
    shape: tuple[int, int]
    cross: Sequence[BufferView]
    past: list[BufferView] = field(default_factory=list)
    capacity: int = 0
    calls: BoundSteps = field(default_factory=dict)
    free: bool = True

    def take(self, capacity: int, spare: int) -> bool:
        """Whether past serves for so many columns; the first state to ask has it, with zeros."""
        fits = self.free and capacity <= self.capacity <= capacity + spare
        self.free = False
        for view in self.past if fits else ():
            view.numpy()[...] = 0  # a row of the batch before may have left NaN
        return fits

    def __del__(self) -> None:
        size = sum(view.buffer.tensor_size_in_bytes() for view in (*self.cross, *self.past))
        if size <= LARGEST_KEPT:
            self.kept[self.shape] = size, self.cross, self.past, self.capacity, self.calls
        while sum(size for size, *_ in self.kept.values()) > KEPT_BYTES:
            self.kept.popitem(last=False)


class FusedState(NamedTuple):
    """Inputs of a step besides the tokens. The states before and after share its buffers.

    A step writes only where no row of its state attends, so a state stays valid until rows that
    were selected from it step. Rows are grouped by slot, `width` neighbouring rows each.

    Attributes:
        cross: Keys and values of the sources on the device `[slots, kv_heads, source, d_head]`.
        past: Keys and values of earlier positions, likewise `[slots, kv_heads, capacity, d_head]`.
        source_bias: 0 at a token of the source, else minus infinity `[slots, 1, 1, source]`.
        capacity: Columns of past.
        bias: 0 at the columns of a row's own history, else minus infinity
            `[slots, width, capacity]`. None while each slot has one row, whose history fills the
            first columns.
        positions: Positions of the next tokens `[slots, width]`.
        held: Position of the token in a column, where a row attends to it `[slots, capacity]`; None
            as `bias`.
        prompt: Tokens of the prompt in a slot `[slots]`.
        padding: Padding after that prompt, up to the longest in its batch `[slots]`.
        calls: Steps bound to these buffers.
        lease: Holds cross and past; None of larger batches.
    """

    cross: Sequence[BufferView]
    past: Sequence[BufferView]
    source_bias: Floats
    capacity: int
    bias: Floats | None
    positions: Integers
    held: Integers | None
    prompt: Integers
    padding: Integers
    calls: BoundSteps
    lease: Lease | None

    def seen(self) -> tuple[Floats, Integers]:
        """Returns `bias` and `held`, also where each history fills the first columns."""
        if self.bias is not None and self.held is not None:
            return self.bias, self.held
        columns = np.arange(self.capacity)
        bias = np.where(columns < self.positions[:, :, None], np.float32(0), np.float32(-np.inf))
        return bias, np.tile(columns, (len(self.positions), 1))


def unused_columns(bias: Floats, count: int) -> Integers:
    """First `count` columns of each slot that no row attends to, ascending `[slots, count]`.

    So the place of a row's keys and values, and with it the order of rounded sums over them,
    depends on its own sentence alone.

    Args:
        bias: `[slots, width, capacity]`.
        count: Columns wanted of each slot; they may lie beyond the capacity.
    """
    slots, _, capacity = bias.shape
    used = np.zeros((slots, capacity + count), np.bool_)
    np.equal(bias.max(axis=1), 0, out=used[:, :capacity])
    return used.argsort(axis=1, kind="stable")[:, :count]


def grouped(rows: Integers, slots: int, width: int) -> tuple[Integers | None, tuple[int, int]]:
    """Slots of selected rows, None for all in their places; and their number and rows of each."""
    of_row = rows // width
    each, rest = divmod(len(rows), slots)
    if not rest and (of_row.reshape(slots, each) == np.arange(slots)[:, None]).all():
        return None, (slots, each)
    chosen, counts = _runs(of_row)
    if (counts != counts[0]).any() or np.bincount(chosen).max() > 1:
        # No common width: each row gets a slot of its own.
        return of_row, (len(rows), 1)
    return chosen, (len(chosen), int(counts[0]))


def closes_up(chosen: Integers) -> bool:
    """Whether slots that stay keep their places, and slots that move come from the end."""
    left = len(chosen)
    return bool((chosen[chosen != np.arange(left)] >= left).all())


def _runs(values: Integers) -> tuple[Integers, Integers]:
    """Value and length of each run of neighbouring equal values."""
    starts = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))
    return values[starts], np.diff(np.append(starts, len(values)))


class _Kept(threading.local):
    """Buffers that a thread keeps for later batches; see `Lease`."""

    def __init__(self) -> None:
        self.batches = OrderedDict[tuple[int, int], tuple[Any, ...]]()


class CacheBuffers:
    """Allocates, fills and moves the buffers of a variant; several threads may use it at once."""

    def __init__(self, runners: Mapping[str, GraphRunner], positions: int) -> None:
        """Takes the graphs of the variant by name, and the positions of the model."""
        self._runners, self._positions = runners, positions
        self._own = _Kept()
        self._decoder = runners["decoder"]
        self._leased = 0  # columns of all slots
        if not self._decoder.on_device:
            self._leased = LARGEST_KEPT // column_bytes(self._decoder.graph)
        self._kv_heads = int(self._decoder.graph.tensor("past").shape[1])

    def zeros(self, role: Role, slots: int, columns: int) -> list[BufferView]:
        """Allocates buffers of zeros, since a column that was never written must not hold NaN.

        Args:
            role: "cross" or "past": one buffer for each tensor of the role.
            slots: Rows of each buffer.
            columns: Columns of each buffer, padded.

        Raises:
            AllocationError: There is not enough memory.
        """
        sizes = {"batch": slots, "past": slots, "source": columns, "capacity": columns}
        # All of a role have one shape.
        shape = [int(sizes.get(str(n), n)) for n in self._decoder.graph.tensor(role).shape]
        count = len(self._decoder.graph.names(role))
        return [BufferView(self._decoder.zeros(role, shape), 0, shape[0]) for _ in range(count)]

    def cells(self, columns: Integers, former: Integers | None = None) -> Integers:
        """Slot, head and column of cells, of columns `[slots, new]`: `[slots, new, kv_heads, 3]`.

        `former`, the cells of as many other columns, is changed and returned.
        """
        cells = former
        if cells is None:
            cells = np.empty((*columns.shape, self._kv_heads, 3), np.int64)
            cells[..., 0] = np.arange(len(columns))[:, None, None]
            cells[..., 1] = np.arange(self._kv_heads)
        cells[..., 2] = columns[..., None]
        return cells

    def lease(self, slots: int, length: int) -> Lease | None:
        """Leases buffers for sources of so many tokens; None on a GPU and for a large batch."""
        shape, kept = (slots, padded(length)), self._own.batches
        if math.prod(shape) > self._leased:
            return None
        if shape not in kept:
            return Lease(kept, shape, self.zeros("cross", *shape))
        return Lease(kept, shape, *kept.pop(shape)[1:])

    def encode(
        self, source: Integers, mask: Bools, tokens: int, cross: Sequence[BufferView] = ()
    ) -> Sequence[BufferView]:
        """Encodes padded token ids into buffers of cross keys and values.

        Args:
            source: Token ids `[rows, source]`.
            mask: True at tokens `[rows, source]`.
            tokens: Limit on the tokens to encode at once, padding counted.
            cross: Buffers to write. Default: new ones.
        """
        encoder, place = self._runners["encoder"], self._runners["place"]
        source, mask = widened(source, UNIT), widened(mask, UNIT)
        for block, length in blocks(mask, tokens):
            length = min(length, self._positions)
            inputs = {
                "source": [encoder.value(source[block, :length])],
                "source_mask": [encoder.value(mask[block, :length])],
            }
            count = block.stop - block.start
            if (whole := (count, length) == source.shape) and cross:
                encoder.run(inputs, in_place={"cross": cross})
                return cross
            encoded = encoder.run(inputs, "cross")
            if whole:
                return [BufferView.of(each) for each in encoded]
            cross = cross or self.zeros("cross", *source.shape)
            views = [buffer.view(block.start, count) for buffer in cross]
            write = place.value(np.zeros(count, np.int64))
            place.run(
                {"write": [write], "fresh": encoded, "state": views}, in_place={"placed": views}
            )
        return cross

    def move(self, buffers: Sequence[BufferView], chosen: Integers) -> list[BufferView]:
        """Copies some slots to other places, in place, and returns views of the chosen slots.

        Args:
            buffers: All of cross, then all of past where that is a KV cache.
            chosen: The slot for each place: its own, or one from beyond the last place `[places]`.
        """
        places = np.flatnonzero(chosen != np.arange(len(chosen)))
        if len(places):
            move = self._runners["move"]
            rows, to = [move.value(chosen[places])], [move.value(places)]
            move.run({"rows": rows, "places": to, "state": buffers}, in_place={"moved": buffers})
        return [buffer.view(0, len(chosen)) for buffer in buffers]

    def select(self, cross: Sequence[BufferView], slots: Integers) -> list[BufferView]:
        """Copies slots of cross into new buffers."""
        select = self._runners["select"]
        found = select.run({"rows": [select.value(slots)], "state": cross}, "selected")
        return [BufferView.of(each) for each in found]

    def gather(
        self, past: Sequence[BufferView], slots: Integers, room: int, capacity: int
    ) -> list[BufferView]:
        """Copies slots of past into new buffers of another capacity, both counted in columns.

        Args:
            past: Buffers of `room` columns.
            slots: Slots to take `[slots]`.
            room: Columns of the old buffers.
            capacity: Columns of the new buffers.
        """
        gather = self._runners["gather"]
        # The content of new columns does not matter as long as it is finite: no row attends to it.
        columns = np.arange(capacity)
        columns[room:] = 0
        heads = np.arange(self._kv_heads)[:, None]
        index = (slots[:, None, None] * self._kv_heads + heads) * room + columns
        found = gather.run({"index": [gather.value(index)], "state": past}, "gathered")
        return [BufferView.of(each) for each in found]

    def dequantised(
        self, cross: Sequence[BufferView], past: Sequence[BufferView]
    ) -> tuple[list[BufferView], list[BufferView]]:
        """Returns the cross and past of an int8 cache in float32."""
        found = self._runners["dequantise"].run({"state": [*cross, *past]}, "cross", "past")
        floats = [BufferView.of(each) for each in found]
        return floats[: len(cross)], floats[len(cross) :]
