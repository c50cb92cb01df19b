"""Answers through the path that serves: the engine's queue, replicas, and batches of full size."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from transferry.runtime.decoding.batching import BatchOptions
from transferry.runtime.decoding.decoder import Decoder, Tensors
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.decoding.hypothesis import Hypothesis
from transferry.runtime.decoding.search import search_batch
from transferry.runtime.decoding.strategy import Request
from transferry.runtime.engine.preprocess import WorkItem
from transferry.runtime.engine.worker_pool import Take, in_order
from transferry.runtime.ort.encoder import EncoderModel
from transferry.runtime.tokenizer.special_tokens import SpecialTokens

Item: TypeAlias = tuple[int, Sequence[int]]  # row id and source
Answers: TypeAlias = list[list[Hypothesis]]

# Two replicas share the queue, as the engine's do.
REPLICAS = 2


def serve(
    decoder: Decoder[Any],
    sources: Sequence[Sequence[int]],
    options: GenerationOptions,
    special: SpecialTokens,
    batches: BatchOptions,
    row_ids: Sequence[int],
) -> list[Answers]:
    """Answers sources as `Engine.generate` does, in batches of full size.

    The sources are repeated until each replica has a batch of the largest size and another one
    after it, so that rows lie in all places, and in places that were used before.

    Returns:
        The hypotheses of each source, once for each time that it was answered.
    """
    slots = max(1, batches.rows // max(options.beam, options.n_best))
    count = max(len(sources), REPLICAS * slots + slots // 2)
    items = [(row_ids[i % len(sources)], sources[i % len(sources)]) for i in range(count)]

    def prepare(window: list[Item]) -> list[WorkItem[Item] | list[Hypothesis]]:
        return [WorkItem(item, len(item[1])) for item in window]

    def work(take: Take[Item], rows: int) -> Iterator[tuple[WorkItem[Item], list[Hypothesis]]]:
        length, prefix = options.max_length, options.prefix
        while items := take(rows):
            batch = [Request(item, item.row[1], length, prefix, item.row[0]) for item in items]
            yield from search_batch(decoder, batch, options, special)

    workers: list[Any] = [work] * REPLICAS
    answers: list[Answers] = [[] for _ in sources]
    for place, found in enumerate(in_order(items, prepare, workers, slots, batches)):
        answers[place % len(sources)].append(found)
    return answers


class Watched(EncoderModel):
    """A served model that shows the tensors of each batch to a function."""

    def __init__(self, model: EncoderModel, shown: Callable[[Any, Any, Tensors], None]) -> None:
        self.variant, self.options = model.variant, model.options
        self.batches, self.outputs = model.batches, model.outputs
        self._model, self._shown = model, shown

    def describe(self) -> dict[str, Any]:
        """Returns the facts of the model."""
        return self._model.describe()

    def encode(self, source: Any, mask: Any, outputs: Any = None) -> dict[str, Any]:
        """Encodes as the model does, which computes all outputs whichever it returns."""
        found = self._model.encode(source, mask)
        self._shown(source, mask, found)
        return {name: found[name] for name in outputs or self.outputs}
