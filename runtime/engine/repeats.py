"""Inputs that come again: answered once, as far as a bounded table remembers."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Generic, TypeVar

from transferry.runtime.engine.preprocess import WorkItem
from transferry.runtime.engine.result import RowResult

Input = TypeVar("Input")
Answer = TypeVar("Answer", bound=RowResult)

# Tokens of the answers that are remembered, and numbers of vectors likewise: some 40 MB.
MOST_TOKENS = 1 << 20
# Overhead of an answer, in tokens.
_OVERHEAD = 32


class Repeats(Generic[Input, Answer]):
    """Gives an input that was answered before its answer again.

    An answer depends on its input alone, so this changes only the work. The answers that were not
    used for longest are forgotten first.
    """

    def __init__(
        self,
        prepare: Callable[[list[Input]], list[Any]],
        key: Callable[[Input], Any],
        most_tokens: int = MOST_TOKENS,
    ) -> None:
        """Watches a stream.

        Args:
            prepare: See `worker_pool.in_order`; gives one item or answer for each input.
            key: Returns the hashable part of an input that decides its answer; None for an input
                that comes once, such as a sample.
            most_tokens: Limit on the size of the answers that are remembered.
        """
        self._prepare, self._key, self._most_tokens = prepare, key, most_tokens
        self._known: OrderedDict[Any, tuple[Answer, int]] = OrderedDict()
        self._tokens = 0
        # Key of each input whose answer is still to come, and whether it came before.
        self._asked: deque[tuple[Any, bool]] = deque()

    def prepare(self, inputs: list[Input]) -> list[WorkItem[Any] | Answer]:
        """Encodes a window of inputs, each distinct one once."""
        keys = [self._key(each) for each in inputs]
        answered: dict[Any, WorkItem[Any] | Answer] = {}
        new: dict[Any, Input] = {}
        for place, each in enumerate(inputs):
            key = keys[place]
            if key is None:
                keys[place] = one = object()
                new[one] = each
                self._asked.append((None, False))
                continue
            again = key in answered or key in new
            if not again and (found := self._known.get(key)) is not None:
                self._known.move_to_end(key)
                answered[key], again = found[0], True
            elif not again:
                new[key] = each
            self._asked.append((key, again))
        answered |= zip(new, self._prepare(list(new.values())), strict=True)
        return [answered[key] for key in keys]

    def watch(self, answers: Iterable[Answer]) -> Iterator[Answer]:
        """Passes the answers on, and remembers them; those that came again are marked."""
        for answer in answers:
            key, again = self._asked.popleft()
            if again:
                yield replace(answer, repeated=True, shared_prompt_tokens=0)
                continue
            yield answer
            self._remember(key, answer)

    def _remember(self, key: Any, answer: Answer) -> None:
        if key is None or answer.error is not None or key in self._known:
            return
        size = _OVERHEAD + answer.size
        self._known[key] = answer, size
        self._tokens += size
        while self._tokens > self._most_tokens:
            _, (_, size) = self._known.popitem(last=False)
            self._tokens -= size
