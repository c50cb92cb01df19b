"""Where a cache in place lies: buffers of keys and values, made anew or kept in a pool.

On a device buffers are kept, and so are the calls that are bound to them: what is recorded there
can be played back only where nothing moves. So that few kinds are wanted, they have more slots and
columns than are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onnxruntime import OrtValue

from transferry.runtime.bundle import Role
from transferry.runtime.graph_runner import Bindable, BoundCall, GraphRunner, Rows
from transferry.runtime.pool import Pool

# Sources and caches have a multiple of so many columns: the product of one row with a matrix sums
# its last one to three terms in another order, so that else the padding would show.
UNIT = 4
# The same where buffers are kept.
POOLED_UNIT = 32


class SlotBuffers:
    """Makes the buffers of a variant; may be used by several threads at once.

    Attributes:
        pooled: Whether buffers are kept.
        unit: Columns of a buffer are a multiple of this.
        calls: Calls that are bound to kept buffers, by what they are bound to.
    """

    def __init__(self, runners: Mapping[str, GraphRunner]) -> None:
        """Takes the graphs of a variant; buffers are kept where one clears them on the device."""
        self._runners = runners
        self._pool = Pool[list[OrtValue]]()
        self.pooled = "clear" in runners
        self.unit = POOLED_UNIT if self.pooled else UNIT
        self.calls: dict[tuple[int, ...], BoundCall] = {}

    def columns(self, count: int) -> int:
        """How many columns a buffer has that is to have so many at least."""
        return -(-count // self.unit) * self.unit

    def slots(self, count: int) -> int:
        """How many slots are computed where so many are in use.

        Where buffers are kept the next power of two, or one and a half of one. The slots behind
        those in use compute once more whatever they last did.
        """
        if not self.pooled:
            return count
        power = 1 << (count - 1).bit_length()
        return power * 3 // 4 if count <= power * 3 // 4 else power

    def zeros(self, role: Role, slots: int, columns: int) -> list[Rows]:
        """Returns buffers of zeros, so that columns never written cannot be NaN.

        Args:
            role: "cross" or "past": one buffer for each tensor of the role.
            slots: Rows of each; the buffers of a pool have some more.
            columns: Of each, as many as `columns` gives.

        Raises:
            AllocationError: There is no memory for them.
        """
        decoder = self._runners["decoder"]
        sizes = {"batch": self.slots(slots), "source": columns, "capacity": columns}
        shapes = [
            [int(sizes.get(str(size), size)) for size in spec.shape]
            for spec in decoder.graph.inputs
            if spec.role == role
        ]

        def make() -> list[OrtValue]:
            return [decoder.zeros(role, shape) for shape in shapes]

        if not self.pooled:
            return [Rows.of(buffer) for buffer in make()]
        key = role, *shapes[0]
        try:
            lent = self._pool.lend(key, make)
        except MemoryError:  # of which buffers of other shapes may hold much
            self.calls.clear()
            self._pool.clear()
            lent = self._pool.lend(key, make)
        whole = [Rows.of(buffer) for buffer in lent.thing]
        self._runners["clear"].run({"state": whole}, in_place={"cleared": whole})
        return [Rows(buffer, 0, slots, lent) for buffer in lent.thing]

    def filled(
        self,
        graph: str,
        inputs: Mapping[Any, Sequence[Bindable]],
        output: Role,
        role: Role,
        shape: tuple[int, int],
    ) -> list[Rows]:
        """Runs a graph that fills new buffers.

        Args:
            graph: Its name.
            inputs: As for `GraphRunner.run`.
            output: The role of its outputs.
            role: "cross" or "past", which they are from now on.
            shape: Their slots and columns.
        """
        if not self.pooled:
            return [Rows.of(each) for each in self._runners[graph].run(inputs, output)]
        buffers = self.zeros(role, *shape)
        self._runners[graph].run(inputs, in_place={output: buffers})
        return buffers
