"""What is made once and lent again and again, such as the buffers of a device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Thing = TypeVar("Thing")


class Lent(Generic[Thing]):
    """A thing that goes back to its pool once nobody holds this any more."""

    def __init__(self, thing: Thing, free: list[Thing]) -> None:
        self.thing = thing
        self._free = free

    def __del__(self) -> None:
        self._free.append(self.thing)


class Pool(Generic[Thing]):
    """Lends things, of which those of one key are alike; may be used by several threads at once."""

    def __init__(self) -> None:
        self._free: defaultdict[Hashable, list[Thing]] = defaultdict(list)

    def lend(self, key: Hashable, make: Callable[[], Thing]) -> Lent[Thing]:
        """Lends the thing of a key that came back last, or a new one.

        Args:
            key: What tells things apart.
            make: Makes one.
        """
        free = self._free[key]
        try:
            thing = free.pop()
        except IndexError:
            thing = make()
        return Lent(thing, free)

    def clear(self) -> None:
        """Forgets all that is not lent now; what is lent goes when it is given back."""
        self._free = defaultdict(list)
